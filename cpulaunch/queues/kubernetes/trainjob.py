"""Render a job as a TrainJob for Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1), with its own runtime.

A TrainJob refers to a TrainingRuntime, and the runtime defines the pods.  The runtime requests Open MPI
because otherwise, Trainer creates no hostfile and no ssh key (kubeflow/trainer#4025).  cpulaunch reads the
hostfile, and starts the ranks with ssh or with any MPI of the image.

Sources (for Trainer 2.3): kubeflow/trainer, pkg/apis/trainer/v1alpha1 (the fields),
pkg/runtime/framework/plugins/mpi (the hostfile, the key, and the names "node" and "launcher") and
plugins/jobset (the pods' names); kubernetes-sigs/jobset, pkg/webhooks (how long names may be).
"""

from __future__ import annotations

from typing import Any

from cpulaunch.queues.kubernetes.pods import HOME, Job, Kind, config_maps, document, launcher_pod, worker_pod

GROUP = "trainer.kubeflow.org"
VERSION = f"{GROUP}/v1alpha1"
RUNTIME = "TrainingRuntime"


def _documents(job: Job) -> list[dict[str, Any]]:
    """The TrainingRuntime, the TrainJob, and the ConfigMap with the job's files."""
    slots = {"numProcPerNode": job.slots} if job.slots else {}
    policy = {"mpiImplementation": "OpenMPI", "sshAuthMountPath": f"{HOME}/.ssh", **slots}
    launcher = launcher_pod(job, TRAINJOB)
    command = launcher["containers"][0].pop("command")
    spec = {
        "mlPolicy": {"numNodes": job.workers, "mpi": policy},
        "template": {
            "spec": {
                # The job ends with its launcher.
                "successPolicy": {"operator": "All", "targetReplicatedJobs": ["launcher"]},
                "replicatedJobs": [_workers(job), _launcher(launcher)],
            }
        },
    }
    uses = {
        "runtimeRef": {"apiGroup": GROUP, "kind": RUNTIME, "name": job.name},
        "trainer": {"numNodes": job.workers, **slots, "command": command},
    }
    runtime = document(job, VERSION, RUNTIME, job.name, spec=spec)
    return [runtime, document(job, VERSION, "TrainJob", job.name, spec=uses), *config_maps(job)]


def _workers(job: Job) -> dict[str, Any]:
    # A worker whose sshd was killed restarts under the same name, so --max-restarts can use it.
    pod = {"restartPolicy": "OnFailure", **worker_pod(job, TRAINJOB)}
    return {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}


def _launcher(pod: dict[str, Any]) -> dict[str, Any]:
    """The launcher, which is created when the workers are ready.  It runs the TrainJob's command.

    --max-restarts controls restarts, so Kubernetes must not restart the launcher.
    """
    return {
        "name": "launcher",
        "dependsOn": [{"name": "node", "status": "Ready"}],
        "template": {
            "metadata": {"labels": {f"{GROUP}/trainjob-ancestor-step": "trainer"}},
            "spec": {"backoffLimit": 0, "template": {"spec": {"restartPolicy": "Never", **pod}}},
        },
    }


TRAINJOB = Kind(
    name="TrainJob",
    operator="Kubeflow Trainer v2",
    job_label="jobset.sigs.k8s.io/jobset-name",
    role_label="jobset.sigs.k8s.io/replicatedjob-name",
    worker="node",
    container="node",
    launcher_job="{name}-launcher-0",
    suffixes=("-launcher-0-0-xxxxx", "-node-0-{last}-xxxxx"),  # with the five random characters of a pod
    documents=_documents,
)
