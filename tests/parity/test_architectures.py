"""A few architectures of Transformers; ``architectures.py`` tries all of them."""

from __future__ import annotations

import pytest
from outside.architectures import compare


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("causal", "gpt2"),  # attention computes with a cache
        ("causal", "deepseek_v3"),  # latent attention, experts
        ("causal", "qwen3_5_text"),  # linear attention, whose caches hold other things
        ("image", "beit"),  # blocks take a torch.Size
        ("audio", "wav2vec2"),  # numpy's random numbers, skipped layers
    ],
)
def test_architecture(task: str, kind: str) -> None:
    assert compare(task, kind).verdict == "equal"
