"""IBM Spectrum LSF for `cpulaunch submit --to lsf`.

An example of a queue in a separate package, never run on a real LSF.  Sources: bsub(1) and bjobs(1) of LSF
10.1.
"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from math import ceil

from cpulaunch.errors import HostError, UsageError
from cpulaunch.model.hosts import Host
from cpulaunch.queues.base import Job, Option, Queue, Submitted, Tell, call

LOOK = 5.0
"""Seconds between two calls of bjobs."""


class Lsf(Queue):
    name, title, program = "lsf", "LSF", "bsub"
    options = (
        Option("-n", "", "SLOTS", "job slots, each of which is a rank; needs -R span[ptile=N]"),
        Option("-R", "", "RESOURCES", "resources, as in span[ptile=2] (repeat)"),
        Option("-q", "", "QUEUE", "queue"),
        Option("-W", "", "TIME", "time limit, as in 2:00 for two hours"),
        Option("-P", "", "PROJECT", "project"),
        Option("-G", "", "GROUP", "group of users"),
        Option("-J", "", "NAME", "name of the job; default: the script's"),
        Option("-o", "", "FILE", "file for what the job prints"),
        Option("-w", "", "CONDITION", "what the job waits for"),
        Option("-H", "", "", "hold the job"),
    )
    help = """\
example:
  cpulaunch submit --to lsf -n 8 -R 'span[ptile=2]' -W 2:00 train.py
"""
    follows = True
    log_option = "-o"

    def prepare(self, job: Job) -> Job:
        """Return the options with the job's name, and whole hosts: one slot of each if the user requests
        none."""
        options = [*job.options]
        if "-J" not in job.asked:
            options.insert(0, ("-J", job.title))
        if "-n" not in job.asked:
            options += [("-n", str(len(super().hosts(job, None)))), ("-R", "span[ptile=1]")]
        elif _per_host(job) is None:
            why = f"-n {job.asked['-n']}: LSF may spread the slots over any number of hosts"
            raise UsageError(why, hint="-R 'span[ptile=N]' says how many ranks each host has")
        options.append(("-x", ""))
        return Job(job.config, tuple(options), job.run, job.words, job.no_python, job.follow)

    def hosts(self, job: Job, cpus: int | None) -> tuple[Host, ...]:
        each, slots = _per_host(job), job.asked.get("-n", "")
        if each is None or not slots.isdecimal():
            return super().hosts(job, cpus)
        if each == 1:  # 1 says nothing about ranks
            return tuple(Host(f"node{number + 1}") for number in range(int(slots)))
        count = ceil(int(slots) / each)
        last = int(slots) - each * (count - 1)
        return tuple(Host(f"node{n + 1}", last if n == count - 1 else each) for n in range(count))

    def render(self, job: Job) -> str:
        lines = [
            f"#BSUB {name} {shlex.quote(value) if value else ''}".rstrip() for name, value in job.options
        ]
        command = [sys.executable, "-m", "cpulaunch", "run", *job.run, *job.words]
        return "\n".join(["#!/bin/sh", *lines, f"exec {shlex.join(command)}", ""])

    def submit(self, document: str, tell: Tell) -> Submitted:
        done = call(["bsub"], text=document)
        found = re.search(r"Job <(\d+)>", done.stdout)
        if done.returncode or not found:
            raise HostError(f"bsub: {(done.stderr or done.stdout).strip()}")
        return Submitted(found[1], f"LSF job {found[1]}")

    def watch(self, job: Submitted) -> Sequence[str]:
        return (
            f"`bjobs {job.id}` shows its state, `bpeek -f {job.id}` its output, and `bkill {job.id}` ends it",
        )

    def follow(self, job: Submitted, tell: Tell) -> int:
        """Wait for the job's end; return its exit code.  `bpeek` shows its output."""
        before = ""
        while True:
            done = call(["bjobs", "-noheader", "-o", "stat exit_code", job.id])
            state, _, code = done.stdout.strip().partition(" ")
            if done.returncode or not state:
                raise HostError(f"bjobs: {(done.stderr or done.stdout).strip()}")
            if state != before:
                tell(f"{job.title} is {state}")
                before = state
            if state in ("DONE", "EXIT"):
                return 0 if state == "DONE" else int(code) if code.strip().isdecimal() else 1
            time.sleep(LOOK)


def _per_host(job: Job) -> int | None:
    """Return N of -R span[ptile=N]."""
    found = (
        re.search(r"span\[\s*ptile\s*=\s*(\d+)\s*\]", value) for name, value in job.options if name == "-R"
    )
    return next((int(each[1]) for each in found if each), None)


QUEUE = Lsf()
