"""Compose a recipe with Hydra, check the config, and explain errors in it. The verbs in `commands/` call it.

Read `composition.py` first. `recipe_app` starts Hydra for one recipe, and `RecipeApp.check` returns the plain
values from which `run.py` builds a run. The check uses these modules, in this order: `overrides.py` (the
user's overrides), `recipes.py` (Hydra's loader, and the recipe's own choices), `strict_yaml.py` (YAML files),
`resolution.py` (keys, and settings that do not apply), `validate.py` (classes, types and folders).

`hydra_errors.py` adds remedies to errors. `sweeps.py` checks the runs of a sweep. `loggers.py` keeps secrets
out of loggers, and `ckpt_path.py` finds checkpoints.
"""
