"""Plans as plain text: which unit or pool owns how many bytes, tier by tier."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from outcore.core.quantities import format_bytes
from outcore.spec.budget import Limits, Reservation, reservations
from outcore.spec.model import ModelSpec
from outcore.spec.plan import TIERS, Plan, Tier, UnitPlan

_MOST_SAID = 3
"""Consumers of a tier that a refusal names, besides activations: these grow with the batch."""


def plan_table(model: ModelSpec, plan: Plan, limits: Limits | None = None) -> str:
    """Write down which unit or pool owns how many bytes on each tier.

    Args:
        model: Units in the plan's order.
        plan: The plan to print.
        limits: If given, each tier's total is printed with its budget.
    """
    rows: list[tuple[str, str, str]] = []
    for tier in TIERS:
        items = [r for r in reservations(model, plan) if r.tier == tier]
        if items or limits is not None:
            budget = None if limits is None else _budget(tier, limits)
            against = "" if budget is None else f"budget {format_bytes(budget)}"
            rows.append((tier, against, format_bytes(sum(r.nbytes for r in items))))
            rows += _tier_rows(items, [u.name for u in model.units], plan)
    how = f"precision {plan.precision}, prefetch depth {plan.prefetch_depth}, policy {_policies(plan)}"
    early = sum(u.early for u in plan.units)
    how += f", {early} units updated inside backward" if early else ""
    how += f", weights {_partitions(plan)}" if any(u.partition != "replicate" for u in plan.units) else ""
    pieces = plan.micro_batches_in_unit
    how += f", units run a batch in {pieces} pieces" if pieces > 1 else ""
    how += f"\nactivations kept while they fit in {format_bytes(plan.kept_bytes)}" if plan.kept_bytes else ""
    return _align(rows) + "\n" + how


def infeasible_table(
    model: ModelSpec,
    plan: Plan,
    limits: Limits,
    required_bytes: Mapping[Tier, int],
    *,
    raise_one_to: Mapping[Tier, int] = MappingProxyType({}),
    given: bool = False,
) -> str:
    """Say why nothing fits: need against budget per tier, the largest consumers, and activations.

    Args:
        model: Units in the plan's order.
        plan: The plan with the least need, or the one that was given.
        limits: The budget.
        required_bytes: Bytes that the plan takes, activations included.
        raise_one_to: Tier -> bytes of it that would do with the other tiers as given.
        given: Whether the plan was given and may not be changed.
    """
    lines = ["expected a plan within the budget, but no placement fits; the least that would do is:"]
    if given:
        lines = ["expected a plan within the budget, but the plan that was given takes more:"]
    rows: list[tuple[str, str, str]] = []
    for tier in TIERS:
        budget, need = _budget(tier, limits), required_bytes[tier]
        verdict = "fits" if need <= (budget or 0) else "too little"
        against = "no budget" if budget is None else f"budget {format_bytes(budget)}"
        rows.append((tier, f"{against}: {verdict}", format_bytes(need)))
        items = [r for r in reservations(model, plan) if r.tier == tier]
        consumers = sorted(_sums(items, plan).items(), key=lambda item: -item[1])
        said = [item for i, item in enumerate(consumers) if i < _MOST_SAID or "activations" in item[0]]
        rows += [(f"  {label}", "", format_bytes(nbytes)) for label, nbytes in said]
        reserve = need - sum(r.nbytes for r in items)
        if reserve:
            rows.append(("  activations (reserved)", "", format_bytes(reserve)))
    lines.append(_align(rows))
    lines.append(f"give {_as_budget(required_bytes)} or more, or train a smaller model or with smaller units")
    if raise_one_to:
        lines.append("or raise one tier and leave the others as they are:")
        lines += [f"  {t}{'_bytes' * (t == 'disk')}={_as_size(n)}" for t, n in raise_one_to.items()]
    return "\n".join(lines)


def _tier_rows(items: Sequence[Reservation], order: Sequence[str], plan: Plan) -> Iterator[tuple[str, str, str]]:
    for kind in ("weights", "gradients", "states", "next_weights", "next_states", "activations"):
        owned = {r.owner: r.nbytes for r in items if r.kind == kind}
        for label, nbytes in _runs([(name, owned[name]) for name in order if name in owned]):
            yield f"  {kind.replace('_', ' ')}", label, format_bytes(nbytes)
    buffers = sum(r.nbytes for r in items if r.kind == "buffers")
    if buffers:
        yield "  buffers", "all units", format_bytes(buffers)
    if workspace := sum(r.nbytes for r in items if r.kind == "workspace"):
        yield "  workspace", "activations, logits and loss of a micro-batch", format_bytes(workspace)
    slots = Counter(_pool_index(r) for r in items if r.kind == "slot")
    for index in sorted(slots):
        pool = plan.pools[index]
        label = f"{pool.kind}, {pool.num_slots} x {format_bytes(pool.slot_bytes)}"
        yield "  slots", label, format_bytes(pool.total_bytes)


def _sums(items: Sequence[Reservation], plan: Plan) -> dict[str, int]:
    """Add up bytes by kind, with the root and the pools apart, since they cannot move."""
    sums: dict[str, int] = {}
    for item in items:
        kind = item.kind.replace("_", " ")
        label = f"{kind} of the units" if item.owner else f"{kind} of the root"
        if item.kind == "workspace":
            label = "activations, logits and loss (workspace)"
        if item.kind == "slot":
            label = f"slots for {plan.pools[_pool_index(item)].kind}"
        sums[label] = sums.get(label, 0) + item.nbytes
    return sums


def _pool_index(slot: Reservation) -> int:
    return int(slot.owner.split("/")[1])


def _runs(owned: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    """Yield (label, bytes of all) of neighbours of equal size whose names count up."""
    run: list[tuple[str, int]] = []
    for name, nbytes in owned:
        if run and not (run[0][1] == nbytes and _follows(run[-1][0], name)):
            yield _run_label([n for n, _ in run]), sum(b for _, b in run)
            run = []
        run.append((name, nbytes))
    if run:
        yield _run_label([n for n, _ in run]), sum(b for _, b in run)


def _run_label(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0] or "root"
    first, last = names[0].split("."), names[-1].split(".")
    parts = [a if a == b else f"{a}-{b}" for a, b in zip(first, last, strict=True)]
    return f"{'.'.join(parts)} ({len(names)} units)"


def _follows(name: str, next_name: str) -> bool:
    """Return whether two names differ in one number only, by one."""
    parts, next_parts = name.split("."), next_name.split(".")
    if len(parts) != len(next_parts):
        return False
    differing = [(a, b) for a, b in zip(parts, next_parts, strict=True) if a != b]
    if len(differing) != 1 or not all(part.isdecimal() for part in differing[0]):
        return False
    number, next_number = map(int, differing[0])
    return number + 1 == next_number


def _policies(plan: Plan) -> str:
    counts = Counter(
        u.policy if u.activations == "device" else f"{u.policy} on {u.activations}" for u in plan.units if u.name
    )
    if len(counts) < 2:
        return next(iter(counts), "keep")
    return ", ".join(f"{policy} ({count} units)" for policy, count in sorted(counts.items()))


def _partitions(plan: Plan) -> str:
    counts = Counter("on each rank" if u.partition == "replicate" else _cut(u) for u in plan.units if u.name)
    return ", ".join(f"{how} ({count} units)" for how, count in sorted(counts.items()))


def _cut(unit: UnitPlan) -> str:
    over = "all ranks" if unit.partition == "world" else "the ranks of a machine"
    return f"shared by {over}" if unit.gather == "host" else f"cut over {over}"


def _budget(tier: Tier, limits: Limits) -> int | None:
    return {"device": limits.device_bytes, "host": limits.host_bytes, "disk": limits.disk_bytes}[tier]


def _as_budget(required_bytes: Mapping[Tier, int]) -> str:
    sizes: dict[Tier, str] = {"device": "device", "host": "host", "disk": "disk=..., disk_bytes"}
    said = (f"{name}={_as_size(required_bytes[tier])}" for tier, name in sizes.items() if required_bytes[tier])
    return f"Budget({', '.join(said)})"


def _as_size(nbytes: int) -> str:
    """Write a size as an argument, rounded up, so that it suffices."""
    return f'"{format_bytes(nbytes, is_need=True).replace(" ", "")}"'


def _align(rows: Sequence[tuple[str, str, str]]) -> str:
    """Align three columns: left, left, right."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows)
