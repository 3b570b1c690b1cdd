"""Gradients on the move: collected per backward pass, sent home when the pass is over for their unit.

[Note: a gradient's way] Within one backward pass the gradients of a unit are summed as autograd itself would sum them,
in the dtype in which it makes them. The sum is in a *bucket* on the device. The root, and units whose gradients live on
the device, need no bucket: their sum is in loose tensors. Autograd reaches all parameters of a unit after all calls of
the unit. Then the pass is *closed* for the unit: norms are taken, and the sum goes home. The first micro-batch lands
there as it is (*native* form, the weights layout); a second one is added in the update dtype (*update* form).
``p.grad`` is a handle from then on. Setting it to None, or zeroing it, makes the next gradient the first again.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn

import torch

from outcore.core.errors import UnsupportedError
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.homes import GradientHomes
from outcore.engine.gradients.rank_exchange import RankExchange
from outcore.engine.gradients.unit_gradients import UnitGradients, UnitPass
from outcore.engine.unit.live_port import Recovery
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import outermost_first, torch_dtype
from outcore.engine.values.parameter_values import refuse_other_form
from outcore.optim import kernels
from outcore.order.gradients import GradientOrder
from outcore.order.slots import SlotPool
from outcore.torch_private import at_end_of_task, copy_each, current_task


class BackwardGradients:
    """What a backward does: it collects the gradients of all units, and sends them home."""

    def __init__(
        self,
        units: Sequence[Unit],
        order: GradientOrder[Handle],
        homes: GradientHomes,
        accumulation_steps: int | None,
        recovery: Recovery,
    ) -> None:
        """Begin without gradients.

        Args:
            units: All units.
            order: Submits what a pass needs.
            homes: Where gradients rest.
            accumulation_steps: Micro-batches per step, if promised.
            recovery: Learns how to notice a broken pass, and how to forget it.
        """
        self._order, self._device, self.homes = order, homes.device, homes
        self._accumulation_steps = accumulation_steps
        self.of = {unit.name: UnitGradients(unit, homes, self.deposit) for unit in units}
        self._exchange: RankExchange | None = None
        """Exchanges gradients with the other ranks; None: there are none."""
        self._make_room = self._close_one
        if homes.world is not None:
            mine = [self.of[unit.name] for unit in units if unit.num_trainable]
            self._exchange = RankExchange(mine, order, homes, homes.world, accumulation_steps)
            self._make_room = self._exchange.make_room
        recovery.signs.append(self._notice)
        recovery.parts.append(self._reset)
        self._tasks: dict[int, weakref.ref[object]] = {}
        """Autograd's tasks, each with its end callback. Autograd alone holds that, so it lives as long as the task."""
        self._breaking_off = threading.RLock()  # by autograd's thread, or by the one that notices first
        self._num_passes, self._recovery = 0, recovery
        self._open: dict[str, UnitGradients] = {}
        self.on_last: Callable[[UnitGradients], None] = _nothing
        """Called when the last promised gradient of a unit that is updated early is on its way home."""

    # What calls of units and autograd's own accumulation give.

    def deposit(self, unit: Unit, grads: dict[int, torch.Tensor]) -> None:
        """Take gradients that autograd made in the pass that is running now."""
        if not grads:
            return
        if self._exchange is not None:
            self._exchange.refuse_late(unit)
        gradients = self.of[unit.name]
        try:
            self._join_pass(gradients)
            current = gradients.open
            if current is None:
                expected = sum([p.requires_grad for p in unit.params[: unit.num_trainable]])
                gradients.open = current = UnitPass(gradients, expected)
            with torch.no_grad():
                if gradients.has_bucket and not current.loose:
                    self._into_bucket(gradients, current, grads)
                else:
                    current.add_loose(grads)
            current.present.update(grads)
        except BaseException:
            self.break_off()
            raise

    def begin(self, unit: Unit) -> None:
        """Note that the backward of a unit begins: an exception in it leaves the unit's gradients incomplete."""
        try:
            self._join_pass(self.of[unit.name])
        except BaseException:
            self.break_off()
            raise

    def hook(self, unit: Unit, index: int) -> Callable[[torch.Tensor], None]:
        """Return what autograd calls when it reaches a parameter: once in a pass, after all that gives it a gradient.

        ``p.grad`` is an ordinary tensor then if autograd itself accumulated: for a parameter of the root, or one that
        was read outside of its unit.
        """
        gradients, spec = self.of[unit.name], unit.spec.params[index]
        dtype = torch_dtype(spec.dtype)

        def reached(param: torch.Tensor) -> None:
            if torch.is_grad_enabled() or len(param._post_accumulate_grad_hooks or ()) > 1:
                self._refuse_other_hooks(spec.name)
            if type(param) is not unit.presence.absent_class and (param.dtype != dtype or param.shape != spec.shape):
                refuse_other_form(spec, param)
            grad = param.grad
            if grad is not None and not isinstance(grad, GradHandle):
                param.grad = None
                self.deposit(unit, {index: grad.to(dtype)})
            current = gradients.open
            if current is not None and unit.name:
                current.reached.add(index)
                if len(current.reached) == current.num_expected:
                    try:
                        self._close(gradients)
                    except BaseException:
                        self.break_off()
                        raise

        return reached

    def _refuse_other_hooks(self, name: str) -> NoReturn:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                f"expected a backward without create_graph=True, but the gradient of '{name}' was asked for with it; "
                "double backward through streamed weights is not supported"
            )
        raise UnsupportedError(
            f"expected no post-accumulate-grad hooks, but '{name}' has one, and its gradient leaves the device as soon "
            "as it is there; use register_hook, or act on p.grad between backward() and step()"
        )

    def refuse_unfinished(self) -> None:
        """Raise if gradients of a step are not where the step will look for them."""
        if self._exchange is not None:
            self._exchange.refuse_unfinished()

    def zero(self) -> None:
        """Drop gradients that are not on ``p.grad`` yet: the optimizer zeroes those that are."""
        if self._exchange is not None:
            self._exchange.zero(is_running=bool(self._tasks))

    def after_step(self) -> None:
        """Begin a new accumulation window."""
        for gradients in self.of.values():
            gradients.num_passes = 0
        self.homes.last_factor = None

    # One backward pass.

    def _join_pass(self, gradients: UnitGradients) -> None:
        if self._exchange is not None:
            self._exchange.refuse_broken()
        task = current_task()
        if task not in self._tasks:
            self._notice()
            if not self._tasks:
                if self._recovery.is_due:
                    self._recovery.run()
                self._num_passes += 1
                self.homes.is_infinite = None
            # A backward inside of a backward (reentrant checkpointing) has a task of its own: both are one pass.
            end = functools.partial(self._end_task, task)
            self._tasks[task] = weakref.ref(end, functools.partial(_over, weakref.ref(self), task))
            at_end_of_task(end)
        self._open[gradients.unit.name] = gradients

    def _end_task(self, task: int) -> None:
        """Close what is still open: the root, and units of which not all parameters were reached.

        With several ranks, only the outermost task of a pass does so.
        """
        try:
            if self._exchange is None:
                for gradients in list(self._open.values()):
                    self._close(gradients)
            elif len(self._tasks) == 1:
                self._exchange.finish(self._num_passes)
            if self._exchange is None or len(self._tasks) == 1:
                self._open.clear()
            self._tasks.pop(task, None)
        except BaseException:
            self.break_off()
            raise

    def _notice(self) -> None:
        """Break off the pass if an exception has ended a task of it. Outside of a backward no task may be left.

        Autograd's thread may let go of such a task only later.
        """
        if self._tasks:
            with self._breaking_off:
                if self._tasks and (current_task() < 0 or any(end() is None for end in self._tasks.values())):
                    self.break_off()

    def end_without_callback(self, task: int) -> None:
        """Break off the pass if a task is gone whose end was never called: it ended in an exception."""
        with self._breaking_off:
            if task in self._tasks:
                self.break_off()

    def break_off(self) -> None:
        """End the pass after an exception. Units that it was at lose their gradients: all may be incomplete.

        A plain loop keeps those that were there. For gradients made inside of a block it is not known which these were.
        """
        with self._breaking_off:
            if self._exchange is not None:
                self._exchange.break_off(is_running=bool(self._tasks))
            self._recovery.is_due = True
            for name, gradients in list(self._open.items()):
                gradients.lose()
                del self._open[name]
            self._tasks.clear()

    def _reset(self) -> None:
        """Forget what passes have given so far. See [Note: cut short]."""
        if self._exchange is not None:
            self._exchange.lose_kept()
        if self._open:
            self.break_off()
        for gradients in self.of.values():
            gradients.open = gradients.unit.ledger.bucket = None

    def _into_bucket(self, gradients: UnitGradients, current: UnitPass, grads: dict[int, torch.Tensor]) -> None:
        unit = gradients.unit
        bucket, current.made = self._order.collect(unit.ledger, current.made, self._make_room)
        current.stream = self._device.stream_name()
        views = unit.views.native(bucket.of.memory)
        first = [i for i in grads if i not in current.present]
        if first:
            copy_each([views[i] for i in first], [grads[i] for i in first])
        for i in current.present & grads.keys():
            views[i].add_(grads[i])

    def _close_one(self, pool: SlotPool[Handle]) -> None:
        """Close a unit to free its bucket: units that are called again later hold all buckets of a pool."""
        taken = ((g, g.unit.ledger.bucket) for g in self._open.values())
        self._close(next(g for g, bucket in taken if bucket is not None and bucket.pool is pool))

    @torch.no_grad()
    def _close(self, gradients: UnitGradients) -> None:
        """Take norms, send the sums of this pass home, put handles on ``p.grad``."""
        if self._exchange is not None:
            self._exchange.come(gradients, self._num_passes)
            return
        current = gradients.open
        if current is None:
            return
        unit = gradients.unit
        current.held = held = {i: handle for i, handle in gradients.held_handles().items() if not handle.is_zero}
        # May refuse: the pass is still open then, and is dropped.
        gradients.count_pass(self._num_passes, self._accumulation_steps, is_first=not held)
        gradients.version += 1
        added = current.present & held.keys()
        current.take_over()
        _take_norms(gradients, current, added)
        self._order.send(unit.ledger, current, is_first=not held)
        gradients.put_handles(current.present - added)
        gradients.open = None  # last, so that gradients are known to be lost if this is interrupted before
        if unit.plan.early and gradients.num_passes == self._accumulation_steps:
            self.on_last(gradients)


