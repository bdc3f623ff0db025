"""Policies by exact counts (products in the backward pass, recomputed blocks, live bytes); rejections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing, RecomputedBlock, recompute
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.core.call_state import RecomputationError
from lightning_eff.core.errors import ConfigError, ConflictError
from lightning_eff.core.host_offload import HostOffload
from lightning_eff.models.gpt import GPT
from tests.support.counted import Operators, kept_bytes
from tests.support.models import Deep, fit
from tests.support.ranks import is_equal
from tests.support.versions import since_torch_2_13

NUM_LAYERS = 4
PRODUCTS_A_BLOCK = 4
"""Linear layers of a block: qkv, output, up and down."""


def make_gpt(policy: str | None, dropout: float = 0.0, **options: Any) -> GPT:
    torch.manual_seed(0)
    sizes = {"vocab_size": 11, "context_length": 16, "d_model": 16, "num_layers": NUM_LAYERS, "num_heads": 2}
    model = GPT(**sizes, dropout=dropout)
    if policy is not None:
        recompute(model, policy=policy, **options)
    return model


def step(model: GPT) -> Tensor:
    torch.manual_seed(1)
    tokens = torch.randint(0, 11, (2, 17))
    return model.loss(model(tokens[:, :-1]), tokens[:, 1:])


PLAIN_PRODUCTS = 2 * (PRODUCTS_A_BLOCK * NUM_LAYERS + 1)
"""Each linear layer, the head included, needs two: the gradients of its input and of its weight."""


@pytest.mark.parametrize(
    ("policy", "options", "products", "attentions"),
    [
        (None, {}, PLAIN_PRODUCTS, 0),
        # The backward pass does not need a block's last product: the recomputation stops before it.
        ("full", {}, PLAIN_PRODUCTS + (PRODUCTS_A_BLOCK - 1) * NUM_LAYERS, NUM_LAYERS),
        ("offload", {}, PLAIN_PRODUCTS + (PRODUCTS_A_BLOCK - 1) * NUM_LAYERS, NUM_LAYERS),
        ("every_n", {"every_n_blocks": 2}, PLAIN_PRODUCTS + (PRODUCTS_A_BLOCK - 1) * 2, 2),
        ("every_n", {"every_n_blocks": 4}, PLAIN_PRODUCTS + PRODUCTS_A_BLOCK - 1, 1),
        ("selective", {}, PLAIN_PRODUCTS, 0),
        ("full", {"blocks": ["MLP"]}, PLAIN_PRODUCTS + NUM_LAYERS, 0),
    ],
)
def test_number_of_products_and_attentions_in_the_backward_pass(
    policy: str | None, options: dict[str, Any], products: int, attentions: int
) -> None:
    loss = step(make_gpt(policy, **options))
    with Operators() as operations:
        loss.backward()
    assert operations.counts["mm"] == products
    assert operations.counts["_scaled_dot_product_flash_attention_for_cpu"] == attentions


def live_bytes(policy: str | None, **options: Any) -> int:
    return kept_bytes(make_gpt(policy, **options), step)


def test_live_bytes_after_the_forward_pass() -> None:
    plain = live_bytes(None)
    full = live_bytes("full")
    # A recomputed block keeps its input; a plain block keeps `a_block` more bytes.
    a_block = (plain - full) / NUM_LAYERS
    assert a_block == int(a_block)
    assert live_bytes("every_n", every_n_blocks=2) == plain - 2 * a_block
    assert live_bytes("every_n", every_n_blocks=4) == plain - a_block
    assert full < live_bytes("selective") < plain
    assert live_bytes("offload") == full, "on the CPU, copies replace the inputs"
    assert a_block > 10 * (2 * 16 * 16 * 4), "ten times a hidden state"


def assert_same_gradients(
    make: Callable[[], Any], backward: Callable[[Any], None], **options: Any
) -> dict[str, RecomputedBlock]:
    """Compare gradients with and without recomputed blocks, bit for bit; return the recomputed blocks."""
    results, recomputed = [], {}
    for is_recomputed in (False, True):
        torch.manual_seed(0)
        model = make()
        recomputed = recompute(model, **options) if is_recomputed else {}
        backward(model)
        results.append([parameter.grad for parameter in model.parameters()])
    assert is_equal(*results)
    return recomputed


@pytest.mark.parametrize("policy", ["selective", "offload"])
def test_frozen_blocks_and_tied_weights_get_the_same_gradients(policy: str) -> None:
    def make() -> GPT:
        model = make_gpt(None, dropout=0.1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("embedding", "blocks.1", "blocks.3.mlp")))
        model.blocks[2].mlp.up.weight = model.blocks[1].mlp.up.weight
        return model

    assert_same_gradients(make, lambda model: step(model).backward(), policy=policy)


class Recurrent(nn.Module):
    """A GRU over packed sequences, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 3, num_layers=2, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        y, _ = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True, total_length=5)
        return x + self.linear(y)


