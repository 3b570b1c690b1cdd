"""``outcore plan --list-hardware``: known parts, with the figures that plans are made with."""

from __future__ import annotations

from collections.abc import Iterator

import typer

from outcore.core.quantities import format_bytes
from outcore.planner.timing.known_parts import KnownParts, known_parts


def print_hardware(value: bool) -> None:  # noqa: FBT001 (Typer calls it)
    """Print the list, and end the command."""
    if value:
        print(hardware_text())
        raise typer.Exit


def hardware_text() -> str:
    """List devices by family with what is usual beside them, then other parts by kind, then how to name them."""
    known = known_parts()
    heads = ("device", "memory", "bf16", "bandwidth", "usual beside it")
    rows = [heads, *_devices(known), ("bus", "", "", "each way"), *_buses(known)]
    rows += [("host", "memory", "", "bandwidth"), *_hosts(known), ("disk", "size", "", "write", "life"), *_disks(known)]
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(heads))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows)
    return "\n".join([*lines, known.listed("links", "network"), "", _HOW])


_HOW = (
    "bf16 and bandwidth are what is predicted to be reached, not what is published. Join parts by '+'; a size is host "
    "memory, and figures of your own follow a part: rtx-4090,memory=22GiB,bf16=140TFLOPS+pcie4+64GiB. The sources of "
    "all figures are in outcore/planner/timing/known_hardware.toml."
)


def _devices(known: KnownParts) -> Iterator[tuple[str, ...]]:
    family = ""
    for name, part in known.devices.items():
        if known.families[name] != family:
            family = known.families[name]
            yield (family,)
        half = f"{part.bf16_flops / 1e12:.0f} TFLOP/s" + ("" if part.computes_bf16 else " (fp16)")
        beside = " ".join(known.usual[name].values())
        yield f"  {name}", format_bytes(int(part.memory_bytes)), half, f"{part.bytes_per_s / 1e9:,.0f} GB/s", beside


def _buses(known: KnownParts) -> Iterator[tuple[str, ...]]:
    for name, part in known.buses.items():
        yield f"  {name}", "", "", f"{part.h2d_bytes_per_s / 1e9:.1f} GB/s"


def _hosts(known: KnownParts) -> Iterator[tuple[str, ...]]:
    for name, part in known.hosts.items():
        yield f"  {name}", format_bytes(int(part.memory_bytes)), "", f"{part.bytes_per_s / 1e9:,.0f} GB/s"


def _disks(known: KnownParts) -> Iterator[tuple[str, ...]]:
    for name, part in known.disks.items():
        life = f"{part.endurance_bytes / 1e12:,.0f} TB written"
        yield f"  {name}", f"{part.size_bytes / 1e12:g} TB", "", f"{part.write_bytes_per_s / 1e9:.1f} GB/s", life
