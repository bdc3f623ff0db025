"""Count the live bytes of one training step under each gradient checkpointing policy, storage by storage.

The model is a GPT with 12 layers, d_model=512, 8 heads, 50,304 tokens of vocabulary and 512 positions (63.5 M
parameters). AdamW trains it in float32. The step runs on fake tensors, which have shapes but no memory. With
`--real 1`, batch size 1 also runs with real tensors, and both counts must agree to the byte.

    python benchmarks/live_bytes.py --real 1 --json benchmarks/live_bytes.json
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from _common import arguments, publish
from lightning_eff.callbacks.gradient_checkpointing import recompute
from lightning_eff.core.text import text_table
from lightning_eff.models.gpt import GPT
from lightning_eff.report.live_bytes import LiveBytes

LENGTH, VOCABULARY = 512, 50_304
POLICIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "selective": {"policy": "selective"},
    "every_n (2)": {"policy": "every_n", "every_n_blocks": 2},
    "full": {"policy": "full"},
    "offload": {"policy": "offload"},
}


def train(
    model: GPT, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor], live: LiveBytes
) -> dict[str, int]:
    """Return the peaks of the second step by phase; in this step optimizer state and old gradients exist."""
    peaks: dict[str, int] = {}
    for _ in range(2):
        for phase in ("forward", "backward", "step"):
            live.peak_bytes = live.now_bytes
            with live:
                if phase == "forward":
                    loss = model.loss(model(batch[0]), batch[1])
                    optimizer.zero_grad()
                elif phase == "backward":
                    loss.backward()  # pyright: ignore[reportPossiblyUnbound]
                    del loss
                else:
                    optimizer.step()
            peaks[phase] = live.peak_bytes
    return peaks


def measure(policy: dict[str, Any], batch_size: int, *, fake: bool, fused: bool) -> dict[str, int]:
    """Build a new model and optimizer, train two steps, and return the peaks by phase."""
    torch.manual_seed(0)
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext():
        model = GPT(vocab_size=VOCABULARY, context_length=LENGTH, d_model=512, num_layers=12, num_heads=8)
        if policy:
            recompute(model, **policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=not fused)
        batch = (
            torch.zeros(batch_size, LENGTH, dtype=torch.long),
            torch.zeros(batch_size, LENGTH, dtype=torch.long),
        )
        live = LiveBytes()
        live.add(
            [*batch, *model.parameters(), *model.buffers(), *tree_leaves(list(optimizer.state.values()))]
        )
        return train(model, optimizer, batch, live)


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per batch size and policy."""
    rows = content["rows"]
    plain = {row["batch_size"]: row["peak_bytes"] for row in rows if row["policy"] == "plain"}
    cells = [
        [
            str(row["batch_size"]),
            row["policy"],
            *(f"{row['phases'][phase] / 1e6:.1f}" for phase in ("forward", "backward", "step")),
            f"{row['peak_bytes'] / 1e6:.1f}",
            f"{row['peak_bytes'] / plain[row['batch_size']]:.3f}",
        ]
        for row in rows
    ]
    header = ["batch", "policy", "forward MB", "backward MB", "step MB", "peak MB", "x plain"]
    return text_table(header, cells)


def main() -> None:
    """Count, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--real", type=int, default=0, help="check the count of this batch size with real memory"
    )
    parser.add_argument("--foreach", action="store_true", help="AdamW over lists of tensors instead of fused")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument(
        "--only", nargs="+", choices=[*POLICIES][1:], default=list(POLICIES)[1:], help="in addition to plain"
    )
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for batch_size in given.batch_sizes:
        for name in ("plain", *given.only):
            policy = POLICIES[name]
            peaks = measure(policy, batch_size, fake=True, fused=not given.foreach)
            if batch_size == given.real:
                real = measure(policy, batch_size, fake=False, fused=not given.foreach)
                if real != peaks:
                    text = f"{name}: the real step differs: {real}, fake {peaks}"
                    raise SystemExit(text)
            row = {"batch_size": batch_size, "policy": name, "peak_bytes": max(peaks.values())}
            rows.append(row | {"phases": peaks})
    publish(given.json, {"rows": rows}, table)


if __name__ == "__main__":
    main()
