"""Formats settings as a commented YAML file."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SCHEMA, SECTIONS, SETTINGS

T = TypeVar("T")

WIDTH = 80

HEADING = f"""\
# Settings of cpulaunch.  Command line and environment override this file.
# Lines such as `# name: value` show defaults; see `cpulaunch run --help-all`.
cpulaunch: {SCHEMA}
"""

_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./+-]*")
# Words that YAML 1.1 does not load as text.
_RESERVED = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}
# Characters that YAML requires to be escaped.
_UNPRINTABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def yaml_text(values: Mapping[Setting[Any], Any], heading: Sequence[str] = ()) -> str:
    """Return the text of a YAML file with ``values`` and their help, and all defaults as comments.

    ``heading``: lines of a comment at the start.  Loading the text gives the same values.
    """
    parts = ["".join(f"# {line}".rstrip() + "\n" for line in heading) + HEADING]
    for section, rows in groupby(SETTINGS.values(), key=lambda setting: setting.section):
        parts.append(_section(section, list(rows), values))
    return "\n".join(parts)


def shown_value(setting: Setting[T], value: T) -> str:
    """Format a setting's value as one line of YAML."""
    return scalar(setting.kind.to_yaml(value))


def scalar(value: Any) -> str:
    """Format a plain value as one line of YAML."""
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
        return value if plain else _quoted(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(scalar, value)) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{scalar(k)}: {scalar(v)}" for k, v in value.items()) + "}"
    return json.dumps(value)


def _quoted(text: str) -> str:
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _section(section: str, rows: Sequence[Setting[Any]], values: Mapping[Setting[Any], Any]) -> str:
    indent = "  " if section else ""
    lines = [f"# {SECTIONS[section]}", f"{section}:"] if section else []
    for setting in rows:
        if setting in values:
            lines += textwrap.wrap(setting.help, WIDTH, initial_indent=f"{indent}# ",
                                   subsequent_indent=f"{indent}# ")  # fmt: skip
            lines.append(f"{indent}{setting.name}: {shown_value(setting, values[setting])}")
    for setting in rows:
        if setting not in values:
            shown = shown_value(setting, setting.default) if setting.default != "" else "(none)"
            lines.append(f"{indent}# {setting.name}: {shown}")
    return "\n".join(lines) + "\n"
