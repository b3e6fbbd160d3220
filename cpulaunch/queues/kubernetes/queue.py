"""The queue Kubernetes: it renders, submits and follows jobs."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from cpulaunch.config.config import Config
from cpulaunch.config.setting import Setting
from cpulaunch.errors import HostError, UsageError
from cpulaunch.plan.instances import are_wanted
from cpulaunch.queues.base import Job, Option, Queue, Submitted, Tell, call
from cpulaunch.queues.kubernetes import pods
from cpulaunch.queues.kubernetes.follow import follow
from cpulaunch.queues.kubernetes.mpijob import MPIJOB
from cpulaunch.queues.kubernetes.patch import merge, read_patch
from cpulaunch.queues.kubernetes.pods import FILES_AT, IMPLEMENTATIONS, MAX_FILES, Kind
from cpulaunch.queues.kubernetes.trainjob import TRAINJOB
from cpulaunch.wording import counted

MIN_MEMORY = 1 << 28
"""The smallest memory of a worker in bytes.  A smaller value is a mistake, such as ``64`` for ``64Gi``."""

SUFFIX = 3
"""The number of random bytes in the default name of a job."""

SETTINGS = "cpulaunch.yaml"
_RESERVED_PATHS = ("/dev/shm", "/etc/mpi", FILES_AT, f"{pods.HOME}/.ssh")
_IMAGE_PATHS = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr", "/usr/local")


@dataclass(frozen=True, kw_only=True)
class _Submitted(Submitted):
    namespace: str  # empty for kubectl's default
    documents: tuple[str, ...]  # KIND/NAME of each created object


class Kubernetes(Queue):
    """Renders a job as an operator's kind of job and a ConfigMap, and creates both with kubectl."""

    kind: Kind
    too_old: str
    program = "kubectl"
    follows = True
    shares_files = False
    help = """\
A script without a leading / is sent with the job.

example:
  cpulaunch submit --to kubernetes --image I --nodes 4 --cpu 16 --memory 64Gi train.py
"""
    options = (
        Option("--nodes", "-N", "N", "number of workers, one on each node; default: 1"),
        Option("--job-name", "-J", "NAME", "name of the job; default: the script's, with a random suffix"),
        Option("--image", "", "I", "image of all pods: examples/kubernetes/Dockerfile makes one"),
        Option("--namespace", "", "N", "namespace of the job; default: kubectl's"),
        Option("--cpu", "", "N",
               "whole CPUs of each worker; exclusive if kubelets have the static policy"),
        Option("--memory", "", "Q", "memory of each worker, such as 64Gi; /dev/shm may take half of it"),
        Option("--volume", "", "CLAIM:/PATH", "mount a persistent volume claim in all pods (repeatable)"),
        Option("--secret", "", "NAME", "environment variables for the job, from a secret (repeatable)"),
        Option("--patch", "", "FILE", "change the job as this YAML says, a JSON merge patch (repeatable)"),
    )  # fmt: skip

    def prepare(self, job: Job) -> Job:
        _refuse_settings(job.config)
        return job

    def render(self, job: Job) -> str:
        found = {each["kind"]: each for each in self.kind.documents(_contents(job, self.kind))}
        kinds = [self.kind.name, *(kind for kind in found if kind not in (self.kind.name, "ConfigMap"))]
        for name, value in job.options:
            if name == "--patch":
                kind, changes = read_patch(value, kinds)
                found[kind] = merge(found[kind], changes)
        return pods.as_yaml([*found.values()])

    def submit(self, document: str, tell: Tell) -> Submitted:
        import yaml  # costs 15 ms

        documents = list(yaml.safe_load_all(document))
        job = next(each["metadata"] for each in documents if each["kind"] == self.kind.name)
        name, namespace = job["name"], job.get("namespace", "")
        words = [f"{each['kind'].lower()}/{each['metadata']['name']}" for each in documents]
        # The operator deletes a runtime only after its jobs.
        ordered = tuple(sorted(words, key=lambda word: not word.startswith(f"{self.kind.name.lower()}/")))
        title = f"{self.kind.name} {name}"
        submitted = _Submitted(name, title, namespace=namespace, documents=ordered)
        context = self._kubectl(["config", "current-context"], submitted).strip()
        place = f"namespace {namespace}" if namespace else "kubectl's namespace"
        tell(f"creating {title} in {place}, context {context}")
        for number, each in enumerate(documents):
            try:
                self._kubectl(["create", "-f", "-"], submitted, pods.as_yaml([each]))
            except HostError:  # delete the objects created so far
                if number:
                    where = ["-n", namespace] if namespace else []
                    created = [word for word in ordered if word in words[:number]]
                    self._kubectl(["delete", *where, "--ignore-not-found", *created], submitted)
                raise
        return submitted

    def watch(self, job: Submitted) -> Sequence[str]:
        assert isinstance(job, _Submitted)
        where = f" -n {job.namespace}" if job.namespace else ""
        launcher = self.kind.launcher_job.format(name=job.id)
        return (
            f"`kubectl get pods{where} -l {self.kind.job_label}={job.id}` shows its pods",
            f"`kubectl logs -f{where} job/{launcher}` shows what it prints, once its workers are ready",
            f"`kubectl delete{where} {' '.join(job.documents)}` ends and removes it",
        )

    def follow(self, job: Submitted, tell: Tell) -> int:
        assert isinstance(job, _Submitted)
        return follow(self.kind, job.id, job.namespace, tell)

    def _kubectl(self, words: Sequence[str], job: _Submitted, text: str = "") -> str:
        hint = "use --output F to write the job to a file, and `kubectl create -f F` on another machine"
        done = call(["kubectl", *words], text=text, hint=hint)
        if done.returncode:
            lines = [
                line for line in done.stderr.splitlines() if not re.match(r"[EWI][0-9]{4} ", line)
            ]  # without log lines
            error = "\n".join(lines).strip().removeprefix("error: ")
            raise HostError(f"kubectl: {error}", hint=self._remedy(error, job))
        return done.stdout

    def _remedy(self, error: str, job: _Submitted) -> str | None:
        """The hint for an error message of kubectl, or None."""
        if "no matches for kind" in error:
            return f"{self.kind.operator} is not installed: docs/kubernetes.md shows how"
        if "already exists" in error:
            documents = " ".join(job.documents)
            return f"set another --job-name, or remove the other job: `kubectl delete {documents}`"
        if "unknown field" in error:
            return f"{self.kind.operator} in this cluster is {self.too_old}"
        if "connection refused" in error:
            return "`kubectl config get-contexts` lists the clusters"
        return None


