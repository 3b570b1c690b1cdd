"""Activations that leave the device: what a loop may do meanwhile, and what happens if they do not fit."""

from __future__ import annotations

import dataclasses
import errno
import gc
import itertools
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from plans import forced, prepare_for_test
from plans import plan_for as made_plan
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.core.errors import DiskError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall, StoragePacker
from outcore.model import expensive_operations as dear
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.pools import Comfort
from outcore.planner.paper.paper_schedule import schedule
from outcore.spec.lane_names import Lane
from outcore.spec.plan import POLICIES
from outcore.spec.schedule import usual_visits

from . import rig
from .rig import DEVICE, VOCAB, Tower, adamw, assert_same, batch, make, seen, train

COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
TIERS = ("host", "disk")
each_tier = pytest.mark.parametrize("tier", TIERS)
each_policy = pytest.mark.parametrize("policy", POLICIES)
each_pair = pytest.mark.parametrize(("policy", "tier"), [*itertools.product(POLICIES, ("device", *TIERS))])


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small activations leave, too, and make every product dear."""
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)


class Counted:
    """Counts calls that leave, and calls whose activations are dropped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_left = self.num_dropped = 0
        leave, drop = OffloadedCall.leave, StoragePacker.drop
        monkeypatch.setattr(OffloadedCall, "leave", lambda mine, target: self.add("num_left") or leave(mine, target))
        monkeypatch.setattr(StoragePacker, "drop", lambda mine: self.add("num_dropped") or drop(mine))

    def add(self, name: str) -> None:
        setattr(self, name, getattr(self, name) + 1)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Counted:
    return Counted(monkeypatch)


@contextmanager
def prepared(
    model: nn.Module,
    tier: str,
    folder: Path,
    saved_bytes: int = 2**18,
    homes: str = "host",
    policy: str = "keep",
) -> Iterator[Any]:
    optimizer = adamw(model)
    _, plan = forced(model, optimizer, homes, policy=policy, activations=tier, comfort=COMFORT)
    units = [dataclasses.replace(u, saved_bytes=saved_bytes) if u.saved_bytes else u for u in plan.units]
    plan = dataclasses.replace(plan, units=tuple(units))
    with outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=folder), device=DEVICE) as result:
        yield result


Drive = Callable[[nn.Module, Any], Any]


def same(drive: Drive, tier: str, folder: Path, build: Callable[[], nn.Module] = Tower, **more: Any) -> None:
    model = make(build)
    plain = adamw(model, fused=True)
    torch.manual_seed(5)
    want = seen(drive(model, plain), model, plain)
    with prepared(make(build), tier, folder, **more) as (model, optimizer):
        torch.manual_seed(5)
        assert_same(want, seen(drive(model, optimizer), model, optimizer))


def five() -> nn.Module:
    return Tower(num_blocks=5)


