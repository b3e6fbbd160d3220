"""The pods of a job on Kubernetes, and the differences between operators.

Sources: kubernetes.io, "Control CPU Management Policies on the Node" (pods with exclusive cores) and
"Volumes: emptyDir" (/dev/shm).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

IMPLEMENTATIONS = {"intel": "Intel", "mpich": "MPICH", "openmpi": "OpenMPI"}
"""Value of the setting ``mpi.flavour`` → the operator's name of the MPI."""

FILES_AT = "/etc/cpulaunch"
"""The directory in the pods with the job's script and settings."""

MAX_FILES = 1 << 20
"""The largest size of a ConfigMap in bytes (kubernetes.io, "ConfigMaps")."""

MAX_NAME = 63
"""The largest number of characters in a pod's name, which is a host name (RFC 1123)."""

USER, HOME, SSH_PORT = 1000, "/home/mpiuser", 2222
"""User id, home directory and sshd's port in the images of examples/kubernetes."""

POD_SECURITY = {
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "runAsNonRoot": True,
    "seccompProfile": {"type": "RuntimeDefault"},
}
SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
"""Security contexts that fulfil the level "restricted" (kubernetes.io, "Pod Security Standards")."""

LAUNCHER_MEMORY, MEMORY_PER_WORKER = 1024, 8
"""Memory of the launcher in MiB: its own, and that of the ssh process for each worker."""

_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]+)?)([KMGTPE]i|[kMGTPE])?")
_UNITS = {"": 1} | {
    unit: base**power
    for base, units in ((1000, ("k", "M", "G", "T", "P", "E")), (1024, ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")))
    for power, unit in enumerate(units, 1)
}


@dataclass(frozen=True)
class Job:
    """The contents of a job."""

    name: str
    image: str
    command: Sequence[str]
    namespace: str | None = None
    workers: int = 1
    mpi: str = "Intel"  # a value of IMPLEMENTATIONS
    slots: int | None = None  # ranks of each worker; None derives the number from the worker's topology
    cpus: int | None = None  # of each worker; None sets no request and no limit
    memory: str | None = None  # of each worker, such as 64Gi; None sets no request and no limit
    files: Mapping[str, str] = field(default_factory=dict)  # name → text, mounted in all pods at FILES_AT
    variables: Mapping[str, str] = field(default_factory=dict)  # the launcher's environment
    secrets: Sequence[str] = ()  # names of secrets whose variables the launcher gets
    volumes: Mapping[str, str] = field(default_factory=dict)  # path → claim, mounted in all pods


@dataclass(frozen=True)
class Kind:
    """The names that an operator uses for its jobs and their parts."""

    name: str  # the kind of a job
    operator: str
    job_label: str  # the pods' label with the name of the job
    role_label: str  # the pods' label with "launcher" or ``worker``
    worker: str
    container: str  # of the launcher's pod
    launcher_job: str  # the Job that owns the launcher's pod
    suffixes: tuple[str, str]  # of the longest pod names; {last} is the number of the last worker
    documents: Callable[[Job], list[dict[str, Any]]]  # renders a job, with its files last

    def why_not_a_name(self, name: str, workers: int) -> str | None:
        """Why ``name`` is not valid as the name of a job with a service (RFC 1035); None if it is."""
        if not re.fullmatch("[a-z]([-a-z0-9]*[a-z0-9])?", name):
            return "only a-z, 0-9 and - are valid; it must begin with a letter, and not end with -"
        longest = MAX_NAME - max(len(suffix.format(last=workers - 1)) for suffix in self.suffixes)
        return f"it has {len(name)} characters; the maximum is {longest}" if len(name) > longest else None


def document(job: Job, version: str, kind: str, name: str, **content: Any) -> dict[str, Any]:
    """A Kubernetes object in the job's namespace.  ``version`` is its apiVersion."""
    namespace = {"namespace": job.namespace} if job.namespace else {}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, **namespace}, **content}


def config_maps(job: Job) -> list[dict[str, Any]]:
    """The ConfigMap with the job's files; an empty list if it has no files."""
    files = dict(job.files)
    return [document(job, "v1", "ConfigMap", files_of(job.name), data=files)] if files else []


