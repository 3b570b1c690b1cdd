"""Weights that a checkpoint holds quantised: the packed bytes, and beside them the tensors that say what they mean."""

from __future__ import annotations

import json
import math
from typing import Any, final

import torch

from outcore.core.errors import ConfigError
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.planning.units.quantized import is_quantized, kind_of
from outcore.saving.weights.conversions import Group

_STATE = ".quant_state.bitsandbytes__"
_IN_4_BITS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES, _LAYOUT = "SCB", "weight_format"  # of 8 bits, beside the weight


@final
class PackedWeights:
    """Those of a checkpoint, in the form in which bitsandbytes and Transformers write them."""

    def __init__(self, directory: WeightsDirectory) -> None:
        """Args: directory: Only names are looked at."""
        self._directory = directory
        names = directory.names()
        known = set(names)
        self._parts: dict[str, dict[str, str]] = {}
        for name in names:
            weight, state, kind = name.partition(_STATE)
            if state:
                ends = [end for end in _IN_4_BITS if weight + end in known]
                self._parts[weight] = {(state + kind)[1:]: name, **{end[1:]: weight + end for end in ends}}
            elif name.endswith(f".{_SCALES}") and (weight := name.removesuffix(_SCALES) + "weight") in known:
                layout = name.removesuffix(_SCALES) + _LAYOUT
                self._parts[weight] = {_SCALES: name, **({_LAYOUT: layout} if layout in known else {})}
        self.parts = frozenset(part for parts in self._parts.values() for part in parts.values())
        """Names of tensors that only say what packed bytes mean."""

    def holds(self, group: Group) -> bool:
        """Whether what a group of tensors makes is such a weight."""
        return group.converter is None and group.sources[0][1] in self._parts

    def said(self, group: Group) -> str:
        """How the weight is quantised.

        Raises:
            ConfigError: What the checkpoint says of it is not what bitsandbytes writes.
        """
        name = group.sources[0][1]
        parts, shape = self._parts[name], self._directory.shape(name)
        if _SCALES in parts:
            dtype, rows = self._directory.dtype(name), self._directory.shape(parts[_SCALES])
            if dtype != torch.int8 or math.prod(rows) != shape[0]:
                raise ConfigError(
                    f"weights '{self._directory.path}': expected '{name}' in int8, with a scale for each of its "
                    f"{shape[0]} rows, but got {dtype} and scales of shape {rows}; fetch the files again"
                )
            is_by_row = _LAYOUT not in parts or not self._directory.read(parts[_LAYOUT]).any()
            return f"8 bits by row of shape {shape}" if is_by_row else "8 bits in another layout than by row"
        [state] = [part for part in parts.values() if _STATE in part]
        try:
            found = json.loads(self._directory.read(state).numpy().tobytes())
            self._refuse_damaged(name, parts, found)
            nested = found["nested_blocksize"] if "nested_absmax" in parts else 0
            return _said(found["quant_type"], found["blocksize"], nested, found["shape"], self._directory.dtype(name))
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(
                f"weights '{self._directory.path}': expected in '{state}' what bitsandbytes writes of a weight in 4 "
                f"bits, but got {error!r}; fetch the files again"
            ) from error

    def _refuse_damaged(self, name: str, parts: dict[str, str], found: dict[str, Any]) -> None:
        """Raise a ValueError if parts are missing, or others than the description says."""
        is_nested = "nested_absmax" in parts
        needed = ["absmax", "quant_map", *["nested_absmax", "nested_quant_map"] * is_nested]
        fields = ["dtype", *["nested_dtype", "nested_offset"] * is_nested]
        if missing := [part for part in needed if part not in parts] + [
            field for field in fields if field not in found
        ]:
            raise ValueError(f"no {', '.join(missing)}")
        count = math.prod(found["shape"])
        wanted = {name: -(-count // 2), parts["absmax"]: -(-count // found["blocksize"])}
        for part, numel in wanted.items():
            stored = math.prod(self._directory.shape(part)) * (
                self._directory.dtype(part).itemsize if part == name else 1
            )
            if stored != numel:
                raise ValueError(f"'{part}' with {stored} values in place of {numel}")

    def read(self, group: Group) -> dict[str, torch.Tensor]:
        """What the bytes of a weight mean, by the names that bitsandbytes gives it; nothing of other weights.

        Memory: host, these tensors.
        """
        parts = self._parts[group.sources[0][1]] if self.holds(group) else {}
        return {end: self._directory.read(name) for end, name in parts.items()}


def said_of(param: Any) -> str:
    """How a weight of a model is quantised. Args: param: Of bitsandbytes, or any other."""
    if not kind_of(param):
        return type(param).__qualname__ if is_quantized(param) else str(param.dtype)
    if kind_of(param) == "Int8Params":
        return f"8 bits by row of shape {tuple(param.shape)}"
    state = param.quant_state
    nested = state.state2.blocksize if state.nested else 0
    return _said(state.quant_type, state.blocksize, nested, state.shape, param.dtype)


def _said(kind: str, blocksize: int, nested: int, shape: Any, dtype: torch.dtype) -> str:
    scales = f", their scales in blocks of {nested}" if nested else ""
    return f"{kind} of shape {tuple(shape)} in blocks of {blocksize}{scales}, stored as {dtype}"
