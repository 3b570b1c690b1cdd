"""Everything that a step submits through one port, in a run and on paper."""

from __future__ import annotations

from typing import Generic

from outcore.order.activations import ActivationOrder
from outcore.order.attempts import OutOfPlaceUpdates
from outcore.order.gradients import GradientOrder
from outcore.order.ledger import H, Ledger
from outcore.order.port import Port
from outcore.order.slots import Pools, Supply
from outcore.order.updates import UpdateOrder
from outcore.order.weights import WeightOrder
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class StepOrder(Generic[H]):
    """Ledgers of all units, their slots, and the orders of weights, activations, gradients and updates."""

    def __init__(self, model: ModelSpec, plan: Plan, port: Port[H]) -> None:
        """Make ledgers and slots; nothing is submitted yet.

        Args:
            model: Model with units in the plan's order.
            plan: Plan that was checked against the model.
            port: Port that takes the operations.
        """
        pairs = enumerate(zip(model.units, plan.units, strict=True))
        self.ledgers: list[Ledger[H]] = [Ledger(i, spec, unit, model) for i, (spec, unit) in pairs]
        self.pools: Pools[H] = Pools(plan, port)
        supply = Supply(port, self.pools)
        self.weights = WeightOrder(self.ledgers, port, self.pools)
        self.gradients = GradientOrder(port, self.pools, supply)
        self.activations: ActivationOrder[H] = ActivationOrder(self.ledgers, port, self.pools)
        self.out_of_place = OutOfPlaceUpdates(port, self.pools, supply)
        self.updates = UpdateOrder(model, plan, port, self.pools, supply, self.weights)
