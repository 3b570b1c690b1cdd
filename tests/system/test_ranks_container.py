"""Four ranks in one container, each with default budgets: they finish or refuse, and none is killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from ranks.conftest import free_port

from .test_container import memory_group

LIMIT_BYTES = 1100 * 2**20
"""Python and torch take 230 MiB of it for four processes, which share memory at first."""

CHILD = """
    import gc, json, os, sys
    from pathlib import Path

    import torch
    from torch import nn

    import outcore

    WIDTH, DEPTH, NUM_RANKS = 1536, 8, 4
    FOLDER = Path(sys.argv[1])
    torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # what it imports all have
    gc.collect()
    gc.freeze()
    rank = next((rank for rank in range(1, NUM_RANKS) if os.fork() == 0), 0)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    torch.set_num_threads(1)

    def train(budget):
        with torch.device("meta"):
            blocks = [
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
                for _ in range(DEPTH)
            ]
            model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(WIDTH, 1)).to(torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        model, optimizer = outcore.prepare(model, optimizer, budget=budget, device="cpu")
        for _ in range(2):
            loss = model(torch.randn(8, WIDTH, dtype=torch.bfloat16)).float().square().mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        taken = optimizer.plan.tier_bytes
        outcore.close(model, keep_weights=False)
        return taken

    try:
        try:
            train(None)
            refusal = ""
        except outcore.OutcoreError as error:
            refusal = str(error)
        taken = train(outcore.Budget(disk=FOLDER / "tier"))
        (FOLDER / f"{rank}.json").write_text(json.dumps([refusal, taken]))
        torch.distributed.destroy_process_group()
    finally:
        if rank == 0:
            assert [os.wait()[1] for _ in range(1, NUM_RANKS)] == [0] * (NUM_RANKS - 1)
"""


@pytest.mark.timeout(300)
def test_four_ranks_share_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "tier").mkdir()
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": str(2**20), "MASTER_ADDR": "127.0.0.1"}
    environment |= {"OMP_NUM_THREADS": "1", "OUTCORE_RANKS_TIMEOUT_S": "60", "MASTER_PORT": free_port()}
    command = [sys.executable, "-c", textwrap.dedent(CHILD), str(tmp_path)]
    with memory_group(LIMIT_BYTES) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(command, preexec_fn=join, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    said = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    table, others = said[0][0], [refusal for refusal, _ in said[1:]]
    assert "no placement fits; the least that would do is:" in table, table
    assert "4 ranks share those of host memory and disk" in table
    assert all("rank 0 said: " in other and table in other for other in others)
    # A third of the limit is left for gradients in transit, and for pages that are shared at first and then written.
    assert all(0 < 4 * (taken["device"] + taken["host"]) < LIMIT_BYTES / 2 for _, taken in said), said
    assert all(taken["disk"] for _, taken in said)
    assert list((tmp_path / "tier").iterdir()) == []
