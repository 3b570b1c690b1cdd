"""A disk that fails during training: a typed error with file, unit and offset, at the next call at the latest."""

from __future__ import annotations

import errno
import functools
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import nursery
import pytest
import torch
from plans import forced
from torch import nn

import outcore
from outcore.memory.disk_file import OsDiskIO
from outcore.planner.homes.pools import LEAST, Comfort
from outcore.spec.plan import Plan

WIDTH = 67


def model() -> nn.Module:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)) for _ in range(4)]
    return nn.Sequential(nn.Linear(5, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 3))


def disk_plan(module: nn.Module, comfort: Comfort = LEAST) -> Plan:
    return forced(module, torch.optim.AdamW(module.parameters()), "disk", policy="recompute", comfort=comfort)[1]


def prepared(folder: Path) -> outcore.api.Prepared:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    return outcore.prepare(module, optimizer, plan=disk_plan(module), budget=outcore.Budget(disk=folder))


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seen: Callable[[float], None] = lambda _: None
) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        loss = module(torch.randn(7, 5, generator=generator)).square().mean()
        loss.backward()
        seen(loss.item())
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def good_losses(folder: Path, steps: int) -> list[float]:
    losses: list[float] = []
    with prepared(folder) as (module, optimizer):
        train(module, optimizer, steps, losses.append)
    return losses


@functools.cache
def undisturbed_losses(steps: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        return good_losses(Path(folder), steps)


class Failing:
    """Makes an operation of the disk fail from its n-th call on."""

    def __init__(self, real: Callable[..., int], first: int, number: int) -> None:
        self._real, self._left, self._number = real, first, number

    def __call__(self, *args: object) -> int:
        self._left -= 1
        if self._left < 0:
            raise OSError(self._number, os.strerror(self._number))
        return self._real(*args)


@pytest.mark.filterwarnings("ignore:the weights of this:UserWarning")
@pytest.mark.parametrize("first", [0, 3, 11, 40])
@pytest.mark.parametrize(("verb", "number"), [("pread", errno.EIO), ("pwrite", errno.EIO), ("pwrite", errno.ENOSPC)])
def test_an_error_surfaces_typed_and_nothing_hangs(verb, number, first, tmp_path, monkeypatch):
    want = undisturbed_losses(6)
    losses: list[float] = []
    with prepared(tmp_path) as (module, optimizer):
        failing = Failing(getattr(OsDiskIO(), verb), first, number)
        monkeypatch.setattr(OsDiskIO, verb, lambda _, *args: failing(*args))
        with pytest.raises(outcore.DiskError) as error:
            train(module, optimizer, 6, losses.append)
    assert error.value.errno == number
    message = str(error.value)
    assert "data" in message, "the file"
    assert any(kind in message for kind in ("weights", "states", "gradients")), "whose bytes"
    assert "offset" in message or "byte" in message
    assert losses == want[: len(losses)], "no wrong value was used"
    assert list(tmp_path.iterdir()) == []


def test_short_reads_and_writes_change_nothing(tmp_path, monkeypatch):
    want = undisturbed_losses(4)
    real_read, real_write = OsDiskIO.pread, OsDiskIO.pwrite
    monkeypatch.setattr(
        OsDiskIO,
        "pread",
        lambda self, fd, memory, offset: real_read(
            self, fd, memory[: max(4096, len(memory) // 2 // 4096 * 4096)], offset
        ),
    )
    monkeypatch.setattr(
        OsDiskIO,
        "pwrite",
        lambda self, fd, memory, offset: real_write(
            self, fd, memory[: max(4096, len(memory) // 2 // 4096 * 4096)], offset
        ),
    )
    assert good_losses(tmp_path, 4) == want


def test_two_runs_in_one_folder_do_not_collide(tmp_path):
    want = undisturbed_losses(3)
    first, second = [], []
    with prepared(tmp_path) as (a, optimizer_a), prepared(tmp_path) as (b, optimizer_b):
        assert len(list(tmp_path.iterdir())) == 2
        train(a, optimizer_a, 3, first.append)
        train(b, optimizer_b, 3, second.append)
    assert first == second == want


def test_a_folder_that_is_a_file_is_refused_before_anything_moves(tmp_path):
    path = tmp_path / "file"
    path.write_text("not a folder")
    module = model()
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(outcore.DiskError, match="file"):
        outcore.prepare(
            module, torch.optim.AdamW(module.parameters()), plan=disk_plan(module), budget=outcore.Budget(disk=path)
        )
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert path.read_text() == "not a folder"


CHILD = """
    import sys
    from pathlib import Path
    sys.path[:0] = {folders!r}
    from test_disk_failures import prepared, train
    module, optimizer = prepared(Path(sys.argv[1]))
    print("ready", flush=True)
    train(module, optimizer, 10**6)
"""


@pytest.mark.leaves_files
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_killed_run_leaves_no_bytes_and_the_next_reclaims_its_folder(number, tmp_path):
    code = textwrap.dedent(CHILD).format(folders=[str(folder) for folder in Path(__file__).parents[:2]])
    command = [sys.executable, "-c", code, str(tmp_path)]
    with nursery.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        child.send_signal(number)
        child.wait(timeout=30)
    left = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert sum(p.stat().st_size for p in left) < 4096, left
    if number == signal.SIGINT:
        assert left == []
    with prepared(tmp_path):
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []
