"""Generate the frames in docs/: technique pages, tables of techniques and recipes, benchmarks, the API.

A frame is the generated text between two markers; the rest of a page is written by hand. A technique's frame
is generated from its module's docstring, the comments in its YAML, its rules, and the rows of
`benchmarks/compare_*.json`. A benchmark's frame is the table of its figures (benchmarks.py).
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

import lightning_eff
from lightning_eff.comparison.result_table import HEADER, ComparisonRow, cells
from lightning_eff.core import catalog
from lightning_eff.core.errors import keep_overrides
from lightning_eff.core.technique import HasFacts, Rule
from tests.support import benchmarks, migration_pages
from tests.support.markdown import quoted, table
from tests.support.techniques import ROOT, TECHNIQUES, class_of, yaml_of

DOCS = ROOT / "docs"
ON_AN_H100 = ROOT / "benchmarks" / "gpu" / "results" / "techniques.yaml"
FRAME = re.compile(r"<!-- written by `make pages` from (\S+) -->\n.*?<!-- end -->\n", re.DOTALL)
HEADINGS = ("Saves", "Costs", "When not", "Conflicts", "Source")
SLOT = {
    "callbacks": "`Trainer(callbacks=[{name}()])`",
    "monitors": "`Trainer(callbacks=[{name}()])`",
    "precision": "`Trainer(plugins=[{name}()])`",
    "checkpoint_io": "`Trainer(plugins=[{name}()])`",
    "strategy": "`Trainer(strategy={name}())`",
    "optimizer": "`OptimizerChoice(optimizer=functools.partial({name}, lr=1e-3))`",
    "scheduler": "`OptimizerChoice(scheduler=functools.partial({name}, warmup_steps=100))`",
}
"""How to pass a class of each group to Lightning; `name` is the class."""

USE = {
    "callbacks/gradient_accumulation": "`lightning-eff train RECIPE +callbacks=gradient_accumulation "
    "callbacks.gradient_accumulation.global_batch_size=64`, or "
    "`Trainer(callbacks=[GradientAccumulation(global_batch_size=64)])`",
    "callbacks/optimizer_choice": "`Trainer(callbacks=[OptimizerChoice("
    "optimizer=functools.partial(AdamW, lr=1e-3))])`; in a recipe, the group `optimizer`",
    "optimizer/module": "`lightning-eff train RECIPE optimizer=module`, or "
    "`Trainer(callbacks=[ModuleOptimizer()])`",
}
"""The row **Use** of techniques that the pattern of their group does not fit."""

COMPARED = HEADER[:-1]


def pages() -> dict[Path, str]:
    """Return every page that has frames, with its up-to-date text."""
    found: dict[Path, str] = {}
    for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = path.read_text(encoding="utf-8")
        if FRAME.search(text):
            more = text.rpartition("<!-- end -->")[2].strip()
            found[path] = FRAME.sub(lambda match, more=more: framed(match[1], is_alone=not more), text)
    timeline = "memory_timeline"
    found[DOCS / "pictures" / f"{timeline}.svg"] = benchmarks.script(timeline)["picture"](
        benchmarks.kept()[timeline]
    )
    return found


def framed(source: str, *, is_alone: bool = True) -> str:
    """Return a frame with its markers, by the name of its source, for example a technique."""
    written = {
        "techniques": techniques_table,
        "recipes": recipes_table,
        "excerpt": excerpt,
        "docstrings": reference,
    }
    if source in written:
        text = written[source]()
    elif source.startswith("benchmarks"):
        text = benchmarks.frame(source)
    elif source.startswith(migration_pages.BEGIN):
        sections = migration_pages.tables(source)
        text = "\n\n".join(f"## {title}\n\n{table(head, rows)}" for title, head, rows in sections)
    else:
        text = technique_frame(source, is_alone=is_alone)
    return f"<!-- written by `make pages` from {source} -->\n\n{text.strip()}\n\n<!-- end -->\n"


def technique_frame(name: str, *, is_alone: bool) -> str:
    """Return a technique's frame in Markdown; with the full docstring if the page has no other text."""
    group = name.partition("/")[0]
    summary, body, sections = card(name)
    entry = next(entry for entry in catalog.options() if entry.name == name)
    use = f"`lightning-eff train RECIPE {entry.use}`, or {SLOT[group].format(name=class_of(name).__name__)}"
    on_an_h100 = yaml.safe_load(ON_AN_H100.read_text(encoding="utf-8"))
    rows = [
        ["**Use**", USE.get(name, use)],
        *([["**Lowers**", ", ".join(lowers)]] if (lowers := getattr(class_of(name), "lowers", ())) else []),
        *([f"**{heading}**", sections[heading]] for heading in ("Saves", "Costs", "When not", "Conflicts")),
        *([["**On an H100**", on_an_h100[name]]] if name in on_an_h100 else []),
    ]
    parts = [summary, table(["", ""], rows), *([quoted(body)] if is_alone else [])]
    parameters = catalog.yaml_parameters(yaml_of(name))
    if parameters:
        parts += [
            "## Options",
            table(["option", "default", "meaning"], ([f"`{k}`", f"`{v}`", m] for k, v, m in parameters)),
        ]
    named = [[f"`{group}={file.stem}`", catalog.yaml_header(file)] for file in presets(name)]
    if named:
        parts += ["Settings with a name:", table(["", ""], named)]
    conflicts = [[found, reason, remedies] for found, reason, remedies in rules(name)]
    if conflicts:
        parts += [
            "## Checked before the run",
            table(["combined with", "what would happen", "instead"], conflicts),
        ]
    parts += ["## Measured", measured(name)]
    return "\n\n".join([*parts, f"Source: {sections['Source']}"])


