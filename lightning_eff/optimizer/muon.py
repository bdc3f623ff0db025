"""Muon for hidden matrices and AdamW for everything else, as one optimizer.

Muon replaces a matrix's momentum by the nearest orthogonal matrix, so every direction is learned at the
same rate. That is right for matrices between hidden layers; embeddings, the output layer, norms, biases and
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
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.optimization.composite import Joined, is_matrix
from lightning_eff.core.technique import NEEDS_MATRICES, Facts, Outcome


class Muon(Joined):
    """torch's Muon and torch's AdamW behind one face.

    Args:
        params: Parameters or groups. A group with a key `hidden` goes to Muon where that is true and to
            AdamW where it is false, as `parameter_groups.parameter_groups` sets it; without the key,
            every matrix goes to Muon.
        lr: Learning rate of both.
        weight_decay: Share of `lr`, of both; a group may have its own.
        momentum: Muon's.
        nesterov: Muon's: look ahead along the momentum.
        betas: AdamW's decay of its two running averages.
        fused: AdamW's: one kernel for all tensors.
        rest: Patterns of parameter names (`classifier.*`) that are not hidden either; read where the names
            are known, by `configure_optimizers`.

    Raises:
        ConfigError: There is no hidden matrix.

    Example:
        >>> layer = torch.nn.Linear(4, 4)
        >>> [type(part).__name__ for part in Muon(layer.parameters(), lr=1e-3).parts]
        ['Muon', 'AdamW']
    """

    hidden_groups = True
    """Its parameters are to be grouped by whether they are hidden matrices."""

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
        hidden, others = split(params)
        self.rest = rest
        if not hidden:
            allowed = "a model with hidden matrices"
            raise ConfigError(key="", value="Muon", allowed=allowed, remedies=["optimizer=adamw"])
        shared: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
        muon = torch.optim.Muon(
            hidden,
            momentum=momentum,
            nesterov=nesterov,
            adjust_lr_fn="match_rms_adamw",
            **shared,
        )
        first, second = betas
        self._rest = functools.partial(torch.optim.AdamW, betas=(first, second), fused=fused, **shared)
        super().__init__([muon, self._rest(others)] if others else [muon])

    @override
    def place(self, group: dict[str, Any]) -> list[tuple[Optimizer, dict[str, Any]]]:
        hidden, others = split([group])
        if others and len(self.parts) == 1:
            adamw = self._rest([torch.zeros(0)])  # without parameters of its own until the group is added
            adamw.param_groups.clear()
            adamw.state = self.state
            self.parts.append(adamw)
        return [(self.parts[0], each) for each in hidden] + [(self.parts[-1], each) for each in others]

    @staticmethod
    def facts() -> Facts:
        """State what breaks its mathematics."""
        return Facts(excludes=NEEDS_MATRICES)

    def outcome(self) -> Outcome:
        """Say how the parameters were divided."""
        counts = [sum(len(group["params"]) for group in part.param_groups) for part in self.parts]
        did = f"Muon for {counts[0]} hidden matrices, AdamW for {sum(counts[1:])} other tensors"
        return Outcome(did=did, numbers={"hidden": counts[0], "rest": sum(counts[1:])})


def split(params: Iterable[Any]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return groups of hidden matrices and groups of the rest.

    Args:
        params: Parameters, named or not, or groups, as an optimizer takes them.
    """
    given = list(params)
    groups = given if given and isinstance(given[0], dict) else [{"params": given}]
    hidden: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    for group in groups:
        options = {key: value for key, value in group.items() if key not in ("params", "hidden")}
        told = group.get("hidden")
        listed: list[Any] = [group["params"]] if isinstance(group["params"], Tensor) else group["params"]
        parameters: list[Tensor] = [each[1] if isinstance(each, tuple) else each for each in listed]
        for target, chosen in ((hidden, True), (rest, False)):
            members = [p for p in parameters if (is_matrix(p) and told is not False) is chosen]
            if members:
                target.append({"params": members, **options})
    return hidden, rest
