"""What a user types is read as Hydra reads it, or refused with what can be typed instead."""

from __future__ import annotations

import shlex

import pytest

from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core.errors import UsageError


def test_a_value_that_lacks_quotes_gets_them() -> None:
    value = 'it\'s $HOME \\ "here"'
    with pytest.raises(UsageError, match="not an override") as refused:
        parse_overrides([f"output_root={value}"])
    (remedy,) = (line.partition("try: ")[2] for line in str(refused.value).splitlines()[1:])
    (typed,) = shlex.split(remedy, comments=True)
    assert parse_overrides([typed])[0].value() == value


@pytest.mark.parametrize("line", ["muon", "callbacks=[a,b", "seed=1,,2"])
def test_what_quotes_would_not_mend_gets_none(line: str) -> None:
    with pytest.raises(UsageError, match="not an override") as refused:
        parse_overrides([line])
    assert "try:" not in str(refused.value)
