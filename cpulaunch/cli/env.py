"""``cpulaunch env``: prints a report to paste into an issue."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib import metadata

from cpulaunch import __version__, launchers
from cpulaunch.cli.backend import ccl_lines
from cpulaunch.cli.hosts import check
from cpulaunch.cli.options import Parser, add_settings, load_config
from cpulaunch.config.config import Config
from cpulaunch.config.settings import SETTINGS
from cpulaunch.model.facts import Mpi
from cpulaunch.wording import counted

EPILOG = """\
The report has versions, the machine, the MPIs, the build of `ccl` that ranks would load and why, related
environment variables, and settings that are not defaults; with a hostfile, also each host, over ssh.
It omits the values of `env:` and of variables that may hold a secret.

examples:
  cpulaunch env
  cpulaunch env -f hostfiles/four-nodes

exit code: 0; 2 wrong usage or settings; 3 a host is not ready
"""

_PACKAGES = (
    "numpy",
    "impi-rt",
    "oneccl_bind_pt",
    "intel_extension_for_pytorch",
    "accelerate",
    "transformers",
)
_PREFIXES = ("CPULAUNCH_", "CCL_", "FI_", "I_MPI_", "OMPI_MCA_", "OMP_", "KMP_", "MKL_", "GLOO_", "TORCH_",
          "MASTER_", "LD_PRELOAD", "LD_LIBRARY_PATH", "SLURM_JOB_ID", "PBS_JOBID")  # fmt: skip
_SECRET = ("TOKEN", "SECRET", "PASS", "KEY")


def main(arguments: list[str]) -> int:
    parser = Parser(
        "cpulaunch env", "Print a report to paste into an issue.", EPILOG, "cpulaunch env [OPTIONS]"
    )
    add_settings(parser, ("hosts", "mpi", "ccl", "training"), common=("hosts", "mpi", "ccl"))
    config = load_config(parser.parse(arguments))
    for label, text in (*_software(), *_machine(config), *ccl_lines(config.ccl.binding),
                        *_variables(), *_settings(config)):  # fmt: skip
        print(f"{label:16} {text}", flush=True)
    from cpulaunch.discovery.collect import listed_hosts

    return check(config) if listed_hosts(config, lambda line: None) else 0


def _software() -> Iterator[tuple[str, str]]:
    yield "cpulaunch", f"{__version__}, {os.path.dirname(os.path.dirname(__file__))}"
    yield "python", f"{platform.python_version()}, {sys.executable}"
    yield "system", f"{platform.platform()}, {platform.machine()}"
    for package in _PACKAGES:
        try:
            yield package, metadata.version(package)
        except metadata.PackageNotFoundError:
            continue


def _machine(config: Config) -> Iterator[tuple[str, str]]:
    from cpulaunch.discovery.host.installation import all_mpis
    from cpulaunch.discovery.host.interfaces import interfaces_here
    from cpulaunch.discovery.host.this_host import facts_here

    facts = facts_here()
    topology = facts.topology
    yield "CPU", (f"{counted(len(topology.sockets), 'socket')}, {counted(len(topology.nodes), 'NUMA node')}, "
                  f"{counted(len(topology.cores), 'core')} that this process may use")  # fmt: skip
    yield "bf16", " ".join(facts.cpu_flags or ()) or "no bf16 instructions"
    yield "memory", f"{(facts.memory or 0) / 2**30:.0f} GiB"
    yield "interfaces", ", ".join(f"{one.name} {one.address}" for one in interfaces_here())
    found = tuple(all_mpis(config.mpi.path))
    used = next((mpi for mpi in found if config.mpi.flavour in ("auto", mpi.flavour)), None)
    if used:
        yield "MPI", f"{_description(used)}, used for several hosts if all of them have it"
    else:
        what = "none" if config.mpi.flavour == "auto" else f"none of {config.mpi.flavour}"
        yield "MPI", f"{what} found; --launcher ssh does not need one"
    for mpi in found:
        if mpi != used:
            yield "another MPI", _description(mpi)


def _description(mpi: Mpi) -> str:
    return f"{launchers.load(mpi.flavour).title} {mpi.version}, {mpi.path}"


def _variables() -> Iterator[tuple[str, str]]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_PREFIXES):
            yield "variable", f"{name}={'…' if any(word in name for word in _SECRET) else value}"


def _settings(config: Config) -> Iterator[tuple[str, str]]:
    for key, setting in SETTINGS.items():
        if config.is_set(setting):
            value = "…" if setting is Config.env else config.value(setting)
            yield "setting", f"{key}: {value} ({config.origin(setting)})"
