"""Write the file with which a cluster starts a run: a script for SLURM, YAML for Kubernetes.

Each starts the same command on every machine. How many ranks there are the command reads from what started
it (`trainer.devices=auto`), and a restarted job resumes by `ckpt_path=auto` from its newest checkpoint, in a
folder that all machines share. The files are the templates in `templates/`.

Source: https://slurm.schedmd.com/sbatch.html; the schemas of Kubeflow Trainer 2.3 (TrainJob v1alpha1), JobSet
(v1alpha2) and KubeRay (RayJob v1).
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jinja2

from lightning_eff.core.errors import EXIT_SIGUSR1

SHARED = "/outputs"
"""Where a pod has the volume of the runs, unless `output_root` says otherwise."""
NOTICE_S = 120
"""Seconds before a job's time is over at which SLURM says so."""
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lightning_eff", "launch/templates"),
    autoescape=False,  # noqa: S701 - scripts and YAML, whose texts are quoted by these filters
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {
    "json": partial(json.dumps, ensure_ascii=False),  # YAML reads a text of JSON
    "shell": shlex.join,
    "in_pod": partial(re.sub, r"\$\(", "$$("),  # Kubernetes replaces $(NAME) in a pod's command
}


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
    words: Sequence[str] = ()
    nodes: int = 1
    gpus: int = 0
    tasks: int = 1
    image: str = "lightning-eff:latest"
    claim: str = "outputs"
    folder: str = SHARED

    def file(self, kind: str) -> str:
        """Return the text of the file.

        Args:
            kind: `slurm`, a script that is requeued when its time is over or a machine fails; `trainjob` of
                Kubeflow Trainer; `jobset`, which needs no Kubeflow; or `rayjob` of KubeRay.
        """
        added = ["trainer.accelerator=gpu"] * bool(self.gpus) + ["ckpt_path=auto"]
        if kind == "rayjob":
            added += ["launch=ray", f"launch.workers={self.nodes * self.tasks}"]
            added += ["launch.gpu=true"] * bool(self.gpus)
        if kind != "slurm":
            added.append(f"output_root={self.folder}")
        typed = {word.partition("=")[0].lstrip("+") for word in self.words}
        added = [word for word in added if word.partition("=")[0] not in typed]
        return _TEMPLATES.get_template(f"{kind}.j2").render(
            job=self,
            name=self.recipe.replace("_", "-").lower(),  # as Kubernetes takes it
            words=["train", self.recipe, *self.words, *added],
            notice_s=NOTICE_S,
            stopped_code=EXIT_SIGUSR1,
        )
