"""Explain Hydra's composition errors in one or two lines: the key or option at fault and the nearest name.

Hydra's advice to append a misspelt key with `+` is left out.
"""

from __future__ import annotations

from hydra.errors import MissingConfigException

from lightning_eff.config.recipes import RecipeChain, RecipePath
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, parameter_keys
from lightning_eff.core.errors import EnvironmentLacksError, UsageError, suggest_name

JOB_FILES = {"slurm": "slurm", "k8s": "k8s", "kubernetes": "k8s"}
"""What a user may choose as a launcher, and the kind of job file that `launch` prints for it."""

PLUGINS = {
    "hydra/launcher/submitit": ("slurm", "launcher for SLURM"),
    "hydra/launcher/joblib": ("joblib", "launcher for several runs at once"),
    "hydra/sweeper/optuna": ("optuna", "sweeper that searches with Optuna"),
}
"""Options of Hydra's plugins: the extra that installs each, and what it is."""


def missing_file(
    error: MissingConfigException, path: RecipePath, chain: RecipeChain
) -> UsageError | EnvironmentLacksError:
    """Return the error for an option, or a recipe behind one, that does not exist, with the nearest name."""
    wanted = str(error.missing_cfg_file)
    for begin, (extra, about) in PLUGINS.items():
        if wanted.startswith(begin):
            text = f"{wanted}: hydra's {about} is missing\n  try: pip install 'lightning-eff[{extra}]'"
            return EnvironmentLacksError(text)
    where = f"{chain.missing[wanted]}: " if wanted in chain.missing else ""
    group, _, option = wanted.rpartition("/")
    if not group:
        return UsageError(f"{where}{wanted}: no such recipe; {suggest_name(wanted, path.names())}")
    if group == "launch" and option in JOB_FILES:
        text = f"launch={option}: no such option; its job file is printed"
        return UsageError(f"{where}{text}\n  try: lightning-eff launch {JOB_FILES[option]} RECIPE")
    options = error.options or [file.stem for file in (CONF / group).glob("*.yaml")]
    return UsageError(f"{where}{group}={option}: no such option; {suggest_name(option, options)}")


def composition_error(error: Exception) -> str:
    """Return the text for any other error that Hydra 1.3 raises while it composes."""
    if isinstance(error, RecursionError):
        return "the config is nested too deep, or its defaults never end"
    cause = error.__cause__
    first = next(iter(str(error).splitlines() or str(cause or "").splitlines()), type(error).__name__)
    if first.startswith("Could not override '"):
        key = first.split("'")[1]
        if key in TOP_LEVEL:
            return f"{key}: this recipe does not have it\n  try: +{key}=..."
        paths = [path for path in parameter_keys() if path.endswith(f".{key}")]
        hint = f"did you mean {' or '.join(paths[:3])}?" if paths else suggest_name(key, TOP_LEVEL)
        return f"{key}: no such key; {hint}"
    if first.startswith("Multiple values for "):
        group = first.split()[3].rstrip(".")
        remedy = f"leave one of them out, or write `override {group}: OPTION`"
        return f"{group} is set more than once, and takes one option: {remedy}"
    reason = f" ({str(cause).splitlines()[0]})" if str(error) and cause is not None and str(cause) else ""
    return f"{first}{reason}"
