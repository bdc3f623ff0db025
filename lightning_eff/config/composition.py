"""Compose a recipe and its overrides with Hydra, once per run, and check the result.

Hydra accepts some mistakes silently. With this module, an override may set every parameter of a group's
class. After composition, `config/validate.py` checks each key, and the type of its value, against the
signature of the class. So no key is dropped or added unnoticed. The verbs call `compose_recipe` and
`recipe_app`.

Why not `hydra.main`: it composes a config to find the mode, and again to run the job. A check before the run
would need a third composition. `RecipeApp` uses the same Hydra object as `hydra.main`, and Hydra runs exactly
the config that was checked.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.types import RunMode
from hydra.version import setbase
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from lightning_eff.config import hydra_errors, sweeps
from lightning_eff.config.overrides import allow_new_keys, parse_overrides
from lightning_eff.config.recipes import RECIPE, RUN_DIR, TASK, RecipeChain, RecipeLoader, RecipePath
from lightning_eff.config.resolution import check_keys, resolve_config
from lightning_eff.config.validate import check_hydra, check_run_dir, check_write_access
from lightning_eff.core.errors import ConfigError, UsageError, keep_overrides

VERSION_BASE = "1.3"
LOGGING_GROUPS = ("hydra/job_logging", "hydra/hydra_logging")
"""Groups of Hydra's own logging, which is off unless a recipe or an override chooses an option."""


@dataclass(frozen=True)
class Composed:
    """The plain, resolved values of a recipe and its overrides after all checks.

    `run_dir` is an absolute path and does not exist yet; by default, its last part is the date and time.
    """

    values: dict[str, Any]
    run_dir: Path
    has_default_run_dir: bool
    chain: RecipeChain


def compose_recipe(
    recipe: str, overrides: Sequence[str], path: RecipePath | None = None, *, writes: bool = True
) -> Composed:
    """Compose and check the config of one run, without creating files or instantiating classes.

    Verbs that do not start the run pass `writes=False`; then `output_root` needs no write access.

    Raises:
        UsageError: Hydra cannot compose the config, for example because of an unknown recipe, option or key.
        EnvironmentLacksError: The config uses a plugin of Hydra that is not installed.
        ConfigError: A key, class, type or path in the composed config cannot be used.
    """
    with recipe_app(recipe, overrides, path) as app:
        return app.check(writes=writes)


def resolve_job(loader: RecipeLoader, cfg: DictConfig, overrides: Sequence[str]) -> dict[str, Any]:
    """Check the config that Hydra composed for one job of a sweep, and return its values."""
    parsed = parse_overrides(overrides)
    return resolve_config(cfg, parsed, loader.read_chain(parsed))


@contextmanager
def recipe_app(recipe: str, overrides: Sequence[str], path: RecipePath | None = None) -> Generator[RecipeApp]:
    """Start Hydra for a recipe, even inside another Hydra app's job; the overrides may define a sweep."""
    path = path or RecipePath()
    parsed = parse_overrides(overrides)
    loader = RecipeLoader(recipe, path)
    with _habits_explained(parsed):
        chain = loader.read_chain(parsed)
        # Hydra has one global config, so save the config of an outer job.
        outer_config = HydraConfig.instance().cfg
        setbase(VERSION_BASE)
        try:
            yield RecipeApp(recipe, loader, parsed, chain)
        finally:
            # `outer_config` is None if there is no outer job.
            HydraConfig.instance().cfg = outer_config


