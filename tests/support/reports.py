"""Make the content of an `efficiency.json` for tests of texts and pages, and read a page's HTML."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

from lightning_eff.report.display import report_page
from lightning_eff.report.module_tracker import PHASES
from lightning_eff.report.recording import CATEGORIES

MEASURED = {
    "batch_time_s": 0.0123, "samples_per_s": 1300.04, "tokens_per_s": 166_400.0, "flops_per_s": 2.5e12,
    "mfu": 0.4567, "peak_bytes": 3 * 2**29, "data_wait_share": 0.021, "num_batches": 96,
}  # fmt: skip
APPLIED = {"technique": "precision/auto", "asked": {}, "status": "applied", "did": "bf16-mixed on cpu"}
IDLE = {"technique": "callbacks/empty_cache", "asked": {}, "status": "no effect", "did": "never"}


def make_report(**changes: Any) -> dict[str, Any]:
    report = {
        "title": "lm, run 2", "environment": {}, "command": "train lm", "status": "finished",
        "reason": "", "num_steps": 100, "measured": MEASURED, "ledger": [APPLIED, IDLE],
    }  # fmt: skip
    return report | changes


TIME = {
    "step_s": 2.0, "num_steps": 4, "num_batches": 8,
    "parts": {"forward": 0.25, "backward": 0.5, "optimizer": 0.204, "data": 0.001, "other": 0.045},
    "modules": [
        {"path": "blocks.*.mlp", "class": "MLP", "share": 0.75, "batch_s": 0.1875, "calls": 12.0},
        {"path": "(outside of modules)", "class": "", "share": 0.25, "batch_s": 0.0625, "calls": 1.0},
    ],
    "operations": {"matrix products": 0.5, "pointwise operations": 0.25},
    "num_operations": 100, "operation_s": 1e-5, "notes": ["A note.", "Another."],
}  # fmt: skip
HOLDER = {"category": "activations", "name": "logits of lm_head [1016, 2048]"}
HOLDER |= {"num_bytes": 3 * 2**19, "count": 3}
EMPTY = dict.fromkeys(CATEGORIES, 0)
TIMELINE = [
    EMPTY | {"event": event, "phase": phase, "parameters": 10 * 2**20, "activations": size * 2**20}
    for event, phase, size in ((1, "forward", 0), (5, "forward", 90), (9, "step", 30), (11, "forward", 30))
]
MEMORY = {
    "num_bytes": 100 * 2**20, "phase": "forward", "operation": "mm", "path": "a<b", "timeline": TIMELINE,
    "by_phase": dict.fromkeys(PHASES, EMPTY | {"parameters": 10})
    | {"forward": EMPTY | {"parameters": 10 * 2**20, "activations": 90 * 2**20}},
}  # fmt: skip


class Reader(HTMLParser):
    """Collects tags, attributes and texts; checks that every tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def make_page(word: str = "word", **changes: Any) -> str:
    row = {"technique": word, "asked": {word: word, "n": 3}, "status": word, "did": word}
    report = {
        "title": word, "status": "failed", "reason": word, "num_steps": 3, "measured": {}, "ledger": [row],
        "environment": {word: word}, "command": word,
    }  # fmt: skip
    return report_page(report | changes, word)
