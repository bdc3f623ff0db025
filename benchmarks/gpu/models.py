"""Measure parts of models: attention, float8 blocks, offloaded activations, convolutions, long sequences.

    python benchmarks/gpu/models.py attention float8 offload conv lora long --out results --tokens 32768

A long sequence is a training step of a random model of the size of Llama 3 8B with LoRA.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from _suite import Measurement, Setting, in_turns, main, one_case, require, sync
from lightning_eff.callbacks.gradient_checkpointing import RecomputedBlock
from lightning_eff.core.attention_backends import AttentionCall, choose
from lightning_eff.core.host_offload import HostOffload
from lightning_eff.kernels import devices
from lightning_eff.kernels.cross_entropy import linear_cross_entropy
from lightning_eff.models.gpt import GPT, TransformerBlock

BF16 = torch.bfloat16
BACKENDS = {
    "cudnn": "_scaled_dot_product_cudnn_attention", "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention", "math": "_scaled_dot_product_attention_math",
}  # fmt: skip
"""Names of attention's backends, by the operator that the profiler shows."""
ATTENTION = (
    "plain", "causal", "boolean mask", "additive mask", "trained mask", "dropout", "grouped heads", "float32",
    "other head size of values", "head size 320", "three axes", "nn.MultiheadAttention",
)  # fmt: skip
LONG_SIZES = {"vocab_size": 128256, "num_layers": 36, "d_model": 4096, "num_heads": 32}
"""Of a GPT with about as many parameters, layers and channels as Llama 3 8B."""
TINY_SIZES = {"vocab_size": 100, "num_layers": 2, "d_model": 32, "num_heads": 2}


def attention(setting: Setting) -> dict[str, Measurement]:
    """Return twelve calls of `scaled_dot_product_attention`."""
    return {name: partial(find_backend, name, setting) for name in ATTENTION}


def find_backend(name: str, setting: Setting) -> dict[str, Any]:
    """Run a case forward and backward, and return which backend the profiler saw, and which kernels."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints when it starts
    call, expected = attention_case(name, setting)
    call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.is_cuda else [])]
    with profile(activities=activities) as profiler:
        call()
        sync(setting.device)
    events = profiler.key_averages()
    backend = next(
        (key for key, operator in BACKENDS.items() if any(operator in event.key for event in events)), "none"
    )
    kernels = [event.key for event in events if "CUDA" in str(event.device_type)]
    return {"backend": backend, "expected": expected, "kernels": kernels}


def attention_case(name: str, setting: Setting) -> tuple[Callable[[], None], str]:
    """Return a case and the backend that the table of torch's rules expects; `none` without the function.

    Queries, keys and values are [B, H, T, D] in bfloat16, but for what the case's name says.
    """
    length, heads = setting.size(2048, 32), setting.size(16, 4)
    size = 320 if name == "head size 320" else setting.size(128, 16)
    how: dict[str, Any] = {"device": setting.device, "dtype": torch.float32 if name == "float32" else BF16}
    if name == "nn.MultiheadAttention":
        layer = nn.MultiheadAttention(heads * size, heads, batch_first=True, **how)
        x = torch.randn(2, length, heads * size, **how)
        return lambda: layer(x, x, x)[0].sum().backward(), "none"
    batch = () if name == "three axes" else (2,)
    num_kv = heads // 4 if name == "grouped heads" else heads
    value_size = size // 2 if name == "other head size of values" else size
    q, k, v = (
        torch.randn(*batch, h, length, d, **how, requires_grad=True)
        for h, d in ((heads, size), (num_kv, size), (num_kv, value_size))
    )
    options: dict[str, Any] = {"is_causal": name in ("causal", "dropout", "head size 320")}
    if name == "grouped heads":
        options["enable_gqa"] = True
    elif name == "dropout":
        options["dropout_p"] = 0.1
    elif name == "boolean mask":
        options["attn_mask"] = torch.ones(length, length, device=setting.device).tril().bool()
    elif name in ("additive mask", "trained mask"):
        options["attn_mask"] = torch.zeros(length, length, **how).requires_grad_(name == "trained mask")
    expected = choose(AttentionCall.of(q, k, v, **options), devices.of(setting.device).capability).backend
    return lambda: functional.scaled_dot_product_attention(q, k, v, **options).sum().backward(), expected


def make_block(channels: int, heads: int, length: int, setting: Setting) -> TransformerBlock:
    """Return a block in bfloat16, made on the device, where its weights are drawn in no time."""
    with setting.device:
        return TransformerBlock(channels, heads, length, 0.0).to(BF16)


def block_step(block: Any, x: Tensor) -> None:
    """Compute a block forward and backward."""
    block(x).square().mean().backward()


def time_float8(setting: Setting) -> dict[str, Any]:
    """Measure a compiled block with 8,192 tokens in bfloat16 and in each of torchao's recipes."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    length, channels, heads = setting.size(2048, 16), setting.size(4096, 64), setting.size(32, 4)
    x = torch.randn(setting.size(4, 1), length, channels, device=setting.device, dtype=BF16)
    calls: dict[str, Callable[[], None]] = {}
    for recipe in ("", "tensorwise", "rowwise"):
        block: Any = make_block(channels, heads, length, setting)
        if recipe:
            block = convert_to_float8_training(block, config=Float8LinearConfig.from_recipe_name(recipe))
        # On a CPU nothing is timed: no compiler is needed.
        compiled = torch.compile(block, backend="inductor" if setting.is_cuda else "eager")
        calls[recipe or "bfloat16"] = partial(block_step, compiled, x.clone().requires_grad_())
    return in_turns(calls, setting)


