#!/usr/bin/env python3
"""Train BERT with examples/bert_accelerate.py on two ranks, and show cpulaunch's report and messages.

scripts/report_image.py [--steps 300] docs/images/report.png

The image shows the job's report in headless Chromium.  The script prints the last status line that has all
figures, as the terminal showed it, and the findings of a trace of five steps.  It takes some minutes.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "bert_accelerate.py"
LIMIT = 1800.0
SIZE = "1100,1560"
ROWS, COLUMNS = 24, 160
STATUS = re.compile(r"cpulaunch: 2 of 2 ranks up[^\r\n\x1b]*MFU[^\r\n\x1b]*")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("image", type=Path)
    options = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("chromium is not installed")
    with tempfile.TemporaryDirectory() as made:
        directory = Path(made)
        shutil.copy(EXAMPLE, directory)
        last = options.steps // 2 + 4
        window = f"{last - 4}-{last}"
        shown = on_terminal(
            directory, "run", "-n", "2", "--profile", window, EXAMPLE.name, "--steps", str(options.steps)
        )
        print(*STATUS.findall(shown)[-1:])
        (trace,) = directory.glob("runs/*/trace.txt")
        print(trace.read_text())
        on_terminal(directory, "report", "runs")  # the newest job of this user may be another one
        page = directory / "report.html"
        for private in (made, str(Path.home())):
            if private in page.read_text():
                raise SystemExit(f"{private} is in the report")
        subprocess.run(
            [
                chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
                f"--user-data-dir={directory / 'profile'}", f"--window-size={SIZE}",
                "--virtual-time-budget=20000", f"--screenshot={options.image.absolute()}", page.as_uri(),
            ],
            check=True, timeout=LIMIT, capture_output=True,
        )  # fmt: skip


def on_terminal(directory: Path, *arguments: str) -> str:
    """Return the output of `cpulaunch ARGUMENTS` on a terminal of `COLUMNS`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    shown = bytearray()
    process = subprocess.Popen(
        [sys.executable, "-m", "cpulaunch", *arguments], cwd=directory, stdin=subprocess.DEVNULL,
        stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    try:
        while data := _read(ours):
            shown += data
        if process.wait(LIMIT):
            raise SystemExit(shown.decode(errors="replace"))
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return shown.decode(errors="replace")


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, 65536)
    except OSError:  # all processes that had it open have ended
        return b""


if __name__ == "__main__":
    main()
