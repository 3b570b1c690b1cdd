"""Quantised weights in a checkpoint: packed bytes, and beside them the tensors that give the bytes their meaning."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, final

import torch

from outcore.checkpoint.weights.conversions import Group
from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.model.quantized import WRAPPER, is_quantized, kind_of
from outcore.model.wrapped import Wrapping, is_wrapped, tensors_in

_STATE = ".quant_state.bitsandbytes__"
_IN_4_BITS = (".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map")
_SCALES, _LAYOUT = "SCB", "weight_format"  # beside a weight in 8 bits


@final
class PackedWeights:
    """Quantised weights of a checkpoint, in the form in which bitsandbytes, torchao and Transformers write them.

    For a weight of torchao, a file has the tensors inside of the wrapper, and its header describes the wrapper.
    """

    def __init__(self, directory: WeightsDirectory) -> None:
        """Find them. Args: directory: Only its names and metadata are looked at."""
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
        self._wrapped = {name: text for name, text in directory.metadata.items() if self._is_wrapper(name, text, known)}
        self.parts = frozenset(part for parts in self._parts.values() for part in parts.values())
        """Names of tensors that only give packed bytes their meaning, or are inside of wrappers."""
        self.names = [*(name for name in names if name not in self.parts), *self._wrapped]
        """Names of weights."""

    def _is_wrapper(self, name: str, text: str, known: set[str]) -> bool:
        module, _, weight = name.rpartition(".")
        try:
            inside = {f"{module}._{weight}_{end}" for end in json.loads(text)["_tensor_data_names"]}
        except (ValueError, KeyError, TypeError):  # the metadata describes something else
            return False
        self._parts |= {name: {part: part for part in inside}} if known.issuperset(inside) else {}
        return name in self._parts

    def shapes_of(self, name: str) -> torch.Tensor:
        """A weight as the model sees it, on the meta device."""
        return self._wrapper(name, self._meta) if name in self._wrapped else self._meta(name)

    def _meta(self, name: str) -> torch.Tensor:
        return torch.empty(self._directory.shape(name), dtype=self._directory.dtype(name), device="meta")

    def _wrapper(self, name: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The wrapper that torchao makes of the tensors inside."""
        refuse_missing("torchao", extra=None)
        from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

        said = {name: self._wrapped[name], "tensor_names": json.dumps([name])}
        try:
            made, _ = unflatten_tensor_state_dict({part: read(part) for part in self._parts[name]}, said)
            wrapper: torch.Tensor = made[name]
        except (KeyError, TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
            raise ConfigError(
                f"weights '{self._directory.path}': expected '{name}' as torchao writes it, but got {error!r}; fetch "
                "the files again, or load the model with from_pretrained"
            ) from error
        return wrapper

    def holds(self, group: Group) -> bool:
        """Whether a group of tensors makes a quantised weight."""
        return group.converter is None and group.sources[0][1] in self._parts

    def said(self, group: Group) -> str:
        """Describe how the weight is quantised.

        Raises:
            ConfigError: The checkpoint's description of it is not as bitsandbytes or torchao writes it.
        """
        name = group.sources[0][1]
        if name in self._wrapped:
            return said_of(self._wrapper(name, self._meta))
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
        """Raise a ValueError if parts are missing, or do not match the description."""
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
        """Read the tensors that give a weight's bytes their meaning, by bitsandbytes' names; none for other weights.

        A wrapper is returned as a whole, under the name ``WRAPPER``.

        Memory: host, these tensors.
        """
        if (name := group.sources[0][1]) in self._wrapped:
            return {WRAPPER: self._wrapper(name, self._directory.read)}
        parts = self._parts[group.sources[0][1]] if self.holds(group) else {}
        return {end: self._directory.read(name) for end, name in parts.items()}


def said_of(param: Any) -> str:
    """Describe how a weight of a model is quantised. Args: param: Any parameter, quantised or not."""
    if is_wrapped(param):
        inside = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors_in(param))
        return f"{Wrapping(param)}, of {inside}"
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
