"""What ``outcore plan`` has found, as text for people and as data."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outcore.command.plan.answer import Answer
from outcore.command.plan.recipes import Gain
from outcore.core.quantities import format_bytes, format_rate
from outcore.planner.search.evaluations import Evaluations
from outcore.spec.layout import states_bytes
from outcore.spec.plan import Plan, Tier
from outcore.spec.plan_table import plan_table
from outcore.spec.timeline import COMPUTE

_DAY_S = 86400.0
_SHORT_DAYS = 365.0
"""A drive that lasts less than this is worth a warning."""


class Range(NamedTuple):
    """The least and the most that is predicted of one plan."""

    step_s: tuple[float, float]
    tokens_per_s: tuple[float, float]

    @property
    def step_text(self) -> str:
        """Say the seconds."""
        return f"{self.step_s[0]:.4g} to {self.step_s[1]:.4g} s"

    @property
    def tokens_text(self) -> str:
        """Say the tokens per second."""
        return " to ".join(map(format_rate, self.tokens_per_s))


def range_of(answer: Answer) -> Range | None:
    """Return the range of an answer's plan, which is made for the figures in between. None: no figure is a range."""
    if not answer.hardware.has_range:
        return None
    bare, saves, tokens = answer.found.bare, answer.found.candidate.saves, answer.setting.tokens
    ends = (dataclasses.replace(answer.setting, machine=answer.hardware.at(end)) for end in ("fast", "slow"))
    fast_s, slow_s = (Evaluations(end).simulation(bare, saves).step_s for end in ends)
    return Range((fast_s, slow_s), (tokens / slow_s, tokens / fast_s)) if fast_s else None


_LIMITS = {
    "compute": "computation on the device",
    "host": "the processor, which launches the kernels",
    "update": "optimizer updates on the processor",
    "device_update": "optimizer updates on the device",
    "h2d": "copies from host memory to the device",
    "d2h": "copies from the device to host memory",
    "disk_read": "what is read from the drive in every step",
    "disk_write": "what is written to the drive in every step",
}
"""Links of a machine -> what limits a step, in words."""


def limits_text(link: str) -> str:
    """Say in words what limits a step. Args: link: As ``Simulation.binding`` names it."""
    return _LIMITS.get(link, link.replace("_", " "))


def verdict_of(answer: Answer) -> str:
    """Say in two or three sentences that the model fits, how fast it trains, and what limits it."""
    tokens_per_s, binding = answer.tokens_per_s, answer.found.simulation.binding
    if not tokens_per_s:
        return "Fits."
    counted, long = answer.question.counted, _duration(1e6 / tokens_per_s)
    said = [f"Fits. {format_rate(tokens_per_s)} {counted}/s: a million {counted} take {long}."]
    if binding:
        link, part = max(binding.items(), key=lambda item: item[1])
        said.append(f"Limited by {limits_text(link)} ({part:.0%} of the step).")
    days = drive_days(answer)
    if days is not None and days < _SHORT_DAYS:
        said.append(f"Writing wears the drive out in {days:,.0f} days of training.")
    return " ".join(said)


def _duration(seconds: float) -> str:
    """Say a time in the largest unit of which there is at least one and a half."""
    for name, length in (("days", _DAY_S), ("hours", 3600.0), ("minutes", 60.0)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.3g} {name}"
    return f"{seconds:.3g} seconds"


def to_text(found: Answer, helping: Sequence[Gain] = ()) -> str:
    """Return the answer as text: what is predicted, where everything lives, which plans lost and why, what would help.

    Args:
        found: The answer.
        helping: The recipes that would help.
    """
    rows = [*_facts(found), *_memory(found), *_runners_up(found), *_helps(found, helping)]
    width = max(len(name) for name, _ in rows)
    lines = (f"{name:<{width}}  {value}".rstrip() for name, value in rows)
    return "\n".join([verdict_of(found), "", *lines, "", plan_table(found.spec, found.found.plan, found.limits)])


