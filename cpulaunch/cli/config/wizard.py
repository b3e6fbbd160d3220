"""The wizard: asks for settings, as the table of settings defines, and shows the resulting plan."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from cpulaunch import launchers
from cpulaunch.cli.config.host_question import HostPrompt, several
from cpulaunch.cli.config.machine import Machine
from cpulaunch.cli.config.questions import Asker, BackError, Option, Question
from cpulaunch.cli.files import backup_of, diff, read_existing
from cpulaunch.cli.run.plan_text import sentence
from cpulaunch.cli.run.preview import picture_of_first_host, preview
from cpulaunch.cli.terminal import has_colour, has_unicode, width
from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Choice, Switch, Variables, Words
from cpulaunch.config.load import load
from cpulaunch.config.origin import Origin, Source
from cpulaunch.config.setting import Given, Setting
from cpulaunch.config.settings import SECTIONS, SETTINGS, Table
from cpulaunch.config.write import scalar, shown_value, yaml_text
from cpulaunch.discovery.batch.step import NAME as STEPS
from cpulaunch.errors import ConfigError, CpulaunchError, PlanError
from cpulaunch.plan.training import PrecisionDecision

ASKED = sorted((s for s in SETTINGS.values() if s.ask), key=lambda s: s.ask.place if s.ask else 0)
"""The settings with a question, in the order of their questions."""

OF_RANKS: tuple[Setting[Any], ...] = (
    Table.hosts.nproc_per_node,
    Table.ccl.worker_count,
    Table.training.backend,
)
"""Settings without effect on instances."""

OF_INSTANCES: tuple[Setting[Any], ...] = (Table.instances.count, Table.instances.cores_per_instance)
"""Settings that make the job one of instances.  The file never contains their defaults."""

DRAWN: tuple[Setting[Any], ...] = (Table.hosts.nproc_per_node, Table.instances.cores_per_instance)
"""Settings whose answer is followed by a picture of the placement."""

Say = Callable[[str], None]

Values: TypeAlias = dict[Setting[Any], Any]


@dataclass
class Draft:
    """The content to write to the file at ``path``.

    ``typed``: the hosts, if the user has typed them.  ``hostfile_text``: content of the hostfile for these
    hosts.
    """

    path: Path
    values: Values
    hostfile_text: str | None = None
    typed: str = ""

    def text(self) -> str:
        return yaml_text(self.values)

    def config(
        self, environ: Mapping[str, str], changed: Mapping[Setting[Any], Any] = MappingProxyType({})
    ) -> Config:
        """Return the configuration of a run, with ``changed`` values; None removes a value."""
        values = {**self.values, **changed}
        if self.typed:
            values.update({Table.hosts.hostfile: None, Table.hosts.list: self.typed})
        present = {setting: value for setting, value in values.items() if value is not None}
        return load(file=self.path, text=yaml_text(present), environ=environ)


@dataclass
class Wizard:
    """Asks for settings that are not ``fixed``, and stores the answers in ``draft``."""

    machine: Machine
    asker: Asker
    draft: Draft
    environ: Mapping[str, str]
    say: Say
    fixed: Mapping[Setting[Any], Any] = field(default_factory=dict)
    drawn: str = ""

    def run(self) -> bool:
        """Ask all questions; return whether to write the draft.

        Raises KeyboardInterrupt or EOFError if the user exits.
        """
        questions = [s for s in ASKED if s not in self.fixed]
        asked: list[int] = []
        i = 0
        while True:
            try:
                if i == len(questions):
                    return self.finish()
                if self.applies(questions[i]):
                    self.ask(questions[i])
                    asked.append(i)
                else:
                    self.draft.values.pop(questions[i], None)
                i += 1
            except BackError:
                if asked:
                    i = asked.pop()
                    self.say("  (back)\n")
                else:
                    self.say("  (this is the first question)\n")

    def applies(self, setting: Setting[Any]) -> bool:
        """Return whether the setting has an effect after the previous answers."""
        values = self.draft.values
        if setting in OF_RANKS and has_instances(values):
            return False
        if setting is Table.instances.count:
            return not any(other in self.fixed for other in (*OF_RANKS, *OF_INSTANCES))
        if setting is Table.instances.cores_per_instance:
            return has_instances(values)
        if setting is Table.hosts.hostfile:
            return Table.hosts.list not in self.fixed
        if setting in (Table.mpi.flavour, Table.ccl.interface):
            return several(values, self.machine)
        if setting is Table.ccl.worker_count:
            backend = values.get(Table.training.backend, "auto")
            return backend == "ccl" or (backend == "auto" and not self.machine.ccl_missing)
        if setting is Table.training.engine:
            return values.get(Table.training.precision) != "fp32"
        return True

    def ask(self, setting: Setting[Any]) -> None:
        """Ask for one setting, and store the answer."""
        if setting is Table.hosts.hostfile:
            HostPrompt(self.machine, self.asker, self.draft).ask(setting)
            self.draft.values.update(self.fixed)
            return
        self.put(setting, self.question(setting))
        if setting in (*DRAWN, Table.ccl.worker_count):
            self.picture(setting, always=setting in DRAWN)

    def question(self, setting: Setting[Any]) -> Question:
        """Return a setting's question, with the answers that its kind allows."""
        text = setting.ask.question if setting.ask else setting.key
        why = setting.ask.why if setting.ask else f"{setting.help[0].upper()}{setting.help[1:]}."
        now = self.draft.values.get(setting, setting.default)
        options = self.options(setting)
        if options:
            return Question(text, why, now, options)
        if setting is Table.hosts.nproc_per_node and (auto := self.ranks_per_host(setting)):
            why += f"  Here auto is {auto}."
        default = _input_text(setting, now)
        if refused := self.error_in(setting, default):
            why += f"  {default} can't be used: {refused}"
            default = self.valid_default(setting)
        return Question(text, why, default, check=lambda text: self.error_in(setting, text))

    def valid_default(self, setting: Setting[Any]) -> str:
        """Return a default to use if the current value is invalid."""
        default = _input_text(setting, setting.default)
        return "" if self.error_in(setting, default) else default

    def precision(self, value: str) -> PrecisionDecision | None:
        """Return the decision for the precision ``value`` after the previous answers; None without a plan."""
        try:
            return preview(self.draft.config(self.environ, {Table.training.precision: value}))[1].precision
        except CpulaunchError:
            return None

    def options(self, setting: Setting[Any]) -> Sequence[Option]:
        """Return the answers to choose from; empty if the user types the answer."""
        if isinstance(setting.kind, Switch):
            words: Sequence[Any] = (True, False)
        elif isinstance(setting.kind, Choice):
            words = setting.kind.words
        elif setting is Table.ccl.interface and self.machine.interfaces:
            return (Option("auto", "auto"), *(Option(name, name, ip) for name, ip in self.machine.interfaces))
        else:
            return ()
        return [Option(word, scalar(word), self.describe(setting, word)) for word in words]

    def describe(self, setting: Setting[Any], word: Any) -> str:
        """Describe an answer on this machine."""
        machine = self.machine
        if setting is Table.mpi.flavour:
            mpi = machine.mpi(word)
            name = launchers.load(mpi.flavour if mpi else word).title if mpi or word in launchers.MPIS else ""
            return f"{name} {mpi.version}" if mpi else f"{name} not found here".strip()
        if setting is Table.training.backend:
            chosen_backend = "gloo" if machine.ccl_missing else "ccl"
            ccl = f"not usable: {machine.ccl_missing}" if machine.ccl_missing else "cpulaunch's own group"
            return {"auto": f"{chosen_backend} here", "ccl": ccl, "gloo": "comes with PyTorch"}.get(word, "")
        if setting is Table.training.precision and (chosen := self.precision(word)):
            return f"{chosen.precision} here: {chosen.why}" if chosen.why else chosen.warning
        if setting is Table.training.engine:
            ipex = f"IPEX {machine.ipex} is installed" if machine.ipex else "IPEX is not installed"
            return {"native": "PyTorch with kernels", "torch": "PyTorch alone", "ipex": ipex}.get(word, "")
        return ""

    # ---- answers that are typed

    def put(self, setting: Setting[Any], question: Question) -> None:
        """Ask, and store the answer; an empty answer removes the setting from the file."""
        values, answer = self.draft.values, self.asker.ask(question)
        if question.options:
            values[setting] = answer
        elif not answer or (setting in OF_INSTANCES and answer == _input_text(setting, setting.default)):
            values.pop(setting, None)
        elif isinstance(setting.kind, Variables):
            values[setting] = {**values.get(setting, {}), **setting.kind.from_line(answer)}
        else:
            values[setting] = setting.kind.from_line(answer)

    def error_in(self, setting: Setting[Any], text: str) -> str | None:
        """Return the error in a typed answer, as far as it can be detected now."""
        if not text:
            return None
        try:
            value = setting.kind.from_line(text)
        except ValueError:
            return f"expected {setting.kind.expected()}"
        if setting is Table.output.log_dir:
            return "is a file, not a directory" if Path(text).is_file() else None
        if isinstance(setting.kind, Variables):
            return None
        # Ignore errors of previous answers, and plans that may fit on other hosts.
        unset = self.unset_later(setting)
        before = self.plan_error({**unset, setting: None})
        after = self.plan_error({**unset, setting: value})
        if after is None or str(after) == str(before):
            return None
        if isinstance(after, PlanError) and several(self.draft.values, self.machine):
            return None
        return f"{after}" + (f"  ({after.hint})" if after.hint else "")

    def unset_later(self, setting: Setting[Any]) -> dict[Setting[Any], None]:
        """Return the settings of later questions, all unset, as their old answers may be invalid now."""
        after = [s for s in ASKED if s.ask and setting.ask and s.ask.place > setting.ask.place]
        return {other: None for other in after if other not in self.fixed}

    def plan_error(self, changed: Mapping[Setting[Any], Any]) -> CpulaunchError | None:
        """Return the error of a plan with ``changed`` values."""
        try:
            config = self.draft.config(self.environ, changed)
            preview(dataclasses.replace(config, given=dict(_as_answers(config))))
        except CpulaunchError as e:
            return e
        return None

    def ranks_per_host(self, setting: Setting[Any]) -> str | None:
        """Return the number of ranks for ``auto``."""
        try:
            _, plan = preview(self.draft.config(self.environ, {**self.unset_later(setting), setting: None}))
        except CpulaunchError:
            return None
        counts = sorted({len(host.ranks) for host in plan.hosts})
        return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"

    # ---- results

    def picture(self, setting: Setting[Any], *, always: bool) -> None:
        """Draw the placement if it has changed, or if ``always``."""
        try:
            facts, plan = preview(self.draft.config(self.environ, self.unset_later(setting)))
        except CpulaunchError as e:
            self.say(f"  This can't run: {e}\n")
            return
        drawn = picture_of_first_host(plan, facts, width=width(), colour=has_colour(), unicode=has_unicode())
        if drawn == self.drawn and not always:
            return
        self.drawn = drawn
        if len(plan.hosts) > 1:
            like = "this machine" if plan.hosts[0].assumed else plan.hosts[0].host
            self.say(f"  Each host, if it is like {like}:")
        self.say(drawn + "\n")

    def finish(self) -> bool:
        """Show the plan and the changes, and ask what to do; return whether to write."""
        self.plan()
        old = read_existing(self.draft.path)
        if old is not None and old != self.draft.text():
            self.say(f"{self.draft.path} exists; this would change:")
            for line in diff(self.draft.path, old, self.draft.text()):
                self.say(f"  {line}")
            self.say("")
        kept = f"the old file is kept as {backup_of(self.draft.path).name}" if old is not None else ""
        options = [
            Option("write", f"write {self.draft.path}", kept),
            Option("show", "show the file first"),
            Option("more", "change another setting"),
            Option("leave", "exit without writing"),
        ]
        while True:
            answer = self.asker.ask(Question("What next?", "", "write", options))
            if answer == "show":
                self.say(self.draft.text())
            elif answer == "more":
                try:
                    self.change_setting()
                except BackError:
                    continue
                self.plan()
            else:
                return bool(answer == "write")

    def plan(self) -> None:
        self.say("The plan")
        for line in plan_lines(self.draft, self.environ):
            self.say(f"  {line}")
        self.say("")

    def change_setting(self) -> None:
        """Ask for any setting of the table."""
        sections = [Option(section, section or "general", title) for section, title in SECTIONS.items()]
        section = self.asker.ask(Question("In which section?", "", "", sections))
        rows = [s for s in SETTINGS.values() if s.section == section]
        while True:
            values = self.draft.values
            options = [Option(s.key, s.name, shown_value(s, values.get(s, s.default))) for s in rows]
            setting = SETTINGS[self.asker.ask(Question("Which setting?", "", rows[0].key, options))]
            try:
                self.put(setting, dataclasses.replace(self.question(setting), text=setting.key))
            except BackError:
                continue
            return


