"""The module of a user and a recipe that trains it, as texts; tests add classes and settings."""

MODULE = """
import lightning.pytorch as pl, torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

class Net(pl.LightningModule):
    def __init__(self, width: int = 2):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(8, width), torch.nn.Dropout(0.5), torch.nn.ReLU(), torch.nn.Linear(width, 1)
        )

    def forward(self, batch):
        return self.layers(batch[0])

    def training_step(self, batch, batch_idx):
        loss = self(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self(batch).square().mean(), batch_size=len(batch[0]))

class Data(pl.LightningDataModule):
    def rows(self):
        generator = torch.Generator().manual_seed(0)
        return DataLoader(TensorDataset(torch.randn(21, 8, generator=generator)), batch_size=4)

    train_dataloader = val_dataloader = test_dataloader = predict_dataloader = rows
"""
RECIPE = """
defaults:
  - run
  - trainer: default
  - optimizer: adamw
  - scheduler: none
  - precision: fp32
  - strategy: auto
  - checkpoint_io: durable
  - logger: none
  - monitors: [efficiency_report]
  - callbacks: []
  - _self_
model: {_target_: my_own.Net, width: 3}
data: {_target_: my_own.Data}
trainer: {max_steps: 6, accelerator: cpu}
"""
PICKY = """
from lightning_eff.models.gpt import GPT

class Picky(GPT):
    def training_step(self, batch, batch_idx):
        if self.hparams['dropout'] == 0.5:
            raise RuntimeError('no dropout, please')
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log('mine', float('nan') if self.hparams['dropout'] else 0.5)
"""
"""A model with which some runs of a sweep fail, and some log NaN."""
