"""The losses that docs/techniques/tiled_loss.md defines match full logits in float64."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.whole_logits import divergence, error

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "techniques" / "tiled_loss.md").read_text()
BATCH, LENGTH, WIDTH, CLASSES = 4, 6, 5, 30
BETA = 0.3


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """Return the names that the page's code defines."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        if "def training_step" not in block:
            exec(compile(block, "tiled_loss.md", "exec"), names)
    return names


class Batch:
    """Hidden states and heads of a policy and of a wider reference, and answers of unequal lengths."""

    def __init__(self) -> None:
        self.policy, self.reference = (
            (
                torch.randn(BATCH, LENGTH, width).double().requires_grad_(),
                nn.Linear(width, CLASSES, bias=False).double(),
            )
            for width in (WIDTH, WIDTH + 2)
        )
        self.labels = torch.randint(0, CLASSES, (BATCH, LENGTH))
        for row, first in enumerate((3, 1, 0, 5)):
            self.labels[row, :first] = -100
        self.mask = (self.labels != -100).double()

    def logprobs(self, model: tuple[Tensor, nn.Linear]) -> Tensor:
        """Return the log-probability of each label [batch, length]; 0 for ignored labels."""
        logs = model[1](model[0]).log_softmax(-1)
        return logs.gather(-1, self.labels.clamp(min=0).unsqueeze(-1)).squeeze(-1) * self.mask


def whole_dpo(batch: Batch) -> Tensor:
    ratio = (batch.logprobs(batch.policy) - batch.logprobs(batch.reference).detach()).sum(1)
    return -torch.stack([F.logsigmoid(BETA * (ratio[i] - ratio[i + 2])) for i in range(2)]).mean()


def whole_orpo(batch: Batch) -> Tensor:
    logprobs, lengths = batch.logprobs(batch.policy), batch.mask.sum(1)
    p = (logprobs.sum(1) / lengths).exp()
    odds = p / (1 - p)
    hidden, head = batch.policy
    nll = F.cross_entropy(head(hidden[:2]).flatten(0, 1), batch.labels[:2].flatten())
    return nll - BETA * torch.stack([F.logsigmoid((odds[i] / odds[i + 2]).log()) for i in range(2)]).mean()


ADVANTAGES = torch.tensor([1.2, -0.8, 0.3, -0.7], dtype=torch.float64)


def old_logprobs(batch: Batch) -> Tensor:
    """Return log-probabilities whose ratios lie inside and outside of the clipping range."""
    noise = torch.linspace(-0.5, 0.5, BATCH * LENGTH, dtype=torch.float64).view(BATCH, LENGTH)
    return batch.logprobs(batch.policy).detach() + noise


def whole_grpo(batch: Batch) -> Tensor:
    logprobs, old = batch.logprobs(batch.policy), old_logprobs(batch)
    reference = batch.logprobs(batch.reference).detach()
    total = torch.zeros((), dtype=torch.float64)
    for i in range(BATCH):
        tokens: list[Tensor] = []
        for j in range(LENGTH):
            if batch.labels[i, j] == -100:
                continue
            ratio = (logprobs[i, j] - old[i, j]).exp()
            gains = ratio * ADVANTAGES[i], ratio.clamp(0.8, 1.2) * ADVANTAGES[i]
            odds = (reference[i, j] - logprobs[i, j]).exp()
            tokens.append(BETA * (odds - odds.log() - 1) - min(gains))
        total = total + torch.stack(tokens).mean()
    return total / BATCH


def whole_distillation(batch: Batch) -> Tensor:
    kept = batch.mask.bool()
    student, teacher = (head(hidden)[kept] for hidden, head in (batch.policy, batch.reference))
    soft = divergence(student / 3.0, teacher.detach() / 3.0, BETA).mean() * 9.0
    return 0.2 * F.cross_entropy(student, batch.labels[kept]) + 0.8 * soft


LOSSES: dict[str, tuple[Callable[[Batch], Tensor], Callable[[Any, Batch], Tensor]]] = {
    "dpo": (whole_dpo, lambda loss, b: loss(*b.policy, *b.reference, b.labels, beta=BETA)),
    "orpo": (whole_orpo, lambda loss, b: loss(*b.policy, b.labels, beta=BETA)),
    "grpo": (
        whole_grpo,
        lambda loss, b: loss(
            *b.policy, *b.reference, b.labels, old_logprobs(b)[b.mask.bool()], ADVANTAGES, beta=BETA
        ),
    ),
    "distillation": (
        whole_distillation,
        lambda loss, b: loss(
            *b.policy, *b.reference, b.labels, temperature=3.0, beta=BETA, hard_fraction=0.2
        ),
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_the_page_matches_full_logits(name: str, page: dict[str, Any]) -> None:
    batch = Batch()
    whole, call = LOSSES[name]
    exact = whole(batch)
    (hidden, head), (other_hidden, other_head) = batch.policy, batch.reference
    trained = [hidden, head.weight]
    expected = torch.autograd.grad(exact, trained)
    loss = call(page[name], batch)
    torch.testing.assert_close(loss, exact, rtol=1e-10, atol=0.0)
    for one, other in zip(torch.autograd.grad(loss, trained, retain_graph=True), expected, strict=True):
        assert error(one, other) < 1e-12
    loss.backward()
    assert other_hidden.grad is other_head.weight.grad is None, "a reference or teacher is not trained"
