"""A mix of collectives in a group compiled with AddressSanitizer makes no invalid memory access.

It takes three minutes, so it runs only with CPULAUNCH_TEST_ADDRESSES=1.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import programs_names as names
import pytest
from ranks import Ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("built"),
    pytest.mark.skipif(
        not os.environ.get("CPULAUNCH_TEST_ADDRESSES"), reason="CPULAUNCH_TEST_ADDRESSES is not set"
    ),
]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Three ranks with an instrumented group.  An invalid access ends a rank with exit code 99."""
    directory = tmp_path_factory.mktemp("addresses")
    compiler = directory / "g++-with-asan"
    compiler.write_text('#!/bin/sh\nexec g++ -fsanitize=address -fno-omit-frame-pointer "$@"\n')
    compiler.chmod(0o755)
    # Without the C++ runtime, the sanitizer does not find the function that throws exceptions.
    preloaded = [
        subprocess.run(["g++", f"-print-file-name={name}"], capture_output=True, text=True, timeout=60).stdout
        for name in ("libasan.so", "libstdc++.so")
    ]
    log = directory / "log"
    there = {
        "XDG_CACHE_HOME": str(directory), "CXX": str(compiler), "PYTHONMALLOC": "malloc",
        "LD_PRELOAD": " ".join(preloaded).replace("\n", ""),
        "ASAN_OPTIONS": f"detect_leaks=0:exitcode=99:log_path={log}",
    }  # fmt: skip
    subprocess.run([sys.executable, "-m", "cpulaunch", "ccl", "build"], env={**os.environ, **there},
                   check=True, timeout=600, capture_output=True)  # fmt: skip
    modules = [*directory.glob("cpulaunch/ccl/*/*.so")]
    assert modules
    assert all(b"__asan_report_load8" in module.read_bytes() for module in modules)
    ranks = Ranks(3, **there)
    yield ranks
    codes = ranks.close()
    reports = "\n".join(path.read_text() for path in directory.glob("log.*"))
    assert (codes, reports) == ([0, 0, 0], "")


@pytest.mark.parametrize("kind", names.REDUCTIONS)
def test_reductions(checked: Ranks, kind: str) -> None:
    for seed, (op, dtype) in enumerate(
        [("SUM", "float32"), ("AVG", "bfloat16"), ("MAX", "int8"), ("SUM", "bool")]
    ):
        for shape in ([1], [0], [3, 1000], [65_537]):
            for layout in ("plain", "strided"):
                checked.call("reduction", kind, op, dtype, shape, layout, seed, seed, seed % 2 == 0)


@pytest.mark.parametrize("kind", names.MOVEMENTS)
def test_movements(checked: Ranks, kind: str) -> None:
    point_to_point = kind in ("send_recv", "recv_any")
    for seed, dtype in enumerate(("float32", "uint8", "float64")):
        for shape in ([1], [3, 1000], [65_537], *([] if point_to_point else [[0]])):
            checked.call("movement", kind, dtype, shape, "strided", seed, seed, seed % 2 == 0)


@pytest.mark.parametrize(
    "what", ["many_in_flight", "chained", "subgroups", "pairs", "misuse", "objects", "scaled_sum", "train_ddp",
             "release_the_peer", "shm_sums"],
)  # fmt: skip
def test_futures_groups_and_training(checked: Ranks, what: str) -> None:
    checked.call(what, limit=120)


def test_groups_made_and_destroyed(checked: Ranks) -> None:
    checked.call("repeat", 200, 20, limit=240)
