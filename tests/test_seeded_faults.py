"""Test the tests: each of these faults is put into the package, and the named test must fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import ROOT
from tests.support.seeded import occurs_once, run_with_fault

LOOP, TWO, CUT = (
    "tests/microbatching/test_lightning_loop.py",
    "tests/microbatching/test_ddp.py",
    "tests/callbacks/test_micro_batch.py",
)
WINDOW, RETRY, RUNNER, SNAPSHOT, LIGHTNING = (
    f"microbatching/{name}.py"
    for name in ("window", "oom_retry", "micro_batch_runner", "snapshot", "lightning_loop")
)
STEP = f"{LOOP}::test_a_step_equals_the_step_on_the_whole_window"
WHOLE = f"{CUT}::test_the_step_is_that_of_the_full_batch"
TRACE = f"{CUT}::test_running_out_in_any_step_leaves_no_trace"
WINDOWS = f"{CUT}::test_windows_of_cut_batches_are_exact_too"
TOGETHER = f"{TWO}::test_two_ranks_step_as_one_would_on_all_samples"
UNEVEN = "tests/microbatching/test_uneven_ranks.py::test_two_ranks_equal_one_process_with_all_batches"

# name: (file, correct code, faulty code, test that must fail)
FAULTS = {
    "no division": (WINDOW, "loss if divisor == 1.0 else loss / divisor", "loss", STEP),
    "mean of means": (
        WINDOW,
        "counted = num_samples / first if num_samples is not None and first else fraction",
        "counted = 1.0",
        WHOLE,
    ),
    "weights ignored": (WINDOW, "loss * (weight / self.reference) if", "loss / self._num_batches if", STEP),
    "a cut window divided by its nominal length": (
        WINDOW,
        "self._num_batches / self._num_counted if self._num_counted else 1.0",
        "1.0",
        STEP,
    ),
    "each rank has its own reference": (
        WINDOW,
        "self._sum_over_ranks(expected) / self._num_ranks",
        "expected",
        UNEVEN,
    ),
    "last micro-batch dropped": (RETRY, "enumerate(parts)\n", "enumerate(parts[:-1] or parts)\n", WHOLE),
    "gradients cleared in each micro-batch": (
        RUNNER,
        "if is_first and functions.zero_grad is not None",
        "if functions.zero_grad is not None",
        WHOLE,
    ),
    "clipped in each micro-batch": (
        RUNNER,
        "                functions.backward(result.closure_loss)\n",
        "                functions.backward(result.closure_loss)\n"
        "                import torch\n"
        "                torch.nn.utils.clip_grad_norm_(self._model.parameters(), 0.05)\n",
        WHOLE,
    ),
    "clipped before the correction": (
        LIGHTNING,
        "                self._window.correct()\n",
        "                pass\n",
        WINDOWS,
    ),
    "scheduler in each batch": (
        LIGHTNING,
        "return not self._is_complete or self._is_skipped",
        "return self._is_skipped",
        STEP,
    ),
    "a skipped step counts": (
        LIGHTNING,
        "                counts.ready -= 1\n                counts.completed -= 1\n",
        "                pass\n",
        LOOP,
    ),
    "synchronized in the wrong micro-batch": (
        RUNNER,
        "synchronize = is_last and functions.is_last",
        "synchronize = is_first and functions.is_last",
        TOGETHER,
    ),
    "gradients not averaged": (
        RETRY,
        "dist.all_reduce(flat.div_(num_ranks), group=model.process_group)",
        "flat.div_(num_ranks)",
        TOGETHER,
    ),
    "buffers not taken over": (
        RETRY,
        "            take_buffers(self.replica)\n",
        "            pass\n",
        f"{TWO}::test_batches_that_fit_train_as_under_plain_ddp",
    ),
    "the others keep their size": (
        RETRY,
        "self._size.current = int(smallest(self._size.current or self._size.largest, self.replica))",
        "pass",
        f"{TWO}::test_a_rank_that_runs_out_of_memory_leaves_no_trace",
    ),
    "random state not restored": (
        SNAPSHOT,
        "random_states.restore(self._random, self._device, self._generators)",
        "pass",
        TRACE,
    ),
    "batch norm twice": (SNAPSHOT, "tensor.copy_(values)", "pass", TRACE),
    "metrics twice": (
        SNAPSHOT,
        "tensor.data = values.clone()",
        "pass",
        "tests/microbatching/test_snapshot.py",
    ),
    "weights of a failed try counted": (RETRY, "self._window.restore(self._window_state)", "pass", TRACE),
    "gradients of a failed try kept": (
        LIGHTNING,
        "            self._optimizer_zero_grad(batch_idx, optimizer)\n",
        "            counted is not None or self._optimizer_zero_grad(batch_idx, optimizer)\n",
        TRACE,
    ),
    "update not undone": (
        SNAPSHOT,
        "tensor.copy_(value)",
        "pass",
        f"{CUT}::test_running_out_in_the_update_leaves_no_trace",
    ),
    "step logged as of the last micro-batch": (
        RUNNER,
        "metric._forward_cache = _reduced(",
        "_reduced(",
        "tests/microbatching/test_micro_batch_runner.py::test_logged_values_equal_those_of_the_full_batch",
    ),
    "find: a size that failed": (
        RETRY,
        "    return largest\n",
        "    return largest + 1\n",
        "tests/microbatching/test_oom_retry.py",
    ),
    "find: the state stays": (
        RETRY,
        "            optimizer_snapshot.restore()\n",
        "",
        f"{CUT}::test_find_gives_the_largest_and_leaves_no_trace",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_has_its_place_and_its_test(name: str) -> None:
    file, there, _, test = FAULTS[name]
    assert occurs_once(file, there)
    module, _, function = test.partition("::")
    assert f"def {function}(" in (ROOT / module).read_text() if function else (ROOT / module).exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str, tmp_path: Path) -> None:
    *fault, test = FAULTS[name]
    words = ("-m", "pytest", "-p", "no:cacheprovider", "-n", "0", "-x", "-q", test)
    done = run_with_fault(tmp_path, *fault, *words)
    assert done.returncode == 1, f"{name} is not found by {test}:\n{done.stdout[-1500:]}"
