"""The type of the fixture that calls the command line, and overrides for a tiny run."""

from __future__ import annotations

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""The fixture `command`: runs some words; returns exit code, stdout, and log messages with stderr."""
TINY = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0",
    "data.batch_size=2",
    "data.context_length=16",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "monitors.text_sample.num_tokens=3",
]
"""Overrides that make the language-model recipes train two steps in under a second."""
