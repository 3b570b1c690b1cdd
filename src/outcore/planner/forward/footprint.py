"""The most that activations and workspace take on the device, for any choice of policies. See [Note: footprint].

[Note: footprint] One step is followed, on shapes alone, in which every unit is recomputed (``forward.activations``). It
tells, visit by visit, how many bytes are alive. Any other choice is worked out from that. What a unit keeps beyond its
arguments comes on top, from its forward to its backward. What leaves is gone, arguments too, when the call after the
next begins ([Note: activations away] in ``order.activations``). It comes back into slots, which the plan lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from outcore.spec.model import ParamSpec
from outcore.spec.plan import Plan, Policy, UnitPlan

STAY = 2
"""The number of latest calls, with the one that runs, whose activations are still on the device."""


@dataclass(frozen=True, kw_only=True)
class SavedBytes:
    """Bytes that one call of a unit saves, by policy: what can leave the device, in multiples of 4 KiB."""

    keep: int
    select: int
    recompute: int
    """Bytes of the arguments that need a gradient."""
    kept: int
    """Bytes that ``keep`` holds where nothing leaves: all arguments and casts of weights, too."""
    cast: int
    """Bytes of the largest cast of a weight. Where ``keep`` leaves the device, backward makes the cast again."""
    small: int = 0
    """Bytes that ``keep`` holds beside that, in storages so small that they stay on the device in any case."""

    @property
    def held(self) -> int:
        """Bytes that ``keep`` takes of the room where nothing leaves."""
        return self.kept + self.small

    def of(self, policy: Policy) -> int:
        """Return the bytes of a policy."""
        found: int = getattr(self, policy)
        return found

    def or_more(self, other: SavedBytes) -> SavedBytes:
        """Return the larger of each field."""
        return SavedBytes(**{f.name: max(getattr(self, f.name), getattr(other, f.name)) for f in fields(self)})


NOTHING = SavedBytes(keep=0, select=0, recompute=0, kept=0, cast=0)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A visit of a unit and what follows it, up to the next one, in a step that recomputes everything."""

    unit: str
    """The unit's name; the root's if no unit has been visited yet."""
    is_backward: bool
    begin_bytes: int
    """Bytes alive when it begins."""
    peak_bytes: int
    """The most bytes alive."""
    select_bytes: int
    """The most bytes alive if this call has kept what is selected, as a whole."""
    keep_bytes: int
    """In forward: the most bytes alive if this call keeps all that autograd saves."""
    made_bytes: int = 0
    """The most bytes that backward through the unit's graph has made at a time, without what was saved for it."""
    again_bytes: int = 0
    """In backward: the most bytes alive while the unit runs again, if what is selected is held beside that."""
    is_first_gone: bool = False
    """In forward: whether the model lets go of its first unit's arguments before the most is alive."""


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one micro-batch saves, and what is alive during its step."""

    saved: Mapping[str, SavedBytes]
    """By unit, without the root: what its largest calls save."""
    steps: Sequence[Step]
    """The visits of the step; empty if it could not be followed."""
    shared_bytes: int = 0
    """Bytes of arguments that several units get: only the first sends them; they stay on the device for the others."""
    pieces: int = 1
    """Calls in which a unit runs the micro-batch."""
    sums: Mapping[str, int] = field(default_factory=dict)
    """By unit: bytes of the sum of its gradients over several pieces. It is outside of the plan's memory, on the
    device, where gradients live there."""
    loose_bytes: int = 0
    """Bytes of single numbers, each in a block of its own. The loop may hold them from the step before, too."""

    def with_loss(self, nbytes: int) -> Footprint:
        """Add bytes that are alive between the last forward and the first backward."""
        steps = list(self.steps)
        first = next((i for i, step in enumerate(steps) if step.is_backward), 0)
        if first:
            last, alive = steps[first - 1], steps[first].begin_bytes + nbytes
            keeps = max(0, self.saved[last.unit].keep - self.saved[last.unit].recompute) if last.unit else 0
            steps[first - 1] = replace(
                last,
                peak_bytes=max(last.peak_bytes, alive),
                select_bytes=max(last.select_bytes, alive + keeps),
                keep_bytes=max(last.keep_bytes, alive + keeps),
            )
        return replace(self, steps=steps)

    def with_casts(self, nbytes: int) -> Footprint:
        """Add bytes that are alive after the last forward, where the root computes results and loss."""
        steps = list(self.steps)
        last = next((i for i, step in enumerate(steps) if step.is_backward), 0) - 1
        if last >= 0:
            more = {name: getattr(steps[last], name) + nbytes for name in ("peak_bytes", "select_bytes", "keep_bytes")}
            steps[last] = replace(steps[last], **more)
        return replace(self, steps=steps)

    def with_sums(self, early: Sequence[ParamSpec], logits_bytes: int) -> Footprint:
        """Add sums of the root's gradients over pieces, in their update dtype, where a whole batch's gradient was seen.

        Args:
            early: Parameters whose gradients are there before backward reaches any unit.
            logits_bytes: Bytes of the gradient that all pieces of the head share.
        """
        more = sum(param.update_bytes - param.weight_bytes for param in early)
        added = max((_adding(param) for param in early), default=0)
        found = self.with_loss(logits_bytes + more + added) if early else self
        steps = [
            replace(
                step,
                begin_bytes=step.begin_bytes + more,
                peak_bytes=step.peak_bytes + more,
                again_bytes=step.again_bytes + more,
            )
            if step.is_backward
            else step
            for step in found.steps
        ]
        return replace(found, steps=steps)

    @property
    def keep_bytes(self) -> int:
        """Bytes that all units save if they keep everything."""
        return self.pieces * sum(saved.held for saved in self.saved.values())

    def peak_bytes(self, units: Iterable[UnitPlan]) -> int:
        """Return the most device bytes beside the plan's own, with the policies of these units."""
        return max((nbytes + self.loose_bytes for _, nbytes in self.alive(units)), default=0)

    def alive(self, units: Iterable[UnitPlan]) -> Iterator[tuple[Step, int]]:
        """Yield the same for every visit, without loose bytes. Args: units: Units with their policies."""
        plans = {unit.name: unit for unit in units}
        waiting: list[_Waiting] = []  # calls between forward and backward, the latest last
        summed = set[str]()  # units of which a piece has given gradients
        for step in self.steps:
            saved = self.saved.get(step.unit)
            if saved is None:  # the root's own work, before any unit
                yield step, step.peak_bytes
                continue
            if not step.is_backward:
                has_home = sum(call.unit == step.unit for call in waiting) < self.pieces
                waiting.append(_Waiting(step.unit, saved, plans[step.unit], has_home=has_home))
                for call in waiting[:-STAY]:
                    call.has_left = call.leaves
                held = sum(call.beyond for call in waiting[:-1])
                if self.pieces == 1 and waiting[0].has_left and not step.is_first_gone:  # a variable holds it
                    held += waiting[0].saved.recompute
                yield step, waiting[-1].ran(step) + held + self._staying(waiting)
                continue
            calls = waiting if self.pieces > 1 else reversed(waiting)
            mine = next(call for call in calls if call.unit == step.unit)
            waiting.remove(mine)
            sums = self.sums.get(step.unit, 0) if step.unit in summed and plans[step.unit].gradients == "device" else 0
            summed.add(step.unit)
            held = sum(call.beyond for call in waiting) + self._staying(waiting)
            yield step, mine.walked(step) + sums + held

    def _staying(self, waiting: Sequence[_Waiting]) -> int:
        """Return bytes of arguments that a call has sent, and that stay on the device for other calls."""
        return self.shared_bytes if any(call.has_left for call in waiting) else 0


