"""First values: weights, masters and states are written to their homes unit by unit, and parameters become absent.

A model on the CPU shrinks as its units are written; one on the meta device is never in memory as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from outcore.device.lanes import Handle
from outcore.engine.unit.tiers import Tiers
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import flat, own_slice, torch_dtype
from outcore.memory.arena import Buffer
from outcore.optim.compact import close_masters
from outcore.order.ledger import Home
from outcore.order.slots import Pools
from outcore.spec.layout import CODES

Values = Callable[[int], torch.Tensor]
"""Parameter index -> its first value, in any dtype, on any device."""


@torch.no_grad()
def fill_unit(unit: Unit, tiers: Tiers, pools: Pools[Handle], values: Values) -> None:
    """Write a unit's first bytes. Nothing else may be in flight for it.

    Args:
        unit: The unit, whose homes are uninitialised.
        tiers: Writes homes on disk.
        pools: Their slots on the host serve as staging for homes on disk.
        values: Called once for each parameter.
    """
    weights, states = (_staged(home, pools) for home in (unit.ledger.weights, unit.ledger.states))
    if states is not None:
        _begin_states(unit, states)
    for i, param in enumerate(unit.spec.params):
        value = values(i).detach()
        if tuple(value.shape) != param.shape:
            raise AssertionError(f"'{param.name}': expected shape {param.shape}, but got {tuple(value.shape)}")
        if weights is not None:
            _put(unit, weights, i, value)
        if states is not None and unit.ledger.has_master and param.requires_grad:
            master = unit.views.state(states, "master")[i]
            if weights is not None and unit.views.is_compact[i]:
                whole, codes = flat(param, value.to("cpu", torch.float32)), unit.views.state(states, CODES)[i]
                own = unit.views.own(weights.part(*unit.ledger.cut.updated))[i]
                close_masters(own_slice(unit.spec, i, whole), own, master, codes)
            else:
                master.copy_(own_slice(unit.spec, i, flat(param, value.to(master.dtype))))
    for home, staged in ((unit.ledger.weights, weights), (unit.ledger.states, states)):
        if staged is not None and staged is not home.memory:
            tiers.store().write(home.memory, staged.bytes)


def _put(unit: Unit, weights: Buffer, index: int, value: torch.Tensor) -> None:
    """Write what this rank has of a parameter."""
    cut, part = unit.ledger.cut, unit.spec.weight_parts[index]
    if cut.num_sharers == 1:
        unit.views.weights(weights)[index].copy_(value)
        return
    values, dtype = flat(unit.spec.params[index], value), torch_dtype(part.dtype)
    for run in cut.here(part):
        first, numel = (run.layout - part.offset) // dtype.itemsize, run.nbytes // dtype.itemsize
        weights.tensor(dtype, (numel,), run.home).copy_(values[first : first + numel])


def _begin_states(unit: Unit, states: Buffer) -> None:
    states.bytes.zero_()
    for name, state in unit.ledger.state_specs.items():
        for view, form in zip(unit.views.state(states, name), state.forms, strict=True):
            if form is not None and form.initial:
                view.fill_(form.initial)


def _staged(home: Home[Handle], pools: Pools[Handle]) -> Buffer | None:
    if home.memory is None or isinstance(home.memory, Buffer):
        return home.memory
    pool = pools.pool("host", "weights" if home.kind == "weights" else "states", home.nbytes)
    return pool.slots[0].span(home.nbytes).memory
