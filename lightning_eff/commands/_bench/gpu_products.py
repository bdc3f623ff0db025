"""Parts of `bench --suite gpu` about GEMMs: are they right, how fast, and what is the limit."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from lightning_eff.commands._bench import compile_ahead, gemm_problem, gemm_timing
from lightning_eff.commands._bench.gemm_problem import Case, Problem
from lightning_eff.commands._bench.gpu_suite import Measurement, Part, Setting, SkippedError
from lightning_eff.commands._bench.turns import peak_bytes, take_turns
from lightning_eff.kernels import devices, tiles
from lightning_eff.kernels.gemm_kernels import INTERPRETED
from lightning_eff.kernels.linear import Accumulation, TritonLinear
from lightning_eff.kernels.matmul import gemm
from lightning_eff.kernels.tile_configs import CONFIGS, TileConfig

BF16 = torch.bfloat16
ODD_SIZES = ((264, 1000, 200), (1000, 264, 136), (200, 50264, 520), (264, 264, 4104))
"""Multiples of 8 and not of 16: rows that TMA can copy, of sizes for which other kernels are compiled."""
TINY_SIZES = ((24, 40, 72), (24, 40, 520))
COMPILE_S = 60.0
"""Seconds in which kernels are compiled before they are used."""
CUBE = (8192, 8192, 8192)
NUM_LLAMA = 6
"""The first weights of `gemm_problem.WEIGHTS` are those of Llama models of 7 and 8 billion parameters."""
BLOCK = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""Output and input features of the products of a Llama 3 8B block."""
MICRO_BATCHES = 4
LAYER_KINDS = ("nn.Linear", "TritonLinear", "TritonLinear, accumulation")
ROUND_MS = 20


def correctness(setting: Setting) -> dict[str, Measurement]:
    """Return a case for each config: every layout, epilogue and dtype that it fits, against float64."""
    is_cuda = setting.device.type == "cuda"
    if not (is_cuda or INTERPRETED):
        text = "the kernels need a GPU, or Triton's interpreter (TRITON_INTERPRET=1)"
        raise SkippedError(text)
    problems = checked_problems(TINY_SIZES if setting.quick else ODD_SIZES)
    if is_cuda:
        torch.backends.cuda.matmul.allow_tf32 = True  # in this process: otherwise no TMA config takes float32
        jobs = compile_ahead.jobs_of(problems, setting.device)
        compile_ahead.compile_ahead(jobs, setting.device, limit_s=COMPILE_S)
    return {str(config): partial(check_config, config, problems, setting.device) for config in CONFIGS}


def checked_problems(sizes: Iterable[tuple[int, int, int]]) -> list[Case]:
    """Return sizes x layouts x epilogues in bfloat16; float16, float32 and a float32 result without one.

    Those of an MLP come in its own layouts.
    """
    sizes = list(sizes)
    square = Case(M=1, N=1, K=1)
    kinds = [square, replace(square, out_dtype=torch.float32)]
    kinds += [replace(square, kind=kind) for kind in ("adds", "bias", "fused", "c", "c32")]
    kinds += [replace(square, dtype=dtype) for dtype in (torch.float16, torch.float32)]
    return [
        replace(kind, M=M, N=N, K=K, layout=layout)
        for (M, N, K), layout, kind in product(sizes, ("nt", "nn", "tn"), kinds)
    ] + [*gemm_problem.mlp_cases("gated", sizes, BF16), *gemm_problem.mlp_cases("activated", sizes, BF16)]


def check_config(config: TileConfig, cases: Iterable[Case], device: torch.device) -> dict[str, Any]:
    """Return in how many of the cases that a config fits it is right, where not, and what it refused."""
    info = devices.of(device) if device.type == "cuda" else devices.DEVICES["h200"]
    found: dict[str, Any] = {"right": 0, "wrong": {}, "refused": {}}
    for case in cases:
        problem = Problem.draw(case, device)
        if config not in [cost.config for cost in tiles.rank_configs(problem.shape(), info)]:
            continue
        result = gemm_timing.check(gemm_timing.run_config(config), problem)
        name = f"{case} {str(case.dtype).removeprefix('torch.')}"
        if result.is_correct:
            found["right"] += 1
        elif result.refusal:
            found["refused"][name] = result.refusal
        else:
            found["wrong"][name] = f"error {result.error:.3g} times what is allowed"
    return found


