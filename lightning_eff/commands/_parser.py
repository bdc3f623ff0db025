"""The command line as one argparse tree: words, options and examples of each verb.

This module does not import torch, Lightning or Hydra, so `--help` and completion answer at once.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

from lightning_eff import __version__
from lightning_eff.commands._recipe_file import find_recipe
from lightning_eff.core import catalog
from lightning_eff.core.errors import UsageError, suggest_name
from lightning_eff.core.text import parse_bytes

RECIPE = "RECIPE [overrides]"
CLUSTERS = ("slurm", "k8s")
ON_CLUSTER = f"{'|'.join(CLUSTERS)} {RECIPE}"
RUN_OR_RECIPE, COPY, RUNS = "RUN|RECIPE [overrides]", "RECIPE FILE", "RUN..."
OF_RECIPES = (RECIPE, ON_CLUSTER, RUN_OR_RECIPE, COPY)
ABOUT = """\
overrides are Hydra's: key=value, group=option, +callbacks=name
lightning-eff VERB --help shows a verb's options and examples
"""


class Parser(argparse.ArgumentParser):
    """Raises an error instead of exiting, and suggests the nearest choice instead of listing all choices."""

    takes = ""
    """The arguments of a verb, without its options, as the usage line shows them."""

    @override
    def error(self, message: str) -> NoReturn:
        choice = re.match(r"(.*invalid choice: '(.*)') \(choose from (.*)\)", message)
        if choice is not None:
            known = re.findall(r"[\w-]+", choice[3])
            message = f"{choice[1]}; {suggest_name(choice[2], known)}"
        raise UsageError(f"{self.prog.rpartition(' ')[2]}: {message}\n  try: {self.prog} --help")


def _at_least(least: float, kind: type[float] = int) -> Callable[[str], float]:
    """Return an argparse type for numbers of at least `least`."""

    def number(text: str) -> float:
        value = kind(text)  # argparse reports a ValueError
        # This comparison is also False for NaN.
        if not least <= value < math.inf:
            raise argparse.ArgumentTypeError(f"{text}: expected at least {least}")
        return value

    return number


def _size(text: str) -> int:
    """Parse a size with its unit into bytes."""
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _train(verb: Parser) -> None:
    verb.takes = RECIPE
    verb.epilog = """
  lightning-eff train lm trainer.max_steps=50 precision=fp32     a recipe with overrides
  lightning-eff train lm 'callbacks=[]'                          without callbacks
  lightning-eff train lm -m 'callbacks=[],[empty_cache]'         one run for each
  lightning-eff train lm ckpt_path=last trainer.max_steps=400    resume from the newest checkpoint
  lightning-eff train lm ckpt_path=auto                          resume if this command has run before
  lightning-eff train images model._target_=my_project.Net       your own model, from the current folder
  lightning-eff train mine/numbers.yaml                          a recipe's file; its folder has your options
"""
    about = "one run for each combination of comma-separated values"
    verb.add_argument("-m", "--multirun", action="store_true", help=about)
    about = "print the composed config and stop"
    verb.add_argument("-c", "--cfg", choices=["job", "hydra", "all"], help=about)
    topics = ["all", "config", "defaults", "defaults-tree", "plugins", "searchpath"]
    about = f"print Hydra's information about the config and stop: {', '.join(topics)}"
    verb.add_argument("-i", "--info", nargs="?", const="all", choices=topics, metavar="WHAT", help=about)


def _plan(verb: Parser) -> None:
    verb.takes = RECIPE
    verb.epilog = """
  lightning-eff plan lm                 active techniques, where they are set, and the memory of a step
  lightning-eff plan lm device=rtx4090  on another GPU: l4, a10, h100, mi300x, ... or device.memory=40GiB
  lightning-eff plan long_context model.name=NAME device=h200   the longest sequence that fits
  lightning-eff plan lm strategy=fsdp2 trainer.devices=8 trainer.accelerator=cpu data.batch_size=2
                                        also shows the memory per device for 1 to 1,024 devices

Exit code 5 when a combination is rejected, 3 when this machine lacks something; both with a remedy.
"""
    about = "try techniques that save memory, and the largest micro-batch that fits (a minute)"
    verb.add_argument("--advice", action="store_true", help=about)


def _compare(verb: Parser) -> None:
    verb.takes = RECIPE
    verb.epilog = """
  lightning-eff compare lm                               no technique, each one alone, lm itself, all combined
  lightning-eff compare lm --only torch_compile,micro_batch
  lightning-eff compare lm --row 'optimizer=muon +callbacks=micro_batch'

