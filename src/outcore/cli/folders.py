"""Where a disk tier may be when nobody has said so."""

from __future__ import annotations

import tempfile
from pathlib import Path


def usual_folders() -> tuple[Path, ...]:
    """Folders that are on a drive on most machines, the best first: the temporary one is often in memory."""
    return (Path.cwd(), Path("/var/tmp"), Path.home(), Path(tempfile.gettempdir()))
