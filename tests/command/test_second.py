"""The second process of ``outcore plan`` computes what the first would."""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator

import pytest

from outcore.command.plan.worker_process import Second, serve


@pytest.fixture
def second() -> Iterator[Second]:
    with Second() as second:
        second.start()
        if second._process is None:
            pytest.skip("there is one core")
        yield second


def test_it_works_out_what_it_is_asked_for(second: Second):
    found: dict[int, float] = {}
    second._ask_for(math.sqrt, deque(enumerate([1.0, 4.0, 9.0])), found)
    assert found == {0: 1, 1: 2, 2: 3}
    assert second.num_done == 3
    assert second.map(math.sqrt, [16.0, 25.0], before=lambda: found.update({3: 16})) == [4, 5]
    assert found[3] == 16


def test_without_it_the_first_does_everything():
    assert Second().map(math.sqrt, [1.0, 4.0]) == [1, 2]


def test_another_outcore_is_not_asked(monkeypatch: pytest.MonkeyPatch):
    """A new process may import another outcore if the first was started in a folder that has one."""
    monkeypatch.setattr("outcore.command.plan.worker_process.__file__", "/elsewhere/second.py")
    with Second() as second:
        second.start()
        assert second.map(math.sqrt, [1.0, 4.0]) == [1, 2]
        second._ask_for(math.sqrt, deque(enumerate([9.0])), {})
        assert second.num_done == 0


def test_what_cannot_be_sent_the_first_does(second: Second):
    assert second.map(lambda x: x + 1, [1, 2, 3]) == [2, 3, 4]
    assert second.num_done == 0


def test_what_raises_raises_in_the_first(second: Second):
    with pytest.raises(ValueError, match="math domain"):
        second.map(math.sqrt, [1.0, -1.0])


def test_where_it_ends_the_first_goes_on(second: Second):
    process = second._process
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    found: dict[int, float] = {}
    left = deque(enumerate([1.0, 4.0]))
    second._ask_for(math.sqrt, left, found)
    assert (list(left), found) == ([(0, 1.0), (1, 4.0)], {})
    assert second.map(math.sqrt, [1.0, 4.0]) == [1, 2]


def test_it_answers_until_nothing_more_comes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    asked, results = io.BytesIO(), io.BytesIO()
    pickler = pickle.Pickler(asked)
    for number in (1.0, 4.0):
        pickler.dump((math.sqrt, number))
    asked.seek(0)
    serve(asked, results)
    results.seek(0)
    assert [pickle.load(results), pickle.load(results)] == [1, 2]


def test_it_needs_no_torch():
    names = "outcore.command.plan.worker_process, outcore.planner.search.changes"
    code = f"import sys, {names}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
