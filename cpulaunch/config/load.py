"""Merges options, environment, YAML and defaults into one checked Config.

The sources, from strongest to weakest: the command line; the environment (``CPULAUNCH_…``, then the variable
of other software, such as ``CCL_WORKER_COUNT``); the YAML file; the site's file; the default.  Such a
variable in ``--env`` or ``env:`` also sets its setting, with the strength of that source.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cpulaunch import variables
from cpulaunch.config.config import Config
from cpulaunch.config.kinds import Variables, Words
from cpulaunch.config.origin import Origin, Source
from cpulaunch.config.setting import Given, Setting
from cpulaunch.config.settings import SCHEMA, SECTIONS, SETTINGS
from cpulaunch.errors import ConfigError
from cpulaunch.user_file import SETTINGS_LIMIT, read_user_file
from cpulaunch.wording import did_you_mean

# Variables of cpulaunch that are not settings.
_OTHER_VARIABLES = {variable.name for variable in variables.TABLE}

SITE = Path("/etc/cpulaunch/config.yaml")
"""The site's file: settings for all users of a machine."""

LOCKED = "locked"
"""Key in the site's file: a list of settings that users may not change."""

_ALTERNATIVES: tuple[tuple[Setting[Any], Setting[Any]], ...] = (
    (Config.hosts.hostfile, Config.hosts.list),
    (Config.hosts.nproc, Config.hosts.nproc_per_node),
)
"""Settings of which only the one from the stronger source applies."""

_ACCELERATE_KEYS = ("compute_environment", "distributed_type")
"""Keys that identify a configuration file of accelerate."""


@dataclass
class _Layer:
    """The settings of one source.  ``locked``: settings that no stronger source may set, with their lines."""

    found: dict[Setting[Any], Given] = field(default_factory=dict)
    locked: dict[Setting[Any], Origin] = field(default_factory=dict)

    def put(self, setting: Setting[Any], value: Any, origin: Origin) -> None:
        before = self.found.get(setting)
        if isinstance(setting.kind, Variables) and before:
            value, origin = {**before.value, **value}, before.origin.and_then(origin)
        elif isinstance(setting.kind, Words) and before:
            value, origin = (*before.value, *value), before.origin.and_then(origin)
        self.found[setting] = Given(value, origin)


def load(
    given: Iterable[tuple[str, str, str]] = (),
    *,
    file: Path | None = None,
    text: str | None = None,
    environ: Mapping[str, str] | None = None,
    problems: list[ConfigError] | None = None,
) -> Config:
    """Return the merged settings.

    ``given``: the settings on the command line, in order, each as (key, text, name of the option).  ``file``:
    the YAML file to read; by default, the first of ``$CPULAUNCH_CONFIG``, ``./cpulaunch.yaml`` and
    ``$XDG_CONFIG_HOME/cpulaunch/config.yaml``.  ``text``: the content of a ``file`` that isn't written yet.
    Raises ConfigError with the place, the valid values and a hint.  With ``problems``, invalid keys and
    values of the file are skipped, and their errors are added to this list; only invalid YAML raises
    ConfigError.
    """
    environ = dict(os.environ if environ is None else environ)
    path = file or find_file(environ)
    from_file = read_yaml(path, text, problems) if path else _Layer()
    from_site = read_yaml(SITE) if os.path.isfile(SITE) else _Layer()
    layers = (_from_command_line(given), *_from_environment(environ), from_file, from_site)
    merged: dict[Setting[Any], Given] = {}
    for setting in SETTINGS.values():
        for layer in reversed(layers):
            found = None
            with _collect_errors(problems if layer is from_file else None):
                found = _in_layer(layer, setting)
            if found is None:
                continue
            if layer is not from_site and setting in from_site.locked:
                raise _locked_error(setting, found, from_site)
            before = merged.get(setting)
            if isinstance(setting.kind, Variables) and before:
                found = Given({**before.value, **found.value}, before.origin.and_then(found.origin))
            merged[setting] = found
    for pair in _ALTERNATIVES:
        if all(setting in merged for setting in pair):
            weaker, stronger = sorted(pair, key=lambda setting: merged[setting].origin.source)
            if merged[weaker].origin.source < merged[stronger].origin.source:
                if weaker in from_site.locked:
                    raise _locked_error(weaker, merged[stronger], from_site)
                del merged[weaker]
    return Config(merged, environ, path, tuple(_ignored_variables(environ)))


