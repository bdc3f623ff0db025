"""Compute the validation metrics of a checkpoint (`last`, `best` or a path) on a recipe's data."""

from lightning_eff.commands._evaluation import main

__all__ = ["main"]
