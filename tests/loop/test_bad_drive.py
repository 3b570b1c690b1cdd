"""A drive that returns other bytes than were written: unit, file and offset are named before anything uses them."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced

import outcore
from outcore.engine.activations import offloaded_call as away
from outcore.memory.disk import DiskStore, Extent
from outcore.memory.disk_file import OsDiskIO
from outcore.model import expensive_operations as dear
from outcore.planner.homes.pools import Comfort

from .rig import Tower, adamw, assert_same, batch, make, seen

pytestmark = pytest.mark.filterwarnings("ignore:the weights of this:UserWarning")

FLIPS = {"weights": 80, "gradients": 50, "states": 50, "next_states": 6, "activations": 14}
STEPS = 6
MICRO_BATCHES = 2
COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small activations leave, too, and make early updates whatever the rates."""
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)
    monkeypatch.setattr("outcore.engine.updates.streamed._EarlyAttempt.is_due", lambda _: True)
    monkeypatch.setattr("outcore.engine.updates.streamed._EarlyAttempt.settle", lambda _: True)


def five() -> Tower:
    return Tower(num_blocks=5).requires_grad_()


def train(model: Any, optimizer: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        for i in range(MICRO_BATCHES):
            losses.append(model.loss(batch(MICRO_BATCHES * step + i)))
            losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [loss.detach() for loss in losses]


@contextmanager
def prepared(folder: Path) -> Iterator[Any]:
    """Prepare with everything on disk; the second half of the units has second homes."""
    model = make(five)
    optimizer = adamw(model)
    options = {"policy": "keep", "activations": "disk", "steps": MICRO_BATCHES, "comfort": COMFORT}
    _, plan = forced(model, optimizer, "disk", early=True, **options)
    units = [dataclasses.replace(u, early=u.early and i > 2) for i, u in enumerate(plan.units)]
    plan = dataclasses.replace(plan, units=tuple(units), tier_bytes={})
    budget = outcore.Budget(disk=folder)
    with outcore.prepare(
        model, optimizer, plan=plan, budget=budget, accumulation_steps=MICRO_BATCHES, clipping=False
    ) as result:
        yield result


class BadDrive:
    """Flips the chosen bits of every read that contains them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bits: dict[int, int] = {}
        self._real = OsDiskIO.pread
        monkeypatch.setattr(OsDiskIO, "pread", lambda *args: self.pread(*args))

    def pread(self, io: OsDiskIO, fd: int, memory: memoryview, offset: int) -> int:
        moved = self._real(io, fd, memory, offset)
        for at, bit in list(self.bits.items()):
            if offset <= at < offset + moved:
                memory[at - offset] ^= 1 << bit
        return moved


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> BadDrive:
    return BadDrive(monkeypatch)


def assert_named(error: outcore.DiskError, extent: Extent, at: int, folder: Path) -> None:
    found = re.search(r"'(\S+ \w+)': .* of '(.+/data)', .* the (\d+).00 KiB at byte (\d+) are not", str(error))
    assert found, str(error)
    owner, file, size, start = found.groups()
    assert owner == extent.owner
    assert file.startswith(str(folder))
    assert int(start) <= at < int(start) + 1024 * int(size)


class Flips:
    """Makes a bit of each read wrong at first, and right when it is read again."""

    def __init__(self, drive: BadDrive, folder: Path) -> None:
        self._drive, self._folder, self._random = drive, folder, random.Random(0)
        self._real = DiskStore.read
        self.left = dict(FLIPS)

    def read(self, store: DiskStore, extent: Extent, memory: torch.Tensor, **how: Any) -> None:
        kind = extent.owner.split()[1]
        if self.left[kind]:
            at = extent.offset + self._random.randrange(extent.nbytes)
            self._drive.bits[at] = self._random.randrange(8)
            with pytest.raises(outcore.DiskError) as caught:
                self._real(store, extent, memory, **how)
            assert_named(caught.value, extent, at, self._folder)
            del self._drive.bits[at]
            self.left[kind] -= 1
        self._real(store, extent, memory, **how)


def test_every_flipped_bit_is_named_and_what_is_read_again_trains_to_the_same_bits(drive, tmp_path, monkeypatch):
    model = make(five)
    plain = adamw(model, fused=True)
    torch.manual_seed(5)
    want = seen(train(model, plain, STEPS), model, plain)
    flips = Flips(drive, tmp_path)
    monkeypatch.setattr(DiskStore, "read", lambda *args, **how: flips.read(*args, **how))
    with prepared(tmp_path) as (model, optimizer):
        torch.manual_seed(5)
        got = seen(train(model, optimizer, STEPS), model, optimizer)
    assert sum(FLIPS.values()) == 200
    assert flips.left == dict.fromkeys(FLIPS, 0)
    assert_same(want, got)


@pytest.mark.parametrize("kind", FLIPS)
def test_training_stops_at_a_flipped_bit(kind, drive, tmp_path, monkeypatch):
    real, hit = DiskStore.read, []

    def read(store, extent, memory, **how):
        if not hit and extent.owner.endswith(f" {kind}"):
            hit.append((extent, extent.offset + extent.nbytes // 2))
            drive.bits[hit[0][1]] = 3
        real(store, extent, memory, **how)

    with prepared(tmp_path) as (model, optimizer):
        monkeypatch.setattr(DiskStore, "read", read)
        with pytest.raises(outcore.DiskError, match=f" {kind}'") as caught:
            train(model, optimizer, 4)
            optimizer.engine.device.synchronize()
        outcore.close(model, keep_weights=False)
    assert_named(caught.value, *hit[0], tmp_path)
