"""How long an operation takes on an otherwise idle machine, and what it shares with other operations.

[Note: links] Operations that use the same path share a link, whatever their lane. ``h2d`` serves fetches, weights that
are written back, and states on their way to an update on the device. ``disk_read`` and ``disk_write`` serve weights and
states. Links in turn may share something (``Shared``): the two directions of a bus, reading and writing of one drive,
or host memory.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, get_args

from outcore.spec.lane_names import Lane
from outcore.spec.layout import update_cost_numel, weights_home
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.schedule import Operation
from outcore.spec.timeline import COMPUTE, HOST

Link = Literal[
    "compute", "h2d", "d2h", "disk_read", "disk_write", "update", "device_update", "reduce", "gather", "link"
]
LINKS: tuple[Link, ...] = get_args(Link)
Way = Literal["gather", "host gather", "copies", "host copies", "link", "node link"]
"""Ways of weights between ranks. ``gather``: new weights to all ranks. ``copies``: new weights to the ranks that have
the same part. ``link``: parts that are put together. ``host``: through host memory. ``node``: among ranks of a node."""

LINK_OF: Mapping[str, Link] = {
    COMPUTE: "compute",
    Lane.H2D.value: "h2d",
    Lane.WRITE_BACK.value: "h2d",
    Lane.STATES_H2D.value: "h2d",
    Lane.D2H.value: "d2h",
    Lane.STATES_D2H.value: "d2h",
    Lane.WEIGHTS_READ.value: "disk_read",
    Lane.STATES_READ.value: "disk_read",
    Lane.DISK_WRITE.value: "disk_write",
    Lane.STATES_WRITE.value: "disk_write",
    Lane.SAVE.value: "disk_write",
    Lane.UPDATE.value: "update",
    Lane.DEVICE_UPDATE.value: "device_update",
    Lane.REDUCE.value: "reduce",
    Lane.GATHER.value: "gather",
    Lane.LINK.value: "link",
}
"""Lane -> its link."""


@dataclass(frozen=True, kw_only=True)
class Shared:
    """Something that several links use, such as host memory. Each link at full speed takes a part of it."""

    name: str
    """Such as ``host memory``."""
    parts: Mapping[Link, float]
    """Link -> the part that it takes at full speed. Links slow each other down only if their parts exceed 1 in sum.

    Parts above 1 say that links move less together than one of them alone, as drives may that read and write at once.
    A link that is alone has its full speed nevertheless.
    """

    def least_s(self, seconds: Mapping[str, Any]) -> Any:
        """Return the least time for some work.

        Args:
            seconds: Link -> seconds of its work, alone at full speed; numbers, or arrays of equal shape.
        """
        return sum(min(part, 1.0) * seconds.get(link, 0.0) for link, part in self.parts.items())


@dataclass(frozen=True, kw_only=True)
class Rates:
    """How fast a machine is with a model. Operations without a rate take no time."""

    forward_s: Mapping[str, float]
    """Unit -> seconds of its forward over one micro-batch."""
    backward_s: Mapping[str, float]
    """Unit -> seconds of its backward over one micro-batch, without recompute."""
    bytes_per_s: Mapping[str, float] = field(default_factory=dict)
    """``h2d``, ``d2h``, ``disk_read``, ``disk_write`` -> bandwidth; ``compute``: of copies on the device; ``update``:
    of gradients accumulated in host memory; ``reduce`` and each ``Way``: see ``timing.ranks``."""
    parameters_per_s: Mapping[str, float] = field(default_factory=dict)
    """``update`` (by the CPU), ``device_update`` (states from host memory, beside compute), ``compute`` (states that
    live on the device, in ``step()``), ``plain`` (the same by ``torch.optim``, in a plain plan) -> parameters updated
    per second."""
    selected_forward_s: Mapping[str, float] = field(default_factory=dict)
    """Unit -> seconds of forward that policy ``select`` computes again."""
    product_flops_per_s: float = math.inf
    """FLOP/s of matrix products in bf16, of which some updates on the device consist."""
    latency_s: Mapping[str, float] = field(default_factory=dict)
    """Link -> seconds that every operation takes in addition."""
    shared: tuple[Shared, ...] = ()
    """Everything that links share."""
    beside_compute: Mapping[Link, tuple[float, float]] = field(default_factory=dict)
    """Link -> the parts of their speeds that compute and the link keep while both run, where the host computes."""
    visit_s: float = 0.0
    """Seconds that the engine takes on the submitting thread for every visit of a unit."""
    resting_visit_s: float | None = None
    """The same for a unit whose data all rests on the device; None: ``visit_s``."""
    launch_s: Mapping[str, float] = field(default_factory=dict)
    """Unit -> seconds that the submitting thread takes to launch the kernels of one forward on an accelerator."""
    host_runs_ahead: bool = True
    """Whether compute runs asynchronously, as on an accelerator. False: the submitting thread computes."""

    @cached_property
    def known(self) -> dict[Hashable, Any]:
        """Cache of results that were computed with these rates."""
        return {}

    def __getstate__(self) -> dict[str, object]:  # another process fills a cache of its own
        return {name: value for name, value in self.__dict__.items() if name != "known"}

    def move_s(self, link: Link | Way, nbytes: int) -> float:
        """Return the seconds to move bytes, alone."""
        return nbytes / self.bytes_per_s.get(link, math.inf) + (self.latency_s.get(link, 0.0) if nbytes else 0.0)

    def exchange_s(self, spec: UnitSpec) -> float:
        """Return the seconds in which a rank receives its run of a unit's gradients from all others, alone."""
        return self.move_s("reduce", spec.others_bytes)

    def gather_s(self, spec: UnitSpec, plan: UnitPlan) -> float:
        """Return the seconds in which a rank receives new weights from the ranks that have the same runs, alone.

        They are exchanged in host memory if they are updated there, or if ranks share a copy there.
        """
        if spec.num_ranks == 1:
            return 0.0
        home = weights_home(spec, plan)
        way: Way = "gather" if home.trained_sharers == 1 else "copies"
        where: Way = ("host gather" if way == "gather" else "host copies") if _gathers_on_host(plan) else way
        return self.move_s(where, (home.num_copies - 1) * spec.run_bytes)

    def link_s(self, spec: UnitSpec, plan: UnitPlan) -> float:
        """Return the seconds in which a rank receives the other sharers' runs of cut weights, alone."""
        if spec.num_ranks == 1:
            return 0.0
        home = weights_home(spec, plan)
        nbytes = spec.weight_bytes - home.nbytes if home.is_cut else 0
        return self.move_s("node link" if plan.partition == "node" else "link", nbytes)

    def add_s(self, link: Link, spec: UnitSpec) -> float:
        """Return the seconds to accumulate the gradients of all ranks, alone."""
        return self.move_s("compute" if link == "device_update" else link, spec.num_ranks * spec.update_bytes)

    def update_s(self, link: Link | Literal["plain"], spec: UnitSpec, plan: UnitPlan) -> float:
        """Return the seconds to update a unit, alone."""
        is_on_host = link == "update"
        numel = update_cost_numel(spec, plan) if is_on_host else spec.trainable_numel
        seconds = numel / self.parameters_per_s.get(link, math.inf) + (self.latency_s.get(link, 0.0) if numel else 0.0)
        return seconds if is_on_host else seconds + spec.update_flops / self.product_flops_per_s


