# %% [markdown]
# # Your own vision model
#
# A residual network in plain Lightning learns scikit-learn's handwritten digits, without and with plugins
# that save memory. Install: `pip install 'lightning-eff[images]'`. Takes less than a minute on two CPU cores.

# %%
import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset, random_split

from lightning_eff import AutoPrecision, EfficiencyReport, GradientCheckpointing, MicroBatch

MAX_STEPS = 60
QUIET = {"logger": False, "enable_checkpointing": False}


# %%
class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        convolutions = [nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)]
        self.layers = nn.Sequential(
            nn.GroupNorm(4, channels), nn.ReLU(), convolutions[0], nn.ReLU(), convolutions[1]
        )

    def forward(self, x):
        return x + self.layers(x)


class Net(pl.LightningModule):
    def __init__(self, channels=32, num_blocks=4):
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(num_blocks)))
        self.head = nn.Linear(channels, 10)

    def forward(self, images):
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))

    def training_step(self, batch, batch_idx):
        return cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch, batch_idx):
        self.log("accuracy", (self(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3, fused=True)


# %%
pixels, digits = (torch.from_numpy(array) for array in load_digits(return_X_y=True))
images = TensorDataset(pixels.float().view(-1, 1, 8, 8) / 16, digits)
train_images, test_images = random_split(images, [0.8, 0.2], torch.Generator().manual_seed(0))


def train(name, plugins=(), callbacks=()):
    pl.seed_everything(1)
    report = EfficiencyReport(dirpath=f"outputs/vision/{name}")
    trainer = pl.Trainer(max_steps=MAX_STEPS, plugins=[*plugins], callbacks=[*callbacks, report], **QUIET)
    model = Net()
    trainer.fit(model, DataLoader(train_images, batch_size=256, shuffle=True, drop_last=True))
    (found,) = trainer.test(model, DataLoader(test_images, batch_size=256), verbose=False)
    peak = report.report["measured"]["peak_bytes"] / 2**20
    return report, f"{name}: peak memory {peak:.1f} MiB, accuracy {found['accuracy']:.3f}"


# %%
_, plain = train("plain")
report, ours = train("ours", [AutoPrecision()], [GradientCheckpointing(), MicroBatch(micro_batch_size=64)])
print(plain, ours, sep="\n")
for name in ("precision/auto", "callbacks/gradient_checkpointing", "callbacks/micro_batch"):
    print(f" {name}: {report.outcome_of(name)['did']}")
