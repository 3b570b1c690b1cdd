"""The work of links in a run, as loads over their own buffers: copies, updates, matrix products, disk transfers."""

from __future__ import annotations

import itertools
import math
import timeit
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_

from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.updates.workers import UpdateWorkers
from outcore.memory.arena import Region
from outcore.memory.disk import DiskStore, Extent
from outcore.optim.blocks import update_blocks
from outcore.optim.kernels import FusedStep, apply
from outcore.optim.piece import Piece
from outcore.optim.rules import AdamHyper
from outcore.probe.loads import ProbeLoad
from outcore.probe.small_block import SmallBlock
from outcore.spec.lane_names import Lane

_HYPER = AdamHyper(
    lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False, decoupled=True
)
UPDATED_BYTES = 16
"""Bytes of memory per parameter: fp32 master weight and moments, bf16 gradient and weight."""
_PLAIN_BYTES, _TENSORS = 16, 8
"""Bytes per parameter (weight, gradient and moments in fp32), and the number of parameter tensors."""
_LEAST_TURN_S = 4e-3
"""Shortest turn of compute. A shorter load is doubled up to the sizes of a large model, and then repeated."""
_TURNS = 3
"""Turns of which the shortest tells how long a load takes."""
_MOST_WIDTH, _MOST_TOKENS = 8192, 4096
_OF_A_MODEL = (768, 256, 12)
"""Channels, tokens and heads."""
_HEADS = {True: (8, 64), False: (32, 128)}
"""Whether the host computes -> number and size of attention heads. Fewer would not fill an accelerator."""
_ROUND_BYTES = 512 * 2**20
"""Accelerator memory that elementwise kernels cycle through: more than any cache holds."""
_QUEUED = 16
"""Copies in a turn: so many that the link never waits for the submitting thread, and the final wait costs little."""
_WRITTEN_BYTES = 14
"""Bytes that an update writes per parameter: master weight, moments and a bf16 weight."""
_TRANSFERS = {
    "disk_read": (Lane.STATES_READ, DiskStore.read),
    "disk_write": (Lane.DISK_WRITE, DiskStore.write),
}
"""Link -> the lane that serves it, and the method of the store."""


def copies(device: Device, lane: Lane, to: torch.Tensor, origin: torch.Tensor, nbytes: int) -> ProbeLoad:
    """Copies of ``nbytes`` each, cycling through two buffers of equal size."""
    places, region = _places(to.numel(), nbytes), Region("probe", 0, nbytes)

    def submit() -> Handle:
        here = next(places)
        target, source = to[here : here + nbytes], origin[here : here + nbytes]
        return device.submit(lane, "probe", lambda: target.copy_(source, non_blocking=True), writes=[region])

    def turn() -> None:
        handles = [submit() for _ in range(_QUEUED)]
        handles[-1].wait()

    return ProbeLoad(lane.value, _QUEUED * nbytes, turn)


def updates(device: Device, workers: UpdateWorkers, memory: torch.Tensor) -> ProbeLoad:
    """AdamW by the host's workers over a whole buffer, on the lane of updates."""
    pieces = _pieces(memory)
    numel = pieces[0].target.numel()
    writes = [Region("probe", 0, _WRITTEN_BYTES * numel)]

    def turn() -> None:
        device.submit(Lane.UPDATE, "probe", lambda: workers.run(pieces), writes=writes).wait()

    return ProbeLoad("update", numel, turn)


def device_updates(device: Device, memory: torch.Tensor) -> ProbeLoad:
    """AdamW by the device over a whole buffer in its memory."""
    pieces = _pieces(memory)
    room = device.allocate(min(4 * pieces[0].target.numel(), device.update_block_bytes))

    def turn() -> None:
        update_blocks(pieces, room)
        device.mark("probe").wait()

    return ProbeLoad("device_update", pieces[0].target.numel(), turn, is_compute=True)


