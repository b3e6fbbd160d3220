"""The table of environment variables is complete, and names the users of each."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from plan.test_golden import CASES, dry_run
from support.plans import make

import cpulaunch
from cpulaunch import variables
from cpulaunch.config.settings import SETTINGS
from cpulaunch.launchers.mpi import JOB_VARIABLES
from cpulaunch.supervise.attempts.attempt import Attempt
from cpulaunch.variables import TABLE

PACKAGE = Path(cpulaunch.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "variables.py"]
NAMES = {variable.name for variable in TABLE}
CONSTANTS = {
    name: (value,) if isinstance(value, str) else value
    for name, value in vars(variables).items()
    if (value in NAMES if isinstance(value, str) else isinstance(value, tuple) and set(value) <= NAMES)
}


def strings(tree: ast.Module) -> Iterator[str]:
    """The texts of a module, except docstrings and parts of f-strings.  ``-x RANK=1`` counts for RANK."""
    skipped = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr):
            skipped.add(id(node.value))
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skipped:
            yield node.value
        if isinstance(node, ast.keyword) and node.arg in NAMES:
            yield node.arg


def uses() -> dict[str, set[str]]:
    """Variable → the packages whose modules name it."""
    found: dict[str, set[str]] = {name: set() for name in NAMES}
    for path in MODULES:
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        for text in strings(tree):
            if text in NAMES:
                found[text].add(package)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "variables":
                for name in CONSTANTS.get(node.attr, ()):
                    found[name].add(package)
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "rank_setting":
                key = ast.unparse(node.args[0]).removeprefix("Table.")
                found[SETTINGS[key].rank_variable or ""].add(package)
    for path in PACKAGE.rglob("*.cpp"):
        for name in re.findall(r'"([A-Z_]+)"', " ".join(re.findall(r"getenv\(.*?\)", path.read_text()))):
            found[name].add("ccl")
    return found


USES = uses()


def test_no_variable_is_in_the_table_twice() -> None:
    assert len(NAMES) == len(TABLE)


@pytest.mark.parametrize("variable", TABLE, ids=lambda variable: variable.name)
def test_a_row_names_the_packages_that_use_its_variable(variable: variables.Variable) -> None:
    named = set(re.sub("<.*?>", "", f"{variable.writers} {variable.readers}").split())
    assert USES[variable.name] == named


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_variables_of_cpulaunch_are_spelled_only_in_the_table(path: Path) -> None:
    spelled = {
        text for text in strings(ast.parse(path.read_text())) if re.fullmatch("CPULAUNCH_[A-Z_]+", text)
    }
    assert spelled <= {"CPULAUNCH_"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_variables_that_are_read_are_in_the_table(path: Path) -> None:
    """Modules read variables as ``environ["X"]``, ``environ.get("X")`` or ``"X" in environ``."""
    read = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and ends_with_environ(node.value):
            read |= {ast.literal_eval(node.slice)} if isinstance(node.slice, ast.Constant) else set()
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ends_with_environ(node.func.value) and node.args and isinstance(node.args[0], ast.Constant):
                read.add(node.args[0].value)
        elif isinstance(node, ast.Compare) and any(map(ends_with_environ, node.comparators)):
            read |= {node.left.value} if isinstance(node.left, ast.Constant) else set()
    assert read <= NAMES


def ends_with_environ(node: ast.AST) -> bool:
    return getattr(node, "id", getattr(node, "attr", "")) in ("environ", "env", "environment")


def test_no_variable_of_the_table_counts_as_a_setting() -> None:
    """A rank may run ``cpulaunch`` itself, which would mistake the variable for a setting of the user."""
    assert not {setting.environment_name for setting in SETTINGS.values()} & NAMES


def planned_names() -> set[str]:
    """Return the variables that the golden plans set for all ranks, for a host's ranks, or for one rank."""
    found: set[str] = set()
    for options in CASES.values():
        plan = json.loads(dry_run(*options, format="json"))
        hosts = plan["hosts"]
        envs = [
            plan["env"],
            *(host["env"] for host in hosts),
            *(r["env"] for host in hosts for r in host["ranks"]),
        ]
        found |= {name for env in envs for name in env}
    return found - {"SECRET"}  # the user's own, by --env


@pytest.mark.parametrize("name", sorted(planned_names()))
def test_variables_of_plans_are_in_the_table_with_the_planner_as_writer(name: str) -> None:
    (row,) = [variable for variable in TABLE if variable.name == name]
    assert {"plan", "config"} & set(row.writers.split())


def test_ranks_get_settings_by_variables_of_the_table() -> None:
    names = {setting.rank_variable for setting in SETTINGS.values() if setting.rank_variable}
    assert names <= NAMES
    assert {"CPULAUNCH_RANK_CCL_BINDING", "CPULAUNCH_PRECISION"} <= names


def test_an_mpi_forwards_an_attempts_variables() -> None:
    """It forwards all but the launcher's pid, which has a meaning only on the launching host."""
    attempt = Attempt(make(), (), "job", "token", 29500)
    assert {*JOB_VARIABLES, variables.LAUNCHER_PID} == set(attempt.variables("10.0.0.1:7000"))
