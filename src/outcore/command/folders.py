"""Folders for the disk tier where the user names none."""

from __future__ import annotations

import tempfile
from pathlib import Path


def usual_folders() -> tuple[Path, ...]:
    """Return folders that are on a drive on most machines, the best first: the temporary one is often in memory."""
    return (Path.cwd(), Path("/var/tmp"), Path.home(), Path(tempfile.gettempdir()))
