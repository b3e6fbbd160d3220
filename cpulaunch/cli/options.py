"""The options of commands that take settings, made from the table of settings."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Container, Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cpulaunch.cli import habits
from cpulaunch.cli.main import say
from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Switch
from cpulaunch.config.load import load
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SECTIONS, SETTINGS
from cpulaunch.errors import UsageError
from cpulaunch.wording import closest

CLOSE = 0.77
"""How much of an unknown option has to be that of another one for this to be suggested."""


class Parser(argparse.ArgumentParser):
    """argparse, with our errors, and dashes or underscores in options.

    ``foreign``: whether options of other programs, as in ``habits``, are understood.  ``shown_elsewhere``:
    those that are meant for another program, whose own help shows them; ``elsewhere`` says which.
    ``passes_through``: whether unknown options with a = are that program's, too.
    """

    foreign = False
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

    def error(self, message: str) -> NoReturn:
        raise UsageError(message, hint=self._where_listed())

    def _where_listed(self) -> str:
        return f"`{self.prog} --help` lists the options{self.elsewhere}"

    def has(self, name: str) -> bool:
        """Whether there is an option of exactly this name."""
        return name in self._option_string_actions

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """All of ``arguments``: options only."""
        options, rest = self.split(arguments)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return self.parse_args(options)

    def own_options(self, words: Sequence[str]) -> list[str]:
        """Those of another program's words that are long options of this parser."""
        names = (word.partition("=")[0] for word in words if word.startswith("--"))
        return [name for name in dict.fromkeys(names) if name in self._option_string_actions]

    def split(self, arguments: Sequence[str], ends: Iterable[str] = ()) -> tuple[list[str], list[str]]:
        """``(options, the rest)``: the rest begins with the first word that is no option or its value,
        with one of ``ends``, or after ``--``.  Options come back with dashes for underscores."""
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
                options.append(
                    name + equals + value
                )  # a letter with its value attached, or another program's
            elif len(words) < wanted or (words and words[0] in known and not _fits(known[name], words[0])):
                raise UsageError(f"{name} needs a value: {known[name].metavar}")
            elif words and not name.startswith("--"):
                options += [name, "=".join(words)]
            else:  # joined, so that a value may begin with a dash
                options.append("=".join((name, *words)) if words else name + equals + value)
        return options, []

    def _known(self, word: str) -> tuple[str, str, str]:
        """``word`` as an option, with hyphens and as many dashes as it has here; ``=``; its value.

        An option of one letter with its value attached comes back as it is.
        """
        known = self._option_string_actions
        name, equals, value = word.partition("=")
        if len(name) > 2:
            name = name.replace("_", "-")
        if name not in known and "-" + name in known:  # one dash will do, as it does for mpirun
            name = "-" + name
        if name in known:
            return name, equals, value
        if self.passes_through and equals and name.startswith("--"):
            return name, equals, value
        if self.foreign and (row := habits.refusal(name)):
            raise UsageError(f"{name}: {row.why}", hint=row.instead)
        visible = {o for o in known if known[o].help != argparse.SUPPRESS} | self.shown_elsewhere
        if not name.startswith(("--", "-h")) and name[:2] in visible and _values(known[name[:2]]):
            return word, "", ""
        ours = {option.lstrip("-"): option for option in sorted(visible)}
        close = closest(name.lstrip("-"), ours, CLOSE)
        meant = f"; did you mean {ours[close]!r}?" if close else ""
        raise UsageError(f"unknown option {name}{meant}", hint=self._where_listed())


def _values(action: argparse.Action) -> int:
    """The number of words that an option takes."""
    return action.values if isinstance(action, _Give) else int(action.nargs != 0)


def _fits(action: argparse.Action, word: str) -> bool:
    """Whether ``word``, which is an option itself, may be its value: a text may begin with a dash."""
    if isinstance(action, _Give):
        try:
            action.setting.kind.from_text(word)
        except ValueError:
            return False
    return True


class _Give(argparse.Action):
    """Note a setting, in the order of the command line.

    ``read`` makes its text of what is given, which is ``values`` words with a = between.
    """

    def __init__(
        self,
        option_strings: Sequence[str],
        dest: str,
        setting: Setting[Any],
        read: habits.Read,
        values: int,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            option_strings, dest, nargs=None if values else 0, default=argparse.SUPPRESS, **kwargs
        )
        self.setting, self.read, self.values = setting, read, values

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        option = str(option_string)
        text = self.read(option, values if self.values else "true")
        if text is None:
            return
        # mpirun's -x takes a value, too.
        key = "env" if self.setting.key == "forward" and "=" in text else self.setting.key
        namespace.given = [*namespace.given, (key, text, option)]


