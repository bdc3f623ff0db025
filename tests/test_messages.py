"""Users' messages, word for word: `tests/messages.md` has a heading for each situation, and its message.

A heading is a command or a Python expression that ends with a message. After a change of wording, or for a
new heading, `make messages` writes the texts; then read the diff. Other tests check only an error's class and
key. Each command must also fail cleanly: a nonzero exit code, at most five lines, no traceback, no file.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import shlex
import sys
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.optim import SGD

import lightning_eff
from lightning_eff import cli
from lightning_eff.checkpoint_io.durable import Durable
from lightning_eff.config import ckpt_path, resolution
from lightning_eff.config.composition import compose_recipe
from lightning_eff.core.errors import NoEffectWarning, Remedy, keep_overrides
from lightning_eff.core.rules import LIBRARY_RULES, RuleFinding
from lightning_eff.core.technique import Rule, name_of
from lightning_eff.core.text import human_bytes
from lightning_eff.launch import job
from lightning_eff.launch.ranks import first_failure
from lightning_eff.models.gpt import GPT
from lightning_eff.planner.advice import Advice, Saving
from lightning_eff.planner.forecast import DeviceMemory, MemoryForecast
from lightning_eff.planner.longest import LongestSequence
from lightning_eff.planner.printing import advice_text, forecast_text, longest_text
from lightning_eff.prediction.predict import Prediction, predict_step
from lightning_eff.report.display import report_text
from tests.support.models import Net, make_loader, make_trainer
from tests.support.reports import make_report
from tests.support.techniques import ROOT, TECHNIQUES, class_of

MESSAGES = Path(__file__).parent / "messages.md"
Messages = Iterable[tuple[str, str]]
"""Headings and texts."""
TOP = "defaults: [lm, _self_]\n"
RECIPES: dict[str, str | bytes] = {
    "tab": f"{TOP}trainer:\n\tmax_steps: 2\n",
    "duplicate": f"{TOP}seed: 1\nseed: 2\n",
    "nul": f"{TOP}seed: 1\0\n",
    "latin": f"{TOP}output_root: café\n".encode("latin-1"),
    "tag": f"{TOP}seed: !!python/object/apply:os.system ['touch touched']\n",
    "alias": f"{TOP}trainer: &a\n  x: *a\n",
    "nested": f"{TOP}seed: {'[' * 3000}{']' * 3000}\n",
    "itself": "defaults: [itself]\n",
    "circle": "defaults: [lm, other]\n",
    "seven": "# a recipe\ndefaults: 7\n",
    "empty": "",
    "no_root": "seed: 1\n",
    "variable": f"{TOP}output_root: ${{oc.env:NO_SUCH_VARIABLE}}\n",
    "no_recipe": "defaults: [baselin, _self_]\n",
    "no_option": "defaults:\n  - lm\n  - override precision: atuo\n",
    "two_recipes": "defaults: [lm, baseline]\n",
    "two_options": "defaults:\n  - baseline\n  - data: text\n",
    "unread": f"{TOP}x: {{a: 1}}\n",
}
"""Recipes that cannot be read or composed."""
FILES: dict[str, str | bytes] = {f"mine/{name}.yaml": content for name, content in RECIPES.items()} | {
    "there.yaml": "a: 1\n",
    "own.yaml": TOP,
    "broken.py": "import module_that_is_missing\n",
    "unknown.json": '{"colour": 1, "taste": 2}',
    "mine/old.yml": TOP,
    "mine/other.yaml": "defaults: [circle]\n",
    "mine/logger/bare.yaml": "_target_: lightning.pytorch.loggers.CSVLogger\nsave_dir: outputs\n",
    "mine/callbacks/bare.yaml": "_target_: lightning_eff.callbacks.empty_cache.EmptyCache\n",
    "mine/experiment/bare.yaml": "seed: 5\n",
    "text.ckpt": "no checkpoint",
}
VERSION = {"pytorch-lightning_version": "2.6.6"}
CHECKPOINTS: dict[str, Any] = {
    "damaged": VERSION,
    "other": {"step": 1},
    "adapter": VERSION | {"peft_adapter": {}},
    "finished": VERSION | {"global_step": 2, "epoch": 0},
    "runs/run/checkpoints/step-2": VERSION,
}
REQUIRED: dict[str, dict[str, Any]] = {
    "callbacks/optimizer_choice": {"optimizer": SGD},
    "callbacks/gradient_accumulation": {"global_batch_size": 8},
}
VARIANTS = """GradientCheckpointing(policy="budget") GradientCheckpointing(policy="selective")
    TorchCompile(mode="reduce-overhead") TorchCompile(target="forward") MicroBatch(micro_batch_size="auto")
    Float8(recipe="tensorwise",all_gather=True)
    DeepSpeedZero(stage=3) AutoPrecision(precision="bf16-mixed")"""
"""Techniques with more rules than by default."""


class Bare(Net):
    """Has no layer that a technique could change, and a module that is never called."""

    def __init__(self) -> None:
        super().__init__()
        del self.first, self.second, self.norm
        self.scale, self.unused = nn.Parameter(torch.ones(8, 3)), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).mul(self.scale).sum(1)


@functools.cache
def names() -> dict[str, Any]:
    """Return the names that headings in Python may use."""
    public = {name: getattr(lightning_eff, name) for name in lightning_eff.__all__}
    own = {"weights": [torch.zeros(2, 2, requires_grad=True)], "trainer": make_trainer(max_steps=2)}
    own |= {"partial": functools.partial, "torch": torch, "GPT": GPT}
    return vars(job) | vars(ckpt_path) | public | own


def of_commands(headings: Iterable[str]) -> Messages:
    return [(line, answer(*shlex.split(line)[1:])) for line in headings]


def answer(*words: str) -> str:
    """Return exit code and error of a command that fails."""
    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch("sys.stdin", None),
        mock.patch("lightning.pytorch.Trainer.fit", side_effect=AssertionError("it trains")),
        mock.patch(
            "lightning_eff.planner.forecast._predict", return_value=Prediction(reason="not asked for")
        ),
    ):
        code = cli.main(words)
    lines = err.getvalue().partition("error: ")[2].splitlines()
    assert code, words
    assert 0 < len(lines) <= cli.MAX_ERROR_LINES, (words, err.getvalue())
    assert "Traceback" not in err.getvalue()
    assert words[0] == "plan" or not out.getvalue(), words
    assert not Path("outputs").exists(), words
    assert not Path("touched").exists(), words
    return "\n".join([f"exit code {code}"] * (code != 2) + [f"error: {lines[0]}", *lines[1:]])


def of_recipes(_: Iterable[str]) -> Messages:
    return [(name, answer("train", name, "--config-dir", "mine")) for name in RECIPES]


def of_python(headings: Iterable[str]) -> Messages:
    found: list[tuple[str, str]] = []  # no generator: `keep_overrides` below would end before it begins
    for expression in headings:
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the text has its class
            eval(expression, names())
        found.append((expression, f"{type(raised.value).__name__}: {raised.value}"))
    return found


def of_rules(_: Iterable[str]) -> Messages:
    """Yield each rule once, with its remedies for a recipe and, after `or`, for a script."""
    made: list[Any] = [eval(text, names()) for text in re.findall(r"\S+\(.*?\)", VARIANTS)]
    for name in TECHNIQUES:
        is_class = name.startswith(("optimizer/", "scheduler/")) and name != "optimizer/module"
        made.append(class_of(name) if is_class else class_of(name)(**REQUIRED.get(name, {})))
    stated = [(name_of(each), each.facts()) for each in made if hasattr(each, "facts")]
    shown: set[object] = set()
    for name, facts in [*sorted(stated, key=lambda pair: pair[0]), *LIBRARY_RULES.items()]:
        for rule in (*facts.needs, *facts.excludes):
            if (rule.reason, rule.remedies) not in shown:
                found = rule.name if rule in facts.excludes else ""
                yield f"{name}: {rule.name}", f"{rule.verdict.value}\n{rule_text(name, rule, found)}"
            shown.add((rule.reason, rule.remedies))


def rule_text(technique: str, rule: Rule, found: str) -> str:
    with keep_overrides():
        text = str(RuleFinding(technique=technique, rule=rule, found=found))
    scripts = [each.python for each in rule.remedies[:3] if isinstance(each, Remedy)]
    return "\n".join([text, *(f"  or: {each}" for each in scripts)])


def of_warnings(headings: Iterable[str]) -> Messages:
    """Yield the warnings of techniques that had no effect, from one step of training."""
    for expression in headings:
        technique = eval(expression, names())
        slot = "plugins" if isinstance(technique, Precision) else "callbacks"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(**{slot: [technique]}, max_steps=1).fit(Bare(), make_loader())
        assert not technique.outcome().effective
        idle = [str(each.message) for each in caught if issubclass(each.category, NoEffectWarning)]
        yield expression, "\n".join(idle)


def of_others(_: Iterable[str]) -> Messages:
    with mock.patch.dict(os.environ, PATH="", CXX=""):
        yield "no compiler", answer("plan", "fast", "trainer.accelerator=cpu")
    with mock.patch.dict(sys.modules, torchao=None):
        yield "no package", answer("train", "lm", "optimizer=adamw_8bit")
    with mock.patch.object(resolution.log, "warning") as noticed:
        for words in (["optimizer=module"], ["model._target_=lightning_eff.models.cnn.CNN"]):
            compose_recipe("baseline", words)
    yield "settings left out", "\n".join(call.args[0] % call.args[1:] for call in noticed.call_args_list)
    for verb in ("train", "tune", "plan"):
        yield f"{verb} is stopped", cli._error_lines(KeyboardInterrupt(), [verb])[0]
    killed = first_failure([0, -9], [Path("none"), Path("none")], Path("run"))
    yield "a rank is killed", str(killed)
    alone = [Saving(("+callbacks=tiled_loss",), 2**20, 2**21, 1.03, "new peak: backward")]
    alone += [Saving(("precision=auto",), -1024, 2**22, None, "saves nothing here")]
    alone += [Saving(("+callbacks=tiled_mlp",), why="not predicted: no MLP")]
    yield "advice", advice_text(Advice(alone, alone[:1], ("+callbacks=tiled_loss",), 2**21, fits=False))
    yield "advice for a batch that fits", advice_text(Advice(unfinished=True))
    linear = predict_step(
        nn.Linear(8, 8), torch.ones(4, 8), lambda net, x: net(x).sum(), functools.partial(SGD, lr=0.1)
    )
    for free in (2**35, 2**20):
        memory = DeviceMemory("RTX 4090", free, is_cuda=True)
        yield f"a forecast on {human_bytes(free)}", forecast_text(MemoryForecast(linear, memory))
    yield "the longest sequence", longest_text(LongestSequence("H100", 8192, 9216, 2**36, 2**30))
    yield "a report", report_text(make_report(tags=["dev"]))
    yield "a stopped run", report_text(make_report(status="stopped", ledger=[]))


PRODUCERS: dict[str, Callable[[Iterable[str]], Messages]] = {
    "Commands": of_commands,
    "Settings": of_commands,
    "More settings": of_commands,
    "Conflicts": of_commands,
    "Recipes": of_recipes,
    "Arguments": of_python,
    "Launchers": keep_overrides()(of_python),
    "Checkpoints": keep_overrides()(of_python),
    "Rules": of_rules,
    "No effect": of_warnings,
    "Other texts": of_others,
}


def sections() -> dict[str, str]:
    """Return the file's sections by their title."""
    _, *found = re.split(r"^## ", MESSAGES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {text.partition("\n")[0]: text.strip() for text in found}


def written(title: str, text: str) -> str:
    """Return a section with up-to-date messages; its files are written to the current folder."""
    for name, content in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    Path("runs/run/checkpoints").mkdir(parents=True)
    for name, state in CHECKPOINTS.items():
        Durable().save_checkpoint(state, f"{name}.ckpt")
    content = Path("damaged.ckpt").read_bytes()
    Path("damaged.ckpt").write_bytes(content[:200] + bytes(60) + content[260:])
    torch.save({"x": Path("touched")}, "objects.ckpt")
    about = text.split("\n\n")[1]
    with warnings.catch_warnings(), mock.patch("sys.path", [".", *sys.path]):
        warnings.simplefilter("ignore")
        messages = [*PRODUCERS[title](re.findall(r"^### `(.*)`$", text, re.MULTILINE))]
    here = Path.cwd()
    folders = {str(here): "FOLDER", str(here.parent): "PARENT", str(ROOT): "REPOSITORY"}
    parts = [f"{title}\n\n{about}"]
    for heading, text_of_today in messages:
        assert text_of_today, heading
        message = re.sub(r" [0-9a-f]{12}\.{3}|\d{4}-\d\d-\d\d_[\d-]+", "...", text_of_today)  # SHA-256, time
        for folder, name in folders.items():
            message = message.replace(folder, name)
        parts.append(f"### `{heading}`\n\n{textwrap.indent(message.rstrip(), '    ')}")
    return "\n\n".join(parts)


SLOW = {"More settings"}
"""Sections that only `make test-full` compares: each situation composes a recipe in 0.25 s."""


@pytest.mark.parametrize(
    "title", [pytest.param(title, marks=[pytest.mark.slow] if title in SLOW else []) for title in PRODUCERS]
)
def test_users_read_what_the_file_says(title: str, empty_folder: Path) -> None:
    assert written(title, sections()[title]) == sections()[title], "make messages writes the file"


def main() -> None:
    """Write up-to-date messages below the headings."""
    texts = [MESSAGES.read_text(encoding="utf-8").partition("\n## ")[0].strip()]
    for title, text in sections().items():
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "here").mkdir()
            with contextlib.chdir(Path(folder, "here")):
                texts.append(f"## {written(title, text)}")
    MESSAGES.write_text("\n\n".join(texts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
