"""An offloaded block: its parameters at any time, writes to them, errors, and copies of the model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff.callbacks.offload_frozen import offload_frozen
from lightning_eff.callbacks.peft_adapter import adapt
from tests.support.offloaded import BLOCK_BYTES, NUM_BLOCKS, WIDTH, stack, step, train
from tests.support.prediction import GPT_OF


def test_a_parameter_is_its_values_at_any_time_and_does_not_move_with_the_model() -> None:
    model = stack()
    keys, values = list(model.state_dict()), [p.clone() for p in model.parameters()]
    offloaded = offload_frozen(model)
    assert offload_frozen(model).blocks == {}, "a second call finds nothing to do"
    seen: list[int] = []
    model.blocks[1].frozen.register_forward_hook(
        lambda *_: seen.extend(torch.equal(*pair) for pair in zip(model.parameters(), values, strict=True))
    )
    step(model).backward()
    assert seen == [True] * len(values)
    model.to("meta")
    assert {p.device.type for p in model.parameters() if not p.requires_grad} == {"cpu"}
    assert {p.device.type for p in model.parameters() if p.requires_grad} == {"meta"}
    model.to(torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert list(model.state_dict()) == keys
    offloaded.remove()
    model.to("meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}


def write_zeros(block: Any, _: object) -> None:
    block.frozen.weight.zero_()


def test_weights_that_are_written_between_passes_or_in_one_are_the_ones_computed_with() -> None:
    model, x = stack(), torch.ones(2, WIDTH)
    offload_frozen(model)
    with torch.no_grad():
        model(x)
        for block in model.blocks:
            block.frozen.weight.data.zero_()  # PyTorch counts no change here
        assert torch.equal(model(x), x)
        for block in model.blocks:
            block.frozen.weight.data = torch.full((WIDTH, WIDTH), 50.0)
        assert torch.equal(model(x), x + NUM_BLOCKS)
        model.load_state_dict(stack().state_dict())
        assert torch.equal(model(x), stack()(x))
        handle = model.blocks[0].register_forward_pre_hook(write_zeros)
        model(x)
        handle.remove()
    assert not model.blocks[0].frozen.weight.any(), "a forward pass has written to it"


def test_a_weight_that_changes_after_it_was_fetched_ahead_is_fetched_again() -> None:
    model, x = stack(), torch.ones(2, WIDTH)
    offload_frozen(model)
    model.blocks[0].register_forward_hook(lambda *_: write_zeros(model.blocks[1], None))
    with torch.no_grad():
        found = model(x)
        for block in (model.blocks[0], model.blocks[2], model.blocks[3]):
            x = block(x)
    assert torch.equal(found, x)


def lora_model() -> Any:
    torch.manual_seed(0)
    model = GPT_OF()
    adapt(model)
    return model


def test_adapters_that_a_forward_pass_separates_from_their_layer_stay_separate() -> None:
    """PEFT does this through `.data` when adapters are disabled in a merged layer."""
    results: list[list[Tensor]] = []
    for offloads in (False, True):
        model, tokens = lora_model().eval(), torch.arange(16).view(1, -1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.ones_(parameter)
        layers: list[Any] = [module for module in model.modules() if hasattr(type(module), "merged")]
        if offloads:
            offload_frozen(model)
        found: list[Tensor] = []
        with torch.no_grad():
            for layer in layers:
                layer.merge()
            found.append(model(tokens))
            for layer in layers:
                layer.enable_adapters(enabled=False)
            found += [model(tokens), model(tokens)]
        results.append(found)
    assert all(map(torch.equal, *results))
    assert not torch.equal(results[0][0], results[0][1])


@pytest.mark.parametrize("which", ["weight", "activation"])
def test_a_change_in_place_before_the_backward_pass_is_an_error(which: str) -> None:
    """As without: hooks on saved tensors switch off PyTorch's own check."""
    model = stack()
    offload_frozen(model)
    saved: list[Tensor] = []
    model.blocks[1].register_forward_hook(lambda _, args, out: saved.append(args[0]))
    model.blocks[1].forward = lambda x: x * model.blocks[1].scale + model.blocks[1].frozen(x)
    loss = step(model)
    with torch.no_grad():
        (model.blocks[1].frozen.weight if which == "weight" else saved[0]).add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_weight_that_is_trained_later_is_an_error() -> None:
    model = stack()
    offload_frozen(model)
    model.blocks[2].frozen.requires_grad_()
    with pytest.raises(RuntimeError, match=r"blocks\.2\.frozen\.weight is trained now"):
        step(model)


def test_what_two_modules_share_stays_on_the_device() -> None:
    model = stack()
    model.blocks[0].frozen.weight = model.blocks[1].frozen.weight
    model.head = nn.Linear(WIDTH, WIDTH, bias=False)
    model.head.weight = nn.Parameter(model.blocks[2].frozen.weight.data.t(), requires_grad=False)
    offloaded = offload_frozen(model)
    assert list(offloaded.blocks) == ["blocks.3"]
    assert offloaded.left == {"shared with another module": 3 * BLOCK_BYTES}
    assert offload_frozen(stack(), blocks="*.frozen").num_bytes == NUM_BLOCKS * BLOCK_BYTES


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_after_an_error_the_model_works_with_it_and_without(error: type[BaseException], where: str) -> None:
    def fail(*_: object) -> None:
        raise error

    plain, model = stack(), stack()
    offloaded = offload_frozen(model)
    handle = model.blocks[1].frozen.register_forward_hook(
        fail if where == "forward" else lambda _, __, out: out.register_hook(fail) and None
    )
    with pytest.raises(error):
        step(model).backward()
    handle.remove()
    if error is KeyboardInterrupt:  # ends a run; torch calls no hook then
        offloaded.remove()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None  # pyright: ignore[reportAttributeAccessIssue]
    else:
        step(model).backward()
        assert offload_of(model)._copies == {}, "the end of a backward pass drops them"
    for parameter in model.parameters():
        parameter.grad = None
    assert train(model) == train(plain)
    assert all(map(torch.equal, model.parameters(), plain.parameters()))


def test_a_copy_of_the_model_offloads_its_own_weights() -> None:
    model = stack()
    offload_frozen(model)
    step(model).backward()
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for block in model.blocks:
            block.frozen.weight.zero_()
    assert train(twin) == train(stack())
    assert next(iter(offload_of(twin).blocks)).name != ""
    assert offload_of(twin) is not offload_of(model)


def offload_of(model: Any) -> Any:
    return model.blocks[0].__dict__["_offloaded_by"]._fetcher


def test_a_graph_can_be_read_outside_of_a_backward_pass() -> None:
    model = stack()
    offload_frozen(model)
    loss = model.blocks[0](torch.ones(1, WIDTH, requires_grad=True)).sum()
    node = loss.grad_fn.next_functions[0][0].next_functions[1][0].next_functions[0][0].next_functions[0][0]
    assert torch.equal(node._saved_mat2, stack().blocks[0].frozen.weight.t())
