"""The processes of one command: rank 0 tells the others what it found and chose, and speaks for all.

[Note: who speaks] A mistake in the command is an error on all ranks, and is reported once. Rank 0 reports its error,
then notes in the store that it has. Another rank looks there if its error only follows from another's (ranks have lost
one another, or rank 0 has failed) or is a mistake found before training begins: the rank then ends with the same status
and prints nothing. Any other error before training may be one that a library raises on all ranks: the rank waits a
little for the note. An error in training it reports itself.

This module imports little until there are several ranks: a typing mistake must not wait for torch.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from contextlib import suppress
from typing import Any, NamedTuple, Self, final

from outcore.core.errors import ConfigError, OutcoreError, PlanInfeasibleError
from outcore.core.ranks import is_of_other_rank, launched

_LOOK_S = 0.05
"""Seconds between two looks into the store."""
_PATIENCE_S, _LITTLE_S = 60, 3
"""Seconds to wait for ranks that should answer, and for ranks that may have gone or have nothing to say."""
_PIECE_BYTES = 4 * 2**20
"""The most that is put into the store at once: it takes no values of more than 8 MiB."""
_OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of a launcher that holds the store itself."""
_SAID, _HEARD, _TOLD, _CAME = "outcore/said", "outcore/heard/", "outcore/told/", "outcore/came/"


class SaidElsewhereError(OutcoreError):
    """Rank 0 failed, and reports why."""

    def __init__(self, status: int) -> None:
        super().__init__("expected a run that goes on, but rank 0 said why it does not")
        self.status = status


class _RankFailure(NamedTuple):
    status: int


@final
class CommandRanks:
    """One process, or this one among several. See [Note: who speaks]."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        """Args: store: The store that all ranks share."""
        self.rank, self.size = rank, size
        self.has_begun = False
        """On ranks other than 0: whether training has begun, after which an error may be this rank's alone."""
        self._store, self._num_told = store, 0

    @classmethod
    def join(cls) -> Self:
        """Join the processes that a launcher started, if any. Blocks until all are there.

        Raises:
            ConfigError: A launcher that does not say where they meet, or fewer GPUs than ranks.
        """
        if launched() is None:
            return cls()
        from torch import distributed

        from outcore.device.opening import device_of_rank
        from outcore.ranks.world import join_world
        from outcore.torch_private import store_of_ranks

        join_world(None)
        device_of_rank(None)
        return cls(distributed.get_rank(), distributed.get_world_size(), store_of_ranks())

    @property
    def is_first(self) -> bool:
        """Whether this process owns what the run writes, and speaks."""
        return self.rank == 0

    def gather(self) -> None:
        """Let rank 0 wait, for a while, until all ranks have imported their libraries: only then is free memory known.

        Other ranks do not wait.
        """
        if self.size > 1:
            keys = [f"{_CAME}{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], "")
            if self.is_first:
                self._wait(keys, _PATIENCE_S)

    def end(self) -> None:
        """End a run that went well. Rank 0 stays until all have heard what it told: its process may hold the store."""
        if self.is_first and self._num_told:
            with suppress(RuntimeError):
                self._wait([f"{_HEARD}{rank}/{self._num_told}" for rank in range(1, self.size)], _PATIENCE_S)
        self.leave()

    def leave(self) -> None:
        """End this rank's part in the run."""
        if self.size > 1:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()

    def tell(self, value: Any) -> None:
        """On rank 0: let the others go on with a value."""
        if self.size > 1:
            text, key = pickle.dumps(value), self._next()
            pieces = [text[first : first + _PIECE_BYTES] for first in range(0, len(text), _PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, str(len(pieces)))

    def hear(self) -> Any:
        """Return what rank 0 tells next.

        Raises:
            SaidElsewhereError: Rank 0 failed.
        """
        key = self._next()
        try:
            self._wait([key])
        except RuntimeError as error:
            raise OutcoreError(
                f"rank {self.rank}: expected rank 0 to say what to do, but it has ended; see its messages"
            ) from error
        pieces = [self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key)))]
        value = pickle.loads(b"".join(pieces))
        self._store.set(f"{_HEARD}{self.rank}/{self._num_told}", "")
        if isinstance(value, _RankFailure):
            self._note_heard()
            raise SaidElsewhereError(value.status)
        return value

    def has_said(self, status: int, error: Exception) -> None:
        """On rank 0: note that it said why the run ends. If the store ends with its process, wait for the others."""
        with suppress(RuntimeError):
            self._store.set(_SAID, str(status))
            self.tell(_RankFailure(status))
            heard = [f"{_HEARD}{rank}" for rank in range(1, self.size)]
            if os.environ.get(_OWN_STORE) != "True":
                self.leave()  # this ends a library's barrier in which others may wait for this rank
                self._wait(heard, _LITTLE_S if is_of_other_rank(error) else _PATIENCE_S)

    def told(self, error: Exception) -> int | None:
        """On another rank: return rank 0's exit status, if that speaks for this one. Args: error: This rank's error."""
        if isinstance(error, SaidElsewhereError):
            return error.status
        status = None
        with suppress(RuntimeError):  # the store has ended
            patience_s = self._patience_s(error)
            if patience_s and self._wait([_SAID], patience_s):
                status = int(self._store.get(_SAID))
            self._note_heard()
        return status

    def _patience_s(self, error: Exception) -> float:
        if is_of_other_rank(error):
            return _PATIENCE_S
        if self.has_begun:
            return 0.0
        return _PATIENCE_S if isinstance(error, ConfigError | PlanInfeasibleError) else _LITTLE_S

    def _note_heard(self) -> None:
        self._store.set(f"{_HEARD}{self.rank}", "")

    def _next(self) -> str:
        self._num_told += 1
        return f"{_TOLD}{self._num_told}"

    def _wait(self, keys: list[str], patience_s: float = math.inf) -> bool:
        """Wait for keys. Returns: Whether all came. Signals are obeyed meanwhile, unlike in the store's own wait."""
        end_s = time.monotonic() + patience_s
        while not self._store.check(keys):
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S)
        return True


ALONE = CommandRanks()
"""This process alone, without a launcher."""
