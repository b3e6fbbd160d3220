"""cpulaunch's own transport without torch.

The ranks are threads of one program, which is also built with sanitizers and for another processor.

The program, `native/ranks.cpp`, generates random collectives from a seed and checks every result.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.command import REPOSITORY
from support.marks import repeat

from cpulaunch.ccl.installed import SOURCES
from cpulaunch.ccl.load import installed_library

pytestmark = pytest.mark.slow

NATIVE = Path(__file__).parent / "native"
CORE = SOURCES / "core"
OWN_TEAM = SOURCES / "layer/own_team.cpp"  # the only file of the layer in the program
FLAGS = ("-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{CORE}", f"-I{SOURCES / 'layer'}")
SANITIZED = ("-O1", "-g1", "-fno-omit-frame-pointer", "-fno-sanitize-recover=all", "-D_GLIBCXX_ASSERTIONS")
EMULATOR = ("qemu-aarch64", "-L", "/usr/aarch64-linux-gnu")
JOBS = 2

LAYOUTS = ("1", "2", "4", "1,1", "2,2", "1,3", "2,2,2,2", "3", "3,1", "2,1,2,1,3", "1,2,3")
SEVENTEEN_HOSTS = ",".join("1" * 17)  # arranged in one row
SIXTY_FOUR_HOSTS = ",".join("1" * 64)
TWENTY_HOSTS = ",".join("1" * 20)  # arranged in a grid of 10 by 2
# Arranged in grids of 12 by 3 with two extra hosts, and of 9 by 2 with one, where some ranks have two lanes.
LARGE_PRIME_FACTORS = (",".join("1" * 38), ",".join("12" * 9 + "1"))
PROGRAMS = ("plain", "addresses", "threads", "aarch64")


@dataclass(frozen=True)
class Program:
    """A build of the program."""

    command: tuple[str, ...]
    rounds: int  # rounds of random collectives that take less than a second

    def run(self, layout: str, rounds: int, seed: int, what: str) -> subprocess.CompletedProcess[str]:
        reports = {"TSAN_OPTIONS": "halt_on_error=1", "UBSAN_OPTIONS": "print_stacktrace=1"}
        done = subprocess.run(
            [*self.command, layout, str(rounds), str(seed), what],
            capture_output=True, text=True, timeout=100, env={**os.environ, **reports},
        )  # fmt: skip
        if "ThreadSanitizer: unexpected memory mapping" in done.stderr:
            pytest.skip("ThreadSanitizer has no room here: the kernel's vm.mmap_rnd_bits is over 28")
        return done

    def check(self, layout: str, seed: int, what: str = "mix", rounds: int = 0) -> None:
        """Run ``rounds`` rounds, or the program's usual number, and check that there is no error."""
        done = self.run(layout, rounds or self.rounds, seed, what)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.endswith("ok\n")


# --- the program, in several builds


