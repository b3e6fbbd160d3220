"""Finding allocators and OpenMP runtimes on a host, and choosing among them."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from cpulaunch.discovery.libraries import find_libraries, library_directories
from cpulaunch.errors import PlanError
from cpulaunch.plan.environment import HOW_TO_GET, choose_libraries

FOUND = {
    "tcmalloc": "/t/libtcmalloc_minimal.so.4",
    "jemalloc": "/j/libjemalloc.so.2",
    "intel": "/i/libiomp5.so",
}
GOMP = {"torch": "/torch/lib/libgomp.so.1"}


def library(path: Path, head: bytes = b"") -> str:
    """A file that begins as a library for this machine does, or with ``head``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head or Path(sys.executable).read_bytes()[:64])
    return str(path)


class TestFinding:
    def test_the_first_directory_that_has_one_counts(self, tmp_path: Path) -> None:
        venv = library(tmp_path / "venv/lib/libiomp5.so")
        library(tmp_path / "module/lib/libiomp5.so")
        other = library(tmp_path / "module/lib/libjemalloc.so.2")
        found = find_libraries([str(tmp_path / "venv/lib"), str(tmp_path / "module/lib")], [])
        assert (found["intel"], found["jemalloc"]) == (venv, other)

    def test_what_the_linker_would_not_load_is_passed_over(self, tmp_path: Path) -> None:
        own = bytearray(Path(sys.executable).read_bytes()[:64])
        foreign = bytes([*own[:18], own[18] ^ 1, *own[19:]])  # another architecture
        library(tmp_path / "a/libiomp5.so", foreign)
        library(tmp_path / "b/libiomp5.so", b"INPUT(libother.so)")
        library(tmp_path / "c/libiomp5.so", b"\x7fELF")
        (tmp_path / "d").mkdir()
        (tmp_path / "d/libiomp5.so").symlink_to("nowhere")
        good = library(tmp_path / "e/libiomp5.so")
        assert find_libraries([str(tmp_path / name) for name in "abcde"], [])["intel"] == good

    def test_minimal_tcmalloc_is_preferred(self, tmp_path: Path) -> None:
        library(tmp_path / "libtcmalloc.so.4")
        minimal = library(tmp_path / "libtcmalloc_minimal.so.4")
        assert find_libraries([str(tmp_path)], [])["tcmalloc"] == minimal

    @pytest.mark.parametrize("name", ["libgomp.so.1", "libgomp-a34b3233.so.1", "libiomp5.so", "libomp.so"])
    def test_torchs_own_openmp_is_what_its_wheel_carries(self, tmp_path: Path, name: str) -> None:
        carried = library(tmp_path / "torch/lib" / name)
        library(tmp_path / "torch/lib/libtorch.so")
        assert find_libraries([], ["/nowhere", str(tmp_path)])["torch"] == carried

    def test_condas_torch_takes_what_stands_for_libgomp(self, tmp_path: Path) -> None:
        (tmp_path / "site-packages/torch/lib").mkdir(parents=True)
        llvm = library(tmp_path / "lib/libomp.so")
        (tmp_path / "lib/libgomp.so.1").symlink_to("libomp.so")
        found = find_libraries([str(tmp_path / "lib")], [str(tmp_path / "site-packages")])
        assert found["torch"] == llvm

    def test_the_environments_own_directories(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/home/me/venv/bin/python")
        monkeypatch.setenv("CONDA_PREFIX", "/home/me/conda")
        monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/gperftools/lib::relative:/home/me/venv/lib")
        directories = [path for path in library_directories() if path != f"{sys.prefix}/lib"]
        assert directories == ["/home/me/venv/lib", "/home/me/conda/lib", "/opt/gperftools/lib"]

    @pytest.mark.parametrize(
        ("package", "name"), [("libtcmalloc-minimal4", "tcmalloc"), ("libjemalloc2", "jemalloc")]
    )
    def test_the_distributions_packages_are_found(self, package: str, name: str) -> None:
        dpkg = shutil.which("dpkg")
        if not dpkg or not list(Path("/var/lib/dpkg/info").glob(f"{package}*.list")):
            pytest.skip(f"Debian's {package} is not installed here")
        assert name in find_libraries([], [])


@pytest.mark.parametrize(
    ("found", "allocator", "openmp", "users", "expected"),
    [
        # nothing there, nothing asked for
        ({}, "auto", "auto", {}, {}),
        (None, "auto", "auto", {}, {}),
        # auto takes what was measured to help
        (FOUND, "auto", "auto", {}, {"LD_PRELOAD": "/t/libtcmalloc_minimal.so.4"}),
        (FOUND, "default", "default", {}, {}),
        (FOUND, "default", "intel", {}, {"LD_PRELOAD": "/i/libiomp5.so", "KMP_BLOCKTIME": "1"}),
        (
            FOUND,
            "tcmalloc",
            "intel",
            {},
            {"LD_PRELOAD": "/t/libtcmalloc_minimal.so.4:/i/libiomp5.so", "KMP_BLOCKTIME": "1"},
        ),
        # torch brings Intel's itself
        ({"torch": "/torch/lib/libiomp5.so"}, "auto", "intel", {}, {"KMP_BLOCKTIME": "1"}),
        ({"torch": "/torch/lib/libiomp5.so"}, "auto", "auto", {}, {"KMP_BLOCKTIME": "1"}),
        # nobody has looked: a name that the linker looks for
        (None, "default", "intel", {}, {"LD_PRELOAD": "libiomp5.so", "KMP_BLOCKTIME": "1"}),
        # the user's own stays, and comes first
        (
            FOUND,
            "auto",
            "auto",
            {"LD_PRELOAD": "/my/libfoo.so /my/bar.so"},
            {"LD_PRELOAD": "/my/libfoo.so:/my/bar.so:/t/libtcmalloc_minimal.so.4"},
        ),
        (FOUND, "auto", "auto", {"LD_PRELOAD": "/my/libjemalloc.so"}, {}),
        (FOUND, "default", "auto", {"LD_PRELOAD": "/my/libmimalloc.so.2"}, {}),
        (FOUND, "jemalloc", "auto", {"LD_PRELOAD": "/my/libjemalloc.so"}, {}),
        (
            FOUND,
            "auto",
            "auto",
            {"LD_PRELOAD": "/my/libiomp5.so", "KMP_BLOCKTIME": "200"},
            {"LD_PRELOAD": "/my/libiomp5.so:/t/libtcmalloc_minimal.so.4"},
        ),
    ],
)  # fmt: skip
def test_choices(found, allocator, openmp, users, expected) -> None:
    found = {**GOMP, **found} if found is not None else None
    assert choose_libraries(found, allocator, openmp, users).env == expected


def test_jemalloc_is_tuned_unless_the_user_has_done_it() -> None:
    tuned = choose_libraries(FOUND, "jemalloc", "auto", {}).env
    assert set(tuned) == {"LD_PRELOAD", "MALLOC_CONF"}
    assert "background_thread:true" in tuned["MALLOC_CONF"]
    assert set(choose_libraries(FOUND, "jemalloc", "auto", {"MALLOC_CONF": "x:1"}).env) == {"LD_PRELOAD"}


@pytest.mark.parametrize(
    ("openmp", "users", "torchs", "intel"),
    [
        ("default", {}, "/torch/lib/libgomp.so.1", False),
        ("default", {}, "/torch/lib/libiomp5.so", True),
        ("intel", {}, "/torch/lib/libgomp.so.1", True),
        ("auto", {"LD_PRELOAD": "/my/libomp.so"}, "/torch/lib/libgomp.so.1", True),
        ("auto", {"LD_PRELOAD": "/my/libgomp.so.1"}, "/torch/lib/libiomp5.so", False),
    ],
)
def test_which_runtime_it_will_be(openmp: str, users: dict[str, str], torchs: str, intel: bool) -> None:
    found = {**FOUND, "torch": torchs}
    assert choose_libraries(found, "auto", openmp, users).intel_openmp is intel


@pytest.mark.parametrize(
    ("allocator", "openmp", "missing"),
    [("tcmalloc", "auto", "tcmalloc"), ("jemalloc", "auto", "jemalloc"), ("auto", "intel", "intel")],
)
def test_what_is_asked_for_and_missing_is_an_error_that_says_how_to_get_it(
    allocator: str, openmp: str, missing: str
) -> None:
    with pytest.raises(PlanError, match="was not found") as caught:
        choose_libraries(GOMP, allocator, openmp, {})
    assert caught.value.hint == HOW_TO_GET[missing]


@pytest.mark.parametrize(
    ("allocator", "openmp", "preload"),
    [("jemalloc", "auto", "/my/libtcmalloc.so.4"), ("auto", "intel", "/my/libgomp.so.1")],
)
def test_what_contradicts_the_users_preload_is_an_error(allocator: str, openmp: str, preload: str) -> None:
    with pytest.raises(PlanError, match=f"LD_PRELOAD has .* \\({preload}\\)"):
        choose_libraries(FOUND, allocator, openmp, {"LD_PRELOAD": preload})
