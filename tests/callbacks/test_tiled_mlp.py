"""MLPs in tiles: exact counts (products, hooks, live bytes), the plain run in float64, and rejections."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, MixtralConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

from lightning_eff.callbacks._token_wise import DRAWS, check_token_wise
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing, recompute
from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.callbacks.tiled_mlp import TiledMLP, tile_mlps
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.core.errors import ConfigError, ConflictError, NoEffectWarning
from lightning_eff.models.gpt import GPT, MLP, Attention
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.prediction.fakes import Fakes
from lightning_eff.report.live_bytes import LiveBytes
from tests.support.counted import Operators, kept_bytes
from tests.support.models import make_trainer
from tests.support.prediction import GPT_OF, assert_predicted_is_measured
from tests.support.ranks import is_equal

CHANNELS, LENGTH, LAYERS = 16, 64, 2
FOUR_TILES_MIB = 2 * LENGTH * (4 * CHANNELS) * 5 * 8 / 4 / 2**20
"""In float64, for a batch of two."""


def make_gpt(**options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "context_length": LENGTH, "d_model": CHANNELS, "num_heads": 2}
    return GPT(**sizes, num_layers=LAYERS, **options).double()


def loss_of(model: GPT) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (2, LENGTH + 1))
    return model.loss(model(tokens[:, :-1]), tokens[:, 1:])


class Products(Operators):
    """Counts the rows of an MLP's products: of [rows, C] @ [C, 4C], and of [rows, 4C] @ [4C, C]."""

    def count(self, func: Any, args: Any, result: Any) -> None:
        if func.overloadpacket.__name__ == "mm":
            (rows, inner), (_, outputs) = args[0].shape, args[1].shape
            self.counts["up"] += rows * ((inner, outputs) == (CHANNELS, 4 * CHANNELS))
            self.counts["down"] += rows * ((inner, outputs) == (4 * CHANNELS, CHANNELS))


@pytest.mark.parametrize("policy", [None, "full"])
def test_an_mlp_is_computed_twice_per_step_also_in_recomputed_blocks(policy: str | None) -> None:
    results, tokens = [], 2 * LENGTH * LAYERS
    for tiled in (False, True):
        model, hooks = make_gpt(), Counter[int]()
        forwards = tile_mlps(model, tile_budget_mib=FOUR_TILES_MIB, min_tokens=1) if tiled else {}
        if tiled and policy is not None:
            recompute(model, policy=policy)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(lambda p, hooks=hooks: hooks.update([id(p)]))
        with Products() as products:
            loss = loss_of(model)
            loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
        assert set(hooks.values()) == {1}
        # The gradient of down's input has the sizes of up's product, and vice versa. A tile's recomputation
        # stops before its last product.
        assert products.counts == {"up": tokens * (3 if tiled else 2), "down": tokens * 2}
    assert [each.max_tiles for each in forwards.values()] == [4] * LAYERS
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_recomputed_blocks_keep_as_much_as_without_tiles() -> None:
    plain, tiled = make_gpt(), make_gpt()
    tile_mlps(tiled, tile_budget_mib=FOUR_TILES_MIB, min_tokens=1)
    for model in (plain, tiled):
        recompute(model)
    assert kept_bytes(tiled, loss_of) == kept_bytes(plain, loss_of)


class SwiGLU(nn.Module):
    """Llama's MLP, with dropout inside."""

    def __init__(self, channels: int = 32, width: int = 128, dropout: float = 0.0) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(channels, width, bias=False) for _ in range(2))
        self.down, self.dropout = nn.Linear(width, channels, bias=False), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.dropout(F.silu(self.gate(x)) * self.up(x)))


def peak_bytes(num_tiles: int) -> int:
    """Return the bytes of a forward and backward pass beyond weights and input."""
    model, x = nn.ModuleDict({"mlp": SwiGLU()}), torch.randn(1, 512, 32, requires_grad=True)
    if num_tiles > 1:
        tile_mlps(model, modules="mlp", tile_budget_mib=512 * 128 * 5 * 4 / num_tiles / 2**20, min_tokens=1)
    live, grad = LiveBytes(), torch.ones(1, 512, 32)
    live.add([*model.parameters(), x, grad])
    before = live.now_bytes
    with live:
        model["mlp"](x).backward(grad)
    return live.peak_bytes - before


def test_tiles_lower_the_peak_of_an_mlp() -> None:
    wide, narrow, weight = 512 * 128 * 4, 512 * 32 * 4, 32 * 128 * 4
    # The output; four wide activations and two of their gradients; the gradient of one weight.
    plain = peak_bytes(1)
    assert plain == 6 * wide + narrow + weight
    assert peak_bytes(16) <= 0.22 * plain
    assert peak_bytes(4) <= 0.37 * plain


