"""Rules for packages: what each may import and touch, without circular imports.

docs/architecture.md shows the table.  A new module follows the rule of its package.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cpulaunch
from cpulaunch import plugins

PACKAGE = Path(cpulaunch.__file__).parent

# What a module can touch, and the names in its code that show that it does.
TOUCHES: dict[str, tuple[str, ...]] = {
    "processes": ("subprocess", "os.fork", "os.posix_spawn", "os.kill", "os.killpg", "os.waitpid", "os.execve",
                  "signal.signal", "signal.set_wakeup_fd", "os.sched_setaffinity"),
    "network": ("socket", "asyncio"),
    "files": ("open", "os.open", "os.fdopen", "os.listdir", "os.unlink", "os.path", "tempfile", "shutil", ".open",
              ".read_text", ".write_text", ".read_bytes", ".write_bytes", ".mkdir", ".iterdir", ".glob", ".unlink",
              ".rename", ".stat", ".exists", ".is_file", ".is_dir"),
    "environment": ("os.environ", "os.getenv", "os.putenv", "os.getcwd", "sys.argv"),
    "clock": ("time.time", "time.monotonic", "time.sleep", "time.perf_counter", "datetime"),
    "libc": ("ctypes",),
    "terminal": ("print", "input", "sys.stdout", "sys.stderr", "termios"),
}  # fmt: skip

ALL = "clock environment files libc network processes terminal"

# Package or module → what it may import, and what it may touch; the longest matching name counts.  All may
# import the standard library, the modules at the top (but `integrations`), and their own package.  A "pure"
# module touches nothing, and neither do the modules that it imports.
RULES: dict[str, tuple[str, str]] = {
    "top": ("model.cores", "pure"),
    "user_file": ("", "environment files"),
    "config": ("model.cores yaml", "pure"),
    "config.load": ("config yaml", "environment files"),
    "model": ("", "pure"),
    "plan": ("config launchers model", "pure"),
    "launchers": ("model plan", "pure"),
    "discovery": ("config launchers model plan", ALL),
    "discovery.host": ("discovery.probe.messages launchers model", ALL),
    "queues": ("config discovery.batch model plan yaml", "clock environment files processes terminal"),
    "supervise": ("discovery.host.master_port launchers model plan rich", ALL),
    "supervise.job": ("launchers model supervise.stalls supervise.telemetry", "pure"),
    "supervise.stalls": ("model plan supervise.control.observer_messages supervise.job", "pure"),
    "supervise.telemetry": ("model supervise.job", "pure"),
    "supervise.telemetry.sinks": (
        "plan supervise.output.directory supervise.telemetry tensorboardX",
        "clock files network",
    ),
    "agent": ("discovery.host model plan", ALL),
    "agent.program": ("discovery.host.master_port", ALL),
    "trace": ("", "pure"),
    "trace.files": ("trace", "files terminal"),
    "trace.run_merge": ("trace", "files"),
    "ccl": (
        "config.rank_settings config.settings model.cores plan.communication psutil torch",
        ALL,
    ),
    "kernels": ("ccl.installed torch", ""),
    "runtime": (
        "ccl config.rank_settings config.settings discovery.host model plan.training torch",
        "clock environment files terminal",
    ),
    "runtime.join": ("launchers.other psutil", "environment"),
    "runtime.measure_rates": ("discovery.host model runtime torch", "environment files processes terminal"),
    "runtime.instances": ("runtime.join", "environment terminal"),
    "runtime.observe": (
        "config.rank_settings config.settings discovery.host model.cores runtime.hooks runtime.log "
        "runtime.product_rates runtime.reports torch",
        "clock environment files libc",
    ),
    "runtime.change": (
        "ccl config.rank_settings config.settings discovery.host kernels model plan.training runtime torch",
        "clock environment files processes",
    ),
    "runtime.change.engines": ("intel_extension_for_pytorch runtime.change.kernels torch", "files"),
    "runtime.checkpoint": (
        "config.kinds config.rank_settings config.settings config.values runtime torch",
        "clock environment files network processes",
    ),
    "integrations": ("accelerate discovery.host runtime torch transformers", ""),
    "report": (
        "config.settings model.names numpy supervise.job supervise.output.record supervise.telemetry",
        "",
    ),
    "report.read": ("config.setting model.names report supervise.job supervise.output.record", "files"),
    "tune": ("config launchers model plan", "pure"),
    "bench": ("model", "pure"),
    "bench.ranks": ("bench torch", "clock environment files network processes terminal"),
    "tune.trial": ("config supervise tune", "clock files processes"),
    "cli": ("*", "clock environment files processes terminal"),
    "__main__": ("cli", ""),
    "__init__": ("runtime", ""),
}
PATTERNS: dict[str, str] = {
    "agent.observe.stacks": "what py-spy, gdb and faulthandler print",
    "ccl.compiler": "/proc/meminfo",
    "ccl.fetch": "what pip prints",
    "ccl.installed": "versions, symbols of libraries, /proc/self/maps",
    "ccl.tools": "what linkers print",
    "ccl.wheel": "versions",
    "cli.bench": "sizes that a user types",
    "cli.config.host_question": "hosts that a user types",
    "cli.options": "command lines, and what argparse prints",
    "cli.run.misuse": "command lines, scripts, and what a program prints",
    "config.kinds": "values that a user types",
    "config.write": "values that a user types",
    "discovery.batch.allocation": "variables of Slurm",
    "discovery.batch.slurm_job": "what scontrol prints",
    "launchers.mpi": "what mpiexec and ssh print",
    "launchers.reach": "what ssh and srun print",
    "launchers.srun": "what srun prints",
    "launchers.ssh": "what ssh prints",
    "metric_line": "lines that programs print",
    "model.hosts": "lists of hosts",
    "plan.malloc": "versions",
    "queues.kubernetes.pods": "quantities and names that a user types",
    "queues.kubernetes.queue": "options, and what kubectl prints",
    "queues.slurm.checks": "patterns of file names",
    "queues.slurm.follow": "what scontrol prints, and patterns of file names",
    "queues.slurm.nodes": "what Slurm's programs print",
    "queues.slurm.options": "options of sbatch",
    "report.secrets": "a user's command line and variables",
    "runtime.change.engines.ipex": "versions",
    "runtime.change.precision": "versions",
    "runtime.change.resume": "names of directories",
    "runtime.checkpoint.directory": "names of directories",
    "runtime.distributed": "an error of DistributedDataParallel",
    "supervise.job.causes": "errors of torch, gloo and sockets, and tracebacks",
    "supervise.output.failure_box": "what faulthandler and the C++ runtime print",
    "supervise.output.merge": "names of files",
    "supervise.output.record": "names of directories",
    "supervise.stalls.location": "paths, and names of C++ functions",
    "supervise.stalls.mismatch": "tracebacks",
    "supervise.stalls.stacks": "paths, and names of functions",
    "supervise.telemetry.metrics": "units that programs print",
    "trace.figures": "names of torch's operations",
    "trace.model": "names of torch's operations",
}
"""Module → what its regular expressions read.

