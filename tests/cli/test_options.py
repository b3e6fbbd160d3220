"""The command line's options are made from the table, so they can't differ from it; commands that are forgotten."""

from __future__ import annotations

import pytest

from cpulaunch.cli.main import main
from cpulaunch.config.settings import SETTINGS


def test_every_setting_has_its_option_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    for setting in SETTINGS.values():
        for flag in setting.flags:
            assert flag in text
    assert "example" in text


@pytest.mark.parametrize("option", ["--nproc-per-node", "--nproc_per_node", "-ppn", "--nproc_per-node"])
def test_dashes_and_underscores_are_the_same(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert main(["run", option, "1", "--dry-run", "--format", "json", "t.py", "--an_argument"]) == 0
    text = capsys.readouterr().out
    assert '"--an_argument"' in text  # the script's own arguments stay as they are
    assert '"key": "hosts.nproc_per_node",\n   "value": 1' in text


@pytest.mark.parametrize("option", ["-n", "-np"])
def test_the_number_of_ranks_may_be_said_as_to_mpirun(option: str, capsys, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    assert main(["run", option, "1", "--dry-run", "--format", "json", "t.py"]) == 0
    assert f'"key": "hosts.nproc",\n   "value": 1,\n   "origin": "{option}"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train.py", "--lr", "1"], "did you mean `cpulaunch run train.py --lr 1`?"),
        (["-n", "2", "train.py"], "options come after the command: cpulaunch run -n 2 train.py"),
        (["rnu"], "commands: run, "),
    ],
)
def test_a_forgotten_command_is_named(arguments: list[str], hint: str, capsys) -> None:
    assert main(arguments) == 2
    assert f"cpulaunch: hint: {hint}" in capsys.readouterr().err
