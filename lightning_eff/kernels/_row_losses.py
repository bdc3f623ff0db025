"""Compute losses from the logits of an output projection, one tile of rows at a time.

    l [R, V] = x [R, D] @ W [V, D].T + bias            for the R rows of a tile, out of N
    values [R, k], G [R, V] = `RowLoss.of_tile(l)`     G is the gradient of l
    dx [R, D] = G @ W;  dW [V, D] += G.T @ x

cross_entropy.py calls `in_tiles`. A projection with an adapter is a sum of two products, x @ W.T + u @ B.T.
The adapter is never merged into W.

Logits are scaled before a loss reads them: softcap * tanh(l / softcap) / temperature. Then

    lse = log(sum_c exp(l_c)),  p_c = exp(l_c - lse)

Cross-entropy, with target t, class weights w (1 if none are set), label smoothing s and z-loss factor z:

    loss = w_t * ((1 - s) * (lse - l_t) + z * lse^2) + s / V * sum_c w_c * (lse - l_c)
    dloss / dl_c = A * p_c - (1 - s) * w_t * [c = t] - s / V * w_c
    A = w_t * (1 - s + 2 * z * lse) + s / V * sum_c w_c

On a CPU, a product of 16-bit operands has a 16-bit result, so logits are rounded to 16 bits. The target's
logit is then computed again in float32, and this value is used in both the loss and lse. Rounding errors of
the other logits average out; an error of the target's logit would not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from typing_extensions import override

from lightning_eff.kernels import _row_kernel, devices
from lightning_eff.kernels._row_kernel import PITCH

MIB = 1 << 20
CPU_BUDGET_MIB = 16
"""Smallest default of `tile_budget_mib` on a CPU, where tiles of that size roughly fit in the caches."""
MIN_TILES = 8
"""Smallest default number of tiles on a CPU; with a small vocabulary, fewer tiles save too little."""
MIN_ROWS = 128
"""Smallest default number of rows per CPU tile; smaller products are slow (benchmarks/tiled_loss.py)."""
GPU_SHARE = 64
"""A GPU's default budget is at least 1 / 64 of its memory, rounded down to a power of two."""
GPU_ROWS = 2048
"""Largest default number of rows per GPU tile; each tile reads and writes the weight's full gradient."""
MAX_16_BIT_TILES = 16
"""Largest number of tiles for 16-bit inputs, since each tile rounds a 16-bit weight gradient once more."""
PART_BYTES = 1 << 18
"""Bytes of float32 logits that a CPU processes at once, so that these logits stay in its caches."""
PART_BYTES_TRAINED = 1 << 20
"""`PART_BYTES` if the weight gets a gradient, which is larger than a part anyway; fewer parts save calls."""
CONVERTED_ROWS = 32
"""Number of rows that are converted to float32 at once."""
MAX_PARTS = 64
"""Largest number of parts of a tile on a CPU."""

