"""Cross-entropy, log-probabilities and distillation losses of an output projection, in tiles of logits.

The logits [N, V] of a language model are often the largest tensor of a step, and their gradient is as large.
Here logits exist for only a few rows at a time. `_row_losses.py` computes the tiles, the losses, and the
gradients of x, weight and bias. On a GPU, the Triton kernel in `_row_kernel.py` computes the losses of a tile
and the gradients of its logits. The autograd function has two modes:

*In forward*: all three GEMMs run in the forward pass, and the backward pass multiplies the gradients by a
factor. This mode is for a scalar loss, because its gradients are known up to that factor. *In backward*: the
forward pass saves only its inputs, and the backward pass computes the logits again, in a fourth GEMM. This
mode is for losses with one value per row, for float16 (gradients would underflow without the loss scale), and
for checkpointed blocks (gradients would be computed twice).

The autograd function returns gradients for its inputs, so hooks, DDP, FSDP2, tied weights and optimizers that
step in the backward pass get one gradient per weight. `callbacks/tiled_loss` calls this module.

Why not torch's `F.linear_cross_entropy` (2.13): it ignores autocast, its float16 gradients underflow, it has
no softcap, z-loss or adapters, and it returns a 16-bit loss. In bfloat16 the error of torch's loss is 8e-3,
and the error of this loss is 1e-7. Compared with torch's fastest options on a CPU, this loss takes at most
5 % longer and at most 1 % more memory. For small losses with a frozen weight, this loss takes 20 % longer,
and 37 % longer in bfloat16 (docs/benchmarks/tiles.md).
Why not an inner `backward()` per tile: hooks would fire once per tile, and DDP rejects the second call.
Why not checkpointing per tile: autograd adds each tile's dW [V, D] to the previous sum, which takes twice the
memory.
"""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels._row_losses import (
    PART_BYTES,
    PART_BYTES_TRAINED,
    CrossEntropy,
    Divergence,
    Projection,
    RowLoss,
    in_tiles,
    tile_rows_of,
    wide_dtype,
)
from lightning_eff.kernels.matmul import autocast_dtype

Reduction = Literal["mean", "sum", "none"]
LowRank = tuple[Tensor, Tensor]
"""Rows [*batch, r] and weight [V, r], whose product an adapter adds to the logits."""
MIN = math.ulp(0.0)
MAX = sys.float_info.max
RANGES: dict[str, tuple[float, float, str]] = {
    "label_smoothing": (0.0, 1.0, "0 to 1"),
    "z_loss": (0.0, MAX, "0 (none) or a number above it, 1e-4 for example"),
    "softcap": (MIN, MAX, "a finite number above 0, or None"),
    "temperature": (MIN, MAX, "a finite number above 0"),
    "beta": (0.0, 1.0, "0 (KL(teacher, student)) to 1 (KL(student, teacher))"),
    "tile_budget_mib": (MIN, MAX, "a finite number of MiB above 0, or None"),
}
"""Smallest and largest value of each option, and the range in words."""
_untraced: Any = torch.compiler.disable


