"""The command line as one argparse tree: what each verb takes, its options and examples.

Nothing here imports torch, Lightning or Hydra, so that `--help` and completion answer at once.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from lightning_eff import __version__
from lightning_eff.commands._argument_types import at_least, size
from lightning_eff.commands._dashed import as_overrides
from lightning_eff.commands._examples import EXAMPLES
from lightning_eff.commands._recipe_file import OF_RUNS, find_recipe
from lightning_eff.core import catalog
from lightning_eff.core.errors import UsageError, suggest_name

RECIPE = "RECIPE [overrides]"
CLUSTERS = ("slurm", "k8s")
ON_CLUSTER = f"{'|'.join(CLUSTERS)} {RECIPE}"
RUN_OR_RECIPE, COPY, RUNS = "RUN|RECIPE [overrides]", "RECIPE FILE", "RUN..."
OF_RECIPES = (RECIPE, ON_CLUSTER, RUN_OR_RECIPE, COPY)
ABOUT = """\
overrides are Hydra's: key=value, group=option, +callbacks=name
lightning-eff VERB --help shows a verb's options and examples
"""
Add = Callable[..., Any]
"""`add_argument` of a verb's parser."""


def _train(add: Add) -> None:
    add(
        "-m", "--multirun", action="store_true", help="one run for each combination of comma-separated values"
    )
    add("-c", "--cfg", choices=["job", "hydra", "all"], help="print the composed config and stop")
    add("-r", "--resolve", action="store_true", help="with --cfg: with interpolations resolved")
    add("-p", "--package", metavar="PATH", help="with --cfg: this part of it only")
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    about = f"print what Hydra knows about the config and stop: {', '.join(topics)}"
    add("-i", "--info", nargs="?", const="all", choices=topics, metavar="WHAT", help=about)


def _plan(add: Add) -> None:
    about = "try techniques that save memory, and the largest micro-batch that fits (a minute)"
    add("--advice", action="store_true", help=about)


def _compare(add: Add) -> None:
    add("--steps", type=at_least(6), default=8, metavar="N", help="optimizer steps of a trial (8)")
    add(
        "--rounds",
        type=at_least(1),
        default=3,
        metavar="N",
        help="runs of each trial (3); the fastest counts",
    )
    about = "a trial is killed after so many seconds (180), and starts no more steps after a third of them"
    add("--limit-s", type=at_least(1, float), default=180.0, metavar="N", help=about)
    add("--only", metavar="NAME,...", help="these rows besides the baseline; * matches anything")
    about = "a row of your own on top of the baseline; may be repeated"
    add("--row", action="append", default=[], metavar="'OVERRIDES'", help=about)


def _tune(add: Add) -> None:
    add("--minutes", type=at_least(0.1, float), default=8.0, metavar="N", help="start no trial later (8)")
    add("--steps", type=at_least(6), default=8, metavar="N", help="optimizer steps of a trial (8)")
    about = "a trial is killed after so many seconds (180)"
    add("--limit-s", type=at_least(1, float), default=180.0, metavar="N", help=about)
    about = "what a step may need, as in 8GiB; otherwise what the device has free"
    add("--memory", type=size, metavar="SIZE", help=about)


def _export(add: Add) -> None:
    add("--merge", action="store_true", help="the merged model instead of the adapter")
    about = "last (the newest complete one) or a path"
    add("--checkpoint", default="last", metavar="WHICH", help=about)
    about = "a new folder under the output root; otherwise RUN/export/adapter or RUN/export/model"
    add("--out", metavar="DIR", help=about)
    add("--output-root", default="outputs", metavar="DIR", help="folder of the runs (outputs)")


def _doctor(add: Add) -> None:
    about = (
        "what the ranks of a job see; started as the run would be: torchrun ... -m lightning_eff doctor ..."
    )
    add("--cluster", action="store_true", help=about)
    about = "with --cluster: folder of the runs, which all ranks share (outputs)"
    add("--output-root", type=Path, default=Path("outputs"), metavar="DIR", help=about)


def _migrate(add: Add) -> None:
    tools = ["transformers", "accelerate", "deepspeed", "lightning", "axolotl"]
    about = "the tool that the file is of; otherwise recognized"
    add("--from", dest="source", choices=tools, metavar="TOOL", help=f"{about}: {', '.join(tools)}")


