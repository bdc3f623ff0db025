"""Scripts in place of SLURM's commands, for machines without SLURM."""

from __future__ import annotations

import os
import sys
from pathlib import Path

SRUN = f"""#!{sys.executable}
import os, subprocess, sys
words, kill = sys.argv[1:], "--kill-on-bad-exit=1" in sys.argv
while words[0].startswith("--"):
    words = words[2:] if words[0] in ("--output", "--error") else words[1:]
number = int(os.environ["SLURM_NTASKS_PER_NODE"])
env = os.environ | {{"SLURM_STEP_ID": "0", "SLURM_NTASKS": str(number), "SLURM_JOB_NAME": "lm"}}
ranks = [
    subprocess.Popen(words, env=env | {{"SLURM_PROCID": i, "SLURM_LOCALID": i, "SLURM_NODEID": "0"}})
    for i in map(str, range(number))
]
codes = []
while len(codes) < number:
    _, status = os.wait()
    codes.append(os.waitstatus_to_exitcode(status))
    if codes[-1] and kill:
        [rank.kill() for rank in ranks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
"""Starts the tasks of one machine, with SLURM's variables."""


def with_commands(folder: Path, **scripts: str) -> dict[str, str]:
    """Write `srun` and other commands into a folder `bin`; return an environment in which they are found."""
    (folder / "bin").mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, **scripts}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    path = f"{folder / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "OMP_NUM_THREADS": "1"}