def linear_cross_entropy(
    x: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "v d"],
    target: Int[Tensor, "*batch"],
    bias: Float[Tensor, " v"] | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    class_weight: Float[Tensor, " v"] | None = None,
    reduction: Reduction = "mean",
    tile_budget_mib: float | None = None,
    low_rank: LowRank | None = None,
) -> Tensor:
    """Return the cross-entropy of `x @ weight.T + bias`, computed tile by tile.

    Args:
        x: Hidden states, `d` features last.
        weight: Weight of the output projection, as `nn.Linear` stores it.
        target: Class of each row; rows with `ignore_index` have no loss and are skipped.
        bias: One value per class, or None.
        ignore_index: Target value of rows without a loss.
        label_smoothing: Fraction of the loss that is spread over all classes, 0 to 1.
        z_loss: Factor of the z-loss, which is the squared logsumexp of the logits.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None leaves logits unchanged.
        temperature: Divisor of the logits, applied after `softcap`.
        class_weight: Weight of each class, like `weight` of `F.cross_entropy`.
        reduction: `mean` (divides by the sum of the targets' weights), `sum`, or `none`.
        tile_budget_mib: Memory for float32 logits in MiB. On a CPU, None means the size of `x`, but at least
            16 MiB; a tile then has at least 128 rows and at most an eighth of all rows. On a GPU, None means
            the size of `x`, but at least a 64th of the GPU's memory, rounded down to a power of two; a tile
            then has at most 2,048 rows. A GPU without Triton needs up to three times as much memory. 16-bit
            inputs are divided into at most 16 tiles.
        low_rank: An adapter of the projection: rows [*batch, r] and weight [v, r], whose product is added to
            the logits.

    Returns:
        The loss in nats, in float32 (float64 for float64 inputs). The reduction `none` gives one value per
        target, 0 for ignored targets; other reductions give a scalar. As in torch, the mean over no targets
        is NaN and has gradients of 0.

    Raises:
        ConfigError: A number is out of range, or the reduction is unknown.
        ValueError: Shapes do not fit.
        TypeError: Dtypes do not fit.
        RuntimeError: A target is not the index of a class. On a GPU the loss is NaN instead.

    Example:
        >>> x, weight, target = torch.eye(3), torch.eye(3), torch.tensor([0, 1, -100])
        >>> loss = linear_cross_entropy(x, weight, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, target))
        True
    """
    _check_options(
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, temperature=temperature,
        tile_budget_mib=tile_budget_mib,
    )  # fmt: skip
    if reduction not in get_args(Reduction):
        raise ConfigError(
            key="reduction", value=reduction, allowed=f"one of {', '.join(get_args(Reduction))}"
        )
    rows, dtype = _checked_rows(x, weight, target, bias=bias, class_weight=class_weight)
    flat_target = _flat_target(target)
    wide = wide_dtype(dtype)
    # Class weights get no gradient, as in torch.
    weights = None if class_weight is None else class_weight.detach().to(wide)
    loss = CrossEntropy(
        target=flat_target, label_smoothing=float(label_smoothing), z_loss=float(z_loss), softcap=softcap,
        temperature=float(temperature), class_weight=weights,
    )  # fmt: skip
    # Ignored rows are never computed: `index` selects the other rows. The size of `index` depends on values,
    # so the CPU waits for the GPU.
    kept = flat_target != ignore_index
    index = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    pairs = _pairs(rows, weight, low_rank, dtype)
    tile_rows = tile_rows_of(pairs[0], len(weight), tile_budget_mib)
    if reduction == "none":
        return _apply(Plan(loss, dtype, tile_rows, index), bias, *pairs).view(target.shape)
    # loss = factor * sum of the rows' losses. The mean divides by the sum of the targets' weights w_t, not by
    # N.
    factor = torch.ones((), dtype=wide, device=x.device)
    if reduction == "mean":
        targets = flat_target if index is None else flat_target[index]
        factor /= len(targets) if weights is None else weights[targets].sum()
    if _may_form_gradients(dtype):
        return _apply(Plan(loss, dtype, tile_rows, index, factor), bias, *pairs)
    # Gradients are computed in the backward pass, so that they include the loss scale. `_apply` returns one
    # value per row, and the values are summed here.
    return _apply(Plan(loss, dtype, tile_rows, index), bias, *pairs).sum() * factor


@overload
def token_logprobs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, with_entropy: Literal[False] = False, tile_budget_mib: float | None = None,
    low_rank: LowRank | None = None,
) -> Tensor: ...  # fmt: skip


