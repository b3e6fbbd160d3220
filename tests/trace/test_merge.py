"""Several ranks' traces become one: rows, times, arrows."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from trace.recorded import Recorded, merged
from typing import Any

import pytest
from support.traced import check_format

from cpulaunch.trace import read as reading
from cpulaunch.trace.files import merge_files
from cpulaunch.trace.merge import SourceError, document, merge
from cpulaunch.trace.read import TraceError


def named(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["name"] == name]


def test_each_rank_is_a_row_with_its_host_and_its_steps() -> None:
    events, _ = merged(Recorded(0, "node0").add("aten::mm", 10, 5), Recorded(1, "node1", steps=1))
    rows = {event["pid"]: event["args"]["name"] for event in named(events, "process_name")}
    assert rows == {1: "rank 0 · node0", 2: "rank 1 · node1"}
    steps = [(event["pid"], event["name"]) for event in events if event.get("cat") == "step"]
    assert steps == [(1, "step 10"), (1, "step 11"), (2, "step 10")]
    (mm,) = named(events, "aten::mm")
    assert (mm["pid"], mm["ts"], mm["dur"], mm["args"]) == (1, 10.0, 5, {})


def test_times_are_converted_to_the_launchers_clock() -> None:
    """Events that happen at the same time have the same time in the trace, although the hosts' clocks differ."""
    one = Recorded(0, "a", ahead=3.25).add("aten::mm", 100, 5)
    other = Recorded(1, "b", ahead=-700.0).add("aten::mm", 130, 5)
    events, ranks = merged(one, other)
    assert [event["ts"] for event in named(events, "aten::mm")] == [100.0, 130.0]
    assert [rank.begin for rank in ranks] == [0.0, 0.0]


def test_a_step_ends_before_the_next_begins() -> None:
    """Differences of clocks are the means of two times, so half of them end in half a nanosecond."""
    late = [Recorded(rank, length=91.003 * rank, ahead=-(rank + 0.5) / 1e9) for rank in range(1, 99)]
    check_format(merged(Recorded(0), *late)[0])


def test_threads_with_the_same_number_on_two_hosts_are_distinct() -> None:
    events, _ = merged(*(Recorded(rank).add("aten::mm", 1, 1, thread=7) for rank in range(2)))
    assert len({event["tid"] for event in named(events, "aten::mm")}) == 2


def test_arrows_join_the_same_collective_of_all_ranks() -> None:
    """Arrows follow the order in which ranks joined.  A rank that waited has the awaited rank and time."""
    ranks = [
        Recorded(rank).collective("all_reduce", at, 600 - at, 41).collective("all_reduce", 700, 10, 42)
        for rank, at in enumerate((100, 500, 300))
    ]
    events, _ = merged(*ranks)
    arrows = [event for event in events if event["ph"] in "stf" and event["id"] == 0]
    assert [(event["ph"], event["pid"], event["ts"]) for event in arrows] == [
        ("s", 1, 100.0),
        ("t", 3, 300.0),
        ("f", 2, 500.0),
    ]
    slices = {
        (event["pid"], event["args"]["number"]): event for event in events if event.get("cat") == "collective"
        and event["ph"] == "X"
    }  # fmt: skip
    assert all(event["tid"] == slices[event["pid"], 41]["tid"] for event in arrows)
    assert slices[1, 41]["args"] == {
        "group": "0", "number": 41, "waited for rank": 1, "waited (ms)": 0.4
    }  # fmt: skip
    assert "waited (ms)" not in slices[2, 41]["args"]


