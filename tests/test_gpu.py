"""Techniques on a GPU compared with a CPU; `pytest -m gpu` runs these tests on a machine with a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from lightning_eff.callbacks.attention import Attention
from lightning_eff.callbacks.channels_last import ChannelsLast
from lightning_eff.callbacks.data_preload import DataPreload
from lightning_eff.callbacks.empty_cache import EmptyCache
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.callbacks.tiled_conv import TiledConv
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.callbacks.tiled_mlp import TiledMLP
from lightning_eff.callbacks.torch_compile import TorchCompile
from lightning_eff.callbacks.triton_gemm import TritonGemm
from lightning_eff.kernels import dispatch
from lightning_eff.kernels.cross_entropy import linear_cross_entropy
from lightning_eff.kernels.matmul import gemm
from lightning_eff.models.gpt import GPT
from lightning_eff.models.unet import UNet
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.optimizer.cpu_offload import CpuOffload
from lightning_eff.optimizer.in_backward import InBackward
from tests.support import whole_logits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]
TOKENS, WIDTH, VOCABULARY, SAMPLES, STEPS = 64, 32, 1000, 4, 3
TOLERANCE = 1e-4
"""Relative, of losses: float32 products are summed in another order, without TF32."""


class Language(GPT):
    """A small language model, trained by SGD."""

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def losses(
    folder: Path, *techniques: Any, accelerator: str = "gpu", images: bool = False, **settings: Any
) -> Any:
    """Return the losses of a short training."""
    torch.manual_seed(0)
    if images:
        net: Any = UNet(channels=4, num_levels=2)
        x, y = torch.randn(SAMPLES * STEPS, 3, 16, 16), torch.randint(0, 4, (SAMPLES * STEPS, 16, 16))
    else:
        net = Language(vocab_size=VOCABULARY, context_length=TOKENS, d_model=WIDTH, num_layers=3)
        x, y = torch.randint(0, VOCABULARY, (2, SAMPLES * STEPS, TOKENS))
    report = EfficiencyReport(dirpath=folder)
    names = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
    quiet: dict[str, Any] = dict.fromkeys(names, False)
    trainer = pl.Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, callbacks=[*techniques, report], **quiet, **settings
    )
    trainer.fit(net, DataLoader(TensorDataset(x, y), batch_size=SAMPLES))
    return [loss for _, loss in report.report["losses"]]


TECHNIQUES: dict[str, Callable[[], Any]] = {
    "attention": lambda: Attention(backend=["efficient", "math"]),
    "empty_cache": lambda: EmptyCache(every_n_steps=1),
    "gradient_checkpointing": GradientCheckpointing,
    "offload": lambda: GradientCheckpointing(policy="offload"),
    "fit": lambda: GradientCheckpointing(policy="fit"),
    "micro_batch": lambda: MicroBatch(micro_batch_size=2),
    "tiled_loss": lambda: TiledLoss(tile_budget_mib=0.1),
    "tiled_mlp": lambda: TiledMLP(min_tokens=1, tile_budget_mib=0.1),
    "triton_gemm": lambda: TritonGemm(min_features=16, fuse_mlps=True),
    "torch_compile": TorchCompile,
    "data_preload": lambda: DataPreload(num_workers=1),
    "accumulation": lambda: GradientAccumulation(global_batch_size=SAMPLES),
}


@pytest.mark.parametrize("name", TECHNIQUES)
def test_a_technique_on_a_gpu_matches_plain_training_on_a_cpu(name: str, tmp_path: Path) -> None:
    expected = losses(tmp_path / "cpu", accelerator="cpu")
    found = losses(tmp_path / "gpu", TECHNIQUES[name]())
    assert len(found) == STEPS
    assert found == pytest.approx(expected, rel=TOLERANCE)


def test_the_kernel_of_a_product_is_chosen_by_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    dispatch.forget()
    a, b = (torch.randn(3072, 3072, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for backend in ("auto", "triton"):
        torch.testing.assert_close(gemm(a, b, backend=backend), a @ b, rtol=2e-2, atol=1.0)
    choices = dispatch.choices_of(a.device)
    (row,) = choices.rows()
    assert row["ratio"] > 0.3
    assert list(json.loads(choices.path.read_text())["choices"]) == [row["shape"]]


ROWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 20.0, "temperature": 0.8},
}


@pytest.mark.parametrize("options", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("num_classes", [5008, 5003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_tiled_loss_on_a_gpu_matches_full_logits(
    dtype: torch.dtype, num_classes: int, options: dict[str, Any]
) -> None:
    """Its kernel, and products that keep float32 sums; 50 times, because a race shows only sometimes."""
    x, weight = torch.randn(300, 64), torch.randn(num_classes, 64).requires_grad_()
    target = torch.randint(0, num_classes, (300,))
    exact = weight.detach().to(dtype).double().requires_grad_()
    expected = whole_logits.cross_entropy(x.to(dtype).double(), exact, target, **options)
    (gradient,) = torch.autograd.grad(expected, [exact])
    on_gpu, found = (x.cuda(), target.cuda()), set[tuple[float, float]]()
    trained = weight.detach().cuda().requires_grad_()
    for _ in range(50):
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = linear_cross_entropy(on_gpu[0], trained, on_gpu[1], tile_budget_mib=2.0, **options)
        (tiled,) = torch.autograd.grad(loss, [trained])
        found.add(
            (whole_logits.error(loss.cpu(), expected.detach()), whole_logits.error(tiled.cpu(), gradient))
        )
    assert max(of_loss for of_loss, _ in found) < 2e-6
    assert max(of_gradient for _, of_gradient in found) < (4e-3 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("technique", [ChannelsLast, lambda: TiledConv(min_pixels=1, tile_budget_mib=0.1)])
def test_convolutions_on_a_gpu_match_a_cpu(technique: Callable[[], Any], tmp_path: Path) -> None:
    expected = losses(tmp_path / "cpu", accelerator="cpu", images=True)
    found = losses(tmp_path / "gpu", technique(), images=True)
    assert found == pytest.approx(expected, rel=1e-3)  # cuDNN may choose TF32


@pytest.mark.parametrize("optimizer", [InBackward, CpuOffload])
def test_optimizers_on_a_gpu_match_adamw_on_a_cpu(optimizer: Any, tmp_path: Path) -> None:
    adamw = OptimizerChoice(optimizer=partial(torch.optim.AdamW, lr=1e-3, weight_decay=0.1))
    expected = losses(tmp_path / "cpu", adamw, accelerator="cpu")
    found = losses(tmp_path / "gpu", OptimizerChoice(optimizer=partial(optimizer, lr=1e-3)))
    assert found == pytest.approx(expected, rel=TOLERANCE)


def test_bf16_on_a_gpu_is_close_to_float32(tmp_path: Path) -> None:
    expected = losses(tmp_path / "cpu", accelerator="cpu")
    assert losses(tmp_path / "gpu", precision="bf16-mixed") == pytest.approx(expected, rel=2e-2)
