"""The ways of training: one of TRL's trainers each, with its settings, its data and its metrics.

Everything else about a run is the same for all methods. TRL is only imported when a method is asked for its classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from outcore.command.train.data.foreign_rows import with_prompt
from outcore.command.train.method import Kind, Method

_MEASURED = (
    *("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens", "eval_aux_loss"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"),
)
_JUDGED = ("chosen", "rejected")


@final
class FineTuning(Method):
    """Supervised fine-tuning and pre-training, with SFTTrainer."""

    command, config, trainer = "train", "SFTConfig", "SftTrainer"
    metrics = _MEASURED
    kinds = ("messages", "prompt_completion", "text")
    has_reference = False
    rows_per_example = 1

    def fitted(self, training: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
        """Pack plain text: it has no turns that a cut could spoil."""
        if kind != "text" or not training.get("packing", True):
            return dict(training)
        return {**training, "packing": True, "packing_strategy": training.get("packing_strategy", "wrapped")}

    def misfit(self, fields: Mapping[str, Any]) -> str | None:
        """Explain rows of preferences: they say which of two answers is better, so there is no single one to learn."""
        if any(fields.get(key) is None for key in _JUDGED):
            return None
        return (
            "expected one answer to learn, but found preferences ('chosen' and 'rejected'); train on them with outcore "
            "dpo, or with another of TRL's trainers behind OutcoreMixin"
        )


@final
class Preferences(Method):
    """Direct preference optimization, with DPOTrainer."""

    command, config, trainer = "dpo", "DPOConfig", "DpoTrainer"
    metrics = (
        *_MEASURED,
        *(f"eval_{what}/{answer}" for what in ("rewards", "logps", "logits") for answer in _JUDGED),
        *("eval_rewards/accuracies", "eval_rewards/margins"),
    )
    kinds = ("preferences",)
    has_reference = True
    rows_per_example = 2  # both answers at once

    def read_row(self, where: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Put the prompt beside the answers, if both begin with it instead."""
        return with_prompt(where, fields)

    def misfit(self, fields: Mapping[str, Any]) -> str | None:
        """Explain rows with a single answer: it cannot be preferred to another."""
        found = next((key for key in ("messages", "completion", "text") if fields.get(key) is not None), None)
        if found is None or any(key in fields for key in _JUDGED):
            return None
        return (
            f"expected preferences ('chosen' and 'rejected', and perhaps 'prompt'), but found '{found}'; train on it "
            "with outcore train"
        )


FINE_TUNING, PREFERENCES = FineTuning(), Preferences()
