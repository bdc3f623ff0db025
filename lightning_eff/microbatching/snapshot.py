"""Undo a training step, or an optimizer's update, so that a second attempt runs as if it were the first.

`StepSnapshot` copies:

- random states: torch on the CPU and on the device, Python, NumPy, and generators that modules hold;
- buffers, the states of torchmetrics, and the values that Lightning has logged;
- every module's attributes, the content of dicts, lists, sets and deques in these attributes, the containers
  in containers of at most 1000 items, and tensors of up to 1 MiB that are attributes.

Changes to custom objects, to tensors in containers, to attributes through `.data`, to files and to the batch
are not undone. Undoing a step raises an error if the step has changed a frozen parameter, a larger tensor in
an attribute, or a buffer that cannot be copied (sparse, expanded).

`OptimizerSnapshot` keeps parameters, gradients and optimizer state in host memory. `atomic_update` takes an
`OptimizerSnapshot` before an update, because memory may run out after half of the parameters are updated. On
a CPU, a snapshot is taken before every update. On other devices, a snapshot is taken only before the first
update, which allocates the optimizer's state. A snapshot before every update would take longer than a step.
If an optimizer evaluates its closure more than once in a step (LBFGS), the update is not retried.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_map
from torchmetrics import Metric

from lightning_eff.core import allocator, random_states
from lightning_eff.core.call_state import BASE, CONTAINERS, content_of, reinstate, version
from lightning_eff.core.errors import is_out_of_memory
from lightning_eff.report.live_bytes import tensors_in

MAX_PLAIN_BYTES = 2**20
"""Largest tensor that is copied if it is an attribute but no buffer, because it may be a data set."""
MAX_ITEMS = 1000
"""Size of the largest container whose containers are copied too, because a larger one may be a data set."""


class StepSnapshot:
    """Copies the state before a step, and restores this state.

    Args:
        module: The model.
        device: The device whose random state is kept in addition to the CPU's random state.
        logged: Lightning's collection of logged values; None without a Trainer.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, logged: Mapping[str, Any] | None = None
    ) -> None:
        self._module = module
        self._device = device
        self._logged: Any = logged if logged is not None else {}

    def keep(self) -> None:
        """Copy the current state."""
        modules = list(self._module.modules())
        # Read from `_buffers`, which includes the buffers that are None.
        held = [each for each in modules if not isinstance(each, torch.jit.ScriptModule)]
        self._registered = [(vars(each)["_buffers"], dict(vars(each)["_buffers"])) for each in held]
        # Tensor, values, and count of in-place changes; -1 for a tensor that is always restored.
        self._copies: list[tuple[Tensor, Tensor, int]] = []
        # Name, tensor and count of in-place changes.
        self._unchanged: list[tuple[str, Tensor, int]] = []
        for owner in modules:
            if isinstance(owner, Metric):
                continue
            # Not `isinstance`: a subclass may be LazyLogits, which a copy would compute.
            plain = {k: v for k, v in vars(owner).items() if type(v) is Tensor and not v.requires_grad}
            buffers = owner.named_buffers(recurse=False, remove_duplicate=False)
            for name, tensor in [*buffers, *plain.items()]:
                is_copied = tensor.layout == torch.strided and not tensor.is_inference()
                is_copied &= name not in plain or tensor.nbytes <= MAX_PLAIN_BYTES
                if is_copied:  # an expanded tensor (stride 0) has shared elements, which `copy_` rejects
                    axes = zip(tensor.stride(), tensor.shape, strict=True)
                    is_copied = all(stride or size <= 1 for stride, size in axes)
                if is_copied:
                    # Restore every buffer, because batch norms change buffers without increasing the version.
                    before = version(tensor) if name in plain else -1
                    self._copies.append((tensor, tensor.detach().clone(), before))
                else:
                    self._unchanged.append((name, tensor, version(tensor)))
        # A step that updates a frozen parameter (a momentum encoder) would update it once per micro-batch.
        frozen = [(name, p) for name, p in self._module.named_parameters() if not p.requires_grad]
        self._unchanged += [(name, parameter, version(parameter)) for name, parameter in frozen]
        self._generators = random_states.held_by(self._module)
        self._random = random_states.capture(self._device, self._generators)
        self.keep_visible()

    def keep_visible(self) -> None:
        """Copy only the logged values, attributes, lists and metrics."""
        self._logged_before = dict(self._logged)
        owners: list[Any] = [*self._module.modules(), *self._logged.values()]
        self._attributes = [(vars(owner), dict(vars(owner))) for owner in owners]
        # A step may append to a list, for example an output that is averaged later.
        own = [value for _, each in self._attributes for name, value in each.items() if name not in BASE]
        self._containers = _containers(own)
        metrics: list[Any] = [owner for owner in owners if isinstance(owner, Metric)]
        # The keys of `_defaults` are the names of a metric's states, in torchmetrics 1.x.
        states = [vars(metric).get(name) for metric in metrics for name in metric._defaults]  # noqa: SLF001
        self._states = [(state, state.detach().clone()) for state in states if isinstance(state, Tensor)]

    def restore(self) -> None:
        """Restore the copied state.

        Raises:
            RuntimeError: A frozen parameter, or a buffer that could not be copied, has changed.
        """
        # Check first, because a restored tensor may share its version with an unchanged one.
        for name, tensor, before in self._unchanged:
            if version(tensor) != before:
                raise RuntimeError(
                    f"training_step changes {name}, so that the step cannot be undone: change it in "
                    "on_train_batch_end"
                )
        for current, registered in self._registered:  # a failed attempt may have added or replaced buffers
            current.clear()
            current.update(registered)
        with torch.no_grad():
            for tensor, values in [(t, values) for t, values, before in self._copies if version(t) != before]:
                tensor.copy_(values)
        self._unchanged = [(name, tensor, version(tensor)) for name, tensor, _ in self._unchanged]
        random_states.restore(self._random, self._device, self._generators)
        self.restore_visible()

    def restore_visible(self) -> None:
        """Restore logged values, attributes, lists and metrics."""
        self._logged.clear()
        self._logged.update(self._logged_before)
        for attributes, before in self._attributes:
            attributes.clear()
            attributes.update(before)
        for tensor, values in self._states:
            tensor.data = values.clone()  # keeps the tensor object, which other code may reference
        for container, content in self._containers:
            reinstate(container, content, {})


