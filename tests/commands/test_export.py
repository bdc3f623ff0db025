"""`export`: what it writes is loaded by plain PEFT and transformers, in a process without this package."""

from __future__ import annotations

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file, load_model
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from lightning_eff import run
from lightning_eff.adapters import adapter_checkpoint as adapter_state
from lightning_eff.adapters import export as adapter_export
from lightning_eff.callbacks.peft_adapter import adapt
from lightning_eff.checkpoint import stored_weights
from lightning_eff.core.errors import ConfigError
from lightning_eff.models.hf_causal_lm import HFCausalLM
from tests.support.adapters import METHODS, Exact, edited
from tests.support.command_line import Command
from tests.support.trained_llama import train_llama

pytestmark = pytest.mark.filterwarnings(
    "ignore::lightning_eff.core.errors.NoEffectWarning",
    "ignore::lightning_eff.core.errors.SlowPathWarning",
    "ignore:Experiment logs directory",
)
LORA = ["+callbacks=peft_adapter", "+callbacks.peft_adapter.options={r: 4}", "checkpoint_io=durable"]
PLAIN = """
import sys, torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
base, adapter, merged = sys.argv[1:]
ids = torch.arange(2, 26).reshape(2, 12)
assert AutoTokenizer.from_pretrained(merged)("the cat").input_ids
models = [PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)]
models += [AutoModelForCausalLM.from_pretrained(merged)]
with torch.inference_mode():
    torch.save([model.eval()(ids).logits for model in models], "logits.pt")
found = [name for name in sys.modules if name.partition(".")[0] in ("lightning_eff", "lightning")]
assert not found, found
"""


def elsewhere(*folders: Path) -> list[torch.Tensor]:
    """Return the logits that libraries alone make of an adapter and a merged model, in another process."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", PLAIN, *map(str, folders)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return torch.load("logits.pt", weights_only=True)


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found = model.eval()(torch.arange(2, 26).reshape(2, 12))
    return getattr(found, "logits", found)


def adapted_model(run_dir: Path) -> Any:
    """Return the run's model, with its adapter where training had it."""
    model = run.model_again(yaml.safe_load((run_dir / run.RESOLVED).read_text()))
    adapter_state.load_adapter(model, stored_weights.checkpoint(run_dir / "checkpoints" / "step-2.ckpt"))
    return model


@pytest.mark.slow
def test_plain_peft_and_transformers_load_what_is_exported(
    tiny_llama: Path, command: Command, empty_folder: Path
) -> None:
    """T5: another scaling, a layer left out or a merge in half precision would be off by 1e-3."""
    folder = train_llama(command, tiny_llama, *LORA)
    found = json.loads(command("export", "full_finetune", "--json", code=0)[1])
    assert found["kind"] == "adapter"
    keys = load_file(folder / "export/adapter/adapter_model.safetensors").keys()
    assert all(key.startswith("base_model.model.model.layers.") for key in keys)
    assert len(keys) == 28
    command("export", str(folder), "--merge", code=0)
    expected = logits(adapted_model(folder))
    base = HFCausalLM(name=str(tiny_llama))
    base.configure_model()
    assert (logits(base) - expected).abs().max() > 1e-2, "the adapter differs from the base"
    for found in elsewhere(tiny_llama, folder / "export" / "adapter", folder / "export" / "model"):
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-5)


@pytest.mark.slow
def test_a_merged_export_includes_the_base_that_is_the_checkpoint_of_another_run(
    tiny_llama: Path, command: Command, empty_folder: Path
) -> None:
    path = train_llama(command, tiny_llama) / "checkpoints" / "step-2.ckpt"
    folder = train_llama(command, tiny_llama, *LORA, f"+callbacks.peft_adapter.base_checkpoint='{path}'")
    command("export", str(folder), "--out", "outputs/0", "--merge", code=0)
    merged: Any = AutoModelForCausalLM.from_pretrained("outputs/0")
    torch.testing.assert_close(logits(merged), logits(adapted_model(folder)), rtol=0.0, atol=1e-5)


