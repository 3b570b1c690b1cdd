"""The work of a step, and between which visits each piece of it must lie, whatever the order of operations.

Data alone orders the pieces: a gradient is made, goes home, is used by an update, and the update's weights are fetched
again. What slots keep, or let happen ahead, is noted as slack.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from outcore.order.weight_cache import slot_sizes
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import Rates
from outcore.spec.layout import weights_home
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, PoolKind
from outcore.spec.schedule import Visit
from planning.bound.activation_work import list_activations
from planning.bound.gradient_work import list_gradients
from planning.bound.jobs import LinkJob, LinkWork, Sweep, most_of
from planning.bound.times import Times, UpdatedUnit, VisitMoment

_BRINGING = ("disk_read", "h2d", "link")
"""The links that bring weights, in this order."""


class _SlotHold(NamedTuple):
    """Seconds for which a slot is held: while it is filled, used, and emptied."""

    before_s: float
    used_s: float
    after_s: float


def work_of(
    model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances
) -> LinkWork:
    """List the work of a step.

    Args:
        model: Units in the plan's order.
        plan: Where they live, and how many slots they share.
        rates: Rates of the machine, with this model.
        visits: Visits of a step.
        circumstances: Circumstances of the run.
    """
    return _Listing(Times(model, plan, rates, visits, circumstances)).list_all()


def totals_of(
    model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances
) -> Mapping[str, float]:
    """Return ``total_s`` of ``work_of`` alone, from one unit of all that are alike. Args: As in ``work_of``."""
    return _Listing(Times(model, plan, rates, visits, circumstances)).list_all(alike=True).total_s


class _SlotFillings:
    """Work that fills slots ahead of its turn.

    Each slot can be filled once that way. All other fillings come after a slot has been used and emptied, at the
    earliest by the unit that takes the least time for that.
    """

    def __init__(self) -> None:
        self._found: list[LinkJob] = []
        self._freed_s: dict[str, float] = {}

    def add(self, job: LinkJob, freed_s: float) -> None:
        """Add a filling. Args: job: Held by slots. freed_s: Seconds from there until the slot is free again."""
        self._freed_s[job.held_by] = min(self._freed_s.get(job.held_by, math.inf), freed_s)
        self._found.append(job)

    def jobs(self) -> list[LinkJob]:
        """Return the jobs, once all have been added."""
        return [job._replace(head_s=job.head_s + self._freed_s[job.held_by]) for job in self._found]


class _Listing:
    """Adds up the work of a step."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._held_s: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
        self._read_s: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        self._kept_s: defaultdict[str, float] = defaultdict(float)
        self._fillings = _SlotFillings()
        self.work = LinkWork(times.used_s, times.compute_s, starts=times.course.starts)

    def list_all(self, *, alike: bool = False) -> LinkWork:
        """List all work. Args: alike: Whether only sums are needed."""
        self.work.total_s["compute"] += sum(self.work.compute_s)
        if self._times.rates.host_runs_ahead:
            self.work.total_s["host"] = self._times.host_s()
        trained = None if alike else self._times.trained()
        units = self._times.alike() if trained is None else list(trained.values())
        list_gradients(self._times, self.work, units)
        for unit in units:
            self.work.count = unit.num_alike
            self._update(unit)
        list_activations(self._times, self.work, alike=alike)
        self._fetches(trained)
        self._take_off()
        return self.work

    # Updates.

    def _update(self, unit: UpdatedUnit) -> None:
        seconds, tail_s, home = unit.costs.update_s, unit.costs.from_update_s, unit.home
        brought_s = self._times.brought_s(unit)
        self.work.chains.append((home.visit, unit.first, home.head_s + brought_s + seconds + tail_s))
        begin = home.plus(brought_s) if unit.is_early else unit.after
        if not unit.is_early and home.visit == begin.visit:
            begin = max(begin, home.plus(brought_s))
        self.work.chains.append((begin.visit, unit.first, begin.head_s + seconds + tail_s))
        link = "compute" if unit.plan.states == "device" else unit.costs.updater
        self.work.add(link, seconds, begin, unit.first, tail_s)
        if gathered_s := unit.costs.gathered_s:
            self.work.add("gather", gathered_s, begin.plus(seconds), unit.first, tail_s - gathered_s)
        if unit.plan.states == "device":
            return
        if unit.plan.update == "device":
            self._staged(unit, begin)
        else:
            self._on_host(unit, begin)
        self._sent(unit, begin)

    def _sent(self, unit: UpdatedUnit, begin: VisitMoment) -> None:
        """List the sending of new weights, if they must be sent: behind the update, and behind ``step()``."""
        seconds, tail_s = unit.costs.sent_s, sum(unit.costs.bring_s)
        updated_s = unit.costs.update_s + unit.costs.gathered_s
        if not seconds:
            return
        updated = begin.plus(updated_s)
        if unit.plan.update == "device":
            self.work.add(
                "device_update" if unit.plan.weights == "device" else "d2h", seconds, updated, unit.first, tail_s
            )
            return
        sent = updated if not unit.is_early else max(unit.after, updated)
        self.work.add("disk_write" if unit.plan.weights == "disk" else "h2d", seconds, sent, unit.first, tail_s)
        if not unit.is_early:
            held = _SlotHold(0.0, updated_s + seconds, 0.0)
            self._hold("new_weights", weights_home(unit.spec, unit.plan).updated_bytes, held, unit, tail_s)

    def _on_host(self, unit: UpdatedUnit, begin: VisitMoment) -> None:
        spec, plan, rates = unit.spec, unit.plan, self._times.rates
        update_s, tail_s = unit.costs.update_s, unit.costs.from_update_s
        if plan.gradients == "device":
            seconds = rates.move_s("d2h", spec.update_bytes)
            asked = self._times.asked_for(unit, unit.made[-1])
            self.work.add("d2h", seconds, asked, unit.first, update_s + tail_s)
            if plan.early and not unit.is_early:  # copied for an update that was overtaken
                self.work.add("d2h", seconds, unit.made[-1], unit.made[0].visit + len(self._times.visits) + 1, 0.0)
            self._hold("gradients", spec.update_bytes, _SlotHold(seconds, update_s, 0.0), unit, tail_s)
        nbytes = unit.costs.states_bytes
        if plan.states != "disk" or not nbytes:
            return
        held = _SlotHold(rates.move_s("disk_read", nbytes), update_s, rates.move_s("disk_write", nbytes))
        self._hold("states", nbytes, held, unit, tail_s)
        self.work.total_s["disk_read"] += unit.num_alike * (held.before_s + unit.costs.old_weights_s)
        self.work.total_s["disk_write"] += unit.num_alike * held.after_s
        self._read_s[self._times.pool("host", "states", nbytes)] += [held.before_s] * unit.num_alike
        self._ahead("disk_read", "states", nbytes, held, unit, tail_s)
        if not unit.is_early:
            ready, then_s = begin.plus(update_s), self._behind_s(held, tail_s)
            slots = self._slack("disk_write", "states", nbytes, held.after_s)
            self.work.jobs.append(LinkJob("disk_write", held.after_s, *ready, unit.first, then_s, slots))

    def _staged(self, unit: UpdatedUnit, begin: VisitMoment) -> None:
        rates = self._times.rates
        update_s, tail_s, sent_s = unit.costs.update_s, unit.costs.from_update_s, unit.costs.sent_s
        states, _, _, scratch = unit.costs.staging
        there_s = unit.costs.staged_s
        home_s = rates.move_s("d2h", states[1] - states[0])
        held = _SlotHold(there_s, update_s, home_s)
        self._ahead("h2d", "staging", scratch[1], held, unit, tail_s)
        slots = self._slack("d2h", "staging", scratch[1], home_s)
        then_s = self._behind_s(held, tail_s)
        self.work.jobs.append(LinkJob("d2h", home_s, *begin.plus(update_s), unit.first, then_s, slots))
        if unit.plan.gradients == "host" or self._times.is_behind:  # else states may come before the gradient is made
            asked = self._times.asked_for(unit, unit.home)
            other = LinkJob("h2d", there_s, *asked, unit.first, update_s + tail_s, instead_of=slots)
            self.work.jobs.append(other)
        self.work.total_s["h2d"] += unit.num_alike * there_s
        self.work.total_s["d2h"] += unit.num_alike * home_s
        if unit.plan.weights == "device":  # new weights are copied beside the way home of states
            self._hold("staging", scratch[1], _SlotHold(there_s, update_s, max(home_s, sent_s)), unit, tail_s)
        else:
            sent_s += unit.costs.gathered_s
            self._hold("staging", scratch[1], _SlotHold(there_s, update_s + sent_s, home_s), unit, tail_s - sent_s)

    # Slots.

    def _hold(self, kind: PoolKind, nbytes: int, held: _SlotHold, unit: UpdatedUnit, tail_s: float) -> None:
        """List the seconds for which a slot is held: while it is filled, used and emptied.

        All slots may be filled before their turn, unless nothing is asked for that early, and emptied later.
        """
        size, num_slots = self._times.pool("device" if kind == "staging" else "host", kind, nbytes)
        name = f"{num_slots} slots for {kind} of {size} bytes"
        self.work.total_s[name] += unit.num_alike * sum(held) / num_slots
        is_ahead = kind == "states" or not self._times.is_behind
        self.work.slack_s[name, name] = max(self.work.slack_s[name, name], held.after_s + held.before_s * is_ahead)
        if kind == "states":
            self._kept_s[name] = max(self._kept_s[name], held.before_s)
        if not unit.is_early and self._times.waits:
            self.work.jobs.append(LinkJob(name, sum(held) / num_slots, *unit.after, unit.first, tail_s, name))

    def _ahead(self, link: str, kind: PoolKind, nbytes: int, held: _SlotHold, unit: UpdatedUnit, tail_s: float) -> None:
        """List what fills a slot before an update, ahead of its turn if a slot is free: see ``_SlotFillings``."""
        if not unit.is_early and self._times.waits:
            slots = self._slack(link, kind, nbytes, held.before_s)
            job = LinkJob(link, held.before_s, *unit.after, unit.first, held.used_s + tail_s, slots)
            self._fillings.add(job, held.used_s + held.after_s)

    def _behind_s(self, held: _SlotHold, tail_s: float) -> float:
        """Return the seconds that follow when slots have been emptied: the last one is filled and used once more.

        With more units than slots, the last unit waits until all others but those in slots have been emptied.
        """
        return held.before_s + held.used_s + tail_s if self._times.waits else 0.0

    def _slack(self, link: str, kind: PoolKind, nbytes: int, seconds: float) -> str:
        """Note seconds of work that slots may hold. Returns the name of these slots."""
        size, num_slots = self._times.pool("device" if kind == "staging" else "host", kind, nbytes)
        slots = f"{num_slots} slots for {kind} of {size} bytes"
        self._held_s[link, slots, num_slots] += [seconds] * self.work.count
        return slots

    def _take_off(self) -> None:
        """Set what slots may hold, and take the states that slots keep off what a step must read."""
        self.work.jobs += self._fillings.jobs()
        for (link, slots, number), held_s in self._held_s.items():
            self.work.slack_s[link, slots] = most_of(held_s, number)
        for (_, number), read_s in self._read_s.items():
            self.work.total_s["disk_read"] -= most_of(read_s, number)
        for name, kept_s in self._kept_s.items():
            self.work.total_s[name] -= kept_s

    # Weights.

    def _fetches(self, trained: Mapping[int, UpdatedUnit] | None) -> None:
        times, brought = self._times, [costs.bring_s for costs in self._times.costs]
        sizes, streamed = slot_sizes(times.plan, "device"), times.streamed
        slot_of = {nbytes: times.pool("device", "weights", nbytes)[0] for nbytes in set(streamed.values())}
        for size in sorted(set(sizes)):
            mine = [i for i, nbytes in streamed.items() if slot_of[nbytes] == size]
            for link in ("h2d", "link"):
                self._sweep(link, {i: brought[i][_BRINGING.index(link)] for i in mine}, sizes.count(size), trained)
        reads = {i: brought[i][0] for i, (_, plan) in enumerate(times.pairs) if plan.weights == "disk"}
        self._sweep("disk_read", reads, len(sizes) + len(slot_sizes(times.plan, "host")), trained)

    def _sweep(
        self, link: str, seconds: Mapping[int, float], slots: int, trained: Mapping[int, UpdatedUnit] | None
    ) -> None:
        """List the weights that a link brings. Args: trained: Updated units by index; None if only sums are needed."""
        if not any(seconds.values()):
            return
        course = self._times.course
        by_visit = [seconds.get(unit, 0.0) for unit, _ in course.parts]
        for i in course.pieces:
            by_visit[i] = 0.0
        places = {i: unit for unit, i in course.firsts.items() if by_visit[i] and unit in course.changed}
        """Visit -> unit, for units that have just been updated."""
        if trained is not None:
            firsts: list[LinkJob | None] = [None] * len(by_visit)
            for i, unit in places.items():
                firsts[i] = self._first(link, trained[unit], by_visit[i])
            self.work.sweeps.append(Sweep(link, by_visit, firsts, slots))
        for start, stop in itertools.pairwise([*self.work.starts, len(by_visit)]):
            again = [by_visit[i] for i in range(start, stop) if i not in places]
            self.work.total_s[link] += sum(by_visit[start:stop]) - most_of(again, slots)

    def _first(self, link: str, unit: UpdatedUnit, seconds: float) -> LinkJob:
        """Return the job of updated weights: they come behind the update."""
        brought, place = unit.costs.bring_s, _BRINGING.index(link)
        head_s = unit.costs.gathered_s + unit.costs.sent_s + sum(brought[:place])
        ready = unit.after.plus(head_s if unit.is_early else head_s + unit.costs.update_s)
        return LinkJob(link, seconds, *ready, unit.first, sum(brought[place + 1 :]))
