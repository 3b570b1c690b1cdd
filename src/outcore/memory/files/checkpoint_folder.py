"""A checkpoint's folder: written aside, made whole by one rename, and checked before it is used.

[Note: one commit] Everything is written into a hidden folder beside the final one and synced. The manifest comes last,
then one rename, then a sync of the parent. So a writer that dies leaves either the whole checkpoint or none. The hidden
folder is locked (``flock``) while its writer lives; the next writer removes those of dead writers. An old
checkpoint of the same name changes places with the new one, in one call where the kernel can do that. Readers lock a
checkpoint too, and it is not removed meanwhile. Where a filesystem has no locks, folders of dead writers stay.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import secrets
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import final

import torch

from outcore.core.errors import ConfigError
from outcore.core.quantities import format_bytes
from outcore.memory.disk_file import disk_error
from outcore.memory.files.checkpoint_file import (
    STALL_TIMEOUT_S,
    BlockPool,
    CheckpointFile,
    FilePiece,
    Files,
    PartOfCheckpoint,
    durable,
    takes_direct_io,
)
from outcore.memory.files.locked_folder import make_locked, taken_alone, taken_when_free, unlock
from outcore.memory.files.staged_files import sync
from outcore.spec.manifest import BLOCK_BYTES, MANIFEST_NAME, ChecksummedBlock, Manifest

_ASIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.(partial|old)")
_RENAME_EXCHANGE = 2  # linux/fs.h
_AT_FDCWD = -100

_NAMES_SYNCED: set[tuple[int, int]] = set()
"""Folders whose own names are durable, each by device and inode."""


@final
class UnfinishedCheckpoint(PartOfCheckpoint):
    """A checkpoint that is being written. ``commit`` makes it a checkpoint; ``remove`` leaves nothing of it."""

    def __init__(self, target: Path) -> None:
        """Create the hidden folder; remove those that dead writers left.

        Args:
            target: The final folder; its parent is created if missing.

        Raises:
            DiskError: The parent cannot be written.
        """
        self.target = target
        self._pid, self._lock, self._ending = os.getpid(), -1, threading.Lock()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            clear_away(target.parent)
            self.path, self._lock = make_locked(lambda: _aside(target, "partial"))
            self.is_direct = takes_direct_io(self.path)
            self._pool = BlockPool(is_direct=self.is_direct)
        except OSError as error:
            if self._lock >= 0:
                shutil.rmtree(self.path, ignore_errors=True)
                unlock(self._lock)
            raise disk_error(self._expected, error) from error
        self._files: dict[str, CheckpointFile] = {}

    def commit(self, describe: Callable[[Files], Manifest], shared: Sequence[Files] = ()) -> None:
        """Make everything durable, and give the checkpoint its name.

        Args:
            describe: Makes the manifest of all files in the folder, with their checksums; other code may have put
                files there, too.
            shared: Files of other processes, which their ``PartOfCheckpoint`` has made durable.

        Raises:
            OSError: The system reported an error; an older checkpoint of the same name is untouched.
            DiskError: The checkpoint has its name, but a power loss may take that back.
        """
        known = durable(self._files.values(), self.path)
        for files in shared:
            known.update(files)
        self._files.clear()
        for path in _files_in(self.path):
            name = str(path.relative_to(self.path))
            if name not in known:
                known[name] = tuple(_summed(path))
                sync(path)
        write_new(self.path / MANIFEST_NAME, describe(known).to_json())
        sync(self.path / MANIFEST_NAME)
        for folder in sorted((p for p in (self.path, *self.path.rglob("*")) if p.is_dir()), reverse=True):
            sync(folder)
        _sync_names_above(self.target.parent)
        old = _renamed(self.path, self.target)
        try:
            sync(self.target.parent)
        except OSError as error:
            self._end()  # others clear the old one away, later: after a power loss it may have its name again
            what = f"checkpoint '{self.target}': expected that it survives a power loss"
            then = "; it is whole and in place, and can be loaded, but save again before you rely on it"
            raise disk_error(what, error, then=then) from error
        _remove(old)
        self._end()

    def remove(self) -> None:
        """Remove everything. Idempotent, from any thread. A forked child does nothing: the folder is its parent's."""
        if os.getpid() != self._pid:
            return
        with self._ending:
            if self._lock >= 0:
                self._pool.close()  # first: files that are still written would stay behind
                shutil.rmtree(self.path, ignore_errors=True)
                self._end()

    def _end(self) -> None:
        lock, self._lock = self._lock, -1
        unlock(lock)
        self._pool.close()


