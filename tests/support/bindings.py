"""Machines and requests for properties of bindings."""

from __future__ import annotations

from hypothesis import assume, event
from hypothesis import strategies as st

from cpulaunch.errors import PlanError
from cpulaunch.model.topology import Cpu, Topology
from cpulaunch.plan.binding import Binding, bind
from cpulaunch.plan.request import BindingRequest


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Up to 8 nodes of up to 12 cores, numbered in one of three ways; some CPUs are missing or slower."""
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=8))
    threads = draw(st.integers(1, 2))
    sockets = draw(st.integers(1, len(sizes)))
    cores = [(node, i) for node, size in enumerate(sizes) for i in range(size)]
    number = {
        "physical cores first": lambda core, thread: core + thread * len(cores),
        "siblings adjacent": lambda core, thread: core * threads + thread,
        "node by node": lambda core, thread: (
            sum(sizes[: cores[core][0]]) * threads + cores[core][1] + thread * sizes[cores[core][0]]
        ),
    }[draw(st.sampled_from(["physical cores first", "siblings adjacent", "node by node"]))]
    slow = draw(st.sets(st.integers(0, len(cores) - 1)))
    missing = draw(st.sets(st.integers(0, len(cores) * threads - 1), max_size=len(cores) // 2))
    cpus = [
        Cpu(
            number(core, thread), core, node * sockets // len(sizes), node, 3000.0 if core in slow else 5000.0
        )
        for core, (node, _) in enumerate(cores)
        for thread in range(threads)
    ]
    left = tuple(sorted((c for c in cpus if c.cpu not in missing), key=lambda c: c.cpu))
    assume(left)
    quota = draw(st.none() | st.floats(0.1, 100))
    return Topology(left, quota=quota)


requests = st.builds(
    BindingRequest,
    ranks=st.none() | st.integers(1, 20),
    cores_per_rank=st.sampled_from(["auto", "auto", "max", 1, 2, 3, 5]),
    bind_numa=st.booleans(),
    logical_cores=st.booleans(),
    e_cores=st.booleans(),
    strategy=st.sampled_from(["scatter", "close"]),
    worker_count=st.sampled_from(["auto", "auto", 0, 1, 2, 3]),
    ccl_logical_cores=st.booleans(),
    dedicate_workers=st.booleans(),
    oversubscribe=st.booleans(),
    threads=st.sampled_from(["auto", "auto", "auto", 4]),
)


def bound(topology: Topology, request: BindingRequest) -> Binding:
    """Return the binding.  Skip examples that the host can't fulfil."""
    try:
        binding = bind(topology, request)
    except PlanError:
        event("impossible")
        assume(False)
        raise
    event("oversubscribed" if binding.oversubscribed else "not oversubscribed")
    return binding