def _containers(values: Iterable[Any]) -> list[tuple[Any, Any]]:
    """Return the containers among values, and those inside them, each with a copy of its content."""
    found: dict[int, tuple[Any, Any]] = {}
    new = list(values)
    while new:
        # Not `isinstance`, which would follow a weak proxy.
        new = [value for value in new if issubclass(type(value), CONTAINERS) and id(value) not in found]
        contents = {id(value): (value, content_of(value)) for value in new}
        found |= contents
        small = [content for _, content in contents.values() if len(content) <= MAX_ITEMS]
        new = [
            each for content in small for each in (content.values() if isinstance(content, dict) else content)
        ]
    return list(found.values())


@runtime_checkable
class SharesState(Protocol):
    """An optimizer that wraps other optimizers and shares its state with them."""

    share_state: Callable[[], None]
    """Set the wrapped optimizers' state and groups to the wrapper's state and groups."""


class OptimizerSnapshot:
    """Keeps an optimizer's parameters, gradients and state, so that an update can be undone."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        groups = optimizer.param_groups
        options = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._groups: list[dict[str, Any]] = _copied(options)
        self._state = {key: _copied(value) for key, value in optimizer.state.items()}
        parameters: list[Tensor] = [parameter for group in groups for parameter in group["params"]]
        # Leave out frozen parameters, which no update changes. Writing to a frozen parameter would increase
        # its version, and StepSnapshot would report a change by the step.
        parameters = [p for p in parameters if p.requires_grad or p.grad is not None]
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        tensors = [*parameters, *gradients, *tensors_in([*options, *optimizer.state.values()])]
        # Copy each tensor once, even if groups or states share it.
        self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
        # Copy to the CPU, since the device's memory may run out.
        self._values = [tensor.detach().to("cpu", copy=True) for tensor in self._tensors]

    def restore(self) -> None:
        """Restore parameters, gradients and optimizer state."""
        for tensor, value in zip(self._tensors, self._values, strict=True):
            with torch.no_grad():
                tensor.copy_(value)
        for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key in group.keys() - options.keys() - {"params"}:
                del group[key]
            group.update(_copied(options))
        # Delete state that the failed update has created, so that the retry creates it again.
        for key in [key for key in self._optimizer.state if key not in self._state]:
            del self._optimizer.state[key]
        for key, value in self._state.items():
            self._optimizer.state[key] = _copied(value)
        if isinstance(self._optimizer, SharesState):
            self._optimizer.share_state()


def _copied(value: Any) -> Any:
    """Return a copy of a value, with new containers and the same leaves."""
    return tree_map(lambda leaf: leaf, value)


def free_memory(device: torch.device) -> None:
    """Free the leftovers of a failed attempt: tensors in reference cycles, and the allocator's cache."""
    gc.collect()
    if allocator.has_cache(device):
        allocator.empty_cache(device)


