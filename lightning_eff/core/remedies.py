"""What helps against a refusal: stated once, as a recipe's overrides, and shown to a plain Trainer as Python.

`callbacks.micro_batch.micro_batch_size=4` is then `MicroBatch(micro_batch_size=4)`, `trainer.devices=2` is
`Trainer(devices=2)`, `~callbacks.micro_batch` is "remove MicroBatch". The command line and what builds a
recipe's run enter `as_overrides`; a text is made for whoever reads it where it is made. Which class an option
stands for, and which options have a parameter, is read from the YAML files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import yaml

from lightning_eff.core import catalog

_in_recipe: ContextVar[bool] = ContextVar("_in_recipe", default=False)
_GROUPS = "callbacks|monitors|checkpoint_io|data|model|optimizer|precision|scheduler|strategy|trainer"
_TOKEN = re.compile(
    rf"(?<![^\s'])(?:~(?P<left_out>(?:{_GROUPS})(?:\.\w+)+)"
    rf"|\+?(?P<key>(?:{_GROUPS})(?:\.\w+)*)=(?P<value>\{{[^}}]*\}}|\[[^\]]*\]|[^\s,']+))(?=[\s,']|$)"
)
_ONE_CALL = re.compile(r"\b(\w+)\(([^()]+)\) \1\(")
"""Two calls of one class in a row, up to the arguments of the second."""
_NEXT_CALL = re.compile(r"\) (?=[\w.]+\()")
_TRY = re.compile(r"^  try: (.*)$", re.MULTILINE)
_OWN = f"{__name__.partition('.')[0]}."


@contextmanager
def keep_overrides() -> Generator[None]:
    """Leave the remedies of texts that are made inside as they are stated."""
    token = _in_recipe.set(True)
    try:
        yield
    finally:
        _in_recipe.reset(token)


def format_remedies(text: str) -> str:
    r"""Return a text with its remedies, the lines that begin with `try:`, for whoever reads it.

    Example:
        >>> print(shown("it does not fit\n  try: callbacks.micro_batch.micro_batch_size=4"))
        it does not fit
          try: MicroBatch(micro_batch_size=4)
    """
    return text if _in_recipe.get() else _TRY.sub(lambda match: f"  try: {override_as_python(match[1])}", text)


def override_as_python(remedy: str) -> str:
    """Return a remedy as one would write it in Python; words beside overrides stay.

    Example:
        >>> in_python("optimizer.max_parameter_norm=1.0 trainer.gradient_clip_val=null")
        'partial(InBackward, max_parameter_norm=1.0) and Trainer(gradient_clip_val=None)'
        >>> in_python("~callbacks.micro_batch"), in_python("precision=bf16_mixed"), in_python("remove it")
        ('remove MicroBatch', 'Mixed(precision="bf16-mixed")', 'remove it')
    """
    text = _TOKEN.sub(lambda match: _written(**match.groupdict()), remedy)
    return _NEXT_CALL.sub(") and ", _ONE_CALL.sub(r"\1(\2, ", text))


def _written(left_out: str | None, key: str, value: str) -> str:
    if left_out is not None:
        group, *path = left_out.split(".")
        made = _made(group, path[0]) if group in catalog.MULTI_CHOICE_GROUPS else ""
        return f"remove {made}" if made else f"leave out {path[-1]}"
    group, *path = key.split(".")
    if len(path) <= (group in catalog.MULTI_CHOICE_GROUPS):
        return _option(group, value) or f"{key}={value}"
    given = _value(value)
    made = "Trainer" if group == "trainer" else _owner(group, path)
    parameter, *inside = path[1:] if group in catalog.MULTI_CHOICE_GROUPS else path
    for name in reversed(inside):
        given = {name: given}
    argument = f"{parameter}={_literal(given)}"
    if group == "optimizer" and made:
        return f"partial({made}, {argument})"  # its parameters and rate are given by OptimizerChoice
    return f"{made}({argument})" if made else argument


def _value(text: str) -> Any:
    try:
        return text if text == "..." else yaml.safe_load(text)
    except yaml.YAMLError:  # a path of the user's, say
        return text


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) and value != "..." else str(value)


def _owner(group: str, path: list[str]) -> str:
    """Return the class that has a parameter; nothing where several have."""
    if group in catalog.MULTI_CHOICE_GROUPS:
        return _made(group, path[0])
    files = sorted((catalog.CONF / group).glob("*.yaml"))
    having = {_target(file) for file in files if path[0] in dict(_parameters(file))}
    return having.pop().rpartition(".")[2] if len(having) == 1 else ""


def _made(group: str, option: str) -> str:
    file = catalog.CONF / group / f"{option}.yaml"
    return _target(file).rpartition(".")[2] if file.exists() else ""


def _option(group: str, name: str) -> str:
    """Return how an option of a group is made; nothing where that is not known."""
    file = catalog.CONF / group / f"{name}.yaml"
    if not file.exists():
        return ""
    target = _target(file)
    short = target.rpartition(".")[2]
    if group == "strategy" and not target.startswith(_OWN):
        return f"Trainer(strategy={_literal(name)})"
    if group == "optimizer":
        made = short if target.startswith(_OWN) else target
        rate = dict(_parameters(file)).get("lr", 1e-3)
        return f"OptimizerChoice(optimizer=partial({made}, lr={rate}))"
    changed = (
        "" if _has_target(file) else ", ".join(f"{key}={_literal(value)}" for key, value in _parameters(file))
    )
    return f"{short}({changed})" if target else f"no {group}"


@functools.cache
def _target(file: Path) -> str:
    """Return the class of an option, or of the one that it begins with."""
    text = file.read_text(encoding="utf-8")
    own = re.search(r"^_target_: (\S+)", text, re.MULTILINE)
    first = re.search(r"^defaults:\n  - (\w+)$", text, re.MULTILINE)
    if own is not None:
        return own[1]
    return _target(file.with_name(f"{first[1]}.yaml")) if first is not None else ""


def _has_target(file: Path) -> bool:
    return "\n_target_:" in file.read_text(encoding="utf-8")


def _parameters(file: Path) -> list[tuple[str, Any]]:
    return [(key, _value(default)) for key, default, _ in catalog.yaml_parameters(file)]