@overload
def token_logprobs(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, temperature: float = 1.0,
    softcap: float | None = None, with_entropy: Literal[True], tile_budget_mib: float | None = None,
    low_rank: LowRank | None = None,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


def token_logprobs(
    x: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "v d"],
    target: Int[Tensor, "*batch"],
    bias: Float[Tensor, " v"] | None = None,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    with_entropy: bool = False,
    tile_budget_mib: float | None = None,
    low_rank: LowRank | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Return the log-probability of each target, for preference and policy losses.

    Args:
        x: Hidden states, `d` features last.
        weight: Weight of the output projection, as `nn.Linear` stores it.
        target: Class of each row. There is no ignored index, so rows must be selected before the call.
        bias: One value per class, or None.
        temperature: Divisor of the logits, applied after `softcap`.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None leaves logits unchanged.
        with_entropy: Also return the entropy of each row, which is differentiable.
        tile_budget_mib: Memory for float32 logits in MiB; None means the same as in `linear_cross_entropy`.
        low_rank: An adapter of the projection, as in `linear_cross_entropy`.

    Returns:
        Log-probabilities in nats (at most 0), in float32 (float64 for float64 inputs), in the shape of
        `target`. With `with_entropy`, a pair: the log-probabilities, and the entropies in the same shape.

    Raises:
        ConfigError: A number is out of range.
        ValueError: Shapes do not fit.
        TypeError: Dtypes do not fit.
        RuntimeError: A target is not the index of a class. On a GPU the result is NaN instead.

    Example:
        >>> token_logprobs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3])).exp()
        tensor([0.2500])
    """
    _check_options(softcap=softcap, temperature=temperature, tile_budget_mib=tile_budget_mib)
    rows, dtype = _checked_rows(x, weight, target, bias=bias)
    loss = CrossEntropy(
        target=_flat_target(target), temperature=float(temperature), softcap=softcap,
        num_values=1 + with_entropy,
    )  # fmt: skip
    pairs = _pairs(rows, weight, low_rank, dtype)
    plan = Plan(loss, dtype, tile_rows_of(pairs[0], len(weight), tile_budget_mib))
    # Columns of the result [N, k]: the loss, and the entropy if requested. A loss is -log p.
    values = [value.view(target.shape) for value in _apply(plan, bias, *pairs).unbind(1)]
    return (-values[0], values[1]) if with_entropy else -values[0]


def linear_kl(
    x: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "v d"],
    teacher_x: Float[Tensor, "*batch e"],
    teacher_weight: Float[Tensor, "v e"],
    *,
    temperature: float = 1.0,
    beta: float = 0.0,
    tile_budget_mib: float | None = None,
) -> Tensor:
    """Return the divergence of each row's distribution from the teacher's, for distillation.

    Args:
        x: The student's hidden states.
        weight: The student's output projection.
        teacher_x: The teacher's hidden states, of any width.
        teacher_weight: The teacher's output projection. The teacher gets no gradients.
        temperature: Divisor of the logits of student and teacher.
        beta: 0 for KL(teacher, student), 1 for KL(student, teacher). A value between 0 and 1 gives the
            generalized Jensen-Shannon divergence, `beta * KL(teacher, m) + (1 - beta) * KL(student, m)` with
            `m = beta * teacher + (1 - beta) * student`.
        tile_budget_mib: Memory for the student's float32 logits in MiB; the teacher's logits need as much
            again.

    Returns:
        Divergences in nats, in float32 (float64 for float64 inputs), one per row, `[*batch]`.

    Raises:
        ConfigError: A number is out of range.
        ValueError: Shapes do not fit.
        TypeError: Dtypes do not fit.

    Example:
        >>> x, weight = torch.randn(5, 2), torch.randn(4, 2)
        >>> linear_kl(x, weight, x, weight).abs().max() < 1e-6
        tensor(True)
    """
    _check_options(temperature=temperature, beta=beta, tile_budget_mib=tile_budget_mib)
    rows, dtype = _checked_rows(x, weight)
    teacher_rows, teacher_dtype = _checked_rows(teacher_x, teacher_weight, of="teacher_")
    own, taught = (
        f"{len(w)} classes and rows {[*h.shape[:-1]]}" for h, w in ((x, weight), (teacher_x, teacher_weight))
    )
    # The numbers of classes and rows must agree; the widths D of the two models may differ.
    if own != taught:
        raise ValueError(f"a teacher of {taught} and a student of {own}: expected as many")
    # Detached, because the teacher gets no gradients.
    teacher = (teacher_rows.detach().to(teacher_dtype), teacher_weight.detach().to(teacher_dtype))
    loss = Divergence(teacher=teacher, temperature=float(temperature), beta=float(beta))
    pairs = _pairs(rows, weight, None, dtype)
    plan = Plan(loss, dtype, tile_rows_of(pairs[0], len(weight), tile_budget_mib))
    return _apply(plan, None, *pairs).view(x.shape[:-1])


@dataclass(frozen=True, eq=False)
class Plan:
    """Settings of one loss computation.

    Args:
        loss: The loss to compute from the logits.
        dtype: Dtype in which rows and weights are multiplied.
        tile_rows: Number of rows per tile.
        index: Indices of the rows that have a loss; None for all rows.
        factor: Factor of the sum of the values. If `factor` is given, the result is a scalar, and the forward
            pass computes the gradients. If `factor` is None, the result is one value per row.
    """

    loss: RowLoss
    dtype: torch.dtype
    tile_rows: int
    index: Tensor | None = None
    factor: Tensor | None = None

    def projection(
        self, bias: Tensor | None, pairs: Sequence[Tensor], needs: Sequence[bool]
    ) -> tuple[Projection, list[Tensor | None]]:
        """Return the projection in the dtype of its products, and the tensors that get gradients."""
        # `pairs` alternates rows and weights: x, W, and with an adapter also u, B.
        receivers = [each if needed else None for each, needed in zip((bias, *pairs), needs, strict=True)]
        cast = [each.detach().to(self.dtype) for each in pairs]
        # receivers = [bias, x, W, u, B]: every second entry, starting at index 2, is a weight.
        is_trained = any(each is not None for each in receivers[2::2])
        projection = Projection(
            list(zip(cast[::2], cast[1::2], strict=True)), None if bias is None else bias.detach(),
            self.index, self.tile_rows, PART_BYTES_TRAINED if is_trained else PART_BYTES,
        )  # fmt: skip
        return projection, receivers


class LossInTiles(torch.autograd.Function):
    """The values of rows [N, k] or, if the plan has a factor, the factor times the sum of the values."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, bias: Tensor | None, *pairs: Tensor) -> Tensor:
        """Compute the values and, if the plan has a factor, the gradients."""
        # Needed even if gradients are computed here, because a retained graph may run backward twice.
        ctx.save_for_backward(bias, *pairs)
        ctx.plan = plan
        # d(factor * sum_i v_i) / d v_i = factor, for every row [N, 1].
        grads = None if plan.factor is None else plan.factor.expand(len(pairs[0]), 1)
        needs = ctx.needs_input_grad[1:] if grads is not None else [False] * (1 + len(pairs))
        projection, receivers = plan.projection(bias, pairs, needs)
        # The operands have their final dtypes. Autocast would cast float32 sums to 16 bits again.
        with torch.autocast(pairs[0].device.type, enabled=False):
            values, ctx.gradients = in_tiles(projection, plan.loss, grads, receivers)
        return values if plan.factor is None else values.sum() * plan.factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients times `grad`; compute the gradients if the forward pass has not computed them.

        Raises:
            RuntimeError: A second derivative is requested.
        """
        if torch.is_grad_enabled():  # torch would treat these gradients as constants
            raise RuntimeError(
                "a loss in tiles has no second derivative: compute whole logits for gradient penalties"
            )
        bias, *pairs = ctx.saved_tensors  # raises if the graph was freed
        # Drop the node's reference, so that the gradients are freed after their use.
        plan, gradients, ctx.gradients = ctx.plan, ctx.gradients, None
        if plan.factor is not None:
            if gradients is not None:
                # In place: only this node uses these gradients, and no other tensors here are as large.
                return None, *[None if each is None else each.mul_(grad) for each in gradients]
            # The second backward pass of a retained graph.
            grad = (grad * plan.factor).expand(len(pairs[0]), 1)
        projection, receivers = plan.projection(bias, pairs, ctx.needs_input_grad[1:])
        with torch.autocast(pairs[0].device.type, enabled=False):
            return None, *in_tiles(projection, plan.loss, grad, receivers)[1]


_apply: Any = _untraced(LossInTiles.apply)
"""The number of tiles depends on values, so torch.compile breaks its graph here."""


@_untraced
def _may_form_gradients(dtype: torch.dtype) -> bool:
    """Return whether the forward pass of a scalar loss computes the gradients.

    If gradients are disabled, none are computed. In float16, gradients would underflow without the loss
    scale. In a checkpointed block, the forward pass runs twice. In both cases, the backward pass computes the
    gradients. A checkpointed block is detected by its saved-tensor hooks.
    """
    if dtype == torch.float16 or not torch.is_grad_enabled():
        return False
    # Private in torch 2.11 to 2.13. Activation checkpointing sets hooks for saved tensors during the forward
    # pass.
    autograd: Any = torch._C._autograd  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(True) is None  # noqa: SLF001, FBT003


def _pairs(rows: Tensor, weight: Tensor, low_rank: LowRank | None, dtype: torch.dtype) -> list[Tensor]:
    """Return rows and weight of each product; autograd records the cast of the rows, as under autocast.

    Raises:
        ValueError: An adapter's shapes do not fit the projection.
    """
    pairs = [rows.to(dtype), weight]
    if low_rank is None:
        return pairs
    low, up = low_rank
    fits = up.ndim == 2 and len(up) == len(weight) and low.shape[-1:] == up.shape[1:]
    if not fits or low.numel() != len(rows) * up.shape[1]:
        raise ValueError(
            f"low_rank {list(low.shape)} and {list(up.shape)}: expected rows [*batch, r], {len(rows)} "
            f"in all, and a weight [{len(weight)}, r]"
        )
    # logits = x @ W.T + u @ B.T, with u [N, r] and B [V, r].
    return [*pairs, low.reshape(len(rows), up.shape[1]).to(dtype), up]


def _check_options(**options: Any) -> None:
    """Check numbers; None means that an option is not set.

    Why not `core.arguments`: that module needs beartype, which may not be installed where only kernels are
    measured.

    Raises:
        ConfigError: A value is not a number, or out of range.
    """
    for key, value in options.items():
        least, largest, allowed = RANGES[key]
        # A bool is an int in Python, but not a sensible factor.
        is_number = isinstance(value, numbers.Real) and value is not True and value is not False
        if not (is_number and least <= float(value) <= largest) and not (value is None and "None" in allowed):
            raise ConfigError(key=key, value=value, allowed=allowed)


def product_dtype(x: Tensor, weight: Tensor, *, of: str = "") -> torch.dtype:
    """Return the dtype in which rows and weight are multiplied; `of` is a prefix of names in errors.

    Raises:
        TypeError: Dtypes do not fit.
    """
    cast = autocast_dtype(x.device.type, x.dtype, weight.dtype)
    # Without autocast, torch rejects products of two dtypes.
    if not x.dtype.is_floating_point or (cast is None and x.dtype != weight.dtype):
        msg = f"{of}x of {x.dtype} and {of}weight of {weight.dtype}"
        raise TypeError(f"{msg}: expected one floating-point dtype, or autocast")
    return cast or x.dtype


def _checked_rows(
    x: Tensor, weight: Tensor, target: Tensor | None = None, *, of: str = "", **by_class: Tensor | None
) -> tuple[Tensor, torch.dtype]:
    """Return the rows [N, D], and the dtype of their products; `of` is a prefix of names in errors.

    Raises:
        ValueError: Shapes do not fit.
        TypeError: Dtypes do not fit.
    """
    has_target_shape = target is None or x.shape[:-1] == target.shape
    if weight.ndim != 2 or x.ndim < 1 or x.shape[-1:] != weight.shape[1:] or not has_target_shape:
        found = f", target {list(target.shape)}" if target is not None else ""
        expected = ", target [*batch]" if found else ""
        msg = f"{of}x {list(x.shape)}, {of}weight {list(weight.shape)}{found}: expected {of}x [*batch, d], "
        raise ValueError(f"{msg}{of}weight [v, d]{expected}")
    for name, each in by_class.items():
        if each is not None and each.shape != weight.shape[:1]:
            raise ValueError(f"{name} {list(each.shape)}: expected one value per class, [{len(weight)}]")
    return x.reshape(-1, x.shape[-1]), product_dtype(x, weight, of=of)


def _flat_target(target: Tensor) -> Tensor:
    """Return the targets as class indices [N]; `torch.gather` rejects indices that are out of range.

    Raises:
        TypeError: Targets are not integers. A cast would turn probabilities into classes.
    """
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype == torch.bool:
        raise TypeError(f"target of {target.dtype}: expected integers; for probabilities use linear_kl")
    return target.reshape(-1).to(torch.int64)
