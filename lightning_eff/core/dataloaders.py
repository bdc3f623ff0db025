"""The one place where a technique sees, or replaces, the loader that a run trains with.

Lightning prepares loaders when it makes them, and makes them when somebody asks for the number of steps: that
may be as early as in `configure_optimizers`. What a strategy makes of a loader goes on to the next technique
that was hooked in, and is the same whatever their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl

LoaderTransform = Callable[[Any], Any]
"""Is given a training loader as the strategy has prepared it, and returns it or another in its place."""


def add_loader_transform(trainer: pl.Trainer, look: LoaderTransform) -> Callable[[], None]:
    """Call `look` with each loader that this Trainer is going to train with.

    Returns:
        What takes the hook out again, whatever was hooked in or taken out in between.
    """
    strategy: Any = trainer.strategy
    looks: list[LoaderTransform] | None = strategy.__dict__.get("_looks")
    if looks is None:
        looks = strategy.__dict__["_looks"] = []
        process = strategy.process_dataloader

        def prepare(dataloader: object) -> object:
            prepared = process(dataloader)
            for each in looks if trainer.training else ():
                prepared = each(prepared)
            return prepared

        strategy.process_dataloader = prepare
    looks.append(look)

    def take_out() -> None:
        looks.remove(look)
        if not looks:
            strategy.__dict__.pop("process_dataloader", None)
            strategy.__dict__.pop("_looks", None)

    return take_out


def restore_loader_state(trainer: pl.Trainer) -> None:
    """Bring stateful loaders to where a checkpoint left them, when a run begins.

    Lightning does so when it makes the loaders. It makes them earlier, before the checkpoint's state is
    known, when the optimizer's schedule asks for the number of steps (`estimated_stepping_batches`), and
    forgets them then: the run would begin its epoch anew.
    """
    fit_loop: Any = trainer.fit_loop
    if fit_loop._combined_loader_states_to_load:  # noqa: SLF001
        fit_loop._load_combined_loader_states()  # noqa: SLF001
        fit_loop._data_fetcher.setup(fit_loop._combined_loader)  # noqa: SLF001
        iter(fit_loop._data_fetcher)  # noqa: SLF001 - makes the iterator
