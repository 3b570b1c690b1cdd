"""The page that ``outcore plan --html`` writes: the answer as data, and the script that draws it. It loads nothing."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from outcore.command.plan.answer import Answer
from outcore.command.plan.misfit import Misfit
from outcore.command.plan.recipes import Gain
from outcore.command.plan.text import (
    drive_days,
    drive_life,
    limits_text,
    order_texts,
    range_of,
    received_text,
    verdict_of,
)
from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes, format_rate
from outcore.planner.search.curves import CurvePoint, curves
from outcore.planner.timing.rank_layout import links_of, network_of
from outcore.spec.budget import reservations
from outcore.spec.plan import TIERS, UnitPlan
from outcore.spec.timeline import COMPUTE, Span

_PARTS = {
    "next_weights": "second homes",
    "next_states": "second homes",
    "activations": "activations of units",
    "workspace": "activations and workspace",
}
_SAVED = {
    "keep": "activations kept",
    "select": "costly results kept",
    "recompute": "computed again in backward, its arguments kept",
}
_LANES = {
    "h2d": "brings bytes from host memory to the device",
    "write_back": "brings new weights to the device",
    "d2h": "takes gradients and activations to host memory",
    "update": "runs updates and sums on the processor",
    "states_h2d": "brings states to the device for an update",
    "device_update": "runs updates on the device",
    "states_d2h": "takes states and new weights back",
    "weights_read": "reads weights from disk",
    "states_read": "reads states and gradients",
    "disk_write": "writes gradients, weights and activations to disk",
    "states_write": "writes states",
    "reduce": "exchanges gradients between ranks",
    "gather": "exchanges new weights",
    "link": "gathers weights that are cut over ranks",
}
"""What each lane does."""


def write_page(answer: Answer, helping: Sequence[Gain], path: Path) -> None:
    """Write the page.

    Args:
        answer: What it shows.
        helping: The recipes that would help.
        path: The file.

    Raises:
        ConfigError: The file cannot be written.
    """
    _write(path, page(facts_of(answer, helping)))


def write_misfit(misfit: Misfit, path: Path) -> None:
    """Write the page of a model that does not fit. Raises: ConfigError: The file cannot be written."""
    title = html.escape(f"{misfit.question.model} does not fit {misfit.machine}")
    head = f'<meta charset="utf-8"><title>outcore plan: {title}</title><style>{_asset("page.css")}</style>'
    said = html.escape(f"{misfit.error}\n\n{misfit.to_text()}")
    _write(path, f'<!doctype html>\n<html lang="en">{head}<h1>{title}</h1><pre>{said}</pre></html>\n')


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--html: expected a file that can be written, but got '{path}': {error.strerror}") from error


def page(data: Mapping[str, Any]) -> str:
    """Return the whole file as text."""
    # An end tag inside the data would end the script.
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    found = _asset("page.html")
    title = html.escape(f"outcore plan: {data['model']} on {data['machine']}")
    for name, value in {"title": title, "style": _asset("page.css"), "script": _asset("page.js"), "data": text}.items():
        found = found.replace("{{" + name + "}}", value)
    return found


def _asset(name: str) -> str:
    return (files(__package__) / name).read_text(encoding="utf-8")


def facts_of(answer: Answer, helping: Sequence[Gain] = ()) -> dict[str, Any]:
    """Return all that the page shows. Args: helping: The recipes that would help."""
    asked, simulation = answer.question, answer.found.simulation
    return {
        "model": _short(asked.model),
        "machine": answer.hardware.name,
        "verdict": verdict_of(answer),
        "asked": _asked(answer),
        "counted": asked.counted,
        "tokens_per_s": answer.tokens_per_s,
        "drive_days": drive_days(answer),
        "facts": list(_facts(answer)),
        "tiers": list(_tiers(answer)),
        "units": list(_units(answer)),
        "homes_text": _homes_text(answer),
        "timeline": _timeline(answer),
        "time_text": (
            f"{simulation.num_steps} steps of {simulation.step_s:.4g} s each, lane by lane; below, the memory in use "
            f"on each tier. {_binds(answer)} {_lanes_text(answer)}{_order_text(answer)}"
        ),
        "lanes": list(_lanes(answer)),
        "curves": _curves(answer),
        "recipes": [
            {
                **gain.recipe.facts,
                "gain": gain.factor,
                "step_s": gain.step_s,
                "tokens_per_s": gain.factor * answer.tokens_per_s,
            }
            for gain in helping
        ],
        "runners_up": [dataclasses.asdict(other) for other in answer.found.runners_up],
        "least": {"at_all": answer.least.at_all, "with_others": answer.least.with_others},
        "sources": list(_sources(answer)),
    }


def _short(model: str) -> str:
    """Shorten a model's name. A file's folder says more than ``config.json``."""
    path = Path(model)
    return (path.parent.name or path.name) if path.name == "config.json" else path.name if path.exists() else model


def _asked(answer: Answer) -> str:
    asked = answer.question
    steps = f"{asked.grad_accum} micro-batches of " if asked.grad_accum > 1 else ""
    numel = sum(param.parameters for unit in answer.spec.units for param in unit.params)
    ranks = asked.ranks
    each = " on each rank" if ranks.size > 1 else ""
    text = (
        f"{numel / 1e9:.2f} billion parameters in {len(answer.spec.units) - 1} units. A step is {steps}"
        f"{asked.micro_batch} in {asked.precision}{each}, "
        f"{'with' if asked.clipping else 'without'} clipping."
    )
    shown = f" {ranks.size} ranks train together ({ranks}); memory, lanes and homes are those of one rank."
    return text + (shown if each else "")


def _facts(answer: Answer) -> Iterator[tuple[str, str, str]]:
    found = answer.found
    step_s, ends = found.simulation.step_s, range_of(answer)
    lane, busy_s = answer.busiest_lane
    yield (
        "Step, predicted",
        f"{step_s:.4g} s",
        f"the busiest lane, {lane}, works {busy_s:.4g} s"
        + (f"; {ends.step_text} by the ranges of the machine's figures" if ends else ""),
    )
    ranks = answer.setting.ranks
    of_all = f" of {ranks.size} ranks" if ranks.size > 1 else ""
    yield (
        "Tokens, predicted",
        f"{format_rate(answer.tokens_per_s)} / s",
        f"{answer.setting.tokens:,} per step{of_all}" + (f"; {ends.tokens_text} / s" if ends else ""),
    )
    binds = sorted(found.simulation.binding.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{link.replace('_', ' ')} {part:.0%}" for link, part in binds[1:3] if part >= 0.01)
    if binds:
        yield "Limited by", limits_text(binds[0][0]), f"{binds[0][1]:.0%} of the step" + (f"; {rest}" if rest else "")
    kept = answer.found.plan.kept_bytes
    nbytes = answer.activation_bytes
    most = "" if nbytes is None else "at most "
    room = f"{most}on the device, with workspace" + (f"; {_about(kept)} are left to keep more" if kept else "")
    how = ", ".join(f"{count} x {policy} on {tier}" for (policy, tier), count in answer.policies.items())
    yield "Activations", "of unknown size" if nbytes is None else _about(nbytes), f"{room}; units: {how}"
    if ranks.size > 1:
        received = sum(answer.received_bytes().values())
        yield "Between ranks", _about(received), f"received by each per step: {received_text(answer)}"
        peaks = answer.of_node(answer.peak_bytes())
        yield (
            "Node",
            _about(peaks["host"]),
            f"of host memory in use by its {ranks.per_node} ranks"
            + (f", and {_about(peaks['disk'])} of disk" if peaks["disk"] else ""),
        )
    if answer.written_bytes:
        life, node = drive_life(answer), " by the ranks of a node" if ranks.per_node > 1 else ""
        yield "Disk writes", _about(answer.written_bytes), f"per step{node}" + (f"; {life}" if life else "")


def _about(nbytes: float) -> str:
    """Format bytes with three digits."""
    number, unit = format_bytes(int(nbytes)).split(" ")
    return f"{float(f'{float(number):.3g}'):g} {unit}"


def _tiers(answer: Answer) -> Iterator[dict[str, Any]]:
    limits, peaks = answer.limits, answer.peak_bytes()
    budgets = {"device": limits.device_bytes, "host": limits.host_bytes, "disk": limits.disk_bytes}
    for tier in TIERS:
        parts = dict.fromkeys(("weights", "gradients", "states"), 0)
        for each in reservations(answer.spec, answer.found.plan):
            if each.tier == tier:
                kind = f"slots for {each.owner.split('/')[0].replace('_', ' ')}" if each.kind == "slot" else each.kind
                kind = _PARTS.get(kind, kind)
                parts[kind] = parts.get(kind, 0) + each.nbytes
        if tier == "device" and answer.found.plan.kept_bytes:
            parts["room to keep activations"] = answer.found.plan.kept_bytes
        if budgets[tier]:
            rows = [{"label": label, "bytes": nbytes} for label, nbytes in parts.items() if nbytes]
            reserved = sum(parts.values())
            yield {"tier": tier, "budget": budgets[tier], "reserved": reserved, "peak": peaks[tier], "parts": rows}


def _units(answer: Answer) -> Iterator[dict[str, Any]]:
    owned: dict[tuple[str, str], int] = {}
    for each in reservations(answer.spec, answer.found.plan):
        owned[each.owner, each.kind] = each.nbytes
    for unit in answer.run.units:
        homes = {"weights": unit.weights, "gradients": unit.gradients, "states": unit.states}
        rows = {kind: [tier, owned.get((unit.name, kind), 0)] for kind, tier in homes.items()}
        yield {"name": unit.name, "how": _how(unit), **rows}


def _how(unit: UnitPlan) -> str:
    where = "device" if unit.states == "device" or unit.update == "device" else "host"
    text = f"updated on the {where}" + (" inside backward" if unit.early else "")
    away = "" if unit.activations == "device" else f" on {unit.activations}"
    return f"{text}, {_SAVED[unit.policy]}{away}"


def _homes_text(answer: Answer) -> str:
    said = []
    for kind in ("weights", "gradients", "states"):
        tiers = [getattr(unit, kind) for unit in answer.found.plan.units]
        counts = ", ".join(f"{tiers.count(tier)} on {tier}" for tier in TIERS if tier in tiers)
        said.append(f"{kind} of {counts}")
    return f"Homes of {len(answer.found.plan.units)} units: {'; '.join(said)}. Arrow keys choose a unit."


def _timeline(answer: Answer) -> dict[str, Any]:
    """Return the timeline. Spans are rows of numbers: lane, kind, unit, start, length, bytes."""
    simulation = answer.found.simulation
    timeline, start_s = simulation.timeline, simulation.timeline.start_s
    lanes = [lane for lane in timeline.lanes() if any(span.lane == lane for span in timeline.spans)]
    units = {unit.name or "root": i for i, unit in enumerate(answer.found.plan.units)}
    kinds: dict[str, int] = {}

    def row(span: Span) -> list[float]:
        kind, _, unit = span.name.rpartition(" ")
        number = kinds.setdefault(kind, len(kinds))
        lane = lanes.index(span.lane) if span.lane in lanes else 0
        numbers = (_rounded(span.start_s - start_s), _rounded(span.duration_s), span.nbytes)
        return [lane, number, units.get(unit, 0), *numbers]

    spans, waits = ([row(span) for span in rows] for rows in (timeline.spans, timeline.waits))
    loads = [
        {"tier": load.tier, "label": load.label, "moments": [[_rounded(t), nbytes] for t, nbytes in load.moments]}
        for load in answer.loads
    ]
    return {
        "step_s": simulation.step_s,
        "wall_s": timeline.wall_s,
        "lanes": lanes,
        "kinds": list(kinds),
        "spans": spans,
        "waits": waits,
        "loads": loads,
    }


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.6g}")


def _lanes_text(answer: Answer) -> str:
    said = [f"{lane} {_LANES[lane]}" for lane in answer.busy_s() if lane in _LANES]
    return "Rows that are busy at once work in parallel" + (f": {'; '.join(said)}." if said else ".")


def _order_text(answer: Answer) -> str:
    return "".join(f" {text[0].upper()}{text[1:]}." for text in order_texts(answer.found.plan))


def _binds(answer: Answer) -> str:
    waits = {lane: s for lane, s in answer.exposed_s().items() if lane != COMPUTE}
    if not waits:
        return "Compute waits for nothing."
    lane = max(waits, key=waits.__getitem__)
    return f"Compute waits {sum(waits.values()):.3g} s per step, most of it for {lane.replace('_', ' ')}."


def _lanes(answer: Answer) -> Iterator[dict[str, Any]]:
    exposed, moved = answer.exposed_s(), answer.moved_bytes()
    for lane, busy_s in answer.busy_s().items():
        yield {"lane": lane, "busy_s": busy_s, "exposed_s": exposed.get(lane, 0.0), "bytes": moved.get(lane, 0.0)}


def _curves(answer: Answer) -> list[dict[str, Any]]:
    def curve(name: str, points: Sequence[CurvePoint], *, is_bytes: bool) -> dict[str, Any]:
        return {"name": name, "is_bytes": is_bytes, "points": [point._asdict() for point in points]}

    over = curves(answer.setting, answer.found)
    return [
        curve("Device memory", over.device_memory, is_bytes=True),
        curve("Host memory", over.host_memory, is_bytes=True),
        curve("Sequences in a micro-batch", over.batch, is_bytes=False),
    ]


def _sources(answer: Answer) -> Iterator[tuple[str, str, float, str]]:
    hardware = answer.hardware
    for name, part in (("device", hardware.device), ("bus", hardware.bus), ("host", hardware.host)):
        yield from _figures(name, part)
    if hardware.disk is not None:
        yield from _figures("disk", hardware.disk)
    if answer.setting.ranks.size > 1:
        yield from _figures("links", links_of(hardware))
        yield from _figures("network", network_of(hardware))


def _figures(name: str, part: Any) -> Iterator[tuple[str, str, float, str]]:
    for field in dataclasses.fields(part):
        value, source = getattr(part, field.name), part.sources.get(field.name, "")
        if isinstance(value, int | float) and (value or source):  # 0 without a source: not known
            yield name, field.name, value, source
