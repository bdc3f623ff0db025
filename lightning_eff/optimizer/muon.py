"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so every direction is learned at the same
rate. This update suits matrices between hidden layers. Embeddings, the output layer, norms, biases and
convolutions go to AdamW, as Muon's authors recommend. Muon's update is scaled to the size of AdamW's update,
so both use the same learning rate, decay and schedule.

Saves: optimizer steps to reach the same loss, according to Muon's authors; half of AdamW's state for hidden
    matrices.
Costs: five small matrix products per hidden matrix and step. In float32, state takes 4 bytes per parameter
    in hidden matrices, and 8 bytes for each other parameter.
When not: models without hidden matrices, which are rejected; finetuning of weights that AdamW trained.
Conflicts: ZeRO is rejected, because it flattens matrices into vectors.
Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; scaling as in Liu et al. 2025,
    https://arxiv.org/abs/2502.16982
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.arguments import check_arguments
from lightning_eff.core.errors import TO_ADAMW, ConfigError, LittleReachedWarning
from lightning_eff.core.optimization.composite import WrapperOptimizer
from lightning_eff.core.technique import NEEDS_MATRICES, Facts, Outcome


class Muon(WrapperOptimizer):
    """torch's Muon and torch's AdamW as one optimizer.

    Args:
        params: Parameters or parameter groups. `build.parameter_groups` sets a group's key `hidden`, which
            sends the group to Muon if true and to AdamW if false. Without the key, every matrix goes to Muon.
        lr: Learning rate of Muon and of AdamW.
        weight_decay: Weight decay per step of Muon and AdamW, as a fraction of `lr`; a group may have another
            value.
        momentum: Momentum of Muon.
        nesterov: Use Nesterov momentum in Muon.
        betas: Decay rates of AdamW's two running averages.
        fused: Use AdamW's fused kernel, which updates all tensors at once.
        rest: Name patterns (`classifier.*`) of additional parameters that AdamW steps; `configure_optimizers`
            applies the patterns, because names are available only there.

    Raises:
        ConfigError: The model has no hidden matrix.

    Warns:
        LittleReachedWarning: Tensors of three or more axes, such as convolutions, have more trained weights
            than hidden matrices.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [type(inner).__name__ for inner in Muon(layer.parameters(), lr=1e-3).optimizers]
        ['Muon', 'AdamW']
    """

    hidden_groups = True
    """`build` marks its groups with the key `hidden`."""

    @check_arguments
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        betas: Iterable[float] = (0.9, 0.95),
        fused: bool | None = True,
        rest: Sequence[str] | None = None,
    ) -> None:
        hidden, others = split_hidden(params)
        self.rest = rest
        if not hidden:
            allowed = "a model with hidden matrices"
            raise ConfigError(key="", value="Muon", allowed=allowed, remedies=[TO_ADAMW])
        _warn_if_little(hidden, others)
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        # match_rms_adamw: the update is scaled by 0.2 * sqrt(max(rows, columns)), to AdamW's usual size.
        shape: Any = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(hidden, **shape, **shared)
        first, second = betas
        # Kept, since AdamW is built later if `add_param_group` adds the first parameters for AdamW.
        self._adamw = functools.partial(torch.optim.AdamW, betas=(first, second), fused=fused, **shared)
        optimizers: list[Optimizer] = [muon, self._adamw(others)] if others else [muon]
        super().__init__([group for inner in optimizers for group in inner.param_groups], {})
        self.optimizers = optimizers  # from now on, `add_param_group` passes groups to these optimizers
        for inner in self.optimizers:
            self.state.update(inner.state)
            inner.state = self.state  # one dict for all optimizers, so that each gets a loaded state

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if "optimizers" not in vars(self):  # called by Optimizer.__init__, with the inner optimizers' groups
            super().add_param_group(param_group)
            return
        hidden, others = split_hidden([param_group])
        present = {parameter for group in self.param_groups for parameter in group["params"]}
        if any(parameter in present for group in (*hidden, *others) for parameter in group["params"]):
            raise ValueError("some parameters appear in more than one parameter group")
        if others and len(self.optimizers) == 1:
            adamw = self._adamw([torch.zeros(0)])  # an optimizer cannot be built without a parameter
            adamw.param_groups.clear()
            adamw.state = self.state
            self.optimizers.append(adamw)
        for inner, groups in ((self.optimizers[0], hidden), (self.optimizers[-1], others)):
            for group in groups:
                inner.add_param_group(group)
                # The same dict, so that a schedule changes the learning rate of both.
                self.param_groups.append(inner.param_groups[-1])

    @override
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = closure() if closure is not None else None
        for inner in self.optimizers:
            inner.step()
        return loss

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Optimizer.load_state_dict replaces the groups and the state; inner optimizers must use the same
        # objects.
        index_of = {id(group): index for index, group in enumerate(self.param_groups)}
        indices_of = [[index_of[id(group)] for group in inner.param_groups] for inner in self.optimizers]
        super().load_state_dict(state_dict)
        for inner, indices in zip(self.optimizers, indices_of, strict=True):
            inner.param_groups = [self.param_groups[index] for index in indices]
            inner.state = self.state

    @staticmethod
    def facts() -> Facts:
        """Return the conflicts: strategies that flatten matrices."""
        return Facts(excludes=NEEDS_MATRICES)

    def outcome(self) -> Outcome:
        """Report how many parameters Muon and AdamW step."""
        counts = [sum(len(group["params"]) for group in inner.param_groups) for inner in self.optimizers]
        did = f"Muon for {counts[0]} hidden matrices, AdamW for {sum(counts[1:])} other tensors"
        return Outcome(did=did, numbers={"hidden": counts[0], "rest": sum(counts[1:])})


def _warn_if_little(hidden: Sequence[dict[str, Any]], others: Sequence[dict[str, Any]]) -> None:
    """Warn if AdamW steps most weights of layers, as in a CNN, because convolutions are not matrices.

    Embeddings and output layers, which are matrices too, do not count: AdamW steps these layers on purpose.
    """
    taken = sum(p.numel() for group in hidden for p in group["params"])
    left = sum(p.numel() for group in others for p in group["params"] if p.dim() > 2 and p.requires_grad)
    if left > taken:
        text = (
            f"Muon steps only {taken / (taken + left):.1%} of the weights of layers: AdamW steps tensors of "
            "three or more axes, such as convolutions"
        )
        warnings.warn(LittleReachedWarning(f"{text}\n  try: {TO_ADAMW}"), stacklevel=3)


def split_hidden(params: Iterable[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Split parameters, named parameters or parameter groups into hidden matrices and the rest.

    A group's key `hidden` decides; without this key, every matrix is hidden.
    """
    entries = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    hidden: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "hidden")}
        listed: list[Any] = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        parameters: list[Tensor] = [item[1] if isinstance(item, tuple) else item for item in listed]
        # Without the key that `build` sets, the number of axes decides.
        may_be_hidden = group.get("hidden") is not False
        matrices = [p for p in parameters if may_be_hidden and p.dim() == 2 and not p.is_complex()]
        present = set(matrices)
        others = [p for p in parameters if p not in present]
        if matrices:
            hidden.append({"params": matrices, **options})
        if others:
            rest.append({"params": others, **options})
    return hidden, rest
