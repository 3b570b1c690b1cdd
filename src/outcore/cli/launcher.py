"""What every command that trains asks first: whether it was started alone."""

from __future__ import annotations

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.ranks import refuse_ranks


def refuse_launchers() -> None:
    """Refuse to be one of several ranks, before anything is read or written.

    Raises:
        ConfigError: Started by torchrun or the like with more than one process.
    """
    try:
        refuse_ranks("outcore")
    except UnsupportedError as error:
        raise ConfigError(str(error)) from error