def _locked_error(setting: Setting[Any], given: Given, site: _Layer) -> ConfigError:
    """Return the error for a value that the site has locked."""
    fixed = site.found[setting].value if setting in site.found else setting.default
    return ConfigError(
        f"{given.origin}: {setting.key} is locked by {site.locked[setting]}",
        hint=f"leave it out; the site sets it to {setting.kind.to_text(fixed)}",
    )


def _read(setting: Setting[Any], read: Callable[[str], Any], text: str, origin: Origin) -> Any:
    """Parse ``text`` by ``read``, a method of the setting's kind.  Raises ConfigError."""
    try:
        return read(text)
    except ValueError:
        raise ConfigError(
            f"{origin}: {text!r} is not valid for {setting.key}: expected {setting.kind.expected()}",
            part=text,
        ) from None


def known_setting(key: str, origin: Origin) -> Setting[Any]:
    """Return the setting of this key.  Raises ConfigError."""
    if key not in SETTINGS:
        raise ConfigError(
            f"{origin}: unknown setting {key!r}{did_you_mean(key, SETTINGS)}",
            part=key,
            hint="`cpulaunch config show` lists all settings",
        )
    return SETTINGS[key]


def read_text(path: Path, shown: str, hint: str) -> str:
    """Return the text of a file of at most 1 MiB.  Raises ConfigError, which calls the file ``shown``."""
    try:
        raw = read_user_file(path, SETTINGS_LIMIT)
    except OSError as e:
        raise ConfigError(f"{shown}: cannot be read: {e.strerror}", hint=hint) from None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        line = raw.count(b"\n", 0, e.start) + 1
        raise ConfigError(
            f"{shown}:{line}: byte 0x{raw[e.start]:02x} is not UTF-8", hint="save the file as UTF-8"
        ) from None


def read_yaml(path: Path, text: str | None = None, problems: list[ConfigError] | None = None) -> _Layer:
    """Read the settings of the YAML file at ``path``, or of ``text`` in its place.

    Raises ConfigError with the line; with ``problems``, errors of keys and values are added to this list.
    """
    from cpulaunch.config.nodes import open_yaml  # importing yaml takes 15 ms

    shown, hint = _shown(path), "`cpulaunch config` writes a file with settings"
    if text is None:
        text = read_text(path, shown, hint)
    with open_yaml(text, shown, hint) as (loader, root):
        return _YamlReader(shown, loader, problems, is_site=path == SITE).read(root)