No regular expression reads a sentence of cpulaunch: causes, and all else that decisions depend on, travel as
fields.
"""

MAX_MODULES = 16
"""Modules in one package, without ``__init__``."""


def modules() -> list[str]:
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))


MODULES = modules()


def package_of(module: str) -> str:
    """Return the row of RULES that holds for a module."""
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (name := ".".join(parts[:length])) in RULES:
            return name
    assert len(parts) == 1, f"{module} is in no package that the table has"
    return "top"


TOP = [module for module in MODULES if package_of(module) in ("top", "user_file")]
PURE = [package for package, (_, touches) in RULES.items() if touches == "pure"]


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def nodes(module: str) -> Iterator[ast.AST]:
    """Return all nodes of a module, except code only for type checkers."""
    waiting: list[ast.AST] = [tree(module)]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += (
            node.orelse if isinstance(node, ast.If) and is_type_checking(node) else ast.iter_child_nodes(node)
        )


def is_module(name: str) -> bool:
    path = PACKAGE.parent / name.replace(".", "/")
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def imports(module: str) -> set[str]:
    """The full names of a module's imports, at its top or within functions, including ``from . import x``."""
    package = ["cpulaunch", *module.split(".")[:-1]]
    found = set()
    for node in nodes(module):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else []
            source = ".".join([*start, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{source}.{alias.name}"
                found.add(inner if inner.startswith("cpulaunch.") and is_module(inner) else source)
    return found


def ours(module: str) -> set[str]:
    """Return the modules of cpulaunch that a module imports, with the names that `modules` gives them."""
    found = set()
    for name in imports(module):
        if name == "cpulaunch" or name.startswith("cpulaunch."):
            inner = name.partition(".")[2] or "__init__"
            found.add(inner if inner in MODULES else f"{inner}.__init__")
    return found - {module}


def name_of(imported: str) -> str:
    """Return the table's name for an import."""
    root, _, rest = imported.partition(".")
    if root == "cpulaunch":
        return rest or "__init__"
    return "stdlib" if root in sys.stdlib_module_names else root


def touched(module: str) -> set[str]:
    """Return the categories of TOUCHES with a name that the module uses."""
    names = set()
    for node in nodes(module):
        if isinstance(node, ast.Attribute):
            names |= {f".{node.attr}", f"{getattr(node.value, 'id', '')}.{node.attr}"}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names.add(node.func.id)
    names |= {name.partition(".")[0] for name in imports(module)}
    return {what for what, words in TOUCHES.items() if names & set(words)}


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_its_package_may(module: str) -> None:
    package = package_of(module)
    words = RULES[package][0].split()
    allowed = {"stdlib", "__init__", package, *TOP, *words}
    names = {name_of(imported) for imported in imports(module)}
    wrong = {name for name in names - allowed if not any(name.startswith(f"{prefix}.") for prefix in allowed)}
    assert not wrong or words == ["*"]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_touches_only_what_its_package_may(module: str) -> None:
    assert touched(module) <= set(RULES[package_of(module)][1].split()) - {"pure"}


def test_every_row_is_about_modules_that_exist() -> None:
    assert {package_of(module) for module in MODULES} == set(RULES)


def test_no_package_has_too_many_modules() -> None:
    packages = Counter(module.rpartition(".")[0] for module in MODULES if not module.endswith("__init__"))
    assert {package: count for package, count in packages.items() if count > MAX_MODULES} == {}


def test_imports_are_not_circular() -> None:
    """This includes imports within functions, where circles hide."""
    graph = {module: ours(module) - {"__init__"} for module in MODULES}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("package", PURE)
def test_a_pure_package_imports_nothing_that_touches_the_machine(package: str) -> None:
    """The test follows all imports, direct and indirect."""
    waiting = [module for module in MODULES if package_of(module) == package]
    reached: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += ours(module)
    impure = {module: found for module in sorted(reached) if (found := touched(module))}
    assert not impure


def test_launcher_and_agent_never_import_torch() -> None:
    code = (
        "import sys, cpulaunch.cli.run.command, cpulaunch.cli.run.plan_text, cpulaunch.discovery.collect;"
        "import cpulaunch.supervise.attempts.attempt, cpulaunch.agent.loop;"
        "heavy = {'torch', 'numpy', 'rich', 'questionary', 'psutil'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_agent_starts_with_the_standard_library_alone(tmp_path: Path) -> None:
    """With -I -S, there are no site-packages.  It runs until it finds no plan."""
    agent = PACKAGE / "agent" / "run_agent.py"
    done = subprocess.run(
        [sys.executable, "-I", "-S", agent, "--", "true"],
        cwd=tmp_path,
        env={},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr.startswith("cpulaunch: this process can't know its rank")


def test_regular_expressions_parse_no_sentence_of_cpulaunch() -> None:
    """A new regular expression needs a row in PATTERNS.  None may read our own sentences."""
    assert {name for name in MODULES if "re" in imports(name)} == set(PATTERNS)


def test_lines_of_cpp_have_120_characters_at_most() -> None:
    sources = [*PACKAGE.rglob("*.[ch]pp"), *Path(__file__).parent.rglob("*.[ch]pp")]
    assert sources
    long = [
        f"{path.name}:{number}"
        for path in sources
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 120
    ]
    assert not long


def test_supervise_names_no_launcher() -> None:
    """The only exceptions are plan.select and the module on steps of Slurm."""
    names = {*plugins.BUILT_IN[plugins.LAUNCHERS], "mpirun"} - {
        "intel",
        "ssh",
    }  # an OpenMP runtime and a program have these names, too
    knowing = set()
    for module in MODULES:
        if module.split(".")[0] in ("plan", "discovery", "supervise", "agent", "runtime", "model", "report"):
            found = (node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant))
            if names & {value for value in found if isinstance(value, str)}:
                knowing.add(module)
    assert knowing == {"plan.select", "discovery.batch.step"}
