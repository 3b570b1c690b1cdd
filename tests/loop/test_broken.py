"""Errors in workers and transfers, stalled disks, Ctrl-C: an error names unit, tier and stage, and nothing hangs."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager

import nursery
import pytest

import outcore
from outcore.engine.updates import workers
from outcore.memory.disk import DiskStore
from outcore.memory.disk_file import OsDiskIO

from .rig import batch, tower_on, train

pytestmark = pytest.mark.filterwarnings("ignore:the weights of this:UserWarning")

BOUND_S = 0.2


@pytest.fixture(autouse=True)
def bounds(monkeypatch):
    monkeypatch.setattr("outcore.device.threads.STALL_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.device.threads.CLOSE_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.device.threads._END_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.engine.updates.workers.CLOSE_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.memory.disk._CLOSE_TIMEOUT_S", BOUND_S)
    monkeypatch.setattr("outcore.memory.piece_pool._LAST_PIECES_TIMEOUT_S", BOUND_S)
    monkeypatch.setitem(DiskStore.open.__func__.__kwdefaults__, "stall_timeout_s", BOUND_S)


@pytest.fixture
def release():
    """Yield an event: stalled operations go on once it is set, at the latest at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


@contextmanager
def trained(kind, folder):
    """A prepared model after one good step."""
    with tower_on(kind, folder) as (model, optimizer):
        train(model, optimizer, 1)
        optimizer.engine.device.synchronize()
        yield model, optimizer


def replace_operation(monkeypatch, engine, name, work):
    """Replace one kind of operation by ``work``; ``name`` is the beginning of its name."""
    submit = engine.device.submit

    def replaced(lane, what, given, **options):
        return submit(lane, what, work if what.startswith(name) else given, **options)

    monkeypatch.setattr(engine.device, "submit", replaced)


def fails_then_closes(model, optimizer, error, match, *, is_forward_lost=True):
    """Check that training raises, forward alone too if weights are lost, training again; and that closing is quick."""
    with pytest.raises(error, match=match):
        train(model, optimizer, 3)
    if is_forward_lost:
        with pytest.raises(outcore.OutcoreError):
            model.loss(batch())
    for _ in range(2):
        with pytest.raises(outcore.OutcoreError):  # the next forward misses an update that needs the failed operation
            train(model, optimizer, 2)
    start_s = time.monotonic()
    outcore.close(model, keep_weights=False)
    assert time.monotonic() - start_s < 10  # seconds; the stuck operation would last 30


OPERATIONS = [
    ("host", "fetch blocks.1", "h2d (host to device)"),
    ("host", "update blocks.1", "update (on the host)"),
    ("disk", "read weights of blocks.1", "weights_read (disk to host)"),
    ("disk", "read states of blocks.1", "states_read (disk to host)"),
    ("disk", "write states of blocks.1", "states_write (host to disk)"),
    ("disk", "write weights of blocks.1", "disk_write (host to disk)"),
]


@pytest.mark.parametrize(("kind", "name", "lane"), OPERATIONS)
def test_an_error_names_unit_tier_and_stage(kind, name, lane, tmp_path, monkeypatch):
    def work():
        raise ZeroDivisionError("injected")

    with trained(kind, tmp_path) as (model, optimizer):
        replace_operation(monkeypatch, optimizer.engine, name, work)
        match = re.escape(f"'{name}' on lane {lane} to finish, but it raised ZeroDivisionError: injected")
        are_weights_lost = not name.startswith("write states")  # slots keep a copy, which no further update may use
        fails_then_closes(model, optimizer, outcore.OutcoreError, match, is_forward_lost=are_weights_lost)


def test_an_error_in_a_worker(tmp_path, monkeypatch):
    def update(*_):
        raise ZeroDivisionError("injected")

    with trained("host", tmp_path) as (model, optimizer):
        monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", update)
        match = r"'update .*' on lane update \(on the host\) to finish, but it raised ZeroDivisionError: injected"
        fails_then_closes(model, optimizer, outcore.OutcoreError, match)


@pytest.mark.filterwarnings("ignore:expected all lanes to end:RuntimeWarning")
@pytest.mark.parametrize(("kind", "name", "lane"), OPERATIONS[:2])
def test_an_operation_that_stands_still(kind, name, lane, tmp_path, monkeypatch, release):
    with trained(kind, tmp_path) as (model, optimizer):
        replace_operation(monkeypatch, optimizer.engine, name, lambda: release.wait(30))
        match = re.escape(f"'{name}' on lane {lane} to finish, but it has made no progress for 0.2 s")
        fails_then_closes(model, optimizer, outcore.OutcoreError, match)


@pytest.mark.filterwarnings("ignore:expected all lanes to end:RuntimeWarning")
def test_a_worker_that_stands_still(tmp_path, monkeypatch, release):
    with trained("host", tmp_path) as (model, optimizer):
        monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", lambda *_: release.wait(30))
        match = r"'update .*' on lane update \(on the host\) to finish, but it has made no progress"
        fails_then_closes(model, optimizer, outcore.OutcoreError, match)


