"""The blocked update: fused kernels run on blocks that stay in cache, so that each byte passes through memory once.

[Note: blocks] Inside a fused kernel, a vector body handles full vectors and a scalar tail the rest, and the two round
differently. So a block starts at a multiple of 64 elements from its parameter's start, and ends at such a multiple or
at the parameter's end. Every element is then handled by the same of the two as in a step over the whole parameter.
Neither the block size, nor the number of workers, nor the place in memory changes the bits.

[Note: interpreter lock] Every call of torch releases the interpreter lock and takes it again. A worker that finds it
taken sleeps until it is woken, which takes longer than the call. So one call per tensor makes the views of all blocks
of a parameter. Each block of a fused kernel then needs only two more calls: the kernel itself, and a call that copies
the block's weights and casts the next block's gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from outcore.core.quantities import align_up
from outcore.optim.compact import close_masters, open_masters
from outcore.optim.formats import Codes, decode, encode
from outcore.optim.kernels import FusedHyper, FusedStep, Stepper, bound, copy_all
from outcore.optim.piece import CUT_NUMEL, Piece
from outcore.optim.rules import Hyper, RuleHyper, SgdHyper
from outcore.spec.layout import CODES


class StoppedError(Exception):
    """An update was stopped between two blocks: a part of the parameters is updated, the rest is not."""


def update_blocks(pieces: Iterable[Piece], scratch: Tensor, is_stopped: Callable[[], bool] = lambda: False) -> None:
    """Update every piece, in blocks that fit the scratch.

    The result is bit for bit that of one step of ``torch.optim`` with ``fused=True``, or of the rule, over whole
    parameters whose gradient is ``grad.to(update dtype)`` times the factors, then ``weights.copy_(target)``. See
    [Note: blocks].

    Args:
        pieces: Pieces on the scratch's device, in any dtypes; different pieces may have different settings.
        scratch: 1D uint8 on the device of the pieces, aligned to 256 bytes: holds the gradients of one block. On the
            CPU it should fit in a core's share of the cache, beside the data that streams through. On an accelerator
            larger is faster.
        is_stopped: Called before each block.

    Raises:
        StoppedError: ``is_stopped`` returned True.
    """
    with torch.no_grad():
        for (hyper, dtype, _, formats), group in _alike(pieces).items():
            # A rule makes tensors of the size of a block; together they should be no larger than the scratch.
            cut, lanes, cannot_be_cut = group[0].cut_numel, 1 + len(formats), group[0].is_whole
            cuts = scratch.numel() // (dtype.itemsize * cut * lanes)
            if isinstance(hyper, RuleHyper) or formats:
                times = hyper.rule.temporaries if isinstance(hyper, RuleHyper) else 2.0
                cuts = min(cuts, max(int(cuts / max(times / lanes, 1.0)), 1))
            numel = cuts * cut
            room = scratch[: lanes * numel * dtype.itemsize].view(dtype).view(lanes, numel).unbind()
            step = None if isinstance(hyper, RuleHyper) else bound(hyper, group[0].target.device, dtype)
            if step is not None and not isinstance(hyper, RuleHyper) and not formats:
                group = [piece for piece in group if not _stream(piece, hyper, room[0], step, is_stopped)]
            for blocks in ([piece] for piece in group) if cannot_be_cut else _filled(group, numel):
                if is_stopped():
                    raise StoppedError("the model was closed")
                _update(blocks, room, step)


_Alike = tuple[Hyper, torch.dtype, bool, tuple[tuple[str, str], ...]]


def _alike(pieces: Iterable[Piece]) -> dict[_Alike, list[Piece]]:
    """Group pieces that one kernel call can take: same settings, same dtype, states stored in the same way."""
    alike: dict[_Alike, list[Piece]] = {}
    for piece in pieces:
        first = isinstance(piece.hyper, SgdHyper) and piece.step == 1
        formats = tuple(piece.formats.items())
        alike.setdefault((piece.hyper, piece.update_dtype, first, formats), []).append(piece)
    return alike


def _filled(pieces: Sequence[Piece], block_numel: int) -> Iterator[list[Piece]]:
    """Yield lists of blocks that together fill the scratch, each list for one kernel call."""
    if not block_numel and any(piece.target.numel() for piece in pieces):
        raise AssertionError(f"the scratch of an update holds less than {CUT_NUMEL} elements")
    batch: list[Piece] = []
    room = block_numel
    for piece in pieces:
        for block in piece.parts(_sizes(piece.target.numel(), room, block_numel)):
            batch.append(block)
            room -= align_up(block.target.numel(), block.cut_numel)
            if room <= 0:
                yield batch
                batch, room = [], block_numel
    if batch:
        yield batch


def _sizes(numel: int, first: int, following: int) -> list[int]:
    """Split ``numel`` into a sum: at most ``first``, then ``following`` as often as it fits, then the rest."""
    if numel <= first:
        return [numel] if numel else []
    whole, rest = divmod(numel - first, following)
    return [first, *[following] * whole, *([rest] if rest else [])]


def _stream(piece: Piece, hyper: FusedHyper, room: Tensor, step: Stepper, is_stopped: Callable[[], bool]) -> bool:
    """Update a piece of several blocks like ``_update``, but with two calls of torch per block and little between them.

    Returns:
        Whether it did: only for a piece of several blocks, in host memory, updated in place.
    """
    numel = room.numel()
    is_in_place = piece.old_target is None and not piece.old_states
    if not 0 < numel < piece.target.numel() or not room.is_cpu or not is_in_place:
        return False
    targets, grads, weights, *states = [
        itertools.repeat(None) if tensor is None else tensor.split(numel)
        for tensor in (piece.target, piece.grad, piece.weights, *[piece.states[n] for n in hyper.state_names])
    ]
    is_cast = not piece.zero and piece.grad is not None and piece.grad.dtype != room.dtype
    one = FusedStep(hyper=hyper, targets=[room], grads=[room], states=[()], steps=[piece.step])
    copies: tuple[list[Tensor], list[Tensor]] = [], []  # the last block's weights, and this block's gradient
    for target, grad, to, *held in zip(targets, grads, weights, *states, strict=False):
        there = room if target.numel() == numel else room[: target.numel()]
        if is_cast:
            copies[0].append(there)
            copies[1].append(grad)
        copy_all(*copies)
        if is_stopped():
            raise StoppedError("the model was closed")
        one.targets[0], one.grads[0], one.states[0] = (
            target,
            _gradient(piece, there if is_cast else grad, there),
            (*held,),
        )
        step(one)
        copies = ([], []) if to is None else ([to], [target])
    copy_all(*copies)
    return True


def _update(blocks: list[Piece], lanes: Sequence[Tensor], step: Stepper | None) -> None:
    """Do one kernel call, and the casts around it.

    Args:
        blocks: Blocks of one group of ``_alike``.
        lanes: Scratch in the update dtype: a row for gradients, and one for each coded state.
        step: The fused kernel; None for rules.
    """
    hyper = blocks[0].hyper
    for block in blocks:  # out of place: copying here leaves the block's new bytes in cache for the kernel
        if block.old_target is not None:
            block.target.copy_(block.old_target)
        for name, old in block.old_states.items():
            block.states[name].copy_(old)
    coded = [] if blocks[0].codes is None else list(_rooms(blocks, lanes))
    held = [_decoded(*each, lanes[0]) for each in coded] or [(block.target, block.states) for block in blocks]
    grads = _gradients(blocks, lanes[0])  # after decoding, which uses the gradients' scratch
    if isinstance(hyper, RuleHyper):
        for block, grad, (target, states) in zip(blocks, grads, held, strict=True):
            _follow(hyper, block, target, grad, states)
    elif step is not None:
        targets, steps = [target for target, _ in held], [block.step for block in blocks]
        names = hyper.state_names
        columns = [tuple([states[name] for name in names]) for _, states in held]
        step(FusedStep(hyper=hyper, targets=targets, grads=grads, states=columns, steps=steps))
    for each in coded:
        _encode(*each)
    for block in blocks:
        if block.weights is not None:
            block.weights.copy_(block.target)


def _gradients(blocks: Sequence[Piece], scratch: Tensor) -> list[Tensor]:
    grads, start, is_whole, cut = list[Tensor](), 0, blocks[0].is_whole, blocks[0].cut_numel
    for block in blocks:
        numel = block.target.numel()
        if is_whole:
            room = torch.empty_like(block.target, dtype=block.update_dtype) if _needs_room(block) else scratch
        else:
            room = scratch if numel == scratch.numel() else scratch[start : start + numel]
        grads.append(_gradient(block, block.grad, room))
        start += align_up(numel, cut)
    return grads


def _rooms(blocks: Sequence[Piece], lanes: Sequence[Tensor]) -> Iterator[tuple[Piece, Codes, dict[str, Tensor]]]:
    """Yield, for each block, its codes and the scratch of each coded state."""
    start = 0
    for block in blocks:
        if block.codes is None:
            raise AssertionError("a block whose states are not coded among others")
        stop = start + align_up(block.target.numel(), block.cut_numel)
        if block.is_whole:
            rooms = {name: lanes[0].new_empty(stop - start) for name in block.formats}
        else:
            rooms = {name: lanes[i][start:stop] for i, name in enumerate(block.formats, start=1)}
        yield block, block.codes, rooms
        start = stop


def _decoded(
    block: Piece, codes: Codes, rooms: Mapping[str, Tensor], spare: Tensor
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the decoded target and states, for the rule. Args: spare: Scratch, overwritten; not for whole blocks."""
    opened, states = dict[str, Tensor](), block.states
    for name, room in rooms.items():
        if name == "master":
            other = torch.empty_like(room) if block.is_whole else spare
            opened[name] = open_masters(block.target, states[name], states[CODES], room, other)
        elif not name:
            opened[name] = room[: block.target.numel()].copy_(block.target)
        else:
            opened[name] = decode(name, states, codes, room)
    target = opened.get("master", opened.get("", block.target))
    return target, {n: opened.get(n, t) for n, t in states.items() if n != "master" and codes.elements_of(n) == 1}


