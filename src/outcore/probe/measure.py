"""Measure this machine in some seconds: every link at several sizes, alone and beside each other one.

The median of a load's turns counts. The quartiles of what computes are kept as the slow and the fast end of its figure.

[Note: what is shared] Links also run in pairs. Their remaining speeds tell how much each takes of what they share
(``samples.parts``): host memory, and the cores that move bytes there. The two directions of the bus have a figure of
their own, and so have reading and writing of the drive. Where the device is the CPU, compute runs beside each link,
too, and what both keep of their speeds counts as it is (``planner.timing.fair_shares``, [Note: cores]). Compute is a
block there: it has many short kernels, and after each of them all threads wait for the one that gave way. A large
product loses less.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from outcore.device.device import Device
from outcore.device.opening import device_name
from outcore.engine.updates.workers import UpdateWorkers
from outcore.memory.disk import DiskStore
from outcore.memory.host import HostMemory
from outcore.memory.machine import cache_bytes, disk_free_bytes, host_bytes, host_free_bytes
from outcore.probe import compute_rates as work
from outcore.probe.loads import ProbeLoad, SampledRate, rate_of, speeds
from outcore.probe.samples import FittedLine, line, parts
from outcore.probe.visits import VisitTimes, visit_times
from outcore.spec.hardware import BusPart, DevicePart, DiskPart, Hardware, HostPart
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE

MIB = 2**20
_OF_FREE = 16
"""A buffer takes at most one part in this many of the free memory."""
_MOVED_BYTES = 28.0
"""Bytes that an update moves per parameter."""
_KERNELS = 500
_LONGEST_S = 0.06
"""Seconds that the longest transfer may take on either link of the drive; a slower drive is measured without it.

Threads share the pieces of a transfer, and wait for the last of them. So two long transfers at once are faster than two
short ones: a virtual drive read and wrote 2.6 GB/s with 16 MiB each, and 3.4 GB/s with 85 MiB.
"""
_FLOAT32, _BFLOAT16 = torch.float32, torch.bfloat16
_BUS, _DISK = ("h2d", "d2h"), ("disk_write", "disk_read")


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is measured, and how long."""

    window_s: float
    """Seconds of every measurement."""
    buffer_bytes: int
    """Least size of the buffers on either side of the bus."""
    sizes: Sequence[int]
    """Bytes of one copy, and of one read or write, the largest last."""
    disk_bytes: int
    """Bytes to write and read."""
    longest_transfer: int = 0
    """Bytes of a read or write as long as states of a unit, at most half of ``disk_bytes``; 0: none. It is left out on
    a slow drive, and where host memory is scarce."""
    steps: int
    """Steps of a small model, for the engine's time per visit."""
    of_caches: int = 0
    """Least size of these buffers in multiples of the processor's last-level caches. A run's data outgrows those."""