class _YamlReader:
    """Reads settings from the nodes of a YAML file, which have line numbers."""

    def __init__(
        self, shown: str, loader: Any, problems: list[ConfigError] | None = None, *, is_site: bool = False
    ) -> None:
        self.shown, self.loader, self.problems = shown, loader, problems
        self.source = Source.SITE if is_site else Source.FILE

    def read(self, root: Any) -> _Layer:
        layer = _Layer()
        self._refuse_accelerate(root)
        for name, node, origin in self._entries(root, ""):
            with _collect_errors(self.problems):
                self._read_entry(layer, name, node, origin)
        return layer

    def _refuse_accelerate(self, root: Any) -> None:
        if any(key.value in _ACCELERATE_KEYS for key, _ in root.value):
            raise ConfigError(
                f"{self.shown}: a configuration of accelerate, not of cpulaunch",
                hint=f"`cpulaunch config import {shlex.quote(self.shown)} -o cpulaunch.yaml` converts it",
            )

    def _read_entry(self, layer: _Layer, name: str, node: Any, origin: Origin) -> None:
        if name == "cpulaunch":
            self._check_schema(node, origin)
        elif name == LOCKED and self.source is Source.SITE:
            self._lock(layer, node, origin)
        elif name in SETTINGS:
            self._put(layer, SETTINGS[name], node, origin)
        elif name in SECTIONS:
            self._read_section(layer, name, node, origin)
        else:
            valid = [
                "cpulaunch",
                *(s for s in SECTIONS if s),
                *(s.key for s in SETTINGS.values() if not s.section),
            ]
            self._unknown(name, "", valid, origin)

    def _lock(self, layer: _Layer, node: Any, origin: Origin) -> None:
        keys = self._plain(node)
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise ConfigError(f"{origin}: expected a list of settings, such as [training.precision]")
        for key in keys:
            layer.locked[known_setting(key, origin)] = origin

    def _read_section(self, layer: _Layer, section: str, node: Any, origin: Origin) -> None:
        if node.tag == "tag:yaml.org,2002:null":
            return  # a section whose lines are all commented out
        if node.id != "mapping":
            from cpulaunch.config.nodes import noun

            raise ConfigError(f"{origin}: {section!r} is a section: expected a mapping, not {noun(node)}")
        valid = {s.name: s for s in SETTINGS.values() if s.section == section}
        for name, value, where in self._entries(node, section):
            with _collect_errors(self.problems):
                if name not in valid:
                    self._unknown(name, section, list(valid), where)
                self._put(layer, valid[name], value, where)

    def _entries(self, node: Any, section: str) -> Iterator[tuple[str, Any, Origin]]:
        seen: dict[str, Origin] = {}
        for key, value in node.value:
            origin = Origin(self.source, f"{self.shown}:{key.start_mark.line + 1}")
            with _collect_errors(self.problems):
                name = self._key(key, section, origin, seen)
                seen[name] = origin
                yield name, value, origin

    def _key(self, key: Any, section: str, origin: Origin, seen: Mapping[str, Origin]) -> str:
        name = self._plain(key)
        if not isinstance(name, str):
            raise ConfigError(f"{origin}: a key must be text, not {name!r}")
        if name in seen:
            raise ConfigError(
                f"{origin}: {'.'.join(filter(None, (section, name)))!r} is given twice, "
                f"first at {seen[name]}",
                part=name,
            )
        return name

    def _put(self, layer: _Layer, setting: Setting[Any], node: Any, origin: Origin) -> None:
        if node.id == "mapping":
            value: Any = {}
            for name, entry, where in self._entries(node, setting.key):
                value[name] = self._text(entry)
                if isinstance(setting.kind, Variables):
                    self._check_variable(setting, name, value[name], where)
        else:
            value = self._plain(node)
            if type(value) is int and ":" in node.value:
                value = node.value  # YAML 1.1 reads 3:4 as a time, 184 seconds
        try:
            layer.put(setting, setting.kind.from_yaml(value), origin)
        except ValueError:
            # Quote numbers and booleans as the user wrote them: `yes`, not True.
            written = node.id == "scalar" and not isinstance(value, str)
            shown = "an empty value" if value is None else node.value if written else repr(value)
            if isinstance(setting.kind, Variables):
                shown = "a value that is not a mapping"  # it may be secret
            raise ConfigError(
                f"{origin}: {shown} is not valid for {setting.key}: expected {setting.kind.expected()}",
                part=str(value),
            ) from None

    def _check_variable(self, setting: Setting[Any], name: str, value: Any, origin: Origin) -> None:
        """Raise ConfigError for an invalid variable.  Values may be secret, so they are not shown."""
        try:
            setting.kind.from_yaml({name: value})
        except ValueError:
            raise ConfigError(
                f"{origin}: {name!r} in {setting.key!r}: expected a name without =, and text as its value",
                part=name,
                hint=f'{name}: "" sets an empty value' if value is None else None,
            ) from None

    def _check_schema(self, node: Any, origin: Origin) -> None:
        schema = self._plain(node)
        if type(schema) is int and schema > SCHEMA:
            raise ConfigError(
                f"{origin}: written for schema {schema}; this cpulaunch knows schema {SCHEMA}",
                hint="upgrade cpulaunch",
            )
        if schema != SCHEMA or type(schema) is not int:
            raise ConfigError(f"{origin}: {schema!r} is not a schema: expected `cpulaunch: {SCHEMA}`")

    def _unknown(self, name: str, section: str, valid: Sequence[str], origin: Origin) -> None:
        inside = f" in {section!r}" if section else ""
        raise ConfigError(
            f"{origin}: unknown key {name!r}{inside}{did_you_mean(name, valid)}",
            part=name,
            hint=f"valid{inside}: {', '.join(valid)}",
        )

    def _plain(self, node: Any) -> Any:
        return self.loader.construct_object(node, deep=True)

    def _text(self, node: Any) -> Any:
        """Return a scalar as it is written: 010 stays 010 instead of 8, and `off` stays text."""
        return node.value if node.id == "scalar" and not node.tag.endswith(":null") else self._plain(node)


