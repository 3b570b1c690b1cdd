"""Fixtures and hooks for every test: no GPU is needed, arithmetic is repeatable, and nothing stays behind."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import nursery
import one_arithmetic
import pytest
import torch

from outcore.memory import machine

os.environ["HF_HUB_OFFLINE"] = "1"  # libraries read it on import
# Plans have no predicted times: nothing is measured, and tests decide what moves. Tests of times name a machine.
os.environ["OUTCORE_HARDWARE"] = "none"
# The duration of an example, or of its generation, says nothing: other processes may have the processor.
too_slow = [hypothesis.HealthCheck.too_slow]
hypothesis.settings.register_profile("patient", deadline=None, suppress_health_check=too_slow)
hypothesis.settings.load_profile("patient")

LANE_EXIT_S = 5.0  # a closed lane's thread may still run its last instructions
FIRST = ("simulated_gpu", "tutorial", "system")  # folders whose tests start first
WORKERS_PER_CORE = 2
EVERY_OPTIMIZER = ("parity", "loop")
BIT_FOR_BIT = ("parity", "checkpoint", "integrations", "loop")  # plans that update on the host, and plain loops


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    _leave_pairs(items)
    has_gpu = torch.cuda.is_available()
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; tests/simulated_gpu runs it on one"))
        if item.path.parent.name in EVERY_OPTIMIZER:  # the warning comes once per process, from whichever test is first
            item.add_marker(pytest.mark.filterwarnings("ignore:torch._fused_sgd_ .* cannot be used:RuntimeWarning"))
    yield  # here pytest-randomly shuffles them
    items.sort(key=_turn)


def _leave_pairs(items: list[pytest.Item]) -> None:
    """Of tests marked `pairs`, keep those with a pair of values that no kept test has, most new pairs first."""
    tests: dict[str, list[Any]] = {}
    for item in items:
        if item.get_closest_marker("pairs"):
            tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    dropped: set[pytest.Item] = set()
    for left in tests.values():
        pairs = {item: set(itertools.combinations(enumerate(item.callspec._idlist), 2)) for item in left}
        while any(pairs.values()):
            most = max(pairs, key=lambda item: len(pairs[item]))
            seen = pairs.pop(most)
            pairs = {item: rest - seen for item, rest in pairs.items()}
        dropped |= pairs.keys()
    items[:] = [item for item in items if item not in dropped]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the files whose tests took longest, if ``--slowest-files`` says how many: seconds of all their phases."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    if number := config.getoption("--slowest-files"):
        terminalreporter.section(f"slowest {number} files")
        for name, taken_s in seconds.most_common(number):
            terminalreporter.write_line(f"{taken_s:7.1f} s {name}")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slowest-files", type=int, default=0, help="print this many files whose tests took longest")


@pytest.fixture(autouse=True, scope="module")
def _little_to_search() -> None:
    """Exclude imported objects from garbage collection: to search them takes longer than most tests that collect."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _idle() -> None:
    """Take no machine for busy: tests run beside one another."""
    machine._LEAST_S = math.inf


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """Start two workers per core: tests wait for late lanes, disks and new threads nearly as long as they compute."""
    is_said = "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ
    return None if is_said else WORKERS_PER_CORE * len(os.sched_getaffinity(0))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes() -> None:
    """Fork the workers: otherwise each of them, and its nursery, would import for ten seconds."""
    nursery.fork_workers()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler.loadgroup import LoadGroupScheduling

    class Together(LoadGroupScheduling):
        """Groups tests by file: group marks do not reach the scheduler (pytest-xdist 3.8 with pytest 9.2)."""

        def _split_scope(self, nodeid: str) -> str:
            return _stays_together(config.rootpath / nodeid.partition("::")[0]) or nodeid

    return Together(config, log)


@functools.cache
def _stays_together(path: Path) -> str | None:
    """Return the group of tests that run one after the other: control groups and signals, or costly shared fixtures."""
    text, folder = path.read_text(), path.parent.name
    if folder in FIRST:
        return folder
    return path.name if 'scope="module"' in text or "@functools.cache\n" in text else None


def _turn(item: pytest.Item) -> int:
    """Return a sort key that starts the longest sequences first, so that none is left when other workers are done."""
    folder = item.path.parent.name
    return FIRST.index(folder) if folder in FIRST else len(FIRST) + (_stays_together(item.path) is None)


@pytest.fixture(autouse=True, scope="session")
def _repeatable_arithmetic() -> None:
    # The bits of sums depend on the number of threads, so it is the same everywhere: 1. Kernels this small gain nothing
    # from a second thread, and wait for it a thousand times longer than they work if its core is busy.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _one_arithmetic(request: pytest.FixtureRequest) -> None:
    """Install the CPU's kernels on a real GPU; a simulated GPU has them already."""
    is_real = torch.version.cuda is not None or torch.version.hip is not None
    folders = {item.path.parent.name for item in request.session.items}
    if is_real and os.environ.get("OUTCORE_TEST_DEVICE") == "cuda" and not folders.isdisjoint(BIT_FOR_BIT):
        one_arithmetic.install()


@pytest.fixture(autouse=True)
def _nothing_stays(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves threads running, or files of the disk tier in its tmp_path."""
    before = set(threading.enumerate())
    # Requested before the test runs, so that the folder still exists after it.
    is_watched = "tmp_path" in request.fixturenames and "leaves_files" not in request.keywords
    folder = request.getfixturevalue("tmp_path") if is_watched else None
    yield
    deadline_s = time.monotonic() + LANE_EXIT_S
    while (left := _started_since(before)) and time.monotonic() < deadline_s:
        gc.collect()  # lanes of objects dropped without close end with the last reference
        time.sleep(0.01)
    assert not left, f"threads left running: {sorted(t.name for t in left)}"
    if folder is not None:
        files = sorted(str(path.relative_to(folder)) for path in folder.rglob("outcore-*"))
        assert not files, f"files of the disk tier left behind: {files}"


def _started_since(before: set[threading.Thread]) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread not in before and thread.name.startswith("outcore")}
