"""Checkpoints of adapters: small, exact on resume, and rejected for another base, method or model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DistributedSampler, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_eff.adapters import adapter_checkpoint as adapter_state
from lightning_eff.adapters.adapter_checkpoint import CHECKPOINT_KEY, Fingerprint
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.checkpoint import stored_weights
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core.errors import CheckpointError, ConfigError
from tests.support.adapters import edited, read
from tests.support.models import Deep, Net, make_loader, make_trainer, seeded
from tests.support.models import fit as train
from tests.support.ranks import is_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore:Checkpoint directory"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # torchdata 0.11 on torch 2.13
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
]
LORA: dict[str, Any] = {"options": {"r": 4}}


class Normed(Deep):
    """Has running statistics in its frozen base."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.norm = nn.BatchNorm1d(16)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01)


def make(seed: int = 1, kind: type[Deep] = Normed) -> Any:
    return seeded(kind, seed=seed)


def shuffled() -> StatefulDataLoader[Any]:
    data = make_loader().dataset
    assert isinstance(data, TensorDataset)
    sampler = DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    return StatefulDataLoader(data, batch_size=4, sampler=sampler)


def fit(
    model: pl.LightningModule,
    folder: Path | None = None,
    *,
    steps: int = 4,
    resume: Path | None = None,
    loader: Any = None,
    every: int = 0,
    **keywords: Any,
) -> pl.Trainer:
    """Train with an adapter; save `end.ckpt`, and further checkpoints every `every` steps if it is not 0."""
    # Lightning restores no random states, so let dropout depend on the step alone.
    seeds = LambdaCallback(on_train_batch_start=lambda t, *_: torch.manual_seed(1000 + t.global_step))
    callbacks: list[Any] = [PeftAdapter(**(LORA | keywords)), seeds]
    if every:
        callbacks.append(ModelCheckpoint(folder, "{step}", save_top_k=-1, every_n_train_steps=every))
    torch.manual_seed(2)
    settings = {"max_steps": steps, "plugins": [Durable()], "enable_checkpointing": bool(every)}
    trainer = train(model, *callbacks, loader=loader, ckpt_path=resume, **settings)
    if folder is not None:
        trainer.save_checkpoint(folder / "end.ckpt")
    return trainer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    fit(make(), folder)
    return folder / "end.ckpt"


def test_a_checkpoint_holds_trained_parameters_and_buffers_only(saved: Path) -> None:
    def keys(**keywords: Any) -> tuple[set[str], Any]:
        model = make()
        adapt(model, **(LORA | keywords))
        checkpoint: dict[str, Any] = {"state_dict": model.state_dict()}
        adapter_state.strip_base(model, checkpoint, Fingerprint())
        return set(checkpoint["state_dict"]), model

    found, model = keys()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert set(read(saved)["state_dict"]) == found == trained | {name for name, _ in model.named_buffers()}
    assert len(trained) == 10
    head = keys(modules_to_save=["second"], target_modules=["first"])[0]
    copied = {f"second.modules_to_save.default.{part}" for part in ("weight", "bias")}
    assert {key for key in head if key.startswith("second")} == copied
    assert "first.base_layer.bias" in keys(options={"r": 4, "bias": "lora_only"})[0]


def test_a_resumed_run_equals_the_uninterrupted_run(tmp_path: Path) -> None:
    """Weights, statistics and optimizer state, bit for bit; with dropout, from the middle of an epoch."""
    keywords: dict[str, Any] = {"options": {"r": 4, "bias": "all"}, "modules_to_save": ["second"]}
    stop = 3  # in a second epoch, stock Lightning does not restore the position
    whole, first, second = make(), make(), make()
    never = fit(whole, steps=15, loader=shuffled(), **keywords)
    fit(first, tmp_path, steps=stop, loader=shuffled(), every=stop, **keywords)
    path = tmp_path / f"step={stop}.ckpt"
    again = fit(second, tmp_path, steps=15, loader=shuffled(), resume=path, every=stop, **keywords)
    assert first.losses + second.losses == whole.losses
    assert is_equal(second.state_dict(), whole.state_dict())
    states = [trainer.optimizers[0].state_dict()["state"] for trainer in (again, never)]
    for index, values in states[0].items():
        assert is_equal(values, states[1][index])
    assert not torch.equal(second.norm.running_mean, first.norm.running_mean), "statistics changed"


