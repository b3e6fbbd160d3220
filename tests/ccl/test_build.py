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
from support.command import TIMEOUT, bounded, clean_environment, processes_with
from support.marks import repeat

from cpulaunch.ccl import build, compiler, installed
from cpulaunch.ccl.installed import Built, Part, State
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


def make(tmp_path: Path, kind: str = "layer", **changes: str) -> Part:
    """A part in the cache below ``tmp_path`` that can't be loaded."""
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


# --- what is there


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
def test_a_built_part_is_taken_only_if_it_fits(
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
def test_a_layer_serves_all_builds_and_patch_releases_of_its_torch(version: str, key: str) -> None:
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
        f"the ccl process group is built, but not loaded, as others may write to {cache}: a run"
        in done.stderr
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("where", ["cpulaunch", "cpulaunch/ccl"])
def test_nothing_is_built_into_another_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A dry run says so, too: it calls ``check``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cpulaunch/ccl").mkdir(parents=True)
    os.chown(theirs := tmp_path / where, 12345, -1)
    for act in (lambda: build.check(installed.state()), build.build):
        with pytest.raises(HostError, match=f"others may write to {theirs}\n"):
            act()


def test_the_cache_is_made_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        with build._lock(lambda step, detail: None):
            assert installed.writable_by_others(installed.cache_directory()) is None
    finally:
        os.umask(before)


def test_a_part_that_needs_a_newer_c_library_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part that was built on another host, such as a login node."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    part = make(tmp_path, "core", glibc="glibc 99.0")
    part.file.write_bytes(b"\0GLIBC_2.2.5\0GLIBC_99.0\0GLIBCXX_3.4.11\0")
    assert "this one lacks GLIBC_99.0" in str(installed.state().problem)
    part.file.write_bytes(b"\0GLIBC_2.2.5\0GLIBCXX_3.4.11\0")
    assert installed.state().part("core") == part


def test_this_host_meets_the_groups_requirements(built: Built) -> None:
    for part in built.parts:
        assert installed.missing_versions(part.file) == []


# --- building


def test_building_without_a_compiler_suggests_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(HostError, match="no C\\+\\+ compiler") as caught:
        build.build()
    assert "ccl build --wheel" in str(caught.value.hint)
    assert "gloo" in str(caught.value.hint)


@pytest.mark.slow
def test_building_without_the_network_suggests_a_remedy(
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
        build.build(lambda step, detail: said.append(step + detail), oneccl=True)
    assert "network" in str(caught.value.hint)
    assert said == [f"fetching oneccl-devel {installed.ONECCL_VERSION} (32 MB)"]
    # No partial build is left, not even by a build that was killed earlier.
    assert {p.name for p in installed.cache_directory().iterdir()} == {"lock", "not-fetched.json"}


def test_an_unsupported_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installed, "state", lambda: State("2.5.1", Path(), (), None))
    with pytest.raises(HostError, match=r"torch 2.5.1 is older than 2.8"):
        build.build()


@pytest.mark.slow
def test_a_run_that_builds_prints_two_lines(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "hello.py").write_text("")
    (gxx := tmp_path / "g++").write_text('#!/bin/sh\ncase "$1" in -dump*) exec g++ "$@";; esac; exit 1\n')
    gxx.chmod(0o755)
    env = {"XDG_CACHE_HOME": str(tmp_path), "CXX": str(gxx)}
    done = cpulaunch("run", "-n", "1", "--backend", "ccl", "hello.py", env=env)
    assert done.returncode == 3
    compiling, failed, *_ = done.stderr.splitlines()
    assert compiling == (
        "cpulaunch: ccl: compiling the core and torch's layer (building it takes up to a minute, once)"
    )
    assert failed.startswith("cpulaunch: error: the compiler failed")


@pytest.mark.slow
def test_a_job_that_cannot_be_planned_fails_before_the_build(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "hello.py").write_text("")
    env = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "/bin/false"}
    done = cpulaunch("run", "-n", "1000", "--backend", "ccl", "hello.py", env=env)
    assert done.returncode == 2
    assert "compiling" not in done.stderr


