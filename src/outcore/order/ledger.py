"""Records of the last writer of bytes and of their readers since: homes of a unit, and slots that units take turns in.

``H`` stands for a submitted operation: a handle in a run, an entry of a schedule on paper.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, Union

from outcore.spec.layout import CODES, has_master, states_bytes, states_of, weights_home
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Tier, UnitPlan


class OnLane(Protocol):
    """A submitted operation."""

    @property
    def lane(self) -> str:
        """Its lane's name."""


H = TypeVar("H", bound=OnLane)
Dependency = Union[H, Iterable[Union[H, None]], None]  # noqa: UP007 (evaluated, and H is no class)
After = Mapping[str, Dependency[H]]
"""Label -> operations that must be over first. Labels are short phrases: ``slot free``, ``weights written``."""


def newest(handles: Iterable[H]) -> list[H]:
    """Return the last operation of each lane. What comes after these comes after all of them.

    This keeps lists of readers short. Dropping handles that are ``done`` would, too, but not in the same way each time.

    Args:
        handles: Operations in the order of submission.
    """
    return list({handle.lane: handle for handle in handles}.values())


class ByteSpan(NamedTuple):
    """The bytes [start, stop) of a home or a slot."""

    of: Home[Any] | Slot[Any]
    start: int
    stop: int
    nbytes: int
    """Number of bytes."""
    memory: Any
    """Buffer or extent in a run; None on paper."""

    def part(self, start: int, stop: int) -> ByteSpan:
        """Return the bytes [start, stop) of a span that begins where its home or slot does."""
        return ByteSpan(
            self.of, start, stop, stop - start, None if self.memory is None else self.memory.part(start, stop)
        )


@dataclass(slots=True, eq=False)
class Home(Generic[H]):
    """Place where bytes of one kind rest.

    A reader waits for the last writer. A writer waits for the last writer and for all readers since.
    """

    name: str
    """Name such as ``next states of model.layers.3``."""
    kind: str
    """``weights``, ``gradients``, ``states`` or ``activations``, for labels."""
    tier: Tier
    nbytes: int
    memory: Any = None
    """Buffer or extent in a run. None if there are no bytes, and on paper."""
    ready: H | None = None
    readers: list[H] = field(default_factory=list)

    def span(self, start: int = 0, stop: int | None = None) -> ByteSpan:
        """Return the bytes [start, stop) of the home; all of them by default."""
        stop, memory = self.nbytes if stop is None else stop, self.memory
        if memory is not None and stop - start != self.nbytes:
            memory = memory.part(start, stop)
        return ByteSpan(self, start, stop, stop - start, memory)

    def before_read(self) -> dict[str, Dependency[H]]:
        """Return what a reader waits for."""
        return {f"{self.kind} written": self.ready}

    def before_write(self) -> dict[str, Dependency[H]]:
        """Return what a writer waits for."""
        return {f"{self.kind} written": self.ready, f"{self.kind} read": self.readers}

    def read_by(self, reader: H) -> None:
        """Note that a reader was submitted."""
        self.readers = newest([*self.readers, reader]) if self.readers else [reader]

    def written_by(self, writer: H) -> None:
        """Note that a writer was submitted, which comes after ``before_write``."""
        self.ready, self.readers = writer, []

    def perhaps_written_by(self, writer: H) -> None:
        """Note a writer that may be skipped. Readers are kept: a skipped writer does not wait for them."""
        self.ready = writer


@dataclass(slots=True, eq=False)
class Slot(Generic[H]):
    """Bytes that units take turns in."""

    name: str
    """Name such as ``bucket slot 2 of 8192 bytes on device``."""
    tier: Tier
    nbytes: int
    memory: Any = None
    """Buffer in a run; None on paper."""
    free_after: list[H] = field(default_factory=list)
    """Operations that must be over before its bytes may be overwritten."""
    ready: H | None = None
    """Operation that brought the weights that it holds."""
    kept: Home[H] | None = None
    """Home on disk of which it still has a copy, while it is idle."""
    kept_after: H | None = None
    """Operation that made the copy."""

    def span(self, stop: int, start: int = 0) -> ByteSpan:
        """Return the bytes [start, stop) of the slot."""
        memory = self.memory
        is_part = memory is not None and stop - start != self.nbytes
        return ByteSpan(self, start, stop, stop - start, memory.part(start, stop) if is_part else memory)


