"""``outcore plan --fit``: the largest well-known models that a machine trains, and how fast.

Nothing is fetched: see ``known``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from outcore.command.plan.answer import Answer, answer_for, machine_for
from outcore.command.plan.known_models import KnownModel
from outcore.command.plan.question import Question
from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import format_bytes, format_rate
from outcore.spec.plan import TIERS

MOST = 5
"""How many models are planned for: the largest that fit."""


@dataclass(frozen=True, kw_only=True)
class FittingModels:
    """The models that a machine trains."""

    question: Question
    machine: str
    answers: Sequence[tuple[KnownModel, Answer]]
    """The largest first."""
    too_large: Sequence[KnownModel]
    """Models larger than these, which do not fit."""


def fits(question: Question, known: Sequence[KnownModel]) -> FittingModels:
    """Plan for the largest models that fit.

    Args:
        question: What is asked of each model. Its own model is ignored.
        known: At least one model; the largest first.

    Raises:
        ConfigError: An option that cannot be used.
        PlanInfeasibleError: No model fits.
    """
    found: list[tuple[KnownModel, Answer]] = []
    too_large: list[KnownModel] = []
    machine = machine_for(question)
    for each in known:
        try:
            found.append((each, answer_for(dataclasses.replace(question, model=each.name), each.source, machine)))
        except PlanInfeasibleError as error:
            too_large += [] if found else [each]
            if len(too_large) == len(known):
                raise _none_fits(known, error) from error
        if len(found) == MOST:
            break
    return FittingModels(question=question, machine=machine.name, answers=found, too_large=too_large)


def _none_fits(known: Sequence[KnownModel], error: PlanInfeasibleError) -> PlanInfeasibleError:
    """Return the error if no model fits. Args: error: The error of the smallest model."""
    return PlanInfeasibleError(
        f"--fit: expected a machine that trains one of {len(known)} known models, but even {known[-1].name} does not "
        f"fit:\n{error}",
        error.required_bytes,
        error.raise_one_to,
    )


def to_text(found: FittingModels) -> str:
    """Return a table of the models."""
    heads = ("model", "parameters", "step", "tokens/s", "binds", "activations", *TIERS)
    rows = [heads, *(_row(known, answer) for known, answer in found.answers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    asked = found.question
    batch = f"{asked.grad_accum} x " if asked.grad_accum > 1 else ""
    ranks = f"{asked.ranks.size} ranks ({asked.ranks}; sizes are per rank) with " if asked.ranks.size > 1 else ""
    batch = f"{ranks}{batch}{asked.batch_size} x {asked.seq_len}"
    first = f"{found.machine}: the largest models that it trains, as predicted for {batch}"
    return "\n".join([f"{first} tokens in {asked.precision}", "", *lines, *_too_large(found)])


def _row(known: KnownModel, answer: Answer) -> tuple[str, ...]:
    link, part = _binding(answer)
    [((policy, tier), _)] = answer.policies.most_common(1)
    sizes = (format_bytes(nbytes) if nbytes else "-" for nbytes in answer.found.plan.tier_bytes.values())
    step, tokens = f"{answer.found.simulation.step_s:.4g} s", format_rate(answer.tokens_per_s)
    return (
        known.name,
        f"{known.parameters / 1e9:.1f}e9",
        step,
        tokens,
        f"{link} {part:.0%}",
        f"{policy} on {tier}",
        *sizes,
    )


def _binding(answer: Answer) -> tuple[str, float]:
    binding = answer.found.simulation.binding
    return max(binding.items(), key=lambda pair: pair[1], default=("compute", 1.0))


def _too_large(found: FittingModels) -> Iterator[str]:
    if found.too_large:
        yield ""
        yield f"too large: {', '.join(known.name for known in found.too_large)}"


def to_json(found: FittingModels) -> str:
    """Return the models as JSON."""
    asked = {name: value for name, value in dataclasses.asdict(found.question).items() if name != "model"}
    facts: dict[str, Any] = {
        **asked,
        "machine": found.machine,
        "models": [
            {
                "model": known.name,
                "parameters": known.parameters,
                "predicted_step_s": answer.found.simulation.step_s,
                "predicted_tokens_per_s": answer.tokens_per_s,
                "binding": dict(answer.found.simulation.binding),
                "activations": answer.ways(),
                "reserved_bytes": dict(answer.found.plan.tier_bytes),
            }
            for known, answer in found.answers
        ],
        "too_large": [known.name for known in found.too_large],
    }
    return json.dumps(facts, indent=2)
