"""What must be right before DeepSpeed starts: values, the machine, the run; told before anything is built."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager, redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.precision import DeepSpeedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.optim import Optimizer

from lightning_eff.core.dtypes import auto_precision
from lightning_eff.core.errors import ConfigError, ConflictError, EnvironmentLacksError
from lightning_eff.strategy._shared import checks

NAME = "strategy/deepspeed_zero"
STAGES = (1, 2, 3)
DEVICES = (None, "cpu", "nvme")


def check_values(stage: int, optimizer: str | None, parameters: str | None, nvme_path: str | None) -> None:
    """Refuse stages and places that there are not, or that do not go together."""
    if stage not in STAGES:
        text = "1 (optimizer state), 2 (and gradients) or 3 (and weights)"
        raise ConfigError(key="stage", value=stage, allowed=text)
    for key, device in (("offload_optimizer", optimizer), ("offload_parameters", parameters)):
        if device not in DEVICES:
            raise ConfigError(key=key, value=device, allowed="cpu, nvme or None")
    if parameters is not None and stage != STAGES[-1]:
        text = f"None under stage {stage}, where each device keeps all weights"
        raise ConfigError(
            key="offload_parameters", value=parameters, allowed=text, remedies=["strategy.stage=3"]
        )
    wants_disk = "nvme" in (optimizer, parameters)
    if wants_disk and stage != STAGES[-1]:
        text = "cpu or None: only stage 3 reads from a disk"
        raise ConfigError(
            key="offload_optimizer", value=optimizer, allowed=text, remedies=["strategy.stage=3"]
        )
    if wants_disk is (nvme_path is None):
        text = "a folder on a local disk for nvme, and None without"
        remedy = "strategy.nvme_path=/local_nvme" if wants_disk else "~strategy.nvme_path"
        raise ConfigError(key="nvme_path", value=nvme_path, allowed=text, remedies=[remedy])
    if nvme_path is not None and not os.access(nvme_path, os.W_OK | os.X_OK):
        text = "a folder on a local disk that is there and can be written to"
        remedies = [f"mkdir -p {nvme_path}", "strategy.nvme_path=/tmp"]
        raise ConfigError(key="nvme_path", value=nvme_path, allowed=text, remedies=remedies)


def import_deepspeed() -> None:
    """Import it, or say how to get it.

    It logs to the standard output, which belongs to whoever reads `--json`, and warns of a machine without a
    GPU unless that was asked for.
    """
    alone = not torch.cuda.is_available() and "DS_ACCELERATOR" not in os.environ
    asked = {"DS_ACCELERATOR": "cpu"} if alone else {}
    try:
        os.environ.update(asked)
        with redirect_stdout(sys.stderr):
            import deepspeed  # noqa: F401  # pyright: ignore[reportUnusedImport]
    except ImportError as error:
        text = (
            f"{NAME} needs deepspeed, which cannot be imported: {error}\n  try: pip install 'deepspeed>=0.19'"
        )
        raise EnvironmentLacksError(text) from error
    finally:
        for name in asked:
            del os.environ[name]


def check_accelerator(device: str) -> None:
    """Refuse a DeepSpeed that has settled on another kind of device than the Trainer."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    settled = accelerator.device_name()
    if settled != device:
        text = (
            f"{NAME}: the Trainer runs on {device}, and DeepSpeed has settled on {settled} when it was "
            f"imported\n  try: DS_ACCELERATOR={device} in the environment"
        )
        raise EnvironmentLacksError(text)


def leave_out_shared_memory() -> None:
    """Keep DeepSpeed from building its own shared-memory transport, for which it would need a compiler.

    It also waits for ever for the lock of a build that was killed. gloo does the same work.
    """
    import deepspeed.ops

    names: dict[str, Any] = deepspeed.ops.__dict__
    known = names.setdefault("__compatible_ops__", {})
    known["deepspeed_shm_comm"] = False


@contextmanager
def no_group_empty(module: nn.Module, optimizer: Optimizer | None) -> Generator[None]:
    """Give groups in which nothing is trained a number to train, for stages 1 and 2 cannot divide nothing.

    Adapters leave such groups behind: of norms and biases, say. DeepSpeed names a group's parameters by the
    module's names when it starts; afterwards the module is without the number again.
    """
    groups: list[dict[str, Any]] = optimizer.param_groups if optimizer is not None else []
    empty = [group for group in groups if not any(p.requires_grad for p in group["params"])]
    for index, group in enumerate(empty):
        filler = nn.Parameter(torch.zeros(1))
        group["params"] = [*group["params"], filler]
        module.register_parameter(f"filler_{index}", filler)
    try:
        yield
    finally:
        for index in range(len(empty)):
            delattr(module, f"filler_{index}")


def precision_like(plugin: Precision, device_type: str) -> DeepSpeedPrecision:
    """Return DeepSpeed's precision for another plugin's.

    Raises:
        ConfigError: DeepSpeed has none like it.
    """
    asked: Any = plugin.precision
    settled: Any = auto_precision(device_type)[0] if asked == "auto" else asked
    try:
        return DeepSpeedPrecision(settled)
    except ValueError as error:
        text = "bf16-mixed, bf16-true, 16-mixed, 16-true or 32-true under DeepSpeed"
        remedies = ["precision=fp32", "strategy=ddp"]
        raise ConfigError(key="precision", value=asked, allowed=text, remedies=remedies) from error


def check_run(trainer: pl.Trainer) -> None:
    """Refuse what Lightning warns of, or DeepSpeed passes over."""
    module = trainer.lightning_module
    checks.check_sizes(NAME, module)
    checks.check_formats(module)
    if trainer.state.fn == TrainerFn.FITTING:
        checks.check_trained(module)
    strategy: Any = trainer.strategy
    if strategy.zero_stage_3:
        checks.check_wrapped(module)
    algorithm = trainer.gradient_clip_algorithm
    if algorithm is not None and str(algorithm.value) == "value" and trainer.gradient_clip_val:
        text = "norm: under ZeRO no rank sees every value of a gradient"
        remedies = ["trainer.gradient_clip_algorithm=norm", "strategy=fsdp2"]
        raise ConfigError(
            key="trainer.gradient_clip_algorithm", value="value", allowed=text, remedies=remedies
        )
    if is_overridden("configure_gradient_clipping", module):
        text = f"{NAME}: {type(module).__name__}.configure_gradient_clipping would not be called"
        text += "\n  try: trainer.gradient_clip_val=1.0 and no method of that name"
        raise ConflictError(text)
    _refuse_batch_norm(trainer)
    if is_overridden("backward", module):
        text = f"{NAME}: {type(module).__name__}.backward would not be called, since DeepSpeed's is"
        text += "\n  try: strategy=auto"
        raise ConflictError(text)


def _refuse_batch_norm(trainer: pl.Trainer) -> None:
    """Refuse statistics in float32 beside weights in 16 bits, which PyTorch's batch norm does not compute."""
    strategy: Any = trainer.strategy
    settled = "buffer_dtype" in strategy.config.get("data_types", {})
    low = strategy.precision_plugin.precision != "32-true"
    modules = trainer.lightning_module.named_modules()
    found = next((name for name, module in modules if isinstance(module, _BatchNorm)), "")
    if low and found and not settled:
        text = (
            f"{NAME}: under {strategy.precision_plugin.precision} DeepSpeed casts the weights of {found} and "
            "leaves its running statistics in float32, which batch norms cannot compute\n"
            "  try: precision=fp32\n  try: strategy=fsdp2\n"
            "  try: strategy.config.data_types.buffer_dtype=bf16"
        )
        raise ConflictError(text)
