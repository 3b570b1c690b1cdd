"""Adapters merged into their base model, whose layers are in memory one at a time.

[Note: merging] The base model with its adapters is built on the meta device. Of each module around which peft has put
something, a copy gets its values from the files, peft merges it, and its tensors are written; then the copy goes. All
other weights are the base model's. Weights that are quantised in the base model's files are dequantised one by one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import places, tied_targets
from outcore.checkpoint.weights.load_plan import plan_loading
from outcore.checkpoint.weights.quantize import quantized
from outcore.core.errors import ConfigError
from outcore.model.quantized import WRAPPER

_PREFIX = "base_model.model."
"""What peft puts before the names of the base model."""
_AROUND = re.compile(r"(^|\.)(?:base_layer|original_module|token_adapter)(?=\.|$)")
_INT8_STEPS = 127
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Ways to initialise adapters that also change the weights below them."""

Check = Callable[[str, torch.Tensor], object]
"""Compares a weight of the base model with the one that adapters were trained on. Gets its name in peft's model."""


@final
class BaseWeights:
    """The weights of a base model's folder by name, in the dtype of the model."""

    def __init__(self, model: nn.Module, folder: Path, quantization: Any = None) -> None:
        """Settle where every weight comes from; only headers are read.

        Args:
            model: The base model, on the meta device. It is not changed.
            folder: Its files.
            quantization: What its configuration says of quantised weights in the files; None: there are none.

        Raises:
            ConfigError: The folder is no checkpoint of this model.
        """
        like: Any = copy.deepcopy(model)
        if quantization is not None:
            like = quantized(like, quantization if isinstance(quantization, Mapping) else quantization.to_dict())
        self._plan = plan_loading(like, folder, is_exact=False)
        self._places = {place.name: place.tensor for place in places(like)}
        self._dtypes = {place.name: place.tensor.dtype for place in places(model)}
        self.folder = folder

    def read(self, name: str) -> torch.Tensor:
        """Read a weight. Raises: ConfigError: It is not there. Memory: host, this weight."""
        tensor = self._places.get(name)
        if tensor is None or not self._plan.holds(tensor):
            raise ConfigError(f"--merge: expected '{name}' in the base model's files in '{self.folder}', but it is not")
        parts = self._plan.read_parts(tensor)
        value = self._plan.read(tensor) if WRAPPER not in parts else parts[WRAPPER]
        return (_dequantized(value, parts) if parts else value).to(self._dtypes[name])


def _dequantized(packed: Any, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """Open a quantised weight. Args: parts: See ``PackedWeights.read``."""
    if WRAPPER in parts:
        opened: torch.Tensor = packed.dequantize()
        return opened
    if "SCB" in parts:
        return packed.float() * (parts["SCB"].reshape(-1, 1).float() / _INT8_STEPS)
    from bitsandbytes.functional import QuantState, dequantize_4bit

    state = QuantState.from_dict(parts, device=torch.device("cpu"))
    full: torch.Tensor = dequantize_4bit(packed, state)
    return full


@final
class Merged:
    """The tensors of a base model with adapters merged in. See [Note: merging]."""

    def __init__(
        self, model: Any, base: BaseWeights, adapters: Callable[[str], torch.Tensor | None], check: Check
    ) -> None:
        """Read nothing yet.

        Args:
            model: peft's model with the adapters, on the meta device.
            base: The weights of the base model.
            adapters: Reads a tensor of the adapters by its name in peft's model. None: there is none of this name.
            check: Called with every weight of the base model.

        Raises:
            ConfigError: peft cannot merge such adapters.
        """
        _refuse_unmergeable(model)
        self._base, self._adapters, self._check = base, adapters, check
        self._layers = _layers(model.get_base_model())
        self._now: tuple[str, dict[str, torch.Tensor]] = "", {}
        """The layer that was merged last, and its tensors by name."""

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor by its name in the base model. Memory: host, this tensor, or its layer with the adapters."""
        parents = (name[:end] for end in (match.start() for match in re.finditer(r"\.", name)))
        layer = next((parent for parent in parents if parent in self._layers), None)
        if layer is None:
            return self._value(name, _PREFIX + name)
        if self._now[0] != layer:
            self._now = "", {}
            self._now = layer, self._merged(layer)
        return self._now[1][name]

    def unties(self, model: nn.Module) -> bool:
        """Whether tensors that are tied in the base model differ now. Args: model: The base model, on the meta device.

        Memory: host, two tensors that are tied.
        """
        targets = tied_targets(model)
        first: dict[int, str] = {}
        for place in sorted(places(model), key=lambda place: place.name in targets):
            source = first.setdefault(id(place.tensor), place.name)
            is_merged = any(name.rpartition(".")[0] in self._layers for name in (source, place.name))
            if source != place.name and is_merged and not torch.equal(self.read(source), self.read(place.name)):
                return True
        return False

    def _value(self, name: str, place: str) -> torch.Tensor:
        """Read a tensor. Args: name: In the base model. place: In peft's model, where it may be trained."""
        value = self._adapters(place)
        if value is None:
            value = self._base.read(name)
            self._check(place, value)
        return value

    def _merged(self, layer: str) -> dict[str, torch.Tensor]:
        """Let peft merge a copy of a layer. Returns: Its tensors, by their names in the base model."""
        from peft.utils.other import ModulesToSaveWrapper

        made = copy.deepcopy(self._layers[layer])
        is_replaced = isinstance(made, ModulesToSaveWrapper)
        for place in list(places(made)):
            if not place.is_persistent or (is_replaced and place.name.startswith("original_module.")):
                continue
            own = _AROUND.sub("", place.name).removeprefix(".")
            found = self._value(f"{layer}.{own}", f"{_PREFIX}{layer}.{place.name}")
            value = found.to(place.tensor.dtype, copy=True)
            if place.is_buffer:
                place.module._buffers[place.key] = value
            else:
                place.module._parameters[place.key] = nn.Parameter(value, requires_grad=False)
        if hasattr(made, "unload_and_optionally_merge_module"):
            merged = made.unload_and_optionally_merge_module(merge=True, safe_merge=False, adapter_names=None)
        else:
            made.merge()
            merged = made.get_base_layer()
        return {f"{layer}.{place.name}": place.tensor.detach() for place in places(merged)}


def _layers(base: nn.Module) -> dict[str, Any]:
    """The outermost modules that peft has put around modules of the base model, by name."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    found: dict[str, Any] = {}
    for name, module in base.named_modules(remove_duplicate=False):
        is_inside = any(name.startswith(f"{outer}.") for outer in list(found)[-1:])
        if isinstance(module, BaseTunerLayer | AuxiliaryTrainingWrapper) and not is_inside:
            found[name] = module
    return found


def _refuse_unmergeable(model: Any) -> None:
    config = model.peft_config["default"]
    kind = getattr(config.peft_type, "value", config.peft_type)
    if config.is_prompt_learning:
        raise ConfigError(f"--merge: expected adapters inside of layers, but {kind} is none; export without --merge")
    way = getattr(config, "init_lora_weights", True)
    if isinstance(way, str) and way.lower().startswith(_CHANGES_BASE):
        raise ConfigError(
            f"--merge: expected adapters over unchanged weights, but init_lora_weights='{way}' changes the weights "
            "below them; load base and adapters with peft, and call merge_and_unload there"
        )
