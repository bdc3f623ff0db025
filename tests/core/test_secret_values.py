"""Secrets stay variables of the environment in a config, and leave hyperparameters and texts."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_eff.core.errors import ConfigError
from lightning_eff.core.secret_values import hide_secrets, is_secret, keep_variables, without_secrets
from lightning_eff.core.technique import config_of


def test_secrets_are_known_by_their_keys() -> None:
    for key in ("token", "HF_TOKEN", "password", "apiKey", "AWS_SECRET_ACCESS_KEY"):
        assert is_secret(key, "x"), key
        assert not is_secret(key, "")
        assert not is_secret(key, 3)
    for key in ("num_tokens", "tokenizer", "pad_token", "key", "secretary", "monkey"):
        assert not is_secret(key, "x"), key


def test_a_secret_stays_the_variable_that_it_comes_from() -> None:
    source: dict[str, Any] = {"a": [{"token": "Bearer ${oc.env:X,''}", "n": "${oc.env:N}"}], "b": "${a}"}
    values: dict[str, Any] = {"a": [{"token": "Bearer hunter2", "n": "4"}], "b": [1]}
    kept = keep_variables(values, source)
    assert kept == {"a": [{"token": "Bearer ${oc.env:X,''}", "n": "4"}], "b": [1]}


def test_a_secret_within_another_text_is_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    values = {"url": "https://u:hunter2@host", "headers": ["Bearer hunter2"], "api_token": "hunter2"}
    kept = keep_variables(values, dict.fromkeys(values))
    token = "${oc.env:MY_TOKEN}"
    assert kept == {"url": f"https://u:{token}@host", "headers": [f"Bearer {token}"], "api_token": token}


@pytest.mark.parametrize("source", ["hunter2", "${oc.env:X}${data.token}"])
def test_a_secret_in_the_config_is_rejected_without_being_shown(source: str) -> None:
    with pytest.raises(ConfigError) as raised:
        keep_variables({"model": {"api_token": "hunter2"}}, {"model": {"api_token": source}})
    assert raised.value.key == "model.api_token"
    assert "hunter2" not in str(raised.value)


def test_hyperparameters_texts_and_arguments_lose_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "hunter2")
    monkeypatch.setenv("OTHER_SECRET", "hunter2-and-more")
    monkeypatch.setenv("SHORT_TOKEN", "e")
    assert hide_secrets("hunter2: hunter2-and-more") == "***: ***"
    given = {"width": 3, "hubs": [{"token": "x", "name": "y"}], "url": "https://u:hunter2@host"}
    assert without_secrets(given) == {"width": 3, "hubs": [{"name": "y"}]}
    assert without_secrets(None) is None

    class Technique:
        def __init__(self, token: str) -> None:
            self.token = token

    assert config_of(Technique("hunter2")) == {"token": "***"}
