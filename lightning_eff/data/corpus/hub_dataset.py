"""Open a Hugging Face dataset: by its name on the hub, or as files and folders on this machine.

`load_dataset` reads data only: since version 4 it runs no code of a dataset's repository.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_eff.data.corpus.extra import import_extra, is_saved, saved_split

BUILDERS = {
    **dict.fromkeys((".json", ".jsonl", ".ndjson"), "json"),
    ".parquet": "parquet",
    ".csv": "csv",
    ".arrow": "arrow",
    ".txt": "text",
}
"""The builder of datasets that reads files with a suffix."""
NUM_SHARDS = 16
"""Pieces of a saved dataset that workers share when it is streamed; a number of their own would change the
order of the rows."""


def open_dataset(name: str, *, subset: str | None, split: str, streaming: bool) -> Any:
    """Return a `Dataset`, or with `streaming` an `IterableDataset` that downloads and stores nothing.

    Args:
        name: `owner/name` on the hub, perhaps with `@revision`; a folder of `save_to_disk`; a file, a pattern
            with `*`, or a folder of data files.
        subset: A dataset's configuration on the hub, or None.
        split: As `load_dataset` takes it, `train[:5%]` too unless streamed.
        streaming: Read rows while they are trained on.

    Raises:
        ValueError: It cannot be opened, in the words of datasets.
        FileNotFoundError: A path matches no file.
    """
    datasets = import_extra("datasets")
    path = Path(name).expanduser()
    errors = (ValueError, OSError, KeyError, StopIteration, datasets.exceptions.DatasetsError)
    try:
        if name and path.is_dir() and is_saved(path):
            base, _, part = split.partition("[")
            rows = datasets.load_from_disk(str(saved_split(path, base)))
            if part:
                msg = f"split={split!r} of a saved dataset: expected {base!r}, which is whole"
                raise ValueError(msg)
            return rows.to_iterable_dataset(min(NUM_SHARDS, max(1, len(rows)))) if streaming else rows
        keywords: dict[str, Any] = {"split": split, "streaming": streaming}
        if name and path.is_dir():  # of "." datasets would take no name
            return datasets.load_dataset(str(path.resolve()), **keywords)
        if path.suffix.lower() in BUILDERS and (path.is_file() or "*" in name):
            builder = BUILDERS[path.suffix.lower()]
            return datasets.load_dataset(builder, data_files=str(path), **keywords)
        if (
            not name
            or name.startswith((".", "/", "~"))
            or name.count("/") > 1
            or path.suffix.lower() in BUILDERS
        ):
            msg = f"name={name!r} is no file, folder or pattern of data that can be read"
            raise FileNotFoundError(msg)
        hub, _, revision = name.partition("@")
        keywords |= {"revision": revision} if revision else {}
        return datasets.load_dataset(hub, *([subset] if subset else []), **keywords)
    except FileNotFoundError as error:
        if str(error).startswith("name="):
            raise
        raise _cannot_open(name, error) from error
    except errors as error:
        raise _cannot_open(name, error) from error


def _cannot_open(name: str, error: BaseException) -> ValueError:
    if isinstance(error, StopIteration):
        return ValueError(f"name={name!r} cannot be opened: it has no rows")
    while error.__cause__ is not None:  # of a damaged file datasets says no more than that there was an error
        error = error.__cause__
    reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
    return ValueError(f"name={name!r} cannot be opened: {reason}")
