"""Exit codes for everything that can end the process."""

from __future__ import annotations

import pickle

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_eff.core import errors
from lightning_eff.core.errors import ConfigError, exit_code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("the notes say: out of memory"), 1),
        (ConfigError("lr", -1, allowed="a positive number"), 2),
        (errors.EnvironmentLacksError("pip install triton"), 3),
        (torch.OutOfMemoryError("no room"), 4),
        (MemoryError(), 4),
        (RuntimeError("MPS backend out of memory (allocated 9 GB)"), 4),
        (errors.ConflictError("choose one"), 5),
        (KeyboardInterrupt(), 130),
        (type("Derived", (SIGTERMException,), {})(), 143),
        (SystemExit(), 0),
        (SystemExit("a message"), 1),
    ],
    ids=repr,
)
def test_every_end_has_its_code(error: BaseException, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_of_the_cpus_allocator_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert type(caught.value) is RuntimeError, "torch has no class for it"
    assert exit_code(caught.value) == 4


def test_out_of_memory_is_known_behind_what_it_caused_also_in_a_circle() -> None:
    one, other = RuntimeError("one"), RuntimeError("other")
    one.__cause__, other.__cause__ = other, one
    assert not errors.is_out_of_memory(one)
    other.__cause__ = MemoryError()
    assert errors.is_out_of_memory(one)


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("stage", 4, allowed="1, 2 or 3", remedies=["stage=3"]),
        errors.ConflictError("choose one\n  try: strategy=ddp"),
    ],
    ids=repr,
)
def test_an_error_of_another_process_has_the_text_that_it_had_there(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