def _sync_names_above(folder: Path) -> None:
    """Make the name of a folder durable, and once the names of those above, by syncing the folders that hold them."""
    for path in [folder.absolute(), *folder.absolute().parents]:
        state = path.stat()
        try:
            sync(path.parent)
        except OSError as error:
            if error.errno in (errno.EIO, errno.ENOSPC):
                raise
            # a folder that cannot be read or synced was there before
        if (state.st_dev, state.st_ino) in _NAMES_SYNCED:
            return
        _NAMES_SYNCED.add((state.st_dev, state.st_ino))


def _aside(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{secrets.token_hex(4)}.{kind}"


def clear_away(parent: Path) -> None:
    """Remove what dead writers left in a folder of checkpoints. An old checkpoint that lost its name gets it back.

    Folders that cannot be removed are left to the next writer: they are never taken for checkpoints.
    """
    for path in sorted(parent.glob(".*")):
        match = _ASIDE.fullmatch(path.name)
        if match is None or path.is_symlink() or not path.is_dir():
            continue
        is_lost = match[2] == "old" and not (parent / match[1]).exists()
        with suppress(OSError), taken_alone(path, needs_lock=not is_lost):  # a rename loses nothing
            path.rename(parent / match[1]) if is_lost else shutil.rmtree(path)


def remove(path: Path) -> bool:
    """Remove a checkpoint. Its name goes first, so that a part is never taken for the whole.

    Of a symbolic link, only the link is removed.

    Returns:
        Whether it is gone. False if it is being read.

    Raises:
        DiskError: The checkpoint cannot be removed.
    """
    aside = _aside(path, "partial")
    try:
        if path.is_symlink():
            path.unlink()
            return True
        with taken_alone(path, needs_lock=False):
            path.rename(aside)
        sync(path.parent)
        shutil.rmtree(aside)
    except (BlockingIOError, FileNotFoundError):
        return not path.exists()
    except OSError as error:
        raise disk_error(f"checkpoint '{path}': expected that it can be removed", error) from error
    return True


def read_manifest(path: Path, *, check: bool) -> Manifest:
    """Read the manifest of a checkpoint, and check that its files have their sizes.

    Args:
        path: The checkpoint.
        check: Read all files, too, and compare them with the checksums.

    Raises:
        ConfigError: It is damaged, or not a checkpoint.
    """
    what = f"checkpoint '{path}': expected it as it was saved"
    advice = "take another one (outcore checkpoint ls)"
    try:
        manifest = Manifest.from_json((path / MANIFEST_NAME).read_bytes())
        found = {str(p.relative_to(path)): p.stat().st_size for p in _files_in(path)}
    except FileNotFoundError as error:
        raise ConfigError(f"{what}, but it has no {MANIFEST_NAME}; {advice}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what}, but its {MANIFEST_NAME} cannot be used: {error}; {advice}") from error
    for name, blocks in manifest.files.items():
        size = sum(block.nbytes for block in blocks)
        if found.get(name) != size:
            there = "is missing" if name not in found else f"has {found[name]:,}"
            raise ConfigError(f"{what}, but '{name}' of {size:,} bytes {there}; {advice}")
    if check:
        damaged = find_damage(path, manifest)
        if damaged is not None:
            raise ConfigError(f"{what}, but {damaged}; {advice}, and look at the drive's health (smartctl)")
    return manifest


def find_damage(path: Path, manifest: Manifest) -> str | None:
    """Describe where the first block lies that is not as it was saved; None if all are."""
    found: list[tuple[str, int, ChecksummedBlock]] = []
    pool = BlockPool()

    def look(name: str, fd: int, piece: FilePiece, memory: torch.Tensor) -> None:
        block, view = piece.sums[piece.place], memory.numpy().data
        done = 0
        while done < block.nbytes:
            moved = os.preadv(fd, [view[done : block.nbytes]], piece.start + done)
            if moved <= 0:
                break
            done += moved
        if done < block.nbytes or zlib.crc32(view[: block.nbytes]) != block.crc32:
            found.append((name, piece.start, block))

    try:
        for name, blocks in sorted(manifest.files.items()):
            with (path / name).open("rb", buffering=0) as file:
                pool.run(partial(look, name, file.fileno()), _as_pieces(blocks))
            if found:
                break
    except OSError as error:
        return f"it cannot be read: {error}"
    finally:
        pool.close()
    if not found:
        return None
    name, start, block = min(found)
    return f"{format_bytes(block.nbytes)} of '{name}' at byte {start:,} are not those that were saved"


def _as_pieces(blocks: Sequence[ChecksummedBlock]) -> Iterator[FilePiece]:
    start, listed = 0, list(blocks)
    for i, block in enumerate(blocks):
        yield FilePiece(start, start + block.nbytes, _nothing, listed, i)
        start += block.nbytes


def _nothing(_: int, __: int, ___: torch.Tensor) -> None:
    """Fill nothing: these blocks are only read."""


def _summed(path: Path) -> Iterator[ChecksummedBlock]:
    with path.open("rb", buffering=0) as file:
        while data := file.read(BLOCK_BYTES):
            yield ChecksummedBlock(len(data), zlib.crc32(data))


def _files_in(folder: Path) -> list[Path]:
    everything = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in everything if path != folder / MANIFEST_NAME)