def without(c: dict[str, Any]) -> None:
    del c["state_dict"]["first.lora_A.default.weight"]


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Any]], object]:
    return lambda c: c["state_dict"].update({name: tensor})


FIRST, SECOND = "first.lora_A.default.weight", "second.lora_B.default.weight"
DAMAGE: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (put(FIRST, torch.empty(0)), FIRST),
    (without, FIRST),
    (put(SECOND, torch.zeros(3, 2)), rf"{SECOND} \(3, 2\) for \(3, 4\)"),
    (lambda c: c.update(state_dict=3), "no weights"),
    (put("\x1b[2J", torch.ones(1)), r"'\\x1b\[2J'"),
    (lambda c: c[CHECKPOINT_KEY].update(base={"tensors": {"a": 1}}), "fingerprint"),
    (lambda c: c[CHECKPOINT_KEY]["base"]["tensors"].popitem(), "another base"),
    (lambda c: c.pop(CHECKPOINT_KEY), "first.base_layer.weight"),
]
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"options": {"r": 2}}, r"options\.r"),
    ({"method": "ia3", "options": None}, "'IA3'"),
    ({"modules_to_save": ["second"]}, "second.modules_to_save.default.weight"),
]


@pytest.mark.parametrize(
    ("edit", "keywords", "text"),
    [*((edit, {}, text) for edit, text in DAMAGE), *((dict, other, text) for other, text in OTHERS)],
)
def test_a_wrong_adapter_method_or_rank_is_rejected_before_anything_is_assigned(
    edit: Callable[[dict[str, Any]], object], keywords: dict[str, Any], text: str, saved: Path, tmp_path: Path
) -> None:
    rejected(make(), edited(saved, tmp_path / "edited.ckpt", edit), text, **keywords)


def rejected(model: pl.LightningModule, path: Path, text: str, run: str = "fit", **keywords: Any) -> None:
    """Check that loading raises, and leaves the model with its base and new adapters."""
    technique, base = PeftAdapter(**(LORA | keywords)), copy.deepcopy(model.state_dict())
    trainer = make_trainer(callbacks=[technique], plugins=[Durable()], max_steps=6)
    with pytest.raises(CheckpointError, match=text) as caught:
        getattr(trainer, run)(model, make_loader(), ckpt_path=path)
    assert str(path) in str(caught.value)
    state = {name.replace(".base_layer", ""): value for name, value in model.state_dict().items()}
    assert all(torch.equal(state[name], value) for name, value in base.items() if name in state)
    assert not any(value.any() for name, value in state.items() if "lora_B" in name)


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_another_base_is_rejected_with_the_names_of_tensors_that_differ(run: str, saved: Path) -> None:
    rejected(make(seed=5), saved, "'blocks.0.linear.bias', .* and 7 more of 18 frozen", run)
    one = make()
    with torch.no_grad():
        one.blocks[1].linear.weight[3, 3] += 1e-6
    rejected(one, saved, "'blocks.1.linear.weight' of 18 frozen tensors", run)


def test_a_weights_only_checkpoint_loads_with_another_dropout(saved: Path, tmp_path: Path) -> None:
    model = make()
    trainer = fit(model, tmp_path, steps=6, resume=saved, options={"r": 4, "lora_dropout": 0.3})
    trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    alone, full = (read(tmp_path / f"{name}.ckpt") for name in ("weights", "end"))
    assert "optimizer_states" not in alone
    assert is_equal(alone["state_dict"], full["state_dict"])
    assert alone[CHECKPOINT_KEY] == full[CHECKPOINT_KEY]
    fresh = make()
    make_trainer(callbacks=[PeftAdapter(**LORA)]).validate(
        fresh, make_loader(), ckpt_path=tmp_path / "weights.ckpt", verbose=False
    )
    assert is_equal(fresh.state_dict(), model.state_dict())


