"""Small state that goes with a checkpoint, as JSON and tensors: schedulers, loaders, scalers, random generators.

[Note: small state] JSON has no tuples, no tensors, and no keys other than strings. These are written as objects with
one key that begins with ``$``. Values of tensors are in a safetensors file beside the JSON.
"""

from __future__ import annotations

import json
import random
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch

from outcore.core.errors import ConfigError
from outcore.device.device import Device
from outcore.memory.files.checkpoint_folder import small_file, write_new
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors
from outcore.memory.files.weights_layout import STORED_DTYPES

_SCALARS = (str, int, float, bool, type(None))
_OF_TENSOR: Mapping[str, Callable[[torch.Tensor], Any]] = {
    "$tensor": lambda tensor: tensor,
    "$array": lambda tensor: tensor.numpy(),
    "$number": lambda tensor: tensor.numpy()[()],
}
_OF_ITEMS: Mapping[str, Callable[[list[Any]], Any]] = {
    "$tuple": tuple,
    "$pairs": dict,
    "$counter": lambda pairs: Counter(dict(pairs)),
}


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str = "extra") -> Any:
    """Turn a value into one that JSON can hold.

    Args:
        value: Nested dicts, lists and tuples of numbers, strings, tensors and arrays.
        tensors: Filled with copies of the tensors in the value, by name.
        where: Name of the value, for errors.

    Raises:
        ConfigError: The value contains something else.
    """
    if type(value) in _SCALARS:
        return value
    if isinstance(value, list | tuple):
        items = [encode(item, tensors, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple": items}
    if type(value) in (dict, OrderedDict, Counter):
        if type(value) is not Counter and all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: encode(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [(encode(k, tensors, where), encode(v, tensors, f"{where}[{k!r}]")) for k, v in value.items()]
        return {"$counter" if type(value) is Counter else "$pairs": pairs}
    kind, tensor = _as_tensor(value, where)
    name = str(len(tensors))
    tensors[name] = tensor
    return {kind: name}


def _as_tensor(value: Any, where: str) -> tuple[str, torch.Tensor]:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.dtype in STORED_DTYPES:
        return "$tensor", value.detach().to("cpu", copy=True).contiguous()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        with suppress(TypeError, ValueError):  # long doubles, other byte orders
            return "$array" if isinstance(value, np.ndarray) else "$number", torch.from_numpy(np.array(value))
    raise ConfigError(
        f"save_checkpoint: expected numbers, strings, tensors, arrays, lists, tuples and dicts, but {where} is a "
        f"{type(value).__module__}.{type(value).__qualname__}; give its state_dict(), or leave it out"
    )


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Give back what ``encode`` was given. Args: tensor: Reads a tensor by its name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    key, item = next(iter(value.items())) if len(value) == 1 else ("", "")
    if key in _OF_TENSOR:
        return _OF_TENSOR[key](tensor(item))
    if key in _OF_ITEMS:
        return _OF_ITEMS[key](decode(item, tensor))
    return {name: decode(item, tensor) for name, item in value.items()}


def write_small(folder: Path, stem: str, value: Any) -> None:
    """Write a value into new files of a checkpoint's folder: ``stem.json``, and its tensors beside it.

    Raises:
        ConfigError: The value contains something that ``encode`` does not take; nothing was written.
        OSError: The system reported an error.
    """
    tensors: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, tensors, stem))
    if tensors:
        specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        write_safetensors(folder, specs, tensors.items(), stem=stem, max_shard_bytes=2**62, is_synced=False)
    write_new(folder / f"{stem}.json", text.encode() + b"\n")


def read_small(folder: Path, stem: str) -> Any:
    """Read back what ``write_small`` was given.

    Raises:
        ConfigError: A file cannot be read.
    """
    value = json.loads(small_file(folder / f"{stem}.json"))
    return decode(value, lambda name: WeightsDirectory.open(folder, stem).read(name))


def random_states(device: Device) -> dict[str, Any]:
    """States of torch's default generators, and of the global ones of Python and numpy."""
    return {
        "torch": device.rng_state(),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),  # noqa: NPY002 (what programs draw from)
    }


def restore_random_states(states: Mapping[str, Any], device: Device) -> None:
    """Set the generators to saved states. A generator of a device that the states do not fit stays as it is."""
    mine, saved = device.rng_state(), states["torch"]
    if isinstance(mine, tuple):
        host = saved[0] if isinstance(saved, tuple) else saved
        own = saved[1] if isinstance(saved, tuple) and saved[1].shape == mine[1].shape else mine[1]
        device.set_rng_state((host, own))
    else:
        device.set_rng_state(saved[0] if isinstance(saved, tuple) else saved)
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])  # noqa: NPY002
