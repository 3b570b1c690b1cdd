"""``outcore probe``: how fast this machine is, as text and as a file to plan with."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from outcore.command.files import refuse_unwritable
from outcore.command.terminal import aligned
from outcore.core.errors import ConfigError, DiskError, OutcoreError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.device.opening import device_of_rank, open_device
from outcore.memory.machine import Others
from outcore.probe.links import RankConnection, measure_links
from outcore.probe.measured_machines import Machine, Measured
from outcore.ranks.world import World, join_world
from outcore.spec.hardware import Hardware

_LOOK_S = 1.0
"""Seconds in which others are watched before the machine is measured."""


def probe(*, disks: Sequence[Path], device: str | None, out: Path | None) -> str:
    """Measure this machine, keep the result, and describe it.

    With several ranks, the first one does this. All ranks measure the links between them together.

    Args:
        disks: Folders of the disk tier; they must be there.
        device: Default: the accelerator if there is one, else the CPU.
        out: File to write the machine to.

    Returns:
        Text for people; empty on ranks other than the first.

    Raises:
        ConfigError: A folder, device or file that cannot be used.
        OutcoreError: Others keep the machine busy.
    """
    for folder in disks:
        if not folder.is_dir():
            raise ConfigError(
                f"--disk-dir: expected a folder that is there, but got '{folder}'; make it, or name another"
            )
    refuse_unwritable("--out", out)
    if not join_world(device):
        return _measured(Machine(device, tuple(disks)), out)
    world, text = World(), ""
    with world.kept("outcore probe"):
        mine = device_of_rank(device)
        with closing(open_device(mine)) as opened:
            between = measure_links(world, opened)
        if world.rank == 0:
            text = _measured(Machine(mine, tuple(disks)), out, between)
        world.all_of(None)  # the others wait here and leave the machine to rank 0
    world.close()
    return text


def _measured(machine: Machine, out: Path | None, between: RankConnection | None = None) -> str:
    others = Others()
    time.sleep(_LOOK_S)
    _refuse_busy(others.busy())  # now: a probe of a busy machine takes minutes
    try:
        found = machine.measure("whole", between=between)
    except DiskError as error:
        raise ConfigError(f"--disk-dir: {error}") from error
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
    _refuse_busy(found.busy)
    if out is not None:
        found.hardware.save(out)
    return _text(machine, found)


def _refuse_busy(busy: str) -> None:
    if busy:
        raise OutcoreError(
            f"this machine is busy: {busy} while it was measured, so its rates are neither kept nor written; measure "
            "it again when that has ended"
        )


def _text(machine: Machine, found: Measured) -> str:
    rows = [("machine", found.hardware.name), *_rows(found.hardware)]
    rows.append(("kept", str(machine.path) if machine.path.is_file() else f"nowhere: {machine.path} cannot be written"))
    return aligned(rows)


def _rows(machine: Hardware) -> Iterator[tuple[str, str]]:
    device, bus, host, disk = machine.device, machine.bus, machine.host, machine.disk
    products = f"products {_ops(device.bf16_flops)} in bf16, {_ops(device.fp32_flops)} in fp32"
    yield "device", f"{products}, attention {_ops(device.attention_flops)}"
    yield "", f"memory {_rate(device.bytes_per_s)}, {_updates(device.update_parameters_per_s)}"
    ways = f"{_rate(bus.h2d_bytes_per_s)} to the device, {_rate(bus.d2h_bytes_per_s)} back"
    yield "bus", f"{ways}, both at once {bus.both:.2f} times one, {1e6 * bus.latency_s:.0f} us more per copy"
    visits = f"{1e6 * host.visit_s:.0f} us of the engine per visit"
    if host.resting_visit_s:
        visits += f", {1e6 * host.resting_visit_s:.0f} us if the unit's data rests on the device"
    yield "host", f"{_updates(host.update_parameters_per_s)}, {visits}"
    if disk is not None:
        ways = f"{_rate(disk.read_bytes_per_s)} read, {_rate(disk.write_bytes_per_s)} written"
        size, how = format_bytes(int(disk.size_bytes)), disk.sources["read_bytes_per_s"]
        yield "disk", f"{ways}, both at once {disk.both:.2f} times one, {size} free; {how}"
    if machine.links is not None:
        ways = f"{_rate(machine.links.bytes_per_s)} to a device, {_rate(machine.links.host_bytes_per_s)} to host memory"
        yield "ranks", f"{ways} from others of the node, {1e6 * machine.links.latency_s:.0f} us more per exchange"
    if machine.network is not None:
        yield "network", f"{_rate(machine.network.bytes_per_s)} into a node"
    shared = ", ".join(f"{link} {part:.2f}" for link, part in host.parts.items())
    turns = [part.fast[name] / value for part in (device, host) for name, value in part.slow.items()]
    if turns:
        yield "spread", f"half of the turns of what computes within {max(max(x, 1 / x) for x in turns) - 1:.0%}"
    yield "shared", f"{shared} of host memory and cores: parts above 1 together slow each other down"


def _rate(per_s: float) -> str:
    return f"{format_bytes(int(per_s))}/s"


def _ops(per_s: float) -> str:
    return f"{per_s / 1e12:.3g} TFLOP/s"


def _updates(per_s: float) -> str:
    return f"{per_s / 1e6:.0f} million parameters/s updated"
