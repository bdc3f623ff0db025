# %% [markdown]
# # A custom loop under Fabric
#
# A small language model trains in a hand-written loop. Techniques are functions that change the model;
# `ExactGradient` computes a step in micro-batches. Three runs do the same training, and each run needs less
# memory than the previous run. Install: `pip install lightning-eff`.
# The example takes less than a minute on two CPU cores.

# %%
from pydoc_data import topics

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import lightning_eff
from lightning_eff import ExactGradient, Stage, recompute, tile_loss
from lightning_eff.report.live_bytes import LiveBytes

MAX_STEPS = 20
LENGTH, VOCABULARY = 64, 4096


# %%
class Model(nn.Module):
    def __init__(self, width=128, num_layers=4):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.embedding(tokens), mask=mask, is_causal=True))


words = "\n".join(topics.topics.values()).split(" ")
number = {word: index % VOCABULARY for index, word in enumerate(dict.fromkeys(words))}
tokens = torch.tensor([number[word] for word in words])
rows = tokens[: len(tokens) // (LENGTH + 1) * (LENGTH + 1)].view(-1, LENGTH + 1)


# %%
def train(changes=(), micro_batch_size=None):
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(1, verbose=False)
    model = Model()
    lightning_eff.apply(model, [*changes])  # in the order of the stages
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=32, shuffle=True))
    gradient = ExactGradient(model, fabric=fabric, micro_batch_size=micro_batch_size)

    def loss_of(batch):
        return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    with LiveBytes() as live:  # on a GPU: torch.cuda.max_memory_allocated()
        live.add(model.parameters())
        for _, batch in zip(range(MAX_STEPS), loader, strict=False):
            loss = gradient.backward(loss_of, batch)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
    return f"peak memory {live.peak_bytes / 2**20:.1f} MiB, loss {loss:.4f}"


# %%
changes = [
    (Stage.CHECKPOINT, lambda model: len(recompute(model))),
    (Stage.TILE, lambda model: len(tile_loss(model))),
]
print("plain:", train())
print("techniques:", train(changes))
print("and micro-batches of 8:", train(changes, micro_batch_size=8))
