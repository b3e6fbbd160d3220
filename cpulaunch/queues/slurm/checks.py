"""Check a job for mistakes that Slurm accepts, but that would make the job fail."""

from __future__ import annotations

import re
from collections.abc import Mapping
from getpass import getuser
from pathlib import Path

from cpulaunch.config.config import Config
from cpulaunch.discovery.batch.allocation import read_hostfile
from cpulaunch.errors import ConfigError, UsageError
from cpulaunch.model.hosts import fold_hosts, parse_hosts
from cpulaunch.queues.slurm.options import number
from cpulaunch.wording import counted


def missing_nodes(config: Config, options: Mapping[str, str]) -> dict[str, str]:
    """Return sbatch's option --nodes if only --nnodes of `cpulaunch run` is set, else an empty mapping.

    Raises UsageError if --nodes is less than --nnodes.
    """
    wanted = config.hosts.nnodes
    if wanted == "all":
        return {}
    given = number(options, "--nodes")
    if given and wanted.least > given:
        raise UsageError(
            f"{config.where(Config.hosts.nnodes)}: {wanted} of {counted(given, 'node')}",
            hint=f"use --nodes={wanted.most}, and omit the other one",
        )
    return {} if given else {"--nodes": str(wanted.most)}


def check_logs(options: Mapping[str, str]) -> None:
    """Raise UsageError if the directory of the job's log doesn't exist.  Slurm wouldn't create it."""
    known = {"%u": getuser(), "%x": options.get("--job-name", ""), "%%": "%"}
    for name in ("--output", "--error"):
        path = re.sub("%[ux%]", lambda found: known[found[0]], options.get(name, ""))
        directory = Path(path).parent
        if "%" not in str(directory) and not directory.is_dir():  # other patterns depend on the job
            raise UsageError(
                f"{name}={options[name]}: there is no directory {directory}, and Slurm doesn't create it: "
                "the job would end without a message",
                hint=f"mkdir -p {directory}",
            )


def check_environment(config: Config) -> None:
    """Raise UsageError if a variable to forward to the ranks is not set in this environment."""
    for name in config.forward:
        if name not in config.environ:
            raise UsageError(
                f"{config.where(Config.forward)}: {name} is not set in this environment",
                hint=f"use --env {name}=VALUE for a variable, or --exclude={name} for a node to avoid",
            )


def check_hosts(config: Config, asked: Mapping[str, str]) -> None:
    """Raise UsageError if settings name hosts that the job might not get."""
    if config.hosts.exclude:
        where = config.where(Config.hosts.exclude)
        hint = f"omit it, and use --exclude={config.hosts.exclude} of sbatch"
        raise UsageError(f"{where}: Slurm selects the job's nodes", hint=hint)
    try:
        file, named = config.hosts.hostfile, config.hosts.list
        hosts = read_hostfile(Path(file)) if file else parse_hosts(named, "") if named else ()
        chosen = asked.get("--nodelist", "")
        if "/" in chosen:
            return  # the nodes are in a file
        given = {host.name for host in parse_hosts(chosen, "--nodelist")} if chosen else set()
    except ConfigError as e:
        raise UsageError(str(e), hint="omit it: the job uses all nodes that it gets") from None
    if outside := [host.name for host in hosts if host.name not in given]:
        where = config.where(Config.hosts.hostfile if file else Config.hosts.list)
        nodes = ",".join(host.name for host in hosts)
        raise UsageError(
            f"{where}: Slurm may not give the job {fold_hosts(outside)}",
            hint=f"omit it, because the job uses all nodes that it gets; or add --nodelist={nodes}",
        )
