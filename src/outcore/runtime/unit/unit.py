"""A unit at run time: its module and parameters, the homes of its bytes, and what has been submitted for them."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import Parameter

from outcore.device.lanes import Handle
from outcore.memory.arena import Buffer
from outcore.order.ledger import Ledger
from outcore.runtime.unit.absent import Owner, absent_class
from outcore.runtime.unit.gradient_form import GradientForm
from outcore.runtime.unit.presence import Presence
from outcore.runtime.unit.views import Views


class Unit:
    """What all trades know of one unit. The bytes are moved by ``Weights``, ``Gradients`` and ``Updates``.

    Attributes:
        ledger: Where its bytes live, and which operations wrote and read them last.
        presence: What stands beneath its parameters.
        views: Tensors over its bytes.
        gradient_form: Dtypes of its gradients.
        steps: Updates so far, by trainable parameter.
        weights_version: Counts changes, so that a backward notices that these are not its forward's weights.
        states_version: Counts changes by anybody but an update.
    """

    def __init__(self, ledger: Ledger[Handle], module: nn.Module, params: list[Parameter], owner: Owner) -> None:
        """Args: params: In the spec's order. owner: Answers for absent parameters."""
        self.ledger, self.module, self.params = ledger, module, params
        spec = self.spec = ledger.spec
        self.plan = ledger.plan
        self.name = spec.name  # of the module, fully qualified; "" for the root
        self.label = ledger.name  # for people
        self.num_trainable = len(spec.trainable)  # they come first in ``params``
        self.modules = list(module.modules()) if spec.name else []
        self.views = Views(spec, ledger.state_specs)
        self.presence = Presence(
            self.label,
            params,
            spec.params,
            absent_class(owner),
            is_resident=ledger.is_resident,
            has_master=ledger.has_master,
        )
        self.gradient_form = GradientForm(params[: self.num_trainable], spec.trainable)
        self.steps = [0] * self.num_trainable
        self.weights_version = 0
        self.states_version = 0

    def device_buffer(self) -> Buffer | None:
        """Where the weights are on the device now, if they are."""
        ledger = self.ledger
        place = ledger.weights if ledger.is_resident else ledger.slot
        return None if place is None else place.memory

    def show(self) -> None:
        """Make the parameters present where the weights are on the device now."""
        buffer = self.device_buffer()
        if buffer is None:  # the unit has no bytes at all
            self.presence.show([torch.empty(p.shape, dtype=p.dtype, device=p.device) for p in self.params])
        else:
            self.presence.show(self.views.weights(buffer))

    def forget(self) -> None:
        """Let go of all memory, so that it can be given back."""
        self.views.forget()
        self.presence.forget()
        self.ledger.let_go()
