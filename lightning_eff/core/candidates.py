"""How advice tries techniques, as overrides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PART = "{part}"
"""Stands for a number of samples in the last override of a candidate that divides batches."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A technique as advice tries it.

    Args:
        words: Overrides of a recipe, as they are typed.
        needs: Facts without which it saves nothing: `run/cuda`, or an operation whose results are among the
            largest tensors at the peak (`peak/convolution`).
        note: What else it changes, or what it requires.
        is_chosen: Whether it may be chosen to make a recipe fit; otherwise its saving is shown alone.
    """

    words: tuple[str, ...]
    needs: tuple[str, ...] = ()
    note: str = ""
    is_chosen: bool = True

    @property
    def divides(self) -> bool:
        """Whether it computes a batch in parts of some samples."""
        return PART in self.words[-1]


GRADIENT_CHECKPOINTING, POLICY = (
    "+callbacks=gradient_checkpointing",
    "callbacks.gradient_checkpointing.policy",
)
CANDIDATES = (
    Candidate(words=("+callbacks=tiled_conv",), needs=("peak/convolution",)),
    Candidate(words=("+callbacks=tiled_loss",)),
    Candidate(words=(GRADIENT_CHECKPOINTING,)),
    Candidate(words=(GRADIENT_CHECKPOINTING, f"{POLICY}=selective")),
    Candidate(words=("optimizer=in_backward", "trainer.gradient_clip_val=null")),
    Candidate(words=("optimizer=adamw_8bit_bnb",)),
    Candidate(words=("precision=bf16_mixed",)),
    Candidate(words=("precision=bf16_true",)),
    Candidate(words=("+callbacks=peft_adapter",), note="trains fewer weights", is_chosen=False),
    Candidate(
        words=("+callbacks=micro_batch", f"callbacks.micro_batch.micro_batch_size={PART}"),
        note="if the loss is a mean over samples",
    ),
    Candidate(words=(GRADIENT_CHECKPOINTING, f"{POLICY}=offload"), needs=("run/cuda",)),
    Candidate(words=("optimizer=cpu_offload",), needs=("run/cuda",)),
)


def candidates() -> Sequence[Candidate]:
    """Return what is tried; `lightning-eff ls` shows how each changes the training."""
    return CANDIDATES
