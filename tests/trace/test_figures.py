"""The figures of traces for which they are known."""

from __future__ import annotations

from trace.recorded import Recorded, merged

import pytest

from cpulaunch.trace.advice import advice
from cpulaunch.trace.figures import Figures, as_json, figures, is_computation
from cpulaunch.trace.intervals import intersect, subtract, total, union
from cpulaunch.trace.text import summary

LOADER = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"


def of(*recorded: Recorded) -> Figures:
    return figures(merged(*recorded)[1])


def first_advice(found: Figures) -> str:
    return advice(found)[0].text


def test_intervals() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (4, 4)]) == [(1, 4), (5, 6)]
    assert intersect([(1, 4), (5, 9)], [(3, 6), (8, 10)]) == [(3, 4), (5, 6), (8, 9)]
    assert subtract([(1, 4), (5, 9)], [(2, 3), (3.5, 6), (7, 8)]) == [(1, 2), (3, 3.5), (6, 7), (8, 9)]
    assert total([(1, 2), (4, 6)]) == 3


def test_the_parts_of_a_step_add_up() -> None:
    """A step of 1000 µs: 200 of input, 300 of computation, half hidden communication, 100 of optimizer."""
    rank = Recorded(0, steps=1)
    rank.add(LOADER, 0, 200, cat="user_annotation").add("aten::stack", 50, 100)
    rank.add("aten::linear", 200, 200).add("aten::mm", 200, 100)
    rank.add("autograd::engine::evaluate_function: MmBackward0", 400, 100).add("aten::mm", 400, 100)
    rank.collective("all_reduce", 400, 250, 1)
    rank.add("Optimizer.step#AdamW.step", 700, 100, cat="user_annotation").add("aten::add_", 720, 60)
    (shares,) = of(rank).ranks
    parts = [shares.computation, shares.optimizer, shares.input, shares.communication, shares.waiting]
    assert parts == pytest.approx([0.3, 0.1, 0.2, 0.15, 0.0])
    assert (shares.hidden, shares.other) == pytest.approx((0.1, 0.25))
    assert sum(parts) + shares.other == pytest.approx(1)


def test_a_wait_within_an_operation_is_not_computation() -> None:
    """An example is an autograd function with a collective in its backward pass."""
    rank = Recorded(0, steps=1)
    rank.add("autograd::engine::evaluate_function: SyncBatchNormBackward", 0, 800)
    rank.add("SyncBatchNormBackward", 0, 800).collective("all_reduce", 100, 600, 1)
    (shares,) = of(rank).ranks
    assert (shares.computation, shares.communication) == pytest.approx((0, 0.6))


@pytest.mark.parametrize(
    ("name", "computes"),
    [
        ("aten::mm", True),
        ("torch_ipex::linear", True),
        ("Torch-Compiled Region: 0/0", True),
        ("CompiledFunctionBackward", True),
        ("c10d::allreduce_", False),
        ("autograd::engine::evaluate_function: AddmmBackward0", False),
        ("AddmmBackward0", False),
        ("DistributedDataParallel.forward", False),
    ],
)
def test_operations_that_count_as_computation(name: str, computes: bool) -> None:
    assert is_computation(name) is computes


def test_own_time_excludes_called_operations() -> None:
    rank = Recorded(0, steps=2)
    for step in range(2):
        rank.add("aten::linear", 1000 * step, 500).add("aten::mm", 1000 * step + 100, 300)
    found = {each.name: each for each in of(rank).operations}
    assert (found["aten::mm"].seconds, found["aten::linear"].seconds) == pytest.approx((300e-6, 200e-6))
    assert (found["aten::mm"].share, found["aten::mm"].calls) == pytest.approx((0.3, 1))


def test_the_slowest_rank_is_named_first_and_why() -> None:
    """In every step, three ranks wait for one that computes longer."""
    ranks = []
    for rank in range(4):
        ranks.append(recorded := Recorded(rank, f"node{rank}", steps=3))
        busy = 800 if rank == 2 else 200
        for step in range(3):
            recorded.add("aten::mm", 1000 * step, busy)
            recorded.collective("all_reduce", 1000 * step + busy, 900 - busy, step)
    found = of(*ranks)
    assert found.waited_for == pytest.approx((2, 1.0))
    assert found.imbalance == pytest.approx(800 / 350)
    assert first_advice(found) == (
        "60 % of the others' time waiting for slower ranks: rank 2 on node2: it computes 0.8 ms a step, the others 0.2 ms"
    )


