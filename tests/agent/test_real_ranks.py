"""Real ranks have the planned libraries, threads, cores and memory policy; differences are reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.agents import AGENT, PlayedLauncher, placement, rank_plan, run_agent
from support.command import REPOSITORY, TIMEOUT, Run, clean_environment, needs_two_cores
from support.jobs import outcome, output_of_one
from support.marks import repeat

from cpulaunch.discovery.host.libraries import find_libraries, import_directories, library_directories
from cpulaunch.discovery.host.this_host import libc_here
from cpulaunch.messages import Exit, Release, Started
from cpulaunch.model.libraries import FILES
from cpulaunch.plan.malloc import tunables
from cpulaunch.plan.request import BindingRequest, HostRequest

needs_glibc = pytest.mark.skipif(not libc_here().startswith("glibc"), reason="the C library is not glibc")
HERE = find_libraries(library_directories(), import_directories())
FIRST, *_, LAST = sorted(os.sched_getaffinity(0)) * 2

SHOW = """
import json, os
maps = open("/proc/self/maps").read()
names = ("LD_PRELOAD", "MALLOC_CONF", "GLIBC_TUNABLES", "OMP_PLACES", "KMP_AFFINITY", "KMP_BLOCKTIME", "OMP_NUM_THREADS")
print(json.dumps({"env": {n: os.environ[n] for n in names if n in os.environ},
                  "mapped": [n for n in ("libtcmalloc", "libjemalloc", "libiomp5") if n in maps],
                  "policy": open("/proc/self/numa_maps").readline().split()[1]}))
"""

# Waits until the agent has inspected the program.
IS_SEEN = """
import glob, time
while not any('"type":"found"' in open(file).read() for file in glob.glob("runs/*/events.jsonl")):
    time.sleep(0.05)
"""

# Prints the cores of the main thread, OpenMP's second thread, a Python thread and a forked child.
THREADS = """
import json, os, threading
import torch
torch.ones(2000, 2000) @ torch.ones(2000, 2000)
seen = {"threads": torch.get_num_threads(), "main": sorted(os.sched_getaffinity(0))}
thread = threading.Thread(target=lambda: seen.update(thread=sorted(os.sched_getaffinity(0))))
thread.start(), thread.join()
def cores(thread):
    try:
        return sorted(os.sched_getaffinity(int(thread)))
    except ProcessLookupError:  # it has ended since it was listed
        return []
seen["all"] = sorted(map(cores, os.listdir("/proc/self/task")))
read, write = os.pipe()
if os.fork() == 0:
    os.write(write, json.dumps(sorted(os.sched_getaffinity(0))).encode())
    os._exit(0)
