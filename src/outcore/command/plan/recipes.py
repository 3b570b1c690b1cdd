"""Recipes: changes of a request that would help, each with what it changes in the result.

One list serves two questions. Where a model does not fit, ``misfit`` tries recipes with the rule's plan, which takes no
search. Where it fits, ``gains`` searches with each of them, with a quarter of the simulations and from the plan that
was found as well, since what is best for one request is often nearly best for the next.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, get_args

from outcore.command.plan.answer import Answer, limits_for, usual_plan
from outcore.command.plan.question import Question
from outcore.core.errors import ConfigError, PlanInfeasibleError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.planner.search.curves import estimated
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.timing.known_hardware import known_hardware
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware

Result = Literal["same bits", "other rounding", "other training"]
"""What becomes of the result. Other rounding: the same training, with other numbers rounded or in another order."""
_LEAST_GAIN = 1.02
_OF_MODEL = {"lora", "load_in_4bit", "optim", "master_format", "precision"}
"""Fields of a question with which the model is built again."""
_DEVICE, _DISK = "rtx-4090", "desktop-nvme"  # parts by which a disk is found


class Recipe(NamedTuple):
    """A change of a request."""

    options: str
    """Options of the command, or a part of the machine."""
    result: Result
    """What it changes in the result."""
    means: str
    """What it does, in a few words; empty if the options say it."""
    changes: Mapping[str, Any]
    """Fields of the question that change."""
    hardware: Hardware | None = None
    """The machine with that part; None: the machine as it is."""

    @property
    def effect(self) -> str:
        """What it changes in the result, and how."""
        return f"{self.result}: {self.means}" if self.means else self.result

    @property
    def facts(self) -> dict[str, str]:
        """The recipe as data."""
        return {"options": self.options, "result": self.result, "means": self.means}


class Gain(NamedTuple):
    """A recipe for a model that fits, and the step that it is predicted to reach."""

    recipe: Recipe
    step_s: float
    factor: float
    """Tokens per second with it, divided by those without."""


def gains(answer: Answer) -> tuple[Gain, ...]:
    """Return the recipes that gain at least 2%: those with the same bits first, and of these the best.

    There are none for a model that could not be followed on shapes.
    """
    setting, step_s, found = answer.setting, answer.found.simulation.step_s, list[Gain]()
    for recipe in [] if answer.guess else _for_speed(answer):
        other = _setting_with(recipe, answer)
        reached = None
        if other is not None:  # adapters may cut the model into other units, for which the plan found says nothing
            is_cut_alike = [unit.name for unit in other.model.units] == [unit.name for unit in setting.model.units]
            reached = estimated(other, [answer.found.candidate] if is_cut_alike else [])
        if other is not None and reached is not None and reached.simulation.step_s:
            factor = step_s * other.tokens / setting.tokens / reached.simulation.step_s
            found += [Gain(recipe, reached.simulation.step_s, factor)] if factor >= _LEAST_GAIN else []
    return tuple(sorted(found, key=lambda gain: (get_args(Result).index(gain.recipe.result), -gain.factor)))


def _for_speed(answer: Answer) -> Iterator[Recipe]:
    """Yield recipes that may help: of the parts of the machine only those by which the step is limited."""
    question, hardware, limits = answer.question, answer.hardware, answer.limits
    yield from options_for(question, hardware)
    yield from itertools.islice(splits_of(question), 1)
    yield from _larger(question)
    limiting = {link for link, part in answer.found.simulation.binding.items() if part >= _LEAST_GAIN - 1}
    if hardware.disk is not None and limiting & {"disk_read", "disk_write"}:
        yield drive_for(question, hardware, limits)
    for links, recipe in _parts_for(question, hardware, limits):
        if not links or limiting & links:
            yield recipe


def _setting_with(recipe: Recipe, answer: Answer) -> PlanQuestion | None:
    """Return what a plan depends on with a recipe; None if it does not go with the model, or nothing fits."""
    setting, hardware = answer.setting, recipe.hardware or answer.hardware
    asked = dataclasses.replace(answer.question, **recipe.changes)
    if not recipe.changes.keys() & _OF_MODEL:
        return dataclasses.replace(
            setting,
            machine=hardware,
            limits=limits_for(asked, hardware),
            batch_size=asked.batch_size,
            micro_batches=asked.grad_accum,
            clipping=asked.clipping,
        )
    if answer.source is None:  # a model that was given from Python is built already
        return None
    with suppress(ConfigError, PlanInfeasibleError, UnsupportedError):
        _, other = usual_plan(asked, answer.source, hardware)
        model = dataclasses.replace(other.model, sharing=setting.model.sharing)
        ways = tuple(dict.fromkeys([*other.ways, *setting.ways]))
        return None if other.footprint is None else dataclasses.replace(other, model=model, ways=ways)
    return None


def options_for(question: Question, hardware: Hardware) -> Iterator[Recipe]:
    """Yield other options of the run, with the batch as it is."""
    if question.precision == "bf16" and question.master_format != "compact":
        yield Recipe("--master-format compact", "same bits", "masters in half the bytes", {"master_format": "compact"})
    if question.optim.startswith("adamw") and "8bit" not in question.optim:
        yield Recipe("--optim adamw_8bit", "other rounding", "moments in 8 bits", {"optim": "adamw_8bit"})
    if question.precision != "pure_bf16" and hardware.device.computes_bf16:
        pure = {"precision": "pure_bf16", "master_format": "fp32"}
        yield Recipe("--precision pure_bf16", "other rounding", "no fp32 masters, moments in bf16", pure)
    lora = {} if question.lora else {"lora": 16}
    rank = "--lora 16 " if lora else ""
    if lora:
        yield Recipe("--lora 16", "other training", "adapters, not the weights", lora)
    if not (question.load_in_4bit or question.load_in_8bit):
        changes, means = {**lora, "load_in_4bit": True}, "adapters over a base in 4 bits"
        yield Recipe(f"{rank}--load-in-4bit", "other training", means, changes)


def splits_of(question: Question) -> Iterator[Recipe]:
    """Yield other ways to cut a step's tokens into micro-batches: into half as many, then into more and more."""
    size, steps = question.batch_size, question.grad_accum
    larger = [(2 * size, steps // 2)] if steps % 2 == 0 else []
    for batch, accum in [*larger, *((size // n, steps * n) for n in range(2, size + 1) if size % n == 0)]:
        options, changes = f"--batch-size {batch} --grad-accum {accum}", {"batch_size": batch, "grad_accum": accum}
        yield Recipe(options, "other rounding", "as many tokens in a step", changes)


def _larger(question: Question) -> Iterator[Recipe]:
    """Yield a step of more tokens, which share an update, and a step without clipping."""
    steps = 2 * question.grad_accum
    yield Recipe(f"--grad-accum {steps}", "other training", "twice the tokens in a step", {"grad_accum": steps})
    if question.clipping:
        yield Recipe("--no-clipping", "other training", "updates run inside backward", {"clipping": False})


def drive_for(question: Question, hardware: Hardware, limits: Limits) -> Recipe:
    """Return a drive where there is none, else as many drives again."""
    if hardware.disk is None:
        disk = known_hardware(f"{_DEVICE}+{_DISK}").disk
        with_disk = dataclasses.replace(hardware, disk=disk)
        return Recipe(f"a disk, such as {_DISK}", "same bits", "", {"disk_size": None}, with_disk)
    two = _times(hardware.disk, "read_bytes_per_s", "write_bytes_per_s", "size_bytes", "endurance_bytes")
    room = {} if question.disk_size is None else {"disk_size": str(2 * (limits.disk_bytes or 0) * _sharers(question))}
    return Recipe("a second drive of the same kind", "same bits", "", room, dataclasses.replace(hardware, disk=two))


def _parts_for(question: Question, hardware: Hardware, limits: Limits) -> Iterator[tuple[set[str], Recipe]]:
    """Yield more memory and faster parts, each behind the links that it makes faster (none: memory).

    Another processor or device may round differently.
    """
    host_bytes, device_bytes = 2 * limits.host_bytes * _sharers(question), 2 * limits.device_bytes
    on_node = " of every node" if question.nodes > 1 else ""
    text, more = f"{format_bytes(host_bytes)} of host memory{on_node}", {"host_memory": str(host_bytes)}
    yield set(), Recipe(text, "same bits", "", more)
    bus, host, device = hardware.bus, hardware.host, hardware.device
    faster = dataclasses.replace(hardware, bus=_times(bus, "h2d_bytes_per_s", "d2h_bytes_per_s"))
    yield {"h2d", "d2h"}, Recipe("a bus that is twice as fast", "same bits", "", {}, faster)
    launching = dataclasses.replace(device, kernel_s=device.kernel_s / 2) if device.runs_ahead else device
    visits = {"visit_s": host.visit_s / 2, "resting_visit_s": host.resting_visit_s / 2}
    processor = dataclasses.replace(_times(host, "bytes_per_s", "update_parameters_per_s"), **visits)
    faster = dataclasses.replace(hardware, host=processor, device=launching)
    yield set(), Recipe("a processor and host memory that are twice as fast", "other rounding", "", {}, faster)
    text, more = f"{format_bytes(device_bytes)} of device memory", {"device_memory": str(device_bytes)}
    yield set(), Recipe(text, "other rounding", "", more)
    updates = ("update_parameters_per_s", "plain_update_parameters_per_s")
    rates = ("bf16_flops", "fp32_flops", "attention_flops", "bytes_per_s", *updates)
    faster = dataclasses.replace(hardware, device=_times(device, *rates))
    yield {"compute", "device_update"}, Recipe("a device that computes twice as fast", "other rounding", "", {}, faster)


def _sharers(question: Question) -> int:
    """Return the ranks that share the host memory and the disk of a node."""
    return question.ranks.per_node


def _times(part: Any, *fields: str) -> Any:
    """Return a part of a machine with twice these figures."""
    return dataclasses.replace(part, **{field: 2 * getattr(part, field) for field in fields})
