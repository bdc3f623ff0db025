"""`migrate` prints a command that composes, as each row of its tables does, and lists what it lacks."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies
from lightning.pytorch import Trainer

from lightning_eff.commands._completion import complete
from lightning_eff.commands._migration.engine import CONVERSIONS, _target
from lightning_eff.commands._migration.tables import Row, filled, quoted, read_table, tools
from lightning_eff.commands._parser import build
from lightning_eff.commands.migrate import _lines, migration
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.core.errors import EnvironmentLacksError, UsageError
from tests.support.command_line import Command
from tests.support.pages import DOCS

pytestmark = pytest.mark.usefixtures("empty_folder")
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "migration").glob("*.md"))}
NEEDS = {
    "callbacks.peft_adapter": "+callbacks=peft_adapter", "callbacks.data_preload": "+callbacks=data_preload",
    "callbacks.torch_compile": "+callbacks=torch_compile", "logger.wandb": "+logger=wandb",
    "callbacks.gradient_accumulation": "+callbacks=gradient_accumulation", "precision.tf32": "precision=fp32",
    "precision.recipe": "precision=float8", "precision.all_gather": "precision=float8",
    "precision.quant_type": "precision=quantized_base", "precision.double_quant": "precision=quantized_base",
    "strategy.config": "strategy=deepspeed_zero", "strategy.offload": "strategy=deepspeed_zero",
    "optimizer.momentum": "optimizer=sgd", "scheduler": "scheduler=cosine", "optimizer": "optimizer=adamw",
}  # fmt: skip
"""What a key needs if its row does not choose it."""
FLAGS = """deterministic benchmark inference_mode use_distributed_sampler detect_anomaly fast_dev_run
    barebones sync_batchnorm enable_model_summary enable_autolog_hparams ddp_broadcast_buffers
    ddp_static_graph packing sample_packing use_bnb_nested_quant bnb_config_kwargs.bnb_4bit_use_double_quant
    peft_init_lora_weights tf32"""
VALUES = {
    "max_time": "00:01:00:00", "callbacks.Timer.duration": "00:01:00:00", "profiler": "simple",
    "gradient_clip_algorithm": "norm", "accelerator": "cpu", "optimizer.params.betas": [0.9, 0.99],
    "lora_alpha_pattern": {"q_proj": 8}, "lora_rank_pattern": {"q_proj": 8},
    "peft_autocast_adapter_dtype": False,
    "torch_compile_mode": "default", "torch_compile_backend": "eager", "dynamo_config.dynamo_mode": "default",
    "ddp_backend": "gloo", "lora_target_modules": ["q_proj"], "lora_modules_to_save": ["head"],
    "attn_implementation": "sdpa", "dtype": "bfloat16", "torch_dtype": "bfloat16", "ckpt_path": "last",
    "bnb_4bit_quant_type": "fp4", "bnb_config_kwargs.bnb_4bit_quant_type": "fp4",
    "peft_layers_to_transform": [0],
    "optimizer.class_path": "torch.optim.Adagrad", "model.class_path": "lightning_eff.models.cnn.CNN",
    "data.class_path": "lightning_eff.data.digits.Digits", "transformer_layer_cls_to_wrap": ["Block"],
    "fsdp_transformer_layer_cls_to_wrap": ["Block"], **dict.fromkeys(FLAGS.split(), True),
}  # fmt: skip
"""Values of keys that take no 0.5."""
ARGUMENTS = {
    "model.init_args.*": "channels", "data.init_args.*": "num_workers", "optimizer.init_args.*": "lr",
    "strategy.DDPStrategy.*": "bucket_cap_mb", "callbacks.ModelCheckpoint.*": "every_n_epochs",
    "logger.CometLogger.*": "project", "logger.MLFlowLogger.*": "experiment_name",
    "zero_optimization.*": "reduce_bucket_size", "zero_optimization.offload_optimizer.*": "buffer_count",
    "zero_optimization.offload_param.*": "buffer_count",
}  # fmt: skip
"""Names for the `*` of a row."""


def proposals(key: str, row: Row) -> Iterator[list[str]]:
    """Yield the overrides of a row for each of its values, with what they need."""
    key = key.removeprefix("trainer.").removeprefix("fsdp_config.")
    name = ARGUMENTS.get(key, "name" if key.endswith("*") else key.rpartition(".")[2])
    for value, words in {"*": row.ours}.items() if isinstance(row.ours, str) else row.ours.items():
        if not words or words.startswith("!") or "~" in words or "recipe=" in words:
            continue  # removals and other recipes are composed with whole files
        usual = 4 if "{inverse}" in words else 2 if "{whole}" in words or "{value}" in words else 0.5
        usual = "x" if key.startswith("logger.") else usual
        sample = VALUES.get(key, usual) if value == "*" else value
        found = [filled(word, sample, name) for word in words.split()]
        targets = {_target(word) for word in found}
        for begin, need in NEEDS.items():
            if any(f"{target}.".startswith((f"{begin}.", begin + "_")) for target in targets):
                found += [need] if _target(need) not in targets else []
                targets.add(_target(need))
        yield [*found, *([row.needs] if row.needs else [])]


def fits(own: dict[str, str], pack: dict[str, str]) -> bool:
    """Return whether overrides can be composed together: the same options and no other class's arguments."""
    names = "".join(f" {name}" for name in (*own, *pack))
    if " logger " in f"{names} " and " logger." in names:
        return False
    classes = {each.get("optimizer._target_") for each in (own, pack) if "optimizer" in each}
    return len(classes) < 2 and all(pack.get(name, word) == word for name, word in own.items())


