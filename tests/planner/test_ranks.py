"""What one of several ranks has of its node, and what moves between ranks: by hand, in a schedule, and in time."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from outcore.core.errors import PlanInfeasibleError
from outcore.order.gradients import Turns
from outcore.planner.homes.pools import pools_for
from outcore.planner.paper.paper_schedule import schedule
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.known_parts import known_parts
from outcore.planner.timing.profile import UnitWork, rates_for
from outcore.planner.timing.rank_layout import ALONE, RankRates, Ranks, between, links_of, network_of, share_of
from outcore.planner.timing.rates import OperationTimes, Rates
from outcore.planner.timing.simulate import simulate
from outcore.preparation.plan_choice import ChosenPlan
from outcore.preparation.with_ranks import fastest
from outcore.spec.budget import tier_bytes
from outcore.spec.lane_names import Lane
from outcore.spec.layout import shared
from outcore.spec.model import ModelSpec, Sharing
from outcore.spec.plan import Plan
from outcore.spec.schedule import usual_visits

from .models import layered
from .test_simulate import plan_of

MIB, GB = 2**20, 1e9
GATHER, ALL_GATHER = "gather weights of", "all-gather weights of"
NODE = known_hardware("a100-80gb+nvlink3+8x200g")


def test_one_rank_has_all_of_its_machine():
    assert share_of(NODE, ALONE) is NODE
    assert between(NODE, ALONE) == RankRates({}, {}, (), {})
    assert share_of(NODE, Ranks(4, 1)) is NODE


def test_ranks_share_what_a_node_has_once():
    assert NODE.disk is not None
    found = share_of(NODE, Ranks(2, 8))
    assert found.device == NODE.device
    assert found.bus.h2d_bytes_per_s == NODE.bus.h2d_bytes_per_s / 2  # two devices share a switch
    assert found.host.update_parameters_per_s == NODE.host.update_parameters_per_s / 8
    assert found.host.bytes_per_s == NODE.host.bytes_per_s / 8
    assert found.disk is not None
    assert found.disk.write_bytes_per_s == NODE.disk.write_bytes_per_s / 8
    assert share_of(known_hardware("rtx-4090"), Ranks(1, 4)).bus == known_parts().buses["pcie4"]


def test_a_measured_part_of_host_memory_grows_with_the_ranks():
    host = dataclasses.replace(known_parts().hosts["server-ddr4"], parts={"h2d": 0.2, "update": 0.5, "disk_read": 0.1})
    found = share_of(dataclasses.replace(NODE, host=host, links=known_parts().links["nvlink4"]), Ranks(1, 8)).host.parts
    assert found == {"h2d": pytest.approx(1.6), "update": 0.5, "disk_read": 0.1}


def test_where_the_host_computes_ranks_share_it():
    device = dataclasses.replace(NODE.device, runs_ahead=0)
    found = share_of(dataclasses.replace(NODE, device=device), Ranks(1, 2)).device
    assert found.bf16_flops == device.bf16_flops / 2


def test_between_ranks_of_a_node_only_links_count():
    found = between(NODE, Ranks(1, 8))
    assert found.bytes_per_s["reduce"] == pytest.approx(230 * GB)
    assert found.bytes_per_s["gather"] == pytest.approx(230 * GB)
    assert found.bytes_per_s["host gather"] == pytest.approx(2.4 * GB)
    assert [shared.name for shared in found.shared] == ["between ranks"]


def test_an_exchange_passes_the_network_for_every_rank_and_a_gather_for_every_node():
    found, network = between(NODE, Ranks(2, 8)), network_of(NODE).bytes_per_s
    assert network == pytest.approx(192 * GB)
    assert found.bytes_per_s["reduce"] == pytest.approx(network / 8 / (8 / 15))  # 8 of 15 others are elsewhere
    assert found.bytes_per_s["gather"] == pytest.approx(230 * GB)  # 8/15 of it pass the network, at 192
    assert found.bytes_per_s["link"] == found.bytes_per_s["gather"]
    assert found.bytes_per_s["node link"] == pytest.approx(230 * GB)
    assert found.bytes_per_s["copies"] == pytest.approx(network / 8)  # each rank of a node gets a different part
    alone = between(NODE, Ranks(16, 1)).bytes_per_s
    assert alone["reduce"] == alone["gather"] == pytest.approx(network)


def test_without_links_of_their_own_devices_meet_on_the_bus():
    machine = known_hardware("rtx-4090+no-p2p")
    found = between(machine, Ranks(1, 4))
    into, out = ({s.name: s for s in found.shared}[name].parts for name in ("into the device", "out of the device"))
    part = 10 * GB / machine.bus.h2d_bytes_per_s
    assert into == {"h2d": 1.0, **dict.fromkeys(("reduce", "gather", "link"), pytest.approx(part))}
    assert out == {"d2h": 1.0, **dict.fromkeys(("reduce", "gather", "link"), pytest.approx(part))}
    assert found.host_parts["reduce"] == pytest.approx(2 * 10 * GB / (machine.host.bytes_per_s / 4))


def test_what_is_taken_where_nothing_is_known():
    machine = dataclasses.replace(NODE, links=None, network=None)
    links = links_of(machine)
    assert (links.on_bus, links.through_host) == (1, 1)
    assert links.bytes_per_s == NODE.bus.h2d_bytes_per_s / 2
    assert network_of(machine).bytes_per_s == 12.5 * GB
    assert "not known" in links.sources["bytes_per_s"]


def of_ranks(num_ranks: int) -> tuple[ModelSpec, Plan]:
    """Two layers in host memory. Their weights can be cut evenly by 1, 2 and 4."""
    model = layered(2, root=0, layer=MIB, precision="bf16").among(num_ranks, 0)
    return model, plan_of(model)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_bytes_between_ranks(num_ranks: int):
    """In each micro-batch the runs of the others' gradients, and once per step those of new weights."""
    model, plan = of_ranks(num_ranks)
    moved = schedule(model, plan, usual_visits(model, 3)).moved_bytes()
    others = 2 * 2 * MIB * (num_ranks - 1) // num_ranks
    assert (moved["reduce"], moved["gather"]) == (3 * others, others)


