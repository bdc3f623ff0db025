"""Cross-entropy, log-probabilities and distillation in tiles against whole logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lightning_eff.core.errors import ConfigError
from lightning_eff.kernels import cross_entropy
from lightning_eff.kernels._row_losses import Projection
from lightning_eff.kernels.cross_entropy import linear_cross_entropy, linear_kl, token_logprobs
from tests.support import whole_logits
from tests.support.whole_logits import CLASSES, ROWS, SEVERAL_TILES_MIB, WIDTH, error, gradients, make_inputs

T1_LOSS, T1_GRADIENT = 1e-10, 1e-12
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "softcap": {"softcap": 1.5},
    "other index": {"ignore_index": 5},
    "class weights": {"class_weight": torch.linspace(0.0, 2.0, CLASSES, dtype=torch.float64)},
    "low rank": {"low_rank": 3},
    "all": {
        "label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 2.0, "temperature": 1.3, "low_rank": 2,
        "class_weight": torch.linspace(0.5, 2.0, CLASSES, dtype=torch.float64),
    },
}  # fmt: skip


def assert_t1(found: tuple[Tensor, list[Tensor]], exact: tuple[Tensor, list[Tensor]]) -> None:
    """Compare values and gradients within tolerance class T1."""
    torch.testing.assert_close(found[0], exact[0], rtol=T1_LOSS, atol=T1_LOSS)
    for one, other in zip(found[1], exact[1], strict=True):
        assert error(one, other) < T1_GRADIENT


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_matches_full_logits(option: str, reduction: Any) -> None:
    """Catches a mean of tiles' means, a wrong factor of one gradient, and an option that is applied twice."""
    given, options = make_inputs(), dict(OPTIONS[option])
    if "ignore_index" in options:
        given["target"].masked_fill_(given["target"] == -100, 5)
    trained = [given["x"], given["weight"], given["bias"]]
    if "low_rank" in options:
        r = options["low_rank"]
        pair = torch.randn(ROWS, r).double().requires_grad_(), torch.randn(CLASSES, r).double()
        options["low_rank"] = (pair[0], pair[1].requires_grad_())
        trained += options["low_rank"]
    exact = gradients(lambda: whole_logits.cross_entropy(**given, **options, reduction=reduction), trained)
    found = gradients(
        lambda: linear_cross_entropy(
            **given, **options, reduction=reduction, tile_budget_mib=SEVERAL_TILES_MIB
        ),
        trained,
    )  # fmt: skip
    assert_t1(found, exact)


@pytest.mark.parametrize("shape", [(), (3, 1, 7)])
def test_any_number_of_leading_axes_in_one_tile(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, WIDTH, dtype=torch.float64, requires_grad=True)
    weight, target = make_inputs()["weight"], torch.randint(0, CLASSES, shape)
    assert linear_kl(x, weight, x, weight).shape == token_logprobs(x, weight, target).shape == target.shape
    assert_t1(
        gradients(lambda: linear_cross_entropy(x, weight, target, reduction="none"), [x, weight]),
        gradients(lambda: -whole_logits.logprobs(x, weight, target), [x, weight]),
    )


def test_logprobs_and_entropy_with_both_gradients() -> None:
    scaling, budget = {"softcap": 1.5, "temperature": 0.7}, SEVERAL_TILES_MIB
    given = make_inputs()
    given["target"].clamp_(min=0)
    trained = [given["x"], given["weight"], given["bias"]]

    def whole() -> Tensor:
        logs = whole_logits.logits_of(given["x"], given["weight"], given["bias"], **scaling).log_softmax(-1)
        return torch.stack([whole_logits.logprobs(**given, **scaling), -(logs.exp() * logs).sum(-1)])

    def tiled() -> Tensor:
        both = token_logprobs(**given, **scaling, with_entropy=True, tile_budget_mib=budget)
        return torch.stack(both)

    assert_t1(gradients(tiled, trained), gradients(whole, trained))
    alone = token_logprobs(**given, **scaling, tile_budget_mib=budget)
    torch.testing.assert_close(alone, whole()[0])


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
def test_the_divergence_matches_full_logits_and_gives_the_teacher_no_gradient(beta: float) -> None:
    given = make_inputs()
    x, weight = given["x"], given["weight"]
    teacher_x = torch.randn(ROWS, 4, dtype=torch.float64, requires_grad=True)
    teacher_weight = torch.randn(CLASSES, 4, dtype=torch.float64, requires_grad=True)
    options = {"beta": beta, "temperature": 1.7, "tile_budget_mib": SEVERAL_TILES_MIB}

    def whole() -> Tensor:
        return whole_logits.divergence(x @ weight.T / 1.7, teacher_x @ teacher_weight.T / 1.7, beta)

    found = gradients(lambda: linear_kl(x, weight, teacher_x, teacher_weight, **options), [x, weight])
    assert_t1(found, gradients(whole, [x, weight]))
    linear_kl(x, weight, teacher_x, teacher_weight, **options).sum().backward()
    assert teacher_x.grad is teacher_weight.grad is None


class Float32Logits(Projection):
    """Float32 products of 16-bit operands, which exist only on CUDA."""

    def tiles(self) -> Iterator[tuple[slice, Tensor]]:
        ((x, weight),) = self.pairs
        for start in range(0, len(x), 8):
            at = slice(start, min(start + 8, len(x)))
            yield at, x[at].float() @ weight.float().T


