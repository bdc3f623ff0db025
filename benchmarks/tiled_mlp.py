"""Measure the peak memory, the CPU time and the gradient hooks of a tiled MLP's forward and backward pass.

The MLP is a SwiGLU with 256 features and 1024 hidden features, on 4096 tokens, in float32 on one thread.
Memory is counted in addition to weights and inputs (`report/live_bytes`). The variants alternate, and the
table shows the CPU time of the fastest round. The variants are the unmodified MLP, the MLP under one
checkpoint, this package's tiles, and Liger's tiles if `liger_kernel` is installed.

    OMP_NUM_THREADS=1 python benchmarks/tiled_mlp.py --json benchmarks/tiled_mlp.json
"""

from __future__ import annotations

import functools
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from _common import arguments, publish, rows_table
from lightning_eff.callbacks.tiled_mlp import tile_mlps
from lightning_eff.report.live_bytes import LiveBytes

TOKENS, FEATURES, WIDTH = 4096, 256, 1024
TILES = (4, 16)
WIDE_MIB = TOKENS * WIDTH * 5 * 4 / 2**20
HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


class MLP(nn.Module):
    """SwiGLU without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(FEATURES, WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(WIDTH, FEATURES, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return [*batch, 256] for an input of the same shape."""
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def built() -> MLP:
    """Return an MLP; every call returns equal weights."""
    torch.manual_seed(0)
    return MLP()


def ours(num_tiles: int) -> Callable[[Tensor], Tensor]:
    """Return an MLP that is computed in `num_tiles` tiles."""
    model = nn.ModuleDict({"mlp": built()})
    tile_mlps(model, modules="mlp", tile_budget_mib=WIDE_MIB / num_tiles, min_tokens=1)
    return model["mlp"]


def liger(num_tiles: int) -> Callable[[Tensor], Tensor]:
    """Return Liger's tiled MLP."""
    from liger_kernel.ops.tiled_mlp import apply_tiled_mlp

    return functools.partial(_liger, built(), apply_tiled_mlp, num_tiles)


def _liger(mlp: MLP, apply: Any, num_tiles: int, x: Tensor) -> Tensor:
    return apply(MLP.forward, mlp, x[None], num_tiles, list(mlp.parameters()))[0]


def runs() -> dict[str, tuple[Any, nn.Module]]:
    """Return each variant's function and its MLP, by name."""
    plain, under = built(), built()
    found: dict[str, tuple[Any, nn.Module]] = {
        "plain": (plain, plain),
        "whole MLP checkpointed": (lambda x: checkpoint(under, x, use_reentrant=False), under),
    }
    for num_tiles in TILES:
        tiled: Any = ours(num_tiles)
        found[f"callbacks/tiled_mlp, {num_tiles} tiles"] = tiled, tiled
    for num_tiles in TILES if HAS_LIGER else ():
        function: Any = liger(num_tiles)
        found[f"Liger, {num_tiles} tiles"] = function, function.args[0]
    return found


def inputs() -> tuple[Tensor, Tensor]:
    """Return an input and a gradient of the output."""
    torch.manual_seed(1)
    return torch.randn(TOKENS, FEATURES, requires_grad=True), torch.randn(TOKENS, FEATURES)


def counted(run: Any, mlp: nn.Module) -> tuple[int, int, float]:
    """Return added peak bytes, the number of hook calls, and the largest gradient error (to float64)."""
    x, grad = inputs()
    exact = built().double()
    exact(x.detach().double()).backward(grad.double())
    hooks: list[int] = []
    handles = [p.register_post_accumulate_grad_hook(lambda _: hooks.append(1)) for p in mlp.parameters()]
    live = LiveBytes()
    live.add([*mlp.parameters(), x, grad])
    before = live.now_bytes
    with live:
        run(x).backward(grad)
    for handle in handles:
        handle.remove()
    errors = [
        float((own.grad - other.grad).abs().max() / other.grad.abs().max())
        for own, other in zip(mlp.parameters(), exact.parameters(), strict=True)
        if own.grad is not None and other.grad is not None
    ]
    return live.peak_bytes - before, len(hooks), max(errors)


def seconds(found: dict[str, tuple[Any, nn.Module]], rounds: int) -> dict[str, float]:
    """Return each variant's CPU seconds in its fastest round."""
    best = dict.fromkeys(found, float("inf"))
    for _ in range(rounds):
        for name, (run, mlp) in found.items():
            x, grad = inputs()
            mlp.zero_grad()
            began = time.process_time()
            run(x).backward(grad)
            best[name] = min(best[name], time.process_time() - began)
    return best


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per variant."""
    formats = {"cpu_s": ".3f", "peak_mib": ".1f", "of_plain": ".3f", "times_plain": ".2f", "error": ".1e"}
    return rows_table(content["rows"], formats)


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = runs()
    counts = {name: counted(*each) for name, each in found.items()}
    times = seconds(found, given.rounds)
    rows = [
        {
            "who": name, "peak_mib": peak / 2**20, "of_plain": peak / counts["plain"][0],
            "cpu_s": times[name], "times_plain": times[name] / times["plain"],
            "hooks": num_hooks, "error": error,
        }
        for name, (peak, num_hooks, error) in counts.items()
    ]  # fmt: skip
    publish(given.json, {"rows": rows}, table, "liger-kernel")


if __name__ == "__main__":
    main()