def _facts(answer: Answer) -> Iterator[tuple[str, str]]:
    found, asked = answer.found, answer.question
    numel = sum(param.parameters for unit in answer.spec.units for param in unit.params)
    yield "model", f"{asked.model}: {numel / 1e9:.2f}e9 parameters in {len(answer.spec.units) - 1} units"
    trained = sum(unit.trainable_numel for unit in answer.spec.units)
    nbytes = sum(states_bytes(s, u, answer.spec) for s, u in zip(answer.spec.units, found.plan.units, strict=True))
    if trained:
        yield "optimizer", f"{asked.optim}: {nbytes / trained:.2f} bytes of states per parameter, masters included"
    yield "machine", answer.hardware.name
    ranks = asked.ranks
    if ranks.size > 1:
        yield "ranks", f"{ranks.size} ({ranks}): figures are per rank unless noted otherwise"
    each = f"{ranks.size} ranks with " if ranks.size > 1 else ""
    batch = f"{each}{asked.grad_accum} x " if asked.grad_accum > 1 else each
    ends = range_of(answer)
    step = f"{found.simulation.step_s:.4g} s (predicted{f', {ends.step_text}' if ends else ''})"
    yield "step", f"{step} for {batch}{asked.micro_batch}"
    of_all = " of all ranks" if ranks.size > 1 else ""
    yield (
        asked.counted,
        f"{format_rate(answer.tokens_per_s)} per second (predicted{f', {ends.tokens_text}' if ends else ''}){of_all}",
    )
    lane, busy_s = answer.busiest_lane
    share = busy_s / found.simulation.step_s if found.simulation.step_s else 0.0
    yield "busiest", f"{lane} works {busy_s:.4g} s, {share:.0%} of the step"
    yield (
        "limited by",
        ", ".join(f"{link} {part:.0%}" for link, part in found.simulation.binding.items() if part >= 0.01),
    )
    busy = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in answer.busy_s().items())
    yield "busy", f"{busy} s per step"
    waits = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in answer.exposed_s().items() if lane != COMPUTE)
    if ranks.size > 1:
        yield "received", f"{received_text(answer)} from other ranks per step"
        if any(unit.partition != "replicate" and unit.gather == "link" for unit in found.plan.units):
            yield "", "weights are gathered between ranks: in a loop of your own, all ranks must visit the same units"
    yield "waits", f"compute waits for {waits} s per step" if waits else "compute waits for nothing"
    homes = Counter((unit.weights, unit.gradients, unit.states) for unit in found.plan.units[1:])
    for (weights, gradients, states), count in homes.items():
        yield "units", f"{count} with weights on {weights}, gradients on {gradients}, states on {states}"
    yield from _activations(answer)
    yield from (("note", note) for note in answer.notes)
    for said in order_texts(found.plan):
        yield "order", said
    staged = sum(unit.update == "device" for unit in found.plan.units)
    if staged:
        yield "share", f"the device updates {staged} units whose states are in host memory"
    if answer.written_bytes:
        yield "disk", _wear(answer)


_NAMED = 3
"""Units that are named; the plan has them all."""


def order_texts(plan: Plan) -> Iterator[str]:
    """Say how the plan's order of updates differs from the usual one."""
    if plan.updated_first:
        named, others = plan.updated_first[:_NAMED], len(plan.updated_first[_NAMED:])
        rest = f" and {others} more in the plan's order" if others else ""
        yield f"updates begin with {', '.join(name or 'the root' for name in named)}{rest}"
    if not plan.kept_updated_first:
        yield "units whose states are still in slots are updated in their turn, not first"


_POLICIES = {"keep": "all that forward saves", "select": "costly results", "recompute": "arguments alone"}


def _activations(answer: Answer) -> Iterator[tuple[str, str]]:
    for (policy, tier), count in answer.policies.items():
        yield "activations", f"{count} units: {_POLICIES[policy]} ({policy}), resting on {tier}"
    if answer.guess:
        yield "", f"of unknown size, so they get a share of the device, and homes follow the rule: {answer.guess}"


def received_text(answer: Answer) -> str:
    """Say what one rank receives from the others in a step."""
    named = {"reduce": "gradients", "gather": "new weights", "link": "weights"}
    found = answer.received_bytes()
    return ", ".join(f"{format_bytes(int(found[lane]))} of {what}" for lane, what in named.items() if found[lane])


def _memory(answer: Answer) -> Iterator[tuple[str, str]]:
    nbytes = answer.activation_bytes
    room = f"of which {format_bytes(nbytes)}" if nbytes is not None else "and an unknown size of"
    yield "peak", f"{_sizes(answer.peak_bytes())} in use at once, {room} activations and workspace"
    is_shared, least = answer.setting.ranks.per_node > 1, answer.least
    if is_shared:
        yield "", f"by all ranks of a node: {_sizes(answer.of_node(answer.peak_bytes(), all_tiers=True))}"
    shared = " (of host and disk: for all ranks of a node)" if is_shared else ""
    yield "least", f"of one tier, with the others as they are{shared}: {_needs(answer.of_node(least.with_others))}"
    yield "", f"all at once, the least device first: {_needs(answer.of_node(least.at_all))}"


