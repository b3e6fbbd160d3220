"""PBS Professional and OpenPBS for `cpulaunch submit --to pbs`.

An example of a queue in a separate package, never run on a real PBS.  Sources: qsub(1B) and pbs_resources(7B)
of OpenPBS 23.06.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence

from cpulaunch.errors import HostError
from cpulaunch.model.hosts import Host
from cpulaunch.queues.base import Job, Option, Queue, Submitted, Tell, call

LOOK = 5.0
"""Seconds between two calls of qstat."""


class Pbs(Queue):
    name, title, program = "pbs", "PBS", "qsub"
    options = (
        Option("-l", "", "RESOURCES", "resources, as in select=4:ncpus=28 or walltime=2:00:00 (repeat)"),
        Option("-q", "", "QUEUE", "queue"),
        Option("-A", "", "ACCOUNT", "account"),
        Option("-N", "", "NAME", "name of the job; default: the script's"),
        Option("-P", "", "PROJECT", "project"),
        Option("-W", "", "ATTRIBUTES", "further attributes, as in depend=afterok:7 (repeat)"),
        Option("-o", "", "FILE", "file for what the job prints"),
        Option("-m", "", "EVENTS", "events that PBS mails about"),
        Option("-h", "", "", "hold the job"),
    )
    help = """\
example:
  cpulaunch submit --to pbs -l select=4:ncpus=28:mpiprocs=2 -l walltime=2:00:00 train.py
"""
    follows = True
    log_option = "-o"

    def prepare(self, job: Job) -> Job:
        """Return the options with --nnodes' number of whole nodes, and the job's name."""
        options = [("-j", "oe"), *job.options]
        if "-N" not in job.asked:
            options.insert(0, ("-N", job.title))
        if _select(job) is None:
            count = len(super().hosts(job, None))
            options += [("-l", f"select={count}"), ("-l", "place=scatter:excl")]
        return Job(job.config, tuple(options), job.run, job.words, job.no_python, job.follow)

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        select = _select(job)
        if select is None:
            return super().hosts(job, cpus)
        hosts: list[Host] = []
        for chunk in select.split("+"):
            count, *resources = chunk.split(":")
            slots = dict(each.partition("=")[::2] for each in resources).get("mpiprocs")
            for _ in range(int(count) if count.isdecimal() else 1):
                hosts.append(Host(f"node{len(hosts) + 1}", int(slots) if slots else None))
        return tuple(hosts)

    def render(self, job: Job) -> str:
        lines = [f"#PBS {name} {shlex.quote(value) if value else ''}".rstrip() for name, value in job.options]
        command = [sys.executable, "-m", "cpulaunch", "run", *job.run, *job.words]
        return "\n".join(["#!/bin/sh", *lines, 'cd "$PBS_O_WORKDIR"', f"exec {shlex.join(command)}", ""])

    def submit(self, document: str, tell: Tell) -> Submitted:
        done = call(["qsub"], text=document)
        if done.returncode:
            raise HostError(f"qsub: {done.stderr.strip().removeprefix('qsub: ')}")
        number = done.stdout.strip()
        return Submitted(number, f"PBS job {number}")

    def watch(self, job: Submitted) -> Sequence[str]:
        return (f"`qstat {job.id}` shows its state, and `qdel {job.id}` ends it",)

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Wait for the job's end; return its exit code.  The job's file then has its output."""
        before = ""
        while True:
            done = call(["qstat", "-fx", job.id])
            if done.returncode:
                raise HostError(f"qstat: {done.stderr.strip().removeprefix('qstat: ')}")
            found = re.search(r"job_state = (\w)", done.stdout)
            state = found[1] if found else "?"
            if state != before:
                tell(f"{job.title} is {STATES.get(state, state)}")
                before = state
            if state == "F":
                code = re.search(r"Exit_status = (-?\d+)", done.stdout)
                # From 256 on, it is 256 + the signal that has ended the job; PBS's own errors are below 0.
                value = int(code[1]) if code else 1
                return 1 if value < 0 else 128 + value - 256 if value >= 256 else value
            time.sleep(LOOK)


STATES = {
    "Q": "waiting",
    "H": "held",
    "R": "running",
    "E": "ending",
    "F": "over",
    "W": "waiting",
    "S": "suspended",
}


def _select(job: Job) -> str | None:
    """The chunks of -l select=…"""
    texts = (
        value.removeprefix("select=") for name, value in job.options if name == "-l" and "select=" in value
    )
    return next(texts, None)


QUEUE = Pbs()
