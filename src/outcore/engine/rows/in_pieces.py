"""A batch in pieces: a module runs its rows a few at a time, as accumulation over micro-batches would.

[Note: pieces of a batch] The weights of a unit come once for all rows of a batch, however many there are, while
workspace and what is recomputed are those of one piece. Forward runs the pieces in order. Backward comes to them in
that order too, since gradients are summed as accumulation sums them; autograd alone would begin with the last.
Outside of units, modules with parameters run in pieces, too. All else, such as the loss, sees the whole batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from outcore.core.errors import UnsupportedError
from outcore.engine.activations.saved import version_of
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.module.call import SharedByCalls
from outcore.engine.module.side_outputs import active_recording, hand_over, recording_apart
from outcore.engine.recompute.structure import Structure, in_training, take_apart
from outcore.engine.rows.row_independence import RowIndependence
from outcore.engine.streamed_weights import make_way
from outcore.engine.unit.absent import AbsentParameter
from outcore.engine.unit.unit import Unit
from outcore.model.equal_calls import stand_in
from outcore.model.rows import Whole, cut_rows, has_rows, rows_of, sizes_of
from outcore.model.unit_modules import has_forward
from outcore.torch_private import as_it_is, is_executed, order_of, set_order


class PiecewiseForward:
    """Stands in for the ``forward`` of a module."""

    def __init__(
        self,
        module: nn.Module,
        apart: RowIndependence,
        count: int,
        *,
        are_own: bool = False,
        opened: Callable[[], AbstractContextManager[None]] = nullcontext,
        turn: Callable[[], None] | None = None,
        make_way: Callable[[], None] | None = None,
    ) -> None:
        """Wrap ``module.forward`` as it is now.

        Args:
            module: A unit, or a part of the root.
            apart: Checks that its rows can be cut.
            count: Number of pieces.
            are_own: Whether pieces of arguments get memory of their own.
            opened: Opens the context that a piece runs in.
            turn: Called when all pieces have run.
            make_way: Called before rows are tried; lets what earlier calls saved leave.
        """
        self._apart, self._count, self._opened, self._turn, self._make_way = apart, count, opened, turn, make_way
        self._where, self._are_own = apart.where, are_own
        self._forward = module.forward
        self._anchor = torch.empty(0, device="cpu", requires_grad=True)
        functools.update_wrapper(self, self._forward, updated=())

    @as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch."""
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        args, kwargs = in_training(args, kwargs, self._where)
        tensors, structure = take_apart((args, tuple(kwargs), tuple(kwargs.values())), self._where)
        rows = rows_of(tensors)
        sizes = sizes_of(rows, self._count)
        if len(sizes) <= 1:  # a batch may be empty
            return self._forward(*args, **kwargs)
        flags = tuple([has_rows(t, rows) for t in tensors])
        if flags not in self._apart.known:
            if self._make_way is not None:
                self._make_way()
            self._apart.check(self._call, tensors, structure, flags)
        return self._run(tensors, structure, flags, sizes)

    def _run(
        self, tensors: Sequence[torch.Tensor], structure: Structure, flags: Sequence[bool], sizes: Sequence[int]
    ) -> Any:
        columns = [
            list(cut_rows(t, sizes, are_own=self._are_own)) if f else [t] * len(sizes)
            for t, f in zip(tensors, flags, strict=True)
        ]
        recording, begins, results = active_recording(), [self._now()], _Results(sizes, self._where)
        for _ in sizes:
            piece = [column.pop(0) for column in columns]  # not held for longer than its call holds it
            with self._opened(), recording_apart(recording) as added:
                result = self._call(structure, piece)
            results.add((result, added), piece)
            del result, piece
            begins.append(self._now())
        if self._turn is not None:
            self._turn()
        _turn_around(results.made, begins)
        result, added = results.joined()
        hand_over(added)
        return result

    def _call(self, structure: Structure, tensors: Sequence[torch.Tensor]) -> Any:
        nest, versions = structure.fill(tensors), [version_of(t) for t in tensors]
        args, names, values = nest
        result = self._forward(*args, **dict(zip(names, values, strict=True)))
        if [version_of(t) for t in tensors] != versions or not structure.still_holds(nest, tensors, self._where):
            raise UnsupportedError(
                f"{self._where} changed one of its arguments, of which it got a piece; copy it first, or prepare "
                "without micro_batches_in_unit"
            )
        return result

    def _now(self) -> int:
        return order_of(self._anchor.view_as(self._anchor).grad_fn)


