"""Limits for the length of functions and the number of their parameters."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cpulaunch

PACKAGE = Path(cpulaunch.__file__).parent
ROOMS = ("plan", "supervise", "agent")
FILES = [path for room in ROOMS for path in sorted((PACKAGE / room).rglob("*.py"))]
MAX_LINES = 50
MAX_PARAMETERS = 6


def too_big(tree: ast.Module) -> list[str]:
    """The functions of a module that are too long or have too many parameters, not counting the first one of
    methods."""
    methods = {
        id(node)
        for each in ast.walk(tree)
        if isinstance(each, ast.ClassDef)
        for node in each.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if "staticmethod" not in {getattr(decorator, "id", "") for decorator in node.decorator_list}
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            given = node.args
            parameters = [*given.posonlyargs, *given.args, *given.kwonlyargs]
            count = len(parameters) - (id(node) in methods) + bool(given.vararg) + bool(given.kwarg)
            if lines > MAX_LINES:
                found.append(f"{node.name} has {lines} lines")
            if count > MAX_PARAMETERS:
                found.append(f"{node.name} has {count} parameters")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_functions_are_small(path: Path) -> None:
    assert too_big(ast.parse(path.read_text())) == []


def test_functions_of_all_kinds_are_counted() -> None:
    assert {path.relative_to(PACKAGE).parts[0] for path in FILES} == set(ROOMS)
