"""Write the predictions of a checkpoint (`last`, `best` or a path) on a recipe's data to the run's folder."""

from lightning_eff.commands._evaluation import main

__all__ = ["main"]