class _Results:
    """What the pieces of one batch gave."""

    def __init__(self, sizes: Sequence[int], where: str) -> None:
        self._sizes, self._where = sizes, where
        self._wholes: list[Whole | torch.Tensor] = []
        _, self._form = take_apart((), where)
        self.made: list[list[torch.Tensor]] = []
        """Tensors that stand for a piece's results in the graph, by piece."""

    def add(self, result: Any, arguments: Sequence[torch.Tensor]) -> None:
        """Take the results of the next piece."""
        tensors, form = take_apart(result, self._where)
        if not self.made:
            self._form, passed = form, {id(t) for t in arguments}
            self._wholes = [self._whole(t, is_argument=id(t) in passed) for t in tensors]
        if len(tensors) != len(self._wholes) or not form.is_like(self._form):
            raise UnsupportedError(
                f"{self._where}: expected results of pieces of a batch to differ in their rows alone, but they differ "
                "in more; prepare without micro_batches_in_unit"
            )
        self.made.append([self._put(whole, t) for whole, t in zip(self._wholes, tensors, strict=True)])

    def joined(self) -> Any:
        """Return all results, each joined into one."""
        tensors = [whole.joined() if isinstance(whole, Whole) else whole for whole in self._wholes]
        return self._form.fill(tensors)

    def _whole(self, tensor: torch.Tensor, *, is_argument: bool) -> Whole | torch.Tensor:
        if is_argument and not has_rows(tensor, self._sizes[0]):
            return tensor
        if not tensor.dim() or len(tensor) % self._sizes[0] or not len(tensor):
            self._refuse(tensor)
        return Whole(tensor, self._sizes)

    def _put(self, whole: Whole | torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
        if tensor is whole:
            return tensor
        part = whole.put(tensor) if isinstance(whole, Whole) else None
        return self._refuse(tensor) if part is None else part

    def _refuse(self, tensor: torch.Tensor) -> NoReturn:
        raise UnsupportedError(
            f"{self._where}: expected results with a row for each row of the batch, but a piece of "
            f"{self._sizes[len(self.made)]} rows gave one of shape {tuple(tensor.shape)}; prepare without "
            "micro_batches_in_unit"
        )


class ParameterStandIns:
    """Stand-ins for parameters of the root, so that the gradient of each piece is a micro-batch's own.

    Without them autograd would sum over pieces, in the dtype of the parameter.
    """

    def __init__(self, unit: Unit, gradients: BackwardGradients | None) -> None:
        """Args: unit: The root. gradients: Takes the gradient of each piece; None: autograd takes it."""
        self._unit, self._gradients = unit, gradients
        self._trainable = unit.params[: unit.num_trainable]
        self._indices = {id(p): i for i, p in enumerate(self._trainable)}
        # Tells an ordinary backward() from one for chosen inputs.
        self._anchor = torch.empty(0, device="cpu", requires_grad=True)
        self._anchor_node = torch.autograd.graph.get_gradient_edge(self._anchor).node

    def of(self, modules: Sequence[nn.Module]) -> Callable[[], Any]:
        """Return a factory of contexts in which the modules have stand-ins for their trainable parameters."""
        places = [
            (module._parameters, name, self._indices[id(param)])
            for module in modules
            for name, param in module._parameters.items()
            if id(param) in self._indices
        ]

        @contextmanager
        def replaced() -> Iterator[None]:
            own = [slots[name] for slots, name, _ in places]
            try:
                for slots, name, index in places:
                    param = self._trainable[index]
                    if isinstance(param, AbsentParameter):
                        param.owner.make_present()  # not inside of ``apply``, where it would count as evaluation
                    if param.requires_grad:
                        slots[name] = _ParameterStandIn.apply(self, index, self._anchor, param)
                yield
            finally:
                for (slots, name, _), before in zip(places, own, strict=True):
                    slots[name] = before

        return replaced

    def take(self, index: int, grad: torch.Tensor) -> torch.Tensor | None:
        """Take the gradient of one piece. Returns what autograd itself must accumulate."""
        param = self._trainable[index]
        if not param.requires_grad:  # frozen since forward
            return None
        if self._gradients is None or not is_executed(self._anchor_node) or param._backward_hooks:
            return grad
        self._gradients.deposit(self._unit, self._unit.gradient_form.native({index: grad}))
        return None


class _ParameterStandIn(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, stand_ins: ParameterStandIns, index: int, _: torch.Tensor, param: torch.Tensor
    ) -> torch.Tensor:
        ctx.stand_ins, ctx.index = stand_ins, index
        ctx.set_materialize_grads(False)
        return param.detach()  # shares the version counter: an edit before backward is noticed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None, None, None, None if grad is None else ctx.stand_ins.take(ctx.index, grad)


def in_pieces(units: Sequence[Unit], count: int, shared: SharedByCalls) -> Iterator[Callable[[], None]]:
    """Replace forwards of units and of modules outside of them. Yields what undoes it. Args: units: The root first."""
    device, order = shared.device, shared.activations
    for unit in units[1:]:
        turn = functools.partial(order.turn, unit.ledger) if unit.plan.saved_bytes else None
        apart = RowIndependence(unit.module, device, f"unit '{unit.label}'", is_compiled=shared.compiling.is_on)
        way = functools.partial(make_way, order, unit, shared.weights) if order.homes_are_used else None
        yield stand_in(unit.module, PiecewiseForward(unit.module, apart, count, are_own=True, turn=turn, make_way=way))
    stand_ins = ParameterStandIns(units[0], shared.gradients)
    inside = {id(module) for unit in units[1:] for module in unit.modules}
    for name, part in _outside(units[0].module, inside, {id(p) for p in units[0].params}):
        opened = stand_ins.of(list(part.modules()))
        apart = RowIndependence(part, device, f"module '{name}'", is_compiled=False)
        yield stand_in(part, PiecewiseForward(part, apart, count, opened=opened))


def _outside(
    module: nn.Module, inside: Container[int], params: Container[int], prefix: str = ""
) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules with parameters of the root and without a unit, except those with a replaced forward.

    Args:
        module: Its children are looked at.
        inside: Ids of the modules of units.
        params: Ids of the root's parameters.
        prefix: Put before names.
    """
    for name, child in module.named_children():
        if id(child) in inside or not any(id(p) in params for p in child.parameters()):
            continue
        if "forward" in child.__dict__:  # replaced, as ``outcore.losses`` does with that of a head
            continue
        if has_forward(child) and not any(id(m) in inside for m in child.modules()):
            yield prefix + name, child
        else:
            yield from _outside(child, inside, params, f"{prefix}{name}.")


def _turn_around(pieces: Sequence[Sequence[torch.Tensor]], begins: Sequence[int]) -> None:
    """Let backward come to the first piece first. Args: begins: Sequence numbers of piece starts, and of the end."""
    for i, made in enumerate(pieces):
        start, end = begins[i], begins[i + 1]
        shift = begins[0] + begins[-1] - end - start
        seen, stack = set[Any](), [t.grad_fn for t in made]
        while stack:
            node = stack.pop()
            if node is None or node in seen or not start <= order_of(node) < end:
                continue
            seen.add(node)
            stack += [other for other, _ in node.next_functions]
        for node in seen:
            set_order(node, order_of(node) + shift)
