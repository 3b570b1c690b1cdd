"""The order of calls that share a home for activations."""

from __future__ import annotations

from types import SimpleNamespace

from outcore.order.activations import ActivationOrder, SavedCall
from outcore.order.ledger import Home


def test_what_is_left_of_a_part_waits_for_what_used_the_whole():
    home = Home("activations of u", "activations", "disk", 100)
    unit = SimpleNamespace(name="u", activations=[home], plan=SimpleNamespace(saved_bytes=100))
    order = ActivationOrder([unit], None, None)
    write, read = SimpleNamespace(lane="disk writes"), SimpleNamespace(lane="weights reads")

    def call(nbytes):
        saved = SimpleNamespace(nbytes=nbytes, is_held=False, is_wanted=lambda: nbytes < 100)
        found = order._part(unit, nbytes)
        order._calls[found] = SavedCall(unit, saved, found, found)
        return found

    whole = call(100)  # it is no longer needed, but work submitted for it may be under way
    whole.ready, whole.readers = write, [read]
    first, second = call(60), call(40)
    assert (first.nbytes, second.nbytes) == (60, 40)
    for part in (first, second):
        assert {id(write), id(read)} == {id(h) for h in (part.ready, *part.readers) if h is not None}
