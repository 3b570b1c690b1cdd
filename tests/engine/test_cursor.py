"""Following an expected order of visits, whatever really happens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outcore.order.weight_cache import MAX_VISITS, Cursor, EvaluationRound, HeldUnits, Move, Moves
from outcore.spec.schedule import Phase, Visit

NOTHING = HeldUnits((), ())
UNITS = st.lists(st.integers(0, 4), max_size=10)


def visits(units: str | list[int]) -> list[Visit]:
    return [Visit(Phase.FORWARD, int(unit)) for unit in units]


class Decider:
    """Fetches the unit of each visit at the visit before, and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, expected, held) -> Moves:
        self.count += 1
        moves = [Move("device", v.unit, 0, None, max(0, i - 1), i) for i, v in enumerate(expected)]
        return Moves(tuple(moves), held)


def cursor(expected: str) -> Cursor:
    return Cursor(Decider(), visits(expected), NOTHING)


def due_after(follower: Cursor, units: str) -> list[list[int]]:
    """Return what is due after each visit."""
    found = []
    for visit in visits(units):
        follower.follow(visit)
        found.append([move.unit for move in follower.due()])
    return found


def test_each_move_is_due_once_and_in_time():
    assert due_after(cursor("1234"), "1234") == [[1, 2], [3], [4], []]


def test_a_skipped_visit_takes_its_move_with_it():
    assert due_after(cursor("12345"), "1245") == [[1, 2], [3], [4, 5], []]
    assert due_after(cursor("12345"), "145") == [[1, 2], [4, 5], []]


def test_an_unexpected_visit_moves_nothing():
    assert due_after(cursor("1234"), "12934") == [[1, 2], [3], [], [4], []]
    assert due_after(cursor("12"), "1234") == [[1, 2], [], [], []]


def test_the_next_step_is_expected_as_this_one_was():
    follower = cursor("12")
    due_after(follower, "213")
    follower.restart(NOTHING)
    assert due_after(follower, "213") == [[2, 1], [3], []]


def test_a_step_without_visits_is_none():
    follower = cursor("12")
    follower.restart(NOTHING)
    follower.restart(NOTHING)
    assert due_after(follower, "12") == [[1, 2], []]


def test_moves_are_decided_anew_only_for_another_step():
    decide = Decider()
    follower = Cursor(decide, visits("12"), NOTHING)
    for units in ("12", "12", "21", "21", "21"):
        due_after(follower, units)
        follower.restart(NOTHING)
    assert decide.count == 2
    follower.restart(HeldUnits((3,), ()))
    assert decide.count == 3


def test_a_visit_that_may_not_skip_counts_only_in_its_place():
    follower = cursor("120")
    follower.follow(Visit(Phase.FORWARD, 0), may_skip=False)
    assert due_after(follower, "12") == [[1, 2], [0]]
    follower.follow(Visit(Phase.FORWARD, 0), may_skip=False)
    assert follower.next_use(0) == len(follower.expected)


def test_next_use():
    follower = cursor("1231")
    assert [follower.next_use(i) for i in (1, 2, 3, 4)] == [0, 1, 2, 4]
    due_after(follower, "12")
    assert [follower.next_use(i) for i in (1, 2, 3, 4)] == [3, 4, 2, 4]


@given(UNITS, UNITS)
def test_whatever_happens_moves_are_made_in_order_and_once(expected: list[int], units: list[int]):
    follower = Cursor(Decider(), visits(expected), NOTHING)
    uses: list[int] = []
    for visit in visits(units):
        follower.follow(visit)
        uses += [move.use for move in follower.due()]
    assert uses == sorted(set(uses))
    if units == expected:
        assert len(uses) == len(expected)


def test_an_endless_step_does_not_fill_the_memory():
    follower = cursor("1")
    for _ in range(3):
        due_after(follower, "1" * (MAX_VISITS // 2))
    assert len(follower.seen) == MAX_VISITS


def test_a_round_ends_where_it_begins_again():
    follower = EvaluationRound(Decider(), (), NOTHING)
    found = []
    for visit in visits("1123123"):
        follower.follow_round(visit, lambda: NOTHING)
        found.append([move.unit for move in follower.due()])
    assert found == [[], [], [], [], [1, 2], [3], []][: len(found)]
    assert follower.expected == tuple(visits("123"))


def test_a_round_that_begins_elsewhere_is_cut():
    # An encoder runs once, then a decoder runs for each token.
    follower = EvaluationRound(Decider(), (), NOTHING)
    for visit in visits("12" + "345" * 3):
        follower.follow_round(visit, lambda: NOTHING)
    assert follower.expected == tuple(visits("345"))
