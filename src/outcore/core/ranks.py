"""Whether a launcher made this process one of several; asked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from typing import NamedTuple

from outcore.core.errors import OutcoreError

TIMEOUT = "OUTCORE_RANKS_TIMEOUT_S"
"""Environment variable: so long a rank waits for the others."""


class OtherRankError(OutcoreError):
    """Another rank has failed, or ranks have lost one another; what went wrong is said where it did."""


class Launched(NamedTuple):
    """What a launcher's environment says, as torchrun sets it."""

    rank: str
    size: int


def launched() -> Launched | None:
    """This process among others; None: a launcher started it alone, or none did."""
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        return Launched(os.environ.get("RANK", "?"), int(size))
    return None


def is_of_other_rank(error: BaseException | None) -> bool:
    """Whether an error only follows from what another rank did. Args: error: It, and what it was raised from."""
    while error is not None and not isinstance(error, OtherRankError):
        error = error.__cause__
    return error is not None
