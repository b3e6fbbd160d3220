"""``cpulaunch hosts check``: checks whether hosts are ready for a job, and shows their properties."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from cpulaunch.cli.backend import ccl_files
from cpulaunch.cli.files import write_file
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser, add_settings, check_subcommand, load_config
from cpulaunch.config.config import Config
from cpulaunch.discovery.collect import has_step, listed_hosts, mpis_for, once_each
from cpulaunch.errors import UsageError
from cpulaunch.model.fabrics import common_provider
from cpulaunch.model.facts import record
from cpulaunch.model.hosts import LOCALHOST, Host, all_here
from cpulaunch.plan.select import WayToHosts, decide_launcher

EPILOG = """\
Checks all hosts in parallel, over ssh, or by srun in a Slurm allocation without ssh: ssh works without a
password; Python, cpulaunch, torch and this directory are equal on all hosts; the clocks agree; all hosts can
connect to the first host.  Changes nothing on the hosts.

examples:
  cpulaunch hosts check -f hostfiles/four-nodes train.py
  cpulaunch hosts check --hosts node[1-4] --facts-out four-nodes.json
  cpulaunch run --facts four-nodes.json --dry-run train.py                plan for them from another machine

exit code: 0; 2 wrong usage or settings; 3 a host is not ready
"""


def main(arguments: list[str]) -> int:
    parser = Parser(
        "cpulaunch hosts check",
        "Check that the hosts are ready for a job, and show their properties.",
        EPILOG,
        "cpulaunch hosts check [OPTIONS] [train.py]",
    )
    parser.add_argument(
        "--facts-out", metavar="F", type=Path, help="record the hosts' properties in a file for --facts"
    )
    add_settings(parser, ("hosts", "mpi", "ccl", "training"), common=("hosts", "mpi", "ccl"))
    if arguments[:1] in (["-h"], ["--help"]):
        parser.print_help()
        return 0
    check_subcommand("hosts", arguments, ["check"])
    words, rest = parser.split(arguments[1:])
    options = parser.parse_args(words)
    if len(rest) > 1:
        raise UsageError(f"unexpected argument {rest[1]!r}", hint="name one script, without its arguments")
    return check(load_config(options), [Path(word).absolute() for word in rest], options.facts_out)


def check(config: Config, scripts: Sequence[Path] = (), facts_out: Path | None = None) -> int:
    """Check the hosts, print their properties and problems, and record their facts; return the exit code."""
    from cpulaunch.cli.preflight import complaints, table
    from cpulaunch.cli.progress import AskingProgress
    from cpulaunch.discovery.host.this_host import names_here
    from cpulaunch.discovery.probe.check_hosts import Required, check_hosts
    from cpulaunch.discovery.probe.preflight import warnings

    for warning in config.warnings:
        say(f"warning: {warning}")
    here = names_here()
    hosts = listed_hosts(config, say) or (Host(LOCALHOST),)
    once_each(hosts, here)
    here_alone, mpis = all_here(hosts, here), mpis_for(config, hosts, here)
    step = not here_alone and has_step(config, hosts, say)
    required = Required(sys.executable, os.getcwd(), tuple(map(str, scripts)), ccl_files(config))
    found = check_hosts(config, hosts, here, required, AskingProgress(), mpis, step)
    print("\n".join(table(found.reports)))
    for warning in warnings(found.reports):
        say(warning)
    if config.ccl.provider == "auto":
        cards = {report.host: report.facts.fabrics for report in found.reports if report.facts}
        for host, complaint in common_provider(cards)[1].items():
            say(f"warning: {host}: {complaint}")
    for line in complaints(found.reports):
        say(line)
    ready = not any(report.problems for report in found.reports)
    if ready and not here_alone:
        way = WayToHosts(found.without_mpi, found.egress_interface)
        chosen = decide_launcher(config, here_alone=False, mpis=mpis, step=step, way=way)
        print(f"ranks would be started by {chosen.shown}")
    if facts_out:
        known = {report.host: report.facts for report in found.reports if report.facts}
        write_file(facts_out, record(known))
    return 0 if ready else 3
