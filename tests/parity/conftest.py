"""One ATen thread: the models are so small that two threads wait for one another longer than they work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outcore.runtime.early import EarlyUpdates, _Attempt


@pytest.fixture(autouse=True, scope="package")
def _single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def patient_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``step()`` wait for every early update, so that none is overtaken or given up."""

    def settle(self: EarlyUpdates) -> None:
        for attempt in self._attempts.values():
            assert attempt.updated is not None
            attempt.updated.wait_issued()  # nothing that the race checker would take for an order

    monkeypatch.setattr(EarlyUpdates, "settle", settle)
    monkeypatch.setattr(_Attempt, "is_made", lambda self: self._is_made is not False)
    monkeypatch.setattr(_Attempt, "settle", lambda self: True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:  # said once per process, by whichever test comes first
            item.add_marker(pytest.mark.filterwarnings("ignore:torch._fused_sgd_ .* cannot be used:RuntimeWarning"))
