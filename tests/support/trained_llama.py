"""Train the small Llama on a few texts by the command line."""

from __future__ import annotations

from pathlib import Path

from tests.support.command_line import Command

TRAIN = ["trainer.accelerator=cpu", "trainer.max_steps=2", "trainer.limit_val_batches=1"]
TRAIN += ["trainer.num_sanity_val_steps=0", "data.batch_size=2", "data.context_length=16"]
TRAIN += ["callbacks.gradient_accumulation.global_batch_size=2", "optimizer.lr=0.1", "precision=fp32"]
TRAIN += ["scheduler=none", "logger=none", "data.paths=[notes]"]


def train_llama(command: Command, tiny_llama: Path, *words: str) -> Path:
    """Train for two steps in the current folder; return the run's folder."""
    Path("notes").mkdir(exist_ok=True)
    for index in range(20):
        Path("notes", f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    command("train", "full_finetune", f"model.name={tiny_llama}", *TRAIN, *words, code=0)
    return max(Path("outputs/full_finetune").iterdir())
