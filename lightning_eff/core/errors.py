"""Errors, warnings, remedies and exit codes: everything that a message consists of.

An error names key, value, allowed values and remedies. A remedy has two forms: an override for a recipe, and
Python code for a plain Trainer. A remedy's text is the override inside the context `keep_overrides`, and the
Python code elsewhere. The command line and the functions that build a recipe's run enter this context.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from typing_extensions import override

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_REJECTED = 5
EXIT_INTERRUPTED = 130
EXIT_SIGUSR1 = 138
"""Exit code after SIGUSR1, which SLURM can send some time before it ends a job."""
EXIT_TERMINATED = 143
LEGACY = "pytorch_lightning"
"""Lightning's legacy package. Its classes and the classes of `lightning.pytorch` have the same names."""
OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP, XPU and MPS, and CUDA's own calls
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory",  # torch's allocator on Windows
    "_alloc_failed",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, hipBLAS
    "out_of_device_memory",  # SYCL, used by XPU
    "out_of_host_memory",
    "memoryallocation",  # cudaErrorMemoryAllocation, hipErrorMemoryAllocation
)
"""Lower-case texts in the OOM errors of backends that have no exception class for OOM."""
MAX_VALUE_CHARACTERS = 300
"""Messages show at most this many characters of a value."""

_in_recipe: ContextVar[bool] = ContextVar("_in_recipe", default=False)


@dataclass(frozen=True)
class Remedy:
    """A change that removes an error, as an override and as Python code.

    Args:
        override: One or more overrides to paste into a command.
        python: Python code that makes the same change in a script.

    Example:
        >>> remedy = Remedy("callbacks.micro_batch.micro_batch_size=4", "MicroBatch(micro_batch_size=4)")
        >>> str(remedy)
        'MicroBatch(micro_batch_size=4)'
        >>> with keep_overrides():
        ...     str(remedy)
        'callbacks.micro_batch.micro_batch_size=4'
    """

    override: str
    python: str

    def __str__(self) -> str:
        """Return the override inside `keep_overrides`, else the Python code."""
        return self.override if _in_recipe.get() else self.python


TO_ADAMW = Remedy("optimizer=adamw", "OptimizerChoice(optimizer=partial(torch.optim.AdamW, lr=...))")
TO_AUTO_PRECISION = Remedy("precision=auto", "AutoPrecision()")
TO_BF16_MIXED = Remedy("precision=bf16_mixed", 'AutoPrecision(precision="bf16-mixed")')
TO_FP32 = Remedy("precision=fp32", 'AutoPrecision(precision="32-true")')
TO_ONE_BATCH_A_STEP = Remedy("trainer.accumulate_grad_batches=1", "Trainer(accumulate_grad_batches=1)")
TO_TWO_DEVICES = Remedy("trainer.devices=2", "devices=2")
TO_AUTO_STRATEGY = Remedy("strategy=auto", 'strategy="auto"')
TO_DDP = Remedy("strategy=ddp", 'strategy="ddp"')
TO_FSDP2 = Remedy("strategy=fsdp2", "FSDP2() or FSDP2Fabric()")
TO_ZERO = Remedy("strategy=deepspeed_zero", "DeepSpeedZero() or ZeroFabric()")
TO_FULL_CHECKPOINTS = Remedy("strategy.checkpoints=full", 'FSDP2(checkpoints="full")')


@contextmanager
def keep_overrides() -> Generator[None]:
    """Show remedies as overrides in error texts that are created inside this context."""
    # A context variable, so that other threads keep the form of their remedies.
    token = _in_recipe.set(True)
    try:
        yield
    finally:
        _in_recipe.reset(token)


def list_remedy(option: str, class_name: str, parameter: str, names: Sequence[str]) -> Remedy:
    """Return the remedy that sets a parameter to a list of names.

    Example:
        >>> remedy = list_remedy("callbacks.micro_batch", "MicroBatch", "keep", ["weights", "1.0"])
        >>> print(remedy.override, remedy.python)
        'callbacks.micro_batch.keep=[weights,"1.0"]' MicroBatch(keep=['weights', '1.0'])
    """
    # Quote names such as `1.0`, which Hydra would read as numbers, and quote the override for the shell.
    quoted = [name if re.fullmatch(r"[A-Za-z_][\w.-]*|\d+", name) else json.dumps(name) for name in names]
    override = f"{option}.{parameter}=[{','.join(quoted)}]"
    override = override if quoted == list(names) else shlex.quote(override)
    return Remedy(override, f"{class_name}({parameter}={list(names)})")


