"""`cpulaunch topology` draws a machine with the ranks on it."""

from __future__ import annotations

from support.command import REPOSITORY, Run

PLANS = REPOSITORY / "tests" / "plan"
WIDE = {"COLUMNS": "81", "LANG": "C.UTF-8", "LC_ALL": ""}


def test_the_machine_that_lscpu_describes_is_drawn(cpulaunch: Run) -> None:
    done = cpulaunch("topology", "-ppn", "4", "--lscpu", PLANS / "2x28.lscpu", env=WIDE)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (PLANS / "pictures" / "2x28-four-ranks.txt").read_text("utf-8")


def test_without_lscpu_this_machine_is_drawn(cpulaunch: Run) -> None:
    done = cpulaunch("topology", "-ppn", "1", "--cores", "0")
    assert done.returncode == 0, done.stderr
    assert " 1 rank\n" in done.stdout
    assert done.stdout.split("rank  threads")[1].split()[-1] == "0"


def test_ranks_that_do_not_fit_are_refused(cpulaunch: Run) -> None:
    done = cpulaunch("topology", "-ppn", "57", "--lscpu", PLANS / "2x28.lscpu")
    assert (done.returncode, done.stdout) == (2, "")
    assert "57 ranks" in done.stderr


def test_instances_are_drawn_like_ranks(cpulaunch: Run) -> None:
    drawn = ("topology", "--latency-mode", "--lscpu", PLANS / "2x28.lscpu")
    done = cpulaunch(*drawn, env=WIDE)
    assert done.returncode == 0, done.stderr
    assert " 14 instances\n" in done.stdout
    assert "instance  threads" in done.stdout
    one = cpulaunch(*drawn, "--instance", "3", env=WIDE)
    assert " 1 instance\n" in one.stdout
    assert [line.split()[0] for line in one.stdout.split("instance  threads")[1].splitlines()[1:]] == ["3"]
