"""Several ranks over gloo on this machine."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import nursery

TESTS = Path(__file__).parents[1]


def launch(code: str, num_ranks: int, arguments: Sequence[str] = (), *, timeout_s: float = 60.0) -> list[str]:
    """Run code in so many processes; what each has printed. One that fails is shown."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "OMP_NUM_THREADS": "1", "OUTCORE_RANKS_TIMEOUT_S": str(timeout_s)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(num_ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(num_ranks)}
    pipes = {"stdout": -1, "stderr": -1, "text": True}
    ranks = [
        nursery.Popen(
            [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}", *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            **pipes,
        )
        for rank in range(num_ranks)
    ]
    said = [rank.communicate(timeout=250) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(err[-3000:] for _, err in said)
    return [out for out, _ in said]
