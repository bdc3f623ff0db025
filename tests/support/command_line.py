"""Call the command line in a test: what type it has there, and overrides for a run that takes no time."""

from __future__ import annotations

from collections.abc import Callable

Command = Callable[..., tuple[int, str, str]]
"""The fixture `command`: exit code, standard output, log messages and standard error of a few words."""
TINY = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0",
    "data.micro_batch_size=2",
    "data.context_length=16",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "monitors.text_sample.num_tokens=3",
]
"""Overrides that make the language-model recipes train two steps in under a second."""
