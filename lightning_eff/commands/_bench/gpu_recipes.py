"""Parts of `bench --suite gpu` that run recipes: planned beside measured memory, and `compare`."""

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

from lightning_eff.commands._bench.gpu_suite import Measurement, Part, Setting, SkippedError
from lightning_eff.core.errors import EXIT_ENVIRONMENT

RECIPE = (
    "baseline", "precision=bf16_mixed", "model.d_model=1024", "model.num_layers=12", "model.num_heads=16",
    "data.context_length=1024", "data.vocab_size=16384", "data.batch_size=16",
)  # fmt: skip
"""A GPT of 170 million parameters, 16 sequences of 1,024 tokens."""
TINY = (
    "baseline", "precision=fp32", "model.d_model=16", "model.num_layers=1",
    "model.num_heads=2", "data.context_length=16", "data.vocab_size=300", "data.batch_size=2",
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
}
"""What is measured beside its prediction, by the overrides of the recipe."""
STEPS = 4
TRAIN = (
    f"trainer.max_steps={STEPS}", "trainer.limit_val_batches=0", "trainer.num_sanity_val_steps=0",
    "logger=none", "~monitors.text_sample", "~monitors.model_checkpoint",
)  # fmt: skip
COMPARED = "torch_compile,precision=*,triton_gemm,micro_batch,gradient_checkpointing"
ERROR_LENGTH = 300


def run_command(words: Sequence[str]) -> dict[str, Any]:
    """Run a verb with `--json` in a process of its own, and return what it prints."""
    command = [sys.executable, "-m", "lightning_eff", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        is_lacking = done.returncode == EXIT_ENVIRONMENT
        said = [line for line in done.stderr.splitlines() if line.startswith("error:")] or [done.stderr]
        text = f"{words[0]}: exit code {done.returncode}: {said[-1][-ERROR_LENGTH:]}"
        raise SkippedError(text) if is_lacking else RuntimeError(text)
    return json.loads(done.stdout[done.stdout.index("{") :])


def planner(setting: Setting) -> dict[str, Measurement]:
    """Return a case for each setting of the recipe."""
    return {
        name: partial(check_prediction, name, setting)
        for name in (["baseline"] if setting.quick else list(SETTINGS))
    }


def check_prediction(name: str, setting: Setting) -> dict[str, Any]:
    """Train some steps, and return the peak that was predicted and the one that was measured."""
    words = [*_recipe(setting), *SETTINGS[name]]
    with ThreadPoolExecutor() as pool:  # each waits for its process
        found = pool.map(run_command, (["train", *words, *TRAIN], ["plan", *words]))
        measured, predicted = (content[key] for content, key in zip(found, ("measured", "peak"), strict=True))
    found = {"predicted": predicted["peak_bytes"], "measured": measured["peak_bytes"]}
    if not found["predicted"]:
        return found | {"error": f"not predicted: {predicted['reason']}"}
    return found | {
        "ratio": found["predicted"] / found["measured"] if found["measured"] else None,
        "measured_by": measured["peak_measured"], "assumed": predicted["assumed"],
    }  # fmt: skip


def compare(setting: Setting) -> dict[str, Measurement]:
    """Return the one case: `compare` of the recipe."""
    return {"baseline": partial(run_compare, setting)}


def run_compare(setting: Setting) -> dict[str, Any]:
    """Run the verb, one round of each technique, and return its rows."""
    options = ["--rounds", "1", "--limit-s", "60", "--only", COMPARED]
    if setting.quick:
        options = ["--rounds", "1", "--steps", "6", "--only", "triton_gemm"]
    return {"rows": run_command(["compare", *_recipe(setting), *options])["rows"]}


def _recipe(setting: Setting) -> list[str]:
    folder = Path(tempfile.gettempdir()) / "lightning_eff_suite"  # has the tokens, for later calls too
    recipe = [*(TINY if setting.quick else RECIPE), f"output_root={folder}"]
    return recipe if setting.device.type == "cuda" else [*recipe, "trainer.accelerator=cpu"]


HYDRA = ("hydra", "omegaconf", "beartype")
PARTS = (
    Part(
        name="planner", about="the predicted peak beside max_memory_allocated", cases=planner, limit_s=180,
        least_s=30, needs=HYDRA,
    ),
    Part(
        name="compare", about="`compare` of a GPT of 170 million parameters", cases=compare, limit_s=540,
        least_s=240, needs=HYDRA,
    ),
)  # fmt: skip
