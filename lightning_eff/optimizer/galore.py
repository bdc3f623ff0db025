"""GaLore: AdamW's state for a matrix's gradient in a subspace of low rank.

Every `update_proj_gap` steps the gradient's leading singular vectors span a new subspace. AdamW's averages
have shape `rank` by the matrix's longer side, and the step is projected back. All weights are trained, unlike
with LoRA. pytorch-optimizer's GaLore does the work; this class adds the choice of what is projected (hidden
matrices; not embeddings, the output layer, norms and biases) and checkpoints of tensors and plain values,
which load with `weights_only=True`.

Costs: a singular value decomposition of each matrix every `update_proj_gap` steps; approximate.
Conflicts: PEFT adapters (their matrices are low-rank already) and ZeRO (flattened matrices), refused.
Source: Zhao et al. 2024, https://arxiv.org/abs/2403.03507
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytorch_optimizer
from pytorch_optimizer.optimizer.utils.galore import GaLoreProjector
from torch import Tensor
from typing_extensions import override

from lightning_eff.core.arguments import Count, check_arguments
from lightning_eff.core.optimization.composite import WrapperOptimizer
from lightning_eff.core.optimization.parameter_groups import split_hidden
from lightning_eff.core.technique import NEEDS_MATRICES, PROJECTS_GRADIENTS, Facts, Outcome

PROJECTOR = "projector"
"""Under which pytorch-optimizer keeps the projection object in a parameter's state."""


class GaLore(pytorch_optimizer.GaLore):
    """pytorch-optimizer's GaLore for the hidden matrices, and AdamW for the rest.

    Args:
        params: Parameters or groups; a key `hidden` as for Muon.
        lr: Learning rate.
        weight_decay: Fraction of `lr`.
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
    __getstate__ = WrapperOptimizer.__getstate__

    @check_arguments
    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float | Tensor = 3e-3,
        weight_decay: float = 0.1,
        betas: Iterable[float] = (0.9, 0.95),
        rank: Count = 128,
        update_proj_gap: int = 200,
        scale: float = 0.25,
        rest: Sequence[str] | None = None,
    ) -> None:
        hidden, others = split_hidden(params)
        projection: dict[str, Any] = {"rank": rank, "update_proj_gap": update_proj_gap, "scale": scale}
        projection["projection_type"] = "std"
        projected: list[dict[str, Any]] = []
        unprojected: list[dict[str, Any]] = []
        for group in hidden:
            # A matrix whose shorter side is at most `rank` would not get smaller: it joins the rest.
            wide = [p for p in group["params"] if min(p.shape) > rank]
            narrow = [p for p in group["params"] if min(p.shape) <= rank]
            if wide:
                projected.append(group | projection | {"params": wide})
            if narrow:
                unprojected.append(group | {"params": narrow})
        self.rest = rest
        first, second = betas
        groups = [*projected, *unprojected, *others]
        super().__init__(groups, lr=lr, weight_decay=weight_decay, betas=(first, second), eps=1e-8)
        self._num_projected = sum(len(group["params"]) for group in projected)

    @staticmethod
    def facts() -> Facts:
        """Return what its mathematics cannot be combined with."""
        return Facts(excludes=(*NEEDS_MATRICES, PROJECTS_GRADIENTS))

    @override
    def state_dict(self) -> dict[str, Any]:
        saved = super().state_dict()
        for index, state in saved["state"].items():
            if PROJECTOR in state:
                saved["state"][index] = state | {PROJECTOR: dict(vars(state[PROJECTOR]))}
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
        """Return how many matrices are projected."""
        count = self._num_projected
        did = f"{count} hidden matrices wider than the rank projected"
        return Outcome(did=did, effective=count > 0, numbers={"hidden": count})
