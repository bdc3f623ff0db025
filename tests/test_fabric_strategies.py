"""FSDP2Fabric and ZeroFabric on two ranks (gloo): the steps of a plain loop, and its checkpoints.

Two processes are started once for each strategy. `main` runs in both, and the tests read the results. The
plain loop has the samples of both ranks and of a window in one batch.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import Tensor, nn

from lightning_eff import DeepSpeedZero, ExactGradient, FSDP2Fabric, ZeroFabric
from lightning_eff.checkpoint.atomic_io import AtomicFiles
from lightning_eff.core.errors import ConflictError
from lightning_eff.strategy.fsdp2 import FSDP2
from tests.support.fabric_loop import (
    CLIP,
    NUM_STEPS,
    SAVED_AFTER,
    TOLERANCES,
    Loop,
    assert_weights,
    data,
    error_of,
    exact,
    exact_plain,
    plain,
    tower,
    usual,
    with_the_trainer,
)
from tests.support.processes import ROOT
from tests.support.ranks import results_of_two_ranks

DTYPES = {"fsdp2": torch.float64, "zero": torch.float32}


def main(folder: str) -> dict[str, Any]:
    path = Path(folder)
    return {"fsdp2": fsdp2, "zero": zero}[path.name](path)


def fsdp2(path: Path) -> dict[str, Any]:
    dtype = DTYPES["fsdp2"]
    found = usual(path, FSDP2Fabric, dtype)
    offloaded = Loop(FSDP2Fabric(checkpoints="sharded", cpu_offload=True), dtype, separate=True)
    state = offloaded.state(0)
    found["rest"] = offloaded.fabric.load(path / "plain.ckpt", state)
    found["step"] = state["step"]
    offloaded.fabric.save(path / "folder.ckpt", offloaded.state(SAVED_AFTER))
    found["resumed"] = offloaded.train(SAVED_AFTER, NUM_STEPS).gathered()
    again = Loop(FSDP2Fabric(reshard_after_forward=False), dtype)
    again.fabric.load(path / "folder.ckpt", again.state(0))
    again.fabric.setup_module(nn.Linear(2, 2))  # a module without Lightning's steps
    found["from_folder"] = again.train(SAVED_AFTER, NUM_STEPS).gathered()
    found["by_value"] = Loop(FSDP2Fabric(), dtype).train(0, NUM_STEPS, value=0.01).gathered()
    found |= with_the_trainer(path, FSDP2Fabric, FSDP2(), dtype)
    return found | {"rejected": [error_of(act) for act in (auto_size, half_window)]}


def zero(path: Path) -> dict[str, Any]:
    dtype = DTYPES["zero"]
    found = usual(path, ZeroFabric, dtype)
    found |= with_the_trainer(path, ZeroFabric, DeepSpeedZero(stage=1), dtype)
    first = Loop(ZeroFabric(stage=1), dtype)
    state = first.state(0)
    found["rest"] = first.fabric.load(path / "plain.ckpt", state)
    found["step"] = state["step"]
    first.fabric.save(path / "stage1.ckpt", first.state(SAVED_AFTER))
    found["resumed"] = first.train(SAVED_AFTER, NUM_STEPS).gathered()
    found["synced"] = first.synced
    third = Loop(ZeroFabric(stage=3), dtype)
    third.fabric.load(path / "stage1.ckpt", third.state(0))
    found["from_stage_1"] = third.train(SAVED_AFTER, NUM_STEPS).gathered()
    for stage in (1, 3):
        loop = Loop(ZeroFabric(stage=stage, offload_optimizer="cpu"), dtype)
        loop.fabric.backward(loop.model(data(dtype)[3][0]).sum())
        found[f"discarded_{stage}"] = loop.train(0, NUM_STEPS).gathered()
    found["exact_3"] = exact(ZeroFabric(stage=3), dtype)
    found["evaluated"] = [evaluated(stage, path, dtype) for stage in (2, 3)]
    return found | {"rejected": [error_of(act) for act in REJECTED_BY_ZERO]}


def evaluated(stage: Any, path: Path, dtype: torch.dtype) -> Tensor:
    """Return the output of a model that was loaded without an optimizer."""
    fabric = Fabric(accelerator="cpu", devices=2, strategy=ZeroFabric(stage=stage))
    fabric.launch()
    model = fabric.setup_module(tower(dtype, seed=9))
    fabric.load(path / "ours.ckpt", {"model": model})
    with torch.no_grad():
        return model(data(dtype)[0][0])


def clip_by_value() -> None:
    loop = Loop(ZeroFabric(), torch.float32)
    loop.fabric.clip_gradients(loop.model, loop.optimizer, clip_val=0.1)


def not_finite() -> None:
    loop = Loop(ZeroFabric(), torch.float32)
    loop.fabric.backward(loop.model(data(torch.float32)[0][0]).sum() * torch.inf)
    loop.fabric.clip_gradients(loop.model, loop.optimizer, max_norm=1.0)
    loop.optimizer.step()


def half_window() -> None:
    loop = Loop(FSDP2Fabric(), torch.float64)
    with loop.fabric.no_backward_sync(loop.model):
        loop.fabric.backward(loop.model(data(torch.float64)[0][0]).sum())
    loop.optimizer.step()


def discarded() -> None:
    loop = Loop(ZeroFabric(), torch.float32)
    loop.fabric.backward(loop.model(data(torch.float32)[0][0]).sum())
    loop.optimizer.zero_grad()
    loop.optimizer.step()


def second_model() -> None:
    loop = Loop(ZeroFabric(), torch.float32)
    loop.fabric.setup(tower(torch.float32), tower(torch.float32).optimizer())


def stepped_twice() -> None:
    Loop(ZeroFabric(), torch.float32).train(0, 1).optimizer.step()


REJECTED_BY_ZERO = (*(clip_by_value, second_model, not_finite, discarded, stepped_twice),)


def auto_size() -> None:
    loop = Loop(FSDP2Fabric(), torch.float64)
    ExactGradient(loop.model, fabric=loop.fabric, micro_batch_size="auto")


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("fsdp2", "zero")]
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Return the folder of two ranks' checkpoints, and their results."""
    folder, dtype = tmp_path_factory.mktemp(request.param, numbered=False), DTYPES[request.param]
    saved = plain(dtype, SAVED_AFTER)
    content = {"model": saved.state, "optimizer": saved.optimizer, "schedule": saved.schedule}
    torch.save(content | {"step": SAVED_AFTER, "more": [1]}, folder / "plain.ckpt")
    results, other = results_of_two_ranks(__name__, folder)
    return SimpleNamespace(
        name=request.param, folder=folder, dtype=dtype, results=results, other=other, saved=saved
    )


