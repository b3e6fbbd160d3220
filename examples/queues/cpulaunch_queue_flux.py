"""Flux for `cpulaunch submit --to flux`.

An example of a queue in a separate package, never run on a real Flux.  Sources: flux-batch(1), flux-job(1)
and flux-broker-attributes(7) of flux-core 0.70.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from cpulaunch.errors import HostError
from cpulaunch.model.hosts import Host
from cpulaunch.queues.base import Job, Option, Queue, Submitted, Tell, call


class Flux(Queue):
    name, title, program = "flux", "Flux", "flux"
    options = (
        Option("--nodes", "-N", "N", "number of nodes; default: 1"),
        Option("--queue", "-q", "QUEUE", "queue"),
        Option("--time-limit", "-t", "TIME", "time limit, as in 2h"),
        Option("--bank", "-B", "BANK", "bank that is charged"),
        Option("--job-name", "", "NAME", "name of the job; default: the script's"),
        Option("--output", "-o", "FILE", "file for what the job prints"),
        Option("--requires", "", "CONSTRAINT", "what nodes must have"),
        Option("--dependency", "", "URI", "what the job waits for (repeat)"),
        Option("--urgency", "", "N", "urgency, from 0 (held) to 31"),
    )
    help = """\
example:
  cpulaunch submit --to flux --nodes 4 --time-limit 2h -ppn 2 train.py
"""
    passes_through = True
    follows = True
    log_option = "--output"

    def prepare(self, job: Job) -> Job:
        """Return the options with --nnodes' number of whole nodes, and the job's name."""
        options = [("--exclusive", ""), *job.options]
        if "--job-name" not in job.asked:
            options.insert(0, ("--job-name", job.title))
        if "--nodes" not in job.asked:
            options.append(("--nodes", str(len(super().hosts(job, None)))))
        return Job(job.config, tuple(options), job.run, job.words, job.no_python, job.follow)

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        nodes = job.asked.get("--nodes", "")
        if not nodes.isdecimal():
            return super().hosts(job, cpus)
        return tuple(Host(f"node{number + 1}") for number in range(int(nodes)))

    def render(self, job: Job) -> str:
        lines = [
            f"# flux: {name}={shlex.quote(value)}" if value else f"# flux: {name}"
            for name, value in job.options
        ]
        command = shlex.join([sys.executable, "-m", "cpulaunch", "run"])
        words = shlex.join([*job.run, *job.words])
        # The script runs in an instance of Flux of its own, whose brokers are on the job's nodes.
        run = f'exec {command} --hosts="$(flux getattr hostlist)" {words}'
        return "\n".join(["#!/bin/sh", *lines, run, ""])

    def submit(self, document: str, tell: Tell) -> Submitted:
        done = call(["flux", "batch"], text=document)
        if done.returncode:
            raise HostError(f"flux batch: {done.stderr.strip().removeprefix('flux-batch: ')}")
        number = done.stdout.strip()
        return Submitted(number, f"Flux job {number}")

    def watch(self, job: Submitted) -> Sequence[str]:
        return (
            f"`flux job attach {job.id}` shows what it prints, `flux jobs {job.id}` its state, and "
            f"`flux cancel {job.id}` ends it",
        )

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Wait for the job's end; return its exit code, or 128 + the signal that has ended it."""
        done = call(["flux", "job", "status", job.id], timeout=None)
        for line in done.stderr.splitlines():
            tell(line)
        tell(f"{job.title} has ended with exit code {done.returncode}")
        return done.returncode


QUEUE = Flux()
