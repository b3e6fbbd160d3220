"""The house's rules: who may import whom, who may touch what, and no circles.

The tables are those of docs/architecture.md, and hold for every module.
"""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import cpulaunch

PACKAGE = Path(cpulaunch.__file__).parent

# The longest matching prefix counts.  All may import the standard library, `errors`, `variables` and `wording`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "wording": set(),
    "variables": set(),
    "plugins": set(),
    "messages": set(),
    "wire": {"messages"},
    "ledger": {"model.cores"},
    "user_file": set(),
    "metric_line": set(),
    "config": {"config", "model.cores", "plugins"},
    "config.load": {"config", "user_file", "yaml"},
    "config.nodes": {"config", "yaml"},
    "config.accelerate": {"config", "yaml"},
    "model": {"model"},
    "plan": {"config", "model", "plan", "launchers"},
    "launchers": {"launchers", "plugins", "model", "plan"},
    "discovery": {"discovery", "messages", "wire", "model", "launchers", "user_file"},
    "discovery.master_port": set(),
    "discovery.check_hosts": {"discovery", "model", "config.config", "launchers", "plan.select"},
    "manifests": {"manifests"},
    "manifests.mpijob": {"manifests", "yaml"},
    "discovery.partition": {"discovery", "model", "manifests.sbatch_options"},
    "discovery.step": {"discovery", "model", "config.config"},
    "discovery.ask_rates": {"discovery", "launchers", "model", "plan.plan"},
    "discovery.collect": {"discovery", "model", "config", "plan", "user_file"},
    "supervise": {"supervise", "messages", "wire", "model", "plan", "launchers"},
    "supervise.record": {"metric_line", "model", "supervise"},
    "supervise.metrics": {"metric_line", "supervise"},
    "supervise.shown": {"metric_line", "supervise"},
    "supervise.waiting": {"ledger", "model.cores"},
    "supervise.box": {"rich"},
    "supervise.telemetry_sinks": {"supervise", "plan"},
    "supervise.tensorboard": {"supervise", "tensorboardX"},
    "supervise.attempt": {
        "supervise",
        "messages",
        "wire",
        "model",
        "plan",
        "launchers",
        "discovery.master_port",
    },
    "supervise.failure_report": {"supervise", "model"},
    "trace": {"trace"},
    "agent": {"agent", "ledger", "messages", "wire", "model", "discovery", "plan"},
    "agent.bootstrap": {"messages", "wire", "agent.gloo", "agent.kept_port", "agent.ledger_file"},
    "agent.gloo": set(),
    "ccl": {
        "ccl",
        "config.rank_settings",
        "config.settings",
        "ledger",
        "plan.communication",
        "psutil",
        "torch",
    },
    "runtime": {
        "ledger",
        "model.cores",
        "runtime",
        "config.kinds",
        "config.rank_settings",
        "config.settings",
        "config.values",
        "plan.training",
        "discovery.this_host",
        "discovery.rate_cache",
        "discovery.master_port",
        "model.hosts",
        "model.rates",
        "plugins",
        "ccl.installed",
        "ccl.register",
        "torch",
    },
    "runtime.instances": {"metric_line"},
    "runtime.reports": {"messages", "wire"},
    "runtime.last_words": {"messages", "wire"},
    "runtime.tracing": {
        "ledger",
        "messages",
        "wire",
        "torch",
        "runtime.reports",
        "discovery.cgroup",
        "discovery.far_memory",
        "discovery.files",
        "model.cores",
    },
    "runtime.engines.ipex": {"runtime", "torch", "intel_extension_for_pytorch"},
    "integrations": {"runtime", "discovery.this_host", "torch", "accelerate", "transformers"},
    "report": {
        "report",
        "config.setting",
        "config.settings",
        "model.names",
        "supervise.metrics",
        "supervise.outcome",
        "supervise.record",
        "supervise.status",
        "numpy",
    },
    "report.bundle": {"vl_convert"},
    "cli": {"*"},
    "__main__": {"cli"},
    "__init__": {"runtime"},
}