A trial that hangs or fails gets a row with the reason. An interruption prints what was measured.
"""
    about = "optimizer steps of a trial (8)"
    verb.add_argument("--steps", type=_at_least(6), default=8, metavar="N", help=about)
    about = "runs of each trial (3); the fastest counts"
    verb.add_argument("--rounds", type=_at_least(1), default=3, metavar="N", help=about)
    about = "kill a trial after N seconds (180); it starts no batch later than N/3 after its first"
    verb.add_argument("--limit-s", type=_at_least(1, float), default=180.0, metavar="N", help=about)
    about = "run only these rows, the baseline and the unchanged recipe; * matches anything"
    verb.add_argument("--only", metavar="NAME,...", help=about)
    about = "add a custom row on top of the baseline; may be repeated"
    verb.add_argument("--row", action="append", default=[], metavar="'OVERRIDES'", help=about)


def _tune(verb: Parser) -> None:
    verb.takes = RECIPE
    verb.epilog = """
  lightning-eff tune lm                      prints the fastest command to train lm on this machine
  lightning-eff tune lm --minutes 30 --memory 8GiB

The same command continues an interrupted search. Steps, their losses and the global batch do not change.
"""
    about = "start no trial after this time (8)"
    verb.add_argument("--minutes", type=_at_least(0.1, float), default=8.0, metavar="N", help=about)
    about = "optimizer steps of a trial (8)"
    verb.add_argument("--steps", type=_at_least(6), default=8, metavar="N", help=about)
    about = "kill a trial after N seconds (180)"
    verb.add_argument("--limit-s", type=_at_least(1, float), default=180.0, metavar="N", help=about)
    about = "memory limit of a step, for example 8GiB; by default the device's free memory"
    verb.add_argument("--memory", type=_size, metavar="SIZE", help=about)


def _launch(verb: Parser) -> None:
    verb.takes = ON_CLUSTER
    verb.epilog = """
  lightning-eff launch slurm lm --nodes 2 --gpus 8 > job.sbatch     sbatch --time=8:00:00 job.sbatch
  lightning-eff launch k8s lm --nodes 2 --gpus 8 > job.yaml         kubectl apply -f job.yaml
  lightning-eff launch k8s lm --nodes 2 --gpus 8 --kind jobset

A restarted job resumes from its newest checkpoint: the output root must be shared by all machines.
"""
    verb.add_argument("--nodes", type=_at_least(1), default=1, metavar="N", help="machines (1)")
    about = "GPUs per machine, one rank each (none)"
    verb.add_argument("--gpus", type=_at_least(0), default=0, metavar="N", help=about)
    kinds, about = ["trainjob", "jobset", "rayjob"], "k8s: for Kubeflow Trainer, JobSet or KubeRay (trainjob)"
    verb.add_argument("--kind", choices=kinds, dest="kind_of_job", help=about)
    about = "k8s: image that has the package, as the repository's Dockerfile builds it (lightning-eff:latest)"
    verb.add_argument("--image", metavar="NAME", help=about)
    about = "k8s: PersistentVolumeClaim that all pods mount for the runs (outputs)"
    verb.add_argument("--claim", metavar="NAME", help=about)


def _generate(verb: Parser) -> None:
    verb.takes = RUN_OR_RECIPE
    verb.epilog = """
  lightning-eff generate lm --prompt 'def '                the likeliest continuation
  lightning-eff generate lm --prompt 'def ' --temperature 0.8 --top-p 0.95 --num-samples 3
  lightning-eff generate qlora model.name=NAME data=chat --chat --prompt 'Who are you?'
  lightning-eff generate outputs/lm/2026-11-21_10-00-00-000000 ckpt_path=best < start.txt
"""
    about = "text to continue (the standard input); with --chat the user's turn"
    verb.add_argument("--prompt", metavar="TEXT", help=about)
    about = "use the chat template of the data's tokenizer"
    verb.add_argument("--chat", action="store_true", help=about)
    verb.add_argument("--system", metavar="TEXT", help="with --chat: the system's turn")
    about = "tokens to write (64)"
    verb.add_argument("--max-new-tokens", type=_at_least(1), default=64, metavar="N", help=about)
    about = "divide the logits by T; this and the options below enable sampling"
    verb.add_argument("--temperature", type=float, metavar="T", help=about)
    verb.add_argument("--top-k", type=int, metavar="K", help="draw from the K likeliest tokens")
    about = "draw from the likeliest tokens that together have this probability"
    verb.add_argument("--top-p", type=float, metavar="P", help=about)
    verb.add_argument("--num-samples", type=_at_least(1), default=1, metavar="N", help="texts to draw (1)")
    verb.add_argument("--seed", type=_at_least(0), metavar="N", help="random seed for sampling (0)")


def _export(verb: Parser) -> None:
    verb.takes = "RUN"
    verb.epilog = """
  lightning-eff export outputs/lora/2026-11-21_10-00-00-000000    the adapter of that run
  lightning-eff export lora                                       of the recipe's newest run
  lightning-eff export lm                                         of a run without adapters: its weights
