from __future__ import annotations

import dataclasses

from outcore.planner.homes.placement import place
from outcore.spec.budget import Limits
from outcore.spec.plan import Plan, UnitPlan
from outcore.spec.plan_table import plan_table

from .models import layered, unit

MIB = 2**20


def test_three_tiers():
    model = layered(12)
    limits = Limits(device_bytes=6 * MIB, host_bytes=40 * MIB, disk_bytes=100 * MIB)
    table = plan_table(model, place(model, limits), limits)
    assert table == THREE_TIERS.strip("\n")


THREE_TIERS = """
device       budget 6.00 MiB                 5.46 MiB
  weights    root                          100.00 KiB
  weights    model.layers.0-1 (2 units)      1.53 MiB
  slots      weights, 3 x 784.00 KiB         2.30 MiB
  slots      bucket, 2 x 784.00 KiB          1.53 MiB
host         budget 40.00 MiB               39.93 MiB
  weights    model.layers.2-11 (10 units)    7.66 MiB
  gradients  root                          196.00 KiB
  gradients  model.layers.0-7 (8 units)     12.22 MiB
  slots      new_weights, 2 x 784.00 KiB     1.53 MiB
  slots      states, 3 x 4.58 MiB           13.75 MiB
  slots      gradients, 2 x 1.53 MiB         3.05 MiB
  slots      landing, 2 x 784.00 KiB         1.53 MiB
disk         budget 100.00 MiB              61.67 MiB
  gradients  model.layers.8-11 (4 units)     6.11 MiB
  states     root                          588.00 KiB
  states     model.layers.0-11 (12 units)   54.98 MiB
precision bf16, prefetch depth 2, policy recompute
"""


def test_all_on_the_device_without_limits():
    model = layered(3)
    model = dataclasses.replace(model, units=(*model.units[:3], unit("encoder.0", 3, 5, buffers=4096)))
    plan = place(model, Limits(device_bytes=10**12, host_bytes=0, disk_bytes=None), policy="keep")
    assert plan_table(model, plan) == ALL_DEVICE.strip("\n")


ALL_DEVICE = """
device                                    16.17 MiB
  weights    root                        100.00 KiB
  weights    model.layers.0-1 (2 units)    1.53 MiB
  weights    encoder.0                     8.00 KiB
  gradients  root                        196.00 KiB
  gradients  model.layers.0-1 (2 units)    3.05 MiB
  gradients  encoder.0                     4.00 KiB
  states     root                        588.00 KiB
  states     model.layers.0-1 (2 units)    9.16 MiB
  states     encoder.0                    12.00 KiB
  buffers    all units                     4.00 KiB
  slots      scratch, 1 x 1.53 MiB         1.53 MiB
precision bf16, prefetch depth 0, policy keep
"""


def test_only_neighbours_that_count_up_and_are_alike_fold():
    names = ["", "a.0.b", "a.1.b", "a.2.b", "a.4.b", "a.5.c", "a.6", "a.7", "x.1", "x.3", "z.09"]
    sizes = [0, 1, 1, 3_000, 1, 1, 1, 1, 1, 1, 1]
    units = tuple(unit(name, 0, n) for name, n in zip(names, sizes, strict=True))
    model = dataclasses.replace(layered(1), units=units)
    homes = tuple(UnitPlan(name=n, weights="device", gradients="device", states="device") for n in names)
    plan = Plan(precision="bf16", units=homes, pools=(), prefetch_depth=0)
    labels = [line[11:].rsplit("  ", 1)[0].strip() for line in plan_table(model, plan).splitlines()[1:-1]]
    assert labels == ["a.0-1.b (2 units)", "a.2.b", "a.4.b", "a.5.c", "a.6-7 (2 units)", "x.1", "x.3", "z.09"]


def test_the_table_says_in_how_many_pieces_units_run():
    plan = place(layered(3), Limits(device_bytes=10**12, host_bytes=0, disk_bytes=None), policy="keep")
    assert "pieces" not in plan_table(layered(3), plan)
    plan = dataclasses.replace(plan, micro_batches_in_unit=4)
    assert plan_table(layered(3), plan).endswith("policy keep, units run a batch in 4 pieces")
