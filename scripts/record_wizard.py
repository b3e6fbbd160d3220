#!/usr/bin/env python3
"""Record `cpulaunch config` on a real terminal of 80 columns (tmux), as text for docs/wizard.md.

scripts/record_wizard.py                  print the recordings
scripts/record_wizard.py docs/wizard.md   put them where the page has `<!-- recording: NAME -->`
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from cpulaunch.config.settings import SETTINGS

RECORDINGS = {
    "one-machine": {"hosts.nproc_per_node": ["2", "Enter"]},
    "four-nodes": {"hosts.hostfile": ["Down", "Enter"]},
    "instances": {"instances.count": ["2", "Enter"]},
}
"""The keys to press at the question for a setting; at other questions, it is Enter."""

# A question that waits for its answer.
PENDING = re.compile(r"^\? (.*\?) +(?:\(arrow keys.*|\[.*)$", re.MULTILINE)
TIMEOUT = 30.0


def record(name: str) -> str:
    """Return the screen at the end of a run in a separate directory."""
    with tempfile.TemporaryDirectory() as directory:
        if name == "four-nodes":
            # More slots than this machine has cores would be refused.
            hostfile = Path(directory, "hostfiles", "small-nodes")
            hostfile.parent.mkdir()
            hostfile.write_text("node[1-4] slots=2\n")
        keys = {
            ask.question: pressed for key, pressed in RECORDINGS[name].items() if (ask := SETTINGS[key].ask)
        }
        socket = f"record-{name}-{os.getpid()}"

        def tmux(*arguments: str) -> str:
            command = ["tmux", "-L", socket, *arguments]
            return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT).stdout

        def screen() -> str:
            return tmux("capture-pane", "-p", "-S", "-", "-t", "0")

        def wait(asked: str) -> str:
            """Return the next question after ``asked``; empty if the wizard has ended."""
            end = time.monotonic() + TIMEOUT
            while time.monotonic() < end:
                shown = screen()
                pending = PENDING.findall(shown)
                if shown.rstrip().endswith("END"):
                    return ""
                if pending and pending[-1] != asked:
                    return str(pending[-1])
                time.sleep(0.05)
            raise SystemExit(f"{name}: nothing came after {asked!r}:\n{screen()}")

        env = {k: v for k, v in os.environ.items() if not k.startswith(("CPULAUNCH_", "SLURM_", "PBS_"))}
        shell = f"{sys.executable} -m cpulaunch config; echo END; read"
        size = ["-x", "80", "-y", "24"]
        start = ["tmux", "-L", socket, "-f", "/dev/null", "new-session", "-d", *size, "-c", directory]
        subprocess.run([*start, shell], check=True, timeout=TIMEOUT, env={**env, "LANG": "C.UTF-8"})
        try:
            asked = ""
            while asked := wait(asked):
                tmux("send-keys", "-t", "0", *keys.get(asked, ["Enter"]))
            return "$ cpulaunch config\n" + screen().partition("END")[0].rstrip() + "\n"
        finally:
            tmux("kill-server")


def main() -> None:
    if len(sys.argv) < 2:
        for name in RECORDINGS:
            print(f"# {name}\n{record(name)}")
        return
    page = Path(sys.argv[1])
    text = page.read_text()
    for name in RECORDINGS:
        mark = f"<!-- recording: {name} -->\n"
        pattern = re.escape(mark) + r"```text\n.*?```\n"
        new = f"{mark}```text\n{record(name)}```\n"
        text = re.sub(pattern, lambda _: new, text, flags=re.DOTALL)  # noqa: B023
    page.write_text(text)


if __name__ == "__main__":
    main()