def micro_batches(model: nn.Module, optimizer: Any) -> Any:
    for step in range(3):
        for i in range(3):
            model.loss(batch(3 * step + i)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(model: nn.Module, optimizer: Any) -> Any:
    for step in range(3):
        losses = [model.loss(batch(step)), model.loss(batch(step + 7))]
        losses[step % 2].backward()
        losses[1 - step % 2].backward()
        optimizer.step()
        optimizer.zero_grad()


def retained(model: nn.Module, optimizer: Any) -> Any:
    for step in range(3):
        loss = model.loss(batch(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def shapes(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for step, rows in enumerate((3, 1, 5, 2, 5)):
        loss = model.loss(batch(step, rows=rows))
        model.eval()
        with torch.no_grad():
            losses.append(model.loss(batch(9)))
        model.loss(batch(8))  # its graph gets no backward
        model.train()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def parts_of_backward(model: nn.Module, optimizer: Any) -> Any:
    found = []
    for step in range(3):
        loss = model.loss(batch(step))
        found += torch.autograd.grad(loss, [model.blocks[-1].up.weight], retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


DRIVES = (micro_batches, two_forwards, retained, shapes, parts_of_backward)
CALLED_AGAIN = "called again before the backward of an earlier call"


@pytest.mark.pairs
@pytest.mark.parametrize("drive", DRIVES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("tier", ["device", *TIERS])
def test_whatever_a_loop_does(drive: Any, tier: str, policy: str, tmp_path: Path, counted: Counted) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(drive, tier, tmp_path, five, policy=policy)
    assert tier == "device" or counted.num_left >= 6


ONE_CALL = {"keep": 12288, "select": 8192, "recompute": 4096}
"""Bytes of three rows that leave."""


@pytest.mark.parametrize("calls", [1, 2])
@each_tier
@each_policy
def test_two_forwards_leave_as_far_as_there_is_room(
    policy: str, tier: str, calls: int, tmp_path: Path, counted: Counted
) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        same(two_forwards, tier, tmp_path, five, policy=policy, saved_bytes=calls * ONE_CALL[policy])
    assert [CALLED_AGAIN in str(warning.message) for warning in said] == [True] * (2 - calls), "once, however often"
    assert counted.num_left == 3 * {1: 5, 2: 5 + 4}[calls], "the last call of all stays"


@pytest.mark.filterwarnings(f"ignore:.*{CALLED_AGAIN}")
@each_tier
@each_policy
def test_many_forwards_of_any_size_share_a_home(policy: str, tier: str, tmp_path: Path, counted: Counted) -> None:
    """Lanes run out of order: a call's home passes to another call as soon as nothing needs its bytes."""
    draw = random.Random(3)
    plans = [
        [(draw.randint(1, 5), draw.random() < 0.4) for _ in range(draw.randint(1, 4))] for _ in range(12)
    ]  # number of rows, and whether the backward is left out

    def drive(model: nn.Module, optimizer: Any) -> Any:
        draw = random.Random(4)
        seen = []
        for step, plan in enumerate(plans):
            losses = [model.loss(batch(step, rows=rows)) for rows, _ in plan]
            seen += [loss.detach() for loss in losses]
            waiting = [(loss, is_dropped) for loss, (_, is_dropped) in zip(losses, plan, strict=True)]
            del losses
            draw.shuffle(waiting)
            while waiting:
                loss, is_dropped = waiting.pop()
                if not is_dropped:
                    loss.backward()
                del loss  # bytes brought for it in advance are not needed any more
            optimizer.step()
            optimizer.zero_grad()
        return seen

    model = make(five)
    plain = adamw(model, fused=True)
    torch.manual_seed(5)
    want = seen(drive(model, plain), model, plain)
    twin, faults = make(five), Faults(permute=7, poison=True)
    optimizer = adamw(twin)
    _, plan = forced(twin, optimizer, "device", policy=policy, activations=tier, comfort=COMFORT)
    room = 2 * ONE_CALL[policy] + 4096
    units = [dataclasses.replace(u, saved_bytes=room) if u.saved_bytes else u for u in plan.units]
    options = {"plan": dataclasses.replace(plan, units=tuple(units)), "budget": outcore.Budget(disk=tmp_path)}
    options |= {"faults": faults, "race_checker": RaceChecker(), "device": DEVICE}
    with prepare_for_test(twin, optimizer, **options) as (twin, optimizer):
        torch.manual_seed(5)
        assert_same(want, seen(drive(twin, optimizer), twin, optimizer))
    assert counted.num_left > 5 * len(plans)


class Twice(Tower):
    """Calls one block twice, and leaves one out."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i in (0, 1, 2, 1, 4):
            x = self.blocks[i](x)
        return self.head(x)


@each_tier
def test_a_unit_that_is_called_again_is_recomputed_there(tier: str, tmp_path: Path, counted: Counted) -> None:
    with pytest.warns(UserWarning, match=CALLED_AGAIN):
        same(train, tier, tmp_path, lambda: Twice(num_blocks=5), saved_bytes=ONE_CALL["keep"])
    assert counted.num_left == 2 * 3, "not the second call of block 1"


@pytest.mark.parametrize(("policy", "saved_bytes"), [("keep", 4096), ("keep", 8192), ("select", 4096)])
@each_tier
def test_what_does_not_fit_is_recomputed(
    policy: str, saved_bytes: int, tier: str, tmp_path: Path, counted: Counted
) -> None:
    with pytest.warns(UserWarning, match="saves more than the plan"):
        same(shapes, tier, tmp_path, five, saved_bytes=saved_bytes, policy=policy)
    assert counted.num_dropped > 0
    assert counted.num_left > 0, "smaller batches fit, and arguments alone"


def test_the_last_units_stay(tmp_path: Path, counted: Counted) -> None:
    """Backward needs them first: the last one has not left, and the one before it is still there."""
    with prepared(make(five), "host", tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        counted.num_left = 0
        before = optimizer.traffic()
        model.loss(batch()).backward()
        moved = optimizer.traffic()["h2d"] - before["h2d"]
    assert counted.num_left == 4
    weights = sum(unit.spec.weight_bytes for unit in optimizer.engine.units[1:])
    assert moved <= 2 * weights + 3 * 2**14, "three of five come back"


def test_a_copy_that_has_not_begun_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward came before the copy."""
    copied, leave, may_go_on = list[str](), OffloadedCall.leave, threading.Event()

    def noting(mine: OffloadedCall, target: Any) -> Callable[[], None]:
        copy, name = leave(mine, target), mine._unit.label
        return lambda: (copied.append(name), copy())[1]

    monkeypatch.setattr(OffloadedCall, "leave", noting)
    plain = make(five)
    torch.manual_seed(5)
    plain.loss(batch()).backward()
    with prepared(make(five), "host", tmp_path, homes="device") as (model, optimizer):
        device = optimizer.engine.device
        hook = model.blocks[3].up.register_forward_hook(
            lambda *_: device.submit(Lane.D2H, "something slow", may_go_on.wait, reads=[], writes=[]) and None
        )
        torch.manual_seed(5)
        model.loss(batch()).backward()
        hook.remove()
        may_go_on.set()
        device.synchronize()
        assert copied == ["blocks.0", "blocks.1", "blocks.2"]
        assert optimizer.traffic()["d2h"] == len(copied) * ONE_CALL["keep"], "what was dropped is not counted"
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(theirs.grad, mine.grad) if theirs.grad is not None else None


class Scaled(rig.Block):
    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * by


class Shared(Tower):
    """Passes the same tensor to all blocks besides, like an encoder's result."""

    def __init__(self) -> None:
        super().__init__(Scaled, num_blocks=5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        by = 1 + x
        self.storage = by.untyped_storage()._cdata
        for block in self.blocks:
            x = block(x, by)
        return self.head(x)


@each_tier
@each_policy
def test_what_several_units_get_leaves_once(
    policy: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken, take = list[int](), StoragePacker._take

    def noting(mine: StoragePacker, place: int, tensor: torch.Tensor) -> Any:
        taken.append(tensor.untyped_storage()._cdata)
        return take(mine, place, tensor)

    monkeypatch.setattr(StoragePacker, "_take", noting)

    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = []
        for _ in range(3):
            taken.clear()
            losses += train(model, optimizer, 1)
            assert taken.count(model.storage) == (optimizer.__class__.__name__ == "StreamedOptimizer")
        return losses

    same(drive, tier, tmp_path, Shared, policy=policy)


class InPlace(nn.Module):
    """Saves a result that is changed afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Changed(Tower):
    def __init__(self) -> None:
        super().__init__(InPlace, num_blocks=4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.at:
                x.mul_(2)
        return self.head(x)


@pytest.mark.parametrize("at", [0, 2, 3])
def test_what_is_saved_must_not_be_changed(at: int, tmp_path: Path) -> None:
    """Whether it has left by then or not."""
    with prepared(make(Changed), "host", tmp_path) as (model, _):
        model.at = at
        loss = model.loss(batch())
        with pytest.raises(outcore.UnsupportedError, match="was changed in place"):
            loss.backward()


class StopError(Exception):
    pass


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(
    ("tier", "policy"), [("host", "keep"), ("disk", "keep"), ("disk", "select"), ("host", "recompute")]
)
def test_an_exception_in_the_middle(where: str, tier: str, policy: str, tmp_path: Path) -> None:
    def stop(*_: Any) -> None:
        raise StopError

    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = train(model, optimizer, 1)
        up = model.blocks[2].up
        hook = up.register_forward_hook(stop) if where == "forward" else up.register_full_backward_hook(stop)
        torch.manual_seed(1)
        with pytest.raises(StopError):
            model.loss(batch(5)).backward()
        hook.remove()
        optimizer.zero_grad()
        torch.manual_seed(2)
        return losses + train(model, optimizer, 2)

    same(drive, tier, tmp_path, five, policy=policy)


def test_an_interrupt_when_what_was_saved_makes_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interrupt falls between two calls: a slot on its way to the disk is taken, and nothing would give it back."""

    def stop(name: str) -> None:
        if name.startswith("activations of"):
            raise StopError

    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = train(model, optimizer, 1)
        engine = getattr(optimizer, "engine", None)
        for _ in range(COMFORT.max_slots_host if engine is not None else 0):
            with monkeypatch.context() as patch, pytest.raises(StopError):
                submit = engine.device.submit
                patch.setattr(engine.device, "submit", lambda *a, **k: stop(a[1]) or submit(*a, **k))
                model.loss(batch(5))
        optimizer.zero_grad()
        torch.manual_seed(2)
        return losses + train(model, optimizer, 2)

    same(drive, "disk", tmp_path, five)


@each_tier
def test_nothing_is_left_to_the_garbage_collector(tier: str, tmp_path: Path) -> None:
    """A collection comes when objects are many, not when memory is short."""
    before = [o for o in gc.get_objects() if type(o) is StoragePacker]  # errors caught by other tests hold some
    with prepared(make(five), tier, tmp_path) as (model, optimizer):
        gc.collect()
        gc.disable()
        try:
            train(model, optimizer, 2)
            model.loss(batch())  # its backward never comes
            train(model, optimizer, 1)
            left = [o for o in gc.get_objects() if type(o) is StoragePacker and o.storages and o not in before]
        finally:
            gc.enable()
        assert not left


def in_bf16(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for step in range(3):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model.loss(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@each_pair
def test_autocast(policy: str, tier: str, tmp_path: Path) -> None:
    same(in_bf16, tier, tmp_path, five, policy=policy)


class Clamped(rig.Block):
    """Changes its weight after autocast has cast it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        with torch.no_grad():
            (self.up.weight if self.how == "in place" else self.up.weight.data).clamp_(-0.05, 0.05)
        return x


@pytest.mark.parametrize("how", ["in place", "data"])
def test_a_cast_is_not_made_again_from_a_weight_that_was_changed(how: str, tmp_path: Path) -> None:
    same(in_bf16, "host", tmp_path, lambda: Tower(lambda: Clamped(how), num_blocks=4))


def llama() -> nn.Module:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2, vocab_size=VOCAB
    )
    return LlamaForCausalLM(config)


@each_tier
@each_policy
def test_autocast_is_in_the_plan(policy: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly as much leaves as the plan has room for; cast weights do not leave, but are cast again."""
    monkeypatch.undo()
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 40)
    sent = list[int]()
    end = OffloadedCall.end_forward
    monkeypatch.setattr(
        OffloadedCall, "end_forward", lambda mine, owner: (end(mine, owner), sent.append(mine.nbytes))[0]
    )
    ids = torch.arange(2 * 48, device=DEVICE).reshape(2, 48) % VOCAB

    def drive(model: nn.Module, optimizer: Any) -> None:
        for _ in range(3):
            with torch.autocast(DEVICE, torch.bfloat16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    model, twin = make(llama), make(llama)
    drive(model, adamw(model, fused=True))
    options = {"activations": tier, "device": DEVICE, "hardware": "none", "sample": {"input_ids": ids, "labels": ids}}
    with torch.autocast(DEVICE, torch.bfloat16):
        way = ActivationPolicy(tier, policy)
        monkeypatch.setattr("outcore.preparation.plan_choice.ways_to", lambda *_, **__: [way])
        prepared = outcore.prepare(twin, adamw(twin), budget=outcore.Budget(disk=tmp_path), **options)
    with prepared as (twin, optimizer):
        planned = {unit.saved_bytes for unit in optimizer.plan.units[1:]}
        drive(twin, optimizer)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert set(sent) == planned
    rows, weights = 2 * 48 * 64 * 4, sum(p.nbytes for p in model.model.layers[0].parameters()) // 2
    assert policy != "recompute" or planned == {rows}
    assert policy != "keep" or max(planned) < 24 * rows < 24 * rows + weights


class CastsTwice(nn.Module):
    """Autocast casts its argument for each product; it would cast a leaf once, and round its gradient once."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(13, 13), nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(x)) * self.gate(x)


@each_policy
def test_an_argument_that_is_cast_twice(policy: str, tmp_path: Path) -> None:
    def drive(model: nn.Module, optimizer: Any) -> Any:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model.loss(batch())
        loss.backward()
        optimizer.step()

    same(drive, "host", tmp_path, lambda: Tower(CastsTwice, num_blocks=4), policy=policy)


class Frozen(Tower):
    """Trains nothing before the third block, and little after it."""

    def __init__(self) -> None:
        super().__init__(num_blocks=5)
        self.requires_grad_(False)
        self.blocks[2].up.weight.requires_grad_()
        self.blocks[4].down.bias.requires_grad_()


@each_tier
def test_frozen_units_send_only_what_backward_needs(tier: str, tmp_path: Path, counted: Counted) -> None:
    same(train, tier, tmp_path, Frozen)
    assert counted.num_left == 2 * 2, "blocks 2 and 3; there is no backward through the first two"


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft reads an attribute that Transformers has renamed
@each_tier
@pytest.mark.parametrize("is_adapted", [True, False], ids=["adapters", "frozen blocks"])
def test_what_is_frozen_writes_no_more_than_the_plan_says(
    is_adapted: bool, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # plans use the real limit of small activations
    model = make(llama)
    if is_adapted:
        model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")).to(DEVICE)
    else:
        model.model.layers[:2].requires_grad_(False)
    ids = torch.arange(2 * 48, device=DEVICE).reshape(2, 48) % VOCAB
    sample, budget = {"input_ids": ids, "labels": ids}, outcore.Budget(disk=tmp_path)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    options = {"sample": sample, "budget": budget, "device": DEVICE, "hardware": "none", "activations": tier}
    spec, plan = made_plan(model, optimizer, **options)
    planned = schedule(spec, plan, usual_visits(spec)).moved_bytes()
    with outcore.prepare(model, optimizer, plan=plan, budget=budget, device=DEVICE) as (model, optimizer):
        for _ in range(3):
            before = optimizer.traffic()
            loss = model(**sample).loss
            optimizer.engine.device.synchronize()  # backward would drop a copy that has not begun
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            moved = {lane: nbytes - before[lane] for lane, nbytes in optimizer.traffic().items()}
            for lane in ("d2h", "disk_write", "write_back"):
                assert moved[lane] <= planned.get(lane, 0), lane
            assert moved["d2h" if tier == "host" else "disk_write"] > 0


def raises(number: int) -> Callable[..., int]:
    def call(*_: Any) -> int:
        raise OSError(number, os.strerror(number))

    return call


@pytest.mark.parametrize(
    ("call", "fail"),
    [
        ("pread", raises(errno.EIO)),
        ("pread", lambda *_: 0),  # the file ends
        ("pwrite", raises(errno.EIO)),
        ("pwrite", raises(errno.ENOSPC)),
    ],
    ids=["read", "short read", "write", "full"],
)
def test_a_disk_that_fails_is_said(
    call: str, fail: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outcore.memory import disk_file

    with prepared(make(five), "disk", tmp_path, homes="device") as (model, optimizer):
        train(model, optimizer, 1)
        monkeypatch.setattr(disk_file.OsDiskIO, call, fail)
        with pytest.raises(DiskError, match=r"blocks\.\d activations"):
            train(model, optimizer, 2)
        outcore.close(model, keep_weights=False)
