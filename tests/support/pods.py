"""A job whose pods are hosts of the test cluster, set up as the operator and the kubelets would do.

`Pods` are of an MPIJob, `TrainerPods` of a TrainJob.

    with Pods(documents) as pods:
        launcher = pods.start_launcher()
        pods.start_workers()

Each pod has the image's user and its /etc (ours, with the files of examples/kubernetes), the job's secret and
ConfigMaps, /dev/shm of the manifest's size, and as many CPUs of its own as it asks for.  It runs its
manifest's command with the operator's variables.  Scheduling, probes and the isolation of files are not
simulated: every pod reads this machine's files.

Sources: kubeflow/mpi-operator, pkg/controller/mpi_job_controller.go; kubeflow/trainer,
pkg/runtime/framework/plugins/mpi and plugins/jobset.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cpulaunch.queues.kubernetes.pods import SSH_PORT
from support.command import REPOSITORY, bounded, clean_environment
from support.faults import Cluster
from support.namespaces import TIMEOUT

IMAGE = REPOSITORY / "examples" / "kubernetes"
CPUSETS = Path("/sys/fs/cgroup/cpuset")

_AS_USER = ("setpriv", "--reuid=1000", "--regid=1000", "--clear-groups", "--no-new-privs",
            "--inh-caps=-all", "--bounding-set=-all")  # fmt: skip

_MAKE_POD = r"""
set -e
until [ -s /run/sshd.pid ]; do sleep 0.02; done
kill "$(cat /run/sshd.pid)"
rmdir /run/sshd
cp -a /etc "$D/etc"
cp "$IMAGE/sshd_config" "$IMAGE/ssh_config" "$D/etc/ssh/"
grep -v ':1000:' /etc/passwd >"$D/etc/passwd" || true
echo 'mpiuser:x:1000:1000::/home/mpiuser:/bin/bash' >>"$D/etc/passwd"
mkdir -p "$D/etc/mpi" "$D/etc/cpulaunch"
cp "$D/hostfile" "$D/etc/mpi/hostfile"
cp "$D"/files/* "$D/etc/cpulaunch/"
mount --bind "$D/etc" /etc
# What is installed below root's home is everybody's, as in an image.
mkdir "$D/home"
mount --rbind "$HOME" "$D/home"
mount -t tmpfs -o mode=755 tmpfs "$HOME"
for each in "$D/home"/.[!.]* "$D/home"/*; do
    [ ! -d "$each" ] || { mkdir "$HOME/${each##*/}"; mount --rbind "$each" "$HOME/${each##*/}"; }
done
mount -t tmpfs -o mode=755 tmpfs /home
mkdir -p /home/mpiuser/.ssh
cp "$D/../secret" /home/mpiuser/.ssh/id_rsa
cp "$D/../secret.pub" /home/mpiuser/.ssh/id_rsa.pub
cp "$D/../secret.pub" /home/mpiuser/.ssh/authorized_keys
chmod 644 /home/mpiuser/.ssh/*
mkdir -p /home/mpiuser/.cache/cpulaunch
mount --bind "$CACHE" /home/mpiuser/.cache/cpulaunch
chown 1000:1000 /home/mpiuser /home/mpiuser/.cache
"""


class Pods(Cluster):
    """The pods of the MPIJob in ``documents``.  Their names can't be looked up before the workers start."""

    KIND = "MPIJob"

    def __init__(self, documents: Sequence[Mapping[str, Any]]) -> None:
        self.documents = {each["kind"]: each for each in documents}
        self.maps = {
            each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"
        }
        self.name = self.documents[self.KIND]["metadata"]["name"]
        self.namespace = self.documents[self.KIND]["metadata"].get("namespace", "default")
        self.spec = self.documents[self.KIND]["spec"]
        self.launcher, self.workers, self.domain = self._names()
        super().__init__([self.launcher, *self.workers])
        both = [self.launcher, *self.workers] if self.spec.get("runLauncherAsWorker") else self.workers
        self.domain_names = {pod: f"{pod}.{self.domain}" for pod in both}
        self.sshds: list[subprocess.Popen[str]] = []
        self.cpusets: list[Path] = []

    def _names(self) -> tuple[str, list[str], str]:
        """The launcher's pod, the workers' pods, and the domain in the hostfile."""
        count = self.spec["mpiReplicaSpecs"]["Worker"]["replicas"]
        workers = [f"{self.name}-worker-{number}" for number in range(count)]
        return f"{self.name}-launcher", workers, f"{self.name}.{self.namespace}.svc"

    @property
    def slots(self) -> int:
        """The slots of each worker in the hostfile."""
        return self.spec.get("slotsPerWorker", 1)

    @property
    def mpi(self) -> str:
        """The operator's name of the MPI."""
        return self.spec["mpiImplementation"]

    def _up(self) -> None:
        super()._up()
        self._make_pods()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:  # close everything, whatever fails
            for cpuset in self.cpusets:
                stack.callback(cpuset.rmdir)
            for sshd in self.sshds:
                stack.callback(sshd.communicate, timeout=TIMEOUT)
            super().__exit__(kind, error, tb)

    def start_launcher(self) -> subprocess.Popen[str]:
        """Start the launcher's command, with the variables of the image, the manifest and the operator."""
        container = self._container(self.launcher)
        given = {each["name"]: each["value"] for each in container.get("env", ())}
        variables = {**self._image_variables(), **given, **self._operators_variables()}
        words = [word.replace("$$", "$") for word in self._launchers_command()]
        return self._start(self.launcher, words, variables)

    def start_workers(self) -> None:
        """Start the workers' command, and make their names known to the resolver."""
        for worker in self.workers:
            self.sshds.append(self._start(worker, self._container(worker)["command"], {}))
        names = "".join(
            f"{self.addresses[pod]} {self.domain_names.get(pod, pod)} {pod}\n" for pod in self.names
        )
        for pod in self.names:
            with open(self.directory / pod / "etc" / "hosts", "a") as hosts:
                hosts.write(names)

    def ssh(self, worker: str) -> subprocess.CompletedProcess[str]:
        """Reach a worker from the launcher's pod, as its user."""
        words = ["ssh", "-o", "BatchMode=yes", self.domain_names[worker], "id -u"]
        with bounded(self._start(self.launcher, words, {})) as process:
            out, err = process.communicate()
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def listens(self, worker: str) -> bool:
        """Return whether the worker's own sshd is up."""
        return self._listens(worker, SSH_PORT)

    def change_key(self, worker: str) -> None:
        """Give the worker's sshd another key than the job's."""
        key = "rm /home/mpiuser/.ssh/id_rsa && ssh-keygen -q -t ecdsa -N '' -f /home/mpiuser/.ssh/id_rsa"
        self._inside(worker, "sh", "-c", f"{key} && chmod 644 /home/mpiuser/.ssh/id_rsa")

    def cpus(self, pod: str) -> set[int]:
        """The CPUs that belong only to this pod."""
        wanted = int(self._container(pod)["resources"]["limits"]["cpu"])
        mine = sorted(os.sched_getaffinity(0))
        first = self.workers.index(pod) * wanted if pod in self.workers else 0
        return {mine[number % len(mine)] for number in range(first, first + wanted)}

    # ---- the work of the operator and the kubelets

    def _make_pods(self) -> None:
        command = ["ssh-keygen", "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "job"]
        subprocess.run([*command, "-f", str(self.directory / "secret")], check=True, timeout=TIMEOUT)
        (self.directory / "secret").chmod(0o644)
        self.directory.chmod(0o755)
        form = "{} slots={}\n" if self.mpi == "OpenMPI" else "{}:{}\n"
        hostfile = "".join(form.format(name, self.slots) for name in self.domain_names.values())
        for pod in self.names:
            at = self.directory / pod
            (at / "hostfile").write_text(hostfile)
            (at / "files").mkdir()
            for volume in self._pod(pod).get("volumes", ()):
                for file, text in (
                    self.maps[volume["configMap"]["name"]].items() if "configMap" in volume else ()
                ):
                    (at / "files" / file).write_text(text)
            own = f"{pod}.{self.domain}.cluster.local {pod}"  # as the kubelet writes it
            (at / "hosts").write_text(f"127.0.0.1 localhost\n{self.addresses[pod]} {own}\n")
            # The compiled group is in the image's home.
            cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "cpulaunch")
            cache.mkdir(parents=True, exist_ok=True)
            env = {"PATH": os.environ["PATH"], "HOME": str(Path.home()), "CACHE": str(cache),
                   "D": str(at), "IMAGE": str(IMAGE)}  # fmt: skip
            size = [f"mount -o remount,size={self._shm(pod)} /dev/shm"] if self._shm(pod) else []
            argv = self._nsenter(pod, "sh", "-c", "\n".join([_MAKE_POD, *size]))
            subprocess.run(argv, check=True, timeout=TIMEOUT, env=env)

    def _start(self, pod: str, words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
        """Start a command in the pod's cpuset or, if none can be made, bound to the pod's CPUs."""
        cpus = ",".join(map(str, sorted(self.cpus(pod))))
        enter = f"taskset -c {cpus}"
        group = CPUSETS / f"cpulaunch-test-{os.getpid()}-{pod}"
        try:
            group.mkdir()
            self.cpusets.append(group)
            (group / "cpuset.mems").write_text((CPUSETS / "cpuset.mems").read_text())
            (group / "cpuset.cpus").write_text(cpus)
            enter = f"echo $$ >{group}/cgroup.procs && exec"
        except OSError:
            pass  # cgroups of version 2, or without write permission
        line = (
            f"{enter} {shlex.join([*_AS_USER, 'env', '-i', *(f'{k}={v}' for k, v in env.items()), *words])}"
        )
        return self.start(pod, ["sh", "-c", line], directory="/home/mpiuser")

    def _image_variables(self) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        kept = {
            name: value for name, value in clean_environment().items() if name in ("PYTHONPATH", "LC_ALL")
        }
        return {**kept, "PATH": path, "HOME": "/home/mpiuser"}

    def _operators_variables(self) -> dict[str, str]:
        slots = str(self.slots)
        implementations = {
            "OpenMPI": {
                "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
                "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
                "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
                "OMPI_MCA_orte_set_default_slots": slots,
            },
            "Intel": {
                "I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile",
                "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "-o ConnectionAttempts=10",
                "I_MPI_PERHOST": slots,
            },
            "MPICH": {
                "HYDRA_HOST_FILE": "/etc/mpi/hostfile",
                "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10",
            },
        }
        return {
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
            "K_MPI_JOB_ROLE": "launcher",
            "NVIDIA_VISIBLE_DEVICES": "",
            "NVIDIA_DRIVER_CAPABILITIES": "",
            **implementations[self.mpi],
        }

    def _pod(self, pod: str) -> dict[str, Any]:
        kind = "Launcher" if pod == self.launcher else "Worker"
        return self.spec["mpiReplicaSpecs"][kind]["template"]["spec"]

    def _launchers_command(self) -> list[str]:
        return self._container(self.launcher)["command"]

    def _container(self, pod: str) -> dict[str, Any]:
        (container,) = self._pod(pod)["containers"]
        return container

    def _shm(self, pod: str) -> str | None:
        """Return the size of /dev/shm as an option of mount."""
        sizes = [
            each["emptyDir"]["sizeLimit"] for each in self._pod(pod).get("volumes", ()) if "emptyDir" in each
        ]
        return sizes[0].removesuffix("i") if sizes else None


class TrainerPods(Pods):
    """The pods that Trainer and JobSet make of the TrainJob in ``documents`` and its runtime."""

    KIND = "TrainJob"

    def _names(self) -> tuple[str, list[str], str]:
        workers = [f"{self.name}-node-0-{number}" for number in range(self.spec["trainer"]["numNodes"])]
        return f"{self.name}-launcher-0-0", workers, self.name

    @property
    def slots(self) -> int:
        return self.spec["trainer"].get("numProcPerNode", 1)

    @property
    def mpi(self) -> str:
        return self._runtime["mlPolicy"]["mpi"]["mpiImplementation"]

    @property
    def _runtime(self) -> dict[str, Any]:
        (runtime,) = (each for kind, each in self.documents.items() if kind == "TrainingRuntime")
        assert runtime["metadata"]["name"] == self.spec["runtimeRef"]["name"]
        return runtime["spec"]

    def _launchers_command(self) -> list[str]:
        return self.spec["trainer"]["command"]

    def _pod(self, pod: str) -> dict[str, Any]:
        name = "launcher" if pod == self.launcher else "node"
        (job,) = (
            each for each in self._runtime["template"]["spec"]["replicatedJobs"] if each["name"] == name
        )
        return job["template"]["spec"]["template"]["spec"]
