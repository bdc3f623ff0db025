"""UnmovedWeights: exact counts on both sides of one half, what counts, what a report shows, nothing left."""

from __future__ import annotations

import functools
import json
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff.core.errors import ConflictWarning
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.adamw_bf16 import AdamWBf16
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.report import summary
from lightning_eff.report.files import LEDGER_FILE, PAGE_FILE
from lightning_eff.report.unmoved import MAX_SAMPLES, Unmoved, UnmovedWeights
from tests.support.models import make_trainer
from tests.support.prediction import choice

BF16 = torch.bfloat16
SGD = functools.partial(torch.optim.SGD, lr=1.0)
LARGE, SMALL = 2.0**-6, 2.0**-12
"""Gradients that move a weight of 1 at a learning rate of 1, and that do not: its last bit is 2**-7."""


def of_gradients(*values: float) -> nn.Parameter:
    """Return weights of 1 with these gradients."""
    parameter = nn.Parameter(torch.ones(len(values), dtype=BF16))
    parameter.grad = torch.tensor(values, dtype=BF16)
    return parameter


def hooks(optimizer: Any) -> Any:
    return optimizer._optimizer_step_post_hooks or getattr(optimizer, "_gradient_hooks", {})


def counted(optimizer: Any, num_steps: int = 1) -> Unmoved:
    watch = UnmovedWeights([optimizer])
    for _ in range(num_steps):
        optimizer.step()
    found = watch.finish(num_steps)
    assert found is not None
    assert watch.finish(num_steps) is None
    assert not hooks(optimizer)
    return found


@pytest.mark.parametrize(
    ("gradients", "counts", "warns"),
    [
        ([LARGE] * 4 + [SMALL] * 4, (8, 4), False),  # one half
        ([LARGE] * 3 + [SMALL] * 4, (7, 4), True),
        ([LARGE] * 4 + [SMALL] * 4 + [0.0] * 9, (8, 4), False),  # no gradient, so they do not count
        ([LARGE, -LARGE, SMALL, -0.0], (3, 1), False),
    ],
)
def test_counts_are_exact_and_more_than_one_half_warns(
    gradients: list[float], counts: tuple[int, int], warns: bool
) -> None:
    found = counted(SGD([of_gradients(*gradients)]))
    assert (found.num_weights, found.num_unmoved) == counts
    assert found.fraction == counts[1] / counts[0]
    assert bool(found.warning()) is warns


def test_a_gradient_in_any_of_the_steps_counts() -> None:
    parameter = of_gradients(SMALL, 0.0, 0.0)
    optimizer = SGD([parameter])
    watch = UnmovedWeights([optimizer])
    optimizer.step()
    parameter.grad = torch.tensor([0.0, LARGE, 0.0], dtype=BF16)
    optimizer.step()
    assert watch.finish(2) == Unmoved(2, 1, 2, has_gradients=True, is_stochastic=False)


def test_only_trained_bfloat16_weights_are_read() -> None:
    unused, frozen = nn.Parameter(torch.ones(5, dtype=BF16)), of_gradients(SMALL).requires_grad_(False)
    wide = nn.Parameter(torch.ones(3))
    wide.grad = torch.full_like(wide, SMALL)
    found = counted(SGD([of_gradients(SMALL, LARGE), unused, frozen, wide]))
    assert (found.num_weights, found.num_unmoved) == (2, 1), "an unused tensor has no gradient"
    optimizer = SGD([wide, frozen])
    watch = UnmovedWeights([optimizer])
    assert not hooks(optimizer)
    assert watch.finish(1) is None


def test_a_large_tensor_is_sampled_in_every_column_and_counts_by_its_size() -> None:
    rows, columns = 64, 256
    weight = nn.Parameter(torch.ones(rows, columns, dtype=BF16))
    weight.grad = torch.full_like(weight, SMALL)
    weight.grad[:, 0] = LARGE  # each fourth value, from the first one on, would find half of these columns
    found = counted(SGD([weight, of_gradients(*[LARGE] * 10)]))
    stride = 5  # the first from 4 on without a divisor in common with 256
    positions = range(0, rows * columns, stride)
    assert len(positions) <= MAX_SAMPLES
    in_first = sum(position % columns == 0 for position in positions)
    assert found.num_weights == stride * len(positions) + 10
    assert found.num_unmoved == stride * (len(positions) - in_first)


