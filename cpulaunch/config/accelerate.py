"""Imports settings from a configuration file of Hugging Face accelerate, of any version.

Keys that have no equivalent are returned with the reason, so none is dropped silently.  Sources: accelerate's
``commands/config/config_args.py`` and ``commands/launch.py``, from 0.3 (``fp16``, no ``mixed_precision``)
through 0.14 (``dynamo_backend``), 0.16 (``dynamo_config``, ``ipex_config``) and 0.28 (``mpirun_config``) to
1.13 and later (no ``ipex_config``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import Table
from cpulaunch.config.values import HostCount
from cpulaunch.errors import ConfigError
from cpulaunch.wording import counted

USUAL_FILE = "~/.cache/huggingface/accelerate/default_config.yaml"
CPU_TYPES = ("NO", "MULTI_CPU", "FSDP")

REASONS = {
    "compute_environment": "cpulaunch always runs on these machines",
    "debug": "for accelerate's own checks, set ACCELERATE_DEBUG_MODE=1 under env:",
    "machine_rank": "hosts are numbered in the order of the hostfile",
    # Hosts and free ports differ from job to job.
    "main_process_ip": "the rendezvous is on the first host; hosts.master_addr sets another address",
    "main_process_port": "the rendezvous is at a free port; hosts.master_port sets another port",
    "rdzv_backend": "no rendezvous service is needed: cpulaunch numbers the ranks",
    "same_network": "ssh reaches hosts in any network",
    "main_training_function": "for TPUs and notebooks; the script runs as it is",
    "enable_cpu_affinity": "for GPUs; here ranks are always bound to cores",
    "downcast_bf16": "for TPUs",
    "gpu_ids": "for GPUs",
    "fsdp_config": "the script decides on sharding: fsdp_plugin of accelerate, fsdp of transformers",
    **dict.fromkeys(
        ("deepspeed_config", "megatron_lm_config", "tp_config", "parallelism_config"),
        "every rank has a whole model (DDP), unless the script shards it",
    ),
    "fp8_config": "no CPU computes in fp8",
    **dict.fromkeys(("command_file", "commands"), "for TPU pods"),
}
_NOTHING = (None, "", False, 0, "no", "none", "null")


@dataclass(frozen=True)
class Dropped:
    """A key of accelerate's file, at ``place`` (file:line), that was not imported, and the reason."""

    place: str
    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class Imported:
    """The settings that an accelerate file corresponds to.

    ``dropped``: keys that were not, or not completely, imported.  ``off``: keys that were empty or disabled.
    ``advice``: steps that remain for the user.
    """

    settings: Mapping[Setting[Any], Any]
    dropped: tuple[Dropped, ...]
    off: tuple[str, ...]
    advice: tuple[str, ...]


def from_accelerate(text: str, shown: str) -> Imported:
    """Convert ``text``, an accelerate file in YAML or JSON.  Errors call the file ``shown``.

    Raises ConfigError for configurations of GPUs, TPUs and SageMaker, and for other files.
    """
    from cpulaunch.config.nodes import open_yaml

    with open_yaml(text, shown, f"accelerate's own file is {USUAL_FILE}") as (loader, root):
        document = loader.construct_document(root)
    if "compute_environment" not in document and "distributed_type" not in document:
        ours = "cpulaunch" in document
        hint = "`cpulaunch config validate FILE` checks a file of cpulaunch" if ours else None
        raise ConfigError(f"{shown}: not a configuration of accelerate: it has neither compute_environment "
                          "nor distributed_type", hint=hint)  # fmt: skip
    return _Import(document, dict(_lines(root)), shown).result()


