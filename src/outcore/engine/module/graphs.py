"""A block's own graph, and the one node that stands for it in the outer graph.

[Note: ways in and out] Gradients enter a block through its results. They leave it through its inputs, its parameters
and foreign leaves. A tensor that was computed outside may also come in by closure, and one may go out as an attribute
that the block sets. Gradients through such tensors would be lost, so these are refused.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.engine.activations.saved import escaped, storage_of, version_of
from outcore.engine.activations.saving import CallSaving, Graph
from outcore.engine.recompute.checks import Summary
from outcore.engine.recompute.replay import ForwardState
from outcore.engine.recompute.structure import Structure
from outcore.engine.unit.absent import unfreezing_refusal
from outcore.engine.unit.unit import Unit
from outcore.model.wrapped import tensors_in
from outcore.torch_private import is_transformed, order_of, pytree

LEAF: Any = type(torch.autograd.graph.get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)
TAKERS = "outcore: calls that take it"


class Recompute(NamedTuple):
    """What it takes to run the block of a call again."""

    inputs: Structure
    wants_grad: list[bool]
    """Whether each tensor among the arguments needed a gradient."""
    shapes: list[torch.Size]
    """Shapes of the results with a gradient."""
    state: ForwardState
    recording: Mapping[str, Any] | None
    edited: list[int]
    """Indices of parameters that forward itself may have changed."""
    kind: Hashable
    """Kind of the arguments, if a recompute may have to count what is saved."""
    summary: Summary | None
    """Summary of all results, if those of the recompute are compared with them."""


@dataclass(eq=False, kw_only=True)
class ForwardCall:
    """What backward must know of one forward."""

    flags: list[bool]
    """Whether each of the unit's parameters needed a gradient."""
    uses: list[int]
    """How often the block's graph uses each argument. An unused argument is no input of the node: autograd would reach
    it with None, where a plain loop does not reach it."""
    foreign: list[torch.Tensor]
    foreign_versions: list[int]
    outputs: list[torch.Tensor]
    """Results with a gradient, until they are handed to the outer graph."""
    weights_version: tuple[int, ...]
    saving: CallSaving | None
    """Holds the activations that backward needs."""
    watched: list[int]
    """Indices of results that must not be changed in place outside."""
    returned: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Watched results as they were handed out, and their versions then."""
    graph: Graph | None = None
    """The block's own graph, if it was kept."""
    recompute: Recompute | None = None
    """How to run the block again, if it was not."""

    @property
    def needs_arguments(self) -> bool:
        """Whether the call is recomputed from arguments that autograd keeps."""
        return self.recompute is not None and (self.saving is None or not self.saving.has_arguments)

    def release(self) -> None:
        """Let go of what a backward needs: this object lives as long as the loss does."""
        if self.saving is not None:
            self.saving.release()
        self.graph = self.recompute = self.saving = None
        self.returned = []

    def refuse_changes(self, unit: Unit, where: str) -> None:
        """Raise if the weights, or a tensor that backward needs, were changed after forward."""
        if self.weights_version != weights_version(unit, is_recomputed=self.recompute is not None):
            raise UnsupportedError(
                f"{where}: expected the weights of its forward, but they have changed since (optimizer.step(), "
                "load_state_dict, gathered(write=True), an edit in place); run forward again"
            )
        if any(tensor._version != version for tensor, version in self.returned):
            raise UnsupportedError(f"a result of {where} was changed in place after the call; change a copy instead")
        if [version_of(t) for t in self.foreign] != self.foreign_versions:
            raise UnsupportedError(
                f"{where}: a tensor that it captured was changed in place after the call; change a copy instead"
            )


def weights_version(unit: Unit, *, is_recomputed: bool) -> tuple[int, ...]:
    """Return numbers that change with the weights on which a backward of the unit depends."""
    if unit.ledger.cut.is_resident:
        return (unit.weights_version + sum([p._version for p in unit.params]),)
    # A kept graph has saved gathered weights, or their place, which it does not find in the block.
    return (unit.weights_version, *(unit.presence.edits() if is_recomputed else ()))


class BlockResults:
    """Results of a block: arguments that it returns are those of the outer graph; what it made follows by ``take``."""

    def __init__(
        self, inner: Sequence[torch.Tensor], arguments: Mapping[int, torch.Tensor], structure: Structure
    ) -> None:
        """Args: inner: Results inside of the block. arguments: Outer arguments, by id of the inner ones."""
        self._inner, self.structure = inner, structure
        self.tensors = [arguments.get(id(t), t) for t in inner]

    def take(self, made: Iterable[torch.Tensor]) -> None:
        """Take the outer tensors that stand for what the block made."""
        rest = iter(made)
        for i, tensor in enumerate(self._inner):
            if tensor.grad_fn is not None:
                self.tensors[i] = next(rest)


