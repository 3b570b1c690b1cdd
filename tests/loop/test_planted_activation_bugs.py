"""Bugs that moving activations could have, planted one by one: results or the race checker find each of them.

``tests/parity/test_planted_bugs.py`` has the bugs of waits that are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced, prepare_for_test
from torch import nn

import outcore
from outcore.core.errors import RaceError, UnsupportedError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall, StoragePacker, _OffloadedView
from outcore.engine.activations.room import SharedArguments
from outcore.model import expensive_operations as dear
from outcore.order.activations import ActivationOrder, SavedCall
from outcore.order.ledger import HomeParts
from outcore.planner.homes.pools import LEAST

from .rig import DEVICE, WIDTH, Tower, adamw, assert_same, batch, make, seen

ROWS, STEPS = 5, 2
Plant = Callable[[pytest.MonkeyPatch], None]


class Block(nn.Module):
    """Saves transposed views, parts of one tensor, its own result, and tensors that depend on random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = self.up(x).chunk(2, -1)
        mixed = one.mT @ other
        return torch.tanh(x + self.dropout(self.down(other @ mixed)))


def tower() -> nn.Module:
    return Tower(Block, num_blocks=6)


def drive(model: nn.Module, optimizer: Any) -> list[torch.Tensor]:
    """Make two forwards before a backward, with changing numbers of rows."""
    losses = []
    for step in range(STEPS):
        pair = [model.loss(batch(2 * step + i, ROWS - i)) for i in range(2)]
        for loss in pair:
            loss.backward()
        losses += [loss.detach() for loss in pair]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def changes_a_result(model: nn.Module, _: Any) -> None:
    x = model.embed(batch(0, ROWS))
    for i, block in enumerate(model.blocks):
        x = block(x)
        if i == 1:
            x.mul_(2)
    with pytest.raises((RuntimeError, UnsupportedError), match="in.?place"):
        model.head(x).sum().backward()


def planted(owner: Any, name: str, bug: Callable[..., Any]) -> Plant:
    """Args: bug: Gets the real function, and its arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        real = getattr(owner, name)
        patch.setattr(owner, name, lambda *args, **options: bug(real, *args, **options))

    return plant


def wrong_strides(real: Any, view: _OffloadedView, memory: torch.Tensor) -> torch.Tensor:
    found = real(view, memory)
    return torch.empty(0, dtype=found.dtype, device=found.device).set_(
        found.untyped_storage(), found.storage_offset(), found.size(), torch.empty(found.size(), device="meta").stride()
    )


def wrong_offset(real: Any, view: _OffloadedView, memory: torch.Tensor) -> torch.Tensor:
    view.offset -= view.offset % away.ALIGN_BYTES
    return real(view, memory)


def one_over_another(real: Any, packing: StoragePacker, place: int, tensor: torch.Tensor) -> Any:
    storage = real(packing, place, tensor)
    if storage is not None and storage.lender is None and storage.start:
        storage = packing.storages[place] = storage._replace(start=storage.start - away.ALIGN_BYTES)
    return storage


def freed_before_the_copy_left(real: Any, order: ActivationOrder[Any]) -> None:
    real(order)
    leaving = order._leaving
    if leaving is not None and leaving.saved.is_held:
        leaving.saved.close()
        leaving.saved._device.host_access("freed", writes=[leaving.source.memory.region])


def home_given_away(real: Any, parts: HomeParts[Any], home: Any, is_needed: Any) -> Any:
    yield 0, home.nbytes


def brought_from_another_home(real: Any, order: ActivationOrder[Any], call: Any, place: Any, owner: Any, *where: Any):
    calls = list(order._calls.values())
    return real(order, call, place, calls[calls.index(owner) - 1], *where)


def never_copied(real: Any, mine: OffloadedCall, target: Any) -> Any:
    return lambda: None


def given_back_as_brought(real: Any, order: ActivationOrder[Any], call: SavedCall[Any], **options: Any) -> None:
    """Give a slot back as soon as the bytes are there, as if compute were done with it."""
    order._give(call, call.came)
    real(order, call, **options)


BUGS: dict[str, Plant] = {
    "a view is restored with wrong strides": planted(_OffloadedView, "again", wrong_strides),
    "a view is restored without its offset": planted(_OffloadedView, "again", wrong_offset),
    "two storages lie over one another": planted(StoragePacker, "_take", one_over_another),
    "a storage is freed before the copy left": planted(ActivationOrder, "begin_forward", freed_before_the_copy_left),
    "a slot is given back before its use": planted(ActivationOrder, "end_backward", given_back_as_brought),
    "a home is given away that a backward needs": planted(HomeParts, "gaps", home_given_away),
    "another call's bytes come back": planted(ActivationOrder, "_carry", brought_from_another_home),
    "nothing is copied": planted(OffloadedCall, "leave", never_copied),
    "what was lent lies where the call's own bytes are": planted(
        StoragePacker, "loans", lambda real, *args: [loan._replace(at=0) for loan in real(*args)]
    ),
    "a lender is not held": lambda patch: patch.setattr(
        SavedCall, "is_needed", property(lambda call: call.is_coming and not call.borrowers)
    ),
}


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)


def same(tier: str, folder: Path, run: Callable[[nn.Module, Any], Any] = drive) -> None:
    model = make(tower)
    plain = adamw(model, fused=True)
    torch.manual_seed(5)
    want = seen(run(model, plain), model, plain)
    twin = make(tower)
    optimizer = adamw(twin)
    _, plan = forced(twin, optimizer, "device", policy="keep", activations=tier, comfort=LEAST)
    options = {"plan": plan, "budget": outcore.Budget(disk=folder), "device": DEVICE, "race_checker": RaceChecker()}
    with prepare_for_test(twin, optimizer, faults=Faults(poison=True), **options) as (twin, optimizer):
        torch.manual_seed(5)
        assert_same(want, seen(run(twin, optimizer), twin, optimizer))


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_there_is_none(tier: str, tmp_path: Path) -> None:
    same(tier, tmp_path)
    same(tier, tmp_path, changes_a_result)


@pytest.mark.parametrize("bug", BUGS)
def test_is_found(bug: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    with pytest.raises((AssertionError, RaceError, UnsupportedError)):
        same("host", tmp_path)


def test_versions_that_nobody_checks_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadedCall, "_has_changed", lambda _: False)
    monkeypatch.setattr(SharedArguments, "lender_of", lambda *_: None)
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        same("host", tmp_path, changes_a_result)


def test_there_are_enough() -> None:
    assert len(BUGS) >= 8