def ceilings(setting: Setting) -> dict[str, Measurement]:
    """Return the cases that show what the machine can do: one product, and one copy."""
    return {"mm": partial(time_mm, setting), "copy": partial(time_copy, setting)}


def time_mm(setting: Setting) -> dict[str, Any]:
    """Multiply two square matrices by torch's library."""
    n = setting.size(8192, 64)
    a, b = _normal(n, n, setting), _normal(n, n, setting)
    out = torch.empty_like(a)
    times = take_turns({"mm": lambda: torch.mm(a, b.T, out=out)}, setting.device, calls_per_turn=10)["mm"]
    return {"M": n, "TFLOP/s": 2 * n**3 / times["ms"] / 1e9} | times


def time_copy(setting: Setting) -> dict[str, Any]:
    """Copy memory; each byte is read and written."""
    num_bytes = setting.size(4 << 30, 1 << 20)
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=setting.device)
    target = torch.empty_like(source)
    times = take_turns({"copy": lambda: target.copy_(source)}, setting.device, calls_per_turn=10)["copy"]
    return {"bytes": num_bytes, "TB/s": 2 * num_bytes / times["ms"] / 1e9} | times


def gemms(setting: Setting) -> dict[str, Measurement]:
    """Return the cases of `bench`, the most telling first."""
    is_cuda = setting.device.type == "cuda"
    cases = cases_by_value(BF16)
    if setting.quick:
        tiny = [(16, 24, 32)]
        dtype = BF16 if is_cuda else torch.float32
        cases = gemm_problem.cases_of(tiny, tiny, dtype)
        cases += gemm_problem.mlp_cases("gated", tiny, dtype) + gemm_problem.mlp_cases(
            "activated", tiny, dtype
        )
    if is_cuda:
        jobs = compile_ahead.jobs_of(cases, setting.device, top=gemm_timing.TOP_CONFIGS)
        compile_ahead.compile_ahead(jobs, setting.device, limit_s=COMPILE_S)
    measure = compare_gemm if is_cuda else check_gemm
    return {str(case): partial(measure, case, setting.device) for case in cases}


def cases_by_value(dtype: torch.dtype) -> list[Case]:
    """Return the default cases: the cube, Llama with 2,048 and 8,192 tokens, other kinds, the rest."""
    default = gemm_problem.default_cases(dtype)
    llama = [(tokens, *weight) for weight in gemm_problem.WEIGHTS[:NUM_LLAMA] for tokens in (2048, 8192)]
    first = gemm_problem.cases_of([CUBE, *llama], [], dtype)
    for kind in ("adds", *gemm_problem.KIND_ACTIVATIONS):
        first += [case for case in default if case.kind == kind]
    return [*first, *(case for case in default if case not in first)]


def compare_gemm(case: Case, device: torch.device) -> dict[str, Any]:
    """Measure the candidates of a case."""
    return gemm_timing.compare(case, device, round_ms=ROUND_MS).as_dict()


def check_gemm(case: Case, device: torch.device) -> dict[str, Any]:
    """Check `gemm` where there is no GPU to time it on."""
    result = gemm_timing.check(gemm_timing.run_gemm, Problem.draw(case, device), rounds_twice=True)
    return {"correct": result.is_correct, "not timed": "no GPU"}


def host(setting: Setting) -> dict[str, Measurement]:
    """Return the case that times Python: a layer too small for the GPU to be waited for."""
    return {"64 x 64": partial(time_host, setting)}


