"""One call of a unit: bind its weights, run the block, and in backward run it again or walk the graph that was kept.

[Note: the inner graph] The block runs on detached inputs in the caller's grad mode, outside of autograd's view of the rest of
the model. ``UnitFunction`` then stands in the outer graph for the whole block: inputs and foreign leaves in, outputs out.
Under ``recompute`` saved tensors are dropped as they are made (running under no_grad instead would pick other attention
kernels and give another loss); under ``keep`` they stay, but weights are saved as their place in the unit, since the
slot will hold another unit by then.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, cast

import torch
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.runtime.device import Device
from outcore.runtime.replay import ForwardState, autocast_cache_off
from outcore.runtime.structure import Structure, take_apart
from outcore.runtime.unit import Unit
from outcore.runtime.weights import Phase, Weights

_autograd = cast("Any", torch._C)


class GradientSink(Protocol):
    """Where the parameter gradients of a backward go."""

    def expect(self, unit: Unit) -> Callable[[], None]:
        """A call was made whose gradients will come; the returned function says that they have come, or never will."""

    def deposit(self, unit: Unit, grads: dict[int, torch.Tensor]) -> None:
        """Take gradients of trainable parameters, by index."""

    def close_if_complete(self, unit: Unit) -> None:
        """All gradients of a call have been deposited."""


@dataclass(eq=False)
class Call:
    """What backward needs to know of one forward."""

    inputs: Structure
    wants_grad: list[bool]
    foreign: list[torch.Tensor]
    shapes: list[torch.Size]
    outputs: list[torch.Tensor]
    """Only until they were handed to the outer graph."""
    settle: Callable[[], None]
    state: ForwardState | None = None
    graph: tuple[list[torch.Tensor], list[torch.Tensor]] | None = None
    returned: list[tuple[weakref.ref[torch.Tensor], int]] = field(default_factory=list)

    def __del__(self) -> None:
        self.settle()


class UnitCall:
    """Stands in for ``module.forward`` of a unit."""

    def __init__(self, unit: Unit, index: int, weights: Weights, sink: GradientSink, device: Device) -> None:
        """Take over ``unit.module.forward``."""
        self.unit, self._index, self._weights, self._sink, self._device = unit, index, weights, sink, device
        self._forward = unit.module.forward
        # Makes backward run when no input needs a gradient, and tells whether the caller wants parameter gradients at all.
        self._anchor = torch.empty(0, requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node
        functools.update_wrapper(self, self._forward)
        self._trains = any(p.requires_grad for p in unit.module.parameters())

    def restore(self) -> None:
        """Give ``forward`` back."""
        self.unit.module.__dict__.pop("forward", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        """Refuse: a copy would stream through the original's memory."""
        raise UnsupportedError(
            f"expected a model of its own to copy, but '{self.unit.label}' belongs to outcore.prepare(); copy the model before "
            "prepare, or load the copy from outcore.save_pretrained or model.state_dict()"
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse: lanes and arenas cannot be pickled."""
        raise UnsupportedError(
            f"expected model.state_dict() or outcore.save_pretrained to save, but the module '{self.unit.label}' itself is being "
            "pickled; its weights are not inside it"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        tensors, structure = take_apart(_without_caches(args, kwargs, self._where), self._where)
        if not torch.is_grad_enabled() or not (self._trains or any(t.requires_grad for t in tensors)):
            return self._run_plain(args, kwargs)
        wants_grad = [t.requires_grad for t in tensors]
        inner = [t.detach().requires_grad_() if w else t for t, w in zip(tensors, wants_grad, strict=True)]
        versions = [t._version for t in tensors]
        recomputes = self.unit.plan.policy == "recompute"
        state = ForwardState(self.unit.modules, self._device) if recomputes else None
        start = cast("Any", self._anchor.view_as(self._anchor).grad_fn)._sequence_nr()
        with self._bound(Phase.FORWARD):
            saving = _drop_saved() if recomputes else self._save_weights_by_place()
            outputs, out_structure = self._run(structure, inner, saving)
            self._refuse_weights_outside(outputs)
        if state is not None:
            state.drop_unchanged()
        if [t._version for t in tensors] != versions:
            raise UnsupportedError(f"{self._where} changed one of its arguments in place, which recompute would do twice; copy it first")
        made = [t for t in outputs if t.grad_fn is not None]
        foreign = foreign_leaves(made, inner, self.unit.params, start, self._where)
        call = Call(structure, wants_grad, foreign, [t.shape for t in made], made, _nothing, state)
        if not recomputes:
            call.graph = inner, list(made)
        if made:
            call.settle = self._sink.expect(self.unit)
            given = [t for t, w in zip(tensors, wants_grad, strict=True) if w] + call.foreign
            results = iter(UnitFunction.apply(self, call, tensors if recomputes else [], self._anchor, *given))  # type: ignore[no-untyped-call]
        outer = {id(i): t for i, t in zip(inner, tensors, strict=True)}
        return out_structure.fill([outer.get(id(t), t) if t.grad_fn is None else next(results) for t in outputs])

    @property
    def _where(self) -> str:
        return f"unit '{self.unit.label}'"

    def _run_plain(self, args: Any, kwargs: Any) -> Any:
        with self._bound(Phase.INFERENCE), autocast_cache_off():
            result = self._forward(*args, **kwargs)
            tensors, _ = take_apart(result, self._where)
            self._refuse_weights_outside(tensors)
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            raise UnsupportedError(
                f"{self._where} is frozen and no argument needs a gradient, but its result does: a tensor with gradient reached it by "
                "closure; pass it as an argument"
            )
        return result

    @contextmanager
    def _bound(self, phase: Phase) -> Iterator[None]:
        self._weights.bind(self._index, phase)
        try:
            yield
        finally:
            self._weights.unbind(self._index)

    def _run(self, structure: Structure, tensors: Sequence[torch.Tensor], saving: Any) -> tuple[list[torch.Tensor], Structure]:
        args, kwargs = structure.fill(tensors)
        try:
            with torch.enable_grad(), saving, autocast_cache_off():
                return take_apart(self._forward(*args, **kwargs), self._where)
        except RuntimeError as error:
            if "leaf Variable that requires grad" in str(error):
                raise UnsupportedError(f"{self._where} changes one of its arguments in place, which cannot be recomputed; copy it first") from error
            raise

    def _refuse_weights_outside(self, outputs: Sequence[torch.Tensor]) -> None:
        buffer = None if self.unit.is_resident else self.unit.device_buffer()
        if buffer is None:
            return
        base = buffer.bytes.untyped_storage().data_ptr()
        for tensor in outputs:
            if tensor.layout is torch.strided and tensor.untyped_storage().data_ptr() == base:
                raise UnsupportedError(
                    f"{self._where} returns one of its weights (shape {tuple(tensor.shape)}), whose memory will hold another unit soon; "
                    "return a clone"
                )

    def _save_weights_by_place(self) -> Any:
        buffer = None if self.unit.is_resident else self.unit.device_buffer()
        if buffer is None:
            return _keep_saved()
        base, first = buffer.bytes.untyped_storage().data_ptr(), buffer.bytes.storage_offset()
        unit = self.unit

        def pack(tensor: torch.Tensor) -> torch.Tensor | _Placed:
            if tensor.layout is not torch.strided or tensor.untyped_storage().data_ptr() != base:
                return tensor
            offset = tensor.storage_offset() * tensor.element_size() - first
            return _Placed(offset, tensor.dtype, tensor.size(), tensor.stride())

        def unpack(saved: torch.Tensor | _Placed) -> torch.Tensor:
            if isinstance(saved, torch.Tensor):
                return saved
            now = unit.device_buffer()
            if now is None or not unit.num_bound:
                raise AssertionError(f"unit '{unit.label}' is not bound in its backward")
            return saved.at(now.bytes)

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def backward(self, call: Call, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs that want one and of foreign leaves; those of parameters go to the sink."""
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"{self._where}: expected a backward without create_graph=True; double backward through streamed weights is not supported"
            )
        keeps_graph = bool(_autograd._autograd._get_current_graph_task_keep_graph())
        takes_params = bool(_autograd._will_engine_execute_node(self._anchor_node))
        params = self.unit.params[: self.unit.num_trainable] if takes_params else []
        with self._bound(Phase.BACKWARD):
            inner, outputs = self._graph(call, saved)
            if not keeps_graph:
                call.graph = None
            sources: list[torch.Tensor] = [t for t, w in zip(inner, call.wants_grad, strict=True) if w]
            pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
            found = torch.autograd.grad(
                [o for o, _ in pairs],
                [*sources, *call.foreign, *params],
                [g for _, g in pairs],
                retain_graph=keeps_graph,
                allow_unused=True,
            ) if pairs else [None] * (len(sources) + len(call.foreign) + len(params))
            outer = len(sources) + len(call.foreign)
            if takes_params:
                self._sink.deposit(self.unit, {i: g for i, g in enumerate(found[outer:]) if g is not None})
        if takes_params:
            call.settle()
            self._sink.close_if_complete(self.unit)
        return list(found[:outer])

    def _graph(self, call: Call, saved: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Inner inputs and outputs: kept, or made again."""
        if call.state is None:
            if call.graph is None:
                raise UnsupportedError(
                    f"{self._where}: expected one backward through this graph, but it is the second; pass retain_graph=True to the first"
                )
            for reference, version in call.returned:
                tensor = reference()
                if tensor is not None and tensor._version != version:
                    raise UnsupportedError(f"a result of {self._where} was changed in place after the call; copy it first, or plan recompute")
            return call.graph
        inner = [t.detach().requires_grad_() if w else t for t, w in zip(saved, call.wants_grad, strict=True)]
        with call.state.restored():
            outputs, _ = self._run(call.inputs, inner, _keep_saved())
        made = [t for t in outputs if t.grad_fn is not None]
        if [t.shape for t in made] != call.shapes:
            raise UnsupportedError(
                f"{self._where}: recompute gave results of shapes {[tuple(t.shape) for t in made]}, but forward gave "
                f"{[tuple(shape) for shape in call.shapes]}; the block depends on something besides its arguments, random numbers and buffers"
            )
        return inner, made


@dataclass(frozen=True, slots=True)
class _Placed:
    """A saved weight, or a view of one: where it is in the unit."""

    offset: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    def at(self, memory: torch.Tensor) -> torch.Tensor:
        start = (memory.storage_offset() + self.offset) // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=memory.device).set_(memory.untyped_storage(), start, self.size, self.stride)


class UnitFunction(torch.autograd.Function):
    """Stands for a whole block in the outer graph."""

    @staticmethod
    def forward(ctx: Any, unit_call: UnitCall, call: Call, saved: Sequence[torch.Tensor], anchor: torch.Tensor, *_: torch.Tensor) -> Any:
        """Hand the results of the inner graph to the outer one."""
        ctx.unit_call, ctx.call = unit_call, call
        ctx.set_materialize_grads(False)  # an undefined gradient stays None: a zero would make the optimizer step unused parameters
        ctx.save_for_backward(*saved)
        # `.data`: no view relation, which would forbid later in-place changes of outputs of a multi-output function.
        results = tuple(t.data for t in call.outputs)
        call.returned = [(weakref.ref(t), t._version) for t in results]
        call.outputs.clear()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the inner backward."""
        found = ctx.unit_call.backward(ctx.call, ctx.saved_tensors, grads)
        return (None, None, None, None, *found)


def foreign_leaves(
    outputs: Sequence[torch.Tensor], inner: Sequence[torch.Tensor], params: Sequence[Parameter], start: int, where: str
) -> list[torch.Tensor]:
    """Leaves with gradient that the block reached by other ways than its arguments and its own parameters.

    Args:
        outputs: Results that need a gradient.
        inner: The detached arguments.
        params: The unit's own.
        start: Sequence number at the start of the block; a node with a smaller one was made outside of it.
        where: For the error.

    Raises:
        UnsupportedError: A tensor that was computed outside of the block was captured.
    """
    known = {id(t) for t in inner} | {id(p) for p in params}
    found: dict[int, torch.Tensor] = {}
    seen: set[Any] = set()
    stack: list[Any] = [t.grad_fn for t in outputs]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            if id(leaf) not in known:
                found[id(leaf)] = leaf
        elif node._sequence_nr() < start:
            raise UnsupportedError(
                f"{where} uses a tensor made outside of it ({node.name()}) by closure, so its gradient would be lost; pass it to the "
                "block as an argument"
            )
        else:
            stack.extend(edge for edge, _ in node.next_functions)
    return list(found.values())


def _drop_saved() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: None)


@contextmanager
def _keep_saved() -> Iterator[None]:
    yield


def _nothing() -> None:
    """No gradient is expected."""


def _without_caches(args: Any, kwargs: dict[str, Any], where: str) -> tuple[Any, dict[str, Any]]:
    """Take key-value caches away while gradients are computed: recompute would append to them a second time."""
    if not torch.is_grad_enabled():
        return args, kwargs
    return tuple(_no_cache(a, where) for a in args), {k: _no_cache(v, where) for k, v in kwargs.items()}


def _no_cache(value: Any, where: str) -> Any:
    if not any(c.__name__ == "Cache" and c.__module__.startswith("transformers") for c in type(value).__mro__):
        return value
    if value.get_seq_length():
        raise UnsupportedError(
            f"{where}: expected no key-value cache in training, but a filled {type(value).__name__} was passed, which recompute would "
            "change a second time; train with use_cache=False, or generate under torch.no_grad()"
        )
    return None
