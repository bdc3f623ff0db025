"""Measure the host time of a layer and of a kernel launch without a GPU (the Python code around a GEMM).

The first part compares the forward and backward pass of this package's linear layer to `nn.Linear`. On a CPU
the same library computes the products of both layers, so the difference is this package's overhead. The
second part measures a kernel launch. The kernels are compiled for an H200, and a fake driver launches
nothing, so that only the work of the host remains.

All variants alternate in rounds of calls on one thread. The table shows the CPU time of each variant's
fastest round.

    OMP_NUM_THREADS=1 python benchmarks/host_time.py --json benchmarks/host_time.json
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from _common import arguments, publish, rows_table
from lightning_eff.kernels import devices, dispatch, matmul
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.operands import check_operands

FEATURES = (128, 256)
ROWS = 64
CALLS = 100
"""Number of calls per round."""
Run = Callable[[], Any]


def fastest_us(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """Return each function's microseconds per call in its fastest round."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            began = time.process_time()
            for _ in range(CALLS):
                run()
            best[name] = min(best[name], (time.process_time() - began) / CALLS * 1e6)
    return best


def layer(features: int, *, ours: bool = True, accumulation: Accumulation | None = None) -> Run:
    """Return a function that runs the forward and backward pass of a layer."""
    made: Any = nn.Linear(features, features)
    if ours:
        made.__class__, made.accumulation = TritonLinear, accumulation
    x = torch.randn(ROWS, features, requires_grad=True)
    grad = torch.randn(ROWS, features)

    def run() -> None:
        y = made(x)
        if accumulation is None:
            y.backward(grad)
        else:
            with accumulation:
                y.backward(grad)

    return run


def layers(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each layer, with the layer's time and its ratio to the time of `nn.Linear`."""
    rows: list[dict[str, Any]] = []
    for features in FEATURES:
        adding, idle = Accumulation(), Accumulation(is_expected=False)
        runs = {
            "nn.Linear": layer(features, ours=False),
            "TritonLinear": layer(features),
            "TritonLinear, one pass a step": layer(features, accumulation=idle),
            "TritonLinear, adding gradients": layer(features, accumulation=adding),
        }
        times = fastest_us(runs, rounds)
        if (adding.num_added, idle.num_added) != (rounds * CALLS - 1, 0):
            text = f"{adding.num_added} gradients were added: expected all but the first"
            raise RuntimeError(text)
        what = f"{ROWS} x {features} x {features}, forward and backward"
        for name, us in times.items():
            rows.append({"what": what, "who": name, "us": us, "ratio": us / times["nn.Linear"]})
    return rows


def launches(rounds: int) -> list[dict[str, Any]]:
    """Return a row for each way to launch the kernels, for an H200 whose driver launches nothing."""
    import triton
    from triton.backends.compiler import GPUTarget

    from lightning_eff.kernels.gemm_kernels import gemm_tma
    from lightning_eff.kernels.launch import launch

    gpu = devices.DEVICES["h200"]
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", gpu.capability, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        launcher_cls=lambda *_: lambda *_: None,
        utils=SimpleNamespace(
            load_binary=lambda *_: (None, None, 0, 0, 1024),
            get_device_properties=lambda _: {"max_shared_mem": gpu.shared_bytes},
        ),
    )
    a, b = (torch.zeros(1024, 1024, dtype=torch.bfloat16) for _ in range(2))
    operands, out = check_operands(a, b.T, None), torch.zeros(1024, 1024, dtype=torch.bfloat16)
    with (
        mock.patch.object(triton.runtime.driver, "_active", driver),
        mock.patch.object(devices, "of", return_value=gpu),
        mock.patch.object(dispatch, "may_use_triton", return_value=True),
    ):
        dispatch.forget()
        bound: Any = dispatch.find(operands, out)
        by_triton = mock.MagicMock(side_effect=gemm_tma.run)
        with mock.patch.object(gemm_tma, "run", by_triton):
            launch(operands, bound.config, out)
        (call,) = by_triton.call_args_list
        keywords = call.kwargs | {"warmup": False}
        runs: dict[str, Run] = {
            "Triton's own launch": lambda: gemm_tma.run(*call.args, **keywords),
            "our launch": lambda: bound(operands, out),
            "a layer's product": lambda: matmul.compute(operands, out, "triton"),
            "gemm()": lambda: matmul.gemm(a, b.T, backend="triton"),
        }
        times = fastest_us(runs, rounds)
        dispatch.forget()
    what = f"bf16 1024^3, {bound.config}"
    return [
        {"what": what, "who": name, "us": us, "ratio": us / times["Triton's own launch"]}
        for name, us in times.items()
    ]


def table(content: dict[str, Any]) -> str:
    """Return a table with one row per timed variant."""
    return rows_table(content["rows"], {"us": ".2f", "ratio": ".2f"})


def main() -> None:
    """Measure, print the table, and write the figures to the JSON file."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    given = parser.parse_args()
    torch.set_num_threads(1)
    publish(given.json, {"rows": [*layers(given.rounds), *launches(given.rounds)]}, table, "triton")


if __name__ == "__main__":
    main()
