"""Memory that the C library's allocator holds back is given back, but seldom."""

from __future__ import annotations

import pytest
import torch

from outcore.memory import host
from outcore.memory.host import HeldBack, give_back, resident_bytes

CHUNK_BYTES, NUM_CHUNKS = 2**16, 1024


def fragmented() -> torch.Tensor:
    """Free 64 MiB below an allocation that stays."""
    chunks = [torch.ones(CHUNK_BYTES // 4) for _ in range(NUM_CHUNKS)]
    return chunks[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(host.time, "monotonic", lambda: now[0])
    return now


def test_gives_back_what_grew_and_then_rests(clock: list[float]) -> None:
    held = HeldBack()
    held.give_back()
    before = resident_bytes()
    top = fragmented()
    assert resident_bytes() - before > 0.8 * CHUNK_BYTES * NUM_CHUNKS  # else there is nothing to give back
    held.give_back_if_due()
    assert resident_bytes() - before < 0.2 * CHUNK_BYTES * NUM_CHUNKS
    other = fragmented()
    held.give_back_if_due()
    assert resident_bytes() - before > 0.8 * CHUNK_BYTES * NUM_CHUNKS
    clock[0] += 2.5  # too soon: to touch 64 MiB again takes longer than a hundredth of that
    held.give_back_if_due()
    assert resident_bytes() - before > 0.8 * CHUNK_BYTES * NUM_CHUNKS
    clock[0] += 7.5
    held.give_back_if_due()
    assert resident_bytes() - before < 0.2 * CHUNK_BYTES * NUM_CHUNKS
    del top, other


def test_little_growth_is_left_alone(clock: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    held, calls = HeldBack(), []
    held.give_back()
    monkeypatch.setattr(host, "give_back", lambda: calls.append(1))
    for _ in range(5):
        held.give_back_if_due()
        clock[0] += 10.0
    assert not calls


def test_a_library_without_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.ctypes, "CDLL", lambda _: object())
    give_back()