def files_of(name: str) -> str:
    """The name of the ConfigMap with the files of the job ``name``."""
    return f"{name}-files"


def bytes_of(quantity: str) -> int | None:
    """The bytes of a quantity such as ``64Gi``; None if it is not a quantity (kubernetes.io, "Quantity")."""
    match = _QUANTITY.fullmatch(quantity)
    return int(float(match[1]) * _UNITS[match[2] or ""]) if match else None


def launcher_pod(job: Job, kind: Kind) -> dict[str, Any]:
    """The pod of the launcher, which runs the job's command."""
    memory = f"{LAUNCHER_MEMORY + MEMORY_PER_WORKER * job.workers}Mi"
    container = {
        "name": kind.container,
        "image": job.image,
        "command": [_literal(word) for word in job.command],
        **_resources("1", memory),
    }
    if job.variables:
        container["env"] = [{"name": name, "value": _literal(value)} for name, value in job.variables.items()]
    if job.secrets:
        container["envFrom"] = [{"secretRef": {"name": name}} for name in job.secrets]
    return _pod(job, container)


def worker_pod(job: Job, kind: Kind) -> dict[str, Any]:
    """The pod of each worker, which runs an sshd."""
    container = {
        "name": kind.worker,
        "image": job.image,
        "command": ["/usr/sbin/sshd", "-De"],
        # When sshd has answered, the worker is ready, and its name can be resolved.
        "startupProbe": {"tcpSocket": {"port": SSH_PORT}, "periodSeconds": 2, "failureThreshold": 30},
    }
    shm: dict[str, Any] = {"medium": "Memory"}
    if job.memory is not None:
        container |= _resources(str(job.cpus), job.memory)
        shm["sizeLimit"] = half_of(job.memory)
    pod = _pod(job, container, {"name": "shm", "emptyDir": shm}, {"name": "shm", "mountPath": "/dev/shm"})
    pod["topologySpreadConstraints"] = [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {kind.job_label: job.name, kind.role_label: kind.worker}},
        }
    ]
    return pod


def half_of(memory: str) -> str:
    """Half of a quantity of memory: Linux's default limit for /dev/shm, which reserves no memory."""
    mebibytes = (bytes_of(memory) or 0) >> 21
    return f"{mebibytes >> 10}Gi" if mebibytes % 1024 == 0 else f"{mebibytes}Mi"


def _resources(cpus: str, memory: str) -> dict[str, Any]:
    """Requests and limits of a container.

    If they are equal, and the CPUs whole, the kubelet's static policy gives the pod exclusive CPUs.
    """
    return {
        "resources": {
            "requests": {"cpu": cpus, "memory": memory},
            "limits": {"cpu": cpus, "memory": memory},
        }
    }


def _pod(
    job: Job, container: dict[str, Any], volume: dict[str, Any] | None = None, mount: Any = None
) -> dict[str, Any]:
    volumes, mounts = ([volume], [mount]) if volume else ([], [])
    if job.files:
        volumes.append({"name": "files", "configMap": {"name": files_of(job.name)}})
        mounts.append({"name": "files", "mountPath": FILES_AT, "readOnly": True})
    for number, (path, claim) in enumerate(job.volumes.items()):
        volumes.append({"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": claim}})
        mounts.append({"name": f"volume-{number}", "mountPath": path})
    pod: dict[str, Any] = {
        "securityContext": POD_SECURITY,
        "containers": [
            container | {"securityContext": SECURITY} | ({"volumeMounts": mounts} if mounts else {})
        ],
    }
    return pod | ({"volumes": volumes} if volumes else {})


def _literal(text: str) -> str:
    """Escape ``text``, because Kubernetes replaces $(NAME) and $$."""
    return text.replace("$", "$$")


def as_yaml(found: Sequence[Mapping[str, Any]]) -> str:
    """The documents as YAML, with multi-line texts in blocks."""
    import yaml  # costs 15 ms

    class Dumper(yaml.SafeDumper):
        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        style = "|" if "\n" in value else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]
    return yaml.dump_all(found, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=1000)
