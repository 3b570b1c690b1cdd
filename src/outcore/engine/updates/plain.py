"""A step of a plain plan: autograd accumulates, and one kernel call updates all parameters of a group.

See [Note: plain plans].
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.engine.recompute.structure import take_apart
from outcore.engine.unit.absent import unfreezing_refusal
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, shaped
from outcore.engine.updates.unit_update import Numbers, likes_of
from outcore.engine.values.parameter_values import refuse_other_form, refuse_other_strides
from outcore.memory.arena import Buffer
from outcore.optim.blocks import update_blocks
from outcore.optim.kernels import FusedHyper, FusedStep, apply
from outcore.optim.piece import Piece
from outcore.optim.rules import Hyper, RuleHyper, SgdHyper, counts
from outcore.spec.layout import SCRATCH_BYTES

_Piece = tuple[Unit, int, torch.Tensor, RuleHyper]
_Steps = tuple[list[FusedStep], list[_Piece]]
"""Arguments of one kernel call each, and parameters that a rule updates one by one."""


class PlainUpdates:
    """Updates of parameters with autograd's own gradients, regardless of units."""

    def __init__(self, units: Sequence[Unit], device: Device, numbers: Numbers) -> None:
        """Args: units: All units, with their weights in place."""
        self._units, self._device, self._numbers = units, device, numbers
        self._places = {id(p): (u, i) for u in units for i, p in enumerate(u.params[: u.num_trainable])}
        self._forms = {id(p): (p.dtype, p.size(), p.stride()) for u in units for p in u.params}
        self._frozen = [(p, s.name) for u in units for p, s in zip(u.params, u.spec.params, strict=True)]
        self._frozen = [(p, name) for p, name in self._frozen if id(p) not in self._places]
        self._states: dict[int, dict[str, torch.Tensor]] = {}
        # Gradients have the form of their parameters, so nothing is written to this scratch: it only sets block sizes.
        self._room = torch.empty(min(SCRATCH_BYTES, device.update_block_bytes), dtype=torch.uint8, device="meta")
        self._is_closed, self._num_looks = False, 2
        self._homes = [home for unit in units for home in (unit.ledger.weights, unit.ledger.states)]
        self._regions = [home.memory.region for home in self._homes if isinstance(home.memory, Buffer)]

    def steps_of(self, hypers: Mapping[int, Hyper], on_missing: Callable[[], None]) -> _Steps:
        """Return what is to be done for every parameter with a gradient, by kernel call.

        Raises:
            UnsupportedError: A parameter was unfrozen, or has another shape or dtype than at ``prepare``.
        """
        if self._num_looks:  # a forward that changes its weights does so from the first step on
            self._num_looks -= 1
            for unit in self._units:
                unit.presence.watch.look()
        for param, name in self._frozen:
            if param.requires_grad:
                raise UnsupportedError(unfreezing_refusal(name))
        steps: dict[Hashable, FusedStep] = {}
        by_rule: list[_Piece] = []
        num_missing = 0
        for key, (unit, i) in self._places.items():
            grad, hyper = unit.params[i].grad, hypers.get(key)
            if grad is None:
                num_missing += 1
            elif isinstance(hyper, RuleHyper):
                self._refuse_other_form(unit, i)
                by_rule.append((unit, i, grad, hyper))
            elif hyper is not None:
                self._add(steps, unit, i, grad, hyper)
        if num_missing:
            on_missing()
        return list(steps.values()), by_rule

    @torch.no_grad()
    def take(self, steps: _Steps) -> None:
        """Update the parameters."""
        read = [reader for home in self._homes for reader in home.readers]  # saves
        self._device.compute("update all units", writes=self._regions, after={"states read": read})
        for step in steps[0]:
            apply(step)
            torch.autograd.graph.increment_version(step.targets)  # a graph that saved old weights must not be walked
            number = counts(step.hyper)
            for param in step.targets:
                unit, i = self._places[id(param)]
                unit.steps[i] += number
        for unit, i, grad, hyper in steps[1]:
            update_blocks([self._piece(unit, i, grad, hyper)], self._room)
            unit.steps[i] += counts(hyper)
            torch.autograd.graph.increment_version(unit.params[i])
        updated = self._device.mark("updated")
        for home in self._homes:
            home.written_by(updated)
        for unit in self._units:
            unit.presence.watch.note_versions()

    def _add(self, steps: dict[Hashable, FusedStep], unit: Unit, i: int, grad: torch.Tensor, hyper: FusedHyper) -> None:
        """Add a parameter to the kernel call that can take it."""
        param, number = unit.params[i], unit.steps[i] + 1
        if (param.dtype, param.size(), param.stride()) != self._forms[id(param)]:
            self._refuse_other_form(unit, i)
        kind = id(hyper), param.dtype, isinstance(hyper, SgdHyper) and number == 1
        step = steps.get(kind)
        if step is None:
            step = steps[kind] = FusedStep(hyper=hyper, targets=[], grads=[], states=[], steps=[])
        states = self._states_of(unit, i)
        step.targets.append(param)
        step.grads.append(grad)
        step.states.append(tuple([states[name] for name in hyper.state_names]))
        step.steps.append(number)

    def _piece(self, unit: Unit, i: int, grad: torch.Tensor, hyper: RuleHyper) -> Piece:
        """Return the piece for a parameter that is updated by a rule."""
        spec, states = unit.spec.params[i], unit.ledger.states.memory
        names = unit.views.state_names[i] if isinstance(states, Buffer) else ()
        return Piece(
            target=flat(spec, unit.params[i].detach()),
            grad=flat(spec, grad),
            states={name: unit.views.state(states, name)[i] for name in names},
            weights=None,
            step=unit.steps[i] + 1,
            hyper=hyper,
            numbers=self._numbers.advance(unit, i, hyper, unit.steps[i] + 1),
            likes=likes_of(unit, i) if spec.is_whole else {},
        )

    def _refuse_other_form(self, unit: Unit, i: int) -> None:
        refuse_other_form(unit.spec.params[i], unit.params[i])
        refuse_other_strides(unit.spec.params[i], unit.params[i])

    def after_forward(self, _: nn.Module, __: Any, result: Any) -> None:
        """Make backward raise once the model is closed, since bytes that graphs saved are gone. A forward hook."""
        with suppress(UnsupportedError):  # if the result cannot be taken apart, ``close`` must suffice
            for tensor in take_apart(result, "the model")[0]:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(self._refuse_closed)

    def _refuse_closed(self, *_: object) -> None:
        if self._is_closed:
            raise OutcoreError(
                "expected a prepared model in backward, but it was closed; call backward() before close()"
            )

    def _states_of(self, unit: Unit, index: int) -> dict[str, torch.Tensor]:
        """Return the states of a parameter by name, in the parameter's form."""
        param = unit.params[index]
        found = self._states.get(id(param))
        if found is None:
            spec, states = unit.spec.params[index], unit.ledger.states.memory
            names = unit.views.state_names[index] if isinstance(states, Buffer) else ()
            views = {name: unit.views.state(states, name)[index] for name in names}
            found = self._states[id(param)] = {name: shaped(spec, view) for name, view in views.items()}
        return found

    def close(self) -> None:
        """Let go of all memory, so that it can be given back. A backward through saved weights raises after that."""
        self._is_closed = True
        self._states.clear()
        self._homes.clear()
        torch.autograd.graph.increment_version([p for unit in self._units for p in unit.params])