def test_groups_are_kept_apart() -> None:
    """Two pairs of ranks call the same operation at the same time, each in its own group."""
    ranks = [Recorded(rank).collective("all_reduce", 100, 50, 1, str(rank // 2)) for rank in range(4)]
    events, _ = merged(*ranks)
    arrows: dict[int, set[int]] = {}
    for event in events:
        if event["ph"] in "stf":
            arrows.setdefault(event["id"], set()).add(event["pid"])
    assert sorted(map(sorted, arrows.values())) == [[1, 2], [3, 4]]


def test_in_a_single_group_missing_numbers_are_interpolated() -> None:
    """A rank's records have only the last operations of a step."""
    ranks = []
    for rank in range(2):
        ranks.append(recorded := Recorded(rank))
        for index in range(6):
            recorded.collective("all_reduce", 100 * index, 50, 30 + index if index in (2, 5) else None)
    _, traces = merged(*ranks)
    for trace in traces:
        assert [each.key for each in trace.collectives] == [("ccl", "0", 30 + index) for index in range(6)]


def test_records_of_ccl_have_their_own_names() -> None:
    """torch's profiler has the name _all_gather_base where the ledger has all_gather_into_tensor."""
    ranks = []
    for rank in range(2):
        ranks.append(recorded := Recorded(rank))
        for index in range(4):
            recorded.collective("_all_gather_base", 200 * index, 50, index, str(index % 2))
        recorded.notes = [(*note[:3], "all_gather_into_tensor", note[4]) for note in recorded.notes]
    _, traces = merged(*ranks)
    for trace in traces:
        assert [each.key for each in trace.collectives] == [("ccl", str(n % 2), n) for n in range(4)]


def test_a_rank_that_was_late_is_joined_by_number_not_by_order() -> None:
    early, late = Recorded(0), Recorded(1)
    for index in range(4):
        early.collective("all_reduce", 200 * index, 50, index)
        if index:
            late.collective("all_reduce", 200 * index + 20, 30, index)
    _, (first, second) = merged(early, late)
    assert [each.last for each in first.collectives] == [None, 220.0, 420.0, 620.0]
    assert [each.last for each in second.collectives] == [220.0, 420.0, 620.0]


def test_overlapping_collectives_have_separate_rows() -> None:
    """Perfetto shows overlapping events of a row as nested."""
    recorded = Recorded(0)
    for index in range(3):
        recorded.collective("all_reduce", 100 * index, 150, index)
    events, _ = merged(recorded)
    slices = [event for event in events if event.get("cat") == "collective"]
    assert len({event["tid"] for event in slices}) == 2
    assert slices[0]["tid"] == slices[2]["tid"]


def test_events_before_the_first_step_are_left_out() -> None:
    events, _ = merged(Recorded(0).add("aten::mm", -50, 20).add("aten::mm", 50, 20))
    assert [event["ts"] for event in named(events, "aten::mm")] == [50.0]


def test_a_file_is_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces may end anywhere."""
    text = Recorded(0).add("aten::mm", 1, 1, shape="[1, {]").text()
    whole = list(reading.read(io.StringIO(text))[1])
    for size in (1, 7, 100):
        monkeypatch.setattr(reading, "CHUNK", size)
        assert list(reading.read(io.StringIO(text))[1]) == whole


@pytest.mark.parametrize(
    "text", ["", "{}", '{"traceEvents": [', "\0" * 9, "[1, 2]", '{"traceEvents": [{"ph"']
)
def test_an_invalid_trace_is_reported(text: str) -> None:
    with pytest.raises(TraceError):
        merge([Recorded(0).source(text)], lambda event: None)


def test_a_truncated_trace_is_reported() -> None:
    text = Recorded(0).add("aten::mm", 1, 1).text()
    with pytest.raises(SourceError, match="ends early") as raised:
        merge([Recorded(0).source(), Recorded(1).source(text[:-150])], lambda event: None)
    assert raised.value.rank == 1


def test_the_document_is_json() -> None:
    file = io.StringIO()
    write, end = document(file)
    for name in ("a", 'b"'):
        write({"ph": "X", "name": name})
    end()
    assert [event["name"] for event in json.loads(file.getvalue())["traceEvents"]] == ["a", 'b"']


@pytest.mark.parametrize("noun", ["rank", "instance"])
def test_broken_files_are_left_out_of_the_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noun: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reading, "CHUNK", 1000)
    rows = []
    for rank in range(3):
        recorded = Recorded(rank)
        for at in range(200):
            recorded.add("aten::mm", at, 1)
        packed = gzip.compress(recorded.text().encode())
        (tmp_path / f"{rank}.part").write_bytes(packed if rank != 1 else packed[: -len(packed) // 4])
        rows.append({"rank": rank, "host": "h", "file": f"{rank}.part", "clock": 0.0, "uncertain": 0.0})
    missing = {"3": "its agent has gone"}
    brief, text = merge_files({"stem": "trace", "noun": noun, "ranks": rows, "missing": missing})
    first, one, three, *advice = brief
    assert [one.startswith(f"{noun} 1 is missing"), three.startswith(f"{noun} 3 is missing")] == [True, True]
    assert advice
    assert text.startswith("\n".join([first, one, three, "", *advice]))
    assert f"of 2 {noun}s: " in first
    assert f"{noun} 1 is missing: its trace is incomplete" in text
    assert f"{noun} 3 is missing: its agent has gone" in text
    assert text == (tmp_path / "trace.txt").read_text()
    with gzip.open("trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert {event["pid"] for event in events} == {1, 3}
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == [f"{noun} 0 · h", f"{noun} 2 · h"]
    summary = json.loads((tmp_path / "trace.summary.json").read_text())
    assert [each["rank"] for each in summary["ranks"]] == [0, 2]
    assert (tmp_path / "trace.json.gz").stat().st_mode & 0o777 == 0o600
    assert not (tmp_path / "trace.part").exists()
