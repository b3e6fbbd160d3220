"""Hostfiles and lists of hosts."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpulaunch.discovery.batch.allocation import read_hostfile
from cpulaunch.errors import ConfigError
from cpulaunch.model.hosts import Host, fold_hosts, parse_hostfile, parse_hosts, without


def shown(hosts: tuple[Host, ...]) -> str:
    return " ".join(f"{host.name}*{host.slots}" if host.slots else host.name for host in hosts)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a\nb\n", "a b"),
        ("a:2\nb:3", "a*2 b*3"),
        ("a slots=2\nb  slots=3  ", "a*2 b*3"),
        ("a slots=2 max_slots=4\nb max-slots=3\nc max_slots=2 slots=1", "a*2 b*3 c*1"),
        ("# all of them\n\na:2 # the fast one\n\n", "a*2"),
        ("a\r\nb slots=4\r\n", "a b*4"),
        ("\ufeffa\n", "a"),
        ("10.0.0.1\n10.0.0.2:8\n", "10.0.0.1 10.0.0.2*8"),
        ("fd00::1\n[fd00::2]\n[fd00::3]:4\nfd00::4 slots=2", "fd00::1 fd00::2 fd00::3*4 fd00::4*2"),
        ("node[01-03,07]:2", "node01*2 node02*2 node03*2 node07*2"),
        ("rack[1-2]n[8-9]x", "rack1n8x rack1n9x rack2n8x rack2n9x"),
        ("cn-1.example.org slots=128", "cn-1.example.org*128"),
    ],
)
def test_hostfiles(text: str, hosts: str, tmp_path: Path) -> None:
    (file := tmp_path / "hosts").write_text(text, newline="")
    assert shown(read_hostfile(file)) == hosts


@pytest.mark.parametrize(
    ("text", "where", "part"),
    [
        ("", "names no host", None),
        ("a\nb\na:2\n", "hosts:3: a is named twice, first at hosts:1", "a"),
        ("a slots=0", "hosts:1: '0' is not a number of slots", "slots=0"),
        ("a:0", "hosts:1", "a:0"),
        ("a slots=two", "hosts:1", "slots=two"),
        ("a slots=2 cpus=4", "'cpus=4' after the host 'a'", "cpus=4"),
        ("a slots=2 slots=4", "'slots=4' after the host 'a'", "slots=4"),
        ("a max_slots=2 max-slots=4", "'max-slots=4' after the host 'a'", "max-slots=4"),
        ("a max_slots=0", "hosts:1: '0' is not a number of slots", "max_slots=0"),
        ("a slots=3 max_slots=2", "hosts:1: 3 slots exceed max_slots, which is 2", "slots=3 max_slots=2"),
        ("ok\na 4\n", "hosts:2: '4' after the host 'a'", "4"),
        ("a,b", "is not a host's name or address", "a,b"),
        ("user@a", "is not a host's name or address", "user@a"),
        ("-oProxyCommand=x", "is not a host's name or address", "-oProxyCommand=x"),
        ("node[1-", "'[' without ']'", "node[1-"),
        ("[fd00::7", "'[fd00::7': '[' without ']'", "[fd00::7"),
        ("[fd00::7:2", "'[fd00::7:2': '[' without ']'", "[fd00::7:2"),
        ("node[4-1]", "is empty", "4-1"),
        ("a:65537", "hosts:1: 65537 slots exceed 65536, the maximum ranks of a job", "a:65537"),
        ("n[1-9999999]", "'1-9999999' in 'n[1-9999999]' has a number of more than 6 digits", "1-9999999"),
        ("node[1-x]", "is not a range", "1-x"),
        ("node[0-999999]", "expands to more than 100000 hosts", "node[0-999999]"),
        ("rack[1-999][1-999]", "expands to more than 100000 hosts", "rack[1-999][1-999]"),
        ("a[1-50000]\nb[1-50001]", "hosts:2: more than 100000 hosts", "b50001"),
    ],
)
def test_errors_of_a_hostfile_have_their_place(text: str, where: str, part: str | None) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile(text, "hosts")
    assert where in str(caught.value)
    assert caught.value.part == part


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a", "a"),
        ("a,b:2", "a b*2"),
        ("a, b", "a b"),
        ("node[1-3,5]:2,login", "node1*2 node2*2 node3*2 node5*2 login"),
        ("[fd00::1]:2,10.0.0.7", "fd00::1*2 10.0.0.7"),
    ],
)
def test_inline_hosts(text: str, hosts: str) -> None:
    assert shown(parse_hosts(text, "--hosts")) == hosts


@pytest.mark.parametrize("text", ["", ",", "a,", "a,,b", "a,a", "a:0", "a b"])
def test_wrong_inline_hosts(text: str) -> None:
    with pytest.raises(ConfigError, match="--hosts"):
        parse_hosts(text, "--hosts")


@given(st.integers(0, 500), st.integers(0, 60), st.integers(1, 4))
def test_a_range_equals_its_numbers(first: int, more: int, width: int) -> None:
    text = f"n[{first:0{width}d}-{first + more}]"
    names = [host.name for host in parse_hosts(text, "--hosts")]
    assert names == [f"n{number:0{width}d}" for number in range(first, first + more + 1)]


def test_exclude() -> None:
    hosts = parse_hosts("node[1-5]:2", "--hosts")
    assert shown(without(hosts, "node[2-3],node5", "--exclude")) == "node1*2 node4*2"
    with pytest.raises(ConfigError, match="--exclude: nod2 is not among the hosts; did you mean 'node2'"):
        without(hosts, "nod2", "--exclude")


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("node1 node2 node3 node7 login", "node[1-3,7], login"),
        ("n09 n10 n11", "n[09-11]"),
        ("n9 n10", "n[9-10]"),
        ("n9 n010", "n[9,010]"),
        ("r1n1 r1n2 r2n1", "r1n[1-2], r2n1"),
        ("a1-ib a2-ib", "a[1-2]-ib"),
        ("10.0.0.1 10.0.0.2", "10.0.0.[1-2]"),
        ("::1 ::2", "::1, ::2"),
        ("n1 m1 n2", "n1, m1, n2"),
        ("n3 n2 n1", "n[3,2,1]"),
        ("a b c d e f", "a, b, c, d and 2 more"),
    ],
)
def test_names_are_folded_as_in_lists(names: str, text: str) -> None:
    assert fold_hosts(names.split()) == text
    if "more" not in text:
        assert [host.name for host in parse_hosts(text, "list")] == names.split()
