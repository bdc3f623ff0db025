"""Progress: lines in a log, and a bar on a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from lightning_eff.monitors.efficiency_report import EfficiencyReport
from lightning_eff.monitors.progress import Progress
from tests.support.models import Net, make_loader, make_trainer


def show(net: Callable[..., Net], capsys: pytest.CaptureFixture[str], progress: Progress) -> list[str]:
    trainer = make_trainer(callbacks=[progress], enable_progress_bar=True)
    trainer.fit(net(), make_loader())
    return [line for line in capsys.readouterr().err.splitlines() if "step " in line and "left" in line]


@pytest.mark.parametrize(("seconds", "steps"), [(1e-9, [*range(1, 11), 10]), (1e9, [10])])
def test_lines_come_when_they_are_due_and_at_the_end(
    net: Callable[..., Net], capsys: pytest.CaptureFixture[str], seconds: float, steps: list[int]
) -> None:
    lines = show(net, capsys, Progress(every_n_seconds=seconds))
    assert [line.split()[1] for line in lines] == [f"{step}/10" for step in steps]
    middle = lines[len(lines) // 2]
    assert "train_loss" in middle
    assert "samples/s" in middle


def make_terminal(monkeypatch: pytest.MonkeyPatch, name: str = "xterm") -> None:
    """Make the standard error output a terminal of 200 columns."""
    for key, value in {"TERM": name, "COLUMNS": "200", "NO_COLOR": "1", "TTY_COMPATIBLE": "1"}.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_a_terminal_has_a_bar_with_memory_and_the_wait_for_data(
    net: Callable[..., Net],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    make_terminal(monkeypatch)
    sizes = iter([3 * 2**20, 5 * 2**20, *[2**20] * 100])
    figures = SimpleNamespace(held_bytes=lambda _: next(sizes), peak_bytes=lambda _: None)
    monkeypatch.setattr("lightning_eff.monitors.progress.allocator", figures)
    callbacks = [Progress(every_n_seconds=1e-9), EfficiencyReport(dirpath=tmp_path)]
    trainer = make_trainer(callbacks=callbacks, enable_progress_bar=True, max_steps=10)
    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    trainer.fit(net(), make_loader())
    text = capsys.readouterr().err
    assert text.count(hidden) == text.count(shown) == 1
    bar = text[text.index(hidden) : text.index(shown)]
    frames = [frame for frame in re.split(r"\r|\n", bar) if "step " in frame]
    steps = [re.search(r"step (\d+)/10", frame) for frame in frames]
    assert list(dict.fromkeys(int(step[1]) for step in steps if step)) == [*range(1, 11)]
    memory = [text for frame in frames for text in re.findall(r"memory .* MiB, peak .* MiB", frame)]
    assert memory[0] == "memory 3.0 MiB, peak 3.0 MiB"
    assert memory[-1] == "memory 1.0 MiB, peak 5.0 MiB"
    assert "train_loss" in frames[-1]
    assert "samples/s" in frames[7]
    assert [bool(re.search(r"data wait \d+%", frame)) for frame in frames[:2]] == [False, False], "not timed"
    assert re.search(r"data wait \d+%", frames[7])


def test_a_run_that_fails_restores_the_cursor(
    net: Callable[..., Net], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_terminal(monkeypatch)
    model = net()
    model.on_train_batch_end = Mock(side_effect=RuntimeError("broken"))
    trainer = make_trainer(callbacks=[Progress()], enable_progress_bar=True)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit(model, make_loader())
    assert capsys.readouterr().err.count("\x1b[?25h") == 1
