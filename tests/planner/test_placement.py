from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from outcore.core.errors import PlanInfeasibleError
from outcore.core.quantities import PAGE_BYTES, format_bytes
from outcore.model.partition import partition
from outcore.optim.joined import as_one
from outcore.optim.rules import rule_for
from outcore.planner.homes.activation_policies import Activations, ways_to
from outcore.planner.homes.check import check_plan
from outcore.planner.homes.placement import STAYING, fitting, least, place, refusal
from outcore.planner.search.plan_space import ALL_DISK, ALL_HOST, PlanSpace
from outcore.spec.budget import Limits, reservations, tier_bytes
from outcore.spec.plan import TIERS, Plan

from .models import even_footprint, layered, model_specs

MIB = 2**20
PLENTY = 10**12
DEVICE_KINDS = (("device", "weights"), ("device", "bucket"))

steps = st.sampled_from([None, 1, 3])
reserves = st.sampled_from([0, 4096, 12_345])
sizes = st.one_of(st.just(0), st.integers(0, 64).map(lambda n: n * 32 * 1024), st.integers(0, 100 * MIB))


@st.composite
def limits(draw):
    return Limits(device_bytes=draw(sizes), host_bytes=draw(sizes), disk_bytes=draw(st.one_of(st.none(), sizes)))


def bytes_of(model, plan: Plan, reserve: int = 0) -> dict[str, int]:
    need = tier_bytes(model, plan)
    return {**need, "device": need["device"] + reserve}


def as_limits(required: dict[str, int]) -> Limits:
    return Limits(device_bytes=required["device"], host_bytes=required["host"], disk_bytes=required["disk"] or None)


@settings(deadline=None, max_examples=150)
@given(model=model_specs(), given_limits=limits(), accumulation_steps=steps, reserve=reserves)
def test_keeps_to_the_limits_or_says_what_would_do(model, given_limits, accumulation_steps, reserve):
    options = {"accumulation_steps": accumulation_steps, "activations": Activations(reserve)}
    try:
        plan = place(model, given_limits, **options)
    except PlanInfeasibleError as error:
        required = error.required_bytes
        assert any(required[t] > given_limits.by_tier[t] for t in TIERS)
        plan = place(model, as_limits(required), **options)
        given_limits = as_limits(required)
    assert all(bytes_of(model, plan, reserve)[t] <= given_limits.by_tier[t] for t in TIERS)
    assert plan.tier_bytes == tier_bytes(model, plan)
    check_plan(model, plan, given_limits, activation_reserve_bytes=reserve)
    assert all(r.nbytes % PAGE_BYTES == 0 for r in reservations(model, plan))
    assert Plan.from_json(plan.to_json()) == plan


@settings(deadline=None, max_examples=100)
@given(model=model_specs(), given_limits=limits(), share=st.sampled_from([0.1, 0.3, 0.7]), reserve=reserves)
def test_required_bytes_leave_the_share_of_activations_again(model, given_limits, share, reserve):
    options = {"activations": Activations(reserve, share)}
    try:
        plan = place(model, given_limits, **options)
    except PlanInfeasibleError as error:
        given_limits = as_limits(error.required_bytes)
        plan = place(model, given_limits, **options)
        device_bytes = given_limits.device_bytes - 1
        with pytest.raises(PlanInfeasibleError):
            place(model, dataclasses.replace(given_limits, device_bytes=device_bytes), **options)
    left = given_limits.device_bytes - plan.tier_bytes["device"]
    assert left >= reserve + int(share * given_limits.device_bytes)


@settings(deadline=None, max_examples=100)
@given(model=model_specs(), given_limits=limits(), share=st.sampled_from([0.0, 0.3]))
def test_one_tier_raised_to_what_the_error_says_is_enough_and_one_byte_less_is_not(model, given_limits, share):
    activations = Activations(share=share)
    try:
        place(model, given_limits, activations=activations)
    except PlanInfeasibleError as error:
        raised = error.raise_one_to
    else:
        return
    for tier in TIERS:
        if not given_limits.by_tier[tier] and tier != "device":  # the tier is not allowed
            assert tier not in raised
            continue
        with pytest.raises(PlanInfeasibleError):
            less = raised.get(tier, PLENTY) - 1
            place(model, dataclasses.replace(given_limits, **{f"{tier}_bytes": less}), activations=activations)
        if tier in raised:
            more = dataclasses.replace(given_limits, **{f"{tier}_bytes": raised[tier]})
            place(model, more, activations=activations)


