"""AutoPrecision: the requested format runs, each weight is cast once per step, fused AdamW clips."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.accelerators import CPUAccelerator
from torch import Tensor, nn

from lightning_eff.callbacks.optimizer_choice import OptimizerChoice
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.precision.auto import AutoPrecision, set_tf32, step_context
from lightning_eff.precision.float8 import Float8
from lightning_eff.precision.quantized_base import QuantizedBase
from tests.support.models import Net, fit
from tests.support.tf32 import SWITCHES, in_forks

pytestmark = pytest.mark.filterwarnings("ignore::lightning_eff.core.errors.SlowPathWarning")


class Spy(Net):
    """Record the dtypes of the first layer's output, its weight and its input, and the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        self.seen = (hidden.dtype, self.first.weight.dtype, x.dtype, torch.get_default_dtype())
        return self.second(self.norm(hidden))


@pytest.mark.parametrize(
    ("precision", "computed", "kept"),
    [
        ("32-true", torch.float32, torch.float32),
        ("bf16-mixed", torch.bfloat16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_products_and_weights_have_the_dtypes_of_the_precision(
    precision: str, computed: torch.dtype, kept: torch.dtype
) -> None:
    model, plugin = Spy(), AutoPrecision(precision=precision)
    # With an instance of CPUAccelerator, Lightning 2.6.6 autocasts on cuda.
    fit(model, accelerator=CPUAccelerator(), plugins=[plugin], max_steps=1)
    assert plugin.device == "cpu"
    assert model.seen[:2] == (computed, kept)
    assert model.seen[3] == kept
    numbers = plugin.outcome().numbers
    expected = {} if precision == "32-true" else {"first": "Linear", "second": "Linear"}
    assert {k: v for k, v in numbers["layers"].items() if v == "Linear"} == expected
    name = "float32" if precision == "32-true" else precision
    assert plugin.outcome().did.startswith(f"{name} on cpu")
    assert numbers["parameter_bytes"] == sum(p.numel() for p in model.parameters()) * kept.itemsize


def test_32_true_leaves_the_default_dtype_unchanged() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        with step_context("32-true", "cpu"):
            assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_bf16_mixed_has_no_effect_on_a_model_in_float64() -> None:
    plugin = AutoPrecision(precision="bf16-mixed", device="cpu")
    with pytest.warns(NoEffectWarning, match="except in float64"):
        plugin.convert_module(nn.Linear(4, 4).double())
    assert not plugin.outcome().effective


@pytest.mark.parametrize(
    ("capabilities", "chosen"), [({"avx512_f": True}, "32-true"), ({"amx_bf16": True}, "bf16-mixed")]
)
def test_auto_chooses_bf16_on_a_cpu_that_computes_it(
    capabilities: dict[str, bool], chosen: str, net: Callable[..., Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities, raising=False)
    plugin = AutoPrecision()
    fit(net(), plugins=[plugin], max_steps=1)
    assert plugin.precision == chosen


class Complex(Spy):
    """Has a complex buffer and a complex parameter, as rotary embeddings and Fourier filters do."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Module()
        self.part.register_buffer("phase", torch.tensor([1 + 2j, 3 - 4j]))
        self.part.filter = nn.Parameter(torch.tensor([[0.5 - 1j]]))
        self.part.register_buffer("exact", torch.ones(2))


@pytest.mark.parametrize(
    "plugin",
    [
        lambda: AutoPrecision(precision="bf16-true"),
        lambda: Float8(precision="bf16-true", emulate=True, skip=()),
        lambda: QuantizedBase(quant_type="bf16", skip_modules=["second"]),
    ],
)
@pytest.mark.filterwarnings("ignore:precision/float8 has no effect")
def test_complex_tensors_stay_complex(plugin: Callable[[], Any]) -> None:
    model, used = Complex(), plugin()
    model.first.requires_grad_(requires_grad=False)
    fit(model, plugins=[used], max_steps=1)
    assert torch.equal(model.part.phase, torch.tensor([1 + 2j, 3 - 4j]))
    assert torch.equal(model.part.filter, torch.tensor([[0.5 - 1j]]))
    assert model.first.weight.dtype == torch.bfloat16
    if used.precision == "bf16-true":
        assert model.part.exact.dtype == model.dtype == torch.bfloat16


class FourTimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = self.layer(x)
        return x


@pytest.mark.parametrize(("keep_casts", "copies"), [(True, 1), (False, 4)])
def test_a_layer_used_four_times_is_cast_once(keep_casts: bool, copies: int) -> None:
    module, saved = FourTimes(), dict[int, int]()

    def pack(tensor: Tensor) -> Tensor:
        if tensor.shape == (64, 64) and tensor.dtype == torch.bfloat16:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    x = torch.randn(8, 64, requires_grad=True)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        step_context("bf16-mixed", "cpu", keep_casts=keep_casts),
    ):
        out = module(x)
    assert sum(saved.values()) == copies * 64 * 64 * 2
    assert out.dtype == torch.bfloat16


def test_a_forward_pass_without_gradients_does_not_fill_the_cache_of_casts() -> None:
    """Autocast's cache once held a copy made under no_grad: the weight got no gradient, without an error."""
    module = FourTimes()
    with step_context("bf16-mixed", "cpu"):
        with torch.no_grad():
            module(torch.randn(2, 64))
        loss = module(torch.randn(2, 64)).float().sum()
    loss.backward()
    assert module.layer.weight.grad is not None
    assert float(module.layer.weight.grad.abs().sum()) > 0


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_fused_adamw_clips(precision: str) -> None:
    """Lightning's own plugin raises an error here (2.6.6)."""
    norms: list[float] = []

    class Watch(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            if grads:
                norms.append(float(torch.stack([grad.norm() for grad in grads]).norm()))

    choice = OptimizerChoice(optimizer=functools.partial(torch.optim.AdamW, lr=1e-3, fused=True))
    fit(Watch(), choice, plugins=[AutoPrecision(precision=precision)], gradient_clip_val=0.01, max_steps=4)
    assert norms == pytest.approx([0.01] * len(norms), rel=1e-3)
    assert len(norms) >= 3


def test_a_modules_own_lbfgs_with_fp16_is_rejected(net: Callable[..., Net]) -> None:
    model = net()
    model.configure_optimizers = lambda: torch.optim.LBFGS(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="LBFGS"):
        fit(model, plugins=[AutoPrecision(precision="16-mixed")])


BACKENDS: Any = torch.backends
NEW_SWITCHES = (
    *(BACKENDS, BACKENDS.cudnn, BACKENDS.mkldnn, BACKENDS.cuda.matmul),
    *(BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.matmul),
)
OLD_SWITCHES = (
    torch.get_float32_matmul_precision,
    lambda: BACKENDS.cuda.matmul.allow_tf32,
    lambda: BACKENDS.cudnn.allow_tf32,
)
CUDNN_STATEMENTS = [
    "torch.backends.cudnn.allow_tf32 = False",
    "torch.backends.cudnn.conv.fp32_precision = 'ieee'",
    "torch.backends.cudnn.rnn.fp32_precision = 'none'; torch.backends.fp32_precision = 'ieee'",
    "torch.backends.mkldnn.matmul.fp32_precision = 'bf16'",
]


def switches() -> list[Any]:
    """Return the state of every switch; `raises` for an old one that cannot be read."""
    found: list[Any] = [switch.fp32_precision for switch in NEW_SWITCHES]
    for read in OLD_SWITCHES:
        try:
            found.append(read())
        except RuntimeError:
            found.append("raises")
    return found


def with_each_global_value() -> list[list[Any]]:
    """Return the state of every switch now and for two values of the global one, which others inherit."""
    before, found = BACKENDS.fp32_precision, [switches()]
    for value in ("tf32", "ieee", before):
        BACKENDS.fp32_precision = value
        found.append(switches())
    return found


def set_and_restore() -> str:
    """Set TF32 both ways, and check each time that restoring it leaves no trace."""
    for enabled in (True, False):
        before = with_each_global_value()
        # Until it is set, cuDNN computes TF32 unless it inherits another value; nothing can set that again.
        values = list(zip(*before[:3], strict=True))
        is_initial = any(
            values[NEW_SWITCHES.index(switch)] == ("tf32", "tf32", "ieee")
            for switch in (BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
        )
        restore = set_tf32(enabled=enabled)
        for switch in (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn):
            assert (switch.fp32_precision == "tf32") is enabled, switch
        assert "raises" in before[0] or "raises" not in switches()
        restore()
        assert switches() == before[0]
        assert with_each_global_value() == before or (is_initial and not enabled)
    return "restored"


def test_tf32_is_set_and_restored_exactly_for_every_combination_of_switches() -> None:
    statements = [*SWITCHES, *CUDNN_STATEMENTS]
    assert in_forks(statements, set_and_restore) == dict.fromkeys(statements, "restored")


def test_the_plugin_switches_tf32_for_a_run_on_cuda_and_warns_on_a_cpu(net: Callable[..., Net]) -> None:
    with pytest.warns(NoEffectWarning, match="tf32=True"):
        fit(net(), plugins=[AutoPrecision(precision="32-true", tf32=True)], max_steps=1)
    plugin, before = AutoPrecision(precision="32-true", device="cuda", tf32=True), switches()
    plugin.convert_module(nn.Linear(2, 2))
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == ("high", True)
    assert plugin.outcome().effective
    plugin.teardown()
    assert switches() == before
