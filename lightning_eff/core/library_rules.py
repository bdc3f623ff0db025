"""Rules about classes of other libraries: Lightning's callbacks and plugins, optimizers of torch and others.

A key is a package and a class, and holds for its subclasses too; or it is a name that a technique provides.
"""

from __future__ import annotations

from lightning_eff.core.errors import TO_ADAMW, TO_AUTO_PRECISION, TO_BF16_MIXED, TO_FP32, TO_FSDP2, Remedy
from lightning_eff.core.technique import (
    NEEDS_MATRICES,
    NEW_PARAMETERS,
    SCHEDULE,
    SUITE,
    TRANSFORM,
    Facts,
    Rule,
    Verdict,
)

_LATE_CONVERSION = Rule(
    name=TRANSFORM,
    reason="it replaces layers after the checkpoint was restored, so earlier changes of them are lost",
    remedies=(TO_AUTO_PRECISION,),
)
_SEARCH = Rule(
    name=SUITE,
    reason="its trials switch all callbacks off, so it may return a size that was never tried with them",
    remedies=(Remedy("remove it and add: +callbacks=micro_batch", "remove it and add: MicroBatch()"),),
)
_COPIES = Rule(
    name=NEW_PARAMETERS,
    reason="it copies the model before its parameters are replaced, and averages the wrong ones",
    remedies=("remove it",),
)
_ADAMW_8BIT = Remedy(
    "optimizer=adamw_8bit", "OptimizerChoice(optimizer=partial(torchao.optim.AdamW8bit, lr=...))"
)
_ADAMW_8BIT_BNB = Remedy(
    "optimizer=adamw_8bit_bnb", "OptimizerChoice(optimizer=partial(bitsandbytes.optim.AdamW8bit, lr=...))"
)
_COMPILER = Rule(
    name="machine/compiler",
    reason="it quantizes its state in code that torch.compile builds",
    remedies=("apt-get install g++", _ADAMW_8BIT_BNB),
)
_SHARDED_8BIT = tuple(
    Rule(
        name=name,
        reason="its state cannot be restored from a sharded checkpoint",
        remedies=(_ADAMW_8BIT,),
    )
    for name in ("lightning/FSDPStrategy", "lightning/ModelParallelStrategy", "strategy/fsdp2")
)
_LATE_UNSCALING = Rule(
    name="run/clipping_by_lightnings_mixed",
    reason="a fused optimizer unscales gradients itself, so Lightning's own plugin cannot clip them",
    remedies=(TO_AUTO_PRECISION, Remedy("optimizer.fused=false", "fused=False")),
)
_NO_SCALER = Rule(
    name="run/scaler",
    reason="it evaluates the loss several times a step, but a scaler unscales gradients only once",
    remedies=(TO_BF16_MIXED, TO_FP32),
)
_SECOND_SCHEDULE = Rule(
    name=SCHEDULE,
    reason="it averages the weights instead of decaying the rate; doing both trains worse",
    remedies=(Remedy("scheduler=none", "no scheduler"),),
    verdict=Verdict.WARNED,
)
_SECOND_AVERAGE = tuple(
    Rule(
        name=name,
        reason="it would average weights that this optimizer swaps for evaluation",
        remedies=("remove it",),
    )
    for name in ("lightning/WeightAveraging", "lightning/StochasticWeightAveraging")
)
_OLD_STATISTICS = Rule(
    name="run/batch_norm",
    reason="their statistics belong to the training weights, but evaluation uses the averaged weights",
    remedies=(TO_ADAMW,),
    verdict=Verdict.WARNED,
)
_NO_PAGES = Rule(
    name="run/cpu",
    reason="its pages move between a GPU and the host, so on a CPU it works like the optimizer without pages",
    remedies=(_ADAMW_8BIT_BNB,),
    verdict=Verdict.WARNED,
)
_OTHER_RATE = Rule(
    name="callbacks/optimizer_choice",
    reason="it tries rates with callbacks off, and sets one on the module that this optimizer ignores",
    remedies=("remove it",),
)
_NO_SWITCH = Rule(
    name="strategy/deepspeed_zero",
    reason="DeepSpeed trains a copy of the weights, so the averaged weights would not be evaluated",
    remedies=(TO_FSDP2, TO_ADAMW),
)
_SCHEDULE_FREE = Facts(excludes=(_SECOND_SCHEDULE, *_SECOND_AVERAGE, _OLD_STATISTICS, _NO_SWITCH))

LIBRARY_RULES = {
    "lightning/BatchSizeFinder": Facts(excludes=(_SEARCH,)),
    "lightning/LearningRateFinder": Facts(excludes=(_OTHER_RATE,)),
    "lightning/WeightAveraging": Facts(excludes=(_COPIES,)),
    "lightning/StochasticWeightAveraging": Facts(excludes=(_COPIES,)),
    "lightning/TransformerEnginePrecision": Facts(excludes=(_LATE_CONVERSION,)),
    "lightning/BitsandbytesPrecision": Facts(excludes=(_LATE_CONVERSION,)),
    "torch/LBFGS": Facts(excludes=(_NO_SCALER,)),
    "torch/Adafactor": Facts(excludes=NEEDS_MATRICES),
    "torch/Muon": Facts(excludes=NEEDS_MATRICES),
    "torchao/_AdamBase": Facts(needs=(_COMPILER,)),
    "bitsandbytes/Optimizer8bit": Facts(excludes=_SHARDED_8BIT),
    "bitsandbytes/PagedAdamW8bit": Facts(excludes=(_NO_PAGES,)),
    "schedulefree/AdamWScheduleFree": _SCHEDULE_FREE,
    "schedulefree/SGDScheduleFree": _SCHEDULE_FREE,
    "schedulefree/RAdamScheduleFree": _SCHEDULE_FREE,
    "optimizer/fused": Facts(excludes=(_LATE_UNSCALING,)),
}