# A compiler that counts the files it compiles.  On request, it waits for a pipe before the core's larger
# unit.
COUNTING = """#!/bin/sh
case "$*" in *" -c "*)
  echo "$*" | grep -o "[a-z]*[.]cpp -o" >> {here}/compiled
  case "$*" in */layer.cpp*) test -e {here}/fifo && exec cat {here}/fifo;; esac;;
esac
exec g++ "$@"
"""
BUILD = """
import sys; from pathlib import Path; from cpulaunch.ccl import build, compiler, installed
compiler.SOURCES = installed.SOURCES = Path(sys.argv[1])
build._check_loading = lambda made, there: None
print(build.build(lambda *t: print(*t, flush=True)).module)
"""


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Few sources with their own cache and a counting compiler.  The real sources take up to a minute."""
    sources = tmp_path / "sources"
    for name in ("core/arithmetic.cpp", "core/boundary.cpp", "core/other.cpp", "layer/group.cpp"):
        (sources / name).parent.mkdir(parents=True, exist_ok=True)
        (sources / name).write_text(f"int {Path(name).stem};\n" if "boundary" not in name else "")
    (gxx := tmp_path / "g++").write_text(COUNTING.format(here=tmp_path))
    gxx.chmod(0o755)
    monkeypatch.setenv("CXX", str(gxx))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return sources


def start_build(sources: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(sources)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def compiled_units(tmp_path: Path) -> list[str]:
    return sorted(line.split(".")[0] for line in (tmp_path / "compiled").read_text().splitlines())


@pytest.mark.slow
def test_concurrent_first_builds_make_one_complete_build(tmp_path: Path, small: Path) -> None:
    with bounded(start_build(small), limit=120) as first, bounded(start_build(small), limit=120) as second:
        texts = [builder.communicate()[0] for builder in (first, second)]
    modules = {text.splitlines()[-1] for text in texts}
    assert len(modules) == 1
    assert Path(modules.pop()).stat().st_size > 1e3
    assert compiled_units(tmp_path) == ["arithmetic", "core", "layer"]
    # The second build waited for the first, and used its result.
    assert sorted("linking" in text for text in texts) == [False, True]
    assert any("waiting for another build" in text for text in texts)
    # Only files in use are kept.
    assert {path.name.partition("-")[0] for path in installed.cache_directory().iterdir()} == {
        "core",
        "lock",
        "torch",
    }


@pytest.mark.slow
def test_the_next_build_uses_the_objects_of_an_interrupted_one(tmp_path: Path, small: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with bounded(start_build(small), limit=120) as builder:
        assert builder.stdout is not None
        while not builder.stdout.readline().endswith("2 of 3\n"):
            pass
        os.killpg(builder.pid, signal.SIGINT)
        builder.communicate()
    assert len([*(installed.cache_directory() / "objects").iterdir()]) == 2
    assert compiled_units(tmp_path) == ["arithmetic", "core", "layer"]
    (tmp_path / "fifo").unlink()
    (tmp_path / "compiled").unlink()
    with bounded(start_build(small), limit=120) as builder:
        builder.communicate()
    assert (builder.returncode, compiled_units(tmp_path)) == (0, ["layer"])


@pytest.mark.slow
def test_another_torch_compiles_only_the_layer(tmp_path: Path, small: Path) -> None:
    """All builds share the core, from a wheel or an earlier build."""
    with bounded(start_build(small), limit=120) as builder:
        builder.communicate()
    (layer,) = installed.cache_directory().glob("torch-*")
    shutil.rmtree(layer)
    (tmp_path / "compiled").unlink()
    with bounded(start_build(small), limit=120) as builder:
        builder.communicate()
    assert (builder.returncode, compiled_units(tmp_path)) == (0, ["layer"])


def test_cores_and_memory_limit_the_number_of_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(Path, "read_text", lambda self: f"MemTotal: 1 kB\nMemAvailable: {8 << 20} kB\n")
    assert compiler.jobs() == 5
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3})
    assert compiler.jobs() == 1


# --- the symbols that oneCCL's static library lacks

USES_ONECCL = """
#include <oneapi/ccl.hpp>
void use() { ccl::init(); }
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
    lines = (installed.SOURCES / "oneccl/shim.cpp").read_text().splitlines()
    source = tmp_path / "shim.cpp"
    source.write_text("\n".join(line for line in lines if without not in line) + "\n")
    return compiled(source, oneccl)


