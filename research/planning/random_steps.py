"""Random models, plans and machines: steps in random legal orders, compared with the bound.

python -m planning.random_steps 0 10000        (in the folder research)

"bound" behind it: no order is chosen; "roomy": only for roomy plans whose activations stay on the device.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import get_args

from planner.models import unit
from plans import share_updates

from outcore.core.quantities import PAGE_BYTES, align_up
from outcore.order.weight_cache import nothing_held
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import Circumstances, consecutive
from outcore.planner.timing.player import Task, play
from outcore.planner.timing.rates import LINKS, OperationTimes, Rates, Shared, Way
from outcore.planner.timing.simulate import tasks_of
from outcore.spec.budget import can_be_early
from outcore.spec.layout import shared
from outcore.spec.model import ModelSpec, Sharing, UnitSpec
from outcore.spec.plan import TIERS, Plan, UnitPlan
from outcore.spec.schedule import ROOT, Visit, usual_visits
from outcore.spec.timeline import COMPUTE, HOST
from planning.bound.bound import bound_of

LEGAL = [(w, g, s) for w in TIERS for g in TIERS for s in TIERS if s != "device" or w == g == "device"]
STEPS = 10


@dataclass(frozen=True)
class Step:
    """One of many equal steps."""

    model: ModelSpec
    plan: Plan
    rates: Rates
    visits: tuple[Visit, ...]
    circumstances: Circumstances
    is_roomy: bool


def random_step(chance: random.Random, *, has_ranks: bool = False, kept_first: bool = True) -> Step:
    """Draw a model, plan and machine. Args: has_ranks: Several ranks train together. kept_first: See ``Plan``."""
    model = random_model(chance)
    if has_ranks:
        nodes, per_node = chance.choice([(1, 2), (1, 3), (2, 2), (4, 1)])
        sharing = chance.choice(get_args(Sharing))
        model = replace(model.among(nodes * per_node, 0, per_node), sharing=sharing)
    is_roomy = chance.random() < 0.4
    if not has_ranks:
        model = replace(model, micro_batches_in_unit=chance.choice([1, 1, 1, 1, 1, 2, 3]))
    micro_batches = chance.choice([1, 1, 2, 3])
    plan = replace(random_plan(model, chance, micro_batches, is_roomy=is_roomy), kept_updated_first=kept_first)
    early = [u.name for u in plan.units if u.early]
    circumstances = Circumstances(
        clips=chance.random() < 0.7, overtaken=frozenset(name for name in early if chance.random() < 0.3)
    )
    visits = usual_visits(model, micro_batches)
    return Step(model, plan, random_rates(model, chance), visits, circumstances, is_roomy)


def random_model(chance: random.Random) -> ModelSpec:
    precision = chance.choice(["bf16", "bf16", "fp32"])
    large, root = chance.choice([10**5, 10**6]), chance.choice([0, 10**4, 10**6])
    sizes = [
        large if chance.random() < 0.8 else chance.choice([large // 3, 2 * large]) for _ in range(chance.randint(1, 12))
    ]
    units: list[UnitSpec] = [unit("", root, precision=precision)]
    for i, size in enumerate(sizes):
        is_frozen = chance.random() < 0.1
        units.append(unit(f"l.{i}", 0 if is_frozen else size, size if is_frozen else 0, precision=precision))
    return ModelSpec(units=tuple(units), state_names=("exp_avg", "exp_avg_sq"), precision=precision)


def random_plan(model: ModelSpec, chance: random.Random, micro_batches: int, *, is_roomy: bool) -> Plan:
    """Draw homes shared by many units, as in plans that a search finds; sometimes each unit has its own."""
    kinds = [chance.choice(LEGAL) for _ in range(chance.randint(1, 3))]
    cut = sorted(chance.randrange(len(model.units) + 1) for _ in kinds[1:])
    sends_away = chance.random() < 0.3
    is_wild, early_share, units = chance.random() < 0.15, chance.choice([0.0, 0.0, 0.5, 1.0]), []
    for i, spec in enumerate(model.units):
        weights, gradients, states = chance.choice(LEGAL) if is_wild else kinds[sum(i >= c for c in cut)]
        if not spec.name:
            weights = "device"
            states = states if states != "device" or gradients == "device" else "host"
        rest = (gradients, states) if spec.trainable else (weights, weights)
        homes = UnitPlan(
            name=spec.name,
            weights=weights,
            gradients=rest[0],
            states=rest[1],
            policy=chance.choice(["keep", "recompute"]) if spec.name else "keep",
        )
        homes = replace(homes, early=can_be_early(spec, homes) and chance.random() < early_share)
        tier = chance.choice(TIERS) if spec.name and sends_away else "device"
        if tier != "device":
            saved = align_up(int(spec.weight_bytes * chance.uniform(0.2, 2)) or 1, PAGE_BYTES)
            homes = replace(homes, policy="keep", activations=tier, saved_bytes=saved)
        units.append(homes)
    units = [shared(unit, model.sharing) for unit in share_updates(units, chance.choice([0.0, 0.0, 0.5, 1.0]))]
    depth, buckets, slots = (
        (2, 2, 3) if is_roomy else (chance.randint(0, 3), chance.randint(1, 3), chance.randint(1, 4))
    )
    comfort = Comfort(prefetch_depth=depth, num_buckets=buckets, max_slots_host=slots)
    return Plan(
        precision=model.precision,
        units=tuple(units),
        pools=pools_for(model, units, comfort),
        prefetch_depth=depth,
        updated_first=last_units(units, chance.choice([0, 0, 1, 3, len(units)])),
        accumulation_steps=micro_batches,
        micro_batches_in_unit=model.micro_batches_in_unit,
    )


def random_rates(model: ModelSpec, chance: random.Random) -> Rates:
    """Draw links that take as long for a large unit as its forward, or a few times as long."""
    largest = max(max(spec.weight_bytes for spec in model.units), 1)
    numel = max(sum(p.numel for p in spec.params) for spec in model.units)

    def pace(amount: float) -> float:
        return amount / 10 ** chance.uniform(-1.0, 0.7)

    parts = {link: chance.uniform(0.1, 0.7) for link in LINKS[1:6]}
    ways = {"h2d": chance.uniform(0.5, 0.8), "d2h": chance.uniform(0.5, 0.8)}
    common = (Shared(name="host memory", parts=parts), Shared(name="bus", parts=ways))
    numels = {spec.name: sum(p.numel for p in spec.params) / max(numel, 1) for spec in model.units}
    backward = chance.choice([1.0, 2.0])
    bytes_per_s = {link: pace(largest) for link in ("h2d", "d2h")}
    bytes_per_s |= {link: pace(4 * largest) for link in ("disk_read", "disk_write")}
    bytes_per_s |= {link: pace(30 * largest) for link in ("compute", "update")}
    if model.units[0].num_ranks > 1:
        bytes_per_s |= {way: pace(largest) for way in ("reduce", *get_args(Way))}
        parts = {"reduce": 1.0, "gather": 1.0, "link": 1.0, "d2h": 0.3}
        common += (Shared(name="between ranks", parts=parts),)
    return Rates(
        forward_s=numels,
        backward_s={name: backward * s for name, s in numels.items()},
        bytes_per_s=bytes_per_s,
        parameters_per_s={"update": pace(numel), "device_update": pace(5 * numel), "compute": pace(20 * numel)},
        shared=common[: chance.choice([0, 0, 1, 2])] + common[2:],
        host_runs_ahead=chance.random() < 0.8,
    )


def steps_s(step: Step, chance: random.Random, *, num_orders: int, steps: int = STEPS) -> Iterator[float]:
    """Seconds of a step in submission order, and in random orders of the lanes; half the time updates are in any order.

    A step lasts from the end of its compute to the end of the next step's compute. If it is longer, the time until all
    that was submitted by then is done counts: the last of some steps may leave more behind than the first. An order may
    leave ever more behind; so no step counts as shorter than all work of all steps divided by their number.
    """
    if chance.random() < 0.5:
        shuffled = chance.sample(range(len(step.model.units)), len(step.model.units))
        names = tuple(step.model.units[i].name for i in shuffled)
        step = replace(step, plan=replace(step.plan, updated_first=names))
    plain = laid_out(step, steps)
    yield settled_s(*plain, step.rates)[0]
    for _ in range(num_orders if step.rates.host_runs_ahead else 0):
        found_s, end_s = settled_s(*reordered(*plain, chance), step.rates)
        yield max(found_s, end_s / steps)


def chosen_s(step: Step, num_steps: int = STEPS) -> float:
    """Seconds of a step with the fastest of the update orders that a search tries. Args: num_steps: Simulated steps."""

    def seconds(orders: Sequence[tuple[tuple[str, ...], bool]]) -> list[float]:
        plans = [replace(step.plan, updated_first=first, kept_updated_first=kept) for first, kept in orders]
        return [settled_s(*laid_out(replace(step, plan=plan), num_steps), step.rates)[0] for plan in plans]

    count = len(step.model.units)
    trained = [i for i in (*range(1, count), ROOT) if step.model.units[i].trainable]
    firsts = [last_units(step.plan.units, number) for number in sorted({0, 1, 2, 3, count // 2, count})]
    kept = (True, False) if any(u.states == "disk" for u in step.plan.units) else (True,)
    orders = list(itertools.product(firsts, kept))
    best_s, best = min(zip(seconds(orders), orders, strict=True))
    if ROOT in trained:
        root_first = ("", *best[0]), best[1]
        best_s, best = min((best_s, best), *zip(seconds([root_first]), [root_first], strict=True))
    return best_s


def last_units(units: Sequence[UnitPlan], number: int) -> tuple[str, ...]:
    """Names of some of the last units, the last one first."""
    return tuple(unit.name for unit in units[: max(len(units) - number - 1, 0) : -1])


def laid_out(step: Step, steps: int) -> tuple[list[Task], list[int]]:
    """Return the tasks of some steps, and the last compute task of each."""
    found = consecutive(step.model, step.plan, step.visits, nothing_held(step.plan), step.circumstances)
    pace = OperationTimes(step.model, step.plan, step.rates, clips=step.circumstances.clips)
    laid = tasks_of([row.operations for row in itertools.islice(found, steps)], pace, step.rates)
    return laid.tasks, laid.ends


def settled_s(tasks: Sequence[Task], ends: Sequence[int], rates: Rates) -> tuple[float, float]:
    """Return the seconds of one of the later steps, and of all steps."""
    end, half = play(tasks, rates).end, len(ends) // 2
    done = list(itertools.accumulate(end, max))
    return max(at[ends[-1]] - at[ends[half - 1]] for at in (end, done)) / (len(ends) - half), done[-1]


def reordered(tasks: Sequence[Task], ends: Sequence[int], chance: random.Random) -> tuple[list[Task], list[int]]:
    """Return another order of all lanes but compute: each lane picks any task that is ready.

    A task that does no work keeps its turn: waiting for it means waiting for all earlier work of its lane
    (``order.ledger.newest``).
    """
    waiting = [len(set(task.after)) for task in tasks]
    successors: list[set[int]] = [set() for _ in tasks]
    computes = [i for i, task in enumerate(tasks) if task.lane == COMPUTE]
    for earlier, later in itertools.pairwise(computes):
        successors[earlier].add(later)
        waiting[later] += earlier not in tasks[later].after
    last_of: dict[str, int] = {}
    for i, task in enumerate(tasks):
        keeps_turn = not task.nbytes and task.lane not in (COMPUTE, HOST) and task.lane in last_of
        before = {*task.after, last_of[task.lane]} if keeps_turn else set(task.after)
        waiting[i] += len(before) - len(set(task.after))
        for first in before:
            successors[first].add(i)
        last_of[task.lane] = i
    wish = [
        chance.choice([i, i + 200 * chance.random(), i - 200 * (task.lane == "h2d")]) for i, task in enumerate(tasks)
    ]
    ready = {i for i, number in enumerate(waiting) if not number}
    free: Counter[str] = Counter()
    end, order = [0.0] * len(tasks), []
    earliest = [0.0] * len(tasks)
    while ready:
        begin = {i: max(earliest[i], free[tasks[i].lane]) for i in ready}
        soonest = min(begin.values())
        index = min((i for i in ready if begin[i] <= soonest), key=wish.__getitem__)
        ready.remove(index)
        order.append(index)
        end[index] = begin[index] + tasks[index].seconds
        free[tasks[index].lane] = end[index]
        for other in successors[index]:
            waiting[other] -= 1
            earliest[other] = max(earliest[other], end[index])
            if not waiting[other]:
                ready.add(other)
    place = {index: i for i, index in enumerate(order)}
    found = [tasks[i]._replace(after=tuple(place[j] for j in tasks[i].after)) for i in order]
    return found, [place[i] for i in ends]


def compared(seed: int, options: frozenset[str] = frozenset()) -> dict[str, list[float]]:
    """Return seconds over the bound of one random step, by kind; empty if its bound is 0. Args: options: See above."""
    chance = random.Random(seed)
    step = random_step(chance, has_ranks="ranks" in options, kept_first=seed % 4 != 3)
    bound = bound_of(step.model, step.plan, step.rates, step.visits, step.circumstances)
    if not bound.seconds:
        return {}
    plain, *others = (seconds / bound.seconds for seconds in steps_s(step, chance, num_orders=1))
    sends_away = any(u.saved_bytes for u in step.plan.units)
    found, is_roomy = {"": plain}, step.is_roomy and not sends_away
    if "bound" not in options and (is_roomy or "roomy" not in options):
        ratio = chosen_s(step) / bound.seconds
        if ratio < 1 - 1e-9:  # with so few steps a step may not have settled
            print(f"seed {seed}: {ratio:.5f} of the bound in {STEPS} steps, order chosen", flush=True)
            ratio = chosen_s(step, 6 * STEPS) / bound.seconds
        found[", order chosen"] = ratio
    ratios = {"reordered": others}
    for how, ratio in found.items():
        ratios[f"all{how}"] = [ratio] * (not how or "roomy" not in options)
        ratios[f"roomy{how}"] = [ratio] * is_roomy
        ratios[f"with activations away{how}"] = [ratio] * sends_away
    if min([plain, *others]) < 1 - 1e-9:  # as above
        again_s = steps_s(step, chance, num_orders=1, steps=6 * STEPS)
        plain, *others = (seconds / bound.seconds for seconds in again_s)
    if min([plain, *others]) < 1 - 1e-9:
        print(f"seed {seed}: {plain:.5f}, {others} of the bound, {dict(bound.parts)}", flush=True)
    return ratios


def main() -> None:
    first, end, *options = sys.argv[1:]
    ratios: dict[str, list[float]] = {}
    with multiprocessing.Pool() as pool:
        found = pool.imap(partial(compared, options=frozenset(options)), range(int(first), int(end)))
        for number, one in enumerate(found, 1):
            for name, values in one.items():
                ratios.setdefault(name, []).extend(values)
            if number % 500 == 0:
                say(ratios)
    say(ratios)


def say(ratios: Mapping[str, list[float]]) -> None:
    """Print the least, median, 90% and largest ratio of each kind."""
    for name, found in ratios.items():
        if not found:
            continue
        ordered = sorted(found)
        at = {q: ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.0, 0.5, 0.9, 1.0)}
        print(name, len(ordered), {q: round(x, 4) for q, x in at.items()}, flush=True)


if __name__ == "__main__":
    main()
