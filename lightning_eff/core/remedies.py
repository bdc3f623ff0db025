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
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import yaml

from lightning_eff.core import catalog

_in_recipe: ContextVar[bool] = ContextVar("_in_recipe", default=False)
_in_fabric: ContextVar[bool] = ContextVar("_in_fabric", default=False)
_FABRIC_NAMES = (("Trainer(", "Fabric("), ("FSDP2(", "FSDP2Fabric("), ("DeepSpeedZero(", "ZeroFabric("))
"""What is used in a loop without a Trainer in place of what a remedy names."""
_GROUPS = "callbacks|monitors|checkpoint_io|data|model|optimizer|precision|scheduler|strategy|trainer"
_TOKEN = re.compile(
    rf"(?<![^\s'])(?:~(?P<removed>(?:{_GROUPS})(?:\.\w+)+)"
    rf"|\+?(?P<key>(?:{_GROUPS})(?:\.\w+)*)=(?P<value>\{{[^}}]*\}}|\[[^\]]*\]|[^\s,']+))(?=[\s,']|$)"
)
_QUOTED = re.compile(r"'(\+?[\w.]+=\[[^']*\])'")
"""An override in the quotes that a shell needs."""
_ONE_CALL = re.compile(r"\b(\w+)\(([^()]*)\) \1\(")
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


@contextmanager
def for_fabric() -> Generator[None]:
    """Show remedies with Lightning Fabric's names, in texts that are created inside of this context."""
    token = _in_fabric.set(True)
    try:
        yield
    finally:
        _in_fabric.reset(token)


def list_override(key: str, names: Sequence[str]) -> str:
    """Return the override of a list of names, in quotes where Hydra would read a number or null.

    Example:
        >>> list_override("callbacks.micro_batch.keep", ["weights", "1"])
        'callbacks.micro_batch.keep=[weights,1]'
        >>> print(list_override("callbacks.micro_batch.keep", ["1.0"]))
        'callbacks.micro_batch.keep=["1.0"]'
    """
    quoted = [name if type(yaml.safe_load(name)) in (str, int) else f'"{name}"' for name in names]
    override = f"{key}=[{','.join(quoted)}]"
    return override if quoted == list(names) else f"'{override}'"


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
        >>> override_as_python("+callbacks=micro_batch callbacks.micro_batch.micro_batch_size=4")
        'MicroBatch(micro_batch_size=4)'
        >>> override_as_python("~callbacks.micro_batch"), override_as_python("strategy=deepspeed_zero")
        ('remove MicroBatch', 'DeepSpeedZero()')
    """
    text = _QUOTED.sub(r"\1", remedy)
    text = _TOKEN.sub(lambda match: _as_python(**match.groupdict()), text)
    text = _NEXT_CALL.sub(") and ", _ONE_CALL.sub(_joined_call, text))
    for name, fabrics in _FABRIC_NAMES if _in_fabric.get() else ():
        text = text.replace(name, fabrics)
    return text


def _joined_call(calls: re.Match[str]) -> str:
    return f"{calls[1]}({calls[2]}, " if calls[2] else f"{calls[1]}("


def _as_python(removed: str | None, key: str, value: str) -> str:
    """Return one override as Python: `~removed`, or `key=value`."""
    group, *path = (removed or key).split(".")
    is_multi = group in catalog.MULTI_CHOICE_GROUPS
    if removed is None and len(path) <= is_multi:
        return _option_as_python(group, value) or f"{key}={value}"
    names = [path.pop(0)] if is_multi else [file.stem for file in (catalog.CONF / group).glob("*.yaml")]
    # The class of the options that have this parameter; none where several classes have it.
    options = (_option(group, name) for name in names)
    owners = {target for target, parameters in options if is_multi or path[0] in parameters}
    owner = owners.pop().rpartition(".")[2] if len(owners) == 1 else ""
    if removed is not None:
        return f"remove {owner}" if is_multi and owner else f"leave out {removed.rpartition('.')[2]}"
    argument: Any = value
    with suppress(yaml.YAMLError):  # a path of the user, for example
        argument = Ellipsis if value == "..." else yaml.safe_load(value)
    for name in reversed(path[1:]):
        argument = {name: argument}
    keyword = f"{path[0]}={_literal(argument)}"
    if group == "optimizer" and owner:
        return f"partial({owner}, {keyword})"  # OptimizerChoice passes its parameters and rate
    owner = "Trainer" if group == "trainer" else owner
    return f"{owner}({keyword})" if owner else keyword


def _option_as_python(group: str, name: str) -> str:
    """Return the call that constructs an option; empty if there is no such option."""
    target, parameters = _option(group, name)
    if not parameters and not target:
        return ""
    short = target.rpartition(".")[2]
    if group == "strategy" and not target.startswith(_OWN):
        return f"Trainer(strategy={_literal(name)})"
    if group == "optimizer" and name == "module":
        return "leave out OptimizerChoice"
    if group == "optimizer":
        optimizer = short if target.startswith(_OWN) else target
        # The rate is the run's own, not that of a file.
        return f"OptimizerChoice(optimizer=partial({optimizer}, lr=...))"
    # A preset, which begins with the option that it changes.
    changes = parameters if "defaults" in parameters else {}
    changed = ", ".join(f"{key}={_literal(value)}" for key, value in changes.items() if key != "defaults")
    return f"{short}({changed})" if target else f"no {group}"


@functools.cache
def _option(group: str, name: str) -> tuple[str, dict[str, Any]]:
    """Return an option's class, a preset's from the option that it builds on, and the keys of its file."""
    file = catalog.CONF / group / f"{name}.yaml"
    keys: dict[str, Any] = yaml.safe_load(file.read_text(encoding="utf-8")) if file.exists() else {}
    bases = [entry for entry in keys.get("defaults", []) if entry != "_self_"]
    target = keys.get("_target_") or (_option(group, bases[0])[0] if bases else "")
    return target, {key: value for key, value in keys.items() if not key.startswith("_")}


def _literal(value: Any) -> str:
    return json.dumps(value) if isinstance(value, str) else "..." if value is Ellipsis else str(value)
