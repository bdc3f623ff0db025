# %% [markdown]
# # Two devices
#
# Two CPU processes train one model. Each process has a full copy (DDP) or a shard (FSDP2), as on a cluster.
# Install: `pip install lightning-eff`. Takes less than a minute on two CPU cores.
#
# Lightning starts this file again for the second process, which does not work in a notebook. In a notebook,
# save the code as a file, and run `!python two_devices.py`.

# %%
import os
import sys

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import FSDP2, EfficiencyReport, GradientAccumulation

MAX_STEPS = 20
QUIET = {"logger": False, "enable_checkpointing": False}


# %%
class Encoder(pl.LightningModule):
    def __init__(self, width=256, num_layers=4):
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)

    def training_step(self, batch, batch_idx):
        (x,) = batch
        return (self.layers(x) - x.mean(1, keepdim=True)).square().mean()  # learns the mean of a sequence

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def train(name, strategy):
    pl.seed_everything(1, verbose=False)
    data = TensorDataset(torch.randn(256, 16, 256))
    report = EfficiencyReport(dirpath=f"outputs/two_devices/{name}")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=MAX_STEPS,
        callbacks=[GradientAccumulation(global_batch_size=32), report],
        **QUIET,
    )
    trainer.fit(Encoder(), DataLoader(data, batch_size=8))  # a step: 8 samples x 2 devices x 2 batches
    peak, loss = report.report["measured"]["peak_bytes"] / 2**20, report.report["losses"][-1][1]
    if trainer.is_global_zero:
        print(f"{name}: peak memory {peak:.1f} MiB on each device, loss {loss:.4f}")
    return trainer, report


# %%
if __name__ == "__main__":
    train("ddp", "ddp")
    trainer, report = train("fsdp2", FSDP2())
    if trainer.is_global_zero:
        print(report.outcome_of("strategy/fsdp2")["did"])
    sys.stdout.flush()
    os._exit(0)  # PyTorch's gloo can abort a process that ends by itself (docs/troubleshooting.md)
