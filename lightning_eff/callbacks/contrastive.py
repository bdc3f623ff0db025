"""Train with a contrastive loss over a large batch, in the memory of one micro-batch (gradient caching).

The module has two methods, `embed(batch)` and `similarity_loss(embeddings)`, and its `training_step` is
`return self.similarity_loss(self.embed(batch))`. During `training_step` this callback replaces `embed`. The
replacement embeds the batch in micro-batches without keeping activations. The replacement returns the
embeddings of the full batch, gathered from all ranks. When the backward pass reaches the embeddings, the
callback recomputes one micro-batch at a time. The gradient of the micro-batch's embeddings then continues
through the recomputed graph. Why not one backward pass per micro-batch, with a surrogate loss: a single
backward pass leaves loss scaling, accumulation, reduction over ranks and backward hooks unchanged. Parameters
of the loss, such as a temperature, get their gradients as usual.

The recomputation of a micro-batch uses the random numbers, autocast, attributes and buffers of the first
computation. Values that the recomputation writes or logs are dropped. `embed` must not compare samples.
Before a batch is split for the first time, the callback checks `embed` on a few samples. A step may call
`embed` several times, for example for two views. The results of `embed` have one row per sample: embeddings,
and labels if the loss needs labels.

Each rank computes the loss over the embeddings of all ranks; the step minimizes the mean of the ranks'
losses. Batches may differ in size between ranks, unless ranks shard parameters or synchronize batch norms. If
a step has several batches, the loss compares samples only within one batch. The Trainer's own
`accumulate_grad_batches` then works like `callbacks/gradient_accumulation`: batches count by their samples.

With `micro_batch_size=auto`, the full batch is tried first. After an OOM, everything that the step has
changed is restored, and the step runs again in micro-batches of half the size. Checkpoints store the size.

Saves: activations: only one micro-batch's activations are in memory at a time. Embeddings and the tensors of
    the loss still grow with the batch.
Costs: one more forward pass of `embed`. Until its backward pass, each micro-batch keeps random states, copies
    of changed buffers, and an autograd graph without activations. The graph takes host memory (0.3 MB for 80
    modules). The gradients of micro-batches are summed in the dtype of the weights; with FSDP2, in the dtype
    of the gathered weights. This sum is separate from the gradients of earlier batches of the step. Batch
    norms compute statistics per micro-batch. On several ranks, embeddings and their gradients are exchanged;
    `plan` does not count this communication.
When not: the batch fits, or the loss is a mean over samples (`callbacks/micro_batch`).
Conflicts: `callbacks/micro_batch`, manual optimization; `auto` on several ranks. A module that gathers
    embeddings itself needs `gather=false`. The run stops with an error if `embed` changes its inputs or
    frozen parameters in place, or is not called by `training_step`. A loss that `embed` stores in an
    attribute is the last micro-batch's, with a warning. A list to which `embed` appends losses is not
    detected; it has one loss per micro-batch. Changes of buffers by `embed` are made once per micro-batch,
    with a warning. The warning misses changes that `embed` makes only in training mode (spectral norm, an EMA
    codebook) or through `.data` (a momentum encoder).
Source: Gao et al. 2021, Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup,
    https://arxiv.org/abs/2101.06983
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_eff.core.arguments import Count, accepts, check_arguments
from lightning_eff.core.call_state import CallState, oldest_graphs_first, stops_early
from lightning_eff.core.errors import (
    TO_FSDP2,
    ConfigError,
    ConflictError,
    ConflictWarning,
    NoEffectWarning,
    Remedy,
)
from lightning_eff.core.managed import Managed
from lightning_eff.core.shards import is_sharded
from lightning_eff.core.technique import Facts, Outcome, Rule, Verdict
from lightning_eff.microbatching import lightning_loop, splitting
from lightning_eff.microbatching.mean_check import MAX_SAMPLES, check_mean
from lightning_eff.microbatching.micro_batch_runner import MAX_NAMES, logged_values, merge_logged
from lightning_eff.microbatching.oom_retry import MicroBatchSize, kept_names
from lightning_eff.microbatching.splitting import MicroBatchPart, Splitter

FIXED_SIZE = Remedy("callbacks.contrastive.micro_batch_size=8", "Contrastive(micro_batch_size=8)")
WITHOUT = Remedy("~callbacks.contrastive", "remove Contrastive")
ONE_LINE = "def training_step(self, batch, batch_idx): return self.similarity_loss(self.embed(batch))"
OWNER = ("callbacks.contrastive", "Contrastive")
PREDICTED_PARTS = 32
"""Maximum number of micro-batches per batch that run while memory is being predicted."""
Embed = Callable[[Any], Any]


class _WholeBatches(MicroBatchSize):
    """The micro-batch size of `embed`; the loop retries steps, but does not split batches itself."""

    @override
    def split(self, batch: Any, size: int | None) -> list[MicroBatchPart]:
        return splitting.split(batch, None)

    @override
    def num_samples(self, batch: Any) -> int | None:
        return self.largest  # samples in the largest argument of `embed`


class Contrastive(Managed):
    """Compute `embed` in micro-batches, for a loss over the embeddings of the full batch.

    Args:
        micro_batch_size: Number of samples per micro-batch on each device; `auto` starts with the full batch.
        gather: Whether `embed` returns the embeddings of all ranks; use false if the module gathers
            embeddings itself.
        splitter: Function `splitter(batch, size)` that splits the argument of `embed`; if None, built-in
            rules apply.
        keep: Names of values in the batch that are not split, so that every micro-batch gets the full value.
            The format is the same as in `MicroBatch`.

    Raises:
        ConfigError: The module has no method `embed`, or `embed` returned anything but tensors with one row
            per sample.
        ConflictError: `embed` compares samples, or `training_step` does not call `embed`. Also raised if
            batches differ in size on ranks that shard parameters or synchronize batch norms.
        RecomputationError: `embed` changes its inputs or frozen parameters in place.

    Warns:
        NoEffectWarning: The run has one rank, and no batch was larger than `micro_batch_size`.
        ConflictWarning: `embed` changes buffers, or stores a tensor with an autograd graph.

    Example:
        >>> trainer = pl.Trainer(callbacks=[Contrastive(micro_batch_size=8)], logger=False, accelerator="cpu")
        >>> Contrastive(micro_batch_size=0)
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: micro_batch_size=0: expected 'auto', or a whole number ...
    """

    exact = True
    lowers = ("activations",)
    try_as = ()  # only for modules that have the method `embed`

    @check_arguments
    def __init__(
        self,
        *,
        micro_batch_size: Literal["auto"] | Count = "auto",
        gather: bool = True,
        splitter: Splitter | None = None,
        keep: Sequence[str | int] | None = None,
    ) -> None:
        self.micro_batch_size = micro_batch_size
        self.gather = gather
        self.splitter = splitter
        self.keep = keep
        self._size = self._new_size(micro_batch_size if isinstance(micro_batch_size, int) else None)
        self._max_parts: int | None = None
        self._num_left_out = 0
        self._num_calls = 0
        self._num_ranks = 1
        self._last_split = -1  # index of the last split batch
        self._check = ""
        """Message if the check of `embed` could not run; empty otherwise."""

    def join_prediction(self, gpu: object) -> bool:
        """Skip micro-batches in the middle of a large batch, so that predicting memory takes only seconds."""
        del gpu
        self._max_parts = PREDICTED_PARTS
        return True

    def assumptions(self) -> list[str]:
        """Return the effects that a memory prediction does not count."""
        text = f"only {PREDICTED_PARTS} micro-batches of a batch are run: buffers that the others change"
        return [f"{text} are not counted"] if self._num_left_out else []

    def _new_size(self, current: int | None) -> MicroBatchSize:
        is_auto, keep = self.micro_batch_size == "auto", kept_names(self.keep, self.splitter)
        return _WholeBatches(current, is_auto=is_auto, splitter=self.splitter, keep=keep)

    def facts(self) -> Facts:
        """Reject techniques that also split batches, untested strategies, and `auto` on several devices."""
        reasons = {
            "callbacks/micro_batch": "it splits training_step, whose loss compares samples",
            "run/manual_optimization": "the module runs its backward passes itself",
        }
        rules = [Rule(name=name, reason=reason, remedies=(WITHOUT,)) for name, reason in reasons.items()]
        reason = "only DDP, FSDP2 and DeepSpeedZero are known to give the gradient of all ranks' batches"
        names = ("FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")
        rules += [Rule(name=f"lightning/{name}", reason=reason, remedies=(TO_FSDP2,)) for name in names]
        if self.micro_batch_size == "auto":
            reason = "a rank that runs out of memory would leave the others waiting for its embeddings"
            rules.append(Rule(name="run/many_devices", reason=reason, remedies=(FIXED_SIZE,)))
        reason = "statistics are computed per micro-batch, so the result depends on its size"
        rules.append(Rule(name="run/batch_norm", reason=reason, verdict=Verdict.WARNED))
        return Facts(excludes=tuple(rules))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        super().setup(trainer, pl_module, stage)
        if not callable(getattr(type(pl_module), "embed", None)):
            allowed = "a module with the methods embed(batch) and similarity_loss(embeddings)"
            name = type(pl_module).__name__
            raise ConfigError(key="", value=name, allowed=allowed, remedies=[ONE_LINE])
        self._size = self._new_size(self._size.current)  # with auto, the size of an earlier fit
        self._num_calls, self._last_split, self._check = 0, -1, ""
        self._num_ranks = trainer.world_size
        self.cleanup.enter_context(oldest_graphs_first())
        loop = lightning_loop.install(trainer)
        self.cleanup.callback(lightning_loop.uninstall, trainer)
        loop.micro_batch_size = self._size if self._size.is_auto else None
        loop.num_checks_left, loop.mean_check = 0, "samples are compared only within each batch of a step"
        loop.around_training_step = partial(self._embedding_in_parts, pl_module)

    @contextmanager
    def _embedding_in_parts(self, module: pl.LightningModule) -> Generator[None]:
        """Replace `module.embed` within a `training_step`."""
        embed: Any = module.embed
        with patch.object(module, "embed", partial(self._embed_all, module, embed)):
            yield
        if not self._num_calls:
            text = f"callbacks/contrastive: training_step does not call self.embed(batch)\n  try: {ONE_LINE}"
            raise ConflictError(text)

    def _embed_all(self, module: pl.LightningModule, embed: Embed, batch: Any) -> Any:
        """Return the embeddings of a batch, gathered from all ranks."""
        size, self._num_calls = self._size, self._num_calls + 1
        parts = splitting.split(batch, size.current, size.splitter, size.keep, owner=OWNER)
        size.largest = sum(part.num_samples or 0 for part in parts)
        counts = self._counts(module, size.largest)
        if len(parts) > 1:
            if self._last_split < 0:
                self._check_apart(module, embed, batch, min(counts))
            # Count a batch once, although its step may call `embed` several times, or run again.
            index = module.trainer.fit_loop.epoch_loop.total_batch_idx
            size.num_split += index != self._last_split
            self._last_split = index
            outputs = self._embed_parts(module, embed, parts)
        else:
            outputs = [embed(batch)]
        # Rows [N, *] are in the order of the batch; gathered rows are in the order of the ranks.
        joined = _joined(outputs, parts)
        if self._num_ranks == 1 or not self.gather:
            return joined
        leaves, spec = tree_flatten(joined)
        rows = [_Gather.apply(leaf, counts, module.global_rank) for leaf in leaves]
        return tree_unflatten(rows, spec)

    def _counts(self, module: pl.LightningModule, rows: int) -> list[int]:
        """Return the number of samples in each rank's batch."""
        if self._num_ranks == 1:
            return [rows]
        if not rows and self.gather:
            allowed = "a function whose micro-batches have countable samples, on several ranks"
            raise ConfigError(key="splitter", value=self.splitter, allowed=allowed)
        counts = torch.zeros(self._num_ranks, dtype=torch.int64, device=module.device)
        counts[module.global_rank] = rows
        dist.all_reduce(counts)
        found: list[int] = counts.tolist()
        # A rank with fewer micro-batches would run fewer collectives, and other ranks would wait forever.
        has_collectives = any(is_sharded(each) for each in module.parameters())
        has_collectives |= any(isinstance(each, nn.SyncBatchNorm) for each in module.modules())
        if len(set(found)) > 1 and has_collectives:
            raise ConflictError(
                f"callbacks/contrastive: batches of {found} samples; ranks that shard parameters or share "
                "batch norms must run the same number of micro-batches\n  try: DataLoader(drop_last=True)"
            )
        return found

    def _embed_parts(
        self, module: pl.LightningModule, embed: Embed, parts: Sequence[MicroBatchPart]
    ) -> list[Any]:
        """Embed micro-batches, and log the values that a full batch would have logged."""
        results: Any = module.trainer._results  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
        before = results.batch, results.batch_size
        early_stop, stored = stops_early(module), _with_graph(module)
        outputs, logged = list[Any](), [logged_values(results)]
        self._num_left_out = max(0, len(parts) - (self._max_parts or len(parts)))
        # While memory is being predicted, only the first micro-batches run, and the last micro-batch, whose
        # size may differ.
        run = [*parts[: len(parts) - self._num_left_out - 1], parts[-1]]
        for part in run:
            results.batch, results.batch_size = part.batch, part.num_samples
            # With a cached cast, autograd would sum the gradients of all micro-batches in 16 bits.
            torch.clear_autocast_cache()
            outputs.append(_embed_again_in_backward(module, embed, part.batch, early_stop=early_stop))
            logged.append(logged_values(results))
        # A tensor has only one weak reference without a callback, so an unchanged attribute has the same one.
        if new := [name for name, each in _with_graph(module).items() if stored.get(name) is not each]:
            text = (
                f"callbacks/contrastive: embed(batch) stores {', '.join(new)}; in the loss, it has only the "
                "values and the gradient of the last micro-batch, unless embed(batch) returns it"
            )
            warnings.warn(text, ConflictWarning, stacklevel=2)
        merge_logged(results, logged, [part.num_samples for part in run], is_weighted=False)
        # The embeddings of skipped micro-batches still take memory.
        outputs[-1:-1] = [tree_map(torch.empty_like, outputs[0]) for _ in range(self._num_left_out)]
        results.batch, results.batch_size = before
        return outputs

    def _check_apart(self, module: pl.LightningModule, embed: Embed, batch: Any, num_samples: int) -> None:
        """Reject an `embed` that compares samples.

        If `embed` does not compare samples, a mean over the rows is the same for a batch and for its parts.
        """

        def run(part: MicroBatchPart) -> Tensor:
            rows = [leaf for leaf in tree_leaves(embed(part.batch)) if leaf.is_floating_point()]
            # Why the sine: centered rows have mean 0 in every part, so a plain mean would not reveal them.
            return torch.stack([row.reshape(len(row), -1).sin().sum(1).mean() for row in rows]).sum()

        size = MicroBatchSize(None, is_auto=False, splitter=self.splitter, keep=self._size.keep)
        is_low = not str(module.trainer.precision).startswith(("32", "64"))
        # The check's forward passes keep no activations, so they may have more samples than a micro-batch.
        max_samples = min(num_samples, MAX_SAMPLES, 4 * (self._size.current or 1))
        found = check_mean(batch, run, module, size, max_samples, module.device, is_low=is_low)
        if found.difference:
            raise ConflictError(
                "callbacks/contrastive: embed(batch) compares the samples of its batch, so micro-batches "
                "would get other embeddings: compare samples in similarity_loss"
            )
        if found.moved:
            some = ", ".join(sorted(found.moved)[:MAX_NAMES])
            text = f"Contrastive: embed changes {some}, which happens once per micro-batch now: "
            warnings.warn(f"{text}change them in on_train_batch_end", ConflictWarning, stacklevel=2)
        if found.undecided:
            reason = found.undecided.partition(":")[2]
            self._check = f"not checked whether embed treats samples independently:{reason}"
            rank_zero_info(f"callbacks/contrastive: {self._check}")

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the micro-batch size, so that a resumed run does not run out of memory again."""
        return {"micro_batch_size": self._size.current if self._size.is_auto else None}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        size = state_dict.get("micro_batch_size")
        if self._size.is_auto and accepts(Count, size):
            self._size.current = size

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        outcome = self.outcome()
        if not self._size.is_auto and not outcome.effective:
            text = f"Contrastive had no effect: no batch had more than {self.micro_batch_size} samples"
            warnings.warn(text, NoEffectWarning, stacklevel=2)

    def outcome(self) -> Outcome:
        """Report the micro-batch size, the split batches, the gathering and the out-of-memory errors."""
        size, is_gathered = self._size, self.gather and self._num_ranks > 1
        if not self._num_calls:
            return Outcome(did="no training data yet", effective=False)
        parts = [
            "full batches" if size.current is None else f"micro-batches of {size.current}",
            f"{size.num_split} batch{'es' * (size.num_split != 1)} split",
            f"embeddings of {self._num_ranks} ranks gathered" if is_gathered else "",
            self._check,
        ]
        if size.halvings:
            sizes = [size.halvings[0].before, *(halving.after for halving in size.halvings)]
            parts.append(f"out of memory: {' -> '.join(map(str, sizes))}")
        return Outcome(
            did="; ".join(filter(None, parts)),
            effective=bool(size.num_split or size.halvings or is_gathered),
            numbers={
                "micro_batch_size": size.current,
                "batches_split": size.num_split,
                "out_of_memory": [[h.before, h.after, h.reason] for h in size.halvings],
            },
        )


def _with_graph(module: nn.Module) -> dict[str, weakref.ref[Tensor]]:
    """Return tensors with an autograd graph in the attributes of modules, by name."""
    return {
        f"{path}.{name}".lstrip("."): weakref.ref(value)
        for path, part in module.named_modules()
        for name, value in vars(part).items()
        if isinstance(value, Tensor)
        and value.grad_fn is not None
        # Weight norm, spectral norm and pruning compute `weight` from these parameters in each forward.
        and {f"{name}_orig", f"{name}_g"}.isdisjoint(dict(part.named_parameters(recurse=False)))
    }


def _embed_again_in_backward(
    module: pl.LightningModule, embed: Embed, batch: Any, *, early_stop: bool
) -> Any:
    """Embed a micro-batch without keeping activations, and embed it again in the backward pass."""
    state: CallState | None = None

    def run(batch: Any, _: Tensor) -> Any:
        nonlocal state
        if state is None:
            state = CallState(module, [batch])
            output = embed(batch)
            state.end_forward()
            return output
        # The recomputation uses the state of the first computation, and logs nothing a second time.
        with state.again("embed"):
            vars(module)["log"] = vars(module)["log_dict"] = lambda *_, **__: None  # `again` removes both
            return embed(batch)

    # `checkpoint` restores the random state and autocast of its tensor arguments' device.
    device = torch.empty(0, device=module.device)
    return checkpoint(run, batch, device, use_reentrant=False, early_stop=early_stop)


def _joined(outputs: Sequence[Any], parts: Sequence[MicroBatchPart]) -> Any:
    """Join the rows of micro-batches.

    Raises:
        ConfigError: An output is not a tensor with one row per sample.
    """
    flat = [tree_leaves(output) for output in outputs]
    for leaves, part in zip(flat, parts, strict=True):
        for leaf in leaves:
            is_rows = isinstance(leaf, Tensor) and leaf.dim() > 0
            if not is_rows or part.num_samples not in (None, len(leaf)):
                value = f"a tensor of shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)
                allowed = f"tensors (one, or a tuple or dict) of {part.num_samples} rows, one per sample"
                raise ConfigError(key="", value=f"embed returned {value}", allowed=allowed)
    _, spec = tree_flatten(outputs[0])
    # For each output of `embed`, a column joins the rows of all micro-batches.
    columns = [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*flat, strict=True)]
    return tree_unflatten(columns, spec)


class _Gather(torch.autograd.Function):
    """Gathers the rows of all ranks, and sums the gradient of each row over ranks.

    Each rank's loss uses all rows, so the sum over ranks is the gradient of the sum of losses. The strategy
    then divides by the number of ranks, which gives the gradient of the mean loss.
    """

    @staticmethod
    @override
    def forward(ctx: Any, rows: Tensor, counts: Sequence[int], rank: int) -> Tensor:
        ctx.first, ctx.num_rows = sum(counts[:rank]), len(rows)
        # All other rows are 0, so the sum over ranks is the concatenation.
        gathered = rows.new_zeros(sum(counts), *rows.shape[1:])
        gathered[ctx.first : ctx.first + ctx.num_rows] = rows
        # Why not `all_gather`: it needs equal numbers of rows. Booleans have no sum, so bytes are summed.
        dist.all_reduce(gathered.view(torch.uint8) if gathered.dtype == torch.bool else gathered)
        return gathered

    @staticmethod
    @override
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        # A sum over ranks in 16 bits would round once per rank.
        total = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        dist.all_reduce(total)
        return total[ctx.first : ctx.first + ctx.num_rows].to(grad.dtype), None, None
