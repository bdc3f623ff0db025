"""List verbs, recipes, techniques and options by reading their files, without importing torch."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).resolve().parent.parent
MULTI_CHOICE_GROUPS = ("callbacks", "monitors", "logger")
"""Groups of which a run may use several options. Each option is a key of the group's dictionary."""
OPTIONAL_GROUPS = ("launch", "experiment")
"""Single-option groups that a recipe need not list. Experiments are files of the user, and are composed
last."""
LEDGER_FILE = "efficiency.json"
"""File with the efficiency report in a run's folder."""
RESOLVED = "resolved.yaml"
"""File in a run's folder with the run's resolved config. The file is a recipe without a defaults list. The
verbs `export`, `validate`, `test`, `predict` and `generate` build the model from this file."""


CONF, RECIPES, CONSTRAINTS = (
    PACKAGE / name if (PACKAGE / name).exists() else PACKAGE.parent / name
    for name in ("conf", "recipes", "constraints.txt")
)
"""Paths inside the installed package or, in a checkout, next to the package."""


def read_ledger(run: Path) -> dict[str, Any]:
    """Return the efficiency report in the folder of a run or failed run; empty if there is no report."""
    file = run / LEDGER_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


RUN_TIME = "%Y-%m-%d_%H-%M-%S-%f"
"""Format of the time in the folder name of a run or a sweep."""


def began(run: Path) -> tuple[str, int]:
    """Return a run's start time and its number in a sweep, to sort runs; both are read from folder names.

    If the user has named the folder, the start time is the folder's modification time. The modification time
    is only a fallback, because it changes when the folder is copied.

    Example:
        >>> began(Path("outputs/lm/sweep_2026-11-27_01-02-03-000000/7"))
        ('2026-11-27_01-02-03-000000', 7)
    """
    # A run of a sweep has its number as its name, below the sweep's folder.
    number = int(run.name) if run.name.isdecimal() else -1
    found = re.search(r"\d{4}(-\d\d){2}_\d\d(-\d\d){2}(-\d+)?", run.parent.name if number >= 0 else run.name)
    # A folder that the user named has no time in its name.
    time = found[0] if found else datetime.fromtimestamp(run.stat().st_mtime).strftime(RUN_TIME)
    return time, number


@dataclass(frozen=True)
class Entry:
    """A recipe (`lm`), an option, or a technique, which has its module's name (`callbacks/empty_cache`).

    `use` is the argument or command that selects the entry.
    """

    name: str
    kind: str
    summary: str
    use: str


def module_docstring(module: Path) -> str:
    """Return a module's docstring without importing it."""
    # Why not ast.get_docstring: parsing 60 modules takes a third of the time of `ls`.
    _, docstring, _ = module.read_text(encoding="utf-8").split('"""', 2)
    return inspect.cleandoc(docstring)


def verbs() -> dict[str, str]:
    """Return the summary line of every verb, by verb name."""
    files = sorted((PACKAGE / "commands").glob("[a-z]*.py"))
    return {file.stem: module_docstring(file).partition("\n")[0] for file in files}


def recipes(folders: Sequence[Path] = ()) -> list[Entry]:
    """Return the recipes in the user's folders and the recipes of this package."""
    uses = {folder: f" --config-dir {folder}" for folder in folders} | {RECIPES: ""}
    return [
        Entry(file.stem, "recipe", yaml_header(file), f"lightning-eff train {file.stem}{use}")
        for folder, use in uses.items()
        for file in sorted(folder.glob("*.yaml"))
    ]


