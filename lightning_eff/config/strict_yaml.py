"""Read one YAML file under strict rules, and report the file and line of what breaks them.

Hydra's own reader ends in a PyYAML traceback for many faults. This one accepts plain values only, each key
once and no aliases (`${key}` refers to a value), so that a short file cannot stand for a huge or endless one.
Recipes, options and a run's `resolved.yaml` are all read here and nowhere else.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from typing_extensions import override
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from lightning_eff.core.errors import UsageError

MAX_DEPTH = 50
MAX_NUMBER_CHARACTERS = 100
_PREFIX = "tag:yaml.org,2002:"
_PACKAGE = re.compile(r"\s*#\s*@package\s+(\S+)")  # Hydra reads it in the first line only
_NUMBER_TAGS = {f"{_PREFIX}int", f"{_PREFIX}float"}
_DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}
"""Of characters that change the order in which a terminal shows others."""
_PLAIN_TAGS = _NUMBER_TAGS | {f"{_PREFIX}{kind}" for kind in ("null", "bool", "str", "seq", "map")}


@dataclass(frozen=True)
class YamlDocument:
    """A file's plain content (None if it is empty), and the entries of its defaults list with their lines."""

    content: Any
    defaults: Sequence[tuple[int, Any]] = ()
    package: str | None = None
    """What its `# @package` line says."""


class _Loader(yaml.SafeLoader):
    """Checks each node while the file is composed; reads a date as a string, as Hydra does."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != f"{_PREFIX}timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    depth = 0

    @override
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event: Any = self.peek_event()
        if isinstance(event, yaml.AliasEvent):
            raise _fault(event, "aliases are not read: ${key} refers to another value")
        self.depth += 1
        if self.depth > MAX_DEPTH:  # before the recursion
            raise _fault(event, f"nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        if node is not None:
            self._check(node)
        return node

    def _check(self, node: yaml.Node) -> None:
        if node.tag not in _PLAIN_TAGS:
            tag = node.tag.replace(_PREFIX, "!!")
            raise _fault(node, f"tag {tag} is not allowed: expected plain values")
        if isinstance(node, yaml.ScalarNode):
            self._check_scalar(node)
        keys: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_PREFIX}null":
                raise _fault(key, "a key must be a string")
            if key.value in keys:
                raise _fault(key, f"duplicate key {key.value!r}")
            keys.add(key.value)

    def _check_scalar(self, node: yaml.ScalarNode) -> None:
        for char in node.value:
            is_control = unicodedata.category(char) == "Cc" and char not in "\n\t"
            if is_control or unicodedata.bidirectional(char) in _DIRECTIONS:
                raise _fault(node, f"the control character U+{ord(char):04X} is not allowed")
        if node.tag in _NUMBER_TAGS:
            if len(node.value) > MAX_NUMBER_CHARACTERS:
                text = f"a number of {len(node.value)} characters: expected at most {MAX_NUMBER_CHARACTERS}"
                raise _fault(node, text)
            if ":" in node.value:  # YAML 1.1: 1:30 is 90
                raise _fault(node, f"{node.value} is a number in base 60: put it in quotes for a text")
            try:
                self.construct_object(node)
            except ValueError:
                raise _fault(node, f"{node.value!r} is not a number") from None


def _fault(at: yaml.Node | yaml.Event, text: str) -> MarkedYAMLError:
    return MarkedYAMLError(problem=text, problem_mark=at.start_mark)


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
    text = ""
    try:
        text = file.read_bytes().decode("utf-8")
        loader = _Loader(text)
        root = loader.get_single_node()
        content = None if root is None else loader.construct_document(root)
        if expect_mapping and not isinstance(content, dict):
            raise file_error(file, 1, "expected lines of key: value")
        package = _PACKAGE.match(text)
        return YamlDocument(content, _read_defaults(root, loader), package and package[1])
    except OSError as error:
        raise file_error(file, 1, str(error.strerror)) from error
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise file_error(file, line, f"byte {error.object[error.start]:#04x} is not UTF-8") from error
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise file_error(file, mark.line + 1 if mark else 1, str(error.problem)) from error
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise file_error(file, line, f"character {error.character:#04x} is not allowed in YAML") from error


def _read_defaults(root: yaml.Node | None, loader: _Loader) -> list[tuple[int, Any]]:
    """Return the entries of a Hydra defaults list with their lines."""
    pairs = root.value if isinstance(root, yaml.MappingNode) else []
    listed = next((value for key, value in pairs if key.value == "defaults"), None)
    if listed is None:
        return []
    if not isinstance(listed, yaml.SequenceNode):
        raise _fault(listed, "defaults: expected a list of names and of group: option")
    entries: list[tuple[int, Any]] = []
    for node in listed.value:
        entry = names = loader.construct_object(node, deep=True)
        if isinstance(entry, dict) and len(entry) == 1:
            ((group, options),) = entry.items()
            names = [group, *(options if isinstance(options, list) else [options])]
            names = names[:1] if options is None else names
        if not all(isinstance(name, str) for name in (names if isinstance(names, list) else [names])):
            raise _fault(node, f"defaults: {entry!r}: expected a name, or one group: option")
        entries.append((node.start_mark.line + 1, entry))
    return entries