@pytest.mark.slow
def test_the_shim_defines_exactly_the_archives_missing_symbols(tmp_path: Path, oneccl: Path) -> None:
    archive = oneccl / "libccl.a"
    needed = symbols(archive, "--undefined-only") - symbols(archive, "--defined-only")
    defined = symbols(shim(tmp_path, oneccl), "--defined-only", "--extern-only")
    assert defined <= needed
    assert {name for name in needed if name.startswith(("hwloc_", "__itt_", "_intel_"))} <= defined


def test_ctrl_c_ends_a_build_and_its_compilers(tmp_path: Path) -> None:
    """No further file is compiled.  The compilers get the terminal's SIGINT themselves."""
    (gxx := tmp_path / "g++").write_text(f"#!/bin/sh\necho begun >>{tmp_path}/begun\nexec sleep 300\n")
    gxx.chmod(0o755)
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)  # both ends, or the first writer would wait for a reader
    program = (
        "import sys; from pathlib import Path; from cpulaunch.ccl import compiler;"
        "here = Path(sys.argv[1]); compiler.compile_units({'core': compiler.core_units()},"
        " compiler.Compiler(str(here / 'g++'), ''), here / 'kept', here, print)"
    )
    argv = [sys.executable, "-c", program, tmp_path]
    with subprocess.Popen(argv, start_new_session=True, stderr=subprocess.PIPE, text=True) as builder:
        try:
            for _ in range(min(compiler.jobs(), len(compiler.core_units()))):  # that run at the same time
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


@pytest.mark.parametrize(
    ("number", "code", "said"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGINT, 130, "interrupted; the next build reuses the compiled files"),
    ],
)
def test_a_signal_to_the_launcher_alone_ends_the_compilers(
    tmp_path: Path, number: signal.Signals, code: int, said: str
) -> None:
    (tools := tmp_path / "tools").mkdir()
    (gxx := tools / "g++").write_text(
        f'#!/bin/sh\ncase "$*" in *-version*|*-print*|*-dump*) exec /usr/bin/g++ "$@";; esac\n'
        f"echo begun >>{tmp_path}/begun\nexec sleep 300\n"
    )
    gxx.chmod(0o755)
    os.mkfifo(tmp_path / "begun")
    begun = os.open(tmp_path / "begun", os.O_RDWR)  # both ends, or the first writer would wait for a reader
    environment = clean_environment(
        PATH=f"{tools}:{os.environ['PATH']}", XDG_CACHE_HOME=str(tmp_path / "cache"), OF=str(tmp_path)
    )
    argv = [sys.executable, "-m", "cpulaunch", "ccl", "build"]
    with bounded(subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True)) as builder:
        assert select.select([begun], [], [], TIMEOUT)[0]
        builder.send_signal(number)
        _, error = builder.communicate()
    os.close(begun)
    assert builder.returncode == code
    assert error.splitlines()[1:] == ([f"cpulaunch: ccl: {said}"] if said else [])
    assert processes_with(f"OF={tmp_path}") == []
    assert not [*(tmp_path / "cache" / "cpulaunch" / "ccl").glob("building-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [None, repeat("hwloc_topology_init"), repeat("hwloc_bitmap_alloc"), repeat("_intel_fast_memcpy")],
)
def test_the_link_error_names_an_undefined_symbol(tmp_path: Path, oneccl: Path, missing: str | None) -> None:
    (tmp_path / "user.cpp").write_text(USES_ONECCL)
    text = (missing or "\0").replace("hwloc_bitmap_alloc", "NO_TOPOLOGY(bitmap_alloc)")
    objects = [compiled(tmp_path / "user.cpp", oneccl), shim(tmp_path, oneccl, without=text)]
    linked = tmp_path / "linked.so"
    argv = ["g++", "-shared", "-o", str(linked), *map(str, objects), "-Wl,-z,defs"]
    if missing is None:
        compiler.link_oneccl(argv, oneccl / "libccl.a")
        assert not {name for name in symbols(linked, "-D", "--defined-only") if "ccl" in name}
    else:
        with pytest.raises(HostError, match=f"(?m)the linker found no definition of {missing}$"):
            compiler.link_oneccl(argv, oneccl / "libccl.a")


@pytest.mark.slow
def test_a_build_fails_if_its_sources_change_meanwhile(tmp_path: Path, small: Path) -> None:
    gxx = tmp_path / "g++"
    gxx.write_text(f'#!/bin/sh\necho "// " >>{small}/core/other.cpp\nexec g++ "$@"\n')
    with bounded(start_build(small), limit=120) as builder:
        _, error = builder.communicate()
    assert "sources were changed while they were compiled" in error
    assert not [*installed.cache_directory().glob("core-*")]


@pytest.mark.slow
def test_a_build_that_does_not_load_is_deleted(tmp_path: Path, small: Path) -> None:
    program = BUILD.replace("build._check_loading = lambda made, there: None\n", "")
    with bounded(
        subprocess.Popen([sys.executable, "-c", program, str(small)], stderr=subprocess.PIPE, text=True),
        limit=120,
    ) as builder:
        _, error = builder.communicate()
    assert "the compiled libraries do not load" in error
    assert not [*installed.cache_directory().glob("core-*")]


def test_a_toolchain_without_nm_is_named(tmp_path: Path) -> None:
    (gxx := tmp_path / "g++").write_text("#!/bin/sh\necho no-such-nm\n")
    gxx.chmod(0o755)
    with pytest.raises(HostError, match="no-such-nm can't be run: No such file"):
        compiler._ignored(compiler.Compiler(str(gxx), ""), [], ("Py",))


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
            "libcpulaunch_ccl.so",
            "RECORD",
        }
    # A fresh environment with the torch and cpulaunch of this one.
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
        "from cpulaunch.ccl.installed import state; from cpulaunch.kernels import load; load.load()\n"
        "print(state().built.layer.origin, state().part('kernels').origin, flush=True)\n" + HELLO % "ccl"
    )
    for result in run_script(2, source, python=str(venv / "bin" / "python"), **alone):
        assert result.returncode == 0, result.stderr
        assert result.stdout.split()[:4] == ["wheel", "wheel", "sum", "2.0"]


