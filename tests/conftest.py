"""Fixtures and environment of all tests; shared helpers are in tests/support/.

Nothing here imports torch at import time, because the process that distributes tests to the workers imports
this module too, and the workers would wait for it.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import settings

from lightning_eff import cli

pytest.register_assert_rewrite("tests.support")

from tests.support.command_line import TINY  # noqa: E402 - only later imports have rewritten assertions
from tests.support.processes import adopt_orphans, children, end_children  # noqa: E402

if TYPE_CHECKING:
    from tests.support.models import Deep, Net

# Two workers share two cores: more threads would compete. Child processes inherit the variable.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.pop("PL_GLOBAL_SEED", None)
adopt_orphans()
# Deadlines would be assertions on wall time, and a database would be left behind.
settings.register_profile("fast", max_examples=25, derandomize=True, deadline=None, database=None)
settings.register_profile("full", max_examples=1000, deadline=None, database=None)
settings.load_profile("fast")  # `make test-full` says --hypothesis-profile=full
LOGGERS = ("lightning", "lightning.fabric", "lightning.pytorch", "lightning_eff.config.composition", "torch")


def pytest_configure(config: pytest.Config) -> None:
    """Treat libraries' warnings as errors only with the tested versions: others have new deprecations."""
    if not (sys.version_info[:2] == (3, 11) and version("torch").startswith("2.13.")):
        config.addinivalue_line("filterwarnings", "default")
        for kind in ("NoEffectWarning", "ConflictWarning", "CheckpointWarning", "SlowPathWarning"):
            config.addinivalue_line("filterwarnings", f"error::lightning_eff.core.errors.{kind}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before each test, and before module-scoped fixtures, so that the order of tests has no effect."""
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """Restore environment, log levels and rank after each test, and fail a test that leaves processes.

    Lightning leaves its seed, its rank and the ranks' address in the environment, which children inherit.
    """
    from lightning_utilities.core import rank_zero
    from lightning_utilities.core.rank_zero import rank_zero_only

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


@pytest.fixture
def net() -> Callable[..., Net]:
    """Return a function that makes models with equal weights, and sets the same random state each time."""
    from tests.support.models import Net, seeded

    return functools.partial(seeded, Net)


@pytest.fixture
def deep() -> Callable[..., Deep]:
    """Return such a function for models with repeated blocks."""
    from tests.support.models import Deep, seeded

    return functools.partial(seeded, Deep)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Return the report's clock, which advances only when a test sets `now`."""
    watch = SimpleNamespace(now=100.0)
    for module in ("meter", "step_time"):
        stopped = SimpleNamespace(perf_counter=lambda: watch.now)
        monkeypatch.setattr(f"lightning_eff.report.{module}.time", stopped)
    return watch


@pytest.fixture(scope="module")
def frozen_heap() -> Iterator[None]:
    """Exclude existing objects from garbage collection: visiting all of PyTorch's takes a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def text_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small folder of Python files, which is tokenized quickly."""
    folder = tmp_path_factory.mktemp("source")
    for index in range(8):
        lines = [f"def function_{index}_{i}(x):\n    return x + {i}\n" for i in range(60)]
        (folder / f"module_{index}.py").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a Llama of two layers, 32 wide, and its tokenizer."""
    import torch
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
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tiny(text_cache: Path, empty_folder: Path) -> list[str]:
    """Return overrides for a tiny run; the current folder has only a copy of the small text."""
    source = empty_folder / "source"
    shutil.copytree(text_cache, source)
    return [*TINY, f"data.source_dir={source}", "data.vocab_size=300"]


@pytest.fixture
def command(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> Iterator[Callable[..., tuple[int, str, str]]]:
    """Return the command line as a function: exit code, standard output, log messages and standard error.

    With `code`, another exit code fails the test.
    """

    def call(*words: str, code: int | None = None) -> tuple[int, str, str]:
        capfd.readouterr()
        caplog.clear()
        with caplog.at_level(logging.INFO):
            found = cli.main(words)
        out, err = capfd.readouterr()
        said = "\n".join([*caplog.messages, err])
        assert code in (None, found), said
        return found, out, said

    yield call
    for name, module in list(sys.modules.items()):  # another test has its own my_project
        if tmp_path in Path(getattr(module, "__file__", None) or "/").parents:
            del sys.modules[name]
