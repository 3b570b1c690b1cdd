"""Norms of gradients that are cut among ranks: all of them with one exchange. See [Note: one tree]."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.gradients.unit_gradients import UnitGradients
from outcore.optim.norms import Node, block_sums, node_sums, norm_of, num_blocks, whole_nodes
from outcore.optim.piece import CUT_NUMEL
from outcore.ranks.world import World

_NOWHERE = torch.empty(0, dtype=torch.uint8, device="cpu")
_CHUNK_NUMEL = 2**16  # in float64 a chunk stays in cache


class RankNorms:
    """The norm of every gradient that is held. Asking for one makes all known, on all ranks."""

    def __init__(self, units: Sequence[UnitGradients], homes: GradientHomes, world: World) -> None:
        """Args: units: Those with trainable parameters, in the same order on all ranks."""
        self._units, self._homes, self._world = units, homes, world
        self._known: dict[GradHandle, tuple[object, torch.Tensor]] = {}

    def of(self, handle: GradHandle) -> torch.Tensor:
        """Return the norm of one gradient, as the user sees it. A collective, unless it is known."""
        known = self._known.get(handle)
        if known is None or known[0] != _state(handle):
            self._take_all()
        return self._known[handle][1].clone()  # the caller may edit it

    @torch.no_grad()
    def _take_all(self) -> None:
        self._known.clear()
        self._world.note("a gradient's norm")
        held = [(unit, list(unit.held_handles().values())) for unit in self._units]
        sums = [part for unit, handles in held for part in self._sums(unit, handles)]
        mine = torch.cat([torch.zeros(0, dtype=torch.float64, device="cpu"), *sums])
        handles = [(unit, handle) for unit, some in held for handle in some]
        ranks = range(self._world.size)
        nodes = [[[] if h.is_zero else _nodes(unit, h, rank) for unit, h in handles] for rank in ranks]
        counts = [sum(map(len, of_rank)) for of_rank in nodes]
        values = iter(self._world.gather_parts(mine, counts, "ask for a gradient's norm").tolist())
        found: list[dict[Node, float]] = [{} for _ in handles]
        for of_rank in nodes:
            for known, of_handle in zip(found, of_rank, strict=True):
                known.update((node, next(values)) for node in of_handle)
        norms = []
        for (unit, handle), known in zip(handles, found, strict=True):
            count = 0 if handle.is_zero else num_blocks(unit.unit.spec.params[handle.index].numel)
            norms.append(norm_of(known, count))
        exact, device = torch.tensor(norms, dtype=torch.float64, device="cpu"), self._homes.device.torch_device
        rounded = exact.float().to(device).unbind()
        exact = exact.to(device)
        for i, (unit, handle) in enumerate(handles):
            is_double = unit.unit.gradient_form.update_dtypes[handle.index] is torch.float64
            self._known[handle] = _state(handle), exact[i] if is_double else rounded[i]

    def _sums(self, gradients: UnitGradients, handles: Sequence[GradHandle]) -> list[torch.Tensor]:
        """Return sums of the subtrees that this rank has, by gradient."""
        spec, wanted = gradients.unit.spec, [handle for handle in handles if not handle.is_zero]
        if not wanted:
            return []
        stored = gradients.all_stored()
        rooms = [_room(stored[handle.index]) for handle in wanted]
        works = []
        for handle, room in zip(wanted, rooms, strict=True):
            factors = [f.to("cpu") if room.is_cpu else f for f in (*handle.averaging, *handle.factors)]
            chunks = zip(stored[handle.index].split(_CHUNK_NUMEL), room.split(_CHUNK_NUMEL // CUT_NUMEL), strict=True)
            works += [partial(_take, chunk, factors, part) for chunk, part in chunks]
        if rooms[0].is_cpu:
            self._homes.run_all(works)
        else:  # on compute, where works need no scratch
            for work in works:
                work(_NOWHERE)
        found = []
        for handle, room in zip(wanted, rooms, strict=True):
            first, stop, count = _blocks(gradients, handle, spec.rank)
            found.append(node_sums(room, first, stop, count).cpu())
        return found


def _state(handle: GradHandle) -> object:
    return handle.owner.version, handle.is_zero, tuple(map(id, handle.factors))


def _room(values: torch.Tensor) -> torch.Tensor:
    return torch.empty(num_blocks(values.numel()), dtype=torch.float64, device=values.device)


def _take(values: torch.Tensor, factors: Sequence[torch.Tensor], room: torch.Tensor, _: torch.Tensor) -> None:
    room.copy_(block_sums(values, factors))


def _blocks(gradients: UnitGradients, handle: GradHandle, rank: int) -> tuple[int, int, int]:
    """Return the first block of a rank, the one behind its last, and how many blocks the parameter has."""
    spec = gradients.unit.spec
    first, numel = spec.held(rank, handle.index)
    start = first // CUT_NUMEL
    return start, start + num_blocks(numel), num_blocks(spec.params[handle.index].numel)


def _nodes(gradients: UnitGradients, handle: GradHandle, rank: int) -> list[Node]:
    return whole_nodes(*_blocks(gradients, handle, rank))