@pytest.mark.parametrize("directory", ["missing", "a file"])
def test_the_wheel_option_requires_a_directory(tmp_path: Path, directory: str) -> None:
    (tmp_path / "a file").write_text("")
    found = make(tmp_path)
    with pytest.raises(UsageError, match="is not a directory"):
        write_wheel([found], tmp_path / directory)


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
    (tmp_path / "hello.py").write_text(HELLO % "ccl")
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
def test_the_group_sets_only_unset_variables(
    environ: dict[str, str], expected: dict[str, str | None]
) -> None:
    from cpulaunch.ccl.load import Neighbours, settings

    neighbours = Neighbours(
        hosts=1, local_rank=1, local_ranks=2, most_local_ranks=2, cores=1, oversubscribed=False
    )
    wanted = settings(neighbours, environ)
    assert {name: wanted.get(name) for name in expected} == expected


@pytest.mark.parametrize(("most", "shared"), [(1, "0"), (3, "1")])
def test_a_rank_alone_on_its_host_uses_the_same_settings_as_the_others(most: int, shared: str) -> None:
    from cpulaunch.ccl.load import Neighbours, settings

    alone = Neighbours(
        hosts=2, local_rank=0, local_ranks=1, most_local_ranks=most, cores=1, oversubscribed=False
    )
    assert settings(alone, {})["CCL_ATL_SHM"] == shared


@pytest.mark.parametrize(
    ("options", "environ", "warned"),
    [repeat([], {}, False), (["-v"], {}, False), repeat([], {"CCL_LOG_LEVEL": "warn"}, True)],
    ids=["quiet", "-v", "the variable is set"],
)  # fmt: skip
@pytest.mark.slow
def test_warnings_of_oneccl_are_shown_on_request(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path, built: Built,
    options: list[str], environ: dict[str, str], warned: bool,
) -> None:  # fmt: skip
    (tmp_path / "hello.py").write_text(HELLO % "ccl")
    oneccl = ["--backend", "ccl", "--ccl-transport", "oneccl"]
    done = cpulaunch("run", "-n", "2", *options, *oneccl, "hello.py", env=environ, timeout=120)
    assert done.stdout.count("sum 2.0 ccl") == 2, done.stderr
    assert ("CCL_WARN" in done.stdout + done.stderr) is warned


@pytest.mark.slow
def test_the_users_variables_reach_oneccl(built: Built) -> None:
    source = HELLO % "ccl" + "print(os.environ['CCL_ATL_SHM'], os.environ['CCL_WORKER_OFFLOAD'])"
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
