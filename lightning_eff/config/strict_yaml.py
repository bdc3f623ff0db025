"""Read one YAML file under strict rules, and report the file and line of what breaks them.

Hydra's own reader ends in a PyYAML traceback for many faults. This one accepts plain values only, each key
once, no alias inside its own anchor, and limits depth, size and digits well above what any recipe needs.
Recipes, options and a run's `resolved.yaml` are all read here and nowhere else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from lightning_eff.core.errors import UsageError

MAX_DEPTH = 50
MAX_NUM_NODES = 100_000
"""Counts an alias as its whole anchor: nine nested levels of nine aliases are 400 million nodes."""
MAX_NUMBER_CHARACTERS = 100
_PREFIX = "tag:yaml.org,2002:"
_PLAIN_TAGS = {f"{_PREFIX}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NUMBER_TAGS = {f"{_PREFIX}int", f"{_PREFIX}float"}


class _Loader(yaml.SafeLoader):
    """Reads a date as a string, as Hydra does."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_PREFIX}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class YamlDocument:
    """A YAML file that was read.

    Args:
        file: Its path.
        content: Plain dictionaries, lists and values; None for an empty file.
        defaults: Entries of its Hydra defaults list, each with its line: a name, or a group with its options.
    """

    file: Path
    content: Any
    defaults: Sequence[tuple[int, Any]] = ()


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False for a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises for such a name


def file_error(file: Path, line: int, text: str) -> UsageError:
    """Return an error that begins with the file and the line."""
    return UsageError(f"{file}:{line}: {text}")


def read_yaml(file: Path, *, expect_mapping: bool = False) -> YamlDocument:
    """Read one file; with `expect_mapping` reject a file that is not a mapping, or is empty.

    Raises:
        UsageError: It is not a regular file, or not such a YAML file; the text names file and line.
    """
    if not is_file(file):  # opening a FIFO would block until something writes to it
        raise file_error(file, 1, "expected a regular file")
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise file_error(file, 1, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise file_error(file, line, f"byte {error.object[error.start]:#04x} is not UTF-8") from error
    try:
        # Depth is checked on the event stream first: composing the nodes below is recursive.
        depth = 0
        for event in yaml.parse(text, Loader=_Loader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise file_error(file, event.start_mark.line + 1, f"nested deeper than {MAX_DEPTH} levels")
        loader, document = _Loader(text), YamlDocument(file, None)
        root = loader.get_single_node()
        if root is not None:
            _NodeCheck(file, loader).measure(root)
            content = loader.construct_document(root)
            document = YamlDocument(file, content, _read_defaults(file, root, loader))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise file_error(file, mark.line + 1 if mark else 1, str(error.problem)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise file_error(file, line, f"character {error.character:#04x} is not allowed in YAML") from error
    if expect_mapping and not isinstance(document.content, dict):
        raise file_error(file, 1, "expected lines of key: value")
    return document


@dataclass(frozen=True)
class _NodeCheck:
    """Checks every node of one file once."""

    file: Path
    loader: _Loader
    measured: dict[yaml.Node, tuple[int, int] | None] = field(default_factory=dict)

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Return the number of nodes and the depth, with each alias counted as its whole anchor."""
        if node not in self.measured:
            self.measured[node] = None  # until its children are measured: an alias to it is a cycle
            self._check(node)
            children: list[yaml.Node] = []
            if isinstance(node, yaml.MappingNode):
                children = [child for pair in node.value for child in pair]
            elif isinstance(node, yaml.SequenceNode):
                children = node.value
            sizes = [self.measure(child) for child in children]
            depth = 1 + max((depth for _, depth in sizes), default=0)
            self.measured[node] = 1 + sum(size for size, _ in sizes), depth
        measured = self.measured[node]
        if measured is None:
            raise self._error(node, "an alias inside its own anchor, which never ends")
        if measured[0] > MAX_NUM_NODES:
            raise self._error(node, f"more than {MAX_NUM_NODES} values, with aliases expanded")
        if measured[1] > MAX_DEPTH + 1:
            raise self._error(node, f"nested deeper than {MAX_DEPTH} levels")
        return measured

    def _check(self, node: yaml.Node) -> None:
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace(_PREFIX, "!!")
            raise self._error(node, f"tag {tag} is not allowed: expected plain values")
        if node.tag in _NUMBER_TAGS and isinstance(node, yaml.ScalarNode):
            if len(node.value) > MAX_NUMBER_CHARACTERS:
                text = f"a number of {len(node.value)} characters: expected at most {MAX_NUMBER_CHARACTERS}"
                raise self._error(node, text)
            try:
                self.loader.construct_object(node)
            except ValueError as error:
                raise self._error(node, f"{node.value!r} is not a number") from error
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode):
                raise self._error(key, "a key must be a string")
            if key.value in keys:
                raise self._error(key, f"duplicate key {key.value!r}")
            keys.add(key.value)

    def _error(self, node: yaml.Node, text: str) -> UsageError:
        return file_error(self.file, node.start_mark.line + 1, text)


def _read_defaults(file: Path, root: yaml.Node, loader: _Loader) -> list[tuple[int, Any]]:
    """Return the entries of a Hydra defaults list with their lines."""
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    listed = next((value for key, value in pairs if key.value == "defaults"), None)
    if listed is None:
        return []
    if not isinstance(listed, yaml.SequenceNode):
        line = listed.start_mark.line + 1
        raise file_error(file, line, "defaults: expected a list of names and of group: option")
    entries = [(node.start_mark.line + 1, loader.construct_object(node, deep=True)) for node in listed.value]
    for line, entry in entries:
        is_valid = isinstance(entry, str)
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, options),) = entry.items()
            names = options if isinstance(options, list) else [options]
            are_names = options is None or all(isinstance(name, str) for name in names)
            is_valid = isinstance(group, str) and are_names
        if not is_valid:
            raise file_error(file, line, f"defaults: {entry!r}: expected a name, or one group: option")
    return entries
