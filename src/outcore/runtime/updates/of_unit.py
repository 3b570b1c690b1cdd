"""Updates: what ``step()`` does with each unit, wherever its bytes live.

[Note: forward window] ``step()`` takes a snapshot of settings and clip factors, submits every update and returns.
Units are submitted in the order in which forward will need them, and a unit's fetch waits for its own update only.
Units whose states live on the device are updated on compute at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.memory.arena import Buffer
from outcore.optim.blocks import Piece, update_blocks
from outcore.optim.formats import format_of, refuse_other_format
from outcore.optim.rules import Hyper, UpdateRule
from outcore.order.ledger import Span
from outcore.ranks.world import World
from outcore.runtime.gradients.handle import GradHandle
from outcore.runtime.gradients.of_unit import UnitGradients
from outcore.runtime.unit.unit import Unit
from outcore.runtime.updates.workers import UpdateWorkers
from outcore.spec.lanes import Lane
from outcore.spec.model import ParamSpec, StateFormat

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources."""
_NO_LIKES: Mapping[str, torch.Tensor] = {}


class Factors:
    """Factors of gradients on the host, in one step: one clip factor serves all parameters, and is copied once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.Tensor, Handle | None]] = {}

    def of(self, handle: GradHandle) -> tuple[list[torch.Tensor], list[Handle]]:
        """Bring a gradient's factors to the host without blocking it; and the copies that may be under way."""
        found, ready = [], []
        for factor in (*handle.averaging, *handle.factors):
            if id(factor) not in self._copies:
                self._copies[id(factor)] = self._copy(factor)
            value, copied = self._copies[id(factor)]
            found.append(value)
            if copied is not None:
                ready.append(copied)
        return found, ready

    def _copy(self, factor: torch.Tensor) -> tuple[torch.Tensor, Handle | None]:
        if factor.is_cpu:
            return factor, None
        target = torch.empty((), dtype=factor.dtype, device="cpu", pin_memory=True)
        self._device.hand_over(factor, Lane.D2H)
        made = self._device.mark("clip factor made")
        copied = self._device.submit(
            Lane.D2H, "clip factor", lambda: target.copy_(factor, non_blocking=True), after={"clip factor made": made}
        )
        return target, copied


