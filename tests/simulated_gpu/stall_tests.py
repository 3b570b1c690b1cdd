"""A copy that stands still: operations that need it wait, the result is the same, and a Ctrl-C comes through."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import simulator
import torch
from loop.rig import LENGTH, VOCAB, adamw, assert_same, make, prepared, seen
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.device import threads

pytestmark = pytest.mark.gpu
STALLS = ("h2d_stall_s", "d2h_stall_s")


@contextmanager
def pressed(after_s: float) -> Iterator[list[float]]:
    """Press Ctrl-C after so many seconds; yield the list of moments when it was pressed."""
    moments: list[float] = []

    def press() -> None:
        moments.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(after_s, press)
    timer.start()
    try:
        yield moments
    finally:
        timer.cancel()
        timer.join()


def ids(number: int) -> torch.Tensor:
    """Make ids on the device."""
    return torch.arange(3 * LENGTH, device="cuda").view(3, LENGTH).add(number).remainder(VOCAB)


def take_steps(model: Any, optimizer: Any, first: int, count: int) -> list[torch.Tensor]:
    """Take steps without asking for a value, and without copies."""
    losses = []
    for number in range(first, first + count):
        torch.manual_seed(number)
        loss = model.loss(ids(number))
        loss.backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize(("kind", "knob"), [("host", "h2d_stall_s"), ("disk", "d2h_stall_s")])
def test_a_stalled_copy_is_waited_for(kind, knob, tmp_path):
    model, twin = make(), make()
    with prepared(model, adamw(model), kind, tmp_path) as undisturbed:
        want = seen(take_steps(*undisturbed, 0, 4), *undisturbed)
    with prepared(twin, adamw(twin), kind, tmp_path) as (model, optimizer), simulator.knobs(**{knob: 0.4}):
        start = time.monotonic()
        assert_same(want, seen(take_steps(model, optimizer, 0, 4), model, optimizer))
        assert time.monotonic() - start >= 0.4


@pytest.mark.parametrize("knob", STALLS)
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_an_interrupt_comes_through_a_stalled_copy(kind, knob, tmp_path):
    """Wherever the host waits then. Everything else is as usual: a step is lost, or was cut short and is refused."""
    model = make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        take_steps(model, optimizer, 0, 2)
        with simulator.knobs(**{knob: 20}), pressed(0.3) as moments:
            with pytest.raises(KeyboardInterrupt):
                take_steps(model, optimizer, 2, 100)
            assert time.monotonic() - moments[0] < 5  # within a second on an idle machine; the copy stalls for 20
        outcore.close(model, keep_weights=False)


def test_what_a_copy_reads_or_writes_is_not_given_back_before_it_is_over(tmp_path, monkeypatch):
    """Not even if lanes do not end in time: the update's thread waits for its gradients."""
    monkeypatch.setattr(threads, "CLOSE_TIMEOUT_S", 0.2)
    monkeypatch.setattr(threads, "_END_TIMEOUT_S", 0.1)
    model = make()
    with prepared(model, adamw(model), "host", tmp_path, depth=3) as (model, optimizer):
        take_steps(model, optimizer, 0, 1)
        optimizer.engine.device.synchronize()
        with simulator.knobs(d2h_stall_s=60):
            model.loss(ids(1)).backward()
            optimizer.step()
            heads, until = optimizer.engine.device._lanes._heads, time.monotonic() + 50
            while not any(head.handle.name.startswith("update") for head in list(heads.values())):
                assert time.monotonic() < until, "an update that waits for its gradients"
                time.sleep(0.01)
            have_gone_on: list[bool] = []

            def go_on() -> None:
                have_gone_on.append(True)
                simulator.set_knobs(d2h_stall_s=0)

            timer, stop_waiting = threading.Timer(1.0, go_on), threads._stop_waiting

            def stop_waiting_and_go_on(operation: Any, reason: str) -> Any:
                if not timer.ident:
                    timer.start()
                return stop_waiting(operation, reason)

            monkeypatch.setattr(threads, "_stop_waiting", stop_waiting_and_go_on)
            with pytest.warns(RuntimeWarning, match="expected all lanes to end within"):
                outcore.close(model, keep_weights=False)
            assert have_gone_on