def options(folders: Sequence[Path] = ()) -> list[Entry]:
    """Return every option of every group, including techniques; options in the user's folders come first."""
    found: list[Entry] = []
    # A user's folder may have other subfolders, such as hydra/, which are not groups of this package.
    groups = {*OPTIONAL_GROUPS, *(folder.name for folder in CONF.iterdir())}
    files = [file for folder in (*folders, CONF) for file in sorted(folder.glob("*/*.yaml"))]
    for file in (file for file in files if file.parent.name in groups):
        group = file.parent.name
        module = PACKAGE / group / f"{file.stem}.py"
        technique = module.exists()
        summary = module_docstring(module).partition("\n")[0] if technique else yaml_header(file)
        kind = "technique" if technique and group not in ("model", "data", *OPTIONAL_GROUPS) else "option"
        name = f"{group}/{file.stem}"
        found.append(Entry(name, kind, summary, use_of(name)))
    return found


def use_of(option: str) -> str:
    """Return the override that chooses an option.

    Example:
        >>> use_of("callbacks/empty_cache"), use_of("precision/auto"), use_of("logger/none")
        ('+callbacks=empty_cache', 'precision=auto', 'logger=none')
    """
    group, _, name = option.partition("/")
    return f"{'+' * (group in MULTI_CHOICE_GROUPS and name != 'none')}{group}={name}"


@functools.cache
def techniques_with(attribute: str) -> dict[str, Any]:
    """Return, by technique, the classes whose source defines an attribute or method; import only these.

    The modules of other techniques are not imported, because some imports take seconds.
    """
    import yaml  # not needed by `ls`

    found: dict[str, Any] = {}
    for name in (entry.name for entry in options() if entry.kind == "technique"):
        # Search the source text, since importing all techniques takes seconds.
        text = (PACKAGE / f"{name}.py").read_text(encoding="utf-8")
        if re.search(rf"^    (def )?{attribute}\b", text, re.MULTILINE):
            target: str = yaml.safe_load((CONF / f"{name}.yaml").read_text(encoding="utf-8"))["_target_"]
            module, _, kind = target.rpartition(".")
            found[name] = getattr(importlib.import_module(module), kind)
    return found


def yaml_header(file: Path) -> str:
    """Return a YAML file's first comment that is not a Hydra directive."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith("# ") and not line.startswith("# @package"):
            return line[2:]
    return ""


def yaml_parameters(file: Path) -> list[tuple[str, str, str]]:
    """Return key, default and comment of every parameter in a YAML file."""
    found: list[tuple[str, str, str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        # Keys that start with an underscore, such as `_target_`, are Hydra's and do not match.
        match = re.match(r"([a-z]\w*):\s*(.*?)\s*(?:\s#\s*(.*))?$", line)
        if match and match[1] not in ("defaults", "hydra"):
            found.append((match[1], match[2], match[3] or ""))
    return found


def parameter_keys() -> list[str]:
    """Return the command-line paths of all parameters of all options."""
    keys: list[str] = []
    for entry in options():
        group, _, name = entry.name.partition("/")
        # A single-option group has no key for its option: `optimizer.lr`, but `callbacks.micro_batch.keep`.
        path = f"{group}.{name}" if group in MULTI_CHOICE_GROUPS else group
        keys += [f"{path}.{key}" for key, _, _ in yaml_parameters(CONF / group / f"{name}.yaml")]
    return sorted(set(keys))


def entry_details(entry: Entry, folders: Sequence[Path] = ()) -> dict[str, Any]:
    """Return name, kind, summary, full text and parameters of an entry as plain types."""
    # The user may have replaced a recipe or an option of this package.
    files = (folder / f"{entry.name}.yaml" for folder in (*folders, RECIPES, CONF))
    file = next(file for file in files if file.is_file())
    if entry.kind == "recipe":
        return asdict(entry) | {"text": file.read_text(encoding="utf-8")}
    group, _, name = entry.name.partition("/")
    module = PACKAGE / group / f"{name}.py"
    keys = ("key", "default", "meaning")
    return asdict(entry) | {
        "text": module_docstring(module) if module.exists() else yaml_header(file),
        "parameters": [dict(zip(keys, row, strict=True)) for row in yaml_parameters(file)],
    }
