"""Train a recipe with overrides; `-m` runs a sweep, `--cfg job` prints the config, `ckpt_path=` resumes."""

from __future__ import annotations

import argparse
import math
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from lightning_eff.commands import _parser
from lightning_eff.commands._logging import configure_logging, take_over_lightning
from lightning_eff.commands.report import VAL_LOSS, numbered_runs, read_run, show_several
from lightning_eff.config.composition import Composed, RecipeApp, compose_recipe, recipe_app, resolve_job
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipeLoader, RecipePath
from lightning_eff.config.sweeps import METRIC
from lightning_eff.core import host_memory
from lightning_eff.core.batch_size import check_global_batch
from lightning_eff.core.catalog import read_ledger
from lightning_eff.core.errors import (
    EXIT_OK,
    ConfigError,
    RankError,
    SweepRunError,
    UsageError,
    exit_code,
    is_out_of_memory,
    keep_overrides,
    root_cause_line,
)
from lightning_eff.core.log_filters import report_on_stdout, reports_in_brief
from lightning_eff.core.secret_values import hide_secrets
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import (
    Launch,
    check_sweep,
    check_tasks,
    make_folder,
    num_ranks,
    shared_run_dir,
    starts_ranks,
)
from lightning_eff.launch.ranks import STOPPED, error_log, reported_to_parent, run_ranks

if TYPE_CHECKING:
    from lightning_eff.run import Run


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with reported_to_parent(launch):
        return _train(options, launch)


def _train(options: argparse.Namespace, launch: Launch) -> int:
    if options.multirun:
        if options.cfg or options.info:
            raise UsageError("train: --cfg and --info show one run\n  try: leave out --multirun")
        check_sweep(launch, options.recipe)
    path = RecipePath.of(options.config_dir)
    with recipe_app(options.recipe, options.overrides, path) as app:
        if options.cfg or options.info:
            app.show(options.cfg, info=options.info)
            return EXIT_OK  # without this package's log handler, because Hydra adds one here
        configure_logging(launch)
        job = Job(options.recipe, path, launch, as_json=options.json, is_sweep=options.multirun)
        if options.multirun:
            _run_sweep(app, job)
            return EXIT_OK
        with redirect_stdout(sys.stderr) if options.json else report_on_stdout():
            ended = _run(app, job, options.overrides)
    if options.json and not launch.rank:
        print_json(ended.report)
    if ended.failure is not None:
        raise ended.failure
    return EXIT_OK


def _run(app: RecipeApp, job: Job, overrides: Sequence[str]) -> Ended:
    """Check one run, and start its ranks or train it in this process."""
    composed = app.check()
    if starts_ranks(composed.values, job.launch):
        try:
            return Ended(job.run_ranks(composed.values, overrides, composed.run_dir))
        except RankError as error:
            return Ended(read_ledger(composed.run_dir), error)
    return _run_here(app, job, composed, overrides)


def _run_here(app: RecipeApp, job: Job, composed: Composed, overrides: Sequence[str]) -> Ended:
    """Build a run, and then fit it in a folder that Hydra creates; a rejected run leaves no folder."""
    check_tasks(composed.values["trainer"], job.launch)
    # The ranks of a launcher compose their folder's name at different times, so rank 0's folder applies.
    run_dir = shared_run_dir(job.launch, composed.run_dir, has_default_name=composed.has_default_run_dir)
    composed = composed if run_dir == composed.run_dir else app.check(run_dir)
    try:
        # The run is in a list that `Job.fit` empties, so that no variable here keeps the run in memory.
        built = [job.build(composed.values, run_dir)]
    except (MemoryError, RuntimeError) as error:
        if (explained := job.explain(error, overrides)) is error:
            raise
        raise explained from None
    make_folder(run_dir.parent)
    if built[0].is_finished:  # an earlier process finished this run, and the folder exists
        return Ended(built[0].fit())
    fit = partial(job.ended, partial(job.fit, built), overrides, run_dir)
    return app.run(lambda _: fit(), run_dir, save_config=not job.launch.rank)


