"""What a run trains for: one of TRL's trainers, with its settings, its data and its metrics.

Everything else about a run is the same for all methods. TRL is only imported when a method is asked for its classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, final

from outcore.command.train.data.foreign_rows import with_prompt

if TYPE_CHECKING:
    from outcore.command.train.data.records import Kind

_MEASURED = (
    *("eval_loss", "eval_entropy", "eval_mean_token_accuracy", "eval_num_tokens", "eval_aux_loss"),
    *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"),
)
_JUDGED = ("chosen", "rejected")


class Method(ABC):
    """A way of training."""

    command: ClassVar[str]
    """The command of ``outcore`` that trains so."""
    metrics: ClassVar[tuple[str, ...]]
    """What an evaluation measures; the auxiliary loss is that of mixtures of experts."""
    kinds: ClassVar[tuple[Kind, ...]]
    """Kinds of rows that it can train on; if a row could be several, the first counts."""
    has_reference: ClassVar[bool]
    """Whether a frozen copy of the model runs beside it, unless adapters can be switched off instead."""

    rows_per_example: ClassVar[int]
    """Rows that go through the model for one row of the data."""

    @abstractmethod
    def config_class(self) -> Any:
        """Return TRL's class of settings."""

    @abstractmethod
    def trainer_class(self) -> Any:
        """Return TRL's trainer, made to train out of core."""

    @final
    def arguments(self, out: str, training: Mapping[str, Any]) -> Any:
        """Make TRL's settings. The name of outcore's own optimizer is set later, since Transformers would refuse it."""
        from outcore.integrations.optimizers import MUON

        own = {"optim": MUON} if training.get("optim") == MUON else {}
        made = self.config_class()(output_dir=out, **{k: v for k, v in training.items() if k not in own})
        vars(made).update(own)
        return made

    def fitted(self, training: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
        """Return settings together with those that the user left open and that follow from the data."""
        return dict(training)

    def read_row(self, where: str, fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """Complete a row that stands at ``where``.

        Raises:
            ConfigError: Something is missing that cannot be found.
        """
        return fields

    @abstractmethod
    def misfit(self, fields: Mapping[str, Any]) -> str | None:
        """Say what was expected, what was found and what to do if a row is for another method; None: it is for none."""


@final
class FineTuning(Method):
    """Supervised fine-tuning and pre-training, with SFTTrainer."""

    command = "train"
    metrics = _MEASURED
    kinds = ("messages", "prompt_completion", "text")
    has_reference = False
    rows_per_example = 1

    def config_class(self) -> Any:
        """Return TRL's class of settings."""
        from trl import SFTConfig

        return SFTConfig

    def trainer_class(self) -> Any:
        """Return TRL's trainer, made to train out of core."""
        from outcore.command.train.loop.trainer import SftTrainer

        return SftTrainer

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

    command = "dpo"
    metrics = (
        *_MEASURED,
        *(f"eval_{what}/{answer}" for what in ("rewards", "logps", "logits") for answer in _JUDGED),
        *("eval_rewards/accuracies", "eval_rewards/margins"),
    )
    kinds = ("preferences",)
    has_reference = True
    rows_per_example = 2  # both answers at once

    def config_class(self) -> Any:
        """Return TRL's class of settings."""
        from trl import DPOConfig

        return DPOConfig

    def trainer_class(self) -> Any:
        """Return TRL's trainer, made to train out of core."""
        from outcore.command.train.loop.trainer import DpoTrainer

        return DpoTrainer

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