class GraphAnchor:
    """A leaf that every call of a unit takes as an input.

    So backward reaches the unit even if no other input needs a gradient. An ordinary ``backward()`` reaches the leaf,
    one for chosen inputs does not: this tells them apart.
    """

    def __init__(self) -> None:
        self.leaf = torch.empty(0, device="cpu", requires_grad=True)
        self.node = torch.autograd.graph.get_gradient_edge(self.leaf).node


class TrainedParameters:
    """Which parameters of a unit need a gradient. Those frozen at ``prepare`` must stay frozen; others may change."""

    def __init__(self, unit: Unit) -> None:
        self.params = unit.params[: unit.num_trainable]
        self.is_any = any(p.requires_grad for p in unit.module.parameters())
        """Whether any parameter that the module uses was trained at ``prepare``."""
        self._unit, self._at_first = unit, [p.requires_grad for p in unit.params]

    def flags(self) -> list[bool]:
        """Return for each parameter whether it needs a gradient now.

        Raises:
            UnsupportedError: A parameter that was frozen at ``prepare`` needs one.
        """
        flags = [p.requires_grad for p in self._unit.params]
        if flags != self._at_first:
            for now, before, spec in zip(flags, self._at_first, self._unit.spec.params, strict=True):
                if now and not before:
                    raise UnsupportedError(unfreezing_refusal(spec.name))
        return flags

    @contextmanager
    def as_in_forward(self, flags: list[bool]) -> Iterator[None]:
        """Let parameters require gradients as they did in forward: some may have been frozen since."""
        now = self.flags()
        changed = [] if now == flags else list(zip(self._unit.params, flags, now, strict=True))
        try:
            for param, flag, _ in changed:
                param.requires_grad_(flag)
            yield
        finally:
            for param, _, flag in changed:
                param.requires_grad_(flag)


