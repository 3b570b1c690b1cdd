"""Kept measurements: one per machine, stale when something that they depend on changes.

[Note: which machine] A machine is identified by its processor, its memory, the cores that this process may keep busy,
the device and the file systems of the disk tier. Its host name does not count, since containers get a new one each
time. A run uses the measurement of its own file systems. A forecast without folders uses the latest measurement with
any file systems. A kept measurement holds as long as the versions of torch and of the probe are the same. What is
measured while others keep the machine busy is not kept.
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from outcore.core.errors import ConfigError
from outcore.device.opening import device_name, open_device
from outcore.memory.machine import Others, host_bytes, processor_name, read_topology
from outcore.spec.hardware import Hardware
from outcore.spec.text_file import Described

if TYPE_CHECKING:
    from outcore.device.device import Device
    from outcore.probe.links import RankConnection

PROBE_VERSION = "13"
"""Version of the method of measuring. Measurements with another version are stale."""


def measure(open_device: Callable[[], Device], disks: Sequence[Path], effort: str) -> Hardware:
    """Measure the machine. Args: effort: Name of an effort; the others are as for ``probe.measure``."""
    from outcore.probe.measure import EFFORTS, measure  # here: it imports the engine, which readers do not need

    return measure(open_device, disks, EFFORTS[effort])


@dataclass(frozen=True, kw_only=True)
class Measured(Described):
    """A machine, and how and when it was measured."""

    what: ClassVar[str] = "kept measurement"

    hardware: Hardware
    effort: str
    """``whole`` or ``quick``."""
    at: str
    """Date and time."""
    versions: Mapping[str, str]
    """Versions on which the measurement depends besides the machine. See ``versions``."""
    busy: str = ""
    """What others did on this machine meanwhile, if that was so much that the rates are too low."""

    @classmethod
    def from_json(cls, text: str, *, where: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: The text is anything else.
        """
        try:
            data = json.loads(text)
            hardware = Hardware.from_json(json.dumps(data.pop("hardware")), where=where)
            return cls(hardware=hardware, **data)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{where}: expected a measurement that outcore kept, but got: {error}") from error


@dataclass(frozen=True)
class Machine:
    """This machine: a device, and the folders of a disk tier."""

    torch_device: torch.device | str | None
    disks: tuple[Path, ...] = ()

    @property
    def path(self) -> Path:
        """File of its measurement. See [Note: which machine]."""
        drives = sorted({str(_existing(folder).stat().st_dev) for folder in self.disks})
        return cache_folder() / ("-".join(["hardware", self._told, *([_digest(drives)] if drives else [])]) + ".json")

    def blocks_path(self, hardware: Hardware) -> Path:
        """Return the file of the seconds of blocks, which belong to one measurement of the device."""
        told = _digest([json.dumps(dataclasses.asdict(hardware.device), sort_keys=True)])
        return cache_folder() / f"blocks-{self._told}-{told}.json"

    @property
    def _told(self) -> str:
        facts = [device_name(self.torch_device), processor_name(), str(read_topology().num_cores), str(host_bytes())]
        return _digest(facts)

    def kept(self) -> Measured | None:
        """Return the kept measurement if it still holds; warn if there is one that does not."""
        return _kept_in(self.path)

    def kept_with_a_disk(self) -> Measured | None:
        """Return the latest kept measurement of this machine with any drives."""
        found = map(_kept_in, self.path.parent.glob(f"{Machine(self.torch_device).path.stem}-*.json"))
        return max((each for each in found if each is not None), key=lambda each: each.at, default=None)

    def measure(self, effort: str, *, is_kept: bool = True, between: RankConnection | None = None) -> Measured:
        """Measure the machine.

        Args:
            effort: ``whole`` or ``quick``.
            between: What ranks have measured between them; None if there is only one rank.
            is_kept: Keep it for later use, unless the machine is busy. Pass False for a measurement beside a run.

        Raises:
            DiskError: A folder cannot serve the disk tier.
            MemoryBudgetError: There is too little memory to measure in.
        """
        others = Others()
        hardware = measure(partial(open_device, self.torch_device), self.disks, effort)
        if between is not None:
            hardware = dataclasses.replace(hardware, links=between.links, network=between.network)
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        found = Measured(hardware=hardware, effort=effort, at=now, versions=versions(), busy=others.busy())
        if is_kept and not found.busy:
            self._keep(found)
        return found

    def _keep(self, found: Measured) -> None:
        path = self.path
        with suppress(ConfigError, OSError):  # the folder cannot be written to: measure again next time
            path.parent.mkdir(parents=True, exist_ok=True)
            found.save(path)
            for blocks in path.parent.glob(f"blocks-{self._told}-*.json"):  # blocks are measured again, too
                blocks.unlink(missing_ok=True)

    def at_hand(self) -> Hardware:
        """Return the kept hardware. If there is none that holds, measure quickly and warn about it.

        Raises:
            DiskError: A folder cannot serve the disk tier.
            MemoryBudgetError: There is too little memory to measure in.
        """
        kept = self.kept()
        if kept is not None:
            return kept.hardware
        found = self.measure("quick")
        said = f"the result is kept in '{self.path}'; outcore probe measures more accurately"
        if found.busy:
            said = f"this machine is busy: {found.busy}; so the result is not kept, and predicted times may be too long"
        _say(f"this machine was measured once, in a few seconds, to predict times of plans; {said}")
        return found.hardware


def cache_folder() -> Path:
    """Return the folder of kept measurements: below ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(named) if os.path.isabs(named) else Path.home() / ".cache") / "outcore"


def _kept_in(path: Path) -> Measured | None:
    if not path.is_file():
        return None
    try:
        found = Measured.load(path)
    except ConfigError as error:
        _say(f"the measurement of this machine cannot be used: {error}")
        return None
    before, now = found.versions, versions()
    changed = [f"{name} was {before.get(name)}" for name, version in now.items() if before.get(name) != version]
    if changed:
        _say(f"the measurement of this machine of {found.at} is stale: {', '.join(changed)}; it is measured again")
        return None
    return found


def _digest(facts: Sequence[str]) -> str:
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def versions() -> dict[str, str]:
    """Return the versions on which measurements depend besides the machine."""
    return {"torch": torch.__version__, "probe": PROBE_VERSION}


def _existing(folder: Path) -> Path:
    absolute = folder.absolute()
    return next(path for path in (absolute, *absolute.parents) if path.exists())


def _say(text: str) -> None:
    warnings.warn(text, stacklevel=2)
