"""Elements of the table of settings: sections, and their settings.

A setting is an attribute of its section.  On an instance of the section, it is the setting's value, with its
type known to mypy.  On the class, it is the setting itself, which gives access to more than the value::

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
    """A value, and its origin."""

    value: Any
    origin: Origin


@dataclass(frozen=True)
class Section:
    """Settings that belong together.  ``given``: the values of those that are set."""

    section: ClassVar[str]
    title: ClassVar[str]

    given: Mapping[Setting[Any], Given] = field(default_factory=dict)


@dataclass(frozen=True)
class Ask:
    """How the wizard asks for a setting.

    This consists of the question's place in the order, and a line that says why the setting matters and what
    its default means.
    """

    place: int
    question: str
    why: str


@dataclass(eq=False)
class Setting(Generic[T]):
    """One setting.

    ``flags`` are its options of ``cpulaunch run``, if any.  ``--help`` shows those of a ``common`` setting,
    ``--help-all`` all.  ``variable`` is the name by which the field already knows the setting, if there is
    one: in the environment, it counts as the user's wish.  ``ask`` is for settings that the wizard asks for
    one by one; it offers the others at its end.  ``rank_variable`` is the variable by which ranks get its
    value, if they do.  ``decided`` are further values that ranks may get, but users can't set.
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
        """``ccl.worker_count``; the name alone for a setting of the top level."""
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def environment_name(self) -> str:
        """cpulaunch's own variable for it, such as ``CPULAUNCH_CCL_WORKER_COUNT``."""
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
