"""How fast a machine is, resource by resource, each measured alone: the rates from which a step's bound is computed.

Nothing of a step runs here: links copy between buffers of a unit's size, the workers and the device update a unit's
parameters, the disk store moves a unit's states, and a model without blocks and one with a single block are timed in
plain PyTorch.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from llama import materialised
from transformers import LlamaConfig

from outcore.device.device import Device
from outcore.device.opening import open_device
from outcore.engine.updates.workers import UpdateWorkers
from outcore.memory.arena import Region
from outcore.memory.disk import DiskStore
from outcore.memory.host import HostMemory
from outcore.optim.blocks import update_blocks
from outcore.optim.piece import Piece
from outcore.optim.rules import AdamHyper
from outcore.spec.lane_names import Lane
from outcore.spec.layout import lay_out_states
from outcore.spec.model import Part, UnitSpec

STATES = ("master", "exp_avg", "exp_avg_sq")
HYPER = AdamHyper(
    lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False, decoupled=True
)
COPIES, UPDATES, EXTENTS, PASSES = 8, 6, 8, 5


class Marks:
    """Moments in the work given to a device: events on its stream, or the host's clock."""

    def __init__(self, device: str) -> None:
        """Args: device: ``cuda`` or ``cpu``."""
        self._is_cuda = device.startswith("cuda")
        self._moments: list[torch.cuda.Event | float] = []

    def mark(self) -> None:
        """Mark the point that the work has reached, without blocking."""
        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._moments.append(event)
        else:
            self._moments.append(time.perf_counter())

    def between(self) -> list[float]:
        """Return the seconds from each mark to the next. Waits for the last mark."""
        found = []
        for start, end in zip(self._moments, self._moments[1:], strict=False):
            if isinstance(start, float) or isinstance(end, float):
                found.append(end - start)
            else:
                end.synchronize()
                found.append(start.elapsed_time(end) / 1e3)
        return found


@dataclass(frozen=True)
class Passes:
    """Forward and backward of one micro-batch in plain PyTorch, in seconds."""

    block_forward_s: float
    block_backward_s: float
    """Backward without recompute."""
    rest_forward_s: float
    """Embeddings, head and loss."""
    rest_backward_s: float
    peak_bytes: int
    """Device memory beyond the parameters while one block keeps its activations; gradients included."""


def time_passes(
    config_of: Callable[[int], LlamaConfig], batch: Mapping[str, torch.Tensor], device: str, passes: int = PASSES
) -> Passes:
    """Time a model without blocks, and one with a single block.

    Args:
        config_of: Number of blocks -> configuration.
        batch: One micro-batch, on the device.
        device: ``cuda`` or ``cpu``.
        passes: Timed passes, of which medians are taken. Two more run first.
    """
    (rest_forward_s, rest_backward_s, _), (forward_s, backward_s, peak_bytes) = (
        _time_model(config_of(layers), batch, device, passes) for layers in (0, 1)
    )
    free_cached(device)
    return Passes(
        block_forward_s=max(forward_s - rest_forward_s, 0.0),
        block_backward_s=max(backward_s - rest_backward_s, 0.0),
        rest_forward_s=rest_forward_s,
        rest_backward_s=rest_backward_s,
        peak_bytes=peak_bytes,
    )


def _time_model(
    config: LlamaConfig, batch: Mapping[str, torch.Tensor], device: str, passes: int
) -> tuple[float, float, int]:
    """Return the seconds of forward and of backward, and peak bytes."""
    free_cached(device)
    model = materialised(config, device)
    before_bytes = torch.cuda.memory_allocated() if device.startswith("cuda") else 0
    marks = Marks(device)
    for _ in range(2 + passes):
        model.zero_grad(set_to_none=True)
        marks.mark()
        loss = model(**batch).loss
        marks.mark()
        loss.backward()
        marks.mark()
        del loss
    seconds = marks.between()[2 * 3 :]
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes if device.startswith("cuda") else 0
    return statistics.median(seconds[0::3]), statistics.median(seconds[1::3]), peak_bytes


