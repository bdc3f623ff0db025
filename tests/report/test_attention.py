"""Which attention ran is found, with the reason, in plain and in compiled models."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.core.compiled_call import CompiledCall
from lightning_eff.core.errors import SlowPathWarning
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.attention import AttentionRow
from lightning_eff.report.compiled_attention import CompiledAttention
from lightning_eff.report.flops import FlopCount
from lightning_eff.report.recording import Recorder

SHAPE = (2, 4, 8, 16)
SCORES = 2 * 4 * 8 * 8 * 4
"""Bytes of the scores of all heads in float32."""
TRIL = torch.ones(8, 8, dtype=torch.bool).tril()


class Block(nn.Module):
    """Calls one function of query, key and value on projections of its input [2, 8, 64]."""

    def __init__(self, attend: Callable[..., Tensor], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(64, 192, dtype=dtype)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).reshape(2, 8, -1)[..., :64]


def sdpa(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 4 + torch.zeros(8, 8).masked_fill(~TRIL, -1e9)
    return F.dropout(scores.float().softmax(-1).to(q.dtype), 0.1) @ v


CASES: dict[str, tuple[Callable[..., Tensor], str, str, str]] = {
    "plain": (sdpa(), "flash", "none", ""),
    "causal": (sdpa(is_causal=True), "flash", "causal", ""),
    "float mask": (sdpa(attn_mask=torch.arange(64.0).view(8, 8)), "flash", "float", ""),
    "bool mask": (sdpa(attn_mask=TRIL), "flash", "bool that is causal", ""),
    "idle mask": (sdpa(attn_mask=TRIL | True), "flash", "bool that masks nothing", ""),
    "fewer key heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        "flash", "none", "",
    ),
    "dropout": (sdpa(dropout_p=0.1, is_causal=True), "math", "causal", "dropout"),
    "value heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, torch.cat([v, v], -1)),
        "math", "none", "head sizes differ",
    ),
    "trained mask": (
        sdpa(attn_mask=torch.zeros(8, 8, requires_grad=True)), "math", "float", "mask requires grad",
    ),
    "3-D": (
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]).expand(2, -1, -1, -1),
        "math", "none", "not 4-D",
    ),
    "own softmax": (
        eager, "softmax", "float that is causal",
        "scores are computed by the model, not by F.scaled_dot_product_attention",
    ),
}  # fmt: skip


def rows_of(step: Callable[[], Tensor]) -> list[AttentionRow]:
    with FlopCount() as count:
        step().float().sum().backward()
    return count.attention.rows()


@pytest.mark.parametrize("case", CASES)
def test_backend_mask_and_reason_are_named_also_checkpointed(case: str) -> None:
    attend, backend, mask, reason = CASES[case]
    block, x = Block(attend), torch.randn(2, 8, 64)
    (row,) = rows_of(lambda: block(x))
    assert (row.backend, row.mask, row.reason, row.calls) == (backend, mask, reason, 1)
    assert bool(row.remedy) == bool(reason or "that" in mask)
    again = rows_of(lambda: checkpoint(block, x, use_reentrant=False))
    assert again == [dataclasses.replace(row, score_bytes=0)], (
        "called once; no scores held between the passes"
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    (row,) = rows_of(lambda: Block(sdpa(), dtype)(torch.randn(2, 8, 64, dtype=dtype)))
    assert (row.backend, row.call.dtype, row.call.query) == ("flash", dtype, SHAPE)


def test_layers_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    (row,) = rows_of(lambda: layer(torch.randn(2, 8, 64)))
    assert (row.backend, row.reason, row.call.query) == ("math", "dropout", SHAPE)
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 8, 64)
    (row,) = rows_of(lambda: attention(x, x, x)[0])
    assert (row.backend, row.call.query) == ("softmax", (8, 8, 16))
    assert "need_weights=False" in row.remedy
    (row,) = rows_of(lambda: attention(x, x, x, need_weights=False)[0])
    assert row.backend == "flash"


def test_bytes_are_those_of_scores_that_live_on_and_of_each_mask_once() -> None:
    (row,) = rows_of(lambda: Block(CASES["value heads"][0])(torch.randn(2, 8, 64)))
    assert (row.score_bytes, row.mask_bytes) == (SCORES, 0)
    (row,) = rows_of(lambda: Block(sdpa(dropout_p=0.5))(torch.randn(2, 8, 64)))
    assert row.score_bytes == 3 * SCORES, "softmax, dropout's mask, their product"
    blocks, mask = [Block(sdpa(attn_mask=torch.ones(2, 1, 8, 8))) for _ in range(2)], 2 * 8 * 8 * 4
    (row,) = rows_of(lambda: nn.Sequential(*blocks)(torch.randn(2, 8, 64)))
    assert (row.calls, row.mask_bytes) == (2, 2 * mask), "two masks"
    (row,) = rows_of(lambda: nn.Sequential(blocks[0], blocks[0])(torch.randn(2, 8, 64)))
    assert (row.calls, row.mask_bytes) == (2, mask), "one mask, used twice"


def test_nothing_lives_longer_for_being_looked_at() -> None:
    x = torch.randn(1, 2, 8, 4)
    with FlopCount() as count, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        mask = torch.randn(8, 8)
        mask_storage = weakref.ref(mask.untyped_storage())
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        storage = weakref.ref(out.untyped_storage())
        del mask, out
        assert (mask_storage(), storage()) == (None, None)
    assert [row.score_bytes for row in count.attention.rows()] == [0]


def test_what_has_no_storage_or_no_values_does_not_end_a_run() -> None:
    x = torch.randn(1, 8, 4)
    with FlopCount() as count:
        (x @ x.mT)[0].to_sparse().to(torch.float64)
        with torch.inference_mode():
            torch.where(torch.ones(3, dtype=torch.bool))
        Block(sdpa())(torch.randn(2, 8, 64))
    assert count.attention.error is None
    assert [row.backend for row in count.attention.rows()] == ["flash"]
    count.attention.see(None, (), {}, None)  # nothing that torch would call
    with count:
        F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.1)


MASKS: dict[str, tuple[Callable[[Tensor], Tensor], str, int]] = {
    "added": (lambda s: s + torch.zeros(8, 8).masked_fill(~TRIL, -1e9), "float that is causal", 256),
    "distance": (lambda s: s - 0.5 * torch.ones(8, 8).triu(1), "float", 256),
    "filled in": (lambda s: s.masked_fill(~TRIL, -1e9), "bool", 64),
    "two": (lambda s: s + torch.randn(8, 8) + torch.zeros(8, 8).masked_fill(~TRIL, -1e9), "float", 512),
    "scale of heads": (lambda s: s * torch.ones(4, 1, 1), "none", 0),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_scores(name: str) -> None:
    change, mask, num_bytes = MASKS[name]
    (row,) = rows_of(lambda: Block(lambda q, k, v: change(q @ k.mT).softmax(-1) @ v)(torch.randn(2, 8, 64)))
    assert (row.mask, row.mask_bytes) == (mask, num_bytes)


def test_the_mask_of_a_multi_head_attention_and_a_cast_of_its_result() -> None:
    attention = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    (row,) = rows_of(lambda: attention(x, x, x, attn_mask=~TRIL)[0].to(torch.float32))
    assert (row.mask, row.call.dtype) == ("float that is causal", torch.float64)


class Fails(nn.Module):
    """A graph whose last operation needs a size that is not known."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            count = (x > 0).nonzero().shape[0]
        return x.sin() * (1 + count * 1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_looking_at_a_graph_changes_no_state_of_its_compilation() -> None:
    net = nn.Sequential(nn.Linear(4, 4), Fails())
    net[1].compile(backend="aot_eager")
    torch.compiler.reset()
    count = CompiledAttention()
    with (
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True),
        count.begin(None, net, None),
        count,
    ):
        assert net(torch.ones(2, 4)).requires_grad
        assert torch.is_grad_enabled()


