"""Effects of a batch system on a job, with srun's real messages and a fake clock."""

from __future__ import annotations

from signal import SIGINT, SIGTERM

import pytest
from support.played import GRACE, Played, running

from cpulaunch import messages
from cpulaunch.supervise.job.events import Finish

CANCELLED = "slurmstepd-node0: error: *** STEP 5.0 ON node0 CANCELLED AT 2026-11-23T05:54:36{} ***\n"


def under_srun() -> Played:
    return running(launcher="slurm")


def first_error(job: Played) -> str | None:
    return job.first_failure().error


@pytest.mark.parametrize(
    ("why", "said"),
    [("", "Slurm cancelled the step"), (" DUE TO TIME LIMIT", "Slurm cancelled the step due to time limit")],
)
def test_a_cancelled_step_explains_the_signals_that_its_ranks_got(why: str, said: str) -> None:
    job = under_srun()
    job.exits(1, None, 15, by_signal=15, cause={"kind": "agent_signaled", "signal": 15})
    job.process_says(CANCELLED.format(why))
    job.obeys(0, 2, 3)
    assert first_error(job) == said
    assert job.outcome().exit_code == 143


class TestAJobThatCanBeStartedAgain:
    @pytest.mark.parametrize(("steps", "code"), [(0, 75), (3, 143)])
    @pytest.mark.parametrize("whom", ["the launcher", "the agents"])
    def test_loses_nothing_before_its_first_step(self, whom: str, steps: int, code: int) -> None:
        job = under_srun()
        job.says(2, messages.Beat(steps=steps, keeps_ledger=True))
        if whom == "the launcher":
            job.user_sends(SIGTERM)
            job.obeys(0, 1, 2, 3)
        else:
            for rank in range(4):
                job.exits(rank, None, SIGTERM, by_signal=SIGTERM)
        assert job.outcome().exit_code == 143
        outcome = job.outcome().if_restartable()
        assert (outcome.exit_code, outcome.began) == (code, steps > 0)

    def test_has_failed_if_only_one_rank_got_a_signal(self) -> None:
        job = under_srun()
        job.exits(1, None, SIGTERM)
        job.obeys(0, 2, 3)
        assert job.outcome().if_restartable().exit_code == 143

    def test_has_failed_after_ctrl_c(self) -> None:
        job = under_srun()
        job.user_sends(SIGINT)
        job.obeys(0, 1, 2, 3)
        assert job.outcome().if_restartable().exit_code == 130


def test_a_rank_keeps_its_own_failure() -> None:
    job = under_srun()
    job.raises(1, "ValueError: x")
    job.exits(1, 1)
    job.process_says(CANCELLED.format(""))
    job.obeys(0, 2, 3)
    assert first_error(job) == "ValueError: x"


def test_a_step_that_cpulaunch_ends_is_not_reported_as_cancelled_by_slurm() -> None:
    job = under_srun()
    job.exits(1, None, 9)
    job.process_says("srun: forcing job termination\n" + CANCELLED.format(""))
    job.obeys(0, 2, 3)
    assert first_error(job) is None


@pytest.mark.parametrize("first", ["the node", "a rank"])
def test_a_node_that_was_set_down_is_lost_in_any_order_of_events(first: str) -> None:
    job = under_srun()
    if first == "a rank":
        job.exits(0, None, 15)
    job.process_says("srun: error: Node failure on node2\n" + CANCELLED.format(" DUE TO NODE FAILURE, SEE"))
    for rank in range(1 if first == "a rank" else 0, 4):
        job.exits(rank, None, 15)
    outcome = job.outcome()
    assert (outcome.kind, outcome.exit_code) == ("node_lost", 4)
    assert outcome.first_failure
    assert outcome.first_failure.host == "node2"
    assert job.state.lost_hosts == {"node2"}


class TestSrunIsKilled:
    def test_ranks_get_the_grace_period_to_end(self) -> None:
        job = under_srun()
        job.process_ends(-9)
        job.until(3.5)
        assert all(job.sent(rank, messages.End) for rank in range(4))
        assert not job.of(Finish)
        job.obeys(0, 1, 2, 3)
        assert (first_error(job), job.outcome().exit_code) == ("mpiexec got SIGKILL, not from cpulaunch", 137)

    def test_ranks_that_do_not_end_are_given_up(self) -> None:
        job = under_srun()
        job.process_ends(-9)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + 1.0 + GRACE + 2)
        assert job.statuses() == ["killed by launcher"] * 4

    def test_ranks_end_with_an_mpiexec(self) -> None:
        job = running(launcher="intel")
        job.process_ends(-9)
        job.to_the_end()
        assert job.now == pytest.approx(2.0 + 1.0)
