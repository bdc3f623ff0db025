"""HFCausalLM: the loss of transformers, isolated documents, loading, rejected folders, and checkpoints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import GPT2Config

from lightning_eff.models.hf_causal_lm import HFCausalLM
from lightning_eff.monitors.text_sample import continue_prompt
from tests.support.models import fit
from tests.support.ranks import is_equal

DOCUMENTS = [[5, 6, 7, 8, 9], [40, 41, 42], [100, 90, 80, 70, 60, 50]]


def make(folder: Path, **keywords: Any) -> HFCausalLM:
    torch.manual_seed(3)
    model = HFCausalLM(name=str(folder), **keywords)
    model.configure_model()
    return model


def step_of(model: HFCausalLM, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what a training step returns, without a Trainer to log to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "log", lambda *args, **keywords: None)
        return model.training_step(batch, 0)


def copy_of(folder: Path, target: Path, **changed: Any) -> Path:
    """Return a copy of a model's folder with a changed configuration, and code that must never run."""
    shutil.copytree(folder, target)
    (target / "code.py").write_text("raise SystemExit('this code was run')\n")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | changed))
    return target


def draw_batch(rows: int = 4, length: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(2, 272, (rows, length), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(length) < torch.arange(rows)[:, None] * 3, -100)
    return {"input_ids": ids, "labels": labels}


def packed() -> dict[str, Tensor]:
    """Return the three documents in one row of 16, the last two places filled up."""
    ids = torch.tensor([[*(i for each in DOCUMENTS for i in each), 1, 1]])
    positions = torch.tensor([[*(p for each in DOCUMENTS for p in range(len(each))), 0, 1]])
    labels = ids.masked_fill(positions == 0, -100)
    labels[0, -2:] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_the_loss_equals_transformers(tiny_llama: Path, form: str) -> None:
    model = make(tiny_llama)
    batch = packed() if form == "packed" else draw_batch()
    if form == "padded":
        batch["attention_mask"] = (torch.arange(12) < torch.tensor([[12], [9], [7], [11]])).long()
    step = step_of(model, batch)
    theirs = model.model(**batch, use_cache=False).loss
    assert torch.equal(step["loss"], theirs)
    assert int(step["loss_weight"]) == int((batch["labels"][:, 1:] != -100).sum())


def test_a_packed_loss_is_the_weighted_mean_of_its_documents(tiny_llama: Path) -> None:
    # Attention or positions that cross, or a target across a boundary, are wrong by more than 1e-4.
    model = make(tiny_llama, dtype="float64")
    assert model.isolates_documents is True
    whole = step_of(model, packed())
    alone = [
        step_of(model, {"input_ids": torch.tensor([each]), "labels": torch.tensor([each])})
        for each in DOCUMENTS
    ]
    total = sum(step["loss"] * step["loss_weight"] for step in alone)
    assert int(whole["loss_weight"]) == sum(int(step["loss_weight"]) for step in alone) == 11
    torch.testing.assert_close(whole["loss"], total / 11, rtol=1e-12, atol=0.0)
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in (whole["loss"], total / 11)]
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-14)
    across = {key: value for key, value in packed().items() if key != "position_ids"}
    assert (step_of(model, across)["loss"] - whole["loss"]).abs() > 1e-4


def test_rows_joined_for_flash_attention_have_the_same_loss(tiny_llama: Path) -> None:
    # Flash attention detects documents only in a batch of one row, so all rows are joined into one.
    model = make(tiny_llama, dtype="float64")
    batch = {key: torch.cat([value, value.flip(0)]) for key, value in packed().items()}
    expected = step_of(model, batch)["loss"]
    model._attention = "flash_attention_2"
    torch.testing.assert_close(step_of(model, batch)["loss"], expected, rtol=1e-12, atol=0.0)


def test_a_model_without_document_isolation_rejects_packed_rows(tmp_path: Path) -> None:
    from transformers import BloomConfig

    BloomConfig(vocab_size=300, hidden_size=16, n_layer=1, n_head=2).save_pretrained(tmp_path / "bloom")
    model = make(tmp_path / "bloom", pretrained=False)
    assert model.isolates_documents is False
    with pytest.raises(ValueError, match=r"data\.packing=false"):
        step_of(model, packed())
    assert step_of(model, draw_batch())["loss"] > 0


