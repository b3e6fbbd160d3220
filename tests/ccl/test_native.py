"""cpulaunch's own transport without torch: random collectives among threads, also under sanitizers."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from cpulaunch.ccl.installed import SOURCES

HERE = Path(__file__).with_name("native")
TORCH_FREE = (
    "arithmetic", "connector", "hierarchical_*", "host_exchange", "network", "shared_slots", "transport_hierarchical",
)  # fmt: skip
BUILDS = {
    "plain": ["-O2", "-Wall", "-Wextra", "-Werror"],
    "address": ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover"],
    "thread": ["-O1", "-g", "-fsanitize=thread"],
}
LAYOUTS = ("1", "2", "3", "1,1", "2,2", "3,1", "1,2,3", "2,2,2,2")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++"),
]


@pytest.fixture(scope="module", params=BUILDS)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of ``native/``, compiled with the sources that don't include torch."""
    target: Path = tmp_path_factory.mktemp("native") / str(request.param)
    sources = [path for name in TORCH_FREE for path in sorted(SOURCES.glob(f"{name}.cpp"))]
    own = sorted(HERE.glob("*.cpp"))
    argv = [
        "g++",
        "-std=c++17",
        *BUILDS[request.param],
        f"-I{SOURCES}",
        *sources,
        *own,
        "-lpthread",
        "-o",
        target,
    ]
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return target


def run(program: Path, layout: str, what: str = "mix", rounds: int = 20) -> subprocess.CompletedProcess[str]:
    argv = [str(program), layout, str(rounds), "5", what]
    return subprocess.run(argv, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_random_collectives_are_right(program: Path, layout: str) -> None:
    done = run(program, layout)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("what", ["narrow connections", "two groups", "many groups", "strangers", "rounding"])
def test_it_holds_with(program: Path, what: str) -> None:
    done = run(program, "2,1", what, rounds=5)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_hosts_in_a_grid(program: Path) -> None:
    if program.name != "plain":
        pytest.skip("twenty ranks take too long with a sanitizer")
    done = run(program, ",".join(["1"] * 20))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    ("layout", "what", "said"),
    [
        ("2,2", "wrong numbers", "is wrong at"),
        ("3", "another collective", "rank 2 of the group calls reduce_scatter"),
        ("3", "another size", "rank 2 of the group calls all_reduce (sum) of 1001 numbers"),
    ],
)
def test_errors_are_found(program: Path, layout: str, what: str, said: str) -> None:
    done = run(program, layout, what, rounds=5)
    assert done.returncode == 1
    assert said in done.stderr
