"""Who wrote bytes last, and who reads them since: homes of a unit, and slots that units take turns in.

``H`` is what stands for a submitted operation: a handle in a run, an entry of a schedule on paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, Union

from outcore.spec.cut import weights_home
from outcore.spec.layout import CODES, has_master, states_bytes, states_of
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Tier, UnitPlan


class OnLane(Protocol):
    """An operation that was submitted."""

    @property
    def lane(self) -> str:
        """Its lane's name."""


H = TypeVar("H", bound=OnLane)
Dependency = Union[H, Iterable[Union[H, None]], None]  # noqa: UP007 (evaluated, and H is no class)
After = Mapping[str, Dependency[H]]
"""Label -> what must have happened first. Labels are short phrases: ``slot free``, ``weights written``."""


def newest(handles: Iterable[H]) -> list[H]:
    """The last operation of each lane, in the order of submission: whoever comes after these comes after all of them.

    Keeps a list of readers short, and unlike a look at ``done`` always in the same way.
    """
    return list({handle.lane: handle for handle in handles}.values())


class Span(NamedTuple):
    """The bytes [start, stop) of a home or a slot."""

    of: Home[Any] | Slot[Any]
    start: int
    stop: int
    nbytes: int
    """How many they are."""
    memory: Any
    """In a run: the buffer or extent."""

    def part(self, start: int, stop: int) -> Span:
        """The bytes [start, stop) of it, which begins where its home or slot does."""
        return Span(self.of, start, stop, stop - start, None if self.memory is None else self.memory.part(start, stop))


@dataclass(slots=True, eq=False)
class Home(Generic[H]):
    """Where bytes of one kind rest. A reader waits for the last writer; a writer for it and for all readers since."""

    name: str
    """Such as ``next states of model.layers.3``."""
    kind: str
    """``weights``, ``gradients``, ``states`` or ``activations``, for labels."""
    tier: Tier
    nbytes: int
    memory: Any = None
    """In a run: the buffer or extent. None where there are no bytes, and on paper."""
    ready: H | None = None
    readers: list[H] = field(default_factory=list)

    def span(self, start: int = 0, stop: int | None = None) -> Span:
        """A part of it."""
        stop, memory = self.nbytes if stop is None else stop, self.memory
        if memory is not None and stop - start != self.nbytes:
            memory = memory.part(start, stop)
        return Span(self, start, stop, stop - start, memory)

    def before_read(self) -> dict[str, Dependency[H]]:
        """What a reader waits for."""
        return {f"{self.kind} written": self.ready}

    def before_write(self) -> dict[str, Dependency[H]]:
        """What a writer waits for."""
        return {f"{self.kind} written": self.ready, f"{self.kind} read": self.readers}

    def read_by(self, reader: H) -> None:
        """An operation that reads was submitted."""
        self.readers = newest([*self.readers, reader]) if self.readers else [reader]

    def written_by(self, writer: H) -> None:
        """An operation that writes was submitted, and came after ``before_write``."""
        self.ready, self.readers = writer, []

    def perhaps_written_by(self, writer: H) -> None:
        """The same of one that may be skipped: then it has waited for nobody, and readers are still there."""
        self.ready = writer


@dataclass(slots=True, eq=False)
class Slot(Generic[H]):
    """Bytes that units take turns in."""

    name: str
    """Such as ``bucket slot 2 on device``."""
    tier: Tier
    nbytes: int
    memory: Any = None
    """In a run: the buffer."""
    free_after: list[H] = field(default_factory=list)
    """What must be done before its bytes may be overwritten."""
    ready: H | None = None
    """What brought the weights that it holds."""
    kept: Home[H] | None = None
    """Of which home on disk it still has a copy, while it is idle."""
    kept_after: H | None = None
    """What made the copy."""

    def span(self, stop: int, start: int = 0) -> Span:
        """Its first bytes, or those after ``start``."""
        memory = self.memory
        is_part = memory is not None and stop - start != self.nbytes
        return Span(self, start, stop, stop - start, memory.part(start, stop) if is_part else memory)


class Ledger(Generic[H]):
    """The homes of one unit, and what the order of a step keeps in mind about it."""

    def __init__(self, index: int, spec: UnitSpec, plan: UnitPlan, model: ModelSpec) -> None:
        """Args: index: In the plan's order."""
        self.index, self.spec, self.plan = index, spec, plan
        self.name = spec.name or "root"  # for people
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
        """One for each call of a batch."""
        # Second homes, see [Note: early updates].
        self.next_weights: Home[H] = Home(f"next weights {of}", "weights", "host", spec.trainable_bytes)
        self.next_states: Home[H] = Home(f"next states {of}", "states", plan.states, nbytes)
        self.bucket: Taken[H] | None = None
        """Where gradients of the pass that is running are on the device."""
        self.slot: Slot[H] | None = None
        """Where the weights are on the device while they live elsewhere."""

    @property
    def starts_from_weights(self) -> bool:
        """Whether an update reads the weights."""
        return not self.has_master or CODES in self.state_specs

    def rest_in(self, kind: str, memory: Any) -> None:
        """Give homes of one kind their memory. Args: memory: Buffer or extent for all of them."""
        if kind != "activations":
            getattr(self, kind).memory = memory
            return
        for i, home in enumerate(self.activations):
            home.memory = memory.part(i * home.nbytes, (i + 1) * home.nbytes)

    def let_go(self) -> None:
        """Forget where bytes are, so that their memory can be given back."""
        whole = self.weights, self.gradients, self.states, self.next_weights, self.next_states
        for home in (*whole, *self.activations):
            home.memory = None
        self.slot = None

    def weights_on_device(self) -> Span | None:
        """Where the weights are on the device now, if they are."""
        if self.cut.is_resident:
            return self.weights.span() if self.weights.nbytes else None
        return None if self.slot is None else self.slot.span(self.slot.nbytes)


class Taken(NamedTuple, Generic[H]):
    """A slot, and the pool to which it is given back."""

    pool: Any
    slot: Slot[H]
