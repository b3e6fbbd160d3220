"""Fetches the pinned oneCCL wheel by pip, from the index that pip or uv is configured for.

A run must not wait long for an index that can't be reached, nor try again each time.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import machinery
from pathlib import Path

from cpulaunch.ccl import installed
from cpulaunch.ccl.installed import ONECCL_VERSION
from cpulaunch.errors import HostError

Progress = Callable[[str, str], None]
"""Called with each step of a build, and its progress: an empty text at its beginning."""

ANSWER_WITHIN = 1.2
"""Seconds that an index has to answer if a job waits for it."""

REMEMBERED_FOR = 3600.0
"""Seconds in which a run does not try again after a failure."""

ELSEWHERE = (
    "Or build it on a similar machine that has what is missing, with `cpulaunch ccl build --wheel DIR`, "
    "and `pip install` the wheel here; or use `--backend gloo`."
)
_SHA256 = "6df69cc33962e48f401041bd788991bd47f82d3b1be3ed788aa184293c581cf2"
_WANTED = f"oneccl-devel {ONECCL_VERSION}"

# uv's names of pip's settings, as uv's environments have no pip of their own.
_UVS = {
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS",),
}

# pip's verbose output.
_ASKS = re.compile(r"\s*Fetching project page and analyzing links: (\S+)")
_ANSWERED = re.compile(r"\s*(Fetched page|Could not fetch|Collecting|Skipping link) ")
_FAILED = re.compile(r"\s*Could not fetch URL (\S+): (.*?)(?: - skipping)?$")
_COMPLAINS = re.compile(r"(?:ERROR: |WARNING: (?=The repository located at))(.*)")
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\"()]+)")


def fetch_wheel(directory: Path, progress: Progress, *, patient: bool) -> Path:
    """Fetch the wheel of oneccl-devel into ``directory``, and return its path.

    ``patient``: the user asked for it, so pip takes its time.  Otherwise, an index has to answer at once; for
    an hour after one that didn't, HostError is raised without asking it.
    """
    environment = _environment(os.environ)
    memory = _Memory(environment)
    if not patient:
        memory.check()
    progress(f"fetching {_WANTED} (32 MB)", "")
    requirements = directory / "requirements.txt"
    requirements.write_text(f"oneccl-devel=={ONECCL_VERSION} --hash=sha256:{_SHA256}\n")
    # --no-deps: its dependencies are for its own examples, and one of them cannot be met.
    argv = [*_pip(), "download", "-vv", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:",
            "--require-hashes", "-r", str(requirements), "-d", str(directory)]  # fmt: skip
    argv += [] if patient else ["--retries", "0"]
    reason = _run(argv, environment, ANSWER_WITHIN if not patient else None)
    wheel = next(directory.glob("oneccl_devel-*.whl"), None)
    if wheel is None or reason is not None:
        reason = reason or "it gave no reason"
        memory.keep(reason)
        raise HostError(
            f"pip could not fetch {_WANTED}: {reason}",
            hint=f"The oneCCL module needs the network, once; --ccl-transport tcp needs none. {ELSEWHERE}",
        )
    memory.forget()
    return wheel


class _Memory:
    """The last failure, recorded in a file beside the groups."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.path = installed.cache_directory() / "not-fetched.json"
        # A user who sets another index or proxy wants to try it.  Hashed, as the settings may contain
        # passwords.
        matters = sorted(
            (k, v) for k, v in environment.items() if k.startswith("PIP_") or k.lower().endswith("_proxy")
        )
        self.settings = hashlib.sha256(json.dumps(matters).encode()).hexdigest()

    def check(self) -> None:
        """Raise HostError if the last failure was within the hour, with the same settings."""
        try:
            age = time.time() - self.path.stat().st_mtime
            kept = json.loads(self.path.read_text())
            same, reason = kept["settings"] == self.settings, kept["reason"]
        except (OSError, ValueError, KeyError, TypeError):
            return
        if same and 0 <= age < REMEMBERED_FOR:
            when = f"{age / 60:.0f} min ago" if age >= 60 else "just now"
            raise HostError(
                f"pip could not fetch {_WANTED}: {reason} (tried {when})",
                hint="`cpulaunch ccl build --oneccl` tries again, and so do runs an hour later; "
                f"--ccl-transport tcp needs none. {ELSEWHERE}",
            )

    def keep(self, reason: str) -> None:
        self.path.write_text(json.dumps({"settings": self.settings, "reason": reason}))

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _pip() -> list[str]:
    """Return the command of this Python's pip, or of the one that its venv module would install."""
    if machinery.PathFinder.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    import ensurepip

    # Debian and Fedora keep it in a separate directory.
    for place in (Path(ensurepip.__file__).with_name("_bundled"), sysconfig.get_config_var("WHEEL_PKG_DIR")):
        for wheel in sorted(Path(place).glob("pip-*.whl")) if place else ():
            return [sys.executable, str(wheel / "pip")]
    raise HostError(f"there is no pip to fetch {_WANTED} with",
                    hint=f"`uv pip install pip`, or your system's package for it. {ELSEWHERE}")  # fmt: skip


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's environment: unbuffered output, and uv's settings for those that pip lacks."""
    environment = {**environ, "PYTHONUNBUFFERED": "1", "PIP_NO_COLOR": "1", "PIP_PROGRESS_BAR": "off"}
    environment.pop("PIP_QUIET", None)
    for name, uvs in _UVS.items():
        # uv may give an index a name: NAME=URL.
        words = (word.partition("=") for uv in uvs for word in environ.get(uv, "").split())
        found = [url if equals and "/" not in name else name + equals + url for name, equals, url in words]
        if found and not environ.get(name):
            environment[name] = found[0] if name == "PIP_INDEX_URL" else " ".join(found)
    return environment


def _run(argv: list[str], environment: Mapping[str, str], answer_within: float | None) -> str | None:
    """Run pip; return why it failed, or None.  An index has ``answer_within`` seconds before pip is ended."""
    failures: list[str] = []
    with subprocess.Popen(
        argv, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pip:
        try:
            for line in _lines(pip, answer_within):
                if match := _FAILED.match(line):
                    failures.append(f"{match[1]}: {_cause(match[2])}")
                elif match := _COMPLAINS.match(line):
                    failures.append(match[1])
            pip.wait()
        except TimeoutError as e:
            return str(e)
        finally:
            pip.kill()
    return None if pip.returncode == 0 else (failures or [f"it ended with exit code {pip.returncode}"])[0]


def _lines(pip: subprocess.Popen[bytes], answer_within: float | None) -> Iterator[str]:
    """Yield pip's output line by line.  Raises TimeoutError if an index doesn't answer in time."""
    assert pip.stdout is not None
    fd, rest = pip.stdout.fileno(), b""
    asked = None
    while True:
        if not select.select([fd], [], [], answer_within if asked else None)[0]:
            raise TimeoutError(f"no answer from {asked} within {answer_within:g} s")
        *lines, rest = (rest + (data := os.read(fd, 1 << 16))).split(b"\n")
        for line in (each.decode(errors="replace") for each in lines):
            if match := _ASKS.match(line):
                asked = match[1]
            elif _ANSWERED.match(line):
                asked = None
            yield line
        if not data:
            return


def _cause(text: str) -> str:
    """Return the cause, such as ``Connection refused``, from urllib3's long message."""
    if match := _ERRNO.search(text):
        return match[1].strip()
    return text.partition(" for url: ")[0][:200]