def test_the_disk_that_is_named_is_for_the_device_and_host_that_were_given():
    limits = Limits(device_bytes=8 * MIB, host_bytes=20 * MIB, disk_bytes=MIB)
    with pytest.raises(PlanInfeasibleError) as caught:
        place(layered(12), limits)
    disk_bytes = caught.value.raise_one_to["disk"]
    assert disk_bytes < caught.value.required_bytes["disk"]
    assert f'  disk_bytes="{format_bytes(disk_bytes, is_need=True).replace(" ", "")}"' in str(caught.value)
    place(layered(12), dataclasses.replace(limits, disk_bytes=disk_bytes))


@settings(deadline=None, max_examples=100)
@given(model=model_specs(), given_limits=limits(), num_ranks=st.sampled_from([2, 3, 4]), data=st.data())
def test_the_least_suffices_among_ranks_and_a_page_less_does_not(model, given_limits, num_ranks, data):
    """Where gradients of three ranks rest in host memory, their sums take slots on the device."""
    sharing = data.draw(st.sampled_from(["replicate", "copy", "cut"]))
    model = dataclasses.replace(model.among(num_ranks, 0), sharing=sharing)
    try:
        plan = place(model, given_limits)
    except PlanInfeasibleError as error:
        required, raised = as_limits(error.required_bytes), error.raise_one_to
    else:
        assert all(bytes_of(model, plan)[t] <= given_limits.by_tier[t] for t in TIERS)
        found = least(model, given_limits, [STAYING])
        required, raised = as_limits(found.at_all), found.with_others
    place(model, required)
    for tier, nbytes in raised.items():
        place(model, dataclasses.replace(given_limits, **{f"{tier}_bytes": nbytes}))
    for limits_, sizes_ in ((required, required.by_tier), (given_limits, raised)):
        for tier in (tier for tier in TIERS if sizes_.get(tier, 0) >= PAGE_BYTES):
            with pytest.raises(PlanInfeasibleError):
                place(model, dataclasses.replace(limits_, **{f"{tier}_bytes": sizes_[tier] - PAGE_BYTES}))