class RecipeApp:
    """Hydra for one recipe: `check` composes a config, and `run` and `sweep` run exactly that config.

    A sweep has its own config, for launcher and folders, and one config per job. Hydra composes each config
    only once.
    """

    def __init__(
        self, recipe: str, loader: RecipeLoader, overrides: Sequence[Override], chain: RecipeChain
    ) -> None:
        self.recipe = recipe
        self.overrides = overrides
        self.chain = chain
        self.loader = loader
        self._hydra: Any = Hydra("train", loader)
        chosen = {*(item.key_or_group for item in overrides), *chain.chosen.override_choices}
        self._lines = allow_new_keys(overrides, listed=chain.groups)
        self._lines += [f"{group}=none" for group in LOGGING_GROUPS if group not in chosen]

    @keep_overrides()
    def check(self, run_dir: Path | None = None, *, writes: bool = True) -> Composed:
        """Compose and check the run's config; a second call can check it with another `run_dir`."""
        composed = self._check(self.config(), self.overrides, run_dir)
        if writes:
            check_write_access(Path(composed.values["output_root"]))
        return composed

    def config(self) -> DictConfig:
        """Return the config composed by Hydra."""
        return self.loader.compose(self._lines)

    @keep_overrides()
    def check_sweep(self) -> tuple[Path, str | None]:
        """Compose and check each run of a sweep, except runs that a sweeper plugin chooses later.

        Returns:
            The sweep's folder, and the metric that the sweeper optimizes.
        """
        cfg = self.loader.compose(self._lines, RunMode.MULTIRUN)
        check_hydra(OmegaConf.to_container(cfg.hydra, resolve=False))
        hydra_overrides = list(cfg.hydra.overrides.hydra)
        with _explained():
            sweeper: Any = OmegaConf.to_container(cfg.hydra.sweeper, resolve=True)
        # As in Hydra's sweepers, the parameters of the sweeper come before the overrides.
        lines = [f"{key}={value}" for key, value in (sweeper.get("params") or {}).items()]
        lines += cfg.hydra.overrides.task
        metric: str | None = None
        jobs = sweeps.runs_to_check(lines, is_grid=sweeper["_target_"] == sweeps.GRID)
        for job in jobs:
            # The list is the same as in Hydra's `load_sweep_config`, so that Hydra reuses this composition.
            overrides = parse_overrides(job)
            cfg_of_job = self.loader.compose([*hydra_overrides, *job])
            composed = self._check(cfg_of_job, overrides, chain=self.loader.read_chain(overrides))
            metric = composed.values.get(sweeps.METRIC)
            sweeps.check_metric(sweeper, metric, composed.values)
            check_write_access(Path(composed.values["output_root"]))
            sweeps.check_storage(sweeper, Path(composed.values["output_root"]).resolve())
        return Path(str(cfg.hydra.sweep.dir)).resolve(), metric

    def run(self, job: Callable[[DictConfig], Any], run_dir: Path, *, save_config: bool) -> Any:
        """Let Hydra create `run_dir` (with `.hydra/` if `save_config`) and call `job`; return the result."""
        # Set the checked folder: `${now:}` in the default name would now be resolved to a later time.
        OmegaConf.update(self.config(), "hydra.run.dir", str(run_dir))
        if not save_config:
            OmegaConf.update(self.config(), "hydra.output_subdir", None)
        return self._hydra.run(self.recipe, job, self._lines).return_value

    def sweep(self, job: Callable[[DictConfig], float | None]) -> None:
        """Let Hydra run every job of the sweep."""
        self._hydra.multirun(self.recipe, job, self._lines)

    def show(self, cfg: str | None, *, info: str | None) -> None:
        """Print the composed config or, with `info`, Hydra's information about the config.

        Keys and choices of the config are checked. Classes are not checked, because the check would import
        them.
        """
        check_keys(self.config(), self.overrides, self.chain)
        with _explained():
            if info is not None:
                self._hydra.show_info(info, self.recipe, self._lines)
            else:
                self._hydra.show_cfg(self.recipe, self._lines, cfg, None)

    def _check(
        self,
        cfg: DictConfig,
        overrides: Sequence[Override],
        run_dir: Path | None = None,
        chain: RecipeChain | None = None,
    ) -> Composed:
        chain = chain or self.chain
        cfg = copy.deepcopy(cfg)  # Hydra runs the original config, which must not change
        with _explained():
            check_hydra(OmegaConf.to_container(cfg.hydra, resolve=False))
            folders: Any = OmegaConf.to_container(cfg.hydra.run, resolve=False)
            if run_dir is not None:
                OmegaConf.update(cfg, "hydra.run.dir", str(run_dir))
            check_run_dir(cfg)
            folder = Path(str(cfg.hydra.run.dir)).resolve()
            with read_write(cfg.hydra.runtime), open_dict(cfg.hydra.runtime):
                cfg.hydra.runtime.output_dir = str(folder)  # `${run_dir}` refers to this key
            HydraConfig.instance().set_config(cfg)
            values = resolve_config(cfg, overrides, chain)
        return Composed(values, folder, folders["dir"].replace(TASK, RECIPE) == RUN_DIR, chain)


@contextmanager
def _habits_explained(overrides: Sequence[Override]) -> Generator[None]:
    """If an override of another tool caused an error, add this package's overrides to the error."""
    try:
        yield
    except (UsageError, ConfigError) as error:
        explained = hydra_errors.with_habits(error, overrides)
        if explained is error:
            raise
        raise explained from error


@contextmanager
def _explained() -> Generator[None]:
    """Turn an error of OmegaConf into a UsageError that names the key."""
    try:
        yield
    except OmegaConfBaseException as error:
        key = error.full_key or "config"
        needs = f"this recipe needs a value from you\n  try: {key}=..."
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(f"{key}: {needs if isinstance(error, MissingMandatoryValue) else reason}") from error