def _as_answers(config: Config) -> Iterator[tuple[Setting[Any], Given]]:
    """Yield settings; those of the draft, which is not written yet, have the origin "your answer"."""
    answer = Origin(Source.FILE, "your answer")
    for setting, given in config.given.items():
        yield setting, given._replace(origin=answer) if given.origin.source is Source.FILE else given


def plan_lines(draft: Draft, environ: Mapping[str, str]) -> Iterator[str]:
    """Yield the summary of the plan, or its error."""
    try:
        config = draft.config(environ)
        _, plan = preview(config)
    except CpulaunchError as e:
        yield f"warning: this can't run from this machine: {e}"
        if e.hint:
            yield f"hint: {e.hint}"
        return
    unknown_nodes = plan.launcher == STEPS and plan.here_alone  # nodes that Slurm has yet to allocate
    line = sentence(plan)
    yield line.replace("this machine", "each node like this machine") if unknown_nodes else line
    yield from (f"note: {note}" for note in plan.notes)
    for setting, value in draft.values.items():
        effective, origin = config.value(setting), config.origin(setting)
        if effective != value and origin.source is Source.ENVIRONMENT:
            shown = shown_value(setting, effective)
            yield f"note: {origin} overrides this file: {setting.key} is {shown}"


def has_instances(values: Mapping[Setting[Any], Any]) -> bool:
    """Return whether the job consists of instances."""
    return any(values.get(setting, setting.default) != setting.default for setting in OF_INSTANCES)


def draft_from(path: Path, fixed: Mapping[Setting[Any], Any], say: Say) -> Draft:
    """Return a draft with the content of the file at ``path``, if it is valid."""
    values: Values = {}
    if read_existing(path) is not None:
        try:
            config = load(file=path, environ={})
            values = {setting: given.value for setting, given in config.given.items()}
            say(f"{path} exists: its values are the defaults of the questions.\n")
        except ConfigError as e:
            say(f"{path} exists, but is not valid ({e}): the questions have the usual defaults.\n")
    return Draft(path, {**values, **fixed})


def _input_text(setting: Setting[Any], value: Any) -> str:
    """Format a value as the user would type it."""
    if isinstance(setting.kind, Words):
        return shlex.join(value)
    if isinstance(setting.kind, Variables):
        return ""  # each answer adds one
    shown = setting.kind.to_yaml(value)
    return shown if isinstance(shown, str) else scalar(shown)
