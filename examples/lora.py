# %% [markdown]
# # LoRA on a Hugging Face model
#
# A small Llama trains all weights on Python source code, then its adapters on the English of Python's help.
# Install: `pip install 'lightning-eff[hf]'`; no download. Takes less than a minute on two CPU cores.

# %%
import argparse
from pathlib import Path
from pydoc_data import topics

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_eff import EfficiencyReport, PeftAdapter

MAX_STEPS = 100
QUIET = {"logger": False, "enable_checkpointing": False}


# %% [markdown]
# To use a model from the hub: `AutoModelForCausalLM.from_pretrained("HuggingFaceTB/SmolLM2-135M")`, with
# `AutoTokenizer.from_pretrained` of the same name. Here each byte is a token.


# %%
class Llama(pl.LightningModule):
    def __init__(self):
        super().__init__()
        sizes = {
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
        }
        self.network = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes))

    def training_step(self, batch, batch_idx):
        return self.network(input_ids=batch, labels=batch).loss

    def test_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=2e-3, fused=True)


def rows(text, length=64):
    tokens = torch.tensor(list(text.encode()))
    return tokens[: len(tokens) // length * length].view(-1, length)


source = rows(Path(argparse.__file__).read_text(encoding="utf-8"))
prose = rows("\n".join(topics.topics.values()))


# %%
def train(name, model, text, *callbacks):
    report = EfficiencyReport(dirpath=f"outputs/lora/{name}")
    trainer = pl.Trainer(max_steps=MAX_STEPS, callbacks=[*callbacks, report], **QUIET)
    trainer.fit(model, DataLoader(text, batch_size=4, shuffle=True))
    trainer.save_checkpoint(f"outputs/lora/{name}.ckpt")
    (found,) = trainer.test(model, DataLoader(prose[:128], batch_size=32), verbose=False)
    measured, file = report.report["measured"], Path(f"outputs/lora/{name}.ckpt")
    sizes = measured["peak_bytes"], measured["optimizer_state_bytes"], file.stat().st_size
    peak, state, saved = (f"{size / 2**20:.1f} MiB" for size in sizes)
    line = f"{name}: peak memory {peak}, optimizer state {state}, checkpoint {saved}"
    return report, f"{line}; loss on English {found['loss']:.2f}"


# %%
pl.seed_everything(1)
model = Llama()
_, full = train("full", model, source)
report, lora = train("lora", model, prose[128:], PeftAdapter(options={"r": 8, "lora_alpha": 16}))
print(full, lora, sep="\n")
print(report.outcome_of("callbacks/peft_adapter")["did"])
