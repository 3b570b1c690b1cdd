"""First values of a model on the meta device: every module initialises itself, unit by unit, in memory of its own.

[Note: unit by unit] While a unit is initialised, its tensors in the model are fresh memory, and all others are meta
tensors. So modules above and beside it can run their initialisers unchanged: their writes to other tensors do nothing.
The same run with *everything* on meta, before any memory is taken, shows which tensors no module initialises.

Modules run children first, as in ``PreTrainedModel.initialize_weights`` and in the construction of modules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, cast, final

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import (
    StatePlace,
    is_adapter_model,
    is_pretrained_model,
    places,
    tied_targets,
)
from outcore.core.errors import ConfigError
from outcore.torch_private import TorchDispatchMode

Initialiser = Callable[[], object]


@final
class Initialisation:
    """Gives the tensors of a model their first values."""

    def __init__(self, model: nn.Module, tensors: Collection[int]) -> None:
        """Find an initialiser for every tensor. Allocates nothing and draws no random numbers.

        Args:
            model: The model, with all modules and tensors in place.
            tensors: Ids of the parameters and buffers to initialise; all on the meta device.

        Raises:
            ConfigError: No module initialises one of them, or an initialiser needs values.
        """
        self._model, self._tensors = model, frozenset(tensors)
        self._places = list(places(model))
        self._used = _places_that_count(model, self._places)
        self._twins = {id(p.tensor): _like(p.tensor, "meta") for p in self._places}
        self._order = list(_children_first(model))
        self._initialisers = dict(_initialisers(model))
        self._resets = self._find_resets()

    @torch.no_grad()
    def run(self, tensors: Collection[int]) -> dict[int, torch.Tensor]:
        """Initialise some of the tensors.

        Args:
            tensors: Ids, out of those given to the constructor.

        Returns:
            Id -> value in host memory. The model itself stays as it was.

        Memory: host, the tensors.
        """
        wanted = [id(p.tensor) for p in self._places if id(p.tensor) in tensors]
        fresh = {key: _like(self._twins[key], "cpu") for key in wanted}
        made, written = self._run(fresh, self._resets)
        missed = next((p.name for p in self._places if id(p.tensor) in fresh and id(p.tensor) not in written), None)
        if missed is not None:
            raise AssertionError(f"'{missed}' was initialised on meta, but not in memory")
        return made

    def _find_resets(self) -> set[int]:
        """Modules that must reset themselves as torch does, because their model leaves some of their tensors alone."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            fresh = {id(p.tensor): _like(p.tensor, "meta") for p in self._places if id(p.tensor) in self._tensors}
            _, written = self._run(fresh, set())
            resets = {id(p.module) for p in self._places if id(p.tensor) in self._tensors - written}
            _, written = self._run(fresh, resets)
        left = [p for p in self._places if id(p.tensor) in self._tensors - written]
        if left:
            what = "buffer" if left[0].is_buffer else "parameter"
            count = len({id(p.tensor) for p in left})
            raise ConfigError(
                f"expected modules to initialise their tensors on the meta device, but {what} '{left[0].name}' of "
                f"{type(left[0].module).__name__} is not ({count} in all); give the module a reset_parameters() that "
                "sets it, pass weights=, or build the model on the CPU"
            )
        return resets

    def _run(
        self, fresh: Mapping[int, torch.Tensor], resets: Collection[int]
    ) -> tuple[dict[int, torch.Tensor], set[int]]:
        """Run initialisers with ``fresh`` in the model; return the tensors there afterwards, and which were written."""
        scope = _scope(self._order, fresh)
        with _standing_in(self._places, self._used, self._twins, fresh), _Writes() as writes:
            before = {key: _storage(tensor) for key, tensor in fresh.items()}
            for module in scope:
                for initialise in self._of(module, resets):
                    _call(initialise, module)
            after = {id(p.tensor): _standing(p) for p in self._places if id(p.tensor) in fresh and p.name in self._used}
        replaced = {key for key, tensor in after.items() if _storage(tensor) != before[key]}
        return after, replaced | {key for key, storage in before.items() if storage in writes.storages}

    def _of(self, module: nn.Module, resets: Collection[int]) -> Iterator[Initialiser]:
        reset = _torch_initialiser(module)
        own = self._initialisers.get(id(module), [])
        if reset is not None and (not own or id(module) in resets):
            yield reset
        yield from own


