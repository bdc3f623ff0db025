"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so every direction is learned at the same
rate. That is right for matrices between hidden layers; embeddings, the output layer, norms, biases and
convolutions go to AdamW, as its authors advise. Muon's update is scaled to the size of AdamW's, so one
learning rate and one decay serve both, and a schedule moves both.

Costs: five small matrix products a matrix and step; 4 bytes of state per parameter of a hidden matrix in
    float32, 8 for the rest.
Conflicts: ZeRO, refused: it flattens matrices into vectors.
Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon; scaling as in Liu et al. 2025,
    https://arxiv.org/abs/2502.16982
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.composite import CompositeOptimizer
from lightning_eff.core.optimization.parameter_groups import split_hidden
from lightning_eff.core.technique import NEEDS_MATRICES, Facts, Outcome


class Muon(CompositeOptimizer):
    """torch's Muon and torch's AdamW as one optimizer.

    Args:
        params: Parameters or groups. A group with a key `hidden` goes to Muon where that is true and to
            AdamW where it is false, as `parameter_groups.parameter_groups` sets it; without the key,
            every matrix goes to Muon.
        lr: Learning rate of both.
        weight_decay: Fraction of `lr`, of both; a group may have its own.
        momentum: Muon's.
        nesterov: Muon's: look ahead along the momentum.
        betas: AdamW's decay of its two running averages.
        fused: AdamW's: one kernel for all tensors.
        rest: Patterns of parameter names (`classifier.*`) that are not hidden either; read where the names
            are known, by `configure_optimizers`.

    Raises:
        ConfigError: The model has no hidden matrix.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [type(inner).__name__ for inner in Muon(layer.parameters(), lr=1e-3).optimizers]
        ['Muon', 'AdamW']
    """

    hidden_groups = True
    """`build` marks its groups with the key `hidden`."""

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 3e-3,
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
            raise ConfigError(key="", value="Muon", allowed=allowed, remedies=["optimizer=adamw"])
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        # match_rms_adamw: the update is scaled by 0.2 * sqrt(max(rows, columns)), the usual size of AdamW's.
        shape: Any = {"momentum": momentum, "nesterov": nesterov, "adjust_lr_fn": "match_rms_adamw"}
        muon = torch.optim.Muon(hidden, **shape, **shared)
        first, second = betas
        self._adamw = functools.partial(torch.optim.AdamW, betas=(first, second), fused=fused, **shared)
        super().__init__([muon, self._adamw(others)] if others else [muon])

    @override
    def assign_group(self, group: dict[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        hidden, others = split_hidden([group])
        if others and len(self.optimizers) == 1:
            adamw = self._adamw([torch.zeros(0)])  # an optimizer cannot be made without a parameter
            adamw.param_groups.clear()
            adamw.state = self.state
            self.optimizers.append(adamw)
        muon, adamw = self.optimizers[0], self.optimizers[-1]
        return [(muon, members) for members in hidden] + [(adamw, members) for members in others]

    @staticmethod
    def facts() -> Facts:
        """Return what its mathematics cannot be combined with."""
        return Facts(excludes=NEEDS_MATRICES)

    def outcome(self) -> Outcome:
        """Return how many parameters Muon and AdamW step."""
        counts = [sum(len(group["params"]) for group in inner.param_groups) for inner in self.optimizers]
        did = f"Muon for {counts[0]} hidden matrices, AdamW for {sum(counts[1:])} other tensors"
        return Outcome(did=did, numbers={"hidden": counts[0], "rest": sum(counts[1:])})