"""
    verb.add_argument("--merge", action="store_true", help="the merged model instead of the adapter")
    about = "last (the newest complete one) or a path"
    verb.add_argument("--checkpoint", default="last", metavar="WHICH", help=about)
    about = "a new folder under the output root; otherwise RUN/export/adapter or RUN/export/model"
    verb.add_argument("--out", metavar="DIR", help=about)
    verb.add_argument("--output-root", default="outputs", metavar="DIR", help="folder of the runs (outputs)")


def _report(verb: Parser) -> None:
    verb.takes = RUNS
    verb.epilog = """
  lightning-eff report lm                                  print the newest run's report, rebuild its page
  lightning-eff report lm lora                             the newest run of each, side by side
  lightning-eff report outputs/lm/sweep_2026-11-21_10-00-00-000000     all runs of a sweep
"""
    verb.add_argument("--output-root", default="outputs", metavar="DIR", help="folder of the runs (outputs)")


def _migrate(verb: Parser) -> None:
    verb.takes = "FILE"
    verb.epilog = """
  lightning-eff migrate training_args.json       of TrainingArguments.to_json_string(), or a YAML of its keys
  lightning-eff migrate ds_config.json           also default_config.yaml of Accelerate, a LightningCLI config
  lightning-eff migrate axolotl.yaml --json
"""
    tools = ["transformers", "accelerate", "deepspeed", "lightning", "axolotl"]
    about = f"the tool that wrote the file; detected by default: {', '.join(tools)}"
    verb.add_argument("--from", dest="source", choices=tools, metavar="TOOL", help=about)


VERBS: dict[str, Callable[[Parser], None]] = {
    "train": _train, "plan": _plan, "compare": _compare, "tune": _tune, "launch": _launch,
    "generate": _generate, "export": _export, "report": _report, "migrate": _migrate,
}  # fmt: skip
"""By verb, the function that adds the verb's options."""
WITHOUT_OPTIONS = {
    "doctor": ("", ""),
    "validate": (
        RUN_OR_RECIPE,
        """
  lightning-eff validate lm                             the newest checkpoint of that recipe
  lightning-eff validate lm ckpt_path=best trainer.limit_val_batches=1.0
  lightning-eff validate outputs/lm/2026-11-21_10-00-00-000000     that run, with its own config
""",
    ),
    "test": (
        RUN_OR_RECIPE,
        """
  lightning-eff test mine.yaml ckpt_path=best     the best checkpoint, by model_checkpoint's metric
  lightning-eff test outputs/mine/2026-11-21_10-00-00-000000 ckpt_path=step-40.ckpt
""",
    ),
    "predict": (
        RUN_OR_RECIPE,
        """
  lightning-eff predict mine.yaml                     into predictions/ of the run's folder
  lightning-eff predict mine.yaml trainer.devices=2   a file for each rank, with the samples' indices
""",
    ),
    "ls": (
        "[WORD]",
        """
  lightning-eff ls memory        entries with this word in their name or summary
  lightning-eff ls empty_cache   one in full: what it saves and costs, conflicts, options
""",
    ),
    "cp": (
        COPY,
        """
  lightning-eff cp lm mine.yaml       then edit it: lightning-eff train mine.yaml
""",
    ),
}
"""Arguments and examples of the verbs without options."""


