"""One ATen thread: the models are so small that two threads wait for one another longer than they work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def _single_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:  # said once per process, by whichever test comes first
            item.add_marker(pytest.mark.filterwarnings("ignore:torch._fused_sgd_ .* cannot be used:RuntimeWarning"))
