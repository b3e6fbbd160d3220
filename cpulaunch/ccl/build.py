"""Builds missing parts of the group, and the kernels, in a cache directory.

The launcher and ``cpulaunch ccl build`` call it; ranks don't.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cpulaunch.ccl import installed
from cpulaunch.ccl.compiler import Compiler, check_headers, compile_units, find_compiler, link, units_of
from cpulaunch.ccl.fetch import ELSEWHERE, Progress, fetch_wheel
from cpulaunch.ccl.installed import Built, Part
from cpulaunch.ccl.tools import CompilerError
from cpulaunch.errors import HostError


def build(
    progress: Progress = lambda step, detail: None,
    *,
    force: bool = False,
    oneccl: bool = False,
    patient: bool = True,
) -> Built:
    """Return the group for the installed torch, after building its missing parts.

    A lock makes concurrent builds wait for each other.  A part is moved into the cache when it is complete.
    A build reuses the objects of an interrupted build.  ``oneccl`` adds the module with oneCCL, which has to
    be downloaded.  If ``patient`` is false, the build fails within seconds if the network does not answer,
    and at once if it did not answer within the last hour.

    Raises HostError if torch, a compiler, Python's headers, the network, or a writable cache is missing.
    """
    kinds = ("core", "layer", *(("oneccl",) if oneccl else ()))
    there = _build_missing(kinds, progress, force=force, patient=patient)
    if there.built is None:
        raise HostError(f"the ccl process group was built, but cannot be used: {there.problem}")
    return there.built


def build_kernels(
    progress: Progress = lambda step, detail: None, *, force: bool = False, patient: bool = True
) -> Part:
    """Return the kernels for the installed torch, building them like the group if they are missing.

    If ``patient`` is false and this compiler has failed with these sources before, HostError is raised at
    once.
    """
    there = installed.state()
    if force or there.part("kernels") is None:
        failure = _failure_file(there, check(there, ("kernels",)))
        if not patient:
            _raise_again(failure)
        try:
            there = _build_missing(("kernels",), progress, force=force)
        except CompilerError as e:
            failure.write_text(json.dumps(str(e).splitlines()))
            raise
        failure.unlink(missing_ok=True)
    kernels = there.part("kernels")
    if kernels is None:
        raise HostError(f"the kernels were built, but cannot be used: {there.kernels_problem}")
    return kernels


def _failure_file(there: installed.State, compiler: Compiler) -> Path:
    """Return the cache's file that records a failure with these sources, this torch and this compiler."""
    made_of = json.dumps([there.wanted["kernels"], compiler.path, compiler.identity])
    return installed.cache_directory() / f"failed-{hashlib.sha256(made_of.encode()).hexdigest()[:12]}.json"


def _raise_again(failure: Path) -> None:
    try:
        lines = json.loads(failure.read_text())
    except (OSError, ValueError):
        return
    raise HostError(
        f"{' '.join(line.strip() for line in lines[:2])} (an earlier run tried it; "
        "`cpulaunch ccl build` tries again)"
    )


def _build_missing(
    wanted: Sequence[str], progress: Progress, *, force: bool, patient: bool = True
) -> installed.State:
    def missing(there: installed.State) -> list[str]:
        return [kind for kind in wanted if force or there.part(kind) is None]

    there = installed.state()
    if not missing(there):
        return there
    compiler = check(there, wanted)
    try:
        with _lock(progress):
            there = installed.state()
            if kinds := missing(there):  # another process may just have built it
                _build(kinds, there, compiler, progress, patient=patient)
    except OSError as e:
        raise _not_kept(installed.cache_directory(), e.strerror or str(e)) from None
    return installed.state()


def check(there: installed.State, kinds: Sequence[str] = ("core", "layer")) -> Compiler:
    """Return the compiler for these parts.  Raises HostError if they can't be built."""
    if there.torch is None or not installed.is_supported(there.torch):
        of_group = "layer" in kinds
        raise HostError(
            f"{'the ccl process group' if of_group else 'the kernels'} cannot be built: {there.problem}",
            hint="Use `--backend gloo`." if of_group else "Use `--engine torch`.",
        )
    if "oneccl" in kinds and os.uname().machine != "x86_64":
        raise HostError(
            f"oneCCL exists for x86_64 only, this is {os.uname().machine}", hint="Use `--ccl-transport tcp`."
        )
    found = find_compiler()
    if "layer" in kinds:
        check_headers()
    _check_private(installed.cache_directory())
    return found


