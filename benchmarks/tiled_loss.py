"""Compare the memory, time and error of losses over a large vocabulary: full logits, torch, Liger, ours.

Memory is the peak of allocated bytes in the forward and backward pass. This peak includes the gradients, but
not the inputs. An error is the norm of the difference to float64, relative to the norm of the float64 result.
The losses alternate in rounds on one thread, and the table shows the CPU time of the fastest round. Liger has
no kernels for a CPU. Triton's interpreter runs Liger's GPU kernels, so Liger's memory and errors are valid,
but its time is not shown.

The second table shows float16 with a loss scale. The errors in this table are of the gradients of weight rows
whose class is no target. These gradients underflow if a loss computes them before the loss is scaled.

    TRITON_INTERPRET=1 OMP_NUM_THREADS=1 python benchmarks/tiled_loss.py --json benchmarks/tiled_loss.json
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from _common import arguments, publish, rows_table
from lightning_eff.kernels.cross_entropy import linear_cross_entropy

SIZES = (1024, 256, 32000)
SIZES_FLOAT16 = (2048, 64, 50000)
STD = 0.06
LOSS_SCALE = 32768.0
MOST_MB = {
    (torch.float32, False): 67.6,
    (torch.bfloat16, False): 41.6,
    (torch.float32, True): 17.6,
    (torch.bfloat16, True): 9.0,
}
"""Maximum MB as a goal, by dtype and by whether the weight is frozen."""
MOST_LOSS_ERROR = 2e-6
MOST_TIME = 1.0
"""Maximum time as a goal, relative to the fastest of torch's losses."""
OURS = "lightning_eff"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]
Inputs = tuple[Tensor, Tensor, Tensor]


def by_torch(x: Tensor, weight: Tensor, target: Tensor, reduction: str = "mean", **options: Any) -> Tensor:
    """Compute the loss by `F.linear_cross_entropy` in chunks of 128 rows, the fastest setting here."""
    function, options_of = nn.functional.linear_cross_entropy, nn.LinearCrossEntropyOptions  # pyright: ignore[reportAttributeAccessIssue]
    chosen = options_of(batch_chunk_size=128, chunking_method=None, **options)
    return function(x, weight, target, reduction=reduction, options=chosen).mean()


def contenders() -> dict[str, Loss]:
    """Return the compared losses."""
    found: dict[str, Loss] = {
        "whole logits": lambda x, w, t: nn.functional.cross_entropy(x @ w.T, t),
        "whole logits, float": lambda x, w, t: nn.functional.cross_entropy((x @ w.T).float(), t),
        "torch": by_torch,
        "torch, accurate": functools.partial(by_torch, acc_policy="accurate"),
        "torch, none": functools.partial(by_torch, reduction="none"),
        OURS: linear_cross_entropy,
        f"{OURS}, none": lambda x, w, t: linear_cross_entropy(x, w, t, reduction="none").mean(),
    }
    if os.environ.get("TRITON_INTERPRET") != "1":
        return found
    try:
        from liger_kernel.ops.fused_linear_cross_entropy import (  # pyright: ignore[reportMissingImports]
            LigerFusedLinearCrossEntropyFunction as Liger,
        )
    except ImportError:
        return found
    return {**found, "liger": lambda x, w, t: Liger.apply(x, w, t)[0]}


def peak_mb(run: Callable[[], Any]) -> float:
    """Return the peak of the MB (10^6 bytes) that a function allocates."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    now = most = 0
    events = profile.profiler.kineto_results.events()  # pyright: ignore[reportOptionalMemberAccess]
    for event in sorted(events, key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most / 1e6


def error(found: Tensor, exact: Tensor) -> float:
    """Return the norm of the error relative to the norm of the exact tensor."""
    return ((found.detach().double() - exact).norm() / exact.norm()).item()


def errors(loss: Loss, make: Callable[[], Inputs]) -> dict[str, Any]:
    """Return the errors of a loss and of its gradients against float64."""
    x, weight, target = make()
    trained = [each for each in (x, weight) if each.requires_grad]
    exact = [each.detach().double().requires_grad_() for each in (x, weight)]
    expected = nn.functional.cross_entropy(exact[0] @ exact[1].T, target)
    expected_grads = torch.autograd.grad(expected, exact[: len(trained)])
    value = loss(x, weight, target)
    found = [error(*pair) for pair in zip(torch.autograd.grad(value, trained), expected_grads, strict=True)]
    of_loss = error(value, expected.detach())
    return {"loss error": of_loss, "x error": found[0], "weight error": found[1] if found[1:] else None}


def seconds(runs: dict[str, Loss], make: Callable[[], Inputs], rounds: int) -> dict[str, float]:
    """Return each loss's CPU seconds of forward and backward pass in its fastest round."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, loss in runs.items():
            inputs = make()
            began = time.process_time()
            loss(*inputs).backward()
            best[name] = min(best[name], time.process_time() - began)
    return best