class Ledger(Generic[H]):
    """The homes of one unit, and what else the order of a step must remember about the unit."""

    def __init__(self, index: int, spec: UnitSpec, plan: UnitPlan, model: ModelSpec) -> None:
        """Args: index: Index of the unit in the plan's order."""
        self.index, self.spec, self.plan = index, spec, plan
        self.name = spec.name or "root"  # for messages
        self.cut = weights_home(spec, plan)
        self.state_specs = states_of(spec, plan, model)
        self.has_master = has_master(plan, model.precision)
        nbytes = states_bytes(spec, plan, model)
        of = f"of {self.name}"
        self.weights: Home[H] = Home(f"weights {of}", "weights", plan.weights, self.cut.nbytes)
        self.gradients: Home[H] = Home(f"gradients {of}", "gradients", plan.gradients, spec.update_bytes)
        self.states: Home[H] = Home(f"states {of}", "states", plan.states, nbytes)
        self.activations: list[Home[H]] = [
            Home(f"activations {of}", "activations", plan.activations, plan.saved_bytes)
            for _ in range(model.micro_batches_in_unit)
        ]
        """Homes of activations, one for each piece in which the unit runs a batch."""
        # Second homes, see [Note: early updates].
        self.next_weights: Home[H] = Home(f"next weights {of}", "weights", "host", spec.trainable_bytes)
        self.next_states: Home[H] = Home(f"next states {of}", "states", plan.states, nbytes)
        self.bucket: TakenSlot[H] | None = None
        """Bucket slot with the gradients of the running pass."""
        self.slot: Slot[H] | None = None
        """Slot on the device that holds the weights, if they live elsewhere."""

    @property
    def starts_from_weights(self) -> bool:
        """Whether an update reads the weights."""
        return not self.has_master or CODES in self.state_specs

    def rest_in(self, kind: str, memory: Any) -> None:
        """Give the homes of one kind their memory. Args: memory: Buffer or extent for all of them."""
        if kind != "activations":
            getattr(self, kind).memory = memory
            return
        for i, home in enumerate(self.activations):
            home.memory = memory.part(i * home.nbytes, (i + 1) * home.nbytes)

    @property
    def homes(self) -> tuple[Home[H], ...]:
        """All homes but those of activations."""
        return self.weights, self.gradients, self.states, self.next_weights, self.next_states

    def close(self) -> None:
        """Forget where the bytes are, so that their memory can be given back."""
        for home in (*self.homes, *self.activations):
            home.memory = None
        self.slot = None

    def weights_on_device(self) -> ByteSpan | None:
        """Return where the weights are on the device now, or None if they are not."""
        if self.cut.is_resident:
            return self.weights.span() if self.weights.nbytes else None
        return None if self.slot is None else self.slot.span(self.slot.nbytes)


class TakenSlot(NamedTuple, Generic[H]):
    """A slot, and the pool to which it is to be given back."""

    pool: Any
    slot: Slot[H]


class _HomePart(NamedTuple, Generic[H]):
    """The bytes [start, stop) of a home, as a home of their own."""

    start: int
    stop: int
    home: Home[H]


class HomeParts(Generic[H]):
    """The parts of each home that were taken last. They do not overlap."""

    def __init__(self) -> None:
        self._parts: dict[Home[H], list[_HomePart[H]]] = {}

    def gaps(self, home: Home[H], is_needed: Callable[[Home[H]], bool]) -> Iterator[tuple[int, int]]:
        """Yield the free ranges [start, stop) of a home. Args: is_needed: Whether the bytes of a part may be read."""
        end = 0
        for part in sorted(self._parts.get(home, []), key=lambda part: part.start):
            if is_needed(part.home):
                yield end, part.start
                end = part.stop
        yield end, home.nbytes

    def take(
        self, homes: Sequence[Home[H]], nbytes: int, is_needed: Callable[[Home[H]], bool]
    ) -> tuple[Home[H], list[Home[H]]]:
        """Take the first range of ``nbytes`` that is free. Returns it as a home, and the parts that it takes over."""
        gaps = ((home, *gap) for home in homes for gap in self.gaps(home, is_needed))
        home, start = next((home, start) for home, start, stop in gaps if stop - start >= nbytes)
        parts, stop = self._parts.setdefault(home, []), start + nbytes
        over = [part for part in parts if part.start < stop and start < part.stop]
        before = [part.home for part in over]
        if len(over) == 1 and (over[0].start, over[0].stop) == (start, stop):
            return over[0].home, before
        mine = home if nbytes == home.nbytes else _cut(home, start, stop)
        used = [handle for part in over for handle in (part.home.ready, *part.home.readers) if handle is not None]
        mine.ready, mine.readers = None, newest(used)
        kept = [part for part in parts if part not in over]
        for part in over:  # a writer of what is left of a part comes after the operations that used the whole part
            for bounds in ((part.start, start), (stop, part.stop)):
                if bounds[0] < bounds[1]:
                    left = _cut(home, *bounds)
                    left.ready, left.readers = part.home.ready, part.home.readers
                    kept.append(_HomePart(*bounds, left))
        parts[:] = [*kept, _HomePart(start, stop, mine)]
        return mine, before

    def clear(self) -> None:
        """Drop all parts, so that memory can be given back."""
        self._parts.clear()


def _cut(home: Home[H], start: int, stop: int) -> Home[H]:
    return Home(home.name, home.kind, home.tier, stop - start, home.span(start, stop).memory)
