"""Whatever a drive does, a read returns what was written, or raises an error that names owner, file and offset."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from outcore.core.errors import DiskError
from outcore.memory.checksums import SEGMENT_BYTES, Checksums
from outcore.memory.disk import STRIPE_BYTES, DiskStore, Extent
from outcore.memory.disk_file import OsDiskIO

PAGE, SECTOR = 4096, 512
START, STOP = 3 * PAGE, 3 * SEGMENT_BYTES + 5 * PAGE
"""Bounds of an extent whose first and last segments are short."""


def random_bytes(nbytes, seed=0):
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def content():
    return bytes(random_bytes(STOP - START).numpy())


@pytest.fixture(scope="module")
def sums(content):
    sums = Checksums()
    sums.cover(0, START)
    sums.cover(START, STOP)
    sums.note(START, memoryview(content))
    return sums


def test_every_bit_of_a_word_counts_in_every_segment(sums, content):
    changed = bytearray(content)
    assert sums.wrong(START, memoryview(changed)) is None
    places = [0, 1000, SEGMENT_BYTES - START - 1, SEGMENT_BYTES - START, 2 * SEGMENT_BYTES, len(content) - 1]
    for place in (place - place % 8 for place in places):
        for bit in range(64):
            changed[place + bit // 8] ^= 1 << bit % 8
            wrong = sums.wrong(START, memoryview(changed))
            assert wrong is not None
            assert wrong == sums.segment(START + place)
            changed[place + bit // 8] ^= 1 << bit % 8


MIXED_UP = {
    "a page of zeros": lambda b: b[:PAGE] + bytes(PAGE) + b[2 * PAGE :],
    "zeros": lambda b: bytes(len(b)),
    "pages of a segment swapped": lambda b: b[PAGE : 2 * PAGE] + b[:PAGE] + b[2 * PAGE :],
    "sectors of a page swapped": lambda b: b[SECTOR : 2 * SECTOR] + b[:SECTOR] + b[2 * SECTOR :],
    "words swapped": lambda b: b[8:16] + b[:8] + b[16:],
    "pages of two segments swapped": lambda b: b[-PAGE:] + b[PAGE:-PAGE] + b[:PAGE],
    "a page written to the next place": lambda b: b[:PAGE] + b[:PAGE] + b[2 * PAGE :],
    "a sector too far": lambda b: b[-SECTOR:] + b[:-SECTOR],
    "a segment too far": lambda b: b[-SEGMENT_BYTES:] + b[:-SEGMENT_BYTES],
    "old bytes in the last sector": lambda b: b[:-SECTOR] + bytes(random_bytes(SECTOR, seed=1).numpy()),
}


@pytest.mark.parametrize("how", MIXED_UP)
def test_bytes_at_a_wrong_place_change_the_sum(how, sums, content):
    assert sums.wrong(START, memoryview(MIXED_UP[how](content))) is not None


def test_a_value_among_zeros_that_moves_changes_the_sum():
    sums = Checksums()
    sums.cover(0, SEGMENT_BYTES)
    for word in (1, 2**31, 2**40):
        words = torch.zeros(SEGMENT_BYTES // 8, dtype=torch.int64)
        words[100] = word
        sums.note(0, words.numpy().data.cast("B"))
        for place in (101, 102, 5000):
            assert sums.wrong(0, words.roll(place - 100).numpy().data.cast("B")) is not None


def test_what_was_never_written_is_zeros():
    sums = Checksums()
    sums.cover(0, SEGMENT_BYTES + PAGE)
    nothing = bytearray(SEGMENT_BYTES + PAGE)
    assert sums.wrong(0, memoryview(nothing)) is None
    nothing[-1] = 1
    assert sums.wrong(0, memoryview(nothing)) == (SEGMENT_BYTES, SEGMENT_BYTES + PAGE)


def test_extents_share_no_sum():
    sums = Checksums()
    for start, stop in ((0, PAGE), (PAGE, PAGE), (PAGE, 3 * PAGE), (3 * PAGE, 2 * SEGMENT_BYTES)):
        sums.cover(start, stop)
    found = [sums.segment(at) for at in (0, PAGE, 2 * PAGE, 3 * PAGE, SEGMENT_BYTES - 1, SEGMENT_BYTES)]
    assert [tuple(segment) for segment in found] == [
        (0, PAGE),
        (PAGE, 3 * PAGE),
        (PAGE, 3 * PAGE),
        (3 * PAGE, SEGMENT_BYTES),
        (3 * PAGE, SEGMENT_BYTES),
        (SEGMENT_BYTES, 2 * SEGMENT_BYTES),
    ]


class BadDrive(OsDiskIO):
    """Reports every write as done. ``then`` says what happens to the next one: ``lost``, ``elsewhere`` or ``half``."""

    then = ""

    def pwrite(self, fd, memory, offset):
        how, self.then = self.then, ""
        if how == "lost":
            return memory.nbytes
        if how == "half":
            return super().pwrite(fd, memory[: memory.nbytes // 2], offset) * 2
        return super().pwrite(fd, memory, offset + PAGE if how == "elsewhere" else offset)


@pytest.mark.parametrize("how", ["lost", "elsewhere", "half"])
@pytest.mark.parametrize("part", [(0, SEGMENT_BYTES), (2560, 2816)], ids=["whole", "part"])
def test_writes_that_a_drive_loses_are_named_when_they_are_read(how, part, tmp_path):
    io = BadDrive()
    with DiskStore.open([tmp_path], 4 * SEGMENT_BYTES, num_threads=1, io=io) as store:
        store.take(PAGE, owner="first")
        extent = store.take(3 * SEGMENT_BYTES, owner="blocks.3 states")
        store.write(extent, random_bytes(extent.nbytes))
        first = SEGMENT_BYTES - PAGE + part[0]
        written = extent.part(first, first + part[1] - part[0])
        io.then = how
        store.write(written, random_bytes(written.nbytes, seed=1))
        with pytest.raises(DiskError) as caught:
            store.read(extent, random_bytes(extent.nbytes))
        assert caught.value.errno == errno.EBADMSG
        text = str(caught.value)
        names = ["'blocks.3 states'", str(tmp_path), f"the 64.00 KiB at byte {SEGMENT_BYTES} are not", "checkpoint"]
        assert [name for name in names if name not in text] == []
        store.write(extent, random_bytes(extent.nbytes, seed=2))
        got = random_bytes(extent.nbytes)
        store.read(extent, got)
        assert torch.equal(got, random_bytes(extent.nbytes, seed=2))


def flip(nbytes_before: int, bit: int = 0) -> None:
    """Flip a bit in the file of the only store, without the store's knowledge."""
    link = next(fd for fd in Path("/proc/self/fd").iterdir() if os.path.lexists(fd) and "/data (del" in os.readlink(fd))
    fd = os.open(link, os.O_RDWR)
    try:
        (byte,) = os.pread(fd, 1, nbytes_before)
        os.pwrite(fd, bytes([byte ^ 1 << bit]), nbytes_before)
    finally:
        os.close(fd)