# What a module can touch, and by which names it does.
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

MAY_TOUCH: dict[str, set[str]] = {
    "errors": set(),
    "wording": set(),
    "variables": set(),
    "plugins": set(),
    "ledger": set(),
    "messages": set(),
    "wire": set(),
    "user_file": {"files"},
    "metric_line": set(),
    "config": set(),
    "config.load": {"files", "environment"},
    "model": set(),
    "plan": set(),
    "launchers": set(),
    "manifests": set(),
    "discovery": {"processes", "network", "files", "environment", "clock", "libc", "terminal"},
    "supervise": {"processes", "network", "files", "environment", "clock", "libc", "terminal"},
    "supervise.job": set(),
    "supervise.state": set(),
    "supervise.heard": set(),
    "supervise.launched": set(),
    "supervise.ending": set(),
    "supervise.arrivals": set(),
    "supervise.clocks": set(),
    "supervise.dumps": set(),
    "supervise.alike": set(),
    "supervise.stalls": set(),
    "supervise.pauses": set(),
    "supervise.instance_failures": set(),
    "supervise.instance_stalls": set(),
    "supervise.telemetry": set(),
    "supervise.thinning": set(),
    "supervise.sides": set(),
    "supervise.stall_report": set(),
    "supervise.stall_words": set(),
    "supervise.seen": set(),
    "supervise.stragglers": set(),
    "supervise.waiting": set(),
    "supervise.whereabouts": set(),
    "supervise.stacks": set(),
    "supervise.events": set(),
    "supervise.heartbeats": set(),
    "supervise.processes": set(),
    "supervise.rank": set(),
    "supervise.root_cause": set(),
    "supervise.status": set(),
    "supervise.metrics": set(),
    "supervise.notes": set(),
    "supervise.outcome": set(),
    "supervise.restarts": set(),
    "supervise.trace_request": set(),
    "trace": set(),
    "trace.files": {"files", "terminal"},
    "trace.run_merge": {"files"},
    "agent": {"processes", "network", "files", "environment", "clock", "libc", "terminal"},
    "ccl": {"processes", "network", "files", "environment", "clock", "libc"},
    "runtime": {"files", "environment", "clock", "terminal"},
    "runtime.instances": {"environment", "terminal"},
    "runtime.last_words": {"libc"},  # the handler that C++ calls
    "runtime.checkpoint.signals": {"clock", "processes"},
    "runtime.checkpoint.lock": {"clock", "environment", "files", "network"},  # the host's name
    "runtime.patches.own_groups": {"environment", "processes"},
    "runtime.measure_rates": {"environment", "files", "processes", "terminal"},
    "integrations": set(),
    "report": set(),
    "report.read": {"files"},
    "cli": {"processes", "files", "environment", "clock", "terminal"},
    "__main__": set(),
    "__init__": set(),
}


def modules() -> list[str]:
    return sorted(".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py"))


MODULES = modules()


def row(table: dict[str, set[str]], module: str) -> set[str]:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (found := table.get(".".join(parts[:length]))) is not None:
            return found
    raise AssertionError(f"{module} is in no row of the table")


@cache
def tree(module: str) -> ast.Module:
    return ast.parse((PACKAGE / (module.replace(".", "/") + ".py")).read_text())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"


def nodes(module: str) -> Iterator[ast.AST]:
    """All nodes of a module but those for type checkers alone."""
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
    """What a module imports, at its top or within functions, by full names; ``from . import x``, too."""
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
    """The modules of cpulaunch that a module imports, as `modules` names them."""
    found = set()
    for name in imports(module):
        if name == "cpulaunch" or name.startswith("cpulaunch."):
            inner = name.partition(".")[2] or "__init__"
            found.add(inner if inner in MODULES else f"{inner}.__init__")
    return found - {module}


def room_of(imported: str) -> str:
    """The name by which the table knows an import."""
    root, _, rest = imported.partition(".")
    if root == "cpulaunch":
        return rest or "__init__"
    return "stdlib" if root in sys.stdlib_module_names else root


