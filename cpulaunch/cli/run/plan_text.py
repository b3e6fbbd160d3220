"""Formats plans as text and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from cpulaunch import variables
from cpulaunch.cli.terminal import has_unicode
from cpulaunch.config.config import Config
from cpulaunch.config.origin import DEFAULT
from cpulaunch.config.write import scalar
from cpulaunch.launchers.command import Command, to_json
from cpulaunch.model.hosts import fold_hosts
from cpulaunch.plan.communication import needs_oneccl
from cpulaunch.plan.describe import describe, size, started
from cpulaunch.plan.placement import NUMBER, HostPlan, own_arguments
from cpulaunch.plan.plan import Plan
from cpulaunch.wording import counted, shown_path

FEW = 3
"""Maximum number of notes, or of instances' arguments, that are shown."""


def headline(plan: Plan, directory: Path, verbose: bool) -> Iterator[str]:
    """Yield the first lines of a run: a summary of the plan, and notes on it."""
    yield sentence(plan, f"logs in {shown_path(directory)}")
    yield from notes_of(plan, verbose)


def sentence(plan: Plan, *more: str) -> str:
    """Return a summary of the plan in one line, followed by ``more``."""
    separator = " · " if has_unicode() else " - "
    return separator.join((describe(plan, separator), *more))


def notes_of(plan: Plan, verbose: bool) -> Iterator[str]:
    """Yield the notes on the plan; without ``verbose``, only a few."""
    yield from plan.notes if verbose else plan.notes[:FEW]
    if not verbose and len(plan.notes) > FEW:
        yield f"{counted(len(plan.notes) - FEW, 'more note')}: -v shows all"


def thread_warnings(config: Config, plan: Plan) -> Iterator[str]:
    """Yield a warning if a rank or instance has more threads than cores."""
    if config.cpu.threads == "auto":
        return
    for host in plan.hosts:
        cores = min(len(rank.cores) for rank in host.ranks)
        threads = max(rank.threads for rank in host.ranks)
        if threads > cores:
            each = f"per {plan.noun} of {counted(cores, 'core')}"
            yield f"{config.where(Config.cpu.threads)}: {threads} threads {each}"
            return


def plan_as_json(plan: Plan, commands: Sequence[Command]) -> str:
    """Return the document of ``--format json``, and of a job's ``plan.json``."""
    return json.dumps({**plan.to_json(), **to_json(commands)}, indent=1)


def plan_as_text(plan: Plan, commands: Sequence[Command], picture: str, *, like: str, verbose: bool) -> str:
    """Return the text of a dry run: placement, environment, command, and settings with their sources.

    ``picture``: the picture of the first host.  ``like``: the name of the host that hosts without facts
    match.
    """
    lines = [f"{size(plan)}, {started(plan)}"]
    lines += [f"transport: {_transport(plan)}"] if plan.transport else []
    lines += _meeting(plan)
    lines += [] if plan.settings.training.as_written else [str(plan.precision)]
    lines.append(f"allocator: {plan.allocator}")
    lines += ["", "Placement", *placement_as_text(plan, like)]
    lines += [f"  note: {note}" for note in plan.notes]
    lines += ["", picture]
    lines += ["", f"Environment of every {plan.noun}", *_environment_as_text(plan)]
    differ = plan.instances and (plan.program.each or any(NUMBER in word for word in plan.program.argv))
    if differ:
        lines += ["", "Arguments", *_arguments_as_text(plan)]
    if verbose:
        lines += ["", "Masks in the format of I_MPI_PIN_DOMAIN (workers' cores included)"]
        lines += _masks_as_text(plan)
    of_one = f" of {plan.noun} 0 (the others differ in the {plan.noun})"
    filled_in = ", which fills in the arguments" if differ else ""
    lines += ["", f"Command{'' if len(commands) == 1 else of_one}{filled_in}"]
    lines += [f"  {line}" for line in _fold_command(commands[0].argv)]
    for name, text in commands[0].files.items():
        lines += [f"  {name}:", *(f"    {line}" for line in text.splitlines())]
    lines += ["", "Settings" if verbose else "Settings that differ from the defaults (-v: all)"]
    lines += _settings_as_text(plan, verbose)
    return "\n".join(lines) + "\n"


def _meeting(plan: Plan) -> list[str]:
    """Return a line about the address of the rendezvous, if there are several hosts."""
    if len(plan.hosts) == 1 or plan.instances:
        return []
    first = plan.hosts[0].host
    unknown = plan.master_addr == first and not plan.settings.hosts.skip_preflight
    asked = f" (a run takes the address of {first} that leads to the others)" if unknown else ""
    return [f"the ranks meet at {plan.master_addr}{asked}"]