def verdict(row: dict[str, Any], plain: dict[str, Any], most_mb: float) -> str:
    """Return text about the goals that our loss misses."""
    missed = [f"{most_mb} MB"] if round(row["MB"], 1) > most_mb else []
    missed += ["time"] if round(row["time ratio"], 2) > MOST_TIME else []
    missed += ["loss error"] if row["loss error"] > MOST_LOSS_ERROR else []
    names = [name for name in ("x error", "weight error") if row[name] is not None]
    missed += [name for name in names if row[name] > 2 * plain[name]]
    return "misses " + ", ".join(missed) if missed else "all met"


def case(dtype: torch.dtype, sizes: tuple[int, ...], rounds: int, *, is_frozen: bool) -> list[dict[str, Any]]:
    """Return the rows of one dtype, one row per loss."""
    num_rows, width, num_classes = sizes
    torch.manual_seed(0)
    x0, weight0 = torch.randn(num_rows, width), torch.randn(num_classes, width) * STD
    target = torch.randint(0, num_classes, (num_rows,))

    def make() -> Inputs:
        x, weight = (each.to(dtype, copy=True) for each in (x0, weight0))
        return x.requires_grad_(), weight.requires_grad_(not is_frozen), target

    losses = contenders()
    timed = {name: loss for name, loss in losses.items() if name != "liger"}
    times = seconds(timed, make, rounds)
    best = min(time for name, time in times.items() if name.startswith("torch"))
    rows: list[dict[str, Any]] = []
    for name, loss in losses.items():
        inputs = make()
        peak = peak_mb(lambda loss=loss, inputs=inputs: loss(*inputs).backward())
        row = {
            "dtype": str(dtype).removeprefix("torch."), "weight": "frozen" if is_frozen else "trained",
            "loss": name, "MB": peak, "s": times.get(name),
            "time ratio": times[name] / best if name in times else None, **errors(loss, make), "goals": "",
        }  # fmt: skip
        rows.append(row)
        if name == OURS and sizes == SIZES:
            row["goals"] = verdict(row, rows[0], MOST_MB[dtype, is_frozen])
    return rows


def float16_rows(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the gradients' errors in weight rows whose class is no target, with a loss scale."""
    num_rows, width, num_classes = sizes
    torch.manual_seed(0)
    x, weight = torch.randn(num_rows, width).half(), (torch.randn(num_classes, width) * STD).half()
    x.requires_grad_()
    target = torch.randint(0, num_classes, (num_rows,))
    others = torch.ones(num_classes, dtype=torch.bool).index_fill_(0, target, value=False)
    trained = weight.double().requires_grad_()
    (exact,) = torch.autograd.grad(
        nn.functional.cross_entropy(x.detach().double() @ trained.T, target), [trained]
    )
    exact = exact[others] * LOSS_SCALE
    rows: list[dict[str, Any]] = []
    losses = contenders()
    losses.pop("liger", None)  # Liger's small chunks take too long in float16 on a CPU
    for name, loss in losses.items():
        trained = weight.clone().requires_grad_()
        _, found = torch.autograd.grad(loss(x, trained, target).float() * LOSS_SCALE, [x, trained])
        zeros = (found[others] == 0).double().mean().item()
        rows.append({"loss": name, "error": error(found[others], exact), "zeros": zeros})
    return rows


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per dtype and loss, and a table for float16."""
    formats = {"MB": ".1f", "s": ".3f", "time ratio": ".2f", "zeros": ".1%"}
    formats |= dict.fromkeys(("loss error", "x error", "weight error", "error"), ".1e")
    return "\n\n".join(rows_table(content[name], formats) for name in ("rows", "float16"))


def main() -> None:
    """Measure, print the tables, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--sizes", type=int, nargs=3, default=SIZES, metavar=("N", "D", "V"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    sizes = tuple(given.sizes)
    rows: list[dict[str, Any]] = []
    for dtype, is_frozen in MOST_MB:
        rows += case(dtype, sizes, given.rounds, is_frozen=is_frozen)
    float16 = float16_rows(SIZES_FLOAT16 if sizes == SIZES else sizes)
    publish(given.json, {"rows": rows, "float16": float16}, table, "triton", "liger-kernel")


if __name__ == "__main__":
    main()
