"""Limits of this machine, or of the container around this process: host memory, disk space, time on cores.

The limit of a container is not in ``/proc/meminfo`` but in the control groups of the process, and every parent group
limits the process too. Both versions of the interface are read, since many machines still run version 1 or a mixture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def host_free_bytes(root: Path = _ROOT) -> int:
    """Host memory that can be taken now without the kernel killing a process.

    This is the least of ``MemAvailable`` and, for each control group of this process and each parent group, the limit
    minus the use. The page cache counts as free in both, since the kernel gives it up before it kills.

    Args:
        root: Folder in place of ``/`` (tests put faked ``proc`` and ``sys`` below it).
    """
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
            break
    else:
        raise AssertionError(f"{root / 'proc/meminfo'} has no MemAvailable (Linux 3.14 and later write it)")
    return max(0, min([available, *_cgroup_free_bytes(root)]))


def host_total_bytes(root: Path = _ROOT) -> int:
    """Host memory of the machine.

    Args:
        root: Folder in place of ``/``.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    return int(fields["MemTotal"].split()[0]) * 1024


def host_limit_bytes(root: Path = _ROOT) -> int | None:
    """The lowest memory limit of the control groups of this process and their parents.

    None if there is no limit below the memory of the machine.

    Args:
        root: Folder in place of ``/``.
    """
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")
    limits = [limit for group in _groups(root, "memory") for limit in _numbers(group, *names)]
    least = min(limits, default=None)
    return None if least is None or least >= host_total_bytes(root) else least


def host_bytes() -> int:
    """Host memory of the machine, or of the container around this process."""
    return host_limit_bytes() or host_total_bytes()


def disk_free_bytes(path: Path) -> int:
    """Space that this user may take on the filesystem of a path. The path need not exist yet."""
    absolute = path.absolute()
    stat = os.statvfs(next(folder for folder in (absolute, *absolute.parents) if folder.exists()))
    return stat.f_bavail * stat.f_frsize


def cpu_quota(root: Path = _ROOT) -> int | None:
    """Cores that the control groups let this process keep busy, at least 1; None: no limit.

    The quota is rounded down: from time to time, the kernel stops a process that exceeds it, with all its threads.

    Args:
        root: Folder in place of ``/``.
    """
    quotas = [quota for group in _groups(root, "cpu") if (quota := _cpu_quota_us(group)) is not None]
    return max(1, min(used_us // period_us for used_us, period_us in quotas)) if quotas else None


def _cgroup_free_bytes(root: Path) -> Iterator[int]:
    for group in _groups(root, "memory"):
        limits = _numbers(group, "memory.max", "memory.high", "memory.limit_in_bytes")
        used = _numbers(group, "memory.current", "memory.usage_in_bytes")
        if limits and used:
            yield min(limits) - used[0] + _page_cache_bytes(group)


def _page_cache_bytes(group: Path) -> int:
    stat = dict(line.split() for line in _text(group / "memory.stat").splitlines() if len(line.split()) == 2)
    prefix = "total_" if "total_inactive_file" in stat else ""  # version 1 counts the groups below under total_
    return sum(int(stat.get(f"{prefix}{kind}_file", 0)) for kind in ("inactive", "active"))


def _cpu_quota_us(group: Path) -> tuple[int, int] | None:
    """Microseconds that all cores together may work per period, and the period; None: no limit."""
    fields = _text(group / "cpu.max").split()
    if len(fields) == 2:
        return None if fields[0] == "max" else (int(fields[0]), int(fields[1]))
    numbers = _numbers(group, "cpu.cfs_quota_us", "cpu.cfs_period_us")
    return (numbers[0], numbers[1]) if len(numbers) == 2 and numbers[0] > 0 else None


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that limit this process, innermost first.

    A container often sees its own group as the top of the tree, while ``/proc`` gives the group's name outside the
    container. The folder of that name does not exist here, but walking up still arrives at the top, whose files are the
    container's.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, name = line.split(":", 2)
        relative = PurePosixPath(name.lstrip("/"))
        if ".." in relative.parts:
            relative = PurePosixPath()
        for mount in _mounts(root / "sys/fs/cgroup", number, controllers, controller):
            for folder in (relative, *relative.parents):
                if (mount / folder).is_dir():
                    yield mount / folder


def _mounts(cgroup: Path, number: str, controllers: str, controller: str) -> list[Path]:
    if number == "0" and not controllers:
        return [cgroup, cgroup / "unified"]
    if controller in controllers.split(","):
        return [cgroup / controller] if (cgroup / controller).is_dir() else [cgroup / controllers]
    return []


def _numbers(group: Path, *names: str) -> list[int]:
    """The numbers in those of the files that exist and hold a number ("max" is not one)."""
    texts = [_text(group / name).strip() for name in names]
    return [int(text) for text in texts if text.lstrip("-").isdecimal()]


def _text(path: Path) -> str:
    """Content of a file, or "": which of these files exist depends on the kernel's version and the container."""
    try:
        return path.read_text()
    except OSError:
        return ""
