"""A checkpoint that several ranks write. Each writes its own files, in a folder that rank 0 creates and commits."""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch

from outcore.checkpoint.small_state import random_states, restore_random_states
from outcore.checkpoint.weights.conversions import places
from outcore.engine.checkpoint_saves import Save
from outcore.engine.engine import Engine
from outcore.memory.files.checkpoint_file import Files, PartOfCheckpoint
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint
from outcore.ranks.agreement import agreed, refuse_failed
from outcore.ranks.world import World
from outcore.spec.manifest import Manifest

T = TypeVar("T")

_CALL = "save_checkpoint"


class SharedCheckpoint:
    """One rank's side of the checkpoint. A failure on one rank fails the save on all."""

    def __init__(self, world: World, target: Path) -> None:
        """Have rank 0 create the folder. A collective.

        Raises:
            DiskError: The folder cannot be created, or this rank does not see it.
            OutcoreError: Another rank raised.
        """
        self._world = world
        self._files: list[Files] = []
        """Files of the other ranks."""
        self._is_written = False
        """Whether all ranks have written their files."""
        whole: UnfinishedCheckpoint | None = None
        with self.agreed():
            if world.rank == 0:
                whole = UnfinishedCheckpoint(target)
        path, is_direct = world.from_first(("", False) if whole is None else (str(whole.path), whole.is_direct))
        self._whole = whole
        try:
            with self.agreed():
                part = None if whole is not None else PartOfCheckpoint(Path(path), target, is_direct=is_direct)
        except BaseException:
            if whole is not None:
                whole.remove()
            raise
        self._part = part

    @property
    def unfinished(self) -> PartOfCheckpoint:
        """The checkpoint, or part of it, in which this rank creates its files."""
        found = self._whole or self._part
        if found is None:
            raise AssertionError("a rank without a part of a checkpoint")
        return found

    @contextmanager
    def agreed(self, save: Save | None = None) -> Iterator[None]:
        """Let all ranks leave the block, or all raise. A collective, from the caller's thread.

        Args: save: If it failed on its lane, errors of the block only follow from that, and its own error is raised.
        """
        with agreed(self._world, _CALL):
            try:
                yield
            except Exception as error:
                if save is None or not isinstance(save.error, Exception):
                    raise
                raise save.error from error

    def meet(self, save: Save) -> None:
        """Wait until all ranks have written; raise if another one failed. A collective, on the save lane."""
        files: Files = {}
        error = save.error
        try:
            if error is None and self._part is not None:
                files = self._part.finish()
        except OSError as caught:
            save.fail(caught)
            error = save.error
        said = self._world.all_have_saved((None if error is None else str(error), files))
        self._files = [files for _, files in said]
        self._is_written = all(text is None for text, _ in said)
        if error is None:
            refuse_failed([text for text, _ in said], _CALL, None)

    def commit(self, describe: Callable[[Files], Manifest]) -> None:
        """Commit on rank 0, and tell the others. A collective, on the save lane."""
        error: Exception | None = None
        try:
            if self._whole is not None:
                self._whole.commit(describe, self._files)
        except Exception as caught:
            error = caught
        said = self._world.all_have_saved(None if error is None else str(error))
        refuse_failed(said[:1], _CALL, error)  # errors of other ranks no longer count: what they wrote is durable

    def miss(self, save: Save) -> None:
        """Tell the other ranks, which are in ``commit``, that this one gave the save up after ``meet``."""
        if self._is_written:
            self._world.all_have_saved(str(save.error))

    def first(self, tidy_up: Callable[[], object]) -> None:
        """Tidy up, on rank 0 only."""
        if self._whole is not None:
            tidy_up()


def all_random_states(engine: Engine) -> list[dict[str, Any]]:
    """States of the random generators, by rank. A collective if there are several ranks."""
    mine, world = random_states(engine.device), engine.access.world
    return [mine] if world is None else world.all_of(mine)


def restore_random_states_of(saved: Sequence[Mapping[str, Any]], engine: Engine, call: str) -> None:
    """Restore this rank's states, if as many ranks saved them. Args: saved: By rank. call: Named in the warning."""
    mine = of_this_rank(saved, engine)
    if mine is not None:
        restore_random_states(mine, engine.device)
        return
    warnings.warn(
        f"{call}: {len(saved)} {'rank' if len(saved) == 1 else 'ranks'} saved the states of random generators, and "
        f"{engine.num_ranks} go on: generators stay as they are",
        stacklevel=5,
    )


def of_this_rank(saved: Sequence[T], engine: Engine) -> T | None:
    """What this rank saved; None if another number of ranks saved. Args: saved: By rank."""
    world = engine.access.world
    return None if len(saved) != engine.num_ranks else saved[0 if world is None else world.rank]


def buffers_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Persistent buffers, each once under its first name."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for place in places(engine.model):
        if place.is_buffer and place.is_persistent:
            found.setdefault(id(place.tensor), (place.name, place.tensor))
    return dict(found.values())


def odd_buffers(engine: Engine) -> list[dict[str, torch.Tensor]]:
    """By rank, its values of the buffers that differ between ranks. A collective if there are several ranks."""
    world = engine.access.world
    if world is None:
        return [{}]
    buffers = sorted(buffers_of(engine).items())
    here = {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in buffers}
    sums = [zlib.crc32(buffer.reshape(-1).view(torch.uint8).numpy().data) for buffer in here.values()]
    odd = [name for name, *theirs in zip(here, *world.all_of(sums), strict=True) if len(set(theirs)) > 1]
    return world.all_of({name: here[name] for name in odd})


@torch.no_grad()
def restore_buffer(buffer: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a saved value into a buffer. Elements along an expanded dimension (of stride 0) share memory."""
    for dim in (i for i, stride in enumerate(buffer.stride()) if stride == 0 and buffer.shape[i]):
        buffer, value = buffer.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    buffer.copy_(value)


def restore_odd_buffers(saved: Sequence[Mapping[str, torch.Tensor]], engine: Engine) -> None:
    """Restore this rank's values of such buffers, if as many ranks saved them. Args: saved: By rank."""
    buffers = buffers_of(engine)
    for name, value in (of_this_rank(saved, engine) or {}).items():
        restore_buffer(buffers[name], value)
