"""Finding and registering the built group, and its settings in a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import environment, free_port, run_script
from support.marks import repeat

from cpulaunch.ccl import installed
from cpulaunch.ccl.installed import Built, Part
from cpulaunch.ccl.load import Neighbours, settings

HELLO = """
import os, torch, torch.distributed as dist
dist.init_process_group("ccl")
x = torch.ones(3); dist.all_reduce(x)
os.write(1, f"sum {x[0].item()} {dist.get_backend()}\\n".encode())  # whole, beside other ranks' lines
dist.destroy_process_group()
"""


def python(source: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", source],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **variables},
    )


def make(tmp_path: Path, kind: str = "layer", **changes: str) -> Part:
    """Make a part in the cache below ``tmp_path``.  Its file is empty, so it can't be loaded."""
    fields = {
        "compiler": "g++-12",
        "glibc": installed.glibc_version(),
        **installed.state().wanted[kind],
        **changes,
    }
    directory = tmp_path / "cpulaunch" / "ccl" / f"{kind}-{len(changes)}"
    directory.mkdir(parents=True)
    part = Part(kind, directory, "cache", **fields)
    part.file.write_bytes(b"")
    installed.write_record(part)
    return part


# --- finding builds


def test_inspecting_builds_does_not_import_torch() -> None:
    done = python(
        "import sys; from cpulaunch.ccl import installed\n"
        "installed.state().problem\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("kind", "changes", "fits"),
    [("layer", {}, True), ("layer", {"torch": "2.9"}, False), ("layer", {"python": "cp39"}, False),
     ("layer", {"abi": "0"}, False), ("layer", {"machine": "riscv64"}, False), ("layer", {"sources": "0"}, False),
     ("layer", {"compiler": "clang++-18"}, True), ("core", {"sources": "0"}, False),
     ("core", {"machine": "riscv64"}, False), ("core", {"compiler": "zig"}, True), ("oneccl", {"sources": "0"}, False)],
    ids=str,
)  # fmt: skip
def test_a_built_part_is_used_only_if_it_is_compatible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, str], fits: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = make(tmp_path, kind, **changes)
    assert installed.state().part(kind) == (found if fits else None)


@pytest.mark.parametrize(
    ("version", "key"),
    [("2.13.0", "2.13"), ("2.13.1+cpu", "2.13"), ("2.8.0+cu128", "2.8"), ("2.13.0.post1", "2.13"),
     ("2.14.0.dev20261101+cpu", "2.14.0.dev20261101+cpu"), ("2.14.0a0+git0123abc", "2.14.0a0+git0123abc"),
     ("2.14.0rc2", "2.14.0rc2")],
)  # fmt: skip
def test_a_layer_works_with_all_builds_and_patch_releases_of_its_torch(version: str, key: str) -> None:
    assert installed.torch_key(version) == key


def test_the_problem_names_the_existing_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "not built for torch" in str(installed.state().problem)
    make(tmp_path, torch="2.9")
    make(tmp_path, "core")
    assert "only for torch 2.9" in str(installed.state().problem)


@pytest.mark.parametrize("where", ["", "core-0", "core-0/libcpulaunch_ccl.so"])
def test_files_that_others_can_write_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    make(tmp_path, "core")
    open_to = installed.cache_directory() / where
    assert installed.state().part("core")
    open_to.chmod(0o777)
    assert installed.state().part("core") is None
    assert f"others may write to {open_to}" in str(installed.state().problem)