class _Import:
    """Converts one key of ``left`` after the other; drops the remaining keys at the end, with a reason."""

    def __init__(self, document: Mapping[str, Any], lines: Mapping[str, int], shown: str) -> None:
        self.document, self.lines, self.shown = document, lines, shown
        self.left: dict[str, Any] = {str(key): value for key, value in document.items()}
        self.alone = False
        self.settings: dict[Setting[Any], Any] = {}
        self.dropped: list[Dropped] = []
        self.off: list[str] = []
        self.advice: list[str] = []

    def result(self) -> Imported:
        self.refuse_other_hardware()
        self.hosts_and_ranks()
        self.precision()
        self.compiling()
        for key, value in self.left.items():
            self.leave(key, value)
        return Imported(self.settings, tuple(self.dropped), tuple(self.off), tuple(self.advice))

    def refuse_other_hardware(self) -> None:
        computing = str(self.left.pop("compute_environment", None) or "LOCAL_MACHINE").upper()
        kind = _word(self.left.pop("distributed_type", None), "NO").upper()
        use_cpu = self.left.pop("use_cpu", None)
        gpus = self.document.get("gpu_ids") not in (None, "", "all")
        reason = None
        if "SAGEMAKER" in computing:
            reason = "it is for Amazon SageMaker, which starts its own machines"
        elif kind in ("TPU", "XLA", "TPU_POD") or self.document.get("tpu_name"):
            reason = "it is for TPUs"
        elif kind == "DEEPSPEED":
            reason = "it is for DeepSpeed, which has its own launcher"
        elif kind == "MEGATRON_LM":
            reason = "it is for Megatron-LM, which needs GPUs"
        elif kind not in CPU_TYPES:
            device = kind.removeprefix("MULTI_")
            reason = f"it is for {device}s" if device != kind else f"distributed_type {kind} is unknown"
        elif kind != "MULTI_CPU" and not use_cpu and (kind == "FSDP" or gpus):
            reason = "it is for GPUs"
        if reason:
            where = self.place("compute_environment" if "SageMaker" in reason else "distributed_type")
            raise ConfigError(f"{where}: {reason}; cpulaunch trains on CPUs",
                              hint="`cpulaunch config` writes a configuration for CPUs")  # fmt: skip
        if kind == "NO" and not use_cpu:
            self.drop("use_cpu", use_cpu, "accelerate uses a GPU if there is one; cpulaunch never does")
        self.alone = kind == "NO"
        if computing not in ("LOCAL_MACHINE", "CUSTOM_CLUSTER"):
            self.drop("compute_environment", computing, REASONS["compute_environment"])

    def hosts_and_ranks(self) -> None:
        machines, total = self.count("num_machines", 1), self.count("num_processes", -1)
        mpirun = self.mapping("mpirun_config")
        # Some versions write these at the top level.
        hostfile = mpirun.pop("mpirun_hostfile", None) or self.left.pop("mpirun_hostfile", None)
        workers = mpirun.pop("mpirun_ccl", None)
        workers = self.left.pop("mpirun_ccl", None) if workers is None else workers
        for key, value in mpirun.items():
            self.drop(f"mpirun_config.{key}", value, "not known to accelerate either")
        if self.alone:
            machines, total = 1, 1
        if hostfile:
            self.settings[Table.hosts.hostfile] = str(hostfile)
        elif machines > 1:
            self.advice.append(
                f"name the {machines} hosts, unless a queue assigns them: set hosts.hostfile in the file, or "
                "use `cpulaunch run -f HOSTFILE`; one `cpulaunch run` starts all of them"
            )
        if machines > 1 or hostfile:
            self.settings[Table.hosts.nnodes] = HostCount(machines, machines)
        if total > 0 and total % machines:
            self.settings[Table.hosts.nproc] = total
            self.advice.append(f"{counted(total, 'rank')} can't be divided evenly over {machines} hosts: "
                               "set each host's number with slots=N in the hostfile")  # fmt: skip
        elif total > 0:
            self.settings[Table.hosts.nproc_per_node] = total // machines
        self.workers(workers)

    def workers(self, workers: Any) -> None:
        if workers is None:
            return
        number = self.number("mpirun_config.mpirun_ccl", workers)
        if number > 1:
            self.settings[Table.ccl.worker_count] = number
        else:  # accelerate's default is 1, however small the ranks
            self.drop("mpirun_config.mpirun_ccl", workers, "auto decides: small ranks have no worker")

    def precision(self) -> None:
        old = "fp16" if self.left.pop("fp16", False) else "no"
        precision = _word(self.left.pop("mixed_precision", None), old).lower()
        if precision == "bf16":
            self.settings[Table.training.precision] = "bf16"
        elif precision == "no":
            self.settings[Table.training.precision] = "fp32"
        else:
            self.drop(
                "mixed_precision",
                precision,
                "not for CPUs: auto chooses the faster of bf16 and fp32",
            )
        ipex = self.mapping("ipex_config")
        wanted, xpu = ipex.pop("ipex", None), ipex.pop("use_xpu", None)
        if wanted:
            self.settings[Table.training.engine] = "ipex"
        elif wanted is not None:
            self.settings[Table.training.engine] = "native"
        if xpu:
            self.drop("ipex_config.use_xpu", xpu, "for Intel GPUs")
        for key, value in ipex.items():
            self.drop(f"ipex_config.{key}", value, "not known to accelerate either")

    def compiling(self) -> None:
        dynamo = self.mapping("dynamo_config")
        dynamo = {key.removeprefix("dynamo_"): value for key, value in dynamo.items()}
        backend = _word(dynamo.pop("backend", self.left.pop("dynamo_backend", None)), "NO").lower()
        if backend == "no":
            return
        self.settings[Table.training.compile] = True
        if backend != "inductor":
            self.drop("dynamo_config.dynamo_backend", backend, "torch.compile's own backend is used")
        for key, value in dynamo.items():
            if value not in (*_NOTHING, "default"):
                self.drop(f"dynamo_config.dynamo_{key}", value, "torch.compile is called with its defaults")

    def leave(self, key: str, value: Any) -> None:
        if value in _NOTHING or value in ([], {}) or (isinstance(value, str) and value.lower() in _NOTHING):
            self.off.append(key)
        elif key in REASONS:
            self.drop(key, value, REASONS[key])
        elif key.startswith("tpu_"):
            self.drop(key, value, "for TPUs")
        else:
            self.drop(key, value, "this version of cpulaunch does not know this key of accelerate")

    # ---- helpers

    def drop(self, key: str, value: Any, reason: str) -> None:
        self.dropped.append(Dropped(self.place(key), key, value, reason))

    def place(self, key: str) -> str:
        # Older versions have keys at the top level that newer versions have in a section.
        names = (key, key.rpartition(".")[2], key.partition(".")[0])
        line = next((self.lines[name] for name in names if name in self.lines), None)
        return f"{self.shown}:{line}" if line else self.shown

    def refuse(self, key: str, value: Any, expected: str) -> NoReturn:
        raise ConfigError(f"{self.place(key)}: {key}: {value!r} is not {expected}", part=str(value)) from None

    def mapping(self, key: str) -> dict[str, Any]:
        value = self.left.pop(key, None) or {}
        if not isinstance(value, Mapping):
            self.refuse(key, value, "a mapping")
        return {str(name): content for name, content in value.items()}

    def count(self, key: str, default: int) -> int:
        value = self.left.pop(key, None)
        number = default if value is None else self.number(key, value)
        if number < 1 and number != default:
            self.refuse(key, value, "a number of at least 1")
        return number

    def number(self, key: str, value: Any) -> int:
        try:
            return int(str(value))
        except ValueError:
            self.refuse(key, value, "a whole number")


def _word(value: Any, default: str) -> str:
    """Return a word as text; YAML loads ``NO`` and ``no`` as false."""
    return default if value is None else "no" if value is False else str(value)


def _lines(node: Any, before: str = "") -> Iterator[tuple[str, int]]:
    """Yield each key of a YAML mapping's node, such as ``ipex_config.ipex``, and its line."""
    for key, value in node.value:
        name = f"{before}{key.value}"
        yield name, key.start_mark.line + 1
        if value.id == "mapping":
            yield from _lines(value, f"{name}.")
