"""The options of commands that take settings, made from the table of settings."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Switch
from cpulaunch.config.load import load
from cpulaunch.config.settings import SECTIONS, SETTINGS, Setting
from cpulaunch.errors import UsageError
from cpulaunch.wording import did_you_mean

ELSEWHERE = {
    "--np": "-n",
    "--nproc": "-n",
    "--ntasks": "-n",
    "--num-processes": "-n",
    "--num-machines": "--nnodes",
    "--nodes": "--nnodes",
    "--machinefile": "--hostfile",
    "-machinefile": "--hostfile",
    "-hostfile": "--hostfile",
    "-genv": "--env",
}
"""What mpirun, srun and accelerate call our options."""


class Parser(argparse.ArgumentParser):
    """argparse, with our errors, and dashes or underscores in options."""

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
        raise UsageError(message, hint=f"`{self.prog} --help` lists the options")

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """All of ``arguments``: options only."""
        options, rest = self.split(arguments)
        if rest:
            self.error(f"unexpected argument {rest[0]!r}")
        return self.parse_args(options)

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
            name, equals, value = word.partition("=")
            if name.startswith("--"):
                name = name.replace("_", "-")
            if word in ends or not word.startswith("-") or word == "-":
                return options, list(arguments[i:])
            attached = (
                not name.startswith("--") and name not in known and name[:2] in known and name[:2] != "-h"
            )
            if name not in known and not attached:
                ours = ELSEWHERE.get(name)
                meant = f"; did you mean {ours!r}?" if ours in known else did_you_mean(name, known)
                raise UsageError(
                    f"unknown option {name}{meant}",
                    hint=f"`{self.prog} --help` lists the options",
                )
            options.append(word if attached else name + equals + value)
            if not attached and not equals and known[name].nargs != 0:
                if i + 1 == len(arguments):
                    raise UsageError(f"{name} needs a value: {known[name].metavar}")
                # Joined, so that a value may begin with a dash.
                options[-1:] = (
                    [f"{name}={arguments[i + 1]}"] if name.startswith("--") else [name, arguments[i + 1]]
                )
                i += 1
            i += 1
        return options, []


class _Give(argparse.Action):
    """Note a setting, in the order of the command line."""

    def __init__(self, option_strings: Sequence[str], dest: str, setting: Setting, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, **kwargs)
        self.setting = setting

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        text = "true" if self.nargs == 0 else values
        namespace.given = [*namespace.given, (self.setting.key, text, option_string)]


class _Set(argparse.Action):
    """Note a setting given as KEY=VALUE."""

    def __call__(
        self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        key, equals, text = values.partition("=")
        if not equals:
            parser.error(f"--set {values}: expected KEY=VALUE")
        namespace.given = [*namespace.given, (key, text, f"--set {key}")]


def add_settings(parser: argparse.ArgumentParser, sections: Iterable[str] = tuple(SECTIONS)) -> None:
    """Options for the settings of ``sections``, and those that say where settings come from."""
    parser.set_defaults(given=[])
    source = parser.add_argument_group("Settings")
    source.add_argument(
        "--config-file", metavar="F", type=Path, help="YAML file; else ./cpulaunch.yaml, if it is there"
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
                    default=argparse.SUPPRESS,
                    help=setting.help,
                    nargs=0 if switch else None,
                    metavar=None if switch else setting.kind.metavar,
                )


def load_config(options: argparse.Namespace) -> Config:
    """The settings that ``options`` and everything weaker say."""
    return load(options.given, file=options.config_file)