def test_the_recomputation_draws_the_same_dropout() -> None:
    model = nn.ModuleDict({"mlp": SwiGLU(dropout=0.5)}).double()
    mlp, x = model["mlp"], torch.randn(8, 32, dtype=torch.float64)
    results = []
    for tiled in (False, True):
        if tiled:
            tile_mlps(model, modules=["mlp"], tile_budget_mib=4 * 128 * 5 * 8 / 2**20, min_tokens=1)
        model.zero_grad()
        torch.manual_seed(3)
        y = mlp(x) if tiled else torch.cat([mlp(part) for part in x.split(4)])
        y.square().sum().backward()
        results.append([y, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-14)


def test_derivatives_of_torch_func_are_computed_without_tiles() -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleDict({"mlp": MLP(CHANNELS)}).double(), torch.randn(2, 8, CHANNELS).double()
    mlp, results = model["mlp"], []
    for tiled in (False, True):
        if tiled:
            tile_mlps(model, modules=["mlp"], tile_budget_mib=0.001, min_tokens=1)
        results.append(torch.func.vmap(torch.func.grad(lambda x: mlp(x).sum()))(x))
    assert is_equal(*results)


def train(technique: TiledMLP, *others: Any) -> None:
    model, tokens = make_gpt(), torch.randint(0, 11, (4, LENGTH + 1))
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=2)
    trainer = make_trainer(callbacks=[*others, technique], max_steps=1, precision="64-true")
    trainer.fit(model, loader)


def test_a_run_reports_its_tiles_and_the_bytes_that_they_do_not_hold() -> None:
    technique = TiledMLP(tile_budget_mib=FOUR_TILES_MIB, min_tokens=1)
    train(technique)
    numbers = technique.outcome().numbers
    assert numbers["mlps"] == ["blocks.0.mlp", "blocks.1.mlp"]
    assert numbers["tiles"] == 4
    assert numbers["not_held_bytes"] == FOUR_TILES_MIB * 2**20 * 3


def test_in_bfloat16_the_error_is_at_most_twice_plain_pytorchs() -> None:
    """T3, with 16 tiles, whose gradients of a weight are added in bfloat16."""
    exact, errors = SwiGLU().double(), []
    x = torch.randn(512, 32)
    exact(x.double()).square().mean().backward()
    for num_tiles in (1, 16):
        model = nn.ModuleDict({"mlp": SwiGLU()})
        model["mlp"].load_state_dict(exact.state_dict())
        budget_mib = 512 * 128 * 5 * 2 / num_tiles / 2**20
        (forward,) = tile_mlps(model, modules="mlp", tile_budget_mib=budget_mib, min_tokens=1).values()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model["mlp"](x).float().square().mean()
        loss.backward()
        assert forward.max_tiles == num_tiles
        pairs = zip(model.parameters(), exact.parameters(), strict=True)
        errors.append(max(float((p.grad - q.grad).norm() / q.grad.norm()) for p, q in pairs))
    assert errors[1] <= 2 * errors[0] + 2 * 2.0**-8
    assert errors[0] != errors[1]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")  # of a CPU without bf16
def test_the_peak_is_predicted_to_the_byte(tmp_path: Path) -> None:
    techniques: list[TiledMLP] = []

    def tiled() -> dict[str, Any]:
        techniques.append(TiledMLP(tile_budget_mib=0.01, min_tokens=1))
        callbacks = [GradientCheckpointing(policy="offload"), techniques[-1]]
        return {"callbacks": callbacks, "plugins": [AutoPrecision(precision="bf16-mixed")]}

    assert_predicted_is_measured(functools.partial(GPT_OF, dropout=0.1), tiled, tmp_path)
    predicted, measured = (technique.outcome().numbers for technique in techniques)
    assert predicted["tiles"] == measured["tiles"] > 4
    assert predicted["not_held_bytes"] == measured["not_held_bytes"]


@pytest.mark.parametrize("options", [{"tile_budget_mib": 0.001}, {"min_tokens": 1}])
def test_inputs_of_one_tile_have_no_effect(options: dict[str, Any]) -> None:
    technique = TiledMLP(**options)
    with pytest.warns(NoEffectWarning):
        train(technique)
    assert not technique.outcome().effective


SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}


def llama_layer() -> Any:
    return LlamaDecoderLayer(LlamaConfig(**SIZES), 0)


def mixtral_layer() -> Any:
    return MixtralDecoderLayer(MixtralConfig(**SIZES, num_local_experts=4), 0)


