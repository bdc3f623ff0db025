"""Read YAML files under strict rules, for Hydra and for this package; errors name the file and the line.

Hydra's own reader shows a PyYAML traceback for many mistakes. This reader accepts plain values and rejects
aliases; use an interpolation `${key}` instead of an alias. Without aliases, a short file cannot expand to a
huge or endless document. Without objects, a tag cannot run code. Through `RecipeFiles`, Hydra uses this
reader too, and reads each file once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.config_source import ConfigResult
from omegaconf import OmegaConf
from omegaconf._utils import get_yaml_loader  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
from omegaconf.errors import OmegaConfBaseException
from typing_extensions import override
from yaml.error import MarkedYAMLError

from lightning_eff.core.errors import UsageError

NO_MAPPING = "expected lines of key: value"
PLAIN_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")}


@dataclass(frozen=True)
class YamlDocument:
    """A file's content in plain types; None for an empty file."""

    file: Path
    content: Any
    header: str = ""
    """Start of the file, which may contain a `# @package` line."""


class _Loader(get_yaml_loader()):
    """OmegaConf's loader, which rejects duplicate keys and Python objects, and reads dates as strings."""

    # In addition to OmegaConf's rules, reject aliases and tags.
    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            problem = "aliases are not read: ${key} refers to another value"
            raise MarkedYAMLError(problem=problem, problem_mark=self.peek_event().start_mark)
        node: Any = super().compose_node(parent, index)
        if node.tag not in PLAIN_TAGS:
            problem = (
                f"tag {node.tag.replace('tag:yaml.org,2002:', '!!')} is not allowed: expected plain values"
            )
            raise MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return node


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file; False for invalid file names."""
    return os.path.isfile(path)  # noqa: PTH113 - pathlib raises for such a name


def read_yaml(file: Path, *, expect_mapping: bool = False) -> YamlDocument:
    """Read one file; with `expect_mapping`, reject a file that is empty or not a mapping.

    Raises:
        UsageError: The path is not a regular file, or the file violates the rules of this module.
    """
    if not is_file(file):  # opening a FIFO would block until something writes to it
        raise UsageError(f"{file}: expected a regular file")
    try:
        text = file.read_bytes().decode("utf-8")
        content = _Loader(text).get_single_data()
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        mark: Any = getattr(error, "problem_mark", None)
        reason = getattr(error, "problem", None) or getattr(error, "strerror", None) or str(error)
        line, reason = mark.line + 1 if mark else 1, str(reason).splitlines()[0][:200]
        raise UsageError(f"{file}:{line}: {reason}") from error
    if expect_mapping and not isinstance(content, dict):
        raise UsageError(f"{file}:1: {NO_MAPPING}")
    return YamlDocument(file, content, text[:512])


class RecipeFiles(FileConfigSource):
    """Hydra's source of recipes and options in one folder.

    Args:
        provider: Hydra's name for the origin of the folder.
        path: Path of the folder.
        documents: Cache of file contents, keyed by recipe or option name. All folders of a search path share
            the cache, so that each file is read once for all compositions.
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
            # The file of an option may be empty; the file of a recipe may not.
            self.documents[name] = read_yaml(Path(self.path, f"{name}.yaml"), expect_mapping="/" not in name)
        document = self.documents[name]
        if not isinstance(document.content, (dict, type(None))):
            raise UsageError(f"{document.file}:1: {NO_MAPPING}")
        try:
            config = OmegaConf.create(document.content or {})  # a new object, since Hydra changes it
        except OmegaConfBaseException as error:  # for example, a key of a type that Hydra does not support
            raise UsageError(f"{document.file}:1: {str(error).splitlines()[0]}") from error
        header = self._get_header_dict(document.header)
        return ConfigResult(self.provider, f"{self.scheme()}://{self.path}", config, header)
