"""`migrate` prints a command that composes, as each row of its tables does, and what has no counterpart."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, strategies
from lightning.pytorch import Trainer
from omegaconf import OmegaConf

from lightning_eff.commands._completion import complete
from lightning_eff.commands._migration import (
    accelerate,
    deepspeed,
    lightning,
    reading,
    settings,
    transformers,
)
from lightning_eff.commands._migration.collecting import Collected, filled, quoted
from lightning_eff.commands._migration.reading import SOURCES
from lightning_eff.commands._migration.rows import Row
from lightning_eff.commands._parser import OPTIONS, build
from lightning_eff.commands.migrate import migration
from lightning_eff.config.composition import compose_recipe
from lightning_eff.config.overrides import parse_overrides
from lightning_eff.config.validate import TOP_LEVEL
from lightning_eff.core.catalog import CONF, parameter_keys
from lightning_eff.core.errors import EnvironmentLacksError, UsageError
from tests.support.command_line import Command
from tests.support.pages import DOCS

pytestmark = pytest.mark.usefixtures("empty_folder")
PAGES = {path.stem: path.read_text() for path in sorted((DOCS / "migration").glob("*.md"))}
NEEDS = {
    "callbacks.peft_adapter": "+callbacks=peft_adapter",
    "callbacks.data_preload": "+callbacks=data_preload",
    "callbacks.torch_compile": "+callbacks=torch_compile",
    "callbacks.gradient_checkpointing": "+callbacks=gradient_checkpointing",
    "callbacks.micro_batch": "+callbacks=micro_batch",
    "callbacks.empty_cache": "+callbacks=empty_cache",
    "logger.tensorboard": "+logger=tensorboard",
    "logger.wandb": "+logger=wandb",
    "logger.mlflow": "+logger=mlflow",
    "logger.comet": "+logger=comet",
    "precision.recipe": "precision=float8",
    "precision.all_gather": "precision=float8",
    "precision.quant_type": "precision=quantized_base",
    "precision.double_quant": "precision=quantized_base",
    "strategy.config": "strategy=deepspeed_zero",
    "strategy.offload": "strategy=deepspeed_zero",
    "optimizer.momentum": "optimizer=sgd",
}
"""What a key of an option needs, where the recipe does not have it."""
VALUES = {
    "accelerator": "cpu", "max_time": "'00:01:00:00'", "profiler": "simple", "deterministic": "true",
    "detect_anomaly": "true", "fast_dev_run": "true", "benchmark": "true", "inference_mode": "true",
    "use_distributed_sampler": "true", "barebones": "false", "sync_batchnorm": "true",
    "enable_autolog_hparams": "true", "enable_model_summary": "true", "gradient_clip_algorithm": "norm",
    "betas": "[0.9,0.99]", "lora_alpha_pattern": "{q_proj:8}", "lora_rank_pattern": "{q_proj:8}",
    "peft_autocast_adapter_dtype": "false", "peft_init_lora_weights": "true", "torch_compile_mode": "default",
    "dynamo_mode": "default", "fused": "true", "foreach": "false", "default_root_dir": "elsewhere",
    "output_dir": "elsewhere", "ddp_broadcast_buffers": "true", "ddp_static_graph": "true", "tags": "x",
    "bnb_4bit_quant_type": "fp4", "duration": "'00:01:00:00'", "fp8_recipe_name": "rowwise",
    "torch_compile_backend": "eager", "val_set_size": "0.1",
    **dict.fromkeys(("eval_strategy", "evaluation_strategy"), "0.1"),
    "model.class_path": "lightning_eff.models.cnn.CNN", "data.class_path": "lightning_eff.data.digits.Digits",
    "optimizer.class_path": "torch.optim.Adagrad",
    "lr_scheduler.class_path": "torch.optim.lr_scheduler.StepLR",
    "torch_dtype": "bfloat16", "dtype": "bfloat16", "lr_scheduler.init_args.*": "100",
    "lora_attn_modules": "[q_proj]", "source": "a.jsonl", "data_files": "a.jsonl", "dataset_name": "a/b",
    "min_lr_rate": "0.1",
    "cosine_min_lr_ratio": "0.1", "cos_min_ratio": "0.1", "lora_modules_to_save": "[head]",
    "attn_implementation": "sdpa", "transformer_layer_cls_to_wrap": "[Block]",
    "fsdp_transformer_layer_cls_to_wrap": "[Block]", "lora_target_modules": "[q_proj]",
    "dynamo_backend": "eager",
    **{f"logger.{name}Logger.*": "x" for name in ("TensorBoard", "MLFlow", "Comet", "CSV", "Wandb")},
}  # fmt: skip
"""Values of keys for which 2 is none."""
REMOVED_FROM = {
    "~callbacks.gradient_checkpointing": "qlora",
    "~callbacks.torch_compile": "fast",
    "~callbacks.micro_batch": "low_memory",
}
"""Recipes that have a callback that a row removes."""
ARGUMENTS = {
    "model.init_args.*": "channels", "data.init_args.*": "num_workers", "optimizer.init_args.*": "lr",
    "lr_scheduler.init_args.*": "warmup_steps", "strategy.DDPStrategy.*": "bucket_cap_mb",
    "callbacks.ModelCheckpoint.*": "every_n_epochs",
}  # fmt: skip
"""Names that the `*` of a row stands for."""


def rows() -> Iterator[tuple[str, str, Row]]:
    """Yield tool, key and row of all tables, but for the arguments of Lightning that are there twice."""
    for tool, source in SOURCES.items():
        table = {**lightning.CONFIG, **lightning.ARGUMENTS} if tool == "lightning" else source.table
        yield from ((tool, key, row) for key, row in table.items())


def proposed() -> dict[tuple[str, ...], tuple[str, str]]:
    """Return the recipe and a key for each set of overrides that a row of a table stands for."""
    found: dict[tuple[str, ...], tuple[str, str]] = {}
    for tool, key, row in rows():
        texts = list(row.here.values()) if isinstance(row.here, Mapping) else [row.here]
        last = key.rpartition(".")[2]
        value = VALUES.get(key) or VALUES.get(last, "2")
        if "Logger.*" in key:
            argument = {"CometLogger": "project", "MLFlowLogger": "experiment_name"}.get(
                key.split(".")[1], "name"
            )
        else:
            argument = ARGUMENTS.get(key, "")
        for text in texts:
            words = [word.replace("{key}", argument) for word in text.split()]
            # As a text a number is quoted; as a value it is written as it stands here.
            filled_in = [
                filled(word, value) if "{s}" in word else word.replace("{}", value) for word in words
            ]
            if words and words != ["recipe=qlora"]:
                found.setdefault(tuple(filled_in), (SOURCES[tool].recipe, key))
    return found


def test_there_are_as_many_names_as_promised() -> None:
    assert len(transformers.FIELDS) >= 110
    assert [len(source.table) > 60 for source in SOURCES.values()] == [True] * 6
    assert OPTIONS["migrate"]
    choices = next(action.choices for action in build()[1]["migrate"]._actions if action.dest == "source")
    assert sorted(choices or ()) == sorted(SOURCES)


def test_transformers_has_these_arguments_with_these_defaults() -> None:
    from transformers import TrainingArguments

    fields = {field.name: field for field in dataclasses.fields(TrainingArguments)}
    ours = {key.partition(".")[0] for key in transformers.FIELDS}
    assert ours - fields.keys() == set()
    assert fields.keys() - ours == set()
    assert fields.keys() & {*transformers.OLDER, *transformers.TRL} == set()
    written = json.loads(TrainingArguments("trainer_output", use_cpu=True, report_to="none").to_json_string())
    silent = {
        "optim",
        "report_to",
        "disable_tqdm",
        "use_cpu",
        "dataloader_pin_memory",
    }  # as this machine has it
    for key, row in transformers.FIELDS.items():
        if "." not in key and key not in silent and written[key] not in (None, False, [], ""):
            assert row.default == written[key], key


def test_deepspeed_lightning_and_accelerate_have_these_keys() -> None:
    from accelerate.commands.config.config_args import ClusterConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    arguments = {*inspect.signature(Trainer).parameters}
    assert arguments - {key.partition(".")[0] for key in lightning.ARGUMENTS} == set()
    assert {key.partition(".")[0] for key in lightning.ARGUMENTS} - arguments == set()
    zero_keys = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert zero_keys - {key.split(".")[1] for key in deepspeed.TABLE if key.startswith("zero_o")} == set()
    cluster = {field.name for field in dataclasses.fields(ClusterConfig)}
    assert cluster - {key.partition(".")[0] for key in accelerate.TABLE} == set()


def test_what_a_row_proposes_exists() -> None:
    trainer = {f"trainer.{key}" for key in inspect.signature(Trainer).parameters}
    known = {*parameter_keys(), *TOP_LEVEL, *trainer}
    free = (
        "strategy.config.", "callbacks.peft_adapter.options.", "strategy.find_unused", "strategy.bucket_cap",
        "strategy.broadcast_b", "strategy.static_g", "strategy.process_g", "monitors.model_checkpoint.",
        "optimizer._target_", "model._target_", "data._target_", "scheduler._target_", "logger.",
    )  # fmt: skip
    for words, (_, row) in proposed().items():
        for word in words:
            key, _, value = word.lstrip("+~").partition("=")
            group, _, option = key.partition(".")
            if word.startswith("~"):
                assert (CONF / group / f"{option}.yaml").is_file(), (row, word)
            elif (CONF / key).is_dir():
                assert (CONF / key / f"{value}.yaml").is_file(), (row, word)
            elif key != "recipe":
                assert key in known or key.startswith(free), (row, word)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "row"), list(proposed().items()), ids=" ".join)
def test_what_a_row_proposes_composes(words: tuple[str, ...], row: tuple[str, str]) -> None:
    recipe = row[0]
    for word in words:
        recipe = word.partition("=")[2] if word.startswith("recipe=") else REMOVED_FROM.get(word, recipe)
    own = [word for word in words if not word.startswith("recipe=")]
    if any(word.startswith("callbacks.gradient_accumulation") for word in own) and not own[0].startswith("+"):
        recipe = "full_finetune"
    chosen = {word.partition("=")[0] for word in own}
    needed = [more for key, more in NEEDS.items() if any(word.startswith(key) for word in own)]
    needed = [more for more in needed if more.partition("=")[0] not in chosen or more in own]
    is_of_hub = recipe in ("full_finetune", "qlora") and "model.name" not in chosen
    # That a logger's package is missing is found after everything else.
    with contextlib.suppress(EnvironmentLacksError):
        compose_recipe(recipe, [*(["model.name=NAME"] if is_of_hub else []), *dict.fromkeys([*needed, *own])])


def write_page_files() -> None:
    for text in (*PAGES.values(), (DOCS / "own_model.md").read_text()):
        for name, content in re.findall(r"```json\n// (\S+)\n(.*?)```", text, re.DOTALL):
            Path(name).write_text(content)
        for content, name in re.findall(r"```(?:yaml|python)\n(# (\w+\.\w+)\n.*?)```", text, re.DOTALL):
            Path(name).write_text(content)


@pytest.mark.slow
def test_each_page_shows_what_the_verb_prints(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    write_page_files()
    shown = [
        each
        for text in PAGES.values()
        for each in re.findall(r"\$ lightning-eff (migrate \S+)\n```\n\n```text\n(.*?)```", text, re.DOTALL)
    ]
    assert len(shown) == 6
    for words, text in shown:
        assert command(*words.split(), code=0)[1] == text, words


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_a_page_runs(page: str) -> None:
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(?!# )(.*?)```", PAGES[page], re.DOTALL):
        exec(compile(block, page, "exec"), names)
        assert names["trainer"].callbacks


def written(name: str, content: Any) -> Path:
    path = Path(name)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def overrides(content: Any, *, name: str = "given.json", source: str | None = None) -> dict[str, str]:
    """Return the overrides that a file becomes, by key."""
    found = migration(written(name, content), source)
    assert found["no_counterpart"] == found["unknown"] == []
    return {word.partition("=")[0]: word.partition("=")[2] for word in found["overrides"]}


def collected(content: Any, name: str = "given.json") -> dict[str, str]:
    """Return the overrides that a file asks for, by key, before they are composed."""
    path = written(name, content)
    read = reading.read_file(path)
    found = Collected(path.parent)
    found.add(read, SOURCES[reading.recognize(read, path)].table)
    settings.settle(found)
    assert found.lacking == found.unknown == []
    words = [word.partition("=") for unit in found.units for word in unit.overrides]
    return {key: value for key, _, value in words}


def test_arguments_that_transformers_wrote_become_one_line() -> None:
    from transformers import TrainingArguments

    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=300,
        learning_rate=3e-5,
        lr_scheduler_type="cosine",
        warmup_steps=0.1,
        optim="adafactor",
        weight_decay=0.01,
        bf16=True,
        activation_checkpointing=True,
        torch_compile=True,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=100,
        save_total_limit=1,
        logging_steps=5,
        report_to=["tensorboard"],
        resume_from_checkpoint="True",
        label_smoothing_factor=0.1,
        use_cpu=True,
    )
    found = migration(written("training_args.json", arguments.to_json_string()))
    assert found["command"] == (
        "lightning-eff train full_finetune model.name=NAME data.paths=PATH data.batch_size=2 "
        "optimizer=adafactor precision=bf16_mixed +callbacks=gradient_checkpointing "
        "+callbacks=torch_compile +logger=tensorboard output_root=out optimizer.lr=3e-05 "
        "scheduler.min_lr_ratio=0.0 optimizer.weight_decay=0.01 trainer.log_every_n_steps=5 "
        "monitors.model_checkpoint.every_n_train_steps=100 trainer.accelerator=cpu ckpt_path=last "
        "callbacks.gradient_accumulation.global_batch_size=null "
        "callbacks.gradient_accumulation.num_batches=4 "
        "trainer.max_steps=300 trainer.max_epochs=null trainer.val_check_interval=200 "
        "trainer.check_val_every_n_epoch=null scheduler.warmup_steps=0.1"
    )
    assert [(row["key"], row["value"]) for row in found["no_counterpart"]] == [
        ("label_smoothing_factor", 0.1)
    ]
    assert found["unknown"] == []
    recipe, *words = shlex.split(found["command"])[2:]
    values = compose_recipe(recipe, words).values
    assert (values["optimizer"]["_target_"], values["optimizer"]["lr"]) == ("torch.optim.Adafactor", 3e-5)


def test_defaults_that_decide_are_written_and_those_of_the_recipe_are_not() -> None:
    from transformers import TrainingArguments

    everything = json.loads(TrainingArguments("outputs", use_cpu=True).to_json_string()) | {"use_cpu": False}
    found = overrides(everything)
    assert found == {
        "model.name": "NAME",
        "data.paths": "PATH",
        "data.batch_size": "8",
        "data.val_fraction": "0.0",
        "scheduler": "linear",
        "scheduler.min_lr_ratio": "0.0",
        "scheduler.warmup_steps": "0",
        "optimizer.lr": "5e-05",
        "optimizer.weight_decay": "0.0",
        "optimizer.betas": "[0.9,0.999]",
        "callbacks.gradient_accumulation.global_batch_size": "null",
        "callbacks.gradient_accumulation.num_batches": "1",
        "trainer.max_epochs": "3",
    }
    asked = {key: value for key, value in collected(everything).items() if not key.startswith("~")}
    assert collected({"output_dir": "outputs", "optim": "adamw_torch"}) == asked


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"train_batch_size": 64, "train_micro_batch_size_per_gpu": 2}, "64"),
        ({"train_batch_size": "auto", "gradient_accumulation_steps": "8"}, "null num_batches=8"),
        (
            {"distributed_type": "NO", "num_processes": 2, "gradient_accumulation_steps": 3},
            "null num_batches=3",
        ),
    ],
)
def test_a_step_has_as_many_samples(content: dict[str, Any], expected: str) -> None:
    size, _, count = expected.partition(" num_batches=")
    found = collected(content)
    assert found["callbacks.gradient_accumulation.global_batch_size"] == size
    assert found.get("callbacks.gradient_accumulation.num_batches", "") == count


def test_ranks_of_accelerate_and_batches_of_deepspeed_make_the_samples_of_a_step() -> None:
    written("ds.json", {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 2}})
    deepspeed_config = {"deepspeed_config_file": "ds.json", "gradient_accumulation_steps": 4}
    config = {"distributed_type": "DEEPSPEED", "num_processes": 6, "num_machines": 2}
    found = collected(config | {"deepspeed_config": deepspeed_config})
    assert found["callbacks.gradient_accumulation.global_batch_size"] == "48"
    assert (found["trainer.devices"], found["trainer.num_nodes"]) == ("3", "2")
    assert (found["data.batch_size"], found["strategy.stage"]) == ("2", "2")


def test_a_deepspeed_config_inside_another_file_is_read() -> None:
    zero = {
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}, "reduce_bucket_size": "auto"},
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }
    expected = {"strategy": "deepspeed_zero", "strategy.stage": "3", "strategy.offload_parameters": "cpu"}
    Path("more").mkdir()
    written("more/ds.json", zero)
    for value in (zero, "ds.json", "more/ds.json"):
        found = collected({"per_device_train_batch_size": 4, "deepspeed": value}, name="more/args.json")
        assert {key: each for key, each in found.items() if key.startswith("strategy")} == expected
    axolotl = {"base_model": "a/b", "sequence_len": 64, "deepspeed": "deepspeed_configs/zero1.json"}
    assert collected(axolotl)["strategy.stage"] == "1"
    lost = Collected(Path())
    lost.add({"deepspeed": "lost.json"}, transformers.TABLE, "given.")
    assert [finding.reason.partition(";")[0] for finding in lost.lacking] == ["no such file"]
    # Without ZeRO nothing reads what is ZeRO's alone.
    off = overrides({"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}})
    assert {key for key in off if key.startswith("strategy")} == {"strategy"}


def test_fsdp_strings_and_sections_are_one_strategy() -> None:
    found = collected({"per_device_train_batch_size": 4, "fsdp": "shard_grad_op auto_wrap offload"})
    assert {key: value for key, value in found.items() if key.startswith("strategy")} == {
        "strategy": "fsdp2",
        "strategy.reshard_after_forward": "false",
        "strategy.cpu_offload": "true",
    }
    hybrid = Collected(Path())
    hybrid.add({"fsdp": ["hybrid_shard"]}, transformers.TABLE, "given.")
    assert [finding.value for finding in hybrid.lacking] == ["hybrid_shard"]


def test_adapters_choose_recipe_and_precision() -> None:
    base = {"base_model": "a/b", "sequence_len": 64, "bf16": True}
    lora = migration(written("a.yaml", base | {"adapter": "lora", "lora_r": 8, "logging_steps": 0.1}))
    assert [row["key"] for row in lora["no_counterpart"]] == ["logging_steps"]
    assert "model.name=a/b" in lora["overrides"]
    assert (lora["recipe"], "precision=frozen_bf16" in lora["overrides"]) == ("full_finetune", True)
    assert "callbacks.peft_adapter.options.r=8" in lora["overrides"]
    eight = migration(written("a.yaml", base | {"adapter": "lora", "load_in_8bit": True}))
    assert (eight["recipe"], "precision=frozen_int8" in eight["overrides"]) == ("qlora", True)
    four = migration(
        written("a.yaml", base | {"adapter": "qlora", "load_in_4bit": True, "gradient_checkpointing": False})
    )
    assert four["recipe"] == "qlora"
    assert not any(word.startswith("precision") for word in four["overrides"])
    assert "~callbacks.gradient_checkpointing" in four["overrides"]


def test_a_script_of_trl_is_read_with_its_model_and_data() -> None:
    script = """
