"""The rule for where everything lives: as much as fits on the device, first units first, then host, then disk.

[Note: waterlines] Two counts tell all plans of the rule apart. The device takes a prefix of a queue: the weights of all
units, followed by gradients and states of all units. The host takes a prefix of what is left: weights, then gradients,
then states. The rest goes to disk. Of the plans that fit, those with the most slots on the device are taken. Among
these the most homes on the device decide, then the most slots on the host, then the most homes on the host. So a larger
budget never gives less in that order.

[Note: one tier] With a larger count on the host, homes there never take less, and those on disk never more. Slots may
take less: a tier that no unit uses has none. So bounds are found by bisection of the homes, and counts beside them are
tried while slots could still make up the difference. What lies on the host makes no difference to the device, unless
ranks add up gradients there that rest in host memory: then the smallest count takes the least of the device.
"""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from outcore.core.errors import PlanInfeasibleError
from outcore.planner.homes.activation_policies import Activations
from outcore.planner.homes.pools import (
    DEVICE_COMFORTS,
    HOST_COMFORTS,
    LEAST,
    Comfort,
    Placement,
    Placer,
    TierBytes,
    UnitHomes,
    with_slots,
)
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Policy, Tier
from outcore.spec.plan_table import infeasible_table

STAYING = Activations()
"""Activations that take nothing of the limits."""


def place(
    model: ModelSpec,
    limits: Limits,
    *,
    accumulation_steps: int | None = None,
    policy: Policy = "recompute",
    activations: Activations = STAYING,
) -> Plan:
    """Decide where every byte lives.

    Args:
        model: The model, its root unit first.
        limits: The most that may be taken on each tier, activations included.
        accumulation_steps: Micro-batches per step if promised, else None.
        policy: Policy of all units but the root, whose activations autograd keeps.
        activations: What they take of the limits. The plan is without those that leave the device.

    Raises:
        PlanInfeasibleError: Nothing fits: see ``refusal``.

    Cost: 0.2 s for 128 equal units, seconds if all differ; integers only.
    """
    search = _Placements(model, limits, accumulation_steps=accumulation_steps, policy=policy)
    plan = search.beside(activations).roomiest()
    if plan is None:
        raise _refusal(search, [activations])
    return plan


def fitting(
    model: ModelSpec, limits: Limits, activations: Activations, *, accumulation_steps: int | None = None
) -> Plan | None:
    """Return the plan of ``place``, or None if nothing fits."""
    return _Placements(model, limits, accumulation_steps=accumulation_steps).beside(activations).roomiest()


def refusal(model: ModelSpec, limits: Limits, several: Sequence[Activations]) -> PlanInfeasibleError:
    """Say what would do where nothing fits.

    Args:
        model: The model, its root unit first.
        limits: The limits as they are. A host or disk of 0 bytes counts as not allowed.
        several: The ways to treat activations of which one may be taken.

    Returns:
        The error. ``required_bytes`` is the least device, then the least host, then the least disk that would do;
        ``raise_one_to`` says how much of one tier would do with the others as they are.
    """
    return _refusal(_Placements(model, limits), several)


class Least(NamedTuple):
    """The least limits with which a plan fits."""

    at_all: dict[Tier, int]
    """The least device bytes, then the least host bytes with that device, then the disk bytes that go with both."""
    with_others: dict[Tier, int]
    """The least bytes of one tier, with the other limits as they are; a tier that alone does not help is missing."""
    activations: Activations
    """The way to treat activations of ``at_all``."""

    @classmethod
    def of_any(cls, several: Sequence[Least]) -> Least:
        """Return the least limits of which one of several is told."""
        first = min(several, key=lambda each: list(each.at_all.values()))
        named = [pair for each in several for pair in each.with_others.items()]
        return first._replace(with_others={tier: min(n for t, n in named if t == tier) for tier in dict(named)})


def least(model: ModelSpec, limits: Limits, several: Sequence[Activations]) -> Least:
    """Return the least limits that would do. Args: as for ``refusal``."""
    return _least(_Placements(model, limits), several)


class Waterline(NamedTuple):
    """How much of the two queues of [Note: waterlines] the device and the host take."""

    on_device: int
    on_host: int


def _least(search: _Placements, several: Sequence[Activations]) -> Least:
    """See ``least``. Ways that need a tier that is not allowed are left out, unless there is no other."""
    allowed = {"device"} | {tier for tier, most in search.given.by_tier.items() if most}
    usable = [way for way in several if all(tier in allowed for tier, nbytes in way.taken.items() if nbytes)]
    return Least.of_any([search.beside(way).least_limits() for way in usable or several])


def _refusal(search: _Placements, several: Sequence[Activations]) -> PlanInfeasibleError:
    """See ``refusal``."""
    found = _least(search, several)
    within = search.beside(found.activations)
    plan = within.plan(within.least(), LEAST)
    plan = found.activations.applied(plan)
    message = infeasible_table(search.model, plan, search.given, found.at_all, raise_one_to=found.with_others)
    return PlanInfeasibleError(message, dict(found.at_all.items()), dict(found.with_others.items()))


