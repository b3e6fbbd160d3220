"""An operation that completes in the background keeps the thread-local state of the caller that started it."""

from __future__ import annotations

import programs_names as names
import pytest
from ranks import Ranks, run_script


@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("state", names.STATES)
@pytest.mark.parametrize("kind", names.COMPLETIONS)
def test_an_operation_completes_in_the_callers_thread_state(
    two: Ranks, kind: str, state: str, early: int
) -> None:
    assert two.call("completes_elsewhere", kind, state, "ccl", early)[early]


@pytest.mark.parametrize("state", names.STATES)
@pytest.mark.parametrize("kind", names.COMPLETIONS_OF_GLOO)
def test_gloos_operations_also_complete_in_the_callers_state(two: Ranks, kind: str, state: str) -> None:
    assert two.call("completes_elsewhere", kind, state, "gloo", 0)[0]


COMPLETION_FAILS = """
import torch, torch.distributed as dist
from datetime import timedelta

dist.init_process_group("ccl", timeout=timedelta(seconds=60))
store = dist.distributed_c10d._get_default_store()
x = torch.ones(2000)[::2]  # the sum comes to other memory, from which it is copied
if dist.get_rank() == 0:
    work = dist.all_reduce(x, async_op=True)
    x.requires_grad_()  # it cannot be written to any more
    store.set("started", "")
    for attempt in (work.get_future().wait, work.wait, dist.barrier):
        try:
            attempt()
        except RuntimeError as error:
            print(error)
    store.wait(["raised"], timedelta(seconds=30))  # this rank lives on
else:
    store.wait(["started"], timedelta(seconds=30))
    dist.all_reduce(x)
    try:
        dist.broadcast(x, 0)
    except dist.DistBackendError as error:
        print(error)
    store.set("raised", "")
"""


@pytest.mark.slow
@pytest.mark.usefixtures("built")
def test_an_operation_that_cannot_complete_fails_its_group_without_a_hang() -> None:
    first, second = run_script(2, COMPLETION_FAILS)
    call, why = "all_reduce (sequence number 0, float32[1000])", "could not be completed: a view"
    reason = f"rank 0: {call} of group '0' of 2 ranks {why}"
    assert first.returncode == 0, first.stderr
    future, waited, used = first.stdout.splitlines()
    assert future.startswith(reason)
    assert waited.startswith(reason)
    assert "cannot be used any more" in used
    assert second.returncode == 0, second.stderr
    assert f"cannot complete: rank 0 failed: {call} {why}" in second.stdout
