"""What the device has left when everything has its place: room for activations, and loops that can run as they are.

[Note: plain plans] Where all units rest on the device, gradients are updated in the dtype in which autograd makes them
and nothing is promised about the loop, nothing has to move or to change its form. Gradients are then autograd's own
tensors, as many bytes as the plan reserves for them, and the update takes them from ``p.grad``.
"""

from __future__ import annotations

import dataclasses

from outcore.planning.homes.reservations import tier_bytes
from outcore.spec.budget import Limits
from outcore.spec.layout import has_master
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


def with_room(model: ModelSpec, plan: Plan, limits: Limits, *, clipping: bool) -> Plan:
    """Make a plan plain where it can be, and give what is left of the device to activations that are kept.

    Args:
        model: Units in the plan's order.
        plan: Keeps to the limits.
        limits: The most that a plan may take on each tier.
        clipping: Whether norms may be asked for; False is a promise.
    """
    if clipping and plan.accumulation_steps is None and can_be_plain(model, plan):
        plan = dataclasses.replace(plan, plain=True, pools=())  # slots are for what moves or changes its form
        plan = dataclasses.replace(plan, tier_bytes=dict(tier_bytes(model, plan).items()))
    left = room_bytes(model, plan, limits)
    return dataclasses.replace(plan, kept_bytes=left if any(u.policy != "keep" for u in plan.units) else 0)


def room_bytes(model: ModelSpec, plan: Plan, limits: Limits) -> int:
    """Device bytes that a plan does not take."""
    return max(0, limits.device_bytes - tier_bytes(model, plan)["device"])


def can_be_plain(model: ModelSpec, plan: Plan) -> bool:
    """See [Note: plain plans]."""
    on_device = all(u.weights == u.gradients == u.states == u.activations == "device" for u in plan.units)
    one_form = all(p.dtype == p.update_dtype for unit in model.units for p in unit.trainable)
    return on_device and one_form and not any(has_master(u, model.precision) for u in plan.units)