def free_cached(device: str) -> None:
    """Release cached memory, and measure peaks from here on."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def link_rates(device: Device, nbytes: int) -> dict[str, dict[str, float]]:
    """Return bytes per second of ``h2d`` and ``d2h``: ``alone``, and ``together``.

    Args:
        device: A device whose lanes are idle.
        nbytes: Bytes per copy.
    """
    with _pinned(device, 2 * nbytes) as here:
        there = device.allocate(2 * nbytes)
        ways = {Lane.H2D: (there[:nbytes], here[:nbytes]), Lane.D2H: (here[nbytes:], there[nbytes:])}
        alone = {lane.value: _copy_rate(device, [lane], ways, nbytes)[lane.value] for lane in ways}
        together = _copy_rate(device, list(ways), ways, nbytes)
        del there, ways
    return {"alone": alone, "together": together}


def _copy_rate(
    device: Device, lanes: Sequence[Lane], ways: Mapping[Lane, tuple[torch.Tensor, torch.Tensor]], nbytes: int
) -> dict[str, float]:
    """Return bytes per second. The first and last copies may have a link to themselves, so they do not count."""
    device.synchronize()
    device.recorder.begin(num_steps=1)
    for _ in range(COPIES):
        for lane in lanes:
            to, origin = ways[lane]
            region = Region("probe", 0, nbytes)
            device.submit(
                lane, "probe", lambda to=to, origin=origin: to.copy_(origin, non_blocking=True), writes=[region]
            )
    device.synchronize()
    timeline = device.recorder.timeline()
    device.recorder.end()
    found = {}
    for lane in lanes:
        seconds = [s.duration_s for s in timeline.spans if s.lane == lane.value][1:-1]
        found[lane.value] = nbytes / statistics.median(seconds)
    return found


@contextlib.contextmanager
def _pinned(device: Device, nbytes: int) -> Iterator[torch.Tensor]:
    with HostMemory.open(nbytes) as memory:
        is_pinned = device.register_host(memory.tensor)
        try:
            yield memory.tensor
        finally:
            device.synchronize()
            if is_pinned:
                device.unregister_host(memory.tensor)


def update_rates(device: Device, unit: UnitSpec) -> dict[str, float]:
    """Return parameters per second: ``update`` by the workers, and ``device``, each over the states of one unit.

    Args:
        device: An idle device.
        unit: A unit of bf16 weights with fp32 masters.
    """
    numel = sum(p.numel for p in unit.trainable)
    nbytes = _states_bytes(unit) + 2 * unit.trainable_bytes
    with HostMemory.open(nbytes) as memory, UpdateWorkers.beside(device) as workers:
        pieces = _pieces(unit, memory.tensor)
        seconds = _repeat(lambda: workers.run(pieces), "cpu")
        del pieces
    found = {"update": numel / statistics.median(seconds)}
    pieces = _pieces(unit, device.allocate(nbytes))
    room = device.allocate(min(unit.update_bytes, device.update_block_bytes))  # so that launches do not dominate
    seconds = _repeat(lambda: update_blocks(pieces, room), device.torch_device.type)
    return found | {"device": numel / statistics.median(seconds)}


def _repeat(run: Callable[[], None], device: str) -> list[float]:
    marks = Marks(device)
    for _ in range(1 + UPDATES):
        marks.mark()
        run()
    marks.mark()
    return marks.between()[1:]


def _states_bytes(unit: UnitSpec) -> int:
    return sum(state.nbytes for state in lay_out_states(unit, STATES).values())


def _pieces(unit: UnitSpec, memory: torch.Tensor) -> list[Piece]:
    """All parameters of a unit over memory that holds three states, gradients and weights in sequence."""

    def views(start: int, parts: Sequence[Part]) -> list[torch.Tensor]:
        places = [(start + part.offset, part) for part in parts]
        return [memory[first : first + p.nbytes].view(getattr(torch, p.dtype)) for first, p in places]

    states = list(lay_out_states(unit, STATES).values())
    master, exp_avg, exp_avg_sq = (views(state.start, state.parts) for state in states)
    parts = unit.weight_parts[: len(unit.trainable)]
    grads, weights = (views(states[-1].stop + i * unit.trainable_bytes, parts) for i in range(2))
    for values, tensors in ((0.02, master), (1e-3, exp_avg), (1e-4, exp_avg_sq), (1e-3, grads)):
        for tensor in tensors:
            tensor.fill_(values)
    return [
        Piece(target=m, grad=g, states={"exp_avg": a, "exp_avg_sq": b}, weights=w, step=10, hyper=HYPER)
        for m, a, b, g, w in zip(master, exp_avg, exp_avg_sq, grads, weights, strict=True)
    ]


def disk_rates(folder: Path, nbytes: int) -> dict[str, float]:
    """Return bytes per second of ``disk_write`` and ``disk_read`` through the store, measured one after the other.

    Args:
        folder: Folder of the disk tier.
        nbytes: Bytes of an extent, such as the states of a unit.
    """
    with DiskStore.open([folder], EXTENTS * nbytes) as store, HostMemory.open(nbytes) as memory:
        memory.tensor.random_(generator=torch.Generator().manual_seed(0))
        extents = [store.take(nbytes, owner="probe") for _ in range(EXTENTS)]
        found = {}
        for name, move in (("disk_write", store.write), ("disk_write", store.write), ("disk_read", store.read)):
            start_s = time.perf_counter()
            for extent in extents:
                move(extent, memory.tensor)
            found[name] = EXTENTS * nbytes / (time.perf_counter() - start_s)
    return found


@dataclass(frozen=True)
class Machine:
    """Rates that do not depend on the tokens of a step."""

    links: Mapping[str, Mapping[str, float]]
    """``alone`` and ``together`` -> link -> bytes per second."""
    parameters_per_s: Mapping[str, float]
    disk: Mapping[str, float]


def measure_machine(torch_device: str, unit: UnitSpec, disk: Path | None) -> Machine:
    """Measure links, updates and, if a folder is given, the disk.

    Args:
        torch_device: ``cuda`` or ``cpu``.
        unit: A block, which gives copies and updates their size.
        disk: Folder of the disk tier; None if it is not measured.
    """
    with open_device(torch_device) as device:
        links = link_rates(device, unit.weight_bytes)
        parameters_per_s = update_rates(device, unit)
    free_cached(torch_device)
    return Machine(links, parameters_per_s, {} if disk is None else disk_rates(disk, _states_bytes(unit)))