def _sizes(by_tier: Mapping[Tier, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in by_tier.items() if nbytes)


def _needs(by_tier: Mapping[Tier, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(nbytes, is_need=True)}" for tier, nbytes in by_tier.items() if nbytes)


def _helps(answer: Answer, helping: Sequence[Gain]) -> Iterator[tuple[str, str]]:
    now_s = answer.found.simulation.step_s
    for recipe, step_s, factor in helping:
        steps = f"{now_s:.4g} -> {step_s:.4g} s per step"
        yield "helps", f"{recipe.options}: {factor:.2f} x {answer.question.counted}/s, {steps}; {recipe.effect}"


def _wear(answer: Answer) -> str:
    life = drive_life(answer)
    on_node = " on each node" if answer.setting.ranks.size > 1 else ""
    text = f"{format_bytes(int(1000 * answer.written_bytes))} written per 1,000 steps{on_node}"
    return text + (f"; {life}" if life else "")


def drive_life(answer: Answer) -> str:
    """Say how long the drive lasts; empty if that is not known."""
    disk = answer.hardware.disk
    if disk is None or not disk.endurance_bytes or not answer.written_bytes:
        return ""
    steps = disk.endurance_bytes / answer.written_bytes
    return f"the drive lasts {steps:,.0f} steps, {drive_days(answer):,.0f} days"


def drive_days(answer: Answer) -> float | None:
    """Return the days of training that the drive lasts; None if that is not known, or nothing is written."""
    disk = answer.hardware.disk
    if disk is None or not disk.endurance_bytes or not answer.written_bytes:
        return None
    return disk.endurance_bytes / answer.written_bytes * answer.found.simulation.step_s / _DAY_S


def _runners_up(answer: Answer) -> Iterator[tuple[str, str]]:
    for other in answer.found.runners_up:
        seconds = "" if other.step_s is None else f"{other.step_s:.4g} s, "
        yield "not", f"{other.name}: {seconds}{other.reason}"


def to_json(answer: Answer, helping: Sequence[Gain] = ()) -> str:
    """Return the answer as JSON. Args: helping: The recipes that would help."""
    found, disk, ends = answer.found, answer.hardware.disk, range_of(answer)
    endurance = disk.endurance_bytes if disk is not None and answer.written_bytes else 0.0
    facts: dict[str, Any] = {
        "fits": True,
        **dataclasses.asdict(answer.question),
        "verdict": verdict_of(answer),
        "predicted_step_s": found.simulation.step_s,
        "predicted_step_s_range": ends and ends.step_s,
        f"predicted_{answer.question.counted}_per_s": answer.tokens_per_s,
        f"predicted_{answer.question.counted}_per_s_range": ends and ends.tokens_per_s,
        "busiest_lane": dict(zip(("lane", "seconds"), answer.busiest_lane, strict=True)),
        "received_bytes": answer.received_bytes(),
        "binding": dict(found.simulation.binding),
        "busy_s": answer.busy_s(),
        "exposed_s": answer.exposed_s(),
        "limits": dataclasses.asdict(answer.limits),
        "reserved_bytes": dict(found.plan.tier_bytes),
        "activation_bytes": answer.activation_bytes,
        "workspace_bytes": found.plan.workspace_bytes,
        "kept_bytes": found.plan.kept_bytes,
        "activations": answer.ways(),
        "not_followed": answer.guess or None,
        "notes": answer.notes,
        "peak_bytes": answer.peak_bytes(),
        "node_peak_bytes": answer.of_node(answer.peak_bytes(), all_tiers=True),
        "peaks": [
            {"tier": load.tier, "label": load.label, "reserved_bytes": load.reserved_bytes, "bytes": load.peak_bytes}
            for load in answer.loads
        ],
        "least_bytes": answer.of_node(answer.least.at_all),
        "least_bytes_with_others_as_given": answer.of_node(answer.least.with_others),
        "recipes": [{**gain.recipe.facts, "step_s": gain.step_s, "gain": gain.factor} for gain in helping],
        "written_bytes_per_1000_steps": 1000 * answer.written_bytes,
        "drive_life_steps": endurance / answer.written_bytes if endurance else None,
        "runners_up": [dataclasses.asdict(other) for other in found.runners_up],
        "plan": json.loads(found.plan.to_json()),
    }
    return json.dumps(facts, indent=2)