@contextmanager
def atomic_update(optimizer: Optimizer, device: torch.device, *, is_first: bool) -> Generator[None]:
    """Make the optimizer's next `step` atomic: either all parameters are updated, or none.

    Args:
        optimizer: The optimizer, whose `step` is replaced inside the context.
        device: The parameters' device.
        is_first: Whether this is the first update, which allocates the optimizer's state.
    """
    # Later updates need no more memory than the first, but on a CPU another process may have taken memory.
    if not is_first and device.type != "cpu":
        yield
        return
    original: Any = optimizer.step

    @functools.wraps(original)
    def step(*args: Any, **keywords: Any) -> Any:
        return _step_atomically(optimizer, original, args, keywords, device)

    is_wrapped = "step" in optimizer.__dict__  # an LR scheduler has replaced `step`
    optimizer.step = step
    try:
        yield
    finally:
        if is_wrapped:
            optimizer.step = original
        else:
            optimizer.__dict__.pop("step", None)


def _step_atomically(
    optimizer: Optimizer,
    step: Callable[..., Any],
    args: tuple[Any, ...],
    keywords: dict[str, Any],
    device: torch.device,
) -> Any:
    """Step, and retry once if memory runs out in the update.

    The snapshot is taken after the closure has run, so an error inside the closure is not retried here.
    """
    closure: Any = keywords.get("closure", args[0] if args else None)
    snapshot: OptimizerSnapshot | None = None
    num_evaluations, loss, is_retry = 0, None, False

    def evaluate() -> Any:
        nonlocal snapshot, num_evaluations, loss
        if is_retry:
            return loss  # the gradients of the first evaluation were restored
        snapshot = None  # an out-of-memory error in the closure is not retried here
        num_evaluations += 1
        loss = closure()
        snapshot = OptimizerSnapshot(optimizer) if num_evaluations == 1 else None
        return loss

    if closure is None:
        snapshot = OptimizerSnapshot(optimizer)
    elif "closure" in keywords:
        keywords = keywords | {"closure": evaluate}
    else:
        args = (evaluate, *args[1:])
    while True:
        try:
            return step(*args, **keywords)
        except Exception as error:
            if not is_out_of_memory(error) or snapshot is None:
                raise
            snapshot.restore()
            if is_retry:
                error.add_note("the optimizer's update does not fit; micro_batch_size does not change that")
                raise
        # Free memory after the handler, inside which the error keeps the failed update's tensors alive.
        free_memory(device)
        is_retry = True
