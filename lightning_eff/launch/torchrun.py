"""What the ranks of torchrun agree on before they are connected: the run's folder, and where they meet.

torchrun's store outlives a restart, and with it the addresses at which ranks were before: a restarted rank
that reads one of them connects to a process that is gone. The number of the restart does not
distinguish attempts, as each machine counts its own. So each rank asks with a random key, and rank 0 answers
with an address of its own, a store that ends with it.

Source: https://github.com/pytorch/pytorch/issues/135712 and 167288, open in torch 2.13.
"""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

KEY = "lightning_eff"
POLL_S = 0.05
AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable: `True` while MASTER_PORT is torchrun's store, which is there before all ranks."""
_served: list[TCPStore] = []
"""Rank 0's store, which lives until the process ends; its process group finds it by its port."""


def agree(store: TCPStore, rank: int, num_ranks: int, folder: Path, wait_s: float) -> Path:
    """Return rank 0's folder, and set the address at which these ranks, and no earlier ones, will meet.

    Args:
        store: torchrun's, with `wait_s` as its timeout.
        rank: Of this process.
        num_ranks: Of all machines.
        folder: That of this rank.
        wait_s: Seconds that rank 0 waits for the others.

    Raises:
        DistError: A rank did not ask, or rank 0 did not answer, in time.
    """
    if rank:
        asked = uuid4().hex
        store.set(f"{KEY}/ask/{rank}", asked)
        answer = json.loads(store.get(f"{KEY}/answer/{asked}"))
        store.set(f"{KEY}/heard/{answer['attempt']}/{rank}", "")
    else:
        answer = {"attempt": uuid4().hex, "folder": str(folder), **_serve(os.environ["MASTER_ADDR"])}
        _answer_all(store, set(range(1, num_ranks)), answer, wait_s)
    os.environ |= {"MASTER_ADDR": answer["host"], "MASTER_PORT": str(answer["port"]), AGENT_STORE: "False"}
    return Path(answer["folder"])


def _serve(host: str) -> dict[str, Any]:
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    _served.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False, multi_tenant=True))
    port = _served[-1].port
    try:  # the others reach torchrun's store at this name; rank 0 may be on another machine
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        host = socket.getfqdn()
    return {"host": host, "port": port}


def _answer_all(store: TCPStore, ranks: set[int], answer: dict[str, Any], wait_s: float) -> None:
    """Answer what each rank asks until all have heard: the question that is there may be of a rank before."""
    from torch.distributed import DistStoreError

    end = time.monotonic() + wait_s
    while ranks:
        for rank in ranks:
            if store.check([f"{KEY}/ask/{rank}"]):
                asked = store.get(f"{KEY}/ask/{rank}").decode()
                store.set(f"{KEY}/answer/{asked}", json.dumps(answer))
        ranks = {rank for rank in ranks if not store.check([f"{KEY}/heard/{answer['attempt']}/{rank}"])}
        if time.monotonic() > end:
            raise DistStoreError(f"rank {min(ranks)} did not ask for the run's folder")
        time.sleep(POLL_S if ranks else 0.0)
