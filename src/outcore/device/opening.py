"""Choice of the device: the only module that chooses an accelerator."""

from __future__ import annotations

import os

import torch

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.cpu import CpuDevice
from outcore.device.cuda import BACKEND, CudaDevice
from outcore.device.device import Device
from outcore.device.faults import NO_FAULTS, Faults
from outcore.device.race import RaceChecker
from outcore.memory.machine import processor_name


def open_device(
    torch_device: torch.device | str | None = None,
    faults: Faults = NO_FAULTS,
    race_checker: RaceChecker | None = None,
) -> Device:
    """Open a device and start its lanes.

    Args:
        torch_device: The device; None: the current CUDA or ROCm device if there is one, else the CPU.
        faults: For tests: faults to inject.
        race_checker: For tests: checks every operation.

    Raises:
        ConfigError: ``torch_device`` is not the name of a device.
        UnsupportedError: There is no such device here, or outcore does not drive its kind.
    """
    try:
        wanted = usual_device() if torch_device is None else torch.device(torch_device)
    except RuntimeError as error:
        raise ConfigError(
            f"device: expected 'cpu' or 'cuda' with an index or without, but got {torch_device!r}"
        ) from error
    if wanted.type == "cpu":
        return CpuDevice(faults, race_checker)
    if wanted.type != "cuda":
        raise UnsupportedError(
            f"device: expected 'cpu' or 'cuda' (NVIDIA or ROCm), but got '{wanted}'; pass device='cpu'"
        )
    if not torch.cuda.is_available():
        raise UnsupportedError(f"device: expected a GPU for '{wanted}', but {_why_no_gpu()}; or pass device='cpu'")
    if wanted.index is not None and wanted.index >= torch.cuda.device_count():
        raise UnsupportedError(
            f"device: expected a GPU for '{wanted}', but torch sees {torch.cuda.device_count()}, which begin at "
            "'cuda:0'; CUDA_VISIBLE_DEVICES may hide others"
        )
    return CudaDevice(wanted, faults, race_checker)


def device_of_rank(torch_device: torch.device | str | None) -> torch.device | str | None:
    """Return the device of one of several ranks: by default, the GPU whose index is ``LOCAL_RANK``.

    If there is no GPU, or if ``torch_device`` is not a GPU or has an index, it is returned as it is.

    Raises:
        ConfigError: There are fewer GPUs than ranks.
    """
    wanted = None if torch_device is None else torch.device(torch_device)
    if not torch.cuda.is_available() or (wanted is not None and (wanted.type != "cuda" or wanted.index is not None)):
        return torch_device
    number, count = int(os.environ.get("LOCAL_RANK", "0")), torch.cuda.device_count()
    if number >= count:
        raise ConfigError(
            f"prepare: expected a GPU for each rank, but this is LOCAL_RANK={number} and torch sees {count}; start as "
            "many processes per node as there are GPUs (torchrun --nproc-per-node), or pass device='cpu'"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def backends(torch_device: torch.device | str | None) -> str:
    """Return the backends of a process group for ranks with this device. Args: torch_device: As for ``open_device``."""
    wanted = usual_device() if torch_device is None else torch.device(torch_device)
    return "gloo" if wanted.type == "cpu" or BACKEND == "gloo" else f"cpu:gloo,cuda:{BACKEND}"


def reach_one_another() -> bool:
    """Whether GPUs of this machine can access each other's memory; looks at the first two."""
    return torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(0, 1)


def usual_device() -> torch.device:
    """The accelerator if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(torch_device: torch.device | str | None = None) -> str:
    """Return the manufacturer's name of a device, for the CPU with the number of threads that compute on it.

    Args:
        torch_device: As for ``open_device``.
    """
    wanted = torch.device(torch_device) if torch_device else usual_device()
    if wanted.type == "cpu":
        threads = torch.get_num_threads()
        return f"cpu ({processor_name()}, {threads} {'thread' if threads == 1 else 'threads'})"
    index = torch.cuda.current_device() if wanted.index is None else wanted.index  # one device has one name
    return f"{wanted.type}:{index} ({torch.cuda.get_device_name(index)})"


def _why_no_gpu() -> str:
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    if not (torch.version.cuda or torch.version.hip):
        return (
            f"this torch ({torch.__version__}) was built without CUDA and ROCm; install one that has it, see "
            "https://pytorch.org/get-started/locally"
        )
    return (
        f"this torch ({torch.__version__}, built for {built_for}) sees none; look at nvidia-smi or rocm-smi, the "
        "driver's version, and whether CUDA_VISIBLE_DEVICES hides it"
    )
