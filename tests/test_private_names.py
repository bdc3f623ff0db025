"""Private upstream names that the package uses: if one changes, these tests name it."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy

from lightning_eff.core.errors import EnvironmentLacksError
from lightning_eff.core.torch_private import torch_private
from lightning_eff.report.meter import FETCH_METHODS
from tests.support.techniques import ROOT

LOOPS = "lightning.pytorch.loops"
EPOCH_LOOP = f"{LOOPS}.training_epoch_loop:_TrainingEpochLoop"
AUTOMATIC = f"{LOOPS}.optimization.automatic:_AutomaticOptimization"
DEEPSPEED = "lightning.pytorch.strategies:DeepSpeedStrategy"
FABRICS_DEEPSPEED = "lightning.fabric.strategies:DeepSpeedStrategy"
FABRICS_FSDP2 = "lightning.fabric.strategies:ModelParallelStrategy"
# module:attribute, and a text that its source must contain
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
    (f"{EPOCH_LOOP}.advance", 'self.update_lr_schedulers("step", update_plateau_schedulers=False)'),
    (AUTOMATIC, "_should_accumulate()"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric", "_forward_cache"),
    ("lightning.pytorch.trainer.connectors.logger_connector.result:_ResultMetric.update", "self.meta.sync("),
    (f"{EPOCH_LOOP}.advance", "batch, _, __ = next(data_fetcher)"),
    ("torch.nn.parallel:DistributedDataParallel", "require_forward_param_sync"),
    ("torch._utils:_take_tensors", "size_limit"),
    ("lightning.pytorch.strategies:DDPStrategy.setup", "_layer_sync"),
    ("torch.utils.data:dataloader", "random_(generator=loader.generator)"),
    ("torch.utils.data._utils.worker:get_worker_info", "return _worker_info"),
    ("torch.nn:Module._apply", "Couldn't swap"),  # why we replace it
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
# module:attribute, and the names of its first parameters
PARAMETERS = [
    (
        "hydra._internal.config_loader_impl:ConfigLoaderImpl.load_configuration",
        "self config_name overrides run_mode from_shell validate_sweep_overrides",
    ),
    (
        "hydra._internal.defaults_list:_create_defaults_list",
        "repo config_name overrides prepend_hydra skip_missing",
    ),
    ("lightning.pytorch.plugins.precision:Precision._after_closure", "self model optimizer"),
    (
        "torch.utils.checkpoint:_checkpoint_without_reentrant_generator",
        "fn preserve_rng_state context_fn determinism_check debug early_stop args kwargs",
    ),
    (f"{LOOPS}.utilities:_block_parallel_sync_behavior", "strategy block"),
    (
        f"{LOOPS}.optimization.automatic:ClosureResult.from_training_step_output",
        "training_step_output normalize",
    ),
    ("lightning.pytorch.trainer.call:_call_strategy_hook", "trainer hook_name"),
    ("torch.nn:Module._apply", "self fn recurse"),
    ("torch.cuda.memory:_record_memory_history", "enabled"),
    ("torch.cuda.memory:_dump_snapshot", "filename"),
]
# module:attribute, and the names that it must have: only names that we replace, or that may be missing. Any
# other missing name is named by the error where it is used.
NAMES = {
    "omegaconf:_utils": "get_yaml_loader",
    "hydra._internal.core_plugins.file_config_source:FileConfigSource": "load_config _get_header_dict",
    "hydra._internal.hydra:Hydra": "run multirun show_cfg show_info",
    AUTOMATIC: "_training_step _make_zero_grad_fn _optimizer_step _on_before_zero_grad _optimizer_zero_grad",
    "torch._C._dynamo:eval_frame": "_set_lru_cache",
    "torch:Tensor": "_post_accumulate_grad_hooks",
    "torch.ops:aten": "_amp_foreach_non_finite_check_and_unscale_",
    "torch._dynamo.callback:callback_handler": "start_callbacks end_callbacks",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter": "_shutdown_workers",
}
# Read as text, because importing DeepSpeed chooses an accelerator for the whole process.
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


def test_upstream_has_the_private_names_that_are_called_replaced_and_read() -> None:
    for place, text in SOURCES:
        assert text in inspect.getsource(found(place)), place
    for place, names in PARAMETERS:
        expected = names.split()
        assert list(inspect.signature(found(place)).parameters)[: len(expected)] == expected, place
    for place, names in NAMES.items():
        assert [name for name in names.split() if not hasattr(found(place), name)] == [], place
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    for file, texts in DEEPSPEED_FILES.items():
        source = (Path(spec.origin).parent / file).read_text()
        assert [text for text in texts if text not in source] == [], file


def test_upstream_objects_have_the_private_attributes_that_are_read() -> None:
    from lightning.pytorch.core.optimizer import _configure_optimizers
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection
    from torch._dynamo.callback import CallbackArgs
    from torch._dynamo.utils import counters
    from torch._functorch import config
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils.data import DataLoader
    from torchmetrics import MeanMetric

    assert pl.callbacks.ModelCheckpoint()._last_global_step_saved == 0
    source = inspect.getsource(_TrainingEpochLoop.on_run_start)
    assert all(f"profiler = self.{name}" in source for name in FETCH_METHODS)
    assert inspect.getsource(_TrainingEpochLoop).count("self._should_accumulate()") >= 4
    assert isinstance(pl.Trainer._results, property)
    assert pl.LightningModule().to(torch.bfloat16)._dtype == torch.bfloat16
    assert {"batch", "batch_size"} <= vars(_ResultCollection(training=True)).keys()
    assert set(MeanMetric()._defaults) == {"mean_value", "weight"}
    assert DDPStrategy(static_graph=True)._ddp_kwargs == {"static_graph": True}
    assert DDPStrategy(ddp_comm_hook=print)._ddp_comm_hook is print
    assert FSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})._activation_checkpointing_kwargs
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert _configure_optimizers({"optimizer": optimizer}) == ([optimizer], [], None)
    assert hasattr(iter(DataLoader([1])), "_sampler_iter")  # pyright: ignore[reportArgumentType]
    assert DataLoader([1])._iterator is None  # pyright: ignore[reportArgumentType]
    assert issubclass(torch.nn.SyncBatchNorm, _BatchNorm)
    assert {field.name for field in dataclasses.fields(CallbackArgs)} == {"callback_trigger", "compile_id"}
    assert isinstance(counters["stats"]["unique_graphs"], int)
    assert config.activation_memory_budget == 1.0
    assert not torch.utils._python_dispatch.TorchDispatchMode.is_infra_mode()
    module = torch.nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None


def test_fake_tensors_have_the_private_attributes_that_a_prediction_reads() -> None:
    from bitsandbytes import functional
    from bitsandbytes.backends import utils
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = torch.ones(2)
        assert isinstance(x, FakeTensor)
        assert x.fake_device == torch.device("cpu")
        assert torch.tensor(1.0).constant is not None
        assert _get_current_dispatch_mode() is mode
        with _pop_mode_temporarily():
            assert not isinstance(torch.ones(1), FakeTensor)
    assert isinstance(functional.name2qmap, dict)
    assert isinstance(utils._code_4bit_cache, dict)


FOUNDATIONS = ("torch.utils._pytree:", "torch.utils._python_dispatch:TorchDispatchMode", "torch._subclasses.")
"""Private names that many libraries use as if they were public."""


def test_no_module_imports_a_private_name_of_torch_when_it_is_imported() -> None:
    found: list[str] = []
    for file in sorted((ROOT / "lightning_eff").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
                places = [f"{node.module}:{alias.name}" for alias in node.names]
                private = [place for place in places if re.search(r"[.:]_", place)]
                found += [f"{file.name}: {place}" for place in private if not place.startswith(FOUNDATIONS)]
    assert found == [], "use core.torch_private"


TAKE_AWAY = """
import importlib, pkgutil, re, sys
from pathlib import Path
import lightning.pytorch, peft, torchao, transformers
import lightning_eff

texts = "".join(path.read_text() for path in Path(lightning_eff.__path__[0]).rglob("*.py"))
places = set(re.findall(r"torch_private\\(\\s*\\"(torch[\\w.]*):(\\w+)\\"", texts))
assert len(places) > 15, places
for module, name in places:
    delattr(importlib.import_module(module), name)
for module in pkgutil.walk_packages(lightning_eff.__path__, "lightning_eff."):
    importlib.import_module(module.name)
print(len(places))
"""


@pytest.mark.slow
def test_the_package_can_be_imported_without_torchs_private_names() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", TAKE_AWAY], check=True, cwd=ROOT)
    with pytest.raises(EnvironmentLacksError, match=r"no torch.nn.gone, without which LoRA cannot work"):
        torch_private("torch.nn:gone", "LoRA")
