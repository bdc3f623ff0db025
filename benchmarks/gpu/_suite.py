"""What the scripts of this folder share: parts, their results, and calls that are measured in turns.

A part is a function from a `Setting` to its cases by name. A case measures one thing and returns plain types:

    python benchmarks/gpu/gemm.py ceilings gemm --out results --seconds 130

The results of a part are in `results/PART.json`, written before and after each case. A case that ends its
process is recorded as such, and the same command with `--resume` does the remaining ones.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # the package of this checkout, and the bound of a product in tests/support

from lightning_eff.core import machine  # noqa: E402
from lightning_eff.core.errors import is_out_of_memory, root_cause_line  # noqa: E402

OUT = Path("outputs/gpu")
PACKAGES = ("triton", "peft", "torchao", "liger-kernel")
SAME = ("device", "torch", "triton", "lightning-eff", "sizes")
"""What has to be the same for a call to continue an earlier one."""
CLOCKS = "clocks.sm,clocks.max.sm,clocks.mem,power.draw,power.limit,temperature.gpu"
EXIT_FAULTS = 4
Measurement = Callable[[], dict[str, Any]]


class SkippedError(Exception):
    """A part or a case cannot run here; the text is the reason."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What the parts are run with."""

    device: torch.device
    smoke: bool = False  # the smallest sizes, whose figures mean nothing
    tokens: int = 131072  # length of the long sequence

    def size(self, full: int, smoke: int) -> int:
        """Return one of two sizes."""
        return smoke if self.smoke else full

    @property
    def is_cuda(self) -> bool:
        """Whether there is a GPU."""
        return self.device.type == "cuda"


Part = Callable[[Setting], dict[str, Measurement]]


def require(*packages: str) -> None:
    """Skip a part for which a package is not installed."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise SkippedError(f"{', '.join(missing)} not installed")


def one_case(name: str, measure: Callable[[Setting], dict[str, Any]], *packages: str) -> Part:
    """Return a part of one case, which needs some packages."""

    def part(setting: Setting) -> dict[str, Measurement]:
        require(*packages)
        return {name: partial(measure, setting)}

    return part


def main(about: str | None, parts: Mapping[str, Part]) -> None:
    """Run the parts that the command line names, by default all, and exit with 4 if a result is wrong."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (all)")
    parser.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"for PART.json ({OUT})")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case later (600)")
    parser.add_argument("--tokens", type=int, default=131072, help="length of the long sequence (131072)")
    parser.add_argument("--resume", action="store_true", help="keep the cases that --out has already")
    parser.add_argument("--smoke", action="store_true", help="the smallest sizes, also without a GPU")
    options = parser.parse_args()
    unknown = [name for name in options.parts if name not in parts]
    if unknown:
        parser.error(f"unknown part {unknown[0]}: expected {', '.join(parts)}")
    if not (options.smoke or torch.cuda.is_available()):
        parser.error("torch finds no CUDA device; --smoke runs the smallest sizes without one")
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    setting = Setting(device=device, smoke=options.smoke, tokens=options.tokens)
    end = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    faults: list[str] = []
    for name in options.parts or parts:
        content = run_part(parts[name], setting, options.out / f"{name}.json", end=end, resume=options.resume)
        faults += [f"{name}, {fault}" for fault in faults_of(content)]
    for fault in faults:
        sys.stderr.write(f"FAILED {fault}\n")
    sys.exit(EXIT_FAULTS if faults else 0)


def run_part(part: Part, setting: Setting, path: Path, *, end: float, resume: bool) -> dict[str, Any]:
    """Run the cases of a part that have no result yet, until a time; return what its file holds."""
    content = begin(setting, path, resume=resume)
    cases, call, began = content["cases"], content["calls"][-1], time.monotonic()
    try:
        measurements = part(setting)
    except SkippedError as reason:
        content["skipped"] = str(reason)
        measurements = {}
    call["clocks before"] = nvidia_smi(setting.device, CLOCKS)
    for name, measure in measurements.items():
        if name in cases:
            continue
        if time.monotonic() >= end:
            call["not run"] = [name for name in measurements if name not in cases]
            break
        cases[name] = {"error": "the process ended in this case"}
        write(path, content)
        cases[name] = result_of(measure)
        call["seconds"] = round(time.monotonic() - began, 1)
        write(path, content)
        sys.stdout.write(f"{path.stem} | {name} | {json.dumps(cases[name])}\n")
        if setting.is_cuda:
            torch.cuda.synchronize()  # raises, and ends the process, if the case has broken the device for it
            gc.collect()
            torch.cuda.empty_cache()
    call["clocks after"] = nvidia_smi(setting.device, CLOCKS)
    write(path, content)
    return content


