"""Plans from requests and facts: sizes, launchers, environment, errors.  No test looks at this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.plans import BIG, MPICH, PROGRAM, SMALL, make, setting

from cpulaunch import launchers, variables
from cpulaunch.config.load import load
from cpulaunch.errors import CpulaunchError, HostError, PlanError
from cpulaunch.launchers.command import Installation
from cpulaunch.model.facts import Facts, Mpi
from cpulaunch.model.hosts import Host
from cpulaunch.model.rates import ProductRates
from cpulaunch.plan.describe import describe
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.malloc import tunables
from cpulaunch.plan.plan import Plan
from cpulaunch.plan.select import checked_world_size, remaining_hosts


def sizes(made: Plan) -> list[int]:
    return [len(host.ranks) for host in made.hosts]


@pytest.mark.parametrize(
    ("settings", "hosts", "expected"),
    [
        ([], "", [2]),  # one rank per NUMA node
        (["hosts.nproc=3"], "", [3]),
        (["hosts.nproc_per_node=5"], "", [5]),
        ([], "a,b", [2, 2]),
        ([], "a:3,b:1", [3, 1]),
        (["hosts.nproc_per_node=4"], "a:3,b:1", [4, 4]),  # -ppn overrides slots
        (["hosts.nnodes=2"], "a,b,c", [2, 2]),
        (["hosts.nnodes=2", "hosts.nproc=6"], "a,b,c", [3, 3]),
        (["hosts.nproc=6"], "a,b,c", [2, 2, 2]),
        (["hosts.nproc=4"], "a:3,b:1", [3, 1]),
        (["hosts.nproc=8", "hosts.nproc_per_node=4"], "a,b", [4, 4]),
        ([], "n[01-16]:2", [2] * 16),
    ],
)
def test_sizes(settings, hosts, expected) -> None:
    made = make(*settings, hosts=hosts)
    assert sizes(made) == expected
    assert made.world_size == sum(expected)
    # A host's ranks are contiguous, and their local ranks start at 0.
    ranks = [(rank["rank"], rank["local_rank"]) for host in made.to_json()["hosts"] for rank in host["ranks"]]
    assert ranks == list(enumerate(local for size in expected for local in range(size)))


@pytest.mark.parametrize(
    ("settings", "hosts", "message"),
    [
        (
            ["hosts.nproc=7"],
            "a,b",
            "hosts.nproc (--hosts.nproc): 7 ranks can't be divided evenly over 2 hosts",
        ),
        (["hosts.nproc=5"], "a:3,b:1", "5 ranks, but the hosts' slots make 4 on 2 hosts"),
        (
            ["hosts.nproc=5", "hosts.nproc_per_node=4"],
            "",
            "5 ranks, but hosts.nproc_per_node (--hosts.nproc_per_node) make 4",
        ),
        (["hosts.nnodes=3"], "a,b", "hosts.nnodes (--hosts.nnodes): 3 hosts, but only 2 named"),
        (["hosts.nnodes=2"], "", "2 hosts, but only 1 named"),
        (["launcher=local"], "a,b", "local starts ranks on this machine only, but the hosts are a, b"),
        (["launcher=local"], "a", "local starts ranks on this machine only"),
        (["hosts.nproc=57"], "", "57"),
        (["hosts.nproc_per_node=57"], "a", "a, assumed to match this machine: "),
        (["cpu.cores=0-x"], "", "--cpu.cores: '0-x' is not valid for cpu.cores"),
        (["cpu.cores=500"], "", "500"),
        (["forward=NOPE"], "", "NOPE is not set in this environment"),
    ],
)
def test_requests_that_do_not_fit_show_the_numbers(settings, hosts, message) -> None:
    with pytest.raises(CpulaunchError) as e:
        make(*settings, hosts=hosts)
    assert message in str(e.value)
    assert e.value.exit_code == 2


def test_ranks_from_topologies_respect_the_maximum_of_a_job() -> None:
    with pytest.raises(
        PlanError, match="65537 ranks are planned, by the hosts' topologies: a job may have 65536"
    ):
        checked_world_size(load([], environ={"HOME": "/nowhere"}), 65537)


@pytest.mark.parametrize(
    ("settings", "hosts", "setting", "launcher"),
    [
        ([], "", "local", "local"),
        ([], "head", "local", "local"),
        ([], "localhost:2", "local", "local"),
        ([], "a", "mpirun", "intel"),
        ([], "head,a", "mpirun", "intel"),
        (["launcher=ssh"], "", "ssh", "ssh"),
        (["launcher=mpirun"], "", "mpirun", "intel"),
        (["mpi.flavour=intel"], "", "mpirun", "intel"),
        (["launcher=local", "mpi.flavour=intel"], "", "local", "local"),
    ],
)
def test_the_launcher_of_the_ranks(settings, hosts, setting, launcher) -> None:
    made = make(*settings, hosts=hosts)
    assert (made.launcher_setting, made.launcher) == (setting, launcher)


@pytest.mark.parametrize(
    ("known", "setting", "why"),
    [
        ({"mpis": None}, "ssh", "no MPI was found here"),
        ({"mpis": None, "mpis_here": (MPICH,)}, "mpirun", "found here; the other hosts were not asked"),
        ({"mpis": ()}, "ssh", "no MPI was found here"),
        ({"without_mpi": ("a", "b")}, "ssh", "a, b: there is no /i/mpiexec.hydra"),
        ({}, "mpirun", "found here; the other hosts were not asked"),
        ({"without_mpi": ()}, "mpirun", "found on all hosts"),
        ({"step": True}, "slurm", "in an allocation of Slurm"),
    ],
)
def test_the_launcher_for_several_hosts_depends_on_installed_programs(known, setting, why) -> None:
    made = make(hosts="a,b", **known)
    assert (made.launcher_setting, made.launcher_why) == (setting, why)
    assert describe(made).endswith(f" · started by {launchers.load(made.launcher).title} ({why})")


def test_ssh_takes_no_arguments_of_an_mpi() -> None:
    plan = make("launcher=ssh", "mpi.args=-verbose", hosts="a,b")
    with pytest.raises(PlanError, match="--launcher ssh accepts no --mpi-args: -verbose"):
        launchers.load("ssh").commands(plan, Installation("/agent.py", "/ssh.sh", "/spawner.py"))


@pytest.mark.parametrize(
    ("hosts", "here_alone"),
    [("", True), ("head", True), ("localhost:2", True), ("a", False), ("head,a", False)],
)
def test_a_job_on_this_host_is_local_by_any_name_of_the_host(hosts: str, here_alone: bool) -> None:
    assert make(hosts=hosts).here_alone is here_alone


class TestMpi:
    def test_without_an_mpi_the_error_names_both_remedies(self) -> None:
        with pytest.raises(PlanError, match="no MPI was found") as e:
            make("launcher=mpirun", hosts="a,b", mpis=())
        assert "pip install 'cpulaunch[mpi]'" in (e.value.hint or "")
        assert "--launcher ssh" in (e.value.hint or "")

    def test_a_missing_requested_mpi_is_distinguished_from_others(self) -> None:
        with pytest.raises(
            PlanError, match=r"no mpiexec of openmpi .* found; found: mpich \(/m/mpiexec\)"
        ) as e:
            make("mpi.flavour=openmpi", hosts="a,b", mpis=(MPICH,))
        assert "openmpi" in (e.value.hint or "")

    def test_recorded_facts_need_no_mpi_here(self) -> None:
        assert make("launcher=mpirun", hosts="a,b", mpis=None).mpiexec == "mpiexec.hydra"
        assert make("mpi.flavour=openmpi", hosts="a,b", mpis=None).mpiexec == "mpiexec"


class TestEnvironment:
    def test_the_users_variables_win_and_the_plan_notes_it(self) -> None:
        made = make(environ={"CCL_ATL_SHM": "0", "OMP_NUM_THREADS": "5", "UNRELATED": "x"})
        assert made.env["CCL_ATL_SHM"] == "0"
        assert made.env["OMP_NUM_THREADS"] == "5"
        assert "UNRELATED" not in made.env
        assert setting(made, "cpu.threads") == (5, "$OMP_NUM_THREADS")

    def test_an_option_wins_over_a_variable_of_another_program(self) -> None:
        made = make(
            "ccl.worker_count=2", "cpu.threads=3", environ={"CCL_WORKER_COUNT": "1", "OMP_NUM_THREADS": "9"}
        )
        assert (made.env["CCL_WORKER_COUNT"], made.env["OMP_NUM_THREADS"]) == ("2", "3")

    def test_env_wins_over_all_and_is_private(self) -> None:
        made = make("env=CCL_LOG_LEVEL=info", "env=SECRET=s", environ={"CCL_LOG_LEVEL": "warn"})
        assert (made.env["CCL_LOG_LEVEL"], made.env["SECRET"]) == ("info", "s")
        assert made.private == ("CCL_LOG_LEVEL", "SECRET")

    def test_the_plan_has_forwarded_names_without_values(self) -> None:
        made = make("forward=TOKEN", environ={"TOKEN": "hunter2"})
        assert made.forward == ("TOKEN",)
        assert "hunter2" not in json.dumps(made.to_json())

    def test_open_mpi_forwards_the_variables_that_make_sense_on_other_hosts(self) -> None:
        environ = {
            "PATH": "/bin",
            "HF_TOKEN": "t",
            "SSH_AUTH_SOCK": "s",
            "SLURM_PROCID": "3",
            "BASH_FUNC_a%%": "()",
        }
        made = make(
            "mpi.flavour=openmpi", hosts="a,b", mpis=(Mpi("openmpi", "/o/mpiexec", "5"),), environ=environ
        )
        assert made.forward == ("HF_TOKEN", "HOME", "PATH")

    def test_variables_that_name_other_ranks_are_hidden(self) -> None:
        environ = {"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "OMPI_COMM_WORLD_RANK": "1", "PMI_RANK": "2"}
        made = make("forward=SLURM_NTASKS", hosts="a,b", environ=environ)
        assert made.launcher == "intel"  # it sets PMI_RANK
        assert {"SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"} <= set(made.hidden)
        assert not {"SLURM_NTASKS", "SLURM_JOB_ID", "PMI_RANK", "MPI_LOCALRANKID"} & set(made.hidden)
        (note,) = [note for note in made.notes if "hidden" in note]
        assert note.endswith(": SLURM_PROCID, OMPI_COMM_WORLD_RANK (-x NAME keeps one)")
        assert "PMI_RANK" in make(hosts="").hidden  # started by cpulaunch itself

    def test_worker_affinity_is_one_list_for_the_host(self) -> None:
        made = make("hosts.nproc_per_node=4", "ccl.worker_count=1", hosts="a,b")
        assert [host.env for host in made.hosts] == [{"CCL_WORKER_AFFINITY": "0,14,28,42"}] * 2
        assert "CCL_WORKER_AFFINITY" not in made.env

    def test_differing_threads_are_set_per_rank(self) -> None:
        made = make(
            "cpu.cores=0-27,28-40", "cpu.cores_per_rank=max", "hosts.nproc=2", "training.backend=gloo"
        )
        threads = [rank.threads for rank in made.hosts[0].ranks]
        assert threads == [21, 20]
        assert [rank.env for rank in made.hosts[0].ranks] == [
            {"OMP_NUM_THREADS": "21", "OMP_PLACES": "{0:21},{1}:20"},
            {"OMP_NUM_THREADS": "20", "OMP_PLACES": "{21:20},{22}:19"},
        ]
        assert "OMP_NUM_THREADS" not in made.env


class TestLibrariesAndMemory:
    DEBIAN = replace(BIG, libraries={"tcmalloc": "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"})
    FEDORA = replace(BIG, libraries={"tcmalloc": "/usr/lib64/libtcmalloc_minimal.so.4"})
    BARE = replace(BIG, libraries={})

    def test_each_host_has_its_own_libraries(self) -> None:
        known = {"a": self.DEBIAN, "b": self.FEDORA}
        made = make(hosts="a,b", hosts_known=known)
        preloads = [host.env["LD_PRELOAD"] for host in made.hosts]
        assert preloads == [facts.libraries["tcmalloc"] for facts in known.values() if facts.libraries]
        assert setting(made, "cpu.allocator")[0] == "tcmalloc"
        assert "LD_PRELOAD" not in made.env  # neither mpiexec nor the agents get it

    def test_a_host_without_the_library_does_without_or_is_an_error(self) -> None:
        known = {"a": self.DEBIAN, "b": self.BARE}
        made = make(hosts="a,b", hosts_known=known)
        assert ["LD_PRELOAD" in host.env for host in made.hosts] == [True, False]
        assert setting(made, "cpu.allocator")[0] == "auto"
        with pytest.raises(PlanError, match="b: allocator tcmalloc: tcmalloc was not found"):
            make("cpu.allocator=tcmalloc", hosts="a,b", hosts_known=known)

    def test_without_tcmalloc_malloc_is_tuned_if_there_is_enough_memory(self) -> None:
        roomy, full = (
            replace(self.BARE, libc="glibc 2.36"),
            replace(self.BARE, libc="glibc 2.28", memory_limit=15 << 30),
        )
        made = make("hosts.nproc_per_node=2", hosts="a,b", hosts_known={"a": roomy, "b": full})
        assert [host.env.get("GLIBC_TUNABLES") for host in made.hosts] == [tunables({}), None]
        assert made.allocator == (
            "glibc (tcmalloc is not installed); default (tcmalloc is not installed, and the control group "
            "allows 7.5 GiB of memory per rank, and 8 GiB are needed to keep freed memory)"
        )
        assert "GLIBC_TUNABLES" not in made.env  # neither mpiexec nor the agents get it
        asked = make("cpu.allocator=glibc", hosts="b", hosts_known={"b": full})
        assert asked.hosts[0].env["GLIBC_TUNABLES"] == tunables({})
        assert setting(asked, "cpu.allocator")[0] == "glibc"

    def test_the_detected_allocator_is_a_value_of_the_setting(self) -> None:
        made = make(facts=replace(self.BARE, libc="glibc 2.36"))
        assert setting(made, "cpu.allocator")[0] == "glibc"
        assert setting(make(facts=replace(self.BARE, libc="musl")), "cpu.allocator")[0] == "default"
        with pytest.raises(PlanError, match="allocator glibc: the C library is musl"):
            make("cpu.allocator=glibc", facts=replace(self.BARE, libc="musl"))

    def test_the_users_tunables_are_merged(self) -> None:
        facts, own = replace(self.BARE, libc="glibc 2.36"), {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=7"}
        set_by = (
            make(facts=facts, environ=own),
            make("env=GLIBC_TUNABLES=glibc.malloc.mmap_max=7", facts=facts),
        )
        for made in set_by:
            assert made.hosts[0].env["GLIBC_TUNABLES"] == tunables(own)
            assert "GLIBC_TUNABLES: your glibc.malloc.mmap_max=7 stays" in made.notes

    def test_malloc_may_be_tuned_on_an_uninspected_host(self) -> None:
        made = make("cpu.openmp=intel", hosts="a", facts=self.BARE)
        assert made.hosts[0].env["LD_PRELOAD"] == "libiomp5.so"
        assert "not checked on this host: libiomp5.so" in made.notes
        assert (made.request.allocator, made.request.openmp) == ("auto", "intel")

    def test_the_environment_is_stronger_than_a_file(self, tmp_path: Path) -> None:
        (file := tmp_path / "c.yaml").write_text("cpulaunch: 1\ncpu: {allocator: tcmalloc}\n")
        environ = {"HOME": "/nowhere", "LD_PRELOAD": "/my/libjemalloc.so.2"}
        facts = Facts(like=self.DEBIAN, here=frozenset({"localhost"}), mpis=())
        made = make_plan(load((), environ=environ, file=file), facts, PROGRAM)
        assert "LD_PRELOAD" not in made.hosts[0].env
        assert setting(made, "cpu.allocator")[0] == "jemalloc"
        assert "allocator: jemalloc, from your LD_PRELOAD" in made.notes
        asked = load([("cpu.allocator", "tcmalloc", "--allocator")], environ=environ)
        with pytest.raises(PlanError, match="allocator tcmalloc is requested, but LD_PRELOAD has jemalloc"):
            make_plan(asked, facts, PROGRAM)

    def test_values_that_env_sets_are_kept_too(self) -> None:
        made = make("env=LD_PRELOAD=/my/libfoo.so", facts=self.DEBIAN)
        assert made.hosts[0].env["LD_PRELOAD"] == (
            "/my/libfoo.so:/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4"
        )

    @pytest.mark.parametrize("name", ["OMP_PLACES", "OMP_PROC_BIND", "KMP_AFFINITY", "GOMP_CPU_AFFINITY"])
    def test_threads_bound_by_the_user_are_left_alone(self, name: str) -> None:
        assert all("OMP_PLACES" in rank.env for rank in make().hosts[0].ranks)
        for made in (make(environ={name: "x"}), make(f"env={name}=x")):
            assert not any(rank.env for rank in made.hosts[0].ranks)
            assert f"your {name} binds OpenMP's threads; cpulaunch leaves them alone" in made.notes

    def test_intels_runtime_gets_its_own_variables(self) -> None:
        facts = replace(BIG, libraries={"intel": "/v/lib/libiomp5.so", "torch": "/t/libgomp.so.1"})
        made = make("cpu.openmp=intel", "ccl.worker_count=1", facts=facts)
        assert made.hosts[0].env == {
            "CCL_WORKER_AFFINITY": "0,28",
            "KMP_BLOCKTIME": "1",
            "LD_PRELOAD": "/v/lib/libiomp5.so",
        }
        assert all(list(rank.env) == ["KMP_AFFINITY"] for rank in made.hosts[0].ranks)

    def test_memory_is_preferred_or_required_on_near_nodes(self) -> None:
        assert [rank.memory_policy for rank in make().hosts[0].ranks] == ["prefer:0", "prefer:1"]
        strict = make("cpu.bind_numa=true").hosts[0].ranks
        assert [rank.memory_policy for rank in strict] == ["bind:0", "bind:1"]

    @pytest.mark.parametrize(
        ("settings", "environ", "firsts"),
        [
            ((), {}, ("", "")),
            (("ccl.transport=tcp",), {}, ("", "")),
            (("ccl.transport=ofi",), {}, ("", "")),
            (("ccl.worker_count=0", "ccl.transport=oneccl"), {}, ("", "")),
            (("ccl.worker_count=1",), {}, ("0", "28")),
            ((), {"CCL_WORKER_COUNT": "1"}, ("0", "28")),
            ((), {"CCL_WORKER_AFFINITY": "0,28"}, ("0", "28")),
            (("ccl.logical_cores=true",), {}, ("56", "84")),
            (("ccl.transport=oneccl",), {}, ("0", "28")),
            ((), {"CCL_ALLREDUCE": "ring"}, ("0", "28")),
            (("ccl.binding=oneccl_bind_pt",), {}, ("0", "28")),
            (("ccl.worker_count=1", "training.backend=gloo"), {}, ("", "")),
        ],
    )
    def test_communication_gets_cores_on_request_or_with_oneccl(
        self, settings: tuple[str, ...], environ: dict[str, str], firsts: tuple[str, str]
    ) -> None:
        made = make("training.backend=ccl", *settings, environ=environ)
        assert tuple(str(rank.comm_cores) for rank in made.hosts[0].ranks) == firsts
        assert [rank.threads for rank in made.hosts[0].ranks] == [
            28 if first in ("", "56", "84") else 27 for first in firsts
        ]
        if made.env[variables.BACKEND] == "ccl":
            assert (made.env["CCL_WORKER_COUNT"], made.env["CCL_ATL_TRANSPORT"]) == ("1", "ofi")
            assert made.env["CCL_WORKER_OFFLOAD"] == ("1" if firsts[0] else "0")


class TestHosts:
    def test_each_host_is_bound_by_its_own_topology(self) -> None:
        made = make("hosts.nproc_per_node=2", hosts="a,b", hosts_known={"b": SMALL})
        assert [[str(rank.cores) for rank in host.ranks] for host in made.hosts] == [
            ["0-27", "28-55"],
            ["0", "1"],
        ]
        assert [host.assumed for host in made.hosts] == [True, False]

    def test_the_number_of_workers_suits_the_smallest_host(self) -> None:
        made = make("hosts.nproc_per_node=2", "ccl.transport=ofi", hosts="a,b", hosts_known={"b": SMALL})
        assert all(not rank.comm_cores for host in made.hosts for rank in host.ranks)
        assert made.env["CCL_WORKER_OFFLOAD"] == "0"

    def test_this_machine_is_not_assumed(self) -> None:
        assert not make().hosts[0].assumed
        assert not make(facts=SMALL).hosts[0].assumed


class TestBackendAndPrecision:
    def test_ccl_is_chosen_if_it_can_be_used(self) -> None:
        assert make().env["CPULAUNCH_BACKEND"] == "ccl"

    def test_auto_falls_back_to_gloo_with_a_reason(self) -> None:
        made = make(ccl_missing="no compiler")
        assert made.env["CPULAUNCH_BACKEND"] == "gloo"
        assert any("no compiler" in note for note in made.notes)

    def test_ccl_never_falls_back_silently(self) -> None:
        with pytest.raises(PlanError, match="no compiler"):
            make("training.backend=ccl", ccl_missing="no compiler")

    @pytest.mark.parametrize(
        ("settings", "rates", "precision"),
        [
            ([], (4e11, 8e11), "bf16"),
            ([], (4e11, 2e11), "fp32"),
            (["training.precision=bf16"], (4e11, 2e11), "bf16"),
            (["training.precision=fp32"], (4e11, 8e11), "fp32"),
        ],
    )
    def test_the_faster_precision_is_chosen_unless_the_user_names_one(
        self, settings, rates, precision
    ) -> None:
        threads = make(facts=SMALL).hosts[0].ranks[0].threads
        made = make(*settings, facts=replace(SMALL, rates=(ProductRates(threads, *rates),)))
        assert made.env["CPULAUNCH_PRECISION"] == setting(made, "training.precision")[0] == precision
        assert made.precision.measured == ProductRates(threads, *rates)
        assert made.notes == tuple(filter(None, [made.precision.warning]))

    def test_rates_with_another_number_of_threads_do_not_count(self) -> None:
        threads = make(facts=SMALL).hosts[0].ranks[0].threads
        made = make(facts=replace(SMALL, rates=(ProductRates(threads + 1, 4e11, 8e11),)))
        assert made.precision.measured is None
        assert made.precision.precision == "fp32"

    def test_a_host_whose_cpu_lacks_bf16_makes_the_precision_fp32(self) -> None:
        known = {"a": replace(SMALL, cpu_flags=("amx_bf16",)), "b": SMALL}
        assert make(hosts="a,b", facts=SMALL, hosts_known=known).env["CPULAUNCH_PRECISION"] == "fp32"

    def test_another_attempt_keeps_the_precision_of_the_first(self) -> None:
        first = make(facts=replace(SMALL, cpu_flags=("amx_bf16",))).precision
        again = make_plan(load([]), Facts(SMALL), PROGRAM, first)
        assert (again.precision, again.env["CPULAUNCH_PRECISION"]) == (first, "bf16")

    def test_as_written_the_script_decides_on_the_precision(self) -> None:
        assert make("training.as_written=true", facts=SMALL).notes == ()


@pytest.mark.parametrize(
    ("nnodes", "avoid", "unusable", "left"),
    [
        ("all", "", "", "abcd"),
        ("3", "b", "", "acd"),  # d was a spare
        ("3", "b", "b", "acd"),
        ("3", "ab", "", "acd"),  # one of them is needed
        ("3:4", "b", "", "acd"),
        ("2:3", "bc", "", "ad"),
        ("2:3", "", "a", "bcd"),
        ("3", "", "ab", ""),
        ("all", "d", "", "abcd"),
        ("all", "d", "d", ""),
    ],
)
def test_another_attempt_uses_the_remaining_hosts(nnodes: str, avoid: str, unusable: str, left: str) -> None:
    config = load([("hosts.nnodes", nnodes, "--nnodes")], environ={})
    named = tuple(map(Host, "abcd"))

    def remaining() -> str:
        return "".join(
            host.name for host in remaining_hosts(config, named, avoid, dict.fromkeys(unusable, "off"))
        )

    if left:
        assert remaining() == left
    else:
        with pytest.raises(
            HostError, match=rf"only \d of the required \d hosts? (remains|remain) \({unusable[0]}: off"
        ):
            remaining()
