"""A block's own graph, and the one node that stands for it in the outer graph.

[Note: ways in and out] Gradients enter a block through its results. They leave it through its inputs, its parameters
and foreign leaves. A tensor that was computed outside may also come in by closure, and one may go out as an attribute
that the block sets. Gradients through such tensors would be lost, so these are refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn

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
from outcore.torch_private import is_transformed, order_of, pytree, run_backward

_LEAF: Any = type(torch.autograd.graph.get_gradient_edge(torch.empty(0, device="cpu", requires_grad=True)).node)
_TAKERS = "outcore: calls that take it"


@dataclass(eq=False)
class ForwardCall:
    """What backward must know of one forward."""

    inputs: Structure
    wants_grad: list[bool]
    foreign: list[torch.Tensor]
    shapes: list[torch.Size]
    outputs: list[torch.Tensor]
    """Results with a gradient, until they are handed to the outer graph."""
    weights_version: tuple[int, ...]
    state: ForwardState | None = None
    graph: Graph | None = None
    watched: list[int] = field(default_factory=list)
    """Indices of results that must not be changed in place outside."""
    returned: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    """Watched results as they were handed out, and their versions then."""
    foreign_versions: list[int] = field(default_factory=list)
    recording: Mapping[str, Any] | None = None
    summary: Summary | None = None
    """Summary of all results, if those of the recompute are compared with them."""
    edited: list[int] = field(default_factory=list)
    """Indices of parameters that forward itself may have changed, if the call is recomputed."""
    flags: list[bool] = field(default_factory=list)
    """Whether each of the unit's parameters needed a gradient."""
    uses: list[int] = field(default_factory=list)
    """How often the block's graph uses each argument. An unused argument is no input of the node: autograd would reach
    it with None, where a plain loop does not reach it."""
    saving: CallSaving | None = None
    """Holds the activations that backward needs."""
    kind: Hashable = None
    """Kind of the arguments, if a recompute may have to count what is saved."""

    @property
    def needs_arguments(self) -> bool:
        """Whether the call is recomputed from arguments that autograd keeps."""
        return self.state is not None and (self.saving is None or not self.saving.has_arguments)

    def release(self) -> None:
        """Let go of what a backward needs: this object lives as long as the loss does."""
        if self.saving is not None:
            self.saving.release()
        self.graph = self.state = self.saving = None
        self.returned = []

    def refuse_changes(self, where: str) -> None:
        """Raise if a tensor that backward needs was changed in place outside."""
        if any(tensor._version != version for tensor, version in self.returned):
            raise UnsupportedError(f"a result of {where} was changed in place after the call; change a copy instead")
        if [version_of(t) for t in self.foreign] != self.foreign_versions:
            raise UnsupportedError(
                f"{where}: a tensor that it captured was changed in place after the call; change a copy instead"
            )


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
            if type(edge) is _LEAF:
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
            takers = metadata.setdefault(_TAKERS, {})
            takers[tensor.output_nr] = takers.get(tensor.output_nr, 0) + 1
        before = tensor


