"""Several ranks over gloo on this machine."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import nursery

TESTS = Path(__file__).parents[1]


def launch(
    code: str,
    num_ranks: int,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float = 60.0,
    limit_s: float = 800.0,
    is_fresh: bool = False,
    **environment: str,
) -> list[str]:
    """Run code in ``num_ranks`` processes and return what each has printed. A process that fails is shown.

    Args:
        limit_s: Time limit for all of them.
        is_fresh: They share no memory with a parent, and sets of strings have another order in each.
    """
    ended = launch_and_wait(
        code, num_ranks, arguments, timeout_s=timeout_s, limit_s=limit_s, is_fresh=is_fresh, **environment
    )
    assert [status for status, _, _ in ended] == [0] * num_ranks, "\n".join(err[-3000:] for _, _, err in ended)
    return [out for _, out, _ in ended]


def launch_and_wait(
    code: str,
    num_ranks: int,
    arguments: Sequence[str] = (),
    *,
    timeout_s: float,
    limit_s: float = 800.0,
    is_fresh: bool = False,
    **environment: str,
) -> list[tuple[int, str, str]]:
    """Return for each process its status, its output and its errors."""
    ranks = start(code, num_ranks, arguments, timeout_s=timeout_s, is_fresh=is_fresh, **environment)
    try:
        said = [rank.communicate(timeout=limit_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [(rank.returncode, *one) for rank, one in zip(ranks, said, strict=True)]


def start(
    code: str,
    num_ranks: int,
    arguments: Sequence[str],
    *,
    timeout_s: float,
    is_fresh: bool = False,
    kind: type[nursery.Popen] = nursery.Popen,
    **environment: str,
) -> list[subprocess.Popen]:
    """Start processes as a launcher would."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "OUTCORE_RANKS_TIMEOUT_S": str(timeout_s)}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": str(num_ranks)}
    common |= {"LOCAL_WORLD_SIZE": str(num_ranks), **environment}
    simulated = [str(nursery.SIMULATED)] if os.environ.get("OUTCORE_TEST_DEVICE") == "cuda" else []
    per_node = int(common["LOCAL_WORLD_SIZE"])
    return [
        (subprocess.Popen if is_fresh else kind)(
            [sys.executable, *simulated, "-c", f"import sys; sys.path.insert(0, {str(TESTS)!r})\n{code}", *arguments],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank % per_node), "PYTHONHASHSEED": str(rank)},
            stdout=-1,
            stderr=-1,
            text=True,
        )
        for rank in range(num_ranks)
    ]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])