def _run_sweep(app: RecipeApp, job: Job) -> None:
    """Check and run a sweep; at the end, even after an error, print the table of its runs to stdout."""
    folder, metric = app.check_sweep()
    try:
        with redirect_stdout(sys.stderr):
            app.sweep(_SweepJob(job, app.loader))
    finally:
        runs = [read_run(run, folder.parent.parent) for run in numbered_runs(folder)]
        if runs or job.as_json:
            show_several(runs, metric or VAL_LOSS, as_json=job.as_json)


def train_in_worker(words: Sequence[str]) -> None:
    """Train in a worker of Ray; `words` are recipe and overrides, as on the command line."""
    main(_parser.parse(["train", *words]))


@dataclass(frozen=True)
class Ended:
    """The report of a run; for a failed run, its partial report and the error to show."""

    report: dict[str, Any]
    failure: BaseException | None = None


@dataclass
class Job:
    """Starts a recipe's runs, in this process or in other processes, and explains errors of the runs.

    A launcher plugin may pickle a job and use it in another process.
    """

    recipe: str
    path: RecipePath
    launch: Launch
    as_json: bool
    is_sweep: bool
    _memory: Any = None

    def run_ranks(self, values: Mapping[str, Any], overrides: Sequence[str], folder: Path) -> dict[str, Any]:
        """Run each rank in a separate process, which composes the config again; return the report."""
        words = [self.recipe, *overrides, *self.path.options()]
        if values.get("launch"):
            from lightning_eff import run
            from lightning_eff.launch import ray_driver

            ray = run.make("launch", values["launch"])
            # Ray decides the number of workers. Device counts of the recipe are ignored, and counts that the
            # user typed are checked.
            typed = {str(item.key_or_group) for item in parse_overrides(overrides)}
            recipes_own = [key for key in ("devices", "num_nodes") if f"trainer.{key}" not in typed]
            ray.check({**values, "trainer": values["trainer"] | dict.fromkeys(recipes_own, "auto")})
            return ray_driver.run(ray, train_in_worker, words, folder)
        check_global_batch(values, num_ranks(values["trainer"]))
        is_read = self.as_json or self.is_sweep  # stdout is read, as JSON or for the table
        return run_ranks(words, folder, values["trainer"], as_json=is_read)

    def build(self, values: Mapping[str, Any], run_dir: Path) -> Run:
        """Build a run from its checked config."""
        take_over_lightning(self.launch)
        from lightning_eff import run  # takes seconds, so settings are checked before

        self._memory = host_memory.host_memory_limit()  # after the imports, before the run allocates
        return run.build(values, recipe=self.recipe, run_dir=run_dir, launch=self.launch)

    def fit(self, built: list[Run]) -> dict[str, Any]:
        """Remove the single run from the list, and train it; return the run's report.

        The list is then empty, so no caller keeps a reference to the run, and its memory can be freed after
        an OOM error.
        """
        from lightning_eff.launch.stop import ended_together

        run, environment = built.pop(), {*os.environ}
        try:
            with ended_together(run.trainer, run.run_dir, self.launch):
                return run.fit()
        finally:
            # Lightning sets NODE_RANK, for example. The next job of a sweep would take itself for a rank.
            for name in {*os.environ} - environment:
                del os.environ[name]

    def ended(self, start: Callable[[], dict[str, Any]], overrides: Sequence[str], folder: Path) -> Ended:
        """Call `start`, which trains in a folder; return the report of the run, or its error."""
        try:
            return Ended(start())
        except BaseException as error:  # noqa: BLE001 - Hydra would print its own frames, even around Ctrl-C
            path = error_log(folder, self.launch.rank)
            # The process of a rank may have written or reported the error already.
            is_new = not (error.__dict__.get("is_reported") or path.exists())
            if exit_code(error) != EXIT_OK and is_new:
                text = hide_secrets("".join(traceback.format_exception(error)))
                path.write_text(text, encoding="utf-8", errors="backslashreplace")
                error.__dict__["error_log"] = str(path)
            return Ended(read_ledger(folder), self.explain(error, overrides, folder))

    def explain(
        self, error: BaseException, overrides: Sequence[str], folder: Path | None = None
    ) -> BaseException:
        """Return the error to show: an OOM error with the planner's advice, any other error unchanged.

        The advice is also added to the report page of the run in `folder`.
        """
        if hasattr(error, "exit_code") or not is_out_of_memory(error):
            return error
        from lightning_eff.planner.out_of_memory import explain_out_of_memory

        sys.stderr.write(" out of memory: searching for an override that fits, for a minute or two\n")
        reason = root_cause_line(error)
        explained = explain_out_of_memory(
            error,
            lambda words: compose_recipe(self.recipe, [*overrides, *words], self.path).values,
            self._memory,
        )
        # Only rank 0 writes the page, which all ranks share.
        if folder is not None and not self.launch.rank:
            from lightning_eff.report.files import add_out_of_memory

            add_out_of_memory(folder, self.recipe, reason, explained.found)
        return explained