def _launch(add: Add) -> None:
    add("--nodes", type=at_least(1), default=1, metavar="N", help="machines (1)")
    add("--gpus", type=at_least(0), default=0, metavar="N", help="GPUs of each, one rank on each (none)")
    kinds, about = ["trainjob", "jobset", "rayjob"], "k8s: for Kubeflow Trainer, JobSet or KubeRay (trainjob)"
    add("--kind", choices=kinds, dest="kind_of_job", help=about)
    about = "k8s: image that has the package, as the repository's Dockerfile builds it"
    add("--image", metavar="NAME", help=f"{about} (lightning-eff:latest)")
    about = "k8s: PersistentVolumeClaim that all pods mount for the runs (outputs)"
    add("--claim", metavar="NAME", help=about)


def _report(add: Add) -> None:
    add("--output-root", default="outputs", metavar="DIR", help="folder of the runs (outputs)")


def _generate(add: Add) -> None:
    add("--prompt", metavar="TEXT", help="text to continue (the standard input); with --chat the user's turn")
    add("--chat", action="store_true", help="by the chat template of the data's tokenizer")
    add("--system", metavar="TEXT", help="with --chat: the system's turn")
    add("--max-new-tokens", type=at_least(1), default=64, metavar="N", help="tokens to write (64)")
    add(
        "--temperature", type=float, metavar="T", help="divides the logits; this and the options below sample"
    )
    add("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    about = "draw from the likeliest tokens that together have this probability"
    add("--top-p", type=float, metavar="P", help=about)
    add("--num-samples", type=at_least(1), default=1, metavar="N", help="texts to draw (1)")
    add("--seed", type=at_least(0), metavar="N", help="seed of what is drawn (0)")


TAKES = {
    "launch": ON_CLUSTER,
    **dict.fromkeys(("train", "plan", "compare", "tune"), RECIPE),
    **dict.fromkeys(OF_RUNS, RUN_OR_RECIPE),
    "ls": "[WORD]", "migrate": "FILE", "export": "RUN", "cp": COPY, "report": RUNS,
}  # fmt: skip
"""Words besides options; any other verb takes none."""
OPTIONS = {
    "train": _train, "plan": _plan, "compare": _compare, "tune": _tune, "export": _export,
    "launch": _launch, "migrate": _migrate, "doctor": _doctor, "report": _report, "generate": _generate,
}  # fmt: skip

VERB_HABITS = {
    "fit": "train", "run": "train", "finetune": "train", "resume": "train", "eval": "validate",
    "evaluate": "validate", "infer": "predict", "list": "ls",
}  # fmt: skip
"""Verbs of other tools, and the one that does the same here."""


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would exit, and suggests the nearest choice where it would list all."""

    @override
    def error(self, message: str) -> NoReturn:
        choice = re.match(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[3])
            habit = VERB_HABITS.get(choice[2], "")
            hint = f"did you mean {habit!r}?" if habit in known else suggest_name(choice[2], known)
            message = f"{choice[1]}; {hint}"
        text = f"{self.prog.rpartition(' ')[2]}: {message}\n  try: {self.prog} --help"
        raise UsageError(text)


def build() -> tuple[_Parser, dict[str, _Parser]]:
    """Return the parser of the command line, and that of each verb."""
    common = argparse.ArgumentParser(add_help=False)
    for flag, about in (
        ("--json", "print JSON on the standard output"),
        ("--debug", "print full tracebacks"),
    ):
        common.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about)
    style: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    style["parents"] = [common]
    recipes = "".join(f"  {entry.name:<18}{entry.summary}\n" for entry in catalog.recipes())
    usage = "lightning-eff VERB [RECIPE] [overrides]"
    top = _Parser("lightning-eff", usage=usage, epilog=f"recipes:\n{recipes}\n{ABOUT}", **style)
    top.add_argument("--version", action="version", version=f"lightning-eff {__version__}")
    top.add_argument("--completion", choices=["bash", "zsh", "fish"], help="print completion for your shell")
    branches = top.add_subparsers(dest="verb", title="verbs", metavar="VERB")
    parsers: dict[str, _Parser] = {}
    for name, summary in catalog.verbs().items():
        prog, takes = f"lightning-eff {name}", TAKES.get(name)
        texts = {"help": summary, "description": summary, "epilog": EXAMPLES.get(name)}
        usage = " ".join(filter(None, (prog, takes, "[options]")))
        parsers[name] = branches.add_parser(name, prog=prog, usage=usage, **texts, **style)
        if name in OPTIONS:
            OPTIONS[name](parsers[name].add_argument)
        if takes in OF_RECIPES or name in ("ls", "report"):
            about = "a folder of your own with groups and recipes; may be repeated"
            keywords: Any = {"action": "append", "default": [], "metavar": "DIR", "help": about}
            parsers[name].add_argument("--config-dir", "-cd", **keywords)
    return top, parsers


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a verb's parser."""
    about = parser.format_help().removesuffix(parser.epilog or "")  # examples name options of other commands
    return re.findall(r"--[a-z][\w-]*", about)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; options and other words of a verb may come in any order.

    Returns:
        The options, `verb`, and `arguments` (the words after it). A verb of recipes has `recipe`, the word
        `given` for it and `overrides`, one of runs `words`, any other one `word`, empty if it is left out.
        The folder of a recipe that is named by its file comes first in `config_dir`; a run's folder, which
        is in `run`, has such a file.

    Raises:
        UsageError: There is an unknown option, no recipe, no such file, or a word too many.

    Example:
        >>> options = parse(["train", "seed=2", "lm", "-m", "~callbacks"])
        >>> options.recipe, options.overrides, options.multirun
        ('lm', ['seed=2', '~callbacks'], True)
    """
    top, parsers = build()
    options, rest = top.parse_known_args(words, argparse.Namespace(json=False, debug=False))
    parser = parsers.get(options.verb, top)
    unknown = [word for word in rest if word.startswith("-")]
    meant = as_overrides(rest) if TAKES.get(options.verb) in OF_RECIPES else []
    if meant:
        name = unknown[0].partition("=")[0]
        text = f"{options.verb}: {name}: settings are overrides, without dashes\n  try: {' '.join(meant)}"
        raise UsageError(text)
    if unknown:
        parser.error(f"unknown option {unknown[0]!r}; {suggest_name(unknown[0], option_names(parser))}")
    if options.verb is None:
        return options
    options.arguments = list(words)
    options.arguments.remove(options.verb)
    takes = TAKES.get(options.verb)
    if takes == ON_CLUSTER:
        options.kind = rest.pop(0) if rest else ""
        if options.kind not in CLUSTERS:
            parser.error(f"expected {' or '.join(CLUSTERS)} first, not {options.kind!r}")
    elif takes == RUNS:
        options.words = rest
        return options
    elif takes not in OF_RECIPES:
        for word in rest[1 if takes else 0 :]:
            parser.error(f"unknown argument {word!r}")
        options.word = rest[0] if rest else ""
        return options
    _take_recipe(options, rest, parser)
    return options


def _take_recipe(options: argparse.Namespace, rest: list[str], parser: _Parser) -> None:
    """Set a recipe and its overrides from the words of its verb, and what else that takes."""
    takes = TAKES[options.verb]
    if takes == COPY:
        if len(rest) != 2:
            parser.error(f"expected a recipe and the file to write, not {len(rest)} words")
        options.file = rest.pop()
    recipes = [word for word in rest if "=" not in word and not word.startswith("~")]
    if len(recipes) != 1:
        found = f"one recipe, not {len(recipes)}: {' '.join(recipes)}" if recipes else "a recipe"
        text = f"{options.verb}: expected {found}; lightning-eff ls lists the recipes"
        raise UsageError(text)
    options.overrides = [word for word in rest if word not in recipes]
    if takes == RUN_OR_RECIPE:
        options.run = recipes[0] if Path(recipes[0], catalog.RESOLVED).is_file() else ""
        recipes = [f"{options.run}/{catalog.RESOLVED}"] if options.run else recipes
    options.given = recipes[0]
    options.recipe, options.config_dir = find_recipe(options.verb, recipes[0], options.config_dir)
