"""Upstream code without a promise that the suite leans on, where a change would be silent.

A private name that is merely gone is an AttributeError in the tests of what uses it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from pathlib import Path
from typing import Any

LOOPS = "lightning.pytorch.loops"
EPOCH_LOOP = f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop"
AUTOMATIC = f"{LOOPS}.optimization.automatic:_AutomaticOptimization"
DEEPSPEED = "lightning.pytorch.strategies:DeepSpeedStrategy"
FABRICS_DEEPSPEED = "lightning.fabric.strategies:DeepSpeedStrategy"
FABRICS_FSDP2 = "lightning.fabric.strategies:ModelParallelStrategy"
# module:attribute, and what its source has
SOURCES = [
    ("hydra._internal.core_plugins.basic_sweeper:BasicSweeper.split_arguments", "itertools.product"),
    ("lightning.pytorch.plugins.precision:Precision._after_closure", "on_before_optimizer_step"),
    (
        "lightning.pytorch.trainer.connectors.signal_connector:_SignalConnector.register_signal_handlers",
        "[self._sigterm_notifier_fn]",
    ),
    (f"{EPOCH_LOOP}.advance", "self._broadcast_sigterm_tensor()"),
    (f"{EPOCH_LOOP}._on_before_fetch", ".train_dataloader_next"),
    (EPOCH_LOOP, "_num_ready_batches_reached"),
    (AUTOMATIC, "_should_accumulate()"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric", "_forward_cache"),
    ("torch.nn.parallel:DistributedDataParallel", "require_forward_param_sync"),
    ("lightning.pytorch.strategies:DDPStrategy.setup", "_layer_sync"),
    ("torch.utils.data:dataloader", "random_(generator=loader.generator)"),
    ("torch.nn:Module._apply", "Couldn't swap"),  # the reason for ours
    (DEEPSPEED, "_setup_model_and_optimizer"),
    (DEEPSPEED, "_init_optimizers"),
    (DEEPSPEED, "_init_deepspeed_distributed"),
    (DEEPSPEED, "self._format_batch_size_and_grad_accum_config()"),
    ("lightning.pytorch.strategies:ModelParallelStrategy.setup_environment", "self._data_parallel_size"),
    (
        "lightning.pytorch.trainer.connectors.data_connector:_DataConnector._requires_distributed_sampler",
        "self.trainer._accelerator_connector.use_distributed_sampler",
    ),
    (f"{FABRICS_FSDP2}.setup_environment", "self._data_parallel_size"),
    (f"{FABRICS_FSDP2}.setup_module", "self._parallelize_fn(module, self.device_mesh)"),
    (f"{FABRICS_DEEPSPEED}._setup_distributed", "self._format_config()"),
    (f"{FABRICS_DEEPSPEED}._setup_distributed", "self._config_initialized = True"),
    (f"{FABRICS_DEEPSPEED}._setup_distributed", "self._set_world_ranks()"),
    (f"{FABRICS_DEEPSPEED}._init_deepspeed_distributed", "deepspeed.init_distributed"),
    (f"{FABRICS_DEEPSPEED}.setup_module_and_optimizers", "self._deepspeed_engine, optimizer, scheduler ="),
    ("lightning.fabric:Fabric.no_backward_sync", "self._strategy._backward_sync_control.no_backward_sync("),
    ("lightning.fabric.strategies.strategy:Strategy.checkpoint_io.fget", "self._checkpoint_io"),
    ("lightning.fabric.strategies.strategy:Strategy.precision.fget", "self._precision"),
]
# Read from its files: importing DeepSpeed settles on an accelerator for the whole process.
DEEPSPEED_FILES = {
    "runtime/zero/stage_1_and_2.py": (
        "self.bit16_groups =", "self.single_partition_of_fp32_groups =", "external_loss_scale",
        "self.all_grad_tensors = {}", "INITIAL_MICRO_STEP_ID = -1", "self.clip_grad =", "_global_grad_norm =",
    ),
    "runtime/zero/stage3.py": (
        "self.fp32_partitioned_groups_flat",
        "self.grad_position[param_id] = [int(i), int(current_offset)",
        "def get_param_id",
        "self.clip_grad =",
        "self._global_grad_norm =",
    ),
    "runtime/zero/parameter_offload.py": (
        "class PreBackwardFunctionForModule(", "class PostBackwardFunctionModule(",
    ),
    "utils/z3_leaf_module.py": ("_z3_leaf",),
    "utils/tensor_fragment.py": ("lp_fragment_address", "hp_fragment_address"),
    "ops/__init__.py": ("__compatible_ops__",),
    "comm/torch.py": ("deepspeed.ops.__compatible_ops__.get(builder.NAME, False)",),
}  # fmt: skip


def found(place: str) -> Any:
    module, _, path = place.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split("."):
        value = getattr(value, name)
    return value


def test_upstream_has_what_is_called_replaced_and_read() -> None:
    for place, text in SOURCES:
        assert text in inspect.getsource(found(place)), place
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    for file, texts in DEEPSPEED_FILES.items():
        source = (Path(spec.origin).parent / file).read_text()
        assert [text for text in texts if text not in source] == [], file
