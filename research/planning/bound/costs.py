"""How long the work of a unit takes alone, under its plan: worked out once for all plans that treat it the same."""

from __future__ import annotations

from typing import NamedTuple, Self

from outcore.planner.timing.rates import Link, Rates
from outcore.spec.layout import Staging, staging, starts_from_weights, states_bytes, sums_on_device, weights_home
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import UnitPlan


class Costs(NamedTuple):
    """Seconds of a unit's work, and some of the bytes behind them."""

    left_s: float
    """Seconds until gradients have left a bucket."""
    exchanged_s: tuple[float, float, float]
    """Seconds to exchange gradients between ranks, to move them to host memory, and to add up those of all ranks."""
    adder: Link
    """The link that adds up gradients of all ranks."""
    home_s: float
    """Seconds from the last gradient until it is where the update finds it."""
    updater: Link
    """The link that updates the unit, if its states do not live on the device."""
    update_s: float
    """Seconds of the update alone."""
    gathered_s: float
    """Seconds to gather the new weights that other ranks have updated."""
    sent_s: float
    """Seconds to send new weights home, if the update does not write them there."""
    bring_s: tuple[float, float, float]
    """Seconds to read weights from disk, to fetch them, and to put together the parts that ranks have."""
    old_weights_s: float
    """Seconds to read weights from disk for an update that starts from them."""
    staged_s: float
    """Seconds to move to the device what an update there needs."""
    states_bytes: int
    staging: Staging

    @classmethod
    def of(cls, spec: UnitSpec, plan: UnitPlan, model: ModelSpec, rates: Rates, *, is_added: bool) -> Self:
        """Work out the costs of a unit. Args: is_added: Whether gradients of several passes are added up."""
        weights, stages = weights_home(spec, plan), staging(spec, plan, model)
        old_bytes = weights.updated_bytes if starts_from_weights(spec, plan, model.precision) else 0
        is_on_device, is_on_disk = plan.weights == "device", plan.weights == "disk"
        updater: Link = "device_update" if plan.update == "device" else "update"
        adder: Link = "device_update" if plan.gradients == "device" or sums_on_device(spec, plan) else "update"
        bucket_s = rates.move_s("d2h", spec.bucket_bytes)
        sums_s = rates.move_s("d2h", spec.update_bytes) if sums_on_device(spec, plan) else bucket_s
        exchange_s, home_s = rates.exchange_s(spec), 0.0
        exchanged_s = (exchange_s, 0.0 if plan.gradients == "device" else sums_s, rates.add_s(adder, spec))
        if spec.num_ranks > 1:
            home_s = sum(exchanged_s)
        elif plan.gradients != "device":
            home_s = bucket_s + (rates.move_s("update", spec.update_bytes) if is_added else 0.0)
        sent: Link = "compute" if is_on_device else "d2h"
        if plan.update != "device":
            sent = "disk_write" if is_on_disk else "h2d"
        is_there = plan.states == "device" or (plan.weights == "host" and plan.update == "host")
        return cls(
            left_s=bucket_s if spec.num_ranks == 1 else exchange_s,
            exchanged_s=exchanged_s,
            adder=adder,
            home_s=home_s,
            updater=updater,
            update_s=rates.update_s("compute" if plan.states == "device" else updater, spec, plan),
            gathered_s=rates.gather_s(spec, plan),
            sent_s=0.0 if is_there else rates.move_s(sent, weights.updated_bytes),
            bring_s=(
                rates.move_s("disk_read", weights.nbytes) if is_on_disk else 0.0,
                0.0 if is_on_device else rates.move_s("h2d", weights.nbytes),
                rates.link_s(spec, plan),
            ),
            old_weights_s=rates.move_s("disk_read", old_bytes) if is_on_disk else 0.0,
            staged_s=rates.move_s("h2d", sum(stop - start for start, stop in stages[:2]) + old_bytes),
            states_bytes=states_bytes(spec, plan, model),
            staging=stages,
        )

    @property
    def from_update_s(self) -> float:
        """Seconds from an update to the unit's next visit, while new weights are on their way."""
        return self.gathered_s + self.sent_s + sum(self.bring_s)
