"""Building the group."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from support.command import TIMEOUT, bounded, clean_environment, processes_with
from support.marks import repeat

from cpulaunch.ccl import build, compiler, installed
from cpulaunch.ccl.installed import State
from cpulaunch.errors import HostError


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
@pytest.mark.parametrize("where", ["cpulaunch", "cpulaunch/ccl"])
def test_nothing_is_built_into_another_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A dry run has the same error, because it calls ``check``."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cpulaunch/ccl").mkdir(parents=True)
    os.chown(theirs := tmp_path / where, 12345, -1)
    for act in (lambda: build.check(installed.state()), build.build):
        with pytest.raises(HostError, match=f"others may write to {theirs}\n"):
            act()


def test_only_its_user_can_write_to_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = os.umask(0)
    try:
        with build._lock(lambda step, detail: None):
            assert installed.writable_by_others(installed.cache_directory()) is None
    finally:
        os.umask(before)


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
    steps: list[str] = []
    (installed.cache_directory() / "building-killed" / "oneccl").mkdir(parents=True)
    with pytest.raises(HostError, match="could not fetch oneccl-devel") as caught:
        build.build(lambda step, detail: steps.append(step + detail), oneccl=True)
    assert "network" in str(caught.value.hint)
    assert steps == [f"fetching oneccl-devel {installed.ONECCL_VERSION} (32 MB)"]
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
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("-n", "1000"), 2, "1000 ranks"),
        (("--launcher", "ssh", "--hosts", "localhost,no-such-host.invalid"), 3, "no-such-host.invalid: ssh"),
    ],
)
def test_a_job_that_cannot_be_planned_fails_before_the_build(
    cpulaunch: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
    options: tuple[str, ...],
    code: int,
    message: str,
) -> None:
    (tmp_path / "hello.py").write_text("")
    env = {"XDG_CACHE_HOME": str(tmp_path), "CXX": "/bin/false"}
    done = cpulaunch("run", *options, "--backend", "ccl", "hello.py", env=env)
    assert done.returncode == code
    assert message in done.stderr
    assert "compiling" not in done.stderr


# A compiler that records the files it compiles.  If there is a pipe, it waits for it at the layer.
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
    """A few small sources, a separate cache and the recording compiler.  Real sources take up to a minute."""
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
    # Object files are deleted after the build.
    assert {path.name.partition("-")[0] for path in installed.cache_directory().iterdir()} == {
        "core",
        "lock",
        "torch",
    }


@pytest.mark.slow
def test_a_build_uses_the_objects_of_an_interrupted_build(tmp_path: Path, small: Path) -> None:
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
    """Compile the shim without the lines that contain the given text."""
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


@pytest.mark.parametrize(
    ("number", "code", "message"),
    [
        (signal.SIGTERM, 128 + signal.SIGTERM, ""),
        (signal.SIGINT, 130, "interrupted; the next build reuses the compiled files"),
    ],
)
def test_a_signal_to_the_launcher_alone_ends_the_compilers(
    tmp_path: Path, number: signal.Signals, code: int, message: str
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
    assert error.splitlines()[1:] == ([f"cpulaunch: ccl: {message}"] if message else [])
    assert processes_with(f"OF={tmp_path}") == []
    assert not [*(tmp_path / "cache" / "cpulaunch" / "ccl").glob("building-*")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "missing",
    [None, repeat("hwloc_topology_init")],
)
def test_the_link_error_names_an_undefined_symbol(tmp_path: Path, oneccl: Path, missing: str | None) -> None:
    (tmp_path / "user.cpp").write_text(USES_ONECCL)
    objects = [compiled(tmp_path / "user.cpp", oneccl), shim(tmp_path, oneccl, without=missing or "\0")]
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
