"""Failures and the end of a group: late and dead peers, exceptions, exit without `destroy_process_group`."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ranks import run_script
from support.marks import repeat
from support.namespaces import until

from cpulaunch.cause import Kind

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("built")]

SCRIPT = """
import json, os, pathlib, select, sys, threading, time, torch, torch.distributed as dist
from contextlib import suppress
from datetime import timedelta
dist.init_process_group("ccl", timeout=timedelta(seconds={seconds}))
rank, x, store = dist.get_rank(), torch.ones(1000, 10), dist.distributed_c10d._get_default_store()
store.set(f"pid of {{rank}}", str(os.getpid()))
def ends(other, within):
    return bool(select.select([os.pidfd_open(int(store.get(f"pid of {{other}}")))], [], [], within)[0])
parts = [torch.ones(1000, 10) for _ in range(dist.get_world_size())]
dist.all_reduce(x)
began = time.monotonic()
try:
{body}
except dist.DistBackendError as error:
    from cpulaunch.agent.program import bootstrap
    print(f"{{time.monotonic() - began:.1f}} s: {{error}}", file=sys.stderr)
    print("CAUSE", json.dumps(bootstrap._cause(error)), file=sys.stderr)
    with suppress(RuntimeError):  # rank 0, which has the store, may have ended
        store.add(f"rank {{rank}} has raised", 1)  # in rank 0, comes back when the others have been told
    sys.exit(7)
"""


def cause_of(result: subprocess.CompletedProcess[str]) -> Any:
    """Return the structured cause of a rank's error."""
    assert result.returncode == 7, result.stderr
    return json.loads(re.findall("^CAUSE (.*)$", result.stderr, re.MULTILINE)[0])


def script(*lines: str, seconds: float = 60) -> str:
    return SCRIPT.format(seconds=seconds, body="\n".join(f"    {line}" for line in lines))


@pytest.fixture(autouse=True)
def leaves_no_shared_memory() -> object:
    before = set(os.listdir("/dev/shm"))
    yield

    def nothing_left() -> bool:
        """Whether no files of ended processes are left.  libfabric's names of files contain the pid.

        Files of running processes may belong to jobs of other tests.
        """
        left = {name for name in set(os.listdir("/dev/shm")) - before if name.count(":") == 2}
        return all(Path("/proc", name.split(":")[0]).exists() for name in left)

    until(nothing_left, "shared memory to be removed")


ONECCL = {"CPULAUNCH_RANK_CCL_TRANSPORT": "oneccl"}


@pytest.mark.parametrize(
    ("collective", "variables"),
    [("all_reduce(x)", {}), ("broadcast(x, 1)", ONECCL), repeat("all_reduce(x, async_op=True)", {})],
    ids=["all_reduce", "oneCCL", "asynchronous"],
)
def test_the_error_for_a_late_rank_names_the_awaited_operation(
    collective: str, variables: dict[str, str]
) -> None:
    first, second = run_script(2, script(
        "if rank == 1: store.wait(['rank 0 has raised'], timedelta(seconds=60))",
        f"work = dist.{collective}",
        "if work: work.wait()",
        seconds=3,
    ), **variables)  # fmt: skip
    name = collective.partition("(")[0]
    late_rank = {"kind": "peer_late", "rank": 1, "operation": name, "sequence": 1, "timeout": 3.0}
    assert cause_of(first) == late_rank
    assert second.returncode == 7  # rank 0 has ended, or has reported the failure


def test_a_group_reports_the_kind_of_its_failure() -> None:
    """Rank 0 times out, and notifies rank 1, which has a longer timeout."""
    first, second, _ = run_script(3, script(
        "group = dist.distributed_c10d._get_default_group()._get_backend(torch.device('cpu'))",
        "options = dist.AllreduceOptions()",
        "options.asyncOp, options.timeout = False, timedelta(seconds=3 if rank == 0 else 60)",
        "if rank == 2: store.wait(['rank 0 has raised'], timedelta(seconds=60))",
        "try: group.allreduce([x], options)",
        "finally: print(group.get_error().name)",
    ))  # fmt: skip
    assert (first.stdout, second.stdout) == ("TIMEOUT\n", "REMOTE_ERROR\n"), first.stderr + second.stderr


