"""QLoRA in a container with room for the base in 4 bits and for the libraries: in bf16 the base would not fit."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from outside.quantized_memory import losses, train, write_base

pytest.importorskip("bitsandbytes")

# Python, torch, TRL and bitsandbytes (about 400 MiB), activations, and a piece of a weight in full precision.
LIBRARIES_BYTES = 460 * 2**20
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 3, "num_attention_heads": 16}


@pytest.mark.timeout(300)
def test_a_base_of_4_bits(tmp_path: Path) -> None:
    """Quantising while reading takes more than a packed base (``outside/quantized_memory.py --packed``)."""
    numel, in_4_bits = write_base(tmp_path, is_packed=False, **SIZES)
    assert in_4_bits < 2 * numel / 3
    done, _ = train(tmp_path, in_4_bits + LIBRARIES_BYTES, in_4_bits, is_packed=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(losses(tmp_path)) == 1
    assert math.isfinite(losses(tmp_path)[0])
