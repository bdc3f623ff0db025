"""Train a recipe, with overrides; `-m` sweeps, `--cfg job` prints the config, `ckpt_path=last` goes on."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from omegaconf import DictConfig

from lightning_eff.config import composition
from lightning_eff.config.overrides import allow_new_keys, parse_overrides, recipe_and_overrides, sweep
from lightning_eff.config.recipes import RecipePath, listed_groups, read_chain
from lightning_eff.core import host_memory
from lightning_eff.core.errors import (
    EXIT_OK,
    ConfigError,
    ConflictWarning,
    NoEffectWarning,
    SlowPathWarning,
    UsageError,
    exit_code,
    is_out_of_memory,
    root_cause_line,
)
from lightning_eff.launch.job import Launch, check_sweep, check_tasks, num_ranks, shared_run_dir
from lightning_eff.launch.watch import end_with_parent, train_in_subprocess

USAGE = """lightning-eff train RECIPE [overrides] [options]

  lightning-eff train lm                                         a recipe as it is
  lightning-eff train lm trainer.max_steps=50 precision=fp32     with overrides
  lightning-eff train lm 'callbacks=[]'                          without techniques
  lightning-eff train lm -m 'callbacks=[],[empty_cache]'         one run for each
  lightning-eff train lm ckpt_path=last trainer.max_steps=400    go on from the newest checkpoint
  lightning-eff train images model._target_=my_project.Net model.width=3
                                                                 a model of your own, from the current folder

options:
  -m, --multirun          one run for each combination of comma-separated values
  -c, --cfg job|all       print the composed config and stop (--resolve, --package PATH)
  -i, --info [WHAT]       print what Hydra knows and stop
  --config-dir DIR        a folder of your own with groups and recipes, or a package of options: pkg://NAME
  --json                  print the efficiency report as JSON on the standard output
  --debug                 whole tracebacks"""


def main(arguments: Sequence[str]) -> int:
    """Run the verb."""
    given = _parse(arguments)
    launch = Launch.of()
    end_with_parent(torchrun=launch.by == "torchrun")
    _configure_logging(launch)
    from lightning_eff.launch.supervisor import TorchrunErrorFile

    with TorchrunErrorFile(launch):
        return _train(given, launch, arguments)


def _train(given: argparse.Namespace, launch: Launch, arguments: Sequence[str]) -> int:
    if given.multirun:
        check_sweep(launch, given.recipe, given.overrides, as_json=given.json)
    place = RecipePath.of(given.config_dir)
    jobs = _Job(given.recipe, place)
    if given.multirun:
        runs = [composition.compose_recipe(given.recipe, each, place) for each in sweep(given.overrides)]
        parsed = parse_overrides([*given.overrides, *place.overrides(given.recipe)])
        listed = listed_groups(read_chain(given.recipe, place)[0])
        lines = [*allow_new_keys(parsed, listed=listed), *runs[0].hydra]
    elif given.cfg or given.info:
        composed = composition.compose_recipe(given.recipe, given.overrides, place)
        lines = [*composed.overrides, *composed.hydra]
    else:
        lines = jobs.prepare(given.overrides)
    with _argv([sys.argv[0], "train", *arguments]):
        _hydra(given, lines, jobs, str(place.main(given.recipe)))
    return EXIT_OK if given.cfg or given.info else jobs.finish(as_json=given.json)


def _configure_logging(launch: Launch) -> None:
    """Print every message once: by the first rank, and not by Lightning's handler in front of the root's."""
    form = f"rank {launch.rank}: %(message)s" if launch.rank else "%(message)s"
    logging.basicConfig(level=logging.ERROR if launch.rank else logging.WARNING, format=form)
    logging.getLogger("lightning_eff").setLevel(logging.WARNING if launch.rank else logging.INFO)
    import lightning

    logging.getLogger(lightning.__name__).handlers.clear()
    if launch.rank:
        for name in (
            "lightning",
            "lightning.fabric",
            "lightning.pytorch",
            "lightning_eff.config.composition",
            "torch",
        ):
            logging.getLogger(name).setLevel(logging.ERROR)
        for said_by_the_first in (NoEffectWarning, ConflictWarning, SlowPathWarning):
            warnings.simplefilter("ignore", said_by_the_first)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Split flags from overrides, wherever the flags stand."""
    parser = argparse.ArgumentParser(
        prog="lightning-eff train", usage=USAGE, add_help=False, allow_abbrev=False
    )
    parser.add_argument("--multirun", "-m", action="store_true")
    parser.add_argument("--cfg", "-c", choices=["job", "hydra", "all"])
    parser.add_argument("--resolve", action="store_true")
    parser.add_argument("--package", "-p")
    parser.add_argument("--info", "-i", nargs="?", const="all", choices=_INFO)
    parser.add_argument("--config-dir", "-cd", action="append", default=[])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--debug", action="store_true")
    parser.error = _usage_error  # pyright: ignore[reportAttributeAccessIssue]
    given, rest = parser.parse_known_args(arguments)
    given.recipe, given.overrides = recipe_and_overrides("train", rest)
    return given