def test_a_write_beside_a_bad_byte_does_not_make_it_good(tmp_path):
    with DiskStore.open([tmp_path], SEGMENT_BYTES) as store:
        extent = store.take(SEGMENT_BYTES, owner="unit")
        store.write(extent, random_bytes(extent.nbytes))
        flip(20_000)
        with pytest.raises(DiskError, match=r"'unit': expected to write 256 B .* but got EBADMSG: the 64.00 KiB"):
            store.write(extent.part(512, 768), random_bytes(256))


def test_a_write_that_failed_is_not_taken_for_an_old_one(tmp_path):
    class Failing(OsDiskIO):
        fails = False

        def pwrite(self, fd, memory, offset):
            if self.fails and offset:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().pwrite(fd, memory, offset)

    io = Failing()
    with DiskStore.open([tmp_path], 2 * STRIPE_BYTES, num_threads=1, io=io) as store:
        extent = store.take(2 * STRIPE_BYTES, owner="unit states")
        store.write(extent, random_bytes(extent.nbytes))
        io.fails = True
        how = r"ENOSPC: No space left on device; free space there or give another path, then go on from the last"
        with pytest.raises(DiskError, match=how):
            store.write(extent, random_bytes(extent.nbytes, seed=1))
        io.fails = False
        with pytest.raises(DiskError, match=rf"the 64.00 KiB at byte {STRIPE_BYTES} are not what was written there"):
            store.read(extent, random_bytes(extent.nbytes))


def test_neighbours_that_move_at_once_do_not_disturb_each_others_sums(tmp_path):
    # Parts of an extent that share a segment, and extents that share 64 KiB of the store.
    num, nbytes = 4, 2 * PAGE + 256
    with DiskStore.open([tmp_path], 3 * SEGMENT_BYTES, num_threads=num) as store:
        store.take(PAGE, owner="first")
        shared = store.take(num * nbytes, owner="shared")
        mine = [shared.part(i * nbytes, (i + 1) * nbytes) for i in range(num)]
        mine += [store.take(PAGE, owner=f"own {i}") for i in range(num)]
        errors: list[object] = []

        def work(extent: Extent) -> None:
            try:
                for seed in range(15):
                    value, got = random_bytes(extent.nbytes, seed), random_bytes(extent.nbytes)
                    store.write(extent, value)
                    store.read(extent, got)
                    assert torch.equal(got, value)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(extent,)) for extent in mine]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
