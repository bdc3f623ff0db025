# %% [markdown]
# # Long sequences
#
# A small Llama trains on one sequence at a time. Each run adds a technique that reduces what takes the most
# memory: the loss, then the activations of all blocks, then the MLP of a block. The training stays the same.
# Install: `pip install 'lightning-eff[hf]'`; no download. Takes less than a minute on two CPU cores.

# %%
from pydoc_data import topics

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_eff import EfficiencyReport, GradientCheckpointing, TiledLoss, TiledMLP

MAX_STEPS = 3
QUIET = {"logger": False, "enable_checkpointing": False}
CONTEXT_LENGTH, VOCABULARY = 4096, 8192


# %% [markdown]
# To use a model from the hub: `AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")`.


# %%
class Llama(pl.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        self.network = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=True, **sizes))

    def training_step(self, batch, batch_idx):
        return self.network(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


words = "\n".join(topics.topics.values()).split(" ")
number = {word: index % VOCABULARY for index, word in enumerate(dict.fromkeys(words))}
tokens = torch.tensor([number[word] for word in words])
rows = tokens[: len(tokens) // CONTEXT_LENGTH * CONTEXT_LENGTH].view(-1, CONTEXT_LENGTH)


# %%
def train(name, *callbacks):
    pl.seed_everything(1)
    report = EfficiencyReport(dirpath=f"outputs/long_context/{name}")
    trainer = pl.Trainer(max_steps=MAX_STEPS, callbacks=[*callbacks, report], **QUIET)
    trainer.fit(Llama(), DataLoader(rows, batch_size=1))
    peak, loss = report.report["measured"]["peak_bytes"] / 2**20, report.report["losses"][-1][1]
    return report, f"peak memory {peak:5.1f} MiB, loss {loss:.4f}: {name}"


# %%
lines = [train("plain")[1], train("tiled_loss", TiledLoss())[1]]
lines.append(train("and_checkpointing", TiledLoss(), GradientCheckpointing())[1])
everything = TiledLoss(), GradientCheckpointing(), TiledMLP(min_tokens=1024, tile_budget_mib=4)
report, line = train("and_tiled_mlp", *everything)
print(*lines, line, sep="\n")
for name in ("callbacks/tiled_loss", "callbacks/gradient_checkpointing", "callbacks/tiled_mlp"):
    print(f" {name}: {report.outcome_of(name)['did']}")