@pytest.mark.parametrize("shape", [(4, 3, 40, 40), (2, 2, 1, 3)])
def test_another_memory_format_is_read_in_the_same_order(shape: tuple[int, ...]) -> None:
    weight = nn.Parameter(torch.ones(shape, dtype=BF16).to(memory_format=torch.channels_last))
    weight.grad = torch.full(shape, SMALL, dtype=BF16)
    weight.grad[0] = LARGE
    weight.grad[-1] = 0.0
    found = counted(SGD([weight]))
    assert found.fraction == pytest.approx(1 - 1 / (shape[0] - 1), abs=0.01)


def test_gradients_that_are_freed_in_the_backward_pass() -> None:
    """An optimizer that shows them is counted as any other; one that does not counts all weights."""
    gradients = torch.tensor([LARGE, SMALL, 0.0, 0.0], dtype=BF16)
    shown = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = InBackward([shown], optimizer=torch.optim.SGD, lr=1.0, weight_decay=0.0)
    watch = UnmovedWeights([optimizer])
    (shown * gradients).sum().backward()
    optimizer.step()
    assert watch.finish(1) == Unmoved(2, 1, 1, has_gradients=True, is_stochastic=False)
    assert not hooks(optimizer)

    hidden = nn.Parameter(torch.ones(4, dtype=BF16))
    plain = SGD([hidden])
    watch = UnmovedWeights([plain])

    def step(parameter: Any) -> None:
        parameter.data -= parameter.grad
        parameter.grad = None

    hidden.register_post_accumulate_grad_hook(step)
    (hidden * gradients).sum().backward()
    plain.step()
    assert (found := watch.finish(1)) is not None
    assert found == Unmoved(4, 3, 1, has_gradients=False, is_stochastic=False)
    assert found.figure()[1] == "75.0% (all counted: gradients are freed in the backward pass)"


def test_stochastic_rounding_loses_nothing_and_is_not_warned_of() -> None:
    found = counted(AdamWBf16([of_gradients(SMALL, SMALL)], lr=1e-6, weight_decay=0.0))
    assert (found.fraction, found.is_stochastic, found.warning()) == (1.0, True, "")
    assert found.figure()[1] == "100.0% (rounded stochastically)"
    weight = of_gradients(SMALL)
    inside = InBackward([weight], optimizer=AdamWBf16)
    assert counted(inside).is_stochastic


def test_one_optimizer_that_rounds_stochastically_does_not_excuse_another() -> None:
    stochastic, plain = AdamWBf16([of_gradients(LARGE)]), SGD([of_gradients(SMALL, SMALL, SMALL)])
    watch = UnmovedWeights([stochastic, plain])
    stochastic.step()
    plain.step()
    assert (found := watch.finish(1)) is not None
    assert (found.num_unmoved, found.is_stochastic) == (3, False)
    assert "optimizer=adamw_bf16" in found.warning()


def test_a_step_with_a_learning_rate_of_zero_loses_no_update() -> None:
    """As a warm-up begins with; in one group of two, and where gradients are freed."""
    groups = [{"params": [of_gradients(SMALL)], "lr": 0.0}, {"params": [of_gradients(LARGE, LARGE)]}]
    assert counted(SGD(groups)) == Unmoved(2, 0, 1, has_gradients=True, is_stochastic=False)
    weight = nn.Parameter(torch.ones(2, dtype=BF16))
    optimizer = InBackward([weight], optimizer=torch.optim.SGD, lr=0.0, weight_decay=0.0)
    watch = UnmovedWeights([optimizer])
    weight.sum().backward()
    optimizer.step()
    assert watch.finish(1) is None


class Two(pl.LightningModule):
    """A weight that moves, one that does not, and an embedding of which one row is used."""

    def __init__(self, num_still: int) -> None:
        super().__init__()
        self.moves = nn.Parameter(torch.ones(10))
        self.still = nn.Parameter(torch.ones(num_still))
        self.table = nn.Embedding(50, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        used = self.table(torch.tensor([3])).float().sum()
        return self.moves.float().sum() * 0.25 + self.still.float().sum() * SMALL + used

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0625)


