"""A recomputed block sees modules, containers and random numbers as they were when it was called."""

from __future__ import annotations

import gc
import random
import weakref
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutput

from lightning_eff.callbacks.gradient_checkpointing import RecomputedBlock
from lightning_eff.core.call_state import RecomputationError

WIDTH = 4
Net = nn.ModuleList
Step = Callable[[Net, Tensor], Tensor]


class Cell(nn.Module):
    """A linear layer, and a forward that a test chooses."""

    def __init__(self, compute: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.factor, self.count, self.kept = 1.0, 0, []
        self.compute = compute

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.compute(self, *args, **kwargs)


def run(
    compute: Callable[..., Any], step: Step, *, recomputed: bool, backwards: int = 1
) -> tuple[Net, list[Tensor]]:
    """Return blocks, and the gradients of two steps with `backwards` backward passes each."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(0)
    net = nn.ModuleList(Cell(compute) for _ in range(3)).double()
    for name, block in net.named_children() if recomputed else ():
        RecomputedBlock(block, name=f"block {name!r}")
    for _ in range(2):
        loss = step(net, torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True))
        for _ in range(backwards):
            loss.backward(retain_graph=backwards > 1)
    return net, [torch.zeros(0) if p.grad is None else p.grad for p in net.parameters()]


def assert_same(compute: Callable[..., Any], step: Step, backwards: int = 1) -> tuple[Net, Net]:
    """Check that gradients equal the plain run to the bit; return the blocks of both runs."""
    plain, expected = run(compute, step, recomputed=False, backwards=backwards)
    net, found = run(compute, step, recomputed=True, backwards=backwards)
    assert any(gradient.any() for gradient in expected)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return plain, net


class Pair(NamedTuple):
    first: Any
    second: Any


WRAPPED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "list in a dict in a tuple": (lambda seen: (1, {"seen": seen}), lambda given: given[1]["seen"]),
    "list in a named tuple": (lambda seen: Pair(seen, 1), lambda given: given.first),
    "list in an object": (lambda seen: SimpleNamespace(seen=seen), lambda given: given.seen),
    "list in a model output": (lambda s: BaseModelOutput(hidden_states=s), lambda given: given.hidden_states),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_an_input_list_is_read_as_it_was_at_the_call(wrapped: str) -> None:
    wrap, unwrap = WRAPPED[wrapped]

    def step(net: Net, x: Tensor) -> Tensor:
        seen = [x]
        for block in net:
            seen.append(block(wrap(seen)))
        return seen[-1].square().sum()

    assert_same(lambda cell, given: torch.tanh(cell.a(sum(unwrap(given)))), step, backwards=2)


def test_a_recomputation_has_the_default_dtype_of_the_forward() -> None:
    """Lightning's 64-true and 16-bit precisions set it around the forward pass alone."""

    def compute(cell: Cell, x: Tensor) -> Tensor:
        return cell.a(x * torch.rand(len(x), 1) + torch.arange(WIDTH) / 7.0)

    def step(net: Net, x: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        try:
            for block in net:
                x = block(x)
        finally:
            torch.set_default_dtype(torch.float32)
        return x.square().sum()

    assert_same(compute, step)


def popped(cell: Cell, x: Tensor, held: deque[Tensor]) -> Tensor:
    return torch.tanh(cell.a(x + held.pop()))


def taken_out_and_put_back(cell: Cell, x: Tensor, held: dict[str, Tensor]) -> Tensor:
    """Change the container twice; the recomputation ends between the changes."""
    value = held.pop("1")
    x = torch.tanh(cell.inner(x + value))
    total = sum(held.values())
    held["1"] = value
    return x + total


def written(cell: Cell, x: Tensor, held: dict[str, Tensor]) -> Tensor:
    held["0"] = torch.tanh(cell.a(x + held["0"]))
    return held["0"]


@pytest.mark.parametrize(
    ("compute", "kind"), [(popped, deque), (taken_out_and_put_back, dict), (written, dict)]
)
def test_containers_that_a_block_changes_are_reinstated(compute: Callable[..., Any], kind: type) -> None:
    sizes = []

    def step(net: Net, x: Tensor) -> Tensor:
        values = [x * j for j in range(7)]
        held = kind(values if kind is deque else zip("0123456", values, strict=True))
        y = x
        for block in net:
            y = block(y, held)
        loss = y.square().sum()
        loss.register_hook(lambda _: sizes.append(len(held)))
        return loss + 0 * len(held)

    assert_same(compute, step)
    assert sizes[:2] == sizes[2:]


def test_attributes_that_a_block_writes_to_a_model_output_are_reinstated() -> None:
    def compute(cell: Cell, out: BaseModelOutput) -> BaseModelOutput:
        hidden: Any = out.last_hidden_state
        out.last_hidden_state = torch.tanh(cell.a(hidden))
        return out

    def step(net: Net, x: Tensor) -> Tensor:
        out: Any = BaseModelOutput(last_hidden_state=x)  # pyright: ignore[reportArgumentType]
        for block in net:
            out = block(out)
        return out.last_hidden_state.square().sum()

    assert_same(compute, step)


def set_on_blocks(name: str, value: Callable[[Tensor], Any]) -> Step:
    """Return a step that sets an attribute of the blocks between two forward passes."""

    def step(net: Net, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for part in (x, x * 2):
            for block in net:
                setattr(block, name, value(part))
            y = part
            for block in net:
                y = block(y)
            total = total + y.square().sum()
        return total

    return step


def kept(net: Net, x: Tensor) -> Tensor:
    for block in net:
        block.kept.append(x.sum())
        x = block(x)
    net[0].kept.clear()
    return x.square().sum()


def swapped(net: Net, x: Tensor) -> Tensor:
    """One step of gradient descent, whose result is differentiated (MAML); needs second derivatives."""
    weights = dict(net.named_parameters())

    def loss(weights: dict[str, Tensor]) -> Tensor:
        return functional_call(Chain(net), {f"net.{k}": v for k, v in weights.items()}, (x,)).square().sum()

    used = {name: weight for name, weight in weights.items() if ".inner" not in name}
    inner = torch.autograd.grad(loss(weights), list(used.values()), create_graph=True)
    return loss({name: weight - 0.1 * g for (name, weight), g in zip(used.items(), inner, strict=True)})


class Chain(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        for block in self.net:
            x = block(x)
        return x


def around(change: Callable[[Cell], Any], undo: Callable[[Cell], Any]) -> Step:
    """Return a step that changes the blocks for one of two forward passes."""

    def step(net: Net, x: Tensor) -> Tensor:
        found = [change(block) for block in net]
        first = Chain(net)(x).square().sum()
        for block, each in zip(net, found, strict=True):
            each.remove() if hasattr(each, "remove") else undo(block)
        return first + Chain(net)(x * 2).square().sum()

    return step


def scaled(cell: Cell, x: Tensor) -> Tensor:
    y = cell.inner(x) if cell.inner.training else x
    return x + torch.tanh(cell.a(y) * cell.factor + sum(cell.kept)) * (0.5 if cell.training else 1.0)


MODULES: dict[str, Step] = {
    "condition with a gradient": set_on_blocks("factor", lambda x: x.mean()),
    "child": set_on_blocks("inner", lambda x: nn.Tanh() if x.sum() > 1 else nn.Sigmoid()),
    "list": kept,
    "parameters": swapped,
    "training": around(nn.Module.eval, nn.Module.train),
    "a child frozen": around(lambda c: c.inner.requires_grad_(False), lambda c: c.requires_grad_(True)),
    "hook": around(lambda cell: cell.inner.register_forward_hook(lambda *a: a[2] * 3), nn.Module.train),
}


@pytest.mark.parametrize("what", MODULES)
def test_module_state_that_changes_after_the_forward_is_reinstated(what: str) -> None:
    plain, net = assert_same(scaled, MODULES[what], backwards=2)
    assert [block.training for block in plain] == [block.training for block in net]
    hooks = [[len(block.inner._forward_hooks) for block in each] for each in (plain, net)]
    assert hooks[0] == hooks[1]
    assert [p.requires_grad for p in plain.parameters()] == [p.requires_grad for p in net.parameters()]


def changes_itself(cell: Cell, x: Tensor) -> Tensor:
    """Count the calls, keep tensors, and write to a tensor that is not a buffer."""
    cell.count += 1
    cell.kept.append(cell.count)
    cell.seen = getattr(cell, "seen", x.new_zeros(()))
    x = torch.tanh(cell.a(x) * cell.count * len(cell.kept) + cell.seen)
    cell.seen.add_(1)
    cell.unused = x.square()
    return x


def test_a_forward_changes_its_module_once() -> None:
    plain, net = assert_same(changes_itself, lambda net, x: Chain(net)(Chain(net)(x)).sum())
    for a, b in zip(plain, net, strict=True):
        assert (a.count, a.kept, a.seen) == (b.count, b.kept, b.seen) == (4, [1, 2, 3, 4], 4)


def test_tensors_of_earlier_steps_are_freed() -> None:
    net = nn.ModuleList([Cell(changes_itself)]).double()
    RecomputedBlock(net[0])
    kept = []
    for _ in range(4):
        net[0](torch.randn(2, WIDTH, dtype=torch.float64)).sum().backward()
        kept.append(weakref.ref(net[0].unused))
    gc.collect()
    assert [each() is not None for each in kept] == [False, False, False, True]


def test_a_recomputation_draws_the_same_random_numbers() -> None:
    """From the global generators of NumPy and Python, and from generators inside a module."""
    found, after = [], []
    for recomputed in (False, True):
        own, numpys = torch.Generator().manual_seed(5), np.random.default_rng(5)

        def draw(own: torch.Generator = own, numpys: np.random.Generator = numpys) -> float:
            return np.random.randn() + random.random() + torch.rand(1, generator=own).item() + numpys.random()

        def compute(cell: Cell, x: Tensor, draw: Callable[[], float] = draw) -> Tensor:
            return torch.tanh(cell.a(x) * (1 + draw()))

        def step(net: Net, x: Tensor, generators: Any = (own, numpys), draw: Any = draw) -> Tensor:
            for block in net:
                block.inner.own = {"generators": [*generators]}
            after.append(draw())
            return Chain(net)(x).sum()

        found.append(run(compute, step, recomputed=recomputed)[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert after[:2] == after[2:], "to the caller, the recomputation draws nothing"


def in_place(what: str) -> Step:
    def step(net: Net, x: Tensor) -> Tensor:
        held, condition = {"count": x.new_ones(1)}, x.sum()
        net[1].kept = [condition * 1]
        y = x
        for block in net:
            y = block(y, held)
        with torch.no_grad():
            changed = {"parameter": net[1].a.bias, "input": held["count"], "condition": net[1].kept[0]}[what]
            changed.add_(1)
        return y.sum()

    return step


@pytest.mark.parametrize(
    ("what", "text"), [("parameter", r"'1': 'a\.bias'"), ("input", "'2'"), ("condition", "'1'")]
)
def test_a_tensor_written_to_before_the_recomputation_is_rejected_by_name(what: str, text: str) -> None:
    def compute(cell: Cell, x: Tensor, held: dict[str, Tensor]) -> Tensor:
        return torch.tanh(cell.a(x) + sum(cell.kept)) / held["count"]

    with pytest.raises(RecomputationError, match=text):
        run(compute, in_place(what), recomputed=True)


def test_a_recomputation_that_differs_names_its_block() -> None:
    flags = SimpleNamespace(is_deep=True)

    def compute(cell: Cell, x: Tensor) -> Tensor:
        return F.gelu(cell.a(x)) if not flags.is_deep else cell.inner(cell.a(x).exp()).sin()

    def step(net: Net, x: Tensor) -> Tensor:
        flags.is_deep = True
        y = Chain(net)(x)
        flags.is_deep = False
        return y.sum()

    with pytest.raises(RecomputationError, match="block '2'"):
        run(compute, step, recomputed=True)


def test_rrelu_at_the_end_of_a_block_gets_the_same_gradient() -> None:
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.RReLU(0.1, 0.9))
        x = torch.randn(64, WIDTH, requires_grad=True)
        if recomputed:
            RecomputedBlock(made)
        made(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)
