"""The command `lightning-eff`: run a verb, and turn its errors into a few lines and an exit code.

`--help`, `ls` and completion must answer in under a second, so this module does not import torch, Lightning
or Hydra.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from lightning_eff.commands import _completion, _parser
from lightning_eff.core.errors import EXIT_OK, exit_code, keep_overrides, root_cause_line
from lightning_eff.core.secret_values import hide_secrets
from lightning_eff.core.text import printable

MAX_ERROR_LINES = 5
GOES_ON = {
    "train": "; ckpt_path=auto resumes from this command's newest checkpoint, if it has saved one",
    "tune": "; the same command continues with the trials measured so far",
}
"""Advice to print when a verb is interrupted, if a second command can continue its work."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: Words after the program's name; if None, they are read from the command line.

    Example:
        >>> main(["--version"]) == 0
        lightning-eff ...
        True
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with keep_overrides():
            return _dispatch(words)
    except BaseException as error:  # noqa: BLE001 - Ctrl-C and SystemExit end in an exit code too
        code = exit_code(error)
        if code != EXIT_OK:
            frames = "".join(traceback.format_exception(error)) if "--debug" in words else ""
            lines = "".join(f"{line}\n" for line in _error_lines(error, words)[:MAX_ERROR_LINES])
            # The text of an error may contain a secret, or control characters from a file.
            sys.stderr.write(printable(hide_secrets(f"{frames}{lines}")))
        return code


def run() -> NoReturn:
    """Run the command and end the process with its exit code.

    When the interpreter of a CPU rank exits, gloo (torch 2.13) sometimes aborts, even with plain DDP. The
    exit code then reports a failure. To avoid this abort, a rank exits right after the libraries' exit
    handlers.
    """
    code = main()
    # Not imported: verbs that do not train must not import torch.
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        sys.exit(code)
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage] # noqa: SLF001 - loggers of services finish here
    # `os._exit` does not flush Python's streams.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _dispatch(words: list[str]) -> int:
    if words[:1] == ["--complete"]:
        sys.stdout.write("".join(f"{word}\n" for word in _completion.complete(words[1:])))
        return EXIT_OK
    options = _parser.parse(words)
    if options.verb is None:
        script = _completion.SCRIPTS.get(options.completion)
        sys.stdout.write(_parser.build()[0].format_help() if script is None else script)
        return EXIT_OK
    module = importlib.import_module(f"lightning_eff.commands.{options.verb}")
    from lightning_eff.core.log_filters import ignore_library_messages

    ignore_library_messages()
    # For imports of the user's classes: a console script starts without the working directory on the path.
    sys.path.insert(0, str(Path.cwd()))
    return int(module.main(options))


def _is_of_user(file: Path) -> bool:
    is_library = "site-packages" in file.parts or file.is_relative_to(Path(__file__).parent)
    return not is_library and file.is_relative_to(Path.cwd())


def _error_lines(error: BaseException, words: Sequence[str]) -> list[str]:
    """Return root cause, line of code and the traceback's file; empty if another rank prints the error."""
    if error.__dict__.get("is_reported"):
        return []
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return [f"stopped{next((text for verb, text in GOES_ON.items() if verb in words), '')}"]
    lines = f"error: {root_cause_line(error)}".splitlines()[: MAX_ERROR_LINES - 1]
    if hasattr(error, "exit_code"):  # an error of this package: its text is complete
        return lines
    notes = "\n".join(getattr(error, "__notes__", [])).splitlines()
    lines += notes[: MAX_ERROR_LINES - 2]
    frames = traceback.extract_tb(error.__traceback__)
    if frames and not notes:
        # A line of the user's own code is more useful than a library's.
        last = ([each for each in frames if _is_of_user(Path(each.filename))] or frames)[-1]
        lines.append(f"  at {last.filename}:{last.lineno} in {last.name}")
    log = error.__dict__.get("error_log")
    lines.append(f"  traceback: {log}" if log else "  --debug prints the traceback")
    return lines
