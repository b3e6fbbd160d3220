"""The wizard's first question: on which hosts ranks run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpulaunch.cli.config.machine import Machine, hosts_in_short
from cpulaunch.cli.config.questions import Asker, BackError, Option, Question
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import Table
from cpulaunch.discovery.batch.allocation import read_hostfile
from cpulaunch.discovery.batch.step import NAME as STEPS
from cpulaunch.errors import CpulaunchError
from cpulaunch.model.hosts import Host, parse_hosts

if TYPE_CHECKING:
    from cpulaunch.cli.config.wizard import Draft

HERE, ALLOCATION, QUEUE, OTHER, TYPED = "here", "allocation", "queue", "other", "typed"
HOSTFILE_HEADING = "# Written by `cpulaunch config`.  One host per line: host, host:N or host slots=N\n"


def several(values: Mapping[Setting[Any], Any], machine: Machine) -> bool:
    """Return whether ranks run on hosts from a list or an allocation, instead of this machine."""
    named = values.get(Table.hosts.hostfile) or values.get(Table.hosts.list)
    return bool(named or (machine.allocation and values.get(Table.launcher) != "local"))


class HostPrompt:
    """Asks for the hosts, and stores them in the draft."""

    def __init__(self, machine: Machine, asker: Asker, draft: Draft) -> None:
        self.machine, self.asker, self.draft = machine, asker, draft

    def ask(self, setting: Setting[Any]) -> None:
        assert setting.ask
        options = list(self.options())
        while True:
            answer = self.asker.ask(Question(setting.ask.question, setting.ask.why, self.default(), options))
            try:
                self.note(answer)
                return
            except BackError:
                continue  # repeat this question

    def options(self) -> list[Option]:
        cores = len(self.machine.facts.topology.cores)
        options = [Option(HERE, "this machine", f"{cores} core{'' if cores == 1 else 's'}")]
        if self.machine.allocation:
            found = self.machine.allocation
            about = f"{found.name}: {hosts_in_short(found.hosts)}"
            options.append(Option(ALLOCATION, "the allocation's hosts", about))
        files = dict(self.machine.hostfiles)
        options += [Option(("file", name), name, hosts_in_short(hosts)) for name, hosts in files.items()]
        known = self.draft.values.get(Table.hosts.hostfile)
        if known and known not in files and not self.draft.typed:
            options.append(Option(("file", known), known, "the current one"))
        if self.machine.submits and not self.machine.allocation:
            options.append(Option(QUEUE, "nodes from Slurm", "`cpulaunch submit` requests them"))
        return [*options, Option(OTHER, "another hostfile"), Option(TYPED, "enter hosts now")]

    def default(self) -> Any:
        if self.draft.typed:
            return TYPED
        if known := self.draft.values.get(Table.hosts.hostfile):
            return ("file", known)
        if self.draft.values.get(Table.launcher) == STEPS and not self.machine.allocation:
            return QUEUE
        return ALLOCATION if several(self.draft.values, self.machine) else HERE

    def note(self, answer: Any) -> None:
        if answer == OTHER:
            hostfile = self.asker.ask(Question("Which hostfile?", "", check=_wrong_hostfile))
            self.set(hostfile=hostfile)
        elif answer == TYPED:
            self.type_in()
        elif answer in (HERE, ALLOCATION, QUEUE):
            self.set()
            if answer == QUEUE:
                self.draft.values[Table.launcher] = STEPS  # outside of an allocation, a run fails
            if answer == HERE and self.machine.allocation:
                self.draft.values[Table.launcher] = "local"  # do not use the allocation's hosts
        else:
            self.set(hostfile=answer[1])

    def type_in(self) -> None:
        why = "Names or addresses, such as node[1-4] or 10.0.0.1:2; :2 is the number of ranks."
        typed = self.asker.ask(Question("Which hosts?", why, self.draft.typed, check=_wrong_hosts, live=True))
        hosts = parse_hosts(_commas(typed), "your answer")
        where = Question(
            "Which hostfile should they be written to?", "", self.free_name(), check=_wrong_new_file
        )
        hostfile = self.asker.ask(where)
        lines = [f"{host.name}{f' slots={host.slots}' if host.slots else ''}\n" for host in hosts]
        self.set(hostfile=hostfile)
        self.draft.typed = _as_list(hosts)
        self.draft.hostfile_text = HOSTFILE_HEADING + "".join(lines)

    def free_name(self) -> str:
        if self.draft.typed:
            return str(self.draft.values[Table.hosts.hostfile])
        names = ("hostfile", *(f"hostfile-{i}" for i in range(2, 1000)))
        return next(name for name in names if not Path(name).exists())

    def set(self, hostfile: str = "") -> None:
        """Store the hosts; remove settings that refer to other hosts."""
        values = self.draft.values
        if values.get(Table.hosts.hostfile, "") != hostfile or Table.hosts.list in values:
            for key in (
                Table.hosts.hostfile,
                Table.hosts.list,
                Table.hosts.exclude,
                Table.hosts.nnodes,
                Table.hosts.master_addr,
            ):
                values.pop(key, None)
        if values.get(Table.launcher) in ("local", STEPS):
            del values[Table.launcher]
        if hostfile:
            values[Table.hosts.hostfile] = hostfile
        self.draft.typed, self.draft.hostfile_text = "", None


def _wrong_hostfile(text: str) -> str | None:
    if not text:
        return "enter the name of a file"
    try:
        read_hostfile(Path(text))
    except CpulaunchError as e:
        return str(e)
    return None


def _wrong_hosts(text: str) -> str | None:
    if not text:
        return "enter at least one host"
    try:
        parse_hosts(_commas(text), "here")
    except CpulaunchError as e:
        return str(e).removeprefix("here: ")
    return None


def _wrong_new_file(text: str) -> str | None:
    return "this file exists; choose another name" if Path(text).exists() else None


def _commas(text: str) -> str:
    return re.sub(r"[,\s]+", ",", text.strip(", "))


def _as_list(hosts: tuple[Host, ...]) -> str:
    names = [f"[{host.name}]" if ":" in host.name else host.name for host in hosts]
    return ",".join(f"{n}:{h.slots}" if h.slots else n for n, h in zip(names, hosts, strict=True))
