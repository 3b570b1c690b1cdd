"""Calls of units: a call binds weights and runs the block; backward runs it again, or walks the graph that was kept.

[Note: the inner graph] The block runs on detached inputs, in the caller's grad mode, and builds a graph of its own.
In the outer graph of the model ``UnitFunction`` stands for the whole block: inputs and foreign leaves go in, outputs
come out. Under ``recompute`` saved tensors are dropped as soon as autograd saves them. (Running under no_grad instead
would pick other attention kernels and give another loss.) Under ``keep`` they stay. Weights are then saved as their
place in the unit, since the slot will hold another unit in backward.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from outcore.core.errors import OutcoreError, UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.activations.policies import Policy, policy_of
from outcore.engine.activations.room import ActivationRoom, SharedArguments
from outcore.engine.activations.saved import as_saved, escaped, slot_of, version_of
from outcore.engine.activations.saving import Graph, edges_of
from outcore.engine.gradients.passes import BackwardGradients
from outcore.engine.module.argument_hooks import hand_on_hooks
from outcore.engine.module.block_gradients import block_gradients
from outcore.engine.module.compiling import Compiling
from outcore.engine.module.graphs import (
    BlockResults,
    ForwardCall,
    GraphAnchor,
    Recompute,
    TrainedParameters,
    UnitFunction,
    find_leaves,
    guarded_leaf,
    nodes_of,
    refuse_backward,
    refuse_transforms,
    refuse_weights_outside,
    taken,
    weights_version,
)
from outcore.engine.module.side_outputs import active_recording, emptied, hand_over, recording_apart
from outcore.engine.recompute.checks import PendingComparisons, Repeats, summary_of
from outcore.engine.recompute.replay import AutocastCacheOff
from outcore.engine.recompute.structure import Structure, in_training, sharing_memory, take_apart
from outcore.engine.streamed_weights import StreamedWeights, UnitBinding, make_way
from outcore.engine.unit.absent import called_inside
from outcore.engine.unit.unit import Unit
from outcore.engine.values.access import ValueAccess
from outcore.engine.values.parameter_values import OwnEdits
from outcore.order.activations import ActivationOrder
from outcore.spec.schedule import Phase
from outcore.torch_private import (
    as_it_is,
    is_executed,
    is_packing,
    keeps_graph,
    order_of,
    pytree,
    without_torch_function,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class SharedByCalls:
    """What the calls of all units share."""

    weights: StreamedWeights
    gradients: BackwardGradients | None
    """Takes gradients of parameters in an ordinary backward; None: autograd itself takes them."""
    device: Device
    comparisons: PendingComparisons
    access: ValueAccess
    room: ActivationRoom
    activations: ActivationOrder[Handle]
    arguments: SharedArguments
    compiling: Compiling


class UnitCall:
    """Stands in for ``module.forward`` of a unit."""

    _why_once = "double backward through streamed weights is not supported"

    def __init__(self, unit: Unit, shared: SharedByCalls) -> None:
        self.unit = unit
        self._shared, self._weights, self._device = shared, shared.weights, shared.device
        self._is_closed, self._where = False, f"unit '{unit.label}'"
        functools.update_wrapper(self, unit.module.forward)
        self._forward = shared.compiling.forward_of(unit.module)
        self._casts = shared.compiling.casts_of(unit.params, self._device.torch_device)
        self._anchor, self._trained = GraphAnchor(), TrainedParameters(unit)
        self._edits = OwnEdits(unit, shared.access)
        self._repeats = Repeats(unit.modules, self._device, shared.comparisons, self._where)
        self._policy: Policy = policy_of(
            unit, shared.room, shared.activations, shared.arguments, self._device, self._where
        )

    def close(self) -> None:
        """Make backward refuse all graphs made so far."""
        self._is_closed = True

    @as_it_is
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        if not torch.is_grad_enabled():
            return self._run_plain(args, kwargs, Phase.INFERENCE)
        tensors, structure = take_apart((args, tuple(kwargs), tuple(kwargs.values())), self._where)
        needs_graph = self._trained.is_any or any(t.requires_grad for t in tensors)
        if needs_graph or self._weights.has_steps:
            # Frozen units get caches of their own, too: entries that they append would reach the units behind them.
            args, kwargs = in_training(args, kwargs, self._where)
        if not needs_graph:
            self._trained.flags()
            return self._run_plain(args, kwargs, Phase.FORWARD)
        refuse_transforms(self._where)
        if self._device.interrupts is not None:
            self._device.interrupts.listen(self._device)
        activations_leave = self._shared.activations.homes_are_used
        if activations_leave:
            make_way(self._shared.activations, self.unit, self._weights)
        # A checkpoint around the unit repeats the call and expects it to save the same: such a call has no kind.
        kind = self._policy.kind_of(args, kwargs) if self._policy.has_kinds and not is_packing() else None
        kept = as_saved(tensors)
        call, results = self._run_forward(tensors, kept, structure, kind)
        if activations_leave:
            self._shared.arguments.add(tensors)
        if call.outputs:
            given = [t for t, uses in zip(tensors, call.uses, strict=True) for _ in range(uses)]
            saved = kept if call.needs_arguments or is_packing() else []
            # Parameters are inputs too: for torch.autograd.grad, backward(inputs=...) and their own gradient hooks.
            inputs = (self._anchor.leaf, *given, *call.foreign, *self._trained.params)
            taken(given)
            retained = [t.retains_grad for t in call.outputs]
            made = UnitFunction.apply(self, call, saved, *inputs)
            for tensor in itertools.compress(made, retained):
                tensor.retain_grad()
            results.take(made)
        result, added = results.structure.fill(results.tensors)
        hand_over(added)
        return result

    def _bound(self, phase: Phase) -> AbstractContextManager[None]:
        return UnitBinding(self.unit, phase, self._weights, self._device.recorder)

    def _run_plain(self, args: Any, kwargs: Any, phase: Phase) -> Any:
        with self._bound(phase), AutocastCacheOff():
            self._edits.begin()
            result = self._forward(*args, **kwargs)
            tensors, _ = take_apart(result, self._where, are_results=True)
            refuse_weights_outside(self.unit, tensors, self._where)
            edits = self._edits.end()
        self._edits.write_home(edits)
        if torch.is_grad_enabled():
            _refuse_captured(tensors, self._where)
        elif not self.unit.ledger.cut.is_resident:
            made = [t for t in tensors if t.grad_fn is not None]
            if made:
                refuse_backward(made, pytree.tree_leaves((args, kwargs)), self._where)
        return result

    def _run_forward(
        self, tensors: list[torch.Tensor], kept: list[torch.Tensor], structure: Structure, kind: Hashable
    ) -> tuple[ForwardCall, BlockResults]:
        """Run the block first. Args: kept: For a recompute."""
        if self._weights.begin_call(self.unit) and self._weights.calls[-1][1] is Phase.FORWARD:
            raise UnsupportedError(called_inside(self._where))
        wants_grad = [t.requires_grad for t in tensors]
        inner = [_leaf_of(t, self._where) if w else t for t, w in zip(tensors, wants_grad, strict=True)]
        versions = [version_of(t) for t in tensors]
        saving = self._policy.begin(kind, kept)
        state = self._repeats.begin(structure.objects) if saving.may_drop else None
        is_checked = state is not None and self._repeats.is_checked(state, tensors, wants_grad)
        start = order_of(self._anchor.leaf.view_as(self._anchor.leaf).grad_fn)
        with self._bound(Phase.FORWARD):
            flags, recording = self._trained.flags(), active_recording()
            self._edits.begin()
            modes = saving.hooks(), self._casts.cache(is_kept=saving.is_kept)
            outputs, out_structure = self._run(structure, inner, modes, recording)
            for leaf, tensor in zip(inner, tensors, strict=True):
                if leaf is not tensor and leaf._backward_hooks:
                    hand_on_hooks(leaf, tensor, slot_of(self.unit), self._where)
            refuse_weights_outside(self.unit, outputs, self._where)
            edits, slot = self._edits.end(), slot_of(self.unit) if saving.is_kept else range(0)
        self._edits.write_home(edits)
        state = None if saving.is_kept else state
        if state is not None:
            state.drop_unchanged()
        if [version_of(t) for t in tensors] != versions:
            raise UnsupportedError(
                f"{self._where} changed one of its arguments in place, which recompute would do twice; copy it first"
            )
        made = [t for t in outputs if t.grad_fn is not None]
        foreign, used = find_leaves(made, inner, self.unit.params, start, slot, self._where)
        call = ForwardCall(
            flags=flags,
            uses=[used.get(id(t), 0) for t in inner],
            foreign=foreign,
            foreign_versions=[version_of(t) for t in foreign],
            outputs=made,
            weights_version=weights_version(self.unit, is_recomputed=state is not None),
            saving=None,
            watched=sharing_memory(made, tensors),
        )
        call.graph = saving.end(inner, made, call)
        call.saving = saving if saving.is_needed else None  # known now
        if state is not None:
            edited, kind = self._edits.suspects, None if saving.is_needed else kind
            summary = summary_of(outputs, out_structure) if is_checked or edited else None
            shapes, template = [t.shape for t in made], emptied(recording)
            call.recompute = Recompute(structure, wants_grad, shapes, state, template, edited, kind, summary)
        if call.graph is not None:
            call.watched = sorted({*call.watched, *saving.watched(made)})
            self._casts.learn(made)
        return call, BlockResults(outputs, dict(zip(map(id, inner), tensors, strict=True)), out_structure)

    def _run(
        self,
        structure: Structure,
        tensors: Sequence[torch.Tensor],
        modes: Sequence[AbstractContextManager[Any]],
        recording: Mapping[str, Any] | None,
    ) -> tuple[list[torch.Tensor], Structure]:
        """Run the block on inner tensors. Returns its results and what was recorded beside them, taken apart."""
        nest = structure.fill(tensors)
        args, names, values = nest
        try:
            saving, caching = modes
            with torch.enable_grad(), saving, caching, recording_apart(recording) as added:
                result = self._forward(*args, **dict(zip(names, values, strict=True)))
        except RuntimeError as error:
            _explain(error, self._where)
            raise
        if not structure.still_holds(nest, tensors, self._where):
            raise UnsupportedError(
                f"{self._where} changed a list, dict or dataclass that it got as an argument, which recompute would "
                "do twice; return what it adds"
            )
        return take_apart((result, added), self._where, are_results=True)

    def backward(
        self, ctx: Any, call: ForwardCall, saved: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return gradients of inputs, foreign leaves and parameters, in the order of ``UnitFunction``'s inputs.

        In an ordinary backward the gradients of parameters go to ``BackwardGradients`` instead.
        """
        self._refuse_always()
        call.refuse_changes(self.unit, self._where)
        if self._device.interrupts is not None:
            self._device.interrupts.look()
        is_kept = keeps_graph()
        params = self._trained.params
        is_ordinary = is_executed(self._anchor.node)
        wanted = [
            flag and (is_ordinary or _is_wanted(node))
            for flag, (node, _) in zip(call.flags, ctx.next_functions[-len(params) :] if params else (), strict=False)
        ]
        taker = self._shared.gradients if is_ordinary else None
        if taker is not None:
            taker.begin(self.unit)
        with self._bound(Phase.BACKWARD):
            with self._trained.as_in_forward(call.flags):
                saving = call.saving
                if saving is not None:
                    saving.begin_backward()
                graph = self._graph(call, saved, is_ordinary=is_ordinary)
                if not is_kept:
                    call.release()
                edges = ctx.next_functions[1:]  # without the anchor's
                found = block_gradients(call, graph, grads, edges, params, wanted, keeps_graph=is_kept)
            self._device.receive(found.fresh)
            grads_of = self.unit.gradient_form.native(found.params)
            # Autograd itself takes the gradients in a backward for chosen inputs, and those of parameters with hooks,
            # which must see the sum of all calls. Gradients of parameters that were frozen since forward are dropped.
            outside = {i: g for i, g in grads_of.items() if taker is None or params[i]._backward_hooks}
            if taker is not None:
                inside = {i: g for i, g in grads_of.items() if i not in outside and params[i].requires_grad}
                taker.deposit(self.unit, inside)
            if saving is not None:
                saving.end_backward(is_over=not is_kept)
        return [*found.outside, *[outside.get(i) for i in range(len(params))]]

    def break_off(self) -> None:
        """Note that a backward ended in an exception. Autograd may report it long after the program has gone on."""
        if self._shared.gradients is not None:
            self._shared.gradients.break_off()

    def _refuse_always(self) -> None:
        if self._is_closed:
            raise OutcoreError(
                f"{self._where}: expected a prepared model in backward, but it was closed; call backward() before "
                "close()"
            )
        if torch.is_grad_enabled():
            raise UnsupportedError(f"{self._where}: expected a backward without create_graph=True; {self._why_once}")

    def _graph(self, call: ForwardCall, saved: Sequence[torch.Tensor], *, is_ordinary: bool) -> Graph:
        """Return inner inputs and outputs: the kept ones, or those of a recompute."""
        again = call.recompute
        if again is None:
            if call.graph is None:
                why = "expected one backward through this graph, but it is the second"
                raise UnsupportedError(f"{self._where}: {why}; pass retain_graph=True to the first")
            _refuse_escaped(*call.graph, self._where, is_ordinary=is_ordinary)
            return call.graph
        count = None if again.kind is None else self._policy.count(again.kind)
        saving = nullcontext() if count is None else count.hooks()
        if call.saving is not None:
            saving, saved = call.saving.recompute_hooks(saving), call.saving.arguments(saved)
        inner = [guarded_leaf(t, self._where) if w else t for t, w in zip(saved, again.wants_grad, strict=True)]
        with again.state.restored(), self._edits.undone(again.edited):
            modes = saving, self._casts.cache_again(was_on=again.state.caches_casts)
            outputs, structure = self._run(again.inputs, inner, modes, again.recording)
        for leaf in itertools.compress(inner, again.wants_grad):
            leaf._backward_hooks = None  # forward's run of the block has handed its hooks on
        made = [t for t in outputs if t.grad_fn is not None]
        _refuse_other_shapes(made, again.shapes, self._where)
        if again.summary is not None:
            edited = [self.unit.spec.params[i].name for i in again.edited]
            self._repeats.compare(again.summary, summary_of(outputs, structure), edited)
        if count is not None:
            self._policy.learn(again.kind, count, made)
        return inner, edges_of(made)


