"""Job directories with telemetry like a real job's."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

JOB = "20261123-051104-77a5194ce8b06d3f"


def write_job(
    directory: Path,
    *,
    ranks: int = 4,
    steps: int = 200,
    slow: int | None = 1,
    job: str = JOB,
    step: float = 0.084,
    restart_at: int | None = None,
) -> Path:
    """Write a job of ``ranks`` ranks on two hosts, in which rank ``slow`` makes the others wait.

    ``restart_at`` is a step at which it failed, and resumed from the previous step.
    """
    place = directory / job
    place.mkdir(parents=True)
    chance = random.Random(7)
    hosts = [f"node{rank * 2 // ranks}" for rank in range(ranks)]
    time = _write_telemetry(place, ranks, steps, slow, step, restart_at, chance)
    _write_plan(place, hosts)
    attempts = [
        {"kind": "ok", "seconds": time, "hosts": ["node0", "node1"], "resumed_from": None, "steps": steps}
    ]
    outcome: dict[str, Any] = {
        "schema": 1, "exit_code": 0, "kind": "ok", "seconds": round(time, 3), "restarts": 0, "first_failure": None,
        "ranks": [{"rank": n, "host": host, "pid": 1, "cores": "0-7", "status": "exit 0"} for n, host in enumerate(hosts)],
        "stalls": [], "attempts": attempts,
    }  # fmt: skip
    events = []
    if restart_at:
        attempts.insert(0, {**attempts[0], "kind": "signal", "seconds": restart_at * step})
        outcome["restarts"] = 1
        exits = {"type": "exit", "code": None, "by_launcher": False}
        events.append({"seconds": restart_at * step - 0.2, "rank": 1, **exits, "signal": 9})
        events.append(
            {"seconds": restart_at * step - 0.1, "rank": 0, **exits, "signal": 15, "by_launcher": True}
        )
        events.append({"seconds": restart_at * step, "type": "restart", "restart": 1, "hosts": ["node0"]})
        text = "no progress for 60 s: rank 1 on node0 has not called all_reduce #5"
        events.append({"seconds": time / 2, "rank": 1, "type": "stall", "lasted": 60.0, "text": text})
    (place / "outcome.json").write_text(json.dumps(outcome))
    (place / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return place


def _write_telemetry(
    place: Path,
    ranks: int,
    steps: int,
    slow: int | None,
    step: float,
    restart_at: int | None,
    chance: random.Random,
) -> float:
    """Write the telemetry; return when the last step has ended."""
    head = {"schema": 1, "peak_flops": 1.2e12, "flops_per_step": 3.4e10, "precision": "bf16"}
    time = 3.0
    with (place / "telemetry.jsonl").open("w") as file:
        file.write(
            json.dumps(head) + "    \n" + json.dumps({"attempt": 0, "time": 0.0, "world_size": ranks}) + "\n"
        )
        for number in range(1, steps + 1):
            if number == restart_at:
                time += 100 * step
                file.write(json.dumps({"attempt": 1, "time": time, "world_size": ranks}) + "\n")
            seconds = step * (1.4 if number == 1 else 1 + 0.05 * chance.random())
            time += seconds
            for rank in range(ranks):
                waiting = (
                    0.006 if rank == slow else (0.006 + (0.012 if slow is not None else 0.0)) * step / 0.084
                )
                file.write(
                    f'{{"rank": {rank}, "step": {number}, "time": {time:.4f}, "seconds": {seconds:.5f}, '
                    f'"communication": {waiting + 0.01:.5f}, "waiting": {waiting:.5f}, "input": 0.002, '
                    f'"bytes": 437986304, "samples": 32, "tokens": 4096, "loss": {10 / (1 + number / steps):.4f}}}\n'
                )
            if number % max(1, steps // 20) == 0:
                for rank in range(ranks):
                    rss = 2_000_000_000 + rank * 100_000_000 + number * 100_000_000 // steps
                    row = {"rank": rank, "time": round(time, 3), "rss": rss, "cpu_seconds": time}
                    file.write(json.dumps(row) + "\n")
    return time


SECRET = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz123456"


def _write_plan(place: Path, hosts: list[str]) -> None:
    """Write a plan with secrets in all places where users put them."""
    ranks = [
        {"rank": n, "local_rank": n, "cores": f"{8 * n + 1}-{8 * n + 7}", "comm_cores": str(8 * n), "numa_nodes": "0",
         "threads": 7, "memory_policy": "", "env": {}}
        for n, _ in enumerate(hosts)
    ]  # fmt: skip
    plan = {
        "schema": 1, "transport": "ofi", "python": True, "env": {"HF_TOKEN": SECRET},
        "program": ["python", "train.py", "--lr", "0.1", "--api-key", "5ecret", "--hub", f"https://me:{SECRET}@hub.example"],
        "hosts": [{"host": host, "assumed": False, "env": {}, "ranks": [r for r in ranks if hosts[r["rank"]] == host]}
                  for host in dict.fromkeys(hosts)],
        "settings": [
            {"key": "launcher", "value": "mpirun", "origin": "--launcher"},
            {"key": "training.backend", "value": "ccl", "origin": "detected"},
            {"key": "training.precision", "value": "bf16", "origin": "cpulaunch.yaml:7"},
            {"key": "ccl.worker_count", "value": 1, "origin": "cpulaunch.yaml:9"},
            {"key": "watch.grace_period", "value": 10, "origin": "default"},
            {"key": "mpi.args", "value": ["-genv", f"HF_TOKEN={SECRET}"], "origin": "--mpi-args"},
            {"key": "env", "value": {"WANDB": "5ecret", "HF_TOKEN": SECRET}, "origin": "cpulaunch.yaml:12"},
        ],
        "notes": [],
    }  # fmt: skip
    (place / "plan.json").write_text(json.dumps(plan))