@contextmanager
def _collect_errors(problems: list[ConfigError] | None) -> Iterator[None]:
    """Add a ConfigError of this context to ``problems``; without a list, raise it."""
    try:
        yield
    except ConfigError as e:
        if problems is None:
            raise
        problems.append(e)


def _from_command_line(given: Iterable[tuple[str, str, str]]) -> _Layer:
    layer = _Layer()
    for key, text, option in given:
        origin = Origin.of_option(option)
        setting = known_setting(key, origin)
        layer.put(setting, _read(setting, setting.kind.from_text, text, origin), origin)
    return layer


def _from_environment(environ: Mapping[str, str]) -> tuple[_Layer, _Layer]:
    ours, others = _Layer(), _Layer()
    for setting in SETTINGS.values():
        # Within a rank, the plan has set the variable of other software, so it isn't the user's choice.
        planned = setting.rank_variable and environ.get(setting.rank_variable)
        for layer, name in (
            (ours, setting.environment_name),
            (others, None if planned else setting.variable),
        ):
            if name and environ.get(name):  # an empty variable counts as unset
                origin = Origin.of_variable(name)
                layer.put(setting, _read(setting, setting.kind.from_line, environ[name], origin), origin)
    return ours, others


def _in_layer(layer: _Layer, setting: Setting[Any]) -> Given | None:
    if setting in layer.found:
        return layer.found[setting]
    env = layer.found.get(Config.env)
    if env and setting.variable and setting.variable in env.value:
        origin = replace(env.origin, text=f"{env.origin} {setting.variable}")
        return Given(_read(setting, setting.kind.from_line, env.value[setting.variable], origin), origin)
    return None


def find_file(environ: Mapping[str, str]) -> Path | None:
    """Return the path of the default YAML file, or None if there is no such file."""
    if named := environ.get(variables.CONFIG):
        return Path(named)
    home = Path(environ.get("XDG_CONFIG_HOME") or Path(environ.get("HOME", "/")) / ".config")
    for path in (Path("cpulaunch.yaml"), home / "cpulaunch" / "config.yaml"):
        if os.path.isfile(path):  # False if it can't be accessed
            return path
    return None


def _ignored_variables(environ: Mapping[str, str]) -> Iterator[str]:
    settings = {setting.environment_name for setting in SETTINGS.values()}
    of_ranks = {setting.rank_variable: setting.environment_name for setting in SETTINGS.values()}
    in_job = variables.JOB_ID in environ
    for name in environ:
        if not name.startswith("CPULAUNCH_") or name in settings:
            continue
        if name not in _OTHER_VARIABLES:
            yield f"${name} is not a setting of cpulaunch, and is ignored{did_you_mean(name, settings)}"
        elif name in of_ranks and not in_job:
            yield f"${name} is ignored: cpulaunch sets it for the ranks; the setting is ${of_ranks[name]}"


def _shown(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
