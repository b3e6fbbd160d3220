"""Plans of instances: their placement, their environment, and contradicting settings."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.machines import machine
from support.plans import BIG, PROGRAM, make, setting

from cpulaunch import launchers, variables
from cpulaunch.cli.run.plan_text import thread_warnings
from cpulaunch.config.load import load
from cpulaunch.config.origin import DETECTED
from cpulaunch.config.setting import Setting
from cpulaunch.config.settings import Table
from cpulaunch.config.write import yaml_text
from cpulaunch.errors import ConfigError, CpulaunchError, PlanError
from cpulaunch.launchers.command import Installation
from cpulaunch.model.facts import Facts, HostFacts
from cpulaunch.model.hosts import parse_hosts
from cpulaunch.plan.instances import as_instances
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.placement import Placement
from cpulaunch.plan.plan import Instances, Plan


def cores(plan: Plan) -> list[str]:
    return [str(rank.cores) for host in plan.hosts for rank in host.ranks]


def placement_of(plan: Plan) -> Placement:
    """Return the plan as the agents receive it."""
    commands = launchers.load(plan.launcher).commands(
        plan, Installation("/agent.py", "/ssh.sh", "/spawner.py")
    )
    return Placement.from_variables(commands[0].env)


class TestNumber:
    """The number of instances, mostly on two sockets of 28 cores, each a NUMA node."""

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            (["instances.count=auto"], ["0-27", "28-55"]),
            (["instances.count=3"], ["0-17", "18-35", "36-53"]),
            (["instances.count=2", "instances.cores_per_instance=4"], ["0-3", "28-31"]),
            (["instances.cores_per_instance=10"], ["0-9", "10-19", "28-37", "38-47"]),
            (["instances.cores_per_instance=40"], ["0-39"]),
            (["instances.cores_per_instance=14", "cpu.numa_nodes=1"], ["28-41", "42-55"]),
            (["instances.count=3", "cpu.bind_numa=true"], ["0-13", "14-27", "28-41"]),
        ],
        ids=" ".join,
    )
    def test_and_cores_are_as_requested(self, settings: list[str], expected: list[str]) -> None:
        plan = make(*settings)
        assert cores(plan) == expected
        assert plan.instances == Instances(len(expected))

    def test_of_small_instances_is_as_many_as_fit_within_the_nodes(self) -> None:
        plan = make("instances.cores_per_instance=4")
        assert plan.world_size == 14
        assert all(len(rank.numa_nodes) == 1 for rank in plan.hosts[0].ranks)

    def test_counts_the_instances_of_all_hosts_together(self) -> None:
        plan = make("instances.count=6", hosts="a,b,c")
        assert [len(host.ranks) for host in plan.hosts] == [2, 2, 2]

    def test_each_host_runs_as_many_instances_as_fit(self) -> None:
        small = HostFacts(machine("xeon-2x14-by-node"))
        plan = make("instances.cores_per_instance=7", hosts="a,b", hosts_known={"a": BIG, "b": small})
        assert [len(host.ranks) for host in plan.hosts] == [8, 4]

    def test_does_not_depend_on_slots_which_count_ranks(self) -> None:
        assert make("instances.count=auto", hosts="a:7,b:7").world_size == 4

    @pytest.mark.parametrize(
        ("settings", "hosts", "error"),
        [
            (["instances.count=57"], "", "57 instances do not fit on 56 usable physical cores"),
            (
                ["instances.cores_per_instance=57"], "",
                "1 instance of 57 cores does not fit on 56 usable physical cores",
            ),
            (["instances.count=3"], "a,b", "3 instances can't be divided evenly over 2 hosts"),
        ],
    )  # fmt: skip
    def test_that_does_not_fit_is_refused(self, settings: list[str], hosts: str, error: str) -> None:
        with pytest.raises(PlanError, match=error):
            make(*settings, hosts=hosts)


class TestEnvironment:
    def test_has_no_variables_of_a_process_group(self) -> None:
        plan = make("instances.count=2", hosts="a,b")
        names = {"MASTER_ADDR", "GLOO_SOCKET_IFNAME", variables.BACKEND, "CCL_WORKER_COUNT", "FI_PROVIDER"}
        given = {*plan.env, *(name for host in plan.hosts for name in host.env)}
        assert not given & names
        assert plan.env[variables.PRECISION] == "bf16"
        assert not any(rank.comm_cores for host in plan.hosts for rank in host.ranks)

    @pytest.mark.parametrize("hosts", ["", "a,b"])
    def test_has_no_rank_variables(self, hosts: str) -> None:
        placement = placement_of(make("instances.count=2", hosts=hosts))
        assert {"PMI_RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID"} <= set(placement.hidden)
        assert (placement.instances, placement.first_instance) == (2, 0)


class TestOnlyOne:
    def test_has_the_same_cores_as_among_all(self) -> None:
        every = make("instances.count=6", hosts="a,b,c")
        plan = make("instances.count=6", "instances.only=3", hosts="a,b,c")
        assert cores(plan) == [cores(every)[3]]
        assert (plan.world_size, [host.host for host in plan.hosts]) == (1, ["b"])
        assert plan.instances == Instances(6, 3)
        assert placement_of(plan).first_instance == 3

    def test_has_the_same_cores_on_an_assumed_host(self) -> None:
        plan = make("instances.count=4", "instances.only=3", hosts="a,b")
        assert plan.hosts[0].assumed
        request = plan.request.binding
        assert (str(request.cores), request.cores_per_rank) == (cores(plan)[0], "auto")

    def test_on_this_host_needs_no_launcher_for_several_hosts(self) -> None:
        assert make("instances.count=2", "instances.only=0", hosts="head,b").here_alone

    def test_that_does_not_exist_is_refused(self) -> None:
        with pytest.raises(
            PlanError, match=r"instances.only \(--instances.only\): there is no instance 2"
        ) as e:
            make("instances.count=2", "instances.only=2")
        assert e.value.hint == "the instances are 0 to 1"

    def test_without_instances_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="the job has no instances"):
            make("instances.only=2")


class TestArgumentsOfEach:
    def planned(self, *settings: tuple[str, str, str]) -> Plan:
        program = replace(PROGRAM, each=(("--a", "0"), ("--a", "1"), ("--a", "2")))
        return make_plan(load(settings, environ={}), Facts(like=BIG), program)

    def test_reach_the_agents(self) -> None:
        plan = self.planned(("instances.count", "3", "--instances"))
        assert placement_of(plan).each == (("--a", "0"), ("--a", "1"), ("--a", "2"))

    def test_apply_to_a_single_instance(self) -> None:
        plan = self.planned(("instances.count", "3", "--instances"), ("instances.only", "2", "--instance"))
        assert placement_of(plan).each == (("--a", "2"),)

    def test_must_be_as_many_as_the_instances(self) -> None:
        with pytest.raises(PlanError, match="--each has 3 lines, but the job has 2 instances"):
            self.planned(("instances.count", "2", "--instances"))


COUNT = ("instances.count", "2", "--instances")


class TestContradictions:
    @pytest.mark.parametrize(
        ("key", "text", "option"),
        [
            ("hosts.nproc", "2", "-n"),
            ("hosts.nproc_per_node", "2", "-ppn"),
            ("cpu.cores_per_rank", "2", "--cores-per-rank"),
            ("watch.max_restarts", "2", "--max-restarts"),
            ("hosts.nnodes", "1:2", "--nnodes"),
            ("watch.stall_action", "restart", "--stall-action"),
        ],
    )
    def test_of_equally_strong_settings_are_refused(self, key: str, text: str, option: str) -> None:
        config = load([COUNT, (key, text, option)], environ={})
        with pytest.raises(ConfigError) as e:
            as_instances(config)
        assert str(e.value) == f"{key} ({option}) contradicts instances.count (--instances)"
        assert e.value.hint

    def test_do_not_arise_if_one_setting_is_weaker(self, tmp_path) -> None:
        restarts = {Table.watch.max_restarts: 2, Table.watch.stall_action: "restart"}
        text = yaml_text({Table.hosts.nproc_per_node: 4, Table.training.backend: "gloo", **restarts})
        config = load([COUNT], file=tmp_path / "c.yaml", text=text, environ={})
        plan = make_plan(config, Facts(like=BIG), PROGRAM)
        assert (plan.world_size, plan.settings.watch.max_restarts) == (2, 0)
        assert plan.settings.watch.stall_action == "report"

    def test_do_not_arise_if_a_file_sets_the_default(self, tmp_path) -> None:
        settings = {
            Table.hosts.nproc_per_node: "auto",
            Table.training.backend: "gloo",
            Table.instances.count: 2,
        }
        config = load([], file=tmp_path / "c.yaml", text=yaml_text(settings), environ={})
        assert make_plan(config, Facts(like=BIG), PROGRAM).world_size == 2

    def test_of_the_two_modes_are_refused(self) -> None:
        modes = [
            ("instances.count", "auto", "--throughput-mode"),
            ("instances.cores_per_instance", "4", "--latency-mode"),
        ]
        with pytest.raises(ConfigError, match=r"\(--latency-mode\) contradicts .* \(--throughput-mode\)"):
            as_instances(load(modes, environ={}))

    def test_of_a_mode_with_a_file_are_resolved_by_the_mode(self, tmp_path) -> None:
        text = yaml_text({Table.instances.cores_per_instance: 4})
        mode = [("instances.count", "auto", "--throughput-mode")]
        config = load(mode, file=tmp_path / "c.yaml", text=text, environ={})
        assert make_plan(config, Facts(like=BIG), PROGRAM).world_size == 2

    @pytest.mark.parametrize("settings", [{Table.instances.count: 2}, {Table.instances.count: "auto"}])
    def test_a_weaker_number_does_not_contradict_latency_mode(
        self, tmp_path, settings: dict[Setting[Any], Any]
    ) -> None:
        text = yaml_text({**settings, Table.instances.cores_per_instance: 7})
        mode = [("instances.cores_per_instance", "4", "--latency-mode")]
        config = load(mode, file=tmp_path / "c.yaml", text=text, environ={"CPULAUNCH_INSTANCES_COUNT": "3"})
        assert make_plan(config, Facts(like=BIG), PROGRAM).world_size == 14
        assert as_instances(config, 5).instances.count == 5  # a line of --each for each

    def test_with_a_file_do_not_depend_on_its_name(self) -> None:
        text = yaml_text({Table.hosts.nproc_per_node: 4})
        config = load([], file=Path("-n.yaml"), text=text, environ={"CPULAUNCH_INSTANCES_COUNT": "2"})
        assert make_plan(config, Facts(like=BIG), PROGRAM).instances == Instances(2)

    def test_the_value_none_overrides_a_file(self, tmp_path) -> None:
        text = yaml_text({Table.instances.cores_per_instance: 4})
        none = [("instances.count", "none", "--instances")]
        config = load(none, file=tmp_path / "c.yaml", text=text, environ={})
        assert make_plan(config, Facts(like=BIG), PROGRAM).instances is None

    def test_the_value_none_in_a_file_is_weaker_than_an_option(self, tmp_path) -> None:
        text = yaml_text({Table.instances.count: "none"})
        cores = [("instances.cores_per_instance", "4", "--latency-mode")]
        config = load(cores, file=tmp_path / "c.yaml", text=text, environ={})
        assert make_plan(config, Facts(like=BIG), PROGRAM).world_size == 14
        each = as_instances(load([], file=tmp_path / "c.yaml", text=text, environ={}), 3)
        assert each.instances.count == 3

    def test_are_reported_once(self) -> None:
        config = as_instances(load([COUNT, ("instances.cores_per_instance", "4", "-c")], environ={}))
        assert as_instances(config) == config


def test_ranks_are_planned_as_usual_without_instances() -> None:
    config = load([], environ={"CPULAUNCH_INSTANCES_FAIL_FAST": "1"})
    assert config.instances.fail_fast
    assert as_instances(config) is config


def test_fail_fast_and_a_single_instance_need_instances() -> None:
    config = load([("instances.fail_fast", "true", "--fail-fast")], environ={})
    with pytest.raises(ConfigError, match=r"\(--fail-fast\): the job has no instances"):
        as_instances(config)


@pytest.mark.parametrize("key", ["hosts.nproc", "hosts.nproc_per_node"])
def test_requested_ranks_are_stronger_than_a_file_with_instances(tmp_path, key: str) -> None:
    text = yaml_text(
        {Table.instances.count: 2, Table.instances.cores_per_instance: 4, Table.instances.only: 1}
    )
    config = load([(key, "3", "-n")], file=tmp_path / "c.yaml", text=text, environ={})
    plan = make_plan(config, Facts(like=BIG), PROGRAM)
    assert (plan.instances, plan.world_size) == (None, 3)


def test_a_hint_names_a_number_of_hosts_that_divides_the_instances() -> None:
    facts = Facts(like=BIG, listed=parse_hosts("a,b,c,d", "--hosts"))
    with pytest.raises(CpulaunchError) as e:
        make_plan(load([("instances.count", "6", "--instances")], environ={}), facts, PROGRAM)
    assert e.value.hint
    assert e.value.hint.startswith("--nnodes 3 takes 3 hosts of these, ")


def test_a_hint_names_the_available_cores() -> None:
    wanted = [("instances.cores_per_instance", "99", "--latency-mode")]
    with pytest.raises(CpulaunchError) as e:
        make_plan(load(wanted, environ={}), Facts(like=BIG), PROGRAM)
    assert e.value.hint
    assert e.value.hint.startswith("--cores-per-instance 28 fits here; ")


@pytest.mark.parametrize(
    ("settings", "hint"),
    [
        (
            ["instances.count=4", "instances.cores_per_instance=28"],
            "4 instances of 14 cores (--cores-per-instance 14) or 2 instances of 28 cores would fit here.",
        ),
        (["instances.count=60", "instances.cores_per_instance=14"], "4 instances of 14 cores would fit here."),
        (
            ["instances.count=3", "instances.cores_per_instance=60"],
            "3 instances of 18 cores (--cores-per-instance 18) would fit here.",
        ),
        (
            ["instances.count=3", "instances.cores_per_instance=28", "cpu.bind_numa=true"],
            "3 instances of 14 cores (--cores-per-instance 14) or 2 instances of 28 cores would fit here.",
        ),
        (["instances.count=57"], "Ask for fewer instances (--instances, or lines of --each) or "),
    ],
)  # fmt: skip
def test_a_hint_suggests_fitting_numbers(settings: list[str], hint: str) -> None:
    with pytest.raises(PlanError) as e:
        make(*settings)
    assert e.value.hint
    assert e.value.hint.startswith(hint)


def test_changes_for_instances_do_not_count_as_set() -> None:
    made = make("instances.cores_per_instance=1")
    for key in ("cpu.cores_per_rank", "training.backend"):
        assert setting(made, key) == ("auto", "default")
    assert setting(made, "instances.count") == ("auto", "--instances.cores_per_instance")


def test_a_single_instance_has_only_its_own_notes() -> None:
    wanted = [("instances.cores_per_instance", "10", "--cores-per-instance")]
    facts = Facts(like=BIG, listed=parse_hosts("a,b", "--hosts"))
    assert any("idle" in note for note in make_plan(load(wanted, environ={}), facts, PROGRAM).notes)
    only = [*wanted, ("instances.only", "5", "--instance")]
    assert make_plan(load(only, environ={}), facts, PROGRAM).notes == ()


def test_a_missing_backend_does_not_matter() -> None:
    facts = Facts(like=BIG, listed=parse_hosts("head", "--hosts"), ccl_missing="not built")
    assert make_plan(load([COUNT], environ={}), facts, PROGRAM).notes == ()
    with pytest.raises(CpulaunchError):
        make_plan(load([("training.backend", "ccl", "--backend")], environ={}), facts, PROGRAM)


def test_nothing_about_ranks_was_detected() -> None:
    found = {row.key for row in make("instances.count=2").setting_rows() if row.origin == DETECTED}
    assert {
        key for key in found if key.startswith(("hosts.nproc", "hosts.master", "ccl.", "training.b"))
    } == set()


def test_more_threads_than_cores_are_reported_per_instance() -> None:
    config = load([("instances.count", "2", "--instances"), ("cpu.threads", "99", "--threads")], environ={})
    plan = make("instances.count=2", "cpu.threads=99")
    assert list(thread_warnings(config, plan)) == [
        "cpu.threads (--threads): 99 threads per instance of 28 cores"
    ]
