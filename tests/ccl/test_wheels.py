"""The wheels with the compiled group, and the core's C interface.

zig takes half a gigabyte and minutes for its first compilation.  So the wheels of ``scripts/build_wheels.sh``
are tested only if CPULAUNCH_TEST_WHEELS is 1, or a directory that has them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from ranks import run_script
from support.marks import repeat

from cpulaunch.ccl import installed
from cpulaunch.ccl.compiler import build_core_elsewhere
from cpulaunch.ccl.installed import Built
from cpulaunch.ccl.wheel import write_wheel
from cpulaunch.errors import UsageError

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
NATIVE = Path(__file__).parent / "native"
WANTED = os.environ.get("CPULAUNCH_TEST_WHEELS", "")
asked_for = pytest.mark.skipif(not WANTED, reason="CPULAUNCH_TEST_WHEELS is not set")

HELLO = """
import os, torch, torch.distributed as dist
from cpulaunch.ccl.installed import state
dist.init_process_group("ccl")
x = torch.ones(3); dist.all_reduce(x)
origins = {part.origin for part in state().built.parts}
os.write(1, f"{' '.join(origins)} sum {x[0].item()}\\n".encode())  # whole, beside the other rank's line
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheels."""
    if WANTED != "1":
        return Path(WANTED)
    out = tmp_path_factory.mktemp("wheels")
    script = REPOSITORY / "scripts/build_wheels.sh"
    subprocess.run(
        [script, out, sys.executable], check=True, timeout=1200, env={**os.environ, "PYTHON": sys.executable}
    )
    return out


def check_by_c(library: Path, compiler: str, emulator: tuple[str, ...], directory: Path) -> None:
    """Compile a program in C with the library, and run it."""
    if shutil.which(compiler) is None or (emulator and shutil.which(emulator[0]) is None):
        pytest.skip(f"{compiler} or {emulator} is not installed")
    program = directory / "two_ranks"
    core = installed.SOURCES / "core"
    subprocess.run(
        [compiler, "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Wpedantic", "-Werror", f"-I{core}",
         str(NATIVE / "two_ranks.c"), str(library), f"-Wl,-rpath,{library.parent}", "-o", str(program)],
        check=True, timeout=120,
    )  # fmt: skip
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr) == ("ok\n", "")


MACHINES = {
    "x86_64": ("gcc", ()),
    "aarch64": ("aarch64-linux-gnu-gcc", ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")),
}


@pytest.mark.parametrize("machine", ["x86_64", repeat("aarch64")])
def test_the_core_has_a_c_interface(tmp_path: Path, machine: str) -> None:
    compiler, emulator = MACHINES[machine]
    if shutil.which(compiler.replace("gcc", "g++")) is None:
        pytest.skip(f"{compiler} is not installed")
    part = build_core_elsewhere([compiler.replace("gcc", "g++")], machine, tmp_path)
    check_by_c(part.file, compiler, emulator, tmp_path)


@asked_for
@pytest.mark.parametrize("machine", MACHINES)
def test_the_core_in_a_wheel_runs_on_its_kind_of_machine(wheels: Path, tmp_path: Path, machine: str) -> None:
    (wheel,) = wheels.glob(f"cpulaunch_ccl_core-*-py3-none-manylinux_2_28_{machine}.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    (library,) = tmp_path.glob("cpulaunch_ccl_core/core/*.so")
    versions = {found[1] for found in installed._SYMBOL_VERSION.finditer(library.read_bytes())}
    assert max(tuple(map(int, name[6:].split(b"."))) for name in versions) <= (2, 28)
    check_by_c(library, *MACHINES[machine], tmp_path)


@asked_for
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the layer's wheel is for x86_64")
def test_a_job_runs_from_wheels_without_a_compiler(wheels: Path, tmp_path: Path) -> None:
    key = installed.torch_key(str(installed.state().torch))
    (layer,) = wheels.glob(f"cpulaunch_ccl-*torch{key}-{installed.python_tag()}-*_x86_64.whl")
    (core,) = wheels.glob("cpulaunch_ccl_core-*_x86_64.whl")
    check_without_compiler(tmp_path, HELLO, core, layer)


def test_a_built_wheel_works_on_a_node_without_compiler_and_network(tmp_path: Path, built: Built) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "ccl", "build", "--wheel", str(tmp_path)],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    wheel = Path(done.stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
    kernels = (
        "from cpulaunch.kernels import load; load.load()\n"
        "from cpulaunch.ccl.installed import state; assert state().part('kernels').origin == 'wheel'\n"
    )
    check_without_compiler(tmp_path, kernels + HELLO, wheel)


def test_the_wheel_option_requires_a_directory(tmp_path: Path, built: Built) -> None:
    with pytest.raises(UsageError, match="is not a directory"):
        write_wheel(built.parts, tmp_path / "missing")


def check_without_compiler(directory: Path, source: str, *wheels: Path) -> None:
    """Run two ranks in a new environment with ``wheels`` and the current torch and cpulaunch."""
    place = directory / "venv"
    venv.create(place, with_pip=False)
    (site,) = place.glob("lib/python*/site-packages")
    borrowed = [path for path in sys.path if "site-packages" in path] + [str(REPOSITORY)]
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in borrowed))
    pip = [sys.executable, "-m", "pip", "--python", str(place), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, *map(str, wheels)], check=True, timeout=120, capture_output=True)
    alone = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(directory)}
    for result in run_script(2, source, python=str(place / "bin" / "python"), **alone):
        assert result.stdout == "wheel sum 2.0\n", result.stderr
