"""Operators in a prediction for CUDA: which one runs, and how many bytes it saves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_eff.callbacks.gradient_checkpointing import GradientCheckpointing
from lightning_eff.callbacks.micro_batch import MicroBatch
from lightning_eff.callbacks.peft_adapter import PeftAdapter
from lightning_eff.callbacks.tiled_loss import TiledLoss
from lightning_eff.precision.auto import AutoPrecision
from lightning_eff.prediction import cuda_operators
from lightning_eff.prediction.cuda_operators import CudaOperators
from lightning_eff.prediction.fakes import Fakes
from lightning_eff.prediction.predict import Prediction, predict, predict_step
from tests.support.counted import Operators
from tests.support.prediction import GPT_OF, loader_for, trainer_of
from tests.support.versions import since_torch_2_13

B, H, T, E = 2, 4, 48, 16
HALF = torch.bfloat16


class Saved(Operators):
    """Names of the operators of attention, and bytes that are saved for the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.tensors: dict[int, Tensor] = {}

    def count(self, func: Any, args: Any, result: Any) -> None:
        name = func.__name__.partition(".")[0]
        if "attention" in name or "softmax" in name or "dropout" in name:
            self.names.append(name.removeprefix("_scaled_dot_product_"))

    def pack(self, tensor: Tensor) -> Tensor:
        self.tensors[tensor.untyped_storage()._cdata] = tensor
        return tensor


def run(
    capability: int, *, dtype: torch.dtype = HALF, mask: Callable[[], Tensor] | None = None, num_kv: int = H,
    keys: int = T, size: int = E, value_size: int | None = None, **options: Any,
) -> tuple[list[str], int, Tensor]:  # fmt: skip
    """Return the operators of a call forward and backward, the bytes that it saves, and its result."""
    with Fakes(), CudaOperators(capability), Saved() as saved:
        q = torch.empty(B, H, T, size, dtype=dtype, requires_grad=True)
        k = torch.empty(B, num_kv, keys, size, dtype=dtype, requires_grad=True)
        v = torch.empty(B, num_kv, keys, value_size or size, dtype=dtype, requires_grad=True)
        attn_mask = None if mask is None else mask()
        with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask, enable_gqa=num_kv != H, **options)
        num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in saved.tensors.values())
        names = [name for name in saved.names if name != "where"]
        out.sum().backward()
        assert q.grad is not None
        assert q.grad.shape == q.shape
    return names, num_bytes, out


QKV_OUT = 4 * B * H * T * E * 2
"""Bytes of query, key, value and result in half precision."""
LOGSUMEXP = B * H * T * 4


def test_flash_with_dropout_saves_no_scores() -> None:
    names, num_bytes, _ = run(80, dropout_p=0.1, is_causal=True)
    assert names == ["flash_attention"]
    # The state of the random numbers: two integers of 8 bytes and one.
    assert num_bytes == QKV_OUT + LOGSUMEXP + 16 + 8


ROWS: list[tuple[int, dict[str, Any], str]] = [
    (90, {}, "cudnn_attention"),
    (80, {"num_kv": 2}, "flash_attention"),
    (80, {"value_size": 8}, "efficient_attention"),
    (80, {"dtype": torch.float32}, "efficient_attention"),
]


@pytest.mark.parametrize(("capability", "options", "operator"), ROWS)
def test_the_operator_of_a_gpu_runs(capability: int, options: dict[str, Any], operator: str) -> None:
    assert run(capability, **options)[0] == [operator]


@pytest.mark.parametrize(
    ("keys", "mask_bytes", "kind"), [(40, T * 40 * 2, "bool"), (44, T * 48 * 2, "float")]
)
def test_a_mask_goes_to_the_efficient_kernel_with_rows_of_8(keys: int, mask_bytes: int, kind: str) -> None:
    def mask() -> Tensor:
        return torch.empty(T, keys, dtype=torch.bool if kind == "bool" else HALF)

    names, num_bytes, _ = run(80, keys=keys, mask=mask)
    assert names == ["efficient_attention"]
    qkv_out = 2 * B * H * (T + keys) * E * 2
    logsumexp = B * H * 64 * 4  # rows of a multiple of 32
    assert num_bytes == qkv_out + logsumexp + mask_bytes + 16


def test_a_backend_that_is_switched_off_is_not_taken() -> None:
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        assert run(90)[0] == ["efficient_attention"]
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        assert run(90)[0] == ["_safe_softmax"]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="flash: mask"):
        run(80, mask=lambda: torch.empty(T, T, dtype=torch.bool))


def backends(found: Prediction) -> list[tuple[str, str]]:
    assert found.reason == ""
    return [(row.backend, row.dtype) for row in found.attention for _ in range(row.calls)]


def test_attention_calls_are_counted_once_under_techniques_that_repeat_the_forward_pass() -> None:
    """The GPT has two layers; autocast has cast the operands to bfloat16."""
    make = functools.partial(GPT_OF, dropout=0.1)
    batch = next(iter(loader_for(make)))
    plugins = [AutoPrecision(precision="bf16-mixed")]

    def techniques() -> list[Any]:
        parts = MicroBatch(micro_batch_size=2)
        return [parts, GradientCheckpointing(policy="selective"), PeftAdapter()]

    found = predict(
        make, batch, num_batches=10, capability=80,
        trainer=lambda: trainer_of({"callbacks": techniques(), "plugins": plugins}),
    )  # fmt: skip
    assert backends(found) == [("flash", "bfloat16")] * 2