def test_an_exception_has_a_structured_cause() -> None:
    """An exception that was raised from the error has the same cause.

    A rank that was notified of the failure also names the rank that detected it.
    """
    calls = (
        "from cpulaunch.agent.program import bootstrap",
        "import json",
        "try:",
        "    try: dist.all_reduce(torch.ones(10 * (rank + 1)))",
        "    except RuntimeError as error: raise ValueError from error",
        "except ValueError as error:",
        "    print(json.dumps([bootstrap._cause(error), sys.modules['cpulaunch.ccl._group'].CAUSES]))",
    )
    for rank, result in enumerate(run_script(2, script(*calls, seconds=10))):
        cause, kinds = json.loads(result.stdout)
        finder, other = cause.pop("finder", rank), cause.pop("rank")
        assert {finder, other} == {0, 1}
        assert cause == {
            "kind": "calls_differ", "operation": "all_reduce", "sequence": 1, "operations": ["all_reduce"] * 2,
            "sizes": [40 * (other + 1), 40 * (finder + 1)], "reductions": ["sum"] * 2,
        }  # fmt: skip
        assert set(kinds) <= {kind.value for kind in Kind}


@pytest.mark.parametrize(
    ("call", "missing"),
    [
        repeat("dist.recv(x, 1, tag=3)", "sent a message with tag 3"),
        repeat("dist.recv(x, tag=3)", "sent a message with tag 3"),
        ("dist.send(x, 1, tag=3)", "received a message with tag 3"),
    ],
)
def test_a_message_that_is_never_sent_or_received_is_named(call: str, missing: str) -> None:
    raised = "store.wait(['rank 0 has raised'], timedelta(seconds=60))"
    first, _ = run_script(2, script(f"{call} if rank == 0 else {raised}", seconds=2))
    cause = cause_of(first)
    found = cause["kind"], cause.get("rank"), cause["timeout"], cause["detail"]
    assert found == ("message_missing", 1 if "1, tag" in call else None, 2.0, missing)


OF_ONES = "of 36 bytes float32"
# The call of rank 0, the call of rank 1, and how an error names the two calls.
DIFFERENT_CALLS = (
    ("dist.barrier(group)", "dist.all_reduce(ones, group=group)", "barrier", f"all_reduce (sum) {OF_ONES}"),
    ("dist.reduce(ones, 0, group=group)", "dist.all_reduce(ones, group=group)", f"reduce (sum) {OF_ONES} to rank 0", f"all_reduce (sum) {OF_ONES}"),
    ("dist.reduce(ones, 0, group=group)", "dist.reduce(ones, 1, group=group)", f"reduce (sum) {OF_ONES} to rank 0", f"reduce (sum) {OF_ONES} to rank 1"),
    ("dist.broadcast(ones, 0, group)", "dist.broadcast(ones, 1, group)", "broadcast of 36 bytes from rank 0", "broadcast of 36 bytes from rank 1"),
    ("dist.gather(ones, both, group=group)", "dist.scatter(ones, group=group)", "gather to rank 0", "scatter from rank 0"),
    ("dist.gather(ones, both, group=group)", "dist.gather(ones, both, 1, group)", "gather to rank 0", "gather to rank 1"),
    ("dist.all_to_all(both, both, group)", "dist.gather(ones, group=group)", "all_to_all", "gather to rank 0"),
    ("dist.all_reduce(ones, group=group)", "dist.all_reduce(ones[:0], group=group)", f"all_reduce (sum) {OF_ONES}", "all_reduce (sum) of 0 bytes float32"),
    ("dist.reduce(ones, 0, group=group)", "dist.reduce(ones[:0], 0, group=group)", f"reduce (sum) {OF_ONES} to rank 0", "reduce (sum) of 0 bytes float32 to rank 0"),
    ("dist.broadcast(ones, 0, group)", "dist.broadcast(ones[:0], 0, group)", "broadcast of 36 bytes from rank 0", "broadcast of 0 bytes from rank 0"),
)  # fmt: skip


