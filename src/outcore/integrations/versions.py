"""Differences between versions of the libraries that outcore works with. Imports none of them, so it is cheap."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",  # transformers 5.23
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def other_names(fields: Collection[str]) -> Mapping[str, str]:
    """Map names that some versions have for fields of the training arguments to those of the installed version.

    Args:
        fields: Fields of the installed version. It may have both the old and the new name of one.
    """
    return {
        **{old: new for old, new in _RENAMED.items() if new in fields},
        **{new: old for old, new in _RENAMED.items() if new not in fields},
    }


def scores_in_tiles() -> bool:
    """Whether TRL's trainers compute losses without the logits of the whole micro-batch."""
    utils = sys.modules.get("trl.trainer.utils")
    return hasattr(utils, "add_fused_lm_head")
