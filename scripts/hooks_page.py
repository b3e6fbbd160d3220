"""Write the list of changes in docs/scripts.md from the tables in the code.

A test compares the page with the tables.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from cpulaunch.runtime.hooks import Change
from cpulaunch.runtime.install import CHANGED, OBSERVED, OF_STEPS, Patched
from cpulaunch.runtime.observe.abort import CHANGES as OF_CPP
from cpulaunch.runtime.observe.abort import LIBRARY

PAGE = Path(__file__).parent.parent / "docs" / "scripts.md"

HEAD = """\
## What is changed

`scripts/hooks_page.py` generates these tables from those in the code. If a library has renamed one of the
names, its change is left out, one line reports the consequence, and the job runs. A function of
`torch.distributed` is replaced in each module of that package that has it.

`--as-written` makes none of these changes, except for the hook that counts steps and, while steps are traced,
what traces need. In both cases, the program's process differs from plain Python's in a few things outside of
the script's objects:

- `sys.excepthook` leaves cpulaunch's frames out of tracebacks, and a finder in `sys.meta_path` notices
  imports.
- Standard output is flushed after each line.
- `faulthandler` is on, and writes stacks at a signal of the agent if py-spy can't read them.
- A script that saves by cpulaunch's checkpoints gets handlers for SIGTERM, SIGUSR1 and SIGUSR2.

Two changes affect more than torch and its libraries:

- `socket.socket.bind`, in rank 0: cpulaunch keeps `MASTER_PORT` bound until rank 0 listens there, so that no
  other program takes it. The replacement lets go of the port if the script binds it itself. `--as-written`
  keeps no port, and replaces nothing.
- C++'s terminate handler, once there is a group of a backend other than ccl: gloo throws in a thread of its
  own when a peer sends more than expected, which aborts the process. The handler reports the calls that did
  not match, which no Python code can, and calls the former one. It needs Python's lock, so it is removed
  while torch destroys groups, which holds that lock and waits.
"""

WATCHES = "These changes only observe:"
ALTERS = "These changes alter what a script does:"
COLUMNS = "| module | replaced | also used | what for | if a name is missing |\n|---|---|---|---|---|"


def page() -> str:
    """Return the page's text; the part before HEAD is kept."""
    before, _, _ = PAGE.read_text().partition(HEAD.partition("\n")[0])
    first, *others = OBSERVED
    assert first is OF_STEPS
    watching = [*_rows([first, *others]), *(_row(LIBRARY, change) for change in OF_CPP)]
    altering = _rows(CHANGED)
    return before + "\n".join([HEAD, WATCHES, "", COLUMNS, *watching, "", ALTERS, "", COLUMNS, *altering, ""])


def _rows(tables: Sequence[Patched]) -> Iterator[str]:
    for table in tables:
        for change in table.changes:
            yield _row(table.module, change)


def _row(module: str, change: Change) -> str:
    what, without = (text.replace("|", r"\|") for text in (change.what, change.without))
    return f"| `{module}` | {_names(change.replaces)} | {_names(change.uses)} | {what} | {without} |"


def _names(names: Sequence[str]) -> str:
    """Return the names, grouped by class or module."""
    found: dict[str, list[str]] = {}
    for name in names:
        place, _, last = name.rpartition(".")
        found.setdefault(place, []).append(last)
    return "; ".join(
        f"`{place}`: {', '.join(f'`{last}`' for last in lasts)}" if place and len(lasts) > 1
        else ", ".join(f"`{place}.{last}`" if place else f"`{last}`" for last in lasts)
        for place, lasts in found.items()
    ) or "–"  # fmt: skip


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.exit(0)