def test_sums_and_states_are_cut():
    alone, cut = (tier_bytes(model, dataclasses.replace(plan, pools=())) for model, plan in (of_ranks(1), of_ranks(4)))
    weights = 2 * 2 * MIB
    assert cut["host"] - weights == (alone["host"] - weights) // 4


def test_seconds_between_ranks():
    model, plan = of_ranks(4)
    names = {"reduce": 3 * MIB, "gather": 5 * MIB, "host gather": 6 * MIB, "update": 8 * MIB, "compute": 16 * MIB}
    rates = Rates(forward_s={}, backward_s={}, bytes_per_s=names)
    pace = OperationTimes(model, plan, rates)
    seconds = {op.name: pace.seconds(op) for op in schedule(model, plan, usual_visits(model)).operations}
    layer = "model.layers.0"
    assert seconds[f"exchange gradients of {layer}"] == pytest.approx(2 * 0.75 / 3)
    assert seconds[f"gather weights of {layer}"] == pytest.approx(2 * 0.75 / 6)  # after an update in host memory
    assert seconds[f"accumulate {layer}"] == pytest.approx(4 / 16)  # a quarter of 4 MiB from each of four ranks
    there = [dataclasses.replace(unit, update="device") if unit.name else unit for unit in plan.units]
    staged = dataclasses.replace(plan, units=tuple(there), pools=pools_for(model, there))
    pace = OperationTimes(model, staged, rates)
    seconds = {op.name: pace.seconds(op) for op in schedule(model, staged, usual_visits(model)).operations}
    assert seconds[f"gather weights of {layer}"] == pytest.approx(2 * 0.75 / 5)


@pytest.mark.parametrize(
    ("sharing", "link", "gather"),
    [("replicate", 0.0, 0.75 / 6), ("copy", 0.0, 0.25 / 7), ("cut", 0.75 / 9, 0.0), ("node", 0.5 / 10, 0.25 / 7)],
)
def test_seconds_of_weights_between_ranks(sharing: Sharing, link: float, gather: float):
    """Two nodes with two ranks each: what one rank gets of 2 MiB in each of its fetches, and after its update."""
    rates = {"host gather": 6, "host copies": 7, "copies": 8, "link": 9, "node link": 10}
    model = layered(2, root=0, layer=MIB, precision="bf16").among(4, 0, 2)
    plan = plan_of(model)
    units = tuple(shared(unit, sharing) for unit in plan.units)
    plan = dataclasses.replace(plan, units=units, pools=pools_for(model, units))
    pace = OperationTimes(
        model, plan, Rates(forward_s={}, backward_s={}, bytes_per_s={k: n * MIB for k, n in rates.items()})
    )
    operations = [op for op in schedule(model, plan, usual_visits(model)).operations if op.unit == "model.layers.0"]
    for kind, expected in ((ALL_GATHER, link), (GATHER, gather)):
        assert sum({pace.seconds(op) for op in operations if op.kind == kind}) == pytest.approx(2 * expected)


