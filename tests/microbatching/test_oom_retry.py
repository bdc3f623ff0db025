"""Messages of out-of-memory errors, and the search for the largest micro-batch size."""

from __future__ import annotations

import pytest

from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.microbatching.oom_retry import find_size

MESSAGES = [
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB",
    "MPS backend out of memory (MPS allocated: 17.97 GB, other allocations: 2.00 MB)",
    "CUDA error: out of memory",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Native API failed. Native API returns: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to",
    "DefaultCPUAllocator: not enough memory: you tried to allocate 8000000000 bytes.",
]


@pytest.mark.parametrize("message", MESSAGES)
def test_out_of_memory_errors_of_every_backend_are_recognized(message: str) -> None:
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message))


def test_other_errors_are_not_recognized_as_out_of_memory() -> None:
    for text in ("CUDA error: device-side assert triggered", "CUDNN_STATUS_NOT_INITIALIZED"):
        assert not is_out_of_memory(RuntimeError(text))
    triton = type("OutOfResources", (Exception,), {})
    assert not is_out_of_memory(triton("out of resource: shared memory, Required: 245760"))


def test_the_search_is_exact_for_every_hidden_limit() -> None:
    """All limits from 1 to 257, for batches of 257, 64, 5 and 1."""
    for most in (257, 64, 5, 1):
        for limit in range(1, 258):
            tried: list[int] = []
            found = find_size(
                lambda size, limit=limit, tried=tried: tried.append(size) or size <= limit,
                max_size=most,
            )
            assert found == min(limit, most)
            assert found in tried
            assert len(tried) <= 10
            assert max(tried) <= most
