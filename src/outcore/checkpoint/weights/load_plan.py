"""Which tensor of a checkpoint becomes which tensor of a model: settled and checked before any memory is taken.

Only headers are read, except where a checkpoint has both names of a tie: their tensors must be equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import (
    Group,
    Rules,
    StatePlace,
    is_adapter_model,
    is_ignored,
    loading_groups,
    places,
    remember_used,
    tied_targets,
)
from outcore.checkpoint.weights.packed import PackedWeights, said_of
from outcore.core.errors import ConfigError
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.model.quantized import full_shape, is_quantized
from outcore.model.wrapped import tensors_in

_SHOWN = 5
_WRAPPERS = re.compile(r"(?<=\.)(base_layer|original_module|modules_to_save\.[^.]+)\.")
"""Parts of names that peft adds where it wraps a module, to any depth: experts are wrapped for each parameter."""


@final
class LoadPlan:
    """Where in a checkpoint every tensor of a model comes from. Made by ``plan_loading``."""

    def __init__(self, model: nn.Module, directory: WeightsDirectory, rules: Rules, packed: PackedWeights) -> None:
        self._model, self._directory, self._rules, self._packed = model, directory, rules, packed
        self._sources: dict[int, tuple[Group, str]] = {}
        self._made: tuple[Group, dict[str, torch.Tensor]] | None = None

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the checkpoint has a tensor of the model."""
        return id(tensor) in self._sources

    def add(self, tensor: torch.Tensor, group: Group, name: str) -> None:
        """Note the group of the checkpoint's tensors that makes a tensor of the model."""
        self._sources[id(tensor)] = group, name

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read a tensor's value, in the checkpoint's dtype.

        Memory: host, this tensor. If the checkpoint has it in another form, its whole group, until the next read.
        """
        group, name = self._sources[id(tensor)]
        if group.converter is None:
            self._made = None
            return self._directory.read(group.sources[0][1])
        if self._made is None or self._made[0] is not group:
            self._made = None
            self._made = group, group.convert(self._directory.read)
        return self._made[1][name]

    def read_parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Read the tensors that give a quantised weight's bytes their meaning; none for other weights.

        Raises:
            ConfigError: One of them has nan or infinite values.
        """
        group, name = self._sources[id(tensor)]
        parts = self._packed.read(group)
        for end, value in parts.items():
            for inner in tensors_in(value):
                if inner.dtype.itemsize > 1:  # elements of one byte are codes, not values
                    self._refuse_infinite(f"{name}.{end}", inner)
        return parts

    def read_finite(self, tensor: torch.Tensor) -> torch.Tensor:
        """Read a weight; see ``read``. Packed bytes are not checked: they are not values, whatever their stored dtype.

        Raises:
            ConfigError: The weight has nan or infinite values, which no step could mend.
        """
        group, name = self._sources[id(tensor)]
        value = self.read(tensor)
        if not self._packed.holds(group):
            self._refuse_infinite(name, value)
        return value

    def _refuse_infinite(self, name: str, value: torch.Tensor) -> None:
        if value.numel() and not all(bound.isfinite() for bound in torch.aminmax(value)):  # as fast as memory
            count = value.numel() - int(value.isfinite().sum())
            raise ConfigError(
                f"weights '{self._directory.path}', tensor '{name}': expected finite values, but {count:,} of "
                f"{value.numel():,} are nan or infinite; fetch the files again, or name a checkpoint from before its "
                "training diverged"
            )

    def close(self) -> None:
        """Release the group that was read last."""
        self._made = None

    def remember_rules(self) -> None:
        """Leave the rules that were used with the model, for when it is saved."""
        remember_used(self._model, self._rules)


def plan_loading(model: nn.Module, path: str | Path, *, is_exact: bool = True) -> LoadPlan:
    """Match a checkpoint directory with a model.

    Names match as ``from_pretrained`` matches them: base-model prefixes, tied weights, renamed and fused tensors.
    A model wrapped by peft takes its base model's weights; adapters come from elsewhere.

    Args:
        model: On any device, also meta.
        path: Directory with ``model.safetensors``, or with shards and their index.
        is_exact: Whether the checkpoint must have all tensors of the model, and no others.

    Raises:
        ConfigError: Tensors are missing, unexpected, of another shape, quantized otherwise, or cannot be converted.

    Memory: host, headers; two tensors of a tie that the checkpoint has twice, while they are compared.
    """
    directory = WeightsDirectory.open(path)
    base, state = _state(model)
    packed = PackedWeights(directory)
    groups, rules = loading_groups(base, packed.names, state)
    plan = LoadPlan(base, directory, rules, packed)
    loaded: dict[str, Group] = {}
    unexpected: list[str] = []
    mismatched: list[str] = []
    quantized: list[str] = []
    for group in groups:
        for name, made in _shapes(group, directory, packed).items():
            if name in state:
                loaded[name] = group
                if packed.holds(group):
                    quantized += _packed_otherwise(name, packed.said(group), state[name][0])
                    continue
                mismatched += _mismatch(name, made, state[name][0])
                quantized += _quantized(name, made, state[name][0])
            elif not is_ignored(base, name, when="unexpected"):
                unexpected += [source for _, source in group.sources]
    _refuse_quantized(path, quantized)
    _refuse_mismatch(path, mismatched)
    _assign(plan, state, loaded, tied_targets(base), directory)
    if is_exact:
        _refuse_names(path, _missing(base, plan, state), list(dict.fromkeys(unexpected)), directory.names())
    return plan


