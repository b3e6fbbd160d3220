"""What a job in Slurm's queue would refuse once it runs is refused before it is submitted.

What Slurm itself refuses, sbatch says.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from cpulaunch.cli.options import refuse_restricted
from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.allocation import read_hostfile
from cpulaunch.errors import ConfigError, PlanError, UsageError
from cpulaunch.manifests.sbatch_options import number, share
from cpulaunch.model.hosts import Host, fold_hosts, parse_hosts
from cpulaunch.plan.select import check_restarts, ranks_per_host
from cpulaunch.wording import counted

MANY = 1 << 20
"""CPUs of a node of which nothing is known: any number of tasks fits."""


def missing_nodes(config: Config, options: Mapping[str, str]) -> dict[str, str]:
    """sbatch's --nodes, where only --nnodes of `cpulaunch run` says how many there should be.

    Raises UsageError where both say how many, and Slurm would give too few.
    """
    wanted = config.hosts.nnodes
    if wanted == "all":
        return {}
    given = number(options, "--nodes")
    if given and wanted.least > given:
        raise UsageError(
            f"{config.where(Config.hosts.nnodes)}: {wanted} of {counted(given, 'node')}",
            hint=f"--nodes={wanted.most}, and leave the other one out",
        )
    return {} if given else {"--nodes": str(wanted.most)}


def check_logs(options: Mapping[str, str]) -> None:
    """UsageError where the job's log is to be in a directory that isn't there: Slurm makes none."""
    for name in ("--output", "--error"):
        directory = Path(options.get(name, "")).parent
        if "%" in str(directory):
            why = f"{name}={options[name]}: Slurm makes no directories, and the job would end without a word"
            raise UsageError(why, hint="take patterns such as %j for the file's name alone")
        if not directory.is_dir():
            raise UsageError(
                f"{name}={options[name]}: there is no directory {directory}, and Slurm doesn't make it: "
                "the job would end without a word",
                hint=f"mkdir -p {directory}",
            )


def check_job(options: argparse.Namespace, config: Config, asked: Mapping[str, str]) -> None:
    """UsageError or ConfigError for what `cpulaunch run` would refuse in the job, whatever its nodes.

    ``asked`` are the options of sbatch.
    """
    check_restarts(config)
    tasks = share(asked, MANY).tasks
    if len(tasks) > 1:
        refuse_restricted(options)
    _check_hosts(config, asked)
    for name in config.forward:
        if name not in config.environ:
            raise UsageError(
                f"{config.where(Config.forward)}: {name} is not set in this environment, which the job gets",
                hint=f"--env {name}=VALUE sets a variable, and --exclude={name} has Slurm avoid a node",
            )
    if config.launcher == "local" and len(tasks) > 1:
        where = config.where(Config.launcher)
        raise UsageError(
            f"{where}: all ranks would be on the first of {len(tasks)} nodes", hint="leave it out"
        )
    total = config.hosts.nproc
    if sum(tasks) and total != "auto" and total != sum(tasks) and config.hosts.nproc_per_node == "auto":
        raise UsageError(
            f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')}, and sbatch's options make "
            f"{counted(sum(tasks), 'task')}, of which each is a rank",
            hint="leave one of the two out",
        )
    try:
        ranks_per_host(config, [Host(f"node {n}", count or None) for n, count in enumerate(tasks, 1)])
    except PlanError as e:
        hint = f"--ntasks={total} --exclusive has Slurm divide them" if total != "auto" else e.hint
        raise UsageError(str(e), hint=hint) from None


def _check_hosts(config: Config, asked: Mapping[str, str]) -> None:
    """UsageError where hosts are named that Slurm may not give the job."""
    if config.hosts.exclude:
        where = config.where(Config.hosts.exclude)
        hint = f"--exclude={config.hosts.exclude} of sbatch has Slurm avoid them"
        raise UsageError(f"{where}: the job's nodes are those that Slurm gives it", hint=hint)
    try:
        file, named = config.hosts.hostfile, config.hosts.list
        hosts = read_hostfile(Path(file)) if file else parse_hosts(named, "") if named else ()
        chosen = asked.get("--nodelist", "")
        if "/" in chosen:
            return  # in a file
        given = {host.name for host in parse_hosts(chosen, "--nodelist")} if chosen else set()
    except ConfigError as e:
        raise UsageError(str(e), hint="leave it out, as the job takes all nodes that it gets") from None
    if outside := [host.name for host in hosts if host.name not in given]:
        where = config.where(Config.hosts.hostfile if file else Config.hosts.list)
        nodes = ",".join(host.name for host in hosts)
        raise UsageError(
            f"{where}: Slurm may not give the job {fold_hosts(outside)}",
            hint=f"leave it out, as the job takes all nodes that it gets; or --nodelist={nodes}",
        )
