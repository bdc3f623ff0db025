"""The command `lightning-eff`: finds the verb, runs it, turns what goes wrong into a few lines and a code.

`--help`, `ls` and completion must answer in under a second, so nothing here imports torch, Lightning or
Hydra.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from lightning_eff import __version__
from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, exit_code, root_cause_line, suggest_name
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.core.text import text_table

MAX_ERROR_LINES = 5

COMPLETION = {
    "bash": """_lightning_eff() {
  local IFS=$'\\n'
  COMPREPLY=($(lightning-eff --complete "${COMP_WORDS[@]:1:COMP_CWORD}"))
}
complete -o nospace -o default -F _lightning_eff lightning-eff
""",
    "zsh": """#compdef lightning-eff
_lightning_eff() { compadd -S '' -- ${(f)"$(lightning-eff --complete "${words[@]:1:$((CURRENT-1))}")"} }
compdef _lightning_eff lightning-eff
""",
    "fish": """complete -c lightning-eff -f \\
  -a '(lightning-eff --complete (commandline -opc)[2..-1] (commandline -ct))'
""",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    Args:
        arguments: What stands behind the program's name; None takes it from the command line.

    Example:
        >>> main(["--version"]) == 0
        lightning-eff ...
        True
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with _Boundary(debug="--debug" in words) as boundary, keep_overrides():
        boundary.exit_code = _dispatch(words)
    return boundary.exit_code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        sys.stdout.write(_help())
    elif words[0] == "--version":
        sys.stdout.write(f"lightning-eff {__version__}\n")
    elif words[0] == "--complete":
        sys.stdout.write("".join(f"{word}\n" for word in complete(words[1:])))
    elif words[0] == "--completion":
        sys.stdout.write(_completion(words[1:]))
    else:
        return _run_verb(words)
    return EXIT_OK


def _run_verb(words: list[str]) -> int:
    verbs = catalog.verbs()
    found = [index for index, word in enumerate(words) if not word.startswith("-")]
    verb = words[found[0]] if found else words[0]
    if verb not in verbs:
        text = f"{verb!r} is no verb; {suggest_name(verb, verbs)}"
        raise UsageError(text)
    rest = words[: found[0]] + words[found[0] + 1 :]
    module = importlib.import_module(f"lightning_eff.commands.{verb}")
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(f"{module.__doc__}\n\n{module.USAGE.strip()}\n")
        return EXIT_OK
    from lightning_eff.core.log_filters import ignore_import_messages

    ignore_import_messages()
    sys.path.insert(0, str(Path.cwd()))  # for classes of the user's own: a console script is started without
    return int(module.main(rest))


def _help() -> str:
    verbs = [[name, line] for name, line in catalog.verbs().items()]
    recipes = [[entry.name, entry.summary] for entry in catalog.recipes()]
    return (
        "lightning-eff VERB [RECIPE] [overrides]\n\n"
        f"{text_table(['verb', ''], verbs)}\n\n{text_table(['recipe', ''], recipes)}\n\n"
        " lightning-eff VERB --help shows a verb's options; overrides are Hydra's: key=value, group=option\n"
        " lightning-eff --completion bash|zsh|fish prints completion for your shell; --version the version\n"
    )


def _completion(words: Sequence[str]) -> str:
    shell = words[0] if words else ""
    if shell not in COMPLETION:
        text = f"--completion {shell}: no such shell; {suggest_name(shell, COMPLETION)}"
        raise UsageError(text)
    return COMPLETION[shell]


def complete(words: Sequence[str]) -> list[str]:
    """Return what the last of `words` could become.

    Example:
        >>> complete(["tr"]), complete(["train", "bas"]), complete(["train", "lm", "precision=tf"])
        (['train'], ['baseline'], ['precision=tf32'])
    """
    start = words[-1] if words else ""
    if len(words) <= 1:
        known = list(catalog.verbs())
    elif words[0] == "ls":
        known = [entry.name for entry in catalog.entries()]
    elif len(words) == 2:
        known = [entry.name for entry in catalog.recipes()]
    else:
        known = [
            entry.use.lstrip("+") if not start.startswith("+") else entry.use for entry in catalog.options()
        ]
        known += [f"{key}=" for key in catalog.parameter_keys()]
    return sorted({word for word in known if word.startswith(start)})


class _Boundary:
    """Everything that a verb raises ends here: the root cause first, at most five lines, and an exit code.

    Args:
        debug: Print the whole traceback too.
    """

    def __init__(self, *, debug: bool) -> None:
        self.exit_code = EXIT_OK
        self._debug = debug

    def __enter__(self) -> _Boundary:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if error is None:
            return False
        self.exit_code = exit_code(error)
        if self.exit_code != EXIT_OK:
            if self._debug:
                sys.stderr.write("".join(traceback.format_exception(kind, error, trace)))
            sys.stderr.write("".join(f"{line}\n" for line in _lines(error)[:MAX_ERROR_LINES]))
        return True


def _lines(error: BaseException) -> list[str]:
    """Return what went wrong, where, and where to read more; nothing where another rank says it."""
    if error.__dict__.get("told"):
        return []
    lines = root_cause_line(error).splitlines()[: MAX_ERROR_LINES - 1]
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return ["stopped; ckpt_path=last goes on from the newest checkpoint"]
    if hasattr(error, "exit_code"):
        return lines
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
    log = error.__dict__.get("error_log")
    lines.append(f"  traceback: {log}" if log else "  --debug prints the traceback")
    return lines
