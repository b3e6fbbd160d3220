"""Plans another attempt of a job, on the remaining hosts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from cpulaunch import launchers
from cpulaunch.cli.backend import ccl_files
from cpulaunch.cli.run.plan_text import plan_as_json
from cpulaunch.config.config import Config
from cpulaunch.discovery.collect import ask_hosts
from cpulaunch.discovery.host.installation import installation_here
from cpulaunch.discovery.probe.preflight import HostsNotReadyError
from cpulaunch.model.facts import Facts
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Program
from cpulaunch.plan.select import remaining_hosts
from cpulaunch.plan.training import PrecisionDecision
from cpulaunch.supervise.attempts.next_attempt import Planned, Without


class Replanner:
    """Plans the next attempt of a job."""

    def __init__(
        self,
        config: Config,
        facts: Facts,
        program: Program,
        precision: PrecisionDecision,
        tell: Callable[[str], None],
    ) -> None:
        """``facts`` and ``precision``: those of the first plan, as all attempts use the same precision."""
        self._config, self._facts, self._program, self._tell = config, facts, program, tell
        self._precision = precision

    def __call__(self, without: Without) -> Planned:
        """Return a plan for hosts that are ready.  Raises CpulaunchError if too few hosts remain."""
        if not self._facts.listed:
            return self._planned(self._facts)
        unusable = dict(without.unusable)
        while True:
            named = (*self._facts.listed, *self._facts.spares)
            listed = remaining_hosts(self._config, named, without.avoid, unusable)
            facts = replace(self._facts, listed=listed)
            files = partial(ccl_files, self._config)
            try:
                return self._planned(
                    ask_hosts(self._config, facts, self._program, files, self._tell, lambda asked: None)
                )
            except HostsNotReadyError as e:
                for report in e.reports:
                    unusable[report.host], _ = report.problems[0].text(report.host)

    def _planned(self, facts: Facts) -> Planned:
        plan = make_plan(self._config, facts, self._program, self._precision)
        commands = launchers.load(plan.launcher).commands(plan, installation_here())
        return Planned(plan, commands, plan_as_json(plan, commands), facts.free_port)