@pytest.mark.parametrize("memory_bytes", [None, 1 << 18])
def test_tiles_of_the_loss_depend_on_the_memory_of_the_gpu(memory_bytes: int | None) -> None:
    technique, batch = TiledLoss(), next(iter(loader_for(GPT_OF)))
    found = predict(
        GPT_OF, batch, num_batches=10, capability=90, memory_bytes=memory_bytes,
        trainer=lambda: trainer_of({"callbacks": [technique]}),
    )  # fmt: skip
    assert found.reason == ""
    numbers = technique.outcome().numbers
    assert (numbers["tile_rows"] < numbers["rows"]) == (memory_bytes is not None)


SGD = functools.partial(torch.optim.SGD, lr=0.1)


def predicted(capability: int, *, dropout: float) -> Prediction:
    """Predict a layer of torch's own under autocast."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=dropout, batch_first=True)

    def step(model: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=HALF):
            return model(x, src_mask=torch.zeros(64, 64), is_causal=True).sum()

    return predict_step(layer, torch.ones(2, 64, 16), step, SGD, capability=capability)


def test_flops_are_the_same_and_the_peak_with_dropout_has_no_scores_on_cuda() -> None:
    fused, there = predicted(0, dropout=0.0), predicted(80, dropout=0.0)
    assert backends(fused) == backends(there) == [("flash", "bfloat16")]
    assert there.flops == fused.flops
    # With dropout a CPU has no fused kernel, so it holds the scores.
    here, there = predicted(0, dropout=0.1), predicted(80, dropout=0.1)
    assert backends(here) == [("math", "float32")]
    assert backends(there) == [("flash", "bfloat16")]
    assert here.peak is not None
    assert there.peak is not None
    held, saved = (each.peak.by_phase["backward"]["activations"] for each in (here, there))
    # The softmax's backward pass, where the peak is, has freed one of the three tensors.
    assert held - saved > here.attention[0].score_bytes * 2


@since_torch_2_13
def test_autocast_has_the_lists_of_the_installed_torch() -> None:
    header = Path(str(torch.__file__)).with_name("include") / "ATen" / "autocast_mode.h"
    lists: dict[str, set[str]] = {}
    for name, body in re.findall(r"#define AT_FORALL_(\w+)\(_\)((?:[^\n]*\\\n)*[^\n]*)", header.read_text()):
        operators = re.findall(r"_\((?:ADD_NS\()?(\w+)(?:\)?,\s*\"?(?:norm\.)?(\w+)\"?)?[,)]", body)
        lists[name] = {".".join(filter(None, operator)) for operator in operators}
    ours = {name: kernel for name, kernel in cuda_operators.autocast_kernels() if hasattr(kernel, "args")}
    assert lists["LOWER_PRECISION_FP"] & ours.keys() == cuda_operators.LOWER
    assert lists["FP32_SET_OPT_DTYPE"] & ours.keys() == cuda_operators.FLOAT32_RESULT
    assert lists["PROMOTE"] == cuda_operators.WIDEST
    named = {
        *cuda_operators.LOWER,
        *cuda_operators.FLOAT32_RESULT,
        *cuda_operators.WIDEST,
        *cuda_operators.NORMS,
    }
    assert ours.keys() - named == lists["FP32"] & ours.keys()


def saved_bytes(capability: int, forward: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> int:
    """Return the bytes that a forward pass of bfloat16 under autocast keeps, its input included."""
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    with Fakes(), CudaOperators(capability), torch.autocast("cpu", dtype=HALF):
        x = torch.empty(shape, dtype=HALF, requires_grad=True) * 1
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = forward(x)
        out.float().sum().backward()
    return sum(kept.values())


WIDTH = 64
N = 8 * 16 * WIDTH
ROW = 8 * 16 * 4
"""Bytes of one float32 number a row."""
KEPT: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    # the float32 copy of the input, and what normalizes a row
    "RMSNorm": (lambda x: F.rms_norm(x, (WIDTH,)), 4 * N + ROW),
    "GroupNorm": (lambda x: F.group_norm(x, 8), 4 * N + 2 * 8 * 8 * 4),
    # the result, in float32
    "softmax": (lambda x: x.softmax(-1), 4 * N),
    # the float32 copies of the input
    "softplus": (F.softplus, 4 * N),
    # nothing: a sum has no need of its input
    "sum": (lambda x: x.sum(-1), 0),
    # the unchanged input; a norm's result in float32
    "norm": (lambda x: x.norm(dim=-1), 2 * N + ROW),
    "SiLU": (F.silu, 2 * N),
}


@since_torch_2_13
@pytest.mark.parametrize("name", KEPT)
def test_autocast_for_cuda_saves_float32_where_a_cpu_does_not(name: str) -> None:
    forward, expected = KEPT[name]
    assert saved_bytes(90, forward, (8, 16, WIDTH)) == expected


def test_cross_entropy_of_low_logits_saves_what_its_parts_save() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(x.flatten(0, 1), torch.zeros(8 * 16, dtype=torch.long))

    with Fakes(), CudaOperators(90), torch.autocast("cpu", dtype=HALF):
        assert loss(torch.empty(8, 16, WIDTH, dtype=HALF)).dtype == torch.float32
    logits, log_probabilities, targets, weight_of_all = 2 * N, 4 * N, 8 * 16 * 8, 4
    expected = logits + log_probabilities + targets + weight_of_all
    assert saved_bytes(90, loss, (8, 16, WIDTH)) == expected


def test_a_prediction_restores_the_cpus_autocast() -> None:
    x = torch.ones(4, 4, dtype=HALF)
    with CudaOperators(90), torch.autocast("cpu", dtype=HALF):
        inside = F.layer_norm(x, (4,)).dtype, F.cross_entropy(x, x).dtype
    with torch.autocast("cpu", dtype=HALF):
        afterwards = F.layer_norm(x, (4,)).dtype, F.cross_entropy(x, x).dtype
    assert inside[0] == torch.float32
    assert afterwards == (HALF, torch.float32)
