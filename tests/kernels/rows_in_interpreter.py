"""Tests of the loss's Triton kernel; test_interpreter.py runs them in a process with Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_eff.kernels import _row_kernel, cross_entropy
from lightning_eff.kernels._row_losses import CrossEntropy, Projection
from lightning_eff.kernels.cross_entropy import linear_cross_entropy, token_logprobs
from tests.support import whole_logits
from tests.support.whole_logits import CLASSES, SEVERAL_TILES_MIB, error, gradients, make_inputs

pytestmark = pytest.mark.filterwarnings("ignore:.* encountered:RuntimeWarning")
"""NumPy computes both sides of `tl.where`; one of them may be infinity minus infinity."""
WEIGHTS = torch.linspace(0.5, 2.0, CLASSES)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 1.5},
    "class weights": {"class_weight": WEIGHTS},
    "all": {
        "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0, "temperature": 1.3, "class_weight": WEIGHTS,
    },
}  # fmt: skip
POISON = float("nan")


class CudaProjection(Projection):
    """Float32 logits of 16-bit operands as on CUDA: rows padded to 16 columns, inside a buffer of NaN."""

    def tiles(self) -> Iterator[tuple[Any, Tensor]]:
        ((x, weight),) = self.pairs
        pitch = -(-len(weight) // _row_kernel.PITCH) * _row_kernel.PITCH
        rows = torch.arange(len(x)) if self.index is None else self.index
        for at in rows.split(8):
            room = torch.full((len(at) + 2, pitch), POISON)
            logits = room[1:-1, : len(weight)]
            torch.mm(x[at].float(), weight.float().T, out=logits)
            yield at, logits if self.bias is None else logits.add_(self.bias)
            assert room[0].isnan().all(), "written before the first row"
            assert room[-1].isnan().all(), "written beyond the last row"


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("float32", "float16", "float16 logits")]


@pytest.fixture(params=["bfloat16", *SLOW])
def dtype(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """Use the kernel, with several blocks per row; return the dtype of the products."""
    monkeypatch.setattr(_row_kernel, "runs_on", lambda logits: logits.dtype != torch.float64)
    monkeypatch.setattr(_row_kernel, "MAX_BLOCK", 32)
    if "logits" not in request.param:
        monkeypatch.setattr(cross_entropy, "Projection", CudaProjection)
    return getattr(torch, request.param.partition(" ")[0])


def assert_alike(
    tiled: Callable[..., Tensor], whole: Callable[..., Tensor], given: dict[str, Tensor], **options: Any
) -> None:
    """Compare values and gradients with full logits in float64.

    A missing class, or an option that is applied twice, is an error of 1 / CLASSES or more.
    """
    dtype = given["x"].dtype
    exact = {
        name: x if name == "target" else x.detach().double().requires_grad_() for name, x in given.items()
    }
    wide = {name: x.double() if isinstance(x, Tensor) else x for name, x in options.items()}
    trained = [name for name in given if name != "target"]
    expected = gradients(lambda: whole(**exact, **wide), [exact[name] for name in trained])
    found = gradients(lambda: tiled(**given, **options), [given[name] for name in trained])
    rounded = dtype == torch.float16 and cross_entropy.Projection is Projection
    assert error(found[0], expected[0]) < (1e-3 if rounded else 2e-6)
    for one, other in zip(found[1], expected[1], strict=True):
        assert error(one, other) < (16 if rounded else 4) * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    "option", [name if name == "all" else pytest.param(name, marks=pytest.mark.slow) for name in OPTIONS]
)
def test_cross_entropy_matches_full_logits(option: str, dtype: torch.dtype) -> None:
    """The gradients are computed in the forward pass, but in float16 in the backward pass."""
    tiled = partial(linear_cross_entropy, tile_budget_mib=SEVERAL_TILES_MIB)
    assert_alike(tiled, whole_logits.cross_entropy, make_inputs(dtype), **OPTIONS[option])


def test_log_probabilities_and_entropies_match_full_logits(dtype: torch.dtype) -> None:
    scaling: dict[str, Any] = {"softcap": 1.5, "temperature": 0.7}

    def whole(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor) -> Tensor:
        logs = whole_logits.logits_of(x, weight, bias, **scaling).log_softmax(-1)
        return torch.stack([logs.gather(1, target[:, None])[:, 0], -(logs.exp() * logs).sum(-1)])

    def tiled(**given: Tensor) -> Tensor:
        return torch.stack(token_logprobs(**given, **scaling, with_entropy=True))

    given = make_inputs(dtype)
    given["target"].clamp_(min=0)
    assert_alike(tiled, whole, given)


@pytest.mark.parametrize(
    ("value", "where"),
    [("nan", 7), ("inf", 39), ("-inf", 7), ("-inf", slice(None))],
    ids=["nan of a class", "infinite target", "class without probability", "row without probability"],
)
def test_nonfinite_logits_affect_only_their_row_as_in_torch(
    value: str, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_row_kernel, "runs_on", lambda _: True)
    monkeypatch.setattr(_row_kernel, "MAX_BLOCK", 16)
    target, logits = torch.tensor([3, 39, 20]), torch.randn(3, CLASSES)
    logits[1, where] = float(value)
    logits.requires_grad_()
    plain = torch.nn.functional.cross_entropy(logits, target, reduction="none")
    (expected,) = torch.autograd.grad(plain.sum(), [logits])
    projection = Projection([(torch.empty(3, 1), torch.empty(CLASSES, 1))], None, None, 3)
    loss = CrossEntropy(target=target)
    values, found = loss.of_tile(projection, slice(None), logits.detach().clone(), torch.ones(3, 1))
    assert found is not None
    torch.testing.assert_close(found, expected, equal_nan=True)
    is_finite = plain.isfinite()
    torch.testing.assert_close(values[is_finite, 0], plain[is_finite])
    assert not values[~is_finite].isfinite().any()


def test_a_target_that_is_no_class_makes_the_loss_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its logit would count as 0, and the loss would look valid."""
    monkeypatch.setattr(_row_kernel, "runs_on", lambda _: True)
    target = torch.tensor([CLASSES, -1, 3])
    loss = linear_cross_entropy(torch.randn(3, 2), torch.randn(CLASSES, 2), target, reduction="none")
    assert loss.isnan().tolist() == [True, True, False]


def test_a_loss_near_zero_keeps_its_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel subtracts the target's logit from the largest one; both must be equal to the last bit."""
    monkeypatch.setattr(_row_kernel, "runs_on", lambda _: True)
    target, scaling = torch.arange(8), {"softcap": 20.0, "temperature": 0.7}
    x = 12.0 * torch.eye(CLASSES)[:8] + torch.rand(8, CLASSES)
    exact = -whole_logits.logprobs(x.double(), torch.eye(CLASSES).double(), target, **scaling)
    plain = -whole_logits.logprobs(x, torch.eye(CLASSES), target, **scaling)
    found = linear_cross_entropy(x, torch.eye(CLASSES), target, **scaling, reduction="none")
    assert exact.max() < 1e-4
    assert error(found, exact) <= 2 * error(plain, exact) + 2e-6
