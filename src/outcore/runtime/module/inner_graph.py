"""What a block's own graph may hold, and how gradients get in and out of it.

[Note: ways in and out] Gradients leave a block through its inputs, its parameters and foreign leaves, and enter
through its results. Gradients through a tensor that comes in by closure, or goes out as an attribute that the block
sets, would be lost. So such a tensor is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch.autograd.function import BackwardCFunction
from torch.nn import Parameter

from outcore.core.errors import UnsupportedError
from outcore.device.autograd import is_transformed, order_of, run_backward
from outcore.runtime.activations.saved import escaped


def find_leaves(
    outputs: Sequence[torch.Tensor], inner: Sequence[torch.Tensor], params: Sequence[Parameter], start: int, where: str
) -> tuple[list[torch.Tensor], set[int]]:
    """Leaves with gradient that results depend on.

    Returns:
        Those that are neither arguments nor the block's own parameters, and the ids of those that are.

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
    found, used = dict[int, torch.Tensor](), dict[int, torch.Tensor]()
    seen: set[Any] = {None}
    stack: list[Any] = [t.grad_fn for t in outputs]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        edges = node.next_functions
        if not edges and (leaf := getattr(node, "variable", None)) is not None:
            (used if id(leaf) in known else found)[id(leaf)] = leaf
        elif order_of(node) < start:
            raise UnsupportedError(
                f"{where} uses a tensor made outside of it ({node.name()}) by closure, so its gradient would be lost; "
                "pass it to the block as an argument"
            )
        else:
            for edge, _ in edges:
                if edge not in seen:
                    stack.append(edge)
    return list(found.values()), set(used)


def guarded_leaf(tensor: torch.Tensor, where: str) -> torch.Tensor:
    """A leaf that stands for an argument inside the block; gradients must come to it through the results."""

    def refuse(_: torch.Tensor) -> NoReturn:
        raise UnsupportedError(escaped(where))

    leaf = tensor.detach()
    if not tensor.is_leaf:  # autocast casts a leaf once, and adds up gradients before they are cast back; but no view
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
        sources: Whose gradients are wanted; None for what has none.
        keeps_graph: It may run again.
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
                "use_reentrant=True, whose gradients go past the unit; pass use_reentrant=False, or leave the "
                "checkpoint out, since outcore recomputes units already"
            ) from error
        raise


class _WhereReached:
    """A parameter's own hook, which a plain loop does not call where the parameter took no part."""

    def __init__(self, hook: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: torch.Tensor | None) -> torch.Tensor | None:
        return None if grad is None else self._hook(grad)


def spare_hooks(params: Sequence[Parameter], grads: Container[int]) -> None:
    """Autograd comes to parameters that have no gradient too: their own hooks are not to be called there.

    Args:
        params: Of a unit.
        grads: Which of them have one.
    """
    for i, param in enumerate(params):
        hooks = param._backward_hooks
        if hooks and i not in grads:
            hooks.update({k: h if isinstance(h, _WhereReached) else _WhereReached(h) for k, h in hooks.items()})


def spare_functions(nodes: Iterable[Any]) -> None:
    """Autograd also comes to nodes to which no gradient flows. Functions of the user's own are not to be called there.

    A plain loop does not come to them; zeros would be made for them, which are a gradient for what lies before.

    Args:
        nodes: Of a unit's arguments that get no gradient.
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
    """Once, lets a node be passed by if nothing has come to it when it runs."""

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


@contextmanager
def requiring(params: Sequence[torch.Tensor], now: list[bool], flags: list[bool]) -> Iterator[None]:
    """Have those parameters need a gradient that did in forward: they may have been frozen since."""
    changed = [] if now == flags else list(zip(params, flags, now, strict=True))
    try:
        for param, flag, _ in changed:
            param.requires_grad_(flag)
        yield
    finally:
        for param, _, flag in changed:
            param.requires_grad_(flag)


def without_hooks(leaves: Sequence[torch.Tensor], work: Callable[[], Any]) -> Any:
    """Run ``work`` with the leaves' own hooks off: autograd runs them once, on the sum of all calls."""
    hooked = [(t, t._backward_hooks) for t in leaves if t._backward_hooks]
    for leaf, _ in hooked:
        leaf._backward_hooks = None
    try:
        return work()
    finally:
        for leaf, hooks in hooked:
            leaf._backward_hooks = hooks


def refuse_transforms(where: str) -> None:
    """Raise where what runs is not an ordinary forward."""
    if is_transformed():
        raise UnsupportedError(
            f"{where}: expected an ordinary forward, but torch.func transforms (vmap, grad, jvp, ...) or "
            "forward-mode AD are active, "
            "which cannot follow streamed weights; call it under torch.no_grad(), or use backward()"
        )
