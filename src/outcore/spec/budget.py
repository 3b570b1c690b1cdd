"""Limits on what a run may take on each tier: as the user gives them, and with defaults resolved on the machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.spec.plan import Tier

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, init=False)
class Budget:
    """The most that a run may take on each tier. None for device or host means what is free when the run starts."""

    device: int | None
    """Bytes of device memory, activations included."""
    host: int | None
    """Bytes of host memory."""
    disk: tuple[str, ...] | None
    """Folders of the disk tier; None: no disk tier."""
    disk_bytes: int | None
    """Bytes in all folders together; None: what is free there."""

    def __init__(
        self,
        *,
        device: int | str | None = None,
        host: int | str | None = None,
        disk: PathLike | Iterable[PathLike] | None = None,
        disk_bytes: int | str | None = None,
    ) -> None:
        """Read sizes and folders. No file is opened.

        Args:
            device: Bytes, or a string such as ``"20GiB"``.
            host: The same for host memory.
            disk: A folder, several folders (they are striped), or None for no disk tier.
            disk_bytes: Bytes on disk, in all folders together.

        Raises:
            ConfigError: A size cannot be read, the list of folders is empty, a folder is named twice, or ``disk_bytes``
                is given without ``disk``.
        """
        paths = None if disk is None else _paths(disk)
        if paths is None and disk_bytes is not None:
            raise ConfigError(
                f"Budget: expected disk= beside disk_bytes={disk_bytes!r}, but got none; name the disk tier's folder"
            )
        object.__setattr__(self, "device", _size(device, "Budget(device=)"))
        object.__setattr__(self, "host", _size(host, "Budget(host=)"))
        object.__setattr__(self, "disk", paths)
        object.__setattr__(self, "disk_bytes", _size(disk_bytes, "Budget(disk_bytes=)"))

    @property
    def paths(self) -> tuple[str, ...]:
        """Folders of the disk tier; empty if there is none."""
        return self.disk or ()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """A budget with every default resolved: the limits of a plan."""

    device_bytes: int
    host_bytes: int
    disk_bytes: int | None
    """None: no disk tier."""

    @property
    def by_tier(self) -> dict[Tier, int]:
        """Tier -> the most bytes there; 0 for a tier that is not allowed."""
        return {"device": self.device_bytes, "host": self.host_bytes, "disk": self.disk_bytes or 0}


def _size(value: int | str | None, what: str) -> int | None:
    return None if value is None else parse_bytes(value, what=what)


def _paths(disk: PathLike | Iterable[PathLike]) -> tuple[str, ...]:
    expected = "Budget(disk=): expected a folder, a list of folders, or None for no disk tier"
    given = [disk] if isinstance(disk, str | bytes | os.PathLike) or not isinstance(disk, Iterable) else list(disk)
    paths: list[str] = []
    for item in given:
        path = os.fspath(item) if isinstance(item, str | os.PathLike) else None
        if not isinstance(path, str) or not path:
            raise ConfigError(f"{expected}, but got {item!r}")
        paths.append(path)
    if not paths:
        raise ConfigError(f"{expected}, but got an empty list; use disk=None to go without")
    absolute = [os.path.normpath(os.path.abspath(p)) for p in paths]
    twice = next((p for i, p in enumerate(paths) if absolute[i] in absolute[:i]), None)
    if twice is not None:
        raise ConfigError(f"{expected}, but '{twice}' is named twice; name every folder once")
    return tuple(paths)
