"""Buffers: parts of them, and tensors over them."""

from __future__ import annotations

import pytest
import torch

from outcore.memory.arena import Arena, Region


def test_parts():
    arena = Arena("host", torch.arange(2 * 4096, dtype=torch.int64).to(torch.uint8))
    arena.take(1)
    buffer = arena.take(100)
    for start, stop in ((0, 100), (0, 7), (0, 0), (3, 9), (100, 100)):
        for _ in range(2):
            part = buffer.part(start, stop)
            assert part.region == Region("host", 4096 + start, 4096 + stop)
            assert torch.equal(part.bytes, buffer.bytes[start:stop])
            assert part.bytes.untyped_storage().data_ptr() == buffer.bytes.untyped_storage().data_ptr()
    assert buffer.part(0, 7) is buffer.part(0, 7)  # cut once
    assert buffer.part(0, 7).part(0, 7).region == buffer.part(0, 7).region
    for start, stop in ((0, 101), (-1, 3), (5, 4)):
        with pytest.raises(AssertionError, match="part"):
            buffer.part(start, stop)
