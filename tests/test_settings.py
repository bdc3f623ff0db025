"""A setting out of its range is refused by its name where it is made; one without effect is told."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_eff import FSDP2Fabric
from lightning_eff.callbacks.contrastive import Contrastive
from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_conv import TiledConv, tile_convs
from lightning_eff.callbacks.tiled_loss import TiledLoss, tile_loss
from lightning_eff.callbacks.tiled_mlp import TiledMLP, tile_mlps
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.callbacks.triton_gemm import TritonGemm, swap
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.data.digits import Digits
from lightning_eff.data.python_source import PythonSource
from lightning_eff.data.shapes import Shapes
from lightning_eff.models.cnn import CNN
from lightning_eff.models.gpt import GPT
from lightning_eff.models.hf_causal_lm import HFCausalLM
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from lightning_eff.monitors.text_sample import TextSample
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from lightning_eff.optimizer.muon import Muon
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.precision.quantized_base import QuantizedBase
from lightning_eff.scheduler.warmup_decay import WarmupDecay
from lightning_eff.strategy.deepspeed_zero import DeepSpeedZero
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.models import Net, make_loader, make_trainer

WEIGHTS = [torch.zeros(2, 2, requires_grad=True)]
PLAIN = torch.optim.SGD(WEIGHTS, lr=0.1)
SCHEDULE = functools.partial(WarmupDecay, PLAIN, total_steps=10)
IN_BACKWARD, OFFLOAD = (functools.partial(kind, WEIGHTS) for kind in (InBackward, CpuOffload))
SIZES = {"vocab_size": 37, "context_length": 12, "d_model": 16, "num_layers": 2, "num_heads": 2}
LANGUAGE = functools.partial(GPT, **SIZES)
HUB = functools.partial(HFCausalLM, name="unread")

WRONG: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *((EmptyCache, {"every_n_steps": value}, "every_n_steps=") for value in (0, None, 1.5)),
    (DataPreload, {"num_workers": "many"}, "num_workers='many'"),
    (DataPreload, {"prefetch_factor": 0}, "at least 1"),
    (GradientAccumulation, {}, "global_batch_size=None"),
    (GradientAccumulation, {"global_batch_size": 8, "schedule": {0: 8}}, "global_batch_size=8"),
    (GradientAccumulation, {"schedule": {1: 8}}, "sizes by epoch or step, from 0 on"),
    (GradientAccumulation, {"schedule": {0: 0}}, r"schedule={0: 0}: expected a mapping \(a whole"),
    (GradientAccumulation, {"global_batch_size": 8, "schedule_by": "batch"}, "one of epoch, step"),
    (GradientAccumulation, {"global_batch_size": 8, "num_batches": 2}, "global_batch_size=8"),
    (GradientAccumulation, {"num_batches": 2, "schedule": {0: 8}}, "num_batches=2"),
    (MicroBatch, {"keep": [1], "splitter": len}, "keep="),
    (MicroBatch, {"keep": ["a", "."]}, "keep="),
    (GradientCheckpointing, {"policy": "some"}, "policy='some'"),
    (GradientCheckpointing, {"every_n_blocks": 0}, "every_n_blocks=0"),
    (GradientCheckpointing, {"memory_budget": 1.5}, "memory_budget=1.5"),
    (GradientCheckpointing, {"memory": "10MiB"}, "memory='10MiB': expected with policy=fit only"),
    (MicroBatch, {"micro_batch_size": -1}, "micro_batch_size=-1: expected 'auto', or a whole number"),
    (MicroBatch, {"headroom": 1.0}, "headroom=1.0: expected a fraction"),
    (Contrastive, {"keep": [1], "splitter": len}, "keep="),
    (Contrastive, {"micro_batch_size": 0}, "micro_batch_size=0: expected 'auto', or a whole number"),
    (MicroBatch, {"micro_batch_size": 4, "find": True}, "false with micro_batch_size=4"),
    (OptimizerChoice, {"optimizer": PLAIN}, "a class, or functools"),
    (OptimizerChoice, {}, "optimizer=None: expected an optimizer"),
    (PeftAdapter, {"target_modules": None}, "target_modules=None"),
    (PeftAdapter, {"method": "lorra"}, r"method='lorra': .* did you mean 'lora'"),
    (PeftAdapter, {"method": "xlora"}, "method='xlora': expected one of PEFT's methods"),
    (PeftAdapter, {"method": "boft"}, "method='boft': expected one of PEFT's methods"),
    (PeftAdapter, {"method": "oft", "options": {"oft_block_size": 4, "r": 3}}, r"options=\{.*PEFT rejects"),
    (PeftAdapter, {"options": {"task_type": "SEQ_CLS"}}, "options.task_type='SEQ_CLS'"),
    (PeftAdapter, {"options": {"lora_alfa": 3}}, r"options.lora_alfa=3: .* did you mean 'lora_alpha'"),
    (PeftAdapter, {"options": {"r": "eight"}}, r"options.r='eight': expected a whole number"),
    (PeftAdapter, {"options": {"target_modules": ["a"]}}, "target_modules to PeftAdapter itself"),
    (TorchCompile, {"mode": "fast"}, "one of default, reduce-overhead"),
    (TorchCompile, {"mode": "default", "backend": "eager"}, "the backend eager has no modes"),
    (TiledLoss, {"tile_budget_mib": 0}, "tile_budget_mib=0: expected a finite number above 0, or None"),
    (TritonGemm, {"min_features": 0}, "min_features"),
    (Progress, {"every_n_seconds": 0.0}, r"every_n_seconds=0\.0"),
    (QuantizedBase, {"quant_type": "bf16", "compute_dtype": "fp32"}, "'fp32': expected bf16 or auto"),
    (IN_BACKWARD, {"max_parameter_norm": 0.0}, "max_parameter_norm=0"),
    (IN_BACKWARD, {"optimizer": functools.partial(torch.optim.SGD, lr=0.5)}, r"optimizer\.lr=0\.5"),
    (IN_BACKWARD, {"optimizer": Muon}, "one that can step a single parameter"),
    (SCHEDULE, {"decay": "cosin"}, "^decay='cosin': expected "),
    (SCHEDULE, {"total_steps": None}, "^total_steps=None: expected "),
    (SCHEDULE, {"min_lr_ratio": math.nan}, "^min_lr_ratio=nan: expected "),
    (TextSample, {"num_tokens": 0}, "num_tokens=0"),
    (TextSample, {"prompt": ""}, "prompt=''"),
    (EfficiencyReport, {"num_warmup_batches": -1}, "num_warmup_batches=-1"),
    *((kind, {"param_dtype": "int8"}, "param_dtype='int8'") for kind in (FSDP2, FSDP2Fabric)),
    (FSDP2, {"reduce_dtype": "fp8"}, "reduce_dtype='fp8'"),
    (FSDP2, {"checkpoints": "both"}, "checkpoints='both'"),
    (DeepSpeedZero, {"stage": 0}, "stage=0"),
    (DeepSpeedZero, {"offload_optimizer": "nvme"}, "offload_optimizer='nvme'"),
    (DeepSpeedZero, {"offload_parameters": "cpu"}, "offload_parameters='cpu'"),
    (DeepSpeedZero, {"config": {"gradient_clipping": 1.0}}, r"trainer\.gradient_clip_val"),
    (DeepSpeedZero, {"config": {"train_batch_size": 8}}, r"data\.batch_size"),
    (DeepSpeedZero, {"config": {"zero_optimization": {"stage": 1}}}, r"strategy\.stage"),
    (
        DeepSpeedZero,
        {"config": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}},
        r"config\.zero_optimization\.offload_optimizer\.device='cpu'",
    ),
    (DeepSpeedZero, {"config": {"zero_optimisation": {}}}, "did you mean 'zero_optimization'"),
]
IMAGES = ("image_size", "num_train_images", "num_val_images", "num_shapes", "batch_size")
OF_DATA: list[tuple[Callable[..., object], str, Any]] = [
    *((kind, "num_workers", -1) for kind in (Digits, Shapes, PythonSource)),
    *((Digits, "batch_size", 0), (Digits, "val_fraction", 0.0), (Digits, "val_fraction", 1.0)),
    *((Shapes, key, 0) for key in IMAGES),
    *((PythonSource, key, 0) for key in ("context_length", "batch_size")),
    *((PythonSource, "vocab_size", 256), (PythonSource, "vocab_size", 65_537)),
    *((PythonSource, "val_fraction", 0.0), (PythonSource, "source_dir", "nowhere")),
]
WRONG_SIZES: list[tuple[Callable[..., object], dict[str, Any], str]] = [
    *((kind, {key: value}, f"{key}={value!r}") for kind, key, value in OF_DATA),
    *((LANGUAGE, {name: 0}, f"^{name}=0 must be at least 1$") for name in SIZES),
    (LANGUAGE, {"d_model": 18}, r"^d_model=18 must be a multiple of 2 \* num_heads = 4$"),
    (LANGUAGE, {"dropout": 1.0}, r"^dropout=1.0 must lie in \[0, 1\)$"),
    *((CNN, {n: 0}, f"{n}=0 must") for n in ("in_channels", "num_classes", "channels", "num_blocks")),
    (HUB, {"vocab_size": 0}, "vocab_size=0 must be at least 1"),
]


@pytest.mark.parametrize(("make", "wrong", "text"), WRONG)
def test_a_wrong_setting_is_refused(make: Callable[..., object], wrong: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make(**wrong)


@pytest.mark.parametrize(("make", "wrong", "text"), WRONG_SIZES)
def test_a_wrong_size_is_refused(make: Callable[..., object], wrong: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=text):
        make(**wrong)


class Bare(Net):
    """Has no layer to change, and a part that is never called."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.second, self.norm
        self.scale, self.unused = nn.Parameter(torch.ones(8, 3)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).mul(self.scale).sum(1)


