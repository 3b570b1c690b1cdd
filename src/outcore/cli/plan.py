"""``outcore plan``: whether a model fits a machine, how fast it would train there, what binds, and what lost."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from outcore.cli.train.model.source import build_model, find_model
from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes, parse_bytes
from outcore.forecast import named_hardware
from outcore.planning.homes.occupancy import Load, occupancy, peak_of
from outcore.planning.homes.placement import Least, Room, least
from outcore.planning.homes.table import plan_table
from outcore.planning.paper.schedule import Circumstances, usual_visits
from outcore.planning.search.changes import Change, best_changes
from outcore.planning.search.search import Found, search, steps_until_settled
from outcore.planning.search.setting import Setting
from outcore.planning.timing.profile import unit_work
from outcore.planning.units.partition import partition
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import PRECISIONS, ModelSpec, Precision
from outcore.spec.plan import TIERS, Tier
from outcore.spec.timeline import COMPUTE

_DEVICE_SHARE, _HOST_SHARE, _DISK_SHARE = 0.9, 0.8, 0.9
"""Of a machine's memory, where no option says otherwise: the rest is for the driver and for other programs."""
_STATES = ("exp_avg", "exp_avg_sq")  # of AdamW
_DAY_S = 86400.0


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked, as the command line has it."""

    model: str
    hardware: str
    batch_size: int
    seq_len: int
    grad_accum: int
    precision: str
    clipping: bool
    device_memory: str | None
    host_memory: str | None
    disk_size: str | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan, and what it was made for."""

    question: Question
    setting: Setting
    found: Found

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return self.setting.hardware

    @property
    def limits(self) -> Limits:
        """Budgets."""
        return self.setting.limits

    @property
    def spec(self) -> ModelSpec:
        """The model's units."""
        return self.setting.model

    @property
    def tokens_per_s(self) -> float:
        """Predicted."""
        step_s = self.found.simulation.step_s
        return self.setting.tokens / step_s if step_s else 0.0

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What would help most."""
        return best_changes(self.setting, self.found)

    @cached_property
    def loads(self) -> tuple[Load, ...]:
        """What is in use on which tier when, as predicted."""
        job, visits = self.setting.job(), usual_visits(self.spec, self.setting.micro_batches)
        circumstances = Circumstances(clips=job.clipping)
        plan, work = self.found.plan, self.setting.work
        warm_up = steps_until_settled(plan)
        return occupancy(self.spec, plan, job.rates, visits, circumstances, work=work, warm_up=warm_up)

    @cached_property
    def least(self) -> Least:
        """The least budgets that would do."""
        job = self.setting.job()
        room = Room(job.activation_reserve_bytes, job.activation_share)
        return least(self.spec, self.limits, room)

    @property
    def activation_bytes(self) -> int:
        """The most that activations take on the device, about."""
        return max(load.peak_bytes for load in self.loads if load.label == "activations")

    def peak_bytes(self) -> dict[Tier, int]:
        """Tier -> the most that is in use at once."""
        return {tier: peak_of([load for load in self.loads if load.tier == tier]) for tier in TIERS}

    @property
    def written_bytes(self) -> float:
        """To disk, per step."""
        return self.moved_bytes()["disk_write"]

    def moved_bytes(self) -> dict[str, float]:
        """Lane -> bytes per step."""
        return self._per_step(self.found.simulation.timeline.moved_bytes())

    def busy_s(self) -> dict[str, float]:
        """Lane -> seconds per step, of lanes that work."""
        return {lane: s for lane, s in self._per_step(self.found.simulation.timeline.busy_s()).items() if s}

    def exposed_s(self) -> dict[str, float]:
        """Lane -> seconds per step that compute waits for it."""
        return {lane: s for lane, s in self._per_step(self.found.simulation.timeline.exposed_s()).items() if s}

    def _per_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        simulation = self.found.simulation
        steps = simulation.timeline.wall_s / simulation.step_s if simulation.step_s else 1.0
        return {lane: value / steps for lane, value in sums.items()}


def answer(question: Question) -> Answer:
    """Plan for a model on a machine. No weights are needed, and neither is the machine.

    Raises:
        ConfigError: An option that cannot be used.
        PlanInfeasibleError: It does not fit; says what would do.
    """
    hardware = named_hardware(question.hardware)
    precision = _precision(question.precision)
    limits = _limits(question, hardware)
    config = Path(question.model, "config.json")  # of a directory, whose weights may be missing
    model = build_model(find_model(str(config) if config.is_file() else question.model), precision)
    spec = partition(model, state_names=_STATES, precision=precision).spec
    setting = Setting(
        model=spec,
        hardware=hardware,
        limits=limits,
        work=unit_work(model, spec, batch_size=question.batch_size, seq_len=question.seq_len),
        batch_size=question.batch_size,
        seq_len=question.seq_len,
        micro_batches=question.grad_accum,
        clipping=question.clipping,
    )
    return Answer(question=question, setting=setting, found=search(setting.job()))


def _precision(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ConfigError(f"--precision: expected one of {', '.join(PRECISIONS)}, but got '{name}'")
    return name


def _limits(question: Question, hardware: Hardware) -> Limits:
    """Budgets as they are given, else a share of what the machine has."""

    def given(text: str | None, flag: str, default: float) -> int:
        nbytes = int(default) if text is None else parse_bytes(text, what=flag)
        if not nbytes:
            raise ConfigError(f"{flag}: expected more than 0 bytes, but got '{text}'")
        return nbytes

    disk = hardware.disk
    if disk is None and question.disk_size is not None:
        raise ConfigError(
            f"--disk-size: expected a machine with a disk, but '{hardware.name}' has none; leave the option out, or "
            "name a machine with one"
        )
    return Limits(
        device_bytes=given(question.device_memory, "--device-memory", _DEVICE_SHARE * hardware.device.memory_bytes),
        host_bytes=given(question.host_memory, "--host-memory", _HOST_SHARE * hardware.host.memory_bytes),
        disk_bytes=None if disk is None else given(question.disk_size, "--disk-size", _DISK_SHARE * disk.size_bytes),
    )


def to_text(found: Answer) -> str:
    """For people: what is predicted, where everything lives, what lost and why."""
    rows = [*_facts(found), *_memory(found), *_runners_up(found), *_helps(found)]
    width = max(len(name) for name, _ in rows)
    lines = (f"{name:<{width}}  {value}".rstrip() for name, value in rows)
    return "\n".join([*lines, "", plan_table(found.spec, found.found.plan, found.limits)])


def _facts(answer: Answer) -> Iterator[tuple[str, str]]:
    found, asked = answer.found, answer.question
    numel = sum(param.numel for unit in answer.spec.units for param in unit.params)
    yield "model", f"{asked.model}: {numel / 1e9:.2f}e9 parameters in {len(answer.spec.units) - 1} units"
    yield "machine", answer.hardware.name
    batch = f"{asked.grad_accum} x " if asked.grad_accum > 1 else ""
    yield "step", f"{found.simulation.step_s:.4g} s (predicted) for {batch}{asked.batch_size} x {asked.seq_len} tokens"
    yield "tokens", f"{answer.tokens_per_s:.0f} per second (predicted)"
    yield "bound", f"{found.bound.seconds:.4g} s: no order of this plan's operations is faster"
    yield "binds", ", ".join(f"{link} {part:.0%}" for link, part in found.simulation.binding.items() if part >= 0.01)
    busy = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in answer.busy_s().items())
    yield "busy", f"{busy} s per step"
    waits = ", ".join(f"{lane} {seconds:.3g}" for lane, seconds in answer.exposed_s().items() if lane != COMPUTE)
    yield "waits", f"compute waits for {waits} s per step" if waits else "compute waits for nothing"
    homes = Counter((unit.weights, unit.gradients, unit.states) for unit in found.plan.units[1:])
    for (weights, gradients, states), count in homes.items():
        yield "units", f"{count} with weights on {weights}, gradients on {gradients}, states on {states}"
    staged = sum(unit.update == "device" for unit in found.plan.units)
    if staged:
        yield "share", f"the device updates {staged} units whose states are in host memory"
    if answer.written_bytes:
        yield "disk", _wear(answer)


def _memory(answer: Answer) -> Iterator[tuple[str, str]]:
    yield (
        "peak",
        f"{_sizes(answer.peak_bytes())} in use at once, of activations about {format_bytes(answer.activation_bytes)}",
    )
    yield "least", f"of one tier, with the others as they are: {_sizes(answer.least.with_others)}"
    yield "", f"at all: {_sizes(answer.least.at_all)}"


def _sizes(by_tier: Mapping[Tier, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in by_tier.items() if nbytes)


def _helps(answer: Answer) -> Iterator[tuple[str, str]]:
    for change in answer.changes:
        yield "helps", f"{change.name}: {change.gain:.2f} times the tokens per second, {change.step_s:.4g} s per step"


def _wear(answer: Answer) -> str:
    life = drive_life(answer)
    return f"{format_bytes(int(1000 * answer.written_bytes))} written per 1,000 steps" + (f"; {life}" if life else "")


def drive_life(answer: Answer) -> str:
    """How long the drive lasts, if that is known."""
    disk = answer.hardware.disk
    if disk is None or not disk.endurance_bytes or not answer.written_bytes:
        return ""
    steps = disk.endurance_bytes / answer.written_bytes
    days = steps * answer.found.simulation.step_s / _DAY_S
    return f"the drive lasts {steps:,.0f} steps, {days:,.0f} days"


def _runners_up(answer: Answer) -> Iterator[tuple[str, str]]:
    for other in answer.found.runners_up:
        seconds = "" if other.step_s is None else f"{other.step_s:.4g} s, "
        yield "not", f"{other.name}: {seconds}{other.reason}"


def to_json(answer: Answer) -> str:
    """The same as data."""
    found, disk = answer.found, answer.hardware.disk
    endurance = disk.endurance_bytes if disk is not None and answer.written_bytes else 0.0
    facts: dict[str, Any] = {
        **dataclasses.asdict(answer.question),
        "predicted_step_s": found.simulation.step_s,
        "predicted_tokens_per_s": answer.tokens_per_s,
        "bound_s": found.bound.seconds,
        "binding": dict(found.simulation.binding),
        "busy_s": answer.busy_s(),
        "exposed_s": answer.exposed_s(),
        "limits": dataclasses.asdict(answer.limits),
        "reserved_bytes": dict(found.plan.tier_bytes),
        "activation_room_bytes": answer.setting.activation_bytes,
        "peak_bytes": answer.peak_bytes(),
        "peaks": [
            {"tier": load.tier, "label": load.label, "reserved_bytes": load.reserved_bytes, "bytes": load.peak_bytes}
            for load in answer.loads
        ],
        "least_bytes": answer.least.at_all,
        "least_bytes_with_others_as_given": answer.least.with_others,
        "changes": [dataclasses.asdict(change) for change in answer.changes],
        "written_bytes_per_1000_steps": 1000 * answer.written_bytes,
        "drive_life_steps": endurance / answer.written_bytes if endurance else None,
        "runners_up": [dataclasses.asdict(other) for other in found.runners_up],
        "plan": json.loads(found.plan.to_json()),
    }
    return json.dumps(facts, indent=2)
