"""Finding, building, packing and loading the group; registration without an import."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import environment, free_port, run_script
from support.command import TIMEOUT, bounded

from cpulaunch.ccl import build, installed
from cpulaunch.ccl.installed import Built, State
from cpulaunch.ccl.wheel import write_wheel
from cpulaunch.errors import HostError, UsageError

HELLO = """
import os, torch, torch.distributed as dist
dist.init_process_group("%s")
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


def make(tmp_path: Path, **changes: str) -> Built:
    there = installed.state()
    fields = {
        "torch": str(there.torch), "python": installed.python_tag(), "oneccl": installed.ONECCL_VERSION,
        "compiler": "g++-12", "abi": "1", "sources": installed.sources_digest(), **changes,
    }  # fmt: skip
    directory = tmp_path / "cpulaunch" / "ccl" / f"torch-{fields['torch']}-{len(changes)}"
    directory.mkdir(parents=True)
    (directory / "_group.so").write_bytes(b"")
    (directory / "LICENSE-oneCCL.txt").write_text("licence")
    found = Built(directory, **fields, origin="cache")
    installed.write_record(directory, found)
    return found


# --- what is there


def test_looking_does_not_import_torch() -> None:
    done = python(
        "import sys; from cpulaunch.ccl import installed\n"
        "installed.state().problem\n"
        "assert 'torch' not in sys.modules"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("changes", "fits"),
    [({}, True), ({"torch": "2.9.1+cpu"}, False), ({"python": "cp39"}, False), ({"oneccl": "2021.13"}, False),
     ({"sources": "0"}, False), ({"compiler": "clang++-18"}, True)],
    ids=str,
)  # fmt: skip
def test_a_built_group_is_taken_only_if_it_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, str], fits: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = make(tmp_path, **changes)
    assert installed.state().built == (found if fits else None)


def test_the_problem_says_what_is_built_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "not built for torch" in str(installed.state().problem)
    make(tmp_path, torch="2.9.1+cpu")
    assert "only for torch 2.9.1+cpu" in str(installed.state().problem)


# --- building


def test_building_without_a_compiler_says_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HostError, match="no C\\+\\+ compiler") as caught:
        build.build()
    assert "ccl build --wheel" in str(caught.value.hint)
    assert "gloo" in str(caught.value.hint)


@pytest.mark.slow
def test_building_without_the_network_says_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    said: list[str] = []
    (installed.cache_directory() / "building-killed" / "oneccl").mkdir(parents=True)
    with pytest.raises(HostError, match="could not fetch oneccl-devel") as caught:
        build.build(lambda step, detail: said.append(step + detail))
    assert "network" in str(caught.value.hint)
    assert said == [f"fetching oneccl-devel {installed.ONECCL_VERSION} (32 MB)"]
    # Nothing half-built is left, not even of a build that was killed earlier.
    assert {p.name for p in installed.cache_directory().iterdir()} == {"lock", "not-fetched.json"}


def test_an_unsupported_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "state", lambda: State("2.5.1", Path(), (), None))
    with pytest.raises(HostError, match=r"torch 2.5.1 is older than 2.8"):
        build.build()


@pytest.mark.slow
def test_a_run_that_has_to_build_says_so_in_two_lines(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "hello.py").write_text("")
    (compiler := tmp_path / "g++").write_text(
        '#!/bin/sh\ncase "$1" in -dump*) exec g++ "$@";; esac; exit 1\n'
    )
    compiler.chmod(0o755)
    env = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(compiler)}
    done = cpulaunch("run", "-n", "1", "--backend", "ccl", "hello.py", env=env)
    assert done.returncode == 3
    fetching, compiling, failed, *_ = done.stderr.splitlines()
    assert fetching == (
        f"cpulaunch: ccl: fetching oneccl-devel {installed.ONECCL_VERSION} (32 MB) "
        "(building it takes a few minutes, once)"
    )
    assert compiling == f"cpulaunch: ccl: compiling for torch {installed.state().torch}"
    assert failed.startswith("cpulaunch: error: the compiler failed")


# A build of few sources: the one of all of them is what the other tests use.
BUILD = """
import sys; from pathlib import Path; from cpulaunch.ccl import build, installed
build.SOURCES = installed.SOURCES = Path(sys.argv[1])
print(build.build(lambda *t: print(*t, flush=True)).module)
"""