def in_groups_of_their_own(new_group: str, calls: Sequence[tuple[str, ...]]) -> list[str]:
    """Lines of a script that makes each of the ``calls`` in its own thread and prints the errors.

    The calls are concurrent because ranks take seconds to explain an error."""
    return [
        "import json",
        f"calls = {calls!r}",
        f"said, groups = [''] * len(calls), [{new_group} for _ in calls]",
        "def call(number):",
        "    group, ones, four = groups[number], torch.ones(9), torch.ones(4)",
        "    both, odd = [torch.ones(9), torch.ones(9)], [torch.ones(9), torch.ones(4)]",
        "    try: eval(calls[number][rank])",
        "    except dist.DistBackendError as error: said[number] = str(error)",
        "threads = [threading.Thread(target=call, args=(number,)) for number in range(len(calls))]",
        "for thread in threads: thread.start()",
        "for thread in threads: thread.join()",
        "print(json.dumps(said))",
        "store.set(f'{rank} is done', '')",
        "store.wait([f'{each} is done' for each in range(dist.get_world_size())])",
    ]


def test_an_error_names_each_ranks_call() -> None:
    calls = in_groups_of_their_own("dist.new_group()", [pair[:2] for pair in DIFFERENT_CALLS])
    results = run_script(2, script(*calls, seconds=10))
    assert [result.returncode for result in results] == [0, 0], results[0].stderr
    said = [[text.split("\n")[0] for text in json.loads(result.stdout)] for result in results]
    for (_, _, by_0, by_1), of_0, of_1 in zip(DIFFERENT_CALLS, *said, strict=True):
        at_0, at_1 = f"rank 1 calls {by_1}, this rank {by_0}", f"rank 0 calls {by_0}, this rank {by_1}"
        assert of_0.endswith(at_0) or of_1.endswith(at_1), (of_0, of_1)


# The calls of ranks 1 and 2 in their own group, and rank 1's error.
CALLS_OF_A_PAIR = (
    ("dist.all_reduce(ones, group=group)", "dist.all_reduce(four, group=group)", "rank [12] calls all_reduce"),
    ("dist.reduce(ones, 1, group=group)", "dist.reduce(ones, 2, group=group)", "rank 2 calls .* to rank 2, this rank .* to rank 1"),
    ("dist.recv(ones, 2, group)", "dist.send(four, 1, group)", "rank 2 sends 16 bytes to this rank, which expects 36$"),
    ("dist.all_to_all(both, odd, group)", "dist.all_to_all(both, both, group)", "rank 1 sends 16 bytes to this rank, which expects 36$"),
    (
        "dist.recv(ones, 2, group, 3)",
        "dist.send(ones, 1, group, 5)",
        "rank 2 has not sent a message with tag 3; one with tag 5 from rank 2 waits to be received$",
    ),
    ("dist.all_reduce(ones, group=group)", "None", "rank 2 did not call the operation"),
)  # fmt: skip


def test_errors_of_a_smaller_group_use_the_jobs_rank_numbers() -> None:
    """The group has ranks 1 and 2 of the job, so the rank numbers differ by one."""
    of_each = [("None", *pair[:2]) for pair in CALLS_OF_A_PAIR]
    calls = in_groups_of_their_own("dist.new_group([1, 2], timeout=timedelta(seconds=5))", of_each)
    _, first, _ = run_script(3, script(*calls))
    for (_, _, reported), text in zip(CALLS_OF_A_PAIR, json.loads(first.stdout), strict=True):
        assert re.search(rf"^rank 1: .* of group '\d' of 2 ranks .*{reported}", text, re.MULTILINE), text


@pytest.mark.repeats
@pytest.mark.parametrize(
    ("on_1", "on_2", "reported"),
    [
        (
            "dist.recv(ones, 2, pair, 3)",
            "dist.send(ones, 1, pair, 5); os._exit(0)",
            "rank 2 has ended; rank 2 has not sent a message with tag 3; one with tag 5 from rank 2 waits to be received\n",
        ),
        (
            "dist.recv(ones, group=pair, tag=3)",
            "[dist.send(ones, 1, pair, tag) for tag in range(5, 10)]; store.wait(['rank 1 has raised'])",
            "no rank has sent a message with tag 3; one with tag 5 .*; one with tag 8 [^;]*; more are waiting\n",
        ),
    ],
    ids=["ended", "has sent other messages"],
)  # fmt: skip
def test_an_error_of_a_smaller_group_reports_the_other_ranks_state(
    on_1: str, on_2: str, reported: str
) -> None:
    calls = (
        "pair = dist.new_group([1, 2], timeout=timedelta(seconds=5)); ones = torch.ones(9)",
        "if rank == 0: store.wait(['rank 1 has raised'])",
        f"if rank == 1: {on_1}",
        f"if rank == 2: {on_2}",
    )
    _, first, _ = run_script(3, script(*calls))
    assert first.returncode == 7, first.stderr
    assert re.search(rf"rank 1: .* of group '1' of 2 ranks .*{reported}", first.stderr), first.stderr


