"""List the GEMMs of a recipe's linear layers, as `callbacks/triton_gemm` computes them in an optimizer step.

The step runs on fake tensors, as for `plan`, with the callback on. Each forward pass of a converted layer is
one product, also the one that recomputes it; each backward pass one for the input's gradient and one for the
weight's, where they are needed, which is added in place from the second backward pass of a step on. An MLP as
one function calls none of its layers but the gate: its products are listed under the names of the others.
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

from lightning_eff.callbacks.triton_gemm import FusedMLP
from lightning_eff.commands._bench.gemm_problem import GRADIENTS, Case, Kind
from lightning_eff.core.errors import UsageError
from lightning_eff.kernels import matmul
from lightning_eff.kernels.linear import Accumulation, TritonLinear
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
        self._count = self.steps.setdefault(trainer.global_step, Counter())
        for name, module in pl_module.named_modules():
            mlp = vars(module).get("forward")
            if module in self._watched or not (type(module) is TritonLinear or isinstance(mlp, FusedMLP)):
                continue
            self._watched.add(module)
            if isinstance(mlp, FusedMLP):
                names: dict[nn.Module, str] = {
                    layer: each for each, layer in module.named_modules(prefix=name)
                }
                module.register_forward_pre_hook(partial(self._mlp_forward, names, mlp))
                module.register_forward_hook(partial(self._mlp_result, names, mlp))
            else:
                module.register_forward_hook(partial(self._forward, name))

    def _forward(self, name: str, layer: TritonLinear, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        (x,) = inputs
        case = _forward_case(layer, x, output.dtype)
        self._count[name, FORWARD, case] += 1
        if output.requires_grad:
            how: dict[str, Any] = {
                "accumulation": getattr(layer, "accumulation", None),
                "needs_input": x.requires_grad,
            }
            output.register_hook(partial(self._backward, name, layer, case, **how))

    def _mlp_forward(
        self, names: Mapping[nn.Module, str], mlp: FusedMLP, _: nn.Module, inputs: tuple[Tensor, ...]
    ) -> None:
        """Count before the MLP runs: one that is recomputed ends as soon as all that was saved is back."""
        for layer, case in _mlp_cases(mlp, inputs).items():
            self._count[names[layer], FORWARD, case] += 1

    def _mlp_result(
        self, names: Mapping[nn.Module, str], mlp: FusedMLP, _: nn.Module, inputs: tuple[Tensor, ...],
        output: Tensor,
    ) -> None:  # fmt: skip
        for layer, case in _mlp_cases(mlp, inputs).items() if output.requires_grad else ():
            needs_input, kind = inputs[0].requires_grad, None
            if layer is mlp.layers.down:
                before = [each for each in mlp.layers.all if each is not layer]
                needs_input |= any(p.requires_grad for each in before for p in each.parameters())
                if layer.weight.requires_grad:  # else what went in is not stored
                    kind = GRADIENTS.get(_mlp_kind(mlp) or "plain")
            output.register_hook(
                partial(self._backward, names[layer], layer, case, needs_input=needs_input,
                        accumulation=mlp.accumulation, kind=kind or "plain")
            )  # fmt: skip

    def _backward(
        self, name: str, layer: nn.Linear, case: Case, _: Tensor, *, needs_input: bool,
        accumulation: Accumulation | None, kind: Kind = "plain",
    ) -> None:  # fmt: skip
        """Count the input's gradient, of a kind, and the weight's."""
        rows, n, k, weight = case.M, case.N, case.K, layer.weight
        plain = replace(case, kind="plain")
        if needs_input:
            self._count[name, INPUT_GRADIENT, replace(plain, N=k, K=n, layout="nn", kind=kind)] += 1
        if not weight.requires_grad:
            return
        adds = _adds(weight, accumulation)
        total = weight.grad if adds and weight.grad is not None else weight
        usual = torch.float32 if adds else case.dtype
        made = replace(
            plain, M=n, N=k, K=rows, layout="tn", kind="adds" if adds else "plain",
            out_dtype=None if total.dtype == usual else total.dtype,
        )  # fmt: skip
        self._count[name, WEIGHT_GRADIENT, made] += 1


def _forward_case(layer: nn.Linear, x: Tensor, dtype: torch.dtype) -> Case:
    n, k = layer.weight.shape
    kind = "bias" if getattr(layer, "bias", None) is not None else "plain"
    return Case(M=x.shape[:-1].numel(), N=n, K=k, layout="nt", dtype=dtype, kind=kind)


def _mlp_kind(mlp: FusedMLP) -> Kind | None:
    """Return the kind of the up projection, None where `bench` has none with this activation."""
    kinds: dict[tuple[str, bool], Kind] = {("silu", True): "gated", ("gelu_tanh", False): "activated"}
    return kinds.get((mlp.layers.activation, mlp.layers.gate is not None))


def _mlp_cases(mlp: FusedMLP, inputs: tuple[Tensor, ...]) -> dict[nn.Linear, Case]:
    """Return the forward products of the layers that are no modules of their own; empty if none is fused."""
    if len(inputs) != 1 or not mlp._applies(inputs[0]):  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        return {}
    (x,), up, down = inputs, mlp.layers.up, mlp.layers.down
    dtype = matmul.autocast_dtype(x.device.type, x.dtype, up.weight.dtype) or x.dtype
    case, kind = _forward_case(up, x, dtype), _mlp_kind(mlp)
    return {up: replace(case, kind=kind) if kind else case, down: _forward_case(down, x, dtype)}


def _adds(weight: Tensor, accumulation: Accumulation | None) -> bool:
    """Return whether a weight's gradient is added to the present one, as `Accumulation.takes` decides.

    Not by calling it: it takes plain tensors alone, and those of this run are fake.
    """
    has_hooks = weight._backward_hooks or getattr(weight, "_post_accumulate_grad_hooks", None)  # noqa: SLF001
    is_open = accumulation is not None and accumulation._depth > 0  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
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
