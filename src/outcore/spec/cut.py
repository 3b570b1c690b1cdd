"""Which bytes of a unit's weights rest with each rank.

[Note: cut weights] The runs of a unit ([Note: runs]) are dealt out to *sharers*: ranks that together have all of its
weights. With L sharers, rank r has the runs r mod L, r mod L + L, ... of the trainable piece, one behind another, and
behind them those of the frozen piece. So the run that it updates itself is among them, and one all-gather puts L
neighbouring runs together. R / L ranks have the same runs; after an update they send each other their own.
With one sharer a rank has all runs, in the order of the weights layout. If the sharers use one copy in host memory, the
copy has all runs, too, and each rank writes those that it would otherwise have.
If a unit is mostly frozen (adapters), its trainable piece stays whole on each rank where that adds little memory: a
fetch then waits for one all-gather instead of two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from outcore.spec.model import Part, Sharing, UnitSpec
from outcore.spec.plan import Tier, UnitPlan

_SMALL = 4
"""Least ratio of a rank's part of the frozen piece to a trainable piece that stays whole on each rank."""


class CutRun(NamedTuple):
    """Neighbouring bytes of the weights layout, and their place in the home."""

    home: int
    """First byte in the home."""
    layout: int
    """First byte in the weights layout."""
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHome:
    """One rank's home of the weights of one unit. See [Note: cut weights].

    These are values, not properties, because they are read at every visit.
    """

    spec: UnitSpec
    num_sharers: int
    trained_sharers: int
    """Number of sharers of the trainable piece: ``num_sharers``, or 1."""
    is_one_copy: bool
    """True if all sharers use one copy in host memory."""
    is_cut: bool
    """True if a fetch needs the other sharers."""
    is_resident: bool
    """True if all weights stay on the device, so that nothing is fetched."""
    num_copies: int
    """Number of ranks that have the same runs of the trainable piece."""
    taken_bytes: int
    """Bytes that this rank takes on the home's tier."""
    nbytes: int
    """Size of the home."""
    updated: tuple[int, int]
    """The bytes [start, stop) of the home that hold new weights after an update: this rank's own run where sharers use
    one copy, else its runs of the trainable piece, with those that ranks with the same runs have sent."""

    @property
    def updated_bytes(self) -> int:
        """Number of bytes in ``updated``."""
        start, stop = self.updated
        return stop - start

    @property
    def own_start(self) -> int:
        """First byte of this rank's own run, counted from the start of ``updated``."""
        return 0 if self.is_one_copy else self.spec.rank // self.trained_sharers * self.spec.run_bytes

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """Place of this rank's own elements, counted from the start of ``updated``, by trainable parameter."""
        shift = self.own_start - self.spec.rank * self.spec.run_bytes
        return tuple(part._replace(offset=part.offset + shift if part.numel else 0) for part in self.spec.own_parts)

    def runs(self) -> list[CutRun]:
        """Return this rank's runs: those in its home, or those that it writes in the one copy of all sharers."""
        spec, found, begin = self.spec, list[CutRun](), 0
        for piece, run, sharers in self._pieces:
            count, nbytes = (1, spec.num_ranks * run) if sharers == 1 else (spec.num_ranks // sharers, run)
            for i in range(count if run else 0):
                layout = piece + (i * sharers + spec.rank % sharers) * nbytes
                found.append(CutRun(begin + i * nbytes if self.is_cut else layout, layout, nbytes))
            begin += count * nbytes
        return found

    def own_run(self, *, is_trained: bool) -> CutRun:
        """Return the run that no other rank counts as its own."""
        spec, (piece, run, sharers) = self.spec, self._pieces[0 if is_trained else 1]
        begin, layout = 0 if is_trained else self.num_copies * spec.run_bytes, piece + spec.rank * run
        return CutRun(begin + spec.rank // sharers * run if self.is_cut else layout, layout, run)

    @property
    def _pieces(self) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """First byte in the weights layout, size of a run and number of sharers: of the trainable and frozen piece."""
        spec = self.spec
        frozen = (spec.trainable_bytes, spec.frozen_run_bytes, self.num_sharers)
        return (0, spec.run_bytes, self.trained_sharers), frozen

    def here(self, part: Part) -> Iterator[CutRun]:
        """Yield what this rank has, or writes, of a part of the weights layout."""
        if self.num_sharers == 1:
            yield CutRun(part.offset, part.offset, part.nbytes)
            return
        for run in self.runs():
            start, stop = max(run.layout, part.offset), min(run.layout + run.nbytes, part.offset + part.nbytes)
            if start < stop:
                yield CutRun(run.home + start - run.layout, start, stop - start)

    def together(self) -> list[tuple[int, int]]:
        """Return the bytes [start, stop) of the weights layout that each all-gather fills, in the order of ``runs``."""
        found, rank = list[tuple[int, int]](), self.spec.rank
        for run in self.runs():
            sharers = self.trained_sharers if run.layout < self.spec.trainable_bytes else self.num_sharers
            start = run.layout - rank % sharers * run.nbytes
            found.append((start, start + sharers * run.nbytes))
        return found


def weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    """Return this rank's home of a unit's weights under a plan."""
    key = unit.partition, unit.gather, unit.weights == "device"
    if key not in spec.homes:  # cached: the planner asks again and again, in plans of hundreds of units
        spec.homes[key] = _weights_home(spec, unit)
    return spec.homes[key]


def _weights_home(spec: UnitSpec, unit: UnitPlan) -> WeightsHome:
    sharers = {"replicate": 1, "node": spec.ranks_per_node, "world": spec.num_ranks}[unit.partition]
    is_one_copy = unit.gather == "host" and sharers > 1
    is_cut, frozen = sharers > 1 and not is_one_copy, spec.num_ranks // sharers * spec.frozen_run_bytes
    is_small = is_cut and _SMALL * spec.trainable_bytes <= frozen
    trained_sharers = 1 if is_small else sharers
    copies, first, run = spec.num_ranks // trained_sharers, spec.rank, spec.run_bytes
    taken = copies * run + frozen
    return WeightsHome(
        spec=spec,
        num_sharers=sharers,
        trained_sharers=trained_sharers,
        is_one_copy=is_one_copy,
        is_cut=is_cut,
        is_resident=unit.weights == "device" and not is_cut,
        num_copies=copies,
        taken_bytes=taken,
        nbytes=taken if is_cut else spec.weight_bytes,
        updated=(first * run, (first + 1) * run) if is_one_copy else (0, copies * run),
    )


def in_slot(spec: UnitSpec, unit: UnitPlan, tier: Tier) -> int:
    """Return the bytes that the weights of a unit take in a slot on a tier; 0 if they need no slot there."""
    home = weights_home(spec, unit)
    if tier == "host":
        return home.nbytes if unit.weights == "disk" else 0
    return 0 if home.is_resident else spec.weight_bytes


def shared(unit: UnitPlan, sharing: Sharing) -> UnitPlan:
    """Return the unit's plan with its weights shared among ranks as asked.

    ``copy`` lets the ranks of a machine share one copy of weights in host memory; other weights stay whole on each.
    ``cut`` cuts the weights of every unit but the root over all ranks, and ``node`` over the ranks of a machine.
    """
    if sharing == "copy" and unit.weights == "host":
        return replace(unit, partition="node", gather="host")
    if sharing in ("cut", "node") and unit.name:
        return replace(unit, partition="world" if sharing == "cut" else "node")
    return unit


def is_resident(spec: UnitSpec, unit: UnitPlan) -> bool:
    """Return whether all weights of a unit stay on the device."""
    return weights_home(spec, unit).is_resident
