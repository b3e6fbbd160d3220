"""The machine drawn in text: some whole pictures, in ``pictures/``, and properties of all of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support.command import REPOSITORY
from support.machines import MACHINES, machine

from cpulaunch.plan.binding import bind
from cpulaunch.plan.picture import Look, picture
from cpulaunch.plan.request import BindingRequest

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
GREY = "\x1b[90m"


def drawn(name: str, request: BindingRequest | None = None, **options: Any) -> str:
    topology = machine(name)
    return picture(topology, bind(topology, request or BindingRequest()).ranks, **options)


@pytest.mark.parametrize(
    ("file", "name", "request_", "options"),
    [
        ("2x28-four-ranks", "xeon-2x28", BindingRequest(ranks=4, dedicate_workers=False), {}),
        ("2x28-three-ranks-ascii", "xeon-2x28", BindingRequest(ranks=3), {"look": Look(unicode=False)}),
        (
            "2x28-workers-on-siblings",
            "xeon-2x28",
            BindingRequest(ranks=4, worker_count=2, ccl_logical_cores=True),
            {},
        ),
        ("2x128-sixteen-ranks", "xeon-2x128", BindingRequest(ranks=16, cores_per_rank=15), {}),
        ("hybrid", "i9-8p-8e", BindingRequest(ranks=2), {}),
        ("alternating", "xeon-2x8-alternating", BindingRequest(ranks=3), {}),
        ("memory-only-nodes", "xeon-max-hbm", BindingRequest(), {}),
        ("oversubscribed", "vm-8-adjacent", BindingRequest(ranks=6, oversubscribe=True, worker_count=1), {}),
        ("quota-narrow", "container-quota", BindingRequest(), {"width": 50}),
    ],
)
def test_a_picture_equals_the_golden_text(
    file: str, name: str, request_: BindingRequest, options: dict[str, Any]
) -> None:
    assert drawn(name, request_, **options) + "\n" == (
        Path(__file__).parent / "pictures" / f"{file}.txt"
    ).read_text("utf-8")


def test_the_documentation_shows_this_picture() -> None:
    drawn_there = (Path(__file__).parent / "pictures" / "2x28-four-ranks.txt").read_text("utf-8")
    assert drawn_there in (REPOSITORY / "docs" / "placement.md").read_text("utf-8")


@pytest.mark.parametrize("width", [50, 80, 132])
@pytest.mark.parametrize("name", MACHINES)
def test_lines_fit_the_width_and_boxes_are_closed(name: str, width: int) -> None:
    for request in (BindingRequest(), BindingRequest(logical_cores=True, e_cores=True)):
        lines = drawn(name, request, width=width).splitlines()
        assert max(map(len, lines)) <= width
        assert {len(line) for line in lines if line[0:1] in ("│", "┌", "└")} == {width}


@pytest.mark.parametrize("name", MACHINES)
def test_every_core_has_one_cell(name: str) -> None:
    """Each row is labelled with its first and last CPU; the cells between them add up to the cores."""
    boxes = drawn(name, BindingRequest(dedicate_workers=False)).split("each number")[0]
    rows = re.findall(r"│ │ +\d+(?:-\d+)? (.*) │ │", boxes)
    assert sum(len(row.split()) for row in rows) == len(machine(name).cores)


@pytest.mark.parametrize("name", MACHINES)
def test_colour_changes_nothing_else_in_the_picture(name: str) -> None:
    coloured = drawn(name, look=Look(colour=True))
    assert ESCAPE.search(coloured)
    assert ESCAPE.sub("", coloured) == drawn(name)


@pytest.mark.parametrize("name", MACHINES)
def test_without_unicode_it_is_ascii(name: str) -> None:
    assert drawn(name, look=Look(unicode=False)).isascii()


def test_neighbouring_ranks_differ_in_colour_and_idle_cores_are_grey() -> None:
    coloured = drawn("xeon-2x28", BindingRequest(ranks=3), look=Look(colour=True))
    colours = {rank: set(re.findall(rf"\x1b\[(\d+)m{rank} ", coloured)) for rank in "012"}
    assert all(len(each) == 1 for each in colours.values())
    assert len(set.union(*colours.values())) == 3
    assert coloured.count(f"{GREY}·  ") == 2