def test_a_graph_inside_a_checkpoint_is_looked_at_unseen_by_the_checkpoint() -> None:
    block, x = Block(sdpa()), torch.randn(2, 8, 64, requires_grad=True)
    block.compile(backend="aot_eager")
    torch.compiler.reset()
    count = CompiledAttention()
    with count.begin(None, block, None), count:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    assert [(row.calls, row.score_bytes) for row in count.attention.rows()] == [(1, 0)]


class AnySize(nn.Linear):
    """Attention over [B, T, 8] in two heads."""

    @override
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x).view(x.shape[0], x.shape[1], 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(y, y, y)


def test_sizes_that_change_are_not_compiled_in_by_looking() -> None:
    block = AnySize(8, 8)
    block.compile(backend="aot_eager")
    torch.compiler.reset()
    block(torch.randn(2, 8, 8))
    count = CompiledAttention()
    with count.begin(None, block, None), count:
        block(torch.randn(3, 9, 8))
    assert [row.call.query for row in count.attention.rows()] == [(3, 2, 9, 4)]
    num_graphs = counters["stats"]["unique_graphs"]
    block(torch.randn(4, 11, 8))
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_what_is_no_attention_is_left_out() -> None:
    x = torch.randn(4, 8, 16, requires_grad=True)
    assert rows_of(lambda: (x @ torch.randn(4, 16, 8)).softmax(-1)) == [], "a classifier of tokens"
    assert rows_of(lambda: x.softmax(-1) @ torch.randn(4, 16, 8)) == [], "a mixture by a router"

    def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(q, k, v)

    (row,) = rows_of(lambda: Block(by_math)(torch.randn(2, 8, 64)))
    assert row.reason == "math was selected", "also where it is told after the selection has ended"


@pytest.mark.parametrize("how", ["forward", "module", "wrapper"])
@pytest.mark.parametrize("case", ["causal", "dropout", "own softmax"])
def test_compiled_blocks_are_counted_one_by_one_and_left_as_they_were(case: str, how: str) -> None:
    attend, backend, *_ = CASES[case]
    blocks = [Block(attend) for _ in range(3)]
    if how == "wrapper":
        compiled: Any = [torch.compile(block, backend="aot_eager") for block in blocks]
        net = nn.Sequential(*compiled)
    else:
        net = nn.Sequential(*blocks)
        for block in blocks:
            if how == "module":
                block.compile(backend="aot_eager")
            else:
                block.forward = CompiledCall(block.forward, {"backend": "aot_eager"})
    before = [dict(vars(module)) for module in net.modules()]
    torch.compiler.reset()
    count = CompiledAttention()
    with count.begin(None, net, None), count:
        net(torch.randn(2, 8, 64)).sum().backward()
    (row,) = count.attention.rows()
    assert (row.backend, row.calls, row.modules) == (backend, 3, ("0", "1", "2"))
    assert [dict(vars(module)) for module in net.modules()] == before
    num_graphs = counters["stats"]["unique_graphs"]
    net(torch.randn(2, 8, 64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


class Net(pl.LightningModule):
    """Attention over [1, 2, `length`, 8], with dropout."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.layer = length, nn.Linear(1, 8)

    @override
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.layer(torch.ones(1, 2, self.length, 1))
        return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1).mean()

    @override
    def train_dataloader(self) -> Any:
        return [torch.zeros(1)] * 3

    @override
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_report_of_a_plain_trainer_and_one_warning_for_long_sequences(
    tmp_path: Any, recwarn: pytest.WarningsRecorder
) -> None:
    for length, num_warnings in ((511, 0), (512, 1)):
        report = EfficiencyReport(dirpath=tmp_path)
        trainer = pl.Trainer(
            max_steps=3, callbacks=[report], logger=False, accelerator="cpu", enable_progress_bar=False,
            enable_checkpointing=False, enable_model_summary=False,
        )  # fmt: skip
        recwarn.clear()
        trainer.fit(Net(length))
        texts = [str(w.message) for w in recwarn if w.category is SlowPathWarning]
        assert len(texts) == num_warnings
        (row,) = report.report["attention"]
        assert (row["backend"], row["reason"], row["query"]) == ("math", "dropout", [1, 2, length, 8])
        assert row["score_bytes"] == 3 * 2 * length * length * 4
    assert "6.0 MiB of scores held; dropout" in texts[0]
    assert "try: dropout 0.0 in the attention, or a CUDA device" in texts[0]
    assert "Attention of the first batch" in (tmp_path / "report.html").read_text()


def test_recorder_looks_at_the_first_batch_alone() -> None:
    block, x, recorder = Block(sdpa()), torch.randn(2, 8, 64), Recorder()
    for _ in range(2):
        with recorder.begin([x], block, []), recorder:
            block(x).sum().backward()
    assert [(row.calls, row.modules) for row in recorder.attention.rows()] == [(1, ("(root)",))]
