"""Faults that are put in on purpose, each of which a named test must find: a test of the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOOP, TWO, CUT = (
    "tests/microbatching/test_lightning_loop.py",
    "tests/microbatching/test_ddp.py",
    "tests/callbacks/test_micro_batch.py",
)
STEP = f"{LOOP}::test_a_step_is_that_of_the_window_as_one_batch"
WHOLE = f"{CUT}::test_the_step_is_that_of_the_full_batch"
TRACE = f"{CUT}::test_running_out_in_a_later_step_leaves_no_trace"
WINDOWS = f"{CUT}::test_windows_of_cut_batches_are_exact_too"
TOGETHER = f"{TWO}::test_two_ranks_step_as_one_would_on_all_samples"

# name: (file, what stands there, what is put there, the test that finds it)
FAULTS = {
    "no division": ("microbatching/window.py", "loss if divisor == 1.0 else loss / divisor", "loss", STEP),
    "mean of means": (
        "microbatching/window.py",
        "counted = num_samples / first if num_samples is not None and first else fraction",
        "counted = 1.0",
        WHOLE,
    ),
    "weights ignored": (
        "microbatching/window.py",
        "loss * (weight / self.reference) if",
        "loss / self._num_batches if",
        STEP,
    ),
    "a cut window divided by its nominal length": (
        "microbatching/window.py",
        "self._num_batches / self._num_counted if self._num_counted else 1.0",
        "1.0",
        STEP,
    ),
    "a reference of each rank's own": (
        "microbatching/window.py",
        "self._sum_over_ranks(expected) / self._num_ranks",
        "expected",
        TOGETHER,
    ),
    "last micro-batch dropped": (
        "microbatching/oom_retry.py",
        "enumerate(parts)\n",
        "enumerate(parts[:-1] or parts)\n",
        WHOLE,
    ),
    "gradients cleared in each micro-batch": (
        "microbatching/micro_batch_runner.py",
        "if is_first and functions.zero_grad is not None",
        "if functions.zero_grad is not None",
        WHOLE,
    ),
    "clipped in each micro-batch": (
        "microbatching/micro_batch_runner.py",
        "                functions.backward(result.closure_loss)\n",
        "                functions.backward(result.closure_loss)\n"
        "                import torch\n"
        "                torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.05)\n",
        WHOLE,
    ),
    "clipped before the correction": (
        "microbatching/lightning_loop.py",
        "            self._window.correct()\n            return loss\n",
        "            return loss\n",
        WINDOWS,
    ),
    "scheduler in each batch": (
        "microbatching/lightning_loop.py",
        "return not self._is_complete or self._is_skipped",
        "return self._is_skipped",
        STEP,
    ),
    "a skipped step counts": (
        "microbatching/lightning_loop.py",
        "                counts.ready -= 1\n                counts.completed -= 1\n",
        "                pass\n",
        LOOP,
    ),
    "synchronized in the wrong micro-batch": (
        "microbatching/micro_batch_runner.py",
        "synchronize = is_last and functions.is_last",
        "synchronize = is_first and functions.is_last",
        TOGETHER,
    ),
    "gradients not averaged": (
        "microbatching/ddp.py",
        "dist.all_reduce(flat.div_(num_ranks), group=model.process_group)",
        "flat.div_(num_ranks)",
        TOGETHER,
    ),
    "buffers not taken over": (
        "microbatching/oom_retry.py",
        "            ddp.take_buffers(self.replica)\n",
        "            pass\n",
        f"{TWO}::test_batches_that_fit_train_as_under_plain_ddp",
    ),
    "the others keep their size": (
        "microbatching/oom_retry.py",
        "self._size.current = int(smallest)",
        "pass",
        f"{TWO}::test_a_rank_that_runs_out_of_memory_leaves_no_trace",
    ),
    "random state not brought back": (
        "microbatching/snapshot.py",
        "partial(torch.set_rng_state, torch.get_rng_state())",
        "int",
        TRACE,
    ),
    "batch norm twice": ("microbatching/snapshot.py", "buffer.tensor.copy_(buffer.values)", "pass", TRACE),
    "metrics twice": (
        "microbatching/snapshot.py",
        "tensor.data = values.clone()",
        "pass",
        "tests/microbatching/test_snapshot.py",
    ),
    "weights of a failed try counted": (
        "microbatching/oom_retry.py",
        "self._window.restore(self._window_state)",
        "pass",
        TRACE,
    ),
    "gradients of a failed try kept": (
        "microbatching/micro_batch_runner.py",
        "functions.zero_grad()\n",
        "self._is_zeroed or functions.zero_grad()\n",
        TRACE,
    ),
    "update not undone": (
        "microbatching/snapshot.py",
        "tensor.copy_(value)",
        "pass",
        f"{CUT}::test_running_out_in_the_update_leaves_no_trace",
    ),
    "step logged as of the last micro-batch": (
        "microbatching/merging.py",
        "metric._forward_cache = _reduced(",
        "_reduced(",
        "tests/microbatching/test_merging.py::test_what_is_logged_is_that_of_the_full_batch",
    ),
    "find: a size that failed": (
        "microbatching/size_search.py",
        "    return sizes[low]\n",
        "    return sizes[high]\n",
        "tests/microbatching/test_micro_batch_size.py",
    ),
    "find: the state stays": (
        "microbatching/size_search.py",
        "            optimizer_snapshot.restore()\n",
        "",
        f"{CUT}::test_find_gives_the_largest_and_leaves_no_trace",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_place_and_its_test(name: str) -> None:
    file, there, _, test = FAULTS[name]
    assert (ROOT / "lightning_eff" / file).read_text().count(there) == 1
    module, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / module).read_text() if function else (ROOT / module).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    file, there, instead, test = FAULTS[name]
    for folder in ("lightning_eff", "tests", "conf", "recipes"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    path = tmp_path / "lightning_eff" / file
    path.write_text(path.read_text().replace(there, instead))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-x", "-q", test]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1, f"{name} is not found by {test}:\n{done.stdout[-1500:]}"
    assert "AssertionError" in done.stdout or "Error" in done.stdout
