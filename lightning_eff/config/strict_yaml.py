"""Read YAML files under strict rules, for Hydra and for this package; errors name the file and the line.

Hydra's own reader shows a PyYAML traceback for many mistakes, and reads some values in unexpected ways.
This reader accepts plain values only, each key once, and no aliases (`${key}` refers to a value). So a short
file cannot expand to a huge or endless one. With `RecipeFiles`, Hydra uses it too, and reads each file once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from typing_extensions import override
from yaml.error import MarkedYAMLError
from yaml.reader import ReaderError

from lightning_eff.core.errors import UsageError

MAX_DEPTH = 50
TOO_DEEP = f"nested deeper than {MAX_DEPTH} levels"
NO_MAPPING = "expected lines of key: value"
_PREFIX = "tag:yaml.org,2002:"
_NUMBER_TAGS = {f"{_PREFIX}int", f"{_PREFIX}float"}
_PLAIN_TAGS = _NUMBER_TAGS | {f"{_PREFIX}{kind}" for kind in ("null", "bool", "str", "seq", "map")}
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""Control characters, and characters that change a terminal's text direction."""


@dataclass(frozen=True)
class YamlDocument:
    """A file's plain content (None if it is empty), and its defaults list with line numbers."""

    file: Path
    content: Any
    defaults: Sequence[tuple[int, Any]] = ()
    header: str = ""
    """Start of the file, which may have a `# @package` line."""


class _Loader(get_yaml_loader()):
    """OmegaConf's loader, reading dates as strings; every node is checked before it is constructed."""

    def get_single_node(self) -> yaml.Node | None:
        try:
            root: yaml.Node | None = super().get_single_node()
        except RecursionError:
            raise MarkedYAMLError(problem=TOO_DEEP, problem_mark=self.get_mark()) from None
        seen: set[int] = set()
        nodes: list[tuple[Any, int, Any]] = [] if root is None else [(root, 1, root)]
        for node, depth, place in nodes:  # the loop extends the list
            if id(node) in seen:
                raise _fault(place, "aliases are not read: ${key} refers to another value")
            seen.add(id(node))
            if depth > MAX_DEPTH:
                raise _fault(node, TOO_DEEP)
            if node.tag not in _PLAIN_TAGS:
                tag = node.tag.replace(_PREFIX, "!!")
                raise _fault(node, f"tag {tag} is not allowed: expected plain values")
            if not isinstance(node, yaml.ScalarNode):
                nodes += [(inner, depth + 1, its_place) for inner, its_place in self._inside(node)]
            elif found := _CONTROL.search(node.value):
                raise _fault(node, f"the control character U+{ord(found[0]):04X} is not allowed")
            elif node.tag in _NUMBER_TAGS:
                self._check_number(node)
        return root

    def _inside(self, node: Any) -> list[tuple[yaml.Node, yaml.Node]]:
        """Return the nodes in a list or mapping, each with the node whose line its errors name."""
        if isinstance(node, yaml.SequenceNode):
            return list(zip(node.value, node.value, strict=True))
        keys: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == f"{_PREFIX}null":
                raise _fault(key, "a key must be a string")
            if key.value in keys:
                raise _fault(key, f"duplicate key {key.value!r}")
            keys.add(key.value)
        return [(inner, key) for key, value in node.value for inner in (key, value)]

    def _check_number(self, node: yaml.ScalarNode) -> None:
        if ":" in node.value:  # YAML 1.1: 1:30 is 90
            raise _fault(node, f"{node.value} is a number in base 60: put it in quotes for a text")
        try:
            self.construct_object(node)
        except ValueError:
            raise _fault(node, f"{node.value[:40]!r} is not a number") from None


def _fault(at: yaml.Node | yaml.Event, text: str) -> MarkedYAMLError:
    return MarkedYAMLError(problem=text, problem_mark=at.start_mark)


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False for invalid file names."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises for such a name


def file_error(file: Path, line: int, text: str) -> UsageError:
    """Return an error that starts with the file and the line."""
    return UsageError(f"{file}:{line}: {text}")


def read_yaml(file: Path, *, expect_mapping: bool = False) -> YamlDocument:
    """Read one file; with `expect_mapping`, reject a file that is empty or not a mapping.

    Raises:
        UsageError: It is not a regular file, or violates these rules; the text names file and line.
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
            raise file_error(file, 1, NO_MAPPING)
        return YamlDocument(file, content, _read_defaults(root, loader), text[:512])
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


class RecipeFiles(FileConfigSource):
    """Hydra's source of recipes and options in one folder.

    Args:
        provider: Hydra's name for the origin of the folder.
        path: The folder.
        documents: Collects the content of files, by recipe or option. All folders of a search path share it,
            so each file is read once for all compositions.
    """

    def __init__(self, provider: str, path: str, documents: dict[str, YamlDocument]) -> None:
        super().__init__(provider, path)
        self.documents = documents

    def __deepcopy__(self, _: Any) -> RecipeFiles:
        return self  # Hydra copies its sources for each composition

    @override
    def load_config(self, config_path: str) -> ConfigResult:
        name = config_path.removesuffix(".yaml")
        if name not in self.documents:
            # An option may be empty.
            self.documents[name] = read_yaml(Path(self.path, f"{name}.yaml"), expect_mapping="/" not in name)
        document = self.documents[name]
        if not isinstance(document.content, (dict, type(None))):
            raise file_error(document.file, 1, NO_MAPPING)
        config = OmegaConf.create(document.content or {})  # a new object, since Hydra changes it
        header = self._get_header_dict(document.header)
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)
