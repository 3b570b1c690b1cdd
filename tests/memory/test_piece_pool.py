"""Requests take turns, errors wait for pieces that are under way, and no caller waits forever."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest

from outcore.memory.piece_pool import ClosedError, PiecePool, StalledError


@pytest.fixture
def pool():
    pool = PiecePool(1, name="outcore-test")
    yield pool
    assert pool.close(timeout_s=10)


def test_a_short_request_does_not_wait_behind_all_of_a_long_one(pool):
    order = []
    gate, started = threading.Event(), threading.Event()

    def work(piece):
        started.set()
        gate.wait(10)
        order.append(piece)

    long = threading.Thread(
        target=pool.run, args=(work, [f"long{i}" for i in range(5)]), kwargs={"stall_timeout_s": 10}
    )
    long.start()
    started.wait(10)
    short = threading.Thread(target=pool.run, args=(work, ["short"]), kwargs={"stall_timeout_s": 10})
    short.start()
    while len(pool._requests) < 2:
        threading.Event().wait(0.001)
    gate.set()
    short.join(10)
    long.join(10)
    assert order.index("short") <= 2
    assert [piece for piece in order if piece != "short"] == [f"long{i}" for i in range(5)]


def in_a_row(pool, *requests):
    """Queue requests while the only thread is held. Returns the order of their pieces, given as kind and letters."""
    order, threads = [], []
    gate, started = threading.Event(), threading.Event()

    def start(work, pieces, **how):
        threads.append(threading.Thread(target=pool.run, args=(work, pieces), kwargs={"stall_timeout_s": 10, **how}))
        threads[-1].start()

    start(lambda piece: (started.set(), gate.wait(10)), [0])
    started.wait(10)
    for number, (kind, letters, gives_way) in enumerate(requests, start=1):
        start(order.append, letters, kind=kind, gives_way=gives_way)
        while len(pool._requests) < number:
            threading.Event().wait(0.001)
    gate.set()
    for thread in threads:
        thread.join(10)
    return "".join(order)


def test_a_request_gives_way_to_others_of_its_kind(pool):
    assert in_a_row(pool, ("read", "aaaa", True), ("read", "bb", False), ("read", "cc", False)) == "bcbcaaaa"
    assert in_a_row(pool, ("read", "aaa", True), ("read", "bb", False), ("write", "ccc", True)) == "bcbacaca"
    assert in_a_row(pool, ("read", "aa", True), ("write", "bb", False)) == "abab"
    assert in_a_row(pool, ("read", "aa", True), ("read", "bb", True)) == "abab"


def test_giving_way_is_no_stall_and_a_hanging_drive_is_one():
    pool = PiecePool(1, name="outcore-test")
    gate, begun, hangs, done, stalled = threading.Event(), threading.Event(), threading.Event(), [], []

    def slow(piece):
        begun.set()
        threading.Event().wait(0.06)
        if piece == 20:
            hangs.set()
            gate.wait(10)

    def first():
        with pytest.raises(StalledError):
            pool.run(slow, range(22), kind="read", stall_timeout_s=0.5)

    def behind():
        with pytest.raises(StalledError) as caught:
            pool.run(done.append, [0], kind="read", stall_timeout_s=0.5, gives_way=True)
        stalled.append((caught.value, hangs.is_set()))

    threads = [threading.Thread(target=run) for run in (first, behind)]
    threads[0].start()
    begun.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert stalled  # the other request made progress for more than twice as long as is allowed
    assert stalled[0][1]
    assert not done
    gate.set()
    assert pool.close(timeout_s=10)


def test_a_first_piece_after_giving_way_is_no_stall(pool):
    """It gives way for 0.3 s, and its first piece is under way when the second 0.25 s are over."""
    begun = threading.Event()
    first = lambda piece: (begun.set(), threading.Event().wait(0.1))  # noqa: E731
    thread = threading.Thread(target=pool.run, args=(first, range(4)), kwargs={"stall_timeout_s": 10})
    thread.start()
    begun.wait(10)
    pool.run(lambda piece: threading.Event().wait(0.2), [0], stall_timeout_s=0.25, gives_way=True)
    thread.join(10)


def test_a_request_that_gives_way_stalls_by_its_own_pieces():
    pool = PiecePool(2, name="outcore-test")
    gate, hangs, stop, errors = threading.Event(), threading.Event(), threading.Event(), []

    def behind():
        with pytest.raises(StalledError) as caught:
            pool.run(lambda piece: (hangs.set(), gate.wait(10)), [1], stall_timeout_s=0.05, gives_way=True)
        errors.append(caught.value.piece)
        stop.set()

    thread = threading.Thread(target=behind)
    thread.start()
    hangs.wait(10)
    while not stop.wait(0.001):  # others make progress
        pool.run(lambda piece: None, range(3), stall_timeout_s=10)
    thread.join(10)
    assert errors == [1]
    gate.set()
    assert pool.close(timeout_s=10)


def test_every_piece_is_done_once():
    pool = PiecePool(4, name="outcore-test")
    done = []
    pool.run(done.append, range(199), stall_timeout_s=10)
    pool.run(done.append, [], stall_timeout_s=10)
    assert sorted(done) == list(range(199))
    assert pool.close(timeout_s=10)


def test_the_first_error_is_raised_after_what_is_under_way_has_ended():
    pool = PiecePool(2, name="outcore-test")
    ended = []
    both = threading.Barrier(2, timeout=10)

    def work(piece):
        if piece < 2:
            both.wait()
        if piece == 0:
            raise ValueError("first")
        threading.Event().wait(0.05)
        ended.append(piece)

    with pytest.raises(ValueError, match="first"):
        pool.run(work, range(100), stall_timeout_s=10)
    assert 1 in ended
    assert len(ended) < 99
    assert pool.close(timeout_s=10)


def test_slow_progress_is_no_stall_and_none_is_one(pool):
    gate = threading.Event()
    pool.run(lambda piece: threading.Event().wait(0.03), range(10), stall_timeout_s=0.1)
    with pytest.raises(StalledError) as caught:
        pool.run(lambda piece: gate.wait(10), ["a", "b"], stall_timeout_s=0.05)
    assert caught.value.piece == "a"
    gate.set()


def test_closing_fails_what_waits():
    pool = PiecePool(1, name="outcore-test")
    gate, started, errors = threading.Event(), threading.Event(), []

    def work(piece):
        started.set()
        gate.wait(10)

    def caller():
        try:
            pool.run(work, range(9), stall_timeout_s=10)
        except ClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=caller)
    thread.start()
    started.wait(10)
    assert not pool.close(timeout_s=0)
    gate.set()
    thread.join(10)
    assert len(errors) == 1
    assert pool.close(timeout_s=10)
    with pytest.raises(ClosedError):
        pool.run(work, [1], stall_timeout_s=1)


def test_an_interrupted_caller_waits_for_what_is_under_way(pool, monkeypatch):
    gate, started, ended = threading.Event(), threading.Event(), []
    wait = pool._wait

    def interrupted(request, stall_timeout_s):
        monkeypatch.setattr(pool, "_wait", wait)
        while not request.under_way:
            request.finished.wait(0.001)
        threading.Timer(0.05, gate.set).start()
        raise KeyboardInterrupt

    def work(piece):
        started.set()
        gate.wait(10)
        ended.append(piece)

    monkeypatch.setattr(pool, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.run(work, range(9), stall_timeout_s=10)
    assert ended == [0]  # the piece that was under way, and no later one
    pool.run(ended.append, ["next"], stall_timeout_s=10)
    assert ended == [0, "next"]


def test_stopping_fails_what_waits_without_waiting_for_what_hangs(monkeypatch):
    monkeypatch.setattr("outcore.memory.piece_pool._LAST_PIECES_TIMEOUT_S", 0.05)
    pool = PiecePool(1, name="outcore-test")
    gate, started, errors = threading.Event(), threading.Event(), []

    def caller():
        with pytest.raises(ClosedError) as caught:
            pool.run(lambda piece: (started.set(), gate.wait(10)), range(9), stall_timeout_s=60)
        errors.append(caught.value)

    thread = threading.Thread(target=caller)
    thread.start()
    started.wait(10)
    pool.stop()
    thread.join(10)
    assert len(errors) == 1
    assert not pool.close(timeout_s=0)
    gate.set()
    assert pool.close(timeout_s=10)


def test_stopping_lets_the_last_pieces_of_a_request_end_well():
    pool = PiecePool(1, name="outcore-test")
    gate, started, done = threading.Event(), threading.Event(), []
    work = lambda piece: (started.set(), gate.wait(10), done.append(piece))  # noqa: E731
    thread = threading.Thread(target=lambda: (pool.run(work, ["only"], stall_timeout_s=10), done.append("returned")))
    thread.start()
    started.wait(10)
    pool.stop()
    gate.set()
    thread.join(10)
    assert done == ["only", "returned"]
    assert pool.close(timeout_s=10)


def test_an_idle_pool_holds_no_piece(pool):
    class Piece:
        pass

    piece = Piece()
    alive = weakref.ref(piece)
    pool.run(lambda piece: None, [piece], stall_timeout_s=10)
    del piece
    for _ in range(1000):  # the thread may still be on its way back to waiting
        gc.collect()
        if alive() is None:
            break
        threading.Event().wait(0.001)
    assert alive() is None
