"""Any share of updates on the device: the right number of units, spread evenly, and only units that allow it."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import share_updates

from outcore.core.errors import ConfigError
from outcore.core.quantities import PAGE_BYTES
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import LEAST, pools_for
from outcore.spec.budget import Limits
from outcore.spec.layout import staging
from outcore.spec.plan import UnitPlan

from .models import layered

MODEL = layered(6)
HOST = UnitPlan(name="x", weights="host", gradients="host", states="host")


def units(count: int, **changes: Any) -> list[UnitPlan]:
    return [dataclasses.replace(HOST, name=str(i), **changes) for i in range(count)]


@given(st.integers(0, 40), st.floats(0, 1))
def test_number_and_spread(count: int, fraction: float):
    shared = share_updates(units(count), fraction)
    on_device = [i for i, u in enumerate(shared) if u.update == "device"]
    assert len(on_device) == int(fraction * count + 0.5)
    gaps = [b - a for a, b in itertools.pairwise(on_device)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert [dataclasses.replace(u, update="host") for u in shared] == units(count)


def test_only_units_that_can_be():
    others = [
        dataclasses.replace(HOST, name="a", weights="disk"),
        dataclasses.replace(HOST, name="b", states="disk"),
        dataclasses.replace(HOST, name="c", early=True),
        dataclasses.replace(HOST, name="d", weights="device", gradients="device", states="device"),
    ]
    assert share_updates(others, 1.0) == others


def test_a_shared_plan_needs_staging_slots():
    limits = Limits(device_bytes=10**9, host_bytes=10**12, disk_bytes=None)
    base = place(MODEL, limits)
    homes = [
        dataclasses.replace(u, weights="host" if u.name else "device", gradients="host", states="host")
        for u in base.units
    ]
    shared = tuple(share_updates(homes, 1.0))
    plan = dataclasses.replace(base, units=shared, pools=pools_for(MODEL, shared, LEAST))
    check_plan(MODEL, plan)
    (pool,) = [p for p in plan.pools if p.kind == "staging"]
    assert not any(p.kind in ("states", "new_weights", "gradients") for p in plan.pools)
    layouts = [staging(spec, unit, MODEL) for spec, unit in zip(MODEL.units, shared, strict=True)]
    assert pool.slot_bytes >= max(layout.scratch[1] for layout in layouts)
    for layout in layouts:
        assert all(start % PAGE_BYTES == 0 for start, _ in layout)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(layout))
    without = dataclasses.replace(plan, pools=tuple(p for p in plan.pools if p.kind != "staging"))
    with pytest.raises(ConfigError, match="expected a pool of 'staging' slots on device"):
        check_plan(MODEL, without)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"states": "disk"}, "expected states in host memory"),
        ({"weights": "disk"}, "expected states in host memory"),
        ({"gradients": "disk"}, "expected states in host memory"),
        ({"early": True}, "expected either early or an update on the device"),
        ({"update": "gpu"}, "update"),
    ],
)
def test_what_cannot_be_staged(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(HOST, **{"update": "device", **changes})
