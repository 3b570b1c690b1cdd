"""A plan: where every byte lives and how units run. Plain data with a JSON form that can be saved and edited."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from outcore.core.errors import ConfigError
from outcore.core.quantities import PAGE_BYTES, format_bytes
from outcore.spec.model import PRECISIONS, Precision
from outcore.spec.text_file import Described, fields_of

Tier = Literal["device", "host", "disk"]
TIERS: tuple[Tier, ...] = ("device", "host", "disk")
AwayTier = Literal["host", "disk"]
Policy = Literal["keep", "select", "recompute"]
POLICIES: tuple[Policy, ...] = ("keep", "select", "recompute")
Partition = Literal["replicate", "node", "world"]
PARTITIONS: tuple[Partition, ...] = ("replicate", "node", "world")
Gather = Literal["link", "host"]
PoolKind = Literal[
    "weights",
    "bucket",
    "received",
    "sums",
    "scratch",
    "staging",
    "new_weights",
    "states",
    "gradients",
    "landing",
    "activations",
    "temporary",
]

_KINDS_BY_TIER: dict[Tier, tuple[PoolKind, ...]] = {
    "device": ("weights", "bucket", "received", "sums", "scratch", "staging", "activations", "temporary"),
    "host": ("weights", "new_weights", "states", "gradients", "landing", "activations", "temporary"),
}
MAX_SLOTS = 1024

PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """Home tiers and activation policy of one unit.

    Optimizer states on the device need weights and gradients there too: the update then runs on the device without any
    transfer. Every other combination is legal.
    """

    name: str
    weights: Tier
    gradients: Tier
    states: Tier
    policy: Policy = "recompute"
    """What forward saves. ``keep``: all that autograd would save. ``recompute``: the arguments, from which the block
    runs again in backward. ``select``: the arguments and results of matrix products and attention; backward runs the
    block again without computing these results."""
    activations: Tier = "device"
    """Tier on which saved activations rest until backward."""
    saved_bytes: int = 0
    """Room on host or disk for what one call saves. A call that saves more is recomputed."""
    update: Literal["host", "device"] = "host"
    """Where states in host memory are updated: by worker threads on the host, or by the device, through which they then
    pass. With ``device`` neither weights nor gradients may live on disk. States on the device are always updated there,
    states on disk on the host."""
    early: bool = False
    """Update inside backward, as soon as the last gradient is there, into second homes of states and weights. These
    become the first ones if ``step()`` asks for the same update. Needs a promise of ``accumulation_steps``."""
    partition: Partition = "replicate"
    """Ranks over which weights are cut. ``replicate``: each rank has all. ``node``: the ranks of one machine have them
    together. ``world``: all ranks have them together. If that is a single rank, it has all."""
    gather: Gather = "link"
    """How cut weights come together. ``link``: each rank brings its part to the device, and the devices exchange them;
    so all ranks must visit the same units. ``host``: the ranks of a machine share one copy in host memory, and each
    fetches whole units from it, whichever it visits."""

    @property
    def is_updated_on_host(self) -> bool:
        """Whether worker threads update the unit."""
        return self.states != "device" and self.update == "host"

    @property
    def rests_on_device(self) -> bool:
        """Whether everything rests on the device, whole on each rank, so that nothing moves."""
        homes = (self.weights, self.gradients, self.states, self.activations)
        return self.partition == "replicate" and all(tier == "device" for tier in homes)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ConfigError(f"plan: expected a unit's name as a string, but got {self.name!r}")
        where = f"plan, unit '{self.name}'"
        for field in ("weights", "gradients", "states"):
            _one_of(getattr(self, field), TIERS, f"{where}: {field}")
        _one_of(self.policy, POLICIES, f"{where}: policy")
        self._check_activations(where)
        if self.states == "device" and not self.weights == self.gradients == "device":
            raise ConfigError(
                f"{where}: states on the device need weights and gradients on the device too, but got "
                f"weights={self.weights}, gradients={self.gradients}; move the states to host or disk"
            )
        self._check_update(where)
        self._check_partition(where)
        if self.name == "" and self.weights != "device":
            raise ConfigError(
                f"plan: the root unit's weights are always resident, expected 'device', but got '{self.weights}'"
            )

    def _check_partition(self, where: str) -> None:
        _one_of(self.partition, PARTITIONS, f"{where}: partition")
        _one_of(self.gather, ("link", "host"), f"{where}: gather")
        if self.name == "" and self.partition != "replicate":
            raise ConfigError(
                f"plan: the root unit's weights are always whole on each rank, expected partition 'replicate', but got "
                f"'{self.partition}'"
            )
        if self.gather == "host" and (self.partition != "node" or self.weights != "host"):
            raise ConfigError(
                f"{where}: gather 'host': expected weights in host memory with partition 'node', of which the ranks of "
                f"a machine share one copy, but got weights={self.weights}, partition={self.partition}; set gather to "
                "'link', or change the others"
            )

    def _check_activations(self, where: str) -> None:
        _one_of(self.activations, TIERS, f"{where}: activations")
        _whole_number(self.saved_bytes, 0, f"{where}: saved_bytes")
        if self.saved_bytes % PAGE_BYTES:
            raise ConfigError(f"{where}: expected saved_bytes in multiples of {PAGE_BYTES}, but got {self.saved_bytes}")
        if (self.activations != "device") != (self.saved_bytes > 0):
            raise ConfigError(
                f"{where}: expected saved_bytes > 0 where activations leave the device, and only there, but got "
                f"{self.saved_bytes} with activations on {self.activations}"
            )
        if self.activations != "device" and not self.name:
            raise ConfigError(
                f"{where}: expected activations on the device, where those of the root stay, but got "
                f"'{self.activations}'"
            )

    def _check_update(self, where: str) -> None:
        _one_of(self.update, ("host", "device"), f"{where}: update")
        if self.update == "device" and (self.states != "host" or "disk" in (self.weights, self.gradients)):
            raise ConfigError(
                f"{where}: update on the device: expected states in host memory, and weights and gradients there or "
                f"on the device, but got weights={self.weights}, gradients={self.gradients}, states={self.states}; "
                "set update to 'host'"
            )
        if self.update == "device" and self.early:
            raise ConfigError(f"{where}: expected either early or an update on the device, but got both; choose one")
        if not isinstance(self.early, bool):
            raise ConfigError(f"{where}: early: expected true or false, but got {self.early!r}")
        if self.early and self.states == "device":
            raise ConfigError(
                f"{where}: early: expected states on host or disk, but they are on the device, where an update waits "
                "for no transfer; set early to false"
            )


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Equal slots on one tier that units take turns in.

    Kinds on the device:

    * ``weights``: fetched weights of a unit, in the weights layout.
    * ``bucket``: gradients of one backward pass.
    * ``received``: with several ranks, what all of them have sent for one rank's run.
    * ``sums``: room to add that up on the device, if the sum rests in host memory.
    * ``scratch``: blocks of an update on the device.
    * ``staging``: all that an update on the device of states from host memory needs.
    * ``activations``: what forward saved, brought back for backward.
    * ``temporary``: tensors that an update makes and drops. It is counted, but no memory is taken beforehand.

    Kinds on the host:

    * ``weights``: weights on their way from or to disk.
    * ``new_weights``: trainable weights after an update, if their home is elsewhere.
    * ``states``: all states of a unit, if their home is disk.
    * ``gradients``: accumulated gradients, if their home is elsewhere.
    * ``landing``: a bucket on its way to be accumulated.
    * ``activations``: what forward saved, on its way from or to disk.
    * ``temporary``: as on the device.
    """

    tier: Tier
    kind: PoolKind
    slot_bytes: int
    num_slots: int

    def __post_init__(self) -> None:
        _one_of(self.tier, tuple(_KINDS_BY_TIER), "plan, pools: tier")
        _one_of(self.kind, _KINDS_BY_TIER[self.tier], f"plan, pools on {self.tier}: kind")
        where = f"plan, pool '{self.kind}' on {self.tier}"
        _whole_number(self.slot_bytes, 1, f"{where}: slot_bytes")
        _whole_number(self.num_slots, 1, f"{where}: num_slots")
        if self.slot_bytes % PAGE_BYTES:
            raise ConfigError(f"{where}: expected slot_bytes in multiples of {PAGE_BYTES}, but got {self.slot_bytes}")
        if self.num_slots > MAX_SLOTS:
            raise ConfigError(f"{where}: expected num_slots <= {MAX_SLOTS}, but got {self.num_slots}")

    @property
    def total_bytes(self) -> int:
        """Bytes of all slots together."""
        return self.slot_bytes * self.num_slots


