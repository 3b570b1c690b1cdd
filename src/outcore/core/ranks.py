"""Whether a launcher made this process one of several; asked before torch is imported, which takes seconds."""

from __future__ import annotations

import os
from typing import NoReturn

from outcore.core.errors import UnsupportedError

HOW = (
    "several GPUs do not work together yet; start one process with plain python, without a launcher, and choose its "
    "GPU with CUDA_VISIBLE_DEVICES"
)


def refuse_ranks(who: str) -> None:
    """Refuse a world of more than one, as a launcher's environment tells it.

    Args:
        who: Refuses, for the error.

    Raises:
        UnsupportedError: This process is one of several.
    """
    size = os.environ.get("WORLD_SIZE", "")
    if size.isdecimal() and int(size) > 1:
        rank = os.environ.get("RANK", "?")
        refuse_several(
            who, f"this is rank {rank} of {size} (WORLD_SIZE={size} in the environment, as torchrun sets it)"
        )


def refuse_several(who: str, found: str) -> NoReturn:
    """Say that there are several processes, and what to do.

    Raises:
        UnsupportedError: Always.
    """
    raise UnsupportedError(f"{who}: expected one process on one device, but {found}; {HOW}")
