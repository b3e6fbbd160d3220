"""Merge patches: the examples of RFC 7386's appendix, and lists that are merged by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpulaunch.errors import UsageError
from cpulaunch.queues.kubernetes.patch import merge, read_patch


@pytest.mark.parametrize(
    ("target", "patch", "result"),
    [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b"}, {"b": "c"}, {"a": "b", "b": "c"}),
        ({"a": "b"}, {"a": None}, {}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": "c"}, {"a": ["b"]}, {"a": ["b"]}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": [{"b": "c"}]}, {"a": [1]}, {"a": [1]}),
        (["a", "b"], ["c", "d"], ["c", "d"]),
        ({"a": "b"}, ["c"], ["c"]),
        ({"a": "foo"}, None, None),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ],
)
def test_the_examples_of_the_rfc(target: Any, patch: Any, result: Any) -> None:
    assert merge(target, patch) == result


def test_items_with_names_are_merged_by_name() -> None:
    containers = [{"name": "worker", "image": "i", "env": [{"name": "A", "value": "1"}]}]
    patch = [
        {"name": "worker", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
        {"name": "side", "image": "s"},
    ]
    assert merge(containers, patch) == [
        {"name": "worker", "image": "i", "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}]},
        {"name": "side", "image": "s"},
    ]


def test_items_without_names_replace_the_list() -> None:
    assert merge([{"key": "a"}], [{"key": "b"}]) == [{"key": "b"}]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "cannot be read: No such file"),
        (b"\xff", "not UTF-8 text"),
        (b"a: [", "not YAML"),
        (b"- a\n", "not a mapping"),
        (b"", "not a mapping"),
        (b"kind: Job\n", "the job has no Job"),
        (b"metadata: {name: other}\n", "it changes metadata.name"),
    ],
)
def test_an_invalid_patch_is_an_error(text: bytes | None, says: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "p.yaml").write_bytes(text)
    with pytest.raises(UsageError, match=says):
        read_patch(str(tmp_path / "p.yaml"), ["MPIJob"])
