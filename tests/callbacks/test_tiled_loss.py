"""Unmodified steps in float64 (T1): a loss in tiles, full logits or a rejection; never another gradient."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_eff.callbacks._lazy_logits import LazyLogits, Use
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss, tile_loss
from lightning_eff.core.errors import ConfigError, ConflictError, ConflictWarning, NoEffectWarning
from lightning_eff.kernels import cross_entropy
from lightning_eff.models.gpt import GPT
from lightning_eff.optimizer.in_backward import InBackward
from tests.support.language import token_rows
from tests.support.models import fit, make_trainer
from tests.support.prediction import GPT_OF, assert_predicted_is_measured

V, LENGTH = 64, 16
SOME_ROWS = 8 * 4 * V / 2**20
"""Budget of tiles of eight rows, in MiB."""
X, Y = torch.randint(0, V, (2, 3, LENGTH), generator=torch.Generator().manual_seed(0))
Y[0, :4] = -100
KEPT = Y.clamp(min=0)


def gpt(**options: Any) -> GPT:
    torch.manual_seed(1)
    sizes = {"vocab_size": V, "context_length": LENGTH, "d_model": 16, "num_layers": 2, "num_heads": 2}
    return GPT(**(sizes | options)).double()


TILED: dict[str, Callable[[Any], Tensor]] = {
    "own": lambda m: m.loss(m(X), Y),
    "shifted": lambda m: F.cross_entropy(
        m(X)[..., :-1, :].contiguous().view(-1, V), Y[..., 1:].contiguous().view(-1)
    ),
    "selected": lambda m: F.cross_entropy(m(X)[Y != -100], Y[Y != -100]),
    "one row": lambda m: F.cross_entropy(m(X)[1, 2], Y[1, 2]),
    "transposed": lambda m: F.cross_entropy(m(X).mT, Y, label_smoothing=0.1, reduction="sum"),
    "weights": lambda m: F.cross_entropy(
        m(X).flatten(0, 1), Y.flatten(), weight=torch.arange(V).double() / V + 0.1
    ),
    "capped": lambda m: F.cross_entropy((torch.tanh(m(X) / 3.0) * 3.0).flatten(0, 1) / 0.7, Y.flatten()),
    "log-softmax": lambda m: F.nll_loss(F.log_softmax(m(X), dim=-1).flatten(0, 1), Y.flatten()),
    "log-probabilities": lambda m: (
        -(torch.log_softmax(m(X), -1).gather(-1, KEPT[..., None])[..., 0] * (Y != -100)).sum()
    ),
    "each": lambda m: F.cross_entropy(m(X).flatten(0, 1), Y.flatten(), reduction="none").square().mean(),
    "detached": lambda m: F.cross_entropy(m(X).detach().mT, Y) * F.cross_entropy(m(X).mT, Y),
    "by keywords": lambda m: F.cross_entropy(input=torch.permute(input=m(X), dims=(0, 2, 1)), target=Y),
    "accuracy": lambda m: with_accuracy(m(X)),
}
FULL: dict[str, Callable[[Any], Tensor]] = {
    "softmax": lambda m: -m(X).softmax(-1).log().gather(-1, KEPT[..., None]).mean(),
    "in place": lambda m: cross_entropy_of(m(X).div_(2.0)),
    "written": lambda m: masked(m(X)),
    "probabilities": lambda m: F.cross_entropy(m(X).mT, F.one_hot(KEPT, V).mT.double()),
    "some classes": lambda m: F.cross_entropy(m(X)[..., :40].flatten(0, 1), Y.flatten().clamp(max=39)),
    "negative": lambda m: F.cross_entropy((m(X) * -1.0).mT, Y),
    "axis": lambda m: m(X).log_softmax(1).square().mean(),
}


def with_accuracy(logits: Tensor) -> Tensor:
    return cross_entropy_of(logits) * (1 + (logits.argmax(-1) == Y).double().mean())


def masked(logits: Tensor) -> Tensor:
    logits[..., 60:] = -1e9
    return F.cross_entropy(logits.flatten(0, 1), Y.flatten().clamp(max=59))


def cross_entropy_of(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), Y.flatten())


def hooked_logits(net: Any) -> Tensor:
    logits = net(X)
    logits.register_hook(lambda grad: grad * 0.1)
    return cross_entropy_of(logits)


def hooked_head(net: Any) -> Tensor:
    net.head.register_forward_hook(lambda module, args, out: out / 3)
    return cross_entropy_of(net(X))


def replaced_forward(net: Any) -> Tensor:
    inner = net.head.forward
    net.head.forward = lambda x: inner(x) * 2
    return cross_entropy_of(net(X))


def without_gradients(net: Any) -> Tensor:
    with torch.no_grad():
        taught = net(X.flip(0))
    return F.mse_loss(net(X), taught) + cross_entropy_of(net(X))


def masked_without_gradients(net: Any) -> Tensor:
    logits = net(X)
    with torch.no_grad():
        logits[..., :3] = -1e4
    return cross_entropy_of(logits.float().double()) + logits.logsumexp(-1).mean()


def written_by_a_function(net: Any) -> Tensor:
    logits = net(X)
    halved = logits / 2
    F.relu(logits, inplace=True)
    return cross_entropy_of(halved) + cross_entropy_of(logits)


def written_as_data(net: Any) -> Tensor:
    logits = net(X)
    logits.data.mul_(2.0)
    return cross_entropy_of(logits)


def written_after_a_view(net: Any) -> Tensor:
    logits = net(X)
    flat, halved = logits.view(-1, V), logits / 2
    logits.mul_(2.0)
    return F.cross_entropy(flat, Y.flatten()) + cross_entropy_of(halved)


def other_order_of_classes(net: Any) -> Tensor:
    return cross_entropy_of(net(X)[..., torch.arange(V).flip(0)]) + cross_entropy_of(net(X)[:, :, :V])


def after_an_update(net: Any) -> Tensor:
    logits = net(X)
    with torch.no_grad():
        net.head.weight.mul_(1.1)
    return cross_entropy_of(logits)


def with_other_weights(net: Any) -> Tensor:
    weights = {name: value * 1.5 for name, value in net.named_parameters()}
    return cross_entropy_of(torch.func.functional_call(net, weights, (X,)))


def after_the_input_changed(net: Any) -> Tensor:
    hidden = net.embedding(X)
    logits = net.head(hidden)
    hidden += 1
    return cross_entropy_of(logits)


def retained_after_the_loss(net: Any) -> Tensor:
    logits = net(X)
    loss = cross_entropy_of(logits)
    logits.retain_grad()
    return loss


def after_a_change_of_mode(net: Any) -> Tensor:
    logits = net(X)
    net.eval()
    return cross_entropy_of(logits)


def gradients(model: nn.Module, step: Callable[[Any], Tensor]) -> tuple[Tensor, list[Tensor]]:
    loss = step(model)
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters() if p.grad is not None]


def assert_same_step(model: nn.Module, step: Callable[[Any], Tensor], rtol: float = 1e-10) -> Any:
    twin = copy.deepcopy(model)
    (projection,) = tile_loss(twin, tile_budget_mib=SOME_ROWS).values()
    expected, found = gradients(model, step), gradients(twin, step)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol / 100)
    assert any(grad.abs().max() > 0 for grad in found[1])
    return projection


@pytest.mark.parametrize("name", TILED)
def test_a_loss_is_computed_in_tiles(name: str) -> None:
    projection = assert_same_step(gpt(), TILED[name])
    assert projection.num_losses >= 1
    assert not projection.readers
    assert projection.tile_rows <= 8


@pytest.mark.parametrize("name", FULL)
def test_other_functions_get_full_logits(name: str) -> None:
    projection = assert_same_step(gpt(), FULL[name])
    assert sum(projection.readers.values()) >= 1


@pytest.mark.parametrize(
    "step",
    [
        hooked_logits,
        hooked_head,
        replaced_forward,
        without_gradients,
        masked_without_gradients,
        written_by_a_function,
        written_as_data,
        written_after_a_view,
        other_order_of_classes,
        after_a_change_of_mode,
    ],
    ids=lambda step: step.__name__,
)
def test_unusual_reads_of_logits_give_the_same_step(step: Callable[[Any], Tensor]) -> None:
    """With as many features as classes, so that a wrong axis changes no shape."""
    assert_same_step(gpt(d_model=V), step)


@pytest.mark.parametrize(
    "step",
    [
        after_an_update,
        with_other_weights,
        after_the_input_changed,
        retained_after_the_loss,
    ],
    ids=lambda step: step.__name__,
)
def test_logits_that_would_differ_later_are_rejected(step: Callable[[Any], Tensor]) -> None:
    model = gpt()
    tile_loss(model, tile_budget_mib=SOME_ROWS)
    with pytest.raises(ConfigError, match="linear_cross_entropy"):
        step(model)


def test_held_logits_are_computed_before_the_optimizer_step() -> None:
    plain, ours, kept = gpt(), gpt(), list[Tensor]()
    tile_loss(ours, tile_budget_mib=SOME_ROWS)
    for net in (plain, ours):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        logits = net(X)
        cross_entropy_of(logits).backward()
        optimizer.step()
        kept.append(logits.softmax(-1).detach())
    torch.testing.assert_close(kept[1], kept[0], rtol=1e-12, atol=0.0)


def test_hidden_states_are_never_indexed_by_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, such an index would end in a device-side assert."""
    widths, on = set[int](), Use.on
    monkeypatch.setattr(Use, "on", lambda use, tensor: [widths.add(tensor.shape[-1]), on(use, tensor)][1])
    chosen = torch.arange(KEPT.numel()), KEPT.flatten()
    assert_same_step(gpt(), lambda m: -m(X).log_softmax(-1).view(-1, V)[chosen].mean())
    assert widths == {V}