def test_a_gpt_with_tied_weights_is_exported_merged_and_as_an_adapter(
    tiny: list[str], command: Command
) -> None:
    """Head and embedding share a weight: it is written once, and loaded under both names."""
    words = ["+callbacks=peft_adapter", "+callbacks.peft_adapter.target_modules=[qkv]"]
    command("train", "lm", *tiny, *words, code=0)
    for flags in ([], ["--merge"]):
        command("export", "lm", *flags, code=0)
    folder = max(Path("outputs/lm").iterdir())
    adapted = adapted_model(folder)
    model, bare = (
        run.make("model", yaml.safe_load((folder / run.RESOLVED).read_text())["model"]) for _ in range(2)
    )
    for each in (model, bare):
        each.configure_model()
    load_model(model, str(folder / "export" / "model" / "model.safetensors"))
    torch.testing.assert_close(logits(model), logits(adapted), rtol=0.0, atol=1e-5)
    state = {name.replace(".base_layer.", "."): value for name, value in adapted.state_dict().items()}
    bare.load_state_dict(state, strict=False)
    pefts = PeftModel.from_pretrained(bare, str(folder / "export" / "adapter"))
    torch.testing.assert_close(logits(pefts), logits(adapted), rtol=0.0, atol=1e-5)


@pytest.mark.parametrize("named", [*METHODS, "head", "pissa", "pattern"])
def test_an_adapter_of_each_method_is_read_by_peft_and_merged(named: str, tmp_path: Path) -> None:
    """With values other than the initial ones, in float64: by PEFT from its file, and after merging."""
    method, options = METHODS.get(named, ("lora", {"r": 4}))
    square = ("oft", "hra", "fourierft", "vera", "randlora")
    own: dict[str, Any] = {"target_modules": ["linear"] if method in square else ["linear", "first"]}
    own |= {"modules_to_save": ["second"]} if named == "head" else {}
    options = options | ({"init_lora_weights": "pissa"} if named == "pissa" else {})
    options = options | ({"rank_pattern": {"first": 2}} if named == "pattern" else {})
    torch.manual_seed(1)
    dtype = torch.float32 if named == "pissa" else torch.float64  # PiSSA has no double precision
    model = Exact(dropout=0.0).to(dtype)
    bare = Exact(dropout=0.0).to(dtype)
    bare.load_state_dict(model.state_dict())
    torch.manual_seed(3)
    adapt(model, method=method, options=options, **own)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    model.eval()
    x = torch.randn(5, 8, dtype=dtype)
    expected, before = model(x), bare.eval()(x)
    assert (expected - before).abs().max() > 1e-3
    merged = copy.deepcopy(model)
    assert adapter_export.merge_adapters(merged) == []
    assert merged.state_dict().keys() == bare.state_dict().keys()
    torch.testing.assert_close(merged(x), expected, rtol=0.0, atol=1e-5)
    adapter_export.save_adapter(model, tmp_path / "adapter")
    again = PeftModel.from_pretrained(bare, str(tmp_path / "adapter"))
    torch.testing.assert_close(again.eval()(x), expected, rtol=0.0, atol=1e-5)


