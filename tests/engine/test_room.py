"""Room for activations: never more is taken than there is, and all of it is given back."""

from __future__ import annotations

import gc

import torch

from outcore.engine.activations.room import ActivationRoom, Lease


class FakeMeter:
    """A meter that returns what it is told."""

    def __init__(self) -> None:
        self.peak = 0
        self.num_starts = 0

    def begin(self) -> None:
        self.num_starts += 1

    def peak_bytes(self) -> int:
        return self.peak


def test_takes_what_there_is_and_no_more():
    room = ActivationRoom(100)
    first, second = room.lease(60), room.lease(40)
    assert (room.free_bytes, room.lease(1)) == (0, None)
    first.give_back()
    first.give_back()
    assert room.free_bytes == 60
    del second
    gc.collect()
    assert room.free_bytes == 100


def test_a_lease_grows_until_there_is_no_room():
    room = ActivationRoom(100)
    lease = Lease(room)
    assert lease.grow(70)
    assert not lease.grow(31)
    assert lease.grow(30)
    assert (lease.nbytes, room.free_bytes) == (100, 0)


def test_goes_back_in_backward_or_with_the_graph():
    room = ActivationRoom(100)

    def result() -> torch.Tensor:
        made = torch.ones(2, requires_grad=True) * 2
        made.grad_fn.register_prehook(room.lease(60).give_back_in_backward)
        return made.sum()

    kept = result()
    assert room.free_bytes == 40
    kept.backward(retain_graph=True)
    assert room.free_bytes == 40
    kept.backward()
    assert room.free_bytes == 100, "the loss is still alive"
    dropped = result()
    assert room.free_bytes == 40
    del dropped
    assert room.free_bytes == 100


def test_closed_until_a_step_without_anything_kept_was_measured():
    meter = FakeMeter()
    room = ActivationRoom(1000, meter)
    room.expect(10)
    assert (room.free_bytes, meter.num_starts) == (0, 1)
    meter.peak = 400
    room.end_step()
    assert room.free_bytes == 1000 - 450, "an eighth more than was measured"
    lease = room.lease(500)
    room.expect(7)
    assert lease is not None
    assert room.free_bytes == 50, "smaller arguments are nothing new"
    meter.peak = 900
    room.end_step()
    assert room.free_bytes == 50, "nothing larger came, so nothing is measured"


def test_larger_arguments_close_it_until_a_step_in_which_nothing_was_kept():
    meter = FakeMeter()
    room = ActivationRoom(1000, meter)
    room.expect(10)
    meter.peak = 80
    room.end_step()
    lease = room.lease(500)
    room.expect(20)
    assert room.lease(1) is None
    meter.peak = 600
    room.end_step()
    assert room.free_bytes == 0, "this step had kept something, so its peak says nothing"
    lease.give_back()
    meter.peak = 160
    room.end_step()
    assert room.free_bytes == 1000 - 180
