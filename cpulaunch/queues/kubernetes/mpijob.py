"""Render a job as an MPIJob for Kubeflow's MPI operator (kubeflow.org/v2beta1).

Sources: kubeflow/mpi-operator, pkg/apis/kubeflow/v2beta1/types.go (the fields) and
pkg/controller/mpi_job_controller.go (how the operator uses them).
"""

from __future__ import annotations

from typing import Any

from cpulaunch.queues.kubernetes.pods import HOME, Job, Kind, config_maps, document, launcher_pod, worker_pod


def _documents(job: Job) -> list[dict[str, Any]]:
    """The MPIJob, and the ConfigMap with the job's files."""
    spec: dict[str, Any] = {
        "mpiImplementation": job.mpi,
        "sshAuthMountPath": f"{HOME}/.ssh",
        # Create the launcher when the workers are ready, so that it doesn't wait for them.
        "launcherCreationPolicy": "WaitForWorkersReady",
        # --max-restarts controls restarts, so Kubernetes must not restart the launcher.
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 0},
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "Never",
                "template": {"spec": launcher_pod(job, MPIJOB)},
            },
            # A worker whose sshd was killed restarts under the same name, so --max-restarts can use it.
            "Worker": {
                "replicas": job.workers,
                "restartPolicy": "OnFailure",
                "template": {"spec": worker_pod(job, MPIJOB)},
            },
        },
    }
    if job.slots:
        spec = {"slotsPerWorker": job.slots, **spec}
    return [document(job, "kubeflow.org/v2beta1", "MPIJob", job.name, spec=spec), *config_maps(job)]


MPIJOB = Kind(
    name="MPIJob",
    operator="the MPI operator",
    job_label="training.kubeflow.org/job-name",
    role_label="training.kubeflow.org/job-role",
    worker="worker",
    container="launcher",
    launcher_job="{name}-launcher",
    suffixes=("-launcher", "-worker-{last}"),
    documents=_documents,
)
