"""What ZeRO must not meet in a run, as rules that `plan` shows and a run is refused by."""

from __future__ import annotations

from lightning_eff.core.technique import Rule

_ALWAYS = (
    Rule(
        name="callbacks/torch_compile",
        reason="its hooks on weights are in the middle of what is compiled",
        remedies=("~callbacks.torch_compile", "strategy=fsdp2"),
    ),
    Rule(
        name="lightning/StochasticWeightAveraging",
        reason="it puts averages into weights that DeepSpeed's own copies overwrite",
        remedies=("strategy=ddp", "remove it"),
    ),
    Rule(
        name="lightning/LearningRateFinder",
        reason="it puts a schedule around the optimizer, which is DeepSpeed's own here",
        remedies=("remove it", "strategy=fsdp2"),
    ),
    Rule(
        name="lightning/BaseFinetuning",
        reason="it unfreezes parameters later, and DeepSpeed trains those that it was given first",
        remedies=("strategy=fsdp2", "strategy=ddp"),
    ),
)
_AVERAGES = Rule(
    name="lightning/WeightAveraging",
    reason="it would average weights in 16 bits, or the parts that stage 3 leaves of them",
    remedies=("strategy.stage=2 precision=fp32", "strategy=ddp"),
)
_ALONE = Rule(
    name="run/one_device",
    reason="there is nothing to divide",
    remedies=("trainer.devices=2", "strategy=auto", "strategy.offload_optimizer=cpu"),
)


def excluded(*, alone: bool, averages: bool) -> tuple[Rule, ...]:
    """Return the rules of one strategy.

    Args:
        alone: Whether nothing is offloaded, so that one device has no use of it.
        averages: Whether the model's own weights are whole and those that are trained.

    Example:
        >>> [rule.name for rule in excluded(alone=True, averages=True)][-1]
        'run/one_device'
    """
    return (*_ALWAYS, *(() if averages else (_AVERAGES,)), *((_ALONE,) if alone else ()))