@pytest.mark.filterwarnings("ignore:.torch.jit.trace", "ignore::torch.jit.TracerWarning")
def test_a_model_is_exported_with_full_logits() -> None:
    model, ids = nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V)), X.flip(0)
    expected = model(ids)
    tile_loss(model)
    for exported in (torch.jit.trace(model, X), torch.export.export(model, (X,)).module()):
        torch.testing.assert_close(exported(ids), expected)


def test_fabric_checks_the_backward_pass_without_full_logits() -> None:
    net, fabric = gpt().float(), Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    (projection,) = tile_loss(net).values()
    model = fabric.setup_module(net)
    fabric.backward(cross_entropy_of(model(X)))
    assert (projection.num_losses, dict(projection.readers)) == (1, {})
    with pytest.raises(RuntimeError, match=r"fabric\.backward"):
        cross_entropy_of(model(X)).backward()


def test_logits_can_be_read_after_the_loss() -> None:
    def step(model: Any) -> Tensor:
        logits = model(X)
        return cross_entropy_of(logits) + 1e-3 * torch.logsumexp(logits, -1).square().mean()

    projection = assert_same_step(gpt(), step)
    assert (projection.num_losses, dict(projection.readers)) == (1, {"logsumexp": 1})


class Custom(torch.autograd.Function):
    """Squares its input; `apply` bypasses torch's function protocol."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.save_for_backward(logits)
        return logits.square().sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0] * 2 * ctx.saved_tensors[0]


def test_a_loss_that_bypasses_the_function_protocol_is_rejected() -> None:
    model = gpt()
    tile_loss(model)
    with pytest.raises(ConfigError, match="linear_cross_entropy"):
        Custom.apply(model(X)).backward()


def test_logits_have_a_shape_and_a_dtype_without_being_computed() -> None:
    model = gpt()
    (projection,) = tile_loss(model).values()
    logits = model(X)
    assert isinstance(logits, LazyLogits)
    assert (logits.shape, logits.dtype, logits.requires_grad) == ((3, LENGTH, V), torch.float64, True)
    assert not projection.readers
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = model.float()(X)
    assert (logits.dtype, logits.requires_grad) == (torch.bfloat16, False)


def test_the_projection_of_hugging_face_is_found_and_its_own_loss_is_tiled() -> None:
    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    torch.manual_seed(0)
    llama = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    gpt2 = GPT2LMHeadModel(
        GPT2Config(vocab_size=V, n_embd=16, n_layer=1, n_head=2, n_positions=LENGTH)
    ).eval()
    for model in (llama, gpt2):
        assert list(tile_loss(copy.deepcopy(model))) == ["lm_head"]
        projection = assert_same_step(
            model, lambda m: m(input_ids=X, labels=Y, use_cache=False).loss, rtol=1e-5
        )
        assert (projection.num_losses, dict(projection.readers)) == (1, {})


class Two(nn.Module):
    """Two projections of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.one, self.other = nn.Embedding(V, 8), nn.Linear(8, V), nn.Linear(8, V)


