"""`migrate` prints a command that composes, as each row of its tables does, and lists the other keys."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies
from lightning.pytorch import Trainer

from lightning_eff.commands._completion import complete
from lightning_eff.commands._migration.engine import CONVERSIONS
from lightning_eff.commands._migration.tables import Row, quoted, read_table, tools
from lightning_eff.commands._parser import build
from lightning_eff.commands.migrate import _lines, migration
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.validate import RUN_KEYS
from lightning_eff.core.catalog import CONF, RECIPES, parameter_keys
from lightning_eff.core.errors import UsageError
from tests.support.command_line import Command
from tests.support.pages import DOCS

pytestmark = pytest.mark.usefixtures("empty_folder")
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "migration").glob("*.md"))}
OF_LIBRARIES = ("strategy", "monitors.model_checkpoint", "logger.wandb")
"""Options whose class takes more arguments than its YAML has."""


def override_words(row: Row) -> list[str]:
    """Return the overrides of a row for any of its values."""
    texts = row.ours.values() if isinstance(row.ours, Mapping) else [row.ours]
    return " ".join(text for text in texts if not text.startswith("!")).split()


@pytest.mark.parametrize("tool", tools())
def test_every_row_names_options_and_parameters_that_exist(tool: str) -> None:
    known = {
        *parameter_keys(),
        *RUN_KEYS,
        *(f"trainer.{key}" for key in inspect.signature(Trainer).parameters),
    }
    for key, row in read_table(tool).rows.items():
        assert any((row.ours, row.same, row.lacks, row.convert)), key
        assert row.convert.partition(".")[0] in ("", *(each.__name__ for each in CONVERSIONS)), key
        for word in override_words(row):
            path, _, value = word.lstrip("+").partition("=")
            parent = path.rpartition(".")[0]
            if path == "recipe":
                assert (RECIPES / f"{value}.yaml").is_file(), word
            elif path.startswith("~"):
                assert (CONF / f"{path[1:].replace('.', '/')}.yaml").is_file(), word
            elif (CONF / path).is_dir():
                assert (CONF / path / f"{value}.yaml").is_file(), word
            elif parent not in OF_LIBRARIES and not path.endswith(("._target_", ".{key}")):
                assert path in known or parent in known, word  # the second: one of PEFT's options


def test_the_tables_have_the_arguments_of_the_tools_with_their_defaults() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from transformers import TrainingArguments

    tables = {tool: {key.split(".")[0] for key in read_table(tool).rows} for tool in tools()}
    fields = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert fields - tables["transformers"] == set()
    assert {*inspect.signature(Trainer).parameters} - tables["lightning"] == set()
    cluster = {field.name for field in dataclasses.fields(ClusterConfig) if "tpu" not in field.name}
    assert {key for key in cluster - tables["accelerate"] if "sagemaker" not in key} == set()
    dump = json.loads(TrainingArguments("out", use_cpu=True, report_to="none").to_json_string())
    of_this_machine = {"output_dir", "optim", "disable_tqdm", "use_cpu", "dataloader_pin_memory", "report_to"}
    for key, row in read_table("transformers").rows.items():
        if key in dump.keys() - of_this_machine and row.default is not None and dump[key] is not None:
            assert row.default == dump[key], key
    (action,) = (action for action in build()[1]["migrate"]._actions if action.dest == "source")
    assert sorted(action.choices or ()) == tools()


def test_each_page_shows_what_the_verb_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for text in (*PAGES.values(), (DOCS / "own_model.md").read_text()):
        for content, name in re.findall(
            r"```(?:yaml|json|python)\n((?://|#) (\w+\.\w+)\n.*?)```", text, re.DOTALL
        ):
            Path(name).write_text(content.removeprefix(f"// {name}\n"))
    shown = [
        pair
        for text in PAGES.values()
        for pair in re.findall(r"\$ lightning-eff migrate (\S+)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    ]
    assert len(shown) == len(PAGES) == 5
    for name, text in shown:
        found, code = migration(Path(name))
        assert ("\n".join(_lines(found)) + "\n", code) == (text, 0)


def test_the_python_of_the_pages_runs() -> None:
    for page, text in PAGES.items():
        names: dict[str, Any] = {}
        for block in re.findall(r"```python\n(?!# )(.*?)```", text, re.DOTALL):
            exec(compile(block, page, "exec"), names)
            assert names["trainer"].callbacks


def migrated(content: Any, name: str = "given.json") -> dict[str, Any]:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return migration(path)[0]


ARGS = {"per_device_train_batch_size": 4}
BEST = ARGS | {"load_best_model_at_end": True, "eval_strategy": "epoch"}
ACCURACY = {"metric_for_best_model": "accuracy", "greater_is_better": True}
NO_METRIC = "greater_is_better metric_for_best_model"
MONITOR = "monitors.model_checkpoint.monitor=val_loss monitors.model_checkpoint.mode=min"
STEP = "callbacks.gradient_accumulation"
TRL = """optimizer.lr=2e-05 precision=bf16_mixed data.packing=false data.context_length=1024
    callbacks.peft_adapter.options.r=16"""
MODULE = {"model": {"class_path": "lightning_eff.models.cnn.CNN"}, "seed_everything": 3}
ADAMW = {"optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}}}
DEFAULTS = f"""data.batch_size=8 data.val_fraction=0.0 trainer.max_epochs=3 optimizer=adamw optimizer.lr=5e-05
    optimizer.betas=[0.9,0.999] optimizer.weight_decay=0.0 scheduler=linear scheduler.min_lr_ratio=0.0
    scheduler.warmup_steps=0 precision=fp32 trainer.gradient_clip_val=1.0 {STEP}.num_batches=1
    {STEP}.global_batch_size=null"""
ZERO_2 = {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
ZERO_0 = {
    "gradient_accumulation_steps": 8,
    "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}},
}
ZERO_3 = "strategy=deepspeed_zero strategy.stage=3 strategy.offload_parameters=cpu"
CHECKPOINTING = {"gradient_checkpointing": False, "fsdp_config": {"activation_checkpointing": True}}


@pytest.mark.parametrize(
    ("content", "words", "lacks"),
    [
        # Defaults that change the result: of transformers, TRL, DeepSpeed and Lightning.
        ({"output_dir": "out", "optim": "adamw_torch"}, DEFAULTS, ""),
        ({"model_name_or_path": "a/b", "use_peft": True}, TRL, "lora_target_modules"),
        ({"fp16": {"enabled": False}, "train_batch_size": 16}, "precision=fp32", ""),
        (MODULE, "optimizer=module trainer.gradient_clip_val=null precision=fp32", ""),
        (MODULE | ADAMW, "optimizer=adamw optimizer.lr=0.1 optimizer.weight_decay=0.01 scheduler=none", ""),
        # The worst checkpoints are never kept.
        (BEST, MONITOR, ""),
        (BEST | ACCURACY, "!monitors", NO_METRIC),
        # No sharding and no offload is dropped in silence.
        (ARGS | {"deepspeed": ZERO_0}, f"strategy=ddp {STEP}.num_batches=8",
         "deepspeed deepspeed.zero_optimization.offload_optimizer.device"),
        (ARGS | {"gradient_accumulation_steps": 4, "deepspeed": {"gradient_accumulation_steps": 8}},
         f"{STEP}.num_batches=8", "gradient_accumulation_steps"),
        # A step has the same number of samples.
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, f"{STEP}.global_batch_size=64", ""),
        ({"machine_rank": 0, "num_processes": 2, "gradient_accumulation_steps": 3},
         f"{STEP}.num_batches=3 trainer.devices=2", ""),
        (ARGS | {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 5},
         "trainer.val_check_interval=10 trainer.check_val_every_n_epoch=null", ""),
        # Settings that nothing would read are left out.
        (ZERO_2, "strategy.stage=2 !strategy.offload_parameters", "zero_optimization.offload_param.device"),
        (ARGS | {"lora_r": 8, "lr_scheduler_type": "constant", "warmup_steps": 9},
         "scheduler=none !callbacks.peft", "warmup_steps lora_r"),
        (ARGS | CHECKPOINTING | {"fsdp": "shard_grad_op offload"},
         "+callbacks=gradient_checkpointing strategy=fsdp2 strategy.cpu_offload=true", ""),
        # Datasets: one, of a known kind.
        (ARGS | {"dataset_name": "a/b", "dataset_text_field": "body", "learning_rate": "2e-5"},
         "data.paths=hf://datasets/a/b data.field=body optimizer.lr=2e-5", "assistant_only_loss"),
        ({"base_model": "a/b", "datasets": [{"path": "c/d"}, {"path": "e/f"}]},
         "data.paths=PATH", "datasets"),
    ],
)  # fmt: skip
def test_the_keys_of_a_file_become_these_overrides(content: Any, words: str, lacks: str) -> None:
    found = migrated(content)
    for word in words.split():
        has_key = any(each.lstrip("+~").startswith(word[1:]) for each in found["overrides"])
        assert not has_key if word.startswith("!") else word in found["overrides"]
    assert [row["key"] for row in found["no_counterpart"]] == lacks.split()
    assert (found["unknown"], found["rejected"]) == ([], "")


def test_the_default_arguments_of_transformers_become_overrides() -> None:
    from transformers import TrainingArguments

    dump = TrainingArguments("outputs", use_cpu=True, report_to="none").to_json_string()
    found = migrated(dump)
    assert {*DEFAULTS.split()} <= {*found["overrides"]}
    assert (found["no_counterpart"], found["unknown"], found["not_needed"]) == ([], [], [])


def test_a_deepspeed_config_in_another_file_is_read() -> None:
    section = {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"}
    zero = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": 2000, "zero_optimization": section}
    Path("more").mkdir()
    Path("more/ds.json").write_text(json.dumps(zero))
    config = {"distributed_type": "DEEPSPEED", "num_processes": 6, "num_machines": 2}
    deepspeed = {"deepspeed_config_file": "ds.json", "gradient_accumulation_steps": 4}
    found = migrated(config | {"deepspeed_config": deepspeed}, "more/given.json")["overrides"]
    expected = f"data.batch_size=2 {STEP}.global_batch_size=48 trainer.devices=3 trainer.num_nodes=2"
    assert {*expected.split(), *ZERO_3.split()} <= {*found}
    found = migrated(ARGS | {"logging_steps": 7, "deepspeed": "more/ds.json"}, "more/args.json")["overrides"]
    assert {word for word in found if word.startswith("strategy")} == {*ZERO_3.split()}
    assert "trainer.log_every_n_steps=7" in found


def test_unknown_keys_and_odd_values_are_listed() -> None:
    odd = {
        "per_device_train_batch_size": "four", "num_train_epochs": 1.5, "seed": None, "warmup_ratio": 1.0,
        "run_name": "a\\b", "learning_rate": {"a b": 1}, "adam_beta2": "0.97",
        "weight_decay": float("inf"), "adam_beta1": 0.8,
        "leaning_rate": 1, "evaluation_strategy": False, "tpu_num_cores": None, "logging_steps": 0.1,
    }  # fmt: skip
    found = migrated(odd)
    assert {*found["unknown"]} == {"leaning_rate", "evaluation_strategy"}
    assert {row["key"] for row in found["no_counterpart"]} == {
        "per_device_train_batch_size", "num_train_epochs", "warmup_ratio", "run_name", "learning_rate",
        "weight_decay", "adam_beta1", "logging_steps",
    }  # fmt: skip
    assert "optimizer.betas=[0.9,0.97]" in found["overrides"]


def test_classes_of_a_file_are_named_and_not_imported(command: Command) -> None:
    Path("trains.py").write_text("raise SystemExit('imported')\n")
    arguments = {"width": 2, "x=y": 4, "b.c": 3}
    config = {"trainer": {"max_epochs": 2}, "model": {"class_path": "trains.Net", "init_args": arguments}}
    Path("given.json").write_text(json.dumps(config))
    found = json.loads(command("migrate", "given.json", "--from", "lightning", "--json", code=0)[1])
    assert (found["rejected"], "trains" in sys.modules) == ("", False)
    assert {"model._target_=trains.Net", "model.width=2"} <= {*found["overrides"]}
    assert len(found["no_counterpart"]) == 2


def test_a_command_that_does_not_compose_is_printed_with_the_error(command: Command) -> None:
    Path("given.yaml").write_text("trainer: {max_epochs: many, precision: bf16-mixed}\n")
    out = command("migrate", "given.yaml", code=2)[1]
    assert "precision=bf16_mixed" in out
    assert "trainer.max_epochs='many'" in out
    assert complete(["migrate", "giv"]) == ["given.yaml"]


def test_write_access_of_this_machine_does_not_matter() -> None:
    assert migrated(ARGS | {"output_dir": "/proc/nowhere"})["rejected"] == ""


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[1, 2]", "a.json:1: "),
        (b"[" * 10_000, "a.json:1: "),
        (b'{"optim": "sgd", "deepspeed": "a.yaml"}', "a.yaml:2: "),
    ],
)
def test_a_file_that_cannot_be_read_is_rejected_by_its_line(content: bytes, place: str) -> None:
    Path("a.yaml").write_text("stage: 1\nstage: 2")
    Path("a.json").write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(place)):
        migration(Path("a.json"))


@settings(max_examples=30)
@given(strategies.text(max_size=12))
@example("1e-5")
@example(":")
@example("${oc.env:HOME}")
def test_a_text_stays_a_text_or_is_rejected(text: str) -> None:
    try:
        word = quoted(text)
    except ValueError:
        assert not text.isprintable() or set(text) & {"\\", '"', "$"}
    else:
        assert parse_overrides([f"tags={word}"])[0].value() == text


@pytest.mark.slow
def test_the_printed_line_trains(tiny_llama: Path, command: Command) -> None:
    texts = Path("texts")
    texts.mkdir()
    for index in range(20):
        (texts / f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    arguments = ARGS | {"max_steps": 2, "use_cpu": True, "output_dir": "out"}
    arguments |= {"eval_strategy": "steps", "eval_steps": 1}
    line = migrated(arguments)["command"].replace("=NAME", f"={tiny_llama}").replace("=PATH", f"={texts}")
    command(*shlex.split(line)[1:], "data.context_length=16", code=0)
    assert "2 optimizer steps" in next(Path("out").rglob("report.html")).read_text()
    config = {"base_model": str(tiny_llama), "adapter": "qlora", "load_in_4bit": True, "sequence_len": 16}
    config |= {"datasets": [{"path": str(texts), "type": "completion"}], "max_steps": 2, "output_dir": "more"}
    config |= {"val_set_size": 0.1}
    command(*shlex.split(migrated(config)["command"])[1:], "trainer.accelerator=cpu", code=0)
    assert list(Path("more").rglob("*.ckpt"))