def build() -> tuple[Parser, dict[str, Parser]]:
    """Return the parser of the command line, and the parser of each verb."""
    common = argparse.ArgumentParser(add_help=False)
    # Without SUPPRESS, the verb's parser would reset a flag that precedes the verb.
    for flag, about in (
        ("--json", "print JSON on the standard output"),
        ("--debug", "print full tracebacks"),
    ):
        common.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=about)
    style: Any = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    style["parents"] = [common]
    recipes = "".join(f"  {entry.name:<18}{entry.summary}\n" for entry in catalog.recipes())
    usage = "lightning-eff VERB [RECIPE] [overrides]"
    top = Parser("lightning-eff", usage=usage, epilog=f"recipes:\n{recipes}\n{ABOUT}", **style)
    top.add_argument("--version", action="version", version=f"lightning-eff {__version__}")
    top.add_argument("--completion", choices=["bash", "zsh", "fish"], help="print completion for your shell")
    branches = top.add_subparsers(dest="verb", title="verbs", metavar="VERB")
    parsers: dict[str, Parser] = {}
    for name, summary in catalog.verbs().items():
        prog = f"lightning-eff {name}"
        parsers[name] = verb = branches.add_parser(
            name, prog=prog, help=summary, description=summary, **style
        )
        if name in VERBS:
            VERBS[name](verb)
        else:
            verb.takes, verb.epilog = WITHOUT_OPTIONS[name]
        verb.usage = " ".join(filter(None, (prog, verb.takes, "[options]")))
        if verb.takes in OF_RECIPES or name in ("ls", "report"):
            about = "your own folder with groups and recipes; may be repeated"
            keywords: Any = {"action": "append", "default": [], "metavar": "DIR", "help": about}
            verb.add_argument("--config-dir", "-cd", **keywords)
    return top, parsers


def option_names(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a verb's parser."""
    about = parser.format_help().removesuffix(parser.epilog or "")  # its examples name other options
    return re.findall(r"--[a-z][\w-]*", about)


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; options and other words of a verb may come in any order.

    Returns:
        The options, `verb`, and `arguments` (the words after the verb). Verbs that take a recipe also have
        `recipe`, `given` (the word that names the recipe) and `overrides`. Other verbs have `words`, and
        `word`, which is the first word or an empty string. If a recipe is named by its file, the file's
        folder is the first entry of `config_dir`. If a run's folder names the recipe, `run` is that folder.

    Raises:
        UsageError: An option is unknown, the recipe or its file is missing, or there are too many words.

    Example:
        >>> options = parse(["train", "seed=2", "lm", "-m", "~callbacks.exact_resume"])
        >>> options.recipe, options.overrides, options.multirun
        ('lm', ['seed=2', '~callbacks.exact_resume'], True)
    """
    top, parsers = build()
    # argparse parses the options; recipe and overrides may stand anywhere between the options.
    options, rest = top.parse_known_args(words, argparse.Namespace(json=False, debug=False))
    parser = parsers.get(options.verb, top)
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        hint = " (settings have no dashes: key=value)" if parser.takes in OF_RECIPES else ""
        names = suggest_name(unknown[0], option_names(parser))
        parser.error(f"unknown option {unknown[0]!r}{hint}; {names}")
    if options.verb is None:
        return options
    options.arguments = list(words)
    options.arguments.remove(options.verb)
    if parser.takes in OF_RECIPES:
        _take_recipe(options, rest, parser)
        return options
    most = len(rest) if parser.takes == RUNS else bool(parser.takes)
    for word in rest[most:]:
        parser.error(f"unknown argument {word!r}")
    options.words, options.word = rest, rest[0] if rest else ""
    return options


def _take_recipe(options: argparse.Namespace, rest: list[str], parser: Parser) -> None:
    """Set recipe, overrides and further arguments of a verb, from the words that are not options."""
    if parser.takes == ON_CLUSTER:
        options.kind = rest.pop(0) if rest else ""
        if options.kind not in CLUSTERS:
            parser.error(f"expected {' or '.join(CLUSTERS)} first, not {options.kind!r}")
    if parser.takes == COPY:
        if len(rest) != 2:
            parser.error(f"expected a recipe and the file to write, not: {' '.join(rest)}")
        options.file = rest.pop()
    # An override has a `=` or begins with `~` (Hydra's deletion).
    recipes = [word for word in rest if "=" not in word and not word.startswith("~")]
    if len(recipes) != 1:
        found = f"one recipe, not {len(recipes)}: {' '.join(recipes)}" if recipes else "a recipe"
        raise UsageError(f"{options.verb}: expected {found}; lightning-eff ls lists the recipes")
    options.overrides = [word for word in rest if word not in recipes]
    if parser.takes == RUN_OR_RECIPE:
        options.run = recipes[0] if Path(recipes[0], catalog.RESOLVED).is_file() else ""
        recipes = [f"{options.run}/{catalog.RESOLVED}"] if options.run else recipes
    options.given = recipes[0]
    options.recipe, options.config_dir = find_recipe(options.verb, recipes[0], options.config_dir)
