"""The work of a step, and between which visits each piece of it must lie, whatever the order of operations.

What orders pieces is data alone: a gradient is made, goes home, is used by an update, and the update's weights are
fetched again. What slots keep, or let happen ahead, is said as slack.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outcore.planning.bound.times import Moment, Times, Trained
from outcore.planning.paper.schedule import Circumstances
from outcore.planning.paper.weight_cache import slot_sizes
from outcore.planning.timing.rates import Rates
from outcore.spec.layout import sums_on_device
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, PoolKind, Tier
from outcore.spec.schedule import Visit


class Job(NamedTuple):
    """Work of a link. It begins ``head_s`` after the start of one visit, and is over ``tail_s`` before another's."""

    link: str
    """Or slots of which there are too few: what they are held for is their work."""
    seconds: float
    after: int
    head_s: float
    before: int
    """Counted on into the next step."""
    tail_s: float
    is_slack: bool | None = None
    """True: right if the link's slack is taken off; False: stands in for such a job, with nothing taken off."""


@dataclass(frozen=True)
class Sweep:
    """Weights that visits need, of units that use the same slots."""

    link: str
    seconds: Sequence[float]
    """By visit: of bringing the weights; 0 where they need not come."""
    firsts: Sequence[Job | None]
    """By visit: the unit has just been updated, so that they must come."""
    slack_s: float
    """What slots may hold when any visit begins."""


@dataclass
class Work:
    """All of a step."""

    used_s: list[float]
    """By visit: of forward or backward."""
    compute_s: list[float]
    """By visit: the same, and what compute does with gradients then."""
    jobs: list[Job] = field(default_factory=list)
    sweeps: list[Sweep] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """Visits that begin a sweep: from one to the next no unit comes twice."""
    slack_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    total_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    chains: list[tuple[int, int, float]] = field(default_factory=list)
    """From the start of one visit to that of another, at least so much."""


class _Held(NamedTuple):
    """Seconds that a slot is held: while it is filled, used, and emptied."""

    before_s: float
    used_s: float
    after_s: float


def work_of(model: ModelSpec, plan: Plan, rates: Rates, visits: Sequence[Visit], circumstances: Circumstances) -> Work:
    """List the work of a step.

    Args:
        model: Units in the plan's order.
        plan: Where they live, and how many slots they share.
        rates: Of the machine, with this model.
        visits: Of a step.
        circumstances: Of the run.
    """
    return _Listing(Times(model, plan, rates, visits, circumstances)).list_all()


class _Fillings:
    """What comes into slots ahead of its turn.

    Each slot can be filled once so. All others come when one has been used and emptied, by whichever unit that takes
    the least time for it.
    """

    def __init__(self) -> None:
        self._found: list[tuple[tuple[PoolKind, int, int], Job]] = []
        self._freed_s: dict[tuple[PoolKind, int, int], float] = {}

    def add(self, pool: tuple[PoolKind, int, int], job: Job, freed_s: float) -> None:
        """Args: pool: That it uses a slot of. freed_s: From its filling until the slot is free again."""
        self._freed_s[pool] = min(self._freed_s.get(pool, math.inf), freed_s)
        self._found.append((pool, job))

    def jobs(self) -> list[Job]:
        """When all have been added."""
        return [job._replace(head_s=job.head_s + self._freed_s[pool]) for pool, job in self._found]


