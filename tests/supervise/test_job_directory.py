"""A job's directory is its own: nobody can have been there before, nor lead its files elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import TIMEOUT
from support.plans import make

from cpulaunch.cli.run import _job_directory
from cpulaunch.supervise.attempt import first_attempt
from cpulaunch.supervise.output import Output
from cpulaunch.supervise.terminal import Screen


def test_jobs_of_one_second_never_share_an_id() -> None:
    plan = make()
    ids = {first_attempt(plan, ()).job_id for _ in range(2000)}
    assert len(ids) == 2000


def test_a_directory_that_is_there_is_not_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "job").mkdir()
    directory = _job_directory(tmp_path, "job")
    try:
        assert directory != tmp_path / "job"
        assert directory.stat().st_mode & 0o777 == 0o700
        assert "can't be written (File exists); logs are in" in capsys.readouterr().err
    finally:
        directory.rmdir()


def test_a_link_in_place_of_a_log_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("mine")
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "victim")
    warnings: list[str] = []
    output = Output(tmp_path, frozenset(), Screen(), warnings.append)
    output.feed(0, 1, b"theirs")
    assert output.close(TIMEOUT)
    assert (tmp_path / "victim").read_text() == "mine"
    assert len(warnings) == 1