def _state(model: nn.Module) -> tuple[nn.Module, dict[str, list[StatePlace]]]:
    """The model that a checkpoint is of, and its tensors by the names that they have in the checkpoint.

    An adapter model wraps the base model's modules, so a base name may have several places.
    """
    if not is_adapter_model(model):
        return model, {p.name: [p] for p in places(model) if p.is_persistent}
    base = model.get_base_model()  # type: ignore[operator]
    state: dict[str, list[StatePlace]] = {}
    adapters = adapter_tensors(model)
    for place in places(base):
        is_trained_copy = ".modules_to_save." in f".{place.name}" and not place.tensor.is_meta
        if place.is_persistent and id(place.tensor) not in adapters and not is_trained_copy:
            name = _WRAPPERS.sub("", f".{place.name}").removeprefix(".")
            state.setdefault(name, []).append(place)
    return base, state


def _missing(model: nn.Module, plan: LoadPlan, state: Mapping[str, Sequence[StatePlace]]) -> list[str]:
    """Names that the checkpoint lacks. In a model partly on the meta device, tensors with values need not be there."""
    wanted = {name: ps[0].tensor for name, ps in state.items() if not plan.holds(ps[0].tensor)}
    if any(p.tensor.is_meta for ps in state.values() for p in ps):
        wanted = {name: tensor for name, tensor in wanted.items() if tensor.is_meta}
    return [name for name in wanted if not is_ignored(model, name, when="missing")]


def adapter_tensors(model: nn.Module) -> set[int]:
    """Ids of the tensors that peft added to a model's layers, without copies of base modules (``modules_to_save``)."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [m for m in model.modules() if isinstance(m, BaseTunerLayer)]
    base = {id(p.tensor) for layer in layers for p in places(layer.get_base_layer())}
    return {id(p.tensor) for layer in layers for p in places(layer)} - base


def _shapes(group: Group, directory: WeightsDirectory, packed: PackedWeights) -> Mapping[str, torch.Tensor]:
    """What a group makes, as meta tensors."""
    try:
        return group.convert(packed.shapes_of)
    except ConfigError:
        raise
    except Exception as error:  # the library's rules may raise anything
        raise ConfigError(
            f"weights '{directory.path}': expected tensors that can be converted to '{group.target}', but converting "
            f"'{group.sources[0][1]}' failed: {error!r}; load the model with from_pretrained instead of weights="
        ) from error


def _mismatch(name: str, made: torch.Tensor, place: StatePlace) -> list[str]:
    expected = full_shape(place.module, place.tensor)
    if made.shape != expected:
        return [f"'{name}' has shape {expected} in the model and {tuple(made.shape)} in the checkpoint"]
    return []


def _quantized(name: str, made: torch.Tensor, place: StatePlace) -> list[str]:
    is_full = place.tensor.is_floating_point() or is_quantized(place.tensor)
    if is_full and (not made.is_floating_point() or made.dtype.itemsize < 2):
        return [f"'{name}' is {place.tensor.dtype} in the model and quantized ({made.dtype}) in the checkpoint"]
    return []


def _packed_otherwise(name: str, said: str, place: StatePlace) -> list[str]:
    expected = said_of(place.tensor)
    return [] if said == expected else [f"'{name}' is {expected} in the model and quantized ({said}) in the checkpoint"]


def _assign(
    plan: LoadPlan,
    state: Mapping[str, Sequence[StatePlace]],
    loaded: Mapping[str, Group],
    targets: frozenset[str],
    directory: WeightsDirectory,
) -> None:
    # Sources of ties first: a tensor under the name of a target is only used if there is no other.
    first: dict[int, str] = {}
    for name in sorted(loaded, key=lambda name: name in targets):
        for place in state[name]:
            known = first.setdefault(id(place.tensor), name)
            if known == name:
                plan.add(place.tensor, loaded[name], name)
            elif not torch.equal(plan.read(place.tensor), _read(loaded[name], name, directory)):
                raise ConfigError(
                    f"weights '{directory.path}': expected equal tensors under '{known}' and '{name}', which are one "
                    "parameter in the model, but they differ; build the model untied (tie_word_embeddings=False)"
                )


def _read(group: Group, name: str, directory: WeightsDirectory) -> torch.Tensor:
    return group.convert(directory.read)[name]


def _refuse_quantized(path: str | Path, quantized: Sequence[str]) -> None:
    if quantized:
        raise ConfigError(
            f"weights '{path}': expected weights in full precision, or quantized as those of the model, but "
            f"{_few(quantized)}; name the model that it was quantized from, or, where bitsandbytes or torchao did "
            "that, pass the model through outcore.quantized(model, model.config.quantization_config)"
        )


def _refuse_mismatch(path: str | Path, mismatched: Sequence[str]) -> None:
    if mismatched:
        raise ConfigError(
            f"weights '{path}': expected a checkpoint of this model, but {_few(mismatched)}; build the model from the "
            "checkpoint's own config.json"
        )


def _refuse_names(path: str | Path, missing: Sequence[str], unexpected: Sequence[str], names: Sequence[str]) -> None:
    if not missing and not unexpected:
        return
    parts = [
        f"{len(found)} of the {where} tensors {what} ({_few(found, quote=repr)})"
        for found, where, what in (
            (missing, "model's", "are missing"),
            (unexpected, f"checkpoint's {len(names)}", "are unexpected"),
        )
        if found
    ]
    raise ConfigError(
        f"weights '{path}': expected exactly the tensors of this model, but {' and '.join(parts)}; build the model "
        "from the checkpoint's own config.json and with the class that it was saved from"
    )


def _few(items: Sequence[str], quote: Callable[[str], str] = str) -> str:
    shown = ", ".join(quote(item) for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}, and {len(items) - _SHOWN} more"