def _encode(block: Piece, codes: Codes, rooms: Mapping[str, Tensor]) -> None:
    for name, room in rooms.items():
        if name == "master":
            close_masters(room, block.target, block.states[name], block.states[CODES])
        elif not name:
            block.target.copy_(room[: block.target.numel()])
        else:
            encode(name, block.states, codes, room, block.start, block.step)


def _follow(hyper: RuleHyper, block: Piece, target: Tensor, grad: Tensor, held: Mapping[str, Tensor]) -> None:
    """Update a block by the rule's own function."""
    numbers = {name: _number(value, block.states[name].dtype) for name, value in block.numbers.items()}
    states = {name: numbers[name] if name in numbers else t for name, t in held.items()}
    if block.is_whole:
        target, grad = _shaped(target, block.likes[""]), _shaped(grad, block.likes[""])
        states = {n: t if n in numbers else _shaped(t, block.likes.get(n, block.likes[""])) for n, t in states.items()}
    hyper.rule.update(target, grad, states, block.step, hyper.settings)
    for name, number in numbers.items():
        block.states[name].fill_(number.item())


def _number(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype, device="cpu")


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    return flat.as_strided(like.shape, like.stride())


def numbers_after(
    hyper: Hyper, numbers: Mapping[str, float], dtypes: Mapping[str, torch.dtype], step: int
) -> dict[str, float]:
    """Return the numbers of a parameter after a step, by running the rule on a weight without elements.

    Args:
        hyper: Settings of the step.
        numbers: Numbers before the step.
        dtypes: Dtypes of the parameter ("") and all its states, as they are updated.
        step: Number of this step of the parameter, from 1.
    """
    if not numbers or not isinstance(hyper, RuleHyper):
        return dict(numbers)
    given = {name: torch.empty(0, dtype=dtype, device="cpu") for name, dtype in dtypes.items()}
    held = {name: _number(value, dtypes[name]) for name, value in numbers.items()}
    weight = given.pop("")
    with torch.no_grad():
        hyper.rule.update(weight, weight.clone(), given | held, step, hyper.settings)
    return {name: float(value) for name, value in held.items()}


def _needs_room(block: Piece) -> bool:
    return block.zero or bool(block.factors) or block.grad is None or block.grad.dtype != block.update_dtype


def _gradient(piece: Piece, grad: Tensor | None, room: Tensor) -> Tensor:
    """Return a part of the gradient for the kernel: the part itself if it can be read in place, else ``room``."""
    factors = piece.factors
    if piece.zero:
        room.zero_()
    elif grad is None:
        raise AssertionError("a piece without gradient must be marked zero")
    elif grad is room:
        pass  # the gradient is already in the scratch
    elif grad.dtype != room.dtype:
        room.copy_(grad)
    elif factors:
        torch.mul(grad, factors[0], out=room)
        factors = factors[1:]
    else:
        return grad
    for factor in factors:
        room.mul_(factor)
        if room.dtype != piece.target.dtype and piece.formats.get(""):  # p.grad is in bf16
            room.copy_(room.to(piece.target.dtype))
    return room
