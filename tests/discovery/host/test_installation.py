"""Finding installed MPIs, and recognizing them by their output."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from cpulaunch.discovery.host.installation import find_mpis
from cpulaunch.model.facts import Mpi

INTEL = "Intel(R) MPI Library for Linux* OS, Version 2021.18.1 Build 20260626 (id: b44796a)"
MPICH = "HYDRA build details:\n    Version:                                 5.0.2"
OPENMPI = "mpiexec (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"


def install(path: Path, says: str) -> Path:
    """Install a program that prints ``text``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(says)}\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the MPIs that are installed on the machine."""
    monkeypatch.setattr("sys.prefix", str(tmp_path / "venv"))
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.delenv("I_MPI_ROOT", raising=False)


@pytest.mark.parametrize(
    ("says", "flavour", "version"),
    [
        (INTEL, "intel", "2021.18.1"),
        (MPICH, "mpich", "5.0.2"),
        (OPENMPI, "openmpi", "5.0.11"),
        ("mpirun (Open MPI) of today", "openmpi", "unknown"),
    ],
)
def test_an_mpi_is_recognized_by_the_version_that_it_prints(
    tmp_path: Path, says: str, flavour: str, version: str
) -> None:
    path = install(tmp_path / "mpiexec", says)
    assert find_mpis("auto", str(path)) == (Mpi(flavour, str(path), version),)


@pytest.mark.parametrize("where", ["", "bin"])
def test_the_directory_may_be_the_mpis_root_or_its_bin(tmp_path: Path, where: str) -> None:
    path = install(tmp_path / "mpi" / "bin" / "mpiexec", MPICH)
    assert find_mpis("auto", str(tmp_path / "mpi" / where)) == (Mpi("mpich", str(path), "5.0.2"),)


def test_the_venv_is_searched_first_then_intels_root_then_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("I_MPI_ROOT", str(tmp_path / "root"))
    assert find_mpis("auto", "auto") == ()
    for directory in ("path", "root/bin", "venv/bin"):
        path = install(tmp_path / directory / "mpiexec", MPICH)
        assert find_mpis("auto", "auto") == (Mpi("mpich", str(path), "5.0.2"),)


def test_a_requested_mpi_is_found_behind_others(tmp_path: Path) -> None:
    mpich = install(tmp_path / "venv/bin/mpiexec", MPICH)
    openmpi = install(tmp_path / "path/mpiexec", OPENMPI)
    found = (Mpi("mpich", str(mpich), "5.0.2"), Mpi("openmpi", str(openmpi), "5.0.11"))
    assert find_mpis("openmpi", "auto") == found[1:]
    assert find_mpis("intel", "auto") == found  # so that the error can name them


def test_intels_mpiexec_hydra_is_used_instead_of_the_script_mpirun(tmp_path: Path) -> None:
    script = install(tmp_path / "mpirun", INTEL)
    hydra = install(tmp_path / "mpiexec.hydra", INTEL)
    assert find_mpis("auto", str(script)) == (Mpi("intel", str(hydra), "2021.18.1"),)


def test_the_version_of_an_mpiexec_from_pip_is_known_without_running_it(tmp_path: Path) -> None:
    python = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    (tmp_path / "venv/lib" / python / "site-packages/impi_rt-2021.18.dist-info").mkdir(parents=True)
    path = install(tmp_path / "venv/bin/mpiexec.hydra", "nothing of use")
    assert find_mpis("auto", "auto") == (Mpi("intel", str(path), "2021.18"),)


def test_other_programs_called_mpiexec_are_not_mistaken_for_an_mpi(tmp_path: Path) -> None:
    install(tmp_path / "path/mpiexec", "mpiexec of something else")
    install(tmp_path / "path/mpirun", MPICH).chmod(0o644)
    assert find_mpis("auto", "auto") == ()
