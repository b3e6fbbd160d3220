"""Downloads the pinned oneCCL wheel with pip, from the index that is configured for pip or uv.

If the index can't be reached, a run fails within seconds, and runs within the next hour fail at once.
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
"""Callback for a build's progress, with the step and its detail, which is empty at the step's beginning."""

ANSWER_WITHIN = 1.2
"""Seconds within which an index must answer if a job waits for the build."""

REMEMBERED_FOR = 3600.0
"""Seconds after a failure in which runs don't try again."""

ELSEWHERE = (
    "Or build a wheel on a similar machine, with `cpulaunch ccl build --wheel DIR`, and `pip install` it "
    "here; or use `--backend gloo`."
)
_SHA256 = "6df69cc33962e48f401041bd788991bd47f82d3b1be3ed788aa184293c581cf2"
_WANTED = f"oneccl-devel {ONECCL_VERSION}"

# Variable of pip → variables of uv with the same meaning.
_UVS = {
    "PIP_INDEX_URL": ("UV_DEFAULT_INDEX", "UV_INDEX_URL"),
    "PIP_EXTRA_INDEX_URL": ("UV_INDEX", "UV_EXTRA_INDEX_URL"),
    "PIP_FIND_LINKS": ("UV_FIND_LINKS",),
}

# Lines of pip's verbose output.
_ASKS = re.compile(r"\s*Fetching project page and analyzing links: (\S+)")
_ANSWERED = re.compile(r"\s*(Fetched page|Could not fetch|Collecting|Skipping link) ")
_FAILED = re.compile(r"\s*Could not fetch URL (\S+): (.*?)(?: - skipping)?$")
_COMPLAINS = re.compile(r"(?:ERROR: |WARNING: (?=The repository located at))(.*)")
_ERRNO = re.compile(r"\[Errno -?\d+\] ([^'\"()]+)")


def fetch_wheel(directory: Path, progress: Progress, *, patient: bool) -> Path:
    """Download the wheel of oneccl-devel into ``directory``, and return its path.

    If ``patient`` is false, the index must answer within `ANSWER_WITHIN`, and HostError is raised at
    once within an hour after a failure.  Raises HostError if the download fails.
    """
    environment = _environment(os.environ)
    memory = _Memory(environment)
    if not patient:
        memory.check()
    progress(f"fetching {_WANTED} (32 MB)", "")
    requirements = directory / "requirements.txt"
    requirements.write_text(f"oneccl-devel=={ONECCL_VERSION} --hash=sha256:{_SHA256}\n")
    # --no-deps: its dependencies are for its examples only, and one of them does not exist.
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
        # With another index or proxy, a run tries again.  Hashed, since the settings may have passwords.
        matters = sorted(
            (k, v) for k, v in environment.items() if k.startswith("PIP_") or k.lower().endswith("_proxy")
        )
        self.settings = hashlib.sha256(json.dumps(matters).encode()).hexdigest()

    def check(self) -> None:
        """Raise HostError if a download with the same settings failed within the last hour."""
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
                hint="`cpulaunch ccl build --oneccl` tries again, and so do runs after an hour; "
                f"--ccl-transport tcp needs none. {ELSEWHERE}",
            )

    def keep(self, reason: str) -> None:
        self.path.write_text(json.dumps({"settings": self.settings, "reason": reason}))

    def forget(self) -> None:
        self.path.unlink(missing_ok=True)


def _pip() -> list[str]:
    """Return the command of this Python's pip, or of the one that its venv module has."""
    if machinery.PathFinder.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    import ensurepip

    # Debian and Fedora keep it in a separate directory.
    for place in (Path(ensurepip.__file__).with_name("_bundled"), sysconfig.get_config_var("WHEEL_PKG_DIR")):
        for wheel in sorted(Path(place).glob("pip-*.whl")) if place else ():
            return [sys.executable, str(wheel / "pip")]
    raise HostError(
        f"pip, which fetches {_WANTED}, is not installed",
        hint=f"Install it by `uv pip install pip`, or by your system's package. {ELSEWHERE}",
    )


def _environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return pip's environment: unbuffered output, and uv's settings where pip has none."""
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
    """Run pip, and return why it failed, or None.  An index must answer within ``answer_within`` seconds."""
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
