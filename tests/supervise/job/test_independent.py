"""Instances, with a fake clock: if one fails, the others continue."""

from __future__ import annotations

from signal import SIGINT, SIGTERM
from typing import Any

import pytest
from support.played import Played, running

from cpulaunch import messages, wire
from cpulaunch.supervise.job.events import HideStderr


def instances(**different: Any) -> Played:
    return running("localhost", "localhost", "localhost", launcher="local", independent=True, **different)


def none_was_ended(job: Played, *ranks: int) -> bool:
    return not any(job.sent(rank, messages.End) for rank in ranks)


def test_an_instance_that_raises_is_named_and_the_others_continue() -> None:
    job = instances()
    job.raises(1, "ValueError: x")
    job.exits(1, 1)
    job.until(60.0)
    assert none_was_ended(job, 0, 2)
    assert job.told == ["instance 1 on localhost failed: ValueError: x at train.py:5; the others go on"]
    assert job.of(HideStderr) == [(2.0, HideStderr(1))]
    job.exits(0)
    job.exits(2)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code) == ("error", 1)
    assert [rank.status for rank in outcome.ranks] == ["exit 0", "exit 1", "exit 0"]


@pytest.mark.parametrize(
    ("end", "said", "code"), [({"code": 3}, "exit code 3", 3), ({"code": None, "signal": 11}, "SIGSEGV", 139)]
)
def test_the_job_has_the_exit_code_of_the_first_failure(end: dict[str, Any], said: str, code: int) -> None:
    job = instances()
    job.exits(2, **end)
    job.until(5.0)
    job.exits(0, 9)
    job.until(10.0)
    job.exits(1)
    assert job.outcome().exit_code == code
    assert job.told == [
        f"instance 2 on localhost failed: {said}; the others go on",
        "instance 0 on localhost failed: exit code 9; 1 other goes on",
    ]


def test_if_all_instances_fail_alike_none_continues() -> None:
    job = instances()
    for rank in range(3):
        job.raises(rank, "ModuleNotFoundError: No module named 'x'")
    for rank in range(3):
        job.exits(rank, 1)
    assert job.told == []  # the box reports it


def test_a_failure_of_the_last_instance_says_nothing_about_others() -> None:
    job = instances()
    job.exits(0)
    job.exits(1)
    job.exits(2, 1)
    assert job.told == []
    assert job.outcome().exit_code == 1


def test_equal_failures_at_about_the_same_time_are_one_line() -> None:
    job = instances()
    for rank in (0, 2):
        job.exits(rank, 3)
    assert job.told == []
    job.until(5.0)
    assert job.told == ["instances 0,2 on localhost failed: exit code 3; the other goes on"]
    job.exits(1)
    assert len(job.told) == 1


def test_an_instance_that_has_raised_counts_as_failed_before_it_exits() -> None:
    job = instances()
    job.exits(2)
    job.raises(0, "ValueError: x")
    job.raises(1, "KeyError: 'x'")
    job.exits(1, 1)
    job.until(5.0)
    assert job.told == ["instance 1 on localhost failed: KeyError: 'x' at train.py:5"]
    job.exits(0, 1)
    assert job.told[1:] == ["instance 0 on localhost failed: ValueError: x at train.py:5"]


def test_the_other_instances_outlive_a_killed_agent() -> None:
    job = instances()
    job.disconnects(0)
    job.until(5.0)
    assert none_was_ended(job, 1, 2)
    job.exits(1)
    job.exits(2)
    assert job.outcome().exit_code == 137


def test_errors_of_differing_operations_start_no_inquiry() -> None:
    job = instances()
    job.raises(0, "RuntimeError: [/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.3]:1")
    job.exits(0, None, 6)
    job.until(5.0)
    assert not job.sent(1, messages.AskDump)
    assert none_was_ended(job, 1, 2)


def test_a_silent_host_ends_the_job() -> None:
    job = running("node0", "node1", independent=True)
    job.falls_silent(1)
    job.until(12.0)
    assert [end.signal for _, end in job.sent(0, messages.End)] == [SIGTERM]


def test_the_first_failure_is_the_cause() -> None:
    job = instances()
    job.raises(1, "ConnectionRefusedError: [Errno 111] Connection refused")
    job.exits(1, 7)
    job.until(5.0)
    job.raises(0, "ValueError: x")
    job.exits(0, 1)
    job.exits(2)
    assert job.outcome().exit_code == 7


def test_with_fail_fast_the_others_are_ended() -> None:
    job = instances(go_on=False)
    job.raises(1, "ValueError: x")
    assert [len(job.sent(rank, messages.End)) for rank in (0, 2)] == [1, 1]
    job.exits(1, 1)
    job.obeys(0, 2)
    assert job.told == []
    assert job.statuses() == ["ended by launcher", "exit 1", "ended by launcher"]


def test_the_users_signal_ends_all() -> None:
    job = instances()
    job.user_sends(SIGINT)
    assert [len(job.sent(rank, messages.End)) for rank in range(3)] == [1, 1, 1]
    assert job.told[0].startswith("SIGINT: ending all instances, ")


def test_stated_metrics_are_in_the_outcome() -> None:
    job = instances()
    for rank in range(3):
        line = b"CPULAUNCH_METRIC throughput=%d samples/s\n" % (100 + rank)
        job.says(rank, messages.Output(1, wire.pack(line)))
        job.says(rank, messages.Output(2, wire.pack(line.replace(b"throughput", b"on_stderr"))))
        job.says(rank, messages.Output(1, wire.pack(b"CPULAUNCH_METRIC broken\n")))
        job.exits(rank)
    (metric,) = job.outcome().metrics
    assert (metric.name, metric.total, metric.ranks) == ("throughput", 303, 3)
    (note,) = job.told
    assert note.startswith("localhost: instances 0-2 printed a metric that can't be read: expected ")
    assert note.endswith("; it was 'CPULAUNCH_METRIC broken'")


def test_a_metric_on_an_unfinished_last_line_counts_unless_the_program_was_killed() -> None:
    job = instances()
    for rank in range(3):
        job.says(rank, messages.Output(1, wire.pack(b"CPULAUNCH_METRIC x=%d ms" % rank)))
    job.exits(0)
    job.exits(1)
    job.exits(2, code=None, signal=9)
    (metric,) = job.outcome().metrics
    assert (metric.ranks, metric.most) == (2, 1)
