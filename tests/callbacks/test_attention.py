"""Backends are chosen and checked; packed rows without a mask match packed rows with the dense mask."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel, varlen
from transformers import masking_utils as masks
from transformers.models.llama import modeling_llama
from typing_extensions import override

from lightning_eff.callbacks._packed_attention import (
    NAME,
    LateMask,
    PackedAttention,
    switched,
    why_not_varlen,
)
from lightning_eff.callbacks.attention import Attention, checked_backends
from lightning_eff.core.errors import ConfigError, ConflictError, NoEffectWarning
from lightning_eff.prediction.predict import predict
from tests.support.attending import Attending
from tests.support.models import make_trainer
from tests.support.versions import since_torch_2_13


def run(net: pl.LightningModule, callback: Attention) -> Attention:
    make_trainer(callbacks=[callback], max_steps=2).fit(net)
    return callback


def test_only_the_chosen_backend_is_enabled_during_the_fit() -> None:
    net, attend = Attending(is_causal=True), F.scaled_dot_product_attention
    callback = run(net, Attention(backend="flash"))
    assert net.flags == [False, False]
    assert torch.backends.cuda.math_sdp_enabled()
    assert F.scaled_dot_product_attention is attend
    assert callback.outcome().numbers["calls"] == {"flash": 1}, "only of the first batch"


def test_a_call_that_no_chosen_backend_accepts_is_rejected_before_the_first_step() -> None:
    net, attend = Attending(dropout_p=0.1), F.scaled_dot_product_attention
    before = net.layer.weight.detach().clone()
    with pytest.raises(ConflictError, match="dropout"):
        run(net, Attention(backend=["cudnn", "flash"]))
    assert torch.equal(net.layer.weight, before)
    assert F.scaled_dot_product_attention is attend
    assert torch.backends.cuda.math_sdp_enabled()
    callback = run(net, Attention(backend=["flash", "math"]))
    assert callback.outcome().numbers["calls"] == {"math": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_calls_by_keyword_and_under_autocast_are_checked() -> None:
    x = torch.ones(1, 2, 8, 8)
    nested = torch.nested.nested_tensor([torch.ones(2, 3, 4), torch.ones(2, 5, 4)])
    with checked_backends([], 0) as calls:
        F.scaled_dot_product_attention(nested, nested, nested)  # left to torch
        F.scaled_dot_product_attention(query=x, key=x, value=x)
        with sdpa_kernel(SDPBackend.MATH):
            F.scaled_dot_product_attention(x, x, x)
    assert dict(calls) == {"flash": 1, "math": 1}
    with torch.autocast("cpu", torch.bfloat16), checked_backends(["flash"], 80):
        assert F.scaled_dot_product_attention(x, x, x).dtype == torch.bfloat16
    with checked_backends(["flash"], 80), pytest.raises(ConflictError, match="not half precision"):
        F.scaled_dot_product_attention(x, x, x)


@pytest.mark.parametrize("backend", [[], ["flash", "fast"], "efficient"])
def test_unknown_backends_and_backends_of_another_device_are_rejected(backend: Any) -> None:
    with pytest.raises(ConfigError, match="backend="):
        run(Attending(), Attention(backend=backend))


def test_without_a_chosen_backend_it_has_no_effect() -> None:
    with pytest.warns(NoEffectWarning):
        run(Attending(), Attention())


def by_document(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, _: Tensor, longest: int, __: int, *, scale: float,
    enable_gqa: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    """Compute what `varlen_attn` does, one document after another."""
    assert starts.dtype == torch.int32
    out: list[Tensor] = []
    for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        assert stop - start <= longest
        index = torch.arange(stop - start)
        distance = index[:, None] - index
        seen = (distance >= 0) if window_size[1] == 0 else torch.ones_like(distance, dtype=torch.bool)
        seen &= (distance <= window_size[0]) if window_size[0] >= 0 else True
        rows = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        y = F.scaled_dot_product_attention(*rows, attn_mask=seen, scale=scale, enable_gqa=enable_gqa)
        out.append(y[0].transpose(0, 1))
    return torch.cat(out)


def hf_model(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = getattr(transformers, f"{kind}Config")(vocab_size=50, num_hidden_layers=2, **sizes, **options)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)


PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6, 0, 0, 1]])
BATCHES: dict[str, dict[str, Tensor]] = {
    "packed": {"position_ids": PACKED},
    "one document a row": {"position_ids": torch.arange(10).expand(2, -1)},
    "padded": {"attention_mask": (torch.arange(10) < torch.tensor([[10], [6]])).long()},
}


@pytest.mark.parametrize(("kind", "batch"), [*(("Llama", batch) for batch in BATCHES), ("Mistral", "packed")])
def test_packed_rows_without_a_mask_match_rows_with_the_dense_mask(kind: str, batch: str) -> None:
    options = {"sliding_window": 3} if kind == "Mistral" else {}
    ids = torch.randint(50, (2, 10), generator=torch.Generator().manual_seed(1))
    inputs = BATCHES[batch] | {"input_ids": ids, "use_cache": False}
    model, packed = hf_model(kind, **options), PackedAttention(by_document)
    weight = inputs.get("attention_mask", torch.ones(2, 10))[..., None].double()
    results: list[list[Tensor]] = []
    for is_switched in (False, True):
        model.zero_grad()
        if is_switched:
            with switched(model, NAME, packed):
                logits = model(**inputs).logits
        else:
            logits = model(**inputs).logits
        (logits * weight).square().sum().backward()
        results.append([logits * weight, *(p.grad.clone() for p in model.parameters())])
    for new, old in zip(*reversed(results), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-12)
    assert (packed.num_batches, packed.num_documents) == ((1, 6) if batch == "packed" else (0, 0))
    assert packed.mask_bytes == (2 * 10 * 10 if batch == "packed" else 0)
    assert model.config._attn_implementation == "sdpa"


def test_a_prediction_for_a_gpu_applies_the_rules_of_the_gpu() -> None:
    trainer = make_trainer(callbacks=[Attention(backend="cudnn")], max_steps=2)
    found = predict(Attending(), torch.zeros(1), trainer=trainer, capability=90)
    assert isinstance(found.error, ConflictError)
    trainer = make_trainer(callbacks=[Attention(backend="efficient")], max_steps=2)
    found = predict(Attending(dropout_p=0.1), torch.zeros(1), trainer=trainer, capability=90)
    assert [row.backend for row in found.attention] == ["efficient"]


def test_documents_are_found_once_per_batch_and_again_after_a_change_of_positions() -> None:
    packed, positions = PackedAttention(by_document), PACKED.clone()
    assert packed.documents_of(positions, 2) is packed.documents_of(positions, 2)
    assert packed.num_batches == 1
    positions.copy_(torch.arange(10).expand(2, -1))
    assert packed.documents_of(positions, 2) is None
    reference = weakref.ref(positions)
    del positions
    assert reference() is None
    # One row of positions serves a batch of any size.
    found = [packed.documents_of(PACKED[:1], num_rows) for num_rows in (1, 2)]
    assert [each.starts[-1].item() for each in found if each is not None] == [10, 20]


def test_a_window_that_only_the_mask_has_is_found_in_the_first_longer_document() -> None:
    packed, x = PackedAttention(by_document), torch.ones(2, 1, 10, 4)

    def attend(positions: Tensor) -> None:
        documents = masks.packed_sequence_mask_function(masks.find_packed_sequence_indices(positions))
        window = masks.and_masks(masks.sliding_window_causal_mask_function(4), documents)
        mask = LateMask(batch_size=2, q_length=10, kv_length=10, mask_function=window)
        packed(nn.Identity(), x, x, x, mask, position_ids=positions)

    short = torch.tensor([0, 1, 2, 3, 0, 1, 2, 0, 1, 2]).repeat(2, 1)
    attend(short)
    for row in (0, 1):  # neither the batch nor the row of the longest document is the first
        longer = short.clone()
        longer[row] = torch.tensor([*range(8), 0, 1])
        with pytest.raises(ConflictError):
            attend(longer)


@pytest.mark.parametrize("kind", ["or_mask_function", "block_sequence_ids"])
def test_a_mask_that_depends_on_the_batch_stays_dense(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of an image attend to each other in both directions, here in the second row."""
    model, packed = hf_model("Llama"), PackedAttention(by_document)
    image = torch.full((2, 10), -1)
    image[1, :3] = 0

    def is_image(row: Any, _: Any, query: Any, key: Any) -> Any:
        return (image[row, query] == 0) & (image[row, key] == 0)

    more = {kind: is_image if kind == "or_mask_function" else image}
    make = modeling_llama.create_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **given: make(**given | more))
    inputs = {"input_ids": torch.arange(20).view(2, 10), "position_ids": PACKED, "use_cache": False}
    expected = model(**inputs).logits
    with switched(model, NAME, packed):
        assert torch.equal(model(**inputs).logits, expected)


