"""What was measured on a GPU: who computes each shape, and how our kernels compare with torch's library.

Choices are kept in a file of the user's cache folder, one for each kind of GPU, versions of torch and Triton,
and state of the kernels' sources: they hold for nothing else. The folder `measured` here has such
files, which ship with the package and are read first. A file that is damaged, or of something else, is empty.
"""

from __future__ import annotations

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
"""What the speed of a config depends on, besides its numbers."""


class Choice(NamedTuple):
    """Who computes a shape: `LIBRARY`, or a config by its name."""

    by: str
    ratio: float  # how many times as fast as the library the fastest config was; 0 where none was right

    @property
    def config(self) -> TileConfig | None:
        """The config, or None for the library."""
        return BY_NAME.get(self.by)


class Choices:
    """The choices of one kind of GPU, by the names of shapes.

    Args:
        device: One of these GPUs.
    """

    def __init__(self, device: torch.device) -> None:
        gpu: Any = torch.cuda.get_device_properties(device)
        kernels = hashlib.sha256(repr(CONFIGS).encode())
        for source in SOURCES:
            kernels.update(Path(__file__).with_name(source).read_bytes())
        self.key = {
            "device": gpu.name, "capability": f"{gpu.major}.{gpu.minor}", "torch": str(torch.__version__),
            "triton": str(triton.__version__), "kernels": kernels.hexdigest()[:16],
        }  # fmt: skip
        name = re.sub(r"[^\w.]+", "-", " ".join(self.key.values())) + ".json"
        self.path = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "lightning_eff", name)
        self.known: dict[str, Choice] = {}
        self.asked: dict[Shape, str] = {}  # shapes of this run, and why one was not measured
        for path in (SHIPPED / name, self.path):
            with suppress(OSError):
                self.adopt(path.read_bytes())

    def adopt(self, text: str | bytes) -> None:
        """Add the choices in the text of a file, or in rank 0's; those of another key are none."""
        try:
            content = json.loads(text)
            if content["key"] == self.key:
                read = {shape: Choice(by, float(ratio)) for shape, (by, ratio) in content["choices"].items()}
                self.known |= {shape: each for shape, each in read.items() if each.by in (LIBRARY, *BY_NAME)}
        except (ValueError, TypeError, KeyError, AttributeError):  # data of any form: measured again
            return

    def text(self) -> str:
        """Return what `adopt` reads."""
        return json.dumps({"key": self.key, "choices": self.known}, indent=1) + "\n"

    def add(self, shape: Shape, choice: Choice) -> None:
        """Keep a choice, in the file too, with what another process has written there meanwhile.

        Warns:
            UserWarning: The file cannot be written.
        """
        temporary = None
        try:
            with suppress(FileNotFoundError):
                self.adopt(self.path.read_bytes())
            self.known[str(shape)] = choice
            self.path.parent.mkdir(parents=True, exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(self.text())
            Path(temporary).replace(self.path)  # at once: another process reads a whole file
        except OSError as error:
            self.known[str(shape)] = choice
            text = f"the choices of GEMM kernels cannot be kept in {self.path}, and are measured in every run"
            warnings.warn(f"{text}: {error.strerror}", UserWarning, stacklevel=2)
        finally:
            if temporary is not None:
                Path(temporary).unlink(missing_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each shape of this run: who computes it, and the ratio or why there is none."""
        rows: list[dict[str, Any]] = []
        for shape, reason in self.asked.items():
            choice = self.known.get(str(shape))
            found = {"by": LIBRARY, "not measured": reason} if choice is None else choice._asdict()
            rows.append({"shape": str(shape)} | found)
        return rows

    def ours(self) -> list[set[int]]:
        """Return M, N and K of each shape of this run that a kernel of ours computes."""
        known = ((shape, self.known.get(str(shape))) for shape in self.asked)
        return [
            {shape.M, shape.N, shape.K} for shape, choice in known if choice is not None and choice.config
        ]
