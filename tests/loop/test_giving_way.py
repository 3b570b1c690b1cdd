"""What visits wait for comes before what updates need, on its way from disk and to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced

import outcore
from outcore.engine.activations import offloaded_call as away
from outcore.memory.disk import DiskStore, Extent

from .rig import Tower, adamw, make, train


def test_reads_and_writes_for_updates_give_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    seen = set[tuple[str, str, bool]]()
    for verb in ("read", "write"):
        real = getattr(DiskStore, verb)

        def move(
            store: DiskStore, extent: Extent, memory: torch.Tensor, *, gives_way: bool = False, how: Any = (verb, real)
        ) -> None:
            seen.add((how[0], extent.owner.split()[-1], gives_way))
            how[1](store, extent, memory, gives_way=gives_way)

        monkeypatch.setattr(DiskStore, verb, move)
    model = make(lambda: Tower(num_blocks=6).requires_grad_())
    optimizer = adamw(model)
    _, plan = forced(model, optimizer, "disk", policy="keep", activations="disk")
    with outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=tmp_path)) as (model, optimizer):
        seen.clear()  # of filling
        for step in range(3):
            train(model, optimizer, 1, step)
        optimizer.engine.device.synchronize()
        found = {(verb, kind): {way for v, k, way in seen if (v, k) == (verb, kind)} for verb, kind, _ in seen}
    first = [("read", "weights"), ("write", "weights"), ("write", "gradients"), ("read", "activations")]
    behind = [("read", "states"), ("write", "states"), ("read", "gradients")]
    assert {key for key, ways in found.items() if ways == {False}} == {*first, ("write", "activations")}
    assert {key for key, ways in found.items() if ways == {True}} == set(behind)
    assert len(found) == 8
