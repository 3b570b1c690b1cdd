"""Kept seconds of blocks, for each measurement of their machine, so that the same inputs give the same plan.

A block is identified by its class, its printed form, shapes and dtypes of its parameters and arguments, and autocast.
"""

from __future__ import annotations

import dataclasses
import hashlib
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from outcore.core.errors import ConfigError
from outcore.device.device import Device
from outcore.device.opening import device_name
from outcore.memory.machine import Others
from outcore.model.casts import Autocast
from outcore.model.partition import Partition
from outcore.planner.forward.calls import calls_of
from outcore.planner.timing.profile import UnitTimes, UnitWork, rates_for
from outcore.probe.block_times import measure_blocks
from outcore.probe.measured_machines import Machine, versions
from outcore.spec.hardware import Hardware
from outcore.spec.text_file import Described

_MOST_S = 1e6
"""Upper limit of a block's seconds. A larger number means that the file was edited."""


@dataclass(frozen=True, kw_only=True)
class KeptBlocks(Described):
    """Seconds of blocks on one machine, from any models."""

    what: ClassVar[str] = "kept times of blocks"

    versions: Mapping[str, str]
    blocks: Mapping[str, Sequence[float]]
    """Digest that identifies a block -> its seconds, as in ``UnitTimes``."""

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: The text is anything else.
        """
        try:
            found = cls(**cls._fields_in(text, where))
            seconds = [UnitTimes(*each) for each in found.blocks.values()]
            are_right = all(0 <= value < _MOST_S for each in seconds for value in each)
        except (TypeError, AttributeError) as error:
            raise ConfigError(f"{where}: expected times that outcore kept, but got: {error}") from error
        if not are_right:
            raise ConfigError(f"{where}: expected seconds from 0 to {_MOST_S:.0e}, but got others")
        return found


def runs_here(cut: Partition, hardware: Hardware, device: torch.device) -> bool:
    """Whether a block that runs alone on this machine's device does what ``hardware`` will do in a run."""
    is_plain = not cut.quantized and cut.spec.micro_batches_in_unit == 1
    return is_plain and hardware.name == device_name(device)


def with_times(
    work: Mapping[str, UnitWork], cut: Partition, sample: Mapping[str, Any], device: Device, hardware: Hardware
) -> dict[str, UnitWork]:
    """Add to the work of each block its seconds on this machine's device: kept ones, else measured now.

    Args:
        work: Work of every unit, by name.
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward: a micro-batch.
        device: The device that will compute.
        hardware: This machine. Its rates tell which blocks would take too long to run.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: see ``measure_blocks``, and a forward in Python.
    """
    calls = calls_of(cut, sample, device.torch_device)
    names = _names(cut, calls.kinds, device)
    path = Machine(device.torch_device).blocks_path(hardware)
    kept = _kept(path)
    known: dict[str, UnitTimes | None] = {name: UnitTimes(*seconds) for name, seconds in kept.blocks.items()}
    if not all(name in known for name in names):
        rates = rates_for(hardware, cut.spec, work)
        counted_s = {name: rates.forward_s[name] + rates.backward_s[name] for name in work}
        others = Others()
        known |= dict(zip(names, measure_blocks(cut, calls, device, counted_s), strict=True))
        busy = others.busy()
        if busy:
            warnings.warn(
                f"this machine is busy: {busy} while blocks of the model were timed; their times are not kept, and "
                "predictions may be wrong",
                stacklevel=2,
            )
        else:
            _keep(kept, known, path)
    name_of = dict(zip(calls.kinds, names, strict=True))
    of_unit = {unit: _sum([known[name_of[kind]] for kind in kinds]) for unit, kinds in calls.of.items()}
    return {name: dataclasses.replace(each, measured=of_unit.get(name)) for name, each in work.items()}


def _names(cut: Partition, kinds: Iterable[Hashable], device: Device) -> list[str]:
    """Return a digest for each kind of block. The printed form of a module has its classes, sizes and settings."""
    model, autocast = cut.modules[0], Autocast.now(device.torch_device)
    attention = getattr(getattr(model, "config", None), "_attn_implementation", None)
    facts = f"{cut.spec.precision} {autocast} {attention} {model}"
    return [hashlib.blake2b(f"{kind} {facts}".encode(), digest_size=12).hexdigest() for kind in kinds]


def _kept(path: Path) -> KeptBlocks:
    """Read the kept times that still hold; none if the file cannot be read."""
    with suppress(ConfigError):
        found = KeptBlocks.load(path)
        if found.versions == versions():
            return found
    return KeptBlocks(versions=versions(), blocks={})


def _keep(kept: KeptBlocks, known: Mapping[str, UnitTimes | None], path: Path) -> None:
    with suppress(ConfigError, OSError):  # the folder cannot be written to
        path.parent.mkdir(parents=True, exist_ok=True)
        kept_now = {name: seconds for name, seconds in known.items() if seconds is not None}  # others may run later
        dataclasses.replace(kept, blocks=kept_now).save(path)


def _sum(parts: Sequence[UnitTimes | None]) -> UnitTimes | None:
    """Add up the seconds of all calls of a unit; None if those of one call are not known."""
    known = [part for part in parts if part is not None]
    return UnitTimes(*map(sum, zip(*known, strict=True))) if known and len(known) == len(parts) else None