def test_a_dry_run_reports_why_an_existing_group_is_not_loaded(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    home = tmp_path / "cache"
    for kind in ("core", "layer"):
        make(home, kind)
    (cache := home / "cpulaunch/ccl").chmod(0o775)
    (tmp_path / "hello.py").write_text("")
    done = cpulaunch("run", "--dry-run", "-n", "1", "hello.py", env={"XDG_CACHE_HOME": str(home)})
    assert done.returncode == 0, done.stderr
    assert (
        f"the ccl process group is built, but can't be loaded, as others may write to {cache}: a run"
        in done.stderr
    )


def test_a_part_that_needs_a_newer_c_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a part was built on another host, for example a login node."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    part = make(tmp_path, "core", glibc="glibc 99.0")
    part.file.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_99.0\0GLIBCXX_3.4.11\0")
    assert "this one lacks GLIBC_99.0" in str(installed.state().problem)
    part.file.write_bytes(b"\0GLIBC_2.2.5\0GLIBCXX_3.4.11\0")
    assert installed.state().part("core") == part


def test_this_host_meets_the_groups_requirements(built: Built) -> None:
    for part in built.parts:
        assert installed.missing_versions(part.file) == []


# --- registration


@pytest.mark.slow
def test_registration_loads_nothing() -> None:
    done = python(
        "import sys, torch\n"
        "from cpulaunch.ccl import register\n"
        "register.autoload()\n"
        "assert 'cpulaunch.ccl.load' not in sys.modules\n"
        "assert 'ccl' in torch.distributed.Backend.backend_list"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_torchrun(built: Built, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(tmp_path / "hello.py")],
        capture_output=True, text=True, timeout=120, env=without_rank(),
    )  # fmt: skip
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr


def without_rank() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {k: v for k, v in environment(0, 1, 0).items() if k not in names}


@pytest.mark.slow
def test_without_a_build_init_suggests_a_remedy(tmp_path: Path) -> None:
    (result,) = run_script(1, HELLO, XDG_CACHE_HOME=str(tmp_path))
    assert result.returncode == 1
    assert "it is not built for torch" in result.stderr
    assert "cpulaunch ccl build" in result.stderr


# --- settings


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, {"CCL_PROCESS_LAUNCHER": "none", "CCL_LOCAL_RANK": "1", "CCL_LOCAL_SIZE": "2"}),
        ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, {"CCL_PROCESS_LAUNCHER": "torchrun", "CCL_LOCAL_RANK": None}),
        ({"CCL_WORKER_AFFINITY": "0,1"}, {"CCL_WORKER_OFFLOAD": "1"}),
        ({"CCL_WORKER_OFFLOAD": "1", "FI_PROVIDER": "psm3"}, {"CCL_WORKER_OFFLOAD": None, "FI_PROVIDER": None}),
        ({"CCL_LOG_LEVEL": "info"}, {"CCL_LOG_LEVEL": None}),
    ],
    ids=str,
)  # fmt: skip
def test_the_group_sets_only_unset_variables(
    environ: dict[str, str], expected: dict[str, str | None]
) -> None:
    neighbours = Neighbours(
        hosts=1, local_rank=1, local_ranks=2, most_local_ranks=2, cores=1, oversubscribed=False
    )
    wanted = settings(neighbours, environ)
    assert {name: wanted.get(name) for name in expected} == expected


@pytest.mark.parametrize(("most", "shared"), [(1, "0"), (3, "1")])
def test_a_rank_alone_on_its_host_uses_the_same_settings_as_the_others(most: int, shared: str) -> None:
    alone = Neighbours(
        hosts=2, local_rank=0, local_ranks=1, most_local_ranks=most, cores=1, oversubscribed=False
    )
    assert settings(alone, {})["CCL_ATL_SHM"] == shared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environ", "warned"),
    [(["-v"], {}, False), repeat([], {"CCL_LOG_LEVEL": "warn"}, True)],
    ids=["-v", "the variable is set"],
)
def test_warnings_of_oneccl_are_shown_only_on_request(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, built: Built,
    options: list[str], environ: dict[str, str], warned: bool,
) -> None:  # fmt: skip
    (tmp_path / "hello.py").write_text(HELLO)
    oneccl = ["--backend", "ccl", "--ccl-transport", "oneccl"]
    done = cpulaunch("run", "-n", "2", *options, *oneccl, "hello.py", env=environ, timeout=120)
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr
    assert ("CCL_WARN" in done.stdout + done.stderr) is warned


@pytest.mark.slow
def test_the_users_variables_reach_oneccl(built: Built) -> None:
    source = HELLO + "print(os.environ['CCL_ATL_SHM'], os.environ['CCL_WORKER_OFFLOAD'])"
    given = {"CCL_ATL_SHM": "0", "CCL_WORKER_OFFLOAD": "1", "CCL_YIELD": "sleep", "CCL_LOG_LEVEL": "info"}
    first, second = run_script(2, source, CPULAUNCH_RANK_CCL_TRANSPORT="oneccl", **given)
    for result in (first, second):
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "0 1"
    assert "CCL_YIELD: sleep" in first.stdout + first.stderr
    assert "CCL_WORKER_OFFLOAD changed" not in first.stdout + first.stderr  # 1 is oneCCL's default, 0 ours


def test_info_names_the_files_that_would_be_loaded(built: Built) -> None:
    lines = dict(installed.describe(installed.state()))
    assert lines["used for ccl"].startswith(str(built.module))
