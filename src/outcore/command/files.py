"""Files that commands write at their end, checked at their beginning, and folders where the user names none."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from outcore.core.errors import ConfigError


def refuse_unwritable(flag: str, path: Path | None) -> None:
    """Refuse a file that is a folder, or that lies in a folder that is not there. Raises: ConfigError: It is one."""
    if path is not None and (os.path.isdir(path) or not os.path.isdir(path.absolute().parent)):
        raise ConfigError(
            f"{flag}: expected a file in a folder that is there, but got '{path}'; make the folder, or name another"
        )


def usual_folders() -> tuple[Path, ...]:
    """Return folders for the disk tier, the best first: most are on a drive, the temporary one is often in memory."""
    return (Path.cwd(), Path("/var/tmp"), Path.home(), Path(tempfile.gettempdir()))
