"""Print the file that starts a run on a cluster, for `slurm` (sbatch) or `k8s` (kubectl); start nothing.

The file starts the same command on every machine. The command reads the number of ranks from its launcher
(`trainer.devices=auto`). A restarted job resumes with `ckpt_path=auto` from its newest checkpoint, in a
folder that all machines share. The file is rendered from a template in `launch/templates/`.

Source: https://slurm.schedmd.com/sbatch.html; the schemas of Kubeflow Trainer 2.3 (TrainJob v1alpha1), JobSet
(v1alpha2) and KubeRay (RayJob v1).
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath
from typing import Any

import jinja2

from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.recipes import RecipePath
from lightning_eff.core.batch_size import check_global_batch
from lightning_eff.core.errors import EXIT_OK, EXIT_SIGUSR1, ConfigError, UsageError
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import check_local, num_devices

SHARED = "/outputs"
"""Where a pod mounts the volume for runs, unless the user sets `output_root`."""
NOTICE_S = 120
"""Seconds before a job's time limit at which SLURM sends its signal."""
_TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("lightning_eff", "launch/templates"),
    autoescape=False,  # noqa: S701 - scripts and YAML; these filters quote their strings
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
_TEMPLATES.filters |= {
    "json": partial(json.dumps, ensure_ascii=False),  # a JSON string is valid YAML
    "shell": shlex.join,
    "in_pod": partial(re.sub, r"\$\(", "$$("),  # Kubernetes replaces $(NAME) in a pod's command
}


@dataclass(frozen=True, kw_only=True)
class ClusterJob:
    """A run on several machines.

    Args:
        recipe: Name of the recipe; the job has the same name.
        words: Overrides and options of `lightning-eff train`.
        nodes: Number of machines.
        gpus: GPUs on each machine; 0 for CPUs.
        tasks: Ranks on each machine.
        image: Container image with the package.
        claim: PersistentVolumeClaim for the runs, mounted by pods on several machines at once.
        folder: Mount point of the claim in the pods.
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
        """Return the text of the job's file.

        Args:
            kind: `slurm`, a script that is requeued when its time is over or a machine fails; `trainjob` for
                Kubeflow Trainer; `jobset`, which does not need Kubeflow; or `rayjob` for KubeRay.
        """
        added = ["trainer.accelerator=gpu"] * bool(self.gpus) + ["ckpt_path=auto"]
        if kind == "rayjob":
            added += ["launch=ray", f"launch.workers={self.nodes * self.tasks}"]
            added += ["launch.gpu=true"] * bool(self.gpus)
        if kind != "slurm":
            added.append(f"output_root={self.folder}")
        # A key that the user has typed is not set again.
        typed = {word.partition("=")[0].lstrip("+") for word in self.words}
        added = [word for word in added if word.partition("=")[0] not in typed]
        return _TEMPLATES.get_template(f"{kind}.j2").render(
            job=self,
            name=self.recipe.replace("_", "-").lower(),  # a valid Kubernetes name
            words=["train", self.recipe, *self.words, *added],
            notice_s=NOTICE_S,
            stopped_code=EXIT_SIGUSR1,
        )


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    path = RecipePath.of(options.config_dir)
    # Check as `train` does, so that errors appear here and not on the cluster an hour later.
    values = compose_recipe(options.recipe, options.overrides, path).values
    check_local(values, "--kind rayjob adds it" if options.kind == "k8s" else "SLURM starts the ranks")
    job = _job(options, values["trainer"], str(values["output_root"]), path)
    check_global_batch(values, job.nodes * job.tasks)
    text = job.file("slurm" if options.kind == "slurm" else options.kind_of_job or "trainjob")
    if options.json:
        import yaml

        print_json(yaml.safe_load(text))
    else:
        sys.stdout.write(text)
    return EXIT_OK


def _job(options: argparse.Namespace, trainer: dict[str, Any], root: str, path: RecipePath) -> ClusterJob:
    """Return the job to start; the cluster's number of devices replaces the number in the recipe."""
    words = list(options.overrides)
    for key, asked in (("devices", options.gpus), ("num_nodes", options.nodes)):
        found = trainer.get(key, "auto")
        by_user = next((word for word in words if word.startswith(f"trainer.{key}=")), "")
        if by_user and found != "auto" and (key == "num_nodes" or asked):
            option = "--gpus" if key == "devices" else "--nodes"
            allowed = f"auto: {option} {asked} sets how many start"
            remedies = [f"leave {by_user} out"]
            raise ConfigError(key=f"trainer.{key}", value=found, allowed=allowed, remedies=remedies)
        # The cluster decides the number of ranks, which a number in the config might contradict.
        if found != "auto":
            words = [word for word in words if word != by_user] + [f"trainer.{key}=auto"]
    given = {"--kind": options.kind_of_job, "--image": options.image, "--claim": options.claim}
    if options.kind == "slurm":
        useless = [name for name, value in given.items() if value] + ["--json"] * options.json
        if useless:
            raise UsageError(f"launch slurm: {useless[0]} is an option of k8s only")
    root = root if any(word.startswith("output_root=") for word in words) else SHARED
    if options.kind == "k8s" and not PurePosixPath(root).is_absolute():
        allowed = f"the path at which pods mount the runs, as in {SHARED}"
        raise ConfigError(key="output_root", value=root, allowed=allowed)
    # Without GPUs, a machine starts as many ranks as the recipe has devices.
    on_cpu = {"accelerator": "cpu", "devices": trainer.get("devices", "auto")}
    named = {"image": options.image, "claim": options.claim}
    return ClusterJob(
        recipe=options.recipe,
        words=[*words, *path.options()],
        nodes=options.nodes,
        gpus=options.gpus,
        tasks=options.gpus or num_devices(on_cpu),
        folder=root,
        **{name: value for name, value in named.items() if value},
    )
