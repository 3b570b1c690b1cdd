"""Python's and numpy's global random generators, read cheaply enough for every call of a unit.

Asking the generators for their states takes 10 and 60 us. Reading their words in memory takes less than 1 us.
"""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from typing import Any, cast

import numpy as np

_WORDS = 624
_VERSION = 3  # of what random.getstate returns
_PYTHON = cast("Any", random.random).__self__


class GlobalRandom:
    """The states of both generators at the time when this object was made."""

    def __init__(self, *, is_thorough: bool) -> None:
        """Capture. Args: is_thorough: Also read the normal number that numpy keeps for the next call; slow."""
        self._python = _look_at_python()
        self._numpy = _numpy.look()
        self._numpy_all = _numpy.state() if is_thorough or not _numpy.has_words else None

    @property
    def numpy_has_moved(self) -> bool:
        """Whether numpy's generator was drawn from since."""
        if self._numpy_all is not None and not _same_normal(self._numpy_all, _numpy.state()):
            return True
        return _numpy.look() != self._numpy

    def put_back(self) -> None:
        """Set both generators back to these states."""
        if _look_at_python() != self._python:
            words, normal = self._python
            random.setstate(words if _python_words is None else _python_state(words, normal))
        if self.numpy_has_moved:
            _numpy.put_back(self._numpy, self._numpy_all)


def _find_python_words() -> Any:
    """A view of the memory with the generator's position and words; None if this Python keeps them differently."""
    base = random.Random.__base__
    nbytes = 4 * (_WORDS + 1)
    room = 0 if base is None else base.__basicsize__ - object.__basicsize__
    if sys.implementation.name != "cpython" or not nbytes <= room < nbytes + 8:
        return None
    words = (ctypes.c_uint32 * (_WORDS + 1)).from_address(id(_PYTHON) + object.__basicsize__)
    return words if _python_state(bytes(words), _PYTHON.gauss_next) == random.getstate() else None


def _python_state(words: bytes, normal: float | None) -> tuple[Any, ...]:
    position, *rest = struct.unpack(f"{_WORDS + 1}I", words)
    return _VERSION, (*rest, position), normal


def _look_at_python() -> tuple[Any, Any]:
    return (random.getstate() if _python_words is None else bytes(_python_words)), _PYTHON.gauss_next


class _Numpy:
    """Numpy's global generator, whose words are at a public address."""

    def __init__(self) -> None:
        self._source: Any = None
        self._words: Any = None

    def look(self) -> bytes:
        """Read its position and words."""
        source = cast("Any", np.random).get_bit_generator()
        if source is not self._source:
            self._source = source
            address = source.ctypes.state_address
            kind = ctypes.c_uint32 * (_WORDS + 1)
            self._words = kind.from_address(address) if type(source).__name__ == "MT19937" else None
        return repr(source.state).encode() if self._words is None else bytes(self._words)

    @property
    def has_words(self) -> bool:
        """Whether it is numpy's usual generator, whose words can be read; a user may have set another one."""
        return self._words is not None

    def state(self) -> Any:
        """Get its whole state, with the second of two normal numbers that are drawn together."""
        return np.random.get_state(legacy=False)  # noqa: NPY002  (what users' legacy calls draw from)

    def put_back(self, look: bytes, state: Any) -> None:
        """Set it back. Args: look: What ``look`` returned. state: What ``state`` returned then, or None."""
        if not self.has_words:
            self._source.state = state
            return
        if state is None:
            *key, position = struct.unpack(f"{_WORDS + 1}I", look)
            state = ("MT19937", np.array(key, dtype=np.uint32), position)
        np.random.set_state(state)  # noqa: NPY002


def _same_normal(a: Any, b: Any) -> bool:
    return bool((a["has_gauss"], a["gauss"]) == (b["has_gauss"], b["gauss"]))


_python_words = _find_python_words()
_numpy = _Numpy()