class MpiOperator(Kubernetes):
    """MPIJobs."""

    name = "kubernetes"
    title = "Kubernetes"
    kind = MPIJOB
    too_old = "older than version 0.6"


class Trainer(Kubernetes):
    """TrainJobs."""

    name = "trainjob"
    title = "Kubeflow Trainer"
    kind = TRAINJOB
    too_old = "older than version 2.0"


KUBERNETES, TRAINER = MpiOperator(), Trainer()


def _contents(job: Job, kind: Kind) -> pods.Job:
    asked, config, run = job.asked, job.config, job.run
    image = asked.get("--image")
    if not image:
        raise UsageError(
            "--image is missing",
            hint="build an image from examples/kubernetes/Dockerfile as docs/kubernetes.md shows",
        )
    workers = _workers(job)
    cpus, memory = _resources(asked.get("--cpu"), asked.get("--memory"))
    slots = _slots(config, workers)
    if cpus is not None:
        _demand_cpus(config, workers, slots, cpus)
    files, program = _program(job)
    if config.file:
        run = tuple(word for word in run if not word.startswith("--config-file="))
        run = ("--config-file", f"{FILES_AT}/{SETTINGS}", *run)
        files[SETTINGS] = _text(config.file)
    _check_size(files, sum(len(name) + len(text.encode()) for name, text in files.items()))
    return pods.Job(
        name=_name(job, kind, workers),
        image=image,
        command=["cpulaunch", "run", *run, *program],
        namespace=asked.get("--namespace"),
        workers=workers,
        mpi=IMPLEMENTATIONS.get(config.mpi.flavour, IMPLEMENTATIONS["intel"]),
        slots=slots,
        cpus=cpus,
        memory=memory,
        files=files,
        variables=_variables(config),
        secrets=[value for name, value in job.options if name == "--secret"],
        volumes=_volumes([value for name, value in job.options if name == "--volume"]),
    )


def _refuse_settings(config: Config) -> None:
    """Raise UsageError for settings that name hosts, or a launcher that can't start ranks on workers."""
    for setting in (Config.hosts.hostfile, Config.hosts.list, Config.hosts.exclude):
        if config.value(setting):
            raise UsageError(
                f"{config.where(setting)}: the operator selects the hosts",
                hint="omit it, and set their number with --nodes",
            )
    if config.launcher not in ("auto", "mpirun", "ssh"):
        raise UsageError(
            f"{config.where(Config.launcher)}: {config.launcher} can't start ranks on the workers",
            hint="omit it",
        )


def _workers(job: Job) -> int:
    config, nnodes = job.config, job.config.hosts.nnodes
    text = job.asked.get("--nodes") or ("1" if nnodes == "all" else str(nnodes.most))
    if not re.fullmatch("[1-9][0-9]{0,4}", text):
        raise UsageError(f"--nodes {text!r} is not a number of workers", hint="such as --nodes 4")
    if nnodes != "all" and nnodes.least > int(text):
        raise UsageError(
            f"{config.where(Config.hosts.nnodes)}: {nnodes} of {text} workers", hint="omit one of the two"
        )
    return int(text)


