"""Everything except the DeepSpeed strategies works without the packages triton and deepspeed."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = """
import sys
from importlib.machinery import PathFinder
HIDDEN = ("triton", "deepspeed")
class Without:
    # hides these packages and their metadata
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else PathFinder.find_spec(name, path, target)
    def find_distributions(self, *context):
        found = PathFinder.find_distributions(*context)
        return (each for each in found if each.metadata["Name"] not in HIDDEN)
sys.meta_path[sys.meta_path.index(PathFinder)] = Without()

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader
import lightning_eff as eff
from lightning_eff.core.errors import EnvironmentLacksError

for name in eff.__all__:
    getattr(eff, name)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(128, 128), nn.GELU()) for _ in range(3)))
    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

gemm = eff.TritonGemm(min_features=128)
callbacks = [gemm, eff.GradientCheckpointing(), eff.TorchCompile(backend="eager")]
callbacks += [eff.MicroBatch(micro_batch_size=2)]
quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
trainer = pl.Trainer(max_steps=2, accelerator="cpu", devices=1, callbacks=callbacks, **quiet)
trainer.fit(Net(), DataLoader(torch.randn(8, 128), batch_size=4))
print("steps", trainer.global_step, "|", gemm.outcome().did)
for strategy in (lambda: eff.DeepSpeedZero(stage=2), lambda: eff.ZeroFabric(stage=2)):
    try:
        strategy()
    except EnvironmentLacksError as error:
        print("rejected", str(error).replace(chr(10), " "))
assert not set(HIDDEN) & set(sys.modules)
"""


@pytest.mark.slow
def test_a_run_without_triton_and_deepspeed(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "ignore", "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    steps, *rejected = [line for line in done.stdout.splitlines() if line.startswith(("steps", "rejected"))]
    assert steps.startswith("steps 2 | ")
    assert len(rejected) == 2
    for line in rejected:
        assert "needs deepspeed, which cannot be imported" in line
        assert "try: pip install 'lightning-eff[deepspeed]'" in line


def test_the_engines_are_extras_in_addition_to_the_full_set() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for name in ("deepspeed", "triton"):
        (extra,) = project["optional-dependencies"][name]
        assert f"{extra}; sys_platform == 'linux'" in project["dependencies"]