def test_a_monitored_barriers_error_has_gloos_words_and_the_missing_ranks() -> None:
    calls = (
        "pair = dist.new_group([1, 2], timeout=timedelta(seconds=3))",
        "if rank == 1: pair._get_backend(torch.device('cpu')).monitored_barrier()",
        "else: store.wait(['rank 1 has raised'])",
    )
    _, first, _ = run_script(3, script(*calls))
    assert "s: Rank 1 timed out in monitoredBarrier after 3 s: rank 2 did not reach it\n" in first.stderr


def test_an_error_of_oneccl_names_the_other_rank_and_its_call() -> None:
    """oneCCL doesn't compare the ranks' calls.  It only reports that too much data has arrived."""
    calls = (
        "if rank == 1: dist.barrier()",
        "else: dist.broadcast(torch.ones(9), 0); dist.all_reduce(torch.ones(9))",
    )
    first, second = run_script(2, script(*calls, seconds=30), **ONECCL)
    rank_0 = r"rank 0 (calls broadcast|is ahead: it calls all_reduce) of float32\[9\]"
    assert re.search(
        rf"rank 1: barrier \(.* of group '0' of 2 ranks failed: {rank_0}.*; oneCCL: ", second.stderr
    )
    assert "rank 1 failed: barrier" in first.stderr


@pytest.mark.parametrize(
    ("dead", "variables"), [(1, {}), repeat(0, {}), repeat(1, ONECCL)], ids=["1", "0", "1, oneCCL"]
)
def test_a_killed_peer_is_noticed_before_the_timeout(dead: int, variables: dict[str, str]) -> None:
    killed = script(f"if rank == {dead}: os.kill(os.getpid(), 9)", "dist.all_reduce(x)")
    results = run_script(2, killed, **variables)
    assert results[dead].returncode == -9
    ended = {"kind": "peer_ended", "rank": dead, "operation": "all_reduce", "sequence": 1}
    assert cause_of(results[1 - dead]) == ended


def test_an_exception_ends_a_rank_despite_its_pending_collective() -> None:
    """Rank 1 never calls the collective.  The limit of 30 s is half of the collective's timeout."""
    calls = (
        "if rank == 0: dist.all_reduce(x, async_op=True); raise ValueError('mine')",
        "os._exit(0 if ends(0, within=30) else 9)",
    )
    first, second = run_script(2, script(*calls))
    assert (first.returncode, second.returncode) == (1, 0), second.stderr
    assert "ValueError: mine" in first.stderr


def test_a_rank_stays_until_a_late_rank_joins_its_collective() -> None:
    """Rank 0 doesn't wait for the collective, but stays.  For messages, it would stay for only 5 s."""
    calls = (
        "assert rank == 0 or not ends(0, within=7)",
        "work = dist.all_reduce(x, async_op=True)",
        "if rank == 1: work.wait()",
    )
    for result in run_script(2, script(*calls, seconds=30)):
        assert (result.returncode, result.stderr) == (0, "")


IN_A_DAEMON_THREAD = (
    "def calls(call):",
    "    thread = threading.Thread(target=call, daemon=True)",
    "    thread.start()",
    "    while sys._current_frames()[thread.ident].f_code.co_name not in ('all_reduce', 'recv'): time.sleep(0.01)",
    "    def naps(): return int(status.read_text().split('voluntary_ctxt_switches:')[1].split()[0])",
    "    status = pathlib.Path('/proc/self/task', str(thread.native_id), 'status')",
    "    enough = naps() + 50",  # until it is in our function, where it waits
    "    while naps() < enough: time.sleep(0.01)",
)
WAITS_IN_A_THREAD = (
    *IN_A_DAEMON_THREAD,
    "def call(): dist.all_reduce(x); os.write(1, b'came back')",
    "if rank == 0: calls(call); store.add('main ends', 1)",
)


