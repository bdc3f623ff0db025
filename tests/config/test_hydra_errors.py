"""Every override in the table of habits exists."""

from __future__ import annotations

import inspect

from lightning.pytorch import Trainer

from lightning_eff.config.hydra_errors import proposals, read_habits
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, parameter_keys

ROWS = [row.partition("=")[::2] for row in read_habits()]
PROPOSED = [proposals(key, value or "2") for key, value in ROWS]


def test_every_proposed_override_exists() -> None:
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