class _Listing:
    """Adds up the work of a step."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._largest_s: dict[tuple[str, PoolKind, int], float] = {}
        self._kept_s: list[float] = []
        self._fillings = _Fillings()
        self.work = Work(times.used_s, times.compute_s, starts=times.starts())

    def list_all(self) -> Work:
        """All of it."""
        self.work.total_s["compute"] += sum(self.work.compute_s)
        if self._times.rates.host_runs_ahead:
            self.work.total_s["host"] = self._times.host_s()
        trained = self._times.trained()
        for unit in trained.values():
            self._gradients(unit)
            self._update(unit)
        self._buckets(list(trained.values()))
        self._activations()
        self._fetches(trained)
        self._take_off()
        return self.work

    # Gradients.

    def _gradients(self, unit: Trained) -> None:
        spec, plan, made = unit.spec, unit.plan, unit.made
        if spec.num_ranks > 1:
            for way in _exchanged(unit, self._times):
                self._add(*way)
            return
        if plan.gradients == "device":
            return
        left_s = self._times.rates.move_s("d2h", spec.bucket_bytes)
        added_s = self._times.rates.move_s("update", spec.update_bytes)
        tail_s, is_on_disk = self._times.from_gradients_s(unit), plan.gradients == "disk"
        for i, moment in enumerate(made):
            to_come_s = added_s * (len(made) - max(i, 1))  # sums follow one another
            self._add("d2h", left_s, moment, unit, to_come_s + tail_s)
            if i:
                self._add("update", added_s, moment.plus(left_s), unit, to_come_s - added_s + tail_s)
            if is_on_disk:
                nbytes = spec.update_bytes if i else spec.bucket_bytes
                self.work.total_s["disk_write"] += self._times.rates.move_s("disk_write", nbytes)
            if is_on_disk and i:
                read_s, before = self._times.rates.move_s("disk_read", spec.update_bytes), made[i - 1]
                self._add("disk_read", read_s, before.plus(left_s), unit, to_come_s + tail_s)

    def _buckets(self, trained: Sequence[Trained]) -> None:
        """When a bucket is filled, all that were filled before but for some have left."""
        users = [u for u in trained if u.spec.name and (u.plan.gradients != "device" or u.spec.num_ranks > 1)]
        pools = [self._pool("device", "bucket", u.spec.bucket_bytes) for u in users]
        for nbytes, num_slots in sorted(set(pools)):
            mine = [u for u, pool in zip(users, pools, strict=True) if pool[0] == nbytes]
            left = sorted((m, self._times.left_s(u)) for u in mine for m in u.made)
            name = f"{'d2h' if mine[0].spec.num_ranks == 1 else 'reduce'} with {num_slots} buckets of {nbytes} bytes"
            following = [m.visit for m, _ in left[1:]] + [left[0][0].visit + len(self._times.visits)]
            for (moment, seconds), then in zip(left, following, strict=True):
                self.work.jobs.append(Job(name, seconds, *moment, then + 1, 0.0, is_slack=True))
            self.work.slack_s[name] = (num_slots - 1) * max(seconds for _, seconds in left)

    def _activations(self) -> None:
        """What forward saved leaves before the next call but one, and comes back for backward.

        The last two calls before backward are still there, and of those that went to disk the last are in slots.
        See [Note: activations away] in ``order.activations``.
        """
        kept = sum(p.num_slots for p in self._times.plan.pools if (p.tier, p.kind) == ("host", "activations"))
        are_equal = len({(plan.activations, plan.saved_bytes) for spec, plan in self._times.pairs if spec.name}) == 1
        times, brought = self._times, [0.0] * len(self._times.visits)
        for forward, backward in times.passes():
            for place, i in enumerate(forward[:-1]):
                plan = times.pairs[times.visits[i].unit][1]
                if not plan.saved_bytes:
                    continue
                leave_s, write_s, read_s, bring_s = (
                    times.rates.move_s(link, plan.saved_bytes) if link in ("d2h", "h2d") or is_on_disk else 0.0
                    for link in ("d2h", "disk_write", "disk_read", "h2d")
                    for is_on_disk in [plan.activations == "disk"]
                )
                self.work.total_s["d2h"] += leave_s
                self.work.total_s["disk_write"] += write_s
                if place == len(forward) - 2:
                    continue
                then, begin = backward[times.visits[i].unit], Moment(i, times.used_s[i])
                if place > len(forward) - 2 - kept:
                    write_s = read_s = 0.0
                self.work.total_s["disk_read"] += read_s
                self.work.total_s["h2d"] += bring_s
                left = begin.plus(leave_s)
                until = (then, read_s + bring_s)
                if are_equal and place + kept + 2 < len(forward):  # one that leaves later needs the slot
                    until = (forward[place + kept + 2], leave_s)
                jobs = [
                    Job("d2h", leave_s, *begin, forward[place + 2], 0.0),
                    Job("disk_write", write_s, *left, *until),
                    Job("disk_read", read_s, *left.plus(write_s), then, bring_s),
                    Job("h2d", bring_s, *left.plus(write_s + read_s), then, 0.0),
                ]
                self.work.jobs += [job for job in jobs if job.seconds]
                brought[then] = bring_s
        slots = sum(p.num_slots for p in times.plan.pools if (p.tier, p.kind) == ("device", "activations"))
        if any(brought):
            name = f"h2d with {slots} slots for activations"
            self.work.sweeps.append(Sweep(name, brought, [None] * len(brought), slots * max(brought)))

    # Updates.

    def _update(self, unit: Trained) -> None:
        seconds, tail_s, home = self._times.update_s(unit), self._times.from_update_s(unit), self._times.home(unit)
        brought_s = self._times.brought_s(unit)
        self.work.chains.append((home.visit, unit.first, home.head_s + brought_s + seconds + tail_s))
        begin = home.plus(brought_s) if unit.is_early else unit.after
        if not unit.is_early and home.visit == begin.visit:
            begin = max(begin, home.plus(brought_s))
        self.work.chains.append((begin.visit, unit.first, begin.head_s + seconds + tail_s))
        link = "compute" if unit.plan.states == "device" else self._times.updater(unit)
        self._add(link, seconds, begin, unit, tail_s)
        if gathered_s := self._times.gathered_s(unit):
            self._add("gather", gathered_s, begin.plus(seconds), unit, tail_s - gathered_s)
        if unit.plan.states == "device":
            return
        if unit.plan.update == "device":
            self._staged(unit, begin)
        else:
            self._on_host(unit, begin)
        self._sent(unit, begin)

    def _sent(self, unit: Trained, begin: Moment) -> None:
        """New weights, if they must be sent; behind the update, and behind ``step()``."""
        seconds, tail_s = self._times.sent_s(unit), sum(self._times.bring_s(unit.spec, unit.plan))
        updated_s = self._times.update_s(unit) + self._times.gathered_s(unit)
        if not seconds:
            return
        updated = begin.plus(updated_s)
        if unit.plan.update == "device":
            self._add("device_update" if unit.plan.weights == "device" else "d2h", seconds, updated, unit, tail_s)
            return
        sent = updated if not unit.is_early else max(unit.after, updated)
        self._add("disk_write" if unit.plan.weights == "disk" else "h2d", seconds, sent, unit, tail_s)
        if not unit.is_early:
            held = _Held(0.0, updated_s + seconds, 0.0)
            self._hold("new_weights", unit.spec.trainable_bytes, held, unit, tail_s)

    def _on_host(self, unit: Trained, begin: Moment) -> None:
        spec, plan, rates = unit.spec, unit.plan, self._times.rates
        update_s, tail_s = self._times.update_s(unit), self._times.from_update_s(unit)
        if plan.gradients == "device":
            seconds = rates.move_s("d2h", spec.update_bytes)
            self._add("d2h", seconds, unit.made[-1], unit, update_s + tail_s)
            self._hold("gradients", spec.update_bytes, _Held(seconds, update_s, 0.0), unit, tail_s)
        elif plan.gradients == "disk":
            self._read_gradients(unit)
        nbytes = unit.states_bytes
        if plan.states != "disk" or not nbytes:
            return
        held = _Held(rates.move_s("disk_read", nbytes), update_s, rates.move_s("disk_write", nbytes))
        self._hold("states", nbytes, held, unit, tail_s)
        self.work.total_s["disk_read"] += held.before_s
        self.work.total_s["disk_write"] += held.after_s
        self._ahead("disk_read", "states", nbytes, held, unit, tail_s)
        if not unit.is_early:
            self._slack("disk_write", "states", nbytes, held.after_s)
            ready, then_s = begin.plus(update_s), self._behind_s(held, tail_s)
            self.work.jobs.append(Job("disk_write", held.after_s, *ready, unit.first, then_s, is_slack=True))

    def _read_gradients(self, unit: Trained) -> None:
        """Late updates find as many in slots as there are."""
        seconds = self._times.rates.move_s("disk_read", unit.spec.update_bytes)
        if unit.is_early or self._times.waits:
            self.work.total_s["disk_read"] += seconds
        if not unit.is_early and self._times.waits:
            self._kept_s.append(seconds)

    def _staged(self, unit: Trained, begin: Moment) -> None:
        rates = self._times.rates
        update_s, tail_s, sent_s = self._times.update_s(unit), self._times.from_update_s(unit), self._times.sent_s(unit)
        states, _, _, scratch = unit.staging
        there_s = rates.move_s("h2d", self._times.staged_bytes(unit))
        home_s = rates.move_s("d2h", states[1] - states[0])
        if unit.plan.gradients == "host":  # else states may come before the gradient is made
            self.work.jobs.append(
                Job("h2d", there_s, *self._times.home(unit), unit.first, update_s + tail_s, is_slack=False)
            )
        held = _Held(there_s, update_s, home_s)
        self._ahead("h2d", "staging", scratch[1], held, unit, tail_s)
        self._slack("d2h", "staging", scratch[1], home_s)
        then_s = self._behind_s(held, tail_s)
        self.work.jobs.append(Job("d2h", home_s, *begin.plus(update_s), unit.first, then_s, is_slack=True))
        self.work.total_s["h2d"] += there_s
        self.work.total_s["d2h"] += home_s
        if unit.plan.weights == "device":  # new weights are copied beside the way home of states
            self._hold("staging", scratch[1], _Held(there_s, update_s, max(home_s, sent_s)), unit, tail_s)
        else:
            sent_s += self._times.gathered_s(unit)
            self._hold("staging", scratch[1], _Held(there_s, update_s + sent_s, home_s), unit, tail_s - sent_s)

    # Slots.

    def _pool(self, tier: Tier, kind: PoolKind, nbytes: int) -> tuple[int, int]:
        """Size and number of the slots that a unit uses."""
        pools = [p for p in self._times.plan.pools if (p.tier, p.kind) == (tier, kind) and p.slot_bytes >= nbytes]
        size = min(pool.slot_bytes for pool in pools)
        return size, sum(pool.num_slots for pool in pools if pool.slot_bytes == size)

    def _hold(self, kind: PoolKind, nbytes: int, held: _Held, unit: Trained, tail_s: float) -> None:
        """A slot is held while it is filled, used and emptied. All that there are may be filled before their turn."""
        size, num_slots = self._pool("device" if kind == "staging" else "host", kind, nbytes)
        name = f"{num_slots} slots for {kind} of {size} bytes"
        self.work.total_s[name] += sum(held) / num_slots
        self.work.slack_s[name] = max(self.work.slack_s[name], held.before_s + held.after_s)
        if not unit.is_early and self._times.waits:
            job = Job(name, sum(held) / num_slots, *unit.after, unit.first, tail_s, is_slack=True)
            self.work.jobs.append(job)

    def _ahead(self, link: str, kind: PoolKind, nbytes: int, held: _Held, unit: Trained, tail_s: float) -> None:
        """What comes into a slot before an update, ahead of its turn if there is one: see ``_Fillings``."""
        if not unit.is_early and self._times.waits:
            self._slack(link, kind, nbytes, held.before_s)
            pool = (kind, *self._pool("device" if kind == "staging" else "host", kind, nbytes))
            job = Job(link, held.before_s, *unit.after, unit.first, held.used_s + tail_s, is_slack=True)
            self._fillings.add(pool, job, held.used_s + held.after_s)

    def _behind_s(self, held: _Held, tail_s: float) -> float:
        """What comes behind the slots that must be emptied: the last one is filled and used once more.

        Of more units than slots, the last to be filled waits until all others but those in slots were emptied.
        """
        return held.before_s + held.used_s + tail_s if self._times.waits else 0.0

    def _slack(self, link: str, kind: PoolKind, nbytes: int, seconds: float) -> None:
        """Slots may hold so many of these."""
        size, num_slots = self._pool("device" if kind == "staging" else "host", kind, nbytes)
        key = (link, kind, size)
        self._largest_s[key] = max(self._largest_s.get(key, 0.0), num_slots * seconds)

    def _take_off(self) -> None:
        """What is left out of sums, and of what a step must read: states and gradients that slots keep."""
        self.work.jobs += self._fillings.jobs()
        for (link, _, _), seconds in self._largest_s.items():
            self.work.slack_s[link] += seconds
        pools = [pool for pool in self._times.plan.pools if pool.kind == "states"]
        kept_s = sum(pool.num_slots * self._times.rates.move_s("disk_read", pool.slot_bytes) for pool in pools)
        self.work.total_s["disk_read"] -= kept_s
        slots = sum(pool.num_slots for pool in self._times.plan.pools if pool.kind in ("landing", "gradients"))
        self.work.total_s["disk_read"] -= sum(sorted(self._kept_s, reverse=True)[:slots])
        for name, slack_s in self.work.slack_s.items():
            if name in self.work.total_s and " slots for " in name:
                self.work.total_s[name] -= slack_s

    # Weights.

    def _fetches(self, trained: Mapping[int, Trained]) -> None:
        for size in sorted(set(slot_sizes(self._times.plan, "device"))):
            mine = {
                i for i, (spec, plan) in enumerate(self._times.pairs) if plan.weights != "device" and spec.weight_bytes
            }
            mine = {
                i for i in mine if self._pool("device", "weights", self._times.model.units[i].weight_bytes)[0] == size
            }
            seconds = {i: self._times.bring_s(*self._times.pairs[i])[1] for i in mine}
            number = slot_sizes(self._times.plan, "device").count(size)
            self._sweep("h2d", seconds, number * max(seconds.values(), default=0.0), trained)
        reads = {
            i: self._times.bring_s(*pair)[0] for i, pair in enumerate(self._times.pairs) if pair[1].weights == "disk"
        }
        slots = len(slot_sizes(self._times.plan, "device")) + len(slot_sizes(self._times.plan, "host"))
        self._sweep("disk_read", reads, slots * max(reads.values(), default=0.0), trained)

    def _sweep(self, link: str, seconds: Mapping[int, float], slack_s: float, trained: Mapping[int, Trained]) -> None:
        if not any(seconds.values()):
            return
        period = len(self._times.visits)
        by_visit = [seconds.get(visit.unit, 0.0) for visit in self._times.visits]
        firsts = [
            self._first(link, trained[visit.unit], s)
            if s and visit.unit in trained and trained[visit.unit].first == i + period
            else None
            for i, (visit, s) in enumerate(zip(self._times.visits, by_visit, strict=True))
        ]
        self.work.sweeps.append(Sweep(link, by_visit, firsts, slack_s))
        for start, stop in zip(self.work.starts, [*self.work.starts[1:], period], strict=True):
            again_s = sum(s for s, first in zip(by_visit[start:stop], firsts[start:stop], strict=True) if first is None)
            new_s = sum(
                s for s, first in zip(by_visit[start:stop], firsts[start:stop], strict=True) if first is not None
            )
            self.work.total_s[link] += new_s + max(again_s - slack_s, 0.0)

    def _first(self, link: str, unit: Trained, seconds: float) -> Job:
        """Of updated weights: they come behind the update."""
        read_s, fetch_s = self._times.bring_s(unit.spec, unit.plan)
        head_s = self._times.gathered_s(unit) + self._times.sent_s(unit) + (read_s if link == "h2d" else 0.0)
        ready = unit.after.plus(head_s if unit.is_early else head_s + self._times.update_s(unit))
        return Job(link, seconds, *ready, unit.first, fetch_s if link == "disk_read" else 0.0)

    def _add(self, link: str, seconds: float, begin: Moment, unit: Trained, tail_s: float) -> None:
        self.work.jobs.append(Job(link, seconds, *begin, unit.first, tail_s))
        self.work.total_s[link] += seconds


def _exchanged(unit: Trained, times: Times) -> Iterator[tuple[str, float, Moment, Trained, float]]:
    """Gradients of all ranks come, go home, and are added up there or before, pass by pass: for ``_Listing._add``."""
    exchange_s, left_s, added_s = times.exchanged_s(unit)
    is_there, tail_s = sums_on_device(unit.spec, unit.plan), times.from_gradients_s(unit)
    round_s = added_s + (left_s if is_there else 0.0)  # sums follow one another
    for i, moment in enumerate(unit.made):
        after_s = round_s * (len(unit.made) - 1 - i) + tail_s
        arrived = moment.plus(exchange_s)
        yield "reduce", exchange_s, moment, unit, left_s + added_s + after_s
        if is_there:
            yield "device_update", added_s, arrived, unit, left_s + after_s
            yield "d2h", left_s, arrived.plus(added_s), unit, after_s
        else:
            if left_s:
                yield "d2h", left_s, arrived, unit, added_s + after_s
            yield times.adder(unit), added_s, arrived.plus(left_s), unit, after_s
