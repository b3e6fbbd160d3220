"""How spawners divide the hosts among themselves, and their messages."""

from __future__ import annotations

import pytest

from cpulaunch.agent.spawner.messages import (
    FAN_OUT,
    TO_CHILD,
    TO_PARENT,
    Ended,
    Host,
    Start,
    decode,
    encode,
    split_hosts,
)
from cpulaunch.wire import MessageError


def hosts(count: int) -> list[Host]:
    return [Host(f"node{number}", 2 * number, 2) for number in range(count)]


def depth(group: list[Host]) -> int:
    """The number of connections, one after the other, on the way to the farthest host of a group."""
    return 1 + max(map(depth, split_hosts(group[1:])), default=0)


@pytest.mark.parametrize(
    ("count", "deepest"), [(0, 0), (1, 1), (FAN_OUT, 1), (FAN_OUT + 1, 2), (1024, 2), (1057, 3)]
)
def test_more_hosts_than_the_fan_out_are_reached_through_other_hosts(count: int, deepest: int) -> None:
    groups = split_hosts(hosts(count))
    assert len(groups) <= FAN_OUT
    assert [host for group in groups for host in group] == hosts(count)
    assert max(map(depth, groups), default=0) == deepest


def test_any_environment_arrives_unchanged() -> None:
    env = {"LONG": "x" * 3_000_000, "BYTES": "\udcff", "LINES": "a\nb"}
    start = Start([list(host) for host in hosts(1)], 2, 0, ["agent"], ["ssh"], "exec agent", env)
    line = encode(start)
    assert line.index(b"\n") == len(line) - 1
    assert decode(line, TO_CHILD) == start


@pytest.mark.parametrize("line", [b"hello", b'{"type": "ended", "host": 1, "code": 0}', b'{"type": "later"}'])
def test_other_lines_are_not_messages(line: bytes) -> None:
    with pytest.raises(MessageError):
        decode(line, TO_PARENT)


def test_a_message_to_the_parent_is_an_error_for_a_child() -> None:
    assert decode(encode(Ended("a", 3)), TO_PARENT) == Ended("a", 3)
    with pytest.raises(MessageError):
        decode(encode(Ended("a", 3)), TO_CHILD)