def test_a_thread_that_is_left_behind_is_said(tmp_path, monkeypatch, release):
    begun = threading.Event()
    with trained("host", tmp_path) as (model, optimizer):
        monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", lambda *_: (begun.set(), release.wait(30)))
        model.loss(batch()).backward()
        optimizer.step()
        begun.wait(30)
        with pytest.warns(RuntimeWarning, match=r"'update .*' on lane update still runs; its thread is left behind"):
            outcore.close(model, keep_weights=False)


def test_closing_stops_an_update_that_is_only_long(tmp_path, monkeypatch):
    begun = threading.Event()
    real = workers.update_blocks

    def update(*args):
        begun.set()
        while True:  # blocks forever
            real(*args)

    with trained("host", tmp_path) as (model, optimizer):
        monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", update)
        model.loss(batch()).backward()
        optimizer.step()
        begun.wait(30)
        outcore.close(model, keep_weights=False)  # without a warning: no thread is left behind


@pytest.mark.parametrize("verb", ["pread", "pwrite"])
def test_a_disk_that_stands_still(verb, tmp_path, monkeypatch, release):
    real = getattr(OsDiskIO, verb)

    def wait(self, *args):
        release.wait(30)
        return real(self, *args)

    with trained("disk", tmp_path) as (model, optimizer):
        monkeypatch.setattr(OsDiskIO, verb, wait)
        stage = "read" if verb == "pread" else "write"
        match = rf"disk store, '(blocks\.\d|root) (weights|states|gradients)': expected to {stage}"
        fails_then_closes(
            model, optimizer, outcore.DiskError, rf"{match}.* of '.*data', but got ETIMEDOUT: no progress"
        )
        assert list(tmp_path.iterdir()) == []


def test_closing_does_not_wait_for_a_disk_that_stands_still(tmp_path, monkeypatch, release):
    monkeypatch.setitem(DiskStore.open.__func__.__kwdefaults__, "stall_timeout_s", 60.0)
    with trained("disk", tmp_path) as (model, optimizer):
        model.loss(batch()).backward()
        optimizer.engine.device.synchronize()
        monkeypatch.setattr(OsDiskIO, "pread", lambda *_: release.wait(30))
        optimizer.step()
        start_s = time.monotonic()
        outcore.close(model, keep_weights=False)
        assert time.monotonic() - start_s < 10  # seconds; the stuck operation would last 30
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [OSError, MemoryError, KeyboardInterrupt, SystemExit, RuntimeError, GeneratorExit])
@pytest.mark.parametrize("where", ["lane", "worker", "drive"])
def test_errors_of_every_kind(where, kind, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise kind("injected")

    match = rf"'update .*' on lane update \(on the host\) to finish, but it raised {kind.__name__}: injected"
    with trained("disk" if where == "drive" else "host", tmp_path) as (model, optimizer):
        if where == "lane":
            replace_operation(monkeypatch, optimizer.engine, "update blocks.1", fail)
        elif where == "worker":
            monkeypatch.setattr("outcore.engine.updates.workers.update_blocks", fail)
        else:
            monkeypatch.setattr(OsDiskIO, "pread", fail)
            match = "injected"
        fails_then_closes(model, optimizer, outcore.OutcoreError, match)


SCRIPT = """
import sys, threading
import torch
from torch import nn
import outcore
import outcore.device.threads as threads
import outcore.engine.updates.workers as workers

threads.CLOSE_TIMEOUT_S = 1000  # so long would one Ctrl-C take
torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(2, 8, device="cuda" if torch.cuda.is_available() else "cpu")
budget = outcore.Budget(device=12000, host="64MiB", disk=sys.argv[1])
prepared = outcore.prepare(model, optimizer, budget=budget)
model, optimizer = prepared
workers.update_blocks = lambda *_: threading.Event().wait()
def loop():
    while True:
        model(x).sum().backward()
        optimizer.step()
        print("step", flush=True)
if sys.argv[2] == "closes":
    with prepared:
        loop()
loop()
"""


def test_a_second_interrupt_ends_the_process_while_an_update_hangs(tmp_path):
    with ExitStack() as stack:
        running = {}
        for ending in ("closes", "leaves"):
            folder = tmp_path / ending
            folder.mkdir()
            command = [sys.executable, "-c", SCRIPT, str(folder), ending]
            process = nursery.Whole(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            running[folder] = stack.enter_context(process)
            stack.callback(process.kill)
        for process in running.values():
            assert process.stdout.readline() == "step\n", process.communicate()
        for _ in range(2):
            time.sleep(0.5)
            for process in running.values():
                process.send_signal(signal.SIGINT)
        for folder, process in running.items():
            _, err = process.communicate(timeout=120)
            assert process.returncode in (1, 130, -signal.SIGINT), err
            assert "KeyboardInterrupt" in err
            assert list(folder.iterdir()) == []
