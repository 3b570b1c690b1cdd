"""What a step costs and leaves behind: function calls per unit, and objects that only the collector would find."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from plans import forced
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.engine.activations import offloaded_call as away
from outcore.engine.gradients.passes import _batches
from outcore.planner.homes.pools import Comfort

from .rig import DEVICE, WIDTH, Tower, adamw, batch, make, prepared, train

MOST_CALLS = {"device": 715, "plain": 60, "host": 810, "away": 960}  # per unit and step: a little more than measured
MOST_FILES = {"forward": 24, "gradient home": 16, "update on the host": 36, "fetch from disk": 18, "prepare": 75}
KIND = pytest.mark.parametrize("kind", ["device", "plain", "host"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])
SHORT, LONG = 3, 8  # blocks
COUNTED = tuple(f"{folder}{os.sep}" for folder in (Path(outcore.__file__).parent, Path(torch._dynamo.__file__).parent))


def step(model: Any, optimizer: Any) -> None:
    model.loss(batch()).backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def calls(run: Callable[[], None]) -> int:
    """Count calls of outcore's functions on this thread, and of those that turn dynamo off around some of them."""
    count = 0

    def look(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(COUNTED)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return count


@KIND
@POLICY
def test_calls_per_unit(kind, policy, tmp_path):
    """Each call takes a microsecond or less of the thread that drives the device, whatever the size of the unit."""
    counts = []
    for num_blocks in (SHORT, LONG):
        model = make(lambda n=num_blocks: Tower(num_blocks=n))
        with prepared(model, adamw(model), kind, tmp_path, policy=policy, depth=1) as (model, optimizer):
            for _ in range(9):  # the first eight recomputes are checked
                step(model, optimizer)
            counts.append(min(calls(lambda: step(model, optimizer)) for _ in range(3)))
    assert (counts[1] - counts[0]) / (LONG - SHORT) <= MOST_CALLS[kind]


@pytest.mark.skipif(DEVICE != "cpu", reason="an accelerator's operations are others")
def test_calls_per_unit_whose_activations_leave(tmp_path, monkeypatch):
    """Saved tensors are packed and found again, and two copies are submitted."""
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    counts, comfort = [], Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
    for num_blocks in (SHORT, LONG):
        model = make(lambda n=num_blocks: Tower(num_blocks=n))
        optimizer = adamw(model)
        _, plan = forced(model, optimizer, "device", policy="keep", activations="host", comfort=comfort)
        options = {"plan": plan, "budget": outcore.Budget(disk=tmp_path), "device": DEVICE}
        with outcore.prepare(model, optimizer, **options) as (model, optimizer):
            for _ in range(3):
                step(model, optimizer)
            counts.append(min(calls(lambda: step(model, optimizer)) for _ in range(3)))
    assert (counts[1] - counts[0]) / (LONG - SHORT) <= MOST_CALLS["away"]


class Entered:
    """Counts outcore's files that are entered, also by lanes; on this thread only beneath some engine functions."""

    def __init__(self) -> None:
        self.thread, self.is_on, self.beneath, self.depth = threading.get_ident(), False, (), 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        path = frame.f_code.co_filename
        if not self.is_on or event not in ("call", "return") or not path.startswith(COUNTED[0]):
            return
        is_here = threading.get_ident() == self.thread
        if is_here and frame.f_code.co_name in self.beneath and f"{os.sep}engine{os.sep}" in path:
            self.depth += 1 if event == "call" else -1
        if event == "call" and (not is_here or self.depth or not self.beneath):
            self.files.add(path)

    def count(self, run: Callable[[], object], *beneath: str) -> int:
        self.files, self.beneath, self.is_on = set(), beneath, True
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            run()
        finally:
            self.is_on = False
            sys.setprofile(before)
        return len(self.files)


@pytest.mark.skipif(DEVICE != "cpu", reason="an accelerator has files of its own")
def test_files_on_the_way(tmp_path):
    """Count the files that a reader opens to follow one thing from end to end. See docs/internals/architecture.md."""
    x, entered, found = torch.randn(2, WIDTH, requires_grad=True), Entered(), {}
    threading.setprofile(entered)  # for lanes, which start below
    try:
        for kind in ("host", "disk"):
            model = make()
            with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
                synchronize = optimizer.engine.device.synchronize
                for _ in range(9):
                    step(model, optimizer)
                if kind == "disk":
                    with torch.no_grad():
                        model(batch())
                        found["fetch from disk"] = entered.count(lambda: (model.blocks[0](x), synchronize()), "bind")
                    continue
                for _ in range(3):  # the least counts: late work of a lane may fall into a later count
                    seen = {}
                    synchronize()
                    seen["forward"] = entered.count(lambda: (model.blocks[1](x), synchronize()))
                    loss = model.loss(batch())
                    synchronize()
                    backward = lambda loss=loss: (loss.backward(), synchronize())  # noqa: E731
                    seen["gradient home"] = entered.count(backward, "deposit", "reached")
                    seen["update on the host"] = entered.count(lambda: (optimizer.step(), synchronize()))
                    optimizer.zero_grad()
                    found |= {way: min(count, found.get(way, count)) for way, count in seen.items()}
        model, made = make(), []
        given = {"budget": outcore.Budget(device="40KiB", host="64MiB"), "device": "cpu"}
        found["prepare"] = entered.count(lambda: made.append(outcore.prepare(model, adamw(model), **given)))
        outcore.close(made[0].model)
    finally:
        threading.setprofile(None)
    assert not {way: (count, MOST_FILES[way]) for way, count in found.items() if count > MOST_FILES[way]}
    assert found.keys() == MOST_FILES.keys()


@KIND
@POLICY
def test_a_step_leaves_nothing_to_the_collector(kind, policy, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path, policy=policy) as (model, optimizer):
        for _ in range(2):
            step(model, optimizer)
        while gc.collect():  # one collection may make more garbage, such as threads of earlier tests
            pass
        gc.disable()
        try:
            for _ in range(3):
                step(model, optimizer)
            assert gc.collect() == 0
        finally:
            gc.enable()


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_views_are_made_once_and_go_with_the_model(kind, tmp_path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path, depth=1) as (model, optimizer):
        engine = optimizer.engine

        def drive() -> None:
            train(model, optimizer, 2)
            with torch.no_grad():
                model(batch())
            with outcore.gathered(model, write=True), torch.no_grad():
                model.head.weight.mul_(0.5)
            model.load_state_dict(model.state_dict())
            optimizer.load_state_dict(optimizer.state_dict())
            train(model, optimizer, 2)

        drive()
        known = [dict(unit.views._made) for unit in engine.units]
        drive()
        for unit, before in zip(engine.units, known, strict=True):
            assert all(
                a is b for key, views in before.items() for a, b in zip(views, unit.views._made[key], strict=True)
            )
            slots = len(engine.opened.order.pools.slots("device", "weights")) + 12  # and homes, states by name, buckets
            assert len(unit.views._made) <= 4 * slots
        engine.device.synchronize()  # else a lane may still hold what close drops
        views = [weakref.ref(v) for unit in engine.units for views in unit.views._made.values() for v in views]
        known.clear()
        del before
    assert all(not unit.views._made and not unit.presence._nothing for unit in engine.units)
    gc.collect()
    assert all(view() is None for view in views)


def test_norms_on_the_device_are_taken_together(tmp_path):
    model, plain = make(), make()
    plain.loss(batch()).backward()
    with prepared(model, adamw(model), "device", tmp_path) as (model, optimizer):
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(1)
        plain.loss(batch()).backward()
        torch.manual_seed(1)
        model.loss(batch()).backward()
        block, twin = model.blocks[1], plain.blocks[1]
        block.down.weight.grad = None  # the caller drops it
        block.down.bias.grad = torch.zeros_like(twin.down.bias)  # a step would refuse it; the norms of others do not
        known = optimizer.engine.gradients.of["blocks.1"].norms
        assert not known
        assert torch.equal(torch.linalg.vector_norm(block.up.weight.grad), twin.up.weight.grad.norm())
        assert len(known) == 6
        block.up.bias.grad.mul_(0.5)
        assert torch.equal(torch.linalg.vector_norm(block.up.bias.grad), (twin.up.bias.grad * 0.5).norm())
        assert torch.equal(torch.linalg.vector_norm(block.norm.bias.grad), twin.norm.bias.grad.norm())
        for p in model.parameters():
            p.grad = None
        torch.manual_seed(2)
        plain.zero_grad()
        plain.loss(batch(1)).backward()
        torch.manual_seed(2)
        model.loss(batch(1)).backward()
        for p, q in zip(block.parameters(), twin.parameters(), strict=True):
            if p.requires_grad:
                assert torch.equal(torch.linalg.vector_norm(p.grad), q.grad.norm())


def test_casts_for_norms_take_no_more_than_the_largest():
    sizes = [5, 40, 3, 30, 10, 40, 0, 1]
    natives = {i: torch.zeros(n, dtype=torch.bfloat16) for i, n in enumerate(sizes)}
    batches = list(_batches(natives, [torch.float32] * len(sizes)))
    assert [i for part in batches for i in part] == list(natives)
    assert all(sum(sizes[i] for i in part) <= 40 for part in batches)
    assert len(batches) < len(sizes)
    assert len(list(_batches(natives, [torch.bfloat16] * len(sizes)))) == 1  # nothing is cast
    assert not list(_batches({}, []))
