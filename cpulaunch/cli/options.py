"""The argument parser of all commands, with options generated from the table of settings."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

from cpulaunch.cli import habits
from cpulaunch.cli.main import say
from cpulaunch.config.config import Config
from cpulaunch.config.load import load
from cpulaunch.config.settings import SECTIONS, SETTINGS
from cpulaunch.errors import UsageError
from cpulaunch.wording import closest, did_you_mean

CLOSE = 0.77
"""Minimum similarity, from 0 to 1, of an unknown option and an option that is suggested."""

_OPTION = re.compile(r"-\D")
"""Start of a word that is a value only if joined to its option by =.  Negative numbers are values."""

_SINGLE_DASH = re.compile(r"-\w{2}")
"""A word after a single dash, as Hydra's mpiexec has options."""

_VALUE_OF_SWITCH = re.compile(r"argument (?P<names>\S+): ignored explicit argument (?P<value>.+)")
"""argparse's message for a switch with a value."""


class Parser(argparse.ArgumentParser):
    """argparse with cpulaunch's errors, and hyphens or underscores in options.

    ``rare``: options that only ``--help-all`` shows.  ``foreign``: options of other launchers, which are
    refused.  ``shown_elsewhere``: options that only the queue's own documentation explains; ``elsewhere``
    names it.  ``passes_through``: unknown long options are passed to the queue, unless they resemble an
    option of this parser.
    """

    foreign: Mapping[str, habits.Refused] = MappingProxyType({})
    shown_elsewhere: frozenset[str] = frozenset()
    elsewhere = ""
    passes_through = False

    def __init__(self, prog: str, description: str, epilog: str, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            usage=usage,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.rare: list[argparse.Action] = []

    def add_rare(self, *names: str, **kwargs: Any) -> None:
        """Add an option that only ``--help-all`` shows.  Arguments: see ``add_argument``."""
        self.rare.append(self.add_argument(*names, **kwargs))

    def format_help(self) -> str:
        helps = [(action, action.help) for action in self.rare]
        for action in self.rare:
            action.help = argparse.SUPPRESS
        try:
            return super().format_help()
        finally:
            for action, text in helps:
                action.help = text

    def error(self, message: str) -> NoReturn:
        if match := _VALUE_OF_SWITCH.fullmatch(message):
            message = f"{match['names'].split('/')[0]} takes no value, got {match['value']}"
        raise UsageError(message, hint=self._where_listed())

    def _where_listed(self) -> str:
        help_all = "--help-all" if self.has("--help-all") else "--help"
        return f"`{self.prog} {help_all}` lists the options{self.elsewhere}"

    def has(self, name: str) -> bool:
        """Return whether this parser has an option with this name."""
        return name in self._option_string_actions

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Parse ``arguments``, which must all be options."""
        options, rest = self.split(arguments)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return self.parse_args(options)

    def own_options(self, words: Sequence[str]) -> list[str]:
        """Return the options among ``words`` that this parser also has, as they were typed."""
        names = (word.partition("=")[0] for word in words if word.startswith("-"))
        known = self._option_string_actions
        return [name for name in dict.fromkeys(names) if name[:2] + name[2:].replace("_", "-") in known]

    def split(self, arguments: Sequence[str], ends: Iterable[str] = ()) -> tuple[list[str], list[str]]:
        """Split the command line into options, normalized to hyphens, and the remaining words.

        The options end at the first word that is neither an option nor a value, at one of ``ends``, or at
        ``--``.  Raises UsageError for an unknown option, an option without its value, and an empty path.
        """
        known = self._option_string_actions
        options: list[str] = []
        i = 0
        while i < len(arguments):
            word = arguments[i]
            if word == "--":
                return options, list(arguments[i + 1 :])
            if word in ends or not word.startswith("-") or word == "-":
                return options, list(arguments[i:])
            name, equals, value = self._known(word)
            wanted = 0 if equals or name not in known else _values(known[name])
            if wanted == 2 and "=" in "".join(arguments[i + 1 : i + 2]):
                wanted = 1  # NAME=VALUE
            words = arguments[i + 1 :][:wanted]
            i += 1 + len(words)
            if name not in known:
                options.append(name + equals + value)  # -pVALUE, or an option of a queue
                continue
            needs = f"{name} needs a value: {_expected(known[name])}"
            if stray := next(filter(_OPTION.match, words), None):
                raise UsageError(
                    f"{needs}, and {stray} looks like an option",
                    hint=f"if {stray} is the value, join them by =: {name}={'='.join(words)}",
                )
            empty = (equals or words) and not any((value, *words))
            if len(words) < wanted or (empty and known[name].type is Path):
                raise UsageError(needs)
            if words and not name.startswith("--"):
                options += [name, "=".join(words)]
            else:  # join them: argparse rejects a separate value that begins with a dash
                options.append("=".join((name, *words)) if words else name + equals + value)
        return options, []

    def _known(self, word: str) -> tuple[str, str, str]:
        """Return the normalized name of an option, ``=`` and the value; the last two may be empty.

        An option such as ``-pVALUE`` is returned unchanged.
        """
        known = self._option_string_actions
        name, equals, value = word.partition("=")
        if len(name) > 2:
            name = name.replace("_", "-")
        if name not in known and "-" + name in known:  # mpirun also accepts a single dash
            name = "-" + name
        if name in known:
            return name, equals, value
        if name in self.foreign:
            self.foreign[name].refuse(name)
        visible = {o for o in known if known[o].help != argparse.SUPPRESS} | self.shown_elsewhere
        if not name.startswith(("--", "-h")) and name[:2] in visible and _values(known[name[:2]]):
            return word, "", ""
        ours = {option.lstrip("-"): option for option in sorted(visible)}
        close = closest(name.lstrip("-"), ours, CLOSE)
        if self.passes_through and name.startswith("--") and not close:
            return name, equals, value
        meant = f"; did you mean {ours[close]!r}?" if close else ""
        hint = self._where_listed()
        if not close and _SINGLE_DASH.match(name) and self.has("--mpi-args"):
            hint += "; --mpi-args=WORD passes an option to mpiexec"
        raise UsageError(f"unknown option {name}{meant}", hint=hint)


def _values(action: argparse.Action) -> int:
    """Return the number of values of an option."""
    return action.row.values if isinstance(action, _Take) else int(action.nargs != 0)


def _expected(action: argparse.Action) -> str:
    """Return the placeholder of an option's value."""
    return str(action.metavar or "|".join(action.choices or ()))


class _Take(argparse.Action):
    """Pass the option to a row of the table in `habits`."""

    def __init__(self, option_strings: Sequence[str], dest: str, row: habits.Option, **kwargs: Any) -> None:
        metavar = row.metavar if row.values else None
        nargs = None if row.values else 0
        super().__init__(
            option_strings, dest, nargs=nargs, default=argparse.SUPPRESS, metavar=metavar, **kwargs
        )
        self.row = row

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        self.row.take(namespace, str(option_string), values if self.row.values else "true")


class _HelpAll(argparse.Action):
    """Show all options, and exit."""

    def __call__(self, parser: Any, *_: Any) -> None:
        parser.rare.clear()
        parser.print_help()
        parser.exit()


def add_settings(
    parser: Parser, sections: Collection[str] = tuple(SECTIONS), common: Collection[str] = tuple(SECTIONS)
) -> None:
    """Add the options of the settings in ``sections``, and options for the sources of settings.

    ``--help`` shows only common options of the sections ``common``; ``--help-all`` shows all.
    """
    parser.set_defaults(given=[], restricted=[])
    if sections:
        parser.add_argument(
            "--help-all",
            action=_HelpAll,
            nargs=0,
            dest="_",
            help="show all options, not only common ones",
        )
    for section in sorted(sections, key=lambda section: section != "hosts"):  # hosts first
        group = parser.add_argument_group(SECTIONS[section])
        for setting in SETTINGS.values():
            if setting.section == section and setting.flags:
                row = habits.row_of(setting)
                action = group.add_argument(
                    *setting.flags, action=_Take, row=row, dest="_", help=setting.help
                )
                if not setting.common or section not in common:
                    parser.rare.append(action)
    source = parser.add_argument_group("Settings")
    source.add_argument(
        "--config-file",
        metavar="F",
        type=Path,
        help="YAML file with settings; default: ./cpulaunch.yaml",
    )
    source.add_argument(
        "--set", action=_Take, row=habits.ANY_SETTING, dest="_", help="set any setting by its key (repeat)"
    )
    if sections:
        _add_habits(parser, sections)


def _add_habits(parser: Parser, sections: Container[str]) -> None:
    """Add options of other programs, for settings of ``sections`` or without effect.  No help shows them."""
    parser.foreign = habits.REFUSED
    for row in habits.TABLE:
        names = [name for name in row.spellings if not parser.has(name)]
        excluded = isinstance(row, habits.Means) and SETTINGS[row.key].section not in sections
        if names and not excluded and type(row) is not habits.Refused:
            parser.add_argument(*names, action=_Take, row=row, dest="_", help=argparse.SUPPRESS)


def without_options(own: Container[str], words: Sequence[str]) -> Iterator[str]:
    """Yield ``words``, which `Parser.split` has returned, without the options ``own`` and their values."""
    skipped = False
    for word in words:
        if not skipped and word.partition("=")[0] not in own:
            yield word
        skipped = word in own and not word.startswith("--")  # the value of -o is a separate word


def check_subcommand(command: str, arguments: Sequence[str], subcommands: Sequence[str]) -> None:
    """Raise UsageError unless the arguments of ``command`` begin with one of its ``subcommands``."""
    names = f"its commands: {', '.join(subcommands)}"
    if not arguments:
        hint = f"`cpulaunch {command} --help` explains them"
        raise UsageError(f"{command}: no command; {names}", hint=hint)
    word = arguments[0]
    if word not in subcommands:
        raise UsageError(f"{command}: no command {word!r}{did_you_mean(word, subcommands)}", hint=names)


def refuse_restricted(options: argparse.Namespace) -> None:
    """Raise UsageError if an option was given that is accepted only for jobs on one host."""
    for row, _ in options.restricted:
        names = [name for same, name in options.restricted if same is row]
        row.refuse(", ".join(dict.fromkeys(names)))


def report_restricted(options: argparse.Namespace) -> None:
    """Report options that have no effect, because the job is on one host."""
    if names := [name for _, name in options.restricted]:
        verb = "are" if len(names) > 1 else "is"
        say(f"{', '.join(names)} {verb} ignored: the job is on one host")


def load_config(options: argparse.Namespace) -> Config:
    """Merge the settings in ``options`` with all weaker sources."""
    given, notes = habits.resolve(options.given)
    for line in notes:
        say(line)
    return load(given, file=options.config_file)
