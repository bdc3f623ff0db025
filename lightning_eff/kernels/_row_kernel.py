"""Cross-entropy of a tile of logits in one Triton kernel; the gradient overwrites the logits.

For each row l [V] of scaled logits, with the symbols of `_row_losses.py`:

    top = max_c l_c;  d = sum_c exp(l_c - top);  lse = top + log(d);  p_c = exp(l_c - top) / d
    u = sum_c exp(l_c - top) * (top - l_c);  H = log(d) + u / d, the entropy
    G_c = (of_p + of_lse * lse) * p_c + of_target * [c = t] - of_all * s / V * w_c
          - of_entropy * p_c * (log p_c + H)

G is then multiplied by the derivative of the scaling. Each program computes one row, left to right, in two
passes:

              BLOCK   BLOCK   BLOCK
            +-------+-------+----+..+     the tile [r, V]; a row begins every `pitch` elements
    program | l     | l     | l  |  |     1. top, d and u of each of BLOCK lanes, then of all lanes
            +-------+-------+----+..+     2. read l again, write G over it

If 16-bit operands give float32 logits, the gradient is stored in 16 bits, because the next products need
16-bit operands. The gradient is written to the front half of the row, so no logit is overwritten before it is
read:

    bytes   0      2 * c  4 * c
            [G ... G     ][l ... l    ]   at column c: G ends at byte 2 * c, unread logits start at 4 * c

Online softmax: each lane stores its largest logit so far, m, and its sums relative to m. So pass 1 computes
one exponential per logit, and lanes exchange values only at the end of the row. `_row_losses.py` calls
`compute`.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Liger-Kernel, for the
    gradient that overwrites the logits.
"""

# pyright: basic, reportInvalidTypeForm=false
from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from lightning_eff.kernels import devices
from lightning_eff.kernels.epilogue import jit, tl

MAX_BLOCK = 2048
"""Largest number of columns in a block."""
COLUMNS_OF_A_WARP = 256
"""8 columns per thread. With 16, the sums that all options need would not fit in registers."""
PITCH = 16
"""Each row starts at a multiple of this number of elements, so that loads are vectorized for any V."""


def runs_on(logits: Tensor) -> bool:
    """Return whether the kernel supports logits: on a GPU with Triton, or fake logits of a predicted GPU."""
    gpu = devices.gpu_of(logits)
    if gpu is None or logits.dtype == torch.float64:
        return False
    return gpu.capability >= devices.AMPERE if is_fake(logits) else not devices.why_no_kernels(logits.device)


