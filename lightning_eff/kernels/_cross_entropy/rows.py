"""What is made of rows of logits l: values, and gradients of the logits.

    l = softcap * tanh(l / softcap);  l = l / temperature
    lse = log(sum_c exp(l_c)),  p_c = exp(l_c - lse)

    cross-entropy, with target t, class weights w (1 without), label smoothing s and z-loss z:
    loss = w_t * ((1 - s) * (lse - l_t) + z * lse^2) + s / V * sum_c w_c * (lse - l_c)
    dloss / dl_c = A * p_c - (1 - s) * w_t * [c = t] - s / V * w_c
    A = w_t * (1 - s + 2 * z * lse) + s / V * sum_c w_c

Where logits are rounded to 16 bits (a CPU has no product of 16 bits with a float32 result), the target's
logit is computed in float32, in the loss and in lse alike: the other roundings average out, its own does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_eff.kernels._cross_entropy.tiles import Projection, Rows


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses of logits are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Scaled:
    """A loss of scaled logits."""

    softcap: float | None = None
    temperature: float = 1.0

    def scale(self, logits: Tensor) -> Tensor:
        """Return scaled logits, in float32 at least and in their own memory if they have that dtype."""
        if logits.dtype.itemsize == 2:
            logits = logits.float()
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if self.temperature == 1.0 else logits.div_(self.temperature)

    def unscale(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Return the gradient of the logits before they were scaled, in its memory; overwrite the logits."""
        if self.softcap is not None:
            tanh = logits.mul_(self.temperature / self.softcap)
            grad.addcmul_(grad * tanh, tanh, value=-1.0)
        return grad if self.temperature == 1.0 else grad.div_(self.temperature)


