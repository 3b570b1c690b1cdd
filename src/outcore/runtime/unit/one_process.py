"""What outcore and others may not both do: replicate or shard a model, or have it stepped by other ranks.

Without this, every rank would train a model of its own: gradients never meet, since neither ``torchrun`` nor a process
group changes what a plain loop computes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from torch import distributed, nn

from outcore.core.errors import UnsupportedError
from outcore.torch_private import as_it_is

_FIRST = "prepare behind init_process_group, or under torchrun, and all ranks train together"
_BARE = "prepare the bare model on every rank: outcore shares the work among them itself"
_WRAPPERS = frozenset({"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"})


_measured: list[None] = []
"""As many as there are models to measure with."""


@contextmanager
def measuring() -> Iterator[None]:
    """Inside, one rank may run a model of its own: it measures its machine with it, and the others wait."""
    _measured.append(None)
    try:
        yield
    finally:
        _measured.pop()


@as_it_is
def refuse_process_group(who: str, num_ranks: int = 1) -> None:
    """Refuse a process group of others than train together. Takes less than a microsecond if there is none.

    Args:
        who: Refuses, for the error.
        num_ranks: So many train together.

    Raises:
        UnsupportedError: There is one.
    """
    if num_ranks == 1 and not _measured and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            raise UnsupportedError(
                f"{who}: expected one process on one device, but torch.distributed has "
                f"{distributed.get_world_size()} processes; {_FIRST}"
            )


def refuse_wrapped(who: str, model: nn.Module) -> None:
    """Refuse a model that somebody else replicates or shards.

    Args:
        who: Refuses, for the error.
        model: Looked at as a whole.

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
    """What DDP and DataParallel ask a module before they replicate it: a prepared one refuses."""

    def __call__(self, *_: object) -> NoReturn:
        """DataParallel copies the module."""
        _refuse_wrapper("DataParallel", "the prepared model", "DataParallel")

    def __iter__(self) -> Iterator[str]:
        """DDP asks which parameters to leave alone."""
        _refuse_wrapper("DistributedDataParallel", "the prepared model", "DistributedDataParallel")


def _torch_classes(value: object) -> Iterator[type]:
    return (kind for kind in type(value).__mro__ if kind.__module__.startswith("torch."))


def _refuse_wrapper(who: str, what: str, wrapper: str) -> NoReturn:
    raise UnsupportedError(f"{who}: expected a model on one device, but {what} is wrapped in {wrapper}; {_BARE}")
