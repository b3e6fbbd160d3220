"""The classes of the table of settings: a setting is a descriptor in the class of its section.

On an instance of the section, the attribute is the setting's value, whose type mypy knows.  On the class, it
is the setting itself::

    config.hosts.nproc                    int | Literal["auto"]
    config.where(Config.hosts.nproc)      "hosts.nproc (cpulaunch.yaml:7)"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar, cast, overload

from cpulaunch.config.kinds import Kind
from cpulaunch.config.origin import Origin

T = TypeVar("T")
S = TypeVar("S", bound="Section")


class Given(NamedTuple):
    """A value that a source sets, and its origin."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Section:
    """A group of settings.  ``given``: the settings that a source sets, with their values."""

    section: ClassVar[str]
    title: ClassVar[str]

    given: Mapping[Setting[Any], Given] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """How the wizard asks for a setting.

    ``place``: position of the question.  ``why``: a line about the purpose and the default of the setting.
    """

    place: int
    question: str
    why: str


@dataclass(eq=False)
class Setting(Generic[T]):
    """One setting.

    ``flags``: its options of ``cpulaunch run``.  ``variable``: a variable of other software with the same
    meaning, such as ``OMP_NUM_THREADS``; users may set it instead.  ``ask``: the wizard's question; the
    wizard offers settings without a question at its end.  ``common``: ``--help`` shows the options;
    ``--help-all`` shows all.  ``rank_variable``: the variable that passes the value to ranks.  ``decided``:
    further values that the plan may pass to ranks, but users can't set.
    """

    kind: Kind[T]
    default: T
    help: str
    flags: tuple[str, ...] = ()
    variable: str | None = None
    ask: Ask | None = None
    common: bool = False
    rank_variable: str | None = None
    decided: tuple[T, ...] = ()
    section: str = field(init=False)
    name: str = field(init=False)

    def __set_name__(self, owner: type[Section], name: str) -> None:
        self.section, self.name = owner.section, name

    @overload
    def __get__(self, instance: None, owner: type[Section]) -> Setting[T]: ...
    @overload
    def __get__(self, instance: Section, owner: type[Section]) -> T: ...
    def __get__(self, instance: Section | None, owner: type[Section]) -> Setting[T] | T:
        if instance is None:
            return self
        given = instance.given.get(self)
        return cast(T, given.value) if given else self.default

    @property
    def key(self) -> str:
        """The section and the name, such as ``ccl.worker_count``; at the top level, the name alone."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def environment_name(self) -> str:
        """The variable that sets it, such as ``CPULAUNCH_CCL_WORKER_COUNT``."""
        return "CPULAUNCH_" + self.key.upper().replace(".", "_")


class Nested(Generic[S]):
    """A section within the top level."""

    def __init__(self, of: type[S]) -> None:
        self.of = of

    @overload
    def __get__(self, instance: None, owner: type[Section]) -> type[S]: ...
    @overload
    def __get__(self, instance: Section, owner: type[Section]) -> S: ...
    def __get__(self, instance: Section | None, owner: type[Section]) -> type[S] | S:
        return self.of if instance is None else self.of(instance.given)
