"""Refuses models that other libraries replicate or shard, and process groups whose ranks do not train together.

Without this, every rank would train a model of its own: gradients would never meet, since neither ``torchrun`` nor a
process group changes what a plain loop computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import distributed, nn

from outcore.core.errors import UnsupportedError
from outcore.torch_private import as_it_is

_FIRST = "prepare after init_process_group, or under torchrun, and all ranks train together"
_BARE = "prepare the bare model on every rank: outcore shares the work among them itself"
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


_measured: list[None] = []
"""One entry for each running ``measuring`` block."""


@contextmanager
def measuring() -> Iterator[None]:
    """Allow one rank to run a model of its own inside the block. It measures its machine with it; the others wait."""
    _measured.append(None)
    try:
        yield
    finally:
        _measured.pop()


@as_it_is
def refuse_process_group(who: str, num_ranks: int = 1) -> None:
    """Refuse a process group of several ranks if only one rank trains the model.

    Takes less than a microsecond if there is no process group.

    Args:
        who: Name of what refuses, for the error.
        num_ranks: Number of ranks that train the model together.

    Raises:
        UnsupportedError: There is such a group.
    """
    if num_ranks == 1 and not _measured and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            raise UnsupportedError(
                f"{who}: expected one process on one device, but torch.distributed has "
                f"{distributed.get_world_size()} processes; {_FIRST}"
            )


def refuse_wrapped(who: str, model: nn.Module) -> None:
    """Refuse a model that another library replicates or shards.

    Args:
        who: Name of what refuses, for the error.
        model: The model; all its modules and parameters are looked at.

    Raises:
        UnsupportedError: A module is wrapped in DDP, FSDP or DataParallel, or a parameter is sharded.
    """
    for name, module in model.named_modules():
        wrapper = next((kind.__name__ for kind in _torch_classes(module) if kind.__name__ in _WRAPPERS), None)
        if wrapper is not None:
            _refuse_wrapper(who, f"'{name}'" if name else "the model", wrapper)
    for name, param in model.named_parameters():
        if any(kind.__name__ == "DTensor" for kind in _torch_classes(param)):
            _refuse_wrapper(who, f"'{name}'", "DTensor")


class RefuseReplicas:
    """An object that makes DDP and DataParallel fail when they ask a prepared model for it before replicating it."""

    def __call__(self, *_: object) -> NoReturn:
        """Refuse DataParallel, which calls this to copy the module."""
        _refuse_wrapper("DataParallel", "the prepared model", "DataParallel")

    def __iter__(self) -> Iterator[str]:
        """Refuse DDP, which asks here which parameters to leave alone."""
        _refuse_wrapper("DistributedDataParallel", "the prepared model", "DistributedDataParallel")


def _torch_classes(value: object) -> Iterator[type]:
    return (kind for kind in type(value).__mro__ if kind.__module__.startswith("torch."))


def _refuse_wrapper(who: str, what: str, wrapper: str) -> NoReturn:
    raise UnsupportedError(f"{who}: expected a model on one device, but {what} is wrapped in {wrapper}; {_BARE}")
