"""The work of activations that leave the device."""

from __future__ import annotations

import functools

from outcore.planner.timing.rates import Rates
from outcore.spec.plan import Tier
from planning.bound.jobs import LinkJob, LinkWork, Sweep
from planning.bound.times import Times, VisitMoment


def list_activations(times: Times, work: LinkWork, *, alike: bool = False) -> None:
    """Add the moves of activations: they leave before the next call but one, and come back for backward.

    Those of the last two calls before backward are still on the device, and of those that went to disk the last ones
    are still in host slots. See [Note: activations away] in ``order.activations``.

    Args:
        times: Times of the plan.
        work: The moves are added to it.
        alike: Whether only sums are needed.
    """
    if not any([plan.saved_bytes for _, plan in times.pairs]):
        return
    kept = sum(p.num_slots for p in times.plan.pools if (p.tier, p.kind) == ("host", "activations"))
    are_equal = len({(plan.activations, plan.saved_bytes) for spec, plan in times.pairs if spec.name}) == 1
    brought, moved_s = [0.0] * len(times.visits), functools.cache(functools.partial(_moved_s, times.rates))
    for calls in times.course.passes:
        plans = [times.pairs[times.visits[i].unit][1] for i, _ in calls[:-1]]
        on_disk = [place for place, plan in enumerate(plans) if plan.saved_bytes and plan.activations == "disk"]
        in_slots = on_disk[max(len(on_disk) - kept, 0) :]
        for place, ((i, then), plan) in enumerate(zip(calls[:-1], plans, strict=True)):
            nbytes = plan.saved_bytes
            if not nbytes:
                continue
            leave_s, bring_s, write_s, read_s = moved_s(nbytes, plan.activations)
            work.total_s["d2h"] += leave_s
            work.total_s["disk_write"] += write_s
            if place == len(calls) - 2:
                continue
            if place in in_slots:
                write_s = read_s = 0.0
            work.total_s["disk_read"] += read_s
            work.total_s["h2d"] += bring_s
            if alike:
                continue
            begin = VisitMoment(i, times.used_s[i])
            left = begin.plus(leave_s)
            until = (then, read_s + bring_s)
            if are_equal and place + kept + 2 < len(calls):  # a later one needs the slot
                until = (calls[place + kept + 2][0], leave_s)
            jobs = [
                LinkJob("d2h", leave_s, *begin, calls[place + 2][0], 0.0),
                LinkJob("disk_write", write_s, *left, *until),
                LinkJob("disk_read", read_s, *left.plus(write_s), then, bring_s),
                LinkJob("h2d", bring_s, *left.plus(write_s + read_s), then, 0.0),
            ]
            work.jobs += [job for job in jobs if job.seconds]
            brought[then] = bring_s
    slots = sum(p.num_slots for p in times.plan.pools if (p.tier, p.kind) == ("device", "activations"))
    if any(brought):
        name = f"h2d with {slots} slots for activations"
        work.sweeps.append(Sweep(name, brought, [None] * len(brought), slots))


def _moved_s(rates: Rates, nbytes: int, tier: Tier) -> tuple[float, float, float, float]:
    """Return seconds off the device, back to it, to disk, and back from disk."""
    leave_s, bring_s = rates.move_s("d2h", nbytes), rates.move_s("h2d", nbytes)
    if tier != "disk":
        return leave_s, bring_s, 0.0, 0.0
    return leave_s, bring_s, rates.move_s("disk_write", nbytes), rates.move_s("disk_read", nbytes)
