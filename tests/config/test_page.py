"""The reference page and the command line are made from the table, so they can't differ from it."""

from __future__ import annotations

import runpy

import pytest
from support.command import REPOSITORY

from cpulaunch.cli.main import main
from cpulaunch.config.settings import SETTINGS


def test_the_settings_page_is_the_tables() -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "settings_page.py"))
    assert script["page"]() == (REPOSITORY / "docs" / "settings.md").read_text(), (
        "run scripts/settings_page.py"
    )


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


class TestConfigShow:
    def test_shows_each_value_with_its_origin(self, cpulaunch, tmp_path) -> None:
        (tmp_path / "cpulaunch.yaml").write_text("ccl:\n  worker_count: 4\n")
        done = cpulaunch("config", "show", "--origin", "--set", "cpu.threads=3", env={"FI_PROVIDER": "psm3"})
        lines = {line.split(":")[0].strip(): line for line in done.stdout.splitlines()}
        assert lines["worker_count"].split("#")[1].strip() == "cpulaunch.yaml:2"
        assert lines["provider"].split("#")[1].strip() == "$FI_PROVIDER"
        assert lines["threads"].split("#")[1].strip() == "--set cpu.threads"
        assert lines["strategy"].split("#")[1].strip() == "default"

    def test_what_it_shows_is_a_valid_file_with_the_same_values(self, cpulaunch, tmp_path) -> None:
        shown = cpulaunch("config", "show", "--set", "ccl.worker_count=4", "--env", "A=b c").stdout
        (tmp_path / "shown.yaml").write_text(shown)
        assert cpulaunch("config", "validate", "shown.yaml").returncode == 0
        assert cpulaunch("config", "show", "--config-file", "shown.yaml").stdout == shown


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