def begin(setting: Setting, path: Path, *, resume: bool) -> dict[str, Any]:
    """Return the content of a part's file with this call added to its calls."""
    environment: dict[str, Any] = machine.machine_info(setting.device)
    environment |= {package: machine.package_version(package) for package in PACKAGES}
    environment["driver"] = nvidia_smi(setting.device, "driver_version")
    environment["sizes"] = "smoke" if setting.smoke else "full"
    content: dict[str, Any] = {"environment": environment, "calls": [], "cases": {}}
    if resume and path.exists():
        content = json.loads(path.read_text(encoding="utf-8"))
        other = [key for key in SAME if content["environment"].get(key) != environment[key]]
        if other:
            sys.exit(f"error: {path} was measured with another {', '.join(other)}: choose another --out")
    script = Path(sys.argv[0]).name
    command = shlex.join(["python", f"benchmarks/gpu/{script}", *sys.argv[1:]])
    content["calls"].append({"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds")})
    return content


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file at once, so that a killed process leaves a whole one."""
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def result_of(measure: Measurement) -> dict[str, Any]:
    """Return what a case measures, or why it cannot."""
    try:
        return measure()
    except SkippedError as reason:
        return {"skipped": str(reason)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the result of this case alone
        return {"error": describe(error)}


def describe(error: Exception) -> str:
    """Return an error in one line."""
    kind = "out of memory: " if is_out_of_memory(error) else ""
    return kind + root_cause_line(error).splitlines()[0][:300]


def faults_of(content: Mapping[str, Any]) -> list[str]:
    """Return a line for each case, or entry of a case, that failed or is wrong."""
    found: list[str] = []
    for name, case in content["cases"].items():
        entries = {name: case} | {f"{name}, {key}": entry for key, entry in case.items()}
        for key, entry in entries.items():
            reasons = [entry.get("error"), entry.get("wrong")] if isinstance(entry, dict) else []
            found += [f"{key}: {reason}" for reason in reasons if reason]
    return found


def nvidia_smi(device: torch.device, fields: str) -> str:
    """Return fields of a GPU now: clocks in MHz, power in W, temperature in degrees Celsius."""
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return "unknown"
    uuid = torch.cuda.get_device_properties(device).uuid
    command = [tool, f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    values = done.stdout.strip().split(", ")
    return ", ".join(f"{name} {value}" for name, value in zip(fields.split(","), values, strict=False))


def sync(device: torch.device) -> None:
    """Wait until a device has computed all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    calls: Mapping[str, Callable[[], Any]], setting: Setting, *, calls_per_turn: int = 5, rounds: int = 7
) -> dict[str, dict[str, Any]]:
    """Measure calls: first the memory of each, then its time in turns A B A B.

    Turns see the same clocks and temperatures. A call that raises is left out, with its error.

    Returns:
        By name `ms` (the median of the rounds, per call), `low`, `high`, `ratio` (how many times as fast as
        the first call it is), and on a GPU `peak_bytes`, allocated beyond what was there before.
    """
    device = setting.device
    calls_per_turn, rounds = (1, 2) if setting.smoke else (calls_per_turn, rounds)
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        try:
            call()  # compiles, and lets the allocator keep what is needed
            found[name] = peak_bytes(call, device)
        except Exception as error:  # noqa: BLE001 - whatever it is, the other calls are measured
            found[name] = {"error": describe(error)}
    times: dict[str, list[float]] = {name: [] for name in calls if "error" not in found[name]}
    for _ in range(rounds):
        for name, measured in times.items():
            sync(device)
            began = time.perf_counter()
            for _ in range(calls_per_turn):
                calls[name]()
            sync(device)
            measured.append(1e3 * (time.perf_counter() - began) / calls_per_turn)
    first = times.get(next(iter(calls)))
    for name, measured in times.items():
        found[name] |= {"ms": median(measured), "low": min(measured), "high": max(measured)}
        found[name]["ratio"] = median(first) / median(measured) if first else None
    return found


def peak_bytes(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the bytes that a call allocates at most beyond what is there; nothing without a GPU."""
    if device.type != "cuda":
        call()
        return {}
    sync(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    sync(device)
    return {"peak_bytes": torch.cuda.max_memory_allocated(device) - before}
