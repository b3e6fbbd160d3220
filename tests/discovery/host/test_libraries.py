"""Finding allocators and OpenMP runtimes on a host."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from cpulaunch.discovery.host.libraries import find_libraries, library_directories


def library(path: Path, head: bytes = b"") -> str:
    """Write a file that starts with ``head``, or like a library for this machine; return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(head or Path(sys.executable).read_bytes()[:64])
    return str(path)


class TestFinding:
    def test_the_first_directory_with_a_library_wins(self, tmp_path: Path) -> None:
        venv = library(tmp_path / "venv/lib/libiomp5.so")
        library(tmp_path / "module/lib/libiomp5.so")
        other = library(tmp_path / "module/lib/libjemalloc.so.2")
        found = find_libraries([str(tmp_path / "venv/lib"), str(tmp_path / "module/lib")], [])
        assert (found["intel"], found["jemalloc"]) == (venv, other)

    def test_libraries_that_the_linker_would_not_load_are_skipped(self, tmp_path: Path) -> None:
        own = bytearray(Path(sys.executable).read_bytes()[:64])
        foreign = bytes([*own[:18], own[18] ^ 1, *own[19:]])  # another architecture
        library(tmp_path / "a/libiomp5.so", foreign)
        library(tmp_path / "b/libiomp5.so", b"INPUT(libother.so)")
        library(tmp_path / "c/libiomp5.so", b"\x7fELF")
        (tmp_path / "d").mkdir()
        (tmp_path / "d/libiomp5.so").symlink_to("nowhere")
        good = library(tmp_path / "e/libiomp5.so")
        assert find_libraries([str(tmp_path / name) for name in "abcde"], [])["intel"] == good

    def test_libraries_with_a_path_that_can_be_preloaded_are_preferred(self, tmp_path: Path) -> None:
        odd = [library(tmp_path / name / "libiomp5.so") for name in ("my env", "a:b")]
        plain = library(tmp_path / "plain/libiomp5.so")
        directories = [str(Path(path).parent) for path in (*odd, plain)]
        assert find_libraries(directories, [])["intel"] == plain
        assert find_libraries(directories[:2], [])["intel"] == odd[0]

    def test_minimal_tcmalloc_is_preferred(self, tmp_path: Path) -> None:
        library(tmp_path / "libtcmalloc.so.4")
        minimal = library(tmp_path / "libtcmalloc_minimal.so.4")
        assert find_libraries([str(tmp_path)], [])["tcmalloc"] == minimal

    @pytest.mark.parametrize("name", ["libgomp.so.1", "libgomp-a34b3233.so.1", "libiomp5.so", "libomp.so"])
    def test_torchs_openmp_runtime_is_found_in_its_wheel(self, tmp_path: Path, name: str) -> None:
        carried = library(tmp_path / "torch/lib" / name)
        library(tmp_path / "torch/lib/libtorch.so")
        assert find_libraries([], ["/nowhere", str(tmp_path)])["torch"] == carried

    def test_condas_torch_uses_the_library_that_replaces_libgomp(self, tmp_path: Path) -> None:
        (tmp_path / "site-packages/torch/lib").mkdir(parents=True)
        llvm = library(tmp_path / "lib/libomp.so")
        (tmp_path / "lib/libgomp.so.1").symlink_to("libomp.so")
        found = find_libraries([str(tmp_path / "lib")], [str(tmp_path / "site-packages")])
        assert found["torch"] == llvm

    def test_the_directories_of_environments_are_searched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "executable", "/home/me/venv/bin/python")
        monkeypatch.setenv("CONDA_PREFIX", "/home/me/conda")
        monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/gperftools/lib::relative:/home/me/venv/lib")
        directories = [path for path in library_directories() if path != f"{sys.prefix}/lib"]
        assert directories == ["/home/me/venv/lib", "/home/me/conda/lib", "/opt/gperftools/lib"]

    @pytest.mark.parametrize(
        ("package", "name"), [("libtcmalloc-minimal4", "tcmalloc"), ("libjemalloc2", "jemalloc")]
    )
    def test_libraries_from_the_distributions_packages_are_found(self, package: str, name: str) -> None:
        dpkg = shutil.which("dpkg")
        if not dpkg or not list(Path("/var/lib/dpkg/info").glob(f"{package}*.list")):
            pytest.skip(f"Debian's {package} is not installed here")
        assert name in find_libraries([], [])