NO_EFFECT: list[tuple[Callable[[], Any], str]] = [
    (lambda: MicroBatch(micro_batch_size=64), "no batch had more than 64 samples"),
    (GradientCheckpointing, "found no repeated blocks: name them with blocks="),
    (lambda: GradientCheckpointing(blocks=["unused"]), r"recomputed nothing: 1 of 1 .* \(full\), 0 times"),
    (lambda: TorchCompile(backend="aot_eager"), "found no repeated blocks"),
    (lambda: TorchCompile(backend="aot_eager", target="unused"), "compiled no graph"),
    (TiledLoss, "no output projection with more outputs than inputs; name it with head="),
    (TiledMLP, "no token-wise MLP found in repeated blocks; name them with modules="),
    (TiledConv, "no nn.Sequential with convolutions or pooling found"),
    (TritonGemm, "no linear layer that is trained has 256 or more input and output features"),
    (lambda: AutoPrecision(precision="bf16-mixed"), "no linear, convolution or recurrent layer"),
]


CHANGES: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (tile_loss, {"tile_budget_mib": "big"}, "tile_budget_mib='big'"),
    (tile_mlps, {"min_tokens": 0}, "min_tokens=0"),
    (tile_convs, {"min_pixels": 0}, "min_pixels=0"),
    (swap, {"min_features": 0}, "min_features=0"),
]


@pytest.mark.parametrize(("change", "arguments", "text"), CHANGES)
def test_functions_for_other_loops_check_and_warn_as_the_callbacks(
    change: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        change(torch.nn.Linear(2, 2), **arguments)
    with pytest.warns(NoEffectWarning) as caught:
        assert change(torch.nn.Linear(2, 2)) == {}
    assert [each.filename for each in caught] == [__file__]


@pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")
@pytest.mark.parametrize(("make", "text"), NO_EFFECT)
def test_a_technique_that_finds_nothing_to_do_says_so(make: Callable[[], Any], text: str) -> None:
    technique = make()
    slot = "plugins" if isinstance(technique, AutoPrecision) else "callbacks"
    with pytest.warns(NoEffectWarning, match=text):
        make_trainer(**{slot: [technique]}, max_steps=1).fit(Bare(), make_loader())
    assert not technique.outcome().effective