class Llama(nn.Module):
    """A Hugging Face model with one matrix for its embedding and its head."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder, tie_word_embeddings=True))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids).logits


def trained(model: nn.Module, **keywords: Any) -> Any:
    """Return a model with adapters that are no identity."""
    adapt(model, **keywords)
    torch.manual_seed(1)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`", "ignore:.*tied")
@pytest.mark.parametrize("targets", [["lm_head", "q_proj"], ["embed_tokens"]])
def test_merging_does_not_change_the_layer_that_shares_the_weight(
    targets: list[str], tiny_llama: Path, tmp_path: Path
) -> None:
    """A merge in place would change the embedding with the head: logits are then wrong by whole numbers."""
    model, ids = trained(Llama(tiny_llama), target_modules=targets), torch.arange(8)[None]
    expected = model(ids)
    untied = adapter_export.merge_adapters(model)
    assert untied == ["model.model.embed_tokens.weight", "model.lm_head.weight"]
    adapter_export.save_full_model(model, tmp_path)
    torch.testing.assert_close(model(ids), expected, rtol=0.0, atol=1e-5)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(input_ids=ids).logits, expected, rtol=0.0, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Embedding(4, 4, max_norm=1.0)],
    ids=["weight_norm", "max_norm"],
)
def test_an_adapter_is_not_merged_into_a_weight_that_each_forward_computes(layer: nn.Module) -> None:
    model = trained(nn.ModuleDict({"layer": layer}), target_modules=["layer"])
    with pytest.raises(ConfigError, match="layer computes or rescales its weight"):
        adapter_export.merge_adapters(model)


QUANTIZED = ["precision=quantized_base", "precision.compute_dtype=fp32"]
BF16 = ["precision=quantized_base", "precision.quant_type=bf16", "precision.compute_dtype=auto"]


@pytest.mark.parametrize(
    "words", [QUANTIZED, pytest.param(BF16, marks=pytest.mark.slow)], ids=["nf4", "bf16"]
)
def test_the_adapter_of_a_quantized_base_is_exported(
    tiny_llama: Path, command: Command, empty_folder: Path, words: list[str]
) -> None:
    """The adapter's values are exported to the bit; a merge is exact or rejected."""
    folder = train_llama(command, tiny_llama, *LORA, *words)
    command("export", str(folder), code=0)
    written = load_file(folder / "export" / "adapter" / "adapter_model.safetensors")
    saved = stored_weights.checkpoint(folder / "checkpoints" / "step-2.ckpt")["state_dict"]
    for key, value in written.items():
        name = key.removeprefix("base_model.").replace(".weight", ".default.weight")
        assert torch.equal(value, saved[name]), key
    assert len(written) == 28
    if words == QUANTIZED:
        command("export", str(folder), "--merge", code=2)
        rejects_another_base_but_not_rounding(command, folder)
        return
    command("export", str(folder), "--merge", code=0)
    merged: Any = AutoModelForCausalLM.from_pretrained(folder / "export" / "model")
    exact = logits(adapted_model(folder).float())
    torch.testing.assert_close(logits(merged), exact, rtol=0.0, atol=1e-5)


def rejects_another_base_but_not_rounding(command: Command, folder: Path) -> None:
    """Another device rounds differently when it quantizes; the other tensors are the same."""

    def changed(name: str, file: str) -> list[str]:
        def change(checkpoint: Any) -> None:
            base = checkpoint[adapter_state.CHECKPOINT_KEY]["base"]
            form = base["tensors"][name].partition(" ")[0]
            base["tensors"] |= {name: f"{form} 0123456789abcdef"}

        edited(folder / "checkpoints" / "step-2.ckpt", Path(file), change)
        return ["export", str(folder), "--checkpoint", file, "--out", f"outputs/{file}"]

    out = command(*changed("model.model.layers.0.mlp.up_proj.weight", "rounded.ckpt"), code=0)[1]
    assert "1 tensor of the base" in out
    err = command(*changed("model.model.embed_tokens.weight", "other.ckpt"), code=1)[2]
    assert "'model.model.embed_tokens.weight'" in err


WRONG: list[tuple[list[str], int, str]] = [
    (["RUN", "--checkpoint", "beste"], 2, "--checkpoint='beste'"),
    (["RUN", "--out", "/tmp/elsewhere"], 2, "--out='/tmp/elsewhere'"),
    (["RUN", "--out", "outputs"], 2, "--out='outputs'"),
    (["RUN", "--checkpoint", "wrong.ckpt"], 1, "checkpoint wrong.ckpt .* 'model.model.layers.0"),
]


def test_a_rejected_or_failed_export_leaves_no_file(
    tiny_llama: Path, command: Command, empty_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For wrong arguments, damaged checkpoints, configs that `train` would reject, and a full disk."""
    folder = train_llama(command, tiny_llama, *LORA)
    path = folder / "checkpoints" / "step-2.ckpt"
    edited(path, Path("wrong.ckpt"), lambda c: c["state_dict"].pop(next(iter(c["state_dict"]))))
    before = sorted(Path().rglob("*"))
    for words, code, text in WRONG:
        err = command("export", *[str(folder) if word == "RUN" else word for word in words], code=code)[2]
        assert re.search(text, err), (words, err)
        assert "Traceback" not in err
    config, touched = folder / run.RESOLVED, Path("touched").resolve()
    good = config.read_text()
    config.write_text(f"!!python/object/apply:os.system ['touch {touched}']")
    assert "Traceback" not in command("export", str(folder), code=2)[2]
    config.write_text(good)
    assert sorted(Path().rglob("*")) == before

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(adapter_export, "save_adapter", full)
        assert "No space left on device" in command("export", str(folder), code=1)[2]
    assert list((folder / "export").iterdir()) == []
    command("export", str(folder), code=0)