def _homes_at(index: int, borders: Iterable[tuple[int, int]]) -> UnitHomes:
    return UnitHomes(*("device" if index < near else "host" if index < far else "disk" for near, far in borders))


class _Placements:
    """All plans of the rule over one model and one set of limits."""

    def __init__(
        self,
        model: ModelSpec,
        given: Limits,
        *,
        accumulation_steps: int | None = None,
        policy: Policy = "recompute",
    ) -> None:
        """Args: given: The most that may be taken, activations included."""
        self.model, self.given, self.num_units = model, given, len(model.units)
        self._placer = placer = Placer(model, policy=policy, accumulation_steps=accumulation_steps)
        # Equal units are counted, not listed.
        self._ends = list(itertools.accumulate(len(list(group)) for _, group in itertools.groupby(placer.alike)))
        """Where runs of equal units end."""
        self._needs = functools.cache(lambda line: placer.needs(self._alike_homes(line)))
        self.turn_to(STAYING)

    def turn_to(self, activations: Activations) -> None:
        """Search beside these activations."""
        self.activations, self.limits = activations, activations.left(self.given)
        """Activations, and what they leave to everything else."""
        self._window = functools.cache(self._bisect)

    def beside(self, activations: Activations) -> _Placements:
        """Return the search beside other activations. Both share what is known of units."""
        other = copy.copy(self)
        other.turn_to(activations)
        return other

    def roomiest(self) -> Plan | None:
        """Return the best plan with the most slots, or None if nothing fits."""
        if self.activations.exceeds(self.given) or self.best([LEAST]) is None:
            return None
        for depth, buckets in DEVICE_COMFORTS:
            comforts = [Comfort(prefetch_depth=depth, num_buckets=buckets, max_slots_host=n) for n in HOST_COMFORTS]
            best = self.best(comforts)
            if best is not None:
                return self.plan(*best)
        raise AssertionError("a plan with the fewest slots fits, but none was found")

    def least_limits(self) -> Least:
        """Return the least limits that would do."""
        taken, full = self.activations.taken, self.activations.exceeds(self.given)
        at_all: dict[Tier, int] = self.bytes(self.least(), LEAST)._asdict()  # type: ignore[assignment]
        with_others = {tier: nbytes for tier, nbytes in self.raise_one_to().items() if full <= {tier}}
        total, alone = ({tier: n + taken[tier] for tier, n in part.items()} for part in (at_all, with_others))
        return Least(total, alone, self.activations)

    @property
    def most_on_device(self) -> int:
        """The length of the device's queue."""
        return 2 * self.num_units - 1

    def most_on_host(self, on_device: int) -> int:
        """Return the length of the host's queue."""
        weights = min(on_device, self.num_units - 1)
        return self.num_units - 1 - weights + 2 * (self.num_units - (on_device - weights))

    def _borders(self, line: Waterline) -> list[tuple[int, int]]:
        """Return of weights, gradients and states how many units have them on the device, and on device or host."""
        weights_device = min(line.on_device, self.num_units - 1)
        states_device = line.on_device - weights_device
        rest, found = line.on_host, list[tuple[int, int]]()
        for on_device in (weights_device + 1, states_device, states_device):
            on_host = min(rest, self.num_units - on_device)
            rest -= on_host
            found.append((on_device, on_device + on_host))
        return found

    def best(self, comforts: Sequence[Comfort]) -> tuple[Waterline, Comfort] | None:
        """Return the best plan that fits, or None. ``comforts`` are equal on the device, the best one first."""
        for on_device in self._fitting(comforts[0]):
            for comfort in comforts:
                line = self._fitting_line(on_device, comfort)
                if line is not None:
                    return line, comfort
        return None

    def _fitting(self, comfort: Comfort) -> Iterator[int]:
        """Yield the counts with which some plan fits the device's limit, the largest first."""
        for on_device in range(self.most_on_device, -1, -1):
            if self.device_bytes(on_device, comfort) <= self.limits.device_bytes:
                yield on_device

    def _fitting_line(self, on_device: int, comfort: Comfort) -> Waterline | None:
        """Return the waterline with the most on the host within the limits, or None."""
        lines = (Waterline(on_device, on_host) for on_host in reversed(self._window(on_device)))
        return next((line for line in lines if self._fits(line, comfort)), None)

    def _fits(self, line: Waterline, comfort: Comfort) -> bool:
        """Return whether a waterline fits device and host."""
        taken = self.bytes(line, comfort)
        return taken.device <= self.limits.device_bytes and taken.host <= self.limits.host_bytes

    def least(self) -> Waterline:
        """Return the waterline with the least device, then host, then disk bytes, on the tiers that are allowed."""
        lines = range(self.most_on_device + 1)
        if not self.limits.host_bytes:
            without_host = [Waterline(d, self.most_on_host(d)) for d in lines]
            return min(
                (line for line in without_host if not self.bytes(line, LEAST).host),
                key=lambda line: self.bytes(line, LEAST),
            )
        least = min(self.device_bytes(d, LEAST) for d in lines)
        candidates = [d for d in lines if self.device_bytes(d, LEAST) == least]
        all_lines = (Waterline(d, h) for d in candidates for h in self._host_choices(d))
        return min(all_lines, key=lambda line: self.bytes(line, LEAST))

    def raise_one_to(self) -> dict[Tier, int]:
        """Return for each allowed tier the bytes that would do with the other limits as they are.

        Tiers that alone do not help are missing. See [Note: one tier].
        """
        found: dict[Tier, int | None] = {"device": self._least_device()}
        if self.limits.host_bytes:
            found["host"] = self._least_of(self._least_host)
        if self.limits.disk_bytes:
            found["disk"] = self._least_of(self._least_disk)
        return {tier: nbytes for tier, nbytes in found.items() if nbytes is not None}

    def _least_of(self, least: Callable[[int], int | None]) -> int | None:
        """Return the least bytes of a tier over all counts on the device. Args: least: Count -> bytes, or None."""
        return min((n for n in map(least, self._fitting(LEAST)) if n is not None), default=None)

    def _least_device(self) -> int | None:
        """Return the least device bytes within the limits of host and disk; None if none suffices."""
        floors = {d: self.device_bytes(d, LEAST) for d in range(self.most_on_device + 1)}
        found: int | None = None
        for on_device, floor in sorted(floors.items(), key=lambda pair: pair[1]):
            if found is not None and found <= floor:
                break
            each = (self.bytes(Waterline(on_device, on_host), LEAST) for on_host in self._window(on_device))
            for taken in (taken for taken in each if taken.host <= self.limits.host_bytes):
                found = taken.device if found is None else min(found, taken.device)
                if found == floor:
                    break
        return found

    def _least_host(self, on_device: int) -> int | None:
        """Return the least host bytes with this count on the device, within the other limits; None if none suffices."""
        choices, disk_bytes = self._host_choices(on_device), self.limits.disk_bytes or 0
        lines = [Waterline(on_device, on_host) for on_host in choices]
        found: int | None = None
        for line in lines[bisect.bisect_left(lines, -disk_bytes, key=lambda line: -self._homes_bytes(line).disk) :]:
            if found is not None and found <= self._homes_bytes(line).host:
                break
            taken = self.bytes(line, LEAST)
            if taken.device <= self.limits.device_bytes:
                found = taken.host if found is None else min(found, taken.host)
        return found

    def _least_disk(self, on_device: int) -> int | None:
        """Return the least disk bytes with this count on the device, within the other limits; None if none suffices."""
        lines = [Waterline(on_device, on_host) for on_host in self._host_choices(on_device)]
        stop = bisect.bisect_right(lines, self.limits.host_bytes, key=lambda line: self._homes_bytes(line).host)
        fitting = (line for line in reversed(lines[:stop]) if self._fits(line, LEAST))
        return next((self.bytes(line, LEAST).disk for line in fitting), None)

    def device_bytes(self, on_device: int, comfort: Comfort) -> int:
        """Return the least device bytes of a plan with this count: see [Note: one tier]."""
        return self.bytes(Waterline(on_device, self._host_choices(on_device)[0]), comfort).device

    def bytes(self, line: Waterline, comfort: Comfort) -> TierBytes:
        """Return the least limits that allow a plan: what it takes, and on the device room for activations."""
        _, taken = with_slots(self._homes_bytes(line), self._needs(line), comfort)
        return taken._replace(device=self.activations.limit_for(taken.device))

    def plan(self, line: Waterline, comfort: Comfort) -> Plan:
        """Return the plan of a waterline."""
        borders = self._borders(line)
        placements = [Placement(_homes_at(i, borders)) for i in range(self.num_units)]
        pools, taken = with_slots(self._homes_bytes(line), self._needs(line), comfort)
        plan = self._placer.plan(placements, comfort, pools)
        return dataclasses.replace(plan, tier_bytes=taken._asdict())

    def _host_choices(self, on_device: int) -> range:
        most = self.most_on_host(on_device)
        return range(0 if self.limits.disk_bytes else most, most + 1)

    def _bisect(self, on_device: int) -> range:
        """Find the host counts at which homes fit host and disk: with the count, host homes grow, disk homes shrink."""
        choices = self._host_choices(on_device)
        disk_bytes, host_bytes = self.limits.disk_bytes or 0, self.limits.host_bytes
        first = bisect.bisect_left(choices, -disk_bytes, key=lambda n: -self._homes_bytes(Waterline(on_device, n)).disk)
        stop = bisect.bisect_right(choices, host_bytes, key=lambda n: self._homes_bytes(Waterline(on_device, n)).host)
        return choices[first:stop]

    def _alike_homes(self, line: Waterline) -> Iterable[tuple[tuple[int, Placement], int]]:
        """Count equal units with the same homes. Each run of them is looked at only once."""
        borders, found = self._borders(line), Counter[tuple[int, Placement]]()
        ends = {*self._ends, *itertools.chain.from_iterable(borders)} - {0}
        for start, stop in itertools.pairwise([0, *sorted(ends)]):
            found[self._placer.alike[start], Placement(_homes_at(start, borders))] += stop - start
        return found.items()

    def _homes_bytes(self, line: Waterline) -> TierBytes:
        return self._placer.homes_bytes(self._alike_homes(line))