def card(name: str) -> tuple[str, str, dict[str, str]]:
    """Return the summary, the paragraphs and the sections of a technique's docstring."""
    text = catalog.module_docstring(ROOT / "lightning_eff" / f"{name}.py")
    introduction, *rest = re.split(rf"^({'|'.join(HEADINGS)}):", text, flags=re.MULTILINE)
    summary, _, body = introduction.partition("\n")
    texts = (" ".join(words.split()) for words in rest[1::2])
    sections = {
        heading: text if heading == "Source" else text[:1].upper() + text[1:]
        for heading, text in zip(rest[::2], texts, strict=True)
    }
    return summary, body.strip(), sections


def presets(name: str) -> list[Path]:
    """Return the option files that are presets of a technique, as `cosine` is of `warmup_decay`."""
    option = name.rpartition("/")[2]
    files = sorted(yaml_of(name).parent.glob("*.yaml"))
    return [file for file in files if option in (yaml.safe_load(file.read_text()).get("defaults") or ())]


def rules(name: str) -> Iterator[tuple[str, str, str]]:
    """Yield found combination, verdict and remedies of a technique's rules, with its YAML's arguments."""
    written = {k: v for k, v in yaml.safe_load(yaml_of(name).read_text()).items() if not k.startswith("_")}
    kind = class_of(name)
    technique: Any = (
        kind if name.startswith(("optimizer/", "scheduler/")) and name != "optimizer/module" else None
    )
    if technique is None and None not in (written.get("optimizer", 0), written.get("global_batch_size", 0)):
        technique = kind(**written)
    if not isinstance(technique, HasFacts):
        return
    by_reason: dict[tuple[str, str, str], list[str]] = {}
    facts = technique.facts()
    for word, stated in (("without ", facts.needs), ("", facts.excludes)):
        for rule in stated:
            with keep_overrides():
                remedies = "; ".join(f"`{remedy}`" for remedy in rule.remedies)
            key = (f"{rule.verdict}", rule.reason, remedies)
            by_reason.setdefault(key, []).append(word + described(rule))
    for (verdict, reason, remedies), found in by_reason.items():
        yield ", ".join(found), f"{verdict}: {reason}", remedies or "-"


def described(rule: Rule) -> str:
    """Return the subject of a rule: a link if it has a page, otherwise words."""
    group, _, rest = rule.name.partition("/")
    if rule.name in TECHNIQUES:
        return f"[`{rule.name}`]({rest}.md)"
    words = rest.replace("_", " ") if group in ("run", "machine") else rest or group
    return f"`{words}`" if group not in ("run", "machine") and rest else words