@pytest.mark.parametrize("tool", tools())
def test_all_rows_of_a_table_compose(tool: str) -> None:
    packs: list[dict[str, str]] = [{}]
    for key, row in read_table(tool).rows.items():
        assert any((row.ours, row.same, row.lacks, row.convert)), key
        assert row.convert.partition(".")[0] in ("", *(each.__name__ for each in CONVERSIONS)), key
        for words in proposals(key, row):
            own = {_target(word): word for word in words}
            pack = next((pack for pack in packs if fits(own, pack)), None)
            if pack is None:
                packs.append(pack := {})
            pack |= own
    for pack in packs:
        words = [*([] if tool == "lightning" else ["model.name=NAME"]), *pack.values()]
        with contextlib.suppress(EnvironmentLacksError):  # of a logger's package, after all other checks
            compose_recipe(read_table(tool).recipe, list(dict.fromkeys(words)))


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


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(?!# )(.*?)```", PAGES[page], re.DOTALL):
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
        (BEST | {"metric_for_best_model": "eval_loss", "greater_is_better": False}, MONITOR, ""),
        (BEST | {"greater_is_better": True}, MONITOR, "greater_is_better"),
        (BEST | ACCURACY, "!monitors", NO_METRIC),
        (BEST | {"eval_strategy": "no"}, "!monitors", "load_best_model_at_end"),
        (ARGS | ACCURACY, "!monitors", NO_METRIC),
        (ARGS | {"save_strategy": "best", "eval_strategy": "epoch"}, MONITOR, ""),
        (BEST | {"save_total_limit": 3}, MONITOR, "save_total_limit"),
        # No format and no place of weights is dropped unsaid.
        (ARGS | {"tf32": False}, "precision=fp32 precision.tf32=false", ""),
        (ARGS | {"load_in_4bit": True, "tf32": True}, "precision=quantized_base", "tf32"),
        (ARGS | {"packing": True, "bf16": False, "load_in_4bit": True}, "precision=quantized_base", "bf16"),
        ({"base_model": "a/b", "bf16": False, "fp16": False}, "precision=fp32", ""),
        (ARGS | {"deepspeed": ZERO_0}, f"strategy=ddp {STEP}.num_batches=8",
         "deepspeed deepspeed.zero_optimization.offload_optimizer.device"),
        (ARGS | {"gradient_accumulation_steps": 4, "deepspeed": {"gradient_accumulation_steps": 8}},
         f"{STEP}.num_batches=8", "gradient_accumulation_steps"),
        (ARGS | {"fsdp": "full_shard", "fsdp_config": {"fsdp_offload_params": True}},
         "strategy=fsdp2 strategy.cpu_offload=true", ""),
        # A step has as many samples.
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, f"{STEP}.global_batch_size=64", ""),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "8"}, f"{STEP}.num_batches=8", ""),
        ({"machine_rank": 0, "num_processes": 2, "gradient_accumulation_steps": 3},
         f"{STEP}.num_batches=3 trainer.devices=2", ""),
        (ARGS | {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 5},
         "trainer.val_check_interval=10 trainer.check_val_every_n_epoch=null", ""),
        # What nothing would read is left out.
        (ZERO_2, "strategy.stage=2 !strategy.offload_parameters", "zero_optimization.offload_param.device"),
        (ARGS | {"optim": "sgd", "adam_beta1": 0.8}, "optimizer=sgd !optimizer.betas", "adam_beta1"),
        (ARGS | {"lora_r": 8, "lr_scheduler_type": "constant", "warmup_steps": 9},
         "scheduler=none !callbacks.peft", "warmup_steps lora_r"),
        (ARGS | {"fp16": True, "load_in_4bit": True, "gradient_checkpointing": False},
         "~callbacks.gradient_checkpointing precision=quantized_base", "fp16"),
        (ARGS | CHECKPOINTING | {"fsdp": "shard_grad_op offload"},
         "+callbacks=gradient_checkpointing strategy=fsdp2 strategy.cpu_offload=true", ""),
        (ARGS | {"ddp_broadcast_buffers": False, "ddp_bucket_cap_mb": 8},
         "strategy=ddp strategy.broadcast_buffers=false strategy.bucket_cap_mb=8", ""),
        # Datasets: one, of a kind that is known.
        (ARGS | {"dataset_name": "a/b", "dataset_text_field": "body", "learning_rate": "2e-5"},
         "data.paths=hf://datasets/a/b data.field=body optimizer.lr=2e-5", "assistant_only_loss"),
        ({"base_model": "a/b", "datasets": [{"path": "c/d", "split": "x"}], "streaming": True},
         "data=chat data.paths=hf://datasets/c/d", "streaming datasets.split"),
        ({"base_model": "a/b", "datasets": [{"path": "c.jsonl", "type": {"format": "x"}}]},
         "data.paths=c.jsonl !data=", "datasets.type"),
        ({"base_model": "a/b", "datasets": [{"path": "c/d"}, {"path": "e/f"}]},
         "data.paths=PATH", "datasets"),
        ({"train_batch_size": 8, "scheduler": {"type": "WarmupLR"}},
         "scheduler=warmup_decay scheduler.decay=none !scheduler.min_lr", "scheduler.params.warmup_type"),
        ({"train_batch_size": 8, "scheduler": {"type": "WarmupCosineLR"}},
         "scheduler=cosine scheduler.min_lr_ratio=0.0001", "scheduler.params.warmup_type"),
        (ARGS | {"deepspeed": "lost.json"}, "strategy=deepspeed_zero", "deepspeed"),
    ],
)  # fmt: skip
def test_a_file_becomes_these_overrides(content: Any, words: str, lacks: str) -> None:
    found = migrated(content)
    for word in words.split():
        has_key = any(each.lstrip("+~").startswith(word[1:]) for each in found["overrides"])
        assert not has_key if word.startswith("!") else word in found["overrides"]
    assert [row["key"] for row in found["no_counterpart"]] == lacks.split()
    assert (found["unknown"], found["rejected"]) == ([], "")