os.wait()
seen["fork"] = json.loads(os.read(read, 10000))
print(json.dumps(seen))
"""


def installed(library: str) -> str:
    if library not in HERE:
        pytest.skip(f"{library} is not installed: {FILES[library][0]} was not found")
    return HERE[library]


def events(directory: Path, kind: str) -> list[dict[str, Any]]:
    (file,) = directory.glob("runs/*/events.jsonl")
    return [event for line in file.open() if (event := json.loads(line))["type"] == kind]


class TestLibraries:
    @pytest.mark.parametrize(
        ("options", "library", "mapped"),
        [
            (["--allocator", "tcmalloc"], "tcmalloc", "libtcmalloc"),
            (["--allocator", "jemalloc"], "jemalloc", "libjemalloc"),
            (["--allocator", "default", "--openmp", "intel"], "intel", "libiomp5"),
            ([], "tcmalloc", "libtcmalloc"),
        ],
    )
    def test_planned_libraries_are_loaded_in_the_program(
        self, cpulaunch: Run, tmp_path: Path, options: list[str], library: str, mapped: str
    ) -> None:
        path = installed(library)
        (tmp_path / "show.py").write_text(SHOW + IS_SEEN)
        seen = output_of_one(cpulaunch("run", "-n", "1", *options, "show.py"))
        assert (seen["env"]["LD_PRELOAD"], seen["mapped"]) == (path, [mapped])
        assert events(tmp_path, "found")[0]["preloaded"] == [path]

    def test_planned_libraries_come_after_the_users_own(self, cpulaunch: Run, tmp_path: Path) -> None:
        tcmalloc, intel = installed("tcmalloc"), installed("intel")
        (tmp_path / "show.py").write_text(SHOW)
        env = {"LD_PRELOAD": tcmalloc, "KMP_BLOCKTIME": "33"}
        done = cpulaunch("run", "-v", "-n", "1", "--openmp", "intel", "show.py", env=env)
        seen = output_of_one(done)
        assert seen["env"]["LD_PRELOAD"] == f"{tcmalloc}:{intel}"
        assert seen["env"]["KMP_BLOCKTIME"] == "33"
        assert "allocator: tcmalloc, from your LD_PRELOAD" in done.stderr
        assert f"LD_PRELOAD: your {tcmalloc} comes first" in done.stderr

    @pytest.mark.parametrize("name", ["my env", repeat("a:b")])
    def test_libraries_with_a_space_or_colon_in_their_path_are_left_out_with_a_message(
        self, tmp_path: Path, name: str
    ) -> None:
        """The job's Python is in an environment whose path has a space or a colon."""
        env_dir = tmp_path / name
        (env_dir / "bin").mkdir(parents=True)
        (env_dir / "lib").mkdir()
        (env_dir / "bin/python").symlink_to(sys.executable)
        (env_dir / "lib/libiomp5.so").symlink_to(installed("intel"))
        (tmp_path / "show.py").write_text(SHOW)
        paths = [str(REPOSITORY), *filter(None, sys.path)]
        done = subprocess.run(
            [env_dir / "bin/python", "-m", "cpulaunch", "run", "-n", "1", "--openmp", "intel", "show.py"],
            cwd=tmp_path,
            env=clean_environment(PYTHONPATH=os.pathsep.join(paths)),
            timeout=TIMEOUT,
            capture_output=True,
            text=True,
        )
        assert "libiomp5" not in output_of_one(done)["mapped"]
        assert "openmp: intel is left out, as LD_PRELOAD takes no space or colon: " in done.stderr

    def test_the_agent_itself_loads_no_allocator(self, cpulaunch: Run, tmp_path: Path) -> None:
        installed("tcmalloc")
        (tmp_path / "parent.py").write_text("import os; print(open(f'/proc/{os.getppid()}/maps').read())")
        done = cpulaunch("run", "-n", "1", "--allocator", "tcmalloc", "parent.py")
        assert "libc.so" in done.stdout
        assert "tcmalloc" not in done.stdout

    @needs_glibc
    def test_malloc_is_tuned_only_in_the_program(self, cpulaunch: Run, tmp_path: Path) -> None:
        (tmp_path / "show.py").write_text(
            "import os\n"
            "print(os.environ['GLIBC_TUNABLES'])\n"
            # glibc overwrites each colon with a zero byte when it parses the variable.
            "given = open(f'/proc/{os.getppid()}/environ').read().split(chr(0))\n"
            "print([each for each in given if each.startswith(('GLIBC_TUNABLES', 'glibc.'))])\n"
        )
        users = {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}
        done = cpulaunch("run", "-v", "-n", "1", "--allocator", "glibc", "show.py", env=users)
        program, agent = done.stdout.splitlines()
        assert program == tunables(users)
        assert agent == "['GLIBC_TUNABLES=glibc.malloc.arena_max=2']"
        assert "GLIBC_TUNABLES: your glibc.malloc.arena_max=2 stays" in done.stderr

    def test_a_missing_allocator_is_an_error_with_instructions(self, cpulaunch: Run, tmp_path: Path) -> None:
        topology = {"cpus": [[0, 0, 0, 0], [1, 1, 0, 0]]}
        facts = {"schema": 1, "hosts": {"node1": {"topology": topology, "libraries": {}}}}
        (tmp_path / "facts.json").write_text(json.dumps(facts))
        (tmp_path / "train.py").write_text("")
        done = cpulaunch("run", "--dry-run", "--facts", "facts.json", "--allocator", "jemalloc", "train.py")
        assert done.returncode == 2
        assert "node1: allocator jemalloc: jemalloc was not found" in done.stderr
        assert "apt install libjemalloc2" in done.stderr

    def test_the_job_fails_if_a_rank_drops_its_preloaded_libraries(
        self, cpulaunch: Run, tmp_path: Path
    ) -> None:
        """A wrapper in the environment restarts Python without LD_PRELOAD."""
        path = installed("tcmalloc")
        shed = "import os, sys\nif os.environ.pop('LD_PRELOAD', ''): os.execv(sys.executable, sys.orig_argv)"
        done = interfered(cpulaunch, tmp_path, shed, "--allocator", "tcmalloc")
        assert done.returncode == 3
        assert f"rank 0 should have preloaded {path}, but has not" in done.stderr