def _slots(config: Config, workers: int) -> int | None:
    """The number of ranks per worker if the user has set it, else None.

    Raises UsageError if the workers would have different numbers.
    """
    ppn, total = config.hosts.nproc_per_node, config.hosts.nproc
    if ppn != "auto":
        return ppn
    if total == "auto":
        return None
    if total % workers:
        raise UsageError(
            f"{config.where(Config.hosts.nproc)}: {counted(total, 'rank')} can't be divided evenly over "
            f"{counted(workers, 'worker')}",
            hint="set the number of ranks per worker with -ppn N",
        )
    return total // workers


def _demand_cpus(config: Config, workers: int, slots: int | None, cpus: int) -> None:
    """Raise UsageError if the ranks or instances of a worker need more CPUs than ``cpus``."""
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
            hint=f"use --cpu {needed} or more, or twice as many if cores have two hyperthreads",
        )


def _resources(cpu: str | None, memory: str | None) -> tuple[int | None, str | None]:
    if cpu is None and memory is None:
        return None, None
    if cpu is None or memory is None:
        raise UsageError(
            f"--{'memory' if cpu is None else 'cpu'} without --{'cpu' if cpu is None else 'memory'}",
            hint="set both to get exclusive CPUs, or neither to use whole nodes",
        )
    if not re.fullmatch("[1-9][0-9]{0,4}", cpu):
        raise UsageError(
            f"--cpu {cpu!r} is not a number of whole CPUs",
            hint="only whole CPUs can be exclusive to a pod, such as --cpu 16",
        )
    size = pods.bytes_of(memory)
    if size is None:
        raise UsageError(
            f"--memory {memory!r} is not a quantity", hint="such as 64Gi (of 2^30 bytes) or 64G (of 10^9)"
        )
    if size < MIN_MEMORY:
        raise UsageError(f"--memory {memory} is too small: {size} bytes", hint="such as 64Gi")
    return int(cpu), memory


def _name(job: Job, kind: Kind, workers: int) -> str:
    """The name that the user gave the job, or the script's name with a random suffix.  Raises UsageError."""
    stem = re.sub("[^a-z0-9]+", "-", job.title.lower()).strip("-")
    name = job.asked.get("--job-name") or f"{stem}-{secrets.token_hex(SUFFIX)}"
    if why := kind.why_not_a_name(name, workers):
        raise UsageError(f"{name!r} is no valid name of a job: {why}", hint="set a name with --job-name")
    return name


def _program(job: Job) -> tuple[dict[str, str], Sequence[str]]:
    """The files to send with the job, and the program and its arguments in the launcher's pod.

    Raises UsageError if the script can't be sent.
    """
    rest = job.words
    if job.no_python or rest[0] in ("-m", "--module") or rest[0].startswith("/"):
        return {}, rest  # the program is in the image
    script = Path(rest[0])
    if not script.is_file():
        what = "is a directory" if script.is_dir() else "no such script here"
        raise UsageError(f"{rest[0]}: {what}", hint="use the absolute path for a script in the image")
    return {script.name: _text(script)}, [f"{FILES_AT}/{script.name}", *rest[1:]]


def _text(path: Path) -> str:
    try:
        _check_size([path.name], path.stat().st_size)  # before reading it
        text = path.read_bytes().decode()
    except OSError as e:
        raise UsageError(f"{path}: cannot be read: {e.strerror}", hint="check its permissions") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text", hint="save it as UTF-8, or put it in the image") from None
    return text


def _check_size(names: Iterable[str], size: int) -> None:
    if size > MAX_FILES:
        raise UsageError(
            f"{' and '.join(names)}: {size:,} bytes are too many for a ConfigMap; at most {MAX_FILES:,} fit",
            hint="put the script in the image, and use its absolute path",
        )


def _variables(config: Config) -> dict[str, str]:
    """The variables in the user's environment from which a setting of the job comes."""
    names = {name for given in config.given.values() for name in given.origin.variables}
    return {name: config.environ[name] for name in sorted(names) if name in config.environ}


def _volumes(texts: Sequence[str]) -> dict[str, str]:
    volumes: dict[str, str] = {}
    for text in texts:
        claim, _, path = text.rstrip("/").partition(":")
        if not claim or not re.fullmatch("/[^:]+", path):
            raise UsageError(
                f"--volume {text!r} is not like CLAIM:/PATH", hint="`kubectl get pvc` lists claims"
            )
        if path in volumes or path in _RESERVED_PATHS:
            owner = volumes.get(path, "cpulaunch's own volume")
            why = f"--volume {text}: {owner} is mounted at {path}"
            raise UsageError(why, hint="use another path")
        if path in _IMAGE_PATHS:
            why = f"--volume {text}: it would hide the image's {path}"
            raise UsageError(why, hint=f"use another path, such as --volume {claim}:/data")
        volumes[path] = claim
    return volumes
