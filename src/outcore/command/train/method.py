"""What distinguishes ways of training, and the kinds of rows that they train on. Knows nothing else of the command."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, final

Kind = Literal["text", "prompt_completion", "messages", "preferences"]
"""What a row holds."""


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

    config: ClassVar[str]
    """Name of TRL's class of settings."""
    trainer: ClassVar[str]
    """Name of the Trainer in ``loop.trainer``."""

    @final
    def config_class(self) -> Any:
        """Return TRL's class of settings."""
        import trl

        return getattr(trl, self.config)

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
