"""A YAML loader that limits the depth and the number of nodes, and reports each error with its line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from cpulaunch.errors import ConfigError

MAX_DEPTH = 32
"""Maximum depth of nested collections."""

MAX_NODES = 10_000
"""Maximum number of scalars and collections in a file, with aliases expanded."""

MAX_NUMBER = 1 << 63
"""Limit of whole numbers.  Python refuses to print much longer ones."""


class BoundedLoader(yaml.SafeLoader):
    """Loads the YAML of ``text``.  Raises ConfigError, with the file name ``shown`` and the line."""

    def __init__(self, text: str, shown: str) -> None:
        super().__init__(text)
        self._shown = shown
        self._depth = self._nodes = 0
        self._sizes: dict[str, int] = {}  # anchor → number of nodes

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        before = self._nodes
        is_alias = isinstance(event, yaml.AliasEvent)
        self._nodes += self._sizes.get(event.anchor, 0) if is_alias else 1
        self._depth += 1
        too_deep = self._depth > MAX_DEPTH
        if too_deep or self._nodes > MAX_NODES:
            what = "levels of nesting" if too_deep else "values, with its aliases expanded"
            most = MAX_DEPTH if too_deep else MAX_NODES
            raise ConfigError(f"{self._shown}:{event.start_mark.line + 1}: more than {most} {what}")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        if event.anchor and not is_alias:
            self._sizes[event.anchor] = self._nodes - before
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        place = f"{self._shown}:{node.start_mark.line + 1}"
        try:
            value = super().construct_object(node, deep=deep)
        except (ValueError, AttributeError, TypeError):
            raise ConfigError(
                f"{place}: {node.value!r} is not a valid date or number", hint="quote it if it is text"
            ) from None
        if isinstance(value, int) and not -MAX_NUMBER < value < MAX_NUMBER:
            raise ConfigError(f"{place}: the number is too large")
        return value


@contextmanager
def open_yaml(text: str, shown: str, hint: str) -> Iterator[tuple[BoundedLoader, Any]]:
    """Yield a loader and the root node of ``text``, which is a mapping.

    Raises ConfigError with the line, also for YAML errors within the context.  ``hint``: for an empty file.
    """
    try:
        loader = BoundedLoader(text, shown)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{shown}: is empty", hint=hint)
        if not isinstance(root, yaml.MappingNode):
            line = root.start_mark.line + 1
            raise ConfigError(f"{shown}:{line}: expected a mapping such as `key: value`, not {noun(root)}")
        yield loader, root
    except yaml.reader.ReaderError as e:
        line = text.count("\n", 0, e.position) + 1
        raise ConfigError(
            f"{shown}:{line}: a character that YAML does not allow: {chr(e.character)!r}"
        ) from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        place = f"{shown}:{mark.line + 1}" if mark else shown
        tab = mark is not None and text.split("\n")[mark.line].lstrip(" ").startswith("\t")
        raise ConfigError(
            f"{place}: not valid YAML: {e.problem or e.context}",
            hint="indent with spaces: YAML allows no tabs" if tab else None,
        ) from None


def noun(node: Any) -> str:
    """Describe a node in an error."""
    return "a list" if node.id == "sequence" else repr(node.value)