class UnitFunction(torch.autograd.Function):
    """Stands for a whole block in the outer graph."""

    @staticmethod
    def forward(
        ctx: Any,
        unit_call: Any,
        call: ForwardCall,
        saved: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        *_: torch.Tensor,
    ) -> Any:
        """Hand the results of the inner graph to the outer one."""
        ctx.unit_call, ctx.call = unit_call, call
        # An undefined gradient stays None: a zero would make the optimizer step unused parameters.
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved)
        # `.data`: no view relation, which would forbid later in-place changes of outputs of a multi-output function.
        results = tuple(t.data for t in call.outputs)
        # Detached: they share memory and version counter, but hold no node.
        returned = [(t.detach(), t._version) for t in (results[i] for i in call.watched)]
        call.returned = returned if call.saving is None else call.saving.returned(returned, results)
        call.outputs.clear()
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the inner backward."""
        try:
            found = ctx.unit_call.backward(ctx, ctx.call, ctx.saved_tensors, grads)
        except BaseException:
            ctx.unit_call.break_off()
            raise
        return (None, None, None, None, *found)


def find_leaves(
    outputs: Sequence[torch.Tensor],
    inner: Sequence[torch.Tensor],
    params: Sequence[Parameter],
    start: int,
    slot: range,
    where: str,
) -> tuple[list[torch.Tensor], dict[int, int]]:
    """Find the leaves with a gradient that results depend on.

    Args:
        outputs: Results that need a gradient.
        inner: The detached arguments.
        params: The unit's own.
        start: Sequence number at the start of the block; a node with a smaller one was made outside of it.
        slot: Addresses that will hold other weights when the graph is walked.
        where: For the error.

    Returns:
        Foreign leaves, which are neither arguments nor the block's own parameters; how often each leaf is used, by id.

    Raises:
        UnsupportedError: A tensor that was computed outside of the block was captured, or a function holds a weight.
    """
    known = {id(t) for t in inner} | {id(p) for p in params}
    found, used = dict[int, torch.Tensor](), dict[int, int]()
    for node, edges in nodes_of(outputs):
        if slot and isinstance(node, BackwardCFunction):
            _refuse_held_weights(node, slot, where)
        if order_of(node) < start:
            raise UnsupportedError(
                f"{where} uses a tensor made outside of it ({node.name()}) by closure, so its gradient would be lost; "
                "pass it to the block as an argument"
            )
        for edge, _ in edges:
            if type(edge) is LEAF:
                leaf = edge.variable
                used[id(leaf)] = used.get(id(leaf), 0) + 1
                if id(leaf) not in known:
                    found[id(leaf)] = leaf
    return list(found.values()), used


def nodes_of(outputs: Iterable[torch.Tensor | GradientEdge]) -> list[tuple[Any, Any]]:
    """Return each node of a graph with its edges, without the nodes of leaves."""
    found = []
    seen: set[Any] = {None}
    stack: list[Any] = [end.node if isinstance(end, GradientEdge) else end.grad_fn for end in outputs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if edges := node.next_functions:
            found.append((node, edges))
            for edge, _ in edges:
                if edge not in seen:
                    stack.append(edge)
    return found


def taken(tensors: Iterable[torch.Tensor]) -> None:
    """Count a call that takes these arguments, at their nodes. Args: tensors: Each once per use, its uses in a row."""
    before = None
    for tensor in tensors:
        if tensor is not before and (node := tensor.grad_fn) is not None:
            metadata: Any = node.metadata
            takers = metadata.setdefault(TAKERS, {})
            takers[tensor.output_nr] = takers.get(tensor.output_nr, 0) + 1
        before = tensor


def holds_weight(nest: Any, slot: range) -> bool:
    """Whether a nest holds a view of a weight. Args: slot: Addresses of the weights."""
    found = (t for t in pytree.tree_leaves(nest) if isinstance(t, torch.Tensor) and not isinstance(t, Parameter))
    inside = (held for tensor in found for held in tensors_in(tensor) if not isinstance(held, Parameter))
    return any(held.data_ptr() in slot for held in inside if storage_of(held))


def _refuse_held_weights(node: Any, slot: range, where: str) -> None:
    if holds_weight(vars(node), slot):
        raise UnsupportedError(
            f"{where}: {node.name()} holds a view of a weight, which will be another unit's in backward; "
            "call ctx.save_for_backward(), hold the parameter itself, or give this unit the policy recompute in the "
            "plan"
        )


def guarded_leaf(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """Return a leaf that stands for an argument inside the block. Gradients that bypass the results are refused."""

    def refuse(_: torch.Tensor) -> NoReturn:
        raise UnsupportedError(escaped(where))

    leaf = tensor.detach().clone() if tensor.is_inference() else tensor.detach()
    # Autocast caches casts of leaves alone; a cached cast sums gradients before casting back.
    if not tensor.is_leaf and tensor.layout is torch.strided:
        leaf = leaf.view_as(leaf)
    leaf.requires_grad_()
    leaf.register_post_accumulate_grad_hook(refuse)
    return leaf


def refuse_backward(results: Sequence[torch.Tensor], arguments: Sequence[Any], where: str) -> None:
    """Make backward refuse a graph that was made inside no_grad(). Arguments among the results have another graph."""
    error = UnsupportedError(
        f"{where}: expected a forward with gradients, but its graph was made by enable_grad() inside of no_grad(), and "
        "its weights are gone; call the unit outside of no_grad()"
    )

    def refuse(*_: object) -> NoReturn:
        raise error

    passed = set(map(id, arguments))
    for tensor in results:
        if tensor.grad_fn is not None and id(tensor) not in passed:
            tensor.grad_fn.register_prehook(refuse)


def refuse_transforms(where: str) -> None:
    """Raise if this is no ordinary forward: torch.func transforms or forward-mode AD are active."""
    if is_transformed():
        raise UnsupportedError(
            f"{where}: expected an ordinary forward, but torch.func transforms (vmap, grad, jvp, ...) or "
            "forward-mode AD are active, which cannot follow streamed weights; "
            "call it under torch.no_grad(), or use backward()"
        )


def refuse_weights_outside(unit: Unit, outputs: Sequence[torch.Tensor], where: str) -> None:
    """Raise if results of a call are views of weights in a slot."""
    buffer = None if unit.ledger.cut.is_resident else unit.device_buffer()
    if buffer is None:
        return
    base = buffer.bytes.untyped_storage().data_ptr()
    for tensor in outputs:
        if storage_of(tensor) == base:
            raise UnsupportedError(
                f"{where} returns one of its weights (shape {tuple(tensor.shape)}), "
                "whose memory will hold another unit soon; return a clone"
            )
