"""Update workers: threads, errors, forks and how they end."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.updates import workers as workers_module
from outcore.engine.updates.workers import (
    LEAST_BYTES,
    LEAST_SHARE_NUMEL,
    MOST_BYTES,
    TOLD_NUMEL,
    TRIALS,
    USUAL_BYTES,
    BlockSizes,
    UpdateWorkers,
    kind_of,
    worker_cpus,
)
from outcore.memory.machine import Node, Topology, read_topology
from outcore.optim.blocks import StoppedError

from .update_cases import FUSED, OPTIMIZERS, Blocked, PlainLoop, assert_same_bits, fused_sgd_is_broken, random

NUMELS = (1, 4097, 199, (1 << 20) + 17, 65)


@pytest.mark.parametrize("main_threads", [1, 2])
@pytest.mark.parametrize("in_teams", [False, True])
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_any_number_of_workers_gives_the_same_bits(num_workers, in_teams, main_threads):
    count = torch.get_num_threads()
    torch.set_num_threads(main_threads)
    try:
        plain = PlainLoop(OPTIMIZERS["adamw"], NUMELS)
        blocked = Blocked(OPTIMIZERS["adamw"], NUMELS, weights_dtype=torch.bfloat16)
        factors = (torch.tensor(0.3),)
        with UpdateWorkers(num_workers, in_teams=in_teams) as workers:
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
    both = threading.Barrier(2, timeout=30)
    pieces = Blocked(OPTIMIZERS["adamw"], (2 * LEAST_SHARE_NUMEL,)).pieces(1, [None])

    def look(*_):
        both.wait()
        seen.append(torch.get_num_threads())

    monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", look)
    count = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with UpdateWorkers(2) as workers:
            workers.run(pieces)
            later = []
            thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
            thread.start()
            thread.join()
        assert (seen, later, torch.get_num_threads()) == ([1, 1], [3], 3)
    finally:
        torch.set_num_threads(count)


@pytest.mark.filterwarnings("ignore:torch._fused_sgd_:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_team_gives_the_bits_of_one_thread(name, dtype, monkeypatch):
    """Teams run fused kernels alone, which their threads cut at whole vectors."""
    counts = set()
    update = workers_module.update_blocks
    monkeypatch.setattr(
        workers_module, "update_blocks", lambda *args: (counts.add(torch.get_num_threads()), update(*args))
    )
    numels = ((1 << 20) + 17, 199)  # one is cut among the team's threads, and more than one block of one thread
    one, many = (Blocked(OPTIMIZERS[name], numels, dtype) for _ in range(2))
    for blocked, in_teams in ((one, False), (many, True)):
        counts.clear()
        with UpdateWorkers(3 if in_teams else 1, in_teams=in_teams) as workers:
            for step in (1, 2):
                workers.run(blocked.pieces(step, [random(n, step, dtype) for n in numels]))
    assert_same_bits(many.tensors(), one.tensors())
    is_broken = name.startswith("sgd") and dtype == torch.bfloat16 and fused_sgd_is_broken()
    assert counts == {3 if name in FUSED and not is_broken else 1}


def test_a_team_has_the_threads_of_its_node(monkeypatch):
    """It is bound to its node, has scratch and work for each thread, and leaves everybody else's threads alone."""
    cpu = min(os.sched_getaffinity(0))
    topology = Topology((Node(frozenset({cpu}), 3), Node(frozenset({10**5}), 2)), None)
    monkeypatch.setattr("outcore.engine.updates.workers.read_topology", lambda: topology)
    seen, both = [], threading.Barrier(2, timeout=30)

    def look(share, scratch, is_stopped):
        both.wait()
        numel = sum(piece.target.numel() for piece in share)
        seen.append((torch.get_num_threads(), scratch.numel() // USUAL_BYTES, len(os.sched_getaffinity(0)), numel))

    monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", look)
    count, everywhere = torch.get_num_threads(), len(os.sched_getaffinity(0))
    with UpdateWorkers(in_teams=True) as workers:
        workers.run(Blocked(OPTIMIZERS["adamw"], (5 * LEAST_SHARE_NUMEL,)).pieces(1, [None]))
        assert workers.num_workers == 5
    sizes = [size * LEAST_SHARE_NUMEL for size in (2, 3)]
    assert sorted(seen) == [(2, 2, everywhere, sizes[0]), (3, 3, 1, sizes[1])]  # the second node has no such CPU
    assert torch.get_num_threads() == count


def test_teams_update_beside_an_accelerator_alone():
    for on_host in (True, False):
        with UpdateWorkers.beside(SimpleNamespace(computes_on_host=on_host)) as workers:
            names = {thread.name.rstrip("0123456789") for thread in workers._threads}
            assert names == {"outcore-update-"} | ({"outcore-update-team-"} if not on_host else set())
            assert workers.num_workers == max(1, read_topology().num_cores - (not on_host))


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


def test_there_is_a_worker_per_core_that_is_not_spared():
    cores = read_topology().num_cores
    for spare, count in ((0, cores), (1, max(1, cores - 1)), (99, 1)):
        with UpdateWorkers(spare_cores=spare) as workers:
            assert workers.num_workers == count


def test_too_little_work_for_all_wakes_few(monkeypatch):
    shares = []
    monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", lambda share, *_: shares.append(share))
    with UpdateWorkers(3) as workers:
        for numel, count in ((1, 1), (2 * LEAST_SHARE_NUMEL - 1, 1), (2 * LEAST_SHARE_NUMEL, 2)):
            shares.clear()
            workers.run(Blocked(OPTIMIZERS["adamw"], (numel,)).pieces(1, [None]))
            assert len(shares) == count


def nodes(*sizes, quota=None):
    first = [sum(sizes[:i]) for i in range(len(sizes))]
    return Topology(tuple(Node(frozenset(range(a, a + n)), n) for a, n in zip(first, sizes, strict=True)), quota)


@pytest.mark.parametrize(
    ("topology", "spare", "counts"),
    [
        (nodes(4, 4), 0, [4, 4]),
        (nodes(4, 4), 1, [4, 3]),
        (nodes(8, 4), 0, [8, 4]),
        (nodes(8, 4, quota=6), 0, [4, 2]),
        (nodes(4, 4, quota=4), 0, [2, 2]),
        (nodes(4, 4, quota=1), 1, [1, 0]),
    ],
)
def test_workers_are_bound_to_nodes_in_proportion(topology, spare, counts):
    places = worker_cpus(topology, spare_cores=spare)
    assert [places.count(node.cpus) for node in topology.nodes] == counts
    assert len(places) == sum(counts)


@pytest.mark.parametrize(
    ("topology", "of_each"),
    [
        (nodes(4, 4), [[1, 0]] * 4 + [[0, 1]] * 4),
        (nodes(8, 8), [[2, 0]] * 4 + [[0, 2]] * 4),
        (nodes(8, 4), [[4, 0], [4, 0], [0, 4]]),
        (nodes(4, 4), [[2, 0], [1, 1], [0, 2]]),
        (nodes(2, 2), [[1, 0]] * 3 + [[0, 1]] * 3),  # more processes than cores
    ],
)
def test_processes_deal_nodes_out(topology, of_each):
    for place, counts in enumerate(of_each):
        places = worker_cpus(topology, spare_cores=0, sharers=(place, len(of_each)))
        assert [places.count(node.cpus) for node in topology.nodes] == counts
    assert worker_cpus(nodes(8), spare_cores=1, sharers=(3, 4)) == [None]


@pytest.mark.parametrize(("spare", "count"), [(0, 4), (1, 3), (4, 1)])
def test_with_one_node_nobody_is_bound(spare, count):
    assert worker_cpus(nodes(4), spare_cores=spare) == [None] * count


def test_binding_is_that_of_the_workers_alone(monkeypatch):
    mine = os.sched_getaffinity(0)
    cpu = min(mine)
    topology = Topology((Node(frozenset({cpu}), 1), Node(frozenset({10**5}), 1)), None)
    monkeypatch.setattr("outcore.engine.updates.workers.read_topology", lambda: topology)
    seen = []
    both = threading.Barrier(2, timeout=30)

    def look(*_):
        both.wait()
        seen.append(os.sched_getaffinity(0))

    monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", look)
    with UpdateWorkers() as workers:
        workers.run(Blocked(OPTIMIZERS["adamw"], (2 * LEAST_SHARE_NUMEL,)).pieces(1, [None]))
    assert sorted(seen, key=len) == sorted([{cpu}, mine], key=len)  # no such CPU: its worker runs anywhere
    assert os.sched_getaffinity(0) == mine


def test_stop_ends_an_update_at_the_next_block(monkeypatch):
    updated = []
    begun = threading.Event()

    def slow(step):
        updated.append(step)
        begun.set()
        time.sleep(0.05)

    monkeypatch.setattr("outcore.optim.blocks.bound", lambda *_: slow)
    num_blocks = 60
    pieces = Blocked(OPTIMIZERS["adamw"], (num_blocks * USUAL_BYTES // 4,)).pieces(1, [None])
    pieces[0].zero = True
    with UpdateWorkers(1) as workers:
        stopper = threading.Thread(target=lambda: (begun.wait(30), workers.stop()))
        stopper.start()
        with pytest.raises(StoppedError, match="the model was closed"):
            workers.run(pieces)
        stopper.join()
        assert 1 <= len(updated) < num_blocks
        with pytest.raises(StoppedError):
            workers.run(pieces)


def test_workers_that_nobody_holds_end():
    before = set(threading.enumerate())
    workers = UpdateWorkers(2)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del workers
    gc.collect()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def test_closing_does_not_wait_for_a_worker_that_hangs(monkeypatch):
    monkeypatch.setattr("outcore.engine.updates.workers.CLOSE_TIMEOUT_S", 0.05)
    begun, release = threading.Event(), threading.Event()
    monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", lambda *_: (begun.set(), release.wait(30)))
    workers = UpdateWorkers(2)
    running = threading.Thread(target=workers.run, args=(Blocked(OPTIMIZERS["adamw"], (1,)).pieces(1, [None]),))
    running.start()
    begun.wait(30)
    workers.close()
    release.set()
    running.join(30)
    assert not running.is_alive()
    workers.close()


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


def test_the_fastest_size_of_blocks_is_found():
    """Any size can be the fastest; sizes beyond a slower one are not tried."""
    for num_workers, fastest, tried in (
        (2, MOST_BYTES, {1, 2, 4, 8}),
        (2, LEAST_BYTES, {4, 2, 1, 0.5}),
        (2, 2**21, {1, 2, 4}),
    ):
        sizes, seen = BlockSizes(num_workers), []
        for _ in range(30):
            seen.append(sizes.take("kind"))
            sizes.took(
                "kind", seen[-1], num_workers * TOLD_NUMEL, 1 + abs(seen[-1].bit_length() - fastest.bit_length())
            )
        assert seen[-1] == fastest
        assert set(seen) == {size * 2**20 for size in tried}
        assert all(seen.count(size) == TRIALS for size in set(seen) - {fastest})
        assert sizes.take("another kind") == USUAL_BYTES
    many = BlockSizes(64)
    many.took("kind", USUAL_BYTES, 64 * TOLD_NUMEL - 1, 1.0)  # too few elements to learn from
    assert not many.kinds
    for _ in range(30):
        size = many.take("kind")
        assert size <= USUAL_BYTES, "all workers together take no more than there may be"
        many.took("kind", size, 64 * TOLD_NUMEL, 1 / size)


def test_updates_look_for_it(monkeypatch):
    """Sizes are tried in turn, and the bits are the same for any size."""
    numels = (TOLD_NUMEL + 64, 199)
    plain, blocked = PlainLoop(OPTIMIZERS["adamw"], numels), Blocked(OPTIMIZERS["adamw"], numels)
    ticks, taken = itertools.count(), []
    monkeypatch.setattr("outcore.engine.updates.workers.time.perf_counter", lambda: next(ticks))  # equal times
    with UpdateWorkers(1) as workers:
        for step in range(1, 4 * TRIALS):
            grads = [random(n, step, torch.float32) for n in numels]
            plain.step(grads, ())
            pieces = blocked.pieces(step, grads)
            taken.append(workers.sizes.take((False, kind_of(pieces))))
            workers.run(pieces)
    assert set(taken) == {USUAL_BYTES // 2, USUAL_BYTES, 2 * USUAL_BYTES}
    assert_same_bits(blocked.tensors(), plain.tensors(blocked.names))
