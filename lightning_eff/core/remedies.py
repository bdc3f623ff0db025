"""Remedies of errors and rules, each in two forms: an override of a recipe, and Python for a plain Trainer.

A text that names a remedy gets the form for its reader when it is written: the override inside of
`keep_overrides`, which the command line and the function that builds a recipe's run enter, else the Python.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

_in_recipe: ContextVar[bool] = ContextVar("_in_recipe", default=False)
_in_fabric: ContextVar[bool] = ContextVar("_in_fabric", default=False)
_FABRIC_NAMES = {"Trainer(": "Fabric(", "FSDP2(": "FSDP2Fabric(", "DeepSpeedZero(": "ZeroFabric("}
"""What a loop of Lightning Fabric uses in place of what a remedy's Python names."""


@dataclass(frozen=True)
class Remedy:
    """A change that removes an error, in the form for its reader when it becomes text.

    Args:
        override: One or more overrides to paste into a command.
        python: The same change in a script.

    Example:
        >>> remedy = Remedy("callbacks.micro_batch.micro_batch_size=4", "MicroBatch(micro_batch_size=4)")
        >>> str(remedy)
        'MicroBatch(micro_batch_size=4)'
        >>> with keep_overrides():
        ...     str(remedy)
        'callbacks.micro_batch.micro_batch_size=4'
    """

    override: str
    python: str

    def __str__(self) -> str:
        """Return the override in a recipe's run, else the Python."""
        if _in_recipe.get():
            return self.override
        python = self.python
        for name, fabrics in _FABRIC_NAMES.items() if _in_fabric.get() else ():
            python = python.replace(name, fabrics)
        return python


TO_ADAMW = Remedy("optimizer=adamw", "OptimizerChoice(optimizer=partial(torch.optim.AdamW, lr=...))")
TO_AUTO_PRECISION = Remedy("precision=auto", "AutoPrecision()")
TO_BF16_MIXED = Remedy("precision=bf16_mixed", 'AutoPrecision(precision="bf16-mixed")')
TO_FP32 = Remedy("precision=fp32", 'AutoPrecision(precision="32-true")')
TO_ONE_BATCH_A_STEP = Remedy("trainer.accumulate_grad_batches=1", "Trainer(accumulate_grad_batches=1)")
TO_TWO_DEVICES = Remedy("trainer.devices=2", "Trainer(devices=2)")
TO_AUTO_STRATEGY = Remedy("strategy=auto", 'Trainer(strategy="auto")')
TO_DDP = Remedy("strategy=ddp", 'Trainer(strategy="ddp")')
TO_FSDP2 = Remedy("strategy=fsdp2", "FSDP2()")
TO_ZERO = Remedy("strategy=deepspeed_zero", "DeepSpeedZero()")
TO_FULL_CHECKPOINTS = Remedy("strategy.checkpoints=full", 'FSDP2(checkpoints="full")')


@contextmanager
def keep_overrides() -> Generator[None]:
    """Show remedies as overrides, in texts that are created inside of this context."""
    token = _in_recipe.set(True)
    try:
        yield
    finally:
        _in_recipe.reset(token)


@contextmanager
def for_fabric() -> Generator[None]:
    """Show remedies with Lightning Fabric's names, in texts that are created inside of this context."""
    token = _in_fabric.set(True)
    try:
        yield
    finally:
        _in_fabric.reset(token)


WORDS = ("null", "true", "false", "nan", "inf", "yes", "no", "on", "off")
"""Words that Hydra reads as other values than strings."""


def list_remedy(option: str, class_name: str, parameter: str, names: Sequence[str]) -> Remedy:
    """Return the remedy that sets a parameter to a list of names.

    In the override a name has quotes where Hydra would read anything but this word, and then the override,
    too.

    Example:
        >>> remedy = list_remedy("callbacks.micro_batch", "MicroBatch", "keep", ["weights", "1.0"])
        >>> print(remedy.override, remedy.python)
        'callbacks.micro_batch.keep=[weights,"1.0"]' MicroBatch(keep=['weights', '1.0'])
    """
    plain = [
        re.fullmatch(r"[A-Za-z_][\w.-]*|\d+", name, re.ASCII) and name.lower() not in WORDS for name in names
    ]
    quoted = [name if is_plain else json.dumps(name) for name, is_plain in zip(names, plain, strict=True)]
    override = f"{option}.{parameter}=[{','.join(quoted)}]"
    override = override if all(plain) else shlex.quote(override)
    return Remedy(override, f"{class_name}({parameter}={list(names)})")
