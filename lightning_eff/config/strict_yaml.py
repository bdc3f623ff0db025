"""Read the YAML files of a recipe before Hydra does, and name file and line of what cannot be read.

Stricter than Hydra, which ends in a traceback of PyYAML or of its own: plain values alone, each key once, no
alias inside what it stands for, and limits on depth, size and digits that no recipe comes near.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from lightning_eff.core.errors import UsageError

MAX_DEPTH = 50
MAX_NUM_NODES = 100_000
"""With each alias counted as what it stands for: nine levels of nine aliases are 400 million nodes."""
MAX_NUMBER_CHARACTERS = 100
_PREFIX = "tag:yaml.org,2002:"
_TIMESTAMP = f"{_PREFIX}timestamp"
_PLAIN = {f"{_PREFIX}{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
_NUMBERS = {f"{_PREFIX}int", f"{_PREFIX}float"}


class _Loader(yaml.SafeLoader):
    """Leaves dates texts, as Hydra does."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in found if tag != _TIMESTAMP]
        for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class YamlDocument:
    """A YAML file that was read.

    Args:
        file: Where it lies.
        content: Plain dictionaries, lists and values; None for an empty file.
        defaults: The entries of its list of defaults: the line, then a name or a group with its options.
    """

    file: Path
    content: Any
    defaults: Sequence[tuple[int, Any]] = ()

    def refusal(self, line: int, text: str) -> UsageError:
        """Return an error that names the file and a line."""
        return _refusal(self.file, line, text)


def is_file(path: Path) -> bool:
    """Say whether there is a regular file, also of a name that no file can have."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises about such a name


def read_yaml(file: Path) -> YamlDocument:
    """Read one file.

    Raises:
        UsageError: It is no regular file, or no such YAML; file and line are named.
    """
    if not is_file(file):  # a FIFO would wait for a writer
        raise _refusal(file, 1, "expected a regular file")
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise _refusal(file, 1, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise _refusal(file, line, f"byte {error.object[error.start]:#04x} is not UTF-8") from error
    try:
        _check_depth(file, text)
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return YamlDocument(file, None)
        _Check(file, loader).measure(root)
        return YamlDocument(file, loader.construct_document(root), _defaults(file, root, loader))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise _refusal(file, mark.line + 1 if mark else 1, str(error.problem)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise _refusal(file, line, f"character {error.character:#04x} is not allowed in YAML") from error


def read_mapping(file: Path) -> YamlDocument:
    """Read a file of `key: value` lines.

    Raises:
        UsageError: As `read`, or it holds something else.
    """
    document = read_yaml(file)
    if not isinstance(document.content, dict):
        raise document.refusal(1, "expected lines of key: value")
    return document


def _refusal(file: Path, line: int, text: str) -> UsageError:
    return UsageError(f"{file}:{line}: {text}")


def _line(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def _check_depth(file: Path, text: str) -> None:
    """Refuse what is nested deeper than anything that is read recursively later."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _refusal(file, event.start_mark.line + 1, f"nested deeper than {MAX_DEPTH} levels")


class _Check:
    """Looks at every node of a file once.

    Args:
        file: Is named.
        loader: Makes the value of a number.
    """

    def __init__(self, file: Path, loader: _Loader) -> None:
        self._file = file
        self._loader = loader
        self._measured: dict[yaml.Node, tuple[int, int] | None] = {}

    def measure(self, node: yaml.Node) -> tuple[int, int]:
        """Return how many nodes there are and how deep, each alias counted as what it stands for."""
        if node not in self._measured:
            self._measured[node] = None
            self._check(node)
            below = [self.measure(child) for child in _children(node)]
            depth = 1 + max((depth for _, depth in below), default=0)
            self._measured[node] = 1 + sum(size for size, _ in below), depth
        found = self._measured[node]
        if found is None:
            raise self._refusal(node, "an alias inside what it stands for, which never ends")
        if found[0] > MAX_NUM_NODES:
            raise self._refusal(node, f"more than {MAX_NUM_NODES} values, each alias counted")
        if found[1] > MAX_DEPTH + 1:
            raise self._refusal(node, f"nested deeper than {MAX_DEPTH} levels")
        return found

    def _check(self, node: yaml.Node) -> None:
        if node.tag not in _PLAIN:
            tag = node.tag.replace(_PREFIX, "!!")
            raise self._refusal(node, f"tag {tag} is not allowed: expected plain values")
        if node.tag in _NUMBERS and isinstance(node, yaml.ScalarNode):
            self._check_number(node)
        if isinstance(node, yaml.MappingNode):
            self._check_keys(node)

    def _check_number(self, node: yaml.ScalarNode) -> None:
        if len(node.value) > MAX_NUMBER_CHARACTERS:
            text = f"a number of {len(node.value)} characters: expected at most {MAX_NUMBER_CHARACTERS}"
            raise self._refusal(node, text)
        try:
            self._loader.construct_object(node)
        except ValueError as error:
            raise self._refusal(node, f"{node.value!r} is no number") from error

    def _check_keys(self, node: yaml.MappingNode) -> None:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refusal(key, "a key must be a text")
            if key.value in seen:
                raise self._refusal(key, f"duplicate key {key.value!r}")
            seen.add(key.value)

    def _refusal(self, node: yaml.Node, text: str) -> UsageError:
        return _refusal(self._file, _line(node), text)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []


def _defaults(file: Path, root: yaml.Node, loader: _Loader) -> list[tuple[int, Any]]:
    """Return the list of defaults with the lines of its entries."""
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    listed = next((value for key, value in pairs if key.value == "defaults"), None)
    if listed is None:
        return []
    if not isinstance(listed, yaml.SequenceNode):
        raise _refusal(file, _line(listed), "defaults: expected a list of names and of group: option")
    entries = [(_line(node), loader.construct_object(node, deep=True)) for node in listed.value]
    for line, entry in entries:
        if not _is_entry(entry):
            raise _refusal(file, line, f"defaults: {entry!r}: expected a name, or one group: option")
    return entries


def _is_entry(entry: Any) -> bool:
    """Say whether Hydra can use an entry: a name, or one group with an option, several, or none."""
    if not isinstance(entry, dict):
        return isinstance(entry, str)
    if len(entry) != 1:
        return False
    ((group, options),) = entry.items()
    names = options if isinstance(options, list) else [options]
    return isinstance(group, str) and all(isinstance(n, str) for n in names if options is not None)
