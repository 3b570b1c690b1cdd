"""The range of a prediction where some figures of a machine are known as a range only."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from outcore.command.plan.answer import Answer
from outcore.core.quantities import format_rate
from outcore.planner.search.evaluations import Evaluations


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
    ends = (dataclasses.replace(answer.setting, hardware=answer.hardware.at(end)) for end in ("fast", "slow"))
    fast_s, slow_s = (Evaluations(end.job()).simulation(bare, saves).step_s for end in ends)
    return Range((fast_s, slow_s), (tokens / slow_s, tokens / fast_s)) if fast_s else None
