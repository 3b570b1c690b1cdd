"""What forwards save, and what is alive during a step, from shapes alone. See [Note: footprint].

Kernels differ between devices: attention on the CPU saves the scores, on a GPU it does not. So the step runs on fake
tensors of the device that will compute, with the kernels that torch would choose there. No values are computed.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from outcore.core.errors import ConfigError
from outcore.core.quantities import ALIGN_BYTES
from outcore.model.casts import Autocast
from outcore.model.equal_calls import Shape, arguments_of, is_cache, kind_of, own_cache, stand_in
from outcore.model.partition import Partition
from outcore.model.rows import Whole, cut_rows, has_rows, rows_of, sizes_of
from outcore.model.unit_modules import output_embeddings
from outcore.planner.forward.footprint import NOTHING, Footprint, SavedBytes
from outcore.planner.forward.shapes import on_shapes
from outcore.planner.forward.watch import MemoryWatch, Risen, SavedByPolicy
from outcore.spec.model import ParamSpec, UnitSpec
from outcore.torch_private import pytree

_TILE_BYTES = 4096 * 32768 * 2
"""Bytes of logits that a loss in tiles holds at a time (TRL 1.16, ``kernels/chunked_logprob.py``,
``trainer/utils.py``)."""


def footprint_of(
    cut: Partition, sample: Mapping[str, Any], device: torch.device, *, makes_logits: bool = True
) -> Footprint:
    """Find what a micro-batch saves, by unit and policy, and what is alive while a step works on it.

    The forward runs under autocast if the caller does.

    Args:
        cut: The model; parts of it may be on the meta device.
        sample: Keyword arguments of its forward, as large as they will come. Only shapes and dtypes count. The step is
            followed through the loss that the model returns, else through a cross entropy over its largest result.
        device: The device that will compute.
        makes_logits: Whether logits of the whole micro-batch are made. False: the loop computes them in tiles.

    Returns:
        The footprint; without steps if backward cannot be followed on shapes.

    Raises:
        ConfigError: The model cannot be run with these arguments, or not without values.

    Time: a step in Python, 1 to 4 s for a large model. Memory: none.
    """
    if not makes_logits and "labels" in sample:
        tiled = {**{k: v for k, v in sample.items() if k != "labels"}, "logits_to_keep": 1}
        with suppress(ConfigError):  # another model has no such argument
            return footprint_of(cut, tiled, device).with_loss(_loss_in_tiles(cut.modules[0], sample["labels"].numel()))
    watch, is_whole, logits_bytes = MemoryWatch(device), False, 0
    known: dict[Any, _KnownCall] = {}
    count = cut.spec.micro_batches_in_unit
    units = {unit.name: _FollowedUnit(unit.name, module, watch, known, count) for unit, module in _pairs(cut)}

    def backward(result: list[Any]) -> None:
        nonlocal is_whole, logits_bytes
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]
        logits_bytes = max((t.nbytes for t in made), default=0)
        del made
        loss = loss_of(result.pop())
        try:
            if loss is not None:
                loss.backward()
        except Exception:
            return
        watch.end()
        is_whole = True

    with on_shapes(cut, sample, device) as shapes, ExitStack() as undo:
        given = [t for t in pytree.tree_leaves(shapes.batch) if isinstance(t, torch.Tensor)]
        watch.begin([*shapes.own.values(), *given])
        early = _gradients_before_units(cut.spec.units[0], shapes.own, watch)
        for unit, (_, module) in zip(units.values(), _pairs(cut), strict=True):
            undo.callback(stand_in(module, unit.call))
        with watch:
            shapes.forward(backward)
    saved = {name: unit.saved for name, unit in units.items()}
    shared = sum(watch.shared.values())
    steps = watch.steps if is_whole else []
    numbers = sum(len(unit.trainable) for unit in cut.spec.units) + len(steps)  # norms, and two stand-ins per call
    loose = numbers * ALIGN_BYTES
    found = Footprint(saved=saved, steps=steps, pieces=count, shared_bytes=shared, loose_bytes=loose)
    if count == 1:
        return found
    casts = _head_bytes(cut.modules[0], Autocast.now(device))
    sums = {unit.name: unit.update_bytes for unit in cut.spec.units[1:]}
    return replace(found, sums=sums).with_casts((count - 1) * casts).with_sums(early, logits_bytes)


def _gradients_before_units(root: UnitSpec, own: Mapping[str, torch.Tensor], watch: MemoryWatch) -> list[ParamSpec]:
    """Return a list that backward fills: parameters of the root with gradients before any unit's backward.

    Output embeddings are an example.
    """
    found: list[ParamSpec] = []

    def reached(spec: ParamSpec, _: torch.Tensor) -> None:
        if not watch.is_backward:
            found.append(spec)

    for spec in root.trainable:
        own[spec.name].register_post_accumulate_grad_hook(functools.partial(reached, spec))
    return found


def _head_bytes(model: nn.Module, autocast: Autocast) -> int:
    """Return the bytes of the casts that autocast makes of output embeddings, anew for each piece."""
    weights = [w for head in output_embeddings(model) if isinstance(w := getattr(head, "weight", None), torch.Tensor)]
    cast = [w for w in weights if autocast.is_on and w.dtype != autocast.dtype]
    return sum(w.numel() * autocast.dtype.itemsize for w in cast)


def _loss_in_tiles(model: nn.Module, tokens: int) -> int:
    """Return the bytes beside the hidden states: fp32 gradients of the weight and of these, copies, and a tile.

    Without Triton a tile is also held in fp32, several times over; that is for devices that are not accelerators.
    """
    weights = [w for head in output_embeddings(model) if isinstance(w := getattr(head, "weight", None), torch.Tensor)]
    if not weights:
        return 0
    words, width = weights[0].shape
    gradient = 4 * words * width if weights[0].requires_grad else 0
    return gradient + 8 * tokens * width + min(_TILE_BYTES, 2 * tokens * words)


def _pairs(cut: Partition) -> Iterator[tuple[UnitSpec, nn.Module]]:
    return zip(cut.spec.units[1:], cut.modules[1:], strict=True)


def loss_of(result: Any) -> torch.Tensor | None:
    """Return what a loop would call backward on, or a stand-in for it; None if no result needs a gradient."""
    loss = getattr(result, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    made = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    if not made:
        return None
    largest = max(made, key=torch.Tensor.numel)
    return largest.float().log_softmax(-1).mean() if largest.dim() else largest


class _FollowedUnit:
    """Runs the calls of a unit so that they are recomputed in backward, and counts what they save."""

    def __init__(
        self, name: str, module: nn.Module, watch: MemoryWatch, known: dict[Any, _KnownCall], count: int
    ) -> None:
        """Args: known: What calls of all units did, by kind. count: Pieces in which the unit runs a batch."""
        self.name, self.watch, self._module, self._known, self._count = name, watch, module, known, count
        self.saved = NOTHING
        """What the largest calls save."""
        self.forward: Callable[..., Any] = module.forward

    def params(self) -> list[torch.Tensor]:
        """Return the parameters that need a gradient: the fake ones, while they are lent to the module."""
        return [p for p in self._module.parameters() if p.requires_grad]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the module's forward."""
        leaves, form = pytree.tree_flatten((args, kwargs))
        rows = rows_of([t for t in leaves if isinstance(t, torch.Tensor)])
        sizes = sizes_of(rows, self._count)
        if len(sizes) <= 1:
            return self._run(*args, **kwargs)
        cut = [cut_rows(t, sizes, are_own=True) if _has_rows(t, rows) else [t] * len(sizes) for t in leaves]
        wholes: list[Any] = []
        result_form = form
        for piece in zip(*cut, strict=True):
            args, kwargs = pytree.tree_unflatten(piece, form)
            results, result_form = pytree.tree_flatten(self._run(*args, **kwargs))
            wholes = wholes or [Whole(t, sizes) if _has_rows(t, sizes[0]) else t for t in results]
            for i, whole in enumerate(wholes):
                if isinstance(whole, Whole):
                    whole.put(results[i])
            results.clear()  # not held while the next piece runs
        joined = [whole.joined() if isinstance(whole, Whole) else whole for whole in wholes]
        return pytree.tree_unflatten(joined, result_form)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        leaves, form = arguments_of(args, kwargs, own_cache)
        given = [i for i, t in enumerate(leaves) if isinstance(t, torch.Tensor) and t.requires_grad]
        if not given and not self.params():
            values, named = pytree.tree_unflatten(leaves, form)
            return self.forward(*values, **named)
        met = self.watch.meet(leaves[i] for i in given)
        known = self._known.setdefault((kind_of(self._module, leaves, form), *met), _KnownCall())
        run = _FollowedCall(self, leaves, form, given, met, known)
        anchor = torch.empty(0, device="cpu", requires_grad=True)
        made = iter(_RecomputedUnit.apply(run, anchor, *(leaves[i] for i in given)))
        results, form = pytree.tree_flatten(run.result)
        run.result = None
        return pytree.tree_unflatten([next(made) if i in run.made else t for i, t in enumerate(results)], form)

    def count(self, saved: SavedBytes) -> None:
        """Count what one call saves."""
        self.saved = self.saved.or_more(saved)


