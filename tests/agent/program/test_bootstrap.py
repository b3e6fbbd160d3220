"""The reports of a program's bootstrap to the agent, and the tracebacks that it shows."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpulaunch.agent.output import Reports
from cpulaunch.agent.program import bootstrap
from cpulaunch.agent.program.bootstrap import leaving_report, ready_report
from cpulaunch.messages import Leaving, Raised, Ready, Report, Unknown
from cpulaunch.wire import encode


@pytest.mark.parametrize("report", [Ready([]), Ready([0, 2, 17]), Leaving(0), Leaving(255)])
def test_reports_written_by_hand_equal_encoded_reports(report: Report) -> None:
    by_hand = ready_report(report.cpus) if isinstance(report, Ready) else leaving_report(report.code)  # type: ignore[union-attr]
    assert list(Reports().feed(by_hand)) == [report]
    assert [type(found) for found in Reports().feed(by_hand)] == [type(report)]


RAISED = Raised("ValueError: x", "train.py", 5, "Traceback …", "", None)


@pytest.mark.parametrize(
    ("pieces", "reports"),
    [
        ([encode(RAISED)], [RAISED]),
        ([encode(RAISED)[:7], encode(RAISED)[7:]], [RAISED]),
        ([leaving_report(0) + b'{"type":"step"}\n'], [Leaving(0), Unknown("step")]),
        ([b"nonsense\n", leaving_report(0)], [Leaving(0)]),
        ([b'{"type":"leaving"}\n', leaving_report(0)], [Leaving(0)]),
        ([leaving_report(1) + b"nonsense\nhalf a line", leaving_report(0)], [Leaving(1), Leaving(0)]),
    ],
)
def test_malformed_reports_are_ignored(pieces: list[bytes], reports: list[Report]) -> None:
    reader = Reports()
    assert [report for piece in pieces for report in reader.feed(piece)] == reports


def stands_in(fault: str) -> Callable[..., Any]:
    """Return a wrapper for a library's function that runs the code ``fault`` before each call."""
    code = f"def watch(original):\n def call(*args):\n  {fault}\n  return original(*args)\n return call\n"
    exec(compile(code, bootstrap._PACKAGE + "runtime/observe/communication.py", "exec"), names := {})
    return names["watch"]


@pytest.mark.parametrize(
    ("fault", "original", "shown"),
    [
        ("pass", int, ["users"]),
        ("pass", lambda text: int(text), ["users", "<lambda>"]),
        ("None.missing", int, ["users", "call"]),
    ],
    ids=["of C", "of Python", "at fault"],
)
def test_tracebacks_show_cpulaunchs_frames_only_if_the_error_is_there(
    fault: str, original: Callable[..., Any], shown: list[str]
) -> None:
    call = stands_in(fault)(original)

    def users() -> None:
        try:
            call("no number")
        except Exception as error:
            raise KeyError from error

    with pytest.raises(KeyError) as caught:
        users()
    cause = bootstrap._remove_own_frames(caught.value).__cause__
    assert cause
    assert [frame.name for frame in traceback.extract_tb(cause.__traceback__)] == shown


def test_very_deep_tracebacks_are_shown() -> None:
    def deep() -> None:
        deep()

    with pytest.raises(RecursionError) as caught:
        deep()
    assert len(traceback.extract_tb(bootstrap._remove_own_frames(caught.value).__traceback__)) > 100


def test_a_script_keeps_its_own_annotations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``from __future__ import annotations``, they are objects."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    script = tmp_path / "train.py"
    script.write_text("def step(count: int) -> None: ...\n")
    bootstrap._run_file(str(script))
    assert sys.modules["__main__"].step.__annotations__ == {"count": int, "return": None}
