"""Let a checkpoint write: it is loaded as `predict` loads it, and the model's own `generate` draws.

The prompt is the only batch of a `Trainer.predict` whose step generates, so that precision, adapters and
quantization are those of the run. The compiler is left out: it would compile for each length of the text.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_eff.commands._saved_run import SavedRun, explained_loading
from lightning_eff.core.errors import ConfigError, UsageError

NEEDED = ("num_tokens", "generator", "temperature", "top_k", "top_p")
"""Keywords that a module's `generate` needs; `stop_ids` and `on_token` are given if it takes them."""
LEFT_OUT = ("torch_compile",)
INCOMPLETE = "\ufffd"
"""What a tokenizer decodes bytes to that are not a whole character yet."""


@dataclass(frozen=True)
class Asked:
    """What the user has asked for; the fields are the options of the verb."""

    prompt: str
    is_chat: bool
    system: str | None
    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    num_samples: int
    seed: int

    def describe(self) -> str:
        """Return how tokens are drawn."""
        if not self.temperature:
            return "the likeliest token each time"
        limits = {"top_k": self.top_k, "top_p": self.top_p}
        shown = [f"{name}={value}" for name, value in limits.items() if value is not None]
        return ", ".join([f"temperature={self.temperature:g}", *shown, f"seed={self.seed}"])


def generate(saved: SavedRun, asked: Asked, write: Callable[[str], None] | None) -> dict[str, Any]:
    """Load a checkpoint and continue the prompt; return what was written, in plain types.

    Args:
        saved: Config and checkpoint.
        asked: Prompt and options.
        write: Gets prompt and text, piece by piece as they come, and nothing before the first token; None if
            nothing is to be shown meanwhile.

    Raises:
        ConfigError: The model is no language model, the prompt is too long, or the checkpoint does not fit.
        UsageError: There is no chat template, or it rejects the conversation.
    """
    from lightning_eff.config.ckpt_path import read_for

    trainer, data, model = _built(saved)
    step = read_for(saved.checkpoint, trainer).get("global_step")
    keywords = _keywords(model, data)
    tokenizer = _Tokenizer(data)
    ids = tokenizer.prompt_ids(asked)
    _check_length(model, len(ids), asked)
    where = f"{saved.checkpoint} (ckpt_path={saved.which}, step {step})"
    sys.stderr.write(f"generate: {where}; {len(ids)} tokens of prompt; {asked.describe()}\n")
    text = _Text(tokenizer, ids, write, lead="" if asked.is_chat else asked.prompt)
    offered = {"stop_ids": tokenizer.stop_ids, "on_token": text.add if write is not None else None}
    taken = {name: value for name, value in offered.items() if name in keywords}
    drawn = _drawn(trainer, model, saved, asked, ids, taken)
    rows = [tokenizer.cut(row[len(ids) :]) for row in drawn]
    texts = [text.decode(row) for row in rows]
    text.show(texts[0])
    return {
        "checkpoint": str(saved.checkpoint),
        "ckpt_path": saved.which,
        "step": step,
        "model": type(model).__name__,
        "num_prompt_tokens": len(ids),
        **asdict(asked),
        "tokens": rows,
        "texts": texts,
        "notes": saved.notes,
    }


