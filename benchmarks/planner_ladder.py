"""Predict the memory peaks of a full finetune of a 3B-parameter model, and compare to torchtune's table.

The model has the shapes of Llama 3.2 3B (transformers' class, built from a config without a download), in
bf16. The model takes an AdamW step on 2 x 4096 tokens, with fake tensors only. As in the table that torchtune
published, each row adds a technique to the rows above. In the rows with a compiler, compilation is
approximated by a loss in chunks. Like compiled code, this loss keeps its logits in bf16 and nothing in
float32.

    python benchmarks/planner_ladder.py --json benchmarks/planner_ladder.json
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from _common import arguments, publish, rows_table
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.prediction.predict import Prediction, predict_step

GIB = 2**30
ROWS, LENGTH, NUM_CHUNKS = 2, 4096, 8
SHAPES: dict[str, Any] = {
    "vocab_size": 128256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
    "num_attention_heads": 24, "num_key_value_heads": 8, "tie_word_embeddings": True, "use_cache": False,
}  # fmt: skip


class ChunkLoss(torch.autograd.Function):
    """Cross entropy of one chunk of logits, which keeps only the logits in bf16, like a fused kernel."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the loss over the chunk's tokens."""
        ctx.save_for_backward(logits, targets)
        wide = logits.float()
        return (wide.logsumexp(-1) - wide.gather(-1, targets[:, None])[:, 0]).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """Return the gradient of the logits, in the dtype of the logits."""
        logits, targets = ctx.saved_tensors
        share = logits.softmax(-1)
        share.scatter_add_(-1, targets[:, None], torch.full_like(targets[:, None], -1, dtype=share.dtype))
        return share.mul_(gradients[0].to(share.dtype)), None


def whole_loss(net: Any, tokens: Tensor) -> Tensor:
    """Return transformers' own loss."""
    return net(input_ids=tokens, labels=tokens).loss


def chunked_loss(net: Any, tokens: Tensor) -> Tensor:
    """Return the loss; logits and their float32 copies exist for one chunk at a time."""
    hidden = net.model(input_ids=tokens).last_hidden_state.flatten(0, 1)
    chunks = zip(hidden.chunk(NUM_CHUNKS), tokens.flatten().chunk(NUM_CHUNKS), strict=True)
    losses: list[Any] = [ChunkLoss.apply(net.lm_head(x), y) for x, y in chunks]
    return sum(losses) / tokens.numel()


def model(*, policy: str | None = None) -> nn.Module:
    """Make the model; with a `policy`, its blocks are recomputed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    made: Any = LlamaForCausalLM(LlamaConfig(**SHAPES)).to(torch.bfloat16).train()
    if policy is not None:
        recompute(made, policy=policy)
    return made


def eight_bit(parameters: Any) -> Optimizer:
    """Return an optimizer that steps in the backward pass, with 8-bit state (bitsandbytes)."""
    from bitsandbytes.optim import AdamW8bit

    return InBackward(parameters, optimizer=AdamW8bit, lr=1e-5)


ADAMW = functools.partial(torch.optim.AdamW, fused=True, lr=1e-5)
FULL, OFFLOAD = functools.partial(model, policy="full"), functools.partial(model, policy="offload")
Row = tuple[float, Callable[[], nn.Module], Callable[[Any, Any], Tensor], Callable[[Any], Optimizer]]
LADDER: dict[str, Row] = {
    "plain": (60.0, model, whole_loss, ADAMW),
    "+ compile, loss in chunks": (42.9, model, chunked_loss, ADAMW),
    "+ checkpointing": (24.9, FULL, chunked_loss, ADAMW),
    "+ optimizer in backward": (23.1, FULL, chunked_loss, functools.partial(InBackward, lr=1e-5)),
    "+ activations on the host": (21.8, OFFLOAD, chunked_loss, functools.partial(InBackward, lr=1e-5)),
    "+ 8-bit optimizer": (17.6, OFFLOAD, chunked_loss, eight_bit),
}
"""Published GiB of active memory (README of pytorch/torchtune, A100); model, loss and optimizer."""
TITLES = {
    "row": "row", "published_gib": "published GiB", "predicted_gib": "predicted GiB", "ratio": "ratio",
    "phase": "peak in", "seconds": "s",
}  # fmt: skip


def predicted(name: str) -> tuple[Prediction, float]:
    """Return a row's prediction and the seconds that it took."""
    _, make, loss, optimizer = LADDER[name]
    began = time.perf_counter()
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    return predict_step(make, tokens, loss, optimizer), time.perf_counter() - began


def table(content: dict[str, Any]) -> str:
    """Return a table of all rows, and the memory that the planner itself used."""
    rows = [{key: row[key] for key in TITLES} for row in content["rows"]]
    formats = {"predicted_gib": ".1f", "ratio": ".3f", "seconds": ".1f"}
    own = f" {content['memory_gib']:.1f} GiB of memory at most, imports included"
    return f"{rows_table(rows, formats, TITLES)}\n\n{own}"


def main() -> None:
    """Predict, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=LADDER, default=list(LADDER), help="rows; all by default"
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in given.only:
        published = LADDER[name][0]
        found, seconds = predicted(name)
        peak = found.in_blocks
        gib = None if peak is None else peak.num_bytes / GIB
        ratio = None if gib is None else gib / published
        row = {"row": name, "published_gib": published, "predicted_gib": gib, "ratio": ratio}
        row |= {"seconds": seconds, "phase": peak and peak.phase, "reason": found.reason}
        row["by_category"] = peak and peak.by_category
        rows.append(row)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    publish(given.json, {"rows": rows, "memory_gib": grown}, table, "transformers", "bitsandbytes")


if __name__ == "__main__":
    main()