@pytest.mark.slow
class TestThreads:
    @needs_two_cores
    @pytest.mark.parametrize("openmp", ["default", repeat("intel")])
    def test_each_openmp_thread_has_a_core_and_children_may_use_all_cores(
        self, cpulaunch: Run, tmp_path: Path, openmp: str
    ) -> None:
        if openmp == "intel":
            installed("intel")
        (tmp_path / "threads.py").write_text(THREADS)
        cores = f"{FIRST},{LAST}"
        seen = output_of_one(cpulaunch("run", "-n", "1", "--cores", cores, "--openmp", openmp, "threads.py"))
        both = [FIRST, LAST]
        assert seen["threads"] == 2
        assert seen["main"] == seen["thread"] == seen["fork"] == both
        assert [LAST] in seen["all"]
        assert [FIRST] not in seen["all"]

    @needs_two_cores
    def test_ranks_that_are_not_pinned_may_run_on_all_cores(self, cpulaunch: Run, tmp_path: Path) -> None:
        (tmp_path / "seen.py").write_text("import os, pathlib\nmine = sorted(os.sched_getaffinity(0))\n"
                                          "pathlib.Path(os.environ['RANK']).write_text(str(mine))")  # fmt: skip
        cores = f"{FIRST},{LAST}"
        done = cpulaunch("run", "-n", "2", "--cores", cores, "--strategy", "none", "seen.py")
        assert done.returncode == 0, done.stderr
        assert [(tmp_path / rank).read_text() for rank in "01"] == [str([FIRST, LAST])] * 2

    def test_threads_bound_by_the_user_are_left_alone(self, cpulaunch: Run, tmp_path: Path) -> None:
        (tmp_path / "show.py").write_text(SHOW)
        done = cpulaunch("run", "-v", "-n", "1", "show.py", env={"OMP_PLACES": "sockets"})
        assert output_of_one(done)["env"]["OMP_PLACES"] == "sockets"
        assert "your OMP_PLACES binds OpenMP's threads; cpulaunch leaves them alone" in done.stderr

    @needs_two_cores
    def test_torchs_number_of_threads_is_checked(self, cpulaunch: Run, tmp_path: Path) -> None:
        (tmp_path / "change.py").write_text(
            "import ctypes\n"
            f"ctypes.CDLL({HERE['torch']!r}).omp_set_num_threads(7)\n"
            "import torch\nimport time\ntime.sleep(300)\n"
        )
        done = cpulaunch("run", "-n", "1", "--threads", "1", "--openmp", "default", "change.py")
        assert done.returncode == 3
        assert re.search("rank 0 was given 1 threads, but torch has [2-7]; --lenient makes", done.stderr)

    @needs_two_cores
    @pytest.mark.parametrize(
        ("prepare", "said"),
        [
            ("import os; os.environ['OMP_NUM_THREADS'] = '2'", 2),
            repeat("import os; os.environ['MKL_NUM_THREADS'] = '2'", 2),
            # transformers calls this before it imports torch.
            repeat("import importlib.util; importlib.util.find_spec('torch')", 1),
        ],
    )
    def test_a_program_may_change_its_number_of_threads(
        self, cpulaunch: Run, tmp_path: Path, prepare: str, said: int
    ) -> None:
        (tmp_path / "own.py").write_text(f"{prepare}\nimport torch\nprint(torch.get_num_threads())")
        done = cpulaunch("run", "-n", "1", "--threads", "1", "own.py")
        assert output_of_one(done) == said
        assert events(tmp_path, "found")[-1]["torch_threads"] == said


