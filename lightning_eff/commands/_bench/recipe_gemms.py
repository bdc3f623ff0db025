"""List the GEMMs of a recipe's linear layers, as `callbacks/triton_gemm` computes them in an optimizer step.

The step runs on fake tensors, as for `plan`, with the callback on. Each forward pass of a converted layer is
one product, also the one that recomputes it; each backward pass one for the input's gradient and one for the
weight's, where they are needed, which is added in place from the second backward pass of a step on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_eff.commands._bench.gemm_problem import Case
from lightning_eff.core.errors import UsageError
from lightning_eff.kernels.linear import TritonLinear
from lightning_eff.planner.dry_run import ExampleBatch, dry_run

FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = "forward", "input's gradient", "weight's gradient"
TRITON_GEMM = "triton_gemm"


@dataclass(frozen=True, kw_only=True)
class LayerProduct:
    """One GEMM of a layer, and how often a step computes it."""

    layer: str
    product: str
    case: Case
    count: int


class _Watch(pl.Callback):
    """Counts the products of each optimizer step."""

    def __init__(self) -> None:
        self.steps: dict[int, Counter[tuple[str, str, Case]]] = {}
        self._watched: set[nn.Module] = set()

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        count = self.steps.setdefault(trainer.global_step, Counter())
        for name, module in pl_module.named_modules():
            if type(module) is TritonLinear and module not in self._watched:
                self._watched.add(module)
                module.register_forward_hook(partial(self._forward, name))
        self._count = count

    def _forward(self, name: str, layer: TritonLinear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        (x,) = inputs
        n, k = layer.weight.shape
        has_bias = getattr(layer, "bias", None) is not None
        rows = x.numel() // max(k, 1)
        case = Case(M=rows, N=n, K=k, layout="nt", dtype=output.dtype)
        self._count[name, FORWARD, replace(case, kind="bias" if has_bias else "plain")] += 1
        if output.requires_grad:
            output.register_hook(partial(self._backward, name, layer, case, needs_input=x.requires_grad))

    def _backward(self, name: str, layer: TritonLinear, case: Case, _: Tensor, *, needs_input: bool) -> None:
        rows, n, k = case.M, case.N, case.K
        if needs_input:
            self._count[name, INPUT_GRADIENT, replace(case, N=k, K=n, layout="nn")] += 1
        weight = layer.weight
        if not weight.requires_grad:
            return
        adds = _adds(layer)
        total = weight.grad if adds and weight.grad is not None else weight
        usual = torch.float32 if adds else case.dtype
        made = replace(
            case, M=n, N=k, K=rows, layout="tn", kind="adds" if adds else "plain",
            out_dtype=None if total.dtype == usual else total.dtype,
        )  # fmt: skip
        self._count[name, WEIGHT_GRADIENT, made] += 1


def _adds(layer: TritonLinear) -> bool:
    """Return whether a weight's gradient is added to the present one, as `Accumulation.takes` decides.

    Not by calling it: it takes plain tensors alone, and those of this run are fake.
    """
    weight, accumulation = layer.weight, getattr(layer, "accumulation", None)
    has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
    is_open = accumulation is not None and accumulation._depth > 0  # noqa: SLF001
    return is_open and weight.grad is not None and not has_hooks


def layer_products(
    values: Mapping[str, Any], example: ExampleBatch | None = None, *, is_cuda: bool = False
) -> list[LayerProduct]:
    """Return the products of an optimizer step, layer by layer in the order of their first call.

    Args:
        values: Of a composed recipe with `callbacks/triton_gemm`.
        example: Batch to run with; None takes one from the data.
        is_cuda: As in `dry_run`.

    Raises:
        UsageError: No layer is converted.
        Exception: Whatever ends the step where there are no values.
    """
    watch = _Watch()
    found = dry_run(values, example, is_cuda=is_cuda, watch=watch)
    if found.error is not None:
        raise found.error
    if not any(watch.steps.values()):
        text = "bench --tune: callbacks/triton_gemm converts no linear layer of this recipe"
        text += "\n  try: +callbacks=triton_gemm callbacks.triton_gemm.min_features=16"
        raise UsageError(text)
    # The first step has what only happens once; later ones are all alike.
    counted = watch.steps[max(step for step, count in watch.steps.items() if count)]
    return [
        LayerProduct(layer=layer, product=product, case=case, count=count)
        for (layer, product, case), count in counted.items()
    ]


def case_counts(products: Sequence[LayerProduct]) -> dict[Case, int]:
    """Return how often a step computes each distinct GEMM, that with the most FLOPs in total first."""
    counts: Counter[Case] = Counter()
    for each in products:
        counts[each.case] += each.count
    return dict(sorted(counts.items(), key=lambda item: -flops(item[0]) * item[1]))


def flops(case: Case) -> int:
    """Return the floating-point operations of a GEMM, two for a multiply-add."""
    return 2 * case.M * case.N * case.K
