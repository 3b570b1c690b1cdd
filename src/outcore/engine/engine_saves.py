"""What copies an engine's homes into the files of a save. See [Note: saving beside training]."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property, partial

import torch

from outcore.core.errors import OutcoreError
from outcore.device.device import Device
from outcore.device.device_copies import DeviceChecksum, DeviceCopies
from outcore.device.lanes import Handle
from outcore.engine.checkpoint_saves import EditedError, Read, Save, Source, Spans, Writer, append_bytes
from outcore.engine.unit.live_port import LivePort, Tiers
from outcore.memory.arena import Buffer
from outcore.memory.disk import Extent
from outcore.order.ledger import ByteSpan, Home, Ledger
from outcore.order.saves import save_homes
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE

Meet = Callable[["Save"], None]


def _alone(_: Save) -> None:
    """No other rank saves."""


class EngineSaves:
    """The saves of one engine, one at a time."""

    def __init__(self, device: Device, port: LivePort, tiers: Tiers) -> None:
        self._device, self._port, self._tiers = device, port, tiers
        self.edited: set[str] = set()
        """Labels of units whose weights had changed after a copy: the next save waits for them."""
        self.late = defaultdict[str, list[DeviceChecksum]](list)
        """Sums of units whose weights an update still sends. The first user, a call or the copy, takes them."""
        self._running: list[Save] = []
        """At most one."""
        self._pid = os.getpid()
        # For programs that end without close(). Called before the lanes are closed, which were opened earlier.
        self._at_exit = weakref.finalize(self, _finish, self._running, self._pid)

    @cached_property
    def _aside(self) -> DeviceCopies:
        return DeviceCopies(self._device.torch_device)

    def make_room(self) -> Save | None:
        """Wait for the save before. Returns it if it failed and no caller was told."""
        failed = None
        for save in self._running:
            if not save.is_told:
                with suppress(Exception):
                    save.wait()
                failed = save if save.error is not None else None
        self._running.clear()
        self.late.clear()
        return failed

    def begin(self, save: Save) -> None:
        """Begin a save. Nothing of it was submitted."""
        self._running.append(save)

    def finish(self) -> None:
        """Wait for the save under way. Raises: Its error, if it failed and no caller was told."""
        failed = self.make_room() if os.getpid() == self._pid else None
        if failed is not None:
            failed.wait()

    def end_at_once(self) -> None:
        """End the save under way without waiting for it."""
        for save in self._running:
            save.end_at_once()

    def close(self) -> None:
        """Remove what is not complete: the lanes have stopped."""
        self._at_exit.detach()
        for save in self._running if os.getpid() == self._pid else ():
            save.fail(OutcoreError("expected a model whose checkpoint can be written, but it was closed"))
            save.close()

    def home(
        self,
        unit: Ledger[Handle],
        home: Home[Handle],
        spans: Spans,
        save: Save,
        file: Writer,
        *,
        header: bytes = b"",
    ) -> None:
        """Submit that a header, and behind it some bytes of a home, are appended to a file."""
        first = min(start for start, _ in spans)
        source = home.span(first, max(stop for _, stop in spans))
        inside = [(start - first, stop - first) for start, stop in spans]
        copied = self._unedited([(unit, home)], [source])

        def write() -> None:
            with copied():
                append_bytes(file, header)
                file.write(_length(inside), partial(self._fill, source.memory, inside))

        save_homes(self._port, [(unit, home)], [source], self._unless_over(save, write))

    def made(self, sources: Sequence[Source], save: Save, make: Callable[[Sequence[Read]], None]) -> None:
        """Submit that ``make`` is called with readers of homes' bytes, one for each source."""
        homes = [(unit, home) for unit, home, _, _ in sources]
        spans = [home.span(start, stop) for _, home, start, stop in sources]
        copied = self._unedited(homes, spans)

        def work() -> None:
            with copied():
                make([partial(self._fresh, span.memory) for span in spans])

        save_homes(self._port, homes, spans, self._unless_over(save, work))

    def _unedited(
        self, homes: Sequence[tuple[Ledger[Handle], Home[Handle]]], spans: Sequence[ByteSpan]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Sum weights on the device. Returns a context for their copy, which raises if they have changed.

        See [Note: weights that are saved]. Weights that an update still sends there are summed when they are there.
        """
        watched = list[tuple[str, torch.Tensor, DeviceChecksum]]()
        for (unit, home), span in zip(homes, spans, strict=True):
            if home.kind == "weights" and home.tier == "device" and span.nbytes:
                watched.append((unit.name, span.memory.bytes, DeviceChecksum(span.memory.bytes)))
                self._sum(unit, home, span, watched[-1][-1])

        @contextmanager
        def copied() -> Iterator[None]:
            self._aside.take(before for _, _, before in watched)
            yield
            for name, memory, before in watched:
                if not self._aside.is_sum_of(before, memory):
                    self.edited.add(name)
                    raise EditedError(
                        f"save: expected weights of unit '{name}' that stay as they are until they are copied, but its "
                        "forward changes them, or code that kept p.data; save with wait=True before they change"
                    )

        return copied

    def _sum(self, unit: Ledger[Handle], home: Home[Handle], span: ByteSpan, of: DeviceChecksum) -> None:
        """Take the sum now, or leave it for later if it would have to wait for an update."""
        if _is_on_its_way(home):
            self.late[unit.name].append(of)
            return
        self._device.compute("sum weights", reads=[span.memory.region], after=home.before_read())
        of.take()

    def _unless_over(self, save: Save, work: Callable[[], None]) -> Callable[[], None]:
        """Return work for the lane. An error in it fails the save, not the training."""
        save.num_pieces += 1

        def function() -> None:
            if save.error is not None:
                return
            try:
                began_s = time.monotonic()
                work()
                save.num_written += 1
                save.busy_s += time.monotonic() - began_s
            except Exception as error:
                save.fail(error)

        return function

    def last(
        self,
        save: Save,
        name: str,
        commit: Callable[[], None],
        tidy_up: Callable[[], object],
        *,
        meet: Meet = _alone,
        miss: Meet = _alone,
    ) -> None:
        """Submit the end of a save, behind everything else that was submitted.

        Args:
            save: The save.
            name: Name of the operation.
            commit: Makes the save durable; a collective if there are other ranks.
            tidy_up: Called after that.
            meet: Meets the other ranks; raises if one failed.
            miss: Called in place of ``commit`` if the save has failed on this rank by then.
        """
        end = partial(self._end, save, commit, tidy_up, meet, miss)
        save.ends_with(self._device.submit(Lane.SAVE, name, end), self._device)

    def _end(
        self, save: Save, commit: Callable[[], None], tidy_up: Callable[[], object], meet: Meet, miss: Meet
    ) -> None:
        try:
            if save.error is None:
                save.refuse_missing()
        except Exception as error:
            save.fail(error)
        try:
            meet(save)
            if not save.commit(commit):
                miss(save)
        except Exception as error:
            save.fail(error)
        save.close()
        if save.error is not None:
            return
        try:
            tidy_up()
        except Exception as error:
            save.complaint = error

    def _fill(self, memory: Buffer | Extent, spans: Spans, start: int, stop: int, to: torch.Tensor) -> None:
        """Read the bytes [start, stop) of some spans of a home's part, counted as if one lay behind the other."""
        first = 0
        for begin, end in spans:
            a, b = max(start, first), min(stop, first + end - begin)
            if a < b:
                self._read(memory, begin + a - first, to[a - start : b - start])
            first += end - begin

    def _read(self, memory: Buffer | Extent, start: int, to: torch.Tensor) -> None:
        if isinstance(memory, Extent):
            self._tiers.store().read(memory.part(start, start + to.numel()), to, gives_way=True)
            return
        self._aside.copy(memory.bytes[start : start + to.numel()], to)

    def _fresh(self, memory: Buffer | Extent | None, start: int, stop: int) -> torch.Tensor:
        result = torch.empty(stop - start, dtype=torch.uint8, device="cpu")
        if memory is not None and stop > start:
            self._read(memory, start, result)
        return result


def _is_on_its_way(home: Home[Handle]) -> bool:
    return home.ready is not None and home.ready.lane != COMPUTE and not home.ready.is_over()


def _length(spans: Spans) -> int:
    return sum(stop - start for start, stop in spans)


def _finish(running: list[Save], pid: int) -> None:
    """Wait for saves at exit. Errors become warnings: no caller is left. A forked child has nothing to wait for."""
    if os.getpid() != pid:
        return
    for save in running:
        if save.is_told:
            continue
        try:
            save.wait()
        except Exception as error:
            warnings.warn(f"the last save failed: {error}", RuntimeWarning, stacklevel=3)
    running.clear()
