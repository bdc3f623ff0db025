"""Sizes of micro-batches: halving, searching, and what is kept of a failed attempt."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching.micro_batch_size import MicroBatchSize, halved
from lightning_eff.microbatching.oom_retry import OomRetry
from lightning_eff.microbatching.size_search import find_size
from lightning_eff.microbatching.snapshot import StepSnapshot
from lightning_eff.microbatching.splitting import MicroBatchPart
from lightning_eff.microbatching.window import Window

CPU = torch.device("cpu")
MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "HIP out of memory. Tried to allocate 512.00 MiB",
    "XPU out of memory. Tried to allocate 1.00 GiB",
    "MPS backend out of memory (MPS allocated: 17.97 GB, other allocations: 2.00 MB)",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "HIPBLAS_STATUS_ALLOC_FAILED when calling hipblasCreate(handle)",
    "cudaErrorMemoryAllocation: out of memory",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "RESOURCE_EXHAUSTED: Attempting to allocate 2.00G",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8000000000 bytes.",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_every_back_ends_message_is_known(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message)), "a message alone, of another kind, is none"


def test_it_is_known_by_type_and_as_a_cause_and_nothing_else_is() -> None:
    error = RuntimeError("wrapped")
    error.__cause__ = torch.OutOfMemoryError("anything")
    assert all(map(is_out_of_memory, (error, torch.OutOfMemoryError("x"), MemoryError())))
    others = (
        "CUDA error: device-side assert triggered",
        "CUDNN_STATUS_NOT_INITIALIZED",
        "expected 3 channels",
    )
    assert not any(is_out_of_memory(RuntimeError(text)) for text in others)
    triton = type("OutOfResources", (Exception,), {})
    assert not is_out_of_memory(triton("out of resource: shared memory, Required: 245760"))


@pytest.mark.parametrize("multiple_of", [1, 8])
def test_find_is_exact_for_every_hidden_limit(multiple_of: int) -> None:
    """All limits from 1 to 257, of batches of 257, 64, 5 and 1."""
    for most in (257, 64, 5, 1):
        allowed = {*range(multiple_of, most + 1, multiple_of), most, 1, 2, 4}
        for limit in range(1, 258):
            tried: list[int] = []
            found = find_size(
                lambda size, limit=limit, tried=tried: tried.append(size) or size <= limit,
                max_size=most,
                multiple_of=multiple_of,
            )
            assert found == max(size for size in allowed if size <= min(limit, most))
            assert found in tried
            assert len(tried) <= 10
            assert max(tried) <= most


def test_halving_ends_at_one_and_keeps_multiples() -> None:
    for start in range(1, 300):
        for multiple_of in (1, 4, 8):
            size, steps = start, 0
            while size > 1:
                smaller = halved(size, multiple_of)
                assert 1 <= smaller < size
                assert smaller % multiple_of == 0 or smaller < multiple_of
                size, steps = smaller, steps + 1
            assert steps <= 9


def test_nothing_of_a_failed_attempt_is_alive_when_the_next_one_begins() -> None:
    """A batch that is smaller than the size is halved from its own."""

    class Activation:
        alive = 0

        def __init__(self) -> None:
            Activation.alive += 1

        def __del__(self) -> None:
            Activation.alive -= 1

    seen = []

    def run_part(part: MicroBatchPart, *_: Any, **__: Any) -> None:
        seen.append(Activation.alive)
        kept = Activation()  # held by this frame, and so by the exception
        cycle = [kept]
        cycle.append(cycle)  # pyright: ignore[reportArgumentType]
        if part.num_samples is None or part.num_samples > 2:
            raise MemoryError

    size, model = MicroBatchSize(64, is_auto=True), torch.nn.Linear(1, 1)
    retry = OomRetry(size, Window(model.parameters), StepSnapshot(model, CPU), model, CPU)
    assert [part.num_samples for part, _ in retry.run(torch.ones(16), run_part)] == [2] * 8
    assert seen[:4] == [0, 0, 0, 0]
    assert [(halving.before, halving.after) for halving in size.halvings] == [(16, 8), (8, 4), (4, 2)]
