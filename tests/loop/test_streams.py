"""Several streams of compute: a hook that autograd leaves on an old stream is ordered, as declarations show."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from plans import prepare_for_test

import outcore
from outcore.core.errors import RaceError
from outcore.device.cpu import CpuDevice
from outcore.device.race import RaceChecker
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.gradients.unit_gradients import UnitPass
from outcore.memory.arena import Region
from outcore.spec.timeline import COMPUTE

from .rig import DEVICE, KINDS, adamw, batch, make, plan_for

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="real streams: tests/gpu/test_streams_cuda.py")
OLD, NEW = COMPUTE, f"{COMPUTE} 1"


class Streams(CpuDevice):
    """The CPU with several streams of compute, as far as declarations go."""

    now = OLD

    def __init__(self, *args):
        super().__init__(*args)
        self.stream_name = lambda: self.now

    @contextmanager
    def on(self, stream):
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


@contextmanager
def old_hooks(monkeypatch):
    """Run hooks of parameters on the stream of the first step; autograd joins it before a backward ends."""
    hook, end = BackwardGradients.hook, BackwardGradients._end_task

    def on_old(self, unit, index):
        reached = hook(self, unit, index)

        def work(param):
            with self._device.on(OLD):
                reached(param)

        return work

    def joined(self, *args):
        self._device._checker.order(self._device.now, OLD)
        end(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr("outcore.device.opening.CpuDevice", Streams)
        patch.setattr(BackwardGradients, "hook", on_old)
        patch.setattr(BackwardGradients, "_end_task", joined)
        yield


def run(kind, folder):
    model = make()
    optimizer, checker = adamw(model), RaceChecker()
    plan = plan_for(model, optimizer, kind)
    options = {"plan": plan, "budget": outcore.Budget(disk=str(folder)), "race_checker": checker}
    with prepare_for_test(model, optimizer, **options) as (model, optimizer):
        device = optimizer.engine.device
        for step, stream in enumerate((OLD, NEW, NEW, OLD)):
            checker.order(stream, device.now)
            device.now = stream
            for micro in range(2):
                model.loss(batch(step + micro)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", KINDS)
def test_a_pass_closed_on_another_stream_is_ordered(kind, tmp_path, monkeypatch):
    with old_hooks(monkeypatch):
        run(kind, tmp_path)


def test_it_would_race_without(tmp_path, monkeypatch):
    monkeypatch.setattr(UnitPass, "take_over", lambda *_: None)
    with old_hooks(monkeypatch), pytest.raises(RaceError, match="to come after 'gradients of blocks.2' on compute 1"):
        run("host", tmp_path)


PLACE = Region("device", 0, 4096)


def test_streams_are_unordered_unless_joined():
    checker = RaceChecker()
    written = checker.act(OLD, "a", writes=[PLACE])
    with pytest.raises(RaceError, match="'b' on compute 1 to come after 'a' on compute,.*mark"):
        checker.act(NEW, "b", reads=[PLACE])
    checker.act(NEW, "b", reads=[PLACE], after=[written])
    with pytest.raises(RaceError):
        checker.act(OLD, "c", writes=[PLACE])
    checker.order(OLD, NEW)
    checker.act(OLD, "c", writes=[PLACE])
    with pytest.raises(RaceError):
        checker.act("h2d", "d", reads=[PLACE], after=[checker.mark(NEW)])
    checker.act("h2d", "d", reads=[PLACE], after=[checker.mark(OLD)])


def test_a_handle_from_before_a_stream_was_seen_still_orders():
    checker = RaceChecker()
    written = checker.act("h2d", "a", writes=[PLACE])
    for number in range(1, 4):
        checker.act(f"{COMPUTE} {number}", "b", reads=[PLACE], after=[written])
    with pytest.raises(RaceError, match="'b' on compute 1"):
        checker.act(OLD, "c", writes=[PLACE], after=[written])
    checker.synchronize()
    checker.act(OLD, "c", writes=[PLACE])