_INFO = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]


def _usage_error(message: str) -> None:
    text = f"train: {message}"
    raise UsageError(text)


def _make_root(run_dir: Path) -> None:
    """Make the parent folder, so that a disk that refuses is told as a setting, not as a failed run."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            key="output_root", value=str(run_dir.parent), allowed=f"a folder that can be made ({error})"
        ) from error


class _Job:
    """What Hydra calls for each run; keeps reports and failures, so that one failure does not end a sweep.

    Args:
        recipe: Name of the recipe.
        place: Folders that it is looked for in.
    """

    def __init__(self, recipe: str, place: RecipePath) -> None:
        self.recipe = recipe
        self.place = place
        self.reports: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self._prepared: Any = None
        self._memory = host_memory.host_memory_limit()
        self._home = os.getpid()

    def prepare(self, overrides: Sequence[str]) -> list[str]:
        """Compose, check and instantiate the only run before Hydra makes its folder.

        Returns:
            The overrides that let Hydra compose the same again.
        """
        composed = composition.compose_recipe(self.recipe, overrides, self.place)
        from lightning_eff import run  # takes seconds, after what is refused without it

        launch = Launch.of()
        check_tasks(composed.values["trainer"], launch)
        by_time = any(line.startswith("hydra.run.dir=") for line in composed.hydra)
        run_dir = shared_run_dir(launch, composed.run_dir, chosen_here=by_time)
        here = [f'hydra.run.dir="{run_dir}"']
        if run_dir != composed.run_dir:
            composed = composition.compose_recipe(self.recipe, [*overrides, *here], self.place)
        self._memory = host_memory.host_memory_limit()  # with all that is imported, and nothing of the run
        try:
            self._prepared = run.build(composed.values, recipe=self.recipe, run_dir=run_dir)
        except (MemoryError, RuntimeError) as error:
            told = self._told(error, overrides)
            if told is error:
                raise
            raise told from None
        _make_root(run_dir)
        here += ["hydra.output_subdir=null"] if launch.rank else []
        return [*composed.overrides, *composed.hydra, *here]

    def __call__(self, _: DictConfig) -> None:
        """Run one job in the folder that Hydra made for it."""
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        elsewhere = os.getpid() != self._home
        if elsewhere:
            _configure_logging(Launch.of())
        folder = Path(hydra.runtime.output_dir)
        overrides = list(hydra.overrides.task)
        with _Kept(self.failures, folder, lambda error: self._told(error, overrides)):
            self.reports.append(self._run(overrides, folder))
        if self.failures and elsewhere:
            raise self.failures[0]  # a launcher took this job elsewhere, and brings what is raised back

    def _run(self, overrides: list[str], folder: Path) -> dict[str, Any]:
        from lightning_eff import run
        from lightning_eff.launch.supervisor import RankSupervisor

        launch, prepared = Launch.of(), self._prepared
        self._prepared = None  # nothing but this run holds its tensors
        if prepared is None:
            here = f'hydra.run.dir="{folder}"'
            composed = composition.compose_recipe(self.recipe, [*overrides, here], self.place)
            check_tasks(composed.values["trainer"], launch)
            if launch.num_tasks is None and num_ranks(composed.values["trainer"]) > 1:
                return train_in_subprocess(self.recipe, [*overrides, here], self.place.words(), folder)
            self._memory = host_memory.host_memory_limit()
            prepared = run.build(composed.values, recipe=self.recipe, run_dir=composed.run_dir)
        with RankSupervisor(prepared.trainer, prepared.run_dir, launch):
            return prepared.fit()

    def _told(self, error: BaseException, overrides: Sequence[str]) -> BaseException:
        """Return the error to show: out of memory is explained, anything else speaks for itself."""
        if hasattr(error, "exit_code") or not is_out_of_memory(error):
            return error
        from lightning_eff.planner.out_of_memory import explain_out_of_memory

        sys.stderr.write(" out of memory: looking for an override that fits, for a minute or two\n")

        def compose(words: Sequence[str]) -> dict[str, Any]:
            return composition.compose_recipe(self.recipe, [*overrides, *words], self.place).values

        return explain_out_of_memory(error, compose, self._memory)

    def finish(self, *, as_json: bool) -> int:
        """Print what was asked for; raise the only failure, or name each of several."""
        if as_json and not Launch.of().rank:
            shown = self.reports[0] if len(self.reports) == 1 else {"rows": self.reports}
            sys.stdout.write(json.dumps(shown, indent=1) + "\n")
        if not self.failures:
            return EXIT_OK
        for failure in self.failures[1:]:
            sys.stderr.write(f"{root_cause_line(failure)}\n")
        raise self.failures[0]


class _Kept:
    """Keep a job's exception for later, its traceback in `error.log`.

    Why not `except`: also what is no `Exception` must not pass Hydra, which prints its own frames around it.

    Args:
        failures: Where it is kept.
        folder: Of the log.
        told: Returns the error to keep, after the log is written.
    """

    def __init__(
        self,
        failures: list[BaseException],
        folder: Path,
        told: Callable[[BaseException], BaseException],
    ) -> None:
        self._failures = failures
        self._folder = folder
        self._told = told

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        if exit_code(error) != EXIT_OK and not error.__dict__.get("told"):
            path = self._folder / "error.log"
            path.write_text("".join(traceback.format_exception(kind, error, trace)))
            error.__dict__["error_log"] = str(path)
        self._failures.append(self._told(error))
        return True


def _hydra(given: argparse.Namespace, overrides: Sequence[str], jobs: _Job, folder: str) -> None:
    """Let Hydra run the jobs, or print what it was asked to, with the command line that it expects."""
    import hydra

    flags: list[str] = ["--multirun"] if given.multirun else []
    flags += ["--cfg", given.cfg] if given.cfg else []
    flags += ["--resolve"] if given.resolve else []
    flags += ["--package", given.package] if given.package else []
    flags += ["--info", given.info] if given.info else []

    own_words = sys.argv[:]

    def job(cfg: DictConfig) -> None:
        # Lightning starts the other ranks with this process's words, which must be ours again.
        with _argv(own_words):
            jobs(cfg)

    composition.register()
    decorate = hydra.main(version_base=composition.VERSION_BASE, config_path=folder, config_name=given.recipe)
    with _hydra_raises(), _argv([sys.argv[0], *flags, *overrides]):
        decorate(job)()


@contextmanager
def _argv(words: list[str]) -> Generator[None]:
    before = sys.argv[:]
    sys.argv[:] = words
    try:
        yield
    finally:
        sys.argv[:] = before


@contextmanager
def _hydra_raises() -> Generator[None]:
    """Let Hydra raise what goes wrong instead of printing it and leaving the process."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = before
