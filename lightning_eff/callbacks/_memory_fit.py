"""Choose a policy for each repeated block (keep, recompute or offload), so that a step fits a memory budget.

`callbacks/gradient_checkpointing` calls this module for `policy="fit"`. A step is recorded on fake tensors
once per policy, with the same policy for all blocks. Each forward or backward pass of a block starts a new
segment of the recording; the segment belongs to that block. Each segment has a net change of live bytes, and
a maximum rise of live bytes above its start. The net change and the rise depend only on the policy of the
segment's block, because the policy of the previous block does not change what a block saves. So a few
recordings give the peak of every mixture of policies. The peak is the maximum, over all segments, of the
segment's rise plus the net changes of all earlier segments.

The search for the cheapest mixture within a budget is exact, and extends partial choices block by block. A
partial choice is dropped if another partial choice costs no more and needs no more bytes in any later
segment. Costs are compared first by bytes moved to the host, and then by FLOPs. On an H100, the host
transfers of the `offload` policy did not overlap with computation and took 3 times as long as recomputation.
The step is then predicted with the chosen mixture. If the predicted peak is higher than the peak computed
from segments, the blocks influence each other, and the limit is lowered by the difference. A single policy
for all blocks is always a candidate, so the result is never worse than the best single policy.

Why the planner does not choose when a recipe starts: a plain Trainer has no planner. Why a second Trainer
with new technique objects: the run's own objects have already changed the run's module, and a technique is
fully defined by its arguments.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from torch import Tensor
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_eff.callbacks._recomputed_block import KEEP, Policies, recompute
from lightning_eff.core import allocator, model_surgery, random_states, rules
from lightning_eff.core.compiled_call import is_compiled
from lightning_eff.core.errors import ConfigError, Remedy, root_cause_line
from lightning_eff.core.model_surgery import BlockSelector, Stage
from lightning_eff.core.technique import Outcome, Technique, name_of
from lightning_eff.core.text import UNITS, human_bytes, parse_bytes
from lightning_eff.core.torch_private import real_tensors
from lightning_eff.kernels import devices
from lightning_eff.kernels.devices import Device
from lightning_eff.prediction.cuda_operators import CudaOperators
from lightning_eff.prediction.fakes import Fakes
from lightning_eff.prediction.predict import CUDA_BLOCK_BYTES, predict_inside
from lightning_eff.report.module_tracker import in_backward
from lightning_eff.report.recording import Recorder

KEY = "callbacks.gradient_checkpointing"
POLICIES = (KEEP, "selective", "full", "offload")
"""All policies, ordered by the memory that they save, from none to most."""
MAX_CORRECTIONS = 4
"""Number of mixtures to predict before the search falls back to a single policy."""
Numbers = np.ndarray[Any, np.dtype[np.int64]]


class UnpredictableError(Exception):
    """A step cannot be predicted."""


@dataclass
class Segments:
    """A recorded step, cut where the forward and backward passes of blocks start.

    All lists and arrays have one entry per segment. `net` is the change of live bytes from the start to the
    end of a segment. `rise` is the maximum of live bytes in a segment, minus the live bytes at the start.
    `flops` are the FLOPs in a segment, and `moved_bytes` are the bytes moved to the host.
    """

    peak_bytes: int
    blocks: list[str]
    first_bytes: int
    """Maximum of live bytes before the first segment."""
    start_bytes: int
    """Live bytes at the start of the first segment."""
    net: Numbers
    rise: Numbers
    flops: Numbers
    moved_bytes: Numbers

    @classmethod
    def of(cls, recorder: Recorder, marks: Sequence[tuple[str, int, int]], *, on_device: bool) -> Segments:
        """Cut a recording at marks.

        A mark has the name of the block that starts, and the numbers of events and FLOPs before this start.
        """
        # CUDA's caching allocator rounds the size of every allocation up to this unit.
        unit = CUDA_BLOCK_BYTES if on_device else 1
        sizes: dict[int, int] = {}
        live, moved = [0], [0]
        for event in recorder.events:
            size = -(-event.num_bytes // unit) * unit
            is_on_host = event.allocation in recorder.on_host
            moved.append(moved[-1] + size * is_on_host)
            # An event has the new size of an allocation, or 0 if the memory was freed. Host memory counts
            # only if the model is on a CPU.
            change = 0 if is_on_host and on_device else size - sizes.get(event.allocation, 0)
            sizes[event.allocation] = size
            live.append(live[-1] + change)
        # live[i] is the number of live bytes before event i. A segment from cut a to cut b covers live[a] to
        # live[b].
        cuts = [*(index for _, index, _ in marks), len(recorder.events)]
        rise = [max(live[start : end + 1]) - live[start] for start, end in pairwise(cuts)]
        return cls(
            max(live),
            blocks=[name for name, _, _ in marks],
            first_bytes=max(live[: cuts[0] + 1]),
            start_bytes=live[cuts[0]],
            net=np.diff(np.array(live)[cuts]),
            rise=np.array(rise, dtype=np.int64),
            flops=np.diff([*(flops for _, _, flops in marks), recorder.flops]),
            moved_bytes=np.diff(np.array(moved)[cuts]),
        )


class RecordBlocks(pl.Callback):
    """Applies policies to the blocks of a model in a predicted run, and marks where each block starts."""

    def __init__(self, policies: Policies, blocks: BlockSelector, recorder: Recorder) -> None:
        self.marks: list[tuple[str, int, int]] = []
        self._policies, self._blocks, self._recorder = policies, blocks, recorder

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        change = functools.partial(recompute, policy=self._policies, blocks=self._blocks)
        model_surgery.queue(trainer, pl_module, Stage.CHECKPOINT, lambda model: len(change(model)))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for name, block in model_surgery.select_blocks(pl_module, self._blocks).items():
            # Prepend the hook, because the mark must come before the first allocation of a recomputed block.
            block.register_forward_pre_hook(functools.partial(self._enter, name), prepend=True)
            block.register_forward_hook(functools.partial(self._leave, name))

    def _mark(self, name: str, *_: object) -> None:
        self.marks.append((name, len(self._recorder.events), self._recorder.flops))

    def _enter(self, name: str, *_: object) -> None:
        if not in_backward():  # otherwise the block is recomputed, in a segment that has already started
            self._mark(name)

    def _leave(self, name: str, _block: object, _inputs: object, output: object) -> None:
        for each in tree_leaves(output) if not in_backward() else ():
            # A block's backward pass starts when the gradient of its output arrives.
            if isinstance(each, Tensor) and each.requires_grad:
                each.register_hook(functools.partial(self._mark, name))


class MemoryFit:
    """Chooses the policy of each block of a module, by predictions on a copy of the original module.

    Args:
        trainer: The run's Trainer, during the `setup` of its callbacks.
        own: The run's `GradientCheckpointing`, which is left out of the predicted runs.
        module: The module, before techniques have changed it.

    Raises:
        ConfigError: The module cannot be copied.
    """

    def __init__(self, trainer: pl.Trainer, own: Any, module: pl.LightningModule) -> None:
        self.policies: Policies = {}
        self._peak_bytes = self._budget_bytes = 0
        self._trainer, self._own = trainer, own
        self._accumulate_grad_batches = trainer.accumulate_grad_batches
        outer = Fakes.opened()
        self._fakes = outer or Fakes()
        try:
            with self._fakes if outer is None else nullcontext():
                self._twin = self._fakes.of(module)
        except Exception as error:  # a user's module may hold objects that cannot be copied
            raise _not_predicted(root_cause_line(error)) from error
        # Techniques have replaced the `configure_model` of the original. Restore the copy's own method.
        model_surgery.restore(self._twin)
        # These hooks have already been called on the batch that predictions use, so replace the hooks.
        for hook in ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"):
            setattr(self._twin, hook, lambda batch, *_: batch)
        if is_compiled(module):
            raise _not_predicted("what its own compiled modules keep is the compiler's choice")

    def choose(self, module: pl.LightningModule, batch: Any) -> None:
        """Choose the same policies on all ranks, before the module's first step.

        Raises:
            ConfigError: No choice fits the budget, or a step cannot be predicted.
        """
        gpu = devices.gpu_of(next(module.parameters()))
        memory_bytes = allocator.total_bytes(torch.device("cpu")) if gpu is None else gpu.memory_bytes
        # The minimum over ranks is the negative of a maximum of negatives.
        budget_bytes = -self._most([-num_bytes(self._own.memory, memory_bytes)])[0]
        # DDP's buckets are as large as the gradients. No operator allocates the buckets, so add their bytes.
        trained_bytes = sum(each.nbytes for each in module.parameters() if each.requires_grad)
        buckets_bytes = trained_bytes if gpu is not None and self._trainer.world_size > 1 else 0
        names = list(model_surgery.select_blocks(module, self._own.blocks))
        predict = functools.partial(self._predict, batch, gpu)
        reason, chosen, peak_bytes = "", {}, 0
        try:
            # `offload`, the last policy, saves nothing on a CPU.
            policies = POLICIES if gpu is not None else POLICIES[:-1]
            chosen, peak_bytes = choose(predict, budget_bytes - buckets_bytes, policies)
        except UnpredictableError as error:
            reason = str(error)
        own = [POLICIES.index(chosen.get(name, KEEP)) for name in names]
        # If ranks differ, take the policy that saves the most memory: the largest index in `POLICIES`.
        has_failed, *indices = self._most([bool(reason), *own])
        if has_failed:
            raise _not_predicted(reason or "on another rank")
        self.policies = {name: POLICIES[index] for name, index in zip(names, indices, strict=True)}
        if indices != own:  # this mixture has not been predicted yet
            peak_bytes = predict(self.policies).peak_bytes
        peak_bytes = self._most([peak_bytes])[0] + buckets_bytes
        if peak_bytes > budget_bytes:
            smallest = f"{math.ceil(1000 * peak_bytes / UNITS['MiB']) / 1000}MiB"
            python = f'GradientCheckpointing(policy="fit", memory="{smallest}")'
            enough = Remedy(f"{KEY}.memory={smallest}", python)
            allowed = f"at least {smallest}"
            raise ConfigError(f"{KEY}.memory", self._own.memory, allowed=allowed, remedies=[enough])
        self._peak_bytes, self._budget_bytes = peak_bytes, budget_bytes
        # Free the copy's fake tensors and its graph.
        del self._twin

    def outcome(self) -> Outcome:
        """Report the chosen policies, the predicted peak and, if the device records it, the measured peak."""
        if not self._budget_bytes:
            return Outcome(did="nothing chosen yet", effective=False)
        device = self._trainer.strategy.root_device
        top_bytes = allocator.peak_bytes(device) if Fakes.opened() is None else None
        did = f"{merged(self.policies)}; predicted peak {human_bytes(self._peak_bytes)} of "
        did += human_bytes(self._budget_bytes)
        did += "" if top_bytes is None else f", measured {human_bytes(top_bytes)}"
        sizes = {"predicted_peak_bytes": self._peak_bytes, "peak_bytes": top_bytes}
        return Outcome(did=did, numbers={"policies": dict(self.policies), **sizes})

    def _most(self, numbers: Sequence[int]) -> list[int]:
        """Return the elementwise maximum over ranks."""
        if self._trainer.world_size == 1:
            return list(numbers)
        strategy: Any = self._trainer.strategy
        return strategy.reduce(torch.tensor(numbers, device=strategy.root_device), reduce_op="max").tolist()

    def _predict(self, batch: Any, gpu: Device | None, policies: Policies) -> Segments:
        trainer: Any = self._trainer
        recorder = Recorder()
        marks = RecordBlocks(policies, self._own.blocks, recorder)
        # Predicted steps draw random numbers, for example for dropout, so restore the random states below.
        states = random_states.capture(trainer.strategy.root_device)
        num_batches = trainer.num_training_batches
        with ExitStack() as stack:
            if Fakes.opened() is None:
                stack.enter_context(real_tensors())  # the report must not count predicted steps
                stack.enter_context(self._fakes)
                stack.enter_context(CudaOperators(gpu.capability if gpu is not None else 0))
                stack.enter_context(devices.predicted(gpu))
            try:
                twin_trainer = self._new_trainer(marks)
            except Exception as error:  # the constructor of a user's subclass may raise anything
                raise UnpredictableError(root_cause_line(error)) from error
            found = predict_inside(
                self._fakes, self._twin, batch, trainer=twin_trainer, recorder=recorder,
                num_batches=None if num_batches == math.inf else num_batches,
                batch_size=getattr(trainer.train_dataloader, "batch_size", None),
            )  # fmt: skip
        random_states.restore(states, trainer.strategy.root_device)
        if found.peak is None:
            raise UnpredictableError(found.reason) from found.error
        return Segments.of(recorder, marks.marks, on_device=gpu is not None)

    def _new_trainer(self, marks: RecordBlocks) -> pl.Trainer:
        trainer: Any = self._trainer
        others = [each for each in rules.callbacks_of(trainer) if isinstance(each, Technique)]
        # GradientAccumulation sets `accumulate_grad_batches`, and rejects a Trainer that sets the number too.
        is_accumulating = any(name_of(each) == "callbacks/gradient_accumulation" for each in others)
        return pl.Trainer(
            accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
            callbacks=[*(remade(each) for each in others if each is not self._own), marks],
            plugins=[remade(trainer.precision_plugin, device="cpu"), LightningEnvironment()],
            accumulate_grad_batches=1 if is_accumulating else self._accumulate_grad_batches,
            gradient_clip_val=trainer.gradient_clip_val,
            gradient_clip_algorithm=trainer.gradient_clip_algorithm,
            max_steps=trainer.max_steps, max_epochs=trainer.max_epochs,  # learning-rate schedules read both
        )  # fmt: skip


def _not_predicted(reason: str) -> ConfigError:
    full = Remedy(f"{KEY}.policy=full", "GradientCheckpointing()")
    allowed = f"another policy, since a step cannot be predicted: {reason}"
    return ConfigError(f"{KEY}.policy", "fit", allowed=allowed, remedies=[full])


def remade(technique: Any, **changed: Any) -> Any:
    """Construct a technique or precision plugin again with the same arguments, except those in `changed`."""
    arguments = {
        # If a base class already uses the attribute `x`, `given_x` has the argument `x` (core/technique.py).
        name: changed.get(name, getattr(technique, f"given_{name}", getattr(technique, name, None)))
        for name in inspect.signature(type(technique)).parameters
        if name != "scaler"  # a scaler belongs to the run's device
    }
    return type(technique)(**arguments)


class Mixtures:
    """Computes the peak and the cost of any mixture of policies, from one recording per policy.

    Args:
        runs: Recordings by policy, in order of preference at equal cost.
    """

    def __init__(self, runs: Mapping[str, Segments]) -> None:
        self.policies = list(runs)
        first = next(iter(runs.values()))
        # Segments of different recordings are combined by position, so the order of blocks must be the same.
        if any(each.blocks != first.blocks for each in runs.values()):
            raise UnpredictableError("the blocks are called in another order under another policy")
        # A block has several segments: one per forward pass and one per backward pass, in each micro-batch.
        self.names = list(dict.fromkeys(first.blocks))
        self.first_bytes, self.start_bytes = first.first_bytes, first.start_bytes
        # Arrays [blocks, policies, segments], with zeros in the segments of other blocks.
        is_own = np.array([[each == name for each in first.blocks] for name in self.names])[:, None]
        net, rise, flops, moved = (
            np.where(is_own, np.array([getattr(each, name) for each in runs.values()], np.int64), 0)
            for name in ("net", "rise", "flops", "moved_bytes")
        )
        # Bytes that a block adds to the maximum in each segment. These are the net bytes of the block's
        # earlier segments, plus the rise if the segment belongs to the block.
        self.added: Numbers = np.cumsum(net, axis=2) - net + rise
        is_changed = np.broadcast_to(np.arange(len(runs)) > 0, net.shape[:2])
        costs = (moved.sum(axis=2), flops.sum(axis=2), is_changed)
        self.costs: Numbers = np.stack(costs, axis=2, dtype=np.int64)

    def _picked(self, values: Numbers, choice: Policies) -> Numbers:
        picks = [self.policies.index(choice[name]) for name in self.names]
        return values[range(len(picks)), picks].sum(axis=0)

    def peak_bytes(self, choice: Policies) -> int:
        """Return the peak of a mixture."""
        # peak = start + max over segments of the sum over blocks of `added`.
        return max(self.first_bytes, self.start_bytes + int(self._picked(self.added, choice).max()))

    def cost(self, choice: Policies) -> list[int]:
        """Return moved bytes, FLOPs and the number of changed blocks, to be compared in this order."""
        return self._picked(self.costs, choice).tolist()

    def cheapest(self, limit_bytes: int) -> Policies | None:
        """Return the cheapest mixture whose peak is within a limit; None if no mixture fits."""
        # `slack` is the number of free bytes in each segment if every block used the policy that needs the
        # fewest bytes in that segment.
        least = self.added.min(axis=1)
        slack = limit_bytes - self.start_bytes - least.sum(axis=0)
        if limit_bytes < self.first_bytes or (slack < 0).any():
            return None
        extra, count = self.added - least[:, None], len(self.policies)
        # One row per partial choice: bytes above the minimum [rows, segments], costs [rows, 3], and the
        # policies chosen so far [rows, blocks].
        used, costs = np.zeros((1, extra.shape[2]), np.int64), np.zeros((1, 3), np.int64)
        picks = np.zeros((1, 0), np.int64)
        for index in range(len(self.names)):
            # Extend each partial choice by each policy of this block.
            used = (used[:, None] + extra[index]).reshape(-1, extra.shape[2])
            costs = (costs[:, None] + self.costs[index]).reshape(-1, 3)
            picks = np.column_stack([picks.repeat(count, axis=0), np.tile(np.arange(count), len(picks))])
            rows = np.flatnonzero((used <= slack).all(axis=1))
            if not len(rows):
                return None
            # Compare only segments whose bytes still depend on the policy of a later block.
            is_open = extra[index + 1 :].any(axis=(0, 1))
            rows = rows[_undominated(used[rows][:, is_open], costs[rows])]
            used, costs, picks = used[rows], costs[rows], picks[rows]
        # `_undominated` sorts by cost, so the first row is the cheapest.
        return {name: self.policies[pick] for name, pick in zip(self.names, picks[0], strict=True)}

    def smallest_bytes(self) -> int:
        """Return the smallest peak of any mixture, by bisection."""
        low, high = 0, max(self.peak_bytes(dict.fromkeys(self.names, policy)) for policy in self.policies)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.cheapest(middle) else (middle + 1, high)
        return high


def _undominated(used: Numbers, costs: Numbers) -> list[int]:
    """Return the Pareto-optimal rows, the cheapest first.

    A row is dropped if another row costs no more and uses no more bytes in every segment.
    """
    different = np.unique(used, axis=1)  # equal columns would repeat a comparison
    kept: list[int] = []
    # Rows are sorted by costs and then by bytes, so only an earlier row can dominate a row.
    for row in np.lexsort([different.sum(axis=1), *costs.T[::-1]]):
        if not kept or not (different[kept] <= different[row]).all(axis=1).any():
            kept.append(int(row))
    return kept


def choose(
    predict: Callable[[Policies], Segments], budget_bytes: int, policies: Sequence[str]
) -> tuple[Policies, int]:
    """Return the cheapest policies within a budget, and their peak.

    If nothing fits, return the policies with the smallest peak. `policies` lists the candidates, with `keep`
    first.
    """
    plain = predict({})
    names = list(dict.fromkeys(plain.blocks))
    if plain.peak_bytes <= budget_bytes or not names:
        return {}, plain.peak_bytes
    runs = {KEEP: plain} | {policy: predict(dict.fromkeys(names, policy)) for policy in policies[1:]}
    mixtures = Mixtures(runs)
    # If nothing fits, search for the smallest peak, because the error message names it.
    goal = limit = budget_bytes if mixtures.cheapest(budget_bytes) else mixtures.smallest_bytes()
    found = [(dict.fromkeys(names, policy), run.peak_bytes) for policy, run in runs.items()]
    for _ in range(MAX_CORRECTIONS):
        choice = mixtures.cheapest(limit)
        if choice is None:
            break
        peak_bytes = predict(choice).peak_bytes
        found.append((dict(choice), peak_bytes))
        if peak_bytes <= goal:
            break
        # The blocks influence each other, so lower the limit by the error of the computed peak.
        limit -= peak_bytes - mixtures.peak_bytes(choice)
    fitting = [each for each in found if each[1] <= budget_bytes]
    if not fitting:
        return min(found, key=lambda each: each[1])
    # Single policies are candidates too, so the result is never worse than the best single policy.
    return min(fitting, key=lambda each: mixtures.cost(each[0]))


def num_bytes(memory: str | float, device_bytes: int) -> int:
    """Convert a size with a unit, or a fraction of a device's memory, to a number of bytes.

    Raises:
        ConfigError: The text is not a size.
    """
    try:
        return parse_bytes(memory) if isinstance(memory, str) else int(memory * device_bytes)
    except ValueError as error:
        allowed = f"a size with its unit, one of {', '.join(UNITS)}, or a fraction of the device's memory"
        raise ConfigError("memory", memory, allowed=allowed) from error


def merged(policies: Policies) -> str:
    """Describe policies in words; neighbouring blocks with the same policy are merged.

    Example:
        >>> merged({"net.0": "full", "net.1": "full", "net.2": "keep", "tail": "keep"})
        'net.0-1 full, net.2 keep, tail keep'
    """
    texts: list[str] = []
    for (_, policy), group in groupby(policies.items(), lambda item: (item[0].rpartition(".")[0], item[1])):
        first, *others = [name for name, _ in group]
        last = f"-{others[-1].rpartition('.')[2]}" if others else ""
        texts.append(f"{first}{last} {policy}")
    return ", ".join(texts)