# Prints "trained", and waits until its agent has inspected it.
TRAINED = """
import glob, time
print("trained")
while not any('"found"' in open(log).read() for log in glob.glob("runs/*/events.jsonl")): time.sleep(0.01)
"""


def interfered(cpulaunch: Run, directory: Path, code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a job in whose ranks ``code`` is executed when Python starts, before the program."""
    (directory / "site").mkdir()
    (directory / "site" / "sitecustomize.py").write_text(
        f"import os\nif 'CPULAUNCH_REPORT_FD' in os.environ:\n    exec({code!r})\n"
    )
    (directory / "train.py").write_text(TRAINED)
    env = {"PYTHONPATH": str(directory / "site")}
    return cpulaunch("run", "-n", "1", *options, "train.py", env=env)


class TestMasks:
    @needs_two_cores
    def test_the_job_fails_if_something_narrows_a_ranks_cpu_mask(
        self, cpulaunch: Run, tmp_path: Path
    ) -> None:
        code = f"import time, os; os.sched_setaffinity(0, [{FIRST}])"
        done = interfered(cpulaunch, tmp_path, code, "--cores", f"{FIRST},{LAST}")
        assert done.returncode == 3
        assert f"rank 0 was put on CPUs {FIRST}-{LAST}, but is on {FIRST}" in done.stderr
        assert outcome(tmp_path)["kind"] == "start_failed"

    @needs_two_cores
    def test_with_lenient_a_narrowed_cpu_mask_is_a_warning(self, cpulaunch: Run, tmp_path: Path) -> None:
        code = f"import os; os.sched_setaffinity(0, [{FIRST}])"
        done = interfered(cpulaunch, tmp_path, code, "--cores", f"{FIRST},{LAST}", "--lenient")
        assert (done.returncode, done.stdout) == (0, "trained\n")
        assert f"rank 0 was put on CPUs {FIRST}-{LAST}, but is on {FIRST}" in done.stderr

    @needs_two_cores
    def test_threads_on_other_cores_are_noticed_after_torch_is_imported(
        self, cpulaunch: Run, tmp_path: Path
    ) -> None:
        (tmp_path / "stray.py").write_text(
            f"import os, time\nos.sched_setaffinity(0, [{LAST}])\nimport torch\ntime.sleep(300)"
        )
        done = cpulaunch("run", "-n", "1", "--cores", FIRST, "stray.py")
        assert done.returncode == 3
        assert f"rank 0 was put on CPUs {FIRST}, but its threads are on " in done.stderr


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="a kernel without NUMA")
class TestMemory:
    """A machine with a single NUMA node suffices: it also has memory policies."""

    @pytest.mark.parametrize("policy", ["bind:0", "prefer:0"])
    def test_the_program_has_the_planned_memory_policy(self, tmp_path: Path, policy: str) -> None:
        assert output_of_one(run_agent(placement(tmp_path, rank_plan(policy)), SHOW))["policy"] == policy

    def test_without_a_planned_memory_policy_the_kernels_default_applies(self, tmp_path: Path) -> None:
        assert output_of_one(run_agent(placement(tmp_path, rank_plan()), SHOW))["policy"] == "default"

    def test_an_impossible_strict_memory_policy_is_an_error(self, tmp_path: Path) -> None:
        done = run_agent(placement(tmp_path, rank_plan("bind:1000")), SHOW)
        assert done.returncode == 3
        assert "the memory policy bind:1000 can't be set: Invalid argument" in done.stderr
        assert done.stdout == ""

    @pytest.mark.parametrize(("policy", "lenient"), [("prefer:1000", False), ("bind:1000", True)])
    def test_other_impossible_memory_policies_are_skipped(
        self, tmp_path: Path, policy: str, lenient: bool
    ) -> None:
        """By default, the kernel already prefers near memory, and containers often forbid the system call."""
        assert (
            output_of_one(run_agent(placement(tmp_path, rank_plan(policy), lenient=lenient), SHOW))["policy"]
            == "default"
        )

    def test_the_job_fails_if_something_changes_the_memory_policy(self, tmp_path: Path) -> None:
        (tmp_path / "site").mkdir()
        (tmp_path / "site" / "sitecustomize.py").write_text(
            f"import sys; sys.path.insert(0, {str(AGENT.parent.parent.parent)!r})\n"
            "from cpulaunch.agent.launch.child import set_memory_policy\nset_memory_policy('prefer:0')\n"
        )
        env = {"PYTHONPATH": str(tmp_path / "site")}
        done = run_agent(placement(tmp_path, rank_plan("bind:0")), "import time; time.sleep(300)", env)
        assert done.returncode == 3
        assert "rank 0 was given the memory policy bind:0, but has prefer:0" in done.stderr


class TestHostsThatNobodyLookedAt:
    def test_agents_on_unprobed_hosts_find_cores_and_libraries_themselves(self, tmp_path: Path) -> None:
        intel = installed("intel")
        placed = placement(
            tmp_path,
            rank_plan(cores="4000-4055"),
            assumed=True,
            host_env={"LD_PRELOAD": "/not/here/libtcmalloc.so.4", "MALLOC_CONF": "x:1"},
            request=HostRequest(
                BindingRequest(worker_count=1, dedicate_workers=False), allocator="default", openmp="intel"
            ),
        )
        seen = output_of_one(run_agent(placed, SHOW))
        cores = len(os.sched_getaffinity(0))
        assert seen["env"]["LD_PRELOAD"] == intel
        assert "MALLOC_CONF" not in seen["env"]
        assert int(seen["env"]["OMP_NUM_THREADS"]) <= cores
        assert ("KMP_AFFINITY" in seen["env"]) == (int(seen["env"]["OMP_NUM_THREADS"]) > 1)

    @needs_glibc
    @pytest.mark.parametrize(("allocator", "tuned"), [("glibc", True), ("default", False)])
    def test_agents_on_unprobed_hosts_decide_on_the_tunables_of_malloc(
        self, tmp_path: Path, allocator: str, tuned: bool
    ) -> None:
        planned = {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=3"}
        request = HostRequest(allocator=allocator, openmp="default")
        placed = placement(tmp_path, assumed=True, host_env=planned, request=request)
        env = output_of_one(run_agent(placed, SHOW))["env"]
        assert env.get("GLIBC_TUNABLES") == (tunables({}) if tuned else None)

    def test_a_library_left_out_because_of_its_path_is_named(self, tmp_path: Path) -> None:
        """The agent runs under the venv's base interpreter, whose own directories have no such library."""
        library = tmp_path / "my libraries" / "libiomp5.so"
        library.parent.mkdir()
        python = os.path.realpath(sys.executable)
        shutil.copy(python, library)  # an ELF file for this machine
        placed = placement(tmp_path, assumed=True, request=HostRequest(allocator="default", openmp="intel"))
        env = {"LD_LIBRARY_PATH": str(library.parent)}
        with PlayedLauncher(placed, SHOW, env=env, python=python) as launcher:
            launcher.welcome()
            notes = launcher.next(Started).notes
            launcher.next(Exit)
            launcher.say(Release())
            assert launcher.end()[0] == 0
        assert notes == [f"openmp: intel is left out, as LD_PRELOAD takes no space or colon: {library}"]

    def test_an_impossible_library_is_an_error(self, tmp_path: Path) -> None:
        request = HostRequest(allocator="jemalloc")
        env = {"LD_PRELOAD": "/nowhere/libtcmalloc.so.4"}  # doesn't exist; ld.so only prints a warning
        done = run_agent(placement(tmp_path, assumed=True, request=request), SHOW, env)
        assert done.returncode == 3
        assert "allocator jemalloc is requested, but LD_PRELOAD has tcmalloc" in done.stderr
        assert done.stdout == ""
