"""A result that its own block saves and the next one gets rests once: the next block borrows it for its backward."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced, prepare_for_test
from torch import nn

import outcore
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.model import expensive_operations as dear
from outcore.order.activations import ActivationOrder
from outcore.planner.homes.pools import LEAST, Comfort
from outcore.spec.plan import POLICIES

from .rig import DEVICE, WIDTH, Tower, adamw, assert_same, batch, make, seen, train

NUM_BLOCKS, ROWS = 6, 40
RESULT_BYTES = ROWS * 7 * WIDTH * 4
AWAY = ("host", "disk")
COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
Drive = Callable[[nn.Module, Any], Any]
By = Callable[[int], str]


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)


class Rectified(nn.Module):
    """Like the end of a ResNet's block: backward needs the result of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.up(x))


class Row(Tower):
    """Blocks one after another."""

    def __init__(self) -> None:
        super().__init__(Rectified, NUM_BLOCKS)


class Apart(Tower):
    """One result also takes another way, and one block is left out."""

    def __init__(self) -> None:
        super().__init__(Rectified, NUM_BLOCKS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        side = self.blocks[1](x)
        x = self.blocks[4](self.blocks[3](x + side.mean()))
        return self.head(self.blocks[5](x) + side)


class Counted:
    """Counts bytes of storages that were sent, and of those that were borrowed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sent, self.borrowed = list[int](), list[int]()
        leave, end_forward = OffloadedCall.leave, ActivationOrder.end_forward

        def leaving(mine: OffloadedCall, target: Any) -> Any:
            self.sent += [s.memory.numel() for s in mine.packing.storages.values() if s.lender is None]
            return leave(mine, target)

        def ending(mine: ActivationOrder[Any], unit: Any, saved: Any, loans: Any) -> Any:
            self.borrowed += [loan.nbytes for loan in loans]
            return end_forward(mine, unit, saved, loans)

        monkeypatch.setattr(OffloadedCall, "leave", leaving)
        monkeypatch.setattr(ActivationOrder, "end_forward", ending)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@contextmanager
def prepared(model: nn.Module, tier: str | By, policy: str | By, folder: Path, **more: Any) -> Iterator[Any]:
    """Prepare under the race checker, with poisoned memory and with the faults in ``more``."""
    optimizer = adamw(model)
    comfort, room = more.pop("comfort", COMFORT), more.pop("room", 0)
    _, plan = forced(model, optimizer, "device", policy=policy, activations=tier, comfort=comfort)
    if room:
        homes = [dataclasses.replace(u, saved_bytes=room) if u.saved_bytes else u for u in plan.units]
        plan = dataclasses.replace(plan, units=tuple(homes))
    options = {"plan": plan, "budget": outcore.Budget(disk=folder), "device": DEVICE, "race_checker": RaceChecker()}
    with prepare_for_test(model, optimizer, faults=Faults(poison=True, **more), **options) as result:
        yield result


def same(drive: Drive, folder: Path, build: Callable[[], nn.Module] = Row, **more: Any) -> None:
    model = make(build)
    plain = adamw(model, fused=True)
    want = seen(drive(model, plain), model, plain)
    with prepared(make(build), folder=folder, **more) as (model, optimizer):
        assert_same(want, seen(drive(model, optimizer), model, optimizer))


def micro_batches(model: nn.Module, optimizer: Any) -> None:
    for step in range(3):
        for i in range(2):
            model.loss(batch(2 * step + i, ROWS - 3 * i)).backward()
        optimizer.step()
        optimizer.zero_grad()


def retained(model: nn.Module, optimizer: Any) -> None:
    loss = model.loss(batch(0, ROWS))
    loss.backward(retain_graph=True)
    loss.backward()
    optimizer.step()


def two_forwards(model: nn.Module, optimizer: Any) -> None:
    for step in range(2):
        losses = [model.loss(batch(step, 9)), model.loss(batch(step + 7, 8))]
        model.loss(batch(3, 2))  # its backward never comes
        losses[step].backward()
        losses[1 - step].backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("comfort", [COMFORT, LEAST], ids=["", "least"])
@pytest.mark.parametrize("drive", [micro_batches, retained, two_forwards])
@pytest.mark.parametrize("tier", AWAY)
def test_is_the_plain_loop(drive: Drive, tier: str, comfort: Comfort, tmp_path: Path) -> None:
    same(drive, tmp_path, tier=tier, policy="keep", comfort=comfort)


@pytest.mark.parametrize(("lender", "borrower", "policy"), [*itertools.product(AWAY, AWAY, POLICIES)])
def test_between_any_tiers_and_policies(
    lender: str, borrower: str, policy: str, tmp_path: Path, counted: Counted
) -> None:
    """Every second block keeps all; the others save what the policy says."""
    plan = {"tier": lambda i: (borrower, lender)[i % 2], "policy": lambda i: (policy, "keep")[i % 2]}
    same(micro_batches, tmp_path, comfort=LEAST, permute=3, **plan)
    assert counted.borrowed


def test_a_row_of_blocks_sends_every_storage_once(tmp_path: Path, counted: Counted) -> None:
    with prepared(make(Row), "host", "keep", tmp_path) as (model, optimizer):
        before = optimizer.traffic()
        loss = model.loss(batch(0, ROWS))
        optimizer.engine.device.synchronize()  # backward would drop a copy that has not begun
        loss.backward()
        moved = {lane: nbytes - before[lane] for lane, nbytes in optimizer.traffic().items()}
    assert counted.sent == [RESULT_BYTES] * NUM_BLOCKS, "what the first block got, and what five gave"
    assert counted.borrowed == [RESULT_BYTES] * (NUM_BLOCKS - 1), "what all but the first got"
    aligned = 4096 * -(-RESULT_BYTES // 4096)
    assert moved["d2h"] == (NUM_BLOCKS - 1) * aligned + 4096 * -(-2 * RESULT_BYTES // 4096) - aligned


def test_what_all_is_lent_leaves_without_a_copy(tmp_path: Path, counted: Counted) -> None:
    """Recompute needs only the arguments."""
    plan = {"tier": "disk", "policy": lambda i: ("keep", "recompute")[i % 2]}
    same(lambda model, optimizer: train(model, optimizer, 2), tmp_path, **plan)
    assert counted.borrowed


@pytest.mark.parametrize("tier", AWAY)
@pytest.mark.parametrize("is_over", [True, False])
def test_the_lender_may_be_walked_first(tier: str, is_over: bool, tmp_path: Path) -> None:
    """Its home stays taken for the borrower, though later calls of the unit need one."""

    def drive(model: nn.Module, optimizer: Any) -> Any:
        x, blocks = model.embed(batch(0, ROWS)), model.blocks
        mine = blocks[1](blocks[0](x))
        theirs = blocks[2](mine)
        blocks[4](blocks[3](x.detach()))  # by then both have left
        first = torch.autograd.grad(mine.mean(), [blocks[0].up.weight], retain_graph=not is_over)
        for i in range(2):
            found = [*first, model.loss(batch(i, ROWS)).detach()]
        return [*found, *torch.autograd.grad(theirs.square().mean(), [blocks[2].up.weight])]

    same(drive, tmp_path, Row, tier=tier, policy="keep", room=2**16)


def test_a_result_that_was_changed_is_not_lent(tmp_path: Path) -> None:
    """The next block gets other values; only the first one's backward, which needs the old ones, is refused."""

    def drive(model: nn.Module, optimizer: Any) -> Any:
        x = model.blocks[0](model.embed(batch(0, ROWS)))
        x.mul_(2)
        y = model.blocks[1](x)
        model.blocks[2](model.blocks[3](y))
        found = torch.autograd.grad(y.square().mean(), [model.blocks[1].up.weight], retain_graph=True)
        with pytest.raises((RuntimeError, outcore.UnsupportedError), match="in.?place"):
            y.square().mean().backward()
        return found

    same(drive, tmp_path, tier="host", policy="keep")


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_and_lanes(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    tiers = [draw.choice(("device", *AWAY, *AWAY)) for _ in range(NUM_BLOCKS + 1)]
    policies = [draw.choice(("keep", "keep", *POLICIES)) for _ in range(NUM_BLOCKS + 1)]
    late = {lane: 0.001 for lane in ("h2d", "d2h", "weights_read", "disk_write") if draw.random() < 0.5}
    more = {"comfort": draw.choice((COMFORT, LEAST)), "permute": seed, "delays": late}
    for build in (Row, Apart):
        same(micro_batches, tmp_path, build, tier=lambda i: tiers[i], policy=lambda i: policies[i], **more)
