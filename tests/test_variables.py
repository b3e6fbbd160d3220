"""The table of environment variables is complete, and says who uses which."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cpulaunch
from cpulaunch import variables
from cpulaunch.config.settings import SETTINGS
from cpulaunch.variables import TABLE

PACKAGE = Path(cpulaunch.__file__).parent
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.name != "variables.py"]
NAMES = {variable.name for variable in TABLE}
CONSTANTS = {
    "LOCAL_IDENTITY": variables.LOCAL_IDENTITY,
    **{
        name: (value,) for name, value in vars(variables).items() if isinstance(value, str) and value in NAMES
    },
}


def strings(tree: ast.Module) -> Iterator[str]:
    """The texts of a module that are no docstrings and no parts of f-strings; ``-x RANK=1`` counts for RANK."""
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
                found[SETTINGS[ast.literal_eval(node.args[0])].rank_variable or ""].add(package)
    for path in PACKAGE.rglob("*.cpp"):
        for name in re.findall(r'"([A-Z_]+)"', " ".join(re.findall(r"getenv\(.*?\)", path.read_text()))):
            found[name].add("ccl")
    return found


USES = uses()


def test_no_variable_stands_in_the_table_twice() -> None:
    assert len(NAMES) == len(TABLE)


@pytest.mark.parametrize("variable", TABLE, ids=lambda variable: variable.name)
def test_a_row_names_the_packages_that_use_its_variable(variable: variables.Variable) -> None:
    named = set(re.sub("<.*?>", "", f"{variable.writers} {variable.readers}").split())
    assert USES[variable.name] == named


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_our_own_variables_are_spelled_in_the_table_alone(path: Path) -> None:
    spelled = {
        text for text in strings(ast.parse(path.read_text())) if re.fullmatch("CPULAUNCH_[A-Z_]+", text)
    }
    assert spelled <= {"CPULAUNCH_"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_what_is_read_from_the_environment_is_in_the_table(path: Path) -> None:
    """By the ways in which modules read it: ``environ["X"]``, ``environ.get("X")``, ``"X" in environ``."""
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


def test_ranks_are_told_settings_by_variables_of_the_table() -> None:
    told = {setting.rank_variable for setting in SETTINGS.values() if setting.rank_variable}
    assert told <= NAMES
    assert {"CPULAUNCH_CCL_BINDING", "CPULAUNCH_PRECISION"} <= told
