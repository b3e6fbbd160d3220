"""Measure the rates of bf16 and fp32 on the cores of one rank, once per CPU model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from cpulaunch.discovery.host.rate_cache import MARK
from cpulaunch.discovery.probe import event_loop
from cpulaunch.discovery.probe.probe import remote_command
from cpulaunch.launchers.reach import Reach
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.model.rates import Cpu, ProductRates
from cpulaunch.plan.placement import HostPlan

TIMEOUT = 90.0
"""Seconds to wait for a host's rates.  Measuring takes 3 s; importing torch may take much longer."""

_PROGRAM = str(Path(__file__).parents[2] / "runtime" / "measure_rates.py")


class Answer(NamedTuple):
    """A host's rates."""

    rates: ProductRates
    kept: bool  # whether they were written to the host's cache
    writable: bool  # whether the host's cache can be written


class Measured(NamedTuple):
    """The facts with the measured rates, and the errors by host."""

    facts: Facts
    errors: dict[str, str]


def unmeasured(facts: Facts, hosts: Sequence[HostPlan]) -> list[HostPlan]:
    """The hosts to measure: one for each CPU and number of threads per rank without known rates."""
    chosen: dict[object, HostPlan] = {}
    for host in hosts:
        known, _ = facts.of(host.host)
        if not host.assumed and known.rates_of(host.ranks[0].threads) is None:
            chosen.setdefault((known.cpu, host.ranks[0].threads), host)
    return list(chosen.values())


def measure_rates(
    facts: Facts,
    hosts: Sequence[HostPlan],
    python: str,
    reach: Reach,
    limits: dict[str, str],
    tell: Callable[[str], None],
) -> Measured:
    """Measure on all ``hosts`` in parallel, on the cores of each host's first rank.

    ``python`` is the ranks' interpreter, and ``limits`` are their INSTRUCTION_LIMITS.
    """
    names = [host.host for host in hosts]
    here = not set(names) - facts.here
    where = "this machine" if here else fold_hosts(names)
    tell(f"measuring bf16 and fp32 on {where} (once per CPU model, number of threads and torch version)")
    answers = event_loop.run(_measure_all(facts, hosts, python, reach, limits))
    found: list[tuple[Cpu | None, ProductRates]] = []
    errors = {}
    for host, answer in zip(hosts, answers, strict=True):
        if isinstance(answer, str):
            errors[host.host] = answer
        else:
            found.append((facts.of(host.host)[0].cpu, answer.rates))

    for writable, why in (
        (True, "other programs used the cores meanwhile"),
        (False, "the cache can't be written"),
    ):
        uncached = [
            host.host
            for host, answer in zip(hosts, answers, strict=True)
            if isinstance(answer, Answer) and not answer.kept and answer.writable is writable
        ]
        if uncached:
            where = "" if here else f" on {fold_hosts(uncached)}"
            tell(f"the rates{where} are used for this job only, because {why}: the next job measures again")

    def with_rates(known: HostFacts) -> HostFacts:
        new = (rates for cpu, rates in found if cpu == known.cpu)
        return replace(known, rates=(*new, *known.rates))

    like, known = with_rates(facts.like), {name: with_rates(each) for name, each in facts.hosts.items()}
    return Measured(replace(facts, like=like, hosts=known), errors)


async def _measure_all(
    facts: Facts, hosts: Sequence[HostPlan], python: str, reach: Reach, limits: dict[str, str]
) -> list[Answer | str]:
    commands = []
    for host in hosts:
        rank = host.ranks[0]
        cores = str(rank.cores or rank.comm_cores)
        request = json.dumps({"cores": cores, "threads": rank.threads, "environment": limits})
        program = (python, _PROGRAM, request)
        commands.append(
            program if host.host in facts.here else remote_command(reach, host.host, program, _PROGRAM)
        )
    return await asyncio.gather(*map(_measure_one, commands))


async def _measure_one(argv: Sequence[str]) -> Answer | str:
    """Run a command, and return the rates that it prints, or an error."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )
    except OSError as e:
        return f"{argv[0]} can't be started: {os.strerror(e.errno or 0)}"
    try:
        out, error = await asyncio.wait_for(process.communicate(), TIMEOUT)
    except asyncio.TimeoutError:
        return f"no answer within {TIMEOUT:.0f} s"
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    for line in out.decode(errors="replace").splitlines():
        if line.startswith(MARK):
            with contextlib.suppress(KeyError, TypeError, ValueError):
                report = json.loads(line.removeprefix(MARK))
                return Answer(ProductRates.from_json(report), bool(report["kept"]), bool(report["writable"]))
    last = error.decode(errors="replace").strip().splitlines()[-1:]
    return last[0] if last else f"it ended with code {process.returncode} and printed no rates"