def _transport(plan: Plan) -> str:
    """Return the transport of ccl's collectives, with the module or the connections that it needs."""
    if plan.transport in ("tcp", "shm+tcp"):
        connections = min(len(rank.comm_cores) for host in plan.hosts for rank in host.ranks)
        return plan.transport + (f", {connections} connections between two ranks" if connections > 1 else "")
    ours = plan.settings.ccl.binding != "oneccl_bind_pt"
    needs = " (needs the oneCCL module: cpulaunch ccl build --oneccl)"
    return plan.transport + (needs if ours and needs_oneccl(plan.transport) else "")


def placement_as_text(plan: Plan, like: str) -> Iterator[str]:
    """Yield the ranks of each host.  ``like``: the name of the host that hosts without facts match."""
    for layout, group in groupby(plan.hosts, key=_layout):
        assumed, *ranks = layout
        yield f"  {_names(group)}{f', assumed to match {like}' if assumed else ''}"
        yield from _ranks_as_text(ranks, plan)


def _layout(host: HostPlan) -> tuple[Any, ...]:
    """Return the key by which equal hosts are grouped."""
    ranks = (
        (r.local_rank, r.cores, r.comm_cores, r.numa_nodes, r.threads, r.memory_policy) for r in host.ranks
    )
    return (host.assumed, *ranks)


def _ranks_as_text(ranks: Iterable[Any], plan: Plan) -> Iterator[str]:
    for local_rank, cores, comm_cores, nodes, threads, policy in ranks:
        name = _local(plan, local_rank)
        workers = f", workers on {comm_cores}" if comm_cores else ""
        memory = f", memory {policy}" if policy else ""
        count = counted(threads, "thread")
        yield f"    {name}: cores {cores}{workers}, NUMA {nodes}{memory}, {count}"


def _environment_as_text(plan: Plan) -> Iterator[str]:
    for name, value in plan.env.items():
        yield f"  {name}={value}"
    if plan.instances:
        yield f"  {variables.INSTANCE}: its number, from 0"
        yield f"  {variables.INSTANCES}={plan.instances.count}"
    for env, hosts in groupby(plan.hosts, key=lambda host: host.env):
        if env:
            yield f"  on {_names(hosts)}: {_pairs(env)}"
    for envs, hosts in groupby(plan.hosts, key=lambda host: [rank.env for rank in host.ranks]):
        where = _names(hosts)
        yield from (f"  {_local(plan, i)} on {where}: {_pairs(env)}" for i, env in enumerate(envs) if env)


def _local(plan: Plan, number: int) -> str:
    """Return the name of a rank on its host; a single instance has its number among all instances."""
    only = plan.instances and plan.instances.count > plan.world_size
    return plan.names.one(0) if only else f"local {plan.noun} {number}"


def _arguments_as_text(plan: Plan) -> Iterator[str]:
    """Yield the arguments of the first instances."""
    for rank in range(min(plan.world_size, FEW)):
        number = plan.names.number(rank)
        own = plan.program.each[number] if plan.program.each else ()
        words = own_arguments(plan.program.argv, own, number)
        yield f"  {plan.names.one(rank)}: {shlex.join(words[1 + plan.program.python :])}"
    if plan.world_size > FEW:
        yield f"  and so on, up to {plan.names.one(plan.world_size - 1)}"


def _masks_as_text(plan: Plan) -> Iterator[str]:
    for cores, hosts in groupby(plan.hosts, key=lambda host: [(r.cores, r.comm_cores) for r in host.ranks]):
        masks = ",".join((a | b).mask() for a, b in cores)
        yield f"  {_names(hosts)}: [{masks}]"


def _settings_as_text(plan: Plan, verbose: bool) -> Iterator[str]:
    rows = [
        (f"{row.key}: {scalar(row.value)}", row.origin.text)
        for row in plan.setting_rows()
        if verbose or row.origin != DEFAULT
    ]
    width = min(60, max((len(text) for text, _ in rows), default=0))
    yield from (f"  {text:{width}}  {origin}" for text, origin in rows)


def _fold_command(argv: Sequence[str], width: int = 100) -> Iterator[str]:
    """Yield a command as continued lines for a shell, in which an option and its values share a line."""
    line = ""
    for number, word in enumerate(map(shlex.quote, argv)):
        rest = len(shlex.join(takewhile(lambda w: not w.startswith("-"), argv[number + 1 :])))
        begins = word.startswith("-") and len(line) + len(word) + rest > width
        if line.strip() and (begins or len(line) + len(word) > width):
            yield line + " \\"
            line = "  "
        line += (" " if line.strip() else "") + word
    yield line


def _names(hosts: Iterable[HostPlan]) -> str:
    """Return the hosts' names, such as ``node1`` or ``node[1-4] (4 hosts)``."""
    names = [host.host for host in hosts]
    return fold_hosts(names) + (f" ({len(names)} hosts)" if len(names) > 1 else "")


def _pairs(env: Mapping[str, str]) -> str:
    return " ".join(f"{name}={value}" for name, value in env.items())
