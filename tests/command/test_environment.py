"""``outcore env`` says what is there, and leaves nothing behind; ``--version`` and ``python -m outcore``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outcore.command import environment
from outcore.memory.machine import host_limit_bytes, host_total_bytes

from .conftest import Run


def test_version(command: Run):
    done = command("--version")
    assert (done.status, done.out, done.err) == (0, f"outcore {version('outcore')}\n", "")


def test_as_a_module():
    done = subprocess.run([sys.executable, "-m", "outcore", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"outcore {version('outcore')}\n"


def test_json_holds_everything_in_bytes(command: Run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = command("env", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["packages"]["torch"] == version("torch")
    assert set(found["packages"]) >= {"outcore", "transformers", "trl", "peft", "accelerate", "datasets"}
    assert found["cpu"]["cores_allowed"] == len(os.sched_getaffinity(0))
    assert 0 < found["host_memory"]["free"] <= found["host_memory"]["total"]
    assert found["default_budget"]["device"] > 0
    assert found["default_budget"]["host"] > 0
    assert found["disks"][0]["folder"] == str(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_text_is_aligned(command: Run):
    rows = [line.partition("  ") for line in command("env").out.splitlines()]
    assert {"python", "torch", "cpu", "host memory", "pinnable", "disk", "by default"} <= {name for name, *_ in rows}
    assert len({len(name) + 2 + len(rest) - len(rest.lstrip()) for name, _, rest in rows}) == 1


def test_accelerators_and_what_is_missing(monkeypatch):
    device = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(name="Fast One", total_memory=2**34))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: "cuda")
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: device)
    monkeypatch.setattr(environment, "PACKAGES", ("outcore", "no-such-package"))
    text = environment.report(as_json=False)
    assert "cuda:1           Fast One, 16.00 GiB" in text
    assert "no-such-package  not installed" in text


def test_the_nearest_mount_counts(tmp_path):
    (tmp_path / "proc").mkdir()
    mounts = ("/dev/a / ext4 rw 0 0", "none /dev/shm tmpfs rw 0 0", "/dev/b /dev/shm xfs rw 0 0")
    (tmp_path / "proc/mounts").write_text("\n".join(mounts))
    assert environment.filesystem_of(Path("/dev/shm"), tmp_path) == "xfs"
    assert environment.filesystem_of(Path("/dev"), tmp_path) == "ext4"
    assert environment.filesystem_of(Path("/dev"), tmp_path / "nowhere") is None


@pytest.mark.parametrize(("limit", "wanted"), [("max", None), (str(2**30), 2**30), (str(2**50), None)])
def test_a_containers_limit(tmp_path, limit, wanted):
    files = {
        "proc/meminfo": "MemTotal:       8388608 kB\nMemAvailable:   4194304 kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert host_total_bytes(tmp_path) == 2**33
    assert host_limit_bytes(tmp_path) == wanted
