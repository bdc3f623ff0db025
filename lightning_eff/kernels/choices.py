"""Measured choices per GPU: the backend for each shape, and our kernels' speed relative to torch's library.

`dispatch.choices_of` returns the choices. Choices are stored as files in the user's cache folder. A file's
key consists of the GPU model, the versions of torch and Triton, and a hash of the kernels' code. A file is
valid only for its key. Changes to comments, docstrings or layout do not change the hash. Files in the folder
`measured` ship with the package and are read first. A damaged file counts as empty, and so does a file with
another key.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import tempfile
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lightning_eff.kernels.gemm_kernels import triton
from lightning_eff.kernels.tile_configs import BY_NAME, CONFIGS, Shape, TileConfig

LIBRARY = "torch's library"
SHIPPED = Path(__file__).with_name("measured")
SOURCES = ("gemm_kernels.py", "epilogue.py", "launch.py")
"""Source files whose code affects the speed of all configs."""


class Choice(NamedTuple):
    """The backend that was chosen for a shape: `LIBRARY`, or the name of a config."""

    by: str
    ratio: float  # speed of the fastest config relative to the library; 0 if every result was wrong

    @property
    def config(self) -> TileConfig | None:
        """The config, or None for the library."""
        return BY_NAME.get(self.by)


class Choices:
    """The choices for one GPU model, indexed by the names of shapes.

    Args:
        device: A GPU of this model.
    """

    def __init__(self, device: torch.device) -> None:
        gpu: Any = torch.cuda.get_device_properties(device)
        # The hash covers kernels and configs, because measurements of other kernels or configs do not apply.
        kernels = hashlib.sha256(repr(CONFIGS).encode())
        for source in SOURCES:
            kernels.update(_code(Path(__file__).with_name(source)).encode())
        self.key = {
            "device": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "torch": str(torch.__version__),
            "triton": str(triton.__version__), "kernels": kernels.hexdigest()[:16],
        }  # fmt: skip
        name = re.sub(r"[^\w.]+", "-", " ".join(self.key.values())) + ".json"
        self.path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_eff", name)
        self.known: dict[str, Choice] = {}
        self.asked: dict[Shape, str] = {}  # shapes of this run, with the reason if not measured
        # The user's file is read last, so that its measurements replace the shipped measurements.
        for path in (SHIPPED / name, self.path):
            # Without a readable file, all shapes are measured.
            with suppress(OSError):
                self.adopt(path.read_bytes())

    def adopt(self, text: str | bytes) -> None:
        """Add the choices in a text, which is from a file or from rank 0; ignore a text with another key."""
        try:
            content = json.loads(text)
            if content["key"] == self.key:
                read = {shape: Choice(by, float(ratio)) for shape, (by, ratio) in content["choices"].items()}
                # Ignore configs that this version of the package does not have.
                self.known |= {shape: each for shape, each in read.items() if each.by in (LIBRARY, *BY_NAME)}
        # If the text is damaged, shapes are measured again.
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            return

    def text(self) -> str:
        """Return the choices as text that `adopt` reads."""
        return json.dumps({"key": self.key, "choices": self.known}, indent=1) + "\n"

    def add(self, shape: Shape, choice: Choice) -> None:
        """Store a choice, and write it to the file; choices that other processes have written are kept.

        Warns:
            UserWarning: The file cannot be written.
        """
        temporary = None
        try:
            # Read the file again, because other processes may have added choices.
            with suppress(FileNotFoundError):
                self.adopt(self.path.read_bytes())
            self.known[str(shape)] = choice  # after `adopt`, so that an older choice is replaced
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.text())
            Path(temporary).replace(self.path)  # atomic: another process never reads a partial file
        except OSError as error:
            self.known[str(shape)] = choice
            text = f"the choices of GEMM kernels cannot be kept in {self.path}, and are measured in every run"
            warnings.warn(f"{text}: {error.strerror}", UserWarning, stacklevel=2)
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row per shape of this run: the backend, and its ratio or why nothing was measured."""
        rows: list[dict[str, Any]] = []
        for shape, reason in self.asked.items():
            choice = self.known.get(str(shape))
            found = {"by": LIBRARY, "not measured": reason} if choice is None else choice._asdict()
            rows.append({"shape": str(shape)} | found)
        return rows

    def ours(self) -> list[set[int]]:
        """Return M, N and K of the shapes that our kernels compute in this run."""
        known = ((shape, self.known.get(str(shape))) for shape in self.asked)
        return [
            {shape.M, shape.N, shape.K} for shape, choice in known if choice is not None and choice.config
        ]


def _code(path: Path) -> str:
    """Return the code of a module in a normalized layout, without comments and docstrings."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            texts = [s for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
            node.body = [statement for statement in node.body if statement not in texts] or [ast.Pass()]
    return ast.unparse(tree)