class OperationTimes:
    """Seconds of the operations of a plan."""

    def __init__(self, model: ModelSpec, plan: Plan, rates: Rates, *, clips: bool = False) -> None:
        """Args: clips: Norms of gradients are computed before these leave the device."""
        self._rates, self._takes_norms = rates, clips and model.units[0].num_ranks == 1
        self._specs = {spec.name: spec for spec in model.units}
        self._plans = {unit.name: unit for unit in plan.units}
        forward_s = {"keep": {}, "select": rates.selected_forward_s, "recompute": rates.forward_s}
        self._again_s = {unit.name: forward_s[unit.policy].get(unit.name, 0.0) for unit in plan.units}
        self._is_plain = plan.plain
        self._pieces = model.micro_batches_in_unit

    def seconds(self, op: Operation) -> float:
        """Return the seconds that an operation takes alone."""
        if op.lane == HOST:
            return 0.0
        if op.kind in ("forward", "inference"):
            return self.forward_s(op.unit)
        if op.kind == "backward":
            return self.backward_s(op.unit)
        if op.kind == "gradients of" and op.lane == COMPUTE:
            return self.collect_s(op.unit, op.nbytes)
        return self._work_s(op, LINK_OF[op.lane])

    def _work_s(self, op: Operation, link: Link) -> float:
        """Return the seconds of an operation that is no visit."""
        rates, spec, plan = self._rates, self._specs[op.unit], self._plans[op.unit]
        if op.kind in ("update", "update early"):
            return rates.update_s("plain" if self._is_plain else link, spec, plan) if op.nbytes else 0.0
        if op.kind == "gather weights of":
            return rates.gather_s(spec, plan)
        if link == "link":
            return rates.link_s(spec, plan)
        if op.kind == "accumulate" and link != "compute":
            return rates.add_s(link, spec)
        # An update on the device writes its new weights there by a copy at the speed of compute's copies.
        return rates.move_s("compute" if link == "device_update" else link, op.nbytes)

    def forward_s(self, unit: str) -> float:
        """Return the seconds of one visit."""
        return self._rates.forward_s.get(unit, 0.0) / self._visits(unit) + self._visit_s(unit)

    def backward_s(self, unit: str) -> float:
        """Return the seconds of one visit, with recompute where the plan asks for it."""
        seconds = self._again_s[unit] + self._rates.backward_s.get(unit, 0.0)
        return seconds / self._visits(unit) + self._visit_s(unit)

    def collect_s(self, unit: str, nbytes: int) -> float:
        """Return the seconds to copy gradients into a bucket, and to read them again for norms in one of the visits."""
        copied_s = self._rates.move_s("compute", nbytes)
        return copied_s + (0.5 * copied_s / self._visits(unit) if self._takes_norms else 0.0)

    def _visits(self, unit: str) -> int:
        """Return the number of visits in which a unit runs one micro-batch, piece by piece; the root has one."""
        return self._pieces if unit else 1

    def launch_s(self, unit: str, phase: str) -> float:
        """Return the seconds in which the host launches the kernels of a visit.

        A backward takes as long as a forward. Recompute takes as long again. If nothing is recomputed, hooks on each
        kept tensor take as long, as measured. In a plain plan there are no hooks.
        """
        times = 2 if phase == "backward" and (self._again_s[unit] or not self._is_plain) else 1
        return times * self._rates.launch_s.get(unit, 0.0)

    def host_visit_s(self, unit: str) -> float:
        """Return the seconds of the engine for a visit; 0 in a plain plan, whose loop runs unchanged."""
        if self._is_plain:
            return 0.0
        resting_s = self._rates.resting_visit_s
        if resting_s is not None and self._specs[unit].num_ranks == 1 and self._plans[unit].rests_on_device:
            return resting_s
        return self._rates.visit_s

    def gathers_on_host(self, unit: str) -> bool:
        """Return whether new weights come from other ranks in host memory."""
        return _gathers_on_host(self._plans[unit])

    def _visit_s(self, unit: str) -> float:
        return 0.0 if self._rates.host_runs_ahead else self.host_visit_s(unit)


def _gathers_on_host(plan: UnitPlan) -> bool:
    return plan.is_updated_on_host or plan.gather == "host"