class UnitUpdate:
    """What the update of a unit does in a step. See ``order.updates.UpdateWork``."""

    def __init__(
        self,
        gradients: UnitGradients,
        changes: Mapping[int, Change],
        copied: list[Handle],
        device: Device,
        workers: UpdateWorkers | None,
        *,
        is_early: bool,
        world: World | None = None,
    ) -> None:
        """What is to be done.

        Args:
            gradients: Only read, also by the update: without zeroing, the next backward accumulates on them.
            changes: By parameter index; others keep weights and states.
            copied: Copies of clip factors to the host that may be under way.
            device: Of the unit.
            workers: None if every unit is updated on the device.
            is_early: It was done inside backward.
            world: This rank and the others, if there are several.
        """
        self._world = world
        self._gradients, self._changes, self._copied = gradients, changes, copied
        self.unit, self._device, self._workers, self.is_early = gradients.unit, device, workers, is_early

    @property
    def factors(self) -> list[Handle]:
        """What must be over before factors can be read."""
        if self.unit.plan.update != "device":
            return self._copied
        made = [f for change in self._changes.values() for f in change.factors if not f.is_cpu]
        for factor in made:
            self._device.hand_over(factor, Lane.DEVICE_UPDATE)
        return [self._device.mark("clip factor made")] if made else []

    def begin(self) -> None:
        """Note that the weights of the unit are about to change, or did."""
        unit = self.unit
        if unit.presence.num_calls:
            raise AssertionError(f"unit '{unit.label}' is bound while its weights change")
        unit.weights_version += 1
        if unit.ledger.cut.is_resident:  # as in the plain step: a graph that saved the old weights must not be walked
            for i in self._changes:
                torch.autograd.graph.increment_version(unit.params[i])
            unit.presence.watch.note_versions()

    def at_once(self, grads: Span, states: Span, weights: Span, scratch: Span) -> None:
        """Update on compute."""
        held = states.memory if states.nbytes else None
        pieces = pieces_of(self._gradients, self._changes, grads.memory, held, weights.memory)
        update_blocks(pieces, self._room(scratch))

    def in_place(self, grads: Span, states: Span | None, weights: Span, *, is_slot: bool) -> Callable[[], None]:
        """Update in host memory; the update lane runs it."""
        held = None if states is None else states.memory
        pieces = pieces_of(self._gradients, self._changes, grads.memory, held, weights.memory)
        copies = self._unchanged(held, weights.memory) if is_slot and held is not None else []

        def deed() -> None:
            run_on(self._workers, pieces)
            copy_all(copies)

        return deed

    def staged(self, grads: Span, states: Span, weights: Span, scratch: Span) -> Callable[[], None]:
        """Update in a staging slot."""
        held = states.memory if states.nbytes else None
        pieces = pieces_of(self._gradients, self._changes, grads.memory, held, weights.memory)
        copies = self._unchanged(held, weights.memory) if self.unit.ledger.has_master and held is not None else []
        room, workers = self._room(scratch), self._workers
        on_cpu = workers is not None and room.is_cpu
        whole = [piece for piece in pieces if piece.is_whole and on_cpu]  # see UpdateWorkers, [Note: whole parameters]
        parts = [piece for piece in pieces if not (piece.is_whole and on_cpu)]

        def deed() -> None:
            update_blocks(parts, room)
            if whole:
                run_on(workers, whole)
            copy_all(copies)

        return deed

    def weights_sent(self) -> None:
        """Reading a weight before the copy is done must wait for it."""
        self.unit.presence.hide()

    def gather(self, weights: Span) -> Callable[[], None]:
        """The new runs of other ranks."""
        world, unit, cut = self._world, self.unit, self.unit.ledger.cut
        if world is None:
            raise AssertionError("weights are gathered by one rank alone")
        if not cut.is_one_copy:
            return partial(world.gather, world.facts, unit.label, weights.memory.bytes, cut.trained_sharers)
        copy = unit.ledger.weights.memory.bytes[: unit.spec.trainable_bytes]
        return partial(world.fill_copy, world.facts, unit.label, copy, cut.num_sharers)

    def _room(self, scratch: Span) -> torch.Tensor:
        memory: torch.Tensor = scratch.memory.bytes
        return memory[: min(memory.numel(), self._device.update_block_bytes)]

    def _unchanged(self, states: Buffer, weights: Buffer) -> Copies:
        """Weights that a slot must carry home although they were not updated: the home is overwritten as a whole."""
        unit = self.unit
        masters, views = unit.views.state(states, "master"), unit.views.own(weights)
        lost = (i for i, is_compact in enumerate(unit.views.is_compact) if i not in self._changes and not is_compact)
        return [(views[i], masters[i]) for i in lost]


def run_on(workers: UpdateWorkers | None, pieces: Sequence[Piece]) -> None:
    """Update pieces in host memory."""
    if workers is None:
        raise AssertionError("an update on the host without workers")
    workers.run(pieces)


def copy_all(copies: Copies) -> None:
    """Copy sources to targets."""
    for to, origin in copies:
        to.copy_(origin)


@dataclass(frozen=True, slots=True)
class Change:
    """What one step does to one parameter, all of it known when ``step()`` is called."""

    step: int
    hyper: Hyper
    factors: tuple[torch.Tensor, ...]
    """On the device of the update."""
    is_zero: bool
    numbers: Mapping[str, float] = field(default_factory=dict)
    """States that are one number, as they are before it."""


