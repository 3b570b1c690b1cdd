"""The cores that this process may use, which of them share a memory controller, their caches, and who else is busy.

The kernel's files are not trusted: containers and sandboxes may show only parts of them, or other contents.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import final

from outcore.memory.limits import cpu_quota

_ROOT = Path("/")
_MOST = 2**16  # more CPUs, and more nodes, than a kernel can be built for
_USER, _NICE, _STEAL = 0, 1, 7  # columns of /proc/stat; time in the kernel is left out, since it may serve this process
_FREE = 0.8  # a machine is busy if others leave less of what this process may use
_LEAST_S = 0.5  # the kernel counts in hundredths of a second


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
                levels[int(level)] = _numbers(_text(folder / "shared_cpu_list")), int(size[:-1])
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
    allowed = _numbers(lists[0]) if lists else frozenset()
    return tuple(number for number, cpus in _nodes(root).items() if cpus & usable and number in allowed)


def _nodes(root: Path) -> dict[int, frozenset[int]]:
    """CPUs by node number, in ascending order."""
    folders = (root / "sys/devices/system/node").glob("node*")
    found = {int(m[1]): path for path in folders if (m := re.fullmatch(r"node([0-9]{1,5})", path.name))}
    return {number: _numbers(_text(found[number] / "cpulist")) for number in sorted(found)}


def _core(root: Path, cpu: int) -> frozenset[int]:
    """All threads of a CPU's core; the CPU alone if the machine does not report them."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")  # the second is the old name
    return _numbers(siblings) or frozenset({cpu})


def _numbers(text: str) -> frozenset[int]:
    """Parse a set of CPUs or nodes as the kernel writes it: ``0-3,8-11``. Empty for any other text."""
    numbers: set[int] = set()
    for part in text.strip().split(","):
        span = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        if span is None or int(span[2] or span[1]) >= _MOST:
            return frozenset()
        numbers.update(range(int(span[1]), int(span[2] or span[1]) + 1))
    return frozenset(numbers)


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
