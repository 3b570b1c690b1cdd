"""Tries whether a module computes each row of a batch by itself, before the batch is cut for the first time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.engine.module.side_outputs import active_recording, recording_apart
from outcore.engine.recompute.replay import CapturedState, ForwardState
from outcore.engine.recompute.structure import Structure, take_apart


class RowIndependence:
    """Checks whether one module computes each row of a batch by itself.

    It refuses layers that mix rows, batches whose rows do not lie in the first dimension, and arguments that have as
    many elements there as there are rows, but no rows. Two rows run alone: first as they are, then with other values in
    one of them. The result of the other row must stay the same.
    """

    def __init__(self, module: nn.Module, device: Device, where: str, *, is_compiled: bool) -> None:
        """Args: where: For errors. is_compiled: torch has compiled it, but must make no code for two rows."""
        self.where, self._is_compiled = where, is_compiled
        self._around = CapturedState(list(module.modules()), device, where)
        self.known = set[tuple[bool, ...]]()
        """Choices of arguments to cut for which rows were found to be apart."""

    def check(
        self, call: Callable[..., Any], tensors: Sequence[torch.Tensor], structure: Structure, flags: tuple[bool, ...]
    ) -> None:
        """Try two rows; needed once for each choice of arguments to cut. Runs in evaluation mode and leaves no trace.

        Args:
            call: Runs the module on a structure filled with tensors.
            tensors: The arguments.
            structure: How the arguments nest.
            flags: Whether each argument has a row for each row of the batch.

        Raises:
            UnsupportedError: Rows are not apart.
        """
        state = ForwardState(self._around, structure.objects)
        new = _with_new_values([t for t, f in zip(tensors, flags, strict=True) if f])

        def results(other: int | None) -> list[tuple[torch.Tensor, torch.Tensor]]:
            two = [_two_rows(t, other, is_new=id(t) in new) if f else t for t, f in zip(tensors, flags, strict=True)]
            eager = torch.compiler.set_stance("force_eager") if self._is_compiled else nullcontext()
            with torch.no_grad(), state.restored(), recording_apart(active_recording()), eager:
                for module in self._around.modules:
                    module.training = False
                made, _ = take_apart(call(structure, two), self.where)
            return list(self._halves(made, two))

        try:
            whole, first, last = (results(other) for other in (None, 0, 1))
        except (OutcoreError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refusal(f"two of them alone raise {type(error).__name__}: {error}") from error
        stays = [(a, b) for (_, a), (_, b) in zip(whole, first, strict=True)]
        stays += [(a, b) for (a, _), (b, _) in zip(whole, last, strict=True)]
        if not all(_is_close(a, b) for a, b in stays):
            raise self._refusal("the result of one of them depends on another")
        self.known.add(flags)

    def _halves(
        self, made: Sequence[torch.Tensor], arguments: Sequence[torch.Tensor]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield what each of the two rows gave."""
        for result in made:
            if any(result is t for t in arguments):
                continue
            if not result.dim() or len(result) % 2:
                raise self._refusal(f"a result of two rows has shape {tuple(result.shape)}")
            a, b = result.split(len(result) // 2)
            yield a, b

    def _refusal(self, what: str) -> UnsupportedError:
        return UnsupportedError(
            f"{self.where}: expected a batch of which each row is computed by itself, as micro_batches_in_unit needs, "
            f"but {what}; rows that are packed without padding, and layers that mix rows, cannot be cut: prepare "
            "without micro_batches_in_unit"
        )


def _with_new_values(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return ids of tensors that may get any values: those with a gradient, else the first float. Masks may not."""
    numbers = [id(t) for t in tensors if t.is_floating_point()]
    return [id(t) for t in tensors if t.requires_grad] or numbers[:1]


def _two_rows(tensor: torch.Tensor, other: int | None, *, is_new: bool) -> torch.Tensor:
    """Return the first and the last row.

    Args:
        tensor: An argument.
        other: Which of the two gets other values; None: neither.
        is_new: It gets values that neither row has, since both may be alike. Else it gets those of the other row.
    """
    two = tensor.detach()[[0, -1]]
    if other is not None:
        two[other] = 0.25 - 0.5 * two[other] if is_new else two[1 - other]
    return two


def _is_close(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether results are equal but for rounding: kernels may round otherwise beside other rows, as in experts."""
    if torch.equal(a, b) or not a.is_floating_point():
        return torch.equal(a, b)
    largest = float(a.nan_to_num(0.0, 0.0, 0.0).abs().amax())
    most = 4 * torch.finfo(a.dtype).eps * largest
    return torch.allclose(a, b, rtol=0, atol=most, equal_nan=True)
