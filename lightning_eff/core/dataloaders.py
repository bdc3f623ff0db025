"""Observe or replace a run's training loader; every technique that does so uses this module.

Lightning creates and prepares the loaders as soon as it needs the number of steps, possibly in
`configure_optimizers`. After the strategy has prepared a loader, all transforms are applied. They are ordered
by position, and then by time of addition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override


class LoaderWrapper:
    """Wraps a loader; attributes that are not in `OWN` are read from and set on the wrapped loader."""

    OWN: tuple[str, ...] = ("loader",)

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __len__(self) -> int:
        return len(self.loader)

    def __bool__(self) -> bool:
        return True  # so that `bool(loader)` does not call `len(loader)`

    def __getattr__(self, name: str) -> Any:
        if "loader" not in self.__dict__:  # while this object is being copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.OWN:
            super().__setattr__(name, value)
        else:
            setattr(self.loader, name, value)


def is_stateful(loader: Any) -> bool:
    """Return whether a loader saves and restores its position itself."""
    return hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")


LoaderTransform = Callable[[Any], Any]
"""A function that receives the training loader, and returns this loader or a replacement."""


def add_loader_transform(
    trainer: pl.Trainer, transform: LoaderTransform, *, position: int = 0
) -> Callable[[], None]:
    """Apply `transform` to each training loader of a Trainer.

    Args:
        trainer: The Trainer whose strategy prepares loaders.
        transform: Function that receives the loader, and returns this loader or a replacement.
        position: Position among all transforms: -1 is applied first, 1 is applied last. Transforms with equal
            positions are applied in the order of addition.

    Returns:
        A function that removes the transform; transforms may be removed in any order.
    """
    strategy: Any = trainer.strategy
    transforms: list[tuple[int, LoaderTransform]] | None = strategy.__dict__.get("_loader_transforms")
    if transforms is None:
        transforms = strategy.__dict__["_loader_transforms"] = []
        process = strategy.process_dataloader

        def prepare(dataloader: object) -> object:
            prepared = process(dataloader)
            # Validation and test loaders pass through the same method, and stay unchanged.
            for _, transform in transforms if trainer.training else ():
                prepared = transform(prepared)
            return prepared

        # Set on the instance, which hides the class's method until `remove` deletes the attribute.
        strategy.process_dataloader = prepare
    # `sort` is stable, so equal positions stay in the order of addition.
    entry = position, transform
    transforms.append(entry)
    transforms.sort(key=lambda pair: pair[0])

    def remove() -> None:
        transforms.remove(entry)
        if not transforms:
            strategy.__dict__.pop("process_dataloader", None)
            strategy.__dict__.pop("_loader_transforms", None)

    return remove


def restore_loader_state(trainer: pl.Trainer) -> None:
    """When a run starts, restore stateful loaders to the positions that a checkpoint contains.

    Lightning 2.6 restores loaders when it creates them. But if a learning-rate schedule needs the number of
    steps (`estimated_stepping_batches`), Lightning creates the loaders before it reads the checkpoint.
    Lightning never restores such loaders, so the run would repeat its epoch from the start.
    """
    fit_loop: Any = trainer.fit_loop
    if fit_loop._combined_loader_states_to_load:  # noqa: SLF001
        fit_loop._load_combined_loader_states()  # noqa: SLF001
        fit_loop._data_fetcher.setup(fit_loop._combined_loader)  # noqa: SLF001
        iter(fit_loop._data_fetcher)  # noqa: SLF001 - creates the iterator
