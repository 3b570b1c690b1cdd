"""The race checker accepts every kind of order, finds every missing one, and agrees with brute force."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outcore.core.errors import RaceError
from outcore.device.faults import Faults
from outcore.device.opening import open_device
from outcore.device.race import ACTORS, RaceChecker
from outcore.memory.arena import Region
from outcore.spec.lane_names import Lane
from outcore.spec.timeline import COMPUTE, HOST

SLOT = Region("device", 4096, 8192)
HOME = Region("host", 0, 4096)
BUCKET = Region("device", 8192, 12288)
EXTENT = Region("disk", 0, 4096)


@pytest.fixture
def device():
    checker = RaceChecker()
    with open_device("cpu", Faults(), checker) as opened:
        yield opened


def nothing():
    pass


def fetch_then_use(device, label):
    fetched = device.submit(Lane.H2D, "fetch a", nothing, reads=[HOME], writes=[SLOT])
    device.compute("forward a", reads=[SLOT], after=label("weights fetched", fetched))


def slot_reuse_after_compute(device, label):
    device.compute("forward a", reads=[SLOT])
    used = device.mark("forward a is over")
    device.submit(Lane.H2D, "fetch b", nothing, writes=[SLOT], after=label("slot free", used))


def slot_reuse_after_the_access_itself(device, label):
    used = device.compute("forward a", reads=[SLOT])
    device.submit(Lane.H2D, "fetch b", nothing, writes=[SLOT], after=label("slot free", used))


def gradient_leaves_before_it_is_written(device, label):
    device.compute("backward a", writes=[BUCKET])
    written = device.mark("backward a is over")
    device.submit(Lane.D2H, "offload a", nothing, reads=[BUCKET], after=label("gradients ready", written))


def update_reads_gradient_too_early(device, label):
    arrived = device.submit(Lane.D2H, "offload a", nothing, writes=[HOME])
    device.submit(Lane.UPDATE, "update a", nothing, reads=[HOME], after=label("gradients arrived", arrived))


def bucket_is_zeroed_while_it_leaves(device, label):
    left = device.submit(Lane.D2H, "offload a", nothing, reads=[BUCKET])
    device.compute("zero the bucket", writes=[BUCKET], after=label("bucket free", left))


def write_back_before_the_update(device, label):
    updated = device.submit(Lane.UPDATE, "update a", nothing, writes=[HOME])
    device.submit(Lane.DISK_WRITE, "write a", nothing, reads=[HOME], writes=[EXTENT], after=label("updated", updated))


def read_of_an_extent_while_it_is_written(device, label):
    written = device.submit(Lane.DISK_WRITE, "write a", nothing, writes=[EXTENT])
    device.submit(Lane.STATES_READ, "read a", nothing, reads=[EXTENT], after=label("written", written))


def staging_slot_overwritten_while_it_is_copied(device, label):
    copied = device.submit(Lane.H2D, "fetch a", nothing, reads=[HOME])
    device.submit(Lane.WEIGHTS_READ, "read b", nothing, writes=[HOME], after=label("staging free", copied))


def two_writers(device, label):
    first = device.submit(Lane.WEIGHTS_READ, "read a", nothing, writes=[HOME])
    device.submit(Lane.STATES_READ, "read b", nothing, writes=[HOME], after=label("slot free", first))


def host_reads_too_early(device, label):
    updated = device.submit(Lane.UPDATE, "update a", nothing, writes=[HOME])
    for name, handle in label("updated", updated).items():
        device.wait(name, handle)
    device.host_access("state_dict", reads=[HOME])


def host_reads_the_result_of_compute(device, label):
    device.compute("forward a", writes=[BUCKET])
    for name, handle in label("computed", device.mark("over")).items():
        device.wait(name, handle)
    device.host_access("loss.item", reads=[BUCKET])


def what_the_host_waited_for_orders_what_it_submits(device, label):
    updated = device.submit(Lane.UPDATE, "update a", nothing, writes=[HOME])
    for name, handle in label("updated", updated).items():
        device.wait(name, handle)
    device.submit(Lane.H2D, "fetch a", nothing, reads=[HOME])


def transitive_over_two_lanes(device, label):
    device.compute("forward a", reads=[SLOT])
    read = device.submit(Lane.WEIGHTS_READ, "read b", nothing, writes=[HOME], after=label("x", device.mark("over")))
    device.submit(Lane.H2D, "fetch b", nothing, reads=[HOME], writes=[SLOT], after={"read": read})


def reader_of_two_is_forgotten(device, label):
    first = device.submit(Lane.H2D, "fetch a", nothing, reads=[HOME])
    second = device.submit(Lane.DISK_WRITE, "write a", nothing, reads=[HOME])
    device.submit(Lane.UPDATE, "update a", nothing, writes=[HOME], after={"copied": first, **label("written", second)})


def synchronize_orders_everything(device, label):
    device.submit(Lane.UPDATE, "update a", nothing, writes=[HOME])
    device.compute("forward a", writes=[SLOT])
    if label("all", device.mark("over")):
        device.synchronize()
    device.host_access("save", reads=[HOME, SLOT])


SCENARIOS = [
    fetch_then_use,
    slot_reuse_after_compute,
    slot_reuse_after_the_access_itself,
    gradient_leaves_before_it_is_written,
    update_reads_gradient_too_early,
    bucket_is_zeroed_while_it_leaves,
    write_back_before_the_update,
    read_of_an_extent_while_it_is_written,
    staging_slot_overwritten_while_it_is_copied,
    two_writers,
    host_reads_too_early,
    host_reads_the_result_of_compute,
    what_the_host_waited_for_orders_what_it_submits,
    transitive_over_two_lanes,
    reader_of_two_is_forgotten,
    synchronize_orders_everything,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_ordered_scenario_passes(device, scenario):
    scenario(device, lambda name, handle: {name: handle})


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_the_scenario_without_its_edge_is_found(device, scenario):
    with pytest.raises(RaceError):
        scenario(device, lambda name, handle: {})


@pytest.mark.parametrize("scenario", SCENARIOS[:-1], ids=lambda s: s.__name__)
def test_a_skipped_label_is_found_too(scenario):
    seen = set()
    with open_device("cpu", Faults(), RaceChecker()) as device:
        scenario(device, lambda name, handle: {name: handle})
        seen |= device.labels_seen
    assert seen
    for label in seen:
        with open_device("cpu", Faults(skip=frozenset({label})), RaceChecker()) as device, pytest.raises(RaceError):
            scenario(device, lambda name, handle: {name: handle})


def test_the_error_names_both_sides_the_bytes_and_the_repair(device):
    device.compute("forward layers.0", reads=[SLOT])
    with pytest.raises(RaceError) as caught:
        device.submit(Lane.H2D, "fetch layers.3", nothing, writes=[Region("device", 8000, 9000)])
    text = str(caught.value)
    for part in ("'fetch layers.3' on h2d", "'forward layers.0' on compute", "bytes [8000, 9000) of arena 'device'"):
        assert part in text
    assert "it writes" in text
    assert "still read" in text
    assert "(a mark taken after the access)" in text


def test_touching_regions_and_other_arenas_do_not_conflict(device):
    device.compute("a", writes=[Region("device", 0, 100)])
    device.submit(Lane.H2D, "b", nothing, writes=[Region("device", 100, 200), Region("host", 0, 100)])
    device.submit(Lane.D2H, "c", nothing, writes=[Region("device", 50, 50)])  # empty
    with pytest.raises(RaceError):
        device.submit(Lane.D2H, "d", nothing, reads=[Region("device", 99, 100)])


def test_two_readers_do_not_conflict(device):
    device.submit(Lane.H2D, "a", nothing, reads=[HOME])
    device.submit(Lane.DISK_WRITE, "b", nothing, reads=[HOME])
    device.host_access("c", reads=[HOME])


def test_an_operation_may_read_and_write_the_same_bytes(device):
    device.submit(Lane.UPDATE, "a", nothing, reads=[HOME], writes=[HOME])
    device.submit(Lane.UPDATE, "b", nothing, reads=[HOME], writes=[HOME])


def test_a_mark_does_not_cover_what_compute_does_later(device):
    early = device.mark("before forward")
    device.compute("forward", reads=[SLOT])
    with pytest.raises(RaceError):
        device.submit(Lane.H2D, "fetch b", nothing, writes=[SLOT], after={"slot free": early})


def test_a_refused_operation_leaves_no_trace():
    checker = RaceChecker()
    written = checker.act("update", "update", writes=[HOME])
    with pytest.raises(RaceError):
        checker.act("h2d", "fetch", reads=[HOME], writes=[SLOT])
    checker.act("h2d", "fetch", reads=[HOME], after=[written])
    checker.act("d2h", "offload", writes=[SLOT])


def test_the_log_stays_small_and_fast():
    """30 000 operations over 64 slots cut in odd ways; a checker that never forgets would need minutes."""
    rng = random.Random(0)
    checker = RaceChecker()
    clocks = {}
    for i in range(30_000):
        actor = rng.choice(ACTORS[1:])
        start = rng.randrange(64) * 4096 + rng.choice([0, 0, 0, 256, 1300])
        region = Region("device", start, start + rng.choice([100, 2796]))
        clocks[actor] = checker.act(
            actor,
            f"op {i}",
            reads=[region] if i % 3 else [],
            writes=[] if i % 3 else [region],
            after=clocks.values(),
        )
    assert checker.num_accesses == 30_000
    assert checker.num_pieces <= 64 * 8


_op = st.tuples(
    st.sampled_from(["compute", "mark", "wait", "host", "h2d", "d2h", "update", "disk_write"]),
    st.lists(st.tuples(st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=2),
    st.lists(st.integers(0, 200), max_size=2),
)


def _brute_force(program):
    """Return the index of the first operation that races with an earlier one, by transitive closure over edges."""
    before: list[set[int]] = []  # event -> all events that happen before it
    accesses: list[tuple[int, set[int], bool]] = []  # event, bytes, is a write
    last: dict[str, int] = {}  # actor -> its last event
    host: set[int] = set()  # what the host knows
    handles: list[int] = []
    for index, (kind, touched, picks) in enumerate(program):
        after = {handles[pick % len(handles)] for pick in picks} if handles else set()
        if kind == "wait":
            host |= after.union(*(before[event] for event in after))
            continue
        actor = COMPUTE if kind == "mark" else kind
        known = (set() if kind in ("mark", "host") else after) | ({last[actor]} if actor in last else set())
        event = len(before)
        before.append(host | known.union(*(before[other] for other in known)))
        mine = [(event, set(range(start, start + size)), is_write) for start, size, is_write in touched]
        mine = [] if kind == "mark" else mine
        if any(_races(one, other, before[event]) for one in mine for other in accesses):
            return index
        accesses += mine
        last[actor] = event
        if kind == "host":
            host |= before[event] | {event}
        else:
            handles.append(event)
    return None


def _races(access, earlier, before):
    return bool(access[1] & earlier[1]) and (access[2] or earlier[2]) and earlier[0] not in before


def _checked(program):
    checker = RaceChecker()
    clocks = []
    for index, (kind, touched, picks) in enumerate(program):
        after = [clocks[pick % len(clocks)] for pick in picks] if clocks else []
        reads = [Region("a", start, start + size) for start, size, is_write in touched if not is_write]
        writes = [Region("a", start, start + size) for start, size, is_write in touched if is_write]
        try:
            if kind == "wait":
                checker.wait(after)
            elif kind == "mark":
                clocks.append(checker.mark())
            elif kind == "host":
                checker.act(HOST, f"op {index}", reads=reads, writes=writes)
            else:
                clocks.append(checker.act(kind, f"op {index}", reads=reads, writes=writes, after=after))
        except RaceError:
            return index
    return None


@settings(deadline=None, max_examples=400)
@given(st.lists(_op, max_size=40))
def test_it_agrees_with_brute_force(program):
    assert _checked(program) == _brute_force(program)


def _mostly_ordered(seed):
    """Return a program that mostly orders conflicting operations; random ones race within a few operations."""
    rng = random.Random(seed)
    program, num_handles = [], 0
    for _ in range(120):
        kind = rng.choice(["compute", "mark", "wait", "host", "h2d", "d2h", "update", "disk_write"])
        touched = [(rng.randrange(12), rng.randrange(5), rng.random() < 0.4) for _ in range(rng.randrange(3))]
        picks = [handle for handle in range(max(0, num_handles - 12), num_handles) if rng.random() < 0.93]
        program.append((kind, touched, picks))
        num_handles += kind not in ("wait", "host")
    return program


def test_it_agrees_with_brute_force_on_mostly_ordered_programs():
    found = []
    for seed in range(60):
        program = _mostly_ordered(seed)
        found.append(_brute_force(program))
        assert _checked(program) == found[-1], f"seed {seed}"
    lengths = sorted(len(program) if index is None else index for index in found)
    assert lengths[30] >= 10  # else the programs would be no harder than random ones