@pytest.mark.slow
def test_a_build_from_nothing_is_whole_and_made_once(tmp_path: Path) -> None:
    (sources := tmp_path / "sources").mkdir()
    (sources / "user.cpp").write_text(USES_ONECCL)
    shutil.copy(installed.SOURCES / "oneccl_shim.cpp", sources)

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", BUILD, str(sources)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        )  # fmt: skip

    with bounded(start(), limit=120) as first, bounded(start(), limit=120) as second:
        texts = [builder.communicate()[0] for builder in (first, second)]
    modules = {text.splitlines()[-1] for text in texts}
    assert len(modules) == 1
    assert Path(modules.pop()).stat().st_size > 1e6
    # The second waited for the first, and took what it had built.
    assert sorted("linking" in text for text in texts) == [False, True]
    assert any("waiting for another build" in text for text in texts)


# --- the symbols that oneCCL's static library lacks

USES_ONECCL = """
#include <oneapi/ccl.hpp>
extern "C" void* PyList_New(long);
void* use() { ccl::init(); return PyList_New(0); }
"""


@pytest.fixture(scope="module")
def oneccl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pinned oneCCL: its headers and static library."""
    return build._oneccl(tmp_path_factory.mktemp("oneccl"), lambda step, detail: None)


def symbols(file: Path, *options: str) -> set[str]:
    listed = subprocess.run(
        ["nm", "--format=posix", *options, str(file)], capture_output=True, text=True, timeout=60
    )
    return {line.split()[0] for line in listed.stdout.splitlines() if len(line.split()) > 1}


def compiled(source: Path, oneccl: Path) -> Path:
    target = source.with_suffix(".o")
    subprocess.run(
        ["g++", "-fPIC", "-std=c++17", f"-I{oneccl / 'include'}", "-c", str(source), "-o", str(target)],
        check=True, timeout=120,
    )  # fmt: skip
    return target


def shim(tmp_path: Path, oneccl: Path, without: str = "\0") -> Path:
    """The compiled shim, lacking the lines with the given text."""
    lines = (installed.SOURCES / "oneccl_shim.cpp").read_text().splitlines()
    source = tmp_path / "shim.cpp"
    source.write_text("\n".join(line for line in lines if without not in line) + "\n")
    return compiled(source, oneccl)


@pytest.mark.slow
def test_the_shim_defines_what_the_archive_needs_and_no_more(tmp_path: Path, oneccl: Path) -> None:
    archive = oneccl / "libccl.a"
    needed = symbols(archive, "--undefined-only") - symbols(archive, "--defined-only")
    defined = symbols(shim(tmp_path, oneccl), "--defined-only", "--extern-only")
    assert defined <= needed
    assert {name for name in needed if name.startswith(("hwloc_", "__itt_", "_intel_"))} <= defined


def test_ctrl_c_ends_a_build_with_the_compilers_that_run(tmp_path: Path) -> None:
    """No further file is begun.  The compilers have the terminal's SIGINT themselves."""
    (compiler := tmp_path / "g++").write_text(f"#!/bin/sh\necho begun >>{tmp_path}/begun\nexec sleep 300\n")
    compiler.chmod(0o755)
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)  # both ends, or the first writer would wait for a reader
    program = (
        "import sys; from pathlib import Path; from cpulaunch.ccl import build;"
        "here = Path(sys.argv[1]); torch = build._Torch('2.13.0', here, '1', ());"
        "build._compile(torch, str(here / 'g++'), here, here, here / 'm.so', print)"
    )
    argv = [sys.executable, "-c", program, tmp_path]
    with subprocess.Popen(argv, start_new_session=True, stderr=subprocess.PIPE, text=True) as builder:
        try:
            for _ in range(min(build._JOBS, os.cpu_count() or 1)):  # that run at once
                assert select.select([begun], [], [], TIMEOUT)[0]
                os.read(begun, len("begun\n"))
            os.killpg(builder.pid, signal.SIGINT)
            _, error = builder.communicate(timeout=TIMEOUT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(builder.pid, signal.SIGKILL)
    assert "KeyboardInterrupt" in error
    assert not select.select([begun], [], [], 0)[0]
    os.close(begun)


@pytest.mark.slow
@pytest.mark.parametrize("missing", [None, "hwloc_topology_init", "hwloc_bitmap_alloc", "_intel_fast_memcpy"])
def test_a_symbol_that_nothing_defines_fails_the_link_by_name(
    tmp_path: Path, oneccl: Path, missing: str | None
) -> None:
    (tmp_path / "user.cpp").write_text(USES_ONECCL)
    text = (missing or "\0").replace("hwloc_bitmap_alloc", "NO_TOPOLOGY(bitmap_alloc)")
    objects = [compiled(tmp_path / "user.cpp", oneccl), shim(tmp_path, oneccl, without=text)]
    directory = installed.torch_directory()
    assert directory is not None
    arguments = ("g++", objects, oneccl / "libccl.a", tmp_path / "linked.so", directory / "lib")
    if missing is None:
        build._link(*arguments)
        assert symbols(tmp_path / "linked.so", "-D", "--undefined-only") >= {"PyList_New"}
    else:
        with pytest.raises(HostError, match=f"(?m)nothing that is linked defines {missing}$"):
            build._link(*arguments)


@pytest.mark.slow
def test_sources_that_change_while_they_are_compiled_make_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, oneccl: Path
) -> None:
    (sources := tmp_path / "csrc").mkdir()
    (sources / "group.cpp").write_text("int group;\n")
    (compiler := tmp_path / "g++").write_text(f'#!/bin/sh\necho "// " >>{sources}/group.cpp\nexec g++ "$@"\n')
    compiler.chmod(0o755)
    for module in (build, installed):
        monkeypatch.setattr(module, "SOURCES", sources)
    monkeypatch.setattr(build, "_oneccl", lambda *args, **kwargs: oneccl)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(HostError, match="sources were changed while they were compiled"):
        build.build()
    assert installed.state().built is None


