"""Cross-entropy, log-probabilities and distillation of an output projection, without its logits.

The logits [N, V] of a language model are often the largest tensor of its step, and their gradient is as
large. Here they exist for some rows at a time: `_cross_entropy/tiles.py` makes the tiles and the gradients of
x, weight and bias, `_cross_entropy/rows.py` what is made of a tile's rows.

Why not torch's `F.linear_cross_entropy` (2.13): it ignores autocast, its float16 gradients underflow, it has
neither softcap nor z-loss nor adapters, and returns a loss of 16 bits; `backend="torch"` takes it.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels._cross_entropy.checks import (
    LowRank,
    check_low_rank,
    check_options,
    checked_rows,
    checked_target,
)
from lightning_eff.kernels._cross_entropy.function import Plan, TiledLoss
from lightning_eff.kernels._cross_entropy.rows import CrossEntropy, Divergence, LogProb, wide_dtype
from lightning_eff.kernels._cross_entropy.tiles import RowLoss, tile_rows_of

Reduction = Literal["mean", "sum", "none"]
Backend = Literal["auto", "tiled", "torch"]


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
    backend: Backend = "auto",
) -> Tensor:
    """Return the cross-entropy of `x @ weight.T + bias`, whose rows are made tile by tile.

    Args:
        x: Hidden states, `d` features last.
        weight: Of the output projection, as `nn.Linear` stores it.
        target: Class of each row; rows with `ignore_index` have no loss and are not computed.
        bias: One value per class, or None.
        ignore_index: The target that is none.
        label_smoothing: Share of the loss that is spread over all classes, 0 to 1.
        z_loss: Factor of the square of the log of the sum of exponentials.
        softcap: Logits become `softcap * tanh(logits / softcap)`; None for none.
        temperature: Divides the logits, after `softcap`.
        class_weight: Factor of each class, as `weight` of `F.cross_entropy`.
        reduction: `mean` over the targets' weights, `sum`, or `none`.
        tile_budget_mib: Memory for float32 logits in MiB; None for the larger of `x` and 16 on a CPU or 64 on
            a GPU, but at most an eighth of all rows. A GPU needs up to three times as much, and 16-bit inputs
            are computed in 16 tiles at most.
        low_rank: An adapter of the projection: rows [*batch, r] and weight [v, r], whose product is added.
        backend: `tiled`: this module; `torch`: torch's own, from 2.13 on. `auto` is `tiled` everywhere: on a
            CPU it takes as long as torch's fastest, within 5 %, and at most its memory, within 1 %, and in
            bfloat16 torch's loss has an error of 8e-3 and this one 1e-7 (benchmarks/tiled_loss.py). On a GPU
            neither was measured.

    Returns:
        Nats in float32 (float64 for float64 inputs): a scalar, or for `none` one value per target, 0 where it
        is ignored. The mean over no target is NaN, with gradients of 0, as in torch.

    Raises:
        ConfigError: A number or name is outside its range, or torch's own has no such option.
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that do not fit.
        IndexError: A target that is no class; on a GPU an error of CUDA, as in torch.

    Example:
        >>> x, weight, target = torch.eye(3), torch.eye(3), torch.tensor([0, 1, -100])
        >>> loss = linear_cross_entropy(x, weight, target)
        >>> torch.allclose(loss, torch.nn.functional.cross_entropy(x @ weight.T, target))
        True
    """
    check_options(
        label_smoothing=label_smoothing, z_loss=z_loss, softcap=softcap, temperature=temperature,
        tile_budget_mib=tile_budget_mib,
    )  # fmt: skip
    if reduction not in get_args(Reduction):
        raise ConfigError(
            key="reduction", value=reduction, allowed=f"one of {', '.join(get_args(Reduction))}"
        )
    if backend not in get_args(Backend):
        raise ConfigError(key="backend", value=backend, allowed=f"one of {', '.join(get_args(Backend))}")
    rows, dtype = checked_rows(x, weight, target, bias=bias, class_weight=class_weight)
    flat_target = checked_target(target, len(weight), ignore_index)
    if backend == "torch":
        if label_smoothing or z_loss or softcap is not None or temperature != 1.0 or low_rank is not None:
            names = "label_smoothing, z_loss, softcap, temperature and low_rank"
            allowed = f"tiled, for {names}, which torch's own does not have in tiles"
            raise ConfigError(key="backend", value=backend, allowed=allowed)
        return _by_torch(
            rows.to(dtype), weight.to(dtype), target, bias, class_weight, reduction,
            ignore_index, tile_rows_of(rows, len(weight), tile_budget_mib),
        )  # fmt: skip
    wide = wide_dtype(dtype)
    weights = None if class_weight is None else class_weight.detach().to(wide)
    loss = CrossEntropy(
        target=flat_target, label_smoothing=float(label_smoothing), z_loss=float(z_loss), softcap=softcap,
        temperature=float(temperature), class_weight=weights,
    )  # fmt: skip
    kept = flat_target != ignore_index
    index = None if bool(kept.all()) else kept.nonzero().squeeze(1)
    factor: Tensor | None = None
    if reduction != "none":
        factor = torch.ones((), dtype=wide, device=x.device)
        if reduction == "mean":
            targets = flat_target if index is None else flat_target[index]
            factor /= weights[targets].sum() if weights is not None else len(targets)
    values = _tiled(rows, weight, bias, low_rank, dtype, loss, index, tile_budget_mib, factor)
    return values.view(target.shape) if reduction == "none" else values


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
    """Return the log-probability of each target, for losses of preferences and of policies.

    Args:
        x: As for `linear_cross_entropy`, like all that is not listed here.
        weight: Of the output projection.
        target: Every one is a class: there is no index that is ignored; select rows first.
        bias: One value per class, or None.
        temperature: Divides the logits, after `softcap`.
        softcap: Logits become `softcap * tanh(logits / softcap)`.
        with_entropy: Return the entropy of each row too, with its gradient.
        tile_budget_mib: Memory for float32 logits in MiB.
        low_rank: An adapter of the projection.

    Returns:
        Nats, at most 0, in float32 (float64 for float64 inputs), in the shape of `target`; with
        `with_entropy` two of these.

    Raises:
        ConfigError: A number is outside its range.
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that do not fit.
        IndexError: A target that is no class; on a GPU an error of CUDA, as in torch.

    Example:
        >>> token_logprobs(torch.zeros(1, 2), torch.zeros(4, 2), torch.tensor([3])).exp()
        tensor([0.2500])
    """
    check_options(softcap=softcap, temperature=temperature, tile_budget_mib=tile_budget_mib)
    rows, dtype = checked_rows(x, weight, target, bias=bias)
    flat_target = checked_target(target, len(weight), None)
    loss = LogProb(
        target=flat_target, temperature=float(temperature), softcap=softcap, num_values=1 + with_entropy
    )
    values = _tiled(rows, weight, bias, low_rank, dtype, loss, None, tile_budget_mib, None)
    each = [value.view(target.shape) for value in values.unbind(1)]
    return (each[0], each[1]) if with_entropy else each[0]


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
    """Return the divergence of each row's distribution from a teacher's, for distillation.

    Args:
        x: The student's hidden states.
        weight: The student's output projection.
        teacher_x: The teacher's hidden states, of any width.
        teacher_weight: The teacher's output projection; neither gets a gradient.
        temperature: Divides both logits.
        beta: 0 for KL(teacher, student), 1 for KL(student, teacher); between them the generalized
            Jensen-Shannon divergence, `beta * KL(teacher, m) + (1 - beta) * KL(student, m)` with
            `m = beta * teacher + (1 - beta) * student`.
        tile_budget_mib: Memory for the student's float32 logits in MiB; the teacher's need as much again.

    Returns:
        Nats in float32 (float64 for float64 inputs), in the shape of the rows.

    Raises:
        ConfigError: A number is outside its range.
        ValueError: Shapes that do not fit.
        TypeError: Dtypes that do not fit.

    Example:
        >>> x, weight = torch.randn(5, 2), torch.randn(4, 2)
        >>> linear_kl(x, weight, x, weight).abs().max() < 1e-6
        tensor(True)
    """
    check_options(temperature=temperature, beta=beta, tile_budget_mib=tile_budget_mib)
    rows, dtype = checked_rows(x, weight)
    teacher_rows, teacher_dtype = checked_rows(teacher_x, teacher_weight, of="teacher_")
    own, taught = (
        f"{len(w)} classes and rows {[*h.shape[:-1]]}" for h, w in ((x, weight), (teacher_x, teacher_weight))
    )
    if own != taught:
        raise ValueError(f"a teacher of {taught} and a student of {own}: expected as many")
    teacher = (teacher_rows.detach().to(teacher_dtype), teacher_weight.detach().to(teacher_dtype))
    loss = Divergence(teacher=teacher, temperature=float(temperature), beta=float(beta))
    return _tiled(rows, weight, None, None, dtype, loss, None, tile_budget_mib, None).view(x.shape[:-1])


def _tiled(
    rows: Tensor, weight: Tensor, bias: Tensor | None, low_rank: LowRank | None, dtype: torch.dtype,
    loss: RowLoss, index: Tensor | None, tile_budget_mib: float | None, factor: Tensor | None,
) -> Tensor:  # fmt: skip
    """Return the values of rows, or with `factor` their sum times it."""
    pairs = [rows.to(dtype), weight]  # the cast of the rows is autograd's, as under autocast
    if low_rank is not None:
        check_low_rank(low_rank, len(rows), len(weight))
        pairs += [low_rank[0].reshape(len(rows), -1).to(dtype), low_rank[1]]
    in_forward = factor is not None and may_form_gradients(dtype)
    tile_rows = tile_rows_of(pairs[0], len(weight), tile_budget_mib)
    plan = Plan(loss, dtype, index, tile_rows, factor if in_forward else None)
    values = _untraced_apply(plan, bias, *pairs)
    return values if in_forward or factor is None else values.sum() * factor


_untraced: Any = torch.compiler.disable
_untraced_apply: Any = _untraced(TiledLoss.apply)
"""The number of tiles depends on values: a compiler that meets them breaks its graph here."""


@_untraced
def may_form_gradients(dtype: torch.dtype) -> bool:
    """Return whether the gradients of a scalar are formed in the forward pass.

    Not in float16, where they would underflow without the loss scale; nor where they are not wanted; nor
    within a checkpoint, whose forward pass runs twice: it is seen by its hooks on saved tensors.
    """
    if dtype == torch.float16 or not torch.is_grad_enabled():
        return False
    autograd: Any = torch._C._autograd  # noqa: SLF001  # pyright: ignore[reportPrivateUsage, reportAttributeAccessIssue]
    return autograd._top_saved_tensors_default_hooks(True) is None  # noqa: SLF001, FBT003


def _by_torch(
    rows: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, class_weight: Tensor | None,
    reduction: str, ignore_index: int, tile_rows: int,
) -> Tensor:  # fmt: skip
    """Compute by `F.linear_cross_entropy`, with the options that measured best."""
    function = getattr(torch.nn.functional, "linear_cross_entropy", None)
    if function is None:
        allowed = f"tiled: torch {torch.__version__} has no linear_cross_entropy, which 2.13 brought"
        raise ConfigError(key="backend", value="torch", allowed=allowed)
    options: Any = getattr(torch.nn, "LinearCrossEntropyOptions")(  # noqa: B009 - since torch 2.13
        batch_chunk_size=tile_rows, chunking_method=None, acc_policy="accurate", allow_retain_graph=True
    )
    with torch.autocast(rows.device.type, enabled=False):
        values = function(
            rows, weight, target.reshape(-1), linear_bias=bias, weight=class_weight, reduction=reduction,
            ignore_index=ignore_index, options=options,
        )  # fmt: skip
    return values.view(target.shape) if reduction == "none" else values
