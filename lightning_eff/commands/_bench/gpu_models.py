"""Parts of `bench --suite gpu` about models: attention, the loss, float8, long sequences."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name
from torch.utils.checkpoint import checkpoint

from lightning_eff.commands._bench.gpu_suite import Measurement, Part, Setting, SkippedError
from lightning_eff.commands._bench.turns import peak_bytes, sync, take_turns
from lightning_eff.core import machine
from lightning_eff.core.attention_backends import AttentionCall, choose
from lightning_eff.kernels import devices

BF16 = torch.bfloat16
BACKENDS = {
    "cudnn": "_scaled_dot_product_cudnn_attention", "flash": "_scaled_dot_product_flash_attention",
    "efficient": "_scaled_dot_product_efficient_attention", "math": "_scaled_dot_product_attention_math",
}  # fmt: skip
"""Names of attention's backends, by the operator that the profiler shows."""
CASES = (
    "plain", "causal", "boolean mask", "additive mask", "trained mask", "dropout", "grouped heads", "float32",
    "other head size of values", "head size 320", "three axes", "nn.MultiheadAttention",
)  # fmt: skip
LOSS_SIZES = (8192, 4096, 128256)
"""Tokens, channels and vocabulary of Llama 3 8B."""
FLOAT8_RECIPES = ("tensorwise", "rowwise")
GPT = "lightning_eff.models.gpt"
"""Named as recipes name it: the suite imports none of the models that it trains."""
LORA_LAYERS = ["qkv", "out", "up", "down"]
LONG_SIZES = {"vocab_size": 128256, "num_layers": 36, "d_model": 4096, "num_heads": 32}
"""Of a GPT with about as many parameters, layers and channels as Llama 3 8B."""
TINY_SIZES = {"vocab_size": 100, "num_layers": 2, "d_model": 32, "num_heads": 2}
ROWS_OF_LOSS = 4096
"""Tokens whose logits exist at once in the long sequences."""


def attention(setting: Setting) -> dict[str, Measurement]:
    """Return the twelve calls of `scaled_dot_product_attention`."""
    return {name: partial(find_backend, name, setting) for name in CASES}


def find_backend(name: str, setting: Setting) -> dict[str, Any]:
    """Run a case forward and backward, and return which backend the profiler saw, and which kernels."""
    from torch.profiler import ProfilerActivity, profile

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else torch 2.13's profiler prints when it starts
    call, expected = _attention_case(name, setting)
    call()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.device.type == "cuda" else [])]
    with profile(activities=activities) as seen:
        call()
        sync(setting.device)
    events = seen.key_averages()
    names = [event.key for event in events]
    backend = next((key for key, op in BACKENDS.items() if any(op in name for name in names)), "none")
    kernels = [event.key for event in events if "CUDA" in str(event.device_type)]
    return {"backend": backend, "expected": expected, "kernels": kernels}


def _attention_case(name: str, setting: Setting) -> tuple[Callable[[], None], str]:
    """Return a case and the backend that the table of torch's rules expects; `none` without the function.

    Queries, keys and values are [B, H, T, D] in bfloat16, but for what the case's name says.
    """
    length, heads = setting.size(2048, 32), setting.size(16, 4)
    size = 320 if name == "head size 320" else setting.size(128, 16)
    dtype = torch.float32 if name == "float32" else BF16
    if name == "nn.MultiheadAttention":
        layer = nn.MultiheadAttention(heads * size, heads, batch_first=True)
        layer.to(setting.device, dtype)
        x = torch.randn(2, length, heads * size, device=setting.device, dtype=dtype)
        return lambda: layer(x, x, x)[0].sum().backward(), "none"

    def made(num_heads: int, size: int) -> Tensor:
        shape = (2, num_heads, length, size)
        shape = shape[1:] if name == "three axes" else shape
        return torch.randn(shape, device=setting.device, dtype=dtype, requires_grad=True)

    num_kv = heads // 4 if name == "grouped heads" else heads
    q, k = made(heads, size), made(num_kv, size)
    v = made(num_kv, size // 2 if name == "other head size of values" else size)
    options: dict[str, Any] = {"is_causal": name in ("causal", "dropout", "head size 320")}
    options |= {"enable_gqa": True} if name == "grouped heads" else {}
    options |= {"dropout_p": 0.1} if name == "dropout" else {}
    if name == "boolean mask":
        options["attn_mask"] = torch.ones(length, length, device=setting.device).tril().bool()
    elif name in ("additive mask", "trained mask"):
        mask = torch.zeros(length, length, device=setting.device, dtype=dtype)
        options["attn_mask"] = mask.requires_grad_(name == "trained mask")
    expected = choose(AttentionCall.of(q, k, v, **options), devices.of(setting.device).capability).backend
    return lambda: F.scaled_dot_product_attention(q, k, v, **options).sum().backward(), expected


def losses(setting: Setting) -> dict[str, Measurement]:
    """Return the ways in which torch computes the loss of a large vocabulary."""
    return {name: partial(time_loss, name, setting) for name in ("eager", "linear_cross_entropy", "compiled")}


def time_loss(name: str, setting: Setting) -> dict[str, Any]:
    """Time forward and backward of one way, and count its memory; all have the same inputs."""
    tokens, channels, vocabulary = (setting.size(full, 64) for full in LOSS_SIZES)
    generator = torch.Generator(setting.device).manual_seed(0)
    options: dict[str, Any] = {"device": setting.device, "generator": generator}
    x = torch.randn(tokens, channels, **options).to(BF16).requires_grad_()
    weight = torch.randn(vocabulary, channels, **options).mul_(channels**-0.5).to(BF16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), **options)
    function: Any = eager_loss
    if name == "linear_cross_entropy":
        function = getattr(F, name, None)
        if function is None:
            text = f"torch {torch.__version__} has no F.linear_cross_entropy"
            raise SkippedError(text)
    elif name == "compiled":
        function = compiled(eager_loss, setting)
    values: list[float] = []

    def step() -> None:
        x.grad = weight.grad = None
        loss = function(x, weight, targets)
        loss.backward()
        values[:] = [loss.detach()]

    num_bytes = peak_bytes(step, setting.device)
    times = take_turns({name: step}, setting.device, calls_per_turn=1)[name]
    return {"loss": float(values[0]), "peak_bytes": num_bytes} | times