@dataclass(frozen=True, eq=False, kw_only=True)
class _OfTarget(_Scaled):
    """A loss that reads one logit of each row."""

    target: Tensor

    def target_logit(self, projection: Projection, at: Rows, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scaled logit of each row's target [r, 1], as it is among the logits and exact."""
        rounded = self.scale(logits.gather(1, self.target[at].unsqueeze(1)))
        if logits.dtype.itemsize > 2:
            return rounded, rounded
        exact = self.scale(projection.columns(at, self.target[at])).unsqueeze(1)
        # Where a rounding is more than a nat, as it is of logits of 1e3, those of the others are as large.
        return rounded, torch.where((exact - rounded).abs() <= 1.0, exact, rounded)

    def softmax(self, scaled: Tensor) -> Tensor:
        """Return probabilities, in the memory of the scaled logits unless `unscale` needs them."""
        return torch.softmax(scaled, -1, out=scaled if self.softcap is None else None)


def columns(logits: Tensor, count: int) -> list[Tensor]:
    """Return columns [r, 1] for values of a tile's rows, which its parts fill."""
    return [logits.new_empty(len(logits), 1, dtype=wide_dtype(logits.dtype)) for _ in range(count)]


def log_sum_above(p_max: Tensor, change: tuple[Tensor, Tensor], p_target: Tensor) -> Tensor:
    """Return the log of the sum of exponentials less the largest logit, from its probability.

    Not their sum: the loss of a target that is nearly certain would be lost in it. `change` is the target's
    logit as it was in the sum, and as it should have been.
    """
    rounded, exact = change
    above = -p_max.log()
    return above if rounded is exact else above + torch.log1p(p_target * torch.expm1(exact - rounded))


@dataclass(frozen=True, eq=False, kw_only=True)
class CrossEntropy(_OfTarget):
    label_smoothing: float
    z_loss: float
    class_weight: Tensor | None
    num_values: int = 1

    def of_tile(
        self, projection: Projection, at: Rows, logits: Tensor, grads: Tensor | None, out: Tensor | None
    ) -> Tensor:
        smoothing = self.label_smoothing
        target, weights = self.target[at].unsqueeze(1), self.class_weight
        of_target = self.target_logit(projection, at, logits)
        weight: Any = 1.0 if weights is None else weights[target]
        each: Any = (1.0 if weights is None else weights) * (smoothing / logits.shape[1])
        total: Any = smoothing if weights is None else each.sum()  # of each
        of_p = of_target_p = of_lse = of_all = None
        if grads is not None:
            of_p = grads * (weight * (1.0 - smoothing) + total)
            of_target_p = grads * weight * (smoothing - 1.0)
            of_lse = grads * weight * (2.0 * self.z_loss) if self.z_loss else None
            of_all = grads if smoothing else None
        top, p_max, p_target, spread = columns(logits, 4)
        for (
            row, row_target, factor, add, factor_lse, factor_all, row_out,
            row_top, row_max, row_p_target, row_spread,
        ) in projection.parts(
            logits, target, of_p, of_target_p, of_lse, of_all, out, top, p_max, p_target, spread
        ):  # fmt: skip
            scaled = self.scale(row)
            torch.amax(scaled, -1, keepdim=True, out=row_top)
            if smoothing:
                torch.sum(scaled * each, -1, keepdim=True, out=row_spread)
            p = self.softmax(scaled)
            torch.amax(p, -1, keepdim=True, out=row_max)
            torch.gather(p, 1, row_target, out=row_p_target)
            if row_out is None:
                continue
            p.mul_(factor if factor_lse is None else factor + factor_lse * (row_top - row_max.log()))
            p.scatter_add_(1, row_target, add)
            if factor_all is not None:
                p.sub_(factor_all * each)
            row_out.copy_(self.unscale(p, scaled))  # nothing moves where `out` is the memory of the logits
            del p, scaled  # before the next part is converted
        above = log_sum_above(p_max, of_target, p_target)
        lse = top + above
        value = (top - of_target[1] + above) * weight * (1.0 - smoothing)
        if self.z_loss:
            value += self.z_loss * weight * lse.square()
        return value + (total * lse - spread) if smoothing else value


@dataclass(frozen=True, eq=False, kw_only=True)
class LogProb(_OfTarget):
    """Log-probability of the target and, as a second value, entropy."""

    num_values: int

    def of_tile(
        self, projection: Projection, at: Rows, logits: Tensor, grads: Tensor | None, out: Tensor | None
    ) -> Tensor:
        target = self.target[at].unsqueeze(1)
        of_target = self.target_logit(projection, at, logits)
        top, p_max, p_target, entropy = columns(logits, 4)
        for (
            row, row_target, grad, row_out, row_top, row_max, row_p_target, row_entropy
        ) in projection.parts(logits, target, grads, out, top, p_max, p_target, entropy):  # fmt: skip
            scaled = self.scale(row)
            torch.amax(scaled, -1, keepdim=True, out=row_top)
            p = self.softmax(scaled)
            torch.amax(p, -1, keepdim=True, out=row_max)
            torch.gather(p, 1, row_target, out=row_p_target)
            surprise = torch.special.entr(p) if self.num_values == 2 else None  # -p log p
            if surprise is not None:
                torch.sum(surprise, -1, keepdim=True, out=row_entropy)
            if row_out is None:
                continue
            given = grad[:, :1]
            if surprise is None:
                p.mul_(-given)
            else:  # d entropy / d l_c = -p_c * log p_c - p_c * entropy
                of_entropy = grad[:, 1:]
                p.mul_(-given - of_entropy * row_entropy).addcmul_(surprise, of_entropy)
            p.scatter_add_(1, row_target, given)
            row_out.copy_(self.unscale(p, scaled))
            del p, scaled, surprise  # before the next part is converted
        value = of_target[1] - top - log_sum_above(p_max, of_target, p_target)
        return value if self.num_values == 1 else torch.cat([value, entropy], 1)


@dataclass(frozen=True, eq=False, kw_only=True)
class Divergence(_Scaled):
    """Generalized Jensen-Shannon divergence of a student s and a teacher t, with m = (1 - beta) s + beta t.

    beta * KL(t, m) + (1 - beta) * KL(s, m), and its limits: KL(t, s) for beta 0, KL(s, t) for beta 1. The
    gradient of l_c is s_c * (u_c - sum_k s_k u_k) with u = (1 - beta) * log(s / m), or log(s / t).
    """

    teacher: tuple[Tensor, Tensor]
    beta: float
    num_values: int = 1

    def of_tile(
        self, projection: Projection, at: Rows, logits: Tensor, grads: Tensor | None, out: Tensor | None
    ) -> Tensor:
        x, weight = self.teacher
        taught = x[at] @ weight.T
        values = logits.new_empty(len(logits), 1, dtype=wide_dtype(logits.dtype))
        for row, row_taught, row_value, grad, row_out in projection.parts(logits, taught, values, grads, out):
            scaled = self.scale(row)
            log_s = torch.log_softmax(scaled, -1)
            log_t = torch.log_softmax(self.scale(row_taught), -1)
            value, gradient = self._value(log_s, log_t)
            row_value.copy_(value)
            if row_out is not None:
                row_out.copy_(self.unscale(gradient.mul_(grad), scaled))
        return values

    def _value(self, log_s: Tensor, log_t: Tensor) -> tuple[Tensor, Tensor]:
        """Return the divergence of rows [r, 1], and the gradient of their scaled logits [r, V]."""
        s, t, beta = log_s.exp(), log_t.exp(), self.beta
        if beta == 0.0:
            return (t * (log_t - log_s)).sum(-1, keepdim=True), s - t
        log_m = log_t
        if beta < 1.0:
            log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
        u = log_s - log_m
        of_student = (s * u).sum(-1, keepdim=True)
        gradient = s.mul_(u - of_student)
        if beta == 1.0:
            return of_student, gradient
        of_teacher = (t * (log_t - log_m)).sum(-1, keepdim=True)
        return beta * of_teacher + (1.0 - beta) * of_student, gradient.mul_(1.0 - beta)
