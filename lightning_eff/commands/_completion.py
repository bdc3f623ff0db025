"""Complete words in a shell: a script for each shell, and the completions that the script requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_eff.commands import _parser
from lightning_eff.core import catalog

SCRIPTS = {
    # bash starts a new word after "=" and ":", and replaces this new word, so cut off the text before it.
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


def complete(words: Sequence[str]) -> list[str]:
    """Return the completions of the last word in `words`.

    Example:
        >>> complete(["tr"]), complete(["train", "bas"]), complete(["train", "lm", "precision=tf"])
        (['train'], ['baseline'], ['precision=tf32'])
        >>> complete(["launch", "s"]), complete(["launch", "slurm", "bas"])
        (['slurm'], ['baseline'])
    """
    start = words[-1] if words else ""
    # `launch` takes the kind of cluster before the recipe.
    is_on_cluster = words[:1] == ["launch"] and len(words) > 1
    if len(words) <= 1:
        known = list(catalog.verbs())
    elif is_on_cluster and len(words) == 2:
        known = list(_parser.CLUSTERS)
    elif start.startswith("-"):
        parsers = _parser.build()[1]
        known = _parser.option_names(parsers[words[0]]) if words[0] in parsers else []
    elif words[0] == "ls":
        known = [entry.name for entry in [*catalog.recipes(), *catalog.options()]]
    elif len(words) == 2 + is_on_cluster or words[0] == "report":
        is_foreign = words[0] == "migrate"
        known = [] if is_foreign else [entry.name for entry in catalog.recipes()]
        suffixes = (".yaml", ".yml", ".json") if is_foreign else (".yaml",)
        folder = Path(start) if start.endswith("/") else Path(start).parent
        files = [path for path in folder.glob("*") if path.is_dir() or path.suffix in suffixes]
        known += [f"{path}/" if path.is_dir() else str(path) for path in files]
    else:
        uses = [entry.use for entry in catalog.options()]
        known = uses if start.startswith("+") else [use.lstrip("+") for use in uses]
        known += [f"{key}=" for key in catalog.parameter_keys()]
    return sorted({word for word in known if word.startswith(start)})