def touched(module: str) -> set[str]:
    """The categories of TOUCHES of which a module names something."""
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


@pytest.mark.parametrize("module", [each for each in MODULES if "*" not in row(MAY_IMPORT, each)])
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    allowed = {"stdlib", "errors", "variables", "wording", "__init__", *row(MAY_IMPORT, module)}
    rooms = {room_of(imported) for imported in imports(module)}
    parents = {prefix for prefix in allowed if prefix not in ("stdlib", "__init__")}
    wrong = {room for room in rooms - allowed if not any(room.startswith(prefix + ".") for prefix in parents)}
    assert not wrong


@pytest.mark.parametrize("module", MODULES)
def test_a_module_touches_only_what_its_room_may(module: str) -> None:
    assert touched(module) <= row(MAY_TOUCH, module)


def test_no_import_goes_in_a_circle() -> None:
    """Neither at the top of modules nor within functions, where circles hide."""
    graph = {module: ours(module) - {"__init__"} for module in MODULES}
    assert tuple(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("room", ["plan", "launchers", "model", "supervise.job"])
def test_a_pure_room_reaches_nothing_that_runs_commands(room: str) -> None:
    """By way of whatever it imports: purity is by import, not by promise."""
    waiting = [module for module in MODULES if module == room or module.startswith(f"{room}.")]
    assert waiting
    reached: set[str] = set()
    while waiting:
        module = waiting.pop()
        if module not in reached:
            reached.add(module)
            waiting += ours(module)
    impure = {module: found for module in sorted(reached) if (found := touched(module))}
    assert not impure


def sample(directory: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> str:
    """The name of a module with this ``code``, in a package of its own."""
    (directory / "agent").mkdir()
    (directory / "agent" / "sample.py").write_text(code)
    monkeypatch.setitem(globals(), "PACKAGE", directory)
    tree.cache_clear()
    return "agent.sample"


def test_the_rules_see_each_kind_of_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative ones and those within functions, but not those for type checkers alone."""
    code = (
        "from . import sibling\nfrom ..room import name\ndef f():\n    import socket\n"
        "if TYPE_CHECKING:\n    import subprocess\n"
    )
    module = sample(tmp_path, monkeypatch, code)
    assert imports(module) == {"cpulaunch.agent", "cpulaunch.room", "socket"}


@pytest.mark.parametrize(
    ("code", "touches"),
    [
        ("def f():\n    import socket", "network"),
        ("open('x')", "files"),
        ("path.read_text()", "files"),
        ("path.open()", "files"),
        ("path.exists()", "files"),
        ("path.is_file()", "files"),
        ("path.stat()", "files"),
        ("path.rename('x')", "files"),
        ("os.path.exists('x')", "files"),
        ("from os import path", "files"),
        ("os.environ['A']", "environment"),
        ("os.getenv('A')", "environment"),
        ("from os import environ", "environment"),
        ("time.monotonic()", "clock"),
        ("from time import monotonic", "clock"),
        ("os.posix_spawn('x', [], {})", "processes"),
        ("from signal import signal", "processes"),
        ("from ctypes import CDLL", "libc"),
        ("print('x')", "terminal"),
    ],
)
def test_the_rules_see_each_kind_of_touch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, touches: str
) -> None:
    assert touched(sample(tmp_path, monkeypatch, code)) == {touches}


def test_launcher_and_agent_never_import_torch() -> None:
    code = (
        "import sys, cpulaunch.cli.run, cpulaunch.cli.show, cpulaunch.discovery.collect;"
        "import cpulaunch.supervise.execute, cpulaunch.agent.loop;"
        "heavy = {'torch', 'numpy', 'rich', 'questionary', 'psutil'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_the_agent_starts_with_the_standard_library_alone(tmp_path: Path) -> None:
    """-I -S: no site-packages at all.  It gets as far as finding no plan."""
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
