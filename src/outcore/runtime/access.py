"""Reading and writing single parameters and states wherever they live: for saving, loading, looking and editing.

Synchronous: the host waits for whatever writes the bytes; writers also wait for whatever still reads them.
"""

from __future__ import annotations

import torch

from outcore.memory.arena import Buffer
from outcore.runtime.device import Device
from outcore.runtime.homes import Home, Homes
from outcore.runtime.lanes import Handle
from outcore.runtime.unit import Unit, flat, shaped, torch_dtype
from outcore.runtime.weights import Weights


class Access:
    """One parameter at a time."""

    def __init__(self, homes: Homes, device: Device, weights: Weights) -> None:
        """Nothing is allocated."""
        self._homes, self._device, self._weights = homes, device, weights

    def read_weight(self, unit: Unit, index: int) -> torch.Tensor:
        """The current weight as a fresh tensor in host memory."""
        spec = unit.spec.params[index]
        span = unit.spec.weight_offsets[index], spec.weight_bytes
        found = self._read(unit.weights, span, unit.weights_ready, "weights updated")
        return shaped(spec, found.view(torch_dtype(spec.dtype)))

    def read_state(self, unit: Unit, name: str, index: int) -> torch.Tensor:
        """One optimizer state, master weights included, as a fresh tensor in host memory."""
        spec = unit.spec.trainable[index]
        span = self._state_span(unit, name, index)
        found = self._read(unit.states, span, unit.states_ready, "states written")
        return shaped(spec, found.view(torch_dtype(spec.update_dtype)))

    @torch.no_grad()
    def write_weight(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """Replace a weight, and its master.

        A value with more precision than the weight becomes the master. Else elements whose master already rounds to the
        value keep it: loading a model after its optimizer, or writing one element, loses nothing.
        """
        spec = unit.spec.params[index]
        weight = flat(spec, value.detach().to(torch_dtype(spec.dtype)))
        self._weights.invalidate(unit)
        unit.weights_version += 1
        for handle in unit.weights_readers:
            self._device.wait("weights fetched", handle)
        self._write(unit.weights, unit.spec.weight_offsets[index], weight, unit.weights_ready, "weights updated")
        if unit.is_resident:  # a graph that saved the old weights must not be walked any more
            unit.note_change(index)
        if unit.has_master and spec.requires_grad:
            self.write_master(unit, index, value)

    @torch.no_grad()
    def write_master(self, unit: Unit, index: int, value: torch.Tensor) -> None:
        """Let a master follow its weight; see ``write_weight``."""
        if value.dtype == torch_dtype(unit.spec.params[index].dtype):
            master, value = self.read_state(unit, "master", index), value.to("cpu")
            is_edited = master.to(value.dtype) != value
            if not bool(is_edited.any()):
                return
            value = torch.where(is_edited, value.to(master.dtype), master)
        self.write_state(unit, "master", index, value)

    @torch.no_grad()
    def write_state(self, unit: Unit, name: str, index: int, value: torch.Tensor) -> None:
        """Replace one optimizer state."""
        unit.states_version += 1
        for handle in unit.states_readers:
            self._device.wait("states read", handle)
        start, _ = self._state_span(unit, name, index)
        spec = unit.spec.trainable[index]
        state = flat(spec, value.detach().to(torch_dtype(spec.update_dtype)))
        self._write(unit.states, start, state, unit.states_ready, "states written")

    def _state_span(self, unit: Unit, name: str, index: int) -> tuple[int, int]:
        start, _ = unit.state_span(name)
        return start + unit.spec.update_offsets[index], unit.spec.trainable[index].update_bytes

    def _read(self, home: Home | None, span: tuple[int, int], ready: Handle | None, label: str) -> torch.Tensor:
        start, nbytes = span
        result = torch.empty(nbytes, dtype=torch.uint8)
        if home is None or not nbytes:
            return result
        part = home.part(start, start + nbytes)
        if isinstance(part, Buffer):
            self._order(part, ready, label, is_write=False)
            return result.copy_(part.bytes)
        self._device.wait(label, ready)
        self._device.host_access("read from disk", reads=[part.region])
        self._homes.store().read(part, result)
        return result

    def _write(self, home: Home | None, start: int, value: torch.Tensor, ready: Handle | None, label: str) -> None:
        if home is None or not value.numel():
            return
        source = value.contiguous().view(torch.uint8)
        part = home.part(start, start + source.numel())
        if isinstance(part, Buffer):
            self._order(part, ready, label, is_write=True)
            part.bytes.copy_(source)
            return
        self._device.wait(label, ready)
        self._device.host_access("write to disk", writes=[part.region])
        self._homes.store().write(part, source.cpu().clone())
        self._homes.forget(part)

    def _order(self, part: Buffer, ready: Handle | None, label: str, *, is_write: bool) -> None:
        regions = {"writes" if is_write else "reads": [part.region]}
        if part.region.arena == "device":
            self._device.compute("access to one parameter", after={label: ready}, **regions)
        else:
            self._device.wait(label, ready)
            self._device.host_access("access to one parameter", **regions)