def _adding(param: ParamSpec) -> int:
    """Return the bytes beside the sum so far while the gradient of one piece is added to it."""
    is_anew = param.update_dtype == param.dtype
    return (2 if is_anew else 1) * param.weight_bytes


def as_run(plan: Plan, saved: Mapping[str, SavedBytes], nbytes: int) -> Plan:
    """Return a plan as a run obeys it: calls keep their activations while there is room, the first units first.

    Args:
        plan: The plan, whose policies say what becomes of the other activations.
        saved: What a call of each unit saves. It is not known for a missing unit, whose activations are not kept.
        nbytes: The room, for one call of each unit.
    """
    units = []
    for unit in plan.units:
        taken = saved[unit.name].held if unit.policy != "keep" and unit.name in saved else nbytes + 1
        units.append(_kept(unit) if taken <= nbytes else unit)
        nbytes -= taken if taken <= nbytes else 0
    return replace(plan, units=tuple(units))


@functools.lru_cache(4096)
def _kept(unit: UnitPlan) -> UnitPlan:
    return replace(unit, policy="keep", activations="device", saved_bytes=0)


class _Waiting:
    """A call between its forward and its backward."""

    def __init__(self, unit: str, saved: SavedBytes, plan: UnitPlan, *, has_home: bool) -> None:
        """Args: has_home: Whether the unit has a free home for what the call saves."""
        self.unit, self.saved, self.plan = unit, saved, plan
        self.leaves = has_home and plan.activations != "device"
        self.has_left = False

    def ran(self, step: Step) -> int:
        """Return the most bytes alive while its forward runs, without what other calls have beyond their arguments."""
        most = {"keep": step.keep_bytes, "select": step.select_bytes, "recompute": step.peak_bytes}[self.plan.policy]
        stays = self.plan.policy == "keep" and not self.leaves and self.saved.cast > 0
        return most + (self.saved.kept - self.saved.keep if stays else 0)  # casts of weights stay, too

    def walked(self, step: Step) -> int:
        """Return the most bytes alive while its backward runs, without those of other calls."""
        whole = step.begin_bytes + step.made_bytes + self.saved.cast - self.saved.recompute
        if self.has_left:
            is_kept = self.plan.policy == "keep"
            return whole + self.saved.small if is_kept else step.peak_bytes - self.saved.recompute
        if not self.leaves or self.plan.policy == "recompute":
            return max(step.peak_bytes, step.again_bytes if self.plan.policy == "select" else 0)
        # What was to leave is held as a whole. Otherwise backward lets go of it bit by bit.
        return whole + self.saved.keep + self.saved.small if self.plan.policy == "keep" else step.select_bytes

    @property
    def beyond(self) -> int:
        """Bytes that it has on the device beyond its arguments; negative if those have left."""
        small = self.saved.small if self.plan.policy == "keep" else 0
        if self.plan.policy == "keep" and not self.leaves:
            return self.saved.kept + small - self.saved.recompute
        return (0 if self.has_left else self.saved.of(self.plan.policy)) + small - self.saved.recompute