@since_torch_2_13
def test_selective_gives_recurrent_blocks_the_same_gradients() -> None:
    """A GRU adds to products in place, through views that share no version counter."""

    def backward(model: nn.Module) -> None:
        model(torch.randn(3, 5, 6, dtype=torch.float64)).square().sum().backward()

    def make() -> nn.Module:
        return nn.Sequential(Recurrent(), Recurrent()).double()

    assert len(assert_same_gradients(make, backward, policy="selective")) == 2


@since_torch_2_13
def test_selective_recomputes_only_products_that_are_modified_in_place() -> None:
    def make() -> nn.Module:
        layers = [[nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.GELU()] for _ in range(2)]
        return nn.Sequential(*(nn.Sequential(*each) for each in layers)).double()

    counts: list[Any] = []

    def backward(model: nn.Module) -> None:
        loss = model(torch.randn(3, 4, dtype=torch.float64, requires_grad=True)).square().sum()
        with Operators() as operations:
            loss.backward()
        counts.append(operations.counts)

    assert_same_gradients(make, backward, policy="selective")
    assert counts[1]["addmm"] == 2, "one of two products in each block"
    assert counts[1]["mm"] == counts[0]["mm"] == 2 * 2 * 2, "two for the gradients of each product"


class AddsToItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        total += x.sum().detach()
        return torch.tanh(self.linear(x) + total), total


def test_a_block_that_modifies_its_input_in_place_needs_offload() -> None:
    def backward(blocks: Any) -> None:
        y, total = torch.randn(2, 4, dtype=torch.float64), torch.ones((), dtype=torch.float64)
        for block in blocks:
            y, total = block(y, total)
        y.sum().backward()

    def make() -> nn.Module:
        return nn.ModuleList(AddsToItsInput() for _ in range(3)).double()

    assert_same_gradients(make, backward, policy="offload")
    for policy in ("full", "selective"):
        with pytest.raises(RecomputationError, match="offload"):
            assert_same_gradients(make, backward, policy=policy)


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_second_derivatives_of_a_gradient_penalty_equal_the_plain_runs(policy: str) -> None:
    def make() -> nn.Module:
        layers = [[nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.GELU()] for _ in range(2)]
        return nn.Sequential(*(nn.Sequential(*each) for each in layers)).double()

    def backward(model: nn.Module) -> None:
        x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()

    assert_same_gradients(make, backward, policy=policy)


def test_the_outcome_lists_the_recomputed_blocks_and_counts_recomputations(deep: Callable[..., Deep]) -> None:
    callback = GradientCheckpointing(policy="every_n", every_n_blocks=2)
    assert not callback.outcome().effective
    fit(deep(), callback, max_steps=5)
    outcome = callback.outcome()
    assert outcome.did == "2 of 3 blocks recomputed (every_n), 10 times"
    assert outcome.numbers == {"blocks": ["blocks.0", "blocks.2"], "num_blocks": 3, "recomputations": 10}


@pytest.mark.parametrize("whose", ["the model's own", "Hugging Face's"])
def test_a_model_that_recomputes_by_itself_is_rejected(deep: Callable[..., Deep], whose: str) -> None:
    model = deep()
    if whose == "the model's own":
        model.blocks[1].gradient_checkpointing = True
        found = r"blocks\.1"
    else:
        model.language_model = make_llama()
        model.language_model.activation_checkpointing_enable()
        found = r"activation_checkpointing_disable\(\)"
    with pytest.raises(ConflictError, match=found):
        fit(model, GradientCheckpointing(blocks=["Layer"]), max_steps=1)
    assert "configure_model" not in model.__dict__


def test_the_budget_needs_a_compiler_and_is_restored(deep: Callable[..., Deep]) -> None:
    from torch._functorch import config

    for others in ([], [TorchCompile(backend="aot_eager")]):
        with pytest.raises(ConflictError):
            fit(deep(), GradientCheckpointing(policy="budget"), *others)
    seen = []
    model = deep()
    model.blocks[0].register_forward_pre_hook(lambda *_: seen.append(config.activation_memory_budget))
    budget = GradientCheckpointing(policy="budget", memory_budget=0.25)
    fit(model, budget, TorchCompile(backend="aot_eager_decomp_partition"), max_steps=1)
    assert set(seen) == {0.25}
    assert config.activation_memory_budget == 1.0
    assert budget.outcome().did == "the compiler keeps 25% of the activations of each graph"


def make_llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=3, **sizes)).train()


def test_a_cache_passed_by_position_is_not_filled_twice() -> None:
    sizes = {"vocab_size": 50, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 8}
    config, tokens = GPT2Config(**sizes, attn_implementation="eager"), torch.randint(0, 50, (2, 6))
    assert_same_gradients(
        lambda: GPT2LMHeadModel(config).eval(), lambda m: m(input_ids=tokens, labels=tokens).loss.backward()
    )


