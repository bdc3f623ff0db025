"""GaLore: AdamW's state for a matrix's gradient in a subspace of low rank.

Every so many steps the gradient's leading singular vectors span a new subspace; AdamW's averages live in
it, `rank` by the longer side, and the step is projected back. All weights are trained, unlike with LoRA.
The work is done by pytorch-optimizer's GaLore; what this adds is which parameters are projected (hidden
matrices; embeddings, the output layer, norms and biases are not), and checkpoints of tensors and plain
values, which load with `weights_only=True`.

Costs: a singular value decomposition of each matrix every `update_proj_gap` steps; approximate.
Conflicts: PEFT adapters (their matrices are low-rank already) and ZeRO (flattened matrices), refused.
Source: Zhao et al. 2024, https://arxiv.org/abs/2403.03507
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytorch_optimizer
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from typing_extensions import override

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.technique import NEEDS_MATRICES, PROJECTS_GRADIENTS, Facts, Outcome
from lightning_eff.optimizer.muon import split

PROJECTOR = "projector"
"""The library's name for the object that it keeps with a projected parameter's state."""


class GaLore(pytorch_optimizer.GaLore):
    """pytorch-optimizer's GaLore over the hidden matrices, and plainly over the rest.

    Args:
        params: Parameters or groups; a key `hidden` as for Muon.
        lr: Learning rate.
        weight_decay: Share of `lr`.
        betas: Decay of the two running averages.
        rank: Dimensions of the subspace; a matrix that is not wider is not projected.
        update_proj_gap: Optimizer steps between two subspaces.
        scale: Factor of the projected step.
        rest: Patterns of parameter names (`classifier.*`) that are not projected; read where the names are
            known, by `configure_optimizers`.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(64, 64)
        >>> optimizer = GaLore(layer.parameters(), lr=1e-3, rank=4)
        >>> layer(torch.ones(1, 64)).sum().backward()
        >>> _ = optimizer.step()
        >>> optimizer.state[layer.weight]["exp_avg"].shape
        torch.Size([64, 4])
    """

    hidden_groups = True

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        betas: Iterable[float] = (0.9, 0.95),
        rank: int = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        rest: Sequence[str] | None = None,
    ) -> None:
        if rank < 1:
            raise ConfigError(key="rank", value=rank, allowed="a whole number of at least 1")
        hidden, others = split(params)
        wide = [_wider_than(group, rank) for group in hidden]
        hidden, others = [w for w, _ in wide if w["params"]], [n for _, n in wide if n["params"]] + others
        self.rest = rest
        projection = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        groups = [group | projection | {"projection_type": "std"} for group in hidden] + others
        first, second = betas
        super().__init__(groups, lr=lr, weight_decay=weight_decay, betas=(first, second), eps=1e-8)
        self._num_hidden = sum(len(group["params"]) for group in hidden)

    @staticmethod
    def facts() -> Facts:
        """State what breaks its mathematics."""
        return Facts(excludes=(*NEEDS_MATRICES, PROJECTS_GRADIENTS))

    @override
    def __getstate__(self) -> dict[str, Any]:
        text = "GaLore cannot be copied or pickled: build another and load its state_dict()"
        raise TypeError(text)

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        saved["state"] = {index: _plain(state) for index, state in saved["state"].items()}
        return saved

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            if PROJECTOR in state:
                projector = GaLoreProjector()
                vars(projector).update(state[PROJECTOR])
                state[PROJECTOR] = projector

    def outcome(self) -> Outcome:
        """Say how many matrices are projected."""
        return Outcome(
            did=f"{self._num_hidden} hidden matrices wider than the rank projected",
            effective=self._num_hidden > 0,
            numbers={"hidden": self._num_hidden},
        )


def _wider_than(group: dict[str, Any], rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a group by whether a projection would make a matrix smaller."""
    wide = [p for p in group["params"] if min(p.shape) > rank]
    narrow = [p for p in group["params"] if min(p.shape) <= rank]
    return group | {"params": wide}, group | {"params": narrow}


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(vars(value)) if key == PROJECTOR else value for key, value in state.items()}