class ConfigError(ValueError):
    """A setting that cannot be used; the error is raised before the run starts.

    Args:
        key: Name of the setting: a technique passes its parameter's name, and `under` prepends a path.
        value: The rejected value.
        allowed: Description of accepted values.
        remedies: Settings to paste instead; the message shows the first three.
    """

    exit_code = EXIT_CONFIG

    def __init__(
        self, key: str, value: object, *, allowed: str, remedies: Iterable[str | Remedy] = ()
    ) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        self.remedies = tuple(remedies)
        # An error without a key has a text as its value, which is shown without quotes.
        shown = repr(value) if key else str(value)
        shown = shown if len(shown) <= MAX_VALUE_CHARACTERS else f"{shown[:MAX_VALUE_CHARACTERS]}..."
        setting = f"{key}={shown}" if key else shown
        tries = [f"  try: {remedy}" for remedy in self.remedies[:3]]
        super().__init__("\n".join([f"{setting}: expected {allowed}", *tries]))

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the error by its text and attributes; launchers send errors between processes."""
        return _restored, (type(self), self.args, self.__dict__)

    def under(self, path: str) -> ConfigError:
        """Return the same error with `path` in front of its key."""
        key = f"{path}.{self.key}".rstrip(".")
        return ConfigError(key, self.value, allowed=self.allowed, remedies=self.remedies)


def _restored(kind: type[Any], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    # `args` contains only the text, whereas `__init__` has other parameters.
    error: Any = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


class UsageError(Exception):
    """The command line names something that does not exist; the text lists the existing names."""

    exit_code = EXIT_CONFIG


class ConflictError(Exception):
    """Two settings that cannot be combined; the text names the setting to change."""

    exit_code = EXIT_REJECTED


class EnvironmentLacksError(Exception):
    """A required package or tool is not installed; the text contains the command to install it."""

    exit_code = EXIT_ENVIRONMENT


PRE_RUN_ERRORS = (ConfigError, UsageError, ConflictError, EnvironmentLacksError)
"""Errors that are raised before a run starts, when no file and no model has been changed yet."""


class RankError(Exception):
    """A rank failed and ended all other ranks; the text names this rank and the cause in one line."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class SweepRunError(RankError):
    """A run of a sweep failed in another process, or returned nothing to its sweeper.

    The text contains the run's error and the path of the traceback.
    """


class RunOutOfMemoryError(Exception):
    """A run ran out of memory; the text names the phase, the largest tensors and a remedy.

    Args:
        text: Lines of the message.
        found: The content of the message as plain values, for the run's report page.
    """

    exit_code = EXIT_OUT_OF_MEMORY

    def __init__(self, text: str, found: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.found = found or {}


class CheckpointError(Exception):
    """A checkpoint cannot be written or must not be loaded; the text names file, cause and remedy."""

    exit_code = EXIT_FAILED


class CheckpointWarning(UserWarning):
    """A checkpoint is damaged, or could not be moved or deleted; the run continues."""


class NoEffectWarning(UserWarning):
    """A technique was requested but changed nothing."""


class LittleReachedWarning(NoEffectWarning):
    """A technique affects very few modules or none; the warning is issued before the run and by `plan`."""


class ConflictWarning(UserWarning):
    """Two settings can be combined, but do not have the expected effect together."""


class SlowPathWarning(UserWarning):
    """A setting works, but is slower or needs more memory than an alternative."""


def legacy_package_error(name: str) -> ConflictError:
    """Return the error for a Trainer of the legacy package; `name` is the class that received the Trainer."""
    text = f"{name}: this Trainer comes from the package {LEGACY}, which lightning_eff does not support"
    return ConflictError(f"{text}: import lightning.pytorch instead")


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return a hint about an unknown name: similar names, or all known names.

    Example:
        >>> suggest_name("emty_cache", ["empty_cache", "mixed"]), suggest_name("x", ["bf16_mixed", "fp32"])
        ("did you mean 'empty_cache'?", 'there are: bf16_mixed, fp32')
    """
    options = sorted(set(known))
    # Find options with a part that starts with the word. Matches at the front of an option come first, then
    # options with fewer parts.
    begins = re.compile(rf"(?:^|[\W_]){re.escape(word)}", re.IGNORECASE)
    containing = [option for option in options if len(word) > 1 and begins.search(option)]
    containing.sort(key=lambda option: (begins.match(option) is None, len(re.split(r"[\W_]", option))))
    close = containing[:2] or difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if len(options) > 24:
        options = [*options[:24], "..."]
    return f"there are: {', '.join(options)}" if options else "there are none"


def check_path(key: str, path: str | Path) -> None:
    """Reject a path that the system cannot look up, for example because the path contains a null byte."""
    try:
        os.stat(path)  # noqa: PTH116 - pathlib would normalize the path
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        allowed = f"a path that can be looked up ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(key, str(path), allowed=allowed) from error


def exit_code(error: BaseException) -> int:
    """Return the exit code of a process that ends with this error.

    Example:
        >>> exit_code(KeyboardInterrupt()), exit_code(RuntimeError("x")), exit_code(MemoryError())
        (130, 1, 4)
    """
    # Lightning's class is found by its name, because this module does not import Lightning.
    if any(kind.__name__ == "SIGTERMException" for kind in type(error).__mro__):
        return EXIT_TERMINATED
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, SystemExit):
        return int(error.code) if isinstance(error.code, int) else EXIT_FAILED if error.code else EXIT_OK
    if is_out_of_memory(error):
        return EXIT_OUT_OF_MEMORY
    code = getattr(error, "exit_code", None)
    return code if isinstance(code, int) else EXIT_FAILED


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes is an OOM error, by class or text.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
        True
    """
    seen: set[int] = set()  # causes can form a cycle
    while error is not None and id(error) not in seen:
        names = {kind.__name__ for kind in type(error).__mro__}
        # Errors of other classes may quote such a text, although memory was sufficient.
        text = str(error).lower() if isinstance(error, RuntimeError) else ""
        if names & {"MemoryError", "OutOfMemoryError"} or any(part in text for part in OUT_OF_MEMORY):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def root_cause_line(error: BaseException) -> str:
    """Return an error's class and first line, or the full text of an error of this package."""
    text = str(error)
    if hasattr(error, "exit_code"):
        return text
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A first line that ends with a colon only introduces the cause, so add the next line.
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
