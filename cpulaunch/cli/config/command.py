"""``cpulaunch config``: the wizard; also shows the merged settings, checks a file, imports accelerate's."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpulaunch import queues, variables
from cpulaunch.cli.main import say, say_error
from cpulaunch.cli.options import Parser, add_settings, check_subcommand, load_config
from cpulaunch.config.config import Config
from cpulaunch.config.load import find_file, load, read_text, read_yaml
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SCHEMA, SETTINGS, Table
from cpulaunch.config.write import scalar, shown_value, yaml_text
from cpulaunch.errors import ConfigError, CpulaunchError, UsageError
from cpulaunch.plan.instances import with_their_number
from cpulaunch.wording import counted

if TYPE_CHECKING:
    from cpulaunch.cli.config.wizard import Draft

USAGE = """cpulaunch config [OPTIONS]                   ask questions, and write a YAML file
       cpulaunch config show [--origin] [OPTIONS]   print the merged settings as YAML
       cpulaunch config validate [FILE]             check a file; exit with 0 or 2
       cpulaunch config import FILE [-o OUT]        convert accelerate's YAML"""

EPILOG = """\
examples:
  cpulaunch config
  cpulaunch config --defaults --set training.precision=fp32
  cpulaunch config import accelerate.yaml -o cpulaunch.yaml
"""


def main(arguments: list[str]) -> int:
    commands = {"show": _show, "validate": _validate, "import": _import}
    if not arguments or arguments[0].startswith("-"):
        return _configure(arguments)
    check_subcommand("config", arguments, [*commands])
    return commands[arguments[0]](arguments[1:])


# ---- the wizard


def _configure(arguments: list[str]) -> int:
    parser = Parser(
        "cpulaunch config",
        "Inspect this machine, ask a few questions, and write a YAML file.",
        EPILOG,
        USAGE,
    )
    add_settings(parser, ())
    parser.add_argument("--defaults", action="store_true",
                        help="do not ask: use the defaults, and the values of --set")  # fmt: skip
    parser.add_argument("--force", action="store_true",
                        help="with --defaults: overwrite the file, and keep the old one as .bak")  # fmt: skip
    options = parser.parse(arguments)
    path = options.config_file or Path(os.environ.get(variables.CONFIG) or "cpulaunch.yaml")
    if path.is_dir():
        raise UsageError(f"{path} is a directory", hint=f"--config-file {path / 'cpulaunch.yaml'}")
    config = load(options.given, file=path, text=f"cpulaunch: {SCHEMA}\n", environ={})
    fixed = {setting: given.value for setting, given in config.given.items()}
    return _write_defaults(path, fixed, options.force) if options.defaults else _ask(path, fixed)


def _write_defaults(path: Path, fixed: Mapping[Setting[Any], Any], force: bool) -> int:
    from cpulaunch.cli.config.wizard import Draft, plan_lines
    from cpulaunch.cli.files import diff, read_existing

    draft = Draft(path, dict(fixed))
    old = read_existing(path)
    if old is not None and old != draft.text():
        for line in diff(path, old, draft.text()):
            print(line, file=sys.stderr)
        if not force:
            raise UsageError(f"{path} exists, and would change as shown",
                             hint="--force overwrites it, and keeps a backup")  # fmt: skip
    for line in plan_lines(draft, os.environ):
        say(line)
    _write(draft, old, say)
    return 0


def _ask(path: Path, fixed: Mapping[Setting[Any], Any]) -> int:
    from cpulaunch.cli.terminal import drop_keys, fold, why_not_interactive

    if why := why_not_interactive():
        raise UsageError(f"config asks questions, but {why}",
                         hint="--defaults asks no questions; --set KEY=VALUE sets a value")  # fmt: skip
    from cpulaunch.cli.config.machine import inspect
    from cpulaunch.cli.config.questions import Terminal
    from cpulaunch.cli.config.wizard import Wizard, draft_from
    from cpulaunch.cli.files import read_existing

    def tell(line: str) -> None:
        print(fold(line), file=sys.stderr, flush=True)

    try:
        tell("This asks a few questions, and writes a YAML file for `cpulaunch run`.")
        tell("Enter accepts the default, Esc goes back, Ctrl-C exits without writing.\n")
        tell("Inspecting the machine ...")
        machine = inspect(os.environ)
        drop_keys()
        for line in machine.lines():
            tell(f"  {line}")
        tell("")
        draft = draft_from(path, fixed, tell)
        if not Wizard(machine, Terminal(), draft, os.environ, tell, fixed).run():
            tell("Nothing was written.")
            return 0
        _write(draft, read_existing(path), tell)
        return 0
    except (KeyboardInterrupt, EOFError):
        tell("\nNothing was written.")
        return 130


def _write(draft: Draft, old: str | None, tell: Any) -> None:
    """Write the hostfile and the YAML file; report them and the next command."""
    from cpulaunch.cli.config.wizard import has_instances
    from cpulaunch.cli.files import write_file

    if draft.hostfile_text:
        write_file(Path(draft.values[Table.hosts.hostfile]), draft.hostfile_text)
        tell(f"Written: {draft.values[Table.hosts.hostfile]}")
    if old == draft.text():
        tell(f"Unchanged: {draft.path}")
    else:
        backup = write_file(draft.path, draft.text())
        tell(f"Written: {draft.path}" + (f" (the old file is now {backup})" if backup else ""))
    found = find_file(os.environ)
    is_default = found and found.absolute() == draft.path.absolute()
    option = "" if is_default else f"--config-file {shlex.quote(str(draft.path))} "
    script = "infer.py" if has_instances(draft.values) else "train.py"
    if hostfile := draft.values.get(Table.hosts.hostfile):
        tell(f"Next:    cpulaunch hosts check -f {shlex.quote(hostfile)}")
        tell(f"then:    cpulaunch run {option}{script}")
        return
    submits = queues.load("slurm").available() and "SLURM_JOB_ID" not in os.environ
    if submits and draft.values.get(Table.launcher) == "slurm":
        tell(f"Next:    cpulaunch submit --nodes 4 {option}{script}")
        return
    tell(f"Next:    cpulaunch run {option}{script}")
    if submits and draft.values.get(Table.launcher) != "local":
        tell(f"or, on nodes of Slurm: cpulaunch submit --nodes 4 {option}{script}")