def _take_norms(gradients: UnitGradients, current: UnitPass, added: set[int]) -> None:
    for i in current.present:
        gradients.norms.pop(i, None)
    if not gradients.homes.clipping or gradients.unit.plan.gradients == "device":
        return  # on the device a norm is taken when it is asked for, as in the plain loop
    unit = gradients.unit
    bucket, specs = unit.ledger.bucket, unit.spec.params
    views = [] if bucket is None else unit.views.bucket(bucket.slot.memory)
    natives = {
        i: outermost_first(specs[i], current.loose[i]) if i in current.loose else views[i]
        for i in current.present - added
    }
    dtypes = unit.gradient_form.update_dtypes
    for batch in _batches(natives, dtypes):
        values = [native.to(dtypes[i]).reshape(-1) for i, native in batch.items()]
        gradients.norms.update(zip(batch, kernels.norms(values), strict=True))


def _over(gradients: weakref.ref[BackwardGradients], task: int, _: object) -> None:
    if (mine := gradients()) is not None:
        mine.end_without_callback(task)


def _batches(natives: Mapping[int, torch.Tensor], dtypes: Sequence[torch.dtype]) -> Iterator[dict[int, torch.Tensor]]:
    """Yield gradients whose norms are taken together: their casts take no more memory than the cast of the largest."""
    cast_numels = {
        i: 0 if native.dtype == dtypes[i] and native.is_contiguous() else native.numel()
        for i, native in natives.items()
    }
    largest = max(cast_numels.values(), default=0)
    batch, room = dict[int, torch.Tensor](), largest
    for i, native in natives.items():
        if cast_numels[i] > room:
            yield batch
            batch, room = {}, largest
        batch[i] = native
        room -= cast_numels[i]
    if batch:
        yield batch


def _nothing(_: UnitGradients) -> None:
    """Do nothing: no unit is updated early."""
