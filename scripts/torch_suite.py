"""Runs PyTorch's own suite for process groups, which the torch wheel ships, and counts.

    python scripts/torch_suite.py ccl --ranks 2 --out ccl-2.json     about 10 minutes
    python scripts/torch_suite.py ccl --ranks 2 --only REGEX
    python scripts/torch_suite.py --table gloo-2.json ccl-2.json     a table in Markdown

Needs `pip install expecttest` (which torch's test helpers import), and for `ccl` a built group. The suite
selects its tests by the backend's name.  ccl runs under the name of gloo, so that both have the same tests.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEST_LIMIT = 90.0  # seconds; the suite's own limit for a test is longer


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("backend", nargs="?", choices=("ccl", "gloo"))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", metavar="REGEX")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--budget", type=float, default=float("inf"), metavar="S", help="stop after S seconds"
    )
    parser.add_argument("--table", nargs="+", type=Path, metavar="JSON")
    parser.add_argument("--some", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table([json.loads(path.read_text()) for path in options.table]))
        return 0
    if options.some is not None:
        return run_here(options.some)
    results = run_all(options.backend, options.ranks, options.only, options.budget)
    document = {"backend": options.backend, "ranks": options.ranks, "tests": results}
    if options.out:
        options.out.write_text(json.dumps(document, indent=1, sort_keys=True))
    print(table([document]))
    return 1 if any(result["status"] == "failed" for result in results.values()) else 0


def run_all(backend: str, ranks: int, only: str, budget: float) -> dict[str, dict[str, Any]]:
    """Run all tests in one process, which is replaced when a test makes it hang or crash."""
    until = time.monotonic() + budget
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="torch-suite-") as temporary:
        environment = suite_environment(backend, ranks, Path(temporary))
        listed = subprocess.run(
            [sys.executable, __file__, "--some"], env=environment, capture_output=True, text=True
        )
        names = [name for name in listed.stdout.split() if re.search(only, name)]
        if not names:
            raise SystemExit(f"no test matches {only!r}\n{listed.stderr}")
        while (left := [name for name in names if name not in results]) and time.monotonic() < until:
            run_some(left, environment, until, results)
    return results


def suite_environment(backend: str, ranks: int, directory: Path) -> dict[str, str]:
    for name in ("barrier", "test_dir"):
        (directory / name).mkdir()
    return {
        **os.environ,
        "BACKEND": "gloo",
        "SUITE_BACKEND": backend,
        "WORLD_SIZE": str(ranks),
        "TEMP_DIR": str(directory),
        "TMPDIR": str(directory),  # the suite leaves its own directories behind
        "INIT_METHOD": f"file://{directory}/shared_init_file",
        "OMP_NUM_THREADS": "1",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(int(TEST_LIMIT) - 30),
    }


def run_some(
    names: list[str], environment: dict[str, str], until: float, results: dict[str, dict[str, Any]]
) -> None:
    """Run tests until one hangs, adding to `results`."""
    log = Path(environment["TEMP_DIR"], "log")
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, __file__, "--some", *names],
            env=environment, stdout=subprocess.PIPE, stderr=output, text=True, start_new_session=True,
        )  # fmt: skip
    assert process.stdout is not None
    try:
        for name in names:
            ready, _, _ = select.select([process.stdout], [], [], TEST_LIMIT)
            line = process.stdout.readline() if ready else ""
            if not line:
                end = (
                    f"no end after {TEST_LIMIT:.0f} s"
                    if not ready
                    else f"the test process ended: {process.wait()}"
                )
                results[name] = {"status": "failed", "reason": end}
                return
            results[name] = json.loads(line)
            print(f"{len(results)} {name}: {results[name]['status']}", file=sys.stderr, flush=True)
            if time.monotonic() > until:
                return
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def run_here(names: list[str]) -> int:
    """Run tests in this process, and print one line of JSON for each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import unittest

    from torch_suite_case import Suite

    if not names:
        answers.write("\n".join(n for n in sorted(dir(Suite)) if n.startswith("test_")))
        answers.close()
        return 0
    log = Path(os.environ["TEMP_DIR"], "log")
    for name in names:
        for path in log.parent.rglob("*"):
            if path.is_file() and path != log:
                path.unlink()
        began = time.monotonic()
        outcome = unittest.TestResult()
        Suite(name).run(outcome)
        sys.stderr.flush()
        result: dict[str, Any] = {"status": "passed", "seconds": round(time.monotonic() - began, 1)}
        if outcome.skipped:
            result |= {"status": "skipped", "reason": outcome.skipped[0][1]}
        elif not outcome.wasSuccessful():
            (_, text), *_ = outcome.errors + outcome.failures
            errors = re.findall(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", text, re.MULTILINE)
            reason = (errors or text.strip().splitlines())[-1]
            result |= {"status": "failed", "reason": reason[:300]}
        answers.write(json.dumps(result) + "\n")
        answers.flush()
    return 0


def table(documents: list[dict[str, Any]]) -> str:
    """Return a table with the counts of each run, the failures, and the reasons of skips."""
    lines = ["| backend | ranks | passed | failed | skipped |", "|---|---|---|---|---|"]
    for document in documents:
        counts = [
            sum(t["status"] == s for t in document["tests"].values()) for s in ("passed", "failed", "skipped")
        ]
        lines.append(f"| {document['backend']} | {document['ranks']} | {' | '.join(map(str, counts))} |")
    for document in documents:
        for status in ("failed", "skipped"):
            reasons: dict[str, list[str]] = {}
            for name, test in document["tests"].items():
                if test["status"] == status:
                    reasons.setdefault(test["reason"], []).append(name)
            if reasons:
                lines += ["", f"{status.capitalize()}, {document['backend']}, {document['ranks']} ranks:", ""]
                for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
                    shown = ", ".join(names) if status == "failed" else f"{len(names)} tests"
                    lines.append(f"- {reason}: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
