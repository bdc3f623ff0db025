"""Train a recipe, with overrides; `-m` sweeps, `--cfg job` prints the config, `ckpt_path=last` resumes."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from lightning_eff.commands import _parser, _sweep
from lightning_eff.commands._logging import configure_logging
from lightning_eff.config.composition import Composed, RecipeApp, compose_recipe, recipe_app
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.recipes import RecipePath, read_chain
from lightning_eff.config.resolution import resolve_config
from lightning_eff.config.sweeps import METRIC
from lightning_eff.core import host_memory
from lightning_eff.core.batch_size import check_global_batch
from lightning_eff.core.errors import (
    EXIT_OK,
    RankError,
    SweepRunError,
    exit_code,
    is_out_of_memory,
    root_cause_line,
)
from lightning_eff.core.log_filters import report_on_stdout, reports_in_brief
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.core.secret_values import hide_secrets
from lightning_eff.core.text import print_json
from lightning_eff.launch.job import (
    RUN_DIR,
    Launch,
    check_sweep,
    check_tasks,
    make_folder,
    num_ranks,
    shared_run_dir,
    starts_ranks,
)
from lightning_eff.launch.ranks import STOPPED, error_log, reported_to_parent, run_ranks


def main(options: argparse.Namespace) -> int:
    """Run the verb."""
    launch = Launch.of()
    with reported_to_parent(launch):
        return _train(options, launch)


def _train(options: argparse.Namespace, launch: Launch) -> int:
    if options.multirun:
        check_sweep(launch, options.recipe)
    path = RecipePath.of(options.config_dir)
    with recipe_app(options.recipe, options.overrides, path) as app:
        if (options.cfg or options.info) and not options.multirun:
            app.check()
            app.show(options.cfg, info=options.info, package=options.package, resolve=options.resolve)
            return EXIT_OK  # without a handler for logs: Hydra adds one, and would print twice
        configure_logging(launch)  # imports Lightning: not for a recipe that does not exist
        job = _Job(app.recipe, app.path, as_json=options.json)
        if options.multirun:
            return _run_sweep(app, job, as_json=options.json)
        with redirect_stdout(sys.stderr) if options.json else report_on_stdout():
            _run(app, job, options.overrides, launch)
    if options.json and not launch.rank:
        print_json(job.reports[0] if job.reports else job.failed_report)
    if job.failures:
        raise job.failures[0]
    return EXIT_OK


def _run(app: RecipeApp, job: _Job, overrides: Sequence[str], launch: Launch) -> None:
    composed = app.check()
    if starts_ranks(composed.values):
        try:
            job.reports.append(job.run_ranks(composed.values, overrides, composed.run_dir))
        except RankError as error:
            job.keep_failure(error, composed.run_dir)
    else:
        run_dir = job.prepare(app, composed, overrides)
        if not job.reports:  # else an earlier run has finished it
            app.run(job, run_dir, save_config=not launch.rank)
    metric = composed.values.get(METRIC)
    if job.reports and metric is not None and RUN_DIR not in os.environ:  # there, the parent says it
        job.reports[0] = _sweep.log_metric(job.reports[0], metric)


def _run_sweep(app: RecipeApp, job: _Job, *, as_json: bool) -> int:
    """Run a sweep; the standard output has the table of its runs alone, whatever ends it."""
    folder, metric = app.check_sweep()
    job.is_sweep = True
    try:
        with redirect_stdout(sys.stderr):
            app.sweep(job)
    finally:
        _sweep.show_runs(folder, metric, as_json=as_json)
    return EXIT_OK


def train_in_worker(words: Sequence[str]) -> None:
    """Train in a worker of Ray: recipe and overrides, as on the command line."""
    main(_parser.parse(["train", *words]))


class _Job:
    """Called by Hydra for each run; keeps reports and failures.

    A launcher plugin may pickle it and call it in another process.
    """

    def __init__(self, recipe: str, path: RecipePath, *, as_json: bool = False) -> None:
        self.recipe = recipe
        self.path = path
        self.as_json = as_json
        self.reports: list[dict[str, Any]] = []
        self.failures: list[BaseException] = []
        self.failed_report: dict[str, Any] = {}
        """What the run that failed last has left of its report."""
        self.is_sweep = False
        self._prepared: Any = None
        self._memory = host_memory.host_memory_limit()
        self._home_pid = os.getpid()

    def run_ranks(self, values: Mapping[str, Any], overrides: Sequence[str], folder: Path) -> dict[str, Any]:
        """Run each rank in a process of its own, which composes its config once more; return the report."""
        words = [self.recipe, *overrides, *self.path.options()]
        if values.get("launch"):
            from lightning_eff import run
            from lightning_eff.launch import ray_driver

            ray = run.make("launch", values["launch"])
            typed = {str(item.key_or_group) for item in parse_overrides(overrides)}
            recipes_own = [key for key in ("devices", "num_nodes") if f"trainer.{key}" not in typed]
            ray.check({**values, "trainer": values["trainer"] | dict.fromkeys(recipes_own, "auto")})
            return ray_driver.run(ray, train_in_worker, words, folder)
        check_global_batch(values, num_ranks(values["trainer"]))
        is_read = self.as_json or self.is_sweep  # the standard output, for JSON or the table
        return run_ranks(words, folder, values["trainer"], as_json=is_read)

    def prepare(self, app: RecipeApp, composed: Composed, overrides: Sequence[str]) -> Path:
        """Build the only run before Hydra creates its folder; return the folder."""
        from lightning_eff import run  # takes seconds: after everything that is rejected without it

        launch = Launch.of()
        check_tasks(composed.values["trainer"], launch)
        run_dir = shared_run_dir(launch, composed.run_dir, has_default_name=composed.has_default_run_dir)
        if run_dir != composed.run_dir:
            composed = app.check(run_dir)
        self._memory = host_memory.host_memory_limit()  # after the imports, before the run allocates
        try:
            self._prepared = run.build(composed.values, recipe=self.recipe, run_dir=run_dir)
        except (MemoryError, RuntimeError) as error:
            explained = self._explain(error, overrides)
            if explained is error:
                raise
            raise explained from None
        if self._prepared.is_finished:
            self.reports.append(self._prepared.fit())
        make_folder(run_dir.parent)
        return run_dir

    @keep_overrides()
    def __call__(self, cfg: DictConfig) -> float | None:
        """Run one job, composed by Hydra and without its section, in the folder that Hydra created for it.

        Returns:
            The last value of the metric that a sweep optimizes.

        Raises:
            BaseException: A sweep was stopped.
            SweepRunError: A run of a sweep failed. Hydra's own sweeper runs the others before it raises it;
                one that searches counts it. The failure of a single run is kept in `failures`.
        """
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        if os.getpid() != self._home_pid:
            configure_logging(Launch.of())
        folder, overrides = Path(hydra.runtime.output_dir), list(hydra.overrides.task)
        report, failure = self._run_kept(cfg, overrides, folder)
        if not self.is_sweep or Launch.of().rank:
            return None
        if failure is None:
            metric = cfg.get(METRIC)
            return None if metric is None else _sweep.last_value(report, metric)
        if exit_code(failure) in STOPPED:
            raise failure
        # Of a class that can be pickled, with the place of the traceback, which the process takes with it.
        place = f" (traceback: {path})" if (path := failure.__dict__.get("error_log")) else ""
        first, *rest = root_cause_line(failure).splitlines()
        raise SweepRunError("\n".join([f"{first}{place}", *rest]), exit_code(failure)) from failure

    def _run_kept(
        self, cfg: DictConfig, overrides: list[str], folder: Path
    ) -> tuple[dict[str, Any], BaseException | None]:
        """Run one job; return its report and what it failed with, and keep both."""
        try:
            with reports_in_brief() if self.is_sweep else nullcontext():  # else they would bury the table
                self.reports.append(self._run(cfg, overrides, folder))
        except BaseException as error:  # noqa: BLE001 - Hydra would print its own frames around Ctrl-C too
            path = error_log(folder, Launch.of().rank)
            is_new = not (error.__dict__.get("is_reported") or path.exists())  # else a rank has written it
            if exit_code(error) != EXIT_OK and is_new:
                text = hide_secrets("".join(traceback.format_exception(error)))
                path.write_text(text, encoding="utf-8", errors="backslashreplace")
                error.__dict__["error_log"] = str(path)
            self.keep_failure(self._explain(error, overrides, folder), folder)
            return {}, self.failures[-1]
        return self.reports[-1], None

    def keep_failure(self, error: BaseException, folder: Path) -> None:
        """Keep what a run failed with, and its report."""
        self.failures.append(error)
        file = folder / "efficiency.json"
        self.failed_report = json.loads(file.read_text()) if file.is_file() else {}

    def _run(self, cfg: DictConfig, overrides: list[str], folder: Path) -> dict[str, Any]:
        from lightning_eff import run
        from lightning_eff.launch.stop import ended_together

        launch, prepared = Launch.of(), self._prepared
        self._prepared = None  # the run's tensors have no other owner
        if prepared is None:
            parsed = parse_overrides(overrides)
            chain = read_chain(self.recipe, self.path, parsed)  # a sweep's, of what this job chooses
            values = resolve_config(cfg, parsed, chain)
            check_tasks(values["trainer"], launch)
            if starts_ranks(values):
                return self.run_ranks(values, overrides, folder)
            self._memory = host_memory.host_memory_limit()
            prepared = run.build(values, recipe=self.recipe, run_dir=folder)
        with ended_together(prepared.trainer, prepared.run_dir, launch):
            return prepared.fit()

    def _explain(
        self, error: BaseException, overrides: Sequence[str], folder: Path | None = None
    ) -> BaseException:
        """Return the error to show: out of memory gets the planner's advice, any other stays.

        The page of the run in `folder` shows the advice too.
        """
        if hasattr(error, "exit_code") or not is_out_of_memory(error):
            return error
        from lightning_eff.planner.out_of_memory import explain_out_of_memory

        sys.stderr.write(" out of memory: searching an override that fits, for a minute or two\n")
        reason = root_cause_line(error)
        explained = explain_out_of_memory(
            error,
            lambda words: compose_recipe(self.recipe, [*overrides, *words], self.path).values,
            self._memory,
        )
        if folder is not None and not Launch.of().rank:
            from lightning_eff.report.files import add_out_of_memory

            add_out_of_memory(folder, self.recipe, reason, explained.found)
        return explained
