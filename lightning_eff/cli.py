"""The command `lightning-eff`: run a verb, and turn what it raises into a few lines and an exit code.

`--help`, `ls` and completion must answer in under a second, so nothing here imports torch, Lightning or
Hydra.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from lightning_eff import __version__
from lightning_eff.core import catalog
from lightning_eff.core.errors import EXIT_OK, UsageError, exit_code, root_cause_line, suggest_name
from lightning_eff.core.remedies import keep_overrides
from lightning_eff.core.text import text_table

MAX_ERROR_LINES = 5
HELP = """
 lightning-eff VERB --help shows a verb's options; overrides are Hydra's: key=value, group=option
 lightning-eff --completion bash|zsh|fish prints completion for your shell; --version the version
"""

COMPLETION = {
    # bash begins a new word after "=" and ":", and replaces only what follows: the rest is cut off.
    "bash": """_lightning_eff() {
  local line="${COMP_LINE:0:COMP_POINT}" words
  read -ra words <<< "${line#* }"
  [[ $line == *' ' ]] && words+=('')
  local last="${words[-1]}" IFS=$'\\n'
  COMPREPLY=($(lightning-eff --complete "${words[@]}"))
  COMPREPLY=("${COMPREPLY[@]#"${last%"${last##*[=:]}"}"}")
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
        arguments: The words after the program's name; None takes them from the command line.

    Example:
        >>> main(["--version"]) == 0
        lightning-eff ...
        True
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with keep_overrides():
            return _dispatch(words)
    except BaseException as error:  # noqa: BLE001 - also Ctrl-C and SystemExit end in an exit code
        code = exit_code(error)
        if code != EXIT_OK:
            if "--debug" in words:
                sys.stderr.write("".join(traceback.format_exception(error)))
            sys.stderr.write("".join(f"{line}\n" for line in _error_lines(error)[:MAX_ERROR_LINES]))
        return code


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("--help", "-h", "help"):
        verbs = [[name, summary] for name, summary in catalog.verbs().items()]
        recipes = [[entry.name, entry.summary] for entry in catalog.recipes()]
        sys.stdout.write(
            "lightning-eff VERB [RECIPE] [overrides]\n\n"
            f"{text_table(['verb', ''], verbs)}\n\n{text_table(['recipe', ''], recipes)}\n{HELP}"
        )
        return EXIT_OK
    if words[0] == "--version":
        sys.stdout.write(f"lightning-eff {__version__}\n")
        return EXIT_OK
    if words[0] == "--complete":
        sys.stdout.write("".join(f"{word}\n" for word in complete(words[1:])))
        return EXIT_OK
    if words[0] == "--completion":
        shell = words[1] if len(words) > 1 else ""
        if shell not in COMPLETION:
            text = f"--completion {shell}: no such shell; {suggest_name(shell, COMPLETION)}"
            raise UsageError(text)
        sys.stdout.write(COMPLETION[shell])
        return EXIT_OK
    verbs = catalog.verbs()
    index = next((index for index, word in enumerate(words) if not word.startswith("-")), 0)
    verb, rest = words[index], words[:index] + words[index + 1 :]
    if verb not in verbs:
        text = f"unknown verb {verb!r}; {suggest_name(verb, verbs)}"
        raise UsageError(text)
    module = importlib.import_module(f"lightning_eff.commands.{verb}")
    if "--help" in rest or "-h" in rest:
        sys.stdout.write(f"{module.__doc__}\n\n{module.USAGE.strip()}\n")
        return EXIT_OK
    from lightning_eff.core.log_filters import ignore_import_messages

    ignore_import_messages()
    # For the user's own classes: a console script starts without the current folder on the path.
    sys.path.insert(0, str(Path.cwd()))
    return int(module.main(rest))


def complete(words: Sequence[str]) -> list[str]:
    """Return the completions of the last of `words`.

    Example:
        >>> complete(["tr"]), complete(["train", "bas"]), complete(["train", "lm", "precision=tf"])
        (['train'], ['baseline'], ['precision=tf32'])
    """
    start = words[-1] if words else ""
    if len(words) <= 1:
        known = list(catalog.verbs())
    elif words[0] == "ls":
        known = [entry.name for entry in [*catalog.recipes(), *catalog.options()]]
    elif len(words) == 2:
        known = [entry.name for entry in catalog.recipes()]
    else:
        uses = [entry.use for entry in catalog.options()]
        known = uses if start.startswith("+") else [use.lstrip("+") for use in uses]
        known += [f"{key}=" for key in catalog.parameter_keys()]
    return sorted({word for word in known if word.startswith(start)})


def _error_lines(error: BaseException) -> list[str]:
    """Return root cause, line of code and the traceback's file; nothing if another rank prints it."""
    if error.__dict__.get("is_reported"):
        return []
    if isinstance(error, (SystemExit, KeyboardInterrupt)):
        return ["stopped; ckpt_path=last resumes from the newest checkpoint"]
    lines = f"error: {root_cause_line(error)}".splitlines()[: MAX_ERROR_LINES - 1]
    if hasattr(error, "exit_code"):  # an error of this package: its text is complete
        return lines
    frames = traceback.extract_tb(error.__traceback__)
    if frames:
        lines.append(f"  at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}")
    log = error.__dict__.get("error_log")
    lines.append(f"  traceback: {log}" if log else "  --debug prints the traceback")
    return lines
