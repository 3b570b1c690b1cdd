"""Whether a launcher made this process one of several; asked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from typing import NamedTuple, NoReturn

from outcore.core.errors import UnsupportedError

TIMEOUT = "OUTCORE_RANKS_TIMEOUT_S"
"""Environment variable: so long a rank waits for the others."""
HOW = (
    "several ranks work in a loop of your own with outcore.prepare() only; start one process with plain python, "
    "without a launcher, and choose its GPU with CUDA_VISIBLE_DEVICES"
)


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


def refuse_ranks(who: str) -> None:
    """Refuse a world of more than one, as a launcher's environment tells it.

    Args:
        who: Refuses, for the error.

    Raises:
        UnsupportedError: This process is one of several.
    """
    found = launched()
    if found is not None:
        refuse_several(
            who,
            f"this is rank {found.rank} of {found.size} (WORLD_SIZE={found.size} in the environment, as torchrun sets "
            "it)",
        )


def refuse_several(who: str, found: str, how: str = HOW) -> NoReturn:
    """Say that there are several processes, and how it is done.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(f"{who}: expected one process on one device, but {found}; {how}")
