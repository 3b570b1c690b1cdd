"""Ctrl-C and SIGTERM while something slow is under way: the process ends as it should, and leaves nothing on disk."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import nursery
import pytest

from outcore.device import threads

SCRIPT = """
import signal, sys, time
if sys.argv[3] == "exits":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
import torch
from torch import nn
import outcore
import outcore.memory.disk_file as disk_file
import outcore.engine.updates.workers as workers

sys.stdin.readline()  # until the test looks at this process
torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)])
optimizer = torch.optim.AdamW(model.parameters())
prepared = outcore.prepare(model, optimizer, budget=outcore.Budget(device="64KiB", host="160KiB", disk=sys.argv[1]))
model, optimizer = prepared

def busy(seconds):
    # Inside torch nearly all of the time, as an update is.
    a = torch.ones(500, 500)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        a @ a

def slowly(work, seconds):
    def run(*args):
        print("begun", flush=True)
        busy(seconds)
        return work(*args)
    return run

stage = sys.argv[2]
if stage == "update":  # many short blocks
    real = workers.update_blocks
    def update(share, scratch, is_stopped):
        print("begun", flush=True)
        while True:
            real(share, scratch, is_stopped)
    workers.update_blocks = update
elif stage == "copy":  # cannot be stopped
    submit = optimizer.engine.device.submit
    def slow_submit(lane, name, work, **options):
        return submit(lane, name, slowly(work, 2.0) if name.startswith("gradients of 1") else work, **options)
    optimizer.engine.device.submit = slow_submit
else:
    disk_file.OsDiskIO.pwrite = slowly(disk_file.OsDiskIO.pwrite, 0.5)

def loop():
    while True:
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()

if sys.argv[3] == "leaves":
    loop()
with prepared:
    loop()
"""


def start(stack, code, *arguments):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = nursery.Whole(
        [sys.executable, "-c", code, *map(str, arguments)],
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    stack.enter_context(process)
    stack.callback(process.kill)  # runs before the process is waited for
    guard = threading.Timer(90, process.kill)
    guard.start()
    stack.callback(guard.cancel)
    return process


def end(process, number, times):
    """Let it begin, then send the signal ``times`` times, a moment apart. Returns what the process wrote to stderr."""
    process.stdin.write("go\n")
    process.stdin.flush()
    assert process.stdout.readline() == "begun\n", process.communicate()
    for i in range(times):
        time.sleep(0.3 if i else 0.1)
        process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return err


# The signal is sent more than once only where the process cannot end by itself before the last one comes.
CASES = [("update", "leaves", 1), ("copy", "closes", 2), ("copy", "leaves", 3), ("write", "closes", 1)]


def test_ctrl_c_while_something_is_slow(tmp_path):
    with ExitStack() as stack:
        running = [start(stack, SCRIPT, tmp_path / f"{s}-{ending}", s, ending) for s, ending, _ in CASES]
        for process, (stage, ending, times) in zip(running, CASES, strict=True):
            err = end(process, signal.SIGINT, times)
            assert process.returncode == -signal.SIGINT, (stage, ending, err)  # a shell reports 130
            assert err.count("Traceback") <= times, err
            assert "Exception ignored" not in err, err
        assert files(tmp_path) == []


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (3, 3), ("said", 1)])
def test_an_exit_at_the_end_has_its_status(monkeypatch, code, status):
    statuses = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    threads._end_at_once(SystemExit(code))
    assert statuses == [status]


class Written:
    """Writes a letter when it is closed."""

    def __init__(self, end: int, letter: bytes) -> None:
        self._end, self._letter = end, letter
        threads.close_at_exit(self)

    def close(self) -> None:
        os.write(self._end, self._letter)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_process_closes_what_it_opened_itself():
    """Otherwise its threads are unwound in the middle of a kernel, which aborts the process."""
    read, write = os.pipe()
    inherited = Written(write, b"i")
    child = os.fork()
    if child == 0:
        own = Written(write, b"o")
        threads._end()
        os._exit(own is None)
    assert os.waitpid(child, 0)[1] == 0
    threads._open.discard(inherited)
    os.close(write)
    with open(read, "rb") as seen:
        assert seen.read() == b"o"


@pytest.mark.leaves_files
def test_sigterm(tmp_path):
    with ExitStack() as stack:
        running = {ending: start(stack, SCRIPT, tmp_path / ending, "update", ending) for ending in ("exits", "leaves")}
        errs = {ending: end(process, signal.SIGTERM, 1) for ending, process in running.items()}
        assert {ending: process.returncode for ending, process in running.items()} == {
            "exits": 128 + signal.SIGTERM,  # by the program's own handler
            "leaves": -signal.SIGTERM,
        }, errs
        assert errs["exits"] == ""
        assert files(tmp_path / "exits") == []
        assert [path.name for path in files(tmp_path / "leaves")] == ["owner.json"]  # the next run removes it


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