@settings(deadline=None, max_examples=150)
@given(
    model=st.builds(layered, st.integers(1, 9), layer=st.sampled_from([MIB // 8, MIB])),
    given_limits=limits(),
    saved=st.lists(st.integers(0, 12).map(lambda n: n * MIB // 4), min_size=3, max_size=3),
)
def test_what_is_named_suffices_with_one_way_to_treat_activations_and_a_byte_less_with_none(model, given_limits, saved):
    names = [unit.name for unit in model.units]
    given, selected, kept = sorted(saved)
    footprint = even_footprint(names[1:], given=given, selected=selected, kept=kept)
    sent = [None, *ways_to("host", footprint), *ways_to("disk", footprint)]
    ways = [Activations.of(names, footprint, 0.1, sending) for sending in sent]

    def plan_within(limits: Limits) -> Plan | None:
        """The first way's plan, with the activations that leave."""
        for way in ways:
            if (plan := fitting(model, limits, way)) is not None:
                return way.applied(plan)
        return None

    def fits(**nbytes: int) -> bool:
        limits = as_limits(given_limits.by_tier | nbytes)
        plan = plan_within(limits)
        if plan is not None:
            check_plan(model, plan, limits)
        return plan is not None

    if fits():
        return
    error = refusal(model, given_limits, ways)
    assert fits(**error.required_bytes)
    assert not fits(**error.required_bytes | {"device": error.required_bytes["device"] - 1})
    for tier, most in given_limits.by_tier.items():
        named = error.raise_one_to.get(tier, PLENTY)
        assert fits(**{tier: named}) == (tier in error.raise_one_to) or (not most and tier != "device")
        assert not fits(**{tier: named - 1}) or (not most and tier != "device")
    if error.required_bytes["host"]:
        little = as_limits(error.required_bytes | {"host": 1})
        assert refusal(model, little, ways).raise_one_to["host"] == error.required_bytes["host"]


def test_the_least_disk_is_nothing_where_host_memory_has_room():
    """Other plans that fit take something of the disk."""
    limits = Limits(device_bytes=40 * MIB, host_bytes=PLENTY, disk_bytes=PLENTY)
    assert least(layered(4), limits, [STAYING]).with_others["disk"] == 0


@settings(deadline=None, max_examples=100)
@given(model=model_specs(), accumulation_steps=steps, disk=st.booleans(), host=st.booleans(), data=st.data())
def test_one_page_less_than_required_raises(model, accumulation_steps, disk, host, data):
    nothing = Limits(device_bytes=0, host_bytes=int(host), disk_bytes=1 if disk else None)
    try:
        place(model, nothing, accumulation_steps=accumulation_steps)
    except PlanInfeasibleError as error:
        required = error.required_bytes
    else:
        assert not any(p.numel for u in model.units for p in u.params)
        return
    tier = data.draw(st.sampled_from([t for t in TIERS if required[t]]))
    less = dataclasses.replace(as_limits(required), **{f"{tier}_bytes": required[tier] - PAGE_BYTES})
    with pytest.raises(PlanInfeasibleError):
        place(model, less, accumulation_steps=accumulation_steps)


@settings(deadline=None, max_examples=100)
@given(model=model_specs(), given_limits=limits(), more=limits(), accumulation_steps=steps)
def test_more_budget_is_never_refused_where_less_was_enough(model, given_limits, more, accumulation_steps):
    try:
        place(model, given_limits, accumulation_steps=accumulation_steps)
    except PlanInfeasibleError:
        return
    has_disk = given_limits.disk_bytes is not None or more.disk_bytes is not None
    larger = Limits(
        device_bytes=given_limits.device_bytes + more.device_bytes,
        host_bytes=given_limits.host_bytes + more.host_bytes,
        disk_bytes=(given_limits.disk_bytes or 0) + (more.disk_bytes or 0) if has_disk else None,
    )
    place(model, larger, accumulation_steps=accumulation_steps)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_more_device_memory_never_means_less_on_the_device(precision):
    model = layered(7, precision=precision)
    before = (-1, -1, -1, -1)
    for device_mib in range(2, 120):
        limits = Limits(device_bytes=device_mib * MIB, host_bytes=PLENTY, disk_bytes=None)
        try:
            plan = place(model, limits)
        except PlanInfeasibleError:
            assert before == (-1, -1, -1, -1)
            continue
        slots = {p.kind: p.num_slots for p in plan.pools if p.tier == "device"}
        resident = sum(u.weights == "device" for u in plan.units)
        updated = sum(u.states == "device" for u in plan.units)
        fetched = len(plan.units) - resident
        # Enough slots for every fetched unit counts as all the slots one could want.
        depth = 3 if slots.get("weights", 0) >= fetched else slots["weights"]
        leaving = sum(u.gradients != "device" for u in plan.units[1:])
        buckets = 2 if slots.get("bucket", 0) >= leaving else slots["bucket"]
        now = (depth, buckets, resident, updated)
        assert now >= before
        before = now
    assert before == (3, 2, 8, 8)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
def test_first_units_first(precision):
    model = layered(9, precision=precision)
    for device, host in [(4, 20), (6, 40), (9, 60), (40, 10), (60, 60)]:
        plan = place(model, Limits(device_bytes=device * MIB, host_bytes=host * MIB, disk_bytes=PLENTY))
        for kind in ("weights", "gradients", "states"):
            homes = [TIERS.index(getattr(u, kind)) for u in plan.units]
            assert homes == sorted(homes)
        updated = [u.states == "device" for u in plan.units]
        assert not any(updated) or all(u.weights == "device" for u in plan.units)


def test_all_on_the_device_takes_no_slots_but_scratch():
    model = layered(4)
    plan = place(model, Limits(device_bytes=PLENTY, host_bytes=0, disk_bytes=None))
    assert {(u.weights, u.gradients, u.states) for u in plan.units} == {("device", "device", "device")}
    assert [(p.tier, p.kind, p.num_slots) for p in plan.pools] == [("device", "scratch", 1)]
    assert plan.prefetch_depth == 0
    assert plan.tier_bytes["host"] == plan.tier_bytes["disk"] == 0
    exactly = Limits(device_bytes=plan.tier_bytes["device"], host_bytes=0, disk_bytes=None)
    assert place(model, exactly) == plan


def test_without_a_host_budget_the_device_must_hold_all():
    model = layered(4)
    with pytest.raises(PlanInfeasibleError) as caught:
        place(model, Limits(device_bytes=MIB, host_bytes=0, disk_bytes=None))
    whole = place(model, Limits(device_bytes=PLENTY, host_bytes=0, disk_bytes=None))
    assert caught.value.required_bytes == {"device": whole.tier_bytes["device"], "host": 0, "disk": 0}


def test_bytes_in_closed_form():
    # 12 layers of 400_000: 2 B of weights each, and 4 B each of gradient, master, exp_avg, exp_avg_sq.
    model = layered(12)
    assert model.units[1].weight_bytes == 196 * PAGE_BYTES
    weights, update = model.units[1].weight_bytes, model.units[1].update_bytes
    root_weights, root_update = model.units[0].weight_bytes, model.units[0].update_bytes
    plan = place(model, Limits(device_bytes=root_weights + 5 * weights, host_bytes=PLENTY, disk_bytes=None))
    assert plan.prefetch_depth == 2
    assert plan.tier_bytes == {
        "device": root_weights + 5 * weights,  # three slots and two buckets
        "host": 12 * weights + 4 * (12 * update + root_update) + root_weights + 2 * weights,
        "disk": 0,
    }


def test_one_large_unit_does_not_inflate_every_slot():
    model = layered(12)
    big = dataclasses.replace(layered(1, layer=4_000_000).units[1], name="model.embed")
    model = dataclasses.replace(model, units=(*model.units, big))
    plan = place(model, Limits(device_bytes=20 * MIB, host_bytes=PLENTY, disk_bytes=None))
    layer = model.units[1]
    slots = {k: [(p.slot_bytes, p.num_slots) for p in plan.pools if (p.tier, p.kind) == k] for k in DEVICE_KINDS}
    assert slots["device", "weights"] == [(big.weight_bytes, 1), (layer.weight_bytes, 3)]
    assert slots["device", "bucket"] == [(big.trainable_bytes, 1), (layer.trainable_bytes, 2)]


def test_activation_reserve_counts_against_the_device():
    model = layered(4)
    whole = place(model, Limits(device_bytes=PLENTY, host_bytes=PLENTY, disk_bytes=None)).tier_bytes["device"]
    tight = Limits(device_bytes=whole, host_bytes=PLENTY, disk_bytes=None)
    assert place(model, tight, activations=Activations(MIB)).tier_bytes["device"] <= whole - MIB


def test_policy_is_that_of_all_units_but_the_root():
    plan = place(layered(2), Limits(device_bytes=PLENTY, host_bytes=0, disk_bytes=None), policy="keep")
    assert [u.policy for u in plan.units] == ["keep"] * 3
    plan = place(layered(2), Limits(device_bytes=PLENTY, host_bytes=0, disk_bytes=None))
    assert [u.policy for u in plan.units] == ["keep", "recompute", "recompute"]


def test_message_names_need_budget_and_consumers():
    limits = Limits(device_bytes=MIB, host_bytes=3 * MIB, disk_bytes=30 * MIB)
    with pytest.raises(PlanInfeasibleError) as caught:
        place(layered(4), limits, activations=Activations(MIB))
    assert str(caught.value) == (
        "expected a plan within the budget, but no placement fits; the least that would do is:\n"
        "device                    budget 1.00 MiB: too little    2.63 MiB\n"
        "  slots for weights                                    784.00 KiB\n"
        "  slots for bucket                                     784.00 KiB\n"
        "  weights of the root                                  100.00 KiB\n"
        "  activations (reserved)                                 1.00 MiB\n"
        "host                      budget 3.00 MiB: too little    8.41 MiB\n"
        "  slots for states                                       4.58 MiB\n"
        "  slots for gradients                                    1.53 MiB\n"
        "  slots for weights                                    784.00 KiB\n"
        "disk                      budget 30.00 MiB: fits        28.27 MiB\n"
        "  states of the units                                   18.33 MiB\n"
        "  gradients of the units                                 6.11 MiB\n"
        "  weights of the units                                   3.06 MiB\n"
        'give Budget(device="2.63MiB", host="8.41MiB", disk=..., disk_bytes="28.27MiB") or more, or train a smaller '
        "model or with smaller units\n"
        "or raise one tier and leave the others as they are:\n"
        '  device="30.90MiB"'
    )


def test_the_least_suffices_where_blocks_of_one_size_have_rules_of_different_needs():
    """Momentum over some equal blocks, Muon, which needs whole parameters, over the others."""
    blocks = nn.ModuleList(nn.Linear(128, 256, bias=False) for _ in range(4))
    weights = [block.weight for block in blocks]
    optimizers = [torch.optim.SGD(weights[:2], lr=0.1, momentum=0.9), torch.optim.Muon(weights[2:], lr=0.1)]
    spec = partition(blocks, units=["*"], keeps=rule_for(*optimizers).kept(as_one(optimizers).param_groups)).spec
    none = Limits(device_bytes=1000, host_bytes=1000, disk_bytes=10**9)
    with pytest.raises(PlanInfeasibleError) as refusal:
        place(spec, none)
    least = refusal.value.required_bytes
    limits = Limits(device_bytes=least["device"], host_bytes=least["host"], disk_bytes=least["disk"])
    check_plan(spec, place(spec, limits), limits)
    choice = PlanSpace(spec, policy="recompute", accumulation_steps=None, may_be_early=False)
    for kind in (ALL_HOST, ALL_DISK):
        check_plan(spec, choice.plan(choice.uniform(kind)), as_limits(dict.fromkeys(TIERS, PLENTY)))
