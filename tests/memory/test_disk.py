"""The disk store returns what was written, whatever the sizes, offsets, paths and threads."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.core.errors import ConfigError, MemoryBudgetError
from outcore.memory.arena import Region
from outcore.memory.disk import STRIPE_BYTES, DiskStore, Extent
from outcore.memory.host import HostMemory

UGLY_SIZES = [1, 199, 4095, 4096, 4097, STRIPE_BYTES - 1, STRIPE_BYTES, STRIPE_BYTES + 1, 2 * STRIPE_BYTES + 12289]


def random_bytes(nbytes: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(params=[1, 2, 3], ids=lambda n: f"{n} paths")
def paths(request, tmp_path):
    return [tmp_path / str(i) for i in range(request.param)]


def test_round_trip_at_ugly_sizes_through_several_extents(paths):
    total = sum(-(-n // 4096) * 4096 for n in UGLY_SIZES)
    with DiskStore.open(paths, total) as store:
        extents = [store.take(n, owner=f"unit{i}") for i, n in enumerate(UGLY_SIZES)]
        values = [random_bytes(n, seed=i) for i, n in enumerate(UGLY_SIZES)]
        for extent, value in zip(extents, values, strict=True):
            store.write(extent, value)
        for extent, value in zip(extents, values, strict=True):
            got = torch.zeros(extent.nbytes, dtype=torch.uint8)
            store.read(extent, got)
            assert torch.equal(got, value)


@settings(deadline=None, max_examples=8)
@given(data=st.data())
def test_parts_of_extents_behave_like_slices(tmp_path_factory, data):
    # A wrong cut at a stripe, or a page rewritten at a wrong end, changes a neighbour.
    num_paths = data.draw(st.integers(1, 3))
    nbytes = 3 * STRIPE_BYTES + 8192
    folder = tmp_path_factory.mktemp("store")
    reference = random_bytes(nbytes, seed=data.draw(st.integers(0, 99)))
    with DiskStore.open([folder / str(i) for i in range(num_paths)], nbytes + 4096) as store:
        store.take(4096, owner="shifts the stripes")
        extent = store.take(nbytes, owner="unit")
        store.write(extent, reference)
        for seed in range(4):
            start = data.draw(st.integers(0, nbytes))
            stop = data.draw(st.integers(start, nbytes))
            reference[start:stop] = random_bytes(stop - start, seed)
            store.write(extent.part(start, stop), reference[start:stop].clone())
        start = data.draw(st.integers(0, nbytes))
        got = torch.zeros(nbytes - start, dtype=torch.uint8)
        store.read(extent.part(start, nbytes), got)
        assert torch.equal(got, reference[start:])
        whole = torch.zeros(nbytes, dtype=torch.uint8)
        store.read(extent, whole)
        assert torch.equal(whole, reference)


@settings(deadline=None, max_examples=50)
@given(sizes=st.lists(st.integers(0, 50_000), max_size=20))
def test_extents_never_overlap_and_start_on_pages(tmp_path_factory, sizes):
    total = sum(-(-n // 4096) * 4096 for n in sizes)
    with DiskStore.open([tmp_path_factory.mktemp("store")], total, num_threads=1) as store:
        extents = [store.take(n, owner="unit") for n in sizes]
        end = 0
        for extent, size in zip(extents, sizes, strict=True):
            assert extent.offset % 4096 == 0
            assert extent.offset >= end
            assert extent.nbytes == size
            end = extent.offset + extent.nbytes
        assert store.taken_bytes == total == store.nbytes
        with pytest.raises(MemoryBudgetError, match="disk store, 'late': expected at most 0 B more"):
            store.take(1, owner="late")


def test_threads_on_different_extents_do_not_disturb_each_other(paths):
    nbytes = 2 * STRIPE_BYTES + 4096
    with DiskStore.open(paths, 4 * nbytes, num_threads=3) as store, HostMemory.open(4 * nbytes) as memory:
        extents = [store.take(nbytes, owner=f"unit{i}") for i in range(4)]
        wrong = []

        def work(index):
            mine = memory.tensor[index * nbytes : (index + 1) * nbytes]
            for repeat in range(3):
                value = random_bytes(nbytes, seed=10 * index + repeat)
                mine.copy_(value)
                store.write(extents[index], mine)
                mine.zero_()
                store.read(extents[index], mine)
                if not torch.equal(mine, value):
                    wrong.append(index)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []


def test_stripes_go_round_the_paths(tmp_path):
    paths = [tmp_path / "a", tmp_path / "b"]
    with DiskStore.open(paths, 5 * STRIPE_BYTES):
        reserved = [int(text.split('"reserved_bytes": ')[1].split("\n")[0]) for text in owner_texts(paths)]
        assert reserved == [3 * STRIPE_BYTES, 2 * STRIPE_BYTES]


def owner_texts(paths: list[Path]) -> list[str]:
    return [next(path.glob("outcore-*/owner.json")).read_text() for path in paths]


def test_extent_region_and_part():
    extent = Extent(8192, 5000, "unit")
    assert extent.region == Region("disk", 8192, 13192)
    assert extent.part(10, 20) == Extent(8202, 10, "unit")
    with pytest.raises(AssertionError, match="part"):
        extent.part(10, 5001)


def test_wrong_memory_is_refused(tmp_path):
    with DiskStore.open([tmp_path], 8192) as store:
        extent = store.take(8192, owner="unit")
        for memory in (
            torch.zeros(8191, dtype=torch.uint8),
            torch.zeros(8192),
            torch.zeros(16384, dtype=torch.uint8)[::2],
        ):
            with pytest.raises(AssertionError, match="expected 8192 contiguous bytes for 'unit'"):
                store.read(extent, memory)
        with pytest.raises(AssertionError, match="not of this store"):
            store.read(Extent(8192, 4096, "stranger"), torch.zeros(4096, dtype=torch.uint8))


def test_no_path_is_refused():
    with pytest.raises(ConfigError, match="at least one path"):
        DiskStore.open([], 4096)


def test_closing_twice_leaves_the_folder_empty(paths):
    store = DiskStore.open(paths, 2 * STRIPE_BYTES)
    assert all(list(path.glob("outcore-*")) for path in paths)
    store.close()
    store.close()
    assert all(list(path.iterdir()) == [] for path in paths)


def test_space_is_reserved_up_front_and_given_back(tmp_path):
    import os

    def used_bytes():
        fds = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        files = [os.stat(fd) for fd in fds if os.path.exists(fd) and str(tmp_path) in os.readlink(fd)]
        return sum(stat.st_blocks * 512 for stat in files)

    store = DiskStore.open([tmp_path], 64 * 2**20)
    assert used_bytes() >= 64 * 2**20
    store.close()
    assert used_bytes() == 0