def test_a_daemon_threads_collective_is_completed_for_the_other_ranks() -> None:
    """The thread itself doesn't get the result, because Python has been finalized by then."""
    calls = ("if rank == 1: store.wait(['main ends']); assert not ends(0, within=2); dist.all_reduce(x)",)
    for result in run_script(2, script(*WAITS_IN_A_THREAD, *calls)):
        assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_callbacks_that_communicate_complete_before_the_process_ends() -> None:
    calls = (
        "group = dist.new_group([0, 1])",
        "def again(future):",
        "    for _ in range(3): dist.all_reduce(x, group=group)",
        "    os.write(1, b'called back')",
        "if rank == 1: store.wait(['main ends']); assert not ends(0, within=1)",
        "future = dist.all_reduce(x, async_op=True).get_future().then(again)",
        "future.wait() if rank == 1 else store.set('main ends', '')",
    )
    for result in run_script(2, script(*calls)):
        assert (result.returncode, result.stdout, result.stderr) == (0, "called back", "")


def test_a_calls_error_is_not_reported_for_a_later_call() -> None:
    """The thread that waits for the later call moves the data of both calls."""
    calls = (
        "out = torch.empty(2000)",
        "if rank == 0: dist.all_gather_into_tensor(out, x.ravel()[:1000], async_op=True); dist.all_gather(parts, x)",
        "else: dist.all_reduce(x)",
    )
    first, second = run_script(2, script(*calls))
    assert (first.returncode, second.returncode) == (7, 7)
    early, late = (
        "all_gather_into_tensor (sequence number 1, float32[1000])",
        "all_gather (sequence number 2, ",
    )
    calls_other = (
        "failed: rank 1 calls all_reduce (sum) of 40000 bytes float32, this rank all_gather of 8000 bytes"
    )
    assert f"s: rank 0: {late}" in first.stderr
    assert f"cannot complete: {early} {calls_other}" in first.stderr


def test_a_wait_with_its_own_timeout_names_the_missing_rank_and_keeps_the_group() -> None:
    calls = (
        "if rank == 1: store.wait(['rank 0 has raised'])",
        "work = dist.all_reduce(x, async_op=True)",
        "work.wait(timedelta(seconds=1)) if rank == 0 else work.wait()",
    )
    first, second = run_script(2, script(*calls))
    assert (first.returncode, second.returncode, second.stderr) == (7, 0, "")
    assert "within the 1 s that wait() was given: this rank waited for rank 1" in first.stderr


def test_if_a_rank_leaves_a_group_the_others_stop_waiting() -> None:
    calls = (
        "group = dist.new_group([0, 1])",
        "dist.all_reduce(x, group=group)",
        "if rank == 0: dist.all_reduce(x, group=group)",
        "dist.destroy_process_group(group)",
        "store.wait(['rank 0 has raised'], timedelta(seconds=50))",
    )
    first, second = run_script(2, script(*calls))
    assert second.returncode == 0, second.stderr
    left = {"kind": "peer_left", "rank": 1, "operation": "all_reduce", "sequence": 1}
    assert cause_of(first) == left


@pytest.mark.parametrize(
    "line",
    [
        "work = dist.all_reduce(x, async_op=True); work.wait() if rank else None",
        repeat("group = dist.new_group([0, 1]); dist.all_reduce(x, group=group); sys.exit(0)"),
        repeat("dist.destroy_process_group()"),
    ],
    ids=["pending in one rank", "with a subgroup", "destroyed"],
)
def test_the_interpreter_exits_cleanly(line: str) -> None:
    for result in run_script(2, script(line), limit=60):
        assert (result.returncode, result.stderr) == (0, "")


def test_kill_9_of_all_ranks_leaves_nothing_in_dev_shm() -> None:
    for result in run_script(2, script("os.kill(os.getpid(), 9)")):
        assert result.returncode == -9
