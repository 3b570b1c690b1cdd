"""What a run may take on each tier, and every buffer that a plan takes there."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.spec.layout import states_bytes, weights_home
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, Tier, UnitPlan

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


ReservationKind = Literal[
    "weights", "gradients", "states", "next_weights", "next_states", "activations", "buffers", "slot", "workspace"
]


@dataclass(frozen=True, kw_only=True)
class Reservation:
    """One buffer."""

    tier: Tier
    kind: ReservationKind
    owner: str
    """The unit's name; for a slot ``"<pool kind>/<pool index>/<slot index>"``."""
    nbytes: int
    num_sharers: int = 1
    """The number of ranks that share one buffer, which has as many times ``nbytes``."""


def is_temporary(reservation: Reservation) -> bool:
    """Return whether a reservation is for temporary tensors of updates."""
    return reservation.kind == "slot" and reservation.owner.startswith("temporary/")


def can_be_early(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether the unit's update can run inside backward: states are off the device, host weights wholly trained.

    Several ranks cannot: timing decides which early updates are overtaken, so they would meet in different orders.
    """
    if not spec.trainable_bytes or unit.states == "device" or spec.num_ranks > 1:
        return False
    return unit.weights != "host" or spec.trainable_bytes == spec.weight_bytes


def reservations(model: ModelSpec, plan: Plan) -> Iterator[Reservation]:
    """Yield every buffer of a plan. Empty ones are left out.

    The planner adds this list up and the engine allocates from it, so predicted bytes are exact. Exceptions are
    workspace and the temporary tensors of updates (``is_temporary``): they come from torch's allocators.

    Args:
        model: Units in the plan's order.
        plan: A plan, whose pools are taken as they are; ``check_plan`` checks whether they suffice.
    """
    for spec, unit in zip(model.units, plan.units, strict=True):
        yield from (r for r in _unit(spec, unit, model) if r.nbytes)
    for i, pool in enumerate(plan.pools):
        for slot in range(pool.num_slots):
            yield Reservation(tier=pool.tier, kind="slot", owner=f"{pool.kind}/{i}/{slot}", nbytes=pool.slot_bytes)
    if plan.workspace_bytes:
        yield Reservation(tier="device", kind="workspace", owner="", nbytes=plan.workspace_bytes)


def _unit(spec: UnitSpec, unit: UnitPlan, model: ModelSpec) -> Iterator[Reservation]:
    def item(tier: Tier, kind: ReservationKind, nbytes: int) -> Reservation:
        return Reservation(tier=tier, kind=kind, owner=spec.name, nbytes=nbytes)

    weights = weights_home(spec, unit)
    sharers = weights.num_sharers if weights.is_one_copy else 1
    yield replace(item(unit.weights, "weights", weights.taken_bytes), num_sharers=sharers)
    yield item(unit.gradients, "gradients", spec.update_bytes)
    yield item(unit.states, "states", states_bytes(spec, unit, model))
    if unit.early:
        yield item("host", "next_weights", spec.trainable_bytes)
        yield item(unit.states, "next_states", states_bytes(spec, unit, model))
    yield item(unit.activations, "activations", model.micro_batches_in_unit * unit.saved_bytes)
    yield item("device", "buffers", spec.buffer_bytes)


def tier_bytes(model: ModelSpec, plan: Plan) -> dict[Tier, int]:
    """Return the bytes that the plan takes on each tier."""
    total: dict[Tier, int] = {"device": 0, "host": 0, "disk": 0}
    for reservation in reservations(model, plan):
        total[reservation.tier] += reservation.nbytes
    return total
