"""Reading and writing single parameters and states on any tier: for saving, loading, inspecting and editing.

Synchronous: the host waits for operations that write the bytes; before it writes, also for those that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.live_port import Tiers
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.unit.views import flat, shaped, torch_dtype
from outcore.memory.arena import Buffer
from outcore.memory.disk import Extent
from outcore.optim.compact import closed_masters, masters_of
from outcore.order.ledger import Home
from outcore.order.slots import Pools
from outcore.ranks.world import World
from outcore.spec.layout import CODES, ROW_NUMEL, StateSpec
from outcore.spec.model import DTYPE_BYTES, Part

_SAMPLE_BYTES = 4096
_MASTERS_AT_A_TIME = 2**18  # a multiple of ROW_NUMEL: 1 MiB, and as much again in compact form


class HomeAccess:
    """Reads and writes some bytes of a home on any tier. The host waits for operations on the same bytes."""

    def __init__(self, tiers: Tiers, pools: Pools[Handle], device: Device) -> None:
        self._tiers, self._pools, self._device = tiers, pools, device

    def read(self, home: Home[Handle], part: Part, start: int = 0) -> torch.Tensor:
        """Read a part of a home (1D). Args: start: Where the layout of the part begins in the home."""
        result, first = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu"), start + part.offset
        if home.memory is not None and part.nbytes:
            self._copy_out(home, home.span(first, first + part.nbytes).memory, result)
        return result.view(torch_dtype(part.dtype))

    def _copy_out(self, home: Home[Handle], part: Buffer | Extent, result: torch.Tensor) -> None:
        if isinstance(part, Buffer):
            self._order(home, part, is_write=False)
            result.copy_(part.bytes)
            return
        self._wait(home)
        self._device.host_access("read from disk", reads=[part.region])
        self._tiers.store().read(part, result)

    def write(self, home: Home[Handle], start: int, value: torch.Tensor) -> None:
        """Write values. Args: start: Where they begin in the home, in bytes."""
        self._device.wait(f"{home.kind} read", home.readers)
        if home.memory is None or not value.numel():
            return
        source = value.contiguous().view(torch.uint8)
        part = home.span(start, start + source.numel()).memory
        if isinstance(part, Buffer):
            self._order(home, part, is_write=True)
            part.bytes.copy_(source)
            if home.tier == "device":  # lanes must wait for what compute wrote
                home.written_by(self._device.mark(f"{home.kind} written"))
            return
        self._wait(home)
        self._device.host_access("write to disk", writes=[part.region])
        self._tiers.store().write(part, source.detach().cpu())
        self._pools.invalidate(home)

    def _wait(self, home: Home[Handle]) -> None:
        for label, dependency in home.before_read().items():
            self._device.wait(label, dependency)

    def _order(self, home: Home[Handle], part: Buffer, *, is_write: bool) -> None:
        regions = {"writes" if is_write else "reads": [part.region]}
        if home.tier == "device":
            self._device.compute("access to one parameter", after=home.before_read(), **regions)
        else:
            self._wait(home)
            self._device.host_access("access to one parameter", **regions)


class ValueAccess:
    """Reads and writes one parameter or state at a time."""

    def __init__(
        self, tiers: Tiers, pools: Pools[Handle], device: Device, weights: StreamedWeights, world: World | None = None
    ) -> None:
        """Args: world: The ranks, if several share the states of a parameter. Reading a state is a collective then."""
        self.device = device
        self._weights, self.world = weights, world
        self._homes = HomeAccess(tiers, pools, device)
        self.edited: dict[str, dict[int, torch.Tensor | None]] = {}
        """Parameters whose masters do not follow their edits yet, by unit. See [Note: edits].

        With each compact master comes the weight before the first of these edits: what this rank has of it (1D)."""

    def read_weight(self, unit: Unit, index: int) -> torch.Tensor:
        """The current weight as a fresh tensor in host memory. A collective if it is cut over ranks."""
        part = unit.spec.weight_parts[index]
        values = self._weight_bytes(unit, index, 0, part.nbytes).view(torch_dtype(part.dtype))
        return shaped(unit.spec.params[index], values)

    def _weight_bytes(self, unit: Unit, index: int, start: int, stop: int) -> torch.Tensor:
        """The bytes [start, stop) of a weight (1D uint8)."""
        home, cut, part = unit.ledger.weights, unit.ledger.cut, unit.spec.weight_parts[index]
        if not cut.is_cut:
            return self._homes.read(home, Part("uint8", stop - start, part.offset + start))
        if self.world is None:
            raise AssertionError("weights are cut over one rank")
        size, pieces = DTYPE_BYTES[part.dtype], []
        for rank in range(unit.spec.num_ranks):
            first, numel = unit.spec.held(rank, index)
            begin = max(first * size, start)
            pieces.append((begin, max(min((first + numel) * size, stop) - begin, 0)))
        begin, nbytes = pieces[unit.spec.rank]
        run = cut.own_run(is_trained=index < unit.num_trainable)
        mine = self._homes.read(
            home, Part("uint8", nbytes, run.home + part.offset + begin - run.layout if nbytes else 0)
        )
        what = f"read the weight '{unit.spec.params[index].name}'"
        return self.world.gather_parts(mine, [nbytes for _, nbytes in pieces], what)

    def current_weight(self, unit: Unit, index: int) -> torch.Tensor:
        """The current weight; inside of a call of the unit, the parameter's value there, which may have been edited."""
        if unit.presence.now is Beneath.BOUND or unit.presence.bound is not None:
            return unit.params[index].detach().to("cpu", copy=True)
        return self.read_weight(unit, index)

    def read_state(self, unit: Unit, name: str, index: int) -> torch.Tensor:
        """One optimizer state, master weights included, as a fresh tensor in host memory."""
        values, spec = self._own_state(unit, name, index), unit.spec
        form = unit.ledger.state_specs[name].described(spec.params[index], index)
        if self.world is not None:
            state = unit.ledger.state_specs[name]
            numels = [state.owned(spec, index, rank)[1] for rank in range(spec.num_ranks)]
            values = self.world.gather_parts(values, numels, f"read {name} of '{spec.params[index].name}'")
        return shaped(form, values)

    def _own_state(self, unit: Unit, name: str, index: int) -> torch.Tensor:
        """What this rank has of a state (1D)."""
        state = unit.ledger.state_specs[name]
        stored = self._homes.read(unit.ledger.states, state.parts[index], state.start)
        if name != "master" or not unit.views.is_compact[index]:
            return stored
        before = self.edited.get(unit.name, {}).get(index)
        weight = self._own_weight(unit, index) if before is None else before
        return masters_of(weight, stored, self._own_state(unit, CODES, index))

    def _own_weight(self, unit: Unit, index: int) -> torch.Tensor:
        """What this rank updates of a weight (1D)."""
        cut = unit.ledger.cut
        return self._homes.read(unit.ledger.weights, cut.own_parts[index], cut.updated[0])

    def sample(self, unit: Unit, index: int) -> bytes:
        """Some bytes in the middle of a weight, to tell weights apart."""
        whole = unit.spec.weight_parts[index].nbytes
        nbytes = min(whole, _SAMPLE_BYTES)
        start = (whole - nbytes) // 2
        return self._weight_bytes(unit, index, start, start + nbytes).numpy().tobytes()

    @torch.no_grad()
    def replace_weight(self, unit: Unit, index: int, pieces: Iterable[torch.Tensor]) -> None:
        """Replace a weight by bytes in the order of memory (1D uint8 each); a master of the same dtype follows."""
        spec, part = unit.spec.params[index], unit.spec.weight_parts[index]
        self._weights.invalidate(unit)
        unit.weights_version += 1
        master = unit.ledger.state_specs.get("master")
        if master is not None and master.parts[index].dtype != spec.dtype:
            master = None
        start = 0
        with self._written_by_all(unit):
            for piece in pieces:
                self._write_weight(unit, part.offset + start, piece)
                if master is not None:
                    self._write_own(unit, master, index, start, piece)
                start += piece.numel()
        if unit.ledger.cut.is_resident:
            unit.presence.watch.note_change(index)

    @torch.no_grad()
    def replace_state(self, unit: Unit, name: str, index: int, pieces: Iterable[torch.Tensor]) -> None:
        """Replace one optimizer state; see ``replace_weight``."""
        unit.states_version += 1
        if name == "master":
            self._forget_edit(unit, index)
        state, start = unit.ledger.state_specs[name], 0
        for piece in pieces:
            self._write_own(unit, state, index, start, piece)
            start += piece.numel()

    def _write_own(self, unit: Unit, state: StateSpec, index: int, start: int, piece: torch.Tensor) -> None:
        """Write what this rank has of some bytes of a state. Args: start: Position of the first of the bytes."""
        part, first = state.parts[index], 0
        if self.world is not None:
            first = state.owned(unit.spec, index, unit.spec.rank)[0] * DTYPE_BYTES[part.dtype]
        mine = piece[max(first - start, 0) : max(first + part.nbytes - start, 0)]
        self._homes.write(unit.ledger.states, state.start + part.offset + max(start - first, 0), mine)

    @torch.no_grad()
    def write_weight(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """Replace a weight. Its master follows later; a value of another dtype becomes the master at once.

        So nothing is lost by loading a model after its optimizer, by writing one element, or by writing a weight and
        then what it was before. See [Note: edits].
        """
        spec, part = unit.spec.params[index], unit.spec.weight_parts[index]
        is_rounded, is_trained = value.dtype == torch_dtype(part.dtype), index < unit.num_trainable
        if is_rounded:
            self.note_edit(unit, index)
        elif is_trained and unit.ledger.has_master:
            self.write_state(unit, "master", index, value)
            if unit.views.is_compact[index]:  # the weight follows its master
                return
        weight = flat(spec, value.detach().to(torch_dtype(part.dtype)))
        self._weights.invalidate(unit)
        unit.weights_version += 1
        with self._written_by_all(unit):
            self._write_weight(unit, part.offset, weight.contiguous().view(torch.uint8))
        if unit.ledger.cut.is_resident:  # a graph that saved the old weights must not be walked any more
            unit.presence.watch.note_change(index)

    def note_edit(self, unit: Unit, index: int) -> None:
        """Note that a weight is edited, so that its master follows. See [Note: edits].

        Call it before a weight with a compact master is written.
        """
        if unit.ledger.has_master and index < unit.num_trainable:
            edited = self.edited.setdefault(unit.name, {})
            if index not in edited:
                edited[index] = self._own_weight(unit, index) if unit.views.is_compact[index] else None

    @torch.no_grad()
    def follow_edits(self, unit: Unit) -> None:
        """Let masters of an edited unit follow. See [Note: edits]."""
        edited = self.edited[unit.name]
        unit.states_version += 1  # on all ranks alike, whichever has the elements that differ
        for index in list(edited):
            master, weight = self._own_state(unit, "master", index), self._own_weight(unit, index)
            rounded = master.to(weight.dtype)
            is_edited = rounded != weight
            if unit.views.is_compact[index]:  # the weight is read as a part of the master: the sign of a 0 counts, too
                is_edited |= rounded.view(torch.int16) != weight.view(torch.int16)
            if bool(is_edited.any()):
                self._write_master(unit, index, torch.where(is_edited, weight.to(master.dtype), master))
            del edited[index]

    def _forget_edit(self, unit: Unit, index: int) -> None:
        """Let a master be what is written now, which is later than any edit."""
        self.edited.get(unit.name, {}).pop(index, None)

    def close(self) -> None:
        """Let go of all memory."""
        self.edited.clear()

    def _write_weight(self, unit: Unit, offset: int, piece: torch.Tensor) -> None:
        """Write what this rank has of some bytes (1D uint8). Args: offset: Where they begin in the weights layout."""
        for run in unit.ledger.cut.here(Part("uint8", piece.numel(), offset)):
            self._homes.write(
                unit.ledger.weights, run.home, piece[run.layout - offset : run.layout - offset + run.nbytes]
            )

    @contextmanager
    def _written_by_all(self, unit: Unit) -> Iterator[None]:
        """Guard writes to a copy that ranks share: no rank still reads it, or reads it before all have written."""
        is_shared = self.world is not None and unit.ledger.cut.is_one_copy
        if self.world is not None and is_shared:
            self.device.wait("weights read", unit.ledger.weights.readers)
            self.world.say(f"write weights of unit '{unit.label}'")
        yield
        if self.world is not None and is_shared:
            self.world.say(f"have written weights of unit '{unit.label}'")

    @torch.no_grad()
    def write_state(self, unit: Unit, name: str, index: int, value: torch.Tensor) -> None:
        """Replace what this rank has of one optimizer state. Args: value: The whole state."""
        form = unit.ledger.state_specs[name].described(unit.spec.params[index], index)
        whole = flat(form, value.detach())
        first, numel = unit.ledger.state_specs[name].owned(unit.spec, index, unit.spec.rank)
        self._write_state(unit, name, index, whole[first : first + numel], whole)

    def _write_state(self, unit: Unit, name: str, index: int, values: torch.Tensor, whole: torch.Tensor) -> None:
        """Args: values: What this rank has. whole: All values; a compact master's weight follows them on each rank."""
        unit.states_version += 1
        state = unit.ledger.state_specs[name]
        if name != "master":
            self._write_part(unit, state, index, values)
            return
        self._forget_edit(unit, index)
        if unit.views.is_compact[index]:
            self._weights.invalidate(unit)
            unit.weights_version += 1
            with self._written_by_all(unit):
                at = unit.spec.weight_parts[index].offset
                for start, piece in _pieces_of(whole):
                    weight = closed_masters(piece)[0]
                    self._write_weight(unit, at + start * weight.itemsize, weight.view(torch.uint8))
        self._write_master(unit, index, values)

    def _write_master(self, unit: Unit, index: int, values: torch.Tensor) -> None:
        """Write what this rank has of a master. If it is compact, the weight must be its rounding."""
        states = unit.ledger.state_specs
        if not unit.views.is_compact[index]:
            self._write_part(unit, states["master"], index, values)
            return
        for start, piece in _pieces_of(values):
            _, lower, codes = closed_masters(piece)
            self._write_part(unit, states[CODES], index, codes, start // ROW_NUMEL)
            self._write_part(unit, states["master"], index, lower, start)

    def _write_part(self, unit: Unit, state: StateSpec, index: int, values: torch.Tensor, first: int = 0) -> None:
        """Args: first: Number of elements before these in the state's part."""
        part = state.parts[index]
        values = values.to(torch_dtype(part.dtype))
        self._homes.write(unit.ledger.states, state.start + part.offset + first * values.itemsize, values)


def sample_of(param: torch.Tensor) -> bytes:
    """What ``ValueAccess.sample`` would return for a parameter outside of an engine, if it is row-major."""
    data = param.detach().contiguous().reshape(-1).view(torch.uint8)
    nbytes = min(data.numel(), _SAMPLE_BYTES)
    start = (data.numel() - nbytes) // 2
    return data[start : start + nbytes].cpu().numpy().tobytes()


def own_states(unit: Unit, index: int) -> list[StateSpec]:
    """States that a parameter has besides its weight.

    A master of the weight's own dtype is not among them, whether or not the plan has a copy: it equals the weight.
    """
    dtype = unit.spec.params[index].dtype
    states = [s for s in unit.ledger.state_specs.values() if s.forms[index] is not None]
    return [s for s in states if s.name != "master" or s.parts[index].dtype != dtype]


def shown_states(unit: Unit, index: int) -> list[tuple[StateSpec, str]]:
    """These states as users and files see them, with their dtypes: a master is fp32, however it is stored."""
    seen = [s for s in own_states(unit, index) if s.name != CODES]
    return [(s, "float32" if s.name == "master" else s.parts[index].dtype) for s in seen]


def _pieces_of(masters: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield masters (1D) in pieces of whole rows, as fp32 on the CPU, each with the number of its first element."""
    for start in range(0, masters.numel(), _MASTERS_AT_A_TIME):
        yield start, masters[start : start + _MASTERS_AT_A_TIME].to("cpu", torch.float32)
