"""A batch in micro-batches that fit, with the gradient of the whole; when memory runs out, in smaller ones.

The loader yields what an optimizer step is to see; here it is cut along its samples
(microbatching/splitting.py says what can be cut; a `splitter` cuts the rest). Micro-batches count by their
samples, or by the weight that `training_step` returns beside the mean loss, so the step is that of the whole
batch. With `auto` the batch is tried as a whole; when memory runs out in the forward or the backward pass,
everything that the step has changed is brought back (random states, buffers, metrics) and the step is
computed in half the size. The result is to the bit that of a run which began with that size. The size is kept
in the checkpoint.

`find` runs sizes for real before the first step, with an optimizer step, and brings everything back: the
`largest` that fits, or the `fastest`; `search()` does so once more, after layers were unfrozen, say.

Costs: a micro-batch that is too small for the device is slow. `auto` keeps a copy of random states and
    buffers each step, the batches of a window, and parameters, gradients and optimizer state in host memory
    around updates (on a GPU the first); on several ranks the gradients are averaged after the backward pass
    in place of during it. An OOM costs the step that is run again, hooks included (`on_after_backward`, and
    those around zero_grad). What normalizes over a batch (batch norms) sees the micro-batch.
Conflicts: manual optimization, DeepSpeed's own accumulation and optimizers that step in the backward pass;
    `auto` on several ranks under anything but DDP, with synchronized batch norms, a communication hook or a
    static graph.
Source: learned from Composer's device_train_microbatch_size; what Lightning's own search gets wrong:
    https://github.com/Lightning-AI/pytorch-lightning/issues/21903
"""

from __future__ import annotations

import warnings
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import checkpoint_stamp, dataloaders, rules
from lightning_eff.core.dtypes import matmul_dtype
from lightning_eff.core.errors import ConfigError, NoEffectWarning
from lightning_eff.core.technique import Facts, Outcome, Rule, Verdict
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.fitting import Fitting, is_count, rounding
from lightning_eff.microbatching.in_parts import Search
from lightning_eff.microbatching.size_search import OBJECTIVES, Found
from lightning_eff.microbatching.splitting import Splitter
from lightning_eff.report import tile_explanation


def explain(device: str) -> str:
    """Say which sizes suit a device: multiples by format, and tokens that fill it."""
    return tile_explanation.explain_micro_batches(device)