def test_loading_that_is_not_strict_still_requires_the_adapter(saved: Path, tmp_path: Path) -> None:
    loose, again = make(), make()
    loose.strict_loading = again.strict_loading = False
    path = edited(saved, tmp_path / "a.ckpt", lambda c: c["state_dict"].pop("norm.running_mean"))
    fit(loose, steps=6, resume=path)
    rejected(again, edited(saved, tmp_path / "b.ckpt", without), FIRST)


def test_a_checkpoint_with_the_base_loads_too_and_missing_tensors_are_named(tmp_path: Path) -> None:
    first, other = make(), make(seed=5)
    fit(first, tmp_path, save_base=True)
    whole = read(tmp_path / "end.ckpt")
    assert set(whole["state_dict"]) == set(first.state_dict())
    assert whole[CHECKPOINT_KEY]["base"] is None
    fit(other, tmp_path / "next", steps=5, resume=tmp_path / "end.ckpt")
    assert torch.equal(other.first.base_layer.weight, first.first.base_layer.weight)
    assert read(tmp_path / "next" / "end.ckpt")[CHECKPOINT_KEY]["base"] is None, "no other file has the base"
    fit(make(), steps=6, resume=tmp_path / "next" / "end.ckpt")
    rejected(make(), edited(tmp_path / "end.ckpt", tmp_path / "cut.ckpt", without), FIRST)