model_name_or_path: org/model
dataset_name: org/talks
per_device_train_batch_size: 4
learning_rate: 2e-5
max_length: 1024
packing: false
use_peft: true
lora_r: 4
lora_target_modules: [q_proj, v_proj]
eval_strategy: epoch
"""
    found = overrides(script, name="sft.yaml")
    assert (found["model.name"], found["data.paths"], found["data"]) == (
        "org/model",
        "hf://datasets/org/talks",
        "chat",
    )
    assert (found["data.context_length"], found["data.packing"]) == ("1024", "false")
    assert (found["+callbacks"], found["precision"]) == ("peft_adapter", "frozen_bf16")
    assert found["callbacks.peft_adapter.target_modules"] == "[q_proj,v_proj]"
    assert "data.val_fraction" not in found


def test_an_option_that_another_key_replaces_leaves_nothing_behind() -> None:
    config = {
        "checkpointer": {"checkpoint_dir": "model"},
        "optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW", "lr": 1e-5},
        "optimizer_in_bwd": True,
    }
    found = migration(written("tune.yaml", config))
    assert [word for word in found["overrides"] if word.startswith("optimizer")] == [
        "optimizer=in_backward",
        "optimizer.lr=1e-05",
        "optimizer.weight_decay=0.01",
    ]
    lost = {row["key"]: row["reason"] for row in found["no_counterpart"]}
    assert lost == {"optimizer._component_": "optimizer_in_bwd sets optimizer=in_backward"}


@given(strategies.text(strategies.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12))
@example("c:\\dir\\")
@example('\\"')
@example("1e-5")
def test_a_text_stays_a_text(text: str) -> None:
    assert parse_overrides([f"tags={quoted(text)}"])[0].value() == text


def test_what_cannot_be_composed_is_left_out_and_said() -> None:
    trainer = {
        "log_every_n_steps": 0.1,
        "max_epochs": 3,
        "default_root_dir": "${mine}",
        "gradient_clip_val": "much",
    }
    found = migration(written("args.yaml", {"trainer": trainer}))
    assert found["overrides"] == ["trainer.max_epochs=3"]
    reasons = {row["key"]: row["reason"] for row in found["no_counterpart"]}
    assert reasons.keys() == {
        "trainer.log_every_n_steps",
        "trainer.default_root_dir",
        "trainer.gradient_clip_val",
    }
    begin = "trainer.log_every_n_steps=0.1 is refused: trainer.log_every_n_steps=0.1: expected a whole number"
    assert reasons["trainer.log_every_n_steps"].startswith(begin)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.json", b"", "a.json:1: not JSON"),
        ("a.yaml", b"", "a.yaml:1: expected settings as key: value, not nothing"),
        ("a.json", b"{}", "a.json:1: expected settings as key: value, not nothing"),
        ("a.json", b"[1, 2]", "a.json:1: expected settings as key: value, not a list"),
        ("a.yaml", b"just words", "not a str"),
        ("a.json", b"\x80\x02}q\x00.", "a.json:1: byte 0x80 is not UTF-8"),
        ("a.yaml", b"a: \xff", "a.yaml:1: byte 0xff is not UTF-8"),
        ("a.json", b'{"optim": "sgd",\n "seed": 1, "seed": 2}', "duplicate key 'seed'"),
        ("a.yaml", b"optim: sgd\noptim: lion", "a.yaml:2: duplicate key 'optim'"),
        ("a.yaml", b"optim: !!python/object:os.system {}", "tag !!python/object:os.system is not allowed"),
        ("a.json", b'{"optim": sgd}', "a.json:1: not JSON: Expecting value"),
        ("a.json", b"[" * 100_000, "nested too deep"),
        ("a.json", b'{"a":' * 60 + b"1" + b"}" * 60, "nested deeper than 50"),
        (".", None, ".:1: expected a regular file"),
        ("a.json", b'{"colour": 1, "taste": 2}', "its keys are those of no tool that is known: torchtune ("),
        ("lost.json", None, "lost.json: no such file"),
    ],
)  # fmt: skip
def test_a_file_that_is_none_is_refused(name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(UsageError) as caught:
        migration(Path(name))
    assert message in str(caught.value)
    assert caught.value.exit_code == 2


def test_odd_values_do_not_stop_it() -> None:
    odd = {
        "per_device_train_batch_size": "four",
        "learning_rate": "5e-5",
        "num_train_epochs": 1.5,
        "seed": None,
        "run_name": "it's 100% mine",
        "fsdp_config": {},
        "adam_beta2": "0.97",
        "leaning_rate": 1,
        "report_to": "none",
        "warmup_steps": -3,
    }
    found = migration(written("args.json", odd))
    reasons = {row["key"]: row["reason"] for row in found["no_counterpart"]}
    assert reasons["per_device_train_batch_size"] == "expected a whole number from 1 on"
    assert reasons["num_train_epochs"] == "whole epochs only: 2 in its place"
    assert reasons["warmup_steps"] == "expected a number of optimizer steps, or a fraction of the run's"
    assert 'tags=["it\'s 100% mine"]' in found["overrides"]
    assert found["unknown"] == [{"key": "leaning_rate", "nearest": "did you mean 'learning_rate'?"}]
    assert "optimizer.lr=5e-05" in found["overrides"]
    assert "optimizer.betas=[0.9,0.97]" in found["overrides"]


def test_the_tool_may_be_named_and_json_printed(command: Command) -> None:
    written("a.yaml", "seed: 3\nepochs: 2\n")
    assert command("migrate", "a.yaml", "--from", "axolotl")[0] == 0
    out = command("migrate", "a.yaml", "--from", "torchtune", "--json", code=0)[1]
    found = json.loads(out)
    assert (found["source"], found["unknown"]) == ("torchtune", [])
    assert {"seed=3", "trainer.max_epochs=2"} <= {*found["overrides"]}
    assert command("migrate", "a.yaml", "--from", "keras")[0] == 2
    code, _, err = command("migrate")
    assert (code, "migrate: expected a file" in err) == (2, True)


def test_completion_offers_files_and_tools() -> None:
    for name in ("a.json", "a.yml", "a.txt"):
        written(name, {})
    assert complete(["migrate", "a"]) == ["a.json", "a.yml"]
    assert complete(["migrate", "--f"]) == ["--from"]


@pytest.mark.slow
def test_the_printed_line_trains(tiny_llama: Path, command: Command) -> None:
    from transformers import TrainingArguments

    texts = Path("texts")
    texts.mkdir()
    for index in range(20):
        (texts / f"{index}.txt").write_text("the cat sat on the mat\n" * 9)
    arguments = TrainingArguments(
        "out",
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=2,
        activation_checkpointing=True,
        eval_strategy="steps",
        eval_steps=1,
        use_cpu=True,
    )
    found = migration(written("training_args.json", arguments.to_json_string()))
    line = found["command"].replace("=NAME", f"={tiny_llama}").replace("=PATH", f"={texts}")
    command(*shlex.split(line)[1:], "data.context_length=16", code=0)
    (report,) = Path("out").rglob("efficiency.json")
    assert "2 optimizer steps" in report.with_name("report.html").read_text()
    config = {"base_model": str(tiny_llama), "adapter": "qlora", "load_in_4bit": True, "sequence_len": 16}
    config |= {"datasets": [{"path": str(texts), "type": "completion"}], "max_steps": 2, "output_dir": "more"}
    line = migration(written("axolotl.yaml", config | {"val_set_size": 0.1}))["command"]
    command(*shlex.split(line)[1:], "trainer.accelerator=cpu", code=0)
    assert list(Path("more").rglob("*.ckpt"))


def settled(content: Any, tool: str) -> Collected:
    found = Collected(Path())
    found.add(content, SOURCES[tool].table)
    settings.settle(found)
    return found


@pytest.mark.parametrize(
    ("content", "tool", "refused"),
    [
        ({"per_device_train_batch_size": 10**400}, "transformers", ["per_device_train_batch_size"]),
        (
            {"learning_rate": float("nan"), "weight_decay": 1e400},
            "transformers",
            ["learning_rate", "weight_decay"],
        ),
        ({"run_name": "a\x1b[201~b", "output_dir": "\ud800"}, "transformers", ["output_dir", "run_name"]),
        ({"warmup_ratio": 1.0}, "transformers", ["warmup_ratio"]),
        ({"datasets": [{"path": "a" * 5000}]}, "axolotl", []),
        ({"trainer": {"strategy": {"class_path": "DDPStrategy", "init_args": 5}}}, "lightning", []),
    ],
)
def test_values_that_nothing_can_have_are_named_and_end_nothing(
    content: Any, tool: str, refused: list[str]
) -> None:
    assert [finding.key for finding in settled(content, tool).lacking] == refused


def test_a_value_without_a_way_to_write_it_is_refused_and_the_json_is_strict(command: Command) -> None:
    content = '{"per_device_train_batch_size": 2, "learning_rate": {"a b": 1}, "weight_decay": NaN}'
    written("given.json", content)
    output = command("migrate", "given.json", "--json", code=0)[1]
    found = json.loads(output, parse_constant=pytest.fail)
    assert {row["key"]: row["value"] for row in found["no_counterpart"]} == {
        "learning_rate": {"a b": 1}, "weight_decay": "nan",
    }  # fmt: skip


@pytest.mark.parametrize("text", ["${oc.env:HOME}", r"a\${b}", r"\\${seed}", "{}", "{s} {}"])
def test_a_text_stays_what_it_is_when_the_command_is_composed(text: str) -> None:
    (word,) = (
        word
        for unit in settled({"run_name": text}, "transformers").units
        for word in unit.overrides
        if "tags" in word
    )
    (item,) = parse_overrides([word])
    assert OmegaConf.to_container(OmegaConf.create({"tags": item.value(), "seed": 1}), resolve=True) == {
        "tags": [text],
        "seed": 1,
    }


def test_a_long_warm_up_and_a_name_with_a_space_keep_every_character() -> None:
    given = {"per_device_train_batch_size": 2, "warmup_steps": 1234567, "dataset_name": "x y"}
    found = collected(given)
    assert (found["scheduler.warmup_steps"], found["data.paths"]) == ("1234567", '"hf://datasets/x y"')


def test_the_trainer_says_how_often_is_logged_not_its_deepspeed_config() -> None:
    zero = {"zero_optimization": {"stage": 2}, "steps_per_print": 2000}
    given = {"per_device_train_batch_size": 2, "logging_steps": 7, "deepspeed": zero}
    assert collected(given)["trainer.log_every_n_steps"] == "7"
    assert collected(zero)["trainer.log_every_n_steps"] == "2000"


MODULE = {"model": {"class_path": "lightning_eff.models.cnn.CNN"}, "seed_everything": 3}


def test_a_module_without_an_optimizer_in_its_file_keeps_its_own() -> None:
    found = collected(MODULE)
    assert (found["optimizer"], found["trainer.gradient_clip_val"]) == ("module", "null")
    adamw = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.1}}
    found = collected({**MODULE, "optimizer": adamw, "trainer": {"gradient_clip_val": 0.5}})
    assert (found["optimizer"], found["trainer.gradient_clip_val"]) == ("adamw", "0.5")
    assert (found["optimizer.betas"], found["optimizer.weight_decay"]) == ("[0.9,0.999]", "0.01")
    found = collected({**MODULE, "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}})
    assert (found["optimizer"], found["optimizer.momentum"]) == ("sgd", "0.0")


def test_epochs_of_a_schedule_are_not_taken_for_steps() -> None:
    schedule = {"class_path": "torch.optim.lr_scheduler.CosineAnnealingLR", "init_args": {"T_max": 50}}
    (finding,) = settled({**MODULE, "lr_scheduler": schedule}, "lightning").lacking
    assert finding.key == "lr_scheduler.init_args.T_max"
    assert finding.reason == "in optimizer steps here, in epochs there: scheduler.T_max=STEPS"


def test_torchtune_clips_and_validates_only_where_it_is_asked_to() -> None:
    given = {"checkpointer": {"checkpoint_dir": "a"}, "batch_size": 2}
    found = collected({**given, "clip_grad_norm": None})
    assert (found["trainer.gradient_clip_val"], found["data.val_fraction"]) == ("null", "0.0")
    found = collected({**given, "clip_grad_norm": 0.5})
    assert found["trainer.gradient_clip_val"] == "0.5"


def test_a_switch_that_is_off_is_not_missed_where_another_is_on() -> None:
    given = {
        "per_device_train_batch_size": 2,
        "gradient_checkpointing": False,
        "fsdp_config": {"activation_checkpointing": True},
    }
    found = migration(written("given.json", given))
    assert "+callbacks=gradient_checkpointing" in found["overrides"]
    assert found["no_counterpart"] == []
