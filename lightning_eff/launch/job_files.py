"""Write the file with which a cluster starts a run: a script for SLURM, YAML for Kubernetes.

Each starts the same command on every machine. How many ranks there are the command reads from what started
it (`trainer.devices=auto`), and a restarted job goes on by `ckpt_path=auto` from its newest checkpoint, in a
folder that all machines share.

Source: https://slurm.schedmd.com/sbatch.html; the schemas of Kubeflow Trainer 2.3 (TrainJob v1alpha1), JobSet
(v1alpha2) and KubeRay (RayJob v1).
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_eff.core.errors import EXIT_SIGUSR1

SHARED = "/outputs"
"""Where a pod has the volume of the runs, unless `output_root` says otherwise."""
PORT = 29500
RESTARTS = 3
NOTICE_S = 120
"""Seconds before a job's time is over at which SLURM says so."""


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on several machines.

    Args:
        recipe: Name of the recipe, and of the job.
        words: Overrides and options of `lightning-eff train`.
        nodes: Number of machines.
        gpus: On each machine; 0 for CPUs.
        tasks: Ranks on each machine.
        image: Container image with the package.
        claim: PersistentVolumeClaim with the runs, for pods on several machines at once.
        folder: Where pods mount it.
    """

    recipe: str
    words: Sequence[str] = field(default_factory=tuple)
    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    image: str = "lightning-eff:latest"
    claim: str = "outputs"
    folder: str = SHARED

    @property
    def name(self) -> str:
        """Return the recipe's name as Kubernetes takes it."""
        return self.recipe.replace("_", "-").lower()

    def _train(self, *words: str) -> list[str]:
        device = ["trainer.accelerator=gpu"] if self.gpus else []
        chosen = {word.partition("=")[0].lstrip("+") for word in self.words}
        added = [word for word in (*device, "ckpt_path=auto", *words) if word.partition("=")[0] not in chosen]
        return ["train", self.recipe, *self.words, *added]

    def _pod_words(self) -> list[str]:
        """Return the words of a pod's command, in which Kubernetes would replace $(NAME)."""
        return [word.replace("$(", "$$(") for word in self._train(f"output_root={self.folder}")]

    def sbatch(self) -> str:
        """Return a script for `sbatch`: requeued when its time is over, or when a machine fails."""
        gpus = f"#SBATCH --gpus-per-node={self.gpus}\n" if self.gpus else ""
        command = shlex.join(["srun", "--kill-on-bad-exit=1", "lightning-eff", *self._train()])
        return (
            "#!/bin/bash\n"
            f"#SBATCH --job-name={self.recipe}\n"
            f"#SBATCH --nodes={self.nodes}\n"
            f"#SBATCH --ntasks-per-node={self.tasks}\n"
            f"{gpus}"
            f"#SBATCH --signal=USR1@{NOTICE_S}\n"
            "#SBATCH --requeue\n"
            "#SBATCH --open-mode=append\n"
            f"{command}\n"
            "code=$?\n"
            f"# Stopped by the signal, with a checkpoint, {NOTICE_S} s before the time is over.\n"
            f'if [ "$code" = {EXIT_SIGUSR1} ]; then scontrol requeue "$SLURM_JOB_ID"; fi\n'
            'exit "$code"\n'
        )

    def train_job(self) -> dict[str, Any]:
        """Return a TrainJob of Kubeflow Trainer, which sets torchrun's variables `PET_*`."""
        patch = {
            "manager": "lightning-eff",
            "trainingRuntimeSpec": _in_pods({
                "volumes": self._volumes(),
                "containers": [{"name": "node", "volumeMounts": self._mounts()}],
            }),
        }  # fmt: skip
        trainer: dict[str, Any] = {
            "image": self.image,
            "command": ["torchrun"],
            "args": ["-m", "lightning_eff", *self._pod_words()],
            "numNodes": self.nodes,
            "numProcPerNode": self.tasks,
            **({"resourcesPerNode": self._resources()} if self.gpus else {}),
        }
        spec = {"runtimeRef": {"name": "torch-distributed"}, "trainer": trainer, "runtimePatches": [patch]}
        return self._object("trainer.kubeflow.org/v1alpha1", "TrainJob", spec)

    def job_set(self) -> dict[str, Any]:
        """Return a JobSet, which restarts all machines when one fails; needs no Kubeflow."""
        rank = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
        variables = {
            "PET_NNODES": str(self.nodes), "PET_NPROC_PER_NODE": str(self.tasks),
            "PET_MASTER_ADDR": f"{self.name}-node-0-0.{self.name}", "PET_MASTER_PORT": str(PORT),
        }  # fmt: skip
        container = self._container(
            ["torchrun", "-m", "lightning_eff", *self._pod_words()],
            env=[
                *({"name": key, "value": value} for key, value in variables.items()),
                {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": rank}}},
            ],
        )
        pods = {"restartPolicy": "Never", "volumes": self._volumes(), "containers": [container]}
        job = {
            "completionMode": "Indexed", "completions": self.nodes, "parallelism": self.nodes,
            "backoffLimit": 0, "template": {"spec": pods},
        }  # fmt: skip
        spec = {
            "network": {"enableDNSHostnames": True, "subdomain": self.name},
            "failurePolicy": {"maxRestarts": RESTARTS},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        }
        return self._object("jobset.x-k8s.io/v1alpha2", "JobSet", spec)

    def ray_job(self) -> dict[str, Any]:
        """Return a RayJob of KubeRay: a cluster of its own, which ends with the run."""
        words = ["launch=ray", f"launch.workers={self.nodes * self.tasks}"]
        words += ["launch.gpu=true"] if self.gpus else []
        command = ["lightning-eff", *self._train(*words, f"output_root={self.folder}")]
        head = {"volumes": self._volumes(), "containers": [self._container()]}
        pods = {"volumes": self._volumes(), "containers": [self._container(has_gpus=True)]}
        group = {
            "groupName": "workers", "replicas": self.nodes, "minReplicas": self.nodes,
            "maxReplicas": self.nodes, "rayStartParams": {}, "template": {"spec": pods},
        }  # fmt: skip
        # The head starts nothing: its one pod would be a machine without GPUs.
        cluster = {
            "headGroupSpec": {"rayStartParams": {"num-cpus": "0"}, "template": {"spec": head}},
            "workerGroupSpecs": [group],
        }
        spec = {
            "entrypoint": shlex.join(command), "shutdownAfterJobFinishes": True, "backoffLimit": 0,
            "rayClusterSpec": cluster,
        }  # fmt: skip
        return self._object("ray.io/v1", "RayJob", spec)

    def _object(self, version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
        return {"apiVersion": version, "kind": kind, "metadata": {"name": self.name}, "spec": spec}

    def _volumes(self) -> list[dict[str, Any]]:
        """Return the runs, and shared memory: a container has 64 MB of it, NCCL and loaders need more."""
        runs = {"name": "outputs", "persistentVolumeClaim": {"claimName": self.claim}}
        return [runs, {"name": "shm", "emptyDir": {"medium": "Memory"}}]

    def _mounts(self) -> list[dict[str, str]]:
        return [{"name": "outputs", "mountPath": self.folder}, {"name": "shm", "mountPath": "/dev/shm"}]  # noqa: S108

    def _resources(self) -> dict[str, Any]:
        return {"limits": {"nvidia.com/gpu": self.gpus}}

    def _container(
        self, command: Sequence[str] = (), *, has_gpus: bool | None = None, env: Sequence[Any] = ()
    ) -> dict[str, Any]:
        found: dict[str, Any] = {"name": "node", "image": self.image, "volumeMounts": self._mounts()}
        found |= {"command": list(command), "env": list(env)} if command else {}
        has_gpus = bool(command) if has_gpus is None else has_gpus
        return found | ({"resources": self._resources()} if self.gpus and has_gpus else {})


def _in_pods(pod: dict[str, Any]) -> dict[str, Any]:
    """Return a change of a runtime's pods, which it keeps in a JobSet."""
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    return {"template": {"spec": {"replicatedJobs": [job]}}}
