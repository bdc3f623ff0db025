"""Split each batch into micro-batches that fit in memory, with the gradient of the full batch.

The callback splits each batch of the loader along the sample axis, and makes one optimizer step per batch.
The sample axis is the first dimension of all tensors in the batch. For other batches, pass a `splitter`.
`keep` names values that are not split, such as class weights, positions, or a mask shared by all samples.
Each micro-batch is weighted by its number of samples, or by the `loss_weight` that `training_step` returns
with the mean loss. So the gradient equals the gradient of the full batch.

With `micro_batch_size=auto`, the full batch is tried first. When memory runs out in the forward or backward
pass, everything that the step has changed (random states, buffers, metrics) is restored. The step is then
computed again with half the micro-batch size. The result is bit-identical to a run that started with this
size. Checkpoints store the size.

With `find`, the callback tries several sizes before the first step, and uses the largest size that fits. Each
trial includes an optimizer step; all changes of a trial are undone. `search()` repeats these trials during
training, for example after unfreezing layers.

Saves: activations: only one micro-batch's activations are in memory at a time. With `auto`, a run continues
    after an out-of-memory error.
Costs: micro-batches that are too small for the device are slow. `auto` copies random states and buffers in
    each step, and keeps all batches of the step. `auto` also copies parameters, gradients and optimizer state
    to host memory: on a CPU before each update, on a GPU only before the first update. On several ranks,
    `auto` averages gradients after the backward pass instead of during it. After an out-of-memory error the
    step runs again, including its hooks (`on_after_backward`, and the hooks around `zero_grad`). Batch norms
    and other layers that normalize over a batch compute statistics per micro-batch.
When not: the batch fits.
Conflicts: a loss that is not a mean over samples; `optimizer.step()` in `training_step`; manual optimization;
    DeepSpeed's own accumulation; optimizers that step in the backward pass. On several ranks, `auto` needs
    DDP, and conflicts with synchronized batch norms, a communication hook or a static graph. A run with one
    of these is rejected. Two conflicts are not detected: with FSDP2 or ZeRO, ranks that split their batches
    into different numbers of micro-batches wait for each other forever; and `auto` does not undo what a step
    without enough memory has changed in custom objects, in tensors in containers, or in lists and dicts
    inside others of more than 1000 items.
Source: learned from Composer's device_train_microbatch_size; a bug in Lightning's own search:
    https://github.com/Lightning-AI/pytorch-lightning/issues/21903
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import lightning.pytorch as pl
from typing_extensions import override

from lightning_eff.core import dataloaders
from lightning_eff.core.arguments import BelowOne, Count, accepts, check_arguments
from lightning_eff.core.errors import ConfigError, NoEffectWarning, Remedy
from lightning_eff.core.managed import Managed
from lightning_eff.core.technique import Facts, Outcome, Rule, Try, Verdict, name_of
from lightning_eff.microbatching import lightning_loop
from lightning_eff.microbatching.mean_check import check_mean
from lightning_eff.microbatching.oom_retry import FIXED_SIZE, MicroBatchSize, kept_names
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter
from lightning_eff.report.advice import Observed, Suggestion
from lightning_eff.report.recording import GRADIENTS

PREDICTED_PARTS = 8
"""Maximum number of micro-batches per batch that run while memory is being predicted."""


class MicroBatch(Managed):
    """Train on each batch in micro-batches.

    Args:
        micro_batch_size: Number of samples per micro-batch on each device; `auto` starts with the full batch.
        find: With `auto`, search for the largest size that fits, before the first step.
        headroom: Fraction of the device's memory that `find` leaves free at the peak; ignored if the device
            does not report its memory.
        splitter: Function `splitter(batch, micro_batch_size)` that replaces the built-in rules for splitting.
        keep: Names of values in the batch that are not split, so that every micro-batch gets the full value.
            A name matches at any depth; a path of names and positions (`targets.weights`, `1`) starts at the
            root of the batch.

    Raises:
        ConfigError: A number is outside its range, `find` is set without `auto`, `keep` is set with a
            splitter, or the first batch lacks a name in `keep`.
        ConflictError: The loss is not a mean over samples, or `training_step` calls `optimizer.step()`.

    Warns:
        NoEffectWarning: No batch was larger than `micro_batch_size`.

    Example:
        >>> trainer = pl.Trainer(callbacks=[MicroBatch(micro_batch_size=8)], logger=False, accelerator="cpu")
        >>> MicroBatch(micro_batch_size=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: micro_batch_size=0: expected 'auto', or a whole number ...
    """

    exact = True
    lowers = ("activations",)
    try_as = (
        Try(
            overrides=("callbacks.micro_batch.micro_batch_size={part}",),
            # With accumulation, a smaller loader batch has the same effect; batch norms change the result.
            excludes=("callbacks/gradient_accumulation", "run/batch_norm"),
        ),
    )

    @check_arguments
    def __init__(
        self,
        *,
        micro_batch_size: Literal["auto"] | Count = "auto",
        find: bool = False,
        headroom: BelowOne = 0.1,
        splitter: Splitter | None = None,
        keep: Sequence[str | int] | None = None,
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.find = find
        self.headroom = headroom
        self.splitter = splitter
        self.keep = keep
        self._keep = kept_names(keep, splitter)
        if micro_batch_size != "auto" and find:
            allowed = f"false with micro_batch_size={micro_batch_size}, which is fixed"
            auto = Remedy(
                "callbacks.micro_batch.micro_batch_size=auto", 'MicroBatch(micro_batch_size="auto")'
            )
            raise ConfigError(key="find", value=find, allowed=allowed, remedies=[auto])
        self.is_auto = micro_batch_size == "auto"  # the size changes when memory runs out
        self._initial_size: int | None = None
        self._size: MicroBatchSize | None = None
        self._max_parts: int | None = None
        self._loop: lightning_loop.ExactStep | None = None
        self._counts_by = self._uneven = ""

    def join_prediction(self, gpu: object) -> bool:
        """Run only some micro-batches while memory is being predicted, because all need the same memory."""
        del gpu
        self._max_parts = PREDICTED_PARTS
        return True

    def assumptions(self) -> list[str]:
        """Return a note if a memory prediction does not count the outputs of some micro-batches."""
        size = self._size
        # Whether the largest batch has more micro-batches than the prediction ran.
        is_cut = size is not None and (size.current or size.largest) * PREDICTED_PARTS < size.largest
        text = f"only {PREDICTED_PARTS} micro-batches of a batch are run: the others' outputs are not counted"
        return [text] if is_cut else []

    @property
    def current_size(self) -> int | None:
        """The current micro-batch size in samples; None while full batches fit."""
        return self._size.current if self._size is not None else self._initial_size

    def facts(self) -> Facts:
        """Reject modules and strategies that step themselves; `auto` also rejects those that cannot retry."""
        reasons = {
            "lightning/DeepSpeedStrategy": "DeepSpeed counts each backward pass as a separate batch",
            "run/manual_optimization": "the module runs its backward passes itself",
            "run/dataloader_iter": "the module fetches its batches itself",
        }
        remedies = (lightning_loop.WITHOUT_MICRO_BATCH,)
        rules = [Rule(name=name, reason=reason, remedies=remedies) for name, reason in reasons.items()]
        batch_norm = "statistics are computed per micro-batch, so the result depends on its size"
        rules.append(Rule(name="run/batch_norm", reason=batch_norm, verdict=Verdict.WARNED))
        hook = "it runs once per micro-batch, on an incomplete gradient"
        remedies = ("on_before_optimizer_step, which runs once per step",)
        rules.append(Rule(name="run/gradient_hook", reason=hook, remedies=remedies, verdict=Verdict.WARNED))
        if not self.is_auto:
            return Facts(excludes=tuple(rules))
        # With `auto`, a single rank may run out of memory, and then repeats the step without the other ranks.
        wait = "a rank that runs out of memory would leave the others waiting in the middle of a forward pass"
        reasons = {
            "lightning/FSDPStrategy": wait,
            "lightning/ModelParallelStrategy": wait,
            "strategy/fsdp2": wait,
            "strategy/deepspeed_zero": wait,
            "run/sync_batch_norm": wait,
            "run/comm_hook": "the gradients are averaged without DDP, which alone would call the hook",
            "run/static_graph": "DDP records its graph in a first backward pass that is synchronized",
        }
        rules += [Rule(name=name, reason=reason, remedies=(FIXED_SIZE,)) for name, reason in reasons.items()]
        compiled = "each new size is compiled again, and compiling needs memory too"
        name = "callbacks/torch_compile"
        rules.append(Rule(name=name, reason=compiled, remedies=(FIXED_SIZE,), verdict=Verdict.WARNED))
        return Facts(excludes=tuple(rules))

    @staticmethod
    def suggest(run: Observed) -> Suggestion | None:
        """Suggest micro-batches of half a batch, if the loss is a mean over samples.

        If the callback is active already, and operations are small, suggest twice the micro-batch size.
        """
        trainer, module, half = run.trainer, run.module, run.num_samples // 2
        callbacks: Sequence[pl.Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        own = next((each for each in callbacks if isinstance(each, MicroBatch)), None)
        if own is not None:
            size = own.micro_batch_size
            if not isinstance(size, int) or size >= run.num_samples or not run.small_operations:
                return None
            # Micro-batches of twice the size need half as many kernels.
            words = f"micro_batch_size={min(2 * size, run.num_samples)}"
            change = Remedy(f"callbacks.micro_batch.{words}", f"MicroBatch({words})")
            return Suggestion(change=str(change), why=f"{run.small_operations}; more memory is needed")
        is_tiled = any(name_of(each).startswith("callbacks/tiled_") for each in callbacks)
        is_simple = module.automatic_optimization and trainer.world_size == 1
        if run.sample is None or not half or is_tiled or not is_simple:
            return None  # a tile's size does not depend on the number of samples
        # While the second half runs, the gradients of the first half are in memory. `held_bytes` counts these
        # gradients, so the recorded gradients get the factor 0.
        factors = {i: 0.0 for i, each in enumerate(run.allocations) if each.category == GRADIENTS}
        # Activations are proportional to the number of samples.
        factors |= {index: half / run.num_samples for index, _ in run.activations()}
        held_bytes = sum(each.nbytes for each in module.parameters() if each.requires_grad)
        peak_bytes = run.peak_if(factors, held_bytes=held_bytes)
        if not run.is_worth(peak_bytes):
            return None
        num_arguments = len(inspect.signature(module.training_step).parameters)

        def step(part: MicroBatchPart) -> Any:
            with trainer.precision_plugin.train_step_context():
                return module.training_step(*(part.batch, 0)[:num_arguments])

        # Do not suggest micro-batches for a loss that is not a mean over samples, because a run would reject
        # this loss.
        is_low, size = (
            not str(trainer.precision).startswith(("32", "64")),
            MicroBatchSize(None, is_auto=False),
        )
        found = check_mean(run.sample, step, module, size, run.num_samples, module.device, is_low=is_low)
        if found.difference:
            return None
        moved = f"training_step changes {min(found.moved)}" if found.moved else ""
        notes = (f"{half} of the {run.num_samples} samples", found.undecided, moved)
        return Suggestion(
            technique=MicroBatch(micro_batch_size=half),
            why="; ".join(filter(None, notes)),
            peak_bytes=peak_bytes,
        )

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        # Start with the size of an earlier fit or of a checkpoint.
        self._initial_size = self.current_size if self.is_auto else None
        self._size = MicroBatchSize(
            self.micro_batch_size if isinstance(self.micro_batch_size, int) else None,
            is_auto=self.is_auto,
            splitter=self.splitter,
            keep=self._keep,
            headroom=self.headroom,
            max_parts=self._max_parts,
        )
        self._loop = lightning_loop.install(trainer)
        self._loop.micro_batch_size = self._size
        self.cleanup.callback(lightning_loop.uninstall, trainer)
        self.cleanup.callback(setattr, self, "_loop", None)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        dataloaders.restore_loader_state(trainer)
        if self._size is not None and self.is_auto:
            self._size.current = self._initial_size  # a checkpoint was loaded after `setup`
        if self.find and self._initial_size is None:
            self.search()

    def search(self) -> None:
        """Search for a size before the next step; call this during training, from a callback or the module.

        Raises:
            ConfigError: The size is fixed, or no training is running.
        """
        if self._loop is None or not self.is_auto:
            allowed = "to be called during training with micro_batch_size=auto"
            raise ConfigError(key="search", value=self.micro_batch_size, allowed=allowed)
        self._loop.is_search_due = True

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batch size, so that a resumed run does not run out of memory again."""
        return {"micro_batch_size": self.current_size if self.is_auto else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        size = state_dict.get("micro_batch_size")
        self._initial_size = size if accepts(Count, size) else None

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self._loop is not None:
            self._loop.warn_of_dropped_batches()
            self._counts_by = "; ".join(filter(None, (self._loop.mean_check, self._loop.counts_by)))
            self._uneven = self._loop.uneven.did
        if not self.is_auto and self._size is not None and not self._size.num_split:
            text = f"MicroBatch had no effect: no batch had more than {self.micro_batch_size} samples"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the micro-batch size, the number of split batches, and the out-of-memory errors."""
        size = self._size
        if size is None:
            return Outcome(did="no training data yet", effective=False)
        parts = [
            "full batches" if size.current is None else f"micro-batches of {size.current}",
            f"{size.num_split} batch{'es' * (size.num_split != 1)} split",
        ]
        if size.num_split and self._counts_by:
            parts.append(self._counts_by)
        if self._uneven:
            parts.append(self._uneven)
        if size.halvings:
            often = "once" if len(size.halvings) == 1 else f"{len(size.halvings)} times"
            sizes = [size.halvings[0].before, *(halving.after for halving in size.halvings)]
            parts.append(f"out of memory {often}: {' -> '.join(map(str, sizes))}")
        if any(size.tried.values()):
            found = max(tried for tried, fits in size.tried.items() if fits)
            parts.append(f"found {found} in {len(size.tried)} trial{'s' * (len(size.tried) != 1)}")
        return Outcome(
            did="; ".join(parts),
            effective=bool(size.num_split or size.halvings or size.tried),
            numbers={
                "micro_batch_size": size.current,
                "batches_cut": size.num_split,
                "out_of_memory": [[h.before, h.after, h.reason] for h in size.halvings],
                "trials": [[tried, fits] for tried, fits in size.tried.items()],
            },
        )