def test_steps_equal_a_plain_loops(run: Any) -> None:
    """Windows of two micro-batches on two ranks, clipped by the norm of the full gradient."""
    ended = plain(run.dtype)
    assert_weights(run.results["saved"], run.saved.state, run.dtype)
    assert_weights(run.results["ended"], ended.state, run.dtype)
    assert_weights(run.other["ended"], ended.state, run.dtype)
    assert min(ended.norms) > CLIP, "each step is clipped"
    if run.name == "fsdp2":
        assert run.results["norms"] == pytest.approx(ended.norms, rel=1e-12)
        assert_weights(run.results["by_value"], plain(run.dtype, value=0.01).state, run.dtype)
    for key in [key for key in run.results if key.startswith("exact")]:
        assert_weights(run.results[key], exact_plain(run.dtype), run.dtype)


def test_zero_grad_discards_the_gradients_of_a_backward_pass(run: Any) -> None:
    """In all stages of ZeRO, also with offload."""
    keys = [key for key in run.results if key.startswith("discarded")]
    assert len(keys) == {"fsdp2": 1, "zero": 3}[run.name]
    for key in keys:
        assert_weights(run.results[key], plain(run.dtype).state, run.dtype)


def test_gradients_are_reduced_once_per_window(run: Any) -> None:
    """FSDP2: in the last backward pass, for each of three blocks and for the rest. ZeRO 1: in the step."""
    expected = [(0, 4)] * NUM_STEPS if run.name == "fsdp2" else [(0, 0)] * (NUM_STEPS - SAVED_AFTER)
    assert run.results["synced"] == expected


def test_a_checkpoint_equals_a_plain_loops(run: Any) -> None:
    """Saved on two ranks and loaded on one, and the other way round; also as a folder."""
    ours = torch.load(run.folder / "ours.ckpt", weights_only=True)
    assert ours["step"] == SAVED_AFTER
    ended = plain(run.dtype).state
    assert_weights(plain(run.dtype, resume=ours).state, ended, run.dtype)
    assert_weights(run.results["resumed"], ended, run.dtype)
    assert run.results["rest"] == {"more": [1]}
    assert run.results["step"] == SAVED_AFTER
    if run.name == "fsdp2":
        assert_weights(run.results["from_folder"], ended, run.dtype)
        folder = AtomicFiles().load_checkpoint(run.folder / "folder.ckpt")  # as ZeroFabric would
        assert_weights(plain(run.dtype, resume=folder).state, ended, run.dtype)
    else:
        assert_weights(run.results["from_stage_1"], ended, run.dtype)
        model = tower(run.dtype)
        model.load_state_dict(ours["model"])
        expected = model(data(run.dtype)[0][0])
        for outputs in run.results["evaluated"]:
            torch.testing.assert_close(outputs, expected, **TOLERANCES[run.dtype])


def test_a_checkpoint_goes_to_the_trainer_and_back(run: Any) -> None:
    ended = plain(run.dtype)
    assert_weights(run.results["trained"], ended.state, run.dtype)
    assert "loops" in run.results["trainer_rest"]
    assert "state_dict" not in run.results["trainer_rest"]
    assert run.results["is_kept"], "the caller's list still has Fabric's wrapper of the optimizer"
    back = torch.load(run.folder / "back.ckpt", weights_only=True)["optimizer"]["state"]
    for number, entry in ended.optimizer["state"].items():
        torch.testing.assert_close(
            back[number]["momentum_buffer"], entry["momentum_buffer"], **TOLERANCES[run.dtype]
        )


def test_unsupported_calls_are_rejected(run: Any) -> None:
    expected = {
        "zero": ("clip_val", "another", "not finite", *["no gradients"] * 2),
        "fsdp2": ("micro_batch_size='auto'", "no_backward_sync"),
    }
    for message, part in zip(run.results["rejected"], expected[run.name], strict=True):
        assert part in message


def test_one_device_is_rejected() -> None:
    with pytest.raises(ConflictError):
        Fabric(accelerator="cpu", devices=1, strategy=FSDP2Fabric()).launch()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["fsdp2", "zero"])
def test_the_script_of_the_page_runs_and_its_checkpoint_loads_on_one_device(
    strategy: str, tmp_path: Path
) -> None:
    page = (ROOT / "docs" / "fabric.md").read_text()
    script = re.search(r"```python\n(# two_ranks\.py\n.*?)```", page, re.DOTALL)
    assert script is not None
    (tmp_path / "two_ranks.py").write_text(script[1])
    command = [sys.executable, "-W", "ignore", "two_ranks.py", strategy]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert re.search(r"^step 4, loss \d\.\d{4}$", done.stdout, re.MULTILINE), done.stdout[-2000:]
    saved = torch.load(tmp_path / "two_ranks.ckpt", weights_only=True)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model.load_state_dict(saved["model"])
