"""Exit codes for everything that can end the process, and errors in the words of whoever asked."""

from __future__ import annotations

import pickle

import pytest
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_eff.core import errors
from lightning_eff.core.errors import ConfigError, exit_code, root_cause_line, suggest_name


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("the notes say: out of memory"), 1),
        (ConfigError("lr", -1, allowed="a positive number"), 2),
        (errors.UsageError("no such verb"), 2),
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


def test_the_cpus_allocator_refusing_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert type(refused.value) is RuntimeError, "it has no class of its own"
    assert exit_code(refused.value) == 4


def test_config_error_names_key_value_allowed_and_three_remedies() -> None:
    error = ConfigError("stage", "four", allowed="1, 2 or 3", remedies=iter(["a", "b", "c", "d"]))
    assert str(error).split("\n") == ["stage='four': expected 1, 2 or 3", "  try: a", "  try: b", "  try: c"]
    assert error.remedies == ("a", "b", "c", "d")
    assert isinstance(error, ValueError)


def test_under_puts_a_path_in_front_and_leaves_the_error_as_it_was() -> None:
    error = ConfigError("every_n_steps", 0, allowed="at least 1", remedies=["every_n_steps=1"])
    longer = error.under("empty_cache").under("callbacks")
    assert longer.key == "callbacks.empty_cache.every_n_steps"
    assert (longer.value, longer.allowed, longer.remedies) == (0, "at least 1", ("every_n_steps=1",))
    assert str(longer).startswith("callbacks.empty_cache.every_n_steps=0: expected at least 1\n")
    assert error.key == "every_n_steps"


@pytest.mark.parametrize(
    ("word", "known", "said"),
    [
        ("emty_cache", ["mixed", "empty_cache"], "did you mean 'empty_cache'?"),
        ("bf16", ["bf16_true", "bf16_mixed", "fp16_mixed"], "did you mean 'bf16_mixed' or 'bf16_true'?"),
        ("Linear", ["x.linear", "linearity", "bilinear"], "did you mean 'linearity' or 'x.linear'?"),
        ("a.*", ["a.bcde", "abcdef"], "there are: a.bcde, abcdef"),
        ("", [], "there are none"),
    ],
)
def test_nearest_says_the_closest_or_what_there_is(word: str, known: list[str], said: str) -> None:
    assert suggest_name(word, iter(known)) == said


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError("first\nsecond"), "RuntimeError: first"),
        (RuntimeError(), "RuntimeError"),
        (KeyError("loss"), "KeyError: 'loss'"),
        (errors.UsageError("no verb\nthere are: fit"), "no verb\nthere are: fit"),
    ],
    ids=repr,
)
def test_root_cause_is_one_line_and_ours_keep_all_of_theirs(error: BaseException, line: str) -> None:
    assert root_cause_line(error) == line


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
