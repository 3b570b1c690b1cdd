"""``--nproc R``: the same command in R processes, started by torch's launcher."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

import psutil
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from outcore.core.errors import ConfigError
from outcore.core.ranks import launched

_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1")
_UNTIL_KILLED_S = 24 * 3600
"""Seconds until the launcher kills ranks. Ranks end within --grace by themselves; another signal ends them at once."""


def num_processes(text: str) -> int | None:
    """Return how many processes to start; None: this process is one of them, or alone.

    Raises:
        ConfigError: Not a positive integer, or a launcher has started another number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--nproc: expected a positive integer, but got '{text}'; give the number of ranks")
    count, found = int(text), launched()
    if found is not None and found.size != count:
        raise ConfigError(
            f"--nproc: expected it without a launcher, but this is one of {found.size} processes that were started "
            f"(WORLD_SIZE in the environment), and --nproc says {count}; leave one out"
        )
    return None if found is not None or count == 1 else count


def spawn(count: int, command: Sequence[str]) -> int:
    """Run a program in so many processes. Signals go to all of them. Returns: The exit status.

    Args:
        count: Number of ranks, all on this machine.
        command: Arguments of ``python``.
    """
    logging.disable(logging.CRITICAL)  # the launcher's own messages: ranks report what matters
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_UNTIL_KILLED_S))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // count)))
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    wanted: dict[str, Any] = {"signals_to_handle": ",".join(_SIGNALS)}  # options that not every torch has
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        monitor_interval=0.1,
        **{name: value for name, value in wanted.items() if name in known},
    )
    others = set(psutil.Process().children())
    try:
        elastic_launch(config, sys.executable)(*command)
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        return failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
    except SignalException as stop:
        return 128 + (signal.SIGINT if stop.sigval == signal.SIGINT else signal.SIGTERM)
    finally:
        _end_now(set(psutil.Process().children()) - others)
    return 0


def _end_now(left: Collection[psutil.Process]) -> None:
    """End processes that are left because a second signal came while the launcher waited for them."""
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.terminate()
    _, left = psutil.wait_procs(left, timeout=5)
    for child in left:
        with suppress(psutil.NoSuchProcess):
            child.kill()
