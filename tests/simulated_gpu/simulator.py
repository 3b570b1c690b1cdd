"""A CUDA device made of threads: builds and loads it, and gives ``torch.cuda`` the functions that it lacks.

Nothing here may import torch before ``load``: torch looks up its CUDA hooks only once.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
SOURCES = ("machine.cpp", "device.cpp", "operators.cpp", "recurrent.cpp", "python.cpp")
_library: ctypes.CDLL | None = None


def why_not() -> str | None:
    """Return why the simulator cannot be built here, or None."""
    return None if shutil.which("g++") else "needs g++ to build the simulated GPU"


def build() -> Path:
    """Compile what is not compiled yet; the cache's key is the sources and the version of torch.

    The first build takes half a minute. Other processes that come meanwhile wait for it.
    """
    torch_folder = _torch_folder()
    version = (torch_folder / "version.py").read_text()
    texts = [version, *((FOLDER / name).read_text() for name in (*SOURCES, "machine.h", "device.h"))]
    key = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outcore-simulated-gpu" / key
    library = cache / "libsimulated_gpu.so"
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(torch_folder, library)
    return library


def _torch_folder() -> Path:
    return Path(importlib.util.find_spec("torch").origin).parent


def _compile(torch_folder: Path, library: Path) -> None:
    """Compile all files at once: the torch headers that they share take longer than the files."""
    include = [f"-I{torch_folder / 'include'}", f"-I{torch_folder / 'include/torch/csrc/api/include'}"]
    fresh = library.with_suffix(".fresh")
    libs = ["-L", torch_folder / "lib", "-lc10", "-ltorch_cpu"]  # ``load`` finds them in its own environment
    everything = "".join(f'#include "{FOLDER / name}"\n' for name in SOURCES)
    command = ["g++", "-std=c++20", "-O1", "-fPIC", "-w", "-shared", *include, "-x", "c++", "-", "-o", fresh, *libs]
    subprocess.run(command, input=everything, text=True, check=True)
    fresh.rename(library)


def load(**knobs: float) -> None:
    """Make torch see a CUDA device. Call it before torch is imported.

    Args:
        knobs: See ``set_knobs``.
    """
    global _library
    library = build()
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(_torch_folder() / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    _library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    _library.sim_set.argtypes = [ctypes.c_char_p, ctypes.c_double]
    for name in ("sim_num_syncs", "sim_num_operations", "sim_free_bytes"):
        getattr(_library, name).restype = ctypes.c_int64
    for name in ("sim_register_host", "sim_unregister_host"):
        getattr(_library, name).argtypes = [ctypes.c_void_p, ctypes.c_size_t][: 2 if name == "sim_register_host" else 1]
    _library.sim_sleep.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_double]
    set_knobs(**knobs)
    import torch_cuda  # imports torch, which now finds the device

    torch_cuda.install(_library)


def set_knobs(**values: float) -> None:
    """Change the machine.

    ``num_devices``, ``capacity_bytes`` (of each device), ``poison`` (1: freed memory is filled with NaN), ``sync_mode``
    (2: raise where an operation blocks the host), ``refuse_registration`` (how many are refused), ``h2d_bytes_per_s``,
    ``d2h_bytes_per_s``, ``compute_bytes_per_s`` (0: as fast as possible), ``delay_s`` (at most, before each operation),
    ``fail_at`` (how many operations from now one fails; -1: none), ``h2d_stall_s``, ``d2h_stall_s`` (the next copy of
    this direction, and those behind it, stand still for so long, or until this is 0 again).
    """
    for name, value in values.items():
        _library.sim_set(name.encode(), float(value))


@contextlib.contextmanager
def knobs(**values: float) -> Iterator[None]:
    """Change the machine for a while; at the end restore everything that was changed."""
    first = {"poison": 1, "capacity_bytes": 8 << 30, "num_devices": 1, "fail_at": -1}
    set_knobs(**values)
    try:
        yield
    finally:
        set_knobs(**{name: first.get(name, 0) for name in values})


def num_syncs() -> int:
    """Return how often an operation has blocked the host."""
    return _library.sim_num_syncs()


def num_operations() -> int:
    """Return how many operations were given to streams."""
    return _library.sim_num_operations()
