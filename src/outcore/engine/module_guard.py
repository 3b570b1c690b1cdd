"""What a prepared module does differently from an ordinary one.

``state_dict`` gives real values, ``load_state_dict`` writes them home, and what would move or copy its tensors behind
outcore's back raises.

[Note: own parameters] Every module that directly owns parameters handles just those, so a state dict is built parameter
by parameter, and nothing is read twice. Meanwhile stand-ins take their places in the module. The parameters themselves
must not get values in host memory: torch makes a new node for a parameter whose data changes device. Graphs made before
lead to the old node, and their gradients would be lost.
"""

from __future__ import annotations

import functools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.core.strides import row_major
from outcore.engine.streamed_weights import StreamedWeights
from outcore.engine.unit.absent import unfreezing_refusal
from outcore.engine.unit.live_port import Recovery
from outcore.engine.unit.unit import Beneath, Unit
from outcore.engine.values.parameter_values import ParameterValues, same_bytes
from outcore.model.quantized import TensorLocation, is_quantized, places_of
from outcore.model.wrapped import Wrapping, is_wrapped, tensors_in
from outcore.ranks.world import RefuseReplicas, refuse_process_group, refuse_wrapped
from outcore.torch_private import as_it_is, subclassed


def is_guarded(module: nn.Module) -> bool:
    """Whether a module belongs to a prepared model."""
    return isinstance(module.__dict__.get("__deepcopy__"), _RefuseCopies)


class ModuleGuard:
    """Installs hooks and refusals in a prepared model; ``remove`` takes them away."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[Unit],
        values: ParameterValues,
        weights: StreamedWeights,
        run: Recovery,
        *,
        num_ranks: int,
    ) -> None:
        self._model, self._units, self._values = model, units, values
        self._weights, self._run, self._num_ranks = weights, run, num_ranks
        self._undo: list[Callable[[], None]] = []
        self._known: list[tuple[dict[str, Parameter | None], str, str, Parameter]] = []
        self._wrapped = [(name, p) for name, p in model.named_parameters() if is_wrapped(p)]
        self._undo.append(model.register_forward_pre_hook(self._before_forward).remove)
        self._undo.append(model.register_forward_hook(self._after_forward, always_call=True).remove)
        self._put(model, {"zero_grad": _ZeroGrad(model, run)})
        for prefix, module in model.named_modules():
            self._guard_module(module)
            owned = {
                n: p
                for n, p in module.named_parameters(recurse=False, remove_duplicate=False)
                if id(p) in values.places
            }
            self._known += [
                (module._parameters, name, f"{prefix}.{name}" if prefix else name, param)
                for name, param in owned.items()
            ]
            if owned:
                self._guard_state_dict(module, owned)

    def refuse_if_changed(self) -> None:
        """Raise if a module has another parameter than at ``prepare``: it would not be trained.

        Raises:
            UnsupportedError: Naming the first.
        """
        for registered, name, full_name, param in self._known:
            if registered.get(name) is not param:
                refuse_wrapped("optimizer.step", self._model)
                raise UnsupportedError(
                    "expected the parameters that outcore.prepare() got, "
                    f"but '{full_name}' was replaced or removed since; resize embeddings, "
                    "tie weights and add adapters before prepare"
                )
        self._refuse_thawed()

    def _refuse_thawed(self) -> None:
        """Raise if a wrapped weight was unfrozen. Other weights are checked by their units."""
        thawed = next((name for name, param in self._wrapped if param.requires_grad), None)
        if thawed is not None:
            raise UnsupportedError(unfreezing_refusal(thawed))

    def refuse_if_adapted(self) -> None:
        """Raise if parameters were frozen since ``prepare`` and trainable ones were added, such as adapters.

        Raises:
            UnsupportedError: Naming the first.
        """
        if all(p.requires_grad for unit in self._units for p in unit.params[: unit.num_trainable]):
            return
        for name, param in self._model.named_parameters():
            if param.requires_grad and id(param) not in self._values.places:
                raise UnsupportedError(
                    f"expected the parameters that outcore.prepare() got, but '{name}' was added later and others were "
                    "frozen; add adapters before prepare, and give it the optimizer that has them"
                )

    def remove(self) -> None:
        """Make the model an ordinary module again."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    @as_it_is
    def _before_forward(self, *_: object) -> None:
        refuse_process_group("forward", self._num_ranks)
        self._refuse_thawed()
        self._weights.begin_forward()

    @as_it_is
    def _after_forward(self, *_: object) -> None:
        self._weights.end_forward()

    def _guard_module(self, module: nn.Module) -> None:
        if not any(id(p) in self._values.places for p in module.parameters()):
            return
        refusals = {
            "_apply": _RefuseMoves(module, self._values.places),
            "__deepcopy__": _RefuseCopies(module),
            "__reduce_ex__": _RefuseCopies(module),
            "_replicate_for_data_parallel": RefuseReplicas(),
            "_ddp_params_and_buffers_to_ignore": RefuseReplicas(),
        }
        if callable(getattr(module, "resize_token_embeddings", None)):
            refusals["resize_token_embeddings"] = _RefuseResizing(module)
        self._put(module, refusals)

    def _guard_state_dict(self, module: nn.Module, owned: dict[str, Parameter]) -> None:
        own = _OwnParameters(self._values, self._run, module, owned)
        self._put(module, {"_save_to_state_dict": own.save, "_load_from_state_dict": own.load})
        self._undo.append(module.register_load_state_dict_pre_hook(own.before_load).remove)

    def _put(self, module: nn.Module, methods: dict[str, Any]) -> None:
        """Let a module have other methods. ``remove`` gives it back those that it had itself, apart from its class."""
        attributes = module.__dict__
        for name, method in methods.items():
            was_own = name in attributes
            undo = functools.partial(attributes.__setitem__, name, attributes[name]) if was_own else None
            self._undo.append(undo or functools.partial(attributes.pop, name, None))
            attributes[name] = method


