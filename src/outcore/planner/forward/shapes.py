"""A forward on shapes alone: on fake tensors of the device that will compute, with the kernels that it would run.

[Note: packed sequences] Transformers looks at the values of position IDs to see whether a row holds several sequences.
Of fake ones it cannot know, and so makes a mask of rows x length x length, with which attention needs other kernels,
and more memory. Where a micro-batch brings neither position IDs nor a mask, the model counts positions itself, and no
row holds several. On an H200, blocks with such a mask took 1.25 times as long as in a step without one (16 rows of
2,048 tokens, 1024 channels). A sample that brings a mask keeps it, even one that hides nothing: rows of later batches
may be padded.

[Note: experts] Torch's kernels of products with one matrix per expert take all floating dtypes, but its rule for their
shapes takes bf16 alone. Fake tensors of other dtypes go the way that Transformers has for a torch without such kernels:
its arguments and results are the same. It saves the same for backward, but for where the rows of each expert end.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.core.errors import ConfigError
from outcore.core.strides import row_major
from outcore.model.casts import Autocast
from outcore.model.partition import Partition
from outcore.torch_private import FAKE_LOG, FakeTensor, FakeTensorMode, pytree

_ANSWERING = threading.RLock()
_NO_CHECKS = "TRANSFORMERS_DISABLE_TORCH_CHECK"


class Shapes(NamedTuple):
    """A model and a micro-batch without values."""

    own: Mapping[str, torch.Tensor]
    """Parameters, tensors that belong to them, and buffers, by name."""
    batch: Mapping[str, Any]
    forward: Callable[[Callable[[list[Any]], None]], None]
    """Runs the model and calls a function with its result, in a list, while these parameters are lent to the model."""


@contextmanager
def on_shapes(cut: Partition, sample: Mapping[str, Any], device: torch.device) -> Iterator[Shapes]:
    """Provide the model's parameters and buffers as fake tensors, and a forward over them.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward. Only shapes and dtypes count.
        device: The device that will compute.

    Yields:
        Fake tensors, and the forward, which raises ``ConfigError`` if the model cannot be run this way. It runs under
        autocast if the caller does; the function that gets its result does not.

    Time of the forward: its Python, 1 to 3 s for a large model. Memory: none.
    """
    model = cut.modules[0]
    with FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad(), ExitStack() as undo:
        silent = logging.Filter("nobody")  # what fails is told by the error alone
        FAKE_LOG.addFilter(silent)
        undo.callback(FAKE_LOG.removeFilter, silent)
        own = _fakes(cut, device)
        parts: dict[str, torch.Tensor] = {}
        for weight in cut.quantized:
            parts |= weight.follow(own, undo)
        batch = pytree.tree_map_only(torch.Tensor, lambda t: torch.empty(t.shape, dtype=t.dtype, device=device), sample)
        if sample.get("position_ids") is None:
            _answer(undo, "masking_utils", "find_packed_sequence_indices", _packs_nothing)
        _answer(undo, "integrations.moe", "_can_use_grouped_mm", _can_be_followed)
        _leave_out_checks(undo)

        def forward(then: Callable[[list[Any]], None]) -> None:
            lent = _LentModel(model, then, Autocast.now(device))
            with left_as_it_is(model):
                torch.func.functional_call(lent, {f"model.{name}": t for name, t in own.items()}, (batch,))

        yield Shapes({**own, **parts}, batch, forward)


def _answer(undo: ExitStack, where: str, name: str, answer: Callable[..., Any]) -> None:
    """Answer a question of Transformers about fake tensors, until ``undo``.

    Other threads may run real forwards meanwhile. One that follows shapes waits, so that each puts back what it found.

    Args:
        undo: Puts Transformers' own function back.
        where: The module of the function; if it is not imported or has none, nothing happens.
        name: The function.
        answer: Gets the function, and its arguments, the first of which is a fake tensor.
    """
    module = sys.modules.get(f"transformers.{where}")
    if not hasattr(module, name):
        return
    undo.enter_context(_ANSWERING)
    ask = getattr(module, name)
    setattr(module, name, lambda x, *rest: answer(ask, x, *rest) if isinstance(x, FakeTensor) else ask(x, *rest))
    undo.callback(setattr, module, name, ask)


def _leave_out_checks(undo: ExitStack) -> None:
    """Have Transformers leave out checks of values, such as that images have as many tokens as a text has for them."""
    undo.enter_context(_ANSWERING)
    before = os.environ.get(_NO_CHECKS)
    os.environ[_NO_CHECKS] = "1"
    undo.callback(lambda: os.environ.pop(_NO_CHECKS) if before is None else os.environ.update({_NO_CHECKS: before}))


def _packs_nothing(ask: Callable[..., Any], position_ids: torch.Tensor) -> None:
    """See [Note: packed sequences]."""


def _can_be_followed(ask: Callable[..., Any], rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> bool:
    """See [Note: experts]."""
    return weight.dtype == torch.bfloat16 and bool(ask(rows, weight, ends))


@contextmanager
def left_as_it_is(model: nn.Module) -> Iterator[None]:
    """Restore the attributes of modules after the block, with the content that lists, dicts and sets had.

    ``functional_call`` puts lent tensors back if a module is reached by two names, and forwards count or collect.
    """
    before = [
        (
            module.__dict__,
            dict(module.__dict__),
            [(v, copy.copy(v) if v else ()) for v in module.__dict__.values() if _holds(v)],
        )
        for module in model.modules()
    ]
    try:
        yield
    finally:
        for attributes, values, contents in before:
            attributes.clear()
            attributes.update(values)
            for holder, content in contents:
                holder.clear()
                (holder.extend if isinstance(holder, list) else holder.update)(content)


def _holds(value: object) -> bool:
    return type(value) in (list, dict, set, OrderedDict)


class _LentModel(nn.Module):
    """A model that calls a function after its forward, while parameters are still lent: backward may run it again."""

    def __init__(self, model: nn.Module, then: Callable[[list[Any]], None], autocast: Autocast) -> None:
        super().__init__()
        self.model, self._then, self._autocast = model, then, autocast

    def forward(self, batch: Mapping[str, Any]) -> None:
        try:
            result = [self.model(**batch)]  # in a list, from which ``then`` can take it: no frame keeps it
        except Exception as error:
            raise ConfigError(
                "sample: expected keyword arguments with which the model runs on shapes alone, but it raised "
                f"{type(error).__name__}: {error}; give a micro-batch as the loop does, or prepare without sample= and "
                "activations="
            ) from error
        torch.clear_autocast_cache()  # as the end of a loop's own context does
        with self._autocast.off():
            self._then(result)


def _fakes(cut: Partition, device: torch.device) -> dict[str, torch.Tensor]:
    """Return parameters in the dtypes in which they will be trained, and buffers, without bytes."""
    specs = {param.name: param for unit in cut.spec.units for param in unit.params}
    found: dict[str, torch.Tensor] = {}
    for name, p in cut.modules[0].named_parameters():
        spec = specs.get(name)
        dtype = p.dtype if spec is None else getattr(torch, spec.dtype)
        strides = row_major(tuple(p.shape)) if spec is None or spec.strides is None else spec.strides
        made = torch.empty_strided(p.shape, strides, dtype=dtype, device=device)
        found[name] = made.requires_grad_(p.requires_grad)
    for name, buffer in cut.modules[0].named_buffers():
        found[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)
    return found