def test_a_toolchain_without_nm_is_named(tmp_path: Path) -> None:
    (compiler := tmp_path / "g++").write_text("#!/bin/sh\necho no-such-nm\n")
    compiler.chmod(0o755)
    with pytest.raises(HostError, match="no-such-nm can't be run: No such file"):
        build._undefined_python_symbols(str(compiler), [])


def test_a_wheel_serves_a_node_without_compiler_and_network(tmp_path: Path, built: Built) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cpulaunch", "ccl", "build", "--wheel", str(tmp_path)],
        capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    wheel = Path(done.stdout.strip())
    with zipfile.ZipFile(wheel) as archive:
        assert archive.testzip() is None
        assert {Path(name).name for name in archive.namelist()} >= {
            "_group.so",
            "LICENSE-oneCCL.txt",
            "RECORD",
        }
    # A fresh environment, which borrows torch and cpulaunch from this one.
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=60)
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "borrowed.pth").write_text("".join(f"{path}\n" for path in sys.path if "site-packages" in path)
                                       + f"{Path(installed.__file__).parents[2]}\n")  # fmt: skip
    pip = [sys.executable, "-m", "pip", "--python", str(venv), "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True, timeout=120, capture_output=True)
    alone = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    source = (
        "import shutil; assert not shutil.which('g++')\n"
        "from cpulaunch.ccl.installed import state; print(state().built.origin, flush=True)\n" + HELLO % "ccl"
    )
    for result in run_script(2, source, python=str(venv / "bin" / "python"), **alone):
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[:3] == ["wheel", "sum", "2.0"]


@pytest.mark.parametrize("directory", ["missing", "a file"])
def test_a_wheel_wants_a_directory(tmp_path: Path, directory: str) -> None:
    (tmp_path / "a file").write_text("")
    found = make(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        write_wheel(found, tmp_path / directory)


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
@pytest.mark.parametrize("backend", ["ccl", "cpu:ccl"])
def test_scripts_need_no_import(built: Built, backend: str) -> None:
    for result in run_script(2, HELLO % backend):
        assert result.returncode == 0, result.stderr
        assert "sum 2.0" in result.stdout
        assert "CCL_" not in result.stderr


@pytest.mark.slow
def test_torchrun(built: Built, tmp_path: Path) -> None:
    (tmp_path / "hello.py").write_text(HELLO % "ccl")
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()),
         str(tmp_path / "hello.py")],
        capture_output=True, text=True, timeout=120, env=without_rank(),
    )  # fmt: skip
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr


@pytest.mark.slow
def test_plain_mpiexec(built: Built, tmp_path: Path) -> None:
    mpiexec = Path(sys.prefix) / "bin" / "mpiexec.hydra"
    if not mpiexec.exists():
        pytest.skip("Intel MPI is not installed")
    lines = "import os\nos.environ.update(RANK=os.environ['PMI_RANK'], WORLD_SIZE=os.environ['PMI_SIZE'])\n"
    (tmp_path / "hello.py").write_text(lines + HELLO % "ccl")
    done = subprocess.run(
        [str(mpiexec), "-n", "2", sys.executable, str(tmp_path / "hello.py")], capture_output=True, text=True,
        timeout=120, env={**without_rank(), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())},
    )  # fmt: skip
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr


def without_rank() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return {k: v for k, v in environment(0, 1, 0).items() if k not in names}


@pytest.mark.slow
def test_where_nothing_is_built_init_says_what_to_do(tmp_path: Path) -> None:
    (result,) = run_script(1, HELLO % "ccl", XDG_CACHE_HOME=str(tmp_path))
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
def test_the_group_sets_what_nobody_has_set(environ: dict[str, str], expected: dict[str, str | None]) -> None:
    from cpulaunch.ccl.load import Neighbours, settings

    neighbours = Neighbours(
        hosts=1, local_rank=1, local_ranks=2, most_local_ranks=2, cores=1, oversubscribed=False
    )
    wanted = settings(neighbours, environ)
    assert {name: wanted.get(name) for name in expected} == expected


@pytest.mark.parametrize(("most", "shared"), [(1, "0"), (3, "1")])
def test_a_rank_alone_on_its_host_does_as_the_ranks_of_fuller_hosts(most: int, shared: str) -> None:
    from cpulaunch.ccl.load import Neighbours, settings

    alone = Neighbours(
        hosts=2, local_rank=0, local_ranks=1, most_local_ranks=most, cores=1, oversubscribed=False
    )
    assert settings(alone, {})["CCL_ATL_SHM"] == shared


@pytest.mark.parametrize(
    ("options", "environ", "warned"),
    [([], {}, False), (["-v"], {}, False), ([], {"CCL_LOG_LEVEL": "warn"}, True)],
    ids=["quiet", "-v", "the variable is set"],
)  # fmt: skip
@pytest.mark.slow
def test_warnings_of_oneccl_are_for_those_who_ask(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, built: Built,
    options: list[str], environ: dict[str, str], warned: bool,
) -> None:  # fmt: skip
    (tmp_path / "hello.py").write_text(HELLO % "ccl")
    oneccl = ["--backend", "ccl", "--ccl-transport", "ofi"]
    done = cpulaunch("run", "-n", "2", *options, *oneccl, "hello.py", env=environ, timeout=120)
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr
    assert ("CCL_WARN" in done.stdout + done.stderr) is warned


@pytest.mark.slow
def test_variables_that_are_set_reach_oneccl(built: Built) -> None:
    source = HELLO % "ccl" + "print(os.environ['CCL_ATL_SHM'], os.environ['CCL_WORKER_OFFLOAD'])"
    given = {"CCL_ATL_SHM": "0", "CCL_WORKER_OFFLOAD": "1", "CCL_YIELD": "sleep", "CCL_LOG_LEVEL": "info"}
    first, second = run_script(2, source, CPULAUNCH_RANK_CCL_TRANSPORT="ofi", **given)
    for result in (first, second):
        assert result.returncode == 0, result.stderr
        assert result.stdout.splitlines()[-1] == "0 1"
    assert "CCL_YIELD: sleep" in first.stdout + first.stderr
    assert "CCL_WORKER_OFFLOAD changed" not in first.stdout + first.stderr  # 1 is oneCCL's default, 0 ours


def test_info_says_what_would_be_loaded(built: Built) -> None:
    lines = dict(installed.describe(installed.state()))
    assert lines["used for ccl"].startswith(str(built.module))
