"""HFDataset: the same rows from every source, each on one rank and worker, in an order of seed and epoch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_eff.callbacks.exact_resume import ExactResume
from lightning_eff.callbacks.gradient_accumulation import GradientAccumulation
from lightning_eff.data.hf_dataset import HFDataset
from tests.support.models import make_trainer

datasets = pytest.importorskip("datasets")
NUM_FILES, NUM_ROWS = 2, 7
ALL = list(range(NUM_FILES * NUM_ROWS))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder of two files, of seven rows each."""
    files = tmp_path / "files"
    files.mkdir()
    for number in range(NUM_FILES):
        rows = [{"x": [float(i), 1.0], "id": i, "text": f"t{i}"} for i in ALL[number * NUM_ROWS :][:NUM_ROWS]]
        (files / f"part{number}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return files


def ready(name: Path | str, **keywords: Any) -> HFDataset:
    data = HFDataset(name=str(name), **({"batch_size": 4} | keywords))
    data.prepare_data()
    data.setup("fit")
    return data


def ids(loader: Any) -> list[int]:
    return [i for batch in loader for i in batch["id"].tolist()]


def sources(folder: Path) -> dict[str, Path]:
    """Write the rows in every form."""
    rows = datasets.Dataset.from_list(
        [json.loads(line) for file in sorted(folder.iterdir()) for line in file.read_text().splitlines()]
    )
    at = folder.parent
    rows.to_parquet(at / "rows.parquet")
    rows.to_csv(at / "rows.csv")
    rows.save_to_disk(at / "saved")
    datasets.DatasetDict(train=rows).save_to_disk(at / "dict")
    return {
        "folder": folder,
        "pattern": folder / "*.jsonl",
        **{name: at / name for name in ("rows.parquet", "rows.csv", "saved", "dict")},
    }


@pytest.mark.parametrize("streaming", [False, True])
def test_every_source_has_the_same_rows(folder: Path, *, streaming: bool) -> None:
    for name, source in sources(folder).items():
        if streaming and name.startswith("rows."):
            continue  # datasets leaves a stream's CSV file open, and takes 5 s to close one of Parquet
        data = ready(source, val_split="train", streaming=streaming)
        val: Any = data.val_dataloader()
        assert ids(val) == ALL, name
        train = ids(data.train_dataloader())
        assert sorted(train) == ALL, name
        assert train != ALL, "shuffled"
        first = next(iter(val))
        assert first["id"].tolist() == [0, 1, 2, 3]
        assert first["text"] == ["t0", "t1", "t2", "t3"]
        if name != "rows.csv":
            assert torch.equal(first["x"][:, 0], torch.arange(4.0))


def test_a_batch_has_the_columns_that_are_chosen(folder: Path) -> None:
    for streaming in (False, True):
        data = ready(folder, columns=["text", "id"], streaming=streaming)
        assert set(next(iter(data.train_dataloader()))) == {"text", "id"}
        assert data.val_dataloader() == []
        with pytest.raises(ValueError, match=r"columns='lable' is no column of .*: x, id, text"):
            ready(folder, columns=["lable"], streaming=streaming)


@pytest.mark.parametrize(("ranks", "workers"), [(1, 2), (3, 0), (3, 8)])
def test_each_row_of_a_stream_is_on_one_rank_and_worker_and_ranks_have_as_many_batches(
    folder: Path, ranks: int, workers: int
) -> None:
    """Workers that each read everything would give every row twice; unequal ranks would wait for ever."""
    for split in ("train", "val"):
        shares = []
        for rank in range(ranks):
            data = ready(folder, streaming=True, num_workers=workers, val_split="train")
            trainer: Any = type("Ranks", (), {"global_rank": rank, "world_size": ranks})
            data.trainer = trainer
            loader: Any = data.train_dataloader() if split == "train" else data.val_dataloader()
            assert loader.num_workers == min(workers, NUM_FILES)
            shares.append([batch["id"].tolist() for batch in loader])
        assert len({tuple(map(len, share)) for share in shares}) == 1, "as many rows in as many batches"
        found = sorted(i for share in shares for batch in share for i in batch)
        assert set(found) == set(ALL)
        assert len(found) - len(ALL) <= (ranks - 1) * max(1, min(workers, NUM_FILES)), "few are repeated"


def test_the_order_of_a_stream_depends_on_seed_and_epoch_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = set()
    for seed, epoch in ((0, 0), (0, 1), (1, 0)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        found = []
        for _ in range(2):
            torch.rand(3)  # whatever else draws numbers
            loader: Any = ready(folder, streaming=True).train_dataloader()
            loader.sampler.set_epoch(epoch)
            found.append(tuple(ids(loader)))
        assert found[0] == found[1]
        orders.add(found[0])
    assert len(orders) == 3


class Regression(pl.LightningModule):
    """Learns from the rows in their order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(2, 1)
        self.seen: list[list[int]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.seen.append(batch["id"].tolist())
        return (self.layer(batch["x"] / 20.0)[:, 0] - batch["id"] / 20.0).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no", "ignore:The dirpath has")
@pytest.mark.parametrize("streaming", [False, True])
def test_a_run_resumes_bit_for_bit_within_an_epoch(folder: Path, tmp_path: Path, *, streaming: bool) -> None:
    def run(name: str, ckpt_path: Path | None = None) -> Regression:
        pl.seed_everything(3, verbose=False)
        model = Regression()
        saver = ModelCheckpoint(tmp_path / name, filename="{step}", every_n_train_steps=1, save_top_k=-1)
        callbacks = [saver, ExactResume(), GradientAccumulation(num_batches=2)]
        trainer = make_trainer(max_steps=4, callbacks=callbacks, enable_checkpointing=True)
        data = HFDataset(name=str(folder), batch_size=4, streaming=streaming)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path, weights_only=True)
        return model

    whole = run("whole")
    epochs = [[i for batch in whole.seen[first : first + 4] for i in batch] for first in (0, 4)]
    assert [sorted(epoch) for epoch in epochs] == [ALL, ALL]
    assert epochs[0] != epochs[1], "another order in the second epoch"
    for stopped, batches in ((1, 2), (3, 6)):  # inside the first epoch, and inside the second
        resumed = run(f"from_{stopped}", tmp_path / "whole" / f"step={stopped}.ckpt")
        assert resumed.seen == whole.seen[batches:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_a_dataset_on_the_hub_is_asked_for_by_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    rows = datasets.Dataset.from_list([{"id": 1}])

    def load(*names: str, **keywords: Any) -> Any:
        asked.append((names, keywords))
        return rows.to_iterable_dataset() if keywords["streaming"] else rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    ready("owner/name@v1", subset="en", split="train[:5%]", val_split="test")
    ready("name", streaming=True)
    common = {"revision": "v1", "streaming": False}
    assert asked[:2] == [
        (("owner/name", "en"), common | {"split": split}) for split in ("train[:5%]", "test")
    ]
    assert asked[-1] == (("name",), {"split": "train", "streaming": True})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "valid"}, "cannot be opened: .*valid"),
        ({"name": "./nowhere"}, "name='./nowhere' is no file, folder or pattern"),
        ({"name": "nowhere.parquet"}, "is no file, folder or pattern"),
        ({"name": ""}, "name='' is no file, folder or pattern"),
        ({"columns": []}, r"columns=\[\] must name a column; None takes all"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_workers": -1}, "num_workers=-1 must be at least 0"),
    ],
)
def test_what_cannot_be_opened_is_named(folder: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        ready(**({"name": folder, "streaming": True} | change))
    (folder.parent / "empty").mkdir()
    with pytest.raises(ValueError, match="cannot be opened"):
        ready(folder.parent / "empty")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "cannot be opened: it has no rows"),
        ('{"a": 1}\n{"a":\n', "cannot be opened: .*JSON"),
        (
            '{"a": [1]}\n{"a": [1, 2]}\n',
            "column 'a' makes no batch: stack expects each tensor to be equal size",
        ),
        ('{"b": 1, "a": null}\n', "column 'a' makes no batch: .*NoneType.*; name the others in columns"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(content)
    with pytest.raises(ValueError, match=message):
        next(iter(ready(file).train_dataloader()))


def test_the_current_folder_is_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert len(ready(".").train_dataloader().dataset) == len(ready(folder).train_dataloader().dataset)


def test_a_saved_dataset_has_whole_splits(folder: Path) -> None:
    saved = sources(folder)
    with pytest.raises(ValueError, match="has no split 'test'; there are: train"):
        ready(saved["dict"], split="test")
    with pytest.raises(ValueError, match=r"split='train\[:2\]' of a saved dataset"):
        ready(saved["saved"], split="train[:2]")
