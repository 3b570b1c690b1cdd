"""What differs between the versions of the libraries that outcore works with. Light: it imports none of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping

_RENAMED = {
    "gradient_checkpointing": "activation_checkpointing",  # transformers 5.23
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}


def other_names(fields: Collection[str]) -> Mapping[str, str]:
    """Names that some versions have for fields of the training arguments -> those of the installed version.

    Args:
        fields: Of the installed version; the old and the new name may be among them.
    """
    return {
        **{old: new for old, new in _RENAMED.items() if new in fields},
        **{new: old for old, new in _RENAMED.items() if new not in fields},
    }


def scores_in_tiles() -> bool:
    """Whether TRL's trainers work out losses without the logits of the whole micro-batch."""
    utils = sys.modules.get("trl.trainer.utils")
    return hasattr(utils, "add_fused_lm_head")
