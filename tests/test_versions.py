"""docs/versions.md: it has the licenses of installed packages, and the versions that other files state."""

from __future__ import annotations

import re
import subprocess
import sys

from support.command import REPOSITORY, TIMEOUT

import cpulaunch

PAGE = (REPOSITORY / "docs" / "versions.md").read_text()


def test_the_page_has_the_license_of_each_package_that_is_installed() -> None:
    script = REPOSITORY / "scripts" / "licenses.py"
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=TIMEOUT, check=True
    )
    packages, _, vega = done.stdout.partition("\n\n")
    found = {name: license for name, _, license in (line.split(None, 2) for line in packages.splitlines())}
    assert {"cpulaunch", "torch", "rich", "py-spy"} < set(found)
    assert "not stated" not in found.values()
    shown = dict(re.findall(r"^\| ([\w-]+) \| (.+) \|$", PAGE.partition("## Licenses")[2], re.M))
    assert set(found) - set(shown) == set()
    for name in (
        "torch",
        "numpy",
        "rich",
        "py-spy",
        "psutil",
    ):  # an old installation of cpulaunch may exist here
        assert found[name].split(" AND ")[0] == shown[name].split(" AND ")[0], name
    kinds = {line.split()[0] for line in vega.splitlines()[1:]}
    assert all(kind in PAGE for kind in kinds)


def test_versions_agree() -> None:
    assert re.search(
        rf"^## {re.escape(cpulaunch.__version__)}, ", (REPOSITORY / "CHANGELOG.md").read_text(), re.M
    )
    project = (REPOSITORY / "pyproject.toml").read_text()
    (python,) = re.findall(r'requires-python = ">=([\d.]+)"', project)
    (torch,) = re.findall(r'"torch>=([\d.]+)"', project)
    assert f"| Python | {python} to " in PAGE
    assert f"| torch | {torch} and newer " in PAGE
    newest = ".".join(cpulaunch.__version__.split(".")[:2])
    assert f"({newest})" in (REPOSITORY / "SECURITY.md").read_text()
