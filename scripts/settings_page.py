"""Write docs/settings.md from the table of settings.  A test compares the two."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import SECTIONS, SETTINGS
from cpulaunch.config.write import shown_value

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

HEAD = """\
# Settings

This page lists every setting; `scripts/settings_page.py` generates it from `cpulaunch/config`.

A value comes from the first of these sources that has one: the command line, the environment (first
`CPULAUNCH_…`, then the field's own variable), the YAML file, the site's file, the default. `auto` stands for
what cpulaunch detects or decides. `cpulaunch config show --origin` shows where each value came from.

The YAML file is the first of `--config-file F`, `$CPULAUNCH_CONFIG`, `./cpulaunch.yaml` and
`$XDG_CONFIG_HOME/cpulaunch/config.yaml`.

`/etc/cpulaunch/config.yaml`, if it exists, holds a site's settings, which are weaker than those of the YAML
file. Nobody can change the settings that it lists under `locked:`.

```yaml
cpulaunch: 1
cpu:
  lenient: true
training:
  as_written: false
locked: [cpu.lenient, training.as_written]
```

`--set KEY=VALUE` takes any key of this page. In an option's name, underscores work like hyphens. A key's
variable is `CPULAUNCH_` and the key in capitals, with `_` for `.`: that of `ccl.worker_count` is
`CPULAUNCH_CCL_WORKER_COUNT`. Variables of lists and of `env` are split as a shell would:
`CPULAUNCH_ENV="A=1 B='2 3'"`.

If the value of an option begins with a dash, join the two by `=`: `--mpi-args=-print-rank-map`.
"""


def page() -> str:
    """Return the page's text."""
    parts = [HEAD]
    for section, title in SECTIONS.items():
        parts.append(f"## {title}{f' (`{section}`)' if section else ''}\n")
        parts.append("| key | option | default | what it does |\n|---|---|---|---|")
        parts += [_row(setting) for setting in SETTINGS.values() if setting.section == section]
        parts.append("")
    return "\n".join(parts)


def _row(setting: Setting[Any]) -> str:
    options = ", ".join(f"`{flag}`" for flag in setting.flags) or "–"
    what = setting.help
    if setting.kind.metavar and setting.kind.describe != "text":
        what += f"; {setting.kind.describe}"
    if setting.variable:
        what += f"; also `${setting.variable}`"
    what = what.replace("|", r"\|")
    return f"| `{setting.key}` | {options} | `{shown_value(setting, setting.default)}` | {what} |"


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