# ---- show, validate, import


def _show(arguments: list[str]) -> int:
    example = "example: cpulaunch config show --origin --set ccl.worker_count=2"
    usage = "cpulaunch config show [OPTIONS]"
    parser = Parser("cpulaunch config show", "Print the merged settings, as YAML.", example, usage)
    parser.add_argument("--origin", action="store_true", help="show the source of each value")
    add_settings(parser)
    options = parser.parse(arguments)
    config = with_their_number(load_config(options))
    notes = dict(_decision_notes(config))
    lines = [f"cpulaunch: {SCHEMA}"]
    for section, settings in groupby(SETTINGS.values(), key=lambda s: s.section):
        if section:
            lines.append(f"{section}:")
        for setting in settings:
            value = config.value(setting)
            line = f"{'  ' if section else ''}{setting.name}: {shown_value(setting, value)}"
            if value == "":
                line = f"{'  ' if section else ''}# {setting.name}: not set"
            comments = [str(config.origin(setting))] if options.origin else []
            comments += [notes[setting]] if setting in notes else []
            lines.append(f"{line:40}  # {', '.join(comments)}" if comments else line)
    print("\n".join(lines))
    for warning in config.warnings:
        say(f"warning: {warning}")
    return 0


def _decision_notes(config: Config) -> Iterator[tuple[Setting[Any], str]]:
    """Yield (setting, note) for settings whose ``auto`` has been decided."""
    from cpulaunch.cli.run.preview import preview

    if config.training.precision == "auto":
        with suppress(CpulaunchError):  # `config validate` reports this error
            yield Config.training.precision, str(preview(config)[1].precision)


def _validate(arguments: list[str]) -> int:
    parser = Parser("cpulaunch config validate", "Check a YAML file, and warn of unwise settings.",
                    "example: cpulaunch config validate cpulaunch.yaml")  # fmt: skip
    parser.add_argument(
        "file", type=Path, nargs="?", help="file to check; default: the file that `cpulaunch run` would read"
    )
    options = parser.parse_args(arguments)
    file = options.file or find_file(os.environ)
    if file is None:
        raise UsageError("no cpulaunch.yaml found", hint="name a file: cpulaunch config validate FILE")
    problems: list[ConfigError] = []
    config = load(file=file, environ={}, problems=problems)
    for problem in problems:
        say_error(problem)
    if not problems:
        say(f"{file}: {counted(len(read_yaml(file).found), 'setting')}, valid")

    from cpulaunch.cli.run.preview import unwise_settings

    warnings = list(unwise_settings(config))
    if problems and warnings:
        say("apart from these errors:")
    for warning in warnings:
        say(f"warning: {warning}")
    return ConfigError.exit_code if problems else 0


def _import(arguments: list[str]) -> int:
    parser = Parser("cpulaunch config import", "Convert an accelerate configuration, old or new.",
                    "example: cpulaunch config import accelerate.yaml -o cpulaunch.yaml",
                    "cpulaunch config import FILE [-o OUT] [--force]")  # fmt: skip
    parser.add_argument("file", type=Path, nargs="?", help="accelerate's file, YAML or JSON")
    parser.add_argument("-o", "--output", metavar="OUT", type=Path, help="file to write; default: stdout")
    parser.add_argument("--force", action="store_true", help="overwrite OUT, and keep a backup")
    options = parser.parse_args(arguments)

    from cpulaunch.cli.files import write_file
    from cpulaunch.config.accelerate import USUAL_FILE, from_accelerate

    hint = f"accelerate's own file is {USUAL_FILE}"
    if options.file is None:
        raise UsageError("no file to import", hint=hint)
    imported = from_accelerate(read_text(options.file, str(options.file), hint), str(options.file))
    settings = dict(imported.settings)
    if hostfile := settings.get(Table.hosts.hostfile):
        settings[Table.hosts.hostfile] = _checked_hostfile(hostfile)
    text = yaml_text(settings, [f"Converted from {options.file}, an accelerate configuration."])
    load(file=options.output or options.file, text=text, environ={})  # check before writing
    for dropped in imported.dropped:
        say(f"{dropped.place}: {dropped.key}: {_shown(dropped.value)}: not converted: {dropped.reason}")
    if imported.off:
        say(f"left out (empty or off): {', '.join(imported.off)}")
    for advice in imported.advice:
        say(f"to do: {advice}")
    if options.output is None:
        print(text, end="")
        return 0
    if options.output.exists() and not options.force:
        raise UsageError(f"{options.output} exists", hint="--force overwrites it, and keeps a backup")
    backup = write_file(options.output, text)
    say(f"Written: {options.output}" + (f" (the old file is now {backup})" if backup else ""))
    return 0


def _checked_hostfile(name: str) -> str:
    """Return the hostfile's path with ``~`` expanded; warn if the file is invalid."""
    from cpulaunch.discovery.batch.allocation import read_hostfile

    path = Path(name).expanduser()
    try:
        read_hostfile(path)
    except ConfigError as e:
        say(f"warning: {e}" + (f" ({e.hint})" if e.hint else ""))
    return str(path)


def _shown(value: Any) -> str:
    text = scalar(value) if isinstance(value, (str, bool, int, float, list, dict)) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
