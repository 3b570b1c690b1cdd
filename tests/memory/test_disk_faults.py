"""Every disk failure is one typed error that names file, owner and offset; nothing hangs or is silently wrong."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from outcore.core.errors import DiskError, UnsupportedError
from outcore.memory.disk import STRIPE_BYTES, DiskStore
from outcore.memory.disk_file import OsDiskIO

TMPFS = 0x01021994


class FaultyIO:
    """Makes the real calls, with faults that a test switches on."""

    def __init__(self):
        self.real = OsDiskIO()
        self.filesystem = None
        self.free = None
        self.open_errno = {}  # whether O_DIRECT is requested -> errno
        self.allocate_errno = None
        self.read_limit_bytes = self.write_limit_bytes = None
        self.fail_read_at = self.fail_write_at = (None, 0)  # file offset, errno
        self.end_of_file = None
        self.stall = None

    def filesystem_type(self, path):
        return self.filesystem or self.real.filesystem_type(path)

    def free_bytes(self, path):
        return self.real.free_bytes(path) if self.free is None else self.free

    def open(self, path, flags):
        code = self.open_errno.get(bool(flags & os.O_DIRECT))
        if code:
            raise OSError(code, os.strerror(code))
        self.is_direct = bool(flags & os.O_DIRECT)
        return self.real.open(path, flags)

    def allocate(self, fd, nbytes):
        if self.allocate_errno:
            raise OSError(self.allocate_errno, os.strerror(self.allocate_errno))
        self.real.allocate(fd, nbytes)

    def pread(self, fd, memory, offset):
        self._disturb(self.fail_read_at, offset, memory.nbytes)
        if self.end_of_file is not None:
            memory = memory[: max(0, self.end_of_file - offset)]
        return self._some(self.real.pread, fd, memory, offset, self.read_limit_bytes) if memory.nbytes else 0

    def pwrite(self, fd, memory, offset):
        self._disturb(self.fail_write_at, offset, memory.nbytes)
        return self._some(self.real.pwrite, fd, memory, offset, self.write_limit_bytes)

    def _some(self, call, fd, memory, offset, limit):
        """Move whole pages and report ``limit`` bytes, which need not be whole pages."""
        if limit is None or limit >= memory.nbytes:
            return call(fd, memory, offset)
        if not self.is_direct:
            return call(fd, memory[:limit], offset)
        call(fd, memory[: limit - limit % 4096], offset)
        return limit

    def _disturb(self, fault, offset, nbytes):
        if self.stall is not None:
            self.stall.wait(60)
        at, code = fault
        if at is not None and offset <= at < offset + nbytes:
            raise OSError(code, os.strerror(code))


@pytest.fixture
def io():
    return FaultyIO()


def zeros(nbytes):
    return torch.zeros(nbytes, dtype=torch.uint8)


def pattern(nbytes):
    return (torch.arange(nbytes) % 251).to(torch.uint8)


@pytest.mark.parametrize("limit", [4096, 3 * 4096 + 5, 2**20])
def test_short_reads_and_writes_go_on(tmp_path, io, limit):
    # Code that drops the loop, or goes on from an unaligned offset, loses bytes or gets EINVAL.
    nbytes = 2**20 + 8192
    with DiskStore.open([tmp_path], nbytes, io=io) as store:
        extent = store.take(nbytes, owner="unit")
        io.read_limit_bytes = io.write_limit_bytes = limit
        store.write(extent, pattern(nbytes))
        got = zeros(nbytes)
        store.read(extent, got)
        assert torch.equal(got, pattern(nbytes))


def test_odd_short_reads_go_on_with_buffered_io(tmp_path, io):
    io.open_errno = {True: errno.EINVAL}
    with DiskStore.open([tmp_path], 20_480, io=io) as store:
        assert [path.name for path in store.buffered_paths] == ["data"]
        extent = store.take(20_001, owner="unit")
        io.read_limit_bytes, io.write_limit_bytes = 777, 1001
        store.write(extent, pattern(20_001))
        got = zeros(20_001)
        store.read(extent, got)
        assert torch.equal(got, pattern(20_001))


def test_a_file_that_was_truncated(tmp_path, io):
    with DiskStore.open([tmp_path], 3 * STRIPE_BYTES, io=io) as store:
        extent = store.take(3 * STRIPE_BYTES, owner="layers.3 states")
        io.end_of_file = 2 * STRIPE_BYTES + 8192
        with pytest.raises(
            DiskError, match=r"'layers.3 states'.*read 4.00 MiB at byte 8388608 of '.*data'.*ends at byte"
        ):
            store.read(extent, zeros(extent.nbytes))


@pytest.mark.parametrize(("verb", "code"), [("read", errno.EIO), ("write", errno.EIO), ("write", errno.ENOSPC)])
def test_errors_name_file_owner_offset_and_remedy(tmp_path, io, verb, code):
    with DiskStore.open([tmp_path], 4 * STRIPE_BYTES, io=io) as store:
        store.take(4096, owner="first")
        extent = store.take(3 * STRIPE_BYTES, owner="layers.3")
        setattr(io, f"fail_{verb}_at", (2 * STRIPE_BYTES + 5, code))
        with pytest.raises(DiskError) as caught:
            getattr(store, verb)(extent, zeros(extent.nbytes))
        text = str(caught.value)
        for part in ("'layers.3'", verb, f"byte {2 * STRIPE_BYTES}", str(tmp_path), errno.errorcode[code]):
            assert part in text
        assert ("smartctl" if code == errno.EIO else "free space") in text
        assert caught.value.errno == code
        # The store itself still works.
        setattr(io, f"fail_{verb}_at", (None, 0))
        store.write(extent, pattern(extent.nbytes))
        got = zeros(extent.nbytes)
        store.read(extent, got)
        assert torch.equal(got, pattern(extent.nbytes))


def test_nothing_touches_the_memory_after_an_error(tmp_path, io):
    # If the error came while other pieces are under way, they could write into memory that has a new owner by then.
    nbytes = 8 * STRIPE_BYTES
    with DiskStore.open([tmp_path], nbytes, io=io) as store:
        extent = store.take(nbytes, owner="unit")
        store.write(extent, pattern(nbytes))
        io.fail_read_at = (STRIPE_BYTES, errno.EIO)
        memory = zeros(nbytes)
        with pytest.raises(DiskError):
            store.read(extent, memory)
        memory.fill_(7)
        store.read(extent.part(0, 4096), zeros(4096))
        assert bool((memory == 7).all())


def test_a_stalled_disk_is_an_error_and_the_store_unusable(tmp_path, io):
    store = DiskStore.open([tmp_path], 2 * STRIPE_BYTES, io=io, stall_timeout_s=0.1)
    extent = store.take(2 * STRIPE_BYTES, owner="unit")
    io.stall = threading.Event()
    with pytest.raises(DiskError, match=r"'unit'.*read.*of '.*data'.*ETIMEDOUT: no progress for 0.1 s"):
        store.read(extent, zeros(extent.nbytes))
    with pytest.raises(DiskError, match="unusable since an earlier stall"):
        store.write(extent, zeros(extent.nbytes))
    io.stall.set()
    store.close()
    assert list(tmp_path.iterdir()) == []


def test_closing_with_a_stalled_disk_does_not_hang(tmp_path, io):
    store = DiskStore.open([tmp_path], STRIPE_BYTES, io=io, stall_timeout_s=0.1)
    extent = store.take(4096, owner="unit")
    io.stall = threading.Event()
    with pytest.raises(DiskError, match="no progress"):
        store.read(extent, zeros(4096))
    store.close()
    assert list(tmp_path.iterdir()) == []
    io.stall.set()


def test_closed_store(tmp_path):
    store = DiskStore.open([tmp_path], 4096)
    extent = store.take(4096, owner="unit")
    store.close()
    with pytest.raises(DiskError, match=r"'unit'.*the disk store is closed"):
        store.read(extent, zeros(4096))


def test_too_little_space_is_seen_before_anything_is_written(tmp_path, io):
    io.free = 2**20
    with pytest.raises(DiskError, match=r"ENOSPC: needs 1.00 GiB, 1.00 MiB free; free space there") as caught:
        DiskStore.open([tmp_path], 2**30, io=io)
    assert caught.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == []


def test_exactly_the_free_space_is_accepted(tmp_path, io):
    io.free = 2**20
    DiskStore.open([tmp_path], 2**20, io=io).close()


def test_space_that_vanishes_while_it_is_reserved(tmp_path, io):
    io.allocate_errno = errno.ENOSPC
    first, second = tmp_path / "a", tmp_path / "b"
    with pytest.raises(DiskError, match="ENOSPC"):
        DiskStore.open([first, second], 2 * STRIPE_BYTES, io=io)
    assert list(first.iterdir()) == []


def test_a_second_path_that_fails_leaves_nothing_in_the_first(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(DiskError):
        DiskStore.open([tmp_path / "a", tmp_path / "file"], 2 * STRIPE_BYTES)
    assert list((tmp_path / "a").iterdir()) == []


def test_a_filesystem_in_memory_is_refused(tmp_path, io):
    io.filesystem = TMPFS
    with pytest.raises(DiskError, match=r"expected a drive, but it is on tmpfs, which is host memory; give a folder"):
        DiskStore.open([tmp_path / "new"], 4096, io=io)
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_a_real_tmpfs_is_recognised():
    assert OsDiskIO().filesystem_type(Path("/dev/shm")) == TMPFS


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_cannot_be_written(tmp_path, io, code):
    io.open_errno = {True: code, False: code}
    with pytest.raises(DiskError, match=f"disk path '{tmp_path}'.*{errno.errorcode[code]}.*give a "):
        DiskStore.open([tmp_path], 4096, io=io)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/folder"])
def test_a_path_that_is_a_file(tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(DiskError, match="give a folder, not a file"):
        DiskStore.open([Path(f"{file}{below}")], 4096)
    assert file.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DiskError, match=r"EACCES.*this user may write to"):
        DiskStore.open([tmp_path / "new"], 4096)


def test_a_missing_path_is_made(tmp_path):
    DiskStore.open([tmp_path / "a" / "b"], 4096).close()
    assert (tmp_path / "a" / "b").is_dir()


def test_a_filesystem_that_only_accepts_the_flag_gets_buffered_io(tmp_path, io):
    io.fail_write_at = (0, errno.EINVAL)  # the probe's write
    with DiskStore.open([tmp_path], 4096, io=io) as store:
        assert len(store.buffered_paths) == 1
        io.fail_write_at = (None, 0)
        extent = store.take(100, owner="unit")
        store.write(extent, pattern(100))
        got = zeros(100)
        store.read(extent, got)
        assert torch.equal(got, pattern(100))


def test_a_forked_child_gets_an_error_and_takes_nothing_away(tmp_path):
    with DiskStore.open([tmp_path], 4096) as store:
        extent = store.take(4096, owner="unit")
        store.write(extent, pattern(4096))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                store.read(extent, zeros(4096))
            except UnsupportedError as error:
                status = 0 if "forked child" in str(error) else 2
            store.close()
            os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert len(list(tmp_path.iterdir())) == 1
        got = zeros(4096)
        store.read(extent, got)
        assert torch.equal(got, pattern(4096))
