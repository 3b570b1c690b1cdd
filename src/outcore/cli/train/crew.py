"""The processes of one command: rank 0 tells the others what it found and chose, and speaks for all.

[Note: who speaks] A mistake in the command goes wrong on all ranks, and is said once. Rank 0 says what went wrong, and
then notes in the store that it has. Another rank that only follows (ranks have lost one another, or rank 0 has failed)
or that finds a mistake before training begins looks there: it ends with the same status and says nothing. Other errors
before training a library may raise on all ranks: it waits a little. What goes wrong in training it says itself.

Light until there are several: a typing mistake must not wait for torch.
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
"""Between two looks into the store."""
_PATIENCE_S, _LITTLE_S = 60, 3
"""Until a rank that failed takes it that rank 0 did not; until the others are taken to be gone."""
_PIECE_BYTES = 4 * 2**20
"""The most that is put into the store at once: it takes no values of more than 8 MiB."""
_OWN_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable of a launcher that has the store."""
_SAID, _HEARD, _TOLD, _CAME = "outcore/said", "outcore/heard/", "outcore/told/", "outcore/came/"


class SaidElsewhereError(OutcoreError):
    """Rank 0 failed, and says why."""

    def __init__(self, status: int) -> None:
        super().__init__("expected a run that goes on, but rank 0 said why it does not")
        self.status = status


class _Failed(NamedTuple):
    status: int


@final
class Crew:
    """One process, or this one among several. See [Note: who speaks]."""

    def __init__(self, rank: int = 0, size: int = 1, store: Any = None) -> None:
        """Args: store: Of all."""
        self.rank, self.size = rank, size
        self.has_begun = False
        """Of another rank than 0: it trains, and what goes wrong may do so there alone."""
        self._store, self._num_told = store, 0

    @classmethod
    def join(cls) -> Self:
        """Those that a launcher started, if any. Blocks until all are there.

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
        """All have in memory what they import: before, nobody knows what is free. Rank 0 waits for them, a while."""
        if self.size > 1:
            keys = [f"{_CAME}{rank}" for rank in range(self.size)]
            self._store.set(keys[self.rank], "")
            if self.is_first:
                self._wait(keys, _PATIENCE_S)

    def leave(self) -> None:
        """The run is over on this rank."""
        if self.size > 1:
            from torch import distributed

            if distributed.is_initialized():
                distributed.destroy_process_group()

    def tell(self, value: Any) -> None:
        """Of rank 0: let the others go on with a value."""
        if self.size > 1:
            text, key = pickle.dumps(value), self._next()
            pieces = [text[first : first + _PIECE_BYTES] for first in range(0, len(text), _PIECE_BYTES)]
            for number, piece in enumerate(pieces):
                self._store.set(f"{key}/{number}", piece)
            self._store.set(key, str(len(pieces)))

    def hear(self) -> Any:
        """What rank 0 tells next.

        Raises:
            SaidElsewhereError: Rank 0 failed.
        """
        key = self._next()
        try:
            self._wait([key])
        except RuntimeError as error:
            raise OutcoreError(
                f"rank {self.rank}: expected rank 0 to say what to do, but it has ended; look at what it says"
            ) from error
        pieces = [self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key)))]
        value = pickle.loads(b"".join(pieces))
        if isinstance(value, _Failed):
            self._note_heard()
            raise SaidElsewhereError(value.status)
        return value

    def has_said(self, status: int, error: Exception) -> None:
        """Of rank 0: it said why the run ends. If the store ends with its process, the others come first."""
        with suppress(RuntimeError):
            self._store.set(_SAID, str(status))
            self.tell(_Failed(status))
            heard = [f"{_HEARD}{rank}" for rank in range(1, self.size)]
            if os.environ.get(_OWN_STORE) != "True":
                self.leave()  # a library's barrier, in which others may wait for this rank, ends with it
                self._wait(heard, _LITTLE_S if is_of_other_rank(error) else _PATIENCE_S)

    def told(self, error: Exception) -> int | None:
        """Of another rank: the status with which rank 0 ended, if it speaks for this one. Args: error: Of this rank."""
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
        """Returns: whether they came to be there. Signals are obeyed meanwhile, as they are not in the store's wait."""
        end_s = time.monotonic() + patience_s
        while not self._store.check(keys):
            if time.monotonic() > end_s:
                return False
            time.sleep(_LOOK_S)
        return True


ALONE = Crew()
"""No launcher."""
