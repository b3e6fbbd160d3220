"""A job's directory belongs to it alone: no one can prepare it, or redirect its files."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from support.command import TIMEOUT
from support.jobs import job
from support.plans import make
from support.programs import UNTIL_TOLD

from cpulaunch.cli.run.command import _job_directory
from cpulaunch.launchers.command import Command
from cpulaunch.supervise.attempts.attempt import first_attempt
from cpulaunch.supervise.attempts.start import Starter
from cpulaunch.supervise.output.directory import JobDirectory
from cpulaunch.supervise.output.lines import Output
from cpulaunch.supervise.output.terminal import Screen


def test_jobs_of_one_second_never_share_an_id() -> None:
    plan = make()
    ids = {first_attempt(plan, ()).job_id for _ in range(2000)}
    assert len(ids) == 2000


def test_an_existing_directory_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job").mkdir()
    directory = _job_directory(tmp_path, "job")
    try:
        assert directory.path != tmp_path / "job"
        assert directory.path.parent.stat().st_mode & 0o777 == 0o700
        assert "can't be written (File exists); logs are in" in capsys.readouterr().err
    finally:
        directory.path.rmdir()
        directory.path.parent.rmdir()


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "victim")
    warnings: list[str] = []
    output = Output(JobDirectory(tmp_path), frozenset(), Screen(), warnings.append)
    output.feed(0, 1, b"theirs")
    assert output.logs.close(TIMEOUT)
    assert (tmp_path / "victim").read_text() == "mine"
    assert len(warnings) == 1


class Raced(type(Path())):  # type: ignore[misc]
    """A path in a directory whose owner immediately replaces each new directory in it."""

    instead = ""

    def mkdir(self, *arguments: object, **options: object) -> None:
        super().mkdir(*arguments, **options)
        self.rename(f"{self}-moved")
        if self.instead == "a link":
            os.mkdir(self.parent / "victim")
            self.symlink_to(self.parent / "victim")
            return
        os.mkdir(self)
        if self.instead == "his own":
            os.chown(self, 4711, -1)
        else:
            (self.parent / self.name / "plan.json").touch()


@pytest.mark.parametrize("instead", ["a link", "his own", "one with files"])
def test_a_directory_that_replaces_a_new_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instead: str
) -> None:
    if instead == "his own" and os.geteuid() != 0:
        pytest.skip("only root can give directories away")
    monkeypatch.setattr(Raced, "instead", instead)
    with pytest.raises(OSError, match="Not a directory|somebody has put another directory in its place"):
        JobDirectory.make(Raced(tmp_path / "job"))


def test_nothing_is_written_to_a_directory_that_replaces_the_jobs_own(
    marked: dict[str, str], tmp_path: Path
) -> None:
    """The owner of the directory above replaces it by a link into a directory of the user."""
    (victim := tmp_path / "victim").mkdir()
    with job(tmp_path, marked, [], UNTIL_TOLD) as launcher:
        (directory,) = (tmp_path / "runs").iterdir()
        directory.rename(tmp_path / "moved")
        directory.symlink_to(victim)
        (tmp_path / "go").touch()
        assert launcher.wait(TIMEOUT) == 0
    assert list(victim.iterdir()) == []
    assert (tmp_path / "moved/outcome.json").exists()


def test_a_hostfile_is_read_from_the_original_directory(tmp_path: Path) -> None:
    """With a replaced hostfile, mpiexec would send the job's token to other hosts."""
    directory = JobDirectory.make(tmp_path / "job")
    (tmp_path / "job").rename(tmp_path / "moved")
    (tmp_path / "job").mkdir()
    (tmp_path / "job/hostfile").write_text("theirs")
    cat = Command((sys.executable, "-c", "print(open('hostfile').read())"), {}, {"hostfile": "ours"})
    starter = Starter([cat], {}, directory, agents=False)
    starter.start_first()
    assert starter.processes[0].wait(TIMEOUT) == 0
    with open(starter.pipes[0]) as out, open(starter.pipes[1]) as err:
        assert (out.read(), err.read()) == ("ours\n", "")
