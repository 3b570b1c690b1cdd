"""Update workers: threads, errors, forks, ends."""

from __future__ import annotations

import os
import threading
import time
import weakref

import pytest
import torch

from outcore.core.errors import UnsupportedError
from outcore.runtime.workers import UpdateWorkers

from .update_cases import OPTIMIZERS, Blocked, PlainLoop, assert_same_bits, random

NUMELS = (1, 4097, 199, (1 << 20) + 17, 65)


@pytest.mark.parametrize("main_threads", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bits(num_workers, main_threads):
    count = torch.get_num_threads()
    torch.set_num_threads(main_threads)
    try:
        plain = PlainLoop(OPTIMIZERS["adamw"], NUMELS)
        blocked = Blocked(OPTIMIZERS["adamw"], NUMELS, weights_dtype=torch.bfloat16)
        factors = (torch.tensor(0.3),)
        with UpdateWorkers(num_workers) as workers:
            for step in (1, 2):
                grads = [random(n, step, torch.bfloat16) for n in NUMELS]
                plain.step(grads, factors)
                workers.run(blocked.pieces(step, grads, factors=factors))
        assert torch.get_num_threads() == main_threads
    finally:
        torch.set_num_threads(count)
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
    assert_same_bits(blocked.weights, [p.detach().bfloat16() for p in plain.params])


def test_workers_have_one_aten_thread_and_nobody_else_changes(monkeypatch):
    seen = []
    monkeypatch.setattr("outcore.runtime.workers.update_blocks", lambda *_: seen.append(torch.get_num_threads()))
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with UpdateWorkers(2) as workers:
            workers.run([])
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert (seen, later, torch.get_num_threads()) == ([1, 1], [3], 3)
    finally:
        torch.set_num_threads(count)


def test_the_first_error_is_raised_and_the_workers_live_on():
    blocked = Blocked(OPTIMIZERS["adamw"], NUMELS)
    plain = PlainLoop(OPTIMIZERS["adamw"], NUMELS)
    grads = [random(n, 1) for n in NUMELS]
    with UpdateWorkers(2) as workers:
        pieces = Blocked(OPTIMIZERS["adamw"], NUMELS).pieces(1, [None] * len(NUMELS))
        with pytest.raises(AssertionError, match="must be marked zero"):
            workers.run(pieces)
        workers.run(blocked.pieces(1, grads))
    plain.step(grads)
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))


def test_close_ends_the_threads_and_may_come_again():
    before = threading.active_count()
    workers = UpdateWorkers(3)
    assert threading.active_count() == before + 3
    workers.close()
    workers.close()
    assert threading.active_count() == before
    with pytest.raises(UnsupportedError, match="expected open workers"):
        workers.run([])


def test_idle_workers_keep_no_tensor():
    with UpdateWorkers(2) as workers:
        blocked = Blocked(OPTIMIZERS["adamw"], (4097,))
        target = weakref.ref(blocked.targets[0])
        workers.run(blocked.pieces(1, [random(4097, 1)]))
        del blocked
        deadline_s = time.monotonic() + 5
        while target() is not None and time.monotonic() < deadline_s:
            time.sleep(0.001)  # the last worker is on its way back to its queue
        assert target() is None


def test_the_default_is_the_usable_cores():
    with UpdateWorkers() as workers:
        assert 1 <= workers.num_workers <= len(os.sched_getaffinity(0))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_refuses_to_run_and_closes_quietly():
    with UpdateWorkers(2) as workers:
        child = os.fork()
        if child == 0:
            try:
                workers.run([])
            except UnsupportedError:
                workers.close()
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        workers.run([])