def pieces_of(
    gradients: UnitGradients,
    changes: Mapping[int, Change],
    grads: Buffer,
    states: Buffer | None,
    weights: Buffer,
    *,
    old_states: Buffer | None = None,
    old_weights: Buffer | None = None,
) -> list[Piece]:
    """The update of a unit, by parameter; out of place where old buffers are given."""
    unit = gradients.unit
    views, weight_views = _views(unit, states), unit.views.own(weights)
    old_views, stored = _views(unit, old_states), gradients.stored_views(grads)
    old_weight_views = None if old_weights is None else unit.views.own(old_weights)
    pieces = []
    for i, change in changes.items():
        if not unit.spec.own_ranges[i][1] and (unit.spec.params[i].numel or unit.spec.rank):  # others update it
            continue
        moments = unit.views.state_names[i] if views else ()
        has_master = unit.ledger.has_master and not unit.views.is_compact[i]
        old_targets = old_views.get("master") if has_master else old_weight_views
        pieces.append(
            Piece(
                target=views["master"][i] if has_master else weight_views[i],
                grad=None if change.is_zero else stored[i],
                states={name: views[name][i] for name in moments},
                weights=weight_views[i] if has_master else None,
                step=change.step,
                hyper=change.hyper,
                factors=change.factors,
                zero=change.is_zero,
                old_target=None if old_targets is None else old_targets[i],
                old_states={name: old_views[name][i] for name in moments} if old_views else {},
                numbers=change.numbers,
                codes=unit.views.codes[i],
                start=unit.spec.own_ranges[i][0],
                likes=likes_of(unit, i) if unit.spec.params[i].is_whole else _NO_LIKES,
            )
        )
    return pieces


def likes_of(unit: Unit, index: int) -> Mapping[str, torch.Tensor]:
    """The shapes that a rule is to see of a parameter that is updated as a whole; see ``Piece``."""
    forms = (spec.forms[index] for spec in unit.ledger.state_specs.values())
    own = {form.name: form.shape for form in forms if form is not None and form.shape is not None}
    return {"": unit.gradient_form.likes[index]} | {n: torch.empty(s, device="meta") for n, s in own.items()}


def _views(unit: Unit, states: Buffer | None) -> dict[str, list[torch.Tensor]]:
    return {name: unit.views.state(states, name) for name in unit.ledger.state_specs} if states is not None else {}


class Settings:
    """What the rule makes of param groups."""

    def __init__(self, rule: UpdateRule | None, held: Callable[[torch.Tensor], ParamSpec | None]) -> None:
        """Args: rule: None without an optimizer. held: What is kept of a parameter, if it is trained."""
        self._rule, self._held = rule, held
        self._checked: dict[int, tuple[Hyper, int, StateFormat]] = {}
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The user's own list."""

    def now(self) -> dict[int, Hyper]:
        """For updates that do not wait for ``step``."""
        return self.of(self.groups)

    def of(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyper]:
        """Settings by the id of the parameter.

        Raises:
            UnsupportedError: There is no optimizer, or a group needs states for which no memory was taken.
        """
        rule = self.expect_rule()
        hypers = [rule.hyper(group) for group in groups]
        for number, (hyper, group) in enumerate(zip(hypers, groups, strict=True)):
            now = hyper, len(group["params"]), format_of(group)
            if self._checked.get(number) != now:
                self._refuse_new_states(rule, group)
                self._checked[number] = now
        return {id(p): hyper for group, hyper in zip(groups, hypers, strict=True) for p in group["params"]}

    def expect_rule(self) -> UpdateRule:
        """How parameters are updated.

        Raises:
            UnsupportedError: There is no optimizer.
        """
        if self._rule is None:
            raise UnsupportedError(
                "expected an optimizer given to outcore.prepare(), but there was none (optimizer=None); nothing to step"
            )
        return self._rule

    def _refuse_new_states(self, rule: UpdateRule, group: Mapping[str, Any]) -> None:
        for param in group["params"]:
            spec = self._held(param)
            if spec is None:
                continue
            held = {form.name: form for form in spec.states or ()}
            refuse_other_format(spec, group)
            missing = [name for name in rule.states(param, group) if name not in held]
            if missing:
                raise UnsupportedError(
                    f"expected param groups that need no other states than at outcore.prepare(), but one needs "
                    f"{', '.join(missing)} now, for which no memory was taken; set momentum or amsgrad before prepare "
                    "(momentum may be set to 0 afterwards and switched on again later)"
                )