class _OwnParameters:
    """The parameters that one module owns directly, and their stand-ins. See [Note: own parameters]."""

    def __init__(self, values: ParameterValues, run: Recovery, module: nn.Module, owned: dict[str, Parameter]) -> None:
        self._values, self._run, self._registered, self._owned = values, run, module._parameters, owned
        self._module, self._lent = module, list[tuple[TensorLocation, torch.Tensor]]()
        self._save, self._load = module._save_to_state_dict, module._load_from_state_dict
        self._before: dict[str, list[torch.Tensor]] = {}

    def save(self, destination: Any, prefix: str, keep_vars: bool) -> None:  # noqa: FBT001 (torch calls it so)
        """Save real values; the dict keeps the tensors."""
        if keep_vars:
            raise UnsupportedError(
                f"state_dict(keep_vars=True) at '{prefix}': expected keep_vars=False, "
                "since the parameters themselves hold no values between calls; use state_dict(), "
                "or outcore.gathered(model)"
            )
        try:
            self._stand_in(may_change=False)
            self._save(destination, prefix, keep_vars)
        finally:
            self._put_back()

    def load(self, *arguments: Any) -> None:
        """Write home what was loaded."""
        try:
            self._load(*arguments)
            for name, before in self._before.items():
                loaded = tensors_in(self._registered[name])
                for param, value, was in zip(tensors_in(self._owned[name]), loaded, before, strict=True):
                    if not same_bytes(value.detach(), was):
                        self._values.write(param, value.detach())
        finally:
            self._put_back()

    def before_load(
        self, module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_: Any
    ) -> None:
        """Give torch tensors to copy into. This hook runs after others that rename what is loaded."""
        if local_metadata.get("assign_to_params_buffers"):
            raise UnsupportedError(
                f"load_state_dict(assign=True) at '{prefix}': expected assign=False, "
                "since assigning would replace the parameters that outcore and the optimizer know"
            )
        if any(prefix + name in state_dict for name in self._owned):
            self._stand_in(may_change=True)

    def _stand_in(self, *, may_change: bool) -> None:
        self._run.refuse_if_closed()
        for name, param in self._owned.items():
            unit, index = self._values.places[id(param)]
            if unit.presence.now is Beneath.GATHERED:
                continue
            values = [self._values.read(p) for p in tensors_in(param)]
            self._before[name] = values
            values = [value.clone() for value in values] if may_change else values
            if is_wrapped(param):
                self._registered[name] = Parameter(Wrapping(param).around(values), requires_grad=False)
                continue
            stand_in = subclassed(unit.presence.classes[index], values[0], False)  # noqa: FBT003
            self._registered[name] = stand_in
            if is_quantized(stand_in):
                stand_in.__dict__.update(param.__dict__)
                self._lend_parts(stand_in)

    def _lend_parts(self, weight: Parameter) -> None:
        """Let the tensors that belong to a quantised weight have their values, too."""
        for place in places_of(self._module, weight):
            part = place.tensor
            self._lent.append((place, part))
            place.put(self._values.read(part))

    def _put_back(self) -> None:
        for name in self._before:
            self._registered[name] = self._owned[name]
        for place, part in self._lent:
            place.put(part)
        self._before.clear()
        self._lent.clear()


