"""What ``outcore plan`` says of a model that does not fit: what is needed, and which recipes would make it fit.

Every recipe is tried: the rule's plan is made with it, which takes no search. So the advice is as exact as any plan.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from outcore.command.plan.answer import limits_for, usual_plan
from outcore.command.plan.question import Question
from outcore.command.plan.recipes import Recipe, drive_for, options_for, splits_of
from outcore.core.errors import ConfigError, PlanInfeasibleError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.preparation.with_ranks import of_node
from outcore.spec.hardware import Hardware

if TYPE_CHECKING:
    from outcore.command.train.model.source import ModelSource

_TIERS = {"device": "--device-memory", "host": "--host-memory", "disk": "--disk-size"}


class Advice(NamedTuple):
    """A recipe for a model that does not fit."""

    recipe: Recipe
    fits: bool
    """Whether it is enough by itself."""
    needed_bytes: Mapping[str, int]
    """Tier -> what the plan takes then; if it does not fit, the least that would do."""


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

        def tried(recipe: Recipe) -> Advice:
            changed = dataclasses.replace(question, **recipe.changes)
            try:
                taken = usual_plan(changed, source, recipe.hardware or hardware)[0].tier_bytes
            except PlanInfeasibleError as unfit:
                return Advice(recipe, fits=False, needed_bytes=unfit.required_bytes)
            return Advice(recipe, fits=True, needed_bytes=of_node(taken, question.ranks.per_node))

        found = list[Advice]()
        for recipe in options_for(question, hardware):
            with suppress(ConfigError, UnsupportedError):  # it does not go with the model or with other options
                found.append(tried(recipe))
        found += [_smaller_batch(tried, question)] if question.batch_size > 1 else []
        for tier, nbytes in error.raise_one_to.items():
            options = f"{_TIERS[tier]} {format_bytes(nbytes, is_need=True).replace(' ', '')}"
            found.append(Advice(Recipe(options, "same bits", "", {}), fits=True, needed_bytes={tier: nbytes}))
        found += [tried(drive_for(question, hardware, limits_for(question, hardware)))] if hardware.disk is None else []
        advice = tuple(sorted(found, key=lambda each: not each.fits))
        return cls(question=question, machine=hardware.name, error=error, advice=advice)

    def to_text(self) -> str:
        """Return the advice as lines: what would do, then what would not do alone."""
        width = max((len(each.recipe.options) for each in self.advice), default=0)
        lines: list[str] = []
        for fits, title in ((True, "each of these alone would do, with what it would take:"), (False, "not enough:")):
            of_kind = [each for each in self.advice if each.fits is fits]
            lines += [title] if of_kind else []
            lines += [
                f"  {each.recipe.options:<{width}}  {_sizes(each.needed_bytes)}; {each.recipe.effect}"
                for each in of_kind
            ]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        facts: dict[str, Any] = {
            "fits": False,
            **dataclasses.asdict(self.question),
            "machine": self.machine,
            "required_bytes": self.error.required_bytes,
            "raise_one_to": self.error.raise_one_to,
            "recipes": [
                {**each.recipe.facts, "fits": each.fits, "needed_bytes": each.needed_bytes} for each in self.advice
            ],
            "message": str(self.error),
        }
        return json.dumps(facts, indent=2)


def _smaller_batch(tried: Callable[[Recipe], Advice], question: Question) -> Advice:
    """Return the largest part of the batch that fits, or that of one sequence."""
    *parts, last = (split for split in splits_of(question) if split.changes["batch_size"] < question.batch_size)
    least = tried(last)
    return next((found for split in parts if (found := tried(split)).fits), least) if least.fits else least


def _sizes(by_tier: Mapping[str, int]) -> str:
    return ", ".join(f"{tier} {format_bytes(nbytes, is_need=True)}" for tier, nbytes in by_tier.items() if nbytes)
