# %% [markdown]
# # A GAN, stopped and resumed exactly
#
# A GAN in manual optimization learns scikit-learn's handwritten digits. A run that stops within an epoch is
# resumed twice: without and with `ExactResume`, which restores the order of samples and the random numbers.
# Install: `pip install 'lightning-eff[images]'`. Takes less than a minute on two CPU cores.

# %%
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import EfficiencyReport, ExactResume, ModuleOptimizer

MAX_STEPS = 300  # Lightning counts the steps of all optimizers; a batch takes two
QUIET = {"logger": False, "enable_checkpointing": False}


# %%
def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 128), nn.LeakyReLU(0.2), nn.Linear(128, outputs))


class GAN(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = mlp(16, 64), mlp(64, 1)

    def configure_optimizers(self):
        return [torch.optim.Adam(part.parameters(), lr=5e-4) for part in (self.discriminator, self.generator)]

    def training_step(self, batch, batch_idx):
        real, noise = batch[0], torch.randn(len(batch[0]), 16, device=self.device)
        discriminating, generating = self.optimizers()
        for optimizer in (discriminating, generating):
            self.toggle_optimizer(optimizer)
            judged = self.discriminator(self.generator(noise))
            if optimizer is discriminating:
                loss = softplus(judged).mean() + softplus(-self.discriminator(real)).mean()
            else:
                loss = softplus(-judged).mean()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)


pixels = torch.from_numpy(load_digits().data).float() / 8 - 1
loader = DataLoader(TensorDataset(pixels), batch_size=64, shuffle=True)


# %%
def train(name, *callbacks, steps=MAX_STEPS, resume=None):
    torch.manual_seed(1 if resume is None else 2)  # a new process has other random numbers
    model = GAN()
    trainer = pl.Trainer(max_steps=steps, callbacks=[*callbacks], **QUIET)
    trainer.fit(model, loader, ckpt_path=resume)
    trainer.save_checkpoint(f"outputs/gan/{name}.ckpt")
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# %%
whole = train("whole")
stop = MAX_STEPS // 4 * 2  # both optimizers have stepped
train("stopped", steps=stop)
alone = train("resumed", resume="outputs/gan/stopped.ckpt")

train("exact", ExactResume(), steps=stop)
report = EfficiencyReport(dirpath="outputs/gan")
exact = train("resumed", ExactResume(), ModuleOptimizer(), report, resume="outputs/gan/exact.ckpt")

for name, weights in (("Lightning alone", alone), ("ExactResume", exact)):
    print(f"{name}: stopped after step {stop}, resumed weights differ by {(weights - whole).abs().max():.2g}")
for name in ("callbacks/exact_resume", "optimizer/module"):
    print(f" {name}: {report.outcome_of(name)['did']}")