def test_an_ambiguous_projection_must_be_named() -> None:
    for head in (None, "lm_head", "table"):
        with pytest.raises(ConfigError, match=f"head={head!r}"):
            tile_loss(Two(), head=head)
    assert list(tile_loss(Two(), head="other")) == ["other"]
    tied = Two()
    tied.other.weight = tied.table.weight
    assert list(tile_loss(tied)) == ["other"]


class Step(pl.LightningModule):
    """A GPT, trained by SGD on the mean over its targets, which is returned without a weight."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.net = gpt(**options)
        self.reads: Callable[[Tensor], Any] = lambda logits: None

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.reads(logits)
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


class Weighted(Step):
    """The same with its weight."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": (batch[1] != -100).sum()}


class Changed(Step):
    """Returns a loss that is no longer the tiled mean itself, so its number of targets is lost."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 1.0


def trained(model: pl.LightningModule, *callbacks: Any, steps: int = 6) -> dict[str, Tensor]:
    fit(model, *callbacks, loader=DataLoader(TensorDataset(*token_rows()), batch_size=2), max_steps=steps)
    return model.state_dict()


class Collects(Step):
    """Computes a metric from the logits of all validation batches, and keeps these logits."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.kept = [*(self.kept if batch_idx else []), self(batch[0])]

    def on_validation_epoch_end(self) -> None:
        self.log("peak", torch.cat(self.kept[:-1]).max())  # the last logits are never read


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_logits_of_validation_batches_have_the_weights_of_the_validation() -> None:
    peaks = list[Any]()
    for callbacks in ([], [TiledLoss()]):
        ema = EMAWeightAveraging(decay=0.5)  # replaces weights during the validation only
        data = DataLoader(TensorDataset(*token_rows()), batch_size=2)
        trainer = make_trainer(callbacks=[*callbacks, ema], max_steps=-1, max_epochs=2)
        trainer.fit(Collects(), data, data)
        peaks.append(trainer.callback_metrics["peak"])
    torch.testing.assert_close(peaks[1], peaks[0], rtol=1e-12, atol=0.0)


