"""The house's table: who may import whom.  It is the one of docs/architecture.md, and holds for every file."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "cpulaunch"

# The longest matching prefix counts.  "stdlib" alone: nothing installed may be imported.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"stdlib"},
    "messages": {"stdlib"},
    "variables": {"stdlib"},
    "config": {"stdlib", "errors", "config"},
    "config.load": {"stdlib", "errors", "config", "yaml"},
    "config.accelerate": {"stdlib", "errors", "config", "yaml"},
    "model": {"stdlib", "errors", "model", "discovery"},
    "discovery": {"stdlib", "errors", "model", "discovery", "launchers"},
    "plugins": {"stdlib", "errors"},
    "discovery.collect": {"*"},
    "plan": {"stdlib", "errors", "config", "model", "discovery", "plan"},
    "launchers": {"stdlib", "errors", "plugins", "model", "plan", "launchers"},
    "supervise": {"stdlib", "errors", "messages", "model", "plan", "launchers", "supervise"},
    "supervise.failure_report": {"*"},
    "agent": {"stdlib", "errors", "messages", "agent", "model", "discovery", "plan"},
    "agent.bootstrap": {"stdlib", "messages", "agent.gloo"},
    "agent.gloo": {"stdlib"},
    "runtime": {
        "stdlib",
        "torch",
        "errors",
        "runtime",
        "agent.identity",
        "plan.communication",
        "config.rank_settings",
        "ccl.installed",
    },
    "integrations": {"stdlib", "torch", "errors", "runtime", "accelerate", "transformers"},
    "runtime.engines.ipex": {"stdlib", "torch", "intel_extension_for_pytorch"},
    "ccl": {
        "stdlib",
        "torch",
        "config.rank_settings",
        "errors",
        "ccl",
        "agent.identity",
        "plan.communication",
    },
    "cli": {"*"},
    "__main__": {"cli"},
    "__init__": {"stdlib", "runtime"},
}


def modules() -> list[str]:
    return sorted(".".join(p.relative_to(PACKAGE).with_suffix("").parts) for p in PACKAGE.rglob("*.py"))


def allowed_for(module: str) -> set[str]:
    parts = module.split(".")
    for length in range(len(parts), 0, -1):
        if (rule := MAY_IMPORT.get(".".join(parts[:length]))) is not None:
            return rule
    raise AssertionError(f"{module} is in no row of the table")


def imports(module: str) -> set[str]:
    """What a module imports, at its top or within functions, but not for type checks alone."""
    path = PACKAGE / (module.replace(".", "/") + ".py")
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            # `from cpulaunch.launchers import local` imports a module, too.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                is_module = (PACKAGE.parent / (inner.replace(".", "/") + ".py")).is_file()
                found.add(inner if is_module else node.module)
    return found


def room_of(imported: str) -> str:
    """The name by which the table knows an import."""
    root, _, rest = imported.partition(".")
    if root == "cpulaunch":
        return rest or "__init__"
    return "stdlib" if root in sys.stdlib_module_names else root


@pytest.mark.parametrize("module", modules())
def test_a_module_imports_only_what_its_room_may(module: str) -> None:
    allowed = allowed_for(module)
    if "*" in allowed:
        return
    for imported in imports(module):
        room = room_of(imported)
        fits = (
            room in (*allowed, "variables")
            or any(room.startswith(prefix + ".") for prefix in allowed)
            or room == "__init__"
        )
        assert fits, f"{module} imports {imported}"


def test_launcher_and_agent_never_import_torch() -> None:
    code = (
        "import sys, cpulaunch.cli.run, cpulaunch.cli.show, cpulaunch.discovery.collect, cpulaunch.supervise.execute;"
        "import cpulaunch.agent.loop; heavy = {'torch', 'numpy', 'rich', 'questionary', 'psutil'} & set(sys.modules);"
        "sys.exit(f'imported: {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_agent_starts_with_the_standard_library_alone(tmp_path: Path) -> None:
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
    assert "CPULAUNCH_PLACEMENT" in done.stderr
