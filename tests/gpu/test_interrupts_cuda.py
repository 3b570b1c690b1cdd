"""Ctrl-C in a backward that autograd runs on a thread of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.rig import adamw, assert_same, batch, make, prepared, seen
from torch import nn

from outcore.engine.engine import engine_of
from outcore.spec.lane_names import Lane

pytestmark = pytest.mark.gpu


class Pressed:
    """Presses Ctrl-C in the next block that a backward comes to; counts all blocks that it comes to."""

    def __init__(self, model: nn.Module) -> None:
        self.num_visits, self.is_due = 0, False
        self.then: Callable[[], object] = lambda: None
        for block in model.blocks:
            block.up.register_full_backward_hook(self._visit)

    def _visit(self, *_: Any) -> None:
        self.num_visits += 1
        if self.is_due:
            self.is_due = False
            signal.raise_signal(signal.SIGINT)  # to this thread: another one might get it later
            self.then()


def press_everywhere(loss: torch.Tensor, pressed: Pressed) -> None:
    """Check that Ctrl-C is raised once in backward, before the next block, and as usual elsewhere."""
    pressed.is_due, pressed.num_visits = True, 0
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    for _ in range(1000):  # Python would call a pending handler here
        pass
    assert pressed.num_visits == 1
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def steps_with_one_lost(model: nn.Module, optimizer: torch.optim.Optimizer, pressed: Pressed | None) -> Any:
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = model.loss(batch(step))
        if step == 1:
            if pressed is not None:
                press_everywhere(loss, pressed)
            model.zero_grad()  # does not report that something may have been lost
        else:
            loss.backward()
            optimizer.step()
            losses.append(loss.detach().clone())
            optimizer.zero_grad()
    return seen(losses, model, optimizer)


@pytest.mark.parametrize("kind", ["device", "host", "disk"])
def test_it_comes_at_the_next_unit_and_once(kind: str, tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as undisturbed:  # the plain loop would update on the device
        want = steps_with_one_lost(*undisturbed, None)
    model = make()
    pressed = Pressed(model)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        assert_same(want, steps_with_one_lost(model, optimizer, pressed))
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert signal.set_wakeup_fd(-1) == -1


def test_it_ends_a_wait_for_a_lane(tmp_path: Path):
    model, is_done = make(), threading.Event()
    pressed = Pressed(model)
    with prepared(model, adamw(model), "host", tmp_path) as (model, _):
        device = engine_of(model, "test").device
        pressed.then = lambda: device.wait("done", device.submit(Lane.UPDATE, "slow", lambda: is_done.wait(20)))
        pressed.is_due = True
        try:
            with pytest.raises(KeyboardInterrupt):
                model.loss(batch()).backward()
            assert not is_done.is_set()
        finally:
            is_done.set()


@pytest.mark.parametrize("wait", ["for one", "for all"])
def test_it_ends_a_wait_for_the_device(wait: str, tmp_path: Path):
    """The operation takes long: the host polls, instead of waiting inside the driver."""
    model = make()
    with prepared(model, adamw(model), "host", tmp_path) as (model, _):
        device = engine_of(model, "test").device
        slow = device.submit(Lane.H2D, "slow", lambda: torch.cuda._sleep(3_000_000_000))  # 1.5 to 3 s
        timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                device.wait("slow", slow) if wait == "for one" else device.synchronize()
            assert not slow.is_over()
        finally:
            timer.join()


@contextmanager
def handled_by(handler: Callable[..., object]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_of_the_users_own_is_called_behind_backward(tmp_path: Path):
    model, calls = make(), []
    pressed = Pressed(model)
    with prepared(model, adamw(model), "host", tmp_path) as (model, _):
        model.loss(batch()).backward()  # begins with Python's own handler
        pressed.num_visits, pressed.is_due = 0, True
        with handled_by(lambda *_: calls.append(pressed.num_visits)):
            model.loss(batch()).backward()
    assert calls == [len(model.blocks)]


def test_who_waits_for_wakeups_keeps_them(tmp_path: Path):
    model, (read, write) = make(), os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    try:
        with prepared(model, adamw(model), "host", tmp_path) as (model, _):
            model.loss(batch()).backward()
            assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.set_wakeup_fd(-1) == write
    finally:
        signal.set_wakeup_fd(-1)
        os.close(read)
        os.close(write)


def test_a_forked_child_has_signals_of_its_own(tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "host", tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.set_wakeup_fd(-1) == -1 else 1)
        assert os.waitpid(child, 0)[1] == 0
        pressed = Pressed(model)
        optimizer.zero_grad()
        press_everywhere(model.loss(batch()), pressed)
        optimizer.zero_grad()
