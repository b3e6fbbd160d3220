"""``cpulaunch submit --to kubernetes``: an MPIJob that calls ``cpulaunch run``, for kubectl to create."""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any

from cpulaunch.cli.files import keep
from cpulaunch.cli.main import say
from cpulaunch.cli.options import Parser
from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.errors import HostError, UsageError
from cpulaunch.manifests import mpijob
from cpulaunch.manifests.mpijob import FILES_AT, IMPLEMENTATIONS, MAX_FILES, Job
from cpulaunch.plan.instances import are_wanted
from cpulaunch.wording import cannot_run, counted

NAME = "kubernetes"
"""What --to calls it."""

TIMEOUT = 60.0
"""Seconds that kubectl may take."""

LEAST_MEMORY = 1 << 28
"""Bytes below which a worker's memory is a slip, such as ``64`` for ``64Gi``."""

LONGEST_IMAGE = 255
"""Characters of an image's name."""

SETTINGS = "cpulaunch.yaml"
_LABEL = re.compile("[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile("[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?")  # what claims and secrets can be called
_IMAGE = re.compile(
    r"([a-zA-Z0-9][-.a-zA-Z0-9]*(:[0-9]+)?/)?"  # the registry
    r"[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)*"
    r"(:[a-zA-Z0-9_][-.\w]{0,127})?(@[a-zA-Z0-9+._-]+:[0-9a-fA-F]{32,})?",
    re.ASCII,
)
"""What pods' images can be called (github.com/distribution/reference, reference.go)."""
_TAKEN = ("/dev/shm", "/etc/mpi", FILES_AT, f"{mpijob.HOME}/.ssh")
_OF_THE_IMAGE = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/usr/local")


def add_options(parser: Parser) -> set[str]:
    """The options that are for Kubernetes alone, and their names."""
    group = parser.add_argument_group("Kubernetes (--to kubernetes)")
    options = {
        "--image": ("I", "image of all pods: examples/kubernetes/Dockerfile makes one"),
        "--namespace": ("N", "namespace of the job; default: kubectl's"),
        "--cpu": ("N", "whole CPUs of each worker, which are its own where kubelets have the static policy"),
        "--memory": ("Q", "memory of each worker, such as 64Gi, of which /dev/shm may take half"),
        "--volume": ("CLAIM:/PATH", "mount a persistent volume claim in all pods (repeat)"),
        "--secret": ("NAME", "environment variables for the job, from a secret (repeat)"),
    }
    for name, (metavar, text) in options.items():
        repeated = {"action": "append", "default": []} if name in ("--volume", "--secret") else {}
        group.add_argument(name, metavar=metavar, help=text, **repeated)  # type: ignore[arg-type]
    return set(options)


def refuse_options(options: argparse.Namespace, queue: str) -> None:
    """Raise UsageError where an option for Kubernetes was given for another queue."""
    for name in ("image", "namespace", "cpu", "memory", "volume", "secret"):
        if getattr(options, name):
            why = f"--{name} is for --to {NAME}, and this job is for {queue}"
            raise UsageError(why, hint=f"leave it out, or add --to {NAME}")


def submit(
    options: argparse.Namespace, config: Config, sbatch: Sequence[str], run: list[str], rest: list[str]
) -> int:
    """Print the job, keep it or have kubectl create it.

    ``sbatch`` are options that Slurm shares, ``run`` those of `cpulaunch run`, and ``rest`` the program.
    """
    job = _job(options, config, sbatch, run, rest)
    documents = mpijob.documents(job)
    text = mpijob.as_yaml(documents)
    if options.output:
        keep(options.output, text)
    if options.dry_run:
        print(text, end="")
        return 0
    for document in documents:
        _create(document, job)
    where = f" -n {job.namespace}" if job.namespace else ""
    files = f" configmap/{mpijob.files_of(job.name)}" if job.files else ""
    say(f"MPIJob {job.name}: `kubectl get pods{where} -l {mpijob.JOB_LABEL}={job.name}` shows its pods")
    say(f"`kubectl logs -f{where} job/{job.name}-launcher` shows what it prints, once its workers are ready")
    say(f"`kubectl delete{where} mpijob/{job.name}{files}` ends and removes it")
    return 0


def _job(
    options: argparse.Namespace, config: Config, sbatch: Sequence[str], run: list[str], rest: list[str]
) -> Job:
    if not rest or (rest[0] in ("-m", "--module") and len(rest) < 2):
        raise UsageError(
            "no script to run", hint="cpulaunch submit --to kubernetes [OPTIONS] train.py [ARGS…]"
        )
    if not options.image:
        raise UsageError(
            "--image is missing: which image do the pods run?",
            hint="examples/kubernetes/Dockerfile makes one; docs/kubernetes.md shows how",
        )
    if not _IMAGE.fullmatch(options.image) or len(options.image) > LONGEST_IMAGE:
        raise UsageError(
            f"--image {options.image!r} is not an image's name", hint="such as registry.example/me/train:1"
        )
    if options.namespace is not None and not _LABEL.fullmatch(options.namespace):
        raise UsageError(
            f"--namespace {options.namespace!r} is not a namespace's name",
            hint="up to 63 of a-z, 0-9 and -; `kubectl get namespaces` lists them",
        )
    _refuse_settings(config)
    workers = _workers(config, sbatch)
    cpus, memory = _resources(options)
    slots = _slots(config, workers)
    if cpus is not None:
        _demand_cpus(config, workers, slots, cpus)
    files, program = _program(rest, options.no_python)
    if config.file:
        run = [
            "--config-file",
            f"{FILES_AT}/{SETTINGS}",
            *(w for w in run if not w.startswith("--config-file=")),
        ]
        files[SETTINGS] = _text(config.file)
    _check_size(files, sum(len(name) + len(text.encode()) for name, text in files.items()))
    return Job(
        name=_name(sbatch, rest, workers),
        image=options.image,
        command=["cpulaunch", "run", *run, *program],
        namespace=options.namespace,
        workers=workers,
        mpi=IMPLEMENTATIONS.get(config.mpi.flavour, IMPLEMENTATIONS["intel"]),
        slots=slots,
        cpus=cpus,
        memory=memory,
        files=files,
        variables=_variables(config),
        secrets=_secrets(options.secret),
        volumes=_volumes(options.volume),
    )


def _refuse_settings(config: Config) -> None:
    """UsageError for settings that name hosts, or launchers that don't reach them."""
    for setting in (Config.hosts.hostfile, Config.hosts.list, Config.hosts.exclude):
        if config.value(setting):
            raise UsageError(
                f"{config.where(setting)}: the MPI operator names the hosts", hint="--nodes says how many"
            )
    if config.launcher not in ("auto", "mpirun"):
        raise UsageError(
            f"{config.where(Config.launcher)}: {config.launcher} starts nothing on the workers",
            hint="leave it out",
        )


def _workers(config: Config, sbatch: Sequence[str]) -> int:
    given = {name: value for name, _, value in (word.partition("=") for word in sbatch)}
    for name in given:
        if name not in ("--nodes", "--job-name"):
            raise UsageError(
                f"{name} is for --to slurm", hint="--output F keeps the job's YAML, for `kubectl create -f F`"
            )
    nnodes = config.hosts.nnodes
    text = given.get("--nodes") or ("1" if nnodes == "all" else str(nnodes.most))
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise UsageError(f"--nodes {text!r} is not a number of workers", hint="such as --nodes 4")
    if nnodes != "all" and nnodes.least > int(text):
        raise UsageError(
            f"{config.where(Config.hosts.nnodes)}: {nnodes} of {text} workers", hint="leave one of them out"
        )
    return int(text)


def _slots(config: Config, workers: int) -> int | None:
    """Ranks of each worker, where the user has said how many."""
    ppn, total = config.hosts.nproc_per_node, config.hosts.nproc
    if ppn != "auto":
        return ppn
    if total == "auto":
        return None
    if total % workers:
        raise UsageError(
            f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')} can't be divided evenly over "
            f"{counted(workers, 'worker')}",
            hint="-ppn N says how many each has",
        )
    return total // workers


def _demand_cpus(config: Config, workers: int, slots: int | None, cpus: int) -> None:
    """UsageError where what a worker is to run needs more CPUs than it is to get."""
    if config.hosts.oversubscribe:
        return
    if are_wanted(config):
        what, cores, count = "instance", Config.instances.cores_per_instance, config.instances.count
        number: Setting[Any] = Config.instances.count
        slots = ceil(count / workers) if isinstance(count, int) else None
    else:
        what, cores = "rank", Config.cpu.cores_per_rank
        by_host = config.hosts.nproc_per_node != "auto"
        number = Config.hosts.nproc_per_node if by_host else Config.hosts.nproc
    per_rank = config.value(cores)
    each = per_rank if isinstance(per_rank, int) else 1
    needed = (slots or 1) * each
    of_cores = f" of {counted(each, 'core')}" if each > 1 else ""
    if needed > cpus:
        where = config.where(number if slots else cores)
        raise UsageError(
            f"{where}: {counted(slots or 1, what)}{of_cores} on each worker, and --cpu {cpus} gives it "
            f"{counted(cpus, 'CPU')}",
            hint=f"--cpu {needed} or more, and twice as many where cores have two hyperthreads",
        )


def _resources(options: argparse.Namespace) -> tuple[int | None, str | None]:
    cpu, memory = options.cpu, options.memory
    if cpu is None and memory is None:
        return None, None
    if cpu is None or memory is None:
        raise UsageError(
            f"--{'memory' if cpu is None else 'cpu'} without --{'cpu' if cpu is None else 'memory'}",
            hint="a pod gets CPUs of its own only if it names both; without both, it may use all of its node",
        )
    if not re.fullmatch("[1-9][0-9]{0,4}", cpu):
        raise UsageError(
            f"--cpu {cpu!r} is not a number of whole CPUs",
            hint="only whole ones can be a pod's own: such as --cpu 16",
        )
    size = mpijob.bytes_of(memory)
    if size is None:
        raise UsageError(
            f"--memory {memory!r} is not a quantity", hint="such as 64Gi (of 2^30 bytes) or 64G (of 10^9)"
        )
    if size < LEAST_MEMORY:
        raise UsageError(f"--memory {memory} is {size} bytes, too few to train in", hint="such as 64Gi")
    return int(cpu), memory


def _name(sbatch: Sequence[str], rest: Sequence[str], workers: int) -> str:
    """The job's name: the user's, else the script's."""
    given = next((word.partition("=")[2] for word in sbatch if word.startswith("--job-name=")), None)
    program = rest[1] if rest[0] in ("-m", "--module") else Path(rest[0]).stem
    name = re.sub("[^a-z0-9]+", "-", program.lower()).strip("-") if given is None else given
    if why := mpijob.why_not_a_name(name, workers):
        raise UsageError(f"no job can be called {name!r}: {why}", hint="--job-name gives it a name")
    return name


def _program(rest: list[str], no_python: bool) -> tuple[dict[str, str], list[str]]:
    """The files that go with the job, and its program with its arguments, as `cpulaunch run` takes them."""
    if no_python or rest[0] in ("-m", "--module") or rest[0].startswith("/"):
        return {}, rest  # in the image
    script = Path(rest[0])
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "no such script here"
        raise UsageError(f"{rest[0]}: {what}", hint="a script in the image is named by its whole path")
    if not re.fullmatch(r"[-._A-Za-z0-9]{1,253}", script.name):
        raise UsageError(
            f"{script.name!r}: a ConfigMap takes files only whose names have letters, digits, -, _ and .",
            hint="rename it, or put it in the image",
        )
    text = _text(script)
    if left := sorted(_beside(text, script.parent)):
        say(f"warning: {rest[0]} imports {', '.join(left)}, which the pods don't get: put it in the image")
    return {script.name: text}, [f"{FILES_AT}/{script.name}", *rest[1:]]


def _beside(text: str, directory: Path) -> Iterator[str]:
    """The modules in ``directory`` that the script imports."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return  # which Python says better
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module}
    for name in {name.partition(".")[0] for name in names}:
        if (directory / f"{name}.py").is_file() or (directory / name / "__init__.py").is_file():
            yield name


def _text(path: Path) -> str:
    try:
        _check_size([path.name], path.stat().st_size)  # before it is read
        text = path.read_bytes().decode()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}", hint="check its permissions") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", hint="save it as UTF-8, or put it in the image") from None
    return text


def _check_size(names: Iterable[str], size: int) -> None:
    if size > MAX_FILES:
        raise UsageError(
            f"{' and '.join(names)}: {size:,} bytes are too many for a ConfigMap, which takes {MAX_FILES:,}",
            hint="put the script in the image, and name it by its path there",
        )


def _variables(config: Config) -> dict[str, str]:
    """The variables of this environment that are settings of the job."""
    names = {name for given in config.given.values() for name in given.origin.variables}
    return {name: config.environ[name] for name in sorted(names) if name in config.environ}


def _secrets(names: Sequence[str]) -> Sequence[str]:
    for name in names:
        if not _SUBDOMAIN.fullmatch(name):
            raise UsageError(
                f"--secret {name!r} is not a secret's name", hint="`kubectl get secrets` lists them"
            )
    return names


def _volumes(given: Sequence[str]) -> dict[str, str]:
    volumes: dict[str, str] = {}
    for text in given:
        claim, _, path = text.rstrip("/").partition(":")
        if not _SUBDOMAIN.fullmatch(claim) or not re.fullmatch("/[^:]+", path):
            raise UsageError(
                f"--volume {text!r} is not like CLAIM:/PATH", hint="`kubectl get pvc` lists claims"
            )
        if path in volumes or path in _TAKEN:
            there = volumes.get(path, "something of the job's own")
            why = f"--volume {text}: {there} is mounted there already"
            raise UsageError(why, hint="each volume needs a path of its own")
        if path in _OF_THE_IMAGE:
            why = f"--volume {text}: it would hide the image's own {path}"
            raise UsageError(why, hint=f"--volume {claim}:/data mounts it where nothing is")
        volumes[path] = claim
    return volumes


def _create(document: Mapping[str, Any], job: Job) -> None:
    """Have kubectl create one object.  Raises HostError, and leaves no half of a job."""
    try:
        _kubectl(["create", "-f", "-"], job, mpijob.as_yaml([document]))
    except HostError:
        if document["kind"] != "MPIJob":
            where = ["-n", job.namespace] if job.namespace else []
            _kubectl(["delete", *where, "--ignore-not-found", f"mpijob/{job.name}"], job)
        raise


def _kubectl(words: Sequence[str], job: Job, text: str = "") -> None:
    try:
        done = subprocess.run(
            ["kubectl", *words], input=text, capture_output=True, text=True, timeout=TIMEOUT
        )
    except OSError as e:
        hint = "--dry-run prints the job, and --output F keeps it, for `kubectl create -f F` elsewhere"
        raise HostError(cannot_run("kubectl", e), hint=hint) from None
    except subprocess.TimeoutExpired:
        raise HostError(
            f"kubectl has not answered within {TIMEOUT:.0f} s", hint="`kubectl version` asks the cluster"
        ) from None
    if done.returncode:
        lines = [
            line for line in done.stderr.splitlines() if not re.match(r"[EWI][0-9]{4} ", line)
        ]  # its log
        said = "\n".join(lines).strip().removeprefix("error: ")
        raise HostError(f"kubectl: {said}", hint=_remedy(said, job))


def _remedy(said: str, job: Job) -> str | None:
    """What to do about an error of kubectl."""
    if "no matches for kind" in said:
        return "the MPI operator is not installed: docs/kubernetes.md shows how"
    if "already exists" in said:
        left = f"mpijob/{job.name} configmap/{mpijob.files_of(job.name)}"
        return f"--job-name gives this one another name; `kubectl delete {left}` removes the other"
    if "unknown field" in said:
        return "the MPI operator there is older than version 0.6"
    if "connection refused" in said:
        return "`kubectl config get-contexts` shows which clusters it knows"
    return None
