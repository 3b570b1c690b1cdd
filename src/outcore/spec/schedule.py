"""A schedule: what one training step does, in order, and what waits for what. Data, as text too."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outcore.spec.lanes import Lane
from outcore.spec.timeline import COMPUTE, HOST


class Phase(enum.Enum):
    """Why a unit's weights are needed."""

    FORWARD = "forward"
    INFERENCE = "inference"
    """Without gradients: evaluation, generation."""
    BACKWARD = "backward"


ROOT = 0
"""Index of the root in a plan's order."""


class Visit(NamedTuple):
    """Compute reaches a unit: its weights must be on the device."""

    phase: Phase
    unit: int
    """Index in the plan's order."""


Kind = Literal[
    "forward",
    "inference",
    "backward",
    "use activations of",
    "fetch",
    "read weights of",
    "read old weights of",
    "write weights of",
    "activations of",
    "write activations of",
    "read activations of",
    "bring activations of",
    "gradients of",
    "accumulate",
    "exchange gradients of",
    "bring gradients of",
    "gather weights of",
    "all-gather weights of",
    "wait for readers of",
    "read gradients of",
    "write gradients of",
    "read states of",
    "write states of",
    "update",
    "update early",
    "stage",
    "states of",
    "new weights of",
    "save",
    "wait",
]
"""What the names of operations begin with; those of lanes are named so at run time, too.

``gradients of`` on compute puts them into the unit's bucket; on d2h it is their way to the host. ``update early`` runs
inside backward. ``stage``, ``states of`` and ``new weights of`` go to an update on the device and come from there.
``activations of`` takes what a forward saved off the device, ``bring activations of`` takes it back.
``bring gradients of`` takes sums to the device, where those of all ranks are added.
``exchange gradients of``, ``gather weights of`` (new ones), ``all-gather weights of`` (into a slot) and ``wait for
readers of`` are between ranks. ``read old weights of`` is for updates that start from them.
``wait`` is the host's: what is behind it in the row is not submitted before.
"""


class Access(NamedTuple):
    """Bytes [start, stop) of a home or a slot."""

    where: str
    """Its name: ``states of model.layers.3``, ``bucket slot 2 of 8192 bytes on device``."""
    start: int
    stop: int


class Operation(NamedTuple):
    """One operation of a lane, or of compute."""

    lane: str
    """``compute``, a lane's name (``h2d``, ``update``), or ``host``. Each runs its operations in this order."""
    kind: Kind
    unit: str
    """Name; "" for the root."""
    nbytes: int
    """What it writes; between ranks, what it gets from others; 0 for forward and backward."""
    after: tuple[int, ...]
    """Indices of operations that come first, ascending. Negative ones count from the end of the step before."""
    slot: int | None = None
    """Where fetched or read weights go: the index among all slots for weights on that tier, smallest first."""
    evicts: str | None = None
    """The unit whose weights were in the slot."""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()

    @property
    def name(self) -> str:
        """``fetch model.layers.3``: comparable with the names in a measured ``Timeline``."""
        return f"{self.kind} {self.unit or 'root'}"

    @property
    def link(self) -> str | None:
        """What it shares with other lanes that move bytes the same way: ``host to device``; None: nothing."""
        return None if self.lane in (COMPUTE, HOST) else Lane(self.lane).route


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One training step among equal ones: it begins when the updates of the step before have been submitted.

    Where slots keep states from disk, the units that need not be read change from step to step; the rest does not.
    """

    operations: tuple[Operation, ...]
    """In the order of submission. Compute and every lane are queues; between them only ``after`` orders."""
    held_device: tuple[str | None, ...] = ()
    """Whose weights each device slot holds when the step begins: of units that the step before did not change."""
    held_host: tuple[str | None, ...] = ()
    """The same of host slots for weights on disk."""

    def moved_bytes(self) -> dict[str, int]:
        """Lane -> bytes written in a step."""
        total: dict[str, int] = {}
        for op in self.operations:
            total[op.lane] = total.get(op.lane, 0) + op.nbytes
        return total

    def to_text(self) -> str:
        """A line per operation: index, lane, name, bytes, slot with the unit evicted from it, what it comes after."""
        rows = [_cells(i, op) for i, op in enumerate(self.operations)]
        widths = [max((len(cell) for cell in column), default=0) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        held = {"device": self.held_device, "host": self.held_host}
        begin = [f"{tier} slot {i} holds {u}\n" for tier, units in held.items() for i, u in enumerate(units) if u]
        return "".join([*begin, *(line.rstrip() + "\n" for line in lines)])


def _cells(index: int, op: Operation) -> tuple[str, ...]:
    slot = "" if op.slot is None else f"slot {op.slot}" + (f", was {op.evicts}" if op.evicts is not None else "")
    after = "after " + " ".join(map(str, op.after)) if op.after else ""
    return (f"{index:>3}", op.lane, op.name, f"{op.nbytes} B" if op.nbytes else "", slot, after)
