"""Times of a step's parts, modules and operations on a clock that the test controls, and by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Self

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from lightning_eff import GradientAccumulation, MicroBatch, OptimizerChoice, TorchCompile
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.report import step_time
from lightning_eff.report.meter import Meter
from lightning_eff.report.step_time import METHODS, NUM_BATCHES, OUTSIDE, PARTS
from tests.support.fetching import Fetching
from tests.support.gan import GAN, Numbers
from tests.support.models import Net, make_loader, make_trainer

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
Clock = SimpleNamespace


class Sleep(nn.Module):
    """Takes some seconds, and then calls its submodules."""

    def __init__(self, clock: Clock, seconds: float, *inside: nn.Module) -> None:
        super().__init__()
        self.clock, self.seconds = clock, seconds
        self.inside = nn.ModuleList(inside)

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.seconds
        for each in self.inside:
            x = each(x)
        return x


class Strategy:
    """Has the strategy methods that are parts of a step; each takes some seconds."""

    def __init__(self, clock: Clock, module: nn.Module, device: torch.device) -> None:
        self.clock, self.lightning_module, self.root_device = clock, module, device
        self.optimizers: list[Any] = []

    def batch_to_device(self) -> None:
        self.clock.now += 1.0

    def training_step(self) -> Tensor:
        self.clock.now += 3.0
        return self.lightning_module(torch.ones(2, 2, requires_grad=True)).sum()

    def backward(self, loss: Tensor) -> None:
        self.clock.now += 8.0
        loss.backward()

    def optimizer_step(self, closure: Callable[[], None]) -> None:
        closure()
        self.clock.now += 5.0


class Event:
    """Replaces a CUDA event: its time can be read only after a wait for the device."""

    clock: Clock
    num_waits = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.now = self.clock.now

    def synchronize(self) -> None:
        Event.num_waits += 1

    def elapsed_time(self, end: Self) -> float:
        assert Event.num_waits
        return 1e3 * (end.now - self.now)


def train(
    clock: Clock, module: nn.Module, *, num_batches: int, device: torch.device = CPU, **keywords: Any
) -> Meter:
    """Train with two batches per step: 2 s to load a batch, 1 s to move it, two passes, 4 s of callbacks."""
    strategy, loop = Strategy(clock, module, device), Fetching()
    settings: dict[str, Any] = {"num_warmup_batches": 0, "is_counted": True} | keywords
    meter = Meter(device, loop, strategy=strategy, **settings)

    def closure() -> None:
        for _ in range(2):
            strategy.backward(strategy.training_step())

    for index in range(num_batches):
        loop.fetch(lambda: setattr(clock, "now", clock.now + 2.0))
        strategy.batch_to_device()
        meter.begin_batch(torch.ones(3, 2), module, [])
        if index % 2:
            strategy.optimizer_step(closure)
        else:
            closure()
        clock.now += 4.0
        meter.end_batch(torch.ones(3, 2), num_steps=(index + 1) // 2)
        meter.pause(is_paused=True)
        clock.now += 50.0
        strategy.lightning_module(torch.ones(2, 2))  # validation
        meter.pause(is_paused=False)
    meter.close()
    assert not METHODS.keys() & vars(strategy).keys(), "the class's methods are restored"
    return meter


def times_of(meter: Meter) -> dict[str, Any]:
    assert meter.times is not None
    return meter.times.summary()


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_parts_are_exact_fractions_of_whole_steps(
    clock: Clock, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    Event.clock, Event.num_waits = clock, 0
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr("lightning_eff.report.meter.allocator", SimpleNamespace(reset_peak=lambda _: None))
    # Two batches of a step: 6 s for data, 12 s forward, 32 s backward, 5 s for the step, 8 s for the rest.
    meter = train(clock, nn.Identity(), num_batches=40, device=device, is_counted=False)
    assert Event.num_waits == 0, "nothing waits for the device while it trains"
    found = times_of(meter)
    seconds = {"forward": 12.0, "backward": 32.0, "optimizer": 5.0, "data": 6.0, "other": 8.0}
    assert found["parts"] == pytest.approx({part: value / 63 for part, value in seconds.items()}, rel=1e-12)
    assert list(found["parts"]) == list(PARTS)
    assert (found["step_s"], found["num_steps"], found["num_batches"]) == (
        63.0,
        NUM_BATCHES // 2,
        NUM_BATCHES,
    )
    assert "modules" not in found
    assert len(meter.throughput.batch_times_s) == 39, "these batches are typical"
    assert Event.num_waits == (device == CUDA)


def test_a_short_run_has_the_parts_of_the_steps_that_were_complete(clock: Clock) -> None:
    found = times_of(train(clock, nn.Identity(), num_batches=7, is_counted=False))
    assert (found["num_steps"], found["num_batches"], found["step_s"]) == (2, 4, 63.0)
    assert times_of(train(clock, nn.Identity(), num_batches=3, is_counted=False)) == {}


def test_own_time_of_modules_is_merged_over_blocks(clock: Clock) -> None:
    blocks = [Sleep(clock, 1.0, Sleep(clock, seconds)) for seconds in (10.0, 20.0, 30.0)]
    meter = train(clock, nn.Sequential(*blocks, Sleep(clock, 4.0), nn.Identity()), num_batches=40)
    found = times_of(meter)
    rows = [(row["path"], row["class"], row["batch_s"], row["calls"]) for row in found["modules"]]
    # Two forward passes a batch. What takes no time has no row: the Sequential and the Identity.
    assert rows == [
        ("*.inside.*", "Sleep", 120.0, 6.0),
        ("*", "Sleep", 14.0, 8.0),
        (OUTSIDE, "", 6.0, 2.0),
    ]
    assert [row["share"] for row in found["modules"]] == [120 / 140, 14 / 140, 6 / 140]
    # Four are counted, and 36 timed but for two with modules and one with operations.
    assert len(meter.throughput.batch_times_s) == 33


def test_operations_are_timed_by_kind(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"matrix products": 10.0, "pointwise operations": 1.0}
    kind_of = step_time.kind_of

    class Slow(step_time.OperationTimes):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                clock.now += costs.get(kind_of(func), 0.0)
                return func(*args, **kwargs)

            monkeypatch.setattr(step_time, "kind_of", lambda _: kind_of(func))
            return super().__torch_dispatch__(call, types, args, kwargs)

    monkeypatch.setattr(step_time, "OperationTimes", Slow)
    layer = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU())
    found = times_of(train(clock, layer, num_batches=40))
    # Of each of two passes: a product forward and two backward; ones, relu and sum forward; ones, relu's
    # gradient and the sum of the weight's gradients backward.
    # A batch without operations takes 31.5 s on average.
    assert found["operations"] == {"matrix products": 1.0, "pointwise operations": 12 / 31.5}
    assert found["num_operations"] == 2 * (3 + 6)
    assert found["operation_s"] == (60 + 12) / 18


def test_closed_in_the_middle_of_a_batch_it_leaves_nothing(clock: Clock) -> None:
    strategy = Strategy(clock, nn.Identity(), CPU)
    times = step_time.StepTimes(strategy, has_modules=True)
    for _ in range(NUM_BATCHES + 2):
        times.end_batch(has_stepped=True)
    assert not times.is_typical
    assert METHODS.keys() <= vars(strategy).keys()
    assert nn.modules.module._global_forward_hooks
    times.close()
    times.close()
    assert not METHODS.keys() & vars(strategy).keys()
    assert not nn.modules.module._global_forward_hooks


def fit(model: pl.LightningModule, folder: Any, *callbacks: Any, loader: Any = None, **keywords: Any) -> Any:
    report = EfficiencyReport(dirpath=folder)
    keywords = {"max_steps": 20} | keywords
    make_trainer(callbacks=[report, *callbacks], **keywords).fit(model, loader or make_loader())
    return report.report["time"]


LOOPS: dict[str, tuple[Callable[[], dict[str, Any]], int, int]] = {
    "accumulation by the Trainer": (lambda: {"accumulate_grad_batches": 2, "max_steps": 12}, 2, 1),
    "accumulation": (lambda: {"callbacks": GradientAccumulation(num_batches=5), "max_steps": 8}, 5, 1),
    "micro-batches": (lambda: {"callbacks": MicroBatch(micro_batch_size=2)}, 1, 2),
}


@pytest.mark.parametrize("loop", LOOPS)
def test_each_loop_has_all_parts(loop: str, tmp_path: Any) -> None:
    keywords, batches_per_step, num_calls = LOOPS[loop]
    settings = keywords()
    callbacks = [settings.pop("callbacks")] if "callbacks" in settings else []
    found = fit(Net(dropout=0.0), tmp_path, *callbacks, **settings)
    assert found["num_batches"] / found["num_steps"] == batches_per_step
    assert min(found["parts"].values()) > 0
    assert sum(found["parts"].values()) == pytest.approx(1.0)
    calls = {row["path"]: row["calls"] for row in found["modules"]}
    assert {calls[path] for path in ("first", "second", "norm")} == {num_calls}
    assert not any(each.startswith(("The optimizer", "Modules are")) for each in found["notes"])


def test_steps_that_the_module_takes_itself_have_all_parts(tmp_path: Any) -> None:
    found = fit(GAN(), tmp_path, loader=Numbers().train_dataloader(), max_steps=40)
    assert min(found["parts"].values()) > 0
    assert {"generator.*", "discriminator.*"} <= {row["path"] for row in found["modules"]}


def test_an_optimizer_that_steps_in_the_backward_pass_is_noted(tmp_path: Any) -> None:
    found = fit(Net(), tmp_path, OptimizerChoice(optimizer=lambda params: InBackward(params, lr=0.01)))
    assert any("inside the backward pass" in note for note in found["notes"])


@pytest.mark.filterwarnings("ignore")  # torch's own, while it compiles
def test_a_compiled_model_has_parts_and_no_modules(tmp_path: Any) -> None:
    found = fit(Net(), tmp_path, TorchCompile(target="forward", backend="eager"))
    assert found["parts"]["forward"] > 0
    assert "modules" not in found