def time_offload(setting: Setting) -> dict[str, Any]:
    """Measure recomputed blocks whose inputs stay on the device, and whose inputs are copied to the host."""
    channels, heads, length = setting.size(4096, 64), setting.size(32, 4), setting.size(4096, 32)
    x = torch.randn(setting.size(4, 1), length, channels, device=setting.device, dtype=BF16)
    calls: dict[str, Callable[[], None]] = {}
    for name, host in (("on the device", None), ("offloaded", HostOffload())):
        blocks = [make_block(channels, heads, length, setting) for _ in range(setting.size(6, 2))]
        for block in blocks:
            RecomputedBlock(block, host=host)
        calls[name] = partial(block_step, nn.Sequential(*blocks), x.clone().requires_grad_())
    return in_turns(calls, setting, calls_per_turn=1)


def time_conv(setting: Setting) -> dict[str, Any]:
    """Measure a convolution, norm and ReLU under autocast in both memory formats."""
    batch, channels, side = setting.size(64, 2), setting.size(256, 16), setting.size(56, 16)
    calls: dict[str, Callable[[], None]] = {}

    def step(model: nn.Module, x: Tensor) -> None:
        with torch.autocast(setting.device.type, dtype=BF16):
            result = model(x).square().mean()
        result.backward()

    for layout in (torch.contiguous_format, torch.channels_last):
        convolution = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        model: Any = nn.Sequential(convolution, nn.BatchNorm2d(channels), nn.ReLU()).to(setting.device)
        model.to(memory_format=layout)
        x = torch.randn(batch, channels, side, side, device=setting.device).to(memory_format=layout)
        calls[str(layout).removeprefix("torch.")] = partial(step, model, x.requires_grad_())
    return in_turns(calls, setting)


def time_transformers(setting: Setting) -> dict[str, Any]:
    """Train GPT-2 small with the defaults of transformers' Trainer, at the sizes of `training.py speed`."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    length, batch_size, steps = setting.size(1024, 16), setting.size(16, 2), setting.size(20, 2)
    config = GPT2Config(n_positions=length, vocab_size=setting.size(16384, 100), n_layer=setting.size(12, 1))
    model = GPT2LMHeadModel(config)
    tokens = torch.randint(100, (steps * batch_size, length))
    samples: Any = [{"input_ids": each, "labels": each} for each in tokens]
    options: dict[str, Any] = {
        "per_device_train_batch_size": batch_size,
        "report_to": [],
        "save_strategy": "no",
    }
    with TemporaryDirectory() as folder:
        for num_steps in (2, steps):  # the first call warms up
            arguments = TrainingArguments(folder, max_steps=num_steps, use_cpu=not setting.is_cuda, **options)
            metrics = Trainer(model, arguments, train_dataset=samples).train().metrics
    return {"tokens/s": steps * batch_size * length / metrics["train_runtime"]}


def lora(setting: Setting) -> dict[str, Measurement]:
    """Return LoRA of the large model on two sequences, as in published measurements of an H100."""
    require("peft")
    length = setting.size(4096, 64)
    return {f"2 x {length} tokens": partial(train_lora, length, setting, num_sequences=2, num_steps=3)}


def long(setting: Setting) -> dict[str, Measurement]:
    """Return one training step of a long sequence."""
    require("peft")
    length = setting.size(setting.tokens, 64)
    return {f"{length} tokens": partial(train_lora, length, setting)}


def train_lora(
    length: int, setting: Setting, *, num_sequences: int = 1, num_steps: int = 1
) -> dict[str, Any]:
    """Train with recomputed blocks and the tiled loss, and return time and memory of a step."""
    model, trained = lora_model(length, setting)
    optimizer, device = torch.optim.AdamW(trained, lr=1e-4), setting.device

    def step(num_tokens: int) -> float:
        sizes = (num_sequences, num_tokens + 1)
        tokens = torch.randint(model.head.weight.shape[0], sizes, device=device)
        x = model.embedding(tokens[:, :-1])
        for block in model.blocks:
            x = block(x)
        loss = linear_cross_entropy(model.norm(x), model.head.weight, tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    loss = step(min(length, 1024))  # libraries load their kernels
    if setting.is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    sync(device)
    began = time.perf_counter()
    for _ in range(num_steps):
        loss = step(length)
    sync(device)
    seconds = (time.perf_counter() - began) / num_steps
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in trained),
        "loss": loss, "seconds": seconds, "tokens/s": num_sequences * length / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if setting.is_cuda else None,
    }  # fmt: skip


def lora_model(length: int, setting: Setting) -> tuple[Any, list[nn.Parameter]]:
    """Return a GPT in bfloat16 with adapters of rank 16, and what is trained of it."""
    from peft import LoraConfig, inject_adapter_in_model

    sizes = TINY_SIZES if setting.smoke else LONG_SIZES
    with setting.device:
        model: Any = GPT(context_length=length, tie_word_embeddings=False, **sizes)
    model.to(BF16).requires_grad_(requires_grad=False)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=["qkv", "out", "up", "down"])
    inject_adapter_in_model(config, model)
    for block in model.blocks:
        RecomputedBlock(block)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


if __name__ == "__main__":
    parts = {
        "attention": attention,
        "trainer": one_case("GPT-2 small", time_transformers, "transformers", "accelerate"),
        "float8": one_case("block", time_float8, "torchao"),
        "offload": one_case("6 blocks, 16,384 tokens", time_offload),
        "conv": one_case("3x3, 256 channels", time_conv),
        "lora": lora,
        "long": long,
    }
    main(__doc__, parts)
