"""Run recipes: predicted memory next to `max_memory_allocated`, and the speed of training.

    python benchmarks/gpu/training.py planner speed --out results

Nothing else should be timed while `planner` runs: its processes share the GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from _suite import ROOT, Measurement, Setting, SkippedError, main, require
from lightning_eff.core.errors import EXIT_ENVIRONMENT

GPT_170M = (
    "baseline", "precision=bf16_mixed", "model.d_model=1024", "model.num_layers=12", "model.num_heads=16",
    "data.context_length=1024", "data.vocab_size=16384", "data.batch_size=16",
)  # fmt: skip
GPT2_SMALL = ("model.d_model=768", "model.num_heads=12", *GPT_170M[5:], "model.num_layers=12")
TINY = (
    "precision=fp32", "model.d_model=16", "model.num_layers=1", "model.num_heads=2", "data.context_length=16",
    "data.vocab_size=300", "data.batch_size=2", "trainer.accelerator=cpu",
)  # fmt: skip
CHECKPOINTING = "+callbacks=gradient_checkpointing"
SETTINGS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "checkpointing": (CHECKPOINTING,),
    "checkpointing, offload": (CHECKPOINTING, "callbacks.gradient_checkpointing.policy=offload"),
    "micro-batches of 2": ("+callbacks=micro_batch", "callbacks.micro_batch.micro_batch_size=2"),
    "triton_gemm": ("+callbacks=triton_gemm",),
    "8-bit AdamW": ("optimizer=adamw_8bit",),
    "in backward": ("optimizer=in_backward", "trainer.gradient_clip_val=null"),
    "compile": ("+callbacks=torch_compile",),
    "float32": ("precision=fp32",),
    "tiled loss": ("+callbacks=tiled_loss",),
    "tiled MLP": ("+callbacks=tiled_mlp",),
    "LoRA, checkpointing": ("+callbacks=[peft_adapter,gradient_checkpointing]",),
}
"""What is measured next to its prediction, by the overrides of the recipe."""
TRAIN = (
    "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0", "logger=none",
    "~monitors.text_sample", "~monitors.model_checkpoint",
)  # fmt: skip
RUNS_AT_ONCE = 4
"""Trainings that share the GPU in `planner`: each counts its own bytes."""
LIMIT_S = 150
PREDICTED = Path(__file__).with_name("predicted.json")
"""Written by predict.py."""
SPEED = ("tokens_per_s", "mfu", "batch_time_s", "data_wait_share", "peak_bytes")


def run_command(words: Sequence[str]) -> dict[str, Any]:
    """Run a verb with `--json` in a process of its own, and return what it prints."""
    folder = Path(tempfile.gettempdir()) / "lightning_eff_suite"  # has the tokens, for later calls too
    command = [sys.executable, "-m", "lightning_eff", *words, f"output_root={folder}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=ROOT)  # noqa: S603, PLW1510
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("error:")] or [done.stderr]
        message = f"{words[0]}: exit code {done.returncode}: {lines[-1][-300:]}"
        raise SkippedError(message) if done.returncode == EXIT_ENVIRONMENT else RuntimeError(message)
    return json.loads(done.stdout[done.stdout.index("{") :])


def planner(setting: Setting) -> dict[str, Measurement]:
    """Return a case for each setting of the recipe; their processes start now, some at once."""
    require("hydra", "omegaconf", "beartype")
    pool = ThreadPoolExecutor(RUNS_AT_ONCE)
    names = ["baseline"] if setting.smoke else list(SETTINGS)
    futures = {name: pool.submit(check_prediction, name, setting) for name in names}
    return {name: future.result for name, future in futures.items()}


def check_prediction(name: str, setting: Setting) -> dict[str, Any]:
    """Train some steps, and return the peak that was predicted and the one that was measured."""
    words = [*(("baseline", *TINY) if setting.smoke else GPT_170M), *SETTINGS[name]]
    if setting.smoke:
        predicted = run_command(["plan", *words])["peak"]
    else:
        predicted = json.loads(PREDICTED.read_text(encoding="utf-8"))[name]
    measured = run_command(["train", *words, *TRAIN, "trainer.max_steps=4"])["measured"]
    found = {"predicted": predicted["peak_bytes"], "measured": measured["peak_bytes"]}
    if not found["predicted"]:
        return found | {"error": f"not predicted: {predicted['reason']}"}
    ratio = found["predicted"] / found["measured"] if found["measured"] else None
    return found | {"ratio": ratio, "measured_by": measured["peak_measured"], "assumed": predicted["assumed"]}


def speed(setting: Setting) -> dict[str, Measurement]:
    """Return a case for each recipe whose speed is measured, at the size of GPT-2 small."""
    require("hydra", "omegaconf", "beartype")
    return {recipe: partial(train, recipe, setting) for recipe in ("baseline", "lm", "fast")}


def train(recipe: str, setting: Setting) -> dict[str, Any]:
    """Train 40 steps, and return speed and use of the GPU."""
    sizes = TINY if setting.smoke else ("precision=bf16_mixed", *GPT2_SMALL)
    words = ["train", recipe, *sizes, *TRAIN, f"trainer.max_steps={setting.size(40, 6)}"]
    measured = run_command(words)["measured"]
    return {key: measured.get(key) for key in SPEED}


if __name__ == "__main__":
    main(__doc__, {"planner": planner, "speed": speed})
