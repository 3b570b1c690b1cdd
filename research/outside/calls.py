"""System calls that write below a folder, observed and disturbed: their functions in Python are replaced meanwhile.

Nothing is traced from outside, so it costs little; files that Python writes by itself are written by ``os.write`` here.
"""

from __future__ import annotations

import builtins
import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from outcore.memory.files import checkpoint_folder

_NAMED = ("mkdir", "rmdir", "unlink", "rename")
_ON_FD = ("pwrite", "write", "fsync", "ftruncate")
_CHECKPOINT = re.compile(r"(step|checkpoint)-\d+")
_FOLDER = re.compile(rf"\.?{_CHECKPOINT.pattern}")
_FLAGS = {"w": os.O_TRUNC, "x": os.O_EXCL, "a": os.O_APPEND}


class Call(NamedTuple):
    """One system call."""

    name: str
    path: str
    """The file or folder; the first name of two."""
    to: str = ""
    """The second name of two."""
    fd: int = -1
    data: Any = None
    offset: int | None = None


Hook = Callable[[Call, Callable[..., Any]], Any]
"""Called with a call and the function that makes it, which writes other data if given some."""


@contextmanager
def watched(root: Path, hook: Hook, *, reads: bool = False) -> Iterator[None]:
    """Pass every call below ``root`` that writes through ``hook``. Args: reads: Also pass calls that open to read."""
    watch = _Watch(str(root.resolve()) + "/", hook, reads=reads)
    with ExitStack() as patches:
        for name in _NAMED:
            patches.enter_context(mock.patch.object(os, name, partial(watch.named, name, getattr(os, name))))
        for name in _ON_FD:
            patches.enter_context(mock.patch.object(os, name, partial(watch.on_fd, name, getattr(os, name))))
        patches.enter_context(mock.patch.object(os, "replace", partial(watch.named, "rename", os.replace)))
        patches.enter_context(mock.patch.object(os, "open", partial(watch.opened, os.open)))
        patches.enter_context(mock.patch.object(builtins, "open", partial(watch.file, io.open)))
        patches.enter_context(mock.patch.object(io, "open", partial(watch.file, io.open)))
        exchange = partial(watch.exchange, checkpoint_folder._exchange)
        patches.enter_context(mock.patch.object(checkpoint_folder, "_exchange", exchange))
        yield


class _Watch:
    """Replacements for the functions that make system calls."""

    def __init__(self, top: str, hook: Hook, *, reads: bool) -> None:
        self._top, self._hook, self._reads = top, hook, reads

    def named(self, name: str, real: Callable[..., Any], path: Any, *args: Any, **options: Any) -> Any:
        one = _full(path, options.get("dir_fd"))
        two = _full(args[0], None) if name == "rename" else ""
        make = partial(real, path, *args, **options)
        return self._hook(Call(name, one, two), make) if self._is_about(one) else make()

    def on_fd(self, name: str, real: Callable[..., Any], fd: int, *args: Any) -> Any:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if not self._is_about(path):
            return real(fd, *args)
        data = args[0] if name in ("write", "pwrite") else None
        call = Call(name, path, fd=fd, data=data, offset=args[1] if name == "pwrite" else None)
        return self._hook(call, lambda *other: real(fd, *other, *args[len(other) :]))

    def opened(self, real: Callable[..., Any], path: Any, flags: int, *args: Any, **options: Any) -> Any:
        one, make = _full(path, options.get("dir_fd")), partial(real, path, flags, *args, **options)
        name = "open"
        if flags & os.O_CREAT and not os.path.exists(one):
            name = "create"
        elif flags & os.O_TRUNC:
            name = "truncate"
        is_seen = self._is_about(one) and (self._reads or name != "open")
        return self._hook(Call(name, one), make) if is_seen else make()

    def file(
        self, real: Callable[..., Any], path: Any, mode: str = "r", buffering: int = -1, *args: Any, **options: Any
    ) -> Any:
        is_seen = not isinstance(path, int) and self._is_about(_full(path, None)) and "opener" not in options
        writes = set(mode) & set(_FLAGS)
        if not is_seen or not (writes or self._reads):
            return real(path, mode, buffering, *args, **options)
        if not writes:
            return self._hook(Call("open", _full(path, None)), partial(real, path, mode, buffering, *args, **options))
        raw = _Raw(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | _FLAGS[writes.pop()], 0o666))
        if buffering == 0:
            return raw
        buffered = io.BufferedWriter(raw)
        return buffered if "b" in mode else io.TextIOWrapper(buffered, *args, **options)

    def exchange(self, real: Callable[..., Any], a: Path, b: Path) -> Any:
        return self._hook(Call("exchange", str(a), str(b)), partial(real, a, b))

    def _is_about(self, path: str) -> bool:
        return (path + "/").startswith(self._top)


def _full(path: Any, dir_fd: int | None) -> str:
    base = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else str(Path.cwd())
    return os.path.join(base, os.fsdecode(os.fspath(path)))


class _Raw(io.RawIOBase):
    """A file whose bytes go through ``os.write``."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = 0) -> int:
        return os.lseek(self._fd, offset, whence)

    def write(self, data: Any) -> int:
        return os.write(self._fd, bytes(data))

    def close(self) -> None:
        if not self.closed:
            super().close()
            os.close(self._fd)


def phase_of(call: Call) -> str:
    """Return the phase of a save or load to which a call belongs; empty if it is about no checkpoint."""
    *above, last = call.path.split("/")
    if not any(_FOLDER.match(part) for part in (*above, last)):
        return "rename" if call.name == "fsync" and "/.model-partial" not in call.path else ""
    if call.name == "open":
        return "load"
    if call.name == "exchange" or (call.name == "rename" and _CHECKPOINT.fullmatch(Path(call.to).name)):
        return "rename"
    is_aside = (last.startswith(".") and not _FOLDER.match(last)) or last.endswith(".index.json")  # staged, or a probe
    is_old = not is_aside and not (_CHECKPOINT.fullmatch(last) and _FOLDER.match(above[-1]))
    if (call.name in ("rmdir", "unlink") and is_old) or (call.name == "rename" and _FOLDER.match(Path(call.to).name)):
        return "removal"
    return "manifest" if last == "manifest.json" else "write"