def last_value(report: Mapping[str, Any], metric: str) -> float:
    """Return a run's last value of a metric, from Lightning's final `callback_metrics`.

    Raises:
        SweepRunError: The run has not logged the metric, or the value is NaN, which no sweeper can use.
    """
    metrics: Mapping[str, Any] = report.get("metrics", {})
    if metric not in metrics:
        logged = f"one that the run logs: {', '.join(metrics)}" if metrics else "null: the run logs none"
        if metric.startswith("val") and not report.get("validation"):
            logged += "; no validation ran: lower trainer.val_check_interval"
        error = ConfigError(key=METRIC, value=metric, allowed=logged)
        raise SweepRunError(str(error), error.exit_code)  # a ConfigError cannot be pickled
    value = float(metrics[metric])  # the report stores NaN as text
    if math.isnan(value):
        raise SweepRunError(f"{METRIC}: {metric} is nan at the end of the run")
    return value


class _SweepJob:
    """Hydra calls an instance for each run of a sweep; a launcher plugin may call it in another process."""

    def __init__(self, job: Job, loader: RecipeLoader) -> None:
        self._job = job
        self._loader = loader
        self._home_pid = os.getpid()

    @keep_overrides()
    def __call__(self, cfg: DictConfig) -> float | None:
        """Run one job in the folder that Hydra created; `cfg` is composed by Hydra, without Hydra's section.

        Returns:
            The last value of the metric that the sweep optimizes.

        Raises:
            BaseException: The sweep was stopped.
            SweepRunError: The run failed. Hydra's own sweeper runs the other jobs before it raises the error;
                a sweeper that searches counts the failed runs.
        """
        hydra, job = HydraConfig.get(), self._job
        # A process that a launcher plugin has started has no logging yet.
        if os.getpid() != self._home_pid:
            job.launch = Launch.of()
            configure_logging(job.launch)
        folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
        with reports_in_brief():  # full reports would bury the table
            ended = job.ended(partial(self._run, cfg, overrides, folder), overrides, folder)
        if job.launch.rank:
            return None
        if ended.failure is None:
            metric = cfg.get(METRIC)
            return None if metric is None else last_value(ended.report, metric)
        if exit_code(ended.failure) in STOPPED:
            raise ended.failure
        # An error from another process is pickled without its traceback, so the message names the traceback's
        # file.
        place = f" (traceback: {path})" if (path := ended.failure.__dict__.get("error_log")) else ""
        first, *rest = root_cause_line(ended.failure).splitlines()
        raise SweepRunError(
            "\n".join([f"{first}{place}", *rest]), exit_code(ended.failure)
        ) from ended.failure

    def _run(self, cfg: DictConfig, overrides: list[str], folder: Path) -> dict[str, Any]:
        job = self._job
        values = resolve_job(self._loader, cfg, overrides)
        check_tasks(values["trainer"], job.launch)
        if starts_ranks(values, job.launch):
            return job.run_ranks(values, overrides, folder)
        return job.fit([job.build(values, folder)])