def compiled(directory: Path, compiler: str, *flags: str) -> str:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    # Compile all files of a directory together, because most of the time goes to the standard headers.
    sources = [directory / f"{folder.name}.cpp" for folder in (NATIVE, CORE)]
    for source, folder in zip(sources, (NATIVE, CORE), strict=True):
        files = [*sorted(folder.glob("*.cpp")), *([OWN_TEAM] if folder == NATIVE else [])]
        source.write_text("".join(f'#include "{each}"\n' for each in files))
    objects = [source.with_suffix(".o") for source in sources]

    def tool(*arguments: str | Path) -> None:
        done = subprocess.run(
            [compiler, *FLAGS, *flags, *arguments], capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr

    with ThreadPoolExecutor(JOBS) as pool:
        for _ in pool.map(lambda source, to: tool("-c", source, "-o", to), sources, objects):
            pass
    tool(*objects, "-o", directory / "ranks")
    return str(directory / "ranks")


def sanitized(directory: Path, library: str, *flags: str) -> str:
    if shutil.which("g++"):
        ask = ["g++", f"-print-file-name={library}"]
        if subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout.strip() == library:
            pytest.skip(f"g++ has no {library}")
    return compiled(directory, "g++", *SANITIZED, *flags)


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Program:
    return Program((compiled(tmp_path_factory.mktemp("plain"), "g++", "-O2"),), rounds=40)


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program built with sanitizers for invalid accesses, leaks and undefined behaviour."""
    directory = tmp_path_factory.mktemp("addresses")
    return Program((sanitized(directory, "libasan.so", "-fsanitize=address,undefined"),), rounds=10)


@pytest.fixture(scope="session")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program built with a sanitizer for data races, even in memory that ranks share."""
    directory = tmp_path_factory.mktemp("threads")
    return Program((sanitized(directory, "libtsan.so", "-fsanitize=thread"),), rounds=7)


@pytest.fixture(scope="session")
def aarch64(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The program built for another processor, which is emulated."""
    if shutil.which(EMULATOR[0]) is None:
        pytest.skip(f"{EMULATOR[0]} is not installed")
    program = compiled(tmp_path_factory.mktemp("aarch64"), "aarch64-linux-gnu-g++", "-O2")
    return Program((*EMULATOR, program), rounds=4)


def counted(program: Program, layout: str, what: str) -> dict[str, dict[str, float]]:
    """Return the program's lines of `NAME: KEY=NUMBER …`."""
    done = program.run(layout, 1, 1, what)
    assert (done.returncode, done.stderr) == (0, "")
    lines = (line.split(": ") for line in done.stdout.splitlines()[:-1])
    return {
        name: {key: float(number) for key, number in re.findall(r"(\w+)=(\S+)", rest)} for name, rest in lines
    }


def allocations(counts: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return how often the busiest rank allocates memory in a call, unless it never does."""
    return {name: its["allocations"] for name, its in counts.items() if its["allocations"]}


# Emulation takes minutes, and nearly the only difference is the compiled code.
@pytest.fixture(params=[repeat(name) if name == "aarch64" else name for name in PROGRAMS])
def program(request: pytest.FixtureRequest) -> Program:
    return request.getfixturevalue(request.param)


def on_each_program(*layouts: str) -> pytest.MarkDecorator:
    """Run the plain program with all layouts, and sanitized programs with the last; --all combines all."""
    often = {("plain", layout) for layout in layouts} | {
        (name, layouts[-1]) for name in ("addresses", "threads")
    }
    rows = [(program, layout) for program in PROGRAMS for layout in layouts]
    return pytest.mark.parametrize(
        ("program", "layout"), [row if row in often else repeat(*row) for row in rows], indirect=["program"]
    )


# --- without errors


@on_each_program(*LAYOUTS)
def test_random_collectives(program: Program, layout: str) -> None:
    program.check(layout, seed=1)


@pytest.mark.parametrize(
    "layout",
    [SEVENTEEN_HOSTS, TWENTY_HOSTS, *LARGE_PRIME_FACTORS],
    ids=lambda layout: f"{layout.count(',') + 1} hosts",
)
def test_random_collectives_of_many_hosts(plain: Program, layout: str) -> None:
    plain.check(layout, seed=2, rounds=10)


def test_small_collectives_of_many_hosts_take_few_messages(plain: Program) -> None:
    """In a grid of 16 by 4 hosts, each sends only 18 messages, or 6 in an all_gather, to reach 63 others."""
    plain.check(SIXTY_FOUR_HOSTS, seed=22, what="few messages")


@pytest.mark.parametrize(
    "layout", ["1,1", "2,2,2", "2,1,2,2,1,2,2,1,2,2", SEVENTEEN_HOSTS], ids=lambda layout: f"{layout:.5}"
)
def test_hosts_send_no_more_bytes_than_necessary(plain: Program, layout: str) -> None:
    done = plain.run(layout, 1, 25, "few bytes")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout


@pytest.mark.parametrize(
    ("hosts", "rounds", "peers"),
    [(17, 1, 16), repeat(19, 3, 10), (31, 3, 16), repeat(61, 3, 18), repeat(127, 3, 22)],
)
def test_a_prime_number_of_hosts_takes_few_messages(
    plain: Program, hosts: int, rounds: int, peers: int
) -> None:
    steps = counted(plain, ",".join("1" * hosts), "steps")
    small, large = steps["all_reduce of 4 KB"], steps["all_reduce of 25 MB"]
    assert (small["rounds"], small["messages"], large["peers"]) == (rounds, peers, peers)
    assert large["bytes"] < 1.06 * 2 * (hosts - 1) / hosts * (25 << 20)


@pytest.mark.parametrize("layout", ["4", "1,1", "2,2", "3,1"])
def test_a_call_allocates_nothing(plain: Program, layout: str) -> None:
    assert allocations(counted(plain, layout, "counts")) == {}


@pytest.mark.repeats  # takes minutes, and on a busy machine the kernel sends at other times
def test_with_many_hosts_there_are_no_allocations_and_few_system_calls(plain: Program) -> None:
    steps, counts = (counted(plain, SIXTY_FOUR_HOSTS, what) for what in ("steps", "counts"))
    assert allocations(counts) == {}
    large = counts["all_reduce of 25 MB"]
    messages = steps["all_reduce of 25 MB"]["messages"]
    assert large["sends"] < messages / 2
    assert large["receives"] < 1.5 * messages
    # One descriptor for each peer, a listener, and one to poll all of them.  Few pairs open two connections at once.
    assert counts["all_to_all of 16 KB"]["descriptors"] <= 63 + 2 + 3


@pytest.mark.repeats
def test_the_page_on_arithmetic_has_the_numbers_that_the_core_counts(plain: Program) -> None:
    script = runpy.run_path(str(REPOSITORY / "scripts" / "ccl_arithmetic.py"))
    text = script["page"](plain.command[0])
    if os.environ.get("UPDATE_GOLDEN"):
        script["PAGE"].write_text(text)
    assert script["PAGE"].read_text() == text, "run it with UPDATE_GOLDEN=1"


def test_one_call_polls_all_idle_connections(plain: Program) -> None:
    plain.check(SIXTY_FOUR_HOSTS, seed=23, what="vain polls")


@on_each_program("8", "8,8", "12,12,12", "16", "8,2")
def test_sockets_are_a_separate_level(program: Program, layout: str) -> None:
    program.check(layout, seed=14, what="sockets", rounds=program.rounds // 4)


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A provider of libfabric, from the package `impi-rt`."""
    library = installed_library("libfabric.so.1")
    if library is None:
        pytest.skip("there is no libfabric: pip install 'cpulaunch[mpi]'")
    monkeypatch.setenv("LIBFABRIC", str(library))
    monkeypatch.setenv("FI_PROVIDER_PATH", str(library.parent))
    monkeypatch.setenv("FI_PROVIDER", request.param)
    return str(request.param)


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("layout", ["1,1", "2,1,2,1,3", repeat("2,2,2,2"), TWENTY_HOSTS], ids="{:.9}".format)
def test_random_collectives_over_libfabric(plain: Program, layout: str) -> None:
    plain.check(layout, seed=15, what="mix over libfabric", rounds=10)


@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("what", ["large", "two groups", repeat("teams")])
def test_collectives_over_libfabric(plain: Program, what: str) -> None:
    plain.check("1,2", seed=16, what=f"{what} over libfabric", rounds=10)


@pytest.mark.repeats
@pytest.mark.usefixtures("provider")
@pytest.mark.parametrize("provider", ["tcp"], indirect=True)
def test_a_rank_over_libfabric_gets_the_cause_of_a_failure(addresses: Program) -> None:
    for what, message in (
        (
            "another size",
            "rank 1 calls all_reduce (sum) of 4004 bytes int32, this rank all_reduce (sum) of 4000",
        ),
        ("another part", "rank 1 sends 4004 bytes to this rank, which expects 4000"),
        ("two roots of much", " calls reduce (sum) of 4194304 bytes int32 to rank "),
        ("absent", "waits for rank 1"),
    ):
        done = addresses.run("1,1", 1, 8, f"{what} over libfabric")
        assert (done.returncode, message in done.stderr) == (1, True), done.stderr


@on_each_program("2", "8", "2,2", "1,3")
def test_random_collectives_of_ranks_with_several_threads(program: Program, layout: str) -> None:
    program.check(layout, seed=20, what="teams", rounds=program.rounds // 2)


@pytest.mark.parametrize("layout", ["2", "3", "2,2"])
def test_each_of_a_ranks_threads_copies_and_sums_an_equal_part(plain: Program, layout: str) -> None:
    plain.check(layout, seed=21, what="even parts")


@on_each_program("1,1", "1,1,1,1,1", "2,1,2,1,3")
@pytest.mark.parametrize("connections", [2, repeat(3)])
def test_random_collectives_over_several_connections(program: Program, layout: str, connections: int) -> None:
    program.check(layout, seed=26, what=f"mix over {connections} connections", rounds=program.rounds // 2)


@on_each_program("1,1", "2,2", "2,1,2,1,3")
def test_random_collectives_over_connections_for_both_directions(program: Program, layout: str) -> None:
    program.check(layout, seed=28, what="mix over shared connections")


@on_each_program("1,1", "1,1,2")
def test_messages_are_cut_into_stripes(program: Program, layout: str) -> None:
    program.check(layout, seed=27, what="large over 2 connections", rounds=1)


@pytest.mark.parametrize("layout", ["1,1", "1,1,1,1,1"])
def test_each_of_several_connections_carries_an_equal_part(plain: Program, layout: str) -> None:
    for name, its in counted(plain, layout, "even connections over 2 connections").items():
        parts = [count for key, count in its.items() if key != "alone"]
        if name.endswith(("sent", "received")) and its["alone"] > 1 << 20:
            assert sum(parts) <= 1.05 * its["alone"], name
            assert all(0.45 * sum(parts) <= part <= 0.55 * sum(parts) for part in parts), name


@on_each_program("2", "1,1,2")
def test_results_larger_than_the_caches_are_right(program: Program, layout: str) -> None:
    program.check(layout, seed=13, what="large", rounds=1)


@on_each_program("3", "1,2")
def test_two_groups_can_be_used_at_once(program: Program, layout: str) -> None:
    program.check(layout, seed=3, what="two groups")


@on_each_program("3", "1,3")
def test_groups_leave_no_resources(program: Program, layout: str) -> None:
    program.check(layout, seed=4, what="many groups", rounds=4 * program.rounds)


@pytest.mark.parametrize(
    "layout",
    ["1,1", "1,2,3", "2,2,2,2", "1,1,1,1,1,1", TWENTY_HOSTS, LARGE_PRIME_FACTORS[1]],
    ids=lambda layout: f"{layout:.15}",
)
def test_messages_do_not_depend_on_the_kernels_buffers(plain: Program, layout: str) -> None:
    plain.check(layout, seed=5, what="narrow connections", rounds=20)


def test_16_bit_numbers_are_rounded_correctly(program: Program) -> None:
    program.check("1", seed=6, what="rounding")


DETAILS = ("a piece exchanged once", "other sizes", "freed blocks", "spare blocks", "subnormal sums",
           "an endless message", "seals", "a crowd", "a crowd beside a rank", "proofs", "idle memory",
           "pace", "sources", "one connection", "separate connections", "two connections",
           "who has left", "a stranger at an address", "the last data", "the last data before a hello",
           "a late reader", "a hello of a reader", "a short outage", "a question to a root")  # fmt: skip


@pytest.mark.parametrize("what", DETAILS)
def test_internal_details(program: Program, what: str) -> None:
    if what == "idle memory" and program.command[0] == EMULATOR[0]:
        pytest.skip("the emulator does not tell which pages are resident")
    program.check("1", seed=0, what=what, rounds=1)


def test_no_two_threads_get_the_same_block(plain: Program) -> None:
    plain.check("1", seed=0, what="pool", rounds=1)  # with a sanitizer, the pool keeps no blocks


def test_a_forked_process_has_its_own_tensors(plain: Program) -> None:
    plain.check("1", seed=0, what="forked tensors", rounds=1)


# --- errors


@pytest.mark.parametrize("layout", ["2", "1,1"])
def test_every_collective_detects_a_wrong_number(plain: Program, layout: str) -> None:
    done = plain.run(layout, 1, 7, "wrong numbers")
    assert done.returncode == 1
    wrong = Counter(re.findall(r"(\w+)(?: \(\d+ from a rank\))? is wrong at 500", done.stderr))
    on_both = dict.fromkeys(("all_gather", "reduce_scatter", "broadcast", "all_to_all"), 2)
    assert wrong == {
        "all_reduce": 1,
        "reduce": 1,
        **on_both,
    }  # only one rank reports wrong results of these two


@pytest.mark.parametrize(
    ("layout", "what", "message"),
    [
        ("2", "another collective", "rank 1 calls reduce_scatter (sum) of 8000 bytes int32, this rank all_reduce"),
        ("1,1", "another collective", "rank 1 calls reduce_scatter (sum) of 8000 bytes int32, this rank all_reduce"),
        ("2", "another movement", "rank 1 calls all_gather of 8000 bytes, this rank all_reduce (sum) of 4000 bytes int32"),
        ("1,1", "another movement", "rank 1 calls all_gather of 8000 bytes, this rank all_reduce (sum) of 4000 bytes int32"),
        ("2", "another size", "rank 1 calls all_reduce (sum) of 4004 bytes int32, this rank all_reduce (sum) of 4000 bytes int32"),
        ("1,1", "another size", "rank 1 calls all_reduce (sum) of 4004 bytes int32, this rank all_reduce (sum) of 4000 bytes int32"),
        *[
            (layout, what, f"rank {last} calls {call} of 0 bytes{rest}, this rank {call} of {most} bytes{rest}")
            for layout, last in (("2", 1), ("1,1", 1), ("3,1", 3))
            for what, call, most, rest in (
                ("no sum", "all_reduce (sum)", 4000, " int32"),
                ("no part of a sum", "reduce_scatter (sum)", 8000, " int32"),
                ("no parts", "all_gather", 8000, ""),
            )
            if layout != "3,1" or what == "no sum"
        ],
        ("2", "no broadcast", "rank 1 calls broadcast of 0 bytes from rank 0, this rank broadcast of 4000 bytes from rank 0"),
        ("1,1", "no broadcast", "rank 0 calls broadcast of 4000 bytes from rank 0, this rank broadcast of 0 bytes from rank 0"),
        ("2", "another wire", "rank 1 calls all_reduce (sum) of 4000 bytes float32, sent between hosts as bfloat16, this rank all_reduce (sum) of 4000 bytes float32\n"),
        ("1,1", "another wire", "rank 1 calls all_reduce (sum) of 4000 bytes float32, sent between hosts as bfloat16, this rank all_reduce (sum) of 4000 bytes float32\n"),
        ("2", "another part", "rank 1 sends 4004 bytes to this rank, which expects 4000"),
        ("1,1", "another part", "rank 1 sends 4004 bytes to this rank, which expects 4000"),
        ("1,1", "another root", "rank 1 calls broadcast of 4000 bytes from rank 1 as an earlier operation, this rank all_reduce (sum) of 4000 bytes int32\n"),
        ("1,1,1", "another root", "calls broadcast of 4000 bytes from rank "),
        ("1,1", "two roots of little", "rank 1 calls reduce (sum) of 4000 bytes int32 to rank 1, this rank reduce (sum) of 4000 bytes int32 to rank 0\n"),
        ("1,1,1", "two roots of much", "of 4194304 bytes int32 to rank "),
        ("1,1", "two roots of much", "rank 1 calls reduce (sum) of 4194304 bytes int32 to rank 1, this rank reduce (sum) of 4194304 bytes int32 to rank 0\n"),
        ("1,1", "ended root", "rank 0 calls broadcast of 4000 bytes from rank 0, this rank all_reduce (sum) of 4000 bytes int32\n"),
        ("2", "absent", "waits for rank 1"),
        ("1,1", "absent", "waits for rank 1"),
        ("1,1", "few descriptors", "Too many open files"),  # when it connects or accepts a connection
    ],
)  # fmt: skip
def test_a_rank_gets_the_cause_of_a_failure(plain: Program, layout: str, what: str, message: str) -> None:
    done = plain.run(layout, 1, 8, what)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize("connections", [1, 2])
def test_the_size_of_a_large_message_is_compared(plain: Program, connections: int) -> None:
    """The rank that finds the difference first ends, so the other one may only find its connection lost."""
    done = plain.run("1,1", 1, 8, f"another large part over {connections} connections")
    assert done.returncode == 1
    found = re.findall(r"sends (\d+) bytes to this rank, which expects (\d+)", done.stderr)
    assert found
    assert {frozenset(each) for each in found} == {frozenset(("4000000", "4000004"))}


@on_each_program("1,1", "1,1,1,1,1")
@pytest.mark.parametrize("which", ["1", "2", "shared"])
def test_all_ranks_learn_that_one_has_left_amid_an_operation(
    program: Program, layout: str, which: str
) -> None:
    done = program.run(layout, 1, 8, f"killed over {which} connections")
    assert done.returncode == 1
    others = layout.count(",")
    assert len(re.findall("all_reduce.* rank ", done.stderr)) == others, done.stderr
    assert "is not done" not in done.stderr


def test_the_minimum_number_of_descriptors_suffices(plain: Program) -> None:
    plain.check("1,1", seed=9, what="enough descriptors")


@on_each_program("1,1", "3,1")
def test_strangers_do_not_block_ranks(program: Program, layout: str) -> None:
    program.check(layout, seed=10, what="strangers", rounds=2)


@pytest.mark.parametrize("layout", ["1,1", "1,2", "1,1,1"])
def test_garbled_messages_do_not_end_a_process(addresses: Program, layout: str) -> None:
    addresses.check(layout, seed=11, what="garbled", rounds=10)


def test_a_host_may_have_thousands_of_ranks(plain: Program) -> None:
    plain.check("5000,1", seed=12, what="pieces")


# --- the ledger


def test_several_threads_can_write_the_same_ledger(tmp_path: Path) -> None:
    """The test program is compiled with ThreadSanitizer."""
    if shutil.which("g++") is None:
        pytest.skip("g++ is not installed")
    sources = (Path(__file__).with_name("ledger_threads.cpp"), SOURCES / "layer/ledger.cpp")
    command = [
        "g++",
        *FLAGS,
        *SANITIZED,
        "-fsanitize=thread",
        *sources,
        "-o",
        tmp_path / "threads",
    ]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    Program((str(tmp_path / "threads"),), rounds=1).check("1", seed=1)