def _initialisers(model: nn.Module) -> Iterator[tuple[int, list[Initialiser]]]:
    """Initialisers of libraries beyond torch's own: id of a module -> its initialisers, in order."""
    adapters: dict[int, list[Initialiser]] = {}
    inside: set[int] = set()  # the model that they were added to cannot initialise them, but what they wrap
    if is_adapter_model(model):
        adapters, inside = _adapter_initialisers(model)
    yield from adapters.items()

    def walk(module: nn.Module, owner: nn.Module | None) -> Iterator[tuple[int, list[Initialiser]]]:
        owner = module if is_pretrained_model(module) else owner
        if owner is not None and id(module) not in inside:
            yield id(module), [partial(cast("Any", owner)._init_weights, module)]
        for child in module.children():
            yield from walk(child, owner)

    yield from walk(model, None)


def _adapter_initialisers(model: nn.Module) -> tuple[dict[int, list[Initialiser]], set[int]]:
    """Initialisers of the layers that peft changed, and these layers with the modules that it added to them."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    found: dict[int, list[Initialiser]] = {}
    inside: set[int] = set()
    configs: Mapping[str, Any] = model.peft_config  # type: ignore[assignment]
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        base = {id(m) for m in layer.get_base_layer().modules()}
        added = [m for m in layer.modules() if m is not layer and id(m) not in base]
        inside |= {id(m) for m in added}
        if isinstance(layer, LoraLayer):
            inside.add(id(layer))
            adapters = [adapter for adapter in configs if adapter in layer.r]
            found[id(layer)] = [partial(layer.reset_lora_parameters, a, configs[a].init_lora_weights) for a in adapters]
        elif any(p.is_meta for m in added for p in m.parameters()):
            raise ConfigError(
                f"expected adapters on the meta device to be LoRA, but '{name}' is {type(layer).__name__}; load the "
                "base model with its values before adding adapters"
            )
    return found, inside


def _torch_initialiser(module: nn.Module) -> Initialiser | None:
    for name in ("reset_parameters", "_reset_parameters"):
        found = getattr(module, name, None)
        if callable(found):
            return found
    return None


def _call(initialise: Initialiser, module: nn.Module) -> None:
    try:
        initialise()
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"expected {type(module).__name__} to initialise itself while the rest of the model is on the meta device, "
            f"but it failed: {error!r}; pass weights=, or build the model on the CPU"
        ) from error


def _children_first(module: nn.Module) -> Iterator[nn.Module]:
    seen: set[int] = set()

    def walk(module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for child in module.children():
            yield from walk(child)
        yield module

    return walk(module)


def _scope(order: Iterable[nn.Module], fresh: Mapping[int, torch.Tensor]) -> list[nn.Module]:
    """Modules that hold one of the tensors, directly or below. Call it before other tensors stand in for them."""
    holding: set[int] = set()
    scope = []
    for module in order:
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if any(id(t) in fresh for t in own) or any(id(child) in holding for child in module.children()):
            holding.add(id(module))
            scope.append(module)
    return scope


def _places_that_count(model: nn.Module, everything: Iterable[StatePlace]) -> set[str]:
    """Names of one place per tensor. A tied parameter is initialised by its source, as if it were tied afterwards."""
    targets = tied_targets(model)
    first: dict[int, str] = {}
    for place in sorted(everything, key=lambda p: p.name in targets):  # sorting is stable
        first.setdefault(id(place.tensor), place.name)
    return set(first.values())


@contextmanager
def _standing_in(
    everything: Iterable[StatePlace],
    used: Collection[str],
    twins: Mapping[int, torch.Tensor],
    fresh: Mapping[int, torch.Tensor],
) -> Iterator[None]:
    # Read the slots now: buffers may have been replaced since the places were listed.
    standing = [(place, _slots(place)[place.key]) for place in everything]
    try:
        for place, _ in standing:
            key = id(place.tensor)
            _slots(place)[place.key] = fresh[key] if key in fresh and place.name in used else twins[key]
        yield
    finally:
        for place, tensor in standing:
            _slots(place)[place.key] = tensor


def _slots(place: StatePlace) -> dict[str, Any]:
    found = place.module._buffers if place.is_buffer else place.module._parameters
    return found


def _standing(place: StatePlace) -> torch.Tensor:
    tensor = _slots(place)[place.key]
    if not isinstance(tensor, torch.Tensor) or tensor.shape != place.tensor.shape:
        raise ConfigError(
            f"expected initialisation to keep the shape {tuple(place.tensor.shape)} of '{place.name}', but "
            f"{type(place.module).__name__} replaced it; build the model on the CPU"
        )
    return tensor.detach()


def _like(tensor: torch.Tensor, device: str) -> torch.Tensor:
    # Keep the strides: random numbers are drawn in the order of memory.
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Writes(TorchDispatchMode):
    """Records the storages that operations write to, also through ``.data`` and views."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[i] if i < len(args) else kwargs.get(argument.name)
                for tensor in value if isinstance(value, list | tuple) else [value]:
                    if isinstance(tensor, torch.Tensor):
                        self.storages.add(_storage(tensor))
        return func(*args, **kwargs)
