"""What adapters cannot meet, by their method."""

from __future__ import annotations

from lightning_eff.core.technique import PLACES_STATE, Rule, Verdict


def rules(method: str) -> tuple[Rule, ...]:
    """Return what a method excludes, or meets with a warning.

    Example:
        >>> [rule.name for rule in rules("adalora")][-1]
        'run/manual_optimization'
    """
    thaws = Rule(
        name="lightning/BaseFinetuning",
        reason="it freezes and thaws what the adapters leave frozen",
        remedies=("remove it",),
    )
    reason = "the strategy writes checkpoints itself, and they hold the frozen base too"
    names = [rule.name for rule in PLACES_STATE if rule.name.startswith("lightning/")]  # ours leave it out
    whole = [Rule(name=name, reason=reason, verdict=Verdict.WARNED) for name in names]
    lora = "callbacks.peft_adapter.method=lora"
    reasons = {
        "run/scaler": ("ranks are allotted by gradients, and a scaler multiplies them", "precision=mixed"),
        "optimizer/in_backward": ("ranks are allotted by gradients, which it frees", "optimizer=adamw"),
        "strategy/deepspeed_zero": ("ranks are allotted by gradients, which it keeps elsewhere", lora),
        "strategy/fsdp2": ("ranks are allotted by whole tensors, of which each rank has a part", lora),
        "run/manual_optimization": ("ranks are allotted once a step, which is the module's own", lora),
    }
    reasons = reasons if method == "adalora" else {}
    own = [Rule(name=name, reason=why, remedies=(remedy,)) for name, (why, remedy) in reasons.items()]
    return (thaws, *whole, *own)
