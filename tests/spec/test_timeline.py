"""A timeline adds up the work of lanes and the waits of compute, survives JSON, and can be drawn."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outcore.core.errors import ConfigError
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE, LANES, TRACE_BEGINNING, Span, Timeline

STEP = Timeline(
    spans=(
        Span(COMPUTE, "forward", 1.0, 5.0),
        Span("h2d", "fetch layers.1", 1.0, 2.5, 100),
        Span(COMPUTE, "forward layers.0", 1.5, 2.0),
        Span("h2d", "fetch layers.2", 2.5, 4.0, 50),
        Span(COMPUTE, "forward layers.1", 2.5, 3.0),
        Span("d2h", "gradients of layers.1", 6.0, 7.0, 30),
    ),
    waits=(Span("h2d", "fetch layers.1", 2.0, 2.5), Span("d2h", "gradients of layers.1", 5.0, 7.0)),
)

moments = st.floats(0, 100, allow_nan=False)
spans = st.builds(
    lambda lane, name, start_s, more_s, nbytes: Span(lane, name, start_s, start_s + more_s, nbytes),
    st.sampled_from([*LANES, "another lane"]),
    st.text(max_size=5),
    moments,
    moments,
    st.integers(0, 2**40),
)
timelines = st.builds(lambda a, b: Timeline(tuple(a), tuple(b)), st.lists(spans), st.lists(spans))


def test_every_lane_of_the_runtime_has_its_row():
    assert set(LANES) == {COMPUTE, *(lane.value for lane in Lane)}


def test_lanes_are_busy_while_they_work_and_compute_while_it_does_not_wait():
    busy_s = STEP.busy_s()
    assert busy_s["h2d"] == 3.0  # the spans follow each other
    assert busy_s["d2h"] == 1.0
    assert busy_s["update"] == 0.0
    assert busy_s[COMPUTE] == 3.5  # units are within the model's forward, half a second of which is a wait
    assert {lane: s for lane, s in STEP.exposed_s().items() if s} == {"h2d": 0.5, "d2h": 2.0}
    assert STEP.wall_s == 6.0
    assert STEP.explained_s() == busy_s[COMPUTE] + 0.5 + 2.0
    assert STEP.moved_bytes() == {**dict.fromkeys(LANES, 0), "h2d": 150, "d2h": 30}


def test_a_part_is_cut_at_both_ends_and_counts_bytes_once():
    part, rest = STEP.between(1.0, 3.0), STEP.between(3.0, 9.0)
    assert part.wall_s == 2.0
    assert part.busy_s()["h2d"] == 2.0
    assert part.busy_s()[COMPUTE] + rest.busy_s()[COMPUTE] == STEP.busy_s()[COMPUTE]
    assert (part.moved_bytes()["h2d"], rest.moved_bytes()["h2d"]) == (100, 50)


def test_an_empty_timeline_is_nothing():
    empty = Timeline(())
    assert (empty.wall_s, empty.explained_s(), set(empty.busy_s().values())) == (0.0, 0.0, {0.0})
    assert json.loads(empty.to_trace())["traceEvents"]


@given(timelines)
def test_json_comes_back(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


@given(timelines)
def test_busy_and_exposed_never_exceed_the_wall(timeline):
    for seconds in (timeline.busy_s(), timeline.exposed_s()):
        assert all(0 <= s <= timeline.wall_s + 1e-6 for s in seconds.values())
    assert timeline.explained_s() <= timeline.wall_s + 1e-6
    assert timeline.busy_s()[COMPUTE] <= timeline.explained_s() + 1e-6


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 2}', '{"version": 1, "spans": [[1]], "waits": []}'])
def test_other_text_is_refused(text):
    with pytest.raises(ConfigError, match="timeline: expected"):
        Timeline.from_json(text)


def test_a_trace_has_a_row_per_lane_in_a_fixed_order_and_microseconds():
    trace = json.loads(STEP.to_trace())
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    order = {e["tid"]: e["args"]["sort_index"] for e in trace["traceEvents"] if e["name"] == "thread_sort_index"}
    assert [named[row] for row in sorted(order, key=order.get)] == [COMPUTE, "waits", *LANES[1:]]
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(STEP.spans) + len(STEP.waits)
    rows = {lane: row for row, lane in named.items()}
    fetch = next(e for e in events if e["tid"] == rows["h2d"] and e["name"] == "fetch layers.2")
    assert (fetch["ts"], fetch["dur"], fetch["args"]) == (1.5e6, 1.5e6, {"bytes": 50})
    wait = next(e for e in events if e["tid"] == rows["waits"])
    assert (wait["name"], wait["args"]) == ("h2d: fetch layers.1", {"lane": "h2d"})
    ids = {e["pid"] for e in trace["traceEvents"]}
    assert ids == {0}


@given(timelines)
def test_every_trace_can_be_told_by_its_beginning(timeline):
    assert timeline.to_trace().startswith(TRACE_BEGINNING)


def test_a_lane_that_is_not_known_comes_last():
    timeline = Timeline((Span("another lane", "update", 0.0, 1.0), *STEP.spans))
    assert timeline.lanes() == (*LANES, "another lane")
    assert timeline.busy_s()["another lane"] == 1.0