class Between(nn.Module):
    """Two linear layers with a function between them."""

    def __init__(self, mixes: Callable[[Any, Tensor], Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.up, self.part, self.down = nn.Linear(4, 8), part, nn.Linear(8, 4)
        self.mixes = mixes

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.mixes(self, self.up(x)))


class BitLinear(nn.Linear):
    """Rounds its input to 8 bits by its largest value."""

    def forward(self, input: Tensor) -> Tensor:
        scale = 127 / input.abs().max()
        return super().forward((input * scale).round() / scale)


def keeps(self: Any, h: Tensor) -> Tensor:
    self.aux = h.abs().mean()
    return h


def drops_samples(self: Any, h: Tensor) -> Tensor:
    kept = torch.rand([h.shape[0]] + [1] * (h.dim() - 1), dtype=h.dtype) < 0.9
    return h * kept if self.training else h


def hooked() -> nn.Module:
    model = Between(lambda self, h: self.part(h), nn.GELU())
    model.part.register_forward_hook(lambda module, args, output: None)
    return model


OTHER_TOKENS = "a token's output depends on other tokens"
MODULES: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "GPT's MLP": (lambda: MLP(16), ""),
    "Llama's MLP": (lambda: llama_layer().mlp, ""),
    "dropout": (lambda: Between(lambda self, h: self.part(h), nn.Dropout(0.1)), ""),
    "attention": (lambda: Attention(16, 2, 64, 0.0), OTHER_TOKENS),
    "Llama's attention": (lambda: llama_layer().self_attn, "its forward fails"),
    "a middle axis": (
        lambda: Between(lambda self, h: h - h.mean(1, keepdim=True) if h.dim() == 4 else h),
        OTHER_TOKENS,
    ),
    "only in training": (
        lambda: Between(lambda self, h: h - h.mean(1, keepdim=True) if self.training else h),
        OTHER_TOKENS + " in training",
    ),
    "rounded by the largest": (lambda: nn.Sequential(nn.Linear(4, 8), BitLinear(8, 4)), OTHER_TOKENS),
    "experts": (lambda: mixtral_layer().mlp, "it distributes tokens (topk)"),
    "DropPath": (lambda: Between(drops_samples), DRAWS),
    "LayerDrop by NumPy": (lambda: Between(lambda self, h: h * (np.random.rand() > 1e-9)), DRAWS),
    "spectral norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), parametrizations.spectral_norm(nn.Linear(8, 4))),
        "its forward changes buffers",
    ),
    "a stored value": (lambda: Between(keeps), "its forward stores part of its input: aux"),
    "hooks": (hooked, "hooks of part would run for every tile"),
    "two inputs": (lambda: nn.Bilinear(4, 4, 4), "its forward takes 2 inputs"),
    "two outputs": (lambda: nn.GRU(8, 8), "its forward returns a tuple"),
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_is_token_wise_or_the_reason_is_stated(name: str) -> None:
    make, reason = MODULES[name]
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)  # Mixtral leaves them uninitialized
    before = [value.clone() for value in module.state_dict().values()]
    random = torch.get_rng_state()
    found = check_token_wise(module)
    assert found.refusal.startswith(reason)
    assert bool(found.refusal) == bool(reason)
    assert is_equal([before, random], [list(module.state_dict().values()), torch.get_rng_state()])
    assert module.training


@pytest.mark.parametrize("name", ["Llama's MLP", "attention", "experts"])
def test_the_check_reads_no_weights(name: str) -> None:
    make, _ = MODULES[name]
    found = check_token_wise(make())
    assert check_token_wise(make().to("meta")) == found
    with Fakes():
        assert check_token_wise(make()) == found


def test_selected_modules_must_be_token_wise() -> None:
    model = make_gpt()
    with pytest.raises(ConfigError, match="modules="):
        tile_mlps(model, modules=["blocks.*.attention"])
    with pytest.raises(ConfigError, match=r"callbacks\.tiled_mlp\.modules='MLPP'"):
        train(TiledMLP(modules="MLPP"))
    assert list(tile_mlps(model, modules="MLP")) == ["blocks.0.mlp", "blocks.1.mlp"]
    assert tile_mlps(model) == {}, "tiled already"


def test_a_linear_layer_with_an_adapter_is_no_mlp() -> None:
    """LoRA's matrices are not counted: they have no wide activation between them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(2)))
    assert list(adapt(model, options={"r": 2})) == ["0.0", "1.0"]
    with pytest.warns(NoEffectWarning):
        assert tile_mlps(model) == {}


def test_a_fused_mlp_is_a_conflict() -> None:
    with pytest.raises(ConflictError):
        train(TiledMLP(), TritonGemm(min_features=1, fuse_mlps=True))
