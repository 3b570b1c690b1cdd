"""Parts of common machines, from the table ``known_hardware.toml``. Every figure has its source.

Figures are published by vendors. Where a measurement tells how much of such a figure is reached in practice, it is
multiplied by that factor. Where measurements differ, a figure also has a slow and a fast end, and so has every time
that is predicted with it. A measured machine (``outcore probe``) is better than any of them.
"""

from __future__ import annotations

import dataclasses
import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outcore.core.quantities import parse_bytes
from outcore.spec.hardware import BusPart, DevicePart, DiskPart, HostPart, LinksPart, NetworkPart
from outcore.spec.text_file import packaged_text

GIGA, TERA = 1e9, 1e12
UPDATE_BYTES = 28
"""Bytes that AdamW moves per parameter. Master weight and two moments are read and written, a bf16 weight is written,
and a bf16 gradient is read."""


class Figure(NamedTuple):
    """A figure, or a factor of one, and where it is from."""

    value: float
    source: str
    slow: float | None = None
    """The figure at the slow end of what is known; None: there is no range."""
    fast: float | None = None

    def of(self, peak: float, said: str) -> Figure:
        """Multiply a published figure by this factor. Args: said: The published figure and its source."""
        slow, fast = (None if factor is None else factor * peak for factor in (self.slow, self.fast))
        return Figure(self.value * peak, f"{said}; {self.source}", slow, fast)


@dataclass(frozen=True, kw_only=True)
class KnownParts:
    """All known parts by name."""

    devices: Mapping[str, DevicePart]
    buses: Mapping[str, BusPart]
    hosts: Mapping[str, HostPart]
    disks: Mapping[str, DiskPart]
    links: Mapping[str, LinksPart]
    networks: Mapping[str, NetworkPart]
    families: Mapping[str, str]
    """Device -> the vendor's family, such as GeForce RTX 40."""
    usual: Mapping[str, Mapping[str, str]]
    """Device -> kind of part -> the part that is usual beside the device; left out: none is known."""
    refused: Mapping[str, str]
    """Machine for which no plan can be made -> why."""

    @property
    def by_kind(self) -> dict[str, Mapping[str, Any]]:
        """Kind of part, as in ``Hardware`` -> the parts by name."""
        kinds = {"device": self.devices, "bus": self.buses, "host": self.hosts, "disk": {**self.disks, "no-disk": None}}
        return {**kinds, "links": self.links, "network": self.networks}

    def listed(self, *kinds: str) -> str:
        """List names of parts, devices by family, one line each. Args: kinds: As in ``Hardware``; none: all."""
        lines: dict[str, list[str]] = {}
        for kind, parts in self.by_kind.items():
            for name in parts if not kinds or kind in kinds else ():
                lines.setdefault(self.families.get(name, kind), []).append(name)
        return "\n".join(f"  {line}: {', '.join(names)}" for line, names in lines.items())


@functools.cache
def known_parts() -> KnownParts:
    """Read the table."""
    table = _PartsTable(tomllib.loads(packaged_text(__package__, "known_hardware.toml")))
    rows: Mapping[str, Any] = table.rows
    parts: dict[str, dict[str, Any]] = {}
    for kind, make in (
        ("devices", table.device),
        ("buses", table.bus),
        ("hosts", table.host),
        ("links", table.links),
        ("networks", table.network),
    ):
        parts[kind] = {name: make(row) for name, row in rows[kind].items()}
    beside, devices = rows["beside"], rows["devices"]
    return KnownParts(
        **parts,
        disks=table.disks(),
        families={name: row["family"] for name, row in devices.items()},
        usual={name: {"bus": row["bus"], **beside[row["beside"]]} for name, row in devices.items()},
        refused=rows["refused"],
    )


def _factor(value: Any) -> float:
    """Return a factor that is given as a number, or as a pair: what was reached, and the published figure."""
    return value[0] / value[1] if isinstance(value, list) else float(value)


def _figures(**figures: Figure) -> dict[str, Any]:
    """Return the fields of a part."""
    return {
        **{name: figure.value for name, figure in figures.items()},
        "sources": {name: figure.source for name, figure in figures.items()},
        "slow": {name: figure.slow for name, figure in figures.items() if figure.slow is not None},
        "fast": {name: figure.fast for name, figure in figures.items() if figure.fast is not None},
    }


