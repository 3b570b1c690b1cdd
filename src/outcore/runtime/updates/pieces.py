"""An update as pieces: what the rule works on, parameter by parameter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from outcore.memory.arena import Buffer
from outcore.optim.blocks import Piece
from outcore.optim.rules import Hyper
from outcore.runtime.gradients.of_unit import UnitGradients
from outcore.runtime.unit.unit import Unit


@dataclass(frozen=True, slots=True)
class Change:
    """What one step does to one parameter, all of it known when ``step()`` is called."""

    step: int
    hyper: Hyper
    factors: tuple[torch.Tensor, ...]
    """On the device of the update."""
    is_zero: bool


def pieces_of(
    gradients: UnitGradients,
    changes: Mapping[int, Change],
    grads: Buffer,
    states: Buffer | None,
    weights: Buffer,
    *,
    old_states: Buffer | None = None,
    old_weights: Buffer | None = None,
) -> list[Piece]:
    """The update of a unit, by parameter; out of place where old buffers are given."""
    unit = gradients.unit
    views, weight_views = _views(unit, states), unit.views.flat(weights)
    old_views, stored = _views(unit, old_states), gradients.stored_views(grads)
    moments = [(name, view) for name, view in views.items() if name != "master"]
    old_targets = old_views.get("master") if old_weights is None else unit.views.flat(old_weights)
    pieces = []
    for i, change in changes.items():
        pieces.append(
            Piece(
                target=views["master"][i] if unit.ledger.has_master else weight_views[i],
                grad=None if change.is_zero else stored[i],
                states={name: view[i] for name, view in moments},
                weights=weight_views[i] if unit.ledger.has_master else None,
                step=change.step,
                hyper=change.hyper,
                factors=change.factors,
                zero=change.is_zero,
                old_target=None if old_targets is None else old_targets[i],
                old_states={name: old_views[name][i] for name, _ in moments} if old_views else {},
            )
        )
    return pieces


def _views(unit: Unit, states: Buffer | None) -> dict[str, list[torch.Tensor]]:
    return {name: unit.views.state(states, name) for name in unit.ledger.state_specs} if states is not None else {}
