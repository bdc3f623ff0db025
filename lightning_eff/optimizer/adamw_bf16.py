"""AdamW with bfloat16 state, and with bfloat16 weights if requested; small updates are not lost.

A bfloat16 number has 8 bits of precision. If sums are rounded to nearest, an update below half of a weight's
last bit is lost in every step. A running average that should change by 0.1 % per step (`exp_avg_sq` with
beta2 = 0.999) never changes. Here a step is computed in float32, and values stored in bfloat16 are rounded
stochastically. The probability of rounding up equals the fraction that would be cut off, so a stored value is
correct on average. Float32 weights are updated in float32.

The random bits of a tensor depend only on `seed`, the step, and the position of the tensor among the
parameters. So a resumed run continues bit for bit, the weights stay identical on all ranks of DDP, and the
global random state is not changed.

Why not a second bfloat16 tensor for the cut-off bits (Kahan summation): that tensor needs 2 more bytes per
parameter.

Saves: half of AdamW's state; in bfloat16 weights, the small updates that rounding to nearest would lose.
Costs: about 30 small kernels per tensor, and 16 random bits for each rounded value; 4 bytes of state per
    parameter, and temporaries for at most 2**20 values. Each step adds noise of up to one unit in the last
    place to a bfloat16 weight.
When not: float32 state fits in memory, and weights are float32.
Conflicts: parameters that are neither float32 nor bfloat16, and sparse gradients, are rejected.
Source: Zamirai et al. 2020, https://arxiv.org/abs/2010.06192; AdamW as torch.optim.AdamW computes it
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.arguments import BelowOne, CountOrZero, NotNegative, Positive, check_arguments
from lightning_eff.core.errors import TO_ADAMW, TO_FP32, ConfigError, Remedy
from lightning_eff.core.technique import Outcome
from lightning_eff.report.advice import Observed, Suggestion
from lightning_eff.report.recording import STATE

AVERAGES = ("exp_avg", "exp_avg_sq")
DTYPES = (torch.float32, torch.bfloat16)
"""Supported dtypes of weights."""
CHUNK = 1 << 20
"""Largest number of values that are updated at once, to limit temporaries; a single row may have more."""
NOT_COMPUTED = ("maximize", "amsgrad")
"""Options of torch's AdamW that are not supported; a loaded state that enables an option is rejected."""
NUM_TEMPORARIES = 5
"""Number of float32 temporaries that a step needs for each value of a chunk."""
LARGEST = torch.finfo(torch.bfloat16).max
LOW_BITS = 16
"""Number of bits by which a float32 is longer than a bfloat16."""