def test_the_fastest_way_to_have_weights_and_the_first_where_others_gain_little(monkeypatch: pytest.MonkeyPatch):
    model = layered(4, root=0, layer=MIB, precision="bf16").among(2, 0)
    steps_s: dict[Sharing, float | None] = {"copy": 1.0, "cut": 0.96, "node": 0.9}

    def make(question: PlanQuestion) -> ChosenPlan:
        if (name := question.model.sharing) not in steps_s:
            raise PlanInfeasibleError(f"no room for {name}", {})
        plan = plan_of(model, weights="disk" if steps_s[name] is None else "host")
        machine = None if steps_s[name] is None else Rates(forward_s={}, backward_s={})
        return ChosenPlan(plan, plan, None, dataclasses.replace(question, machine=machine))

    def found(*sharings: Sharing) -> str:
        return fastest(sharings, PlanQuestion(model=model), make).question.model.sharing

    def predict(question: PlanQuestion, plan: Plan) -> Any:
        return SimpleNamespace(step_s=steps_s[question.model.sharing])

    monkeypatch.setattr(PlanQuestion, "predict", predict)

    assert found("copy", "cut") == "copy"
    assert found("copy", "cut", "node") == "node"
    assert found("replicate", "cut") == "cut"
    with pytest.raises(PlanInfeasibleError, match="no room for replicate"):
        found("replicate")
    steps_s |= {"copy": None, "node": None}
    assert found("copy", "node") == "node"  # the weights of both rest on disk


@pytest.mark.parametrize("least", ["copy", "cut"])
def test_where_no_way_to_have_weights_fits_the_error_is_that_of_the_way_that_needs_least(least: Sharing):
    def make(question: PlanQuestion) -> ChosenPlan:
        raise PlanInfeasibleError("no room", {"device": 8, "host": 8 if question.model.sharing == least else 9})

    ways: tuple[Sharing, Sharing] = ("copy", "cut")
    with pytest.raises(PlanInfeasibleError) as caught:
        fastest(ways, PlanQuestion(model=layered(1)), make)
    assert caught.value.required_bytes["host"] == 8


@pytest.mark.parametrize(("num_ranks", "lane"), [(2, "update"), (3, "device_update")])
def test_where_gradients_of_all_ranks_are_added_up(num_ranks: int, lane: str):
    """Two runs go home. Of more, the sum comes to the device, except in the first micro-batch, and goes home again."""
    model, plan = of_ranks(num_ranks)
    operations = schedule(model, plan, usual_visits(model, 2)).operations
    layer = [op for op in operations if op.unit == "model.layers.0"]
    update_bytes, bucket_bytes = model.units[1].update_bytes, model.units[1].bucket_bytes
    assert {op.lane for op in layer if op.kind == "accumulate"} == {lane}
    home = {op.nbytes for op in layer if op.kind == "gradients of" and op.lane == Lane.D2H.value}
    assert home == {bucket_bytes if num_ranks == 2 else update_bytes}
    assert [op.nbytes for op in layer if op.kind == "bring gradients of"] == [update_bytes] * (num_ranks - 2)
    kinds = {(pool.tier, pool.kind) for pool in plan.pools}
    assert (("host", "landing") in kinds, ("device", "sums") in kinds) == (num_ranks == 2, num_ranks == 3)


def test_slow_links_bind():
    model, plan = of_ranks(4)
    work = {unit.name: UnitWork(product_flops=1e9, attention_flops=0.0) for unit in model.units}
    rates = rates_for(known_hardware("rtx-4090+no-p2p"), model, work, ranks=Ranks(1, 4))
    slow = dataclasses.replace(rates, bytes_per_s={**rates.bytes_per_s, "reduce": 1e6})
    found = simulate(model, plan, slow, usual_visits(model))
    assert max(found.binding, key=found.binding.__getitem__) == "reduce"
    assert found.step_s == pytest.approx(2 * 2 * MIB * 0.75 / 1e6, rel=0.05)
    assert found.timeline.busy_s()[Lane.REDUCE.value] > 0


def test_turns():
    turns = Turns("abcd")
    assert turns.order == ("d", "c", "b", "a")
    assert list(turns.come("c")) == []
    assert list(turns.come("d")) == ["d", "c"]
    assert list(turns.come("a")) == []
    assert list(turns.rest()) == ["b", "a"]
    assert list(turns.come("d")) == ["d"]  # of the next pass
