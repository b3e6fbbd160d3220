"""The ports on which a job listens on every host with ``--port-range``, and the errors of this option."""

from __future__ import annotations

import ipaddress
import sys
from pathlib import Path

import pytest
from support.chaos import LAUNCHERS
from support.command import TIMEOUT, bounded, clean_environment, launcher_options, mpi_options
from support.faults import Cluster
from support.marks import repeat
from support.namespaces import NETWORK

from cluster.conftest import HOSTS, Run
from cpulaunch.ccl.installed import state

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(state().built is None, reason="not built: cpulaunch ccl build"),
]

FIRST, LAST = 20100, 20139
RANGE = ("--port-range", f"{FIRST}-{LAST}")

# Uses two groups, messages, a checkpoint, and communication through an MPI.
LISTENS = """
import ctypes, os, pathlib, sys, time
import torch, torch.distributed as dist
import cpulaunch

def barrier_of_mpi():
    import ctypes.util
    mpi = ctypes.CDLL(sys.argv[1], ctypes.RTLD_GLOBAL)
    world = ctypes.c_int(0x44000000)
    if hasattr(mpi, "ompi_mpi_comm_world"):
        world = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.in_dll(mpi, "ompi_mpi_comm_world")))
    assert mpi.MPI_Init(None, None) == 0
    size = ctypes.c_int()
    mpi.MPI_Comm_size(world, ctypes.byref(size))
    assert size.value == int(os.environ["WORLD_SIZE"]), size
    assert mpi.MPI_Barrier(world) == 0
    return mpi

mpi = barrier_of_mpi() if len(sys.argv) > 1 else None
dist.init_process_group()
rank, size = dist.get_rank(), dist.get_world_size()
model = torch.nn.Linear(3, 3)
checkpoint = cpulaunch.Checkpoint("saved", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
dist.all_reduce(x := torch.ones(300_000))
assert x[0] == size
pair = dist.new_group([0, size - 1])
if rank in (0, size - 1):
    dist.all_reduce(torch.ones(3), group=pair)
checkpoint.save()
print("ready", flush=True)
while not pathlib.Path("go").exists():
    time.sleep(0.05)
dist.barrier()
if mpi:
    mpi.MPI_Finalize()
"""


def listening(cluster: Cluster, host: str) -> set[int]:
    """The TCP ports on which a host listens for other hosts, except sshd's port."""
    tables = cluster.run(host, ["cat", "/proc/net/tcp", "/proc/net/tcp6"], timeout=TIMEOUT).stdout
    ports = set()
    for line in tables.splitlines():
        _, local, _, status, *_ = line.split()
        if status == "0A":
            address, _, port = local.partition(":")
            words = bytes.fromhex(address)
            octets = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
            if not ipaddress.ip_address(octets).is_loopback:
                ports.add(int(port, 16))
    return ports - {22}


def ports_of_a_job(
    cluster: Cluster, directory: Path, *options: object, library: Path | None = None
) -> dict[str, set[int]]:
    """Start a job of three ranks on two hosts from ``login``; return the ports on which each host listens."""
    (directory / "train.py").write_text(LISTENS)
    argv = [sys.executable, "-m", "cpulaunch", "run", "--hosts", "node0:2,node1:1", "--tee", "all"]
    argv += [*map(str, options), "train.py", *([str(library)] if library else [])]
    job = cluster.start("login", argv, directory=directory, env=clean_environment())
    with bounded(job, 90.0):
        assert job.stdout
        ready = [job.stdout.readline() for _ in range(3)]
        assert all(line.endswith("ready\n") for line in ready), (ready, job.communicate()[1])
        found = {host: listening(cluster, host) for host in ("login", *HOSTS)}
        (directory / "go").touch()
        _, stderr = job.communicate()
    assert job.returncode == 0, stderr
    return found


def within(found: dict[str, set[int]]) -> bool:
    """Whether all hosts listen only on ports in RANGE."""
    return all(ports <= set(range(FIRST, LAST + 1)) for ports in found.values())


def library_of(options: list[str]) -> Path | None:
    """The library of the MPI that the options select, or None for Intel MPI, which oneCCL loads itself."""
    if "--mpi-path" not in options:
        return None
    (library,) = Path(options[-1]).parent.glob("lib/libmpi.so.??")  # wheels have no link libmpi.so
    return library


@pytest.mark.parametrize("launcher", [repeat(name) if name == "mpich" else name for name in LAUNCHERS])
def test_all_sockets_of_a_job_are_within_the_range(launcher: str, cluster: Cluster, tmp_path: Path) -> None:
    options = launcher_options(launcher)
    # Without this variable, Open MPI's ranks would use the address of docker0.
    network = ("--env", f"OMPI_MCA_btl_tcp_if_include={NETWORK}") if launcher == "openmpi" else ()
    found = ports_of_a_job(cluster, tmp_path, *options, *network, *RANGE, library=library_of(options))
    # The launcher listens on ``login``, and ranks, the store and daemons listen on the hosts of the ranks.
    assert [host for host, ports in found.items() if ports] == ["login", "node0", "node1"]
    assert within(found), found


@pytest.mark.parametrize("transport", ["ofi", repeat("oneccl"), repeat("mpi")])
def test_libfabrics_sockets_are_within_the_range(transport: str, cluster: Cluster, tmp_path: Path) -> None:
    options = (*mpi_options("intel"), "--ccl-transport", transport)
    found = ports_of_a_job(cluster, tmp_path, *options, *RANGE)
    assert all(found[host] for host in ("node0", "node1"))
    assert within(found), found


def test_settings_that_would_listen_outside_the_range_are_an_error(cpulaunch: Run, tmp_path: Path) -> None:
    """tests/plan/test_network.py tests other settings."""
    (tmp_path / "train.py").touch()
    done = cpulaunch("run", "--dry-run", "--port-range", "20139-20100", "train.py")
    assert done.returncode == 2
    assert "expected ports such as" in done.stderr


GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("ccl")
try:
    dist.all_reduce(torch.ones(4).to_sparse())
except Exception as e:
    print("refused:", str(e).split(",")[0], flush=True)
dist.new_group(backend="gloo")
"""


def test_a_script_that_needs_gloo_gets_a_warning(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(GLOO)
    done = cpulaunch("run", "--hosts", "node0,node1", "--launcher", "ssh", *RANGE, "train.py")
    assert done.returncode == 1
    assert "refused: this call needs gloo" in done.stdout, done.stderr
    said = " ".join(done.stderr.replace("│", " ").split())
    assert "gloo can't keep its ports within a range: new_group(backend='gloo')" in said


def test_a_range_that_is_too_small_is_an_error(cpulaunch: Run, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import torch.distributed as dist\ndist.init_process_group()\n")
    done = cpulaunch(
        "run", "--hosts", "node0:2,node1:2", "--launcher", "ssh", "--port-range", "20100-20102", "train.py"
    )
    assert done.returncode == 1
    assert "can't listen on 10.213.88.2, ports 20100-20102: Address already in use" in done.stderr
