"""``outcore checkpoint``: list, check and remove checkpoints."""

from __future__ import annotations

from pathlib import Path

from outcore.checkpoint.find_checkpoints import found_in, prune
from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes
from outcore.memory.files.checkpoint_folder import read_manifest
from outcore.memory.files.locked_folder import held


def listed(directory: Path, *, check: bool) -> tuple[str, bool]:
    """Return a table with a row for each checkpoint, the newest first, and whether all are whole.

    Args:
        directory: One checkpoint, or a folder of them.
        check: Read everything, and compare it with its checksums. Else only the files' sizes are compared.

    Raises:
        ConfigError: There is no checkpoint.
    """
    rows, are_whole = [], True
    for step, path in _some(directory):
        try:
            with held(path):
                manifest = read_manifest(path, check=check)
        except ConfigError as damaged:
            if not path.exists():  # a running training has removed it after saving a newer one
                continue
            rows.append((path.name, str(step), "", f"damaged: {damaged}"))
            are_whole = False
            continue
        state = "as it was saved" if check else "whole"
        rows.append((path.name, str(step), format_bytes(manifest.nbytes), state))
    rows = [("checkpoint", "step", "size", "state"), *rows]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ("  ".join([*(cell.ljust(n) for cell, n in zip(row[:3], widths, strict=True)), row[3]]) for row in rows)
    return "\n".join(lines), are_whole


def pruned(directory: Path, *, keep: int) -> str:
    """Remove checkpoints older than the newest ``keep`` intact ones.

    Raises:
        ConfigError: There is none, or the folder is one itself.
    """
    if _some(directory)[0][1] == directory.absolute():
        raise ConfigError(
            f"outcore checkpoint prune: expected a folder of checkpoints, but '{directory}' is one; name the folder "
            "above it"
        )
    removed = prune(directory, keep, of_trainers=True, check=True)
    return "\n".join(f"removed {path}" for path in removed) or "nothing to remove"


def _some(directory: Path) -> list[tuple[int, Path]]:
    here = directory.absolute()
    found = [pair for pair in found_in(here.parent) if pair[1] == here] or found_in(directory)
    if not found:
        raise ConfigError(
            f"outcore checkpoint: expected checkpoints in '{directory}', but there are none; name a folder that "
            "outcore.save_checkpoint() or a run wrote"
        )
    return found
