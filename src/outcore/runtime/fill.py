"""First values: weights, masters and states are written to their homes unit by unit, and parameters become absent.

A model on the CPU shrinks as it is filled in; one on the meta device never stands whole in memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.memory.arena import Buffer
from outcore.runtime.homes import Homes
from outcore.runtime.unit import Unit, flat, torch_dtype

Values = Callable[[int], torch.Tensor]
"""Parameter index -> its first value, in any dtype, on any device."""


@torch.no_grad()
def fill_unit(unit: Unit, homes: Homes, values: Values, initial_state: Callable[[str], float]) -> None:
    """Write a unit's first bytes. Nothing else may be in flight for it.

    Args:
        unit: Its homes are uninitialised.
        homes: Slots serve as staging for what lives on disk.
        values: Each parameter is asked for once.
        initial_state: What every element of a state begins with.
    """
    weights = _staged(unit, homes, "weights")
    states = _staged(unit, homes, "states")
    if states is not None:
        _begin_states(unit, states, initial_state)
    for i, param in enumerate(unit.spec.params):
        value = values(i).detach()
        if tuple(value.shape) != param.shape:
            raise AssertionError(f"'{param.name}': expected shape {param.shape}, but got {tuple(value.shape)}")
        if weights is not None:
            unit.weight_views(weights)[i].copy_(value)
        if states is not None and unit.has_master and param.requires_grad:
            master = unit.state_views(states, "master")[i]
            master.copy_(flat(param, value.to(torch_dtype(param.update_dtype))))
    for home, staged in ((unit.weights, weights), (unit.states, states)):
        if home is not None and staged is not None and not isinstance(home, Buffer):
            if homes.disk is None:
                raise AssertionError("bytes on disk without a disk tier")
            homes.disk.write(home, staged.bytes)


def _begin_states(unit: Unit, states: Buffer, initial_state: Callable[[str], float]) -> None:
    states.bytes.zero_()
    for name in unit.state_names:
        if name != "master" and initial_state(name):
            for view in unit.state_views(states, name):
                view.fill_(initial_state(name))


def _staged(unit: Unit, homes: Homes, kind: str) -> Buffer | None:
    home = unit.weights if kind == "weights" else unit.states
    if home is None or isinstance(home, Buffer):
        return home
    pool = homes.pool("host", "weights" if kind == "weights" else "states", home.nbytes)
    return pool.slots[0].buffer.part(0, home.nbytes)
