"""Remedies of errors: stated once as overrides of a recipe, and shown to users of a plain Trainer as Python.

`callbacks.micro_batch.micro_batch_size=4` is then `MicroBatch(micro_batch_size=4)`, `trainer.devices=2` is
`Trainer(devices=2)`, `~callbacks.micro_batch` is "remove MicroBatch". The command line, and the function that
builds a recipe's run, enter `keep_overrides`. The class of an option, and the options that have a parameter,
are read from the YAML files.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import yaml

from lightning_eff.core import catalog

_in_recipe: ContextVar[bool] = ContextVar("_in_recipe", default=False)
_GROUPS = "callbacks|monitors|checkpoint_io|data|model|optimizer|precision|scheduler|strategy|trainer"
_TOKEN = re.compile(
    rf"(?<![^\s'])(?:~(?P<removed>(?:{_GROUPS})(?:\.\w+)+)"
    rf"|\+?(?P<key>(?:{_GROUPS})(?:\.\w+)*)=(?P<value>\{{[^}}]*\}}|\[[^\]]*\]|[^\s,']+))(?=[\s,']|$)"
)
_ONE_CALL = re.compile(r"\b(\w+)\(([^()]+)\) \1\(")
"""Two calls of one class in a row, up to the arguments of the second."""
_NEXT_CALL = re.compile(r"\) (?=[\w.]+\()")
_TRY = re.compile(r"^  try: (.*)$", re.MULTILINE)
_OWN = f"{__name__.partition('.')[0]}."


@contextmanager
def keep_overrides() -> Generator[None]:
    """Show remedies as overrides, in texts that are created inside of this context."""
    token = _in_recipe.set(True)
    try:
        yield
    finally:
        _in_recipe.reset(token)


def format_remedies(text: str) -> str:
    r"""Return a text whose remedies, the lines that begin with `try:`, are overrides or Python by context.

    Example:
        >>> print(format_remedies("it does not fit\n  try: callbacks.micro_batch.micro_batch_size=4"))
        it does not fit
          try: MicroBatch(micro_batch_size=4)
    """
    if _in_recipe.get():
        return text
    return _TRY.sub(lambda match: f"  try: {override_as_python(match[1])}", text)


def override_as_python(remedy: str) -> str:
    """Return a remedy with its overrides written as Python; other words stay.

    Example:
        >>> override_as_python("optimizer.max_parameter_norm=1.0 trainer.gradient_clip_val=null")
        'partial(InBackward, max_parameter_norm=1.0) and Trainer(gradient_clip_val=None)'
        >>> override_as_python("~callbacks.micro_batch"), override_as_python("strategy=deepspeed_zero")
        ('remove MicroBatch', 'DeepSpeedZero()')
    """
    text = _TOKEN.sub(lambda match: _as_python(**match.groupdict()), remedy)
    return _NEXT_CALL.sub(") and ", _ONE_CALL.sub(r"\1(\2, ", text))


def _as_python(removed: str | None, key: str, value: str) -> str:
    """Return one override as Python: `~removed`, or `key=value`."""
    group, *path = (removed or key).split(".")
    is_multi = group in catalog.MULTI_CHOICE_GROUPS
    if removed is not None:
        name = _target(group, path[0]).rpartition(".")[2] if is_multi else ""
        return f"remove {name}" if name else f"leave out {path[-1]}"
    if len(path) <= is_multi:
        return _option_as_python(group, value) or f"{key}={value}"
    if group == "trainer":
        owner = "Trainer"
    elif is_multi:
        owner = _target(group, path[0]).rpartition(".")[2]
    else:
        # The class of the options that have this parameter; none where several classes have it.
        files = [
            file
            for file in (catalog.CONF / group).glob("*.yaml")
            if any(parameter == path[0] for parameter, _, _ in catalog.yaml_parameters(file))
        ]
        owners = {_target(group, file.stem) for file in files}
        owner = owners.pop().rpartition(".")[2] if len(owners) == 1 else ""
    parameter, *nested = path[1:] if is_multi else path
    argument = _parse(value)
    for name in reversed(nested):
        argument = {name: argument}
    keyword = f"{parameter}={_literal(argument)}"
    if group == "optimizer" and owner:
        return f"partial({owner}, {keyword})"  # OptimizerChoice passes its parameters and rate
    return f"{owner}({keyword})" if owner else keyword


def _option_as_python(group: str, name: str) -> str:
    """Return the call that constructs an option; empty if there is no such option."""
    file = catalog.CONF / group / f"{name}.yaml"
    if not file.exists():
        return ""
    target = _target(group, name)
    parameters = {key: _parse(default) for key, default, _ in catalog.yaml_parameters(file)}
    short = target.rpartition(".")[2]
    if group == "strategy" and not target.startswith(_OWN):
        return f"Trainer(strategy={_literal(name)})"
    if group == "optimizer":
        optimizer = short if target.startswith(_OWN) else target
        return f"OptimizerChoice(optimizer=partial({optimizer}, lr={parameters.get('lr', 1e-3)}))"
    # A preset has no _target_ of its own: it lists only what it changes.
    is_preset = "\n_target_:" not in file.read_text(encoding="utf-8")
    changed = ", ".join(f"{key}={_literal(value)}" for key, value in parameters.items()) if is_preset else ""
    return f"{short}({changed})" if target else f"no {group}"


@functools.cache
def _target(group: str, option: str) -> str:
    """Return the `_target_` of an option, or of the first option in its defaults list; empty without one."""
    file = catalog.CONF / group / f"{option}.yaml"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    own = re.search(r"^_target_: (\S+)", text, re.MULTILINE)
    first = re.search(r"^defaults:\n  - (\w+)$", text, re.MULTILINE)
    if own is not None:
        return own[1]
    return _target(group, first[1]) if first is not None else ""


def _parse(text: str) -> Any:
    try:
        return text if text == "..." else yaml.safe_load(text)
    except yaml.YAMLError:  # a path of the user, for example
        return text


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) and value != "..." else str(value)
