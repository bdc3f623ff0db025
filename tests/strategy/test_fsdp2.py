"""FSDP2 beside Durable; refusals are in _shared/test_refusals.py, two ranks in tests/test_strategies.py."""

from __future__ import annotations

from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.core import rules
from lightning_eff.strategy.fsdp2 import FSDP2


def test_durable_accepts_folders_but_does_not_write_them_in_its_thread() -> None:
    late = Durable(asynchronous=True)
    assert rules.check_rules([FSDP2(), late], {}) == []
    assert rules.check_rules([FSDP2(checkpoints="sharded"), Durable()], {}) == []
    (finding,) = rules.check_rules([FSDP2(checkpoints="sharded"), late], {})
    assert finding.rule.verdict.value == "warned"
    assert "asynchronous=True has no effect" in str(finding)
