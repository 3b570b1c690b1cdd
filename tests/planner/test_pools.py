from __future__ import annotations

import dataclasses

import pytest

from outcore.planner.homes.pools import LEAST, SCRATCH_BYTES, Comfort, pools_for
from outcore.spec.layout import NOISE_BYTES
from outcore.spec.model import ModelSpec, StateForm, UnitSpec
from outcore.spec.plan import UnitPlan

from .models import unit

GENEROUS = Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3)


def pools(model, homes, *, comfort=GENEROUS):
    """{(tier, kind): [(slot bytes, slots)]} for homes given as 'weights gradients states' per unit."""
    units = []
    for spec, text in zip(model.units, homes, strict=True):
        weights, gradients, states = text.split()
        units.append(UnitPlan(name=spec.name, weights=weights, gradients=gradients, states=states))
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for pool in pools_for(model, units, comfort):
        found.setdefault((pool.tier, pool.kind), []).append((pool.slot_bytes, pool.num_slots))
    return found


def model(*layers, root=0, precision="bf16"):
    units = (unit("", root), *(unit(f"l.{i}", n) for i, n in enumerate(layers)))
    return ModelSpec(units=units, state_names=("exp_avg", "exp_avg_sq"), precision=precision)


M = 2048  # elements in a page of bf16 weights; two pages of update


def test_all_resident():
    needed = pools(model(M, M, root=M), ["device device device"] * 3)
    assert needed == {("device", "scratch"): [(8192, 1)]}  # no more than the largest update
    large = pools(model(SCRATCH_BYTES, root=M), ["device device device"] * 2)
    assert large == {("device", "scratch"): [(SCRATCH_BYTES, 1)]}


def test_all_on_the_host():
    needed = pools(model(M, M, M, M), ["device host host", *["host host host"] * 4])
    assert needed == {
        ("device", "weights"): [(4096, 3)],
        ("device", "bucket"): [(4096, 2)],
        ("host", "landing"): [(4096, 2)],
    }


def test_all_on_disk():
    needed = pools(model(M, M, M, M), ["device host host", *["disk disk disk"] * 4])
    assert needed == {
        ("device", "weights"): [(4096, 3)],
        ("device", "bucket"): [(4096, 2)],
        ("host", "weights"): [(4096, 3)],
        ("host", "new_weights"): [(4096, 2)],
        ("host", "states"): [(3 * 8192, 3)],  # master, exp_avg, exp_avg_sq
        ("host", "gradients"): [(8192, 2)],
        ("host", "landing"): [(4096, 2)],
    }


def test_least_is_one_slot_of_the_largest_size():
    homes = ["device disk disk", "disk disk disk", "disk disk disk"]
    needed = pools(model(M, 5 * M, root=9 * M), homes, comfort=LEAST)
    assert needed["device", "weights"] == needed["device", "bucket"] == [(5 * 4096, 1)]  # the root is not among them
    assert needed["host", "states"] == [(9 * 3 * 8192, 1)]  # the root is among them
    assert all(len(slots) == 1 for slots in needed.values())


def test_gradients_off_the_device_land():
    homes = ["device host host", "device host host", "device disk disk"]
    needed = pools(model(M, 2 * M, root=3 * M), homes, comfort=LEAST)
    assert needed["host", "landing"] == [(3 * 4096, 1)]


def test_gradients_on_the_device_with_states_elsewhere_pass_through_the_host():
    needed = pools(model(M), ["device device host", "device device host"])
    assert needed == {("host", "new_weights"): [(4096, 1)], ("host", "gradients"): [(8192, 1)]}


def test_frozen_units_need_weight_slots_only():
    frozen = ModelSpec(units=(unit("", 0, 7), unit("l.0", 0, M)), state_names=("a",), precision="fp32")
    needed = pools(frozen, ["device device device", "disk disk disk"])
    assert needed == {("device", "weights"): [(4096, 1)], ("host", "weights"): [(4096, 1)]}


@pytest.mark.parametrize(
    ("layers", "slots"),
    [
        ((M, M, M, M), [(4096, 3)]),
        ((M, M), [(4096, 2)]),  # never more slots than units
        ((9 * M, M, M, M), [(9 * 4096, 1), (4096, 3)]),
        ((9 * M, 9 * M, M, M, M), [(9 * 4096, 2), (4096, 3)]),
        ((3 * M, 2 * M, 2 * M, 2 * M), [(3 * 4096, 3)]),  # a cut at 1.5 would also take 9 pages, so there is one pool
        ((4 * M, 2 * M, 2 * M, 2 * M), [(4 * 4096, 1), (2 * 4096, 3)]),
    ],
)
def test_pools_are_cut_by_size_where_that_saves_memory(layers, slots):
    homes = ["device host host"] + ["host host host"] * len(layers)
    assert pools(model(*layers), homes)["device", "weights"] == slots


def test_what_updates_make_and_drop_is_counted_where_they_run():
    """For whole parameters everywhere; for pieces on the device alone, since those of the host fit into the scratch."""

    def spec(name, *, is_whole):
        param = dataclasses.replace(unit(name, M).params[0], temporary_bytes=5 * 4096 + 1, is_whole=is_whole)
        return UnitSpec(name=name, params=(param,))

    for is_whole in (True, False):
        units = (unit("", 0), spec("l.0", is_whole=is_whole), spec("l.1", is_whole=is_whole))
        made = ModelSpec(units=units, state_names=("momentum_buffer",), precision="bf16")
        on_host = pools(made, ["device device device", "host host host", "disk disk disk"])
        assert on_host.get(("host", "temporary")) == ([(6 * 4096, 1)] if is_whole else None)
        assert ("device", "temporary") not in on_host
        on_device = pools(made, ["device device device"] * 3)
        assert on_device["device", "temporary"] == [(6 * 4096, 1)]


def test_what_updates_make_has_room_in_both_lanes_of_the_device():
    """A unit that is updated at once and one that is staged may be under way together."""

    def wanted(*tiers):
        plans = [UnitPlan(name="", weights="device", gradients="device", states="device")]
        for i, tier in enumerate(tiers):
            homes = {"weights": "device", "gradients": tier, "states": tier}
            plans.append(UnitPlan(name=f"l.{i}", update="host" if tier == "device" else "device", **homes))
        specs = [
            dataclasses.replace(spec, params=tuple(dataclasses.replace(p, temporary_bytes=10_000) for p in spec.params))
            for spec in model(*[M] * len(tiers)).units
        ]
        spec = dataclasses.replace(model(), units=tuple(specs))
        return [(p.slot_bytes, p.num_slots) for p in pools_for(spec, plans, LEAST) if p.kind == "temporary"]

    assert wanted("device", "device") == wanted("host", "host") == [(12_288, 1)]
    assert wanted("device", "host") == wanted("device", "host", "host") == [(12_288, 2)]


@pytest.mark.parametrize(("chosen", "want"), [("bf16", [NOISE_BYTES]), ("fp32", [])])
def test_noise_is_counted_on_the_host(chosen, want):
    form = StateForm("exp_avg", "bfloat16", format=chosen)
    param = dataclasses.replace(unit("l", M).params[0], states=(form,), temporary_bytes=10_000)
    spec = ModelSpec(units=(UnitSpec(name="l", params=(param,)),), state_names=("exp_avg",), precision="bf16")
    plans = [UnitPlan(name="l", weights="host", gradients="host", states="host")]
    assert [p.slot_bytes for p in pools_for(spec, plans, LEAST) if p.kind == "temporary"] == want