def plain_updates(device: Device, nbytes: int) -> ProbeLoad:
    """AdamW as in a plain plan, over ``nbytes`` of parameters, gradients and moments, after clipping by their norm."""
    numel = max(nbytes // _PLAIN_BYTES // _TENSORS, 1)

    def column(value: float) -> list[torch.Tensor]:
        made = (torch.full((numel,), value, dtype=torch.float32, device=device.torch_device) for _ in range(_TENSORS))
        return list(made)

    states: list[tuple[torch.Tensor, ...]] = list(zip(column(1e-3), column(1e-4), strict=True))
    parameters = column(0.02)
    for parameter, gradient in zip(parameters, grads := column(1e-3), strict=True):
        parameter.grad = gradient
    step = FusedStep(hyper=_HYPER, targets=parameters, grads=grads, states=states, steps=[10] * _TENSORS)

    def work() -> None:
        clip_grad_norm_(parameters, 1e9)
        apply(step)

    return _compute(device, numel * _TENSORS, torch.no_grad()(work))


def _pieces(memory: torch.Tensor) -> list[Piece]:
    numel = memory.numel() // UPDATED_BYTES // 1024 * 1024

    def column(start: int, dtype: torch.dtype, value: float) -> torch.Tensor:
        found = memory[start * numel : (start + dtype.itemsize) * numel].view(dtype)
        return found.fill_(value)

    states = {"exp_avg": column(4, torch.float32, 1e-3), "exp_avg_sq": column(8, torch.float32, 1e-4)}
    grad, weights = column(12, torch.bfloat16, 1e-3), column(14, torch.bfloat16, 0.02)
    target = column(0, torch.float32, 0.02)
    return [Piece(target=target, grad=grad, states=states, weights=weights, step=10, hyper=_HYPER)]


def products(device: Device, dtype: torch.dtype) -> ProbeLoad:
    """Square matrix products, wide enough that one takes some milliseconds."""

    def sized(width: int) -> tuple[float, Callable[[], object]]:
        a, b = (torch.full((width, width), 0.01, dtype=dtype, device=device.torch_device) for _ in range(2))
        return 2.0 * width**3, lambda: a @ b

    return _sized(device, sized, 256, _MOST_WIDTH)


def attention(device: Device, dtype: torch.dtype) -> ProbeLoad:
    """Causal attention, long enough that one call takes some milliseconds."""
    heads, head_size = _HEADS[device.computes_on_host]

    def sized(tokens: int) -> tuple[float, Callable[[], object]]:
        shape = (1, heads, tokens, head_size)
        q, k, v = (torch.full(shape, 0.01, dtype=dtype, device=device.torch_device) for _ in range(3))
        operations = 4 * tokens**2 / 2 * heads * head_size
        return operations, lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return _sized(device, sized, 256, _MOST_TOKENS)


def elementwise(device: Device, nbytes: int) -> ProbeLoad:
    """Activation functions, as between a model's products: into new memory, or cycling through a device's memory."""
    if device.computes_on_host:
        values = torch.full((nbytes // 4,), 0.01, dtype=torch.float32, device=device.torch_device)
        return _sized(device, lambda _: (2.0 * values.nbytes, lambda: functional.relu(values)), 1, 1)
    number = max(2, min(_ROUND_BYTES, device.memory_bytes() // 4) // nbytes)
    parts = torch.full((number, nbytes // 4), 0.01, dtype=torch.float32, device=device.torch_device).unbind()
    places = itertools.cycle(itertools.pairwise((*parts, parts[0])))

    def work() -> None:
        origin, to = next(places)
        torch.neg(origin, out=to)

    return _sized(device, lambda _: (2.0 * parts[0].nbytes, work), 1, 1)


def kernels(device: Device, number: int) -> ProbeLoad:
    """About ``number`` kernels of tiny blocks, one by one. See [Note: launching] in ``probe.small_block``."""
    blocks = [SmallBlock(device.torch_device) for _ in range(max(1, number // SmallBlock.kernels))]
    values = blocks[0].example()

    def work() -> None:
        found = values
        for block in blocks:
            found = block(found)

    return _compute(device, len(blocks) * SmallBlock.kernels, work)


def blocks(device: Device) -> ProbeLoad:
    """Forward of a block as wide as those of a model that the host trains."""
    block = SmallBlock(device.torch_device, *_OF_A_MODEL)
    return _compute(device, 1.0, torch.no_grad()(partial(block, block.example())))


def _sized(
    device: Device, sized: Callable[[int], tuple[float, Callable[[], object]]], size: int, most: int
) -> ProbeLoad:
    """Return the smallest load that takes long enough; if none does, the largest one, repeated."""
    while True:
        load = _compute(device, *sized(size))
        load.turn()
        taken_s = min(timeit.repeat(load.turn, number=1, repeat=_TURNS))  # a slow moment must not decide
        if taken_s >= _LEAST_TURN_S:
            return load
        if size >= most:
            return _repeated(device, *sized(size), math.ceil(_LEAST_TURN_S / taken_s))
        size *= 2


def _repeated(device: Device, amount: float, work: Callable[[], object], times: int) -> ProbeLoad:
    def works() -> None:
        for _ in range(times):
            work()

    return _compute(device, times * amount, works)


def _compute(device: Device, amount: float, work: Callable[[], object]) -> ProbeLoad:
    def turn() -> None:
        work()
        device.mark("probe").wait()

    return ProbeLoad("compute", amount, turn, is_compute=True)


def transfers(device: Device, store: DiskStore, extent: Extent, memory: torch.Tensor, link: str) -> ProbeLoad:
    """Disk reads into memory, or writes from it, cycling through an extent."""
    lane, move = _TRANSFERS[link]
    nbytes = memory.numel()
    places, writes = _places(extent.nbytes, nbytes), [Region("probe", 0, nbytes)]

    def turn() -> None:
        here = next(places)
        part = extent.part(here, here + nbytes)
        device.submit(lane, "probe", lambda: move(store, part, memory), writes=writes).wait()

    return ProbeLoad(link, nbytes, turn)


def fill(store: DiskStore, extent: Extent, memory: torch.Tensor) -> None:
    """Write a whole extent. Args: memory: What to write, again and again."""
    for here in range(0, extent.nbytes, memory.numel()):
        size = min(memory.numel(), extent.nbytes - here)
        store.write(extent.part(here, here + size), memory[:size])


def _places(total: int, nbytes: int) -> Iterator[int]:
    """Yield the offsets of pieces, in a cycle. In a large enough buffer, a piece has left the caches when it recurs."""
    return itertools.cycle(range(0, max(total - nbytes, 0) + 1, nbytes))