def eager_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Compute the loss as a training step does: all logits, in float32."""
    return F.cross_entropy((x @ weight.T).float(), targets)


def compiled(function: Any, setting: Setting) -> Any:
    """Compile a function or module; on a CPU without a compiler of its own, since nothing is timed there."""
    if setting.device.type == "cuda" and machine.find_compiler("cuda") is None:
        text = "torch.compile needs a C compiler: apt-get install gcc"
        raise SkippedError(text)
    return torch.compile(function, backend="inductor" if setting.device.type == "cuda" else "eager")


def float8(setting: Setting) -> dict[str, Measurement]:
    """Return a compiled block in each of torchao's recipes beside the same one in bfloat16."""
    return {recipe: partial(time_float8, recipe, setting) for recipe in FLOAT8_RECIPES}


def time_float8(recipe: str, setting: Setting) -> dict[str, Any]:
    """Time forward and backward of a block with 8,192 tokens."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    length, channels, heads = setting.size(2048, 16), setting.size(4096, 64), setting.size(32, 4)
    x = torch.randn(setting.size(4, 1), length, channels, device=setting.device, dtype=BF16)
    calls: dict[str, Any] = {}
    for name in ("bfloat16", "float8"):
        block: Any = (
            import_module(GPT).TransformerBlock(channels, heads, length, 0.0).to(setting.device, BF16)
        )
        if name == "float8":
            block = convert_to_float8_training(
                block,
                config=Float8LinearConfig.from_recipe_name(recipe),  # pyright: ignore[reportArgumentType]
            )
        calls[name] = partial(_block_step, compiled(block, setting), x.clone().requires_grad_())
    times = take_turns(calls, setting.device)
    return times | {"ratio": times["bfloat16"]["ms"] / times["float8"]["ms"]}


def _block_step(block: Any, x: Tensor) -> None:
    block(x).square().mean().backward()


def long_sequences(setting: Setting) -> dict[str, Measurement]:
    """Return one training step for each length of a sequence."""
    lengths = setting.tokens if not setting.quick else (64,)
    return {f"{length} tokens": partial(train_long, length, setting) for length in lengths}


def train_long(length: int, setting: Setting) -> dict[str, Any]:
    """Train a step of a random model of the size of Llama 3 8B with LoRA, and return its time and memory.

    Blocks are recomputed, and logits exist for some rows at a time, under a checkpoint.
    """
    model, trained = _lora_model(length, setting)
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    device, vocabulary = setting.device, model.head.weight.shape[0]

    def step(num_tokens: int) -> float:
        tokens = torch.randint(vocabulary, (1, num_tokens + 1), device=device)
        x = model.embedding(tokens[:, :-1])
        for block in model.blocks:
            x = block(x)
        targets, total = tokens[0, 1:], torch.zeros((), device=device)
        for rows, expected in zip(x[0].split(ROWS_OF_LOSS), targets.split(ROWS_OF_LOSS), strict=True):
            total = total + checkpoint(_sum_of_loss, model, rows, expected, use_reentrant=False)
        (total / num_tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(total.detach()) / num_tokens

    step(min(length, 1024))  # libraries load their kernels
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.reset_peak_memory_stats(device)
    sync(device)
    began = time.perf_counter()
    loss = step(length)
    sync(device)
    seconds = time.perf_counter() - began
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "trained": sum(parameter.numel() for parameter in trained),
        "loss": loss, "seconds": seconds, "tokens/s": length / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if is_cuda else None,
    }  # fmt: skip


def _lora_model(length: int, setting: Setting) -> tuple[Any, list[nn.Parameter]]:
    """Return a GPT in bfloat16 with adapters of rank 16, and what is trained of it."""
    from peft import LoraConfig, inject_adapter_in_model

    from lightning_eff.core.recompute import RecomputedBlock

    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with setting.device if setting.device.type == "cuda" else nullcontext():
            sizes = TINY_SIZES if setting.quick else LONG_SIZES
            model = import_module(GPT).GPT(context_length=length, tie_word_embeddings=False, **sizes)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(requires_grad=False)
    config = LoraConfig(r=16, lora_alpha=32, target_modules=LORA_LAYERS)
    inject_adapter_in_model(config, model)
    for block in model.blocks:
        RecomputedBlock(block)
    return model, [parameter for parameter in model.parameters() if parameter.requires_grad]


def _sum_of_loss(model: Any, rows: Tensor, targets: Tensor) -> Tensor:
    logits = model.head(model.norm(rows)).float()
    return F.cross_entropy(logits, targets, reduction="sum")


PARTS = (
    Part(name="attention", about="which backend computes attention", cases=attention, limit_s=20),
    Part(name="loss", about="the loss of a large vocabulary", cases=losses, limit_s=40),
    Part(
        name="float8", about="a compiled block in float8 beside bfloat16", cases=float8, limit_s=70,
        needs=("torchao",),
    ),
    Part(
        name="long", about="a step of 8B parameters with LoRA at a long sequence", cases=long_sequences,
        limit_s=180, least_s=100, needs=("peft",),
    ),
)  # fmt: skip
