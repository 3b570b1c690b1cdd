"""How fast ranks reach one another. All of them measure at once, since all of them communicate at once in a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median
from typing import NamedTuple

import torch

from outcore.core.quantities import PAGE_BYTES
from outcore.device.device import Device
from outcore.device.opening import reach_one_another
from outcore.probe import compute_rates as work
from outcore.probe.loads import rate_of
from outcore.probe.measure import MIB, memory_of_host
from outcore.probe.samples import FittedLine, line
from outcore.ranks.world import World
from outcore.spec.hardware import LinksPart, NetworkPart
from outcore.spec.lane_names import Lane

_SIZES = (MIB, 32 * MIB)
"""Bytes that a rank has once all ranks have sent theirs."""
_TIMES, _WINDOW_S = 5, 0.2
_OWN_LINKS = 1.25
"""Links that are more than this many times as fast as the bus do not run over it."""


class RankConnection(NamedTuple):
    """What connects ranks."""

    links: LinksPart | None
    """None if each node has one rank."""
    network: NetworkPart | None
    """None if there is one node."""


def measure_links(world: World, device: Device, sizes: Sequence[int] = _SIZES) -> RankConnection:
    """Measure how ranks reach one another. A collective; nothing else should run meanwhile.

    Args:
        world: The ranks. Process groups of lanes are made in it.
        device: The device of this rank.
        sizes: Bytes to exchange, the largest last.

    Time: some 2 s. Memory: twice the largest size on the device, the largest size in host memory.
    """
    world.join_lanes(device)
    per_node = world.size if world.size % world.local_size else world.local_size
    with ExitStack() as closing:
        found = _RankProbe(world, device, per_node, sizes, closing)
        return RankConnection(
            links=found.links() if per_node > 1 else None,
            network=found.network() if per_node < world.size else None,
        )


class _RankProbe:
    """Measures with buffers of its own, which are freed when the stack closes."""

    def __init__(self, world: World, device: Device, per_node: int, sizes: Sequence[int], closing: ExitStack) -> None:
        self._world, self._device, self._per_node = world, device, per_node
        pages = world.size * PAGE_BYTES
        self._sizes = [max(size // pages, 1) * pages for size in sizes]
        self._there, self._received = (device.allocate(self._sizes[-1]) for _ in range(2))
        self._here = memory_of_host(device, self._sizes[-1], closing)
        if per_node > 1:
            world.open_groups(per_node)

    def links(self) -> LinksPart:
        """Measure the links between ranks of a node."""
        device, per_node = self._device, self._per_node
        others = (per_node - 1) / per_node
        between = self._line(others, lambda nbytes: self._gather(self._there[:nbytes]))
        on_host = self._line(others, lambda nbytes: self._gather(self._here[:nbytes]))
        is_own, port = False, 1.0
        if not device.computes_on_host:
            alone, together = self._to_devices()
            is_own = device.group_backend != "gloo" and between.per_s > _OWN_LINKS * alone
            port = float(min(max(round(alone / together), 1), per_node))
        through_host = not is_own and not (device.group_backend != "gloo" and reach_one_another())
        return LinksPart(
            bytes_per_s=between.per_s,
            on_bus=float(not is_own),
            through_host=float(through_host),
            devices_per_port=port,
            host_bytes_per_s=on_host.per_s,
            latency_s=between.latency_s,
            sources={
                **dict.fromkeys(("bytes_per_s", "host_bytes_per_s", "latency_s"), "measured"),
                "on_bus": "0: much faster than the bus was measured",
                "through_host": "1: devices do not reach one another's memory",
                "devices_per_port": "copies of one rank over those of all at once, measured",
            },
        )

    def network(self) -> NetworkPart:
        """Measure the network between nodes: a lower bound, since links within nodes are used at the same time."""
        size, per_node = self._world.size, self._per_node
        into_node = per_node * (size - per_node) / size
        found = self._line(into_node, self._exchange)
        sources = dict.fromkeys(("bytes_per_s", "latency_s"), "measured")
        return NetworkPart(bytes_per_s=found.per_s, latency_s=found.latency_s, sources=sources)

    def _line(self, part: float, meet: Callable[[int], None]) -> FittedLine:
        """Measure at all sizes. Args: part: Part of a size that passes. meet: Lets all ranks exchange a size."""
        return line({int(part * nbytes): self._exchange_s(meet, nbytes) for nbytes in self._sizes})

    def _exchange_s(self, meet: Callable[[int], None], nbytes: int) -> float:
        seconds = []
        for _ in range(1 + _TIMES):
            self._device.finish_copies()
            self._world.all_of(None)
            start_s = time.perf_counter()
            meet(nbytes)
            self._device.finish_copies()
            seconds.append(time.perf_counter() - start_s)
        return median(seconds[1:])  # the first one opens connections

    def _gather(self, whole: torch.Tensor) -> None:
        place, run = self._world.rank % self._per_node, whole.numel() // self._per_node
        mine = whole[place * run : (place + 1) * run]
        self._world.all_gather("", "probe", [(whole[: run * self._per_node], mine)], self._per_node)

    def _exchange(self, nbytes: int) -> None:
        self._world.exchange(b"\0", self._there[:nbytes], self._received[:nbytes], "probe")

    def _to_devices(self) -> tuple[float, float]:
        """Measure bytes per second from host memory to one device: alone, and while all ranks of the node copy."""
        load = work.copies(self._device, Lane.H2D, self._there, self._here, min(self._sizes[-1], 4 * MIB))
        self._world.all_of(None)
        together = rate_of(load, _WINDOW_S).per_s
        self._world.all_of(None)
        alone = rate_of(load, _WINDOW_S).per_s if self._world.rank == 0 else 0.0
        return self._world.from_first((alone, together))
