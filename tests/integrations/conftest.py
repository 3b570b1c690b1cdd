"""No progress bars."""

from __future__ import annotations

from collections.abc import Iterator

import datasets
import pytest


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
