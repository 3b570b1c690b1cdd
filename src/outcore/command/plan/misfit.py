"""What ``outcore plan`` says of a model that does not fit: what is needed, and which options would make it fit.

Every option is tried: the rule's plan is made with it, which takes no search. So the advice is as exact as any plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outcore.command.plan.answer import usual_plan
from outcore.command.plan.question import Question
from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.core.quantities import format_bytes
from outcore.planner.timing.known_hardware import known_hardware
from outcore.preparation.with_ranks import of_node
from outcore.spec.hardware import Hardware

if TYPE_CHECKING:
    from outcore.command.train.model.source import ModelSource

_DEVICE, _DISK = "rtx-4090", "desktop-nvme"  # parts by which the disk is found
_TIERS = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk-size"}


class Advice(NamedTuple):
    """A change of the request."""

    options: str
    fits: bool
    """Whether it is enough by itself."""
    needed_bytes: Mapping[str, int]
    """Tier -> what the plan takes then; if it does not fit, the least that would do."""
    means: str
    """What becomes of the result."""


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A request that cannot be met."""

    question: Question
    machine: str
    error: PlanInfeasibleError
    advice: tuple[Advice, ...]
    """What would do first; among these options before hardware."""

    @classmethod
    def of(cls, question: Question, source: ModelSource, hardware: Hardware, error: PlanInfeasibleError) -> Misfit:
        """Try what may help. Args: error: Of the question as it was put."""
        found = [*_options(question, source, hardware), *_tiers(question, source, hardware, error)]
        advice = tuple(sorted(found, key=lambda each: not each.fits))
        return cls(question=question, machine=hardware.name, error=error, advice=advice)

    def to_text(self) -> str:
        """Return the advice as lines: what would do, then what would not do alone."""
        width = max((len(each.options) for each in self.advice), default=0)
        lines: list[str] = []
        for fits, title in ((True, "each of these alone would do, with what it would take:"), (False, "not enough:")):
            of_kind = [each for each in self.advice if each.fits is fits]
            lines += [title] if of_kind else []
            lines += [f"  {each.options:<{width}}  {_sizes(each.needed_bytes)}; {each.means}" for each in of_kind]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        facts: dict[str, Any] = {
            "fits": False,
            **dataclasses.asdict(self.question),
            "machine": self.machine,
            "required_bytes": self.error.required_bytes,
            "raise_one_to": self.error.raise_one_to,
            "advice": [each._asdict() for each in self.advice],
            "message": str(self.error),
        }
        return json.dumps(facts, indent=2)


def _options(question: Question, source: ModelSource, hardware: Hardware) -> Iterator[Advice]:
    """Try the options of the run."""
    lora = {} if question.lora else {"lora": 16}
    rank = "--lora 16 " if lora else ""
    named: list[tuple[str, dict[str, Any], str]] = []
    if lora:
        named.append(("--lora 16", lora, "trains adapters, not the weights"))
    if not (question.load_in_4bit or question.load_in_8bit):
        changes = {**lora, "load_in_4bit": True}
        named.append((f"{rank}--load-in-4bit", changes, "trains adapters over a base in 4 bits"))
    if question.optim.startswith("adamw") and "8bit" not in question.optim:
        named.append(("--optim adamw_8bit", {"optim": "adamw_8bit"}, "moments in 8 bits, another result"))
    if question.precision == "bf16" and question.master_format != "compact":
        named.append(("--master-format compact", {"master_format": "compact"}, "the same result"))
    if question.precision != "pure_bf16":
        pure = {"precision": "pure_bf16", "master_format": "fp32"}
        named.append(("--precision pure_bf16", pure, "no fp32 masters, another result"))
    for options, changes, means in named:
        with suppress(ConfigError):  # it does not go with the model or with other options
            yield _tried(options, question, changes, source, hardware, means)
    if question.batch_size > 1:
        yield _smaller_batch(question, source, hardware)


def _smaller_batch(question: Question, source: ModelSource, hardware: Hardware) -> Advice:
    """Return the largest half, quarter or smaller part of the batch that fits, or that of one sequence."""

    def tried(parts: int) -> Advice:
        size, steps = question.batch_size // parts, question.grad_accum * parts
        changes = {"batch_size": size, "grad_accum": steps}
        options, means = f"--batch-size {size} --grad-accum {steps}", "the same step, rounded differently"
        return _tried(options, question, changes, source, hardware, means)

    least = tried(question.batch_size)
    parts = [n for n in range(2, question.batch_size) if question.batch_size % n == 0] if least.fits else []
    return next((found for n in parts if (found := tried(n)).fits), least)


def _tiers(question: Question, source: ModelSource, hardware: Hardware, error: PlanInfeasibleError) -> Iterator[Advice]:
    """Say how much of each tier would do, and try a disk where there is none."""
    for tier, nbytes in error.raise_one_to.items():
        options = f"{_TIERS[tier]} {format_bytes(nbytes, is_need=True).replace(' ', '')}"
        yield Advice(options, fits=True, needed_bytes={tier: nbytes}, means="the same result")
    if hardware.disk is None:
        disk = known_hardware(f"{_DEVICE}+{_DISK}").disk
        with_disk = dataclasses.replace(hardware, disk=disk)
        yield _tried("a disk, such as " + _DISK, question, {"disk_size": None}, source, with_disk, "the same result")


def _tried(
    options: str, question: Question, changes: Mapping[str, Any], source: ModelSource, hardware: Hardware, means: str
) -> Advice:
    changed = dataclasses.replace(question, **changes)
    try:
        taken = usual_plan(changed, source, hardware)[0].tier_bytes
    except PlanInfeasibleError as error:
        return Advice(options, fits=False, needed_bytes=error.required_bytes, means=means)
    return Advice(options, fits=True, needed_bytes=of_node(taken, question.ranks.per_node), means=means)


def _sizes(by_tier: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(nbytes, is_need=True)}" for tier, nbytes in by_tier.items() if nbytes)
