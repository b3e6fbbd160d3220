"""A pseudo-terminal with the wizard in it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import pexpect

from cpulaunch.config.settings import SETTINGS

ENTER, ESCAPE, UP, DOWN, CTRL_C, CTRL_D, CTRL_U = "\r", "\x1b", "\x1b[A", "\x1b[B", "\x03", "\x04", "\x15"
TIMEOUT = 30.0
"""Seconds to wait for any text."""

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\x07")


def question_of(key: str) -> str:
    """The wizard's question for a setting."""
    ask = SETTINGS[key].ask
    assert ask
    return ask.question


class Terminal:
    """A command on its own terminal.  Methods wait for text."""

    def __init__(
        self, directory: Path, env: Mapping[str, str], command: Sequence[str], columns: int = 80
    ) -> None:
        self.child = pexpect.spawn(
            command[0], list(command[1:]), cwd=str(directory), encoding="utf-8", timeout=TIMEOUT,
            dimensions=(24, columns),
            # No terminal answers requests for the cursor's position.
            env={"TERM": "xterm-256color", "LANG": "C.UTF-8", "PROMPT_TOOLKIT_NO_CPR": "1", **env},
        )  # fmt: skip
        self.child.delaybeforesend = None
        self.raw = ""

    def sees(self, text: str) -> None:
        """Wait until ``text`` is shown, after all texts that were awaited before."""
        self.child.expect_exact(text)
        self.raw += self.child.before + self.child.after

    def types(self, *keys: str) -> None:
        for key in keys:
            self.child.send(key)

    def answers(self, question: str, *keys: str) -> None:
        """Wait for ``question``; answer with ``keys`` and Enter."""
        self.sees(question)
        self.types(*keys, ENTER)

    def ends(self) -> int:
        """Wait until the command ends; return its exit code."""
        self.child.expect(pexpect.EOF)
        self.raw += self.child.before
        self.child.close()
        return self.child.exitstatus if self.child.exitstatus is not None else 128 + self.child.signalstatus

    @property
    def text(self) -> str:
        """The text shown so far, without the terminal's commands."""
        return _ESCAPES.sub("", self.raw)

    def close(self) -> None:
        self.child.close(force=True)