Rows = Any
"""A slice, or a tensor of indices, that selects rows."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a loss is computed: float64 for float64 inputs, otherwise float32."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False)
class Projection:
    """An output projection as a sum of products, with operands in the dtype of the products.

    Args:
        pairs: Rows [N, D] and weight [V, D] of each product; D may differ between products.
        bias: Bias [V], or None.
        index: Indices of the rows that have a loss; None for all rows.
        tile_rows: Number of rows per tile.
        part_bytes: `PART_BYTES`, or `PART_BYTES_TRAINED`.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None
    index: Tensor | None
    tile_rows: int
    part_bytes: int = PART_BYTES

    def tiles(self) -> Iterator[tuple[Rows, Tensor]]:
        """Yield the rows of each tile and their logits; all tiles share one buffer."""
        x, weight = self.pairs[0]
        num_rows = len(x) if self.index is None else len(self.index)
        is_gpu = devices.gpu_of(x) is not None
        wide = is_gpu and x.dtype.itemsize == 2  # CUDA can return its float32 accumulator
        options: dict[str, Any] = {"out_dtype": torch.float32} if wide else {}
        # One buffer [tile_rows, V] for all tiles; the last tile uses fewer rows of it.
        step, width = max(1, min(self.tile_rows, num_rows)), len(weight)
        # For the GPU kernel, rows start at multiples of PITCH elements; columns beyond V are masked.
        pitch = -(-width // PITCH) * PITCH if is_gpu else width
        buffer = torch.empty(step, pitch, dtype=torch.float32 if wide else x.dtype, device=x.device)
        for start in range(0, num_rows, step):
            at = slice(start, min(start + step, num_rows))
            logits = buffer[: at.stop - start, :width]
            at = at if self.index is None else self.index[at]
            torch.mm(x[at], weight.T, **options, out=logits)
            for more, low_rank in self.pairs[1:]:
                # Added in place, so that no second tensor [r, V] exists.
                add_product(logits, more[at], low_rank.T)
            if self.bias is not None:
                logits.add_(self.bias)
            yield at, logits

    def gradient_of(self, logits: Tensor) -> Tensor:
        """Return a tensor for the gradient, which is `logits` itself if it has the dtype of the products."""
        dtype = self.pairs[0][0].dtype
        return logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)

    def parts(self, logits: Float[Tensor, "r v"], *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield a tile's logits and other tensors in parts of a few rows, which stay in a CPU's caches.

        For fake tensors, only the first part is yielded, because the other parts reuse the same memory.
        """
        num_rows, width = logits.shape
        # 4 bytes per float32 logit.
        fitting = max(self.part_bytes // (4 * width), -(-num_rows // MAX_PARTS), 1)
        step = num_rows if devices.gpu_of(logits) is not None else fitting
        # `split` makes all views of a tensor in one call, because there may be many.
        views = [repeat(None) if each is None else each.split(step) for each in (logits, *others)]
        return islice(zip(*views), 1 if is_fake(logits) else None)  # noqa: B905 - Nones repeat for ever

    def columns(self, at: Rows, columns: Tensor) -> Tensor:
        """Return one float32 logit per row [r], for the class that `columns` contains for that row."""
        # The target's logit: x_i . W_t + bias_t, a dot product per row instead of a product [r, V].
        exact = torch.zeros(len(columns), device=columns.device)
        for x, weight in self.pairs:
            rows = x[at]
            for start in range(0, len(columns), CONVERTED_ROWS):
                some = slice(start, start + CONVERTED_ROWS)
                # Converting all rows at once would need float32 copies [r, D] of rows and weight.
                exact[some] += (rows[some].float() * weight[columns[some]].float()).sum(-1)
                if is_fake(x):  # the other slices reuse the same memory
                    break
        return exact if self.bias is None else exact + self.bias[columns]


@dataclass(frozen=True, eq=False, kw_only=True)
class RowLoss:
    """A loss computed from rows of scaled logits."""

    softcap: float | None = None
    temperature: float = 1.0
    num_values: int = 1
    """Number of values per row."""

    def of_tile(
        self,
        projection: Projection,
        at: Rows,
        logits: Float[Tensor, "r v"],
        grads: Float[Tensor, "r k"] | None,
    ) -> tuple[Float[Tensor, "r k"], Float[Tensor, "r v"] | None]:
        """Return the values of a tile's rows and, if `grads` is given, the gradients of its logits.

        Args:
            projection: The source of the logits.
            at: Selects the tile's rows in the tensors of the loss, for example the targets.
            logits: Logits of the tile, which may be overwritten. The returned gradients have the dtype of the
                products and may use the memory of the logits.
            grads: Gradients of the values; None to compute only the values.
        """
        raise NotImplementedError

    def scale(self, logits: Tensor) -> Tensor:
        """Return scaled logits in float32 or float64; scale logits that already have this dtype in place."""
        if logits.dtype.itemsize == 2:
            logits = logits.float()
        if self.softcap is not None:
            # In place, because a tile of logits is the largest tensor here.
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def unscale(self, grad: Tensor, scaled: Tensor) -> Tensor:
        """Convert the gradient of scaled logits to the gradient of logits, in place; overwrite `scaled`."""
        if self.softcap is not None:
            tanh = scaled.mul_(self.temperature / self.softcap)
            # In place: grad - (grad * tanh) * tanh = grad * (1 - tanh^2).
            grad.addcmul_(grad * tanh, tanh, value=-1.0)  # d tanh(u) / du = 1 - tanh(u)^2
        return grad if self.temperature == 1.0 else grad.div_(self.temperature)


@dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(RowLoss):
    """Cross-entropy of each row and, if `num_values` is 2, also the entropy of each row."""

    target: Tensor
    label_smoothing: float = 0.0
    z_loss: float = 0.0
    class_weight: Tensor | None = None

    @override
    def of_tile(
        self, projection: Projection, at: Rows, logits: Tensor, grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        target, weights = self.target[at].unsqueeze(1), self.class_weight
        # Terms of the formula in this file's docstring: w_t, s / V * w_c, and s / V * sum_c w_c.
        weight: Any = 1.0 if weights is None else weights[target]
        smoothing = self.label_smoothing / logits.shape[1]
        of_class: Any = smoothing if weights is None else smoothing * weights
        of_classes: Any = self.label_smoothing if weights is None else of_class.sum()
        # Columns [r, 1] to be filled: the largest logit, its p, the target's logit, and a sum over classes c
        # (of s / V * w_c * l_c, or of -p_c * log p_c).
        stats = logits.new_empty(4, len(logits), 1, dtype=wide_dtype(logits.dtype)).unbind()
        factors = self._factors(grads, weight, of_classes)
        if _row_kernel.runs_on(logits):
            gradient = _row_kernel.compute(
                logits, projection.pairs[0][0].dtype, target, stats, factors, weights, smoothing=smoothing,
                softcap=self.softcap, temperature=self.temperature,
                sums="entropy" if self.num_values == 2 else "classes" if self.label_smoothing else "",
            )  # fmt: skip
        else:
            gradient = logits if grads is None else projection.gradient_of(logits)
            self._compute(projection, logits, gradient, target, stats, factors, of_class)
        values = self._values(projection, at, logits, stats, weight, of_classes)
        return values, None if grads is None else gradient

    def _compute(
        self, projection: Projection, logits: Tensor, gradient: Tensor, target: Tensor,
        stats: Sequence[Tensor], factors: Sequence[Tensor | None], of_class: Any,
    ) -> None:  # fmt: skip
        """Fill `stats` and, if factors are given, `gradient`; `_row_kernel.py` does this on a GPU."""
        for (
            row, row_target, of_p, of_target, of_lse, of_all, of_entropy, row_gradient,
            row_top, row_max, row_at_target, row_sum,
        ) in projection.parts(logits, target, *factors, gradient, *stats):  # fmt: skip
            scaled = self.scale(row)
            torch.amax(scaled, -1, keepdim=True, out=row_top)
            torch.gather(scaled, 1, row_target, out=row_at_target)
            if self.label_smoothing:
                torch.sum(scaled * of_class, -1, keepdim=True, out=row_sum)
            # Reuse the memory of the scaled logits, unless `unscale` still reads the scaled logits.
            p = torch.softmax(scaled, -1, out=scaled if self.softcap is None else None)
            torch.amax(p, -1, keepdim=True, out=row_max)
            surprise = torch.special.entr(p) if self.num_values == 2 else None  # -p * log p
            if surprise is not None:
                torch.sum(surprise, -1, keepdim=True, out=row_sum)
            if of_p is None:
                continue
            factor = of_p if of_lse is None else of_p + of_lse * (row_top - row_max.log())
            if surprise is not None:  # d entropy / d l_c = -p_c * log p_c - p_c * entropy
                p.mul_(factor - of_entropy * row_sum).addcmul_(surprise, of_entropy)
            else:
                p.mul_(factor)
            p.scatter_add_(1, row_target, of_target)
            if of_all is not None:
                p.sub_(of_all * of_class)
            row_gradient.copy_(self.unscale(p, scaled))  # no copy if both are the same memory
            del p, scaled, surprise  # free memory before the next part is converted

    def _factors(self, grads: Tensor | None, weight: Any, of_classes: Any) -> list[Tensor | None]:
        """Return factors [r, 1] of the gradient's terms: p, [c = t], lse * p, s / V * w_c, and entropy."""
        if grads is None:
            return [None] * 5
        # Columns of `grads`: the gradient of the loss, then of the entropy.
        s, grad = self.label_smoothing, grads[:, :1]
        of_p = grad * (weight * (1.0 - s) + of_classes)
        of_lse = grad * weight * (2.0 * self.z_loss) if self.z_loss else None
        of_entropy = grads[:, 1:] if self.num_values == 2 else None
        return [of_p, grad * weight * (s - 1.0), of_lse, grad if s else None, of_entropy]

    def _values(
        self, projection: Projection, at: Rows, logits: Tensor, stats: Sequence[Tensor], weight: Any,
        of_classes: Any,
    ) -> Tensor:  # fmt: skip
        top, p_max, rounded, sums = stats
        exact = rounded
        # lse - top is -log of the largest probability. A log of a sum of exponentials would round off the
        # small loss of a nearly certain target.
        above = -p_max.log()
        if logits.dtype.itemsize == 2:
            exact = self.scale(projection.columns(at, self.target[at])).unsqueeze(1)
            # If the correction exceeds 1 nat (logits around 1e3), the other logits have equally large errors,
            # so the rounded logit is kept.
            exact = torch.where((exact - rounded).abs() <= 1.0, exact, rounded)
            # With the corrected target, lse grows by log(1 + p_t * (exp(exact - rounded) - 1)), where p_t =
            # exp(rounded - lse).
            above += torch.log1p((rounded - top - above).exp() * torch.expm1(exact - rounded))
        lse = top + above
        values = (top - exact + above) * weight * (1.0 - self.label_smoothing)
        if self.z_loss:
            values += self.z_loss * weight * lse.square()
        if self.label_smoothing:
            values += of_classes * lse - sums
        return values if self.num_values == 1 else torch.cat([values, sums], 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence(RowLoss):
    """Generalized Jensen-Shannon divergence of a student s and a teacher t, with m = (1 - beta) s + beta t.

    The divergence is beta * KL(t, m) + (1 - beta) * KL(s, m). However, beta = 0 stands for KL(t, s), and beta
    = 1 for KL(s, t). The gradient of l_c is s_c * (u_c - sum_k s_k u_k) with u = (1 - beta) * log(s / m); for
    beta = 1, u = log(s / t).
    """

    teacher: tuple[Tensor, Tensor]
    beta: float

    @override
    def of_tile(
        self, projection: Projection, at: Rows, logits: Tensor, grads: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        x, weight = self.teacher
        # The teacher's logits [r, V], of the same rows.
        taught = x[at] @ weight.T
        values = logits.new_empty(len(logits), 1, dtype=wide_dtype(logits.dtype))
        gradient = None if grads is None else projection.gradient_of(logits)
        parts = projection.parts(logits, taught, values, grads, gradient)
        for row, row_taught, row_value, grad, row_gradient in parts:
            scaled = self.scale(row)
            log_s = torch.log_softmax(scaled, -1)
            log_t = torch.log_softmax(self.scale(row_taught), -1)
            value, of_scaled = self._value(log_s, log_t)
            row_value.copy_(value)
            if row_gradient is not None:
                row_gradient.copy_(self.unscale(of_scaled.mul_(grad), scaled))
        return values, gradient

    def _value(self, log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence [r, 1] of rows, and the gradient [r, V] of the student's scaled logits."""
        s, t, beta = log_s.exp(), log_t.exp(), self.beta
        if beta == 0.0:
            # beta = 0 stands for KL(t, s), whose gradient with respect to l_c is s_c - t_c.
            return (t * (log_t - log_s)).sum(-1, keepdim=True), s - t
        log_m = log_t
        if beta < 1.0:
            # log(beta * t + (1 - beta) * s), without leaving the log domain.
            log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
        u = log_s - log_m
        of_student = (s * u).sum(-1, keepdim=True)
        gradient = s.mul_(u - of_student)
        if beta == 1.0:
            return of_student, gradient
        of_teacher = (t * (log_t - log_m)).sum(-1, keepdim=True)
        return beta * of_teacher + (1.0 - beta) * of_student, gradient.mul_(1.0 - beta)


def tile_rows_of(x: Tensor, width: int, budget_mib: float | None) -> int:
    """Return the number of rows whose float32 logits fit into a budget.

    Args:
        x: The rows [N, D].
        width: Number of columns of the logits.
        budget_mib: Budget in MiB. On a CPU, None means the larger of 16 MiB and the size of `x`; a tile then
            has at least 128 rows and at most an eighth of all rows. On a GPU, None means the larger of the
            size of `x` and a 64th of the GPU's memory, rounded down to a power of two (1 GiB of an H100's 79
            GiB); a tile then has at most 2,048 rows. The default depends on the GPU's total memory, not on
            its free memory. So the default is known before a run, and all steps of a run have the same tiles.

    Example:
        >>> tile_rows_of(torch.zeros(2048, 256), 16000, None)
        256
        >>> from torch._subclasses import FakeTensorMode
        >>> with devices.predicted(devices.DEVICES["h100"]), FakeTensorMode():
        ...     tile_rows_of(torch.empty(8192, 4096, dtype=torch.bfloat16), 128256, None)
        2048
    """
    gpu, of_row = devices.gpu_of(x), 4 * max(width, 1)
    if budget_mib is not None:
        fitting = max(1, int(budget_mib * MIB / of_row))
    elif gpu is not None:
        share = 1 << (gpu.memory_bytes // GPU_SHARE).bit_length() - 1
        fitting = min(max(1, max(share, x.nbytes) // of_row), GPU_ROWS)
    else:
        fitting = min(max(CPU_BUDGET_MIB * MIB, x.nbytes) // of_row, -(-len(x) // MIN_TILES))
        fitting = max(fitting, MIN_ROWS)
    # Each tile rounds a 16-bit weight gradient once more, so the number of tiles is limited.
    if x.dtype.itemsize == 2:
        fitting = max(fitting, -(-len(x) // MAX_16_BIT_TILES))
    # Use the fewest tiles that fit, ceil(N / fitting), all of about equal size. Round the rows of a tile up
    # to a multiple of 8 if that still fits.
    even = -(-len(x) // max(1, -(-len(x) // fitting)))
    return max(1, min(-(-even // 8) * 8, fitting))


def in_tiles(
    projection: Projection,
    loss: RowLoss,
    grads: Float[Tensor, "n k"] | None = None,
    receivers: Sequence[Tensor | None] = (),
) -> tuple[Float[Tensor, "n k"], list[Tensor | None]]:
    """Return the values of all rows (0 for rows without a loss), and the gradients of `receivers`.

    Args:
        projection: The source of the logits.
        loss: The loss to compute from the logits.
        grads: Gradients of the values; None to compute only the values.
        receivers: Tensors that get gradients: the bias, then the rows and weight of each pair. A tensor that
            needs no gradient is replaced by None. A gradient has the dtype of its tensor.
    """
    x = projection.pairs[0][0]
    values = x.new_zeros(len(x), loss.num_values, dtype=wide_dtype(x.dtype))
    # [db, dx, dW, dx, dW, ...]: rows and weight of each pair follow the bias.
    found = [None if each is None else torch.zeros_like(each) for each in receivers]
    for at, logits in projection.tiles():
        values[at], grad = loss.of_tile(projection, at, logits, None if grads is None else grads[at])
        if grad is None:
            continue
        if found[0] is not None:
            # Summed in float32, because a 16-bit sum would be rounded at every row.
            found[0] += grad.sum(0, dtype=values.dtype)
        for (rows, weight), of_rows, of_weight in zip(
            projection.pairs, found[1::2], found[2::2], strict=True
        ):
            # A slice gives a view, to which `out` can write; a tensor of indices gives a copy.
            if of_rows is not None and isinstance(at, slice):
                torch.mm(grad, weight, out=of_rows[at])
            elif of_rows is not None:
                of_rows[at] = grad @ weight
            if of_weight is not None:
                add_product(of_weight, grad.T, rows[at])
    return values, found


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add `a @ b` to `total`, whose dtype is the dtype of `a` and `b`, or float32."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif devices.gpu_of(total) is not None:  # CUDA adds its float32 accumulator without rounding
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # in slices, so that no second tensor of this size exists
        step = max(1, len(total) // MAX_16_BIT_TILES)
        for start in range(0, len(total), step):
            total[start : start + step] += a[start : start + step] @ b
