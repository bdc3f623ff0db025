"""Losses of an output projection, tile by tile: logits exist for a few rows at a time.

    logits [R, V] = x [R, D] @ W [V, D].T + bias      for R of the N rows
    values [R], G [R, V] = what a `RowLoss` makes of them, G being the gradient of the logits
    dx [R, D] = G @ W;  dW [V, D] += G.T @ x

A projection with an adapter is a sum of two products, x @ W.T + u @ B.T, which are never merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

MIB = 1 << 20
LEAST_BUDGET_MIB = {"cpu": 16, "cuda": 64}
"""Least default of `tile_budget_mib`: a CPU's tiles stay near its caches, a GPU's fill it."""
LEAST_TILES = 8
"""Of a loss with the default budget: of a small vocabulary a larger part would save too little."""
LEAST_ROWS = 64
"""Of a tile with the default budget."""
MAX_16_BIT_TILES = 16
"""Each tile rounds a weight gradient of 16 bits once more."""
PART_BYTES = 1 << 18
"""Float32 logits that a CPU works on at once within a tile, at least: they stay in its caches."""
PART_BYTES_TRAINED = 1 << 20
"""The same where the weight gets a gradient, beside which they count for nothing: fewer calls."""
CONVERTED_ROWS = 32
"""Rows that are converted to float32 at once."""
MAX_PARTS = 64
"""Of a tile on a CPU."""

Rows = Any
"""Which rows: a slice, or indices."""


class RowLoss(Protocol):
    """What is made of rows of logits."""

    @property
    def num_values(self) -> int:
        """Values of a row."""
        ...

    def of_tile(
        self,
        projection: Projection,
        at: Rows,
        logits: Float[Tensor, "r v"],
        grads: Float[Tensor, "r k"] | None,
        out: Float[Tensor, "r v"] | None,
    ) -> Float[Tensor, "r k"]:
        """Return the values of rows and, with their gradients `grads`, write those of the logits to `out`.

        Args:
            projection: What made the logits.
            at: Which rows of the loss's own tensors they are.
            logits: May be overwritten.
            grads: Gradients of the values; None for none.
            out: In the dtype of the products; where that is the logits' dtype, `out` is `logits`.
        """
        ...


@dataclass(frozen=True, eq=False)
class Projection:
    """A sum of products, in the dtype in which they are multiplied.

    Args:
        pairs: Rows [N, D] and weight [V, D], each with its own D.
        bias: [V], or None.
        index: The rows that have a loss; None for all.
        tile_rows: Rows of a tile.
        part_bytes: `PART_BYTES`, or `PART_BYTES_TRAINED`.
    """

    pairs: Sequence[tuple[Tensor, Tensor]]
    bias: Tensor | None
    index: Tensor | None
    tile_rows: int
    part_bytes: int = PART_BYTES

    def tiles(self) -> Iterator[tuple[Rows, Tensor]]:
        """Yield rows and their logits, all in one buffer."""
        x, weight = self.pairs[0]
        num_rows = len(x) if self.index is None else len(self.index)
        wide = x.is_cuda and x.dtype.itemsize == 2  # CUDA can keep the float32 that it accumulated
        options: dict[str, Any] = {"out_dtype": torch.float32} if wide else {}
        step = max(1, min(self.tile_rows, num_rows))
        buffer = torch.empty(step, len(weight), dtype=torch.float32 if wide else x.dtype, device=x.device)
        for start in range(0, num_rows, step):
            at = slice(start, min(start + step, num_rows))
            logits = buffer[: at.stop - start]
            at = at if self.index is None else self.index[at]
            torch.mm(x[at], weight.T, **options, out=logits)
            for more, low_rank in self.pairs[1:]:
                logits.addmm_(more[at].to(logits.dtype), low_rank.T.to(logits.dtype))
            if self.bias is not None:
                logits.add_(self.bias)
            yield at, logits

    def parts(self, logits: Float[Tensor, "r v"], *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
        """Yield views of a tile's rows, and of other tensors: on a CPU as many as stay in its caches.

        Of a tile without values the first rows only: the others would need as much memory again.
        """
        num_rows, width = logits.shape
        fitting = max(self.part_bytes // (4 * width), -(-num_rows // MAX_PARTS), 1)
        step = num_rows if logits.is_cuda else fitting
        # By split: one call for all views of a tensor, since there are many of them.
        views = zip(*(repeat(None) if each is None else each.split(step) for each in (logits, *others)))  # noqa: B905
        return islice(views, 1) if is_fake(logits) else views

    def columns(self, at: Rows, columns: Tensor) -> Tensor:
        """Return one logit of each row in float32 [r]: that of the given column."""
        exact = torch.zeros(len(columns), device=columns.device)
        for x, weight in self.pairs:
            rows = x[at]
            for start in range(0, len(columns), CONVERTED_ROWS):
                some = slice(start, start + CONVERTED_ROWS)
                exact[some] += (rows[some].float() * weight[columns[some]].float()).sum(-1)
                if is_fake(x):  # the others would need as much memory again, as in `parts`
                    break
        return exact if self.bias is None else exact + self.bias[columns]


def tile_rows_of(x: Tensor, width: int, budget_mib: float | None) -> int:
    """Return how many rows of float32 logits fit into the budget.

    Args:
        x: The rows [N, D].
        width: Columns of the logits.
        budget_mib: In MiB; None for the larger of `LEAST_BUDGET_MIB` and the bytes of `x`, but at most an
            eighth of the rows.

    Example:
        >>> tile_rows_of(torch.zeros(1024, 256), 32000, None)
        128
    """
    least = LEAST_BUDGET_MIB.get(x.device.type, LEAST_BUDGET_MIB["cuda"]) * MIB
    budget = max(least, x.nbytes) if budget_mib is None else budget_mib * MIB
    fitting = max(1, int(budget / (4 * max(width, 1))))
    if budget_mib is None:
        fitting = min(fitting, max(LEAST_ROWS, -(-len(x) // LEAST_TILES)))
    if x.dtype.itemsize == 2:
        fitting = max(fitting, -(-len(x) // MAX_16_BIT_TILES))
    # As many tiles as needed, of about the same size: a multiple of 8 where that still fits.
    even = -(-len(x) // max(1, -(-len(x) // fitting)))
    return max(1, min(-(-even // 8) * 8, fitting))


def values_of(projection: Projection, loss: RowLoss) -> Float[Tensor, "n k"]:
    """Return the values of all rows; 0 for rows without a loss."""
    values = _no_values(projection, loss)
    for at, logits in projection.tiles():
        values[at] = loss.of_tile(projection, at, logits, None, None)
    return values


def gradients_of(
    projection: Projection, loss: RowLoss, grads: Float[Tensor, "n k"], receivers: Sequence[Tensor | None]
) -> tuple[Float[Tensor, "n k"], list[Tensor | None]]:
    """Return the values of all rows, and the gradients of what receives one.

    Args:
        projection: What makes the logits.
        loss: What is made of them.
        grads: Gradients of the values.
        receivers: The bias, then each pair's rows and weight; None for what needs no gradient. Their
            gradients have their dtypes.
    """
    values = _no_values(projection, loss)
    found = [None if each is None else torch.zeros_like(each) for each in receivers]
    dtype = projection.pairs[0][0].dtype
    if any(each is not None for each in found[2::2]):
        projection = replace(projection, part_bytes=PART_BYTES_TRAINED)
    low: Tensor | None = None  # gradient of the logits, in the dtype of the products
    for at, logits in projection.tiles():
        if low is None:
            low = logits if logits.dtype == dtype else torch.empty_like(logits, dtype=dtype)
        grad = low[: len(logits)]
        values[at] = loss.of_tile(projection, at, logits, grads[at], grad)
        if found[0] is not None:
            found[0] += grad.sum(0, dtype=values.dtype)
        for (x, weight), grad_x, grad_weight in zip(projection.pairs, found[1::2], found[2::2], strict=True):
            if grad_x is not None:
                grad_x[at] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad, x[at])
    return values, found


def _no_values(projection: Projection, loss: RowLoss) -> Tensor:
    x = projection.pairs[0][0]
    return x.new_zeros(len(x), loss.num_values, dtype=torch.promote_types(x.dtype, torch.float32))


def _add_product(total: Tensor, grad: Tensor, x: Tensor) -> None:
    """Add `grad.T @ x` [V, D] to `total`."""
    if total.dtype == x.dtype:
        total.addmm_(grad.T, x)
        return
    # A float32 gradient of 16-bit products, in slices: each is added when it is made.
    step = max(1, len(total) // MAX_16_BIT_TILES)
    for start in range(0, len(total), step):
        total[start : start + step] += grad[:, start : start + step].T @ x
