"""Watches ranks of which one is at fault until all have ended, and judges them by what they report."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import nursery

from .conftest import start
from .faults import IN_PREPARE, NUM_SAVED_WRITES, POINTS, STALL_S, TIMEOUT_S, Fault

_STARTING = threading.Lock()
"""Held while ranks start: the nursery starts one group at a time."""
MARGIN_S = 5.0
INTERRUPT_S = 1.0
_LOST = re.compile(r"rank (\d): expected (?:all ranks to|the same backward on all ranks)")
_ALONE = {
    "zero": "with the same gradients held before",
    "factor": "what they were multiplied by",
    "rate": "settings of",
}


class Watched(NamedTuple):
    """What was seen of one rank."""

    status: int
    lines: list[dict[str, Any]]
    ended_at: float
    errors: str

    def said(self, what: str) -> dict[str, Any] | None:
        """Return the first line of a kind."""
        return next((line for line in self.lines if line["what"] == what), None)


class Verdict(NamedTuple):
    """The judgement of a run."""

    is_reached: bool
    """Whether the fault happened."""
    wrong: list[str]
    seconds: float
    """From the fault, or the Ctrl-C, until the last of the other ranks reported it."""
    ended_s: float
    """From the same moment until the last of the others had ended."""
    where: list[str]
    """What each of the others was waiting for."""


def draw(kind: str, seed: int, num_ranks: int) -> Fault:
    """Draw a fault of a kind."""
    numbers = random.Random(f"{kind} {seed}")
    rank, count = numbers.randrange(num_ranks), numbers.randrange(6)
    points = {
        "skips": ["backward", "step"],
        "asks": ["norm", "gradient", "states"],
        "fails_in_prepare": list(IN_PREPARE),
        "fills_the_drive": ["write"],
        "does_alone": list(_ALONE),
        "is_interrupted": [point for point in POINTS if point != "save"],
    }.get(kind, list(POINTS))
    point = points[seed % len(points)]
    if kind == "fails_in_prepare" and point != "first value":
        count = 0
    elif point in ("norm", "step", "save") and kind != "asks":
        count %= 3
    elif kind == "asks":
        count = numbers.choice([0, 1, 3, 5])  # numbers of backwards before which there are gradients
    elif kind == "fills_the_drive":
        count %= NUM_SAVED_WRITES
    homes = numbers.choice(["host", "disk", "device"])
    partition = "world" if point == "link" or (kind == "fails_in_prepare" and seed % 2) else "replicate"
    return Fault(kind, point, count, rank, homes, partition)


def run(fault: Fault, num_ranks: int) -> Verdict:
    """Run the ranks once and judge them."""
    before = _left_behind()
    with tempfile.TemporaryDirectory(dir=Path.home()) as folder:
        ranks = watch(fault, num_ranks, folder)
        verdict = judge(fault, ranks)
        left = sorted(set(_left_behind()) - set(before))
        homes = [path for path in Path(folder).iterdir() if path.name != "checkpoints"]
        allowed = 1 if fault.kind == "dies" else 0  # the next run removes it; its data file had no name any more
        if len(homes) > allowed or any(file.stat().st_size > 4096 for home in homes for file in home.rglob("*")):
            left += [str(path) for path in homes]
    return verdict._replace(wrong=[*verdict.wrong, *(f"left: {name}" for name in left)])


def _left_behind() -> Iterator[str]:
    """Shared memory and sockets that still have a name."""
    return [*os.listdir("/dev/shm"), *(name for name in os.listdir("/tmp") if "outcore" in name)]


def watch(fault: Fault, num_ranks: int, folder: str) -> list[Watched]:
    """Run the ranks until all have ended."""
    code = "from ranks.faults import main; main()"
    with _STARTING:
        ranks = start(code, num_ranks, [json.dumps(fault), folder], timeout_s=60.0, kind=nursery.Whole)
    found: dict[int, Watched] = {}

    def listen(number: int) -> None:
        process, lines = ranks[number], []
        errors: list[str] = []
        draining = threading.Thread(target=lambda: errors.append(process.stderr.read()))
        draining.start()
        for text in process.stdout:
            lines.append(json.loads(text))
            if lines[-1]["what"] == "reached" and fault.kind == "is_interrupted":
                time.sleep(INTERRUPT_S)
                for other in range(num_ranks):
                    if other != number:
                        ranks[other].send_signal(signal.SIGINT)
        status = process.wait()
        ended_at = time.monotonic()
        draining.join()
        process.stdout.close()
        process.stderr.close()
        found[number] = Watched(status, lines, ended_at, errors[0])

    listeners = [threading.Thread(target=listen, args=(number,)) for number in range(num_ranks)]
    for listener in listeners:
        listener.start()
    for listener in listeners:
        listener.join(250)
    _end(ranks)
    for listener in listeners:
        listener.join()
    return [found[number] for number in range(num_ranks)]


def _end(ranks: list[nursery.Popen]) -> None:
    for rank in ranks:
        rank.kill()


def judge(fault: Fault, ranks: list[Watched]) -> Verdict:
    """Judge whether all ranks ended as they should have."""
    guilty, others = ranks[fault.rank], [rank for number, rank in enumerate(ranks) if number != fault.rank]
    reached = guilty.said("reached")
    if reached is None:
        wrong = [f"{one.status} {one.lines} {one.errors[-2000:]}" for one in ranks if one.said("went on") is None]
        return Verdict(False, wrong, 0.0, 0.0, [])
    heard = "interrupted" if fault.kind == "is_interrupted" else "error"
    wrong = [text for number, rank in enumerate(ranks) for text in _wrong(fault, number, rank, heard)]
    began_at = reached["at"] + (INTERRUPT_S if fault.kind == "is_interrupted" else 0.0)
    lines = [line for rank in others if (line := rank.said(heard)) is not None]
    where = [line["text"] for line in lines]
    if fault.kind == "does_alone" and not any(_ALONE[fault.point] in text for text in where):
        wrong.append(f"nobody said what it was: {where}")
    seconds = max((line["at"] for line in lines), default=began_at) - began_at
    if seconds > (MARGIN_S if heard == "interrupted" else TIMEOUT_S + MARGIN_S):
        wrong.append(f"took {seconds:.1f} s")
    ended_s = max(rank.ended_at for rank in others) - began_at
    if heard == "interrupted" and ended_s > STALL_S - INTERRUPT_S:
        wrong.append(f"took {ended_s:.1f} s to close: it waited for the rank that stalls")
    return Verdict(True, wrong, seconds, ended_s, where)


def _wrong(fault: Fault, number: int, rank: Watched, heard: str) -> Iterator[str]:
    """What is wrong with one rank. Args: heard: The kind of line that the other ranks report the fault with."""
    if fault.kind == "dies" and number == fault.rank:
        if rank.status != -signal.SIGKILL:
            yield f"rank {number} ended with {rank.status}"
        return
    line = rank.said("error" if number == fault.rank else heard)
    if line is None or rank.status != 0:
        yield f"rank {number}: {rank.status} {rank.lines} {rank.errors[-3000:]}"
        return
    if not _names_what_happened(fault, number, line["text"]):
        yield f"rank {number} said: {line['text']}"
    if fault.kind in ("fails_in_prepare", "fills_the_drive") and rank.said("went on") is None:
        yield f"rank {number} did not go on: {rank.lines} {rank.errors[-3000:]}"


def _names_what_happened(fault: Fault, number: int, text: str) -> bool:
    if fault.kind in ("fails_in_prepare", "fills_the_drive"):
        return "No space left on device" in text and (number == fault.rank or f"rank {fault.rank} said" in text)
    if fault.kind == "is_interrupted":
        return True
    if fault.point == "save" and number == fault.rank and "other ranks gave the checkpoint up" in text:
        return True  # it came back after the others gave up
    speaker = _LOST.search(text)
    if speaker is None or int(speaker[1]) != number:
        return False
    others = text[speaker.end() :]
    return fault.kind == "does_alone" or number == fault.rank or f"rank {fault.rank}" in others
