"""Whether a launcher started this process as one of several ranks. Needs no import of torch, which takes seconds."""

from __future__ import annotations

import os
from typing import NamedTuple

from outcore.core.errors import OutcoreError

TIMEOUT = "OUTCORE_RANKS_TIMEOUT_S"
"""Environment variable: seconds for which a rank waits for the others."""


class OtherRankError(OutcoreError):
    """Another rank has failed, or ranks have lost one another. The rank where it happened reports the cause."""


class Launched(NamedTuple):
    """Rank and number of ranks from the launcher's environment, as torchrun sets it."""

    rank: str
    size: int


def launched() -> Launched | None:
    """Return this process's rank and the number of ranks; None if it runs alone, with or without a launcher."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        return Launched(os.environ.get("RANK", "?"), int(size))
    return None


def is_of_other_rank(error: BaseException | None) -> bool:
    """Whether an error only follows from a failure of another rank. Args: error: Checked with its causes."""
    while error is not None and not isinstance(error, OtherRankError):
        error = error.__cause__
    return error is not None
