"""This machine, or the container around this process: host memory, disk space, cores, caches, and who else is busy.

The limit of a container is not in ``/proc/meminfo`` but in the control groups of the process, and every parent group
limits the process too. Both versions of the interface are read, since many machines still run version 1 or a mixture.
The kernel's files are not trusted: containers and sandboxes may show only parts of them, or other contents.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import final

_ROOT = Path("/")
_MOST = 2**16  # more CPUs, and more nodes, than a kernel can be built for
_USER, _NICE, _STEAL = 0, 1, 7  # columns of /proc/stat; time in the kernel is left out, since it may serve this process
_FREE = 0.8  # a machine is busy if others leave less of what this process may use
_LEAST_S = 0.5  # the kernel counts in hundredths of a second


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
    except (OSError, UnicodeDecodeError):
        return ""


@final
@dataclass(frozen=True, slots=True)
class Node:
    """Cores near the same memory (a NUMA node)."""

    cpus: frozenset[int]
    """CPUs as the kernel counts them, so each hyper-thread; only those that this process may use."""
    num_cores: int
    """Number of cores that these CPUs are threads of. Memory-bound work gains nothing from a core's second thread."""


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Cores by node."""

    nodes: tuple[Node, ...]
    """NUMA nodes, at least one; exactly one if the machine does not report them."""
    quota: int | None
    """Number of cores that control groups let this process keep busy; None: all."""

    @property
    def num_cores(self) -> int:
        """Number of cores that this process may keep busy; at least 1."""
        cores = sum(node.num_cores for node in self.nodes)
        return max(1, cores if self.quota is None else min(cores, self.quota))


def read_topology(root: Path = _ROOT) -> Topology:
    """Read the topology from the process's affinity, its control groups and ``/sys``.

    Args:
        root: Folder in place of ``/`` (tests put faked ``proc`` and ``sys`` below it).
    """
    usable = frozenset(os.sched_getaffinity(0))
    groups = [cpus for cpus in _nodes(root).values() if cpus & usable]
    if frozenset().union(*groups) < usable:  # unreadable, or not the whole truth
        groups = [usable]
    nodes = [Node(cpus & usable, len({_core(root, cpu) for cpu in cpus & usable})) for cpus in groups]
    return Topology(tuple(nodes), cpu_quota(root))


@final
class Others:
    """What other processes, and other virtual machines, take of the CPUs that this process may use."""

    def __init__(self, root: Path = _ROOT) -> None:
        """Begin to watch. Args: root: Folder in place of ``/``."""
        self._root, self._begun = root, _used_s(root)

    def busy(self) -> str:
        """Return what they took since this was made, as a clause; empty if that left enough, or cannot be known."""
        seconds, used_s, own_s = (now - begun for now, begun in zip(_used_s(self._root), self._begun, strict=True))
        if seconds < _LEAST_S:
            return ""
        num_cpus, taken = len(os.sched_getaffinity(0)), (used_s - own_s) / seconds
        wanted = min(num_cpus, cpu_quota(self._root) or num_cpus)
        return f"others kept {taken:.1f} of {num_cpus} cores busy" if num_cpus - taken < _FREE * wanted else ""


def _used_s(root: Path) -> tuple[float, float, float]:
    """Read a clock, the seconds that programs have used of these CPUs, and those of this process."""
    names, used = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}, 0
    for name, *ticks in map(str.split, _text(root / "proc/stat").splitlines()):
        if name in names and len(ticks) > _STEAL and all(map(str.isdecimal, ticks)):
            used += sum(int(ticks[column]) for column in (_USER, _NICE, _STEAL))
    return time.perf_counter(), used / os.sysconf("SC_CLK_TCK"), os.times().user


def processor_name(root: Path = _ROOT) -> str:
    """Return the processor's model name, or its architecture if the kernel gives no name.

    Args:
        root: Folder in place of ``/``.
    """
    named = re.search(r"^model name\s*:\s*(.+)$", _text(root / "proc/cpuinfo"), re.MULTILINE)
    return named[1].strip() if named is not None else os.uname().machine


def cache_bytes(root: Path = _ROOT) -> int:
    """Bytes of all last-level caches of the CPUs that this process may use; 0 if the machine does not report them.

    Args:
        root: Folder in place of ``/``.
    """
    found: dict[frozenset[int], int] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        levels = {}
        for folder in (root / f"sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
            level, size = (_text(folder / name).strip() for name in ("level", "size"))
            if re.fullmatch("[1-9]", level) and re.fullmatch(r"[0-9]{1,9}K", size):
                levels[int(level)] = _cpu_list(_text(folder / "shared_cpu_list")), int(size[:-1])
        if levels:
            cpus, kibibytes = levels[max(levels)]
            found[cpus] = 1024 * kibibytes  # those for which no CPUs are named count as one
    return sum(found.values())


def memory_nodes(root: Path = _ROOT) -> tuple[int, ...]:
    """Numbers of the NUMA nodes whose memory this process may use, and which have cores that it may use.

    Nodes without cores are left out: they are slower memory, or memory of an accelerator.

    Args:
        root: Folder in place of ``/``.
    """
    usable = frozenset(os.sched_getaffinity(0))
    status = _text(root / "proc/self/status").splitlines()
    lists = [line.partition(":")[2] for line in status if line.startswith("Mems_allowed_list:")]
    allowed = _cpu_list(lists[0]) if lists else frozenset()
    return tuple(number for number, cpus in _nodes(root).items() if cpus & usable and number in allowed)


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """CPUs by node number, in ascending order."""
    folders = (root / "sys/devices/system/node").glob("node*")
    found = {int(m[1]): path for path in folders if (m := re.fullmatch(r"node([0-9]{1,5})", path.name))}
    return {number: _cpu_list(_text(found[number] / "cpulist")) for number in sorted(found)}


def _core(root: Path, cpu: int) -> frozenset[int]:
    """All threads of a CPU's core; the CPU alone if the machine does not report them."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")  # the second is the old name
    return _cpu_list(siblings) or frozenset({cpu})


def _cpu_list(text: str) -> frozenset[int]:
    """Parse a set of CPUs or nodes as the kernel writes it: ``0-3,8-11``. Empty for any other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        span = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if span is None or int(span[2] or span[1]) >= _MOST:
            return frozenset()
        numbers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(numbers)
