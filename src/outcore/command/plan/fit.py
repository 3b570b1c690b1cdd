"""``outcore plan --fit``: the largest well-known models that a machine trains, in four ways, and how fast.

Nothing is fetched: see ``known_models``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from outcore.command.plan.answer import Answer, answer_for, machine_for
from outcore.command.plan.known_models import KnownModel
from outcore.command.plan.question import Question
from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.core.quantities import format_bytes, format_rate
from outcore.spec.hardware import Hardware

MOST = 5
"""How many models are shown: the largest."""
_RANK = 16


def ways_to_train(asked: Question) -> dict[str, Question]:
    """Return the question once for each way to train, what needs least memory last."""
    rank, base = asked.lora or _RANK, dataclasses.replace(asked, lora=None, load_in_4bit=False, load_in_8bit=False)
    adapters = dataclasses.replace(base, lora=rank)
    return {
        "full": base,
        "8-bit states": dataclasses.replace(base, optim="adamw_8bit", master_format="fp32"),
        "LoRA": adapters,
        "QLoRA": dataclasses.replace(adapters, load_in_4bit=not asked.load_in_8bit, load_in_8bit=asked.load_in_8bit),
    }


class ModelFit(NamedTuple):
    """A model, and what was found of each way to train it: a plan, or why there is none."""

    known: KnownModel
    found: Mapping[str, Answer | PlanInfeasibleError | ConfigError]

    @property
    def answers(self) -> dict[str, Answer]:
        """The ways that fit."""
        return {way: each for way, each in self.found.items() if isinstance(each, Answer)}

    def reaches(self, tokens_per_s: float) -> bool:
        """Whether some way fits and is at least so fast."""
        return any(answer.tokens_per_s >= tokens_per_s for answer in self.answers.values())


@dataclass(frozen=True, kw_only=True)
class FittingModels:
    """The models that a machine trains."""

    question: Question
    at_least: float
    """Tokens per second that one way of each model reaches."""
    machine: str
    models: Sequence[ModelFit]
    """The largest first."""
    too_large: Sequence[KnownModel]
    """Models larger than the smallest of these that do not fit in any way."""
    too_slow: Sequence[ModelFit]
    """Models that fit, and do not reach these tokens per second."""


def fits(
    question: Question,
    known: Sequence[KnownModel],
    *,
    at_least: float = 0,
    told: Callable[[str], None] = lambda _: None,
) -> FittingModels:
    """Plan for the largest models that fit.

    Args:
        question: What is asked of each model. Its own model is ignored; its rank and bits are those of the adapters.
        known: At least one model; the largest first.
        at_least: Tokens per second that one way to train a model has to reach.
        told: Is given the name of each model before it is planned for: this takes seconds to a minute.

    Raises:
        ConfigError: An option that cannot be used.
        PlanInfeasibleError: No model fits.
    """
    shown: list[ModelFit] = []
    too_large: list[KnownModel] = []
    too_slow: list[ModelFit] = []
    machine = machine_for(question)
    for each in known:
        told(each.name)
        model = ModelFit(each, _found(question, each, machine, at_least))
        if not model.answers:
            too_large.append(each)
            if len(too_large) == len(known):
                raise _none_fits(known, model)
        elif model.reaches(at_least):
            shown.append(model)
        else:
            too_slow.append(model)
        if len(shown) == MOST:
            break
    return FittingModels(
        question=question,
        at_least=at_least,
        machine=machine.name,
        models=shown,
        too_large=too_large,
        too_slow=too_slow,
    )


def _found(
    question: Question, known: KnownModel, machine: Hardware, at_least: float
) -> dict[str, Answer | PlanInfeasibleError | ConfigError]:
    """Plan for each way, beginning with what needs least.

    A model that does not fit with QLoRA fits in no other way, and one that is too slow with adapters is slower without.
    """
    found: dict[str, Answer | PlanInfeasibleError | ConfigError] = {}
    ways = ways_to_train(dataclasses.replace(question, model=known.name))
    for way in reversed(ways):
        so_far = ModelFit(known, found)
        if way == "8-bit states" and so_far.answers and not so_far.reaches(at_least):
            break
        try:
            found[way] = answer_for(ways[way], known.source, machine)
        except PlanInfeasibleError as error:
            found[way] = error
            if len(found) == 1:
                return dict.fromkeys(ways, error)
        except ConfigError as error:
            if way == "full":  # the question itself cannot be put
                raise
            found[way] = error
    return {way: found[way] for way in ways if way in found}


def _none_fits(known: Sequence[KnownModel], smallest: ModelFit) -> PlanInfeasibleError:
    """Return the error if no model fits."""
    error = next(each for each in smallest.found.values() if isinstance(each, PlanInfeasibleError))
    return PlanInfeasibleError(
        f"--fit: expected a machine that trains one of {len(known)} known models, but even {smallest.known.name} does "
        f"not fit:\n{error}",
        error.required_bytes,
        error.raise_one_to,
    )


def to_text(found: FittingModels) -> str:
    """Return a table of the models: tokens per second of each way, and what limits them."""
    rows = [("model", "parameters", *ways_to_train(found.question)), *map(_row, found.models)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    asked = found.question
    batch = f"{asked.grad_accum} x " if asked.grad_accum > 1 else ""
    ranks = f"{asked.ranks.size} ranks ({asked.ranks}; sizes are per rank) with " if asked.ranks.size > 1 else ""
    batch = f"{ranks}{batch}{asked.batch_size} x {asked.seq_len}"
    enough = f" at {format_rate(found.at_least)} tokens/s or more" if found.at_least else ""
    first = f"{found.machine}: the largest models that it trains{enough}; tokens/s as predicted for {batch}"
    return "\n".join([f"{first} tokens in {asked.precision}", "", *lines, *_left_out(found)])


def _row(model: ModelFit) -> tuple[str, ...]:
    return model.known.name, f"{model.known.parameters / 1e9:.1f}e9", *map(cell_text, model.found.values())


def cell_text(found: Answer | PlanInfeasibleError | ConfigError) -> str:
    """Say how fast a way is and what limits it, or why there is no plan."""
    if isinstance(found, Answer):
        return f"{format_rate(found.tokens_per_s)} ({_limit(found).replace('_', ' ')})"
    if isinstance(found, ConfigError):
        return "not possible"
    needs = [f"{tier} {format_bytes(nbytes, is_need=True)}" for tier, nbytes in found.raise_one_to.items()]
    return f"needs {' or '.join(needs)}" if needs else "does not fit"


def _limit(answer: Answer) -> str:
    binding = answer.found.simulation.binding
    return max(binding, key=binding.__getitem__, default="compute")


def _left_out(found: FittingModels) -> Iterator[str]:
    yield ""
    yield "In brackets: what limits the step."
    for model in found.models:
        for way, error in model.found.items():
            if isinstance(error, ConfigError):
                yield f"{model.known.name}, {way}: {error}"
    if found.too_slow:
        yield f"too slow: {', '.join(f'{model.known.name} ({_fastest(model)})' for model in found.too_slow)}"
    if found.too_large:
        yield f"too large: {', '.join(known.name for known in found.too_large)}"


def _fastest(model: ModelFit) -> str:
    way, answer = max(model.answers.items(), key=lambda pair: pair[1].tokens_per_s)
    return f"{way} {format_rate(answer.tokens_per_s)} tokens/s"


def to_json(found: FittingModels) -> str:
    """Return the models as JSON."""
    asked = {name: value for name, value in dataclasses.asdict(found.question).items() if name != "model"}
    facts: dict[str, Any] = {
        **asked,
        "at_least": found.at_least,
        "machine": found.machine,
        "models": [_facts(model) for model in found.models],
        "too_slow": [_facts(model) for model in found.too_slow],
        "too_large": [known.name for known in found.too_large],
    }
    return json.dumps(facts, indent=2)


def _facts(model: ModelFit) -> dict[str, Any]:
    ways = {way: _facts_of(each) for way, each in model.found.items()}
    return {"model": model.known.name, "parameters": model.known.parameters, "ways": ways}


def _facts_of(found: Answer | PlanInfeasibleError | ConfigError) -> dict[str, Any]:
    if not isinstance(found, Answer):
        return {"fits": False, "message": str(found)}
    return {
        "fits": True,
        "predicted_step_s": found.found.simulation.step_s,
        "predicted_tokens_per_s": found.tokens_per_s,
        "binding": dict(found.found.simulation.binding),
        "activations": found.ways(),
        "reserved_bytes": dict(found.found.plan.tier_bytes),
    }
