"""Progress: lines in a log, one line on a terminal, nothing where it is switched off."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from lightning_eff.core.errors import ConfigError
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


def test_a_terminals_line_is_rewritten(
    net: Callable[..., Net], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(callbacks=[Progress(every_n_seconds=1e-9)], enable_progress_bar=True, max_steps=3)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    trainer.fit(net(), make_loader())
    assert capsys.readouterr().err.count("\r\x1b[2Kstep ") == 4


def test_switched_off_it_shows_nothing(net: Callable[..., Net], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(every_n_seconds=1e-9)
    progress.disable()
    assert show(net, capsys, progress) == []


def test_an_interval_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"every_n_seconds=0\.0"):
        Progress(every_n_seconds=0.0)
