"""Detection of a slow host by the beats of its ranks."""

from __future__ import annotations

from cpulaunch.messages import Beat
from cpulaunch.supervise.stalls.stragglers import Straggler, Stragglers

HOSTS = ["node0", "node0", "node1", "node1", "node2", "node2"]


def play(computing: list[float], step: float, rounds: int = 8, hosts: list[str] = HOSTS) -> list[Straggler]:
    """Let ranks compute for these times in each step, and wait for the rest of the step.

    They send a beat every 30 steps.
    """
    stragglers = Stragglers(hosts)
    found = []
    for number in range(rounds):
        steps = 10 + 30 * number
        for rank, seconds in enumerate(computing):
            beat = Beat(steps=steps, waiting=steps * (step - seconds))
            found += stragglers.beat(rank, beat, 5.0 + steps * step)
    return found


def test_a_slow_host_is_named_once_with_its_figures() -> None:
    (found,) = play([0.042] * 4 + [0.084] * 2, 0.090)
    assert str(found) == (
        "node2 is slower than the others: 84 ms of computing per step, the others 42 ms, over 120 steps"
    )
    assert found.rank == 4


def test_a_single_slow_rank_is_not_a_slow_host() -> None:
    assert not play([0.042] * 4 + [0.084, 0.042], 0.090, hosts=["a", "a", "b", "b", "b", "b"])


def test_a_difference_that_does_not_matter_is_not_named() -> None:
    assert not play([0.001] * 4 + [0.002] * 2, 0.090)


def test_equal_hosts_and_a_single_host_are_not_named() -> None:
    assert not play([0.042] * 6, 0.090)
    assert not play([0.042, 0.084], 0.090, hosts=["here", "here"])


def test_one_slow_window_is_not_named() -> None:
    stragglers = Stragglers(HOSTS)
    waited = dict.fromkeys(range(6), 0.0)
    found = []
    for number in range(1, 8):
        for rank in range(6):
            slow = rank >= 4 and number == 4
            waited[rank] += 50 * (0.006 if slow else 0.048)
            beat = Beat(steps=50 * number, waiting=waited[rank])
            found += stragglers.beat(rank, beat, 50 * number * 0.09)
    assert not found
