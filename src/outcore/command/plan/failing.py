"""Tells a model whose own forward fails from one that can only not be followed on shapes.

[Note: proof] The type of an error does not tell. Torch's rules for shapes are sometimes narrower than its kernels, and
a model may ask for values, or for a device that is not here. So the function of torch that failed on fake tensors is
tried on zeros of these shapes on the CPU. Only if it fails there, too, the model is refused. All else counts as not
followed: errors that the model's Python raises, others' functions, and operands of more than 256 MiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from outcore.command.plan.model_inputs import said_inputs
from outcore.core.errors import ConfigError
from outcore.model.partition import Partition
from outcore.planner.forward.shapes import on_shapes
from outcore.torch_private import FakeTensor, pytree

_PLAIN = (RuntimeError, ValueError, IndexError, TypeError, ZeroDivisionError)
"""What a function raises for wrong arguments. What it does not support is another type, often a subclass of these."""
_MOST_BYTES, _MOST_CHARACTERS = 2**28, 200


def refuse_failing(where: str, cut: Partition, sample: Mapping[str, Any], device: torch.device) -> None:
    """Refuse a model whose forward fails with this micro-batch: see [Note: proof].

    Args:
        where: What the user named the model with.
        cut: A model that could not be followed.
        sample: Keyword arguments of its forward.
        device: The device with whose kernels it was followed.

    Raises:
        ConfigError: The forward fails.
    """
    watch = _FailureRecorder()
    try:
        with on_shapes(cut, sample, device) as shapes, watch:
            shapes.forward(lambda _: None)
    except ConfigError as error:
        failed = watch.failed
        if failed is None or failed.error is not error.__cause__ or not failed.fails_on_values():
            return
        raise ConfigError(
            f"{where}: expected a model whose forward runs, but with {said_inputs(sample)} it fails in "
            f"{failed.func.__name__}: {told(failed.error)}; correct config.json, or change the inputs "
            "(--batch-size, --seq-len, --input)"
        ) from failed.error


def told(error: BaseException) -> str:
    """Return the type of an error and the beginning of its text, on one line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}..."


def why_not_followed(error: ConfigError) -> str:
    """Say why a model was not followed, and what a user of the command can do."""
    if error.__cause__ is None:
        return str(error)
    return (
        f"its forward cannot be followed on shapes alone ({told(error.__cause__)}); a few steps on the machine "
        "show what they take"
    )


class _FailedCall(NamedTuple):
    """A call of a function of torch, or of another library's, that raised an error."""

    func: Any
    arguments: Any
    error: Exception

    def fails_on_values(self) -> bool:
        """Whether it is torch's own, and raises an error of this kind for zeros on the CPU, too."""
        tensors = [t for t in pytree.tree_leaves(self.arguments) if isinstance(t, torch.Tensor)]
        are_plain = all(type(t) in (FakeTensor, torch.Tensor, nn.Parameter) for t in tensors)
        is_small = are_plain and sum(t.untyped_storage().nbytes() for t in tensors) <= _MOST_BYTES
        if not is_small or not _is_own(self.func) or type(self.error) not in _PLAIN:
            return False
        here = pytree.tree_map_only(torch.device, lambda _: torch.device("cpu"), self.arguments)
        try:
            args, kwargs = pytree.tree_map_only(torch.Tensor, _with_values, here)
            with torch.no_grad():
                self.func(*args, **kwargs)
        except Exception as error:
            return type(error) in _PLAIN
        return False


def _is_own(func: Any) -> bool:
    """Whether a function is of torch's own interface: operators of others may need a device that is not here."""
    where = getattr(func, "__module__", None) or "torch"  # methods of tensors say none
    return where.split(".")[0] == "torch" and not where.startswith("torch._ops")


def _with_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return zeros of the same form, or a copy: the function may write to it."""
    if not isinstance(tensor, FakeTensor):
        return tensor.detach().clone()
    whole = torch.zeros(tensor.untyped_storage().nbytes() // tensor.itemsize, dtype=tensor.dtype, device="cpu")
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class _FailureRecorder(TorchFunctionMode):
    """Notes the function that failed last."""

    failed: _FailedCall | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception as error:
            self.failed = _FailedCall(func, (args, kwargs), error)
            raise