def _drawn(
    trainer: pl.Trainer, model: Any, saved: SavedRun, asked: Asked, ids: list[int], keywords: dict[str, Any]
) -> list[list[int]]:
    """Return prompt and drawn tokens of each sample, by a `predict` whose step generates."""
    drawn: list[Tensor] = []

    def predict_step(batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG001 - Lightning's signature
        drawn.append(
            model.generate(
                batch.expand(asked.num_samples, -1),
                num_tokens=asked.max_new_tokens,
                generator=torch.Generator().manual_seed(asked.seed),
                **{name: getattr(asked, name) for name in ("temperature", "top_k", "top_p")},
                **keywords,
            )
        )
        return drawn[-1]

    model.predict_step = predict_step
    loader: DataLoader[Tensor] = DataLoader([torch.tensor(ids)])  # pyright: ignore[reportArgumentType]
    with explained_loading("generate", saved.checkpoint):
        trainer.predict(
            model, loader, ckpt_path=saved.checkpoint, weights_only=True, return_predictions=False
        )
    return drawn[0].tolist()


def _built(saved: SavedRun) -> tuple[pl.Trainer, Any, Any]:
    """Build the run's Trainer, data and model, as `train` does, without what only training needs."""
    from lightning_eff import run

    kept = {k: v for k, v in (saved.values.get("callbacks") or {}).items() if k not in LEFT_OUT}
    values: dict[str, Any] = dict(saved.values) | {"logger": None, "monitors": {}, "callbacks": kept}
    values["trainer"] = values["trainer"] | {"limit_predict_batches": 1}
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    trainer = run.build_trainer(values)
    data = run.make("data", values["data"])
    pl.seed_everything(values["seed"], workers=True, verbose=False)
    return trainer, data, run.make("model", values["model"])


def _keywords(model: Any, data: Any) -> set[str]:
    """Return the keywords of a model's `generate`, once the data module has its tokenizer.

    Raises:
        ConfigError: It is no language model, or its `generate` lacks one that is needed.
    """
    if callable(getattr(model, "generate", None)) and not hasattr(data, "tokenizer"):
        data.prepare_data()  # a tokenizer that is trained on the text: both are in the cache
        data.setup("predict")
    if not callable(getattr(model, "generate", None)) or not hasattr(data, "tokenizer"):
        names = f"{type(model).__name__} on {type(data).__name__}"
        allowed = "a language model: a module with generate() and a data module with a tokenizer"
        raise ConfigError(key="", value=f"generate cannot run with {names}", allowed=allowed)
    parameters = inspect.signature(model.generate).parameters
    missing = [name for name in NEEDED if name not in parameters]
    if missing:
        allowed = f"generate(tokens, *, {', '.join(NEEDED)}); {', '.join(missing)} missing"
        raise ConfigError(key="", value=f"{type(model).__name__}.generate cannot be called", allowed=allowed)
    return set(parameters)


def _check_length(model: Any, num_tokens: int, asked: Asked) -> None:
    """Reject a prompt that the model cannot see whole, and a text that is longer than it was made for."""
    longest = getattr(model, "max_length", None)
    context = getattr(model, "context_length", longest)
    if isinstance(context, int) and num_tokens > context:
        allowed = f"at most {context}, which is the context of the model"
        raise ConfigError(
            key="",
            value=f"the prompt has {num_tokens} tokens",
            allowed=allowed,
            remedies=["a shorter prompt"],
        )
    if isinstance(longest, int) and num_tokens + asked.max_new_tokens > longest:
        left = longest - num_tokens
        allowed = (
            f"at most {left}: the prompt has {num_tokens} of the {longest} tokens of the model's context"
        )
        remedies = [f"--max-new-tokens {left}"] if left else ["a shorter prompt"]
        raise ConfigError(
            key="--max-new-tokens", value=asked.max_new_tokens, allowed=allowed, remedies=remedies
        )


class _Tokenizer:
    """The tokenizer of a data module: of the library tokenizers, or of transformers."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._tokenizer: Any = data.tokenizer
        self._training: Any = getattr(data, "training_tokenizer", None)
        end = getattr(self._training or self._tokenizer, "eos_id" if self._training else "eos_token_id", None)
        self.stop_ids: list[int] = [] if end is None else [end]

    def prompt_ids(self, asked: Asked) -> list[int]:
        """Return the tokens of the prompt, or of the conversation up to the answer."""
        if not asked.is_chat:
            if self._training is not None:
                return self._training.encode_prompt(asked.prompt)
            encoded = self._tokenizer.encode(asked.prompt)
            return list(getattr(encoded, "ids", encoded))
        turns = [{"role": "system", "content": asked.system}] if asked.system is not None else []
        turns.append({"role": "user", "content": asked.prompt})
        try:
            if self._training is not None and (self._training.has_own_template or self._data.field != "text"):
                return self._training.encode_chat_prompt(turns)
        except ValueError as error:
            text = f"generate: {error}"
            raise UsageError(text) from error
        name = type(self._data).__name__
        text = f"generate: --chat needs a chat template: the tokenizer of {name} has none"
        text += ", and its texts are no conversations\n  try: without --chat"
        text += "\n  try: data=chat, if that is what the run was trained with" if self._training else ""
        raise UsageError(text)

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def cut(self, ids: list[int]) -> list[int]:
        """Return the tokens before the one that ends the text."""
        ends = [index for index, token in enumerate(ids) if token in self.stop_ids]
        return ids[: ends[0]] if ends else ids


class _Text:
    """The text behind a prompt, of which whole characters are written as soon as they are there.

    Prompt and text are decoded as one, since a tokenizer may drop the space before a first word. `lead` is
    written before the first piece, so that a checkpoint that cannot be loaded leaves nothing behind.
    """

    def __init__(
        self,
        tokenizer: _Tokenizer,
        prompt: Sequence[int],
        write: Callable[[str], None] | None,
        *,
        lead: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._start = len(tokenizer.decode(prompt))
        self._write = write
        self._lead = lead
        self._ids: list[int] = []
        self._shown = ""

    def add(self, tokens: Tensor) -> None:
        """Write what the next token of the only row makes of the text."""
        self._ids.append(int(tokens[0]))
        text = self.decode(self._tokenizer.cut(self._ids))
        if not text.endswith(INCOMPLETE):
            self.show(text)

    def show(self, text: str) -> None:
        """Write what is not shown yet of the text."""
        if self._write is not None:
            self._write(self._lead + text[len(self._shown) :])
            self._lead, self._shown = "", text

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some tokens behind the prompt."""
        return self._tokenizer.decode([*self._prompt, *ids])[self._start :]
