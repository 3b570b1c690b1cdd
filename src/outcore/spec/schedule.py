"""A schedule: the operations of one training step in order, and what each waits for. Plain data with a text form."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from outcore.spec.lane_names import Lane
from outcore.spec.model import ModelSpec
from outcore.spec.timeline import COMPUTE, HOST


class Phase(enum.Enum):
    """Why a unit's weights are needed."""

    FORWARD = "forward"
    INFERENCE = "inference"
    """A forward without gradients: evaluation, generation."""
    BACKWARD = "backward"


ROOT = 0
"""Index of the root in a plan's order."""


class Visit(NamedTuple):
    """One use of a unit by compute, for which its weights must be on the device."""

    phase: Phase
    unit: int
    """Index in the plan's order."""


def usual_visits(model: ModelSpec, micro_batches: int = 1) -> tuple[Visit, ...]:
    """Return the visits to expect of an unknown loop: each forward uses every unit once, in module order.

    Pieces of a batch are visits in a row. The root's visits stand between forward and backward, where its head and the
    loss are.
    """
    units = [i for i in range(1, len(model.units)) for _ in range(model.micro_batches_in_unit)]
    forward = (*(Visit(Phase.FORWARD, i) for i in units), Visit(Phase.FORWARD, ROOT))
    backward = (Visit(Phase.BACKWARD, ROOT), *(Visit(Phase.BACKWARD, i) for i in reversed(units)))
    return (forward + backward) * micro_batches


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
"""First words of the names of operations. Operations on lanes have the same names at run time.

``gradients of`` on compute puts gradients into the unit's bucket; on d2h it takes them to the host. ``update early``
runs inside backward. ``stage`` brings an update on the device what it needs; ``states of`` and ``new weights of`` take
its results home. ``activations of`` takes what a forward saved off the device, ``bring activations of`` brings it back.
``bring gradients of`` takes sums to the device, where the gradients of all ranks are added to them.
``exchange gradients of``, ``gather weights of`` (new weights), ``all-gather weights of`` (into a slot) and ``wait for
readers of`` run between ranks. ``read old weights of`` serves updates that start from the weights.
``wait`` is done by the host: operations that follow it in the order of submission are submitted only when it is over.
"""


class Access(NamedTuple):
    """Bytes [start, stop) of a home or a slot."""

    where: str
    """Name of the home or slot: ``states of model.layers.3``, ``bucket slot 2 of 8192 bytes on device``."""
    start: int
    stop: int


class Operation(NamedTuple):
    """One operation of a lane, or of compute."""

    lane: str
    """``compute``, a lane's name (``h2d``, ``update``), or ``host``. Each runs its operations in schedule order."""
    kind: Kind
    unit: str
    """Name of the unit; "" for the root."""
    nbytes: int
    """Bytes that it writes; between ranks, bytes that it gets from others; 0 for forward and backward."""
    after: tuple[int, ...]
    """Indices of operations that must come first, ascending. Negative ones count from the end of the step before."""
    slot: int | None = None
    """Slot for fetched or read weights: an index among all slots for weights on that tier, smallest first."""
    evicts: str | None = None
    """Unit whose weights were in the slot."""
    reads: tuple[Access, ...] = ()
    writes: tuple[Access, ...] = ()

    @property
    def name(self) -> str:
        """A name such as ``fetch model.layers.3``, comparable with the names in a measured ``Timeline``."""
        return f"{self.kind} {self.unit or 'root'}"

    @property
    def link(self) -> str | None:
        """Route that its lane shares with other lanes, such as ``host to device``; None: it shares nothing."""
        return None if self.lane in (COMPUTE, HOST) else Lane(self.lane).route


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One training step in a row of equal ones. It begins when the updates of the step before have been submitted.

    If slots keep states from disk, the units whose states need not be read differ from step to step. All else is equal.
    """

    operations: tuple[Operation, ...]
    """Operations in the order of submission. Compute and every lane are queues; between them only ``after`` orders."""
    held_device: tuple[str | None, ...] = ()
    """Unit whose weights each device slot holds when the step begins, if the step before did not change them."""
    held_host: tuple[str | None, ...] = ()
    """The same for host slots for weights on disk."""

    def moved_bytes(self) -> dict[str, int]:
        """Return lane -> bytes of its operations in a step."""
        total: dict[str, int] = {}
        for op in self.operations:
            total[op.lane] = total.get(op.lane, 0) + op.nbytes
        return total

    def to_text(self) -> str:
        """Return one line per operation: index, lane, name, bytes, slot, evicted unit, and what it comes after."""
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
