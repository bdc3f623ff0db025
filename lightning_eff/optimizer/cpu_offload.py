"""Keep the optimizer's state in the host's memory and step there.

Each parameter has a copy on the host with an optimizer of its own. In a step values and gradients come over,
one after the other on a side stream, each is stepped on as it arrives, and the new values go back while
the next one is worked on. The device keeps parameters and gradients alone. Schedulers, clipping, accumulation
and checkpoints see one optimizer; its state stays on the host when a checkpoint is loaded, and a checkpoint
has the layout of the optimizer that does the work.

Costs: three copies of the parameters' size over the bus a step, and a step at the CPU's speed; pinned host
    memory for parameters, gradients and state.
Conflicts: a model on the CPU, warned: its state is there already. Sharding strategies, refused: they move
    state themselves.
Source: Ren et al. 2021, https://arxiv.org/abs/2101.06840
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.core.errors import NoEffectWarning
from lightning_eff.core.optimization.composite import OptimizerFactory, PerParameter, evaluate, owned
from lightning_eff.core.technique import PLACES_STATE, Facts, Outcome, Rule, Verdict
from lightning_eff.core.text import human_bytes
from lightning_eff.optimizer.in_backward import ADAMW

HOST = torch.device("cpu")


class HostState(dict[str, Any]):
    """One parameter's state; tensors that are put in are moved to the host."""

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.to(HOST) if isinstance(value, Tensor) else value)


class CpuOffload(PerParameter):
    """An optimizer whose state and step are on the CPU while the model is on another device.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        weight_decay: Share of `lr`; a group may have its own.
        optimizer: What steps each parameter: a class of torch.optim or one that keeps its state for each
            parameter, without `lr` and `weight_decay`; None is fused AdamW.
        pin_memory: Keep the host's copies in page-locked memory, which copies faster and asynchronously.

    Raises:
        ConfigError: Two places set the learning rate.

    Warns:
        NoEffectWarning: The parameters are on the CPU.

    Example:
        >>> import pytest
        >>> layer = torch.nn.Linear(2, 2)
        >>> optimizer = CpuOffload(layer.parameters(), lr=0.1)
        >>> layer(torch.ones(1, 2)).sum().backward()
        >>> with pytest.warns(NoEffectWarning, match="on the CPU already"):
        ...     optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        pin_memory: bool = True,
    ) -> None:
        self.pin_memory = pin_memory
        self._copies: dict[Tensor, Tensor] = {}
        self._warned = False
        super().__init__(params, owned(optimizer or ADAMW, lr=lr, weight_decay=weight_decay))

    @staticmethod
    def facts() -> Facts:
        """State where it does nothing, and what moves state itself."""
        idle = Rule(
            name="run/cpu",
            reason="the optimizer's state is on the CPU already",
            remedies=("optimizer=adamw",),
            verdict=Verdict.WARNED,
        )
        return Facts(excludes=(idle, *PLACES_STATE))

    @override
    def stand_in(self, parameter: Tensor) -> Tensor:
        if parameter not in self._copies:
            pinned = self.pin_memory and parameter.is_cuda
            self._copies[parameter] = torch.empty_like(parameter, device=HOST, pin_memory=pinned)
        return self._copies[parameter]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            part_state = self._parts[parameter].state
            copy = self.stand_in(parameter)
            part_state[copy] = HostState(part_state.get(copy, {}))

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = evaluate(closure)
        arriving = [(p, self._fetch(p)) for p in self.parameters() if p.grad is not None]
        for parameter, arrived in arriving:
            if arrived is not None:
                arrived.synchronize()
            self.step_one(parameter)
            parameter.copy_(self._copies[parameter], non_blocking=True)
        if arriving and not self._warned and all(p.device == HOST for p, _ in arriving):
            self._warned = True
            text = "CpuOffload does nothing here: the optimizer's state is on the CPU already"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return loss

    def _fetch(self, parameter: Tensor) -> torch.Event | None:
        """Begin to copy value and gradient to the host; return what tells that they are there.

        The value too: others may have written to the parameter, in ways that leave no trace.
        """
        copy, gradient = self._copies[parameter], parameter.grad
        if gradient is None or gradient.layout != torch.strided:
            copy.copy_(parameter.detach())
            copy.grad = None if gradient is None else gradient.to(HOST)
            return None
        if copy.grad is None or copy.grad.layout != torch.strided:
            copy.grad = torch.empty_like(copy, pin_memory=copy.is_pinned())
        if not parameter.is_cuda:
            copy.copy_(parameter.detach())
            copy.grad.copy_(gradient)
            return None
        side = self._stream(parameter.device)
        side.wait_stream(torch.cuda.current_stream(parameter.device))
        with torch.cuda.stream(side):
            copy.copy_(parameter.detach(), non_blocking=True)
            copy.grad.copy_(gradient, non_blocking=True)
            return side.record_event()

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        if not hasattr(self, "_side"):
            self._side = torch.cuda.Stream(device)
        return self._side

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
        return saved

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load with the host's copies in place of the parameters, so that no state touches the device."""
        on_device = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, on_device, strict=True):
            group["params"] = [self._copies[parameter] for parameter in parameters]
        try:
            torch.optim.Optimizer.load_state_dict(self, state_dict)
        finally:
            for group, parameters in zip(self.param_groups, on_device, strict=True):
                group["params"] = parameters
        loaded = self.state
        self.state = type(loaded)(dict)
        for parameter in self.parameters():
            if self._copies[parameter] in loaded:
                self.state[parameter] = HostState(loaded[self._copies[parameter]])
        self.share_state()

    def outcome(self) -> Outcome:
        """Say how many bytes the host holds for it."""
        held = sum(copy.nbytes for copy in self._copies.values())
        held += sum(v.nbytes for s in self.state.values() for v in s.values() if isinstance(v, Tensor))
        return Outcome(
            did=f"{human_bytes(held)} of copies and state on the host",
            effective=any(parameter.device != HOST for parameter in self._copies),
            numbers={"host_bytes": held},
        )
