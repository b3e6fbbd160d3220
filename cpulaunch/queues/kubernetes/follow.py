"""Follow the output and state of a job on Kubernetes until it has ended."""

from __future__ import annotations

import json
import subprocess
import time
from typing import Any

from cpulaunch.errors import HostError
from cpulaunch.queues.base import Tell, call
from cpulaunch.queues.kubernetes.pods import Kind
from cpulaunch.wording import cannot_run

POLL_INTERVAL = 2.0
"""Seconds between two requests to the API server."""

FAILED = 1
"""The exit code of a job whose launcher has no exit code, for example because its pod was evicted."""


def follow(kind: Kind, name: str, namespace: str, tell: Tell) -> int:
    """Show the output of the job's launcher until it has ended, and return its exit code.

    Raises HostError if the job has been deleted, or if kubectl fails.
    """
    where = ["-n", namespace] if namespace else []
    shown = ""
    while (pod := _launcher(kind, name, where)) is None or pod["status"].get("phase") in (None, "Pending"):
        state = "its launcher is Pending" if pod else "its workers are not ready"
        if state != shown:
            tell(f"{kind.name} {name} waits: {state}")
            shown = state
        time.sleep(POLL_INTERVAL)
    _show_log(pod["metadata"]["name"], where)
    while True:
        pod = _launcher(kind, name, where)
        if pod is None:
            raise HostError(f"the launcher of {kind.name} {name} has been deleted")
        if pod["status"].get("phase") in ("Succeeded", "Failed"):
            code = _exit_code(pod, kind.container)
            tell(f"{kind.name} {name} has ended with exit code {code}{_reason(pod)}")
            return code
        time.sleep(POLL_INTERVAL)


def _launcher(kind: Kind, name: str, where: list[str]) -> dict[str, Any] | None:
    """The launcher's pod, or None if the operator has not created it yet.

    Raises HostError if there is no such job, or if kubectl fails.
    """
    labels = f"{kind.job_label}={name},{kind.role_label}=launcher"
    found = _get_json(["get", "pods", *where, "-l", labels, "-o", "json"])["items"]
    if not found:
        # Raises if the job has been deleted.
        _get_json(["get", f"{kind.name.lower()}/{name}", *where, "-o", "json"])
        return None
    last: dict[str, Any] = found[-1]
    return last


def _get_json(words: list[str]) -> dict[str, Any]:
    done = call(["kubectl", *words])
    if done.returncode:
        raise HostError(f"kubectl: {done.stderr.strip().removeprefix('error: ')}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _show_log(pod: str, where: list[str]) -> None:
    try:
        subprocess.run(["kubectl", "logs", "-f", *where, f"pod/{pod}"], stdin=subprocess.DEVNULL)
    except OSError as e:
        raise HostError(cannot_run("kubectl", e)) from None


def _exit_code(pod: dict[str, Any], container: str) -> int:
    for status in pod["status"].get("containerStatuses", ()):
        if (ended := status.get("state", {}).get("terminated")) and status["name"] == container:
            return int(ended["exitCode"])
    return FAILED


def _reason(pod: dict[str, Any]) -> str:
    """Kubernetes' reason for the end of the pod, in parentheses; empty if there is none."""
    reason = pod["status"].get("reason")
    return f" ({reason})" if reason else ""
