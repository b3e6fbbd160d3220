"""The settings that a tuning tries, in stages.

Each stage varies one setting, or two that depend on each other, and starts from the best result of the
previous stage.  Stages whose settings usually change the rate most come first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from cpulaunch import plugins, variables
from cpulaunch.config.config import Config
from cpulaunch.config.origin import Origin, Source
from cpulaunch.config.setting import Setting
from cpulaunch.errors import CpulaunchError
from cpulaunch.model.facts import Facts
from cpulaunch.model.topology import Topology
from cpulaunch.plan.binding import SMALL_RANK
from cpulaunch.plan.make import make_plan
from cpulaunch.plan.plan import Plan, Program

Values = Mapping[Setting[Any], Any]
"""Setting → value: a candidate, or a part of one."""

BUCKETS_MB = (10, 100)
"""Sizes of DDP's buckets to try in addition to torch's default, in MB."""

_TRIAL = Origin.of_option("--set")

Stage = Callable[["Space", Plan], Iterator[Values]]
"""Yields the values that a stage tries, given the plan of the best candidate so far."""


class Space:
    """The settings to try for ``program`` with the settings ``config`` on the hosts of ``facts``.

    Settings on the command line and in the environment are not varied.  ``installed``: returns whether an
    engine's package is installed.  ``has_oneccl``: whether the oneCCL module is installed.
    """

    def __init__(
        self,
        config: Config,
        facts: Facts,
        program: Program,
        installed: Callable[[str], bool],
        has_oneccl: bool,
    ) -> None:
        self.config, self.facts, self.program = config, facts, program
        self.installed, self.has_oneccl = installed, has_oneccl
        self._known: set[str] = set()  # plans that were tried

    @property
    def stages(self) -> Sequence[Callable[[Values], Iterator[Values]]]:
        """A function for each stage, which maps the best candidate so far to the candidates to try."""
        return [partial(self._candidates, each) for each in STAGES]

    def plan(self, values: Values) -> Plan:
        """Return the plan with ``values``.  Raises PlanError."""
        config = self.config
        for setting, value in values.items():
            config = config.put(setting, value, _TRIAL)
        return make_plan(config, self.facts, self.program)

    def is_fixed(self, setting: Setting[Any]) -> bool:
        """Return whether the user has set this setting on the command line or in the environment."""
        return self.config.origin(setting).source >= Source.ENVIRONMENT

    def _candidates(self, stage: Stage, best: Values) -> Iterator[Values]:
        """Yield candidates whose plans were not tried yet, without values that change nothing."""
        known = self._known
        known.add(self._plan_key(best))
        for values in stage(self, self.plan(best)):
            candidate = {**best, **{s: v for s, v in values.items() if not self.is_fixed(s)}}
            key = self._plan_key(candidate)
            if key and key not in known:
                known.add(key)
                yield self._simplify(candidate, key)

    def _simplify(self, candidate: Values, key: str) -> Values:
        """Return the candidate without values that change nothing."""
        for setting in candidate:
            fewer = {s: v for s, v in candidate.items() if s is not setting}
            if self._plan_key(fewer) == key:
                return self._simplify(fewer, key)
        return candidate

    def _plan_key(self, values: Values) -> str:
        """Return the plan with ``values`` as a text to compare; empty if no plan can be made."""
        try:
            plan = self.plan(values)
        except CpulaunchError:
            return ""
        env = {name: value for name, value in plan.env.items() if name != variables.PRECISION_IS_PLANNED}
        return repr((plan.launcher, plan.transport, env, [host.to_json() for host in plan.hosts]))


def _ranks_and_hyperthreads(space: Space, plan: Plan) -> Iterator[Values]:
    """Yield numbers of ranks per host, and whether they use hyperthreads."""
    hosts = _topologies(space, plan)
    cores = min(len(host.cores) for host in hosts)
    nodes = max(len({core.node for core in host.cores}) for host in hosts)
    for count in sorted({1, *(nodes << n for n in range(cores.bit_length()) if nodes << n <= cores)}):
        yield _ranks(space, count, len(hosts))
    if any(len(core.cpus) > 1 for host in hosts for core in host.cores):
        yield from ({Config.cpu.logical_cores: logical} for logical in (False, True))


def _topologies(space: Space, plan: Plan) -> list[Topology]:
    return [space.facts.of(host.host)[0].topology for host in plan.hosts]


def _ranks(space: Space, per_host: int, hosts: int) -> Values:
    """Return the value of the setting for the number of ranks; nothing if the user has fixed it."""
    nproc, per = Config.hosts.nproc, Config.hosts.nproc_per_node
    if space.is_fixed(nproc) or space.is_fixed(per):
        return {}
    return {nproc: per_host * hosts} if space.config.is_set(nproc) else {per: per_host}


def _pinning(space: Space, plan: Plan) -> Iterator[Values]:
    yield from ({Config.cpu.strategy: strategy} for strategy in ("scatter", "none"))


def _allocators(space: Space, plan: Plan) -> Iterator[Values]:
    names = ("auto", "tcmalloc", "jemalloc", "glibc", "default")
    yield from ({Config.cpu.allocator: name} for name in names)


def _openmp(space: Space, plan: Plan) -> Iterator[Values]:
    yield from ({Config.cpu.openmp: name} for name in ("auto", "intel"))


def _precision(space: Space, plan: Plan) -> Iterator[Values]:
    yield from ({Config.training.precision: precision} for precision in ("bf16", "fp32"))


def _engines(space: Space, plan: Plan) -> Iterator[Values]:
    for name in plugins.BUILT_IN[plugins.ENGINES]:
        if space.installed(name):
            yield {Config.training.engine: name}


def _communication(space: Space, plan: Plan) -> Iterator[Values]:
    """Yield backends, transports, numbers of communication cores, and bucket sizes."""
    if plan.world_size == 1:
        return
    yield {Config.training.backend: "gloo"}
    if len(plan.hosts) > 1 and space.has_oneccl:
        yield {Config.ccl.transport: "oneccl"}
    if min(len(rank.cores) for host in plan.hosts for rank in host.ranks) >= SMALL_RANK:
        yield from ({Config.ccl.worker_count: count} for count in (0, 1, 2))
    yield from ({Config.training.bucket_mb: size} for size in BUCKETS_MB)


STAGES: tuple[Stage, ...] = (
    _ranks_and_hyperthreads,
    _pinning,
    _precision,
    _allocators,
    _communication,
    _openmp,
    _engines,
)
