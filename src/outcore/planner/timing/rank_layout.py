"""One rank's share of its node, and how fast ranks reach one another.

[Note: between ranks] A rank receives equally many bytes from every other rank. In an exchange of gradients, each rank
sends a different run to each other one, so bytes from other nodes pass the network once per rank. In a gather all ranks
receive the same, so bytes pass the network once per node. Where the ranks of a node share one set of weights, each
receives a different part of the new weights from the other nodes. Links within a node and the network work side by
side. For exchanges, the makers of NCCL say the same: https://github.com/NVIDIA/nccl-tests/issues/130.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from outcore.planner.timing.rates import Link, Shared
from outcore.spec.hardware import DevicePart, Hardware, LinksPart, NetworkPart

_GBE_100 = NetworkPart(
    bytes_per_s=100e9 / 8, sources={"bytes_per_s": "not known; taken to be one adapter of 100 Gbit/s"}
)


class Ranks(NamedTuple):
    """Processes that train together, each with a device of its own."""

    nodes: int = 1
    per_node: int = 1

    @property
    def size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.per_node

    def __str__(self) -> str:
        """Describe the ranks for messages."""
        return f"{self.nodes} node{'s' * (self.nodes > 1)} x {self.per_node}"


ALONE = Ranks()


def links_of(hardware: Hardware) -> LinksPart:
    """Return the links between devices of a node. If nothing is known: half of the bus, through host memory."""
    if hardware.links is not None:
        return hardware.links
    bus, said = hardware.bus, "not known; taken to be half of the bus, through host memory"
    sources = dict.fromkeys(("bytes_per_s", "on_bus", "through_host"), said)
    rate = min(bus.h2d_bytes_per_s, bus.d2h_bytes_per_s) / 2
    return LinksPart(bytes_per_s=rate, on_bus=1, through_host=1, sources=sources)


def network_of(hardware: Hardware) -> NetworkPart:
    """Return the network between nodes. If nothing is known: one adapter of 100 Gbit/s."""
    return hardware.network or _GBE_100


def share_of(hardware: Hardware, ranks: Ranks) -> Hardware:
    """Return one rank's share of memory, cores, drives and links to them, while all ranks of its node do the same."""
    if ranks.per_node == 1:
        return hardware
    count, host, disk = ranks.per_node, hardware.host, hardware.disk
    port = min(links_of(hardware).devices_per_port, count)
    more = {link: part * count / port for link, part in host.parts.items() if link in ("h2d", "d2h")}
    host = _over(host, count, "memory_bytes", "bytes_per_s", "update_parameters_per_s")
    return dataclasses.replace(
        hardware,
        device=_device(hardware.device, count),
        bus=_over(hardware.bus, port, "h2d_bytes_per_s", "d2h_bytes_per_s"),
        host=dataclasses.replace(host, parts={**host.parts, **more}),
        disk=disk and _over(disk, count, "size_bytes", "read_bytes_per_s", "write_bytes_per_s", "endurance_bytes"),
    )


def _device(device: DevicePart, count: int) -> DevicePart:
    """Return one rank's device: an accelerator is its own; if the host computes, ranks share its cores."""
    if device.runs_ahead:
        return device
    updates = ("update_parameters_per_s", "plain_update_parameters_per_s")
    rates = ("bf16_flops", "fp32_flops", "attention_flops", "bytes_per_s", *updates)
    return _over(device, count, "memory_bytes", *rates)


def _over(part: Any, count: float, *fields: str) -> Any:
    return dataclasses.replace(part, **{field: getattr(part, field) / count for field in fields})


class RankRates(NamedTuple):
    """Rates of transfers between ranks."""

    bytes_per_s: Mapping[str, float]
    """Bytes per second that a rank receives: of exchanged gradients (``reduce``) and by each ``Way`` of weights."""
    latency_s: Mapping[str, float]
    shared: Sequence[Shared]
    host_parts: Mapping[Link, float]
    """Link -> the part that it takes of one rank's share of host memory."""


def between(hardware: Hardware, ranks: Ranks) -> RankRates:
    """Return the rates at which a rank receives from others. See [Note: between ranks].

    Args:
        hardware: One node.
        ranks: All ranks. A single rank receives nothing.
    """
    if ranks.size == 1:
        return RankRates({}, {}, (), {})
    links, network, bus = links_of(hardware), network_of(hardware), hardware.bus
    inside = (ranks.per_node - 1) / (ranks.size - 1)
    outside, meets = 1 - inside, float(ranks.per_node > 1)
    exchange_s = max(inside / links.bytes_per_s, outside * ranks.per_node / network.bytes_per_s)
    gather_s = max(meets / links.bytes_per_s, outside / network.bytes_per_s)
    on_host_s = max(meets / links.host_bytes_per_s, outside / network.bytes_per_s)
    copies_s = ranks.per_node / network.bytes_per_s  # ranks of a node receive different parts
    rates: dict[str, float] = {"reduce": 1 / exchange_s, "gather": 1 / gather_s, "host gather": 1 / on_host_s}
    rates |= {"link": 1 / gather_s, "node link": links.bytes_per_s if meets else 1 / gather_s}
    rates |= {"copies": 1 / copies_s, "host copies": 1 / max(copies_s, 1 / links.host_bytes_per_s)}
    latency_s = max(meets * links.latency_s, network.latency_s if ranks.nodes > 1 else 0.0)
    shared, host_parts = (
        [Shared(name="between ranks", parts={"reduce": 1.0, "gather": 1.0, "link": 1.0})],
        dict[Link, float](),
    )
    if links.on_bus and meets:
        inner: dict[Link, float] = {"reduce": inside * rates["reduce"], "gather": rates["gather"]}
        inner["link"] = rates["node link"]
        port = min(links.devices_per_port, ranks.per_node)
        into = {link: rate / bus.h2d_bytes_per_s for link, rate in inner.items()}
        out = {link: rate / bus.d2h_bytes_per_s for link, rate in inner.items()}
        shared.append(Shared(name="into the device", parts={"h2d": 1 / port, **into}))
        shared.append(Shared(name="out of the device", parts={"d2h": 1 / port, **out}))
        if links.through_host:  # bytes are written there and read again
            here = hardware.host.bytes_per_s / ranks.per_node
            host_parts = {link: 2 * rate / here for link, rate in inner.items()}
    return RankRates(rates, dict.fromkeys(rates, latency_s), shared, host_parts)
