"""The fields of telemetry: their meanings, how values are combined, and which sinks show them.

A new field of optimizer steps needs a row in OF_STEPS, and code in `runtime.observe` that measures it.  The
ledger, messages, telemetry.jsonl, Prometheus, TensorBoard, reports and the tables of docs/telemetry.md
(`scripts/telemetry_page.py`) are derived from the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

SUM, LAST = "sum", "last"
"""How the values of several steps are combined: added, or only the last one is kept."""


class Field(NamedTuple):
    """A field of telemetry.  Sinks for which it has no name don't show it."""

    name: str
    unit: str  # in telemetry.jsonl; the ledger has nanoseconds instead of seconds
    adds_up: str  # SUM or LAST
    about: str  # its meaning, in docs/telemetry.md; the first sentence is Prometheus's help
    counter: str = ""  # name in Prometheus, where SUM is a counter and LAST a gauge
    scalar: str = ""  # name in TensorBoard, which shows the mean per step
    is_rate: bool = False  # TensorBoard shows the job's total per second instead
    where_any: bool = False  # rows lack the field if it is 0

    @property
    def is_sum(self) -> bool:
        """Whether values are summed."""
        return self.adds_up == SUM


OF_STEPS = (
    Field(
        "seconds",
        "s",
        SUM,
        "Seconds from the end of the previous step to the end of this one, whatever the program did in "
        "between. The first step begins when a `DataLoader` is first asked for a batch, or, without a "
        "`DataLoader`, when the optimizer is made",
        "step_seconds_total",
        "time/step",
    ),
    Field(
        "communication",
        "s",
        SUM,
        "Seconds in which at least one collective or message of this rank was under way. For gloo, see below",
        "communication_seconds_total",
        "time/communication",
    ),
    Field(
        "waiting",
        "s",
        SUM,
        "Seconds in which the program's threads waited for collectives and messages. The rest of "
        "`communication` overlapped with computing. Two threads that wait at once count twice. "
        "DistributedDataParallel waits where `ccl` can't see it; its time counts from the call of the last "
        "bucket's reduction to the end of that reduction, as nothing is left to compute by then",
        "waiting_seconds_total",
        "time/waiting",
    ),
    Field(
        "bytes",
        "B",
        SUM,
        "Bytes of the tensors that this rank gave to collectives and messages",
        "communicated_bytes_total",
    ),
    Field(
        "input",
        "s",
        SUM,
        "Seconds in which the program waited for a `DataLoader`'s next batch",
        "input_seconds_total",
        "time/input",
    ),
    Field(
        "samples",
        "",
        SUM,
        "Samples of the step: the first dimension of the batches that it took from a `DataLoader`. Absent "
        "if there is no `DataLoader`",
        "samples_total",
        "throughput/samples_per_second",
        is_rate=True,
        where_any=True,
    ),
    Field(
        "tokens",
        "",
        SUM,
        "Tokens of the step: elements of these batches' `input_ids`, with padding. Absent if the batches "
        "have no `input_ids`",
        "tokens_total",
        "throughput/tokens_per_second",
        is_rate=True,
        where_any=True,
    ),
    Field(
        "loss",
        "",
        LAST,
        "The loss of the script's last call of `cpulaunch.log(loss=…)`",
        "loss",
        "loss",
    ),
    Field(
        "flops",
        "",
        LAST,
        "The model's FLOPs on this rank, in steps that count them. Such a step takes longer",
    ),
)
"""Fields of each rank's optimizer steps."""

SUMS = tuple(field.name for field in OF_STEPS if field.is_sum)

OF_PROCESSES = (
    Field("cpu_seconds", "s", SUM, "CPU seconds that the program has used", "cpu_seconds_total"),
    Field("rss", "B", LAST, "Resident memory of the program", "resident_memory_bytes"),
    Field(
        "throttled_seconds",
        "s",
        SUM,
        "Seconds in which the CPU limit of the program's cgroup held it back",
        "throttled_seconds_total",
    ),
    Field("cycles", "", SUM, "CPU cycles in user mode", "cycles_total"),
    Field("instructions", "", SUM, "Instructions in user mode", "instructions_total"),
    Field("amx_busy", "", SUM, "Cycles in which the AMX unit was busy", "amx_busy_cycles_total"),
    Field(
        "far_memory",
        "",
        LAST,
        "Fraction of the program's memory on NUMA nodes without its cores",
        "far_memory_ratio",
    ),
)
"""Fields of each rank's program, measured by its agent.  Sums count from the start of the program."""


def added(rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Combine the fields of consecutive rows of one rank into one row."""
    found: dict[str, Any] = {}
    for row in rows:
        for field in OF_STEPS:
            if (value := row.get(field.name)) is not None:
                found[field.name] = found.get(field.name, 0) + value if field.is_sum else value
    return {name: round(value, 7) for name, value in found.items()}