def test_operands_are_cast_as_autocast_would() -> None:
    """A norm with weights of float32 leaves queries and keys in float32."""
    model, dtypes = hf_model("Qwen3", head_dim=8).float(), set[Any]()

    def kernel(*operands: Tensor, **options: Any) -> Tensor:
        dtypes.update(x.dtype for x in operands[:3])
        return by_document(*operands, **options)  # pyright: ignore[reportArgumentType]

    with switched(model, NAME, PackedAttention(kernel)), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=torch.zeros_like(PACKED), position_ids=PACKED, use_cache=False)
    assert dtypes == {torch.bfloat16}


def test_only_models_with_sdpa_are_switched_and_restored() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = transformers.CLIPVisionConfig(image_size=8, patch_size=4, **sizes)
    config = transformers.LlavaConfig(
        vision_config=vision, text_config=transformers.LlamaConfig(vocab_size=20, **sizes)
    )
    config._attn_implementation = {"": "sdpa", "vision_config": "eager", "text_config": "sdpa"}
    config = transformers.LlavaForConditionalGeneration(config).config

    def used() -> list[str]:
        return [each._attn_implementation for each in (config, config.vision_config, config.text_config)]

    model = transformers.LlavaForConditionalGeneration(config)
    with switched(model, NAME, PackedAttention(by_document)):
        assert used() == [NAME, "eager", NAME]
    assert used() == ["sdpa", "eager", "sdpa"]