class _KnownCall:
    """What the first call of a kind did. The others do the same, and need not be followed."""

    def __init__(self) -> None:
        self.saved = NOTHING
        self.forward = self.backward = Risen({}, {}, 0)
        self.made_bytes = 0
        """As ``Step.made_bytes``."""
        self.result: Any = None
        """Shapes in place of results; None until they are known, or if shapes alone do not describe them."""
        self.grads: list[bool] | None = None
        """Which arguments got a gradient; None until that is known."""


class _FollowedCall:
    """One call, which backward repeats."""

    def __init__(
        self, unit: _FollowedUnit, leaves: list[Any], form: Any, given: list[int], met: list[bool], known: _KnownCall
    ) -> None:
        """Prepare a call.

        Args:
            unit: The unit that is called.
            leaves: All parts of the arguments.
            form: The form of the arguments.
            given: Which of the leaves need a gradient.
            met: Whether an earlier unit got these, too.
            known: What is known of calls of this kind.
        """
        self.unit, self.given, self.known, self._met, self._form = unit, given, known, met, form
        self.leaves = [None if i in given else leaf for i, leaf in enumerate(leaves)]
        self.result: Any = None
        self.made: set[int] = set()
        self._autocast = Autocast.now(unit.watch.device)

    def begin_call(self, given: Sequence[torch.Tensor]) -> SavedByPolicy:
        """Begin to note what a call saves. Args: given: Arguments that need a gradient."""
        arguments = [t for t in (*self.leaves, *given) if isinstance(t, torch.Tensor)]
        return self.unit.watch.begin_call(arguments, itertools.compress(given, self._met))

    def forward(self, tensors: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run on new leaves that share memory with these tensors. Returns the leaves, and results with a gradient."""
        inner = [t.detach().requires_grad_() for t in tensors]
        leaves = [own_cache(leaf) if is_cache(leaf) else leaf for leaf in self.leaves]
        for i, leaf in zip(self.given, inner, strict=True):
            leaves[i] = leaf
        args, kwargs = pytree.tree_unflatten(leaves, self._form)
        torch.clear_autocast_cache()
        with self._autocast.again():
            self.result = self.unit.forward(*args, **kwargs)
        torch.clear_autocast_cache()
        results = pytree.tree_leaves(self.result)
        self.made = {i for i, t in enumerate(results) if isinstance(t, torch.Tensor) and t.grad_fn is not None}
        return inner, [t for i, t in enumerate(results) if i in self.made]

    def learn(self, made: Sequence[torch.Tensor], saved: SavedBytes) -> None:
        """Keep what the first call saved and returned."""
        known, results = self.known, pytree.tree_leaves(self.result)
        known.saved, known.forward = saved, self.unit.watch.risen
        if all(i in self.made or t is None or isinstance(t, bool | int | float | str) for i, t in enumerate(results)):
            known.result = pytree.tree_map_only(torch.Tensor, Shape, self.result)

    def invent(self) -> list[torch.Tensor]:
        """Make results like those of the first call."""
        self.unit.watch.rise(self.known.forward)
        self.result = pytree.tree_map_only(Shape, Shape.empty, self.known.result)
        results = pytree.tree_leaves(self.result)
        self.made = {i for i, t in enumerate(results) if isinstance(t, torch.Tensor)}
        return [t for t in results if isinstance(t, torch.Tensor)]


class _RecomputedUnit(torch.autograd.Function):
    """A unit that is recomputed."""

    @staticmethod
    def forward(ctx: Any, run: _FollowedCall, anchor: torch.Tensor, *given: torch.Tensor) -> Any:
        ctx.run = run
        ctx.set_materialize_grads(False)
        ctx.given = [t.detach() for t in given]  # the watch notes when the tensors themselves are gone
        unit, watch = run.unit, run.unit.watch
        watch.visit(unit.name, is_backward=False)
        if run.known.result is not None:
            unit.count(run.known.saved)
            return tuple(run.invent())
        saving = run.begin_call(given)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saving.keep, _never):
            made = run.forward(given)[1]
        saved = watch.end_call(made)
        unit.count(saved)
        run.learn(made, saved)
        return tuple(t.detach() for t in made)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        run: _FollowedCall = ctx.run
        given, ctx.given = ctx.given, None
        params, watch, known = run.unit.params(), run.unit.watch, run.known
        watch.visit(run.unit.name, is_backward=True)
        if known.grads is not None:
            watch.walk().peak = known.made_bytes
            watch.rise(known.backward)
            pairs = zip(given, known.grads, strict=True)
            return (None, None, *(torch.empty_like(t) if is_given else None for t, is_given in pairs))
        run.begin_call(given)
        with torch.enable_grad():
            inner, made = run.forward(given)
        watch.end_call(made)
        run.result = None
        outputs = [get_gradient_edge(t) for t, g in zip(made, grads, strict=True) if g is not None]
        del made
        walk = watch.walk()
        found = torch.autograd.grad(outputs, [*inner, *params], [g for g in grads if g is not None], allow_unused=True)
        known.backward, known.made_bytes = watch.risen, walk.peak
        known.grads = [g is not None for g in found[: len(inner)]]
        return (None, None, *found[: len(inner)])


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, torch.Tensor) and has_rows(value, rows)


def _never(_: object) -> torch.Tensor:
    raise AssertionError("forward saves nothing")