def test_the_mean_loss_passes_its_number_of_targets_to_accumulation() -> None:
    def exact() -> list[Any]:
        return [GradientAccumulation(global_batch_size=6), MicroBatch(micro_batch_size=1)]

    by_user, by_loss = exact(), exact()
    expected = trained(Weighted(), *by_user)
    torch.testing.assert_close(trained(Step(), *by_loss, TiledLoss()), expected, rtol=1e-9, atol=1e-12)
    unweighted = trained(Step(), *exact())
    assert any((unweighted[name] - value).norm() > 1e-3 * value.norm() for name, value in expected.items())
    counted_by = [parts[1].outcome().did.rpartition("; ")[2] for parts in (by_user, by_loss)]
    assert counted_by == ["weights: returned by training_step", "weights: targets of the tiled loss"]
    with pytest.warns(ConflictWarning, match="unequal numbers"):
        trained(Changed(), *exact(), TiledLoss())


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["head", "qkv"], "options": {"r": 2, "lora_alpha": 4}},
        {"target_modules": ["qkv"], "modules_to_save": ["head"], "options": {"r": 2}},
    ],
)
def test_an_adapted_projection_is_computed_in_tiles(options: Any) -> None:
    models, technique = [], TiledLoss(tile_budget_mib=SOME_ROWS)
    for callbacks in ([], [technique]):
        torch.manual_seed(5)
        state = trained(Step(tie_word_embeddings=False), PeftAdapter(**options), *callbacks)
        models.append({key: value for key, value in state.items() if "lora_" in key or "modules_to" in key})
    numbers = technique.outcome().numbers
    assert (numbers["losses"], numbers["whole"]) == (6, {})
    torch.testing.assert_close(models[1], models[0], rtol=1e-9, atol=1e-12)
    assert any("head" in name for name in models[0])


