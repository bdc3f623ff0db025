"""What can go wrong, in the words of whoever asked: an error names key, value, allowed values and remedy."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable
from pathlib import Path

from lightning_eff.core.remedies import format_remedies

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_ENVIRONMENT = 3
EXIT_OUT_OF_MEMORY = 4
EXIT_REFUSED = 5
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
LEGACY = "pytorch_lightning"
"""The package that Lightning was before, with classes of its own by the same names."""
OUT_OF_MEMORY = (
    "out of memory",  # CUDA, HIP, XPU and MPS, and CUDA's own calls
    "can't allocate memory",  # torch's allocator on the CPU
    "not enough memory",  # the same on Windows
    "_alloc_failed",  # cuBLAS, cuDNN, cuSPARSE, cuSOLVER, hipBLAS
    "out_of_device_memory",  # SYCL, behind XPU
    "out_of_host_memory",
    "memoryallocation",  # cudaErrorMemoryAllocation, hipErrorMemoryAllocation
    "resource_exhausted",  # XLA
)
"""How back ends without a class of their own say it, in lower case."""


MAX_VALUE_CHARACTERS = 300
"""Of a value in a message."""


class HasRemedies:
    """What is wrong, with remedies that a plain Trainer's user can paste too.

    Args:
        text: Its lines; those that begin with `try:` are remedies, stated as a recipe's overrides.
    """

    def __init__(self, text: str) -> None:
        super().__init__(format_remedies(text))  # pyright: ignore[reportCallIssue] - it stands before an exception


class ConfigError(HasRemedies, ValueError):
    """A setting that cannot be used, found before anything ran.

    Args:
        key: Name of the setting; a technique gives its parameter's name, the config adds the path in front.
        value: What was given.
        allowed: What would have been accepted, in words.
        remedies: Up to three things to paste instead.

    Example:
        >>> raise ConfigError(key="every_n_steps", value=-1, allowed="a whole number of at least 1, or None")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: every_n_steps=-1: expected a whole number ...
    """

    exit_code = EXIT_CONFIG

    def __init__(self, key: str, value: object, *, allowed: str, remedies: Iterable[str] = ()) -> None:
        self.key = key
        self.value = value
        self.allowed = allowed
        self.remedies = tuple(remedies)
        super().__init__(self._text())

    def _text(self) -> str:
        value = repr(self.value) if self.key else str(self.value)
        value = value if len(value) <= MAX_VALUE_CHARACTERS else f"{value[:MAX_VALUE_CHARACTERS]}..."
        given = f"{self.key}={value}" if self.key else value
        lines = [f"{given}: expected {self.allowed}"]
        lines += [f"  try: {remedy}" for remedy in self.remedies[:3]]
        return "\n".join(lines)

    def under(self, path: str) -> ConfigError:
        """Return the same error with `path` in front of its key."""
        return ConfigError(
            f"{path}.{self.key}".rstrip("."), self.value, allowed=self.allowed, remedies=self.remedies
        )


class UsageError(HasRemedies, Exception):
    """The command line asks for something that does not exist; its text says what does."""

    exit_code = EXIT_CONFIG


class ConflictError(HasRemedies, Exception):
    """Two settings that are fine alone and wrong together; its text says which to change."""

    exit_code = EXIT_REFUSED


class EnvironmentLacksError(HasRemedies, Exception):
    """Something that must be installed is not there; its text gives the command that adds it."""

    exit_code = EXIT_ENVIRONMENT


PRE_RUN_ERRORS = (ConfigError, UsageError, ConflictError, EnvironmentLacksError)
"""What is said before a run begins: nothing has happened yet."""


class RankError(Exception):
    """What ended one rank, and the others with it; its text names the rank and the cause in one line.

    Args:
        text: The line.
        exit_code: Of the rank that ended first.
    """

    def __init__(self, text: str, exit_code: int = EXIT_FAILED) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class RunOutOfMemoryError(Exception):
    """A run that was out of memory; its text names phase, holders and an override that fits."""

    exit_code = EXIT_OUT_OF_MEMORY


class CheckpointError(HasRemedies, Exception):
    """A checkpoint that cannot be written, or must not be read; its text names file, cause and remedy."""

    exit_code = EXIT_FAILED


class CheckpointWarning(HasRemedies, UserWarning):
    """A checkpoint is not what it should be, or is left where it is, and the run goes on."""


class NoEffectWarning(UserWarning):
    """A technique was asked for and changed nothing."""


class ConflictWarning(HasRemedies, UserWarning):
    """Two settings work together, and not as one would expect."""


class SlowPathWarning(UserWarning):
    """What was asked for works here, but slower than doing without it."""


def legacy_package_error(name: str) -> ConflictError:
    """Return the refusal of a Trainer whose classes have Lightning's names and are others.

    Args:
        name: What was given to it.

    Example:
        >>> raise legacy_package("EmptyCache")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConflictError: EmptyCache: this Trainer comes from the package ...
    """
    text = f"{name}: this Trainer comes from the package {LEGACY}, which lightning_eff does not support"
    return ConflictError(f"{text}: import lightning.pytorch instead")


def suggest_name(word: str, known: Iterable[str]) -> str:
    """Return a half-sentence with names that have the word in them, the closest spelling, or what there is.

    Example:
        >>> nearest("epochs", ["max_epochs", "max_steps", "min_epochs"])
        "did you mean 'max_epochs' or 'min_epochs'?"
        >>> nearest("emty_cache", ["empty_cache", "mixed"])
        "did you mean 'empty_cache'?"
        >>> nearest("x", ["bf16_mixed", "fp32"])
        'there are: bf16_mixed, fp32'
    """
    options = sorted(set(known))
    close = _with_word(word, options)[:2] or difflib.get_close_matches(word, options, n=1, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    if len(options) > 24:
        options = [*options[:24], "..."]
    return f"there are: {', '.join(options)}" if options else "there are none"


def _with_word(word: str, options: Iterable[str]) -> list[str]:
    """Return options with a part that begins like the word: at the front first, then with fewer parts."""
    if len(word) < 2:
        return []
    begins = re.compile(rf"(?:^|[\W_]){re.escape(word)}", re.IGNORECASE)
    found = [option for option in options if begins.search(option)]
    return sorted(found, key=lambda option: (begins.match(option) is None, len(re.split(r"[\W_]", option))))


def check_path(key: str, path: str | Path) -> None:
    """Refuse a path that the system cannot even look up: one that is too long, say; it need not exist.

    Raises:
        ConfigError: It is one.
    """
    try:
        os.stat(path)  # noqa: PTH116 - a text that pathlib would normalize
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError) as error:
        allowed = f"a path that can be looked up ({getattr(error, 'strerror', None) or error})"
        raise ConfigError(key, str(path), allowed=allowed) from error


def check_flags(**flags: object) -> None:
    """Refuse what is neither True nor False: "no" would mean yes.

    Raises:
        ConfigError: One of them is something else.

    Example:
        >>> check_flags(save_base="no")
        Traceback (most recent call last):
        lightning_eff.core.errors.ConfigError: save_base='no': expected true or false
    """
    for key, value in flags.items():
        if not isinstance(value, bool):
            raise ConfigError(key=key, value=value, allowed="true or false")


def exit_code(error: BaseException) -> int:
    """Return the process's exit code for what ended it.

    Example:
        >>> exit_code(KeyboardInterrupt()), exit_code(RuntimeError("x")), exit_code(MemoryError())
        (130, 1, 4)
    """
    names = {kind.__name__ for kind in type(error).__mro__}
    if "SIGTERMException" in names:
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
    """Know an allocator's refusal, by its class or by the text of back ends without one; also as a cause.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"))
        True
        >>> is_out_of_memory(RuntimeError("shape '[2, 3]' is invalid for input of size 5"))
        False
    """
    seen: set[int] = set()  # an error may be its own cause's cause
    while error is not None and id(error) not in seen:
        if _says_out_of_memory(error):
            return True
        seen.add(id(error))
        error = error.__cause__
    return False


def _says_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or any(k.__name__ == "OutOfMemoryError" for k in type(error).__mro__):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(words in text for words in OUT_OF_MEMORY)


def root_cause_line(error: BaseException) -> str:
    """Return the first line of what went wrong, with the class unless it is one of ours.

    Example:
        >>> root_cause_line(KeyError("loss"))
        "error: KeyError: 'loss'"
    """
    text = str(error)
    if hasattr(error, "exit_code"):
        return f"error: {text}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    first = " ".join(lines[:2]) if lines and lines[0].endswith(":") else next(iter(lines), "")
    return f"error: {type(error).__name__}: {first}" if first else f"error: {type(error).__name__}"