class _ZeroGrad:
    """Stands in for ``model.zero_grad``, which also zeroes gradients that a backward left incomplete.

    A backward that ended in an exception may be noticed only later, when autograd's own thread lets go of it. Its
    gradients would then be incomplete again.
    """

    def __init__(self, model: nn.Module, run: Recovery) -> None:
        self._zero_grad, self._run = model.zero_grad, weakref.ref(run)

    def __call__(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002  (torch's signature)
        run = self._run()
        if run is not None:
            run.notice()
        self._zero_grad(set_to_none)


class _RefuseMoves:
    """Stands in for ``module._apply``, through which ``to``, ``half``, ``cuda``, ``share_memory`` and others go."""

    def __init__(self, module: nn.Module, places: Mapping[int, tuple[Unit, int]]) -> None:
        self._module, self._places = module, places

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:  # noqa: FBT001, FBT002
        """Let functions pass that change nothing, and refuse the others."""
        tensors = [*self._module.parameters(), *self._module.buffers()]
        for dtype, device, layout in dict.fromkeys((t.dtype, t.device, self._layout(t)) for t in tensors):
            probe = torch.empty_strided(*layout, dtype=dtype, device=device)
            result = function(probe)
            is_same = result is probe or (probe.is_cpu and _copies(function, probe, result))
            if not is_same or (probe.is_cpu and probe.is_shared()):
                raise UnsupportedError(
                    f"expected the prepared model to stay where and what it is ({probe.device}, {probe.dtype}), "
                    f"but {type(self._module).__name__} was asked to become {result.device}, "
                    f"{result.dtype}{', shared' if result is probe else ''}"
                    f"{', in another memory format' if result.stride() != probe.stride() else ''}; "
                    "choose device= and precision= in outcore.prepare(), and a memory format before it"
                )
        return self._module

    def _layout(self, tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return shape and strides of a tensor that may have a memory format; of any other, an empty one's."""
        if tensor.ndim not in (4, 5) or id(tensor) not in self._places:
            return (0,), (1,)
        unit, i = self._places[id(tensor)]
        spec = unit.spec.params[i]
        return spec.shape, spec.strides or row_major(spec.shape)


def _copies(function: Callable[[torch.Tensor], torch.Tensor], probe: torch.Tensor, result: torch.Tensor) -> bool:
    """Whether a function only copies a tensor: torch copies to cpu:0, which is Accelerate's name of a rank's CPU."""
    kept = (result.device, result.dtype, result.stride()) == (probe.device, probe.dtype, probe.stride())
    values = torch.frombuffer(bytearray(os.urandom(64)), dtype=torch.uint8)
    return kept and torch.equal(function(values.view(probe.dtype)).view(torch.uint8), values)


class _RefuseCopies:
    """Stands in for ``__deepcopy__`` and ``__reduce_ex__`` of a module."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *_: object) -> NoReturn:
        """Refuse, and say what to do instead."""
        raise UnsupportedError(
            f"expected a module of its own to copy or pickle, but this {type(self._module).__name__} belongs to "
            "outcore.prepare() and its weights are not inside it; copy it before prepare, or use state_dict(), "
            "outcore.named_tensors or outcore.save_pretrained"
        )


class _RefuseResizing:
    """Stands in for ``resize_token_embeddings`` of Transformers, which would put other parameters into the model."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,  # noqa: FBT001, FBT002 (Transformers' signature)
    ) -> nn.Module:
        """Return the input embeddings if they have this size, and refuse any other."""
        embeddings: nn.Module = self._module.get_input_embeddings()  # type: ignore[operator]
        rows = len(embeddings.weight)  # type: ignore[arg-type]
        wanted = rows if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            wanted += -wanted % pad_to_multiple_of
        if wanted != rows:
            raise UnsupportedError(
                f"resize_token_embeddings: expected the {rows} rows that the model had at outcore.prepare(), but "
                f"{wanted} are asked for; resize embeddings before prepare, and build the optimizer after it; "
                "outcore.close(model) ends a preparation"
            )
        return embeddings
