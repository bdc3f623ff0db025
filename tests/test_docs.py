"""The pages of docs/: each is in the menu, links have targets, and generated frames are up to date."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import benchmarks, pages
from tests.support.techniques import ROOT, TECHNIQUES

SITE = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]
FILES = sorted(pages.DOCS.rglob("*.md"))


def entries(menu: list[Any]) -> Iterator[str]:
    """Yield the pages of a menu, in its order."""
    for item in menu:
        for entry in item.values() if isinstance(item, dict) else [item]:
            yield from entries(entry) if isinstance(entry, list) else [entry]


def test_every_page_has_one_place_in_the_menu() -> None:
    assert sorted(entries(SITE["nav"])) == [path.relative_to(pages.DOCS).as_posix() for path in FILES]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    found = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {benchmarks.anchor(heading) for heading in found}


@pytest.mark.parametrize("path", [ROOT / "README.md", *FILES], ids=lambda path: path.stem)
def test_links_lead_to_files_and_headings(path: Any) -> None:
    for target, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
        if not target.startswith("https://"):
            file = path.parent / target if target else path
            assert file.is_file(), target
            assert not anchor or anchor in anchors(file.read_text()), f"{target}#{anchor}"
            inside = path.parent.name == "pictures" or pages.DOCS in file.resolve().parents
            assert path.name == "README.md" or inside, f"{target} is not on the site"


def test_every_technique_has_a_page_with_an_up_to_date_frame() -> None:
    written = pages.pages()
    for path, text in written.items():
        assert path.read_text() == text, f"write {path} again: make pages"
    named = [
        source for text in written.values() for source in re.findall(r"`make pages` from (\S+) -->", text)
    ]
    assert {*TECHNIQUES} <= {*named}
    assert len(named) == len({*named})


def test_the_messages_of_troubleshooting_are_those_of_the_code() -> None:
    source = "\n".join(file.read_text() for file in (ROOT / "lightning_eff").rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # literals that are continued on the next line
    rows = re.findall(r"^\| (`.*?) \| ", (pages.DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    assert len(rows) > 25
    for cell in rows:
        if not re.search(r"\((Lightning|PyTorch)\)", cell):
            assert all(words in source for words in re.findall(r"`([^`]+)`", cell)), cell
