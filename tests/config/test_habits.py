"""Each row of the table of habits proposes what can be composed, and is found by what people type."""

from __future__ import annotations

import inspect

import pytest
from lightning.pytorch import Trainer

from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.habits import proposals, read_habits
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, parameter_keys
from lightning_eff.core.errors import UsageError

pytestmark = pytest.mark.usefixtures("empty_folder")
ROWS = [row.partition("=")[::2] for row in read_habits()]
PROPOSED = [proposals(key, value or "2") for key, value in ROWS]


def test_what_is_proposed_exists() -> None:
    known = {
        *parameter_keys(),
        *TOP_LEVEL,
        *(f"trainer.{key}" for key in inspect.signature(Trainer).parameters),
    }
    own = {"strategy.find_unused_parameters"}  # of PyTorch's DDP, through Lightning's `**kwargs`
    for found in PROPOSED:
        assert found
        for word in " ".join(found).split():
            key, _, value = word.lstrip("+").partition("=")
            assert key in known | own, word
            is_option = (CONF / key).is_dir() and value not in ("[]", "2")  # 2 stands for the user's value
            for name in value.strip("[]").split(",") if is_option else ():
                assert (CONF / key / f"{name}.yaml").is_file(), word


def test_all_proposals_of_a_habit_are_shown_and_a_typo_is_none() -> None:
    with pytest.raises(UsageError) as caught:
        compose_recipe("images", ["hidden_size=32"])
    tries = ["  try: model.d_model=32", "  try: model.channels=32"]
    assert str(caught.value).splitlines()[1:] == tries
    with pytest.raises(UsageError, match="sed: no such key"):
        compose_recipe("baseline", ["sed=1", "precision=fp32"])