class _Ignore(argparse.Action):
    """Say why an option changes nothing."""

    def __init__(self, option_strings: Sequence[str], dest: str, row: habits.Ignored, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=None if row.values else 0, **kwargs)
        self.why = row.why

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        say(f"{option_string} is ignored: {self.why}")


class _Restrict(argparse.Action):
    """Note an option that changes nothing, or refuse it."""

    def __init__(
        self, option_strings: Sequence[str], dest: str, row: habits.Restricted, **kwargs: Any
    ) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.row = row

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        if self.row.only is not None and values != self.row.only:
            self.row.refuse(str(option_string), values)
        if self.row.on_one_host:
            namespace.restricted = [*namespace.restricted, (self.row, str(option_string), values)]


class _Set(argparse.Action):
    """Note a setting given as KEY=VALUE."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        key, equals, text = values.partition("=")
        if not equals:
            parser.error(f"--set {values}: expected KEY=VALUE")
        namespace.given = [*namespace.given, (key, text, f"--set {key}")]


def add_settings(parser: Parser, sections: Collection[str] = tuple(SECTIONS)) -> None:
    """Options for the settings of ``sections``, and those that say where settings come from."""
    parser.set_defaults(given=[], restricted=[])
    source = parser.add_argument_group("Settings")
    source.add_argument(
        "--config-file", metavar="F", type=Path, help="YAML file; default: ./cpulaunch.yaml, if it exists"
    )
    source.add_argument("--set", metavar="KEY=VALUE", action=_Set, help="any setting, by its key (repeat)")
    for section in sections:
        group = parser.add_argument_group(SECTIONS[section])
        for setting in SETTINGS.values():
            if setting.section == section and setting.flags:
                switch = isinstance(setting.kind, Switch)
                group.add_argument(
                    *setting.flags,
                    action=_Give,
                    dest=setting.key,
                    setting=setting,
                    read=habits.OWN_VALUES.get(setting.key, habits.as_given),
                    values=0 if switch else 1,
                    help=setting.help,
                    metavar=None if switch else setting.kind.metavar,
                )
    if sections:
        _add_habits(parser, sections)


def _add_habits(parser: Parser, sections: Container[str]) -> None:
    """The options of other programs that mean a setting of ``sections``, or nothing; no help shows them."""
    parser.foreign = True
    for row in habits.TABLE:
        names = [name for name in row.spellings if name not in parser._option_string_actions]
        if not names:
            continue
        if isinstance(row, habits.Ignored):
            parser.add_argument(*names, action=_Ignore, row=row, dest="_", help=argparse.SUPPRESS)
        elif isinstance(row, habits.Restricted):
            parser.add_argument(*names, action=_Restrict, row=row, dest="_", help=argparse.SUPPRESS)
        elif isinstance(row, habits.Means) and (setting := SETTINGS[row.key]).section in sections:
            parser.add_argument(
                *names,
                action=_Give,
                dest=setting.key,
                setting=setting,
                read=row.read,
                values=row.values,
                help=argparse.SUPPRESS,
                metavar=setting.kind.metavar if row.values == 1 else "NAME VALUE",
            )


def refuse_restricted(options: argparse.Namespace) -> None:
    """Raise UsageError where options were given that are accepted for jobs on one host only."""
    for row, _, value in options.restricted:
        names = [name for same, name, _ in options.restricted if same is row]
        row.refuse(", ".join(dict.fromkeys(names)), value)  # all at once, as a job may wait long for each


def tell_of_restricted(options: argparse.Namespace) -> None:
    """Say why options for jobs of several hosts change nothing, in one line."""
    if options.restricted:
        names = ", ".join(option for _, option, _ in options.restricted)
        verb = "are" if len(options.restricted) > 1 else "is"
        say(f"{names} {verb} ignored: {options.restricted[0][0].ignored}")


def load_config(options: argparse.Namespace) -> Config:
    """The settings that ``options`` and everything weaker say."""
    given, overruled = habits.settled(options.given)
    for line in overruled:
        say(line)
    return load(given, file=options.config_file)
