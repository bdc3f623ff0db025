"""Your own text or conversations for a causal language model, read with Hugging Face `datasets`.

A batch is a dictionary of integer tensors in the format of transformers: `input_ids` and `labels` [B, T],
with `position_ids` or `attention_mask`. The label of a token is the token itself; the loss compares a label
with the output one position earlier. The label is -100 where there is no target: at a document's first token,
in padding, and in all turns of a conversation except the assistant's.

`packing` selects how rows are made:

- `true`: several uncut documents per row, by best fit. Positions restart at 0 in each document, so models of
  transformers detect that attention must not cross documents. `HFCausalLM` rejects a model whose attention
  crosses documents. No target crosses documents, so each document trains as it would in a separate row. Texts
  longer than a row are split into pieces; conversations are truncated.
- `across`: one stream of all documents, cut into rows. Attention and targets cross documents, as in most
  pre-training. No text is dropped, and no row except the last is padded.
- `grouped`: one document per row; a batch has rows of similar length (transformers' `LengthGroupedSampler`).
  Documents longer than a row are truncated.
- `false`: one document per row, padded to the longest in its batch and masked. Documents longer than a row
  are truncated.

Counts of truncated and dropped documents, and the fraction of padding, are logged. A conversation is a list
of `{role, content}`. With `field=messages`, a row of the data may also have the format of ShareGPT
(`conversations`) or Alpaca (`instruction`, `input`, `output`).

`prepare_data` tokenizes all documents once, and writes the tokens to a file under `cache_dir`. The file is
read through a memory map. A row is read by its index alone, so a run can resume in the middle of an epoch
(`callbacks/exact_resume`).
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_only
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_eff.data._packing import Documents, Packing, Pieces, Rows, collate_padded
from lightning_eff.data._tokenizer import TrainingTokenizer, Turns
from lightning_eff.data.python_source import is_undamaged, save_whole

log = logging.getLogger(__name__)
_log = rank_zero_only(log.log)

PYDOC = "pydoc"
"""A path that stands for the topics of `help()`, English prose that every Python installation has."""
HUB = re.compile(
    r"hf://datasets/(?P<name>[^@:]+)(@(?P<revision>[^:]+))?(:(?P<subset>[^:]*))?(:(?P<split>.+))?"
)
BUILDERS = {
    **dict.fromkeys((".txt", ".text", ".md", ".rst"), "text"),
    **dict.fromkeys((".jsonl", ".ndjson", ".json"), "json"),
    ".parquet": "parquet",
    ".csv": "csv",
}
"""The `datasets` builder for each suffix; a named file with another suffix is read as text."""
SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bot", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation"), "tool"),
}
FORMAT = 1
"""Format version of the cache file; increase it with every change of the format."""
CHUNK = 200
"""Number of documents tokenized at once."""


class DataError(ValueError):
    """The data cannot be used with these settings; the exit code is the same as for a wrong setting."""

    exit_code = 2


class Text(pl.LightningDataModule):
    """Documents as rows of tokens with labels.

    Args:
        paths: Files, folders or patterns with `*` (text, JSON, JSON Lines, CSV or Parquet), a folder written
            by `save_to_disk` of datasets, or `pydoc` for the English prose of Python's own help. The path
            `hf://datasets/owner/name` names the training split of a data set on the hub; `@revision`,
            `:subset` and `:split` may follow the name.
        tokenizer: Name or folder of a Hugging Face tokenizer; None means a byte tokenizer with 257 tokens.
        context_length: Maximum number of tokens in a row.
        batch_size: Number of rows per batch on each rank.
        packing: True, False, "across" or "grouped", as described in the module's docstring.
        field: Column with the text or the conversation. A text file is one document.
        val_fraction: Fraction of the documents for validation, 0 to 0.5; equal in every run.
        cache_dir: Folder for tokenized documents, and for the cache of `datasets`.

    Raises:
        ValueError: A value is out of range, or the tokenizer cannot be loaded. Also raised in `prepare_data`,
            if a file cannot be read or a row has no text.
        FileNotFoundError: A path matches no file.
        ModuleNotFoundError: transformers or datasets is not installed.

    Example:
        >>> Text(context_length=1)
        Traceback (most recent call last):
        ValueError: context_length=1 must be at least 2
    """

    def __init__(
        self,
        *,
        paths: str | Sequence[str] = PYDOC,
        tokenizer: str | None = None,
        context_length: int = 256,
        batch_size: int = 8,
        packing: bool | Literal["across", "grouped"] = True,
        field: str = "text",
        val_fraction: float = 0.05,
        cache_dir: str = "outputs/cache",
    ) -> None:
        super().__init__()
        packings = (True, False, "across", "grouped")
        for key, value, is_valid, allowed in (
            ("paths", paths, bool(paths), "name at least one file or folder, or pydoc"),
            ("context_length", context_length, context_length >= 2, "be at least 2"),
            ("batch_size", batch_size, batch_size >= 1, "be at least 1"),
            ("val_fraction", val_fraction, 0.0 <= val_fraction <= 0.5, "lie between 0 and 0.5"),
            ("packing", repr(packing), packing in packings, "be true, false, across or grouped"),
        ):
            if not is_valid:
                raise ValueError(f"{key}={value} must {allowed}")
        self.sources = find_sources([paths] if isinstance(paths, str) else paths)
        self.context_length = context_length
        self.batch_size = batch_size
        self.packing: Packing = packing
        self.field = field
        self.val_fraction = val_fraction
        self.cache_dir = cache_dir
        self.training_tokenizer = TrainingTokenizer(tokenizer)
        self.tokenizer = self.training_tokenizer.tokenizer
        self.vocab_size = self.training_tokenizer.vocab_size
        """Number of rows that a model's embedding needs."""
        self.padding_fraction: float | None = None
        """Fraction of padding in the training rows, set by `setup`; None if unknown."""
        self._rows: dict[str, Rows] = {}

    @override
    def prepare_data(self) -> None:
        """Tokenize all documents, unless an undamaged cache file has their tokens."""
        self._tokenized(check=is_undamaged)

    def _tokenized(self, check: Callable[[Path], bool] = Path.is_file) -> Documents:
        opened = open_sources(self.sources, self.field, Path(self.cache_dir))
        # The file's name has a hash of everything that its content depends on, so other data get a new file.
        prints = " ".join(rows._fingerprint for _, rows in opened)  # noqa: SLF001 - datasets has no public one
        facts = f"{FORMAT} {self.field} {self.training_tokenizer.digest()} {prints}"
        file = Path(self.cache_dir) / f"text-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.pt"
        if not check(file):
            documents = read_documents(opened, self.field)
            save_whole(tokenize(documents, self.training_tokenizer), file)
        return Documents(**torch.load(file, mmap=True, weights_only=True))

    @override
    def setup(self, stage: str) -> None:
        """Split and pack the documents, in the same way in every run and on every rank."""
        if self._rows:
            return
        documents = self._tokenized()
        pieces = Pieces(documents, context_length=self.context_length, packing=self.packing)
        self._log_losses(documents, pieces)
        # Split documents, not pieces, so that no document is in both splits.
        kept = np.unique(pieces.pieces[:, 0])
        num_val = max(1, round(self.val_fraction * len(kept))) if self.val_fraction else 0
        if num_val == len(kept):
            raise DataError(
                f"val_fraction={self.val_fraction} of 1 document leaves none to train on\n"
                "  try: data.val_fraction=0, or one file a document"
            )
        # The seed is fixed, so that runs with different seeds have the same validation documents.
        order = torch.randperm(len(kept), generator=torch.Generator().manual_seed(0)).numpy()
        is_val = np.isin(pieces.pieces[:, 0], kept[order[:num_val]])
        pad_id = self.training_tokenizer.pad_id
        self._rows["train"] = pieces.rows(pieces.pieces[~is_val], pad_id)
        if num_val:
            self._rows["val"] = pieces.rows(pieces.pieces[is_val], pad_id)
        is_packed = self.packing in (True, "across")
        for split, rows in self._rows.items():
            share = f"{rows.padding_fraction:.1%} padding" if is_packed else "padded by the batch"
            _log(logging.INFO, "%s: %d rows, %s", split, len(rows), share)
        self.padding_fraction = self._rows["train"].padding_fraction if is_packed else None

    def _log_losses(self, documents: Documents, pieces: Pieces) -> None:
        """Log skipped and truncated documents.

        Raises:
            DataError: No document has a target.
        """
        num_documents, num_skipped = len(documents.ends), pieces.num_skipped
        if num_skipped == num_documents:
            raise DataError(
                f"no document has a target in its first context_length={self.context_length} tokens:"
                " they are empty, or the assistant's turns begin later"
            )
        if num_skipped:
            _log(logging.WARNING, "%d of %d documents have no target: skipped", num_skipped, num_documents)
        if pieces.num_cut:
            text = "%d of %d documents are longer than context_length=%d and were cut; %d tokens are lost"
            level = logging.WARNING if pieces.num_lost_tokens else logging.INFO
            _log(level, text, pieces.num_cut, num_documents, self.context_length, pieces.num_lost_tokens)

    @override
    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        rows = self._rows["train"]
        if self.packing != "grouped":
            return self._loader(rows, shuffle=True)
        from transformers.trainer_pt_utils import LengthGroupedSampler

        # All ranks draw the same order, and Lightning gives each rank a fraction of the rows.
        generator = torch.Generator().manual_seed(torch.initial_seed())
        sampler = LengthGroupedSampler(self.batch_size, lengths=rows.lengths.tolist(), generator=generator)
        return self._loader(rows, sampler=sampler)

    @override
    def val_dataloader(self) -> DataLoader[dict[str, Tensor]] | list[DataLoader[dict[str, Tensor]]]:
        return self._loader(self._rows["val"], shuffle=False) if self.val_fraction else []

    def _loader(self, rows: Rows, **order: Any) -> DataLoader[dict[str, Tensor]]:
        pad = functools.partial(collate_padded, pad_id=self.training_tokenizer.pad_id)
        # Packed rows are full already; other rows are padded to the longest row of their batch.
        collate = None if self.packing in (True, "across") else pad
        # Passed as keywords, because Lightning changes `shuffle` or `sampler` for the loader of a rank.
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=collate, **order)


