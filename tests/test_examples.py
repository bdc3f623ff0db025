"""Every example runs, shows the promised effect, and is a short script in percent format."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.techniques import ROOT


def shortened(name: str, steps: int) -> Path:
    """Write an example with fewer steps into the current folder."""
    text = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
    text, count = re.subn(r"^MAX_STEPS = \d+", f"MAX_STEPS = {steps}", text, flags=re.MULTILINE)
    assert count == 1
    path = Path(f"{name}.py").resolve()
    path.write_text(text, encoding="utf-8")
    return path


def numbers(word: str, text: str) -> list[float]:
    """Return the numbers that follow a word."""
    return [float(number) for number in re.findall(rf"{word} +(\d[\d.]*(?:e-\d+)?)", text)]


def assert_less_and_less(out: str, num_runs: int) -> None:
    peaks = numbers("peak memory", out)
    assert len(peaks) == num_runs
    assert all(later < 0.9 * earlier for earlier, later in itertools.pairwise(peaks)), peaks


@pytest.fixture
def run(empty_folder: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Return a function that runs an example with few steps, and returns what it prints."""

    def run(name: str, steps: int) -> str:
        runpy.run_path(str(shortened(name, steps)), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_vision_needs_a_part_of_the_memory(run: Any) -> None:
    out = run("vision", 2)
    assert_less_and_less(out, 2)
    assert "4 of 4 blocks recomputed (full), 32 times" in out
    assert "micro-batches of 64; 2 batches split" in out


@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")
def test_a_gan_resumes_exactly(run: Any) -> None:
    alone, exact = numbers("weights differ by", out := run("gan", 12))
    assert alone > 0.0 == exact
    assert "each step counts as one optimizer step" in out


@pytest.mark.slow
def test_a_loop_under_fabric_needs_less_memory_for_the_same_loss(run: Any) -> None:
    out = run("fabric", 2)
    assert_less_and_less(out, 3)
    assert numbers("loss", out) == pytest.approx([numbers("loss", out)[0]] * 3, abs=2e-3)


@pytest.mark.slow
def test_lora_trains_a_part_of_the_weights(run: Any) -> None:
    out = run("lora", 3)
    assert_less_and_less(out, 2)
    full, adapters = numbers("optimizer state", out)
    assert adapters < full / 10
    assert "163,840 of 3,705,088 parameters trained" in out


@pytest.mark.slow
def test_long_context_removes_what_is_largest(run: Any) -> None:
    out = run("long_context", 2)
    assert_less_and_less(out, 4)
    assert numbers("loss", out) == pytest.approx([numbers("loss", out)[0]] * 4, abs=2e-3)


@pytest.mark.slow
def test_two_devices_share_the_weights(empty_folder: Path) -> None:
    script = shortened("two_devices", 2)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert_less_and_less(done.stdout, 2)
    ddp, fsdp2 = numbers("loss", done.stdout)
    assert ddp == pytest.approx(fsdp2, abs=2e-4)
    assert "sharded across 2 ranks" in done.stdout


def test_each_example_is_short_has_a_test_and_a_row_and_states_how_to_install_it() -> None:
    here, page = Path(__file__).read_text(), (ROOT / "docs" / "examples.md").read_text()
    for example in sorted((ROOT / "examples").glob("*.py")):
        name, text = example.stem, example.read_text(encoding="utf-8")
        assert f'("{name}", ' in here, name
        assert f"| `examples/{name}.py` |" in page, name
        assert len(text.splitlines()) < 80, name
        first, _, code = text.partition("\n# %%\n")
        assert first.startswith("# %% [markdown]\n")
        assert code
        assert "pip install" in first
        assert "on two CPU cores" in first
