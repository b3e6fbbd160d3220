"""Intel's oneccl_bind_pt.  A fake package with the same names, which registers gloo as ``ccl``, replaces it.

The real wheel is not on PyPI.  docs/ccl.md says what was tested with it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import run_script
from support.marks import repeat
from support.packages import stand_in

from cpulaunch.ccl import bindings, installed
from cpulaunch.ccl.installed import Built, State
from cpulaunch.ccl.load import Neighbours, settings
from cpulaunch.errors import HostError
from cpulaunch.plan.communication import Situation, communication_defaults

Run = Callable[..., subprocess.CompletedProcess[str]]

SUM = """
import os, torch, torch.distributed as dist
{imports}
dist.init_process_group("ccl")
x = torch.ones(3); dist.all_reduce(x)
group = dist.group.WORLD._get_backend(torch.device("cpu"))
text = f"sum {{x[0].item()}} by {{type(group).__name__}}"
os.write(1, f"{{text}}, {{os.environ.get('CCL_WORKER_OFFLOAD')}}\\n".encode())  # whole, beside other ranks' lines
{end}
"""
END = "dist.destroy_process_group(); os._exit(0)"  # without gloo's teardown at the end of Python
BROKEN = "raise ImportError('undefined symbol: _ZN5torch')"
STAND_IN = """
import os, torch.distributed as dist

def create(store, rank, size, timeout):
    for name in ("CCL_OFI_LIBRARY_PATH", "FI_PROVIDER_PATH"):
        assert os.path.exists(os.environ[name]), "could not initialize any transport library"
    return dist.ProcessGroupGloo(store, rank, size, timeout)

dist.Backend.register_backend("ccl", create, devices=["cpu"])
other_name = 1
"""


@pytest.mark.parametrize("binding", ["auto", "cpulaunch"])
def test_bindings_are_not_used_by_default(binding: str) -> None:
    assert not bindings.are_wanted(binding, State("2.8.0", Path(), (), "2.8.0"))


def test_bindings_are_used_on_request() -> None:
    assert bindings.are_wanted("oneccl_bind_pt", State("2.8.0+cpu", Path(), (), "2.8.0+cpu"))


@pytest.mark.parametrize(
    ("version", "advice"), [("2.8.0+cpu", "it works with the torch that it was"), (None, "not installed")]
)
def test_requesting_incompatible_bindings_is_an_error(version: str | None, advice: str) -> None:
    with pytest.raises(HostError, match=advice):
        bindings.are_wanted("oneccl_bind_pt", State("2.13.0+cpu", Path(), (), version))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "version", "binding", "status", "message"),
    [
        repeat(STAND_IN, "same", "auto", 0, "by ProcessGroupCCL"),
        (STAND_IN, "same", "oneccl_bind_pt", 0, "by ProcessGroupGloo, 1"),
        repeat(STAND_IN, "2.1.0", "oneccl_bind_pt", 1, "works with the torch that it was built for only"),
        repeat(BROKEN, "same", "oneccl_bind_pt", 1, "does not load: undefined symbol: _ZN5torch"),
        repeat("", "same", "oneccl_bind_pt", 1, "was imported and registered no backend ccl"),
    ],
    ids=["not asked for", "asked for", "of another torch", "broken", "not theirs"],
)
def test_the_chosen_implementation_makes_the_group(
    tmp_path: Path, built: Built, body: str, version: str, binding: str, status: int, message: str
) -> None:
    there = stand_in(tmp_path, body, built.torch if version == "same" else version)
    script = SUM.format(imports="", end=END)
    for result in run_script(2, script, **there, CPULAUNCH_RANK_CCL_BINDING=binding):
        assert result.returncode == status, result.stderr
        assert message in result.stdout + result.stderr
        assert "it works with" not in result.stderr or version != "same"


@pytest.mark.slow
@pytest.mark.parametrize("binding", ["auto", repeat("oneccl_bind_pt")])
def test_a_script_that_imports_the_bindings_still_gets_the_jobs_group(
    cpulaunch: Run, tmp_path: Path, built: Built, binding: str
) -> None:
    there = stand_in(tmp_path, STAND_IN, built.torch)
    imports = "import oneccl_bindings_for_pytorch as theirs; assert theirs.other_name"
    (tmp_path / "sum.py").write_text(SUM.format(imports=imports, end=END))
    done = cpulaunch("run", "-n", "2", "--ccl-binding", binding, "sum.py", env=there, timeout=120)
    assert done.returncode == 0, done.stderr
    ours = binding == "auto"
    whose = "ProcessGroupCCL" if ours else "ProcessGroupGloo"
    assert done.stdout.count(f"sum 2.0 by {whose}") == 2
    warning = "imports oneccl_bindings_for_pytorch, but ccl stays cpulaunch's own"
    assert done.stderr.count(warning) == ours
    assert ("planned: ccl from oneccl_bind_pt, " in done.stderr) is not ours


@pytest.mark.slow
def test_an_exception_exits_with_1_even_if_the_bindings_would_abort(
    cpulaunch: Run, tmp_path: Path, built: Built
) -> None:
    aborts = "import ctypes; libc = ctypes.CDLL(None); libc.on_exit(libc.abort, None)"
    there = stand_in(tmp_path, STAND_IN + aborts, built.torch)
    (tmp_path / "sum.py").write_text(SUM.format(imports="", end="raise ValueError('of the script')"))
    asked = ["--ccl-binding", "oneccl_bind_pt", "--backend", "ccl"]
    done = cpulaunch("run", "-n", "2", *asked, "sum.py", env=there, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "ValueError: of the script" in done.stderr


@pytest.mark.slow
def test_info_names_the_implementation_that_ranks_will_use(
    cpulaunch: Run, tmp_path: Path, built: Built
) -> None:
    there = stand_in(tmp_path, BROKEN, built.torch)
    done = cpulaunch("ccl", "info", "--ccl-binding", "oneccl_bind_pt", env=there, timeout=120)
    assert f"used for ccl     oneccl_bind_pt {built.torch}" in done.stdout
    why = "so the ranks will fail: ImportError: undefined symbol: _ZN5torch"
    assert f"but              oneccl_bind_pt does not load, {why}" in done.stdout


def test_all_hosts_must_have_the_same_bindings(tmp_path: Path) -> None:
    stand_in(tmp_path, "", "2.8.0")
    package = tmp_path / installed.BINDINGS
    (package / "lib").mkdir()
    (package / "lib" / "libtheirs.so").touch()
    there = State("2.8.0", Path(), (), "2.8.0", package)
    assert bindings.package_files(there) == (str(package / "__init__.py"), str(package / "lib/libtheirs.so"))


@pytest.mark.parametrize(("comm_cores", "yields"), [(0, True), (1, False)])
def test_the_bindings_workers_yield_a_shared_core_to_the_rank(comm_cores: int, yields: bool) -> None:
    """Without workers, oneCCL 2021.14 blocks a new group while another group has a pending operation."""
    planned = communication_defaults(Situation("ccl", 1, 2, comm_cores=comm_cores, bindings=True))
    assert planned["CCL_WORKER_OFFLOAD"] == "1"
    assert (planned.get("CCL_YIELD") == "sched_yield") is yields
    alone = Neighbours(1, 0, 2, 2, cores=1, oversubscribed=False)
    assert settings(alone, {}, bindings=True)["CCL_WORKER_OFFLOAD"] == "1"
    assert settings(alone, {})["CCL_WORKER_OFFLOAD"] == "0"
