"""Invalid calls of ``cpulaunch profile`` and ``run --profile``."""

from __future__ import annotations

import pytest
from support.command import Run


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("profile", "--steps", "0"), "--steps 0: expected a whole number from 1 to 1000"),
        (("profile", "--steps", "1001"), "--steps 1001: expected"),
        (("profile", "--steps", "³"), "--steps ³: expected"),
        (("profile", "--ranks", "3-1"), "--ranks 3-1: expected ranks, such as"),
        (("profile", "--ranks", ""), "--ranks : expected ranks"),
        (("profile", "nothing"), "nothing: no such running job"),
        (("profile", "-o", "/"), "-o /: is a directory, or in none that exists"),
        (("profile", "-o", "/missing/trace"), "-o /missing/trace: is a directory, or in none that exists"),
        (("run", "--profile", "1-5", "train.py"), "expected none, or steps such as 10-14: from 2 on"),
        (("run", "--profile", "9-5", "train.py"), "expected none, or steps such as 10-14"),
        (("run", "--profile", "2-5000", "train.py"), "1000 of them at most"),
        (("run", "--profile", "2-5", "--no-python", "true"), "a program that is not Python makes no steps"),
    ],
)
def test_invalid_requests_for_a_profile_are_refused(
    arguments: tuple[str, ...], why: str, cpulaunch: Run
) -> None:
    done = cpulaunch(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert why in done.stderr
