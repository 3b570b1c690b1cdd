"""Where ranks meet: they compare what they are about to do, and turn errors of torch's groups into ours.

[Note: tags] A collective only sees bytes: if one rank reads a gradient and another a norm, each would get what the
other sent. So ranks first send and compare a tag that says what they are about to do, and with what. A rank that failed
in what all do together says so by a tag of its own, wherever the others are.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import distributed

from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.ranks import TIMEOUT, OtherRankError
from outcore.ranks.groups import Groups, Notes, gather_single

_NAME_BYTES, _DIGEST_BYTES = 120, 8
"""Sizes of the two parts of a tag."""
_FAILED = "fail"
_SHORT_S, _LONG_S, _GRACE_S = 2e-5, 1e-3, 1.0
_MOST_S = 1e9
"""Longest time for which a rank may wait for the others: 30 years, which fit into a ``timedelta``."""


class Meeting:
    """Meetings of this rank with the others, over any group."""

    def __init__(self, rank: int, size: int, groups: Groups) -> None:
        """Args: groups: All groups; they hang up when ranks have lost one another."""
        self._rank, self._groups = rank, groups
        self.notes = Notes(rank, size)
        self.failure: OtherRankError | None = None
        """Why ranks have lost one another; None if they have not."""
        self.control: Any = None
        """Group for agreements from the caller's thread."""

    def begin(self) -> None:
        """Make the group for agreements. A collective."""
        with self.doing("call prepare"):
            self.control = self._groups.new("gloo")

    @contextmanager
    def doing(self, what: str, group: Any = None, facts: str = "") -> Iterator[None]:
        """Check that all ranks do the same, and turn errors of torch's groups into ours.

        Args:
            what: What all do, for errors, after *expected all ranks to*.
            group: Group in which to compare tags; None if what is sent has a tag of its own. See [Note: tags].
            facts: Other facts that must be the same.
        """
        if self.failure is not None:  # do not wait a second time
            raise self.failure
        try:
            if group is not None:
                self.meet(what, group, facts=facts)
            yield
        except OutcoreError:
            raise
        except RuntimeError as error:
            lost = OtherRankError(
                f"rank {self._rank}: expected all ranks to {what}, but one has ended, or did not come within "
                f"{timeout_s():g} s ({TIMEOUT}). Last seen: {self.notes.last_seen()}. Look at what these ranks say, "
                f"end all, and go on from what was saved. ({type(error).__name__}: {error})"
            )
            raise self.lose(lost) from error

    def meet(self, what: str, group: Any, said: bytes = b"", *, facts: str = "") -> list[bytes]:
        """Exchange texts, after comparing tags. Returns the texts of all ranks of the group. See [Note: tags]."""
        name = what.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
        tag = name + hashlib.sha256(f"{what}\0{facts}".encode()).digest()[:_DIGEST_BYTES]
        tags = self._all_bytes(tag + len(said).to_bytes(8, "little"), group)
        sizes = [int.from_bytes(theirs[-8:], "little") for theirs in tags]
        has_failed = [theirs[:_NAME_BYTES].rstrip(b"\0") == _FAILED.encode() for theirs in tags]
        different = next((place for place, theirs in enumerate(tags) if theirs[:-8] != tag), None)
        if different is not None and not any(has_failed):
            other = distributed.get_process_group_ranks(group)[different]
            raise self.lose(_different(self._rank, what, other, tags[different]))
        if not max(sizes):
            return [b""] * len(tags)
        rooms = self._all_bytes(said.ljust(max(sizes), b"\0"), group)
        texts = [room[:size] for room, size in zip(rooms, sizes, strict=True)]
        if any(has_failed):
            raise self.lose(OtherRankError(texts[has_failed.index(True)].decode()))
        return texts

    def lose(self, error: OtherRankError) -> OtherRankError:
        """Note that ranks have lost one another. Returns why: the first error, from which others follow.

        Waits on other lanes, here and on the other ranks, end soon; not at once, so that all ranks see what is wrong.
        """
        if self.failure is None:
            self.failure = error
            ending = threading.Timer(_GRACE_S, self._groups.hang_up)
            ending.daemon = True
            with suppress(RuntimeError):  # the interpreter is ending, which closes sockets
                ending.start()
        return self.failure

    def tell(self, text: str) -> None:
        """Tell the others, where they meet next, that this rank has failed. They may have failed, too."""
        if self.failure is None:
            with suppress(OutcoreError), self.doing("say how they failed"):
                self.meet(_FAILED, self.control, text.encode())

    def _all_bytes(self, mine: bytes, group: Any) -> list[bytes]:
        """The bytes of all ranks of a group; each gives equally many."""
        found = torch.empty(len(mine) * distributed.get_world_size(group), dtype=torch.uint8, device="cpu")
        self.gather_bytes(found, torch.frombuffer(bytearray(mine), dtype=torch.uint8), group)
        return [part.numpy().tobytes() for part in found.split(len(mine))]

    def gather_bytes(self, found: torch.Tensor, mine: torch.Tensor, group: Any) -> None:
        """Gather equally many bytes of all ranks of a group, in rank order."""
        if group is self.control:
            self.wait_for(gather_single(found, mine, group=group, async_op=True))
        else:  # on a lane, whose thread may block
            gather_single(found, mine, group=group)

    def wait_for(self, work: Any) -> None:
        """Wait for a collective. A Ctrl-C ends the wait, and so do errors on lanes. See [Note: hanging up]."""
        pause_s = _SHORT_S
        try:
            while not work.is_completed() and self.failure is None:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONG_S)
        except BaseException:
            self.failure = OtherRankError(
                f"rank {self._rank}: expected all ranks to meet, but this one was interrupted"
            )
            self._groups.hang_up()
            raise
        if self.failure is not None:  # noticed on a lane
            raise self.failure
        work.wait()


def _different(rank: int, what: str, other: int, tag: bytes) -> OtherRankError:
    """The error for tags that differ. Args: rank: This rank. what: What it is about to do. tag: The other rank's."""
    theirs = tag[:_NAME_BYTES].rstrip(b"\0").decode(errors="replace")
    differ = (
        "settings of param groups, the gradients that are held, what they were multiplied by, or sizes of "
        f"rank {other} differ from its own"
    )
    is_other = theirs.encode() != what.encode()[:_NAME_BYTES]
    return OtherRankError(
        f"rank {rank}: expected all ranks to {what} with the same settings, but "
        f"{f'rank {other} was about to {theirs}' if is_other else differ}; all ranks must make the same calls in the "
        "same order: end all, and go on from what was saved"
    )


def timeout_s() -> float:
    """How long a rank waits for the others.

    Raises:
        ConfigError: The environment variable is not a positive number, or above ``_MOST_S``.
    """
    text = os.environ.get(TIMEOUT, "1800")
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= _MOST_S:  # a NaN is refused, too
        raise ConfigError(f"{TIMEOUT}: expected a number of seconds up to {_MOST_S:g}, but got {text!r}")
    return value