def test_hugging_faces_layers_are_recomputed_without_filling_their_cache() -> None:
    caches, tokens = [], torch.randint(0, 50, (2, 9))

    def backward(model: Any) -> None:
        out = model(input_ids=tokens, labels=tokens, use_cache=True)
        caches.append(out.past_key_values)
        out.loss.backward()

    hooks = assert_same_gradients(make_llama, backward, policy="selective")
    assert {n: hook.num_recomputed for n, hook in hooks.items()} == {f"model.layers.{i}": 1 for i in range(3)}
    assert all(hook.is_cache_disabled for hook in hooks.values())
    assert caches[1].get_seq_length() == 0


def test_a_recomputed_block_rejects_a_filled_cache() -> None:
    model = make_llama()
    tokens = torch.randint(0, 50, (1, 4))
    with torch.no_grad():
        prefix = model(input_ids=tokens, use_cache=True).past_key_values
    recompute(model)
    with pytest.raises(ValueError, match="past_key_values"):
        model(input_ids=tokens, past_key_values=prefix)


WIDTH = 8


class Block(nn.Module):
    """Has dropout, running statistics, a counter that is replaced, and a constant table."""

    table: Tensor
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)
        self.register_buffer("table", torch.ones(WIDTH))
        self.register_buffer("seen", torch.zeros(()))

    def forward(
        self, x: Tensor, scale: Tensor | float = 1.0, *, shift: Tensor | None = None, how: str = "add"
    ) -> Any:
        self.seen = self.seen + 1
        y = F.dropout(self.norm(self.linear(x)).relu(), 0.3, self.training) * scale * self.table
        y = y if shift is None else y + shift
        return {"y": x + y if how == "add" else y, "aux": [y.mean()]}


def make(host: HostOffload | None = None) -> tuple[Block, RecomputedBlock]:
    torch.manual_seed(0)
    block = Block()
    return block, RecomputedBlock(block, host=host)


def train(block: nn.Module, call: Callable[[nn.Module, Tensor], Any], backwards: int) -> list[Tensor]:
    """Return gradients and buffers after three steps, with several backward passes through each graph."""
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(3):
        x = torch.randn(4, WIDTH, requires_grad=True)
        out = call(block, x)
        loss = out["y"].square().sum() + out["aux"][0]
        for _ in range(backwards):
            loss.backward(retain_graph=True)
        assert x.grad is not None
        found.append(x.grad)
    gradients = [p.grad for p in block.parameters() if p.grad is not None]
    return [*found, *gradients, *(b.clone() for b in block.buffers())]


CALLS: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    "by keyword": lambda block, x: block(scale=x.detach().mean(), x=x),
    "keyword-only tensors": lambda block, x: block(x, shift=x * 2, how="replace"),
    "twice in a forward": lambda block, x: block(block(x)["y"]),
}


@pytest.mark.parametrize(
    ("call", "host", "backwards"), [*zip(CALLS, (True, False, True), (1, 2, 1), strict=True)]
)
def test_gradients_and_buffers_equal_the_plain_blocks(call: str, host: bool, backwards: int) -> None:
    torch.manual_seed(0)
    plain = Block()
    block, recomputed = make(HostOffload() if host else None)
    expected, found = train(plain, CALLS[call], backwards), train(block, CALLS[call], backwards)
    assert is_equal(found, expected)
    times = 2 if call == "twice in a forward" else 1
    assert recomputed.num_recomputed == 3 * times * backwards
    assert block.norm.num_batches_tracked == 3 * times
    assert block.seen == 3 * times


def test_a_forward_works_after_one_that_failed() -> None:
    block, recomputed = make()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(4, WIDTH + 1))
    x = torch.randn(4, WIDTH, requires_grad=True)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        block(torch.randn(4, WIDTH + 1, requires_grad=True))
    block(x)["y"].sum().backward()
    assert recomputed.num_recomputed == 1


def test_only_differentiable_inputs_move_to_the_host_and_unused_copies_are_freed() -> None:
    host = HostOffload()
    block = nn.Module()
    block.forward = lambda x, mask: x * mask
    RecomputedBlock(block, host=host)
    x = torch.randn(4, WIDTH, requires_grad=True)
    block(x, torch.ones(WIDTH, dtype=torch.long)).sum().backward()
    assert host.moved_bytes == x.nbytes
    for _ in range(5):
        block(x, torch.ones(WIDTH))
    assert len(host._waiting) <= 2


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_blocks_are_rejected() -> None:
    blocks = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU())) for _ in range(2)]  # pyright: ignore[reportPrivateImportUsage]
    with pytest.raises(ConfigError, match="allows no hooks"):
        recompute(nn.Sequential(*blocks))


def test_derivatives_of_torch_func_recompute_nothing() -> None:
    model, x = make_gpt("full").blocks, torch.randn(1, 4, 16)
    expected = torch.func.grad(lambda x: make_gpt(None).blocks[0](x).sum())(x)
    assert torch.equal(torch.func.grad(lambda x: model[0](x).sum())(x), expected)
