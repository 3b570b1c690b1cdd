"""Comparison of recomputed results with those of forward.

A recompute repeats its forward only if everything that the block saw is known and put back. So results of both are
summarised on the device, and the summaries compared. This is done in the first calls of a unit, whenever its arguments
or modes look different, and later at intervals. On the CPU results must agree bit for bit. On an accelerator some
kernels add in another order each time, so a difference within rounding passes there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.activations.saved import storage_of
from outcore.engine.recompute.replay import CapturedState, ForwardState
from outcore.engine.recompute.structure import Structure, plain_values

FIRST_CALLS = 8
_EVERY = 64
_MOST_FORMS = 256
_ROUNDING = 1e-2  # relative to a result's norm: more than kernels that add in another order can differ by
_WIDTH = 512  # columns of the table that a result is laid out in
_NUM_SKETCHES = 4  # for rows and for columns: 16 numbers, whose mean square estimates that of the norm
_MIX = 0x5851F42D4C957F2D


class Summary(NamedTuple):
    """What is remembered of the results of a run."""

    plain: list[Any]
    """Numbers, strings and other plain values among the results."""
    tensors: list[_TensorSummary]


class _TensorSummary(NamedTuple):
    form: tuple[torch.Size, torch.dtype]
    bits: torch.Tensor | None
    """A hash, as a tensor with one number; None for a layout whose bits cannot be read."""
    sketch: torch.Tensor | None
    """Some projections, and the norm; None on the CPU, and for dtypes other than floating point."""


def summary_of(tensors: Sequence[torch.Tensor], structure: Structure) -> Summary:
    """Summarise all results. The device computes; the host does not wait."""
    with torch.no_grad():
        return Summary(list(plain_values(structure)), [_summary(t.detach()) for t in tensors])


class PendingComparisons:
    """Comparisons whose outcomes are on the device and not yet known to the host."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._made: list[tuple[str, torch.Tensor]] = []
        self._sent: deque[tuple[int, Sequence[str], torch.Tensor, Handle]] = deque()
        self._step = 0

    def compare(self, before: Summary, after: Summary, where: str, *, why: str) -> None:
        """Compare a recompute's results with those of its forward.

        Args:
            before: Summary of the forward's results.
            after: Summary of the recompute's results.
            where: Names the unit in errors.
            why: A known reason why they could differ, or empty. With a reason, no difference passes as rounding.

        Raises:
            UnsupportedError: The results differ, and the host can tell at once.
        """
        if not _same_values(before.plain, after.plain):
            raise UnsupportedError(
                _refusal(where, f"gave {after.plain} beside its tensors, forward {before.plain}", why)
            )
        if [t.form for t in before.tensors] != [t.form for t in after.tensors]:
            raise UnsupportedError(_refusal(where, "gave results of other shapes or dtypes than forward", why))
        for i, (one, two) in enumerate(zip(before.tensors, after.tensors, strict=True)):
            for differs in _differs(one, two, is_exact=bool(why)):
                found = f"gave another result than forward (result {i}, shape {tuple(one.form[0])})"
                message = _refusal(where, found, why)
                if not differs.is_cpu:
                    self._made.append((message, differs))
                elif bool(differs):
                    raise UnsupportedError(message)

    def settle(self) -> None:
        """Look at outcomes that have reached the host. In the first step, wait, so that no update uses wrong gradients.

        Raises:
            UnsupportedError: A recompute did not repeat its forward, in this step or in an earlier one.
        """
        self._step += 1
        if self._made:
            messages, found = zip(*self._made, strict=True)
            self._made.clear()
            on_host = torch.stack(found).to("cpu", non_blocking=True)
            self._sent.append((self._step, messages, on_host, self._device.mark("recompute compared")))
        if self._step == 1 and self._sent:
            self._sent[0][-1].wait()
        while self._sent and self._sent[0][-1].is_over():
            step, refusals, on_host, _ = self._sent.popleft()
            message = next((message for message, differs in zip(refusals, on_host, strict=True) if differs), None)
            if message is not None:
                raise UnsupportedError(message if step == self._step else message + _LATE)


