"""What every benchmark reports of itself: machine, versions, command, commit, median and spread."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from outcore.api import Prepared, prepare_in_loop
from outcore.device.faults import Faults
from outcore.memory.machine import read_topology
from outcore.preparation.prepare_options import Options


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and number of repetitions."""
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    numbers = {"median": median, "quartile_1": low, "quartile_3": high, "min": min(values), "max": max(values)}
    return {name: float(f"{value:.4g}") for name, value in numbers.items()} | {"repetitions": len(values)}


def prepare_slowed(model: torch.nn.Module, optimizer: Any, faults: Faults | None = None, **options: Any) -> Prepared:
    """``outcore.prepare`` with lanes slowed down. Args: faults: Speeds of lanes. options: As for ``prepare``."""
    return prepare_in_loop(model, optimizer, Options(**options), faults)


def context(*packages: str) -> dict[str, object]:
    """Command, commit, versions and hardware of this run."""
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": _output("git", "describe", "--always", "--dirty", "--exclude=*") or source(),
        "versions": {"python": platform.python_version(), **{p: _version(p) for p in ("torch", "outcore", *packages)}},
        "hardware": hardware(),
    }


def source() -> str:
    """Identify the source where there is no repository: a hash of names and contents of the package's files."""
    folder = Path(__file__).resolve().parent.parent / "src"
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return f"sha256 of src: {digest.hexdigest()[:16]}"


def hardware() -> dict[str, object]:
    """What the numbers depend on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found: dict[str, object] = {
        "cpu": _field("/proc/cpuinfo", "model name"),
        "cores": read_topology().num_cores,
        "memory_bytes": memory,
        "simd": torch.backends.cpu.get_cpu_capability(),
        "kernel": platform.release(),
        "load_average_at_end": os.getloadavg()[0],
    }
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "cuda": torch.version.cuda}
    return found


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _field(path: str, key: str) -> str | None:
    lines = Path(path).read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
    return done.stdout.strip() or None if done.returncode == 0 else None