def write_new(path: Path, text: bytes) -> None:
    """Write a small file. ``commit`` makes it durable, so training does not wait for the drive. Raises: OSError."""
    with path.open("xb") as file:
        file.write(text)


def small_file(path: Path) -> bytes:
    """Read a small file of a checkpoint that was checked.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"checkpoint: expected the file '{path}', but it cannot be read: {error}") from error


def mapped_tensors(path: Path) -> Callable[[str], torch.Tensor]:
    """Return a function from names to tensors of a checked file. Their bytes are read when they are used."""
    from safetensors import safe_open

    return safe_open(path, framework="pt").get_tensor


_ATTEMPTS = 20
"""Attempts at a rename: between any two calls, others may take the target away or put theirs there."""
_IS_THERE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
"""Errors that say that a folder was not renamed because the target is there."""


def _remove(old: Path) -> None:
    """Remove a checkpoint that was replaced. If that fails, the next writer tries again."""
    with suppress(OSError):
        old.unlink() if old.is_symlink() or not old.is_dir() else shutil.rmtree(old)


def _renamed(path: Path, target: Path) -> Path:
    """Rename a folder to the target, after readers of an old one there. Returns the path that an old one has now."""
    for left in reversed(range(_ATTEMPTS)):
        try:
            path.rename(target)
        except OSError as error:
            if error.errno not in _IS_THERE and not os.path.lexists(target):  # the target may have gone since
                raise
        else:
            return path
        try:
            with taken_when_free(target, STALL_TIMEOUT_S):  # readers of the old one must not find parts of the new one
                if _exchange(path, target):
                    return path
                old = _aside(target, "old")
                target.rename(old)
                try:
                    path.rename(target)
                except OSError:
                    if os.path.lexists(target):  # another writer's, which is newer than the old one
                        _remove(old)
                    raise
                return old
        except OSError as error:
            is_race = isinstance(error, FileNotFoundError) or error.errno in _IS_THERE
            if not is_race or not left:
                raise
    raise AssertionError("the last attempt returns or raises")


def _exchange(a: Path, b: Path) -> bool:
    """Let two folders change names, in one call. Returns False if this system cannot do that."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(a), os.fsencode(b)
    return call is not None and not call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)