def _leaf_of(argument: torch.Tensor, where: str) -> torch.Tensor:
    """Return a leaf that stands for an argument in forward. To retain its gradient is to retain the argument's."""
    leaf: Any = guarded_leaf(argument, where)
    if not argument.is_leaf:
        leaf.retain_grad = functools.partial(_retain, weakref.ref(argument))
    return leaf


def _retain(reference: weakref.ref[torch.Tensor]) -> None:
    if (argument := reference()) is not None:
        argument.retain_grad()


def _refuse_captured(results: Sequence[torch.Tensor], where: str) -> None:
    """Raise if a result of a frozen unit needs a gradient though no argument does."""
    if any(t.requires_grad for t in results):
        raise UnsupportedError(
            f"{where} is frozen and no argument needs a gradient, but its result does: a tensor with gradient reached "
            "it by closure; pass it as an argument"
        )


def _is_wanted(node: Any) -> bool:
    """Whether a backward for chosen inputs needs the gradient that flows into a leaf's node."""
    try:
        return is_executed(node)
    except RuntimeError:  # raised by torch if torch.autograd.grad captures this very leaf
        return True


def _refuse_escaped(inner: Sequence[torch.Tensor], outputs: Sequence[Any], where: str, *, is_ordinary: bool) -> None:
    """Raise if the backward that runs now also enters a kept graph by a tensor that the block stored elsewhere.

    Else autograd would say only that the graph, which is freed here, is walked a second time.
    """
    leaves = [t for t in inner if t.requires_grad and t.layout is torch.strided] if is_ordinary else []
    with without_torch_function():  # arguments may be gone
        ends = [torch.autograd.graph.get_gradient_edge(leaf).node for leaf in leaves]
    # Where no such argument needs a gradient, or others are asked for, any node may tell.
    if any(map(_is_wanted, ends or [node for node, _ in nodes_of(outputs)])):
        raise UnsupportedError(escaped(where))


def _refuse_other_shapes(results: Sequence[torch.Tensor], shapes: Sequence[torch.Size], where: str) -> None:
    """Raise if results of a recompute have other shapes than those of its forward."""
    if [t.shape for t in results] != shapes:
        raise UnsupportedError(
            f"{where}: recompute gave results of shapes {[tuple(t.shape) for t in results]}, but forward gave "
            f"{[tuple(shape) for shape in shapes]}; the block depends on something besides its arguments, "
            "random numbers and buffers: move that into a buffer, or give this unit the policy keep in the plan"
        )


def _explain(error: RuntimeError, where: str) -> None:
    """Raise a better error for what torch says of blocks that cannot run here."""
    if "leaf Variable that requires grad" in str(error):
        raise UnsupportedError(
            f"{where} changes one of its arguments in place, which cannot be recomputed; copy it first"
        ) from error
    if "saved tensor hooks" in str(error):
        raise UnsupportedError(
            f"{where} takes gradients by torch.func, which torch cannot do if saved tensors are packed "
            "or dropped; give this unit the policy keep in the plan, with weights and activations on the device"
        ) from error
