"""Fixture for tests that build tensors by themselves: on any device, their tensors are made where the models are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .rig import DEVICE


@pytest.fixture(autouse=True)
def _tensors_are_made_on_the_device() -> Iterator[None]:
    if DEVICE == "cpu":
        yield
        return
    with torch.device(DEVICE):
        yield