@dataclass(frozen=True, kw_only=True)
class Plan(Described):
    """Where bytes live and when they move. A plan never changes the result."""

    what: ClassVar[str] = "plan"
    _table: ClassVar[Any] = None

    precision: Precision
    units: tuple[UnitPlan, ...]
    """Plans of all units: the root first, then in module order."""
    pools: tuple[Pool, ...]
    prefetch_depth: int
    """Number of visits before its use at which a fetch can begin, where slots allow. Fewer may save fetches."""
    updated_first: tuple[str, ...] = ()
    """Units whose updates ``step()`` begins with, in this order. The others follow in the order of their next use."""
    kept_updated_first: bool = True
    """Whether ``step()`` begins with the units whose states are still in the slots through which they went to disk, so
    that these are not read again. False: they come in their turn. Most slots are taken by then, so most are read."""
    accumulation_steps: int | None = None
    """Micro-batches per step if promised, else None: any number."""
    micro_batches_in_unit: int = 1
    """Number of pieces in which units run a batch. Pieces round differently than the whole batch, so a caller that
    obeys the plan must ask for the same number."""
    kept_bytes: int = 0
    """Device bytes, in addition to the plan's own, in which calls of units with policy ``recompute`` may keep their
    activations instead. A call that finds no room there is recomputed."""
    workspace_bytes: int = 0
    """Most device bytes that activations and workspace of the largest micro-batch take, in addition to those that the
    plan lists by unit and pool; 0: not known."""
    plain: bool = False
    """True if everything rests on the device in the form in which autograd makes it: gradients are autograd's own
    tensors, and a call that keeps its activations is the module's own forward."""
    tier_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Tier -> bytes that this plan takes there. Informative only; recomputed when the plan is used."""
    version: int = PLAN_VERSION

    def __post_init__(self) -> None:
        if self.version != PLAN_VERSION:
            raise ConfigError(
                f"plan: expected version {PLAN_VERSION}, but got {self.version!r}; "
                "make the plan again with this version of outcore"
            )
        _one_of(self.precision, PRECISIONS, "plan: precision")
        _whole_number(self.prefetch_depth, 0, "plan: prefetch_depth")
        if self.accumulation_steps is not None:
            _whole_number(self.accumulation_steps, 1, "plan: accumulation_steps (null: any number)")
        _whole_number(self.micro_batches_in_unit, 1, "plan: micro_batches_in_unit")
        _whole_number(self.kept_bytes, 0, "plan: kept_bytes")
        _whole_number(self.workspace_bytes, 0, "plan: workspace_bytes")
        for name in ("kept_updated_first", "plain"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"plan: {name}: expected true or false, but got {getattr(self, name)!r}")
        if not isinstance(self.tier_bytes, Mapping):
            raise ConfigError(f"plan: expected tier_bytes as an object, but got {self.tier_bytes!r}")
        names = [u.name for u in self.units]
        if len(set(names)) != len(names):
            twice = min(name for name in names if names.count(name) > 1)
            raise ConfigError(f"plan: expected every unit once, but '{twice}' is named twice; remove one of them")
        self._check_updated_first()

    def _check_updated_first(self) -> None:
        left = {unit.name for unit in self.units}
        for i, name in enumerate(self.updated_first):
            if isinstance(name, str) and name in left:
                left.remove(name)
            else:
                expected = "plan: updated_first: expected names of units of the plan, each once"
                raise ConfigError(f"{expected}, but got {name!r} at place {i}")

    def __str__(self) -> str:
        """Return the table of all bytes; of a plan that belongs to no model, the sums that it names."""
        if self._table is not None:
            return str(self._table())
        sums = (f"{tier}  {format_bytes(nbytes)}" for tier, nbytes in self.tier_bytes.items())
        return "\n".join([*sums, f"precision {self.precision}, {len(self.units)} units"])

    @property
    def rests_on_device(self) -> bool:
        """Whether everything rests on the device, so that nothing moves."""
        return all(unit.rests_on_device for unit in self.units)

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan") -> Self:
        """Read a plan from JSON text.

        Raises:
            ConfigError: The text is not JSON, a key is missing or unknown, or a value is wrong.
        """
        data = cls._fields_in(text, where)
        for name, kind in {"units": UnitPlan, "pools": Pool}.items():
            rows = _list(data, name, where)
            data[name] = tuple(kind(**fields_of(kind, row, f"{where}: {name}")) for row in rows)
        if "updated_first" in data:
            data["updated_first"] = tuple(_list(data, "updated_first", where))
        return cls(**data)


def shown_by(plan: Plan, table: Callable[[], str]) -> Plan:
    """Return the same plan, with what it prints as. Args: table: Knows the model, which a plan does not."""
    shown = copy.copy(plan)
    object.__setattr__(shown, "_table", table)
    return shown


def _one_of(value: object, allowed: tuple[str, ...], what: str) -> None:
    if value not in allowed:
        raise ConfigError(f"{what}: expected one of {', '.join(allowed)}, but got {value!r}")


def _whole_number(value: object, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what}: expected a whole number >= {least}, but got {value!r}")


def _list(data: dict[str, Any], key: str, where: str) -> list[Any]:
    items = data[key]
    if not isinstance(items, list):
        raise ConfigError(f"{where}: expected a list under '{key}', but got {type(items).__name__}")
    return items