def compute(
    logits: Tensor, dtype: torch.dtype, target: Tensor, stats: Sequence[Tensor],
    factors: Sequence[Tensor | None], class_weight: Tensor | None, *, smoothing: float, softcap: float | None,
    temperature: float, sums: str,
) -> Tensor:  # fmt: skip
    """Fill `stats` and, if `factors` are given, overwrite the logits with their gradient [r, V].

    Args:
        logits: Logits [r, V]. Memory between the end of a row and the next row may be overwritten.
        dtype: Dtype of the gradient: the dtype of the logits, or a 16-bit dtype.
        target: Class of each row, [r, 1].
        stats: Tensors to fill, each [r, 1]: the largest logit, its p, the target's logit, and the sum that
            `sums` selects.
        factors: Factors of the gradient's terms, each [r, 1] or None: of_p, of_target, of_lse, of_all,
            of_entropy.
        class_weight: Weight of each class, [V], or None.
        smoothing: Label smoothing per class, s / V.
        softcap: Soft cap of the logits, or None.
        temperature: Divisor of the logits, applied after the soft cap.
        sums: The sum to compute: `classes` for the sum of s / V * w_c * l_c over c, `entropy` for H, or an
            empty string for none.
    """
    num_rows, width = logits.shape
    # The 16-bit view has 2 * pitch columns; the first V columns lie in the front half of each row.
    gradient = logits if dtype == logits.dtype else logits.view(dtype)[:, :width]
    # The kernel reads the factors of consecutive rows at consecutive addresses.
    columns = [None if each is None else each.contiguous() for each in factors]
    # The length of a Triton range must be a power of two, so the smallest power that covers V is used.
    block = min(MAX_BLOCK, 1 << (width - 1).bit_length())
    if not is_fake(logits):
        with torch.cuda.device_of(logits):  # Triton launches on the current device
            cross_entropy_rows[(num_rows,)](
                logits, gradient, target, class_weight, *columns, *stats, width, logits.stride(0),
                gradient.stride(0), softcap, 1.0 / temperature, smoothing, SUMS=sums, BLOCK=block,
                num_warps=max(1, block // COLUMNS_OF_A_WARP),
            )  # fmt: skip
    return gradient


@jit
def cross_entropy_rows(  # noqa: C901, PLR0915 - a kernel is one function
    logits, gradient, target, class_weight, of_p, of_target, of_lse, of_all, of_entropy,
    top, p_top, at_target, sums,
    V, pitch, gradient_pitch,
    softcap, cooling, smoothing,
    SUMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute one row: its statistics and, if of_p is given, its gradient. `cooling` is 1 / temperature."""
    row = tl.program_id(0)
    # In 64 bits, because row * pitch may exceed 32 bits.
    logits += row.to(tl.int64) * pitch
    gradient += row.to(tl.int64) * gradient_pitch
    t = tl.load(target + row)

    # Per lane [BLOCK]: largest logit, sums relative to that logit, the target's logit, the sum over classes.
    m = tl.full([BLOCK], -float("inf"), tl.float32)
    d = tl.zeros([BLOCK], tl.float32)
    u = tl.zeros([BLOCK], tl.float32)
    l_t = tl.zeros([BLOCK], tl.float32)
    of_classes = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        c = start + tl.arange(0, BLOCK)
        x = _scaled(logits, c, V, pitch, softcap, cooling)
        e, e_distance = _decay(m, x)
        if SUMS == "entropy":
            # A larger x becomes the new m, and the sums are rescaled by e = exp(m - x).
            u = tl.where(x > m, u * e + d * e_distance, u + e_distance)
        d = tl.where(x > m, d * e + 1.0, d + e)
        m = tl.maximum(m, x)
        # At most one lane has the target's column, so the sum over lanes is the target's logit.
        l_t += tl.where(c == t, x, 0.0)
        if SUMS == "classes":
            of_classes += tl.where(c < V, x * (smoothing * _weight(class_weight, c, V)), 0.0)

    # Per row: the lanes' sums, rescaled to the largest logit of all lanes.
    largest = tl.max(m, 0)
    e, e_distance = _decay(largest, m)
    # As in torch, loss and gradient are NaN for a row whose largest logit is infinite.
    total = tl.where(tl.abs(largest) < float("inf"), tl.sum(d * e, 0), float("nan"))
    log_total, inverse, entropy = tl.log(total), 1.0 / total, 0.0
    tl.store(top + row, largest)
    # The largest logit has p = exp(0) / total.
    tl.store(p_top + row, inverse)
    # The loss of an invalid target is NaN, because a logit of 0 would look like the logit of a valid class.
    tl.store(at_target + row, tl.where((t >= 0) & (t < V), tl.sum(l_t, 0), float("nan")))
    if SUMS == "entropy":
        entropy = log_total + tl.sum(u * e + d * e_distance, 0) * inverse
        tl.store(sums + row, entropy)
    if SUMS == "classes":
        tl.store(sums + row, tl.sum(of_classes, 0))
    if of_p is not None:
        factor, factor_t = tl.load(of_p + row), tl.load(of_target + row)
        if of_lse is not None:
            # lse is the same for all columns, so the z-loss only changes the factor of p_c.
            factor += tl.load(of_lse + row) * (largest + log_total)
        for start in range(0, V, BLOCK):
            c = start + tl.arange(0, BLOCK)
            x = _scaled(logits, c, V, pitch, softcap, cooling)
            e, e_distance = _decay(largest, x)
            p = e * inverse
            g = p * factor
            if SUMS == "entropy":  # -log p_c = top - l_c + log(d)
                g += tl.load(of_entropy + row) * (e_distance * inverse + p * (log_total - entropy))
            g += tl.where(c == t, factor_t, 0.0)
            if of_all is not None:
                g -= tl.load(of_all + row) * (smoothing * _weight(class_weight, c, V))
            if softcap is not None:  # d tanh(v) / dv = 1 - tanh(v)^2
                tanh = x / (cooling * softcap)
                g *= 1.0 - tanh * tanh
            g *= cooling
            # Without this barrier, a fast warp could overwrite logits of this or an earlier block before a
            # slow warp has read them.
            tl.debug_barrier()
            tl.store(gradient + c, g.to(gradient.dtype.element_ty), mask=c < pitch)


@jit
def _scaled(logits, c, V, pitch, softcap, cooling):
    """Return the scaled logits of columns c [BLOCK] in float32, and -inf beyond V.

    Loads are masked by `pitch`, which is usually a multiple of 16. A mask by V would prevent vector loads.
    """
    x = tl.load(logits + c, mask=c < pitch, other=0.0).to(tl.float32)
    if softcap is not None:
        x = softcap * _tanh(x / softcap)
    return tl.where(c < V, x * cooling, -float("inf"))


@jit
def _decay(m, x):
    """Return e = exp(-|m - x|) and e * |m - x|; equal infinities give 1 and 0, and NaN gives NaN."""
    # infinity - infinity would be NaN.
    distance = tl.where(m == x, 0.0, tl.abs(m - x))
    e = tl.exp(-distance)
    # 0 * infinity would be NaN.
    return e, e * tl.where(e == 0.0, 0.0, distance)


@jit
def _weight(class_weight, c, V):
    """Return the weights of classes c [BLOCK]."""
    return 1.0 if class_weight is None else tl.load(class_weight + c, mask=c < V, other=0.0)


@jit
def _tanh(v):
    """Return tanh(v); near 0 the quotient loses digits, so the series of tanh is used there."""
    e = tl.exp(-2.0 * tl.abs(v))
    large = (1.0 - e) / (1.0 + e)
    s = v * v
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835))))
    return tl.where(s < 0.0625, v * series, tl.where(v < 0.0, -large, large))