def test_tied_weights_are_updated_in_the_backward_pass() -> None:
    found, technique = [], TiledLoss(tile_budget_mib=SOME_ROWS)
    for callbacks in ([], [technique]):
        optimizer = functools.partial(InBackward, optimizer=torch.optim.SGD, lr=0.1)
        model = Step()
        assert model.net.head.weight is model.net.embedding.weight
        found.append(trained(model, OptimizerChoice(optimizer=optimizer), *callbacks))
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-12)
    assert (found[0]["net.head.weight"] - gpt().head.weight).norm() > 1e-3
    assert technique.outcome().numbers["losses"] == 6


def test_a_run_reports_its_tiles() -> None:
    model, technique = Step(), TiledLoss(tile_budget_mib=SOME_ROWS)
    trained(model, technique)
    outcome = technique.outcome()
    assert outcome.effective
    sizes = {"tile_rows": 8, "rows": 10, "bytes_not_held": 10 * V * 8}
    assert outcome.numbers == {"head": "net.head", "losses": 6, "whole": {}, **sizes}


def test_a_run_without_a_tiled_loss_warns_with_the_function_that_reads_logits() -> None:
    model, technique = Step(), TiledLoss()
    model.reads = lambda logits: logits.softmax(-1)
    with pytest.warns(NoEffectWarning, match="softmax"):
        trained(model, technique, steps=2)
    assert not technique.outcome().effective


def test_strategies_that_wait_for_the_gradient_of_logits_are_rejected() -> None:
    technique = TiledLoss()
    trainer = make_trainer(callbacks=[technique], strategy=ModelParallelStrategy(), devices=1)
    with pytest.raises(ConflictError):
        technique.setup(trainer, Step(), "fit")  # a fit would start a process group


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_parts_of_tiles_are_predicted_to_the_byte(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "PART_BYTES_TRAINED", 1)  # one row per part
    assert_predicted_is_measured(GPT_OF, lambda: {"callbacks": [TiledLoss(tile_budget_mib=1e-2)]}, tmp_path)


def test_a_copy_of_the_model_uses_its_own_weights() -> None:
    model = gpt()
    tile_loss(model)
    twin = copy.deepcopy(model)
    nn.init.zeros_(twin.head.weight)
    loss = F.cross_entropy(twin(X).mT, Y)
    assert float(loss.detach()) == pytest.approx(torch.tensor(V).log().item())


def test_a_compiled_model_has_the_same_step() -> None:
    plain, model = gpt(), gpt()
    tile_loss(model, tile_budget_mib=SOME_ROWS)
    expected = gradients(plain, lambda m: F.cross_entropy(m(X).mT, Y))
    found = gradients(torch.compile(model, backend="eager"), lambda m: F.cross_entropy(m(X).mT, Y))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
