"""Memory on a page: what was held over the counted steps, stacked by category, and the table of its phases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jinja2

from lightning_eff.core.text import human_bytes
from lightning_eff.report.recording import CATEGORIES
from lightning_eff.report.module_tracker import PHASES

_TEMPLATE = """<h2>Memory</h2>
<p>{{ sentence }}</p>
<figure><svg class="stack" viewBox="0 0 1000 100" preserveAspectRatio="none" role="img" aria-label="{{ label }}">
{% for layer in layers %}<polygon class="c{{ layer.color }}" points="{{ layer.points }}"/>
{% endfor %}</svg><figcaption>{{ label }}</figcaption></figure>
<ul class="key">{% for layer in layers %}<li><i class="c{{ layer.color }}"></i>{{ layer.name }}</li>{% endfor %}</ul>
<div class="wide"><table class="figures"><tr><th scope="col">at the most of</th>{% for phase in phases %}<th scope="col" class="number">{{ phase }}</th>{% endfor %}</tr>
{% for name, cells in table %}<tr><th scope="row">{{ name }}</th>{% for cell in cells %}<td class="number">{{ cell }}</td>{% endfor %}</tr>
{% endfor %}</table></div>
"""


def section(memory: Mapping[str, Any]) -> str:
    """Return a part of a page; empty where nothing is known.

    Args:
        memory: A `Peak` as plain values.

    Example:
        >>> section({})
        ''
    """
    timeline: Sequence[Mapping[str, Any]] = memory.get("timeline", ())
    if len(timeline) < 2:
        return ""
    kept = [name for name in CATEGORIES if any(point[name] for point in timeline)]
    rows = [(name, [human_bytes(memory["by_phase"][phase][name]) for phase in PHASES]) for name in kept]
    totals = [human_bytes(sum(memory["by_phase"][phase].values())) for phase in PHASES]
    where = f" in {memory['path']}" if memory["path"] else ""
    sentence = (
        f"The peak is in the {memory['phase']}: {memory['operation'] or 'before the first operation'}{where}."
    )
    label = f"live bytes by category over the first steps, from 0 to {human_bytes(memory['num_bytes'])}"
    return (
        jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
        .from_string(_TEMPLATE)
        .render(
            sentence=sentence,
            label=label,
            layers=_layers(timeline, kept, memory["num_bytes"]),
            phases=PHASES,
            table=[*rows, ("together", totals)],
        )
    )


def _layers(timeline: Sequence[Mapping[str, Any]], names: Sequence[str], most: int) -> list[dict[str, Any]]:
    """Return a polygon for each category, each on top of those before it."""
    below = [0.0] * len(timeline)
    width = 1000 / (len(timeline) - 1)
    layers: list[dict[str, Any]] = []
    for name in names:
        above = [bottom + point[name] for bottom, point in zip(below, timeline, strict=True)]
        edge = [*enumerate(above), *reversed(list(enumerate(below)))]
        points = " ".join(f"{index * width:.1f},{98 - 96 * value / most:.1f}" for index, value in edge)
        layers.append({"name": name, "color": CATEGORIES.index(name), "points": points})
        below = above
    return layers
