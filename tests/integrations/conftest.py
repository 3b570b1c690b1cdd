"""No network, no progress bars, and no search for garbage among what was imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import datasets
import huggingface_hub.constants
import pytest


@pytest.fixture(autouse=True, scope="session")
def _imports_are_no_garbage() -> Iterator[None]:
    """Every call of ``train`` collects garbage, which takes longer than training with these libraries loaded."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
