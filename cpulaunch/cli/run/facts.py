"""Collects the facts for a plan, from this machine and the job's hosts, or from a file."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from cpulaunch import launchers
from cpulaunch.cli.backend import ccl_files, ensure_ccl
from cpulaunch.cli.main import say
from cpulaunch.cli.progress import AskingProgress
from cpulaunch.config.config import Config
from cpulaunch.discovery.collect import Ccl, collect_facts, facts_of_lscpu, recorded_facts
from cpulaunch.discovery.host.rate_cache import limits_of_ranks
from cpulaunch.errors import ConfigError, HostError
from cpulaunch.model.facts import Facts
from cpulaunch.plan.instances import as_instances
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program


def _import_supervision() -> None:
    """Import the modules that a run needs next, which takes tens of milliseconds."""
    import cpulaunch.supervise.attempts.attempt
    import cpulaunch.supervise.attempts.execute
    import cpulaunch.supervise.attempts.loop
    import cpulaunch.supervise.output.lines
    import cpulaunch.supervise.telemetry.sinks  # noqa: F401


def gather(
    config: Config,
    *,
    facts_file: Path | None = None,
    lscpu_file: Path | None = None,
    program: Program | None = None,
    build: bool = True,
    tell: Callable[[str], None] = say,
) -> Facts:
    """Return the facts of this machine and the job's hosts, or those in ``facts_file`` or ``lscpu_file``.

    With a ``program`` to run, ``build`` ccl if it is missing, and contact the hosts over ssh.  Raises
    HostError if hosts aren't ready.
    """
    config = as_instances(config)
    if facts_file and lscpu_file:
        raise ConfigError("--facts and --lscpu both describe hosts", hint="leave out one of the two")
    if lscpu_file:
        return facts_of_lscpu(config, lscpu_file)
    if facts_file:
        return recorded_facts(config, facts_file)
    builds = build and program is not None
    ccl = Ccl(partial(ensure_ccl, config, build=builds, tell=tell), partial(ccl_files, config))
    try:
        return collect_facts(config, ccl, tell, AskingProgress(_import_supervision), program)
    except HostError as e:
        from cpulaunch.cli.preflight import complaints
        from cpulaunch.discovery.probe.preflight import HostsNotReadyError

        for line in complaints(e.reports) if isinstance(e, HostsNotReadyError) else ():
            tell(line)
        raise


def measured_plan(
    config: Config, facts: Facts, program: Program, tell: Callable[[str], None] = say
) -> tuple[Plan, Facts]:
    """Return the plan of a job that is about to start, and the facts that it was made from.

    If the precision is ``auto``, measure the rates of bf16 and fp32 on CPUs that have not been measured
    before, and add them to the facts.  Programs that are not Python, or run as written, need no measurement.
    """
    plan = make_plan(config, facts, program)
    if config.training.precision != "auto" or config.training.as_written or not program.python:
        return plan, facts
    from cpulaunch.discovery.probe.rates import measure_rates, unmeasured  # takes 20 ms, once per CPU

    hosts = unmeasured(facts, plan.hosts)
    if not hosts:
        return plan, facts
    reach = launchers.load(plan.launcher).reach
    limits = limits_of_ranks({**config.environ, **config.env})
    measured = measure_rates(facts, hosts, program.interpreter, reach, limits, tell)
    for host, why in measured.errors.items():
        tell(f"warning: {host}: bf16 and fp32 could not be measured: {why}")
    return make_plan(config, measured.facts, program), measured.facts
