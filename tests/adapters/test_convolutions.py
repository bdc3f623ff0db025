"""Adapters of convolutions: merged they compute the same, they resume exactly, and the rest is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_eff.adapters.convolutions import ADAPTED
from lightning_eff.adapters.export import merge_adapters, save_adapter
from lightning_eff.callbacks.peft_adapter import PeftAdapter, adapt
from lightning_eff.core.errors import ConfigError, ConflictWarning
from tests.support.adapters import Exact
from tests.support.models import fit, make_loader, seeded
from tests.support.techniques import plain_loop

OPTIONS: dict[str, dict[str, Any]] = {"oft": {"oft_block_size": 4}, "ia3": {}}
CASES: list[tuple[str, int, dict[str, Any]]] = [
    *((method, dims, {}) for method in ("lora", "hira") for dims in (1, 2, 3)),
    *((method, dims, {"dilation": 2, "groups": 2}) for method in ("loha", "lokr") for dims in (1, 2)),
    *(("ia3", dims, {"padding": 1, "padding_mode": "circular", "groups": 4}) for dims in (2, 3)),
    ("lora", 2, {"stride": 2, "padding": "valid", "bias": False}),
    ("lora", 1, {"kernel_size": 1, "dilation": 2}),
    ("hira", 2, {"dilation": 2, "padding": "same"}),
    ("hra", 2, {"stride": 2, "padding": 1}),
    ("oft", 2, {"kernel_size": 1, "stride": 2}),
]


def convolution(dims: int, **keywords: Any) -> nn.Module:
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    return kind(8, 8, **({"kernel_size": 3} | keywords))


def options_of(method: str) -> dict[str, Any]:
    return OPTIONS.get(method, {"r": 4})


@pytest.mark.parametrize(("method", "dims", "keywords"), CASES)
def test_a_merged_convolution_computes_the_same(method: str, dims: int, keywords: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(convolution(dims, **keywords)).double()
    keys, x = list(model.state_dict()), torch.randn(2, 8, *[5] * dims, dtype=torch.float64)
    before = model(x)
    assert list(adapt(model, method=method, target_modules=["0"], options=options_of(method))) == ["0"]
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.3)
    trained = model(x)
    assert (trained - before).abs().max() > 0.01
    merge_adapters(model)
    torch.testing.assert_close(model(x), trained, rtol=1e-10, atol=1e-12)
    assert list(model.state_dict()) == keys


REFUSED: list[tuple[str, int, dict[str, Any], str]] = [
    ("lora", 2, {"dilation": 2, "padding": "same"}, r"0 has dilation=\(2, 2\)\n  try: .*hira.*\n.*loha"),
    ("lora", 2, {"padding": 1, "padding_mode": "circular"}, r"has padding_mode='circular'\n  try: .*ia3.\)$"),
    ("loha", 1, {"padding": 1, "padding_mode": "reflect"}, "has padding_mode='reflect'$"),
    ("lora", 2, {"groups": 8}, "has groups=8, which do not divide r=4"),
    ("hira", 1, {"groups": 2}, "has groups=2"),
    ("hra", 2, {"padding": "same"}, "has padding='same', other than a number"),
    ("hra", 2, {"dilation": 2}, "has dilation"),
    ("oft", 2, {}, r"has kernel_size=\(3, 3\), other than 1"),
    ("loha", 3, {}, "0 is a Conv3d, and no more than Conv1d and Conv2d"),
    ("vera", 2, {}, "layers that vera can adapt: 0 is a convolution"),
    ("osf", 2, {}, "layers that osf can adapt: 0 is a convolution"),
    ("tinylora", 2, {}, "layers that tinylora can adapt: 0 is a convolution"),
]


@pytest.mark.parametrize(("method", "dims", "keywords", "message"), REFUSED)
def test_what_peft_computes_wrongly_is_refused(
    method: str, dims: int, keywords: dict[str, Any], message: str
) -> None:
    model = nn.Sequential(convolution(dims, **keywords))
    options = options_of(method) if method in ADAPTED else {}
    with pytest.raises(ConfigError, match=message):
        adapt(model, method=method, target_modules=["0"], options=options)


@pytest.mark.filterwarnings("ignore:LoRA adapter added to ConvNd layer with groups")
@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Conv2d(8, 8, 3, groups=2), "0 is a Conv2d with groups=2\n  try: without --merge"),
        (nn.Conv3d(1, 8, (1, 1, 3)), r"0 is a Conv3d with kernel_size=\(1, 1, 3\)"),
    ],
)
def test_what_peft_cannot_merge_is_refused_before_anything_is(layer: nn.Module, message: str) -> None:
    model = nn.Sequential(layer, nn.Conv2d(8, 8, 3))
    adapt(model, target_modules=["0", "1"], options={"r": 4})
    with pytest.raises(ConfigError, match=message):
        merge_adapters(model)
    assert "0.base_layer.weight" in model.state_dict()


class Convs(Exact):
    """Two convolutions in front of linear layers."""

    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.stem = nn.Conv1d(1, 4, 3, padding=1)
        self.down = nn.Conv1d(4, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.down(F.gelu(self.stem(x[:, None])))).mean(dim=-1))


def convs() -> Convs:
    return seeded(Convs).double()


def test_all_conv_is_every_convolution_and_stands_beside_names() -> None:
    assert list(adapt(convs(), target_modules="all-conv")) == ["stem", "down"]
    both = list(adapt(convs(), target_modules=["all-linear", "all-conv"]))
    assert sorted(both) == sorted([*adapt(convs()), "stem", "down"])
    assert list(adapt(convs(), target_modules=["all-conv", "second"])) == ["second", "stem", "down"]
    assert "stem" not in adapt(convs()), "not without being asked for"


def test_all_conv_says_what_it_leaves_out() -> None:
    def mixed() -> nn.Module:
        return nn.Sequential(nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3, dilation=2), nn.Linear(2, 2))

    with pytest.warns(ConflictWarning, match=r"leaves out 1 of 2 convolutions.* \(1: dilation=\(2, 2\)\)"):
        assert list(adapt(mixed(), target_modules="all-conv")) == ["0"]
    assert list(adapt(mixed(), target_modules="all-conv", options={"exclude_modules": ["1"]})) == ["0"]
    with pytest.raises(ConfigError, match=r"ConvTranspose1d has no convolution but transposed ones$"):
        adapt(nn.ConvTranspose1d(2, 2, 2), target_modules="all-conv")
    with pytest.raises(ConfigError, match=r"Linear has no convolution$"):
        adapt(nn.Linear(2, 2), target_modules="all-conv")
    with pytest.raises(ConfigError, match=r"no convolution that vera can adapt \(0: a convolution"):
        adapt(mixed(), method="vera", target_modules="all-conv")
    with pytest.raises(
        ConfigError, match=r"has no linear layer\n  try: PeftAdapter\(target_modules=.all-conv.\)"
    ):
        adapt(nn.Sequential(nn.Conv2d(8, 8, 3)))
    with pytest.raises(ConfigError, match=r"'dwn': .* did you mean 'down'"):
        adapt(convs(), target_modules=["all-conv", "dwn"])


def test_a_run_trains_like_a_plain_loop_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    """T1; the adapter drawn anew at the resume, or a base that is trained, would be off by 1e-3."""
    keywords: dict[str, Any] = {"target_modules": ["all-conv"], "options": {"r": 2}}
    whole, base, plain, loader = convs(), convs(), convs(), make_loader()
    torch.manual_seed(3)
    fit(whole, PeftAdapter(**keywords), loader=loader, max_epochs=2)
    torch.manual_seed(3)
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["stem", "down"], r=2), plain)
    expected = plain_loop(plain, "64-true", 20)
    assert whole.losses == pytest.approx(expected, rel=1e-10)
    torch.testing.assert_close(
        dict(whole.named_parameters()), dict(plain.named_parameters()), rtol=1e-9, atol=1e-11
    )
    assert torch.equal(whole.stem.base_layer.weight, base.stem.weight)
    assert whole.stem.lora_B["default"].weight.abs().max() > 1e-3

    half = convs()
    torch.manual_seed(3)
    trainer = fit(half, PeftAdapter(**keywords), loader=loader, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    saved = torch.load(tmp_path / "half.ckpt", weights_only=True)["state_dict"]
    assert not any("base_layer" in name for name in saved)
    resumed = convs()
    fit(resumed, PeftAdapter(**keywords), loader=loader, max_epochs=2, ckpt_path=tmp_path / "half.ckpt")
    for name, parameter in whole.named_parameters():
        assert torch.equal(resumed.get_parameter(name), parameter), name


def test_an_exported_adapter_is_peft_s_own(tmp_path: Path) -> None:
    model, base = nn.Sequential(nn.Conv2d(3, 8, 3)), nn.Sequential(nn.Conv2d(3, 8, 3))
    base.load_state_dict(model.state_dict())
    adapt(model, target_modules="all-conv", options={"r": 2, "init_lora_weights": False})
    save_adapter(model, tmp_path)
    x = torch.randn(2, 3, 6, 6)
    loaded = peft.PeftModel.from_pretrained(base, str(tmp_path))
    assert torch.equal(loaded(x), model(x))
    assert not torch.allclose(model[0].base_layer(x), model(x), atol=1e-2)
