"""Functions of ``torch.cuda`` that a CPU build lacks, over the simulated machine."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import _meta_registrations as metas

_C = torch._C
_library: ctypes.CDLL
TOTAL_BYTES = 8 << 30
"""Bytes of each device, unless a capacity is set."""
_COMPILED = ("Meta", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")


def install(library: ctypes.CDLL) -> None:
    """Patch torch, once."""
    global _library
    _library = library
    library.sim_init()
    _use_compiled_shapes()
    values = {name: value for name, value in globals().items() if name in _OURS}
    values |= {
        "Stream": Stream,
        "Event": event,
        "device_count": _C._accelerator_hooks_device_count,
        "current_device": _C._accelerator_getDeviceIndex,
        "set_stream": torch.accelerator.set_stream,
        "cudart": lambda: _Cudart,
        "default_generators": tuple(torch.Generator(device=f"cuda:{i}") for i in range(4)),
        "is_current_stream_capturing": lambda: False,
        "ipc_collect": lambda: None,
        "get_device_name": lambda device=None: "simulated GPU",
        "get_device_capability": lambda device=None: (8, 0),
        "get_sync_debug_mode": lambda: 0,
        "_maybe_exchange_device": _exchange_device,
    }
    values |= dict.fromkeys(("is_available", "is_initialized", "_is_compiled", "is_bf16_supported"), _yes)
    values |= dict.fromkeys(("_lazy_init", "init"), lambda: None)
    for module in (torch.cuda, torch.cuda.memory, torch.cuda.random, torch.cuda.streams):
        for name, value in values.items():
            if module is torch.cuda or hasattr(module, name):
                setattr(module, name, value)
    torch.cuda._initialized = True  # only then torch's own checkpoint takes the device's random state
    torch.UntypedStorage.clone = lambda self: _storage_on(self, self.device)  # for copy.deepcopy
    torch.UntypedStorage.to = lambda self, *, device, **_: _storage_on(self, device)  # for torch.load
    torch.backends.cuda.is_built = _yes
    torch.backends.cudnn.enabled = False  # else recurrent layers warn that it is missing
    _C._cuda_getCurrentRawStream = lambda device: current_stream(device).stream_id


def statistics(device: Any = None) -> dict[str, int]:
    """Return bytes of device memory, and the number of allocations."""
    values = (ctypes.c_int64 * 5)()
    _library.sim_statistics(_index(device), values)
    names = ("allocated", "peak_allocated", "reserved", "peak_reserved", "num_allocations")
    return dict(zip(names, values, strict=True))


def _use_compiled_shapes() -> None:
    """Let Python compute shapes only where no compiled kernel does: it takes twenty times as long."""
    known = metas._meta_lib_dont_use_me_use_register_meta
    names = {name.split("/")[1] for name in known._op_impls}
    known._destroy()
    rest = metas._meta_lib_dont_use_me_use_register_meta = torch.library.Library("aten", "IMPL", "Meta")
    table = metas.global_decomposition_table
    for name in sorted(names):
        if name == "nonzero":  # the shape depends on values: the simulator runs the CPU's kernel
            continue
        if any(_C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key) for key in _COMPILED):
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet), overload or "default")
        rest.impl(op, next(table[k][op] for k in ("meta", "post_autograd", "pre_autograd") if op in table[k]))


def _index(device: Any = None) -> int:
    index = device if isinstance(device, int) else None if device is None else torch.device(device).index
    return _C._accelerator_getDeviceIndex() if index is None or index < 0 else index


def _yes(*_: object, **__: object) -> bool:
    return True


def _storage_on(storage: torch.UntypedStorage, device: Any) -> torch.UntypedStorage:
    return torch.empty(storage.nbytes(), dtype=torch.uint8, device=device).untyped_storage().copy_(storage)


class Stream(torch.Stream):
    """Like ``torch.cuda.Stream``."""

    def __new__(cls, device: Any = None, priority: int = 0, **known: Any) -> Any:
        """Make a stream, or return the one that ``stream_id`` and its companions name."""
        if known:
            return super().__new__(cls, **known)
        return super().__new__(cls, device=torch.device("cuda", _index(device)), priority=priority)

    @property
    def cuda_stream(self) -> int:
        """Return the stream's number."""
        return self.stream_id


class _Cudart:
    cudaError = SimpleNamespace(success=0)  # noqa: N815

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        return _library.sim_register_host(address, nbytes)

    @staticmethod
    def cudaHostUnregister(address: int) -> int:  # noqa: N802
        return _library.sim_unregister_host(address)


def event(*, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    """Replace the class ``torch.cuda.Event``: torch compares times of its own class only."""
    return torch.Event(device="cuda", enable_timing=enable_timing, blocking=blocking)


# Functions of torch.cuda, under their own names.


def set_device(device: Any) -> None:
    _C._accelerator_setDeviceIndex(_index(device))


def _exchange_device(device: int) -> int:
    before = _index()
    if device >= 0:
        set_device(device)
    return before


def current_stream(device: Any = None) -> Stream:
    found = _C._accelerator_getStream(_index(device))
    return Stream(stream_id=found.stream_id, device_index=found.device_index, device_type=found.device_type)


def default_stream(device: Any = None) -> Stream:
    found = _C._accelerator_getStream(_index(device))
    return Stream(stream_id=0, device_index=_index(device), device_type=found.device_type)


@contextlib.contextmanager
def stream(wanted: torch.Stream | None) -> Iterator[None]:
    if wanted is None:
        yield
        return
    device, before = _index(), torch.accelerator.current_stream(wanted.device)
    torch.accelerator.set_stream(wanted)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        set_device(device)


def synchronize(device: Any = None) -> None:
    _C._accelerator_synchronizeDevice(_index(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    free = _library.sim_free_bytes(_index(device))
    return free, free + statistics(device)["reserved"]


def memory_allocated(device: Any = None) -> int:
    return statistics(device)["allocated"]


def max_memory_allocated(device: Any = None) -> int:
    return statistics(device)["peak_allocated"]


def memory_reserved(device: Any = None) -> int:
    return statistics(device)["reserved"]


def max_memory_reserved(device: Any = None) -> int:
    return statistics(device)["peak_reserved"]


def reset_peak_memory_stats(device: Any = None) -> None:
    _library.sim_reset_peaks(_index(device))


def memory_stats(device: Any = None) -> dict[str, int]:
    return {"num_alloc_retries": 0}


def set_per_process_memory_fraction(fraction: float, device: Any = None) -> None:
    _library.sim_set(b"capacity_bytes", float(int(fraction * TOTAL_BYTES)))


def empty_cache() -> None:
    _library.sim_empty_cache(_index())


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="simulated GPU", total_memory=TOTAL_BYTES, major=8, minor=0, multi_processor_count=1, is_integrated=False
    )


def set_sync_debug_mode(mode: int | str) -> None:
    number = {"default": 0, "warn": 1, "error": 2}.get(mode, mode)
    _library.sim_set(b"sync_mode", float(number))


def _sleep(cycles: int) -> None:
    now = torch.accelerator.current_stream()
    _library.sim_sleep(now.device_index, now.stream_id, cycles / 1e9)


_OURS = (
    "set_device current_stream default_stream stream synchronize mem_get_info memory_allocated max_memory_allocated "
    "memory_reserved max_memory_reserved memory_stats reset_peak_memory_stats empty_cache get_device_properties "
    "set_per_process_memory_fraction set_sync_debug_mode _sleep _exchange_device"
).split()
