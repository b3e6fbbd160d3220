"""Importing configuration files of all versions of accelerate."""

from __future__ import annotations

from typing import Any

import pytest

from cpulaunch.config.accelerate import Imported, from_accelerate
from cpulaunch.config.settings import Table
from cpulaunch.config.values import HostCount
from cpulaunch.errors import ConfigError

NEW_MULTI_CPU = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: MULTI_CPU
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""
IPEX_AND_MPIRUN = """\
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
ipex_config:
  ipex: true
  use_xpu: false
machine_rank: 0
main_process_ip: 10.0.0.1
main_process_port: 29500
main_training_function: main
mixed_precision: bf16
mpirun_config:
  mpirun_ccl: '1'
  mpirun_hostfile: /home/user/hostfile
num_machines: 4
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
use_cpu: true
"""
VERY_OLD = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: MULTI_CPU
fp16: false
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
num_machines: 1
num_processes: 4
"""
ONE_PROCESS = """\
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
gpu_ids: all
mixed_precision: 'no'
num_machines: 1
num_processes: 1
use_cpu: true
"""
BASE = "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\n"


def reasons(imported: Imported) -> dict[str, str]:
    return {dropped.key: dropped.reason for dropped in imported.dropped}


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (NEW_MULTI_CPU, {Table.hosts.nproc_per_node: 2, Table.training.precision: "bf16"}),
        (
            IPEX_AND_MPIRUN,
            {
                Table.hosts.hostfile: "/home/user/hostfile", Table.hosts.nnodes: HostCount(4, 4),
                Table.hosts.nproc_per_node: 4,
                Table.training.precision: "bf16", Table.training.engine: "ipex",
            },
        ),
        (VERY_OLD, {Table.hosts.nproc_per_node: 4, Table.training.precision: "fp32"}),
        (ONE_PROCESS, {Table.hosts.nproc_per_node: 1, Table.training.precision: "fp32"}),
        ('{"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": true}',
         {Table.hosts.nproc_per_node: 1, Table.training.precision: "fp32"}),
        (BASE + "mixed_precision: no\nnum_processes: -1\n", {Table.training.precision: "fp32"}),
        (BASE + "ipex_config: {ipex: false}\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
         {Table.training.precision: "fp32", Table.training.engine: "native", Table.training.compile: True}),
        (BASE + "mpirun_hostfile: hosts\nmpirun_ccl: 2\nnum_machines: 2\nnum_processes: 2\n",
         {Table.hosts.hostfile: "hosts", Table.hosts.nnodes: HostCount(2, 2), Table.hosts.nproc_per_node: 1,
          Table.ccl.worker_count: 2, Table.training.precision: "fp32"}),
    ],
)  # fmt: skip
def test_files_of_every_version_of_accelerate_are_imported(text: str, settings: dict[str, Any]) -> None:
    assert from_accelerate(text, "a.yaml").settings == settings


def test_every_key_is_imported_or_reported() -> None:
    for text in (NEW_MULTI_CPU, IPEX_AND_MPIRUN, VERY_OLD, ONE_PROCESS):
        imported = from_accelerate(text, "a.yaml")
        keys = {line.partition(":")[0] for line in text.splitlines() if not line.startswith((" ", "{"))}
        taken = {"distributed_type", "use_cpu", "num_machines", "num_processes", "mixed_precision", "mpirun_config",
                 "main_process_ip", "main_process_port", "compute_environment", "fp16", "ipex_config"}  # fmt: skip
        assert keys - taken <= {key.partition(".")[0] for key in (*reasons(imported), *imported.off)}


@pytest.mark.parametrize(
    ("line", "key", "reason"),
    [
        ("same_network: true", "same_network", "ssh"),
        ("fsdp_config: {fsdp_offload_params: true}", "fsdp_config", "the script decides on sharding"),
        ("deepspeed_config: {zero_stage: 2}", "deepspeed_config", "DDP"),
        ("dynamo_backend: IPEX", "dynamo_config.dynamo_backend", "own backend"),
        ("mixed_precision: fp16", "mixed_precision", "bf16"),
        ("ipex_config: {use_xpu: true}", "ipex_config.use_xpu", "Intel GPUs"),
        ("mpirun_config: {mpirun_ccl: '1'}", "mpirun_config.mpirun_ccl", "auto"),
        ("main_process_ip: 10.0.0.1", "main_process_ip", "rendezvous is on the first host"),
        ("main_process_port: 29500", "main_process_port", "rendezvous is at a free port"),
        ("something_new: 1", "something_new", "does not know this key"),
    ],
)
def test_an_unsupported_key_is_reported_with_its_line_and_the_reason(
    line: str, key: str, reason: str
) -> None:
    imported = from_accelerate(BASE + line, "a.yaml")
    assert reason in reasons(imported)[key]
    assert [dropped.place for dropped in imported.dropped if dropped.key == key][0] == "a.yaml:4"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: 'NO'",
            "a.yaml:1: it is for Amazon SageMaker",
        ),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU", "a.yaml:2: it is for GPUs"),
        ("distributed_type: MULTI_XPU", "a.yaml:1: it is for XPUs"),
        ("distributed_type: XLA", "a.yaml:1: it is for TPUs"),
        ("distributed_type: DEEPSPEED", "a.yaml:1: it is for DeepSpeed"),
        ("distributed_type: MEGATRON_LM", "a.yaml:1: it is for Megatron-LM"),
        ("distributed_type: 'NO'\nuse_cpu: false\ngpu_ids: '0,1'", "a.yaml:1: it is for GPUs"),
        ("cpulaunch: 1", "a.yaml: not a configuration of accelerate"),
        ("- a", "a.yaml:1: expected a mapping"),
        ("", "a.yaml: is empty"),
        ("a: [", "a.yaml:1: not valid YAML"),
        (BASE + "num_processes: many", "a.yaml:4: num_processes: 'many' is not a whole number"),
        (BASE + "num_machines: 0", "a.yaml:4: num_machines: 0 is not a number of at least 1"),
        (BASE + "mpirun_config: 3", "a.yaml:4: mpirun_config: 3 is not a mapping"),
    ],
)
def test_files_for_other_hardware_and_other_files_are_refused_with_a_reason(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_accelerate(text, "a.yaml")
    assert str(error.value).startswith(sentence)


def test_import_reports_the_remaining_steps() -> None:
    assert "name the 3 hosts" in from_accelerate(BASE + "num_machines: 3\nnum_processes: 6", "a").advice[0]
    uneven = from_accelerate(
        BASE + "num_machines: 2\nnum_processes: 5\nmpirun_config: {mpirun_hostfile: h}", "a"
    )
    assert uneven.settings[Table.hosts.nproc] == 5
    assert "evenly" in uneven.advice[0]
