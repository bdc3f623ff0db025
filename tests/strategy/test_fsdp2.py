"""FSDP2 with Durable, and on one device with weights in host memory, where LoRA trains as in a plain run.

Rejected models and optimizers are in _shared/test_rejections.py, two ranks in tests/test_strategies.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.checkpoint import sharded, stored_weights
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError, ConfigError
from lightning_eff.report.model_weights import ModelWeights
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Deep, make_loader, make_trainer, seeded
from tests.support.ranks import is_equal


class Watched(Deep):
    """Records, while a block runs, its index, the blocks with full weights, and all full bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[tuple[int, list[int]]] = []
        self.backwards: list[tuple[int, list[int]]] = []
        self.full_bytes: set[int] = set()
        for index, block in enumerate(self.blocks):
            block.dropout.register_forward_hook(
                lambda *_, index=index: self.forwards.append((index, self.full()))
            )
            block.dropout.register_full_backward_hook(
                lambda *_, index=index: self.backwards.append((index, self.full()))
            )

    def full(self) -> list[int]:
        self.full_bytes.add(sum(p.nbytes for p in self.parameters() if not isinstance(p, DTensor)))
        sharded = [any(isinstance(p, DTensor) for p in block.parameters()) for block in self.blocks]
        return [index for index, is_sharded in enumerate(sharded) if not is_sharded]


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PL_GLOBAL_SEED", "1")  # the command line sets it, and strategies seed with it again
    yield lambda **options: FSDP2(cpu_offload=True, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(
    *callbacks: Any, strategy: Any = "auto", steps: int = 6, save: Path | None = None, **keywords: Any
) -> tuple[Watched, dict[str, Tensor]]:
    """Train LoRA adapters; return the model and its weights after the last step."""
    ckpt_path, save_base = keywords.pop("ckpt_path", None), keywords.pop("save_base", False)
    adapter = PeftAdapter(options={"r": 2}, save_base=save_base)
    model = seeded(Watched)
    trainer = make_trainer(
        callbacks=[adapter, ExactResume(), *callbacks], strategy=strategy, max_steps=steps, **keywords
    )
    trainer.fit(model, make_loader(), ckpt_path=ckpt_path)
    state = {name: value.clone() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    if save is not None:
        trainer.save_checkpoint(save)
    return model, state


STEPS: dict[str, tuple[Callable[[], list[Any]], dict[str, Any]]] = {
    "whole batches, clipped": (list, {"gradient_clip_val": 0.1}),
    "accumulation": (lambda: [GradientAccumulation(global_batch_size=8)], {}),
    "micro-batches, recomputed": (lambda: [MicroBatch(micro_batch_size=2), GradientCheckpointing()], {}),
}


@pytest.mark.parametrize("name", STEPS)
def test_lora_with_the_base_on_the_host_trains_as_in_a_plain_run(name: str, on_host: Any) -> None:
    callbacks, keywords = STEPS[name]
    model, state = train(*callbacks(), strategy=on_host(), save_base=True, **keywords)
    plain, expected = train(*callbacks(), save_base=True, **keywords)
    assert is_equal(state, expected)
    assert model.losses == plain.losses
    assert all(bool(value.any()) for key, value in expected.items() if "lora_B" in key), "trained"
    assert all(full == [index] for index, full in (*model.forwards, *model.backwards)), "one block at a time"
    assert {index for index, _ in model.backwards} == {0, 1, 2}


def test_checkpoints_with_the_base_on_the_host_equal_a_plain_runs(on_host: Any, tmp_path: Path) -> None:
    paths = {strategy: tmp_path / f"{strategy}.ckpt" for strategy in ("auto", "host")}
    strategies: dict[str, Callable[[], Any]] = {"auto": lambda: "auto", "host": on_host}
    _, expected = train(steps=8)
    for name, path in paths.items():
        train(strategy=strategies[name](), steps=4, save=path)
    plain, host = (torch.load(path, weights_only=True) for path in paths.values())
    assert plain.keys() == host.keys()
    assert [*plain["state_dict"]] == [*host["state_dict"]]
    for part in ("state_dict", "optimizer_states"):
        assert is_equal(host[part], plain[part])
    for saved, resumed in itertools.product(paths, repeat=2):
        _, state = train(strategy=strategies[resumed](), steps=8, ckpt_path=paths[saved])
        assert is_equal(state, expected), f"saved by {saved}, resumed by {resumed}"


def test_the_planned_bytes_of_host_and_device_are_exact(on_host: Any) -> None:
    strategy = on_host()
    model, _ = train(strategy=strategy)
    (optimizer,) = strategy.optimizers
    state = sum(value["momentum_buffer"].to_local().nbytes for value in optimizer.state.values())
    held = sum(p.to_local().nbytes for p in model.parameters())
    trained = sum(p.to_local().nbytes for p in model.parameters() if p.requires_grad)
    alike = seeded(Deep)
    adapt(alike, options={"r": 2})
    sgd = torch.optim.SGD([p for p in alike.parameters() if p.requires_grad], momentum=0.9)
    planned = strategy.scheme().share(ModelWeights.of(alike, alike.blocks, sgd), 1)
    assert planned.host == held + trained + state
    assert planned.weights == planned.gradients == planned.optimizer == 0
    block_bytes = sum(p.nbytes for p in alike.blocks[0].parameters())
    # The plan counts two blocks: during a copy to a GPU, a tensor is there twice.
    assert {planned.gathered - block_bytes} == model.full_bytes


@pytest.mark.parametrize("checkpoints", ["full", "sharded"])
def test_shards_that_are_not_finite_are_never_saved(checkpoints: str, on_host: Any, tmp_path: Path) -> None:
    model = seeded(Deep)
    saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=1)
    step = model.training_step
    model.training_step = lambda *args: step(*args) * (torch.nan if model.trainer.global_step > 4 else 1.0)
    trainer = make_trainer(
        callbacks=[saver],
        strategy=on_host(checkpoints=checkpoints),
        plugins=[Durable()],
        enable_checkpointing=True,
    )
    with pytest.raises(CheckpointError, match=r"not finite; .*step=4\.ckpt"):
        trainer.fit(model, make_loader())
    assert [path.name for path in tmp_path.iterdir()] == ["step=4.ckpt"]


def test_a_folder_needs_no_plugin_and_each_file_is_verified_once(
    on_host: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Removing it leaves other files in the folder; TorchCheckpointIO would delete them."""
    path, seen = tmp_path / "a.ckpt", list[str]()
    first = make_trainer(strategy=on_host(checkpoints="sharded"), max_steps=2)
    first.fit(seeded(Deep), make_loader())
    first.save_checkpoint(path)
    verify = sharded.verify
    monkeypatch.setattr(sharded, "verify", lambda file: (seen.append(Path(file.name).name), verify(file))[1])
    again = make_trainer(strategy=on_host(checkpoints="sharded"), max_steps=2)
    again.fit(seeded(Deep), make_loader(), ckpt_path=path)
    assert sorted(seen) == sorted(file.name for file in path.iterdir())
    states = [trainer.strategy.lightning_module_state_dict() for trainer in (first, again)]
    assert is_equal({n: t.full_tensor() for n, t in states[0].items()}, stored_weights.weights(path))
    assert is_equal(*({n: t.full_tensor() for n, t in state.items()} for state in states))
    (path / "notes.txt").write_text("mine")
    again.strategy.remove_checkpoint(path)
    assert [file.name for file in path.iterdir()] == ["notes.txt"]


def test_a_window_that_a_hook_ends_is_rejected_under_sharding(on_host: Any) -> None:
    """Only another backward pass would reduce the gradients of the unfinished window."""
    model = seeded(Deep)
    model.on_train_batch_start = lambda _, index: -1 if index == 3 else None
    callbacks = [GradientAccumulation(num_batches=2)]
    with pytest.raises(ConfigError) as caught:
        make_trainer(callbacks=callbacks, strategy=on_host()).fit(model, make_loader())
    assert caught.value.key == "strategy"
    assert len(model.losses) == 3
