"""Compose a recipe with Hydra, check the config, and explain its errors. The verbs use this package.

Read `composition.py` first. `recipe_app` starts Hydra for one recipe, and `RecipeApp.check` returns the plain
values from which `run.py` builds a run. First, `overrides.py` parses the user's overrides. `recipes.py` is
Hydra's loader, and `strict_yaml.py` reads its YAML files. Then `resolution.py` checks keys and drops settings
that do not apply, and `validate.py` checks classes, types and folders.

`hydra_errors.py` adds remedies to errors. `sweeps.py` checks the runs of a sweep. `loggers.py` keeps secrets
out of loggers, and `ckpt_path.py` finds checkpoints.
"""
