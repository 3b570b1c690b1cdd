"""The backward of a block's own graph: gradients of its arguments, of foreign leaves and of its parameters."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.engine.activations.saving import Graph
from outcore.engine.module.graphs import LEAF, TAKERS, ForwardCall, nodes_of
from outcore.torch_private import run_backward


@dataclass(frozen=True, eq=False)
class BlockGradients:
    """Gradients of one backward of a block."""

    outside: Sequence[torch.Tensor | None]
    """Of arguments and foreign leaves, one for each edge of the outer graph."""
    params: dict[int, torch.Tensor]
    """Of parameters, by index."""
    fresh: Iterable[torch.Tensor | None]
    """All that autograd has made."""


def block_gradients(
    call: ForwardCall,
    graph: Graph,
    grads: Sequence[torch.Tensor | None],
    edges: Sequence[tuple[Any, int]],
    params: Sequence[Parameter],
    wanted: Sequence[bool],
    *,
    keeps_graph: bool,
) -> BlockGradients:
    """Walk a block's own graph.

    Args:
        call: The forward.
        graph: Inner arguments, and results.
        grads: Of the results.
        edges: Of the node in the outer graph, without the anchor's.
        params: The unit's trained parameters.
        wanted: Whether each of them needs a gradient.
        keeps_graph: Whether the graph may be walked again.
    """
    inner, outputs = graph
    outer = [*(t for t, count in zip(inner, call.uses, strict=True) if count), *call.foreign]
    sources = [*outer, *(p for p, w in zip(params, wanted, strict=True) if w)]
    pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    by_use = UseByUse(call.uses, edges)
    handles = by_use.listen(outer, outputs) if by_use.heard else ()
    work = functools.partial(_gradients, pairs, sources, keeps_graph=keeps_graph)
    all_found = _without_hooks([*params, *call.foreign], work, handles)
    found = iter(all_found)
    given = [next(found) for _ in outer]
    made = {i: g for i, w in enumerate(wanted) if w and (g := next(found)) is not None}
    _spare_hooks(params, made)
    if any([g is None for g in given]):  # `in` would compare every tensor
        _spare_functions(node for g, (node, _) in zip(given, by_use.edges, strict=False) if g is None)
    return BlockGradients(by_use.spread(given), made, itertools.chain(all_found, *by_use.heard.values()))


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
                if count > 1 and (type(node) is LEAF or node.metadata[TAKERS][output] > 1):
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
        number_of, handles = {id(inner[i]): i for i in self.heard}, []
        for node, edges in nodes_of(outputs):
            leaves = [(place, id(end.variable)) for place, (end, _) in enumerate(edges) if type(end) is LEAF]
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


def _gradients(
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


def _spare_hooks(params: Sequence[Parameter], grads: Container[int]) -> None:
    """Keep hooks of parameters from being called without a gradient: autograd also reaches parameters that have none.

    Args:
        params: A unit's parameters.
        grads: Indices of those that have a gradient.
    """
    for i, param in enumerate(params):
        hooks = param._backward_hooks
        if hooks and i not in grads:
            hooks.update({k: h if isinstance(h, _WhereReached) else _WhereReached(h) for k, h in hooks.items()})


def _spare_functions(nodes: Iterable[Any]) -> None:
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
    _spare_functions(before for before, _ in node.next_functions)
    return (None,) * len(node.needs_input_grad)


def _without_hooks(leaves: Sequence[torch.Tensor], work: Callable[[], Any], handles: Sequence[Any]) -> Any:
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
