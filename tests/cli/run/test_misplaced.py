"""Options of `cpulaunch run` that were typed after the script."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.command import Run

from cpulaunch.cli.run.misuse import rejected_options


@pytest.mark.parametrize(
    "text",
    [
        "usage: train.py [-h]\ntrain.py: error: unrecognized arguments: --precision bf16 --lr 1",
        "Usage: train.py [OPTIONS]\n\nError: No such option: --precision",
        "│ No such option: --precision Did you mean --decision? │",
        "train.py: error: no such option: --precision",
        "FATAL Flags parsing error: Unknown command line flag 'precision'. Did you mean: decision ?",
        "getopt.GetoptError: option --precision not recognized",
        "ERROR: Could not consume arg: --precision",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--precision', 'bf16']",
        "│ Unrecognized options: --precision │",
    ],
)
def test_complaints_about_unknown_options_are_recognized(text: str) -> None:
    assert rejected_options(f"working\n{text}\n".encode(), ["--tee", "--precision"]) == ["--precision"]


@pytest.mark.parametrize(
    "text",
    [
        "train.py: error: argument --precision: invalid choice: 'fp8'",
        "train.py: error: unrecognized arguments: --precision-of-all x",
        "train.py: error: unrecognized arguments: precision",
        "usage: train.py [--precision P]\ntrain.py: error: unrecognized arguments: --lr 1",
        "",
    ],
)
def test_other_errors_do_not_count_as_complaints_about_options(text: str) -> None:
    assert rejected_options(text.encode(), ["--precision"]) == []


def test_an_option_that_the_script_knows_is_not_misplaced(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\nparser = argparse.ArgumentParser()\n"
        "parser.add_argument('--precision', choices=['fp32', 'bf16'])\nparser.parse_args()\n"
    )
    done = cpulaunch("run", "-n", "1", "train.py", "--precision", "fp8")
    assert (done.returncode, "came after the script" in done.stderr) == (2, False)
    done = cpulaunch("run", "-n", "1", "train.py", "--precision", "bf16", "--tee", "0")
    assert (done.returncode, "cpulaunch: --tee came after the script, " in done.stderr) == (2, True)