class _PartsTable:
    """The table's rows, and parts made of them."""

    def __init__(self, rows: Mapping[str, Any]) -> None:
        self.rows = rows

    def _said(self, source: str, row: Mapping[str, Any] | None = None) -> str:
        """Return a source with its documents, and figures of its row, in place of their names."""
        return source.format_map({**self.rows["documents"], **(row or {})})

    def _figure(self, row: Mapping[str, Any]) -> Figure:
        slow, fast = (None if row.get(end) is None else _factor(row[end]) for end in ("slow", "fast"))
        return Figure(_factor(row["value"]), self._said(row["source"]), slow, fast)

    def _reached(self, architecture: str) -> dict[str, Figure]:
        """Return what of its figures an architecture reaches: products, attention, memory and updates."""
        rows = self.rows["reached"][architecture]
        others = self._reached(rows["like"]) if "like" in rows else {}
        if "because" in rows:
            others = {n: f._replace(source=f"{f.source}; {rows['because']}") for n, f in others.items()}
        return others | {name: self._figure(row) for name, row in rows.items() if isinstance(row, dict)}

    def device(self, row: Mapping[str, Any]) -> DevicePart:
        """Make a device. Without figures in bf16 it has those in fp16, and says so."""
        reached, source, bandwidth = self._reached(row["architecture"]), self._said(row["source"]), row["bandwidth"]
        half = row.get("bf16", row.get("fp16"))
        peak = f"{half} TFLOP/s dense, {source}" if "bf16" in row else f"{half} TFLOP/s in fp16, no bf16, {source}"
        return DevicePart(
            **_figures(
                memory_bytes=Figure(float(parse_bytes(row["memory"], what="memory")), source),
                bf16_flops=reached["bf16"].of(half * TERA, peak),
                fp32_flops=reached["fp32"].of(row["fp32"] * TERA, f"{row['fp32']} TFLOP/s without TF32, {source}"),
                attention_flops=reached["attention"].of(half * TERA, peak),
                bytes_per_s=reached["bandwidth"].of(bandwidth * GIGA, source),
                update_parameters_per_s=reached["update"].of(bandwidth * GIGA / UPDATE_BYTES, source),
                kernel_s=self._figure(self.rows["kernel"]),
                computes_bf16=Figure(float("bf16" in row), source),
            )
        )

    def bus(self, row: Mapping[str, Any]) -> BusPart:
        """Make a bus: a link as it is, or lanes of PCI Express, of which a part is reached."""
        usual, rate = self.rows["bus"], row["gigabytes"] * GIGA
        if "source" in row:
            both = source = self._said(row["source"])
        else:
            rate, source, both = _factor(usual["reached"]) * rate, self._said(usual["source"], row), usual["both"]
        sources = {"h2d_bytes_per_s": source, "d2h_bytes_per_s": source, "both": both}
        return BusPart(h2d_bytes_per_s=rate, d2h_bytes_per_s=rate, sources=sources)

    def host(self, row: Mapping[str, Any]) -> HostPart:
        """Make a processor with its memory."""
        usual, bytes_per_s = self.rows["host"], row["bandwidth"] * GIGA
        most = bytes_per_s / UPDATE_BYTES
        update: dict[str, float] = {}
        for end in ("value", "slow", "fast"):
            each, part = usual["per_core"][end], _factor(usual["of_bandwidth"][end])
            update[end] = min(row["cores"] * each, part * most)
        said = self._said(usual["update"]["source"])
        return HostPart(
            **_figures(
                memory_bytes=Figure(float(parse_bytes(row["memory"], what="memory")), usual["memory"]),
                bytes_per_s=Figure(bytes_per_s, self._said(row["source"])),
                update_parameters_per_s=Figure(source=f"{row['cores']} cores; {said}", **update),
                visit_s=self._figure(usual["visit"]),
                resting_visit_s=self._figure(usual["resting_visit"]),
            )
        )

    def disks(self) -> dict[str, DiskPart]:
        """Make all drives: single ones first, since others are several of them."""
        rows = self.rows["disks"]
        single = {name: self._disk(row) for name, row in rows.items() if "of" not in row}
        several = {name: _striped(single[row["of"]], row["times"]) for name, row in rows.items() if "of" in row}
        return {name: {**single, **several}[name] for name in rows}

    def _disk(self, row: Mapping[str, Any]) -> DiskPart:
        source = self._said(row["source"])
        rates = dict.fromkeys(("read_bytes_per_s", "write_bytes_per_s"), f"sequential, {source}")
        sizes = dict.fromkeys(("size_bytes", "endurance_bytes"), source)
        return DiskPart(
            size_bytes=row["size"] * TERA,
            read_bytes_per_s=row["read"] * GIGA,
            write_bytes_per_s=row["write"] * GIGA,
            endurance_bytes=row["endurance"] * TERA,
            sources={**rates, **sizes, "both": self.rows["disk"]["both"]},
        )

    def links(self, row: Mapping[str, Any]) -> LinksPart:
        """Make links between the devices of a node."""
        direct, per_port = not row.get("through_host", False), row.get("per_port", 1)
        where = "bytes pass the bus" + ("" if direct else ", and host memory")
        return LinksPart(
            bytes_per_s=row["gigabytes"] * GIGA,
            on_bus=float(row.get("on_bus", False)),
            through_host=float(not direct),
            devices_per_port=per_port,
            sources={
                "bytes_per_s": self._said(row["source"]),
                "on_bus": where,
                "through_host": where,
                "devices_per_port": f"{per_port} devices behind each switch, which has one way to the host",
                "host_bytes_per_s": self.rows["link"]["host"],
            },
        )

    def network(self, row: Mapping[str, Any]) -> NetworkPart:
        """Make a node's network adapters."""
        usual = self.rows["network"]
        rate = row["adapters"] * _factor(usual["reached"]) * row["gigabits"] / 8 * GIGA
        return NetworkPart(bytes_per_s=rate, sources={"bytes_per_s": self._said(usual["source"], row)})


def _striped(disk: DiskPart, times: int) -> DiskPart:
    """Return several of a drive."""
    fields = ("size_bytes", "read_bytes_per_s", "write_bytes_per_s", "endurance_bytes")
    return dataclasses.replace(disk, **{field: times * getattr(disk, field) for field in fields})