@pytest.mark.parametrize("scaling", [{}, {"softcap": 1.5, "temperature": 0.7}], ids=str)
def test_gradients_of_float32_logits_reach_the_16_bit_products(
    scaling: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 they once did not: the rows' gradient came from a 16-bit buffer that nothing had filled."""
    monkeypatch.setattr(cross_entropy, "Projection", Float32Logits)
    given = make_inputs(torch.bfloat16)
    x, weight, target = given["x"], given["weight"], given["target"].clamp(min=0)
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    found = gradients(lambda: token_logprobs(x, weight, target, **scaling), [x, weight])
    exact = gradients(lambda: whole_logits.logprobs(*wide, target, **scaling), wide)
    assert max(error(one, other) for one, other in zip(found[1], exact[1], strict=True)) < 2e-2


@pytest.mark.parametrize("peaked", [0.0, 4.0], ids=["even", "nearly certain targets"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_error_in_low_precision_is_at_most_twice_that_of_full_logits(
    dtype: torch.dtype, peaked: float
) -> None:
    """T3, of values and gradients; catches a 16-bit loss, and cancellation between lse and the logit."""
    num_rows, num_classes = 256, 500
    target = torch.randint(0, num_classes, (num_rows,))
    w = torch.randn(num_classes, 32)
    x = torch.randn(num_rows, 32) * 0.3 + peaked * w[target] * 0.3
    x, w = x.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    exact_x, exact_w = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
    scale = 2.0**10 if dtype == torch.float16 else 1.0
    exact = F.cross_entropy(exact_x @ exact_w.T, target, reduction="none")
    plain = F.cross_entropy((x @ w.T).float(), target, reduction="none")
    ours = linear_cross_entropy(x, w, target, reduction="none", tile_budget_mib=0.1)
    scalar = linear_cross_entropy(x, w, target, tile_budget_mib=0.1)
    assert ours.dtype == scalar.dtype == torch.float32
    ulp = torch.finfo(torch.float32).eps
    assert error(ours, exact) <= 2 * error(plain, exact) + 2 * ulp
    assert error(scalar, exact.mean()) <= 2 * error(plain, exact) + 2e-6
    exact_grads = torch.autograd.grad(exact.mean() * scale, [exact_x, exact_w])
    plain_grads = torch.autograd.grad(plain.mean() * scale, [x, w])
    for value in (ours.mean(), scalar):
        found = torch.autograd.grad(value * scale, [x, w])
        for one, other, reference in zip(found, plain_grads, exact_grads, strict=True):
            assert one.dtype == dtype
            assert error(one, reference) <= 2 * error(other, reference) + 2 * torch.finfo(dtype).eps


def test_a_loss_near_zero_is_as_exact_as_log_softmax() -> None:
    """This test found that lse - logit lost all but three digits of a loss of 5e-7."""
    w = torch.randn(200, 64)
    target = torch.randint(0, 200, (64,))
    x = 0.2 * torch.randn(64, 64) + 0.7 * w[target]
    bias = torch.full((200,), 100.0)
    exact = F.cross_entropy(F.linear(x.double(), w.double(), bias.double()), target)
    plain = F.cross_entropy(F.linear(x, w, bias), target)
    assert exact < 1e-2
    assert error(linear_cross_entropy(x, w, target, bias), exact) <= 2 * error(plain, exact) + 2e-6


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_batch_without_targets_has_torchs_value_and_gradients_of_zero(
    reduction: Any, dtype: torch.dtype
) -> None:
    given = make_inputs(dtype)
    given["target"].fill_(-100)
    value = linear_cross_entropy(**given, reduction=reduction)
    expected = F.cross_entropy(
        F.linear(given["x"], given["weight"]).float(), given["target"], reduction=reduction
    )
    torch.testing.assert_close(value, expected, equal_nan=True)
    value.sum().backward()
    for name in ("x", "weight", "bias"):
        assert torch.equal(given[name].grad, torch.zeros_like(given[name])), name


VALID = {"x": torch.zeros(2, 3), "weight": torch.zeros(4, 3), "target": torch.tensor([0, 1])}


def test_no_rows_with_low_rank_rows_have_a_loss_of_0() -> None:
    """A mask may select no targets of a batch."""
    none = {"x": torch.zeros(0, 3), "weight": torch.zeros(4, 3), "target": torch.zeros(0).long()}
    low_rank = torch.zeros(0, 2), torch.zeros(4, 2)
    assert linear_cross_entropy(**none, low_rank=low_rank, reduction="sum") == 0.0


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"label_smoothing": 1.5}, ConfigError),
        ({"reduction": "average"}, ConfigError),
        ({"weight": torch.zeros(4, 2)}, ValueError),
        ({"bias": torch.zeros(3)}, ValueError),
        ({"low_rank": (torch.zeros(1, 2), torch.zeros(4, 2))}, ValueError),
        ({"weight": torch.zeros(4, 3).bfloat16()}, TypeError),
        ({"target": torch.tensor([0.0, 1.0])}, TypeError),
        ({"target": torch.tensor([0, 4])}, RuntimeError),
        ({"target": torch.tensor([0, -1])}, RuntimeError),
    ],
    ids=str,
)
def test_invalid_arguments_are_rejected(changed: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        linear_cross_entropy(**(VALID | changed))
