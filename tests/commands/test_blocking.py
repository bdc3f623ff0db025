"""`bench --blocking`: every variant computes the product, a wrong one is not timed, the page tells it."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from lightning_eff.commands._bench import blocking
from lightning_eff.core import machine
from tests.support.command_line import Command

ROOT = Path(__file__).parent.parent.parent
COMPILER = machine.find_compiler("cpu")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="the loops are C++")
NAMES = ["three loops", "along rows", "blocked", "tiled", "library"]


@needs_compiler
def test_a_quick_run_checks_and_times_every_variant_on_one_thread(command: Command, tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    words = ["--blocking", "--quick", "--out", str(tmp_path / "new")]
    code, out, _ = command("bench", *words, "--json")
    assert (code, torch.get_num_threads()) == (0, threads)
    report = json.loads(out)
    assert report == json.loads((tmp_path / "new" / "blocking.json").read_text())
    assert report["environment"]["command"] == f"lightning-eff bench {' '.join(words)} --json"
    assert report["environment"]["threads"] == 1
    assert [(row["M"], row["N"], row["K"]) for row in report["rows"]] == [(48, 48, 48), (256, 256, 256)]
    assert [row["bytes"] for row in report["rows"]] == [3 * 4 * 48**2, 3 * 4 * 256**2]
    for row in report["rows"]:
        assert [each["name"] for each in row["variants"]] == NAMES
        for each in row["variants"]:
            assert each["correct"]
            assert len(each["gflops"]) == 2
    shown = blocking.table(report)
    assert "[8, 16] in registers" in shown or "[4, 16] in registers" in shown
    assert "caches: L1 " in shown


@needs_compiler
@pytest.mark.parametrize("caches", [{}, {"L1": 2**10, "L2": 2**11}, {"L1": 2**12, "L2": 2**17}])
def test_loops_are_right_for_any_caches_and_sizes_that_blocks_do_not_divide(caches: dict[str, int]) -> None:
    variants, _ = blocking.variants_for(blocking.compile_loops(str(COMPILER)), caches)
    rows = blocking.measure(variants, [(8, 16, 1), (24, 80, 131), (40, 48, 300)], rounds=1)
    errors = {(row["K"], each["name"]): each["error"] for row in rows for each in row["variants"]}
    assert len(errors) == 15
    assert max(errors.values()) <= 1.0
    names = {each["name"]: each["gflops"] for each in rows[-1]["variants"]}
    assert all(len(gflops) == 1 for gflops in names.values())


@pytest.mark.parametrize(
    "wrong",
    [
        lambda a, b, c: torch.mm(a[:, :-1], b[:-1], out=c),  # the last step of K is lost
        lambda a, b, c: torch.mm(a[:-1], b, out=c[:-1]),  # the last row is never written
        lambda a, b, c: c.copy_(a.bfloat16() @ b.bfloat16()),
    ],
)
def test_what_is_wrong_is_not_timed_and_fails_the_command(
    command: Command, monkeypatch: pytest.MonkeyPatch, wrong: Any
) -> None:
    variants = {"wrong": wrong, "library": lambda a, b, c: torch.mm(a, b, out=c)}
    monkeypatch.setattr(machine, "find_compiler", lambda _: "g++")
    monkeypatch.setattr(blocking, "compile_loops", lambda _: None)
    monkeypatch.setattr(blocking, "variants_for", lambda *_: (variants, dict.fromkeys(variants, "")))
    code, out, _ = command("bench", "--blocking", "--quick", "--json")
    first, second = json.loads(out)["rows"][0]["variants"]
    assert code == 1
    assert (first["correct"], first["gflops"]) == (False, [])
    assert (second["correct"], len(second["gflops"])) == (True, 2)
    assert "INCORRECT" in blocking.table(json.loads(out))


@pytest.mark.parametrize(
    ("words", "compiler", "expected", "says"),
    [
        ([], None, 3, "no compiler was found\n  try: apt-get install g++"),
        ([], "/bin/false", 3, "fails: exit code 1\n  try: apt-get install g++"),
        (["--tune"], "g++", 2, "--tune --blocking: expected one of --tune, --suite gpu, --blocking"),
        (["--shapes", "1,2,3"], "g++", 2, "expected without --shapes"),
        (["--resume"], "g++", 2, "bench --resume: expected with --suite gpu"),
    ],
)
def test_what_cannot_be_measured_is_said(
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    compiler: str | None,
    expected: int,
    says: str,
) -> None:
    monkeypatch.setattr(machine, "find_compiler", lambda _: compiler)
    code, out, err = command("bench", "--blocking", *words)
    assert (code, out) == (expected, "")
    assert says in err


def test_sizes_of_caches_are_what_linux_states(tmp_path: Path) -> None:
    for number, (level, kind, size) in enumerate(
        [(1, "Data", "48K"), (1, "Instruction", "64K"), (2, "Unified", "2048K")]
    ):
        folder = tmp_path / f"index{number}"
        folder.mkdir()
        for name, value in {"level": level, "type": kind, "size": size}.items():
            (folder / name).write_text(f"{value}\n")
    assert blocking.cache_sizes(tmp_path) == {"L1": 48 * 2**10, "L2": 2**21}
    assert blocking.cache_sizes(tmp_path / "nothing") == {}


def test_what_the_page_says_of_the_table_follows_from_it() -> None:
    report = json.loads((ROOT / "benchmarks" / "blocking.json").read_text())
    assert all(each["correct"] for row in report["rows"] for each in row["variants"])
    text = (ROOT / "docs" / "gemm_tiling.md").read_text()
    assert report["environment"]["command"] in text
    in_l1, in_l2, in_l3, beyond = (
        {each["name"]: median(each["gflops"]) for each in row["variants"]} for row in report["rows"]
    )
    for row in (in_l1, in_l2):
        assert row["blocked"] == pytest.approx(row["along rows"], rel=0.05)
    gains = [row["blocked"] / row["along rows"] for row in (in_l3, beyond)]
    assert "{:.1f} and {:.1f} times as fast".format(*gains) in text
    assert f"from {in_l2['along rows']:.1f} to {beyond['along rows']:.1f} GFLOP/s" in text
    assert in_l2["tiled"] == pytest.approx(2 * in_l2["blocked"], rel=0.05)
    assert f"{beyond['tiled'] / beyond['three loops']:.0f} times as fast as by three loops" in text
    faster = [row["tiled"] > row["library"] for row in (in_l1, in_l2, in_l3, beyond)]
    assert faster == [False, True, True, True]
