"""Keep the optimizer's state in host memory, and step on the CPU.

Each parameter has a copy on the host, and each copy has its own optimizer. In a step, values and gradients
are copied to the host one after the other on a side stream. Each parameter is stepped as soon as its copies
arrive, and its new value is copied back during the next parameter's step. The device holds only parameters
and gradients. Schedulers, clipping, accumulation and checkpoints see one optimizer. The state stays on the
host when a checkpoint is loaded, and a checkpoint has the layout of the inner optimizer.

Saves: the optimizer's state on the device, 8 bytes per parameter with AdamW.
Costs: per step, three transfers of the parameters' size over the bus, and a step at the CPU's speed; pinned
    host memory for parameters, gradients and state.
When not: the state fits in device memory. With a slow CPU and a small batch, training waits for the CPU's
    step.
Conflicts: a model on the CPU gets a warning, because its optimizer state is on the host already. Sharding
    strategies are rejected, because they move state themselves.
Source: Ren et al. 2021, https://arxiv.org/abs/2101.06840
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import TO_ADAMW, NoEffectWarning
from lightning_eff.core.optimization.composite import OptimizerFactory, PerParameter
from lightning_eff.core.technique import PLACES_STATE, Facts, Outcome, Rule, Try, Verdict
from lightning_eff.core.text import human_bytes

HOST = torch.device("cpu")


class HostState(dict[str, Any]):
    """The state of one parameter; tensors are moved to the host when they are stored."""

    @override
    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value.to(HOST) if isinstance(value, Tensor) else value)


class CpuOffload(PerParameter):
    """An optimizer with state and step on the CPU, for a model on another device.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate.
        weight_decay: Weight decay per step, as a fraction of `lr`; a group may have another value.
        optimizer: Optimizer class that steps each parameter: a class from torch.optim, or any other class
            that keeps its state per parameter. It gets `lr` and `weight_decay` from the arguments above. None
            for fused AdamW.
        pin_memory: Keep the host's copies in page-locked memory, so that copying is faster and asynchronous.

    Raises:
        ConfigError: The learning rate is also set for the inner optimizer.

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

    lowers = ("optimizer state",)
    try_as = (Try(needs=("run/cuda",), changes="chooses AdamW with its defaults"),)

    @check_arguments
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 3e-3,
        weight_decay: float = 0.1,
        optimizer: OptimizerFactory | None = None,
        pin_memory: bool = True,
    ) -> None:
        self.pin_memory = pin_memory
        self._side_stream: torch.cuda.Stream | None = None
        self._has_warned = False
        # Not a bound method, whose reference cycle would keep this optimizer and the host's memory alive.
        super().__init__(
            params,
            optimizer,
            copy=lambda p: torch.empty_like(p, device=HOST, pin_memory=pin_memory and p.is_cuda),
            lr=lr,
            weight_decay=weight_decay,
        )

    @staticmethod
    def facts() -> Facts:
        """Return the conflicts: a model on the CPU, and strategies that move state themselves."""
        reason, remedies = "the optimizer's state is on the CPU already", (TO_ADAMW,)
        no_effect = Rule(name="run/cpu", reason=reason, remedies=remedies, verdict=Verdict.WARNED)
        return Facts(excludes=(no_effect, *PLACES_STATE))

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for parameter in self.param_groups[-1]["params"]:
            inner_state, copy = self._inner[parameter].state, self.copies[parameter]
            # A dict that moves every tensor to the host, whatever state the inner optimizer creates.
            inner_state[copy] = HostState(inner_state.get(copy, {}))

    @override
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        # All copies to the host are queued at once and arrive in this order, while earlier parameters step.
        fetched = [(p, self._fetch(p)) for p in self.copies if p.grad is not None]
        for parameter, arrived in fetched:
            if arrived is not None:
                arrived.synchronize()
            self.step_parameter(parameter)
            # This copy overlaps with the next parameter's step; the next fetch waits for this copy.
            parameter.copy_(self.copies[parameter], non_blocking=True)
        if fetched and not self._has_warned and all(p.device == HOST for p, _ in fetched):
            self._has_warned = True
            text = "CpuOffload does nothing here: the optimizer's state is on the CPU already"
            warnings.warn(text, NoEffectWarning, stacklevel=2)
        return loss

    def _fetch(self, parameter: Tensor) -> torch.Event | None:
        """Start copying value and gradient to the host; return the event of their arrival, or None.

        None means that value and gradient have arrived already. The value is copied in every step, because
        other code may change the parameter through `.data`, which leaves no trace.
        """
        copy, gradient = self.copies[parameter], parameter.grad
        # A sparse gradient has a different number of rows in each step, so its memory is not reused.
        if gradient is None or gradient.layout != torch.strided:
            copy.copy_(parameter.detach())
            copy.grad = None if gradient is None else gradient.to(HOST)
            return None
        # The host's gradient is kept between steps, because allocating pinned memory is slow.
        if copy.grad is None or copy.grad.layout != torch.strided:
            copy.grad = torch.empty_like(copy, pin_memory=copy.is_pinned())
        if not parameter.is_cuda:
            copy.copy_(parameter.detach())
            copy.grad.copy_(gradient)
            return None
        side = self._side_stream = self._side_stream or torch.cuda.Stream(parameter.device)
        side.wait_stream(torch.cuda.current_stream(parameter.device))  # the backward pass writes the gradient
        with torch.cuda.stream(side):
            copy.copy_(parameter.detach(), non_blocking=True)
            copy.grad.copy_(gradient, non_blocking=True)
            return side.record_event()

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        # A checkpoint holds plain dicts, since `weights_only=True` rejects other classes.
        saved["state"] = {index: dict(state) for index, state in saved["state"].items()}
        return saved

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load into the host's copies instead of the parameters, so that no state touches the device."""
        # torch's method moves loaded state to the device of the parameters in the groups.
        on_device = [group["params"] for group in self.param_groups]
        for group, parameters in zip(self.param_groups, on_device, strict=True):
            group["params"] = [self.copies[parameter] for parameter in parameters]
        try:
            torch.optim.Optimizer.load_state_dict(self, state_dict)
        finally:
            for group, parameters in zip(self.param_groups, on_device, strict=True):
                group["params"] = parameters
        loaded = self.state
        self.state = type(loaded)(dict)
        for parameter, copy in self.copies.items():
            if copy in loaded:
                self.state[parameter] = HostState(loaded[copy])
        # The inner optimizers must step with the loaded state.
        self.share_state()

    def outcome(self) -> Outcome:
        """Report the bytes of copies and state on the host."""
        num_bytes = sum(copy.nbytes for copy in self.copies.values())
        num_bytes += sum(v.nbytes for s in self.state.values() for v in s.values() if isinstance(v, Tensor))
        did = f"{human_bytes(num_bytes)} of copies and state on the host"
        is_effective = any(parameter.device != HOST for parameter in self.copies)
        return Outcome(did=did, effective=is_effective, numbers={"host_bytes": num_bytes})
