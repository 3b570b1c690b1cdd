"""Hooks that a block registers on its own arguments.

Inside of the block an argument is a leaf, whose gradient is the share of this block alone. A hook in a plain loop sees
the gradient of all users, so the hooks of the leaf run on the argument in the outer graph instead.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.engine.module.graphs import holds_weight


def hand_on_hooks(leaf: torch.Tensor, argument: torch.Tensor, slot: range, where: str) -> None:
    """Move the hooks of a leaf to the argument that it stands for.

    Args:
        leaf: An argument inside of the block.
        argument: The same argument in the outer graph.
        slot: Addresses that will hold other weights in backward.
        where: For the error.

    Raises:
        UnsupportedError: A hook holds a view of a weight.
    """
    hooks: Any = leaf._backward_hooks
    for hook in hooks.values():
        if slot and holds_weight([*_held(hook)], slot):
            raise UnsupportedError(
                f"{where}: expected a hook on an argument that holds no weight, but it holds a view of a weight, whose "
                "memory will be another unit's when the hook runs; let it hold a clone"
            )
    argument.register_hook(partial(_run, hooks))
    leaf._backward_hooks = None


def _run(hooks: dict[int, Any], grad: torch.Tensor | None) -> torch.Tensor | None:
    """Run the hooks that were not removed since. A plain loop calls none where no gradient flows."""
    for hook in () if grad is None else list(hooks.values()):
        result = hook(grad)
        grad = grad if result is None else result
    return grad


def _held(hook: Any) -> list[Any]:
    """Return what a function holds: its default arguments, and the variables of its closure that have a value."""
    held = list(getattr(hook, "__defaults__", None) or ())
    for cell in getattr(hook, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            continue
    return held
