"""Making a topology from all forms of the output of lscpu."""

from __future__ import annotations

import pytest

from cpulaunch.discovery.host.lscpu import topology_from_lscpu
from cpulaunch.errors import ConfigError

ONE_CPU = ((0, 0, 0, 0),)


TWO_CORES = ((0, 0, 0, 0), (1, 1, 0, 0))


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0,0\n", TWO_CORES, id="-p"),
        pytest.param("0,0,0,0\n1,1,0,0\n", TWO_CORES, id="-p without comments"),
        pytest.param("# NODE,SOCKET,CPU,CORE\n0,0,0,0\n0,0,1,1\n", TWO_CORES, id="-p in another order"),
        pytest.param(
            "# CPU,Core,Socket,Node,,L1d,L2\n0,0,0,0,,0,0\n1,1,0,0,,8\n", TWO_CORES, id="-p with caches"
        ),
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,\n1,1,-,-\n", TWO_CORES, id="-p with unknown cells"),
        pytest.param(
            "# CPU,Core,Socket,Node\n4,3,7,0\n9,5,7,0\n", ((4, 0, 0, 0), (9, 1, 0, 0)), id="odd numbers"
        ),
        pytest.param("# CPU,Core\n0,0\n1,0\n", ((0, 0, 0, 0), (1, 0, 0, 0)), id="-p=CPU,CORE"),
        pytest.param("# CPU,Core,Socket,Node,Online\n0,0,0,0,Y\n1,1,0,0,N\n", ONE_CPU, id="-p -a"),
        pytest.param("# CPU,Core,Socket,Node\n0,0,0,0\n1,,,\n", ONE_CPU, id="-p -a without ONLINE"),
        pytest.param("CPU NODE SOCKET CORE ONLINE\n0 0 0 0 yes\n1 - - - no\n", ONE_CPU, id="-e -a"),
        pytest.param("CPU CORE L1d:L1i:L2:L3\n  0    0 0:0:0:0\n  1    1 1:1:1:0\n", TWO_CORES, id="-e"),
        pytest.param(
            "CPU SOCKET CORE\n1 1 0\n0 0 0\n", ((0, 0, 0, 0), (1, 1, 1, 0)), id="cores counted by socket"
        ),
        pytest.param("CPU CORE\n0 -\n1 -\n", TWO_CORES, id="cores unknown"),
    ],
)
def test_the_tables_of_lscpu_are_read(text: str, cpus: tuple[tuple[int, int, int, int], ...]) -> None:
    topology = topology_from_lscpu(text)
    assert tuple((c.cpu, c.core, c.socket, c.node) for c in topology.cpus) == cpus


@pytest.mark.parametrize(
    ("text", "performance"),
    [
        ("# CPU,Core,Socket,Node,Maxmhz\n0,0,0,0,4800.0000\n", 4800.0),
        ("# CPU,Core,Socket,Node,Maxmhz\n0,0,0,0,\n", None),
        ("# CPU,Core,Socket,Node,,L1d,L1i,L2,L3,Maxmhz\n0,0,0,0,,64,64,8,2500.0000\n", 2500.0),
        ("CPU CORE MAXMHZ\n0 0 5100,0000\n", 5100.0),
    ],
)
def test_the_maximum_frequency_is_read(text: str, performance: float | None) -> None:
    assert topology_from_lscpu(text).cpus[0].performance == performance


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no CPUs in the lscpu text"),
        ("# CPU,Core,Socket,Node\n", "no CPUs in the lscpu text"),
        (
            "Architecture: x86_64\nCPU(s): 2\n",
            "line 1 of the lscpu text is not a heading with the columns CPU and CORE",
        ),
        ("CPU op-mode(s): 32-bit, 64-bit\n", "line 1 of the lscpu text is not a heading"),
        ("# CPU,Socket\n0,0\n", "has no CORE column, but CPU, SOCKET"),
        ("# CPU,Core,Socket,Node\n0,0,0,0\n1,1,0\n", "line 3 of the lscpu text has 3 values for 4 columns"),
        ("CPU CORE\n0 0\n1\n", "line 3 of the lscpu text has 1 value for 2 columns"),
        ("# CPU,Core,Socket,Node\n0,0,0,0\n0,1,0,0\n", "line 3 of the lscpu text describes CPU 0 again"),
        (
            "# CPU,Core,Socket,Node\n0,zero,0,0\n",
            "line 2 of the lscpu text has 'zero' where a CORE number belongs",
        ),
        ("# CPU,Core,Socket,Node\n,0,0,0\n", "line 2 of the lscpu text has no CPU number"),
        ("CPU CORE MAXMHZ\n0 0 fast\n", "line 2 of the lscpu text has 'fast' where MAXMHZ belongs"),
    ],
)
def test_malformed_output_of_lscpu_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        topology_from_lscpu(text)
    assert message in str(caught.value)
    assert caught.value.hint == "record the machine with: lscpu -p=CPU,CORE,SOCKET,NODE,MAXMHZ"


def test_missing_columns_are_noted() -> None:
    assert topology_from_lscpu("CPU CORE\n0 0\n").notes == (
        "the lscpu text has no SOCKET column: one socket is assumed",
        "the lscpu text has no NODE column: one NUMA node is assumed",
    )