def test_all_arguments_of_transformers_become_the_defaults() -> None:
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
    for value in (zero, "ds.json", "more/ds.json"):
        found = migrated(ARGS | {"logging_steps": 7, "deepspeed": value}, "more/args.json")["overrides"]
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
    code, out, _ = command("migrate", "given.json", "--from", "lightning", "--json")
    found = json.loads(out)
    assert (code, found["rejected"], "trains" in sys.modules) == (0, "", False)
    assert {"model._target_=trains.Net", "model.width=2"} <= {*found["overrides"]}
    assert len(found["no_counterpart"]) == 2


def test_texts_of_any_script_stay_what_they_are() -> None:
    found = migrated({"model_name_or_path": "mödel/日本", "optim": "sgd", "run_name": "\u0663"})
    assert found["rejected"] == ""
    assert {'model.name="mödel/日本"', 'tags=["\u0663"]'} <= {*found["overrides"]}


def test_what_plan_rejects_on_every_machine_is_said() -> None:
    """Not what only this machine lacks: a second device, or write access."""
    lost = {"output_dir": "/proc/nowhere", "deepspeed": {"zero_optimization": {"stage": 2}}}
    assert migrated(ARGS | lost)["rejected"] == ""
    sharded = migrated(ARGS | {"load_in_4bit": True, "fsdp": "full_shard"})
    assert sharded["rejected"].startswith("precision/quantized_base with strategy/fsdp2")
    small = migrated({"train_batch_size": 2, "zero_optimization": {"stage": 2}})
    assert "data.batch_size=2" in small["rejected"]


def test_a_command_that_cannot_run_is_printed_with_its_reason(command: Command) -> None:
    Path("given.yaml").write_text("trainer: {max_epochs: many, precision: bf16-mixed}\n")
    code, out, _ = command("migrate", "given.yaml")
    assert code == 2
    assert "precision=bf16_mixed" in out
    assert "trainer.max_epochs='many'" in out
    code, out, _ = command("migrate", "given.yaml", "--from", "lightning", "--json")
    assert (code, "max_epochs" in json.loads(out)["rejected"]) == (2, True)
    assert command("migrate", "given.yaml", "--from", "keras")[0] == command("migrate")[0] == 2
    assert complete(["migrate", "giv"]) == ["given.yaml"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", b"", "a.yaml:1: expected lines of key: value"),
        ("a.json", b"[1, 2]", "a.json:1: expected lines of key: value"),
        ("a.json", b"\x80\x02}q\x00.", "a.json:1: "),
        ("a.json", b'{"optim": "sgd",\n "seed": 1, "seed": 2}', "duplicate key"),
        ("a.yaml", b"optim: sgd\noptim: lion", "a.yaml:2: found duplicate key"),
        ("a.yaml", b"optim: !!python/object:os.system {}", "tag !!python/object:os.system is not allowed"),
        ("a.yaml", b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases are not read"),
        ("a.json", b"[" * 100_000, "a.json:1: maximum recursion"),
        (".", None, ".:1: expected a regular file"),
        ("a.json", b'{"colour": 1, "taste": 2}', "expected keys of accelerate: "),
        ("lost.json", None, "lost.json:1: expected a regular file"),
        ("a.json", b'{"optim": "sgd", "deepspeed": "a.yaml"}', "a.yaml:2: found duplicate key"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_rejected(name: str, content: bytes | None, message: str) -> None:
    Path("a.yaml").write_text("stage: 1\nstage: 2")
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UsageError, match=re.escape(message)):
        migration(Path(name))


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