WHOLE = Effort(
    window_s=0.25,
    buffer_bytes=256 * MIB,
    sizes=(MIB // 16, MIB, 16 * MIB),
    disk_bytes=512 * MIB,
    longest_transfer=64 * MIB,
    steps=40,
    of_caches=4,
)
QUICK = Effort(
    window_s=0.05,
    buffer_bytes=64 * MIB,
    sizes=(MIB // 16, 8 * MIB),
    disk_bytes=64 * MIB,
    longest_transfer=32 * MIB,
    steps=8,
    of_caches=2,
)
EFFORTS: Mapping[str, Effort] = {"whole": WHOLE, "quick": QUICK}


def measure(open_device: Callable[[], Device], disks: Sequence[Path], effort: Effort = WHOLE) -> Hardware:
    """Measure the machine. All that it takes is freed, and the state of random generators is restored.

    Args:
        open_device: Opens the device that computes.
        disks: Folders of the disk tier. Without any, the disk is not measured.
        effort: How much to measure.

    Raises:
        DiskError: A folder cannot serve the disk tier; nothing is left behind.
        MemoryBudgetError: There is too little memory even for this.

    Time: the whole effort 10 to 20 s, the quick one some 5 s. Memory: about two buffers on the device and two in host
    memory. A buffer has 256 MiB, or four times the last-level caches if that is more; for the quick effort, 64 MiB or
    twice the caches; but at most a sixteenth of what is free. With a disk two of the longest transfers as well.
    """
    with ExitStack() as undo:
        device = undo.enter_context(closing(open_device()))
        undo.callback(device.set_rng_state, device.rng_state())
        undo.enter_context(torch.enable_grad())
        undo.enter_context(torch.autocast(device.torch_device.type, enabled=False))
        store = None
        if disks:
            store = undo.enter_context(DiskStore.open(list(disks), effort.disk_bytes))
        visits = visit_times(open_device, effort.steps)
        probe, name = _Probe(device, effort, undo, store), device_name(device.torch_device)
        rates, links = probe.rates(), probe.links()
    return Hardware(
        name=name,
        device=_device(rates, device),
        bus=_bus(links),
        host=_host(links, visits, device),
        disk=None if store is None else _disk(links, disks, store),
    )


class _LinkResults(NamedTuple):
    """What was measured of links."""

    lines: Mapping[str, FittedLine]
    """Link -> its rate and latency, for links that move bytes."""
    alone: Mapping[str, SampledRate]
    """Link -> bytes, parameters or operations per second, with the largest copies and transfers that were measured."""
    left: Mapping[tuple[str, str], tuple[float, ...]]
    """Two links -> the parts of their speeds that remain while both run."""

    def both(self, pair: tuple[str, str]) -> float:
        """Return the speed of two links at once in multiples of one alone: 2 if neither slows the other down."""
        return min(max(sum(self.left[pair]), 0.5), 2.0)


class _Probe:
    """Measures with buffers and workers of its own, which are closed with the stack."""

    def __init__(self, device: Device, effort: Effort, closing: ExitStack, store: DiskStore | None) -> None:
        self._device, self._effort, self._closing = device, effort, closing
        least = 2 * effort.sizes[-1]
        wanted = max(effort.buffer_bytes, effort.of_caches * cache_bytes())
        most = min(wanted, host_free_bytes() // _OF_FREE, device.memory_bytes() // _OF_FREE)
        self._buffer_bytes = max(least, most // least * least)
        self._there = device.allocate(self._buffer_bytes)
        self._there.zero_()
        self._moves = self._without_slow(self._move_loads(store))
        self._workers = closing.enter_context(UpdateWorkers.beside(device))

    def rates(self) -> dict[str, SampledRate]:
        """Measure the device's rates. Each load frees its memory before the next one is made."""
        device = self._device
        loads: dict[str, Callable[[], ProbeLoad]] = {
            "fp32_flops": partial(work.products, device, _FLOAT32),
            "bf16_flops": partial(work.products, device, _BFLOAT16),
            "attention_flops": partial(work.attention, device, _BFLOAT16),
            "bytes_per_s": partial(work.elementwise, device, self._effort.sizes[-1]),
            "update_parameters_per_s": partial(work.device_updates, device, self._there),
            "plain_update_parameters_per_s": partial(work.plain_updates, device, self._buffer_bytes),
            "kernels": partial(work.kernels, device, _KERNELS),
        }
        return {name: self._rate(load()) for name, load in loads.items()}

    def links(self) -> _LinkResults:
        """Measure links, alone and in pairs."""
        sized = {link: {size: self._rate(load) for size, load in each.items()} for link, each in self._moves.items()}
        lines = {link: line({size: size / rate.per_s for size, rate in each.items()}) for link, each in sized.items()}
        shared = [each[max(each)] for each in self._moves.values()]
        updates = work.updates(self._device, self._workers, self._host_memory(self._buffer_bytes))
        alone = {link: each[max(each)] for link, each in sized.items()} | {updates.link: self._rate(updates)}
        shared.append(updates)
        if self._device.computes_on_host:
            shared.append(work.blocks(self._device))
        return _LinkResults(lines, alone, self._left(shared))

    def _rate(self, load: ProbeLoad) -> SampledRate:
        return rate_of(load, self._effort.window_s)

    def _without_slow(self, moves: dict[str, dict[int, ProbeLoad]]) -> dict[str, dict[int, ProbeLoad]]:
        """Leave out the longest transfers if one takes too long on this drive."""
        *_, usual = self._effort.sizes
        long = [(each[usual], size) for each in moves.values() for size in each if size > usual]
        if all(size / self._rate(load).per_s <= _LONGEST_S for load, size in long):
            return moves
        return {link: {size: load for size, load in each.items() if size <= usual} for link, each in moves.items()}

    def _left(self, loads: Sequence[ProbeLoad]) -> dict[tuple[str, str], tuple[float, ...]]:
        """Return the parts of their speeds that two loads keep beside each other, by links."""
        window_s, alone = self._effort.window_s, dict[str, float]()
        for load in loads:
            load.turn()
            alone |= speeds([load], window_s)
        left: dict[tuple[str, str], tuple[float, ...]] = {}
        for pair in itertools.combinations(loads, 2):
            both = speeds(pair, window_s)
            left[pair[0].link, pair[1].link] = tuple(both[load.link] / alone[load.link] for load in pair)
        return left

    def _move_loads(self, store: DiskStore | None) -> dict[str, dict[int, ProbeLoad]]:
        """Make loads of copies and transfers: link -> size -> load."""
        half, sizes, there = self._buffer_bytes // 2, self._effort.sizes, self._there
        here = self._host_memory(self._buffer_bytes)
        ways = {Lane.H2D: (there[:half], here[:half]), Lane.D2H: (here[half:], there[half:])}
        found = {
            lane.value: {size: work.copies(self._device, lane, *way, size) for size in sizes}
            for lane, way in ways.items()
        }
        if store is not None:
            longest = self._effort.longest_transfer
            sizes = [*sizes, longest] if 0 < 2 * longest <= host_free_bytes() // _OF_FREE else sizes
            own = self._host_memory(2 * sizes[-1]).random_()
            halves = {"disk_write": own[: sizes[-1]], "disk_read": own[sizes[-1] :]}
            for link, memory in halves.items():
                part = store.take(store.nbytes // 2, owner="probe")
                work.fill(store, part, memory)  # a file system does not read blocks that were never written
                found[link] = {size: work.transfers(self._device, store, part, memory[:size], link) for size in sizes}
        return found

    def _host_memory(self, nbytes: int) -> torch.Tensor:
        return memory_of_host(self._device, nbytes, self._closing)


def memory_of_host(device: Device, nbytes: int, closing: ExitStack) -> torch.Tensor:
    """Allocate host memory like a run's arenas: pinned where the device can pin. Args: closing: Frees it."""
    memory = closing.enter_context(HostMemory.open(nbytes)).tensor
    if device.register_host(memory):
        closing.callback(device.unregister_host, memory)
    return memory


def _device(rates: Mapping[str, SampledRate], device: Device) -> DevicePart:
    def figures(column: str) -> dict[str, Any]:
        found = {name: getattr(rate, column) for name, rate in rates.items()}
        return {"kernel_s": 1 / found.pop("kernels"), **found}

    return DevicePart(
        memory_bytes=device.total_bytes() / (2 if device.has_host_memory else 1),
        **figures("per_s"),
        runs_ahead=float(not device.computes_on_host),
        sources=_measured(DevicePart, "runs_ahead")
        | {"memory_bytes": "half of host memory" if device.has_host_memory else "of the device"},
        slow=figures("slow"),
        fast=figures("fast"),
    )


def _bus(links: _LinkResults) -> BusPart:
    there, back = links.lines["h2d"], links.lines["d2h"]
    return BusPart(
        h2d_bytes_per_s=there.per_s,
        d2h_bytes_per_s=back.per_s,
        both=links.both(_BUS),
        latency_s=(there.latency_s + back.latency_s) / 2,
        sources=_measured(BusPart),
    )


def _host(links: _LinkResults, visits: VisitTimes, device: Device) -> HostPart:
    update = links.alone["update"]
    # Of two links compute is the second one: it is measured last.
    beside = {pair: [min(part, 1.0) for part in kept] for pair, kept in links.left.items() if COMPUTE in pair}
    return HostPart(
        memory_bytes=host_bytes() / (2 if device.has_host_memory else 1),
        bytes_per_s=max(update.per_s * _MOVED_BYTES, 2 * max(links.alone[link].per_s for link in _BUS)),
        update_parameters_per_s=update.per_s,
        visit_s=visits.on_host,
        resting_visit_s=visits.on_device,
        parts=parts({pair: kept for pair, kept in links.left.items() if COMPUTE not in pair}),
        compute_left={link: kept[1] for (link, _), kept in beside.items()},
        left_beside_compute={link: kept[0] for (link, _), kept in beside.items()},
        sources=_measured(HostPart)
        | {
            "memory_bytes": "half of host memory" if device.has_host_memory else "of the machine or the container",
            "bytes_per_s": "28 bytes per parameter updated, or two per byte copied: whichever is more",
        },
        slow={"update_parameters_per_s": update.slow},
        fast={"update_parameters_per_s": update.fast},
    )


def _disk(links: _LinkResults, disks: Sequence[Path], store: DiskStore) -> DiskPart:
    read, write = links.lines["disk_read"], links.lines["disk_write"]
    how = "measured, through the page cache" if store.buffered_paths else "measured, with direct I/O"
    return DiskPart(
        size_bytes=max(sum(disk_free_bytes(path) for path in disks), 1),
        read_bytes_per_s=read.per_s,
        write_bytes_per_s=write.per_s,
        both=links.both(_DISK),
        latency_s=(read.latency_s + write.latency_s) / 2,
        sources=_measured(DiskPart, "endurance_bytes", how=how) | {"size_bytes": "what was free"},
    )


def _measured(part: type, *but: str, how: str = "measured") -> dict[str, str]:
    names = (field.name for field in dataclasses.fields(part))
    return {name: how for name in names if name not in (*but, "sources", "slow", "fast")}