def _build(
    kinds: list[str], there: installed.State, compiler: Compiler, progress: Progress, *, patient: bool
) -> None:
    root = installed.cache_directory()
    for left in root.glob("building-*"):  # of builds that were killed, as this build has the lock
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=root) as temporary:
        work = Path(temporary)
        oneccl = _oneccl(work, progress, patient=patient) if "oneccl" in kinds else work
        digests = {kind: installed.sources_digest(kind) for kind in kinds}
        units = {kind: units_of(kind, there, oneccl) for kind in kinds}
        objects = compile_units(units, compiler, root / "objects", work, progress)
        if any(installed.sources_digest(kind) != digests[kind] for kind in kinds):
            raise HostError(
                "cpulaunch's C++ sources were changed while they were compiled", hint="Build the group again."
            )
        progress("linking", "")
        made: dict[str, Part] = {}
        for kind in kinds:  # the core first: the others link to it
            part = _part(kind, there, compiler, work / kind)
            part.directory.mkdir()
            core = made.get("core") or there.part("core")
            link(part, compiler, objects[kind], core, there, oneccl)
            if kind == "oneccl":
                shutil.copy(oneccl / "LICENSE.txt", part.directory / "LICENSE-oneCCL.txt")
            installed.write_record(part)
            made[kind] = part
        progress("loading it", "")
        _check_loading(made, there)
        for kind, part in made.items():
            _publish(part, root / _name(kind, part), work / f"replaced-{kind}")
    shutil.rmtree(root / "objects", ignore_errors=True)


def _part(kind: str, there: installed.State, compiler: Compiler, directory: Path) -> Part:
    return Part(
        kind,
        directory,
        "cache",
        compiler=compiler.identity,
        glibc=installed.glibc_version(),
        **there.wanted[kind],
    )


def _name(kind: str, part: Part) -> str:
    if kind == "kernels":
        return f"kernels-torch-{part.torch}-abi{part.abi}-{part.machine}-{part.sources}"
    if kind == "layer":
        return f"torch-{part.torch}-{part.python}-abi{part.abi}-{part.machine}-{part.sources}"
    return f"{kind}-{part.machine}-{part.sources}"


def _publish(part: Part, target: Path, aside: Path) -> None:
    if target.exists():
        target.rename(aside)
    part.directory.rename(target)


@contextmanager
def _lock(progress: Progress) -> Iterator[None]:
    root = installed.cache_directory()
    _make_private(root)
    with open(root / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("waiting for another build", "")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make_private(root: Path) -> None:
    """Create the cache's directories so that other users can't write there, whatever the umask is."""
    root.mkdir(parents=True, exist_ok=True)
    for each in (root, root.parent):
        if each.stat().st_uid == os.geteuid():
            each.chmod(each.stat().st_mode & ~0o022)
    _check_private(root)


def _check_private(root: Path) -> None:
    """Raise HostError if others may write to a directory of the cache that isn't this user's."""
    for each in (root, root.parent):
        try:
            is_anothers = each.exists() and each.stat().st_uid != os.geteuid()
        except OSError as e:
            raise _not_kept(root, e.strerror or str(e)) from None
        if is_anothers and installed.writable_by_others(each):
            raise _not_kept(root, f"others may write to {each}")


def _not_kept(root: Path, why: str) -> HostError:
    hint = "Set XDG_CACHE_HOME to a directory of yours."
    return HostError(f"compiled files can't be kept in {root}: {why}", hint=hint)


def _check_loading(made: dict[str, Part], there: installed.State) -> None:
    """Load the linked libraries in a separate process.  Raises HostError if that fails."""
    known = (
        made if "kernels" in made else {kind: there.part(kind) for kind in ("core", "layer", "oneccl")} | made
    )
    parts = [known.get(kind) for kind in installed.FILES]
    core, layer, oneccl, kernels = (str(part.file) if part else "" for part in parts)
    program = (
        "import sys, ctypes; from pathlib import Path; from cpulaunch.ccl import core, load\n"
        "if sys.argv[1]: core.Core(Path(sys.argv[1]))\n"
        "if sys.argv[3]: ctypes.CDLL(sys.argv[3])\n"
        "if sys.argv[1] and sys.argv[2]: load.load_layer(Path(sys.argv[2]))\n"
        "if sys.argv[4]: import torch; torch.ops.load_library(sys.argv[4])"
    )
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    tried = subprocess.run(
        [sys.executable, "-c", program, core, layer, oneccl, kernels],
        capture_output=True, text=True, env=environment, timeout=300,
    )  # fmt: skip
    if tried.returncode != 0:
        why = (tried.stderr.strip().splitlines() or [f"exit code {tried.returncode}"])[-1]
        raise CompilerError(f"the compiled libraries do not load: {why}", hint=ELSEWHERE)


def _oneccl(work: Path, progress: Progress, *, patient: bool = True) -> Path:
    """Unpack oneCCL's headers, static library and licence from its wheel, and return their directory."""
    path = fetch_wheel(work, progress, patient=patient)
    target = work / "oneccl-wheel"
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            _, _, inside = name.partition(".data/data/")
            if inside.startswith("include/"):
                place = target / inside
            elif inside == "lib/ccl/cpu/lib/libccl.a" or name.endswith("dist-info/LICENSE.txt"):
                place = target / Path(name).name
            else:
                continue
            if not name.endswith("/"):
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(wheel.read(name))
    return target
