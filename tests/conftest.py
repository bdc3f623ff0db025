"""A small model and its data, a Trainer for them, and the command line in this process."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_utilities.core import rank_zero
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_eff import cli

# Two workers share two cores: more threads would wait for each other. Child processes inherit it.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
os.environ.pop("PL_GLOBAL_SEED", None)
LOGGERS = ("lightning", "lightning.fabric", "lightning.pytorch", "lightning_eff.config.composition", "torch")


def adopt_orphans() -> None:
    """Become the parent of processes whose own parent dies, so that none escapes `children`."""
    set_child_subreaper = 36
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        ctypes.CDLL(None).prctl(set_child_subreaper, 1, 0, 0, 0)


adopt_orphans()
SHARED = ("resource_tracker", "forkserver", "compile_worker")
"""Processes that multiprocessing and torch start once and keep for later tests."""


def children() -> set[int]:
    """Return the processes that this one started, or that came to it."""
    lists = Path("/proc/self/task").glob("*/children")
    return {int(word) for path in lists for word in path.read_text().split()}


def command_of(process: int) -> str:
    """Return what a process was started with; nothing of one that has ended, and of one that is shared."""
    try:
        command = Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""
    return "" if any(name in command for name in SHARED) else command


def end_children(before: set[int]) -> list[str]:
    """Return the new processes that do not end by themselves, and end them."""
    left: dict[int, str] = {}
    for attempt in range(500):
        left = {process: command for process in children() - before if (command := command_of(process))}
        if not left:
            return []
        if attempt == 0:
            gc.collect()  # workers end with their loader
        time.sleep(0.02)
    found = list(left.values())
    while left:  # what they had started comes to this process
        for process in left:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
        left = {process: command for process in children() - before if (command := command_of(process))}
    return found


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Let no later test be seeded by this one, be silent as its rank, or start ranks of its job.

    Lightning leaves its seed, its rank and where ranks meet in the environment, which children inherit.
    """
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    environ = {name: value for name, value in os.environ.items() if name != "PL_GLOBAL_SEED"}
    processes = children()
    rank_zero.log = logging.getLogger("lightning.pytorch.utilities.rank_zero")  # pytorch_lightning takes it
    yield
    left = end_children(processes)
    assert not left, f"processes that this test left behind: {left}"
    for name in os.environ.keys() - environ.keys() - {"KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"}:
        del os.environ[name]
    os.environ.update({name: value for name, value in environ.items() if os.environ.get(name) != value})
    rank_zero_only.rank = 0
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


class Net(pl.LightningModule):
    """Two linear layers with dropout between them, trained by SGD with momentum."""

    def __init__(self, *, width: int = 16, dropout: float = 0.1, lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.first = nn.Linear(8, width)
        self.dropout = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.second = nn.Linear(width, 3)
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.dropout(F.relu(self.first(x)))))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x).float(), y)
        self.losses.append(float(loss.detach()))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]).float(), batch[1]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)


class Layer(nn.Module):
    """A residual layer with dropout inside."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(F.gelu(self.linear(self.norm(x))))


class Deep(Net):
    """A Net with three repeated blocks in the middle."""

    def __init__(self, *, width: int = 16, dropout: float = 0.1, lr: float = 0.05) -> None:
        super().__init__(width=width, dropout=dropout, lr=lr)
        self.blocks = nn.ModuleList(Layer(width, dropout) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(F.relu(self.first(x)))
        for block in self.blocks:
            x = block(x)
        return self.second(self.norm(x))


def make_loader(num_samples: int = 40, batch_size: int = 4) -> DataLoader[tuple[Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_samples, 8, generator=generator)
    y = torch.randint(0, 3, (num_samples,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


def make_trainer(**keywords: object) -> pl.Trainer:
    quiet = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_epochs": -1,
        "max_steps": 10,
    }
    return pl.Trainer(**(quiet | keywords))  # pyright: ignore[reportArgumentType]


@pytest.fixture
def net() -> Callable[..., Net]:
    """Return a maker of models that all begin with the same weights and the same random state."""

    return _maker(Net)


@pytest.fixture
def deep() -> Callable[..., Deep]:
    """Return a maker of models with repeated blocks."""
    return _maker(Deep)


def _maker(kind: type[Net]) -> Callable[..., Any]:
    def make(**keywords: float) -> Net:
        torch.manual_seed(1)
        model = kind(**keywords)  # pyright: ignore[reportArgumentType]
        torch.manual_seed(2)
        return model

    return make


TINY = [
    "trainer.accelerator=cpu",
    "trainer.max_steps=2",
    "trainer.val_check_interval=2",
    "trainer.limit_val_batches=1",
    "trainer.num_sanity_val_steps=0",
    "data.batch_size=2",
    "data.context_length=16",
    "model.d_model=16",
    "model.num_layers=1",
    "model.num_heads=2",
    "monitors.text_sample.num_tokens=3",
]
"""Overrides that make the language-model recipes train two steps in under a second."""


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of Python files that is tokenized in no time."""
    folder = tmp_path_factory.mktemp("source")
    for index in range(8):
        lines = [f"def function_{index}_{i}(x):\n    return x + {i}\n" for i in range(60)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Llama of two layers, 32 wide, and a tokenizer of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("hub") / "tiny_llama"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe = trainers.BpeTrainer(
        vocab_size=272, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["the cat sat on the mat"], bpe)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(
        folder
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=272, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def tiny(text_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return overrides for a tiny run, from an empty current folder that holds a copy of the small text."""
    source = tmp_path / "source"
    shutil.copytree(text_cache, source)
    monkeypatch.chdir(tmp_path)
    return [*TINY, f"data.source_dir={source}", "data.vocab_size=300"]


@pytest.fixture
def command(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Return the command line as a function: exit code, standard output, log messages and standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        capfd.readouterr()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            code = cli.main(words)
        out, err = capfd.readouterr()
        return code, out, "\n".join([*caplog.messages, err])

    yield call
    for name, module in list(sys.modules.items()):  # another test has a my_project of its own
        if tmp_path in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]


def in_interpreter(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python where Triton's interpreter runs the kernels: it is chosen when they are imported."""
    return subprocess.run(
        [sys.executable, "-W", "ignore", *words], cwd=Path(__file__).parent.parent,
        env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
