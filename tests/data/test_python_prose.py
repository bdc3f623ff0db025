"""PythonProse: the articles in the source's tokens, none on both sides."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from lightning_eff.data.python_prose import PythonProse


def test_articles_are_in_the_tokens_of_the_source_and_on_one_side(text_cache: Path, tmp_path: Path) -> None:
    def prepare(folder: str) -> PythonProse:
        data = PythonProse(
            vocab_size=300, context_length=16, batch_size=4, source_dir=str(text_cache), cache_dir=folder
        )
        data.prepare_data()
        data.setup("fit")
        return data

    data = prepare(str(tmp_path))
    assert data.tokenizer.to_str() == data.source.tokenizer.to_str()
    texts = [text for _, text in sorted(topics.items())]
    decode = data.tokenizer.decode
    read = {
        split: decode(tokens.tolist(), skip_special_tokens=False).split("<|file|>")[1:]
        for split, tokens in data.tokens.items()
    }
    assert read == {"val": texts[::20], "train": [text for i, text in enumerate(texts) if i % 20]}
    written = {file.name.partition("-")[0]: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    assert sorted(written) == ["python_prose", "python_source"]
    prepare(str(tmp_path))
    assert {f.name.partition("-")[0]: f.stat().st_mtime_ns for f in tmp_path.iterdir()} == written
