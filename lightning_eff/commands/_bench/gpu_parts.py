"""The parts of `bench --suite gpu`, the one that the most claims rest on first; the longest last."""

from __future__ import annotations

from lightning_eff.commands._bench import gpu_models, gpu_products, gpu_recipes

_PLANNER, _COMPARE = gpu_recipes.PARTS
PARTS = (_PLANNER, *gpu_products.PARTS, *gpu_models.PARTS, _COMPARE)
