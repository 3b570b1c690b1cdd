"""Which bytes of a unit's weights rest with a rank.

[Note: cut weights] The runs of a unit ([Note: runs]) are dealt out to *sharers*: ranks that have all of its weights
together. With L sharers, rank r has the runs r mod L, r mod L + L, ... of the trainable piece, one behind the other,
and behind them those of the frozen piece. So its own run, which it updates, is among them, and L neighbouring runs are
what one all-gather puts together. R / L ranks have the same runs; after an update they send one another their own.
With one sharer a rank has all runs, in the order of the weights layout. Where sharers see one copy in host memory, that
has all runs, too, and each rank writes those that it would have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from outcore.spec.model import Part, Sharing, UnitSpec
from outcore.spec.plan import Tier, UnitPlan


class Run(NamedTuple):
    """Neighbouring bytes of the weights layout, and where they rest."""

    home: int
    """First byte in the home."""
    layout: int
    """First byte in the weights layout."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHome:
    """Of one unit, with one rank. See [Note: cut weights]. Values, not properties: they are read at every visit."""

    spec: UnitSpec
    num_sharers: int
    is_one_copy: bool
    """Sharers see one copy."""
    is_cut: bool
    """A fetch needs the other sharers."""
    is_resident: bool
    """All weights stay on the device, so that nothing is fetched."""
    num_copies: int
    """Ranks that have the same runs."""
    taken_bytes: int
    """What this rank takes of its tier."""
    nbytes: int
    """Size of the home."""
    updated: tuple[int, int]
    """The bytes [start, stop) of the home that hold new weights after an update: this rank's, or all copies'."""

    @property
    def updated_bytes(self) -> int:
        """How many they are."""
        start, stop = self.updated
        return stop - start

    @property
    def own_start(self) -> int:
        """Where this rank's own run begins among ``updated``."""
        return 0 if self.is_one_copy else self.spec.rank // self.num_sharers * self.spec.run_bytes

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """Where the elements that are updated here lie among ``updated``, by trainable parameter."""
        shift = self.own_start - self.spec.rank * self.spec.run_bytes
        return tuple(part._replace(offset=part.offset + shift if part.numel else 0) for part in self.spec.own_parts)

    def runs(self) -> list[Run]:
        """What this rank alone of all sharers has, or writes."""
        spec, first = self.spec, self.spec.rank % self.num_sharers
        found, begin = [], 0
        for piece, run in ((0, spec.run_bytes), (spec.trainable_bytes, spec.frozen_run_bytes)):
            for i in range(self.num_copies if run else 0):
                layout = piece + (i * self.num_sharers + first) * run
                found.append(Run(begin + i * run if self.is_cut else layout, layout, run))
            begin += self.num_copies * run
        return found

    def own_run(self, *, is_trained: bool) -> Run:
        """The run that this rank alone of all ranks counts as its own."""
        spec, mine = self.spec, self.spec.rank // self.num_sharers
        frozen = Run(self.num_copies * spec.run_bytes, spec.trainable_bytes, spec.frozen_run_bytes)
        begin, layout, run = Run(0, 0, spec.run_bytes) if is_trained else frozen
        layout += spec.rank * run
        return Run(begin + mine * run if self.is_cut else layout, layout, run)

    def here(self, part: Part) -> Iterator[Run]:
        """What this rank has, or writes, of a part of the weights layout."""
        if self.num_sharers == 1:
            yield Run(part.offset, part.offset, part.nbytes)
            return
        for run in self.runs():
            start, stop = max(run.layout, part.offset), min(run.layout + run.nbytes, part.offset + part.nbytes)
            if start < stop:
                yield Run(run.home + start - run.layout, start, stop - start)

    def together(self) -> list[tuple[int, int]]:
        """The bytes [start, stop) of the weights layout that sharers put together at once, in the order of ``runs``."""
        place = self.spec.rank % self.num_sharers
        starts = [(run.layout - place * run.nbytes, self.num_sharers * run.nbytes) for run in self.runs()]
        return [(start, start + nbytes) for start, nbytes in starts]


def weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    """Under a plan."""
    key = unit.partition, unit.gather, unit.weights == "device"
    if key not in spec.homes:  # plans of hundreds of units are worked out again and again
        spec.homes[key] = _weights_home(spec, unit)
    return spec.homes[key]


def _weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    sharers = {"replicate": 1, "node": spec.ranks_per_node, "world": spec.num_ranks}[unit.partition]
    copies, is_one_copy = spec.num_ranks // sharers, unit.gather == "host" and sharers > 1
    is_cut, taken = sharers > 1 and not is_one_copy, copies * (spec.run_bytes + spec.frozen_run_bytes)
    first, run = spec.rank, spec.run_bytes
    return WeightsHome(
        spec=spec,
        num_sharers=sharers,
        is_one_copy=is_one_copy,
        is_cut=is_cut,
        is_resident=unit.weights == "device" and not is_cut,
        num_copies=copies,
        taken_bytes=taken,
        nbytes=taken if is_cut else spec.weight_bytes,
        updated=(first * run, (first + 1) * run) if is_one_copy else (0, copies * run),
    )


def in_slot(spec: UnitSpec, unit: UnitPlan, tier: Tier) -> int:
    """What the weights of a unit take in a slot on a tier; 0: they need none there."""
    home = weights_home(spec, unit)
    if tier == "host":
        return home.nbytes if unit.weights == "disk" else 0
    return 0 if home.is_resident else spec.weight_bytes


def shared(unit: UnitPlan, sharing: Sharing) -> UnitPlan:
    """The unit, with its weights as ranks are to have them.

    ``copy`` lets ranks of a machine share what is in host memory, and leaves the rest to each; ``cut`` cuts all that
    can be over all ranks, ``node`` over those of a machine.
    """
    if sharing == "copy" and unit.weights == "host":
        return replace(unit, partition="node", gather="host")
    if sharing in ("cut", "node") and unit.name:
        return replace(unit, partition="world" if sharing == "cut" else "node")
    return unit


def is_resident(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Whether all weights of a unit stay on the device."""
    return weights_home(spec, unit).is_resident
