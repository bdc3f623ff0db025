"""The kernel that computed attention is found, with the reason where it is quadratic."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.core.errors import SlowPathWarning
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.attention import AttentionRow
from lightning_eff.report.flops import FlopCount
from tests.support.attending import Attending
from tests.support.models import make_trainer

SHAPE = (2, 4, 8, 16)
SCORES = 2 * 4 * 8 * 8 * 4
"""Bytes of the scores of all heads in float32."""
TRIL = torch.ones(8, 8, dtype=torch.bool).tril()
BY_MODEL = "scores are computed by the model, not by F.scaled_dot_product_attention"


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


def filled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q @ k.mT) * torch.ones(4, 1, 1)  # a factor of each head is no mask
    return scores.masked_fill(~TRIL, -1e9).softmax(-1) @ v


CASES: dict[str, tuple[Callable[..., Tensor], str, str, str]] = {
    "plain": (sdpa(), "flash", "none", ""),
    "causal": (sdpa(is_causal=True), "flash", "causal", ""),
    "mask": (sdpa(attn_mask=TRIL), "flash", "float", ""),
    "fewer key heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        "flash", "none", "",
    ),
    "dropout": (sdpa(dropout_p=0.1), "math", "none", "dropout"),
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
    "own softmax": (eager, "softmax", "float", BY_MODEL),
    "own softmax, filled in": (filled, "softmax", "bool", BY_MODEL),
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
    assert (row.backend, row.call.mask, row.reason, row.calls) == (backend, mask, reason, 1)
    assert bool(row.remedy) == bool(reason)
    assert rows_of(lambda: checkpoint(block, x, use_reentrant=False)) == [row]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("p", "backend"), [(0.0, "flash"), (0.5, "math")])
def test_the_dtype_is_that_of_the_operands(dtype: torch.dtype, p: float, backend: str) -> None:
    (row,) = rows_of(lambda: Block(sdpa(dropout_p=p), dtype)(torch.randn(2, 8, 64, dtype=dtype)))
    assert (row.backend, row.call.dtype, row.call.query) == (backend, dtype, SHAPE)
    assert row.call.dropout == p


def test_layers_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    (row,) = rows_of(lambda: layer(torch.randn(2, 8, 64)))
    assert (row.backend, row.reason, row.call.query) == ("math", "dropout", SHAPE)
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 8, 64)
    (row,) = rows_of(lambda: attention(x, x, x, attn_mask=~TRIL)[0])
    assert (row.backend, row.call.query, row.call.mask) == ("softmax", (8, 8, 16), "float")
    assert "need_weights=False" in row.remedy
    (row,) = rows_of(lambda: attention(x, x, x, need_weights=False)[0])
    assert row.backend == "flash"


def test_bytes_of_scores_and_masks() -> None:
    (row,) = rows_of(lambda: Block(sdpa(dropout_p=0.5))(torch.randn(2, 8, 64)))
    assert (row.score_bytes, row.mask_bytes) == (3 * SCORES, 0), "softmax, dropout's mask, their product"
    blocks = [Block(sdpa(attn_mask=torch.ones(2, 1, 8, 8))) for _ in range(2)]
    (row,) = rows_of(lambda: nn.Sequential(*blocks)(torch.randn(2, 8, 64)))
    assert (row.calls, row.score_bytes, row.mask_bytes) == (2, 0, 2 * 8 * 8 * 4)


def test_nothing_lives_longer_for_being_looked_at() -> None:
    x = torch.randn(1, 2, 8, 4)
    with FlopCount() as count, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        mask = torch.randn(8, 8)
        out = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
        scores = x @ x.mT + mask
        storages = [weakref.ref(each.untyped_storage()) for each in (mask, out, scores)]
        del mask, out, scores
        assert [each() for each in storages] == [None] * 3
    (row,) = count.attention.rows()
    assert (row.score_bytes, row.reason) == (0, "math was selected")


def test_scores_of_the_shape_of_queries_are_counted_once() -> None:
    def attend(x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x

    (row,) = rows_of(lambda: attend(attend(torch.randn(2, 8, 8, requires_grad=True))))
    assert (row.backend, row.calls) == ("softmax", 2)


def test_what_is_no_attention_is_left_out() -> None:
    x = torch.randn(4, 8, 16, requires_grad=True)
    assert rows_of(lambda: (x @ torch.randn(4, 16, 8)).softmax(-1)) == [], "a classifier of tokens"
    assert rows_of(lambda: x.softmax(-1) @ torch.randn(4, 16, 8)) == [], "a mixture by a router"
    with FlopCount() as count:
        (x @ x.mT)[0].to_sparse().to(torch.float64)
        with torch.inference_mode():
            torch.where(torch.ones(3, dtype=torch.bool))
    assert count.attention.rows() == []


def test_fused_kernels_of_compiled_blocks_are_found_and_nothing_is_compiled_again() -> None:
    blocks = [Block(sdpa(is_causal=True)) for _ in range(3)]
    for block in blocks:
        block.compile(backend="aot_eager")
    net = nn.Sequential(*blocks)
    torch.compiler.reset()
    count = FlopCount(is_compiled=True)
    with count.begin(None, net, None), count:
        net(torch.randn(2, 8, 64)).sum().backward()
    assert [(row.backend, row.calls) for row in count.attention.rows()] == [("flash", 3)]
    assert count.flops == 0
    num_graphs = counters["stats"]["unique_graphs"]
    net(torch.randn(2, 8, 64)).sum().backward()
    assert counters["stats"]["unique_graphs"] == num_graphs


def test_report_of_a_plain_trainer_and_one_warning_for_long_sequences(
    tmp_path: Any, recwarn: pytest.WarningsRecorder
) -> None:
    for length, num_warnings in ((511, 0), (512, 1)):
        report = EfficiencyReport(dirpath=tmp_path)
        recwarn.clear()
        make_trainer(max_steps=3, callbacks=[report]).fit(Attending(length, dropout_p=0.1))
        texts = [str(w.message) for w in recwarn if w.category is SlowPathWarning]
        assert len(texts) == num_warnings
        (row,) = report.report["attention"]
        assert (row["backend"], row["reason"], row["query"]) == ("math", "dropout", [1, 2, length, 4])
        assert (row["calls"], row["score_bytes"]) == (1, 3 * 2 * length * length * 4)
    assert "try: dropout 0.0" in texts[0]
    assert "Attention of the first batch" in (tmp_path / "report.html").read_text()
