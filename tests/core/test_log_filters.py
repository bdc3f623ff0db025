"""What libraries log while they are imported is left out, and nothing else that they log."""

from __future__ import annotations

import logging
import warnings

import pytest

from lightning_eff.core.log_filters import IGNORED_MESSAGES, ignore_library_messages

SAID = {
    "torchao": "Failed to load /site-packages/torchao/_C_mxfp8.so: Could not load this library",
    "torch.utils._pytree": "<enum 'KernelPreference'> is an Enum subclass and is now natively supported by",
    "lightning.pytorch.trainer.connectors.signal_connector": "SLURM auto-requeueing enabled. Setting signal",
    "lightning.pytorch.utilities.rank_zero": "\U0001f4a1 Tip: For seamless cloud uploads and versioning, try",
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward from kernels-community: No module",
}


@pytest.mark.parametrize("name", list(IGNORED_MESSAGES))
def test_a_librarys_noise_is_left_out_and_the_rest_is_heard(
    name: str, caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder
) -> None:
    ignore_library_messages()
    logger = logging.getLogger(name)
    logger.warning("%s", SAID[name])
    logger.warning("a kernel is missing")
    logging.getLogger(f"{name}.other").warning(SAID[name])
    assert caplog.messages == ["a kernel is missing", SAID[name]]
    warnings.warn("`isinstance(treespec, LeafSpec)` is deprecated, use ...", FutureWarning, stacklevel=1)
    assert not recwarn.list