def round_stochastically(value: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return `value` in bfloat16, rounded up or down at random so that the mean is `value`.

    A value that bfloat16 can represent is unchanged. NaN, infinities and values beyond the largest bfloat16
    are rounded to nearest, because the largest bfloat16 has no upper neighbour.

    Args:
        value: Tensor of any shape; a dtype other than float32 is first converted to float32.
        generator: Generator on the device of `value`; None for the global generator.

    Example:
        >>> rounded = round_stochastically(torch.full((1000,), 1 + 2**-9))
        >>> rounded.unique().tolist(), rounded.dtype
        ([1.0, 1.0078125], torch.bfloat16)
    """
    value = value.float()
    # The bits of a float grow with its magnitude, also for subnormal numbers. Adding a random number from 0
    # to 0xffff carries into the kept bits with the right probability, away from zero for either sign.
    bits = torch.empty_like(value, dtype=torch.int32).random_(0, 1 << LOW_BITS, generator=generator)
    bits.add_(value.view(torch.int32)).bitwise_and_(-1 << LOW_BITS)
    # The sum overflows for CUDA's NaN (0x7fffffff), and the mask turns other NaNs into infinity.
    is_in_range = value.abs() <= LARGEST
    return torch.where(is_in_range, bits.view(torch.float32), value).to(torch.bfloat16)


class AdamWBf16(Optimizer):
    """AdamW with bfloat16 state; values stored in bfloat16 are rounded stochastically.

    Args:
        params: Parameters or parameter groups, in float32 or bfloat16.
        lr: Learning rate.
        betas: Decay rates of the two running averages.
        eps: Number that is added to the denominator.
        weight_decay: Weight decay per step, as a fraction of `lr`; a group may have another value.
        seed: Seed of the random bits, which must be equal on all ranks.

    Raises:
        ConfigError: A number is out of range, a parameter has an unsupported dtype, a gradient is sparse, or
            a loaded state has unsupported options of torch's AdamW.

    Example:
        >>> layer = torch.nn.Linear(4, 4, dtype=torch.bfloat16)
        >>> optimizer = AdamWBf16(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 4, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg_sq"].dtype
        torch.bfloat16
    """

    lowers = ("optimizer state",)

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest this optimizer instead of an AdamW with float32 state."""
        trained = [each for each in run.module.parameters() if each.requires_grad]
        if not run.has_adamw or any(each.dtype != torch.float32 for each in trained):
            return None
        # float32 state becomes bfloat16, and chunks replace the temporaries of torch's step.
        factors = {i: 0.5 for i, each in enumerate(run.allocations) if each.category == STATE}
        factors |= dict.fromkeys(run.step_temporaries(), 0.0)
        num_values = min(CHUNK, max((each.numel() for each in trained), default=0))
        return Suggestion(
            technique=AdamWBf16,
            why="optimizer state in bfloat16, which is rounded stochastically",
            peak_bytes=run.peak_if(factors, held_bytes=NUM_TEMPORARIES * 4 * num_values),
        )

    elementwise = True
    """Each element is updated independently, so strategies may flatten and split parameters."""
    first_index = 0
    """Position of the first parameter; a wrapper with one optimizer per parameter sets this number."""

    @check_arguments
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: NotNegative | Tensor = 3e-3,
        betas: tuple[BelowOne, BelowOne] = (0.9, 0.95),
        eps: Positive = 1e-8,
        weight_decay: NotNegative = 0.1,
        seed: CountOrZero = 0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "seed": seed}
        super().__init__(params, defaults)

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            if parameter.requires_grad:
                _check_dtype(parameter)

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        index = self.first_index
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group, index)
                # Parameters without a gradient count too, so that the random bits of other parameters stay
                # the same.
                index += 1
        return loss

    def _update(self, parameter: Tensor, group: dict[str, Any], index: int) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        if gradient is None or gradient.layout != torch.strided:
            value, allowed = "AdamWBf16 got a sparse gradient", "dense ones: Embedding(..., sparse=False)"
            raise ConfigError(key="", value=value, allowed=allowed)
        _check_dtype(parameter)  # again: a frozen parameter was not checked before
        if not state:
            for name in AVERAGES:
                state[name] = torch.zeros_like(parameter, dtype=torch.bfloat16)
        # A Python number, because a tensor would add to the 4 bytes of state per parameter.
        step = state["step"] = int(state.get("step", 0)) + 1
        tensors = [_local(each) for each in (parameter, gradient, *(state[name] for name in AVERAGES))]
        generator = torch.Generator(tensors[0].device)
        # The random bits depend only on seed, step, parameter and shard, so a resumed run draws the same
        # bits.
        text = f"{group['seed']} {step} {index} {_shard_of(parameter)}"
        # A digest, since CPU generators use only the low 32 bits of a seed.
        generator.manual_seed(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest()))
        for weight, gradient, *averages in zip(*map(_chunks, tensors), strict=True):
            _adamw(weight, gradient, averages[0], averages[1], generator, step, group)

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.param_groups:  # torch's AdamW saves no seed
            found = [name for name in NOT_COMPUTED if group.get(name)]
            if found:
                value, allowed = f"{found[0]}={group[found[0]]} in the loaded state", "AdamW without it"
                raise ConfigError(key="", value=value, allowed=allowed, remedies=[TO_ADAMW])
            group.setdefault("seed", self.defaults["seed"])
        self.restore_state_dtype()

    def restore_state_dtype(self) -> None:
        """Cast averages back to bfloat16; `Optimizer.load_state_dict` casts state to the weights' dtype."""
        for state in self.state.values():
            for name in [name for name in AVERAGES if name in state]:
                state[name] = state[name].to(torch.bfloat16)

    def outcome(self) -> Outcome:
        """Report how many tensors are rounded, and how many are kept in float32."""
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        num_rounded = sum(parameter.dtype == torch.bfloat16 for parameter in trained)
        did = f"{num_rounded} tensors rounded stochastically, {len(trained) - num_rounded} in float32"
        return Outcome(did=did, numbers={"rounded": num_rounded, "float32": len(trained) - num_rounded})


def _check_dtype(parameter: Tensor) -> None:
    if parameter.dtype in DTYPES:
        return
    dtype = str(parameter.dtype).removeprefix("torch.")
    raise ConfigError(
        key="",
        value=f"AdamWBf16 got a parameter in {dtype}",
        allowed="float32 or bfloat16",
        remedies=[
            Remedy("precision=bf16_true", 'AutoPrecision(precision="bf16-true")'),
            TO_FP32,
            TO_ADAMW,
        ],
    )


def _adamw(
    weight: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    generator: torch.Generator,
    step: int,
    group: dict[str, Any],
) -> None:
    """Update some rows in float32, like torch's for-loop AdamW, and round values stored in bfloat16."""
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    gradient = gradient.float()
    # Averages as in torch: m = beta1 * m + (1 - beta1) * g, and v with beta2 and g^2.
    mean = exp_avg.float().lerp_(gradient, 1 - beta1)
    square = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    exp_avg.copy_(round_stochastically(mean, generator))
    # The update below uses the averages before rounding: only stored values are rounded.
    exp_avg_sq.copy_(round_stochastically(square, generator))
    # sqrt(v / (1 - beta2^t)) + eps, in place.
    denominator = square.sqrt_().div_(math.sqrt(1 - beta2**step)).add_(group["eps"])
    updated = weight.float()  # no copy of a float32 weight
    # Decoupled weight decay, before the update as in torch.
    updated.mul_(1 - lr * group["weight_decay"])
    updated.addcdiv_(mean, denominator, value=-lr / (1 - beta1**step))
    if weight.dtype != torch.float32:
        weight.copy_(round_stochastically(updated, generator))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shard_of(parameter: Tensor) -> list[int]:
    """Return this rank's shard coordinates, by which random bits differ; replicas have equal coordinates."""
    if not isinstance(parameter, DTensor):
        return []
    coordinate = parameter.device_mesh.get_coordinate() or ()
    return [at for at, placed in zip(coordinate, parameter.placements, strict=True) if placed.is_shard()]


def _chunks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield views of at most `CHUNK` values, or of one row."""
    rows = tensor if tensor.dim() else tensor[None]
    row_numel = max(1, rows.numel() // max(1, len(rows)))
    yield from rows.split(max(1, CHUNK // row_numel))