def measured(name: str) -> str:
    """Return the rows of comparisons that have a technique, or a sentence that there are none."""
    group, _, option = name.partition("/")
    names = [option, *(file.stem for file in presets(name))]
    wanted = {option} if group == "callbacks" else {f"{group}={word}" for word in names}
    rows = [
        [benchmarks.title(content), *cells(row)]
        for content, found in benchmarks.comparisons()
        for row in found
        if row.technique in wanted
    ]
    page = benchmarks.page_of(option)
    page = f"More: [benchmark](../benchmarks/{page})." if page else ""
    if not rows:
        return page or "Not measured yet."
    head = ["recipe", *COMPARED, "status"]
    source = "Measured with [`lightning-eff compare`](../benchmarks/compare.md) on two CPU cores."
    return "\n\n".join(part for part in (table(head, rows), source, page) if part)


def techniques_table() -> str:
    """Return one row per technique: what it saves, what it costs, and when it is not worth using."""
    rows = []
    for name in TECHNIQUES:
        _, _, sections = card(name)
        page = DOCS / "techniques" / f"{name.rpartition('/')[2]}.md"
        title = page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        rows.append([f"[{title}]({page.name})", *(sections[each] for each in ("Saves", "Costs", "When not"))])
    return table(["technique", "saves", "costs", "when not"], rows)


def recipes_table() -> str:
    """Return one row per recipe, from the first comment in its file."""
    return table(["recipe", ""], ([f"`{entry.name}`", entry.summary] for entry in catalog.recipes()))


def excerpt() -> str:
    """Return the comparison that README shows."""
    content = benchmarks.kept()["compare_lm"]
    rows = [cells(ComparisonRow(**row))[:-1] for row in content["rows"]]
    return f"{table(COMPARED, rows)}\n\n{benchmarks.measured_on(content)}"


def reference() -> str:
    """Return every public name with its signature, summary and arguments, from its source."""
    by_folder: dict[str, list[str]] = {}
    for name, module in sorted(lightning_eff.public_names().items(), key=lambda item: item[0].lower()):
        folder, _, option = module.removeprefix("lightning_eff.").rpartition(".")
        parts = [f"### {name}", *documented(name)]
        if f"{folder}/{option}" in TECHNIQUES:
            parts.append(f"More: [{option}](techniques/{option}.md).")
        by_folder.setdefault(folder, []).append("\n\n".join(parts))
    return "\n\n".join("\n\n".join([f"## {folder}", *by_folder[folder]]) for folder in sorted(by_folder))


def documented(name: str) -> Iterator[str]:
    """Yield the signature of a public name, the summary of its docstring, and a table of its arguments."""
    found: Any = getattr(lightning_eff, name)
    function: Any = inspect.unwrap(found.__init__ if isinstance(found, type) else found)
    # A signature that an enum or torch defines would not help.
    if str(getattr(function, "__module__", "")).startswith("lightning_eff."):
        source = textwrap.dedent(inspect.getsource(function))
        node: Any = ast.parse(source).body[0]
        text = "\n".join(source.splitlines()[node.lineno - 1 : node.body[0].lineno - 1])
        text = re.sub(r"^def __init__\((\s*)self,?\s*", rf"{name}(\1", text).removeprefix("def ")
        yield f"```python\n{text.removesuffix(':').removesuffix(' -> None')}\n```"
    docstring = f"{inspect.cleandoc(found.__doc__)}\n"
    yield quoted(docstring.partition("\n")[0])
    section = re.search(r"^Args:\n((?: .*\n|\n)+)", docstring, re.MULTILINE)
    arguments = re.split(r"^    (\w+): ", section[1] if section else "", flags=re.MULTILINE)[1:]
    if arguments:
        pairs = zip(arguments[::2], arguments[1::2], strict=True)
        yield table(["argument", "meaning"], ([f"`{each}`", " ".join(text.split())] for each, text in pairs))


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