def fit(num_still: int, folder: Path, *callbacks: Any, steps: int = 12, **keywords: Any) -> EfficiencyReport:
    report = EfficiencyReport(dirpath=folder)
    trainer = make_trainer(
        max_steps=steps, callbacks=[*callbacks, report], **{"precision": "bf16-true"} | keywords
    )
    model = Two(num_still)
    trainer.fit(model, DataLoader(TensorDataset(torch.ones(20, 1))))
    assert not any(map(hooks, trainer.optimizers))
    return report


def test_a_run_in_lightnings_own_bf16_true_warns_once_and_reports(tmp_path: Path) -> None:
    with pytest.warns(ConflictWarning) as caught:
        report = fit(13, tmp_path)
    (warning,) = [str(each.message) for each in caught if each.category is ConflictWarning]
    assert warning == (
        "52.0% of the bf16 weights did not move in 10 steps: rounding to nearest loses updates below half"
        " of a weight's last bit\n  try: OptimizerChoice(optimizer=partial(AdamWBf16, lr=...))\n"
        '  try: AutoPrecision(precision="bf16-mixed")'
    )
    assert report.report["unmoved"] == {
        "fraction": 13 / 25, "num_weights": 25, "num_unmoved": 13, "num_steps": 10,
        "has_gradients": True, "is_stochastic": False,
    }  # fmt: skip
    assert "bf16 weights that did not move in 10 steps 52.0%" in summary.report_text(report.report)
    assert json.loads((tmp_path / LEDGER_FILE).read_text())["unmoved"]["fraction"] == 13 / 25
    assert "did not move in 10 steps" in (tmp_path / PAGE_FILE).read_text()


def test_at_one_half_a_run_does_not_warn_nor_does_one_in_float32(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConflictWarning)
        report = fit(12, tmp_path / "half", steps=4)
        assert report.report["unmoved"]["fraction"] == 0.5
        assert report.report["unmoved"]["num_steps"] == 4
        assert fit(100, tmp_path / "wide", precision="32-true").report["unmoved"] == {}
        stochastic = fit(100, tmp_path / "stochastic", choice(AdamWBf16))
        assert stochastic.report["unmoved"]["is_stochastic"]


def test_the_remedies_of_a_recipe_are_overrides() -> None:
    found = Unmoved(3, 2, 10, has_gradients=True, is_stochastic=False)
    with keep_overrides():
        text = str(ConflictWarning(found.warning()))
    assert text.splitlines()[1:] == ["  try: optimizer=adamw_bf16", "  try: precision=bf16_mixed"]


def test_a_watch_takes_no_memory_of_torch_and_ends_after_the_tenth_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[int] = []
    finish = UnmovedWeights.finish

    def noted(self: UnmovedWeights, num_steps: int) -> Any:
        finished.append(num_steps)
        return finish(self, num_steps)

    monkeypatch.setattr(UnmovedWeights, "finish", noted)
    with pytest.warns(ConflictWarning):
        watched = fit(5000, tmp_path / "watched").report
    assert finished == [10]
    monkeypatch.setattr("lightning_eff.report.unmoved.BF16", torch.complex32)
    plain = fit(5000, tmp_path / "plain").report
    assert (plain["unmoved"], bool(watched["unmoved"])) == ({}, True)
    assert watched["memory"] == plain["memory"]
    assert watched["measured"]["peak_bytes"] == plain["measured"]["peak_bytes"]


def test_a_run_that_fails_reports_the_steps_it_has_had(tmp_path: Path) -> None:
    class Failing(pl.Callback):
        def on_train_batch_start(
            self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == 3:
                msg = "enough"
                raise RuntimeError(msg)

    report = EfficiencyReport(dirpath=tmp_path)
    trainer = make_trainer(callbacks=[Failing(), report], precision="bf16-true")
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(Two(12), DataLoader(TensorDataset(torch.ones(20, 1))))
    assert report.report["unmoved"]["num_steps"] == 3