class UseByUse:
    """Gradients of arguments that several calls take: one for each use, in the order in which autograd makes them.

    In the one graph of a plain loop, autograd adds up the gradients of such a tensor use by use, the last use first. A
    unit that first summed those of its own uses would round otherwise, since gradients of other calls come before them.
    """

    def __init__(self, uses: Sequence[int], edges: Sequence[tuple[Any, int]]) -> None:
        """Args: uses: Uses of each argument in forward. edges: In the outer graph: one per use, then all others."""
        self.edges: list[tuple[Any, int]] = []
        """One edge for each argument that is used, then all edges behind those of arguments."""
        self._counts: list[int] = []
        self.heard: dict[int, list[torch.Tensor]] = {}
        """Gradients by use, by number among used arguments: of those with several uses that other calls may take."""
        place = 0
        for count in uses:
            if count:
                node, output = edges[place]
                if count > 1 and (type(node) is _LEAF or node.metadata[_TAKERS][output] > 1):
                    self.heard[len(self._counts)] = []
                self._counts.append(count)
                self.edges.append(edges[place])
                place += count
        self.edges += edges[place:]

    def listen(self, inner: Sequence[torch.Tensor], outputs: Iterable[torch.Tensor | GradientEdge]) -> Sequence[Any]:
        """Record gradients by use in a block's own graph, until the returned handles are removed.

        Args:
            inner: The detached arguments that are used, then foreign leaves.
            outputs: The block's results, or their edges.
        """
        # Not if the block put a hook on the argument: its result, made of the sum, cannot be divided by use.
        number_of, handles = {id(inner[i]): i for i in self.heard if not inner[i]._backward_hooks}, []
        for node, edges in nodes_of(outputs):
            leaves = [(place, id(end.variable)) for place, (end, _) in enumerate(edges) if type(end) is _LEAF]
            if ours := [(place, self.heard[number_of[leaf]]) for place, leaf in leaves if leaf in number_of]:
                handles.append(node.register_hook(functools.partial(_add, ours)))
        return handles

    def spread(self, sums: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return gradients for the outer graph's edges. Args: sums: For each used argument, and for what follows."""
        spread: list[torch.Tensor | None] = []
        for number, (count, total) in enumerate(zip(self._counts, sums, strict=False)):
            each = self.heard.get(number, ())
            parts = each if 0 < len(each) <= count else [total]  # a recompute may use it more often
            spread += parts
            spread += [None] * (count - len(parts))
        return [*spread, *sums[len(self._counts) :]]


def _add(ours: Sequence[tuple[int, list[torch.Tensor]]], grads: Sequence[torch.Tensor | None], _: object) -> None:
    for place, found in ours:
        if (grad := grads[place]) is not None:
            found.append(grad)


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


def gradients(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]], sources: Sequence[torch.Tensor], *, keeps_graph: bool
) -> Sequence[torch.Tensor | None]:
    """Run a block's own backward.

    Args:
        pairs: Results and their gradients.
        sources: Tensors whose gradients are wanted.
        keeps_graph: Whether it may run again.

    Returns:
        A gradient for each source; None if it has none.
    """
    if not pairs or not sources:
        return [None] * len(sources)
    outputs, grads = zip(*pairs, strict=True)
    try:
        return run_backward(outputs, grads, sources, keeps_graph=keeps_graph)
    except RuntimeError as error:
        if "use_reentrant=True" in str(error):
            raise UnsupportedError(
                "expected torch.utils.checkpoint inside of a unit with use_reentrant=False, but got "
                "use_reentrant=True, whose gradients bypass the unit; pass use_reentrant=False, or leave the "
                "checkpoint out, since outcore recomputes units already"
            ) from error
        raise


class _WhereReached:
    """A parameter's own hook, called only with a gradient. A plain loop does not call it for an unused parameter."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else self._hook(grad)


def spare_hooks(params: Sequence[Parameter], grads: Container[int]) -> None:
    """Keep hooks of parameters from being called without a gradient: autograd also reaches parameters that have none.

    Args:
        params: A unit's parameters.
        grads: Indices of those that have a gradient.
    """
    for i, param in enumerate(params):
        hooks = param._backward_hooks
        if hooks and i not in grads:
            hooks.update({k: h if isinstance(h, _WhereReached) else _WhereReached(h) for k, h in hooks.items()})


def spare_functions(nodes: Iterable[Any]) -> None:
    """Keep the user's own Functions from being called where no gradient flows: autograd also reaches such nodes.

    A plain loop does not reach them. Autograd would make zeros for them, and so a gradient for what lies before.

    Args:
        nodes: Nodes of a unit's arguments that get no gradient.
    """
    seen: set[Any] = {None}
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if not isinstance(node, BackwardCFunction):
            stack.extend(before for before, _ in node.next_functions)
        elif not hasattr(node, "unit_call"):
            node.register_prehook(_Unreached(node))


class _Unreached:
    """A hook that skips a node, once, if no gradient has reached it when it runs."""

    def __init__(self, node: Any) -> None:
        self._node: Any = node

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> None:
        node, self._node = self._node, None
        if node is not None and all(g is None for g in grads):
            node.apply = functools.partial(_pass_by, node)


def _pass_by(node: Any, *_: object) -> tuple[None, ...]:
    del node.apply
    spare_functions(before for before, _ in node.next_functions)
    return (None,) * len(node.needs_input_grad)


def without_hooks(leaves: Sequence[torch.Tensor], work: Callable[[], Any], handles: Sequence[Any]) -> Any:
    """Run ``work`` with the leaves' own hooks off: autograd runs them once, on the sum of all calls.

    Args: handles: Hooks for this run alone, removed at its end.
    """
    hooked = [(t, t._backward_hooks) for t in leaves if t._backward_hooks]
    for leaf, _ in hooked:
        leaf._backward_hooks = None
    try:
        return work()
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks
        for handle in handles:
            handle.remove()


def refuse_transforms(where: str) -> None:
    """Raise if this is no ordinary forward: torch.func transforms or forward-mode AD are active."""
    if is_transformed():
        raise UnsupportedError(
            f"{where}: expected an ordinary forward, but torch.func transforms (vmap, grad, jvp, ...) or "
            "forward-mode AD are active, which cannot follow streamed weights; "
            "call it under torch.no_grad(), or use backward()"
        )
