"""Updates: what ``step()`` does with each unit, wherever its bytes live.

[Note: forward window] ``step()`` takes a snapshot of settings and clip factors, submits every update and returns.
Updates are submitted in the order in which forward will need the units, and a unit's fetch waits for its own update
only. Units whose states live on the device are updated on compute at once.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from outcore.core.errors import UnsupportedError
from outcore.device.device import Device
from outcore.device.lanes import Handle
from outcore.engine.gradients.handle import GradHandle
from outcore.engine.gradients.unit_gradients import UnitGradients
from outcore.engine.unit.unit import Unit
from outcore.engine.updates.workers import UpdateWorkers
from outcore.engine.values.access import ValueAccess
from outcore.memory.arena import Buffer
from outcore.optim.blocks import numbers_after, update_blocks
from outcore.optim.formats import format_of, refuse_other_format
from outcore.optim.piece import Piece, join_neighbours
from outcore.optim.rules import Hyper, UpdateRule
from outcore.order.ledger import ByteSpan
from outcore.ranks.world import World
from outcore.spec.lane_names import Lane
from outcore.spec.model import ParamSpec, StateFormat

Copies = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Pairs of target and source."""
_NO_LIKES: Mapping[str, torch.Tensor] = {}


class Factors:
    """Factors of one step's gradients, on the host. A clip factor that serves all parameters is copied once."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._copies: dict[int, tuple[torch.Tensor, Handle | None]] = {}

    def of(self, handle: GradHandle) -> tuple[list[torch.Tensor], list[Handle]]:
        """Bring a gradient's factors to the host without blocking it. Returns them, and copies perhaps under way."""
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
    """The work of a unit's update in one step. See ``order.updates.UpdateWork``."""

    def __init__(
        self,
        gradients: UnitGradients,
        changes: Mapping[int, ParameterChange],
        copied: list[Handle],
        device: Device,
        workers: UpdateWorkers | None,
        *,
        is_early: bool,
        world: World | None = None,
    ) -> None:
        """Describe the update.

        Args:
            gradients: The unit's gradients. They are only read, since without zeroing the next backward accumulates on
                them.
            changes: Changes by parameter index. Other parameters keep weights and states.
            copied: Copies of clip factors to the host that may be under way.
            device: Device of the unit.
            workers: None if every unit is updated on the device.
            is_early: Whether the update was made inside backward.
            world: All ranks, if there are several.
        """
        self._world = world
        self._gradients, self._changes, self._copied = gradients, changes, copied
        self.unit, self._device, self._workers, self.is_early = gradients.unit, device, workers, is_early

    @property
    def factors(self) -> list[Handle]:
        """Operations that must be over before factors can be read."""
        if self.unit.plan.update != "device":
            return self._copied
        made = [f for change in self._changes.values() for f in change.factors if not f.is_cpu]
        for factor in made:
            self._device.hand_over(factor, Lane.DEVICE_UPDATE)
        return [self._device.mark("clip factor made")] if made else []

    def begin(self) -> None:
        """Note that the weights of the unit are about to change, or have changed."""
        unit = self.unit
        if unit.presence.num_calls:
            raise AssertionError(f"unit '{unit.label}' is bound while its weights change")
        unit.weights_version += 1
        if unit.ledger.cut.is_resident:  # as in the plain step: a graph that saved the old weights must not be walked
            for i in self._changes:
                torch.autograd.graph.increment_version(unit.params[i])
            unit.presence.watch.note_versions()

    def at_once(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> None:
        """Update on compute."""
        pieces = pieces_of(self._gradients, self._changes, grads.memory, states.memory, weights.memory)
        update_blocks(pieces, self._room(scratch))

    def in_place(
        self, grads: ByteSpan, states: ByteSpan | None, weights: ByteSpan, *, is_slot: bool
    ) -> Callable[[], None]:
        """Return the work of an update in host memory, which the update lane runs."""
        held = self.unit.ledger.states.memory if states is None else states.memory  # None, or without bytes
        pieces = pieces_of(self._gradients, self._changes, grads.memory, held, weights.memory)
        copies = self._unchanged(held, weights.memory) if is_slot and held is not None else []

        def work() -> None:
            run_on(self._workers, pieces)
            copy_all(copies)

        return work

    def staged(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> Callable[[], None]:
        """Return the work of an update in a staging slot."""
        held = states.memory
        pieces = pieces_of(self._gradients, self._changes, grads.memory, held, weights.memory)
        copies = self._unchanged(held, weights.memory) if self.unit.ledger.has_master and held is not None else []
        room, workers = self._room(scratch), self._workers
        on_cpu = workers is not None and room.is_cpu
        whole = [piece for piece in pieces if piece.is_whole and on_cpu]  # see UpdateWorkers, [Note: whole parameters]
        parts = [piece for piece in pieces if not (piece.is_whole and on_cpu)]

        def work() -> None:
            update_blocks(parts, room)
            if whole:
                run_on(workers, whole)
            copy_all(copies)

        return work

    def weights_sent(self) -> None:
        """Hide the parameters, so that a read before the copy is done waits for it."""
        self.unit.presence.hide()

    def gather(self, weights: ByteSpan) -> Callable[[], None]:
        """Return the work that brings the new runs of other ranks."""
        world, unit, cut = self._world, self.unit, self.unit.ledger.cut
        if world is None:
            raise AssertionError("weights are gathered by one rank alone")
        if not cut.is_one_copy:
            return partial(world.gather, world.facts, unit.label, weights.memory.bytes, cut.trained_sharers)
        copy = unit.ledger.weights.memory.bytes[: unit.spec.trainable_bytes]
        return partial(world.fill_copy, world.facts, unit.label, copy, cut.num_sharers)

    def _room(self, scratch: ByteSpan) -> torch.Tensor:
        memory: torch.Tensor = scratch.memory.bytes
        return memory[: min(memory.numel(), self._device.update_block_bytes)]

    def _unchanged(self, states: Buffer, weights: Buffer) -> Copies:
        """Return copies of weights that are not updated: a slot must carry them too, since it goes home as a whole."""
        unit = self.unit
        masters, views = unit.views.state(states, "master"), unit.views.own(weights)
        lost = (i for i, is_compact in enumerate(unit.views.is_compact) if i not in self._changes and not is_compact)
        return [(views[i], masters[i]) for i in lost]


def run_on(workers: UpdateWorkers | None, pieces: Sequence[Piece]) -> None:
    """Update pieces in host memory."""
    if workers is None:
        raise AssertionError("an update on the host without workers")
    workers.run(join_neighbours(pieces))  # here, so that the thread which submits does not wait for it


def copy_all(copies: Copies) -> None:
    """Copy sources to targets."""
    for to, origin in copies:
        to.copy_(origin)


@dataclass(frozen=True, slots=True)
class ParameterChange:
    """What one step does to one parameter. All of it is known when ``step()`` is called."""

    step: int
    hyper: Hyper
    factors: tuple[torch.Tensor, ...]
    """Factors of the gradient, on the device of the update."""
    is_zero: bool
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Values before the step of states that are a single number."""


def pieces_of(
    gradients: UnitGradients,
    changes: Mapping[int, ParameterChange],
    grads: Buffer,
    states: Buffer | None,
    weights: Buffer,
    *,
    old_states: Buffer | None = None,
    old_weights: Buffer | None = None,
) -> list[Piece]:
    """Return the pieces of a unit's update, one for each parameter. With old buffers the update is out of place."""
    unit = gradients.unit
    views, weight_views = _views(unit, states), unit.views.own(weights)
    old_views, stored = _views(unit, old_states), gradients.stored_views(grads)
    old_weight_views = None if old_weights is None else unit.views.own(old_weights)
    pieces = []
    for i, change in changes.items():
        if not unit.spec.own_ranges[i][1] and (unit.spec.params[i].numel or unit.spec.rank):  # another rank updates it
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
    """Return the shapes that a rule must see of a parameter that is updated as a whole; see ``Piece``."""
    forms = (spec.forms[index] for spec in unit.ledger.state_specs.values())
    own = {form.name: form.shape for form in forms if form is not None and form.shape is not None}
    return {"": unit.gradient_form.likes[index]} | {n: torch.empty(s, device="meta") for n, s in own.items()}


def _views(unit: Unit, states: Buffer | None) -> dict[str, list[torch.Tensor]]:
    return {name: unit.views.state(states, name) for name in unit.ledger.state_specs} if states is not None else {}


class Numbers:
    """States that are one number per parameter. The host knows them, so that a step need not wait for their home.

    These are the values that the homes have, or will have when all submitted updates are over.

    After any other write to a unit's states (``Unit.states_version``) its values are read again.
    """

    def __init__(self, access: ValueAccess) -> None:
        self._access = access
        self._known: dict[tuple[str, int], tuple[int, Mapping[str, float]]] = {}
        self._after: dict[Hashable, Mapping[str, float]] = {}

    def are_known(self, unit: Unit) -> bool:
        """Return whether the numbers of a unit are known without a wait for their home."""
        return all(not names or self._is_known(unit, i) for i, names in enumerate(unit.views.numbers))

    def of(self, unit: Unit, index: int) -> Mapping[str, float]:
        """Return the numbers of a parameter before its next update."""
        names = unit.views.numbers[index]
        if not names:
            return {}
        if not self._is_known(unit, index):
            values = {name: self._access.read_state(unit, name, index).item() for name in names}
            self._known[unit.name, index] = unit.states_version, values
        return self._known[unit.name, index][1]

    def advance(self, unit: Unit, index: int, hyper: Hyper, step: int) -> Mapping[str, float]:
        """Note that an update is submitted. Returns the numbers before it."""
        before, dtypes = self.of(unit, index), unit.views.dtypes[index]
        if dtypes:
            # Most parameters are at the same step of the same group.
            key = hyper, step, tuple(before.items()), tuple(dtypes)
            if key not in self._after:
                self._after = {key: numbers_after(hyper, before, dtypes, step)}
            self._known[unit.name, index] = unit.states_version, self._after[key]
        return before

    def _is_known(self, unit: Unit, index: int) -> bool:
        version, _ = self._known.get((unit.name, index), (-1, {}))
        return version == unit.states_version


class RuleSettings:
    """Turns param groups into settings of the update rule."""

    def __init__(self, rule: UpdateRule | None, held: Callable[[torch.Tensor], ParamSpec | None]) -> None:
        """Args: rule: None without an optimizer. held: Returns the spec of a trained parameter, None of others."""
        self._rule, self._held = rule, held
        self._checked: dict[int, tuple[Hyper, int, StateFormat]] = {}
        self.groups: Sequence[Mapping[str, Any]] = ()
        """The user's own list of param groups."""

    def now(self) -> dict[int, Hyper]:
        """Return the current settings, for updates that do not wait for ``step``."""
        return self.of(self.groups)

    def of(self, groups: Sequence[Mapping[str, Any]]) -> dict[int, Hyper]:
        """Return settings by the id of the parameter.

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
        """Return the rule by which parameters are updated.

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