def time_host(setting: Setting) -> dict[str, Any]:
    """Time calls that are queued faster than a GPU could be noticed."""
    x = _normal(64, 64, setting)
    grad = _normal(64, 64, setting)
    layers = {kind: _layer(64, 64, BF16, kind, setting) for kind in LAYER_KINDS}
    calls: dict[str, Any] = {f"{kind}, forward": partial(layer, x) for kind, layer in layers.items()}
    for kind, layer in layers.items():
        calls[f"{kind}, both"] = partial(_forward_backward, layer, x, grad)
    if setting.device.type == "cuda" or INTERPRETED:
        calls["gemm, backend=triton"] = lambda: gemm(x, x, backend="triton")
    return take_turns(calls, setting.device, calls_per_turn=setting.size(200, 2))


def layers(setting: Setting) -> dict[str, Measurement]:
    """Return steps of four micro-batches through the products of a Llama 3 8B block."""
    return {
        f"{tokens} tokens, {'float32 weights, autocast' if mixed else 'bfloat16 weights'}": partial(
            time_layers, tokens, mixed=mixed, setting=setting
        )
        for tokens in (setting.size(2048, 32), setting.size(8192, 64))
        for mixed in (True, False)
    }


def time_layers(tokens: int, *, mixed: bool, setting: Setting) -> dict[str, Any]:
    """Time forward, backward and accumulated gradients in each kind of layer, and count their memory."""
    found: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for kind in LAYER_KINDS:
        steps[kind] = _accumulating_step(tokens, kind, mixed=mixed, setting=setting)
        found[kind] = {"peak_bytes": peak_bytes(steps[kind], setting.device)}
    times = take_turns(steps, setting.device, calls_per_turn=setting.size(3, 1), rounds=setting.size(7, 3))
    for kind, figures in times.items():
        found[kind] |= figures | {"ratio": times["nn.Linear"]["ms"] / figures["ms"]}
    return found


def _accumulating_step(tokens: int, kind: str, *, mixed: bool, setting: Setting) -> Any:
    divisor = setting.size(1, 128)
    dtype = torch.float32 if mixed else BF16
    sizes = [(n // divisor, k // divisor) for n, k in BLOCK]
    made = [_layer(n, k, dtype, kind, setting) for n, k in sizes]
    inputs = [_normal(tokens, k, setting).requires_grad_() for _, k in sizes]
    grads = [_normal(tokens, n, setting) for n, _ in sizes]

    def step() -> None:
        for layer in made:
            layer.weight.grad = None
        for _ in range(MICRO_BATCHES):
            for layer, x, grad in zip(made, inputs, grads, strict=True):
                with torch.autocast(setting.device.type, dtype=BF16, enabled=mixed):
                    _forward_backward(layer, x, grad)
                x.grad = None

    return step


def _layer(n: int, k: int, dtype: torch.dtype, kind: str, setting: Setting) -> nn.Linear:
    layer = nn.Linear(k, n, bias=False, device=setting.device, dtype=dtype)
    if kind != "nn.Linear":
        layer.__class__ = TritonLinear
        ours: TritonLinear = layer  # pyright: ignore[reportAssignmentType]
        ours.accumulation = Accumulation() if "accumulation" in kind else None
    return layer


def _forward_backward(layer: nn.Linear, x: Tensor, grad: Tensor) -> None:
    accumulation = getattr(layer, "accumulation", None)
    y = layer(x)
    with accumulation if accumulation is not None else nullcontext():
        y.backward(grad)


def _normal(rows: int, columns: int, setting: Setting) -> Tensor:
    return torch.randn(rows, columns, device=setting.device).mul_(columns**-0.5).to(BF16)


PARTS = (
    Part(
        name="correctness", about="every config, layout and epilogue against float64", cases=correctness,
        limit_s=100, needs=("triton",),
    ),
    Part(name="ceilings", about="what torch's library and the memory reach", cases=ceilings, limit_s=20),
    Part(
        name="gemm", about="the cases of bench, the most telling first", cases=gemms, limit_s=110,
        needs=("triton",),
    ),
    Part(name="host", about="Python's time for a call", cases=host, limit_s=20),
    Part(name="layers", about="layers with accumulated gradients beside nn.Linear", cases=layers, limit_s=40),
)  # fmt: skip
