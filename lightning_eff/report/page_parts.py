"""What our HTML pages share: one style for light, dark and print, and charts as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence

STYLE = """
:root { color-scheme: light dark; --ink: #1c2330; --soft: #5b6472; --line: #d9dee6; --paper: #fff; --mark: #2457c5;
  --pale: #dbe5fa; --c0: #2457c5; --c1: #8a93a3; --c2: #d9822b; --c3: #7b4fc9; --c4: #2a9d8f; --c5: #c8374b; --c6: #d4b106; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ef; --soft: #9aa4b2; --line: #333c4a; --paper: #12161d; --mark: #7fa8ff; --pale: #24324f;
    --c0: #6f9bff; --c1: #7d8796; --c2: #f0a45d; --c3: #a886f0; --c4: #57c7b9; --c5: #ef6f80; --c6: #e6cc4d; }
}
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 62rem; margin: 0 auto; padding: 1.5rem 1rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); font-size: .9rem; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .75rem; margin: 1rem 0; }
dl div { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .75rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-weight: 600; }
.wide { overflow-x: auto; } .figures td:not(:last-child), .figures th { white-space: nowrap; } table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: .35rem .75rem .35rem 0; border-bottom: 1px solid var(--line); }
th { font-size: .85rem; color: var(--soft); } .number { text-align: right; white-space: nowrap; }
th.number { text-align: right; } .bar { min-width: 6rem; width: 55%; } .bar span { display: block; height: .6rem; margin-top: .45rem; background: var(--mark); }
pre { overflow-x: auto; font-size: .85rem; background: var(--pale); padding: .75rem; border-radius: .5rem; }
figure { margin: 0; } svg { display: block; width: 100%; height: 8rem; border-left: 1px solid var(--line);
  border-bottom: 1px solid var(--line); }
polyline { fill: none; stroke: var(--mark); } figcaption { color: var(--soft); font-size: .9rem; }
.stack polygon { stroke: none; } .key { list-style: none; display: flex; flex-wrap: wrap; gap: .25rem 1rem; padding: 0; margin: .4rem 0; font-size: .9rem; }
.c0 { fill: var(--c0); background: var(--c0); } .c1 { fill: var(--c1); background: var(--c1); } .c2 { fill: var(--c2); background: var(--c2); } .c3 { fill: var(--c3); background: var(--c3); } .c4 { fill: var(--c4); background: var(--c4); } .c5 { fill: var(--c5); background: var(--c5); } .c6 { fill: var(--c6); background: var(--c6); }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .35rem; border-radius: .15rem; }
.key i, .bar span { print-color-adjust: exact; }
@media print { :root { --ink: #000; --paper: #fff; --soft: #444; } details { display: none; } }
"""
MAX_POINTS = 500
"""Points of a chart; more could not be told apart."""


def line(values: Sequence[float], *, lowest: float | None = None) -> str:
    """Return the points of a line in a box of 1000 x 100, with the highest of each stretch.

    Args:
        values: In order, finite.
        lowest: Value at the bottom; None for the smallest one.

    Returns:
        For a polyline's `points`; empty where there is nothing to draw.

    Example:
        >>> line([0.0, 1.0, 2.0], lowest=0.0)
        '0.0,98.0 500.0,50.0 1000.0,2.0'
        >>> line([1.0]), line([2.0, 2.0])
        ('', '0.0,50.0 1000.0,50.0')
    """
    if len(values) < 2:
        return ""
    stride = max(1, len(values) // MAX_POINTS)
    shown = [max(values[i : i + stride]) for i in range(0, len(values), stride)]
    bottom = min(shown) if lowest is None else lowest
    height = max(shown) - bottom
    scale = 96.0 / height if height else 0.0
    base = 98.0 if height else 50.0
    return " ".join(
        f"{1000 * i / (len(shown) - 1):.1f},{base - scale * (value - bottom):.1f}"
        for i, value in enumerate(shown)
    )
