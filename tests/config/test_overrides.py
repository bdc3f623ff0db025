"""An override that Hydra cannot read gets the quotes that it lacks."""

from __future__ import annotations

import shlex

import pytest

from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core.errors import UsageError


def test_a_value_that_lacks_quotes_gets_them() -> None:
    value = 'it\'s $HOME \\ "here"'
    with pytest.raises(UsageError, match="output_root=") as rejected:
        parse_overrides([f"output_root={value}"])
    (remedy,) = (line.partition("try: ")[2] for line in str(rejected.value).splitlines()[1:])
    (typed,) = shlex.split(remedy, comments=True)
    assert parse_overrides([typed])[0].value() == value