class MicroBatch(pl.Callback):
    """Train on each batch in micro-batches.

    Args:
        micro_batch_size: Samples of a micro-batch on one device; `auto` begins with the whole batch.
        find: Look for a size before the first step, with `auto`: `largest` or `fastest`; None does not.
        headroom: Share of the device's memory that `find` leaves at the peak, where a device tells its peak.
        multiple_of: Sizes above it that `auto` and `find` choose are its multiples; its own `auto` is
            what the device's tensor cores like in the format of the run (8 in 16 bits), and 1 on a CPU.
        grow_after_n_steps: Double the size after so many steps without running out of memory; None never.
        splitter: Cuts a batch in place of the built-in way, `splitter(batch, micro_batch_size)`.

    Raises:
        ConfigError: A number is outside its range, or `find` without `auto`.

    Warns:
        NoEffectWarning: No batch was larger than the size that was asked for.

    Example:
        >>> trainer = pl.Trainer(callbacks=[MicroBatch(micro_batch_size=8)], logger=False, accelerator="cpu")
        >>> MicroBatch(micro_batch_size=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: micro_batch_size=0: expected 'auto' or a whole number ...
    """

    on_save_checkpoint = checkpoint_stamp.save_stamp
    on_load_checkpoint = checkpoint_stamp.load_stamp

    def __init__(
        self,
        *,
        micro_batch_size: int | str = "auto",
        find: str | None = None,
        headroom: float = 0.1,
        multiple_of: int | str = 1,
        grow_after_n_steps: int | None = None,
        splitter: Splitter | None = None,
    ) -> None:
        self._check(micro_batch_size, find, grow_after_n_steps)
        if not 0.0 <= headroom < 1.0:
            raise ConfigError(key="headroom", value=headroom, allowed="a share from 0 up to 1")
        if multiple_of != "auto" and not is_count(multiple_of):
            allowed = "'auto' or a whole number of at least 1"
            raise ConfigError(key="multiple_of", value=multiple_of, allowed=allowed)
        if not (splitter is None or callable(splitter)):
            allowed = "a function of a batch and a micro-batch size"
            raise ConfigError(key="splitter", value=splitter, allowed=allowed)
        self.micro_batch_size = micro_batch_size
        self.find = find
        self.headroom = headroom
        self.multiple_of = multiple_of
        self.grow_after_n_steps = grow_after_n_steps
        self.splitter = splitter
        self._remembered: int | None = None
        self._rounding = ""
        self._found: Found | None = None
        self._fitting: Fitting | None = None
        self._loop: lightning_loop.ExactStep | None = None

    @staticmethod
    def _check(size: int | str, find: str | None, grow_after_n_steps: int | None) -> None:
        if size != "auto" and not is_count(size):
            allowed = "'auto' or a whole number of at least 1"
            raise ConfigError(key="micro_batch_size", value=size, allowed=allowed)
        if find is not None and find not in OBJECTIVES:
            raise ConfigError(key="find", value=find, allowed=f"one of {', '.join(OBJECTIVES)}, or None")
        if not (grow_after_n_steps is None or is_count(grow_after_n_steps)):
            allowed = "a whole number of at least 1"
            raise ConfigError(key="grow_after_n_steps", value=grow_after_n_steps, allowed=allowed)
        for name, value in (("find", find), ("grow_after_n_steps", grow_after_n_steps)):
            if size != "auto" and value is not None:
                allowed = f"null beside micro_batch_size={size}"
                raise ConfigError(
                    name, value, allowed=allowed, remedies=["callbacks.micro_batch.micro_batch_size=auto"]
                )

    @property
    def adapts(self) -> bool:
        """Whether the size changes when memory runs out."""
        return self.micro_batch_size == "auto"

    @property
    def current_size(self) -> int | None:
        """Samples of a micro-batch as they are now; None while batches fit as a whole."""
        return self._fitting.size if self._fitting is not None else self._remembered

    def facts(self) -> Facts:
        """State who else steps, and what a second try of a batch would break."""
        reasons = {
            "lightning/DeepSpeedStrategy": "DeepSpeed counts each backward pass as a batch of its own",
            "run/manual_optimization": "the module runs its backward passes itself",
            "run/dataloader_iter": "the module fetches its batches itself",
        }
        rules = [
            Rule(name=name, reason=reason, remedies=("~callbacks.micro_batch",))
            for name, reason in reasons.items()
        ]
        rules.append(
            Rule(
                name="run/batch_norm",
                reason="their statistics are those of a micro-batch, so the result depends on its size",
                verdict=Verdict.WARNED,
            )
        )
        return Facts(excludes=(*rules, *(_adapting_rules() if self.adapts else ())))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        rules.enforce(self, trainer, pl_module)
        size = self.micro_batch_size if isinstance(self.micro_batch_size, int) else None
        self._found = None
        self._remembered = self.current_size if self.adapts else None  # of a fit before, or of a checkpoint
        multiple_of = self._settle_rounding(trainer)
        self._fitting = Fitting(
            size,
            adapts=self.adapts,
            splitter=self.splitter,
            multiple_of=multiple_of,
            grow_after_n_steps=self.grow_after_n_steps,
        )
        self._loop = lightning_loop.install(trainer)
        self._loop.fitting = self._fitting

    def _settle_rounding(self, trainer: pl.Trainer) -> int:
        device = trainer.strategy.root_device
        dtype = matmul_dtype(str(trainer.precision_plugin.precision), device.type)
        multiple_of = rounding(self.multiple_of, device, dtype)
        name = str(dtype).removeprefix("torch.")
        self._rounding = f"sizes in multiples of {multiple_of} ({name} on {device.type})"
        return multiple_of

    @override
    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rules.enforce(self, trainer, pl_module)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dataloaders.restore_loader_state(trainer)
        if self._fitting is not None and self.adapts:
            self._fitting.size = self._remembered
        if self.find is not None and self._remembered is None:
            self.search(self.find)

    def search(self, objective: str = "largest") -> None:
        """Look for a size before the next step; call it while training, from a callback or the module.

        Args:
            objective: `largest` or `fastest`.

        Raises:
            ConfigError: The size does not adapt, or no training is going on.
        """
        if self._loop is None or not self.adapts:
            allowed = "a training that goes on with micro_batch_size=auto"
            raise ConfigError(key="search", value=objective, allowed=allowed)
        if objective not in OBJECTIVES:
            raise ConfigError(key="search", value=objective, allowed=f"one of {', '.join(OBJECTIVES)}")
        self._loop.search = Search(objective, self.headroom, self._take)

    def _take(self, found: Found) -> None:
        self._found = found

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the size, so that a run that goes on does not run out of memory once more."""
        return {"micro_batch_size": self.current_size if self.adapts else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        size = state_dict.get("micro_batch_size")
        self._remembered = size if is_count(size) else None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.adapts and self._fitting is not None and not self._fitting.num_split:
            text = f"MicroBatch did nothing: no batch had more than {self.micro_batch_size} samples"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._restore(trainer)

    @override
    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self._restore(trainer)

    def _restore(self, trainer: pl.Trainer) -> None:
        if self._loop is not None:
            self._loop = None
            lightning_loop.uninstall(trainer)

    def outcome(self) -> Outcome:
        """Say how batches were cut, and how often memory ran out."""
        fitting = self._fitting
        if fitting is None:
            return Outcome(did="no training data yet", effective=False)
        size = f"micro-batches of {fitting.size}" if fitting.size is not None else "batches as a whole"
        words = [f"{size}; {fitting.num_split} batches cut"]
        if self.multiple_of == "auto":
            words.append(self._rounding)
        if fitting.halvings:
            sizes = [fitting.halvings[0].before, *(halving.after for halving in fitting.halvings)]
            words.append(f"out of memory {len(fitting.halvings)} times: {' -> '.join(map(str, sizes))}")
        if self._found is not None:
            found = self._found
            words.append(f"found {found.micro_batch_size} in {len(found.trials)} trials")
        return Outcome(
            did="; ".join(words),
            effective=bool(fitting.num_split or fitting.halvings or self._found),
            numbers={
                "micro_batch_size": fitting.size,
                "multiple_of": fitting.multiple_of,
                "batches_cut": fitting.num_split,
                "out_of_memory": [[each.before, each.after, each.reason] for each in fitting.halvings],
                "trials": [
                    [each.micro_batch_size, each.fits, each.seconds_per_sample]
                    for each in (self._found.trials if self._found is not None else ())
                ],
            },
        )


def _adapting_rules() -> list[Rule]:
    """Return what must not meet a step that one rank may compute twice, and the others once."""
    fixed = ("callbacks.micro_batch.micro_batch_size=8",)
    sharded = "a rank that runs out of memory would leave the others waiting in the middle of a forward pass"
    reasons = {
        "lightning/FSDPStrategy": sharded,
        "lightning/ModelParallelStrategy": sharded,
        "strategy/fsdp2": sharded,
        "strategy/deepspeed_zero": sharded,
        "run/sync_batch_norm": sharded,
        "run/comm_hook": "the gradients are averaged without DDP, which alone would call the hook",
        "run/static_graph": "DDP learns its graph in a first backward pass that is synchronized",
    }
    rules = [Rule(name=name, reason=reason, remedies=fixed) for name, reason in reasons.items()]
    compiled = Rule(
        name="callbacks/torch_compile",
        reason="each new size is compiled anew, and compiling needs memory too",
        remedies=fixed,
        verdict=Verdict.WARNED,
    )
    return [*rules, compiled]