def test_a_batch_without_packed_rows_computes_as_before() -> None:
    """With attention dropout in training, and in evaluation with a cache that is longer than the tokens."""
    model = hf_model("Llama", attention_dropout=0.1)
    ids = torch.randint(50, (2, 6), generator=torch.Generator().manual_seed(1))
    texts: list[Tensor] = []
    for context in (nullcontext(), switched(model, NAME, PackedAttention(by_document))):
        with context:
            torch.manual_seed(5)
            texts.append(model.train()(input_ids=ids, use_cache=False).logits)
            options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
            texts.append(model.eval().generate(ids, **options))
    torch.testing.assert_close(texts[2], texts[0], rtol=1e-10, atol=1e-12)
    assert torch.equal(texts[3], texts[1])


LEFT = (torch.arange(10) >= torch.tensor([[0], [4]])).long()
CALL: dict[str, Any] = {"input_ids": torch.zeros_like(PACKED), "position_ids": PACKED, "use_cache": False}


class Packed(Attending):
    """Calls a model of transformers, with or without its head, on packed rows."""

    def __init__(self, model: Any, *, is_inner: bool = False, **changes: Any) -> None:
        super().__init__()
        self.model, self.is_inner, self.call = model, is_inner, CALL | changes

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        called = self.model.model if self.is_inner else self.model
        return called(**self.call)[0].mean()


@pytest.mark.parametrize(
    ("changes", "rejected"),
    [
        ({}, ""),
        ({"use_cache": None}, "a cache"),
        ({"use_cache": None, "is_inner": True}, "a cache"),
        ({"attention_mask": torch.ones(2, 10, dtype=torch.long)}, "an attention_mask"),
        ({"attention_mask": torch.ones(2, 1, 10, 10).bool().tril()}, ""),
        ({"use_cache": True, "position_ids": torch.arange(10)[None]}, ""),
        # transformers gives all padding position 1.
        ({"attention_mask": LEFT, "position_ids": (LEFT.cumsum(1) - 1).where(LEFT.bool(), 1)}, ""),
    ],
)
def test_calls_that_would_join_documents_are_rejected(changes: dict[str, Any], rejected: str) -> None:
    model = hf_model("Llama")
    with pytest.raises(ConflictError, match=rejected) if rejected else nullcontext():
        run(Packed(model, **changes), Attention(backend="flash"))
    assert not model._forward_hooks
    assert not model.model._forward_hooks


def test_attention_dropout_on_packed_rows_is_rejected() -> None:
    model = hf_model("Llama", attention_dropout=0.1).train()
    with (
        switched(model, NAME, PackedAttention(by_document)),
        pytest.raises(ConflictError, match="packing="),
    ):
        model(input_ids=torch.zeros(2, 10, dtype=torch.long), position_ids=PACKED)


def test_a_cpu_keeps_the_dense_mask_and_reports_why() -> None:
    model = hf_model("Llama")
    reason = why_not_varlen(model, torch.device("cpu"), torch.bfloat16)
    net = Packed(model)
    with pytest.warns(NoEffectWarning, match=f"dense mask: {reason}"):
        run(net, Attention())
    for packing in ("varlen", "flex"):
        with pytest.raises(ConfigError, match=f"packing='{packing}'"):
            run(net, Attention(packing=packing))


@since_torch_2_13
def test_torchs_kernel_accepts_our_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`varlen_attn` runs only on CUDA; its checks of arguments run here."""
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn", lambda q, *_: (q, None, None))
    model = hf_model("Llama")
    with switched(model, NAME, packed := PackedAttention()):
        model(input_ids=torch.zeros_like(PACKED), position_ids=PACKED, use_cache=False)
    assert packed.kernel is varlen.varlen_attn