@pytest.mark.parametrize(
    ("loader", "hint"),
    [(LOADER, "num_workers > 0"), (LOADER.replace("Single", "MultiProcessing"), "workers don't keep up")],
)
def test_a_slow_loader_is_named_first(loader: str, hint: str) -> None:
    ranks = [Recorded(rank, steps=1).add(loader, 0, 400, cat="user_annotation") for rank in range(2)]
    for each in ranks:
        each.add("aten::mm", 400, 600)
    line = first_advice(of(*ranks))
    assert line.startswith("40 % waiting for input: ")
    assert hint in line


def test_outside_influences_on_a_rank_come_first() -> None:
    ranks = [Recorded(rank, steps=1).add(LOADER, 0, 600, cat="user_annotation") for rank in range(2)]
    ranks[1].throttled, ranks[1].far_memory = 0.3, 0.9
    first, second, third = [each.text for each in advice(of(*ranks))][:3]
    assert first.startswith(
        "30 % of the time of rank 1 on node0 is lost to the CPU quota of its control group"
    )
    assert second == "90 % of the memory of rank 1 on node0 is on other NUMA nodes than its cores"
    assert third.startswith("60 % waiting for input")


def test_figures_lead_to_advice() -> None:
    rank = Recorded(0, steps=1)
    rank.add("aten::bernoulli_", 0, 120).add("aten::copy_", 120, 130)
    rank.add("Optimizer.step#SGD.step", 250, 200, cat="user_annotation").add("aten::mm", 500, 500)
    rank.collective("all_reduce", 450, 60, 1, backend="gloo")
    texts = [each.text for each in advice(of(rank))]
    assert texts[0].startswith("20 % in the optimizer: fused=True")
    assert texts[1].startswith("copies take 13 %")
    assert texts[2].startswith("dropout's random numbers take 12 %")
    assert texts[3].startswith("5 % in exposed communication (1 % more is hidden")
    assert texts[3].endswith("--backend ccl is faster")
    assert texts[4].startswith("threads migrate 3000 times a second")


@pytest.mark.parametrize(("hosts", "between"), [(("node0", "node0"), False), (("node0", "node1"), True)])
def test_compression_is_advised_between_hosts_only(hosts: tuple[str, str], between: bool) -> None:
    ranks = [Recorded(rank, host, steps=1) for rank, host in enumerate(hosts)]
    for each in ranks:
        each.add("aten::mm", 0, 500).collective("all_reduce", 500, 500, 1)
    line = next(each.text for each in advice(of(*ranks)) if "communication" in each.text)
    assert ("--compress-gradients" in line) == between


def test_idle_python_leads_to_advice() -> None:
    line = first_advice(of(Recorded(0, steps=1).add("aten::mm", 0, 500)))
    assert line.startswith("50 % in Python, or idle: ")
    assert "cpulaunch stacks" in line


def test_a_single_rank_is_not_compared() -> None:
    text = summary(of(Recorded(0, steps=1).collective("all_reduce", 0, 900, 1)), {}).text
    assert "of 1 rank" in text
    assert "arrows" not in text
    assert "mean" not in text


def test_no_figures_no_advice() -> None:
    found = of(Recorded(0, steps=1, length=1e6).add("aten::mm", 0, 1e6))
    assert advice(found) == []
    assert "nothing stands out" in summary(found, {}).text


def test_the_text_has_columns_for_few_ranks_and_only_extremes_for_many() -> None:
    few = summary(of(*(Recorded(rank).add("aten::mm", 0, 1000) for rank in range(2))), {}).text
    assert "steps 10 to 11 of 2 ranks: 1.0 ms a step" in few
    assert "rank 0     rank 1" in few
    assert few.endswith("\n\nthe slowest rank computes 1.00 times as long as the ranks' mean\n")
    recorded = (Recorded(rank).add("aten::mm", 0, 100 * rank) for rank in range(10))
    many = summary(of(*recorded), {5: "gone"}).text
    (line,) = [line.split() for line in many.splitlines() if line.startswith("  computation")]
    assert line == ["computation", "22", "%", "0", "%", "45", "%", "9"]
    assert "rank 5 is missing: gone" in many


def test_figures_can_be_written_as_json() -> None:
    import json

    assert json.loads(json.dumps(as_json(of(Recorded(0)))))["first"] == 10
