"""The report names the kernel that computed attention, with a remedy if it is quadratic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.core.errors import SlowPathWarning
from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.report.attention import AttentionRow
from lightning_eff.report.flops import FlopCount
from tests.support.attending import Attending
from tests.support.models import make_trainer

TRIL = torch.ones(8, 8, dtype=torch.bool).tril()


class Block(nn.Module):
    """Calls one function of query, key and value on projections of its input [2, 8, 64]."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv = nn.Linear(64, 192)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 8, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return x + self.attend(q, k, v).transpose(1, 2).reshape(2, 8, -1)[..., :64]


def sdpa(**options: Any) -> Callable[..., Tensor]:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-1, -2) / 4 + torch.zeros(8, 8).masked_fill(~TRIL, -1e9)
    return F.dropout(scores.float().softmax(-1).to(q.dtype), 0.1) @ v


CASES: dict[str, tuple[Callable[..., Tensor], str, str]] = {
    "plain": (sdpa(), "flash", "none"),
    "causal": (sdpa(is_causal=True), "flash", "causal"),
    "mask": (sdpa(attn_mask=TRIL), "flash", "dense"),
    "fewer key heads": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
        "flash", "none",
    ),
    "dropout": (sdpa(dropout_p=0.1), "math", ""),
    "3-D": (
        lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]).expand(2, -1, -1, -1), "math", "",
    ),
    "own softmax": (eager, "softmax", ""),
}  # fmt: skip


def rows_of(step: Callable[[], Tensor]) -> list[AttentionRow]:
    with FlopCount() as count:
        step().float().sum().backward()
    return count.attention.rows()


@pytest.mark.parametrize("case", CASES)
def test_backend_and_mask_are_named_also_checkpointed(case: str) -> None:
    attend, backend, mask = CASES[case]
    block, x = Block(attend), torch.randn(2, 8, 64)
    (row,) = rows_of(lambda: block(x))
    assert (row.backend, row.mask, row.calls) == (backend, mask, 1)
    assert bool(row.remedy) == (backend != "flash")
    assert rows_of(lambda: checkpoint(block, x, use_reentrant=False)) == [row]


def test_layers_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(64, 4, batch_first=True)
    (row,) = rows_of(lambda: layer(torch.randn(2, 8, 64)))
    assert (row.backend, row.shape) == ("math", (2, 4, 8, 8))
    attention, x = nn.MultiheadAttention(64, 4, batch_first=True), torch.randn(2, 8, 64)
    (row,) = rows_of(lambda: attention(x, x, x, attn_mask=~TRIL)[0])
    assert (row.backend, row.shape) == ("softmax", (8, 8, 8))
    (row,) = rows_of(lambda: attention(x, x, x, need_weights=False)[0])
    assert row.backend == "flash"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
def test_what_is_no_attention_is_left_out() -> None:
    x = torch.randn(4, 8, 16, requires_grad=True)
    assert rows_of(lambda: (x @ torch.randn(4, 16, 9)).softmax(-1)) == [], "a classifier of tokens"
    assert rows_of(lambda: x.softmax(-1) @ torch.randn(4, 16, 8)) == [], "a mixture by a router"
    with FlopCount() as count:
        (x @ x.mT)[0].to_sparse().to(torch.float64)
        with torch.inference_mode():
            torch.where(torch.ones(3, dtype=torch.bool))
        nested = torch.nested.nested_tensor([torch.ones(2, 3, 3), torch.ones(2, 5, 5)])
        nested.softmax(-1)
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
        assert sum(w.category is SlowPathWarning for w in recwarn) == num_warnings
        (row,) = report.report["attention"]
        assert (row["backend"], row["shape"]) == ("math", [1, 2, length, length])
        assert (row["calls"], row["score_bytes"]) == (1, 2 * length * length * 4)