def test_two_steps_lower_the_loss_and_the_checkpoint_loads_with_weights_only(
    tiny_llama: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = HFCausalLM(name=str(tiny_llama))
    batch = draw_batch()
    before = step_of(make(tiny_llama), batch)["loss"]
    model.configure_optimizers = lambda: torch.optim.AdamW(model.parameters(), lr=1e-2)
    trainer = fit(model, loader=DataLoader([batch] * 2, batch_size=None), max_steps=2)
    assert step_of(model, batch)["loss"] < 0.97 * before
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    loaded = HFCausalLM.load_from_checkpoint(tmp_path / "last.ckpt", weights_only=True)
    assert all(value is None or isinstance(value, str | int | bool) for value in loaded.hparams.values())
    assert is_equal(loaded.state_dict(), model.state_dict())


def test_the_weights_are_read_from_the_files_only_once(tiny_llama: Path) -> None:
    from safetensors.torch import load_file

    stored = load_file(tiny_llama / "model.safetensors")
    read, drawn = make(tiny_llama), make(tiny_llama, pretrained=False)
    built = read.model
    read.configure_model()
    assert read.model is built
    assert all(module.training for module in built.modules())
    assert is_equal({name: built.get_parameter(name) for name in stored}, stored)
    assert not torch.equal(drawn.model.lm_head.weight, built.lm_head.weight)


def test_random_weights_depend_only_on_the_seed_at_construction(tiny_llama: Path) -> None:
    torch.manual_seed(5)
    first = HFCausalLM(name=str(tiny_llama), pretrained=False)
    torch.manual_seed(5)
    second = HFCausalLM(name=str(tiny_llama), pretrained=False)
    torch.rand(7)  # as a technique might
    state = torch.get_rng_state()
    first.configure_model()
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    second.configure_model()
    assert torch.equal(first.model.lm_head.weight, second.model.lm_head.weight)


def test_the_embedding_grows_and_never_shrinks(tiny_llama: Path) -> None:
    model, tokens = make(tiny_llama, vocab_size=100, pad_to_multiple_of=64), torch.tensor([[1, 2, 3]])
    assert model.model.get_input_embeddings().num_embeddings == 320, "the files have 272 rows"
    torch.testing.assert_close(model(tokens)[..., :272], make(tiny_llama)(tokens))


def test_a_model_is_loaded_in_float32_or_in_the_dtype_of_its_file(tiny_llama: Path, tmp_path: Path) -> None:
    make(tiny_llama, dtype="bfloat16").model.save_pretrained(tmp_path / "half")
    assert make(tmp_path / "half").model.dtype == torch.float32
    half = make(tmp_path / "half", dtype="auto")
    assert half.model.dtype == torch.bfloat16
    batch = draw_batch()
    targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    expected = F.cross_entropy(half(batch["input_ids"]).float().flatten(0, 1), targets.flatten())
    assert torch.equal(step_of(half, batch)["loss"], expected)


@pytest.mark.parametrize(
    ("prepare", "changed"),
    [
        (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), {}),  # a pickle
        (lambda f: (f / "config.json").unlink(), {}),
        (lambda f: (f / "adapter_config.json").write_text("{}"), {}),
        (bool, {"model_type": "mine", "auto_map": {"AutoConfig": "code.Mine"}}),
        (bool, {"model_type": "vit"}),
        (bool, {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    ],
    ids=["pickle", "no config", "adapter", "custom code", "no language model", "quantized"],
)
def test_a_folder_that_cannot_be_loaded_is_rejected_by_name(
    tiny_llama: Path, tmp_path: Path, prepare: Any, changed: dict[str, Any]
) -> None:
    folder = copy_of(tiny_llama, tmp_path / "model", **changed)
    prepare(folder)
    with pytest.raises(ValueError, match=str(folder)):
        HFCausalLM(name=str(folder))


def test_code_next_to_weights_is_never_run(tiny_llama: Path, tmp_path: Path) -> None:
    auto_map = {"AutoConfig": "code.Mine", "AutoModelForCausalLM": "code.Mine"}
    folder = copy_of(tiny_llama, tmp_path / "model", auto_map=auto_map)
    assert type(make(folder).model).__module__.startswith("transformers.models.llama")


@pytest.mark.parametrize(
    "options", [{}, {"do_sample": True, "temperature": 3.0, "top_k": 9, "top_p": 0.8, "eos_token_id": 5}]
)
def test_generated_tokens_match_transformers_and_the_random_state_is_restored(
    options: dict[str, Any], tiny_llama: Path
) -> None:
    model, prompt = make(tiny_llama).eval(), [5, 6, 7, 8]
    options = options | {"max_new_tokens": 12}
    rows = torch.tensor([prompt]).expand(3, -1)
    torch.manual_seed(7)
    expected = model.model.generate(rows, attention_mask=torch.ones_like(rows), **options)[:, 4:].tolist()
    state = torch.get_rng_state()
    assert continue_prompt(model, prompt, options, seed=7, num_samples=3) == expected
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("data", "key"),
    [({"context_length": 65}, "data.context_length=64"), ({"vocab_size": 301}, "model.vocab_size=301")],
)
def test_data_with_longer_rows_or_more_tokens_is_rejected(
    tmp_path: Path, data: dict[str, int], key: str
) -> None:
    GPT2Config(vocab_size=300, n_positions=64, n_embd=16, n_layer=1, n_head=2).save_pretrained(tmp_path)
    model = HFCausalLM(name=str(tmp_path), pretrained=False)
    model.check_data(SimpleNamespace(context_length=64, vocab_size=300))
    with pytest.raises(ValueError, match=key):
        model.check_data(SimpleNamespace(**({"context_length": 64, "vocab_size": 300} | data)))