class Repeats:
    """Checks that recomputes of one unit repeat its forwards."""

    def __init__(self, modules: Sequence[nn.Module], device: Device, doubts: PendingComparisons, where: str) -> None:
        """Args: modules: Modules of the unit. doubts: Comparisons of all units. where: Names the unit in errors."""
        self._around, self._doubts, self._where = CapturedState(modules, device, where), doubts, where
        self._num_calls, self._forms = 0, set[Hashable]()

    def begin(self, objects: Sequence[Any]) -> ForwardState:
        """Capture what a forward sees that may be recomputed. Args: objects: Arguments that the forward may change."""
        return ForwardState(self._around, objects)

    def is_checked(self, state: ForwardState, tensors: Sequence[torch.Tensor], wants_grad: Sequence[bool]) -> bool:
        """Whether a forward's recompute is compared with it. Args: tensors: Tensors among the forward's arguments."""
        shapes, dtypes = tuple([t.shape for t in tensors]), tuple([t.dtype for t in tensors])
        form = shapes, dtypes, tuple(wants_grad), state.flags
        self._num_calls += 1
        is_new = form not in self._forms and len(self._forms) < _MOST_FORMS
        if is_new:
            self._forms.add(form)
        is_due = is_new or self._num_calls <= FIRST_CALLS or self._num_calls % _EVERY == 0
        if is_due:
            state.look_closely()
        return is_due

    def compare(self, before: Summary, after: Summary, edited: Sequence[str]) -> None:
        """Compare; see ``PendingComparisons.compare``. Args: edited: Parameters that forward itself changed."""
        names = ", ".join(f"'{name}'" for name in edited)
        why = f"the block changes its own parameters in forward ({names}), which recompute begins with"
        self._doubts.compare(before, after, self._where, why=why if edited else "")


_LATE = ". The last update was made with those gradients: go on from an earlier checkpoint"
_UNKNOWN = (
    "the block depends on something besides its arguments, its modules' attributes and buffers, and the usual random "
    "generators, such as a global, a closure or an object that it got"
)


def _refusal(where: str, found: str, why: str) -> str:
    remedy = "Change them outside of forward" if why else "Move that into a buffer, make the block deterministic"
    return f"{where}: recompute {found}; {why or _UNKNOWN}. {remedy}, or give this unit the policy keep in the plan"


def _same_values(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(x == y or (x != x and y != y) for x, y in zip(a, b, strict=True))


def _differs(one: _TensorSummary, two: _TensorSummary, *, is_exact: bool) -> Iterator[torch.Tensor]:
    if one.bits is None or two.bits is None:
        return
    differs = one.bits != two.bits
    if one.sketch is None or two.sketch is None or is_exact:
        yield differs
        return
    gap = (one.sketch[:-1] - two.sketch[:-1]).square().mean().sqrt()
    size = torch.maximum(one.sketch[-1], two.sketch[-1])
    yield differs & ((gap > _ROUNDING * size) | (one.sketch[-1].isfinite() != two.sketch[-1].isfinite()))


def _summary(tensor: torch.Tensor) -> _TensorSummary:
    form = tensor.shape, tensor.dtype
    if not storage_of(tensor) or tensor.is_quantized:
        return _TensorSummary(form, None, None)
    tensor = tensor.resolve_conj().resolve_neg()
    is_sketched = not tensor.is_cpu and tensor.is_floating_point()
    return _TensorSummary(form, _bits(tensor), _sketch(tensor) if is_sketched else None)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """A hash of a tensor's bits that depends on their positions. Integers wrap around, so it is exact."""
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    table = words[: words.numel() // _WIDTH * _WIDTH].view(-1, _WIDTH)
    rest = torch.cat([words[table.numel() :], flat[8 * words.numel() :].to(torch.int64)])
    parts = [table.sum(1), table.sum(0), rest]
    return torch.stack([(part * _weights(part.numel(), i, part.device)).sum() for i, part in enumerate(parts)]).sum()


def _weights(count: int, salt: int, device: torch.device) -> torch.Tensor:
    """Pseudo-random integers. Made anew each time: kept, they would take device memory that no plan accounts for."""
    mixed = torch.arange(1, count + 1, device=device) * _MIX + salt * 0x9E3779B9
    return (mixed ^ (mixed >> 29)) * _MIX


def _sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Sums with random signs over rows and columns, and the norm.

    The mean square of the differences of two tensors' sums estimates the square of their distance.
    """
    rows = -(-tensor.numel() // _WIDTH)
    table = torch.zeros(rows * _WIDTH, device=tensor.device)
    table[: tensor.numel()] = tensor.reshape(-1)
    left, right = (_signs(n, i, tensor.device) for i, n in enumerate((rows, _WIDTH)))
    sums = left.t() @ table.view(rows, _WIDTH) @ right
    return torch.cat([sums.flatten(), torch.linalg.vector_norm(table).view(1)])


def _signs(count: int, salt: int, device: torch.device) -> torch.Tensor:
    numbers = _weights(count * _NUM_SKETCHES, salt + 3, device).view(count, _NUM_SKETCHES)
    return torch.where((numbers >> 40) & 1 == 1, 1.0, -1.0)
