"""The messages between rank, agent and launcher."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cpulaunch import messages, wire
from cpulaunch.messages import FROM_AGENT, FROM_LAUNCHER, FROM_RANK, Message, Unknown
from cpulaunch.wire import MAX_LINE, MAX_OUTPUT, MAX_TEXT, Lines, MessageError, decode, encode, pack, unpack

ALL: list[tuple[Message, Any]] = [
    (messages.Ready([0, 2]), FROM_RANK),
    (messages.Torch(4, "4"), FROM_RANK),
    (messages.Raised("ValueError: x", "train.py", 5, "Traceback …", "", {"kind": "exception"}), FROM_RANK),
    (messages.Raised("ValueError: x", None, None, "", "Do this.", None), FROM_RANK),
    (messages.Aborts([{"id": 1, "name": "MainThread", "frames": [["f", "train.py", 5]]}]), FROM_RANK),
    (messages.Leaving(3), FROM_RANK),
    (messages.Resumes(300), FROM_RANK),
    (messages.Saves(300, leaves=True), FROM_RANK),
    (messages.SavesAt([15, 10]), FROM_RANK),
    (messages.Traces(1, 12), FROM_RANK),
    (messages.HasTraced(1, 12, 14, ""), FROM_RANK),
    (messages.Hello(1, 0, "salt", "proof", 1.5, 4711, "node0"), FROM_AGENT),
    (messages.Started(4711, "0-3", "", 4, ["a note", "another"]), FROM_AGENT),
    (messages.Output(2, "text \udcff\n"), FROM_AGENT),
    (messages.Beat(), FROM_AGENT),
    (messages.Beat(7, 140, 0.5, 1.25, True, 4096, 12.5, True, 12.25, True), FROM_AGENT),
    (messages.Dump(3, 12.5, [{"name": "0"}], [{"pid": 4711}], ""), FROM_AGENT),
    (messages.Time(1.5), FROM_AGENT),
    (messages.Failure("ValueError: x", "train.py", 5, "T", "Do this.", None, 1.5, True, []), FROM_AGENT),
    (messages.Found("0", None, ["/lib/x.so"], None), FROM_AGENT),
    (messages.Found("0", "default", None, 4), FROM_AGENT),
    (messages.Note("mind the gap"), FROM_AGENT),
    (messages.Resumed(300), FROM_AGENT),
    (messages.Saved(300, leaves=False), FROM_AGENT),
    (messages.Steps(12.5, [[7, 1, 12.25, [0.084]]], {"rss": 4096}, 1e12, "bf16"), FROM_AGENT),
    (messages.Tracing(1, 12), FROM_AGENT),
    (messages.Traced(1, 12, 14, 4096, ""), FROM_AGENT),
    (messages.TracePiece(1, "H4sI" * 10_000, True, ""), FROM_AGENT),
    (messages.Refused("no such CPU"), FROM_AGENT),
    (messages.Receipt(12), FROM_AGENT),
    (messages.Exit(None, 9, 1.5, False, 15, {"kind": "killed"}), FROM_AGENT),
    (messages.Exit(3, None, 1.5, False, 0, None, True, [{"name": "0"}]), FROM_AGENT),
    (messages.Challenge("salt"), FROM_LAUNCHER),
    (messages.Welcome("proof"), FROM_LAUNCHER),
    (messages.LauncherReceipt(12), FROM_LAUNCHER),
    (messages.AskTime(), FROM_LAUNCHER),
    (messages.AskProgress(), FROM_LAUNCHER),
    (messages.AskDump(3, True), FROM_LAUNCHER),
    (messages.End(15, 10.0, True), FROM_LAUNCHER),
    (messages.Trace(1, 12, 14), FROM_LAUNCHER),
    (messages.SendTrace(1), FROM_LAUNCHER),
    (messages.Release(), FROM_LAUNCHER),
]


@pytest.mark.parametrize(("message", "kinds"), ALL, ids=lambda each: type(each).__name__)
def test_a_message_round_trips(message: Message, kinds: Any) -> None:
    line = encode(message)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    arrived = decode(line.rstrip(), kinds)
    assert type(arrived) is type(message)
    assert arrived == message


def test_every_kind_of_message_is_tested() -> None:
    assert {type(message) for message, _ in ALL} == set(messages.KINDS)


def test_a_kind_has_one_direction() -> None:
    assert len({*FROM_RANK, *FROM_AGENT, *FROM_LAUNCHER}) == len(messages.KINDS)


@pytest.mark.parametrize(("message", "kinds"), ALL, ids=lambda each: type(each).__name__)
def test_messages_of_another_direction_are_refused(message: Message, kinds: Any) -> None:
    kind = messages.KINDS[type(message)]
    for others in (FROM_RANK, FROM_AGENT, FROM_LAUNCHER):
        if others is not kinds:
            assert decode(encode(message), others) == Unknown(kind)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[1]", "not a message"),
        (b"{}", "not a message"),
        (b'{"type":7}', "not a message"),
        (b'{"type":"note"}', "note without note"),
        (b'{"type":"note","note":7}', "note whose note is '7'"),
        (b'{"type":"note","note":null}', "note whose note is 'None'"),
        (b'{"type":"output","stream":true,"data":""}', "output whose stream is 'True'"),
        (b'{"type":"output","stream":1.0,"data":""}', "output whose stream is '1.0'"),
        (b'{"type":"exit","code":"0"}', "exit whose code is '0'"),
        (b'{"type":"started","pid":1,"cores":"","comm_cores":"","threads":1,"notes":[1]}', "whose notes is"),
        (b'{"type":"started","pid":1,"cores":"","comm_cores":"","threads":1,"notes":"x"}', "whose notes is"),
    ],
)
def test_an_invalid_message_is_an_error(line: bytes, why: str) -> None:
    with pytest.raises(MessageError, match=why.replace("[", r"\[")):
        decode(line, FROM_AGENT)


def test_an_unknown_kind_of_message_is_kept() -> None:
    assert decode(b'{"type":"stall","rank":7}', FROM_AGENT) == Unknown("stall")
    assert decode(json.dumps({"type": "x" * 1000}).encode(), FROM_AGENT) == Unknown("x" * wire.MAX_KIND)


def test_fields_of_later_versions_are_ignored() -> None:
    assert decode(b'{"type":"note","note":"x","urgent":true}', FROM_AGENT) == messages.Note("x")


def test_fields_that_an_earlier_version_lacks_have_their_defaults() -> None:
    assert decode(b'{"type":"beat","steps":3}', FROM_AGENT) == messages.Beat(3)
    assert decode(b'{"type":"end","signal":15,"grace":1.0}', FROM_LAUNCHER) == messages.End(15, 1.0)


def test_an_int_is_accepted_as_a_float() -> None:
    assert decode(b'{"type":"end","signal":15,"grace":10,"failed":false}', FROM_LAUNCHER) == messages.End(
        15, 10
    )


@pytest.mark.parametrize("character", ["x", "é", "\U0001f600", "\udcff", "\0"])
def test_no_text_is_too_long_for_a_line(character: str) -> None:
    long = character * (1 << 20)
    failure = decode(
        encode(messages.Failure(long, long, 1, long + "end", "", None, 0.0, False, [])), FROM_AGENT
    )
    assert isinstance(failure, messages.Failure)
    assert len(failure.traceback) == MAX_TEXT
    assert failure.traceback.endswith("end")


@pytest.mark.parametrize(
    "data", [b"", b"plain", "é☃".encode(), "é".encode()[:1], bytes(range(256)), b"\0" * MAX_OUTPUT]
)
def test_any_output_survives(data: bytes) -> None:
    line = encode(messages.Output(1, pack(data)))
    assert len(line) < MAX_LINE
    output = decode(line, FROM_AGENT)
    assert isinstance(output, messages.Output)
    assert unpack(output.data) == data


@pytest.mark.parametrize(
    ("pieces", "lines", "rest"),
    [
        ([b"a\nb\n"], [b"a", b"b"], b""),
        ([b"a", b"b\nc"], [b"ab"], b"c"),
        ([b"\n\n"], [b"", b""], b""),
        ([b""], [], b""),
    ],
)
def test_lines_are_split_in_pieces_of_any_size(pieces: list[bytes], lines: list[bytes], rest: bytes) -> None:
    cutter = Lines()
    assert [line for piece in pieces for line in cutter.feed(piece)] == lines
    assert cutter.rest == rest


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_line_that_is_too_long_is_refused(end: bytes) -> None:
    with pytest.raises(MessageError, match=f"a line of more than {MAX_LINE} bytes"):
        list(Lines().feed(b"x" * (MAX_LINE + 1) + end))