def find_sources(paths: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each source as a pair: `pydoc`, `hub` or `saved` and its name, or a builder and its files.

    A file that several paths match occurs once, because otherwise a document could be in both splits.

    Raises:
        FileNotFoundError: A path matches no file.

    Example:
        >>> find_sources(["pydoc", "hf://datasets/owner/name:en:test"])
        [('pydoc', ['pydoc']), ('hub', ['hf://datasets/owner/name:en:test'])]
        >>> find_sources(["nowhere.txt"])
        Traceback (most recent call last):
        FileNotFoundError: paths='nowhere.txt' matches no file, folder or pattern
    """
    sources: list[tuple[str, list[str]]] = []
    # A file that several paths name, or link to, is read once.
    seen: set[Path] = set()
    for text in dict.fromkeys(paths):
        path = Path(text).expanduser()
        if text == PYDOC or HUB.fullmatch(text):
            sources.append(("pydoc" if text == PYDOC else "hub", [text]))
            continue
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            sources.append(("saved", [str(path)]))
            continue
        reason = "matches no file, folder or pattern"
        if path.is_dir():
            # Files that end in .json are skipped in folders, because such files are often settings.
            known = [suffix for suffix in BUILDERS if suffix != ".json"]
            files = [file for file in path.rglob("*") if file.suffix.lower() in known]
            reason = f"has no file that ends in {', '.join(known)}"
        elif path.is_file():
            files = [path]
        else:
            files = list(map(Path, glob.glob(str(path), recursive=True)))  # noqa: PTH207 - absolute ones too
        files = sorted(file for file in files if file.is_file())
        if not files:
            msg = f"paths={text!r} {reason}"
            if re.fullmatch(r"[\w.-]+/[\w.-]+", text) and not path.suffix:
                msg += f"\n  try: hf://datasets/{text}, if it is a dataset on the hub"
            raise FileNotFoundError(msg)
        of_builder: dict[str, list[str]] = {}
        for file in files:
            if file.resolve() not in seen:
                seen.add(file.resolve())
                of_builder.setdefault(BUILDERS.get(file.suffix.lower(), "text"), []).append(str(file))
        sources += of_builder.items()
    return sources


def open_sources(
    sources: Sequence[tuple[str, list[str]]], field: str, cache_dir: Path
) -> list[tuple[str, Any]]:
    """Return the sources as data sets of `datasets`, each with its name for messages.

    Raises:
        DataError: A source cannot be read, or has no column `field`.
        ModuleNotFoundError: datasets is not installed.
    """
    try:
        from datasets import exceptions
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("data/text needs datasets: pip install 'lightning-eff[hf]'") from error
    unreadable = (ValueError, OSError, KeyError, StopIteration, exceptions.DatasetsError)
    opened: list[tuple[str, Any]] = []
    for kind, names in sources:
        name = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
        try:
            rows = _open(kind, names, field, cache_dir)
        except unreadable as error:
            cause: BaseException = error
            while cause.__cause__ is not None:  # the root cause says what is wrong with the file
                cause = cause.__cause__
            reason = next(iter(str(cause).strip().splitlines()), "it has no rows")
            raise DataError(f"data.paths={name!r} cannot be read: {reason}") from error
        columns: list[str] = rows.column_names
        if field not in columns and not (field == "messages" and _is_conversation(columns)):
            remedy = "\n  try: data=chat" if _is_conversation(columns) else ""
            raise DataError(
                f"data.field={field!r} is not a column of {name}; there are: {', '.join(columns)}{remedy}"
            )
        opened.append((name, rows))
    return opened


def _open(kind: str, names: list[str], field: str, cache_dir: Path) -> Any:
    """Open a source with `datasets`, which runs no code from a data set's repository."""
    import datasets

    if kind == "pydoc":
        from pydoc_data.topics import topics

        return datasets.Dataset.from_dict({field: [text for _, text in sorted(topics.items())]})
    if kind == "hub":
        part: Any = HUB.fullmatch(names[0])
        subset = [part["subset"]] if part["subset"] else []
        return datasets.load_dataset(
            part["name"], *subset, revision=part["revision"], split=part["split"] or "train"
        )
    if kind == "saved":
        saved = datasets.load_from_disk(names[0])
        if isinstance(saved, datasets.DatasetDict) and "train" not in saved:
            raise ValueError(f"it has no split 'train'; there are: {', '.join(map(str, saved))}")
        return saved["train"] if isinstance(saved, datasets.DatasetDict) else saved
    options: dict[str, Any] = {
        "data_files": names,
        "split": "train",
        "cache_dir": str(cache_dir / "datasets"),
    }
    if kind == "text":
        # Drop the byte order mark that some editors write; a file is one document.
        options |= {"sample_by": "document", "encoding": "utf-8-sig"}
        rows = datasets.load_dataset(kind, **options)
        return rows.rename_column("text", field) if field != "text" else rows
    return datasets.load_dataset(kind, **options)


def _is_conversation(columns: Sequence[str]) -> bool:
    """Return whether rows have the columns of `messages`, ShareGPT or Alpaca."""
    return "messages" in columns or "conversations" in columns or {"instruction", "output"} <= {*columns}


def read_documents(opened: Sequence[tuple[str, Any]], field: str) -> Iterator[tuple[str | Turns, str]]:
    """Yield each document (a text or a conversation) and its origin.

    Raises:
        DataError: A row is neither a text nor a conversation.
    """
    for name, rows in opened:
        for number, row in enumerate(rows, start=1):
            location = f"{name}, row {number}"
            content: Any = row.get(field)
            if content is None and field == "messages":
                content = _conversation(row, location)
            strings: list[Any] = [content]
            if isinstance(content, list) and all(isinstance(turn, dict) for turn in content):
                # Other keys of a turn are not used for training.
                content = [{key: turn.get(key) for key in ("role", "content")} for turn in content]
                strings = [text for turn in content for text in turn.values()]
            if not all(isinstance(text, str) for text in strings):
                value = repr(row.get(field))[:60]
                raise DataError(
                    f"{location}: {field!r} is neither a text nor a list of {{role, content}}: {value}"
                )
            document: Any = content
            yield document, location


def _conversation(row: Mapping[str, Any], location: str) -> list[dict[str, Any]] | None:
    r"""Return the turns of a ShareGPT or Alpaca row; None for any other row.

    Example:
        >>> _conversation({"instruction": "Add.", "input": "1 2", "output": "3"}, "a.json, row 1")[0]
        {'role': 'user', 'content': 'Add.\n\n1 2'}
    """
    turns: list[dict[str, Any]] = []
    if row.get("system"):
        turns.append({"role": "system", "content": row["system"]})
    if row.get("instruction") is not None and row.get("output") is not None:
        asked = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        for question, answer in [*(row.get("history") or []), (asked, row["output"])]:
            turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return turns
    if row.get("conversations") is None:
        return None
    for turn in row["conversations"]:
        role = SHAREGPT_ROLES.get(turn.get("from"))
        if role is None:
            known = ", ".join(SHAREGPT_ROLES)
            raise DataError(f"{location}: a turn is from {turn.get('from')!r}: expected one of {known}")
        if role == "system":  # this turn replaces the row's system prompt
            turns.clear()
        turns.append({"role": role, "content": turn.get("value")})
    return turns


def tokenize(documents: Iterator[tuple[str | Turns, str]], tokenizer: TrainingTokenizer) -> dict[str, Tensor]:
    """Tokenize all documents; return the fields of `Documents` by name.

    Raises:
        DataError: There is no document, or a conversation has no answer; the message names its row.
    """
    tokens: list[NDArray[np.int32]] = []
    masks: list[NDArray[np.bool_]] = []
    is_chat: list[bool] = []
    # With chunks, a call of a fast tokenizer uses all cores, and memory holds the text of a single chunk.
    for chunk in iter(lambda: list(itertools.islice(documents, CHUNK)), []):
        of_texts = iter(tokenizer.encode_texts([text for text, _ in chunk if isinstance(text, str)]))
        for content, location in chunk:
            if isinstance(content, str):
                ids = next(of_texts)
                is_target = [True] * len(ids)
            else:
                try:
                    ids, is_target = tokenizer.encode_chat(content)
                except ValueError as error:
                    raise DataError(f"{location}: {error}") from error
            tokens.append(np.asarray(ids, dtype=np.int32))
            masks.append(np.asarray(is_target, dtype=bool))
            is_chat.append(not isinstance(content, str))
    if not tokens:
        raise DataError("data.paths: no document found")
    # The first token is no target, since no token precedes it. The appended True is what argmax finds if a
    # document has no target.
    first_target = [1 + int(np.append(mask[1:], True).argmax()) for mask in masks]
    arrays = {
        "tokens": np.concatenate(tokens),
        "is_target": np.concatenate(masks),
        "ends": np.cumsum([len(ids) for ids in tokens]),
        "first_target": np.asarray(first_target),
        "is_chat": np.asarray(is_chat),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()}
