"""A timeline: what every lane did and when, predicted or measured, and what compute waited for.

[Note: busy and exposed] A lane is busy while one of its operations runs. Compute is busy inside its spans, except while
it waits. The time that it waits is *exposed*, and counts for the lane of the operation that it waits for. So compute's
busy seconds and all exposed seconds add up to the wall time, except for what runs outside of model and optimizer.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from outcore.core.errors import ConfigError

COMPUTE = "compute"
HOST = "host"
"""The thread that submits operations; its own work has no row."""
LANES = (
    COMPUTE,
    *("h2d", "write_back", "d2h"),
    *("update", "states_h2d", "device_update", "states_d2h", "save"),
    *("weights_read", "states_read", "disk_write", "states_write", "reduce", "gather", "link"),
)
"""Names of lanes, and the order of their rows."""
WRITES_TO_DISK = ("disk_write", "states_write")
"""Lanes whose bytes wear the drives of the disk tier."""
_WAITS = "waits"
TIMELINE_VERSION = 1
TRACE_BEGINNING = '{"displayTimeUnit": "ms", "traceEvents": ['
"""Beginning of the text that ``to_trace`` returns."""


@dataclass(frozen=True, slots=True)
class Span:
    """An operation from start to end, or a wait for it."""

    lane: str
    name: str
    """Name of the operation: ``fetch model.layers.3``."""
    start_s: float
    end_s: float
    nbytes: int = 0
    """Bytes that it moves or updates: those that it writes."""

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Timeline:
    """Spans in the order of their starts. All times are seconds since one common moment."""

    spans: tuple[Span, ...]
    """Operations of lanes and compute. Spans of compute may be nested: ``forward`` contains those of units."""
    waits: tuple[Span, ...] = ()
    """Waits of compute, with lane and name of the operation that it waited for."""

    @property
    def start_s(self) -> float:
        """Start of the first span or wait."""
        return min((s.start_s for s in (*self.spans, *self.waits)), default=0.0)

    @property
    def wall_s(self) -> float:
        """Seconds from the first start to the last end."""
        return max((s.end_s for s in (*self.spans, *self.waits)), default=0.0) - self.start_s

    def busy_s(self) -> dict[str, float]:
        """Return lane -> seconds in which it worked. See [Note: busy and exposed]."""
        waits = _union(self.waits)
        found = {}
        for lane in self.lanes():
            intervals = _union(s for s in self.spans if s.lane == lane)
            found[lane] = _length(intervals) - (_overlap(intervals, waits) if lane == COMPUTE else 0.0)
        return found

    def exposed_s(self) -> dict[str, float]:
        """Return lane -> seconds that compute waited for it. See [Note: busy and exposed]."""
        return {lane: _length(_union(s for s in self.waits if s.lane == lane)) for lane in self.lanes()}

    def explained_s(self) -> float:
        """Return the seconds in which compute worked or waited."""
        return _length(_union((*(s for s in self.spans if s.lane == COMPUTE), *self.waits)))

    def moved_bytes(self) -> dict[str, int]:
        """Return lane -> bytes of its operations."""
        return {lane: sum(s.nbytes for s in self.spans if s.lane == lane) for lane in self.lanes()}

    def lanes(self) -> tuple[str, ...]:
        """Return all lanes in the order of rows; those that are not in ``LANES`` come last."""
        others = sorted({s.lane for s in (*self.spans, *self.waits)} - set(LANES))
        return (*LANES, *others)

    def between(self, start_s: float, end_s: float) -> Timeline:
        """Return what overlaps a window, cut to it. Bytes of an operation count if it ends inside the window."""
        return Timeline(_cut(self.spans, start_s, end_s), _cut(self.waits, start_s, end_s))

    def to_json(self) -> str:
        """Return the timeline as JSON text."""
        rows = {
            "spans": [list(dataclasses.astuple(s)) for s in self.spans],
            _WAITS: [list(dataclasses.astuple(s)) for s in self.waits],
        }
        return json.dumps({"version": TIMELINE_VERSION, **rows}) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote.

        Raises:
            ConfigError: The text is anything else.
        """
        try:
            data = json.loads(text)
            if data["version"] != TIMELINE_VERSION:
                raise ConfigError(f"timeline: expected version {TIMELINE_VERSION}, but got {data['version']!r}")
            spans, waits = (tuple(_span(row) for row in data[key]) for key in ("spans", _WAITS))
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"timeline: expected what to_json() wrote, but got {type(error).__name__}: {error}"
            ) from error
        return cls(spans, waits)

    def to_trace(self) -> str:
        """Return the timeline in Chrome's trace format, with a row per lane and times in microseconds.

        ui.perfetto.dev and chrome://tracing show it.
        """
        rows = [(COMPUTE, COMPUTE, self._on(self.spans, COMPUTE)), (_WAITS, _WAITS, self.waits)]
        rows += [(lane, lane, self._on(self.spans, lane)) for lane in self.lanes() if lane != COMPUTE]
        events: list[Mapping[str, Any]] = [_meta("process_name", 0, name="outcore")]
        for row, (name, kind, spans) in enumerate(rows):
            events += [_meta("thread_name", row, name=name), _meta("thread_sort_index", row, sort_index=row)]
            events += [self._event(span, row, kind) for span in spans]
        return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}) + "\n"

    def _on(self, spans: Iterable[Span], lane: str) -> tuple[Span, ...]:
        return tuple(s for s in spans if s.lane == lane)

    def _event(self, span: Span, row: int, kind: str) -> Mapping[str, Any]:
        start_us, end_us = ((s - self.start_s) * 1e6 for s in (span.start_s, span.end_s))
        name = span.name
        facts: Mapping[str, object] = {"bytes": span.nbytes} if span.nbytes else {}
        if kind == _WAITS:
            name, facts = f"{span.lane}: {span.name}", {"lane": span.lane}
        place = {"ph": "X", "pid": 0, "tid": row, "ts": round(start_us, 3), "dur": round(end_us - start_us, 3)}
        return {"name": name, "cat": kind, **place, "args": facts}


def _meta(kind: str, row: int, **facts: object) -> Mapping[str, Any]:
    return {"name": kind, "ph": "M", "pid": 0, "tid": row, "args": facts}


def _span(row: Sequence[Any]) -> Span:
    lane, name, start_s, end_s, nbytes = row
    return Span(str(lane), str(name), float(start_s), float(end_s), int(nbytes))


def _cut(spans: Sequence[Span], start_s: float, end_s: float) -> tuple[Span, ...]:
    found = []
    for s in spans:
        if s.end_s > start_s and s.start_s < end_s:
            nbytes = s.nbytes if s.end_s <= end_s else 0
            found.append(Span(s.lane, s.name, max(s.start_s, start_s), min(s.end_s, end_s), nbytes))
    return tuple(found)


_Intervals = list[tuple[float, float]]


def _union(spans: Iterable[Span]) -> _Intervals:
    """Return disjoint intervals that cover the same moments, in order."""
    found: _Intervals = []
    for start_s, end_s in sorted((s.start_s, s.end_s) for s in spans):
        if found and start_s <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def _length(intervals: _Intervals) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _overlap(one: _Intervals, other: _Intervals) -> float:
    """Return the seconds that lie in both."""
    total_s, j = 0.0, 0
    for start_s, end_s in one:
        while j < len(other) and other[j][1] <= start_s:
            j += 1
        k = j
        while k < len(other) and other[k][0] < end_s:
            total_s += min(end_s, other[k][1]) - max(start_s, other[k][0])
            k += 1
    return total_s