class Prototype(Normed):
    """Changes a frozen parameter in each step, without a count by PyTorch."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__(**keywords)
        self.prototype = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.prototype.data += 1
        return super().training_step(batch, batch_idx)


def test_a_checkpoint_has_the_base_if_training_changed_a_frozen_tensor(tmp_path: Path) -> None:
    fit(make(kind=Prototype), tmp_path, steps=4)
    resumed = make(kind=Prototype)
    fit(resumed, tmp_path / "next", steps=6, resume=tmp_path / "end.ckpt")
    assert resumed.prototype.tolist() == [6.0] * 3


def test_the_checkpoint_of_an_earlier_run_is_the_base(tmp_path: Path) -> None:
    trained, path = make(), tmp_path / "v1.5" / "run" / "checkpoints" / "a.ckpt"
    train(trained, max_steps=8, plugins=[Durable()]).save_checkpoint(path)
    save_file(trained.state_dict(), tmp_path / "base.safetensors")
    for place in (tmp_path / "v1.5", tmp_path / "base.safetensors"):
        other = make(2)
        assert stored_weights.load_base(other, place, key="") == len(trained.state_dict())
        assert is_equal(other.state_dict(), trained.state_dict())
    model, plain = make(), copy.deepcopy(trained)
    fit(model, tmp_path, base_checkpoint=str(path))
    fit(plain)
    assert model.losses == plain.losses[8:]
    assert torch.equal(model.first.base_layer.weight, trained.first.weight)
    fit(make(), steps=6, resume=tmp_path / "end.ckpt", base_checkpoint=str(path))
    rejected(make(), tmp_path / "end.ckpt", "another base")
    rejected(make(), path, "no adapter")


def test_two_values_for_one_tied_weight_are_rejected() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "head": nn.Linear(4, 8, bias=False)})
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model["head"].weight = model["embedding"].weight
    before = model["head"].weight.clone()
    with pytest.raises(CheckpointError, match="tied"):
        adapter_state.load_base_weights(model, state)
    assert torch.equal(model["head"].weight, before)
    assert adapter_state.load_base_weights(model, dict.fromkeys(state, before + 1)) == 2


def test_a_base_that_does_not_fit_is_rejected_before_anything_is_assigned(
    saved: Path, tmp_path: Path
) -> None:
    train(Net(), max_steps=1, plugins=[Durable()]).save_checkpoint(tmp_path / "net.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "net.ckpt").read_bytes()[:-9])
    (tmp_path / "no.safetensors").write_bytes(b"12345678{}")
    for path in (saved, *(tmp_path / name for name in ("net.ckpt", "cut.ckpt", "no.safetensors", "absent"))):
        model = make()
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ConfigError, match=r"^callbacks\.peft_adapter\.base_checkpoint="):
            fit(model, base_checkpoint=str(path))
        assert is_equal(model.state_dict(), before)


def test_an_empty_or_merged_adapter_is_not_saved() -> None:
    model = Normed()
    adapt(model, **LORA)
    checkpoint = {"state_dict": model.state_dict()}
    parts = [layer for layer in model.modules() if hasattr(layer, "merge")]
    parts[0].merge()
    with pytest.raises(CheckpointError, match="merged"):
        adapter_state.strip_base(model, checkpoint, Fingerprint())
    parts[0].unmerge()
    model.first.lora_A.default.weight.data = torch.empty(0)
    checkpoint = {"state_dict": model.state_dict()}
    for each in (model, Normed().requires_grad_(False)):
        with pytest.raises(CheckpointError, match="empty"):
            adapter_state.strip_base(each, checkpoint, Fingerprint())
    assert CHECKPOINT_KEY not in checkpoint


def test_a_fingerprint_depends_on_values_and_names_but_not_on_strides() -> None:
    model = Normed().requires_grad_(False)
    record = Fingerprint().record(model)
    turned = copy.deepcopy(model)
    turned.first.weight = nn.Parameter(model.first.weight.t().contiguous().t(), requires_grad=False)
    assert not turned.first.weight.is_contiguous()
    assert Fingerprint().record(turned) == record
    swapped = copy.deepcopy(model)
    swapped.first.bias, swapped.norm.weight = swapped.norm.weight, swapped.first.bias
    with pytest.raises(CheckpointError, match=r"'first.bias', 'norm.weight'"):
        Fingerprint().check(swapped, record)


def test_a_base_is_compared_in_the_dtype_of_the_checkpoint(tmp_path: Path) -> None:
    """A `-true` precision converts the model only after a checkpoint is restored."""

    class Low(Deep):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step((batch[0].bfloat16(), batch[1]), batch_idx)

    for steps, resume in ((4, None), (6, tmp_path / "end.ckpt")):
        settings = {"max_steps": steps, "precision": "bf16-true", "ckpt_path": resume}
        train(make(kind=Low), PeftAdapter(**LORA), **settings).save_checkpoint(tmp_path / "end.ckpt")
    record = torch.load(tmp_path / "end.ckpt", weights_only=True)[CHECKPOINT_KEY]["base"]
    other = make(kind=Low)
    adapt(other, **LORA)
    Fingerprint().check(other, record)
    with torch.no_grad():
        other.first.base_layer.weight[0, 0] += 1
    with pytest.raises(CheckpointError, match=r"'first.weight'"):
        Fingerprint().check(other, record)


def test_the_modules_own_checkpoint_hooks_are_called_too(tmp_path: Path) -> None:
    class Own(Normed):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["mine"] = 7

        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            self.seen = checkpoint["mine"]

    again = make(kind=Own)
    fit(make(kind=Own), tmp_path)
    fit(again, steps=6, resume=tmp_path / "end.ckpt")
    assert again.seen == 7
    twin = copy.deepcopy(again)
    assert twin.on_save_checkpoint.__self__.module is twin
    fit(again, tmp_path / "next", steps=7)
    assert again.on_save_checkpoint.__self__.num_saved == 1, "hooks are attached once, not in each fit"
    old, new = (read(folder / "end.ckpt")["state_dict"] for folder in (tmp_path, tmp_path / "next"))
    assert old.keys() == new.keys()


def test_under_fabric_the_functions_save_and_load_an_adapter(tmp_path: Path) -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[Durable()])
    first, second = make(), make()
    for model in (first, second):
        adapt(model, **LORA)
    nn.init.ones_(first.first.lora_B.default.weight)
    checkpoint: dict[str, Any] = {"state_dict": first.state_dict()}
    adapter_state.strip_base(first, checkpoint, Fingerprint())
    fabric.save(tmp_path / "a.ckpt", checkpoint)
    adapter_state.load_adapter(second, fabric.load(tmp_path / "a.ckpt"))
    assert is_equal(second.state_dict(), first.state_dict())
