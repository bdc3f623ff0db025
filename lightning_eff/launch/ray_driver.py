"""Start Ray and its workers, forward signals and output, and return the run's report or raise its error.

The verb `train` calls `run`. Ray's `fit` runs in a thread, so that this module handles signals without delay.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from lightning_eff.core.catalog import read_ledger
from lightning_eff.core.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EnvironmentLacksError,
    RankError,
    root_cause_line,
)
from lightning_eff.core.machine import num_cores
from lightning_eff.launch.job import make_folder
from lightning_eff.launch.ranks import POLL_S, STOPPED, first_failure, handled
from lightning_eff.launch.ray import Ray
from lightning_eff.launch.ray_worker import FOLDER, exchanged, work

OBJECT_STORE_BYTES = 128 * 2**20
"""Size of Ray's object store if Ray is started for this run; Ray's default is 30 % of the machine's
memory."""
LOST = {"RayError", "WorkerHealthCheckFailedError", "WorkerHealthCheckTimeoutError"}
"""Names of Ray's errors for a lost worker; Ray Train does not export these classes."""
SETTINGS = {
    # The command configures the worker's root logger, and the worker's output goes to a file.
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables for Ray; values that the user has set take precedence."""


def run(
    options: Ray, train: Callable[[Sequence[str]], None], words: Sequence[str], folder: Path
) -> dict[str, Any]:
    """Call `train(words)` in each worker; return the report in `folder`, empty if there is no report.

    Args:
        options: The settings of `launch=ray`.
        train: A module-level function, which the workers import.
        words: Recipe and overrides.
        folder: The run's folder, which all workers see.

    Raises:
        EnvironmentLacksError: Ray is not installed, does not answer, or lacks resources.
        RankError: A worker failed or was lost too often; the text names the worker and the cause.
        KeyboardInterrupt, SystemExit: All workers have stopped after a signal to this process.
    """
    _check_installed()
    shared = folder / FOLDER
    shutil.rmtree(shared, ignore_errors=True)
    make_folder(folder.parent)
    shared.mkdir(parents=True)
    exchanged(folder, "stop").touch()
    # With this file, Ray would resume from the checkpoint of an earlier run in this folder.
    (folder / "checkpoint_manager_snapshot.json").unlink(missing_ok=True)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    config = {
        "train": train,
        "words": [*words, "trainer.devices=auto", "trainer.num_nodes=auto"],  # Ray sets both numbers
        "folder": str(folder),
        "cwd": str(Path.cwd()),
        "gpu": options.gpu,
    }
    try:
        # Set handlers twice, because Ray replaces them while it starts, and would lose a KeyboardInterrupt.
        with _forwarded(folder) as early, _started(options), _forwarded(folder) as later:
            error = None if early else _fit(options, config, folder, later)
        failure = _failure(error, folder, options.max_failures)
        stopped = next((128 + number for number in (*early, *later)), 0)
        code = int(exchanged(folder, "code").read_text()) if exchanged(folder, "code").is_file() else stopped
    finally:
        shutil.rmtree(shared, ignore_errors=True)
        (folder / ".validate_storage_marker").unlink(missing_ok=True)
        with suppress(OSError):
            folder.rmdir()  # the folder is empty if no worker was started
    if failure is not None:
        raise failure
    if code in STOPPED:
        raise KeyboardInterrupt if code == EXIT_INTERRUPTED else SystemExit(code)
    return read_ledger(folder)


def _check_installed() -> None:
    try:
        importlib.import_module("ray.train.torch")
    except ImportError as error:
        text = f"launch=ray needs the package ray[train], which cannot be imported ({error})"
        raise EnvironmentLacksError(f"{text}\n  try: pip install 'lightning-eff[ray]'") from error


@contextmanager
def _started(options: Ray) -> Generator[None]:
    """Start Ray, or connect to a running cluster; when the context ends, end Ray or disconnect."""
    ray: Any = importlib.import_module("ray")
    try:
        _init(options.cluster)
        _check_room(options, ray.cluster_resources())
        yield
    finally:
        ray.shutdown()


def _init(cluster: str) -> None:
    """Call `ray.init` in the main thread, because a process ends with the thread that started it."""
    ray: Any = importlib.import_module("ray")
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    own = own | {"num_cpus": num_cores()} if cluster == "local" else {}
    try:
        ray.init(cluster, log_to_driver=False, logging_level="ERROR", configure_logging=True, **own)
    except ConnectionError as error:
        text = f"launch.address={cluster}: no Ray answers there ({root_cause_line(error)})"
        text += "\n  try: ray start --head\n  try: launch.address=null"
        raise EnvironmentLacksError(text) from error
    except SystemExit as error:  # Ray's handler of SIGTERM uses the signal's number as exit code
        raise SystemExit(EXIT_TERMINATED if error.code == signal.SIGTERM else error.code) from error


def _check_room(options: Ray, resources: Mapping[str, float]) -> None:
    """Reject a run that needs more CPUs or GPUs than this machine has; on a cluster, only print a message."""
    # A cluster may grow, and Ray then starts the workers that wait.
    needs = [("CPU", options.cpus, "launch.cpus=1"), ("GPU", int(options.gpu), "launch.gpu=false")]
    for name, per_worker, remedy in needs:
        needed, found = options.bounds[0] * per_worker, int(resources.get(name, 0))
        if needed <= found:
            continue
        text = f"launch.workers={options.workers} needs {needed} {name}s, and Ray has {found}"
        if options.cluster == "local":
            fits = f"launch.workers={found // per_worker}" if found >= per_worker else remedy
            text += f"\n  try: {fits}\n  try: launch.address=auto  # a running cluster"
            raise EnvironmentLacksError(text)
        sys.stderr.write(f"{text}: waits for more\n")


@contextmanager
def _forwarded(folder: Path) -> Generator[list[int]]:
    """Forward the signals that stop a run to the workers, and yield the list of received signals.

    A second signal ends this process at once.
    """
    received: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) > 1:
            if number == signal.SIGINT:
                signal.default_int_handler(number, frame)
            raise SystemExit(128 + number)
        exchanged(folder, "stop").write_text(str(number))

    with handled(["SIGHUP", "SIGINT", "SIGUSR1", "SIGTERM"], forward):
        yield received


def _fit(options: Ray, config: dict[str, Any], folder: Path, received: Sequence[int]) -> BaseException | None:
    """Run the workers, print their output meanwhile, and return Ray's error, if any.

    While Ray waits for resources, there is no worker to read a signal, so a signal ends the wait.
    """
    train: Any = importlib.import_module("ray.train")
    least, most = options.bounds
    trainer = importlib.import_module("ray.train.torch").TorchTrainer(
        work,
        train_loop_config=config,
        scaling_config=train.ScalingConfig(
            num_workers=most if least == most else (least, most),
            use_gpu=options.gpu,
            resources_per_worker={"CPU": options.cpus} | ({"GPU": 1} if options.gpu else {}),
        ),
        run_config=train.RunConfig(
            name=folder.name,  # Ray uses the run's folder, so checkpoints are not copied
            storage_path=str(folder.parent),
            failure_config=train.FailureConfig(max_failures=options.max_failures),
        ),
    )
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            trainer.fit()
        except BaseException as error:  # noqa: BLE001 - passed on to the waiting thread
            errors.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    printed: dict[Path, int] = {}
    streams = {"stdout": sys.stdout, "stderr": sys.stderr}
    with redirect_stdout(sys.stderr):  # Ray prints to stdout, where the caller may print JSON
        while thread.is_alive() and not (received and not _num_ranks(folder)):
            thread.join(POLL_S)
            _print_new(folder, printed, streams)
        _print_new(folder, printed, streams)
    return errors[0] if errors else None


def _print_new(folder: Path, printed: dict[Path, int], streams: Mapping[str, TextIO]) -> None:
    """Print the ranks' output since the last call; `printed` maps a file to its number of printed bytes."""
    for stream, target in streams.items():
        for file in sorted((folder / FOLDER).glob(f"rank*.{stream}")):
            with file.open("rb") as opened:
                opened.seek(printed.get(file, 0))
                text = opened.read()
            printed[file] = printed.get(file, 0) + len(text)
            target.write(text.decode(errors="replace"))
            target.flush()


def _failure(error: BaseException | None, folder: Path, max_failures: int) -> RankError | None:
    """Return an error that names a lost worker or the rank that failed first; None if no worker failed."""
    failures: dict[int, BaseException] = getattr(error, "worker_failures", {})
    # Names of all base classes, because a lost worker's error may be a subclass of an error in LOST.
    names = {rank: {kind.__name__ for kind in type(failure).__mro__} for rank, failure in failures.items()}
    lost = [rank for rank, kinds in names.items() if kinds & LOST]
    if lost:
        restarts = (
            f"the workers were restarted {max_failures} times" if max_failures else "none was restarted"
        )
        text = f"rank {min(lost)} was lost, perhaps because memory ran out or its machine is gone; {restarts}"
        return RankError(text)
    files = [exchanged(folder, f"rank{rank}.error") for rank in range(_num_ranks(folder))]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    codes = [each.get("exit_code", EXIT_FAILED) if each else 0 for each in found]
    failure = first_failure(codes, files, folder)
    if failure is None and error is not None:
        return RankError(root_cause_line(error))
    return failure


def _num_ranks(folder: Path) -> int:
    """Return the number of ranks that have an output file."""
    return len(list((folder / FOLDER).glob("rank*.stderr")))
