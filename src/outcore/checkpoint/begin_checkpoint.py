"""Writing a checkpoint beside training: files are begun, filled on a lane, and committed after the last of them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

from outcore.checkpoint.shared_checkpoint import SharedCheckpoint
from outcore.core.quantities import format_bytes
from outcore.engine.checkpoint_saves import Save
from outcore.engine.engine import Engine
from outcore.memory.files.checkpoint_file import PartOfCheckpoint
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint
from outcore.memory.machine import disk_free_bytes
from outcore.spec.manifest import ChecksummedBlock, Manifest


@contextmanager
def begun(
    engine: Engine,
    target: Path,
    describe: Callable[[Mapping[str, tuple[ChecksummedBlock, ...]]], Manifest],
    tidy_up: Callable[[], object],
) -> Iterator[tuple[PartOfCheckpoint, Save]]:
    """Make a checkpoint of what the block writes and submits. If the block raises, nothing of it stays.

    With several ranks this is a collective: each writes files of its own into the folder of rank 0.

    Args:
        engine: The engine to save. It runs one save at a time, so the previous one is waited for.
        target: Folder of the checkpoint.
        describe: Makes the manifest.
        tidy_up: Called on the lane when the checkpoint is durable.

    Raises:
        DiskError: The checkpoint cannot be written; older ones are untouched. Or the previous checkpoint could not be
            written, which no call has reported yet; the new one is still being saved then.
    """
    saves, world = engine.opened.saves, engine.access.world
    failed = saves.make_room()
    shared = None if world is None else SharedCheckpoint(world, target)
    unfinished = UnfinishedCheckpoint(target) if shared is None else shared.unfinished
    stop = None if shared is None else unfinished.stop
    save = Save(unfinished.target, unfinished.remove, unfinished.error, stop)
    try:
        with shared.agreed(save) if shared is not None else nullcontext():
            saves.begin(save)
            yield unfinished, save
            engine.weights.saved.are_read(saves.edited, saves.late)
        name = f"commit {target.name}"
        if isinstance(unfinished, UnfinishedCheckpoint) and shared is None:
            saves.last(save, name, partial(unfinished.commit, describe), tidy_up)
        elif shared is not None:
            commit, first = partial(shared.commit, describe), partial(shared.first, tidy_up)
            saves.last(save, name, commit, first, meet=shared.meet, miss=shared.miss)
    except BaseException as error:
        save.fail(error)
        save.close()
        if shared is not None:
            unfinished.clear()
        if shared is None or isinstance(error, OSError):
            save.wait()
        save.is_told = True
        raise
    if failed is not None:
        failed.wait()


def refuse_full(unfinished: PartOfCheckpoint, need: int) -> None:
    """Raise if ``need`` bytes are not free. Raises: OSError."""
    free = disk_free_bytes(unfinished.path)
    if need > free:
        raise OSError(errno.ENOSPC, f"it takes {format_bytes(need)}, and {format_bytes(free)} are free")
