"""``outcore env``: the machine as outcore sees it, to read or to send along with a question."""

from __future__ import annotations

import json
import os
import platform
import resource
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from outcore.command.files import usual_folders
from outcore.command.terminal import aligned
from outcore.core.errors import DiskError, OutcoreError
from outcore.core.quantities import format_bytes
from outcore.memory.disk import DiskStore
from outcore.memory.machine import cpu_quota, disk_free_bytes, host_free_bytes, host_limit_bytes, host_total_bytes
from outcore.preparation.with_ranks import free_budget
from outcore.spec.budget import Budget

PACKAGES = ("outcore", "torch", "transformers", "trl", "peft", "accelerate", "datasets", "numpy", "safetensors")
_DRIVERS = ("/proc/driver/nvidia/version", "/sys/module/nvidia/version", "/sys/module/amdgpu/version")
_ROOT = Path("/")

Facts = Mapping[str, Any]


def report(*, as_json: bool) -> str:
    """Say what is installed, what the machine has, and what outcore would take of it.

    Args:
        as_json: Return a JSON object with sizes in bytes, in place of aligned text.
    """
    found = facts()
    return json.dumps(found, indent=2) if as_json else aligned(_rows(found))


def facts() -> dict[str, Any]:
    """Collect all facts. A disk is tried with one byte, which is removed again."""
    return {
        "python": platform.python_version(),
        "system": platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        "torch_build": {"cuda": torch.version.cuda, "rocm": torch.version.hip},
        "accelerators": list(_accelerators()),
        "driver": _driver(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "cores_allowed": len(os.sched_getaffinity(0)),
            "quota": cpu_quota(),
        },
        "host_memory": {
            "total": host_total_bytes(),
            "free": host_free_bytes(),
            "cgroup_limit": host_limit_bytes(),
            "pinnable": _pinnable_bytes(),
        },
        "disks": list(_disks()),
        "default_budget": _default_budget(),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _accelerators() -> Iterator[dict[str, Any]]:
    if not torch.accelerator.is_available():
        return
    kind = torch.accelerator.current_accelerator()
    module = torch.get_device_module(kind)
    for index in range(torch.accelerator.device_count()):
        found = module.get_device_properties(index)
        yield {"device": f"{kind}:{index}", "name": found.name, "memory": found.total_memory}


def _driver() -> str | None:
    lines = (_text(Path(path)).strip().splitlines() for path in _DRIVERS)
    return next((found[0] for found in lines if found), None)


def _cpu_model(root: Path = _ROOT) -> str | None:
    lines = (line.partition(":") for line in _text(root / "proc/cpuinfo").splitlines())
    return next((value.strip() for name, _, value in lines if name.strip() == "model name"), platform.machine() or None)


def _pinnable_bytes() -> int | None:
    """Return how many bytes may be locked in memory; None: no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _disks() -> Iterator[dict[str, Any]]:
    """Yield one folder of each drive that the disk tier may be on."""
    seen: set[int] = set()
    for folder in usual_folders():
        if folder.is_dir() and (device := folder.stat().st_dev) not in seen:
            seen.add(device)
            yield {"folder": str(folder), "filesystem": filesystem_of(folder), **_tried(folder)}


def _tried(folder: Path) -> dict[str, Any]:
    free = disk_free_bytes(folder)
    try:
        with DiskStore.open([folder], nbytes=1) as store:
            return {"free": free, "direct": not store.buffered_paths, "refused": None}
    except DiskError as error:
        return {"free": free, "direct": False, "refused": str(error)}


def filesystem_of(folder: Path, root: Path = _ROOT) -> str | None:
    """Return the type of a folder's file system, from the kernel's list of mounts.

    Args:
        folder: Any folder.
        root: Folder in place of ``/`` (tests put a faked ``proc`` below it).
    """
    mounts = [line.split() for line in _text(root / "proc/mounts").splitlines()]
    places = {Path(fields[1]): fields[2] for fields in mounts if len(fields) > 2}  # the last mount at a place counts
    found = next((place for place in (folder.resolve(), *folder.resolve().parents) if place in places), None)
    return None if found is None else places[found]


def _default_budget() -> dict[str, Any]:
    try:
        budget = free_budget(Budget())
    except OutcoreError as error:
        return {"refused": str(error)}
    return {"device": budget.device, "host": budget.host, "refused": None}


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _rows(found: Facts) -> Iterator[tuple[str, str]]:
    yield "python", f"{found['python']} on {found['system']}"
    for name, number in found["packages"].items():
        yield name, (number or "not installed") + (_build(found["torch_build"]) if name == "torch" else "")
    for accelerator in found["accelerators"]:
        yield accelerator["device"], f"{accelerator['name']}, {format_bytes(accelerator['memory'])}"
    if not found["accelerators"]:
        yield "accelerator", "none that torch sees; training is on the CPU"
    yield "driver", found["driver"] or "none"
    cpu, host = found["cpu"], found["host_memory"]
    quota = "" if cpu["quota"] is None else f", a quota of {cpu['quota']}"
    yield "cpu", f"{cpu['model']}, {cpu['cores_allowed']} of {cpu['cores']} cores allowed{quota}"
    limit = "no container limit" if host["cgroup_limit"] is None else f"limit {format_bytes(host['cgroup_limit'])}"
    yield "host memory", f"{format_bytes(host['total'])}, {format_bytes(host['free'])} free, {limit}"
    yield "pinnable", "unlimited" if host["pinnable"] is None else f"{format_bytes(host['pinnable'])} (ulimit -l)"
    for disk in found["disks"]:
        how = f"unfit for a disk tier: {disk['refused']}" if disk["refused"] else "direct I/O" * disk["direct"]
        what = f"{disk['filesystem'] or 'unknown file system'}, {format_bytes(disk['free'])} free"
        yield "disk", f"{disk['folder']}: {what}, {how or 'buffered I/O only'}"
    taken = found["default_budget"]
    sizes = ", ".join(f"{tier} {format_bytes(taken[tier])}" for tier in ("device", "host") if not taken["refused"])
    yield "by default", taken["refused"] or f"{sizes}, no disk"


def _build(build: Facts) -> str:
    kinds = [f"{kind.upper()} {number}" for kind, number in build.items() if number]
    return f" for {', '.join(kinds) or 'the CPU alone'}"
