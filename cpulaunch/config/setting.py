"""What a row of the table of settings is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cpulaunch.config.kinds import Kind


@dataclass(frozen=True)
class Ask:
    """How the wizard asks for a setting: at which place, and in one line why it matters and what the
    default means."""

    place: int
    question: str
    why: str


@dataclass(frozen=True)
class Setting:
    """One setting.

    ``flags`` are its options of ``cpulaunch run``; ``variable`` is the name by which the field
    already knows it, if there is one: set in the environment, it counts as the user's wish.
    ``ask`` is for those that the wizard asks for one by one; it offers the others at its end.
    ``rank_variable`` is the variable by which ranks are told its value, where they are, and ``decided`` are
    the words that they may be told besides those that a user may say.
    """

    key: str
    kind: Kind
    default: Any
    help: str
    flags: tuple[str, ...] = ()
    variable: str | None = None
    ask: Ask | None = None
    rank_variable: str | None = None
    decided: tuple[str, ...] = ()

    @property
    def section(self) -> str:
        """``"ccl"`` for ``ccl.worker_count``; ``""`` for a setting of the top level."""
        return self.key.rpartition(".")[0]

    @property
    def name(self) -> str:
        """The key within its section."""
        return self.key.rpartition(".")[2]

    @property
    def environment_name(self) -> str:
        """Our own variable for it, such as ``CPULAUNCH_CCL_WORKER_COUNT``."""
        return "CPULAUNCH_" + self.key.upper().replace(".", "_")
