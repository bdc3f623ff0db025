"""Upstream names without a promise that the suite leans on: when one changes, this says which."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
)
from torch.utils import checkpoint

from lightning_eff.report.meter import FETCH_ACTION


def test_precision_calls_hooks_and_clips_in_after_closure() -> None:
    assert list(inspect.signature(Precision._after_closure).parameters) == ["self", "model", "optimizer"]
    assert "on_before_optimizer_step" in inspect.getsource(Precision._after_closure)


def test_lightning_asks_for_signals_before_each_batch_and_by_these_names() -> None:
    connector = pl.Trainer(logger=False, accelerator="cpu")._signal_connector
    assert "[self._sigterm_notifier_fn]" in inspect.getsource(type(connector).register_signal_handlers)
    assert "self._broadcast_sigterm_tensor()" in inspect.getsource(_TrainingEpochLoop.advance)


def test_model_checkpoint_remembers_the_step_it_saved() -> None:
    assert pl.callbacks.ModelCheckpoint()._last_global_step_saved == 0


def test_the_loop_tells_the_profiler_when_it_waits_for_a_batch() -> None:
    source = inspect.getsource(_TrainingEpochLoop._on_before_fetch)
    assert f"[{_TrainingEpochLoop.__name__}].train_dataloader_next" == FETCH_ACTION
    assert ".train_dataloader_next" in source


def test_cpu_attention_and_dispatch_modes_exist() -> None:
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    assert torch.utils._python_dispatch.TorchDispatchMode
    assert not torch.utils._python_dispatch.TorchDispatchMode.is_infra_mode()
    module = torch.nn.Linear(1, 1)
    assert module._compiled_call_impl is None
    module.compile(backend="eager")
    assert module._compiled_call_impl is not None
    assert torch.utils._pytree.tree_leaves({"a": [1]}) == [1]


def test_the_checkpoint_generator_takes_its_options_by_position() -> None:
    parameters = list(inspect.signature(checkpoint._checkpoint_without_reentrant_generator).parameters)
    assert parameters == [
        *(
            "fn",
            "preserve_rng_state",
            "context_fn",
            "determinism_check",
            "debug",
            "early_stop",
            "args",
            "kwargs",
        )
    ]


def test_the_compiler_has_its_counters_callbacks_and_limits() -> None:
    from torch._dynamo import config
    from torch._dynamo.callback import CallbackArgs, CallbackTrigger, callback_handler
    from torch._dynamo.utils import counters

    assert {field.name for field in dataclasses.fields(CallbackArgs)} == {"callback_trigger", "compile_id"}
    assert CallbackTrigger.DYNAMO.name == "DYNAMO"
    assert callback_handler.start_callbacks == []
    assert isinstance(counters["stats"]["unique_graphs"], int)
    names = ("recompile_limit", "accumulated_recompile_limit", "fail_on_recompile_limit_hit")
    assert all(hasattr(config, name) for name in names)


def test_the_partitioner_has_a_memory_budget() -> None:
    from torch._functorch import config

    assert config.activation_memory_budget == 1.0


def test_strategies_keep_their_arguments() -> None:
    assert DDPStrategy(static_graph=True)._ddp_kwargs == {"static_graph": True}
    assert FSDPStrategy(activation_checkpointing_policy={torch.nn.Linear})._activation_checkpointing_kwargs


def test_loaders_and_optimizers_keep_what_is_looked_at() -> None:
    from lightning.pytorch.core.optimizer import _configure_optimizers
    from torch.nn.modules.batchnorm import _BatchNorm
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

    assert issubclass(torch.nn.SyncBatchNorm, _BatchNorm)
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert _configure_optimizers({"optimizer": optimizer}) == ([optimizer], [], None)
    assert DataLoader([1])._iterator is None  # pyright: ignore[reportArgumentType]
    assert callable(_MultiProcessingDataLoaderIter._shutdown_workers)
    assert "random_(generator=loader.generator)" in inspect.getsource(
        inspect.getmodule(_MultiProcessingDataLoaderIter)  # pyright: ignore[reportArgumentType]
    )


def test_what_a_second_try_brings_back_has_its_names() -> None:
    from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
    from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultCollection, _ResultMetric
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils._python_dispatch import _disable_current_modes
    from torchmetrics import MeanMetric

    assert list(inspect.signature(_block_parallel_sync_behavior).parameters) == ["strategy", "block"]
    assert "_forward_cache" in inspect.getsource(_ResultMetric)
    assert {"batch", "batch_size"} <= vars(_ResultCollection(training=True)).keys()
    assert "require_forward_param_sync" in inspect.getsource(DistributedDataParallel)
    assert set(MeanMetric()._defaults) == {"mean_value", "weight"}
    assert DDPStrategy(ddp_comm_hook=print)._ddp_comm_hook is print
    assert "_layer_sync" in inspect.getsource(DDPStrategy.setup)
    with _disable_current_modes():
        pass
    assert isinstance(pl.Trainer._results, property)


def test_the_loop_has_the_parts_that_are_replaced() -> None:
    from lightning.pytorch.loops.optimization.automatic import ClosureResult, _AutomaticOptimization
    from lightning.pytorch.trainer.call import _call_strategy_hook

    names = ("run", "_training_step", "_make_zero_grad_fn", "_optimizer_step", "_on_before_zero_grad")
    for name in (*names, "_optimizer_zero_grad"):
        assert callable(getattr(_AutomaticOptimization, name))
    assert "normalize" in inspect.signature(ClosureResult.from_training_step_output).parameters
    assert "_should_accumulate()" in inspect.getsource(_AutomaticOptimization)
    source = inspect.getsource(_TrainingEpochLoop)
    assert source.count("self._should_accumulate()") >= 4
    assert "_num_ready_batches_reached" in source
    assert list(inspect.signature(_call_strategy_hook).parameters)[:2] == ["trainer", "hook_name"]


def test_autograd_says_what_it_will_do_and_who_listens() -> None:
    """Whether a backward pass adds to a parameter's gradient, and how deep forward derivatives are nested."""
    from torch.autograd import forward_ad

    seen: list[bool] = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> torch.Tensor:
            seen.append(torch._C._will_engine_execute_node(node))
            return grads[0]

    weight = torch.ones(1, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(weight).node
    Look.apply(weight).backward()
    other = torch.ones(1, requires_grad=True)
    (Look.apply(other) + 0.0).backward()
    assert seen == [True, False]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(Look.apply(weight), weight)
    weight.register_post_accumulate_grad_hook(print)
    assert getattr(weight, "_post_accumulate_grad_hooks", None)
    assert forward_ad._current_level < 0
    with forward_ad.dual_level():
        assert forward_ad._current_level >= 0
    assert torch._C._len_torch_dispatch_stack() == 0
    assert torch._C._functorch.maybe_current_level() is None
    levels: list[int | None] = []
    torch.func.vmap(lambda x: levels.append(torch._C._functorch.maybe_current_level()) or x)(torch.ones(2))
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert torch._C._len_torch_dispatch_stack() == 1
    assert levels == [1]


def test_fake_tensors_have_what_a_prediction_needs() -> None:
    from bitsandbytes import functional
    from bitsandbytes.backends import utils
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

    assert list(inspect.signature(torch.nn.Module._apply).parameters) == ["self", "fn", "recurse"]
    assert "Couldn't swap" in inspect.getsource(torch.nn.Module._apply), "the reason for ours"
    assert torch.ops.aten._local_scalar_dense.default
    assert torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
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


def test_autograd_numbers_its_nodes() -> None:
    x = torch.ones(1, requires_grad=True)
    number = torch.autograd._get_sequence_nr()
    y = x * 2
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == number
    assert torch._C._current_graph_task_id() == -1
    seen: list[tuple[bool, int]] = []
    y.grad_fn.register_prehook(
        lambda _: seen.append(
            (torch._C._current_graph_task_id() >= 0, torch._C._current_autograd_node()._sequence_nr())
        )
    )
    y.backward()
    assert seen == [(True, number)]


def test_deepspeed_keeps_its_parts_where_they_are_looked_for() -> None:
    """Read from its files: importing it settles on an accelerator for the whole process."""
    spec = importlib.util.find_spec("deepspeed")
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent
    used = {
        "runtime/zero/stage_1_and_2.py": (
            "self.bit16_groups =", "self.single_partition_of_fp32_groups =", "external_loss_scale",
        ),
        "runtime/zero/stage3.py": (
            "self.fp32_partitioned_groups_flat",
            "self.grad_position[param_id] = [int(i), int(current_offset)",
            "def get_param_id",
        ),
        "utils/tensor_fragment.py": ("lp_fragment_address", "hp_fragment_address"),
        "ops/__init__.py": ("__compatible_ops__",),
        "comm/torch.py": ("deepspeed.ops.__compatible_ops__.get(builder.NAME, False)",),
    }  # fmt: skip
    for file, names in used.items():
        source = (folder / file).read_text()
        assert [name for name in names if name not in source] == [], file


def test_lightnings_strategies_call_what_ours_replace() -> None:
    for name in ("_setup_model_and_optimizer", "_init_optimizers", "_init_deepspeed_distributed"):
        assert name in inspect.getsource(DeepSpeedStrategy)
    assert "self._format_batch_size_and_grad_accum_config()" in inspect.getsource(DeepSpeedStrategy)
    assert "self._data_parallel_size" in inspect.getsource(ModelParallelStrategy.setup_environment)
