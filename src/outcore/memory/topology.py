"""The cores that this process may use, and which of them share a memory controller."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from outcore.memory.limits import cpu_quota

_ROOT = Path("/")


@final
@dataclass(frozen=True, slots=True)
class Node:
    """Cores that are near to the same memory (a NUMA node)."""

    cpus: frozenset[int]
    """What the kernel calls a CPU, so each hyper-thread; only those that this process may use."""
    num_cores: int
    """Cores that they are threads of: what is bound by memory gains nothing from a core's second thread."""


@final
@dataclass(frozen=True, slots=True)
class Topology:
    """Cores by node."""

    nodes: tuple[Node, ...]
    """At least one; just one where the machine does not say."""
    quota: int | None
    """Cores that control groups let this process keep busy; None: all."""

    @property
    def num_cores(self) -> int:
        """Cores that this process may keep busy; at least 1."""
        cores = sum(node.num_cores for node in self.nodes)
        return max(1, cores if self.quota is None else min(cores, self.quota))


def read_topology(root: Path = _ROOT) -> Topology:
    """Look at affinity, control groups and ``/sys``.

    Args:
        root: Folder in place of ``/`` (tests put faked ``proc`` and ``sys`` below it).
    """
    usable = frozenset(os.sched_getaffinity(0))
    groups = [cpus for cpus in _nodes(root / "sys/devices/system/node") if cpus & usable]
    if frozenset().union(*groups) < usable:  # unreadable, or not the whole truth
        groups = [usable]
    nodes = [Node(cpus & usable, len({_core(root, cpu) for cpu in cpus & usable})) for cpus in groups]
    return Topology(tuple(nodes), cpu_quota(root))


def _nodes(folder: Path) -> Iterator[frozenset[int]]:
    found = [path for path in folder.glob("node*") if re.fullmatch(r"node\d+", path.name)]
    for path in sorted(found, key=lambda path: int(path.name.removeprefix("node"))):
        yield _cpus(_text(path / "cpulist"))


def _core(root: Path, cpu: int) -> frozenset[int]:
    """All threads of a CPU's core; the CPU alone where the machine does not say."""
    folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    siblings = _text(folder / "core_cpus_list") or _text(folder / "thread_siblings_list")  # the second is the old name
    return _cpus(siblings) or frozenset({cpu})


def _cpus(text: str) -> frozenset[int]:
    """The kernel's way to write a set of CPUs: ``0-3,8-11``."""
    spans = [part.split("-") for part in text.strip().split(",") if part]
    return frozenset(cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1))


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
