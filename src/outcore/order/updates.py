"""Updates: on the host beside the next forward, inside backward, or on the device.

[Note: staged updates] The device updates faster than the CPU, and the link has room beside the fetches. So a plan may
give the device a share of the units whose states live in host memory. States and gradients of such a unit go to a
staging slot on the device and are updated there. Then new weights and states go home. Copies in, updates and copies out
have a lane each, so that with two slots one unit comes while another one leaves. Rule and blocks are those of every
update. On a GPU the results agree with those of the CPU to the rounding of one kernel.

The idea is that of Deep Optimizer States (arXiv:2410.21316, section 4), without its limit of one half.

[Note: one copy] If ranks of a machine share weights in host memory, each rank writes its own run there. It may write
only when all reads of the old weights are over, and the new ones may be read only when all ranks have written. So a
step begins with a meeting of the ranks, for which each rank waits until its own reads are over, and each update ends
with a meeting. Both use the lane of new weights. Between two steps no rank waits for another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, Protocol

from outcore.order.ledger import ByteSpan, H, Home, Ledger, newest
from outcore.order.port import Port, Work, WorkFunction
from outcore.order.slots import Pools, Supply
from outcore.order.weights import WeightOrder
from outcore.spec.lane_names import Lane
from outcore.spec.layout import SCRATCH_BYTES, staging
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


class UpdateWork(Protocol[H]):
    """The work of one unit's update. On paper it does nothing."""

    @property
    def is_early(self) -> bool:
        """Whether the update that ``step()`` asks for was made inside backward."""

    @property
    def factors(self) -> list[H]:
        """Operations that must be over before the host, or a lane of the device, can read the gradients' factors."""

    def begin(self) -> None:
        """Note that the weights are about to change."""

    def at_once(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> None:
        """Update on compute."""

    def in_place(self, grads: ByteSpan, states: ByteSpan | None, weights: ByteSpan, *, is_slot: bool) -> WorkFunction:
        """Update in host memory. Args: is_slot: New weights pass through a slot, all of which is copied home."""

    def staged(self, grads: ByteSpan, states: ByteSpan, weights: ByteSpan, scratch: ByteSpan) -> WorkFunction:
        """Update in the given parts of a staging slot. All new weights are copied home, also those not updated."""

    def weights_sent(self) -> None:
        """Note that new weights are on their way to the device."""

    def gather(self, weights: ByteSpan) -> WorkFunction:
        """Send this rank's new run to all ranks that have the same runs, and receive theirs."""


class UpdateOrder(Generic[H]):
    """Submits the operations of updates."""

    def __init__(
        self, model: ModelSpec, plan: Plan, port: Port[H], pools: Pools[H], supply: Supply[H], weights: WeightOrder[H]
    ) -> None:
        self._model, self._port, self._pools, self._supply, self._weights = model, port, pools, supply, weights
        self._kept_first = plan.kept_updated_first
        self._shared = [unit for unit in weights.units if unit.cut.is_one_copy and unit.cut.updated_bytes]

    def step(
        self,
        units: Iterable[Ledger[H]],
        work_of: Callable[[Ledger[H]], UpdateWork[H] | None],
        meet: WorkFunction = None,
    ) -> None:
        """Submit all updates of a step.

        Units are updated in the given order, with one exception: if the plan says so, units whose states are still in
        slots come first, and these states are not read again. The slot next in line does not count, since the first
        unit whose states must be read takes it.

        Args:
            units: Units in the order in which forward needs them. No unit may be bound.
            work_of: Unit -> its update; None: it is not updated.
            meet: Function that waits for all ranks. See [Note: one copy].
        """
        pools = self._pools.of("host", "states") if self._kept_first else []
        kept: set[Home[H]] = {home for pool in pools for home in pool.spared()}
        if self._shared:
            self._begin(meet)
        for unit in sorted(units, key=lambda unit: unit.states not in kept):
            work = work_of(unit)
            if work is None:
                continue
            self._weights.invalidate(unit)
            work.begin()
            if work.is_early:
                self._change_places(unit, work)
            elif unit.states.tier == "device":
                self._at_once(unit, work)
            elif unit.plan.update == "device":
                self._staged(unit, work)
            else:
                self._on_host(unit, work)

    def _begin(self, meet: WorkFunction) -> None:
        """Submit a meeting, after which no rank reads old weights in shared copies. See [Note: one copy]."""
        homes = [unit.weights for unit in self._shared]
        used = newest(handle for home in homes for handle in (home.ready, *home.readers) if handle is not None)
        met = self._port.submit(
            Lane.GATHER,
            "wait for readers of",
            self._shared[0],
            reads=[],
            writes=[],
            after={"used": used},
            work=Work(meet),
        )
        for home in homes:
            home.written_by(met)

    def _at_once(self, unit: Ledger[H], work: UpdateWork[H]) -> None:
        pool = self._pools.pool("device", "scratch", min(SCRATCH_BYTES, unit.spec.update_bytes))
        scratch, trained = pool.slots[0].span(pool.slot_bytes), unit.weights.span(*unit.cut.updated)
        states = unit.states.span()
        self._port.compute(
            "update",
            unit,
            reads=[unit.gradients.span()],
            writes=[trained, *([states] if states.nbytes else []), scratch],
            after={**unit.gradients.before_read(), **unit.states.before_write(), **unit.weights.before_write()},
        )
        work.at_once(unit.gradients.span(), states, trained, scratch)
        done = self._port.mark("updated", unit)
        unit.states.written_by(done)
        if unit.spec.num_ranks > 1:
            unit.gradients.read_by(done)
            done = self._gathered(unit, trained, done, work)
        if unit.spec.num_ranks > 1 and unit.cut.is_resident:
            work.weights_sent()
        unit.weights.written_by(done)

    # On the host.

    def _on_host(self, unit: Ledger[H], work: UpdateWork[H]) -> None:
        """Bring what is missing, update, write back."""
        grads, states = self._supply.gradients(unit), self._supply.states(unit)
        target = self._supply.new_weights(unit)
        held = None if states is None else states.span
        done = self._port.submit(
            Lane.UPDATE,
            "update",
            unit,
            reads=[grads.span],
            writes=[target.span, *([] if held is None else [held])],
            after={
                **grads.after,
                **target.after,
                **({} if states is None else states.after),
                "clip factor copied": work.factors,
            },
            work=Work(work.in_place(grads.span, held, target.span, is_slot=target.taken is not None)),
        )
        self._supply.give_back_gradients(unit, grads, done)
        if states is not None:
            self._supply.write_states(unit, states, unit.states, done)
        if unit.spec.num_ranks > 1:
            done = self._gathered(unit, target.span, done, work)
        if target.taken is None:
            unit.weights.written_by(done)
            return
        lane = Lane.WRITE_BACK if unit.weights.tier == "device" else Lane.DISK_WRITE
        self._pools.give_back(target.taken, self._send_weights(unit, target.span, done, work), lane)

    def _gathered(self, unit: Ledger[H], new: ByteSpan, done: H, work: UpdateWork[H]) -> H:
        """Complete new weights, of which this rank has made only its own run, with the runs of other ranks.

        Returns the operation after which the new weights are complete.
        """
        if unit.cut.num_copies == 1 and not unit.cut.is_one_copy:
            return done
        moved = (unit.cut.num_copies - 1) * unit.spec.run_bytes
        return self._port.submit(
            Lane.GATHER,
            "gather weights of",
            unit,
            reads=[],
            writes=[unit.weights.span() if unit.cut.is_one_copy else new],
            after={"weights updated": done},
            work=Work(work.gather(new), moved=moved),
        )

    def _send_weights(self, unit: Ledger[H], new: ByteSpan, done: H, work: UpdateWork[H]) -> H:
        """Send new trained weights from host memory to their home on the device or on disk."""
        lane = Lane.WRITE_BACK if unit.weights.tier == "device" else Lane.DISK_WRITE
        sent = self._port.submit(
            lane,
            "write weights of",
            unit,
            reads=[new],
            writes=[unit.weights.span(0, new.nbytes)],
            after={"weights updated on the host": done, **self._unused(unit), **unit.weights.before_write()},
        )
        unit.weights.written_by(sent)
        if unit.cut.is_resident:
            work.weights_sent()
        return sent

    def _unused(self, unit: Ledger[H]) -> dict[str, H]:
        """Return what a write to weights on the device must wait for: compute has used the old ones."""
        return {"weights used": self._port.mark("weights used", unit)} if unit.cut.is_resident else {}

    def _change_places(self, unit: Ledger[H], work: UpdateWork[H]) -> None:
        """Exchange first and second homes. If weights live on the device or on disk, the new ones are sent there."""
        unit.states, unit.next_states = unit.next_states, unit.states
        sent: H | None = None
        if unit.weights.tier == "host":
            unit.weights, unit.next_weights = unit.next_weights, unit.weights
        elif unit.next_weights.ready is not None:
            sent = self._send_weights(unit, unit.next_weights.span(), unit.next_weights.ready, work)
        for home in (unit.next_states, unit.next_weights):
            if home.tier == "host" and home.nbytes:
                free = self._port.freed(home, Lane.UPDATE, {"new weights sent": sent, **home.before_write()})
                if free is not None:  # old weights from disk are read there by another lane
                    home.written_by(free)

    # On the device, of states in host memory. See [Note: staged updates].

    def _staged(self, unit: Ledger[H], work: UpdateWork[H]) -> None:
        layout = staging(unit.spec, unit.plan, self._model)
        taken = self._pools.take("device", "staging", layout.scratch[1])
        states, grads, weights, scratch = (taken.slot.span(stop, start) for start, stop in layout)
        brought = self._bring(unit, taken.slot.free_after, states, grads, weights)
        reads = grads if grads.nbytes else unit.gradients.span()
        updated = self._port.submit(
            Lane.DEVICE_UPDATE,
            "update",
            unit,
            reads=[reads],
            writes=[part for part in (states, weights, scratch) if part.nbytes],
            after={"staged": brought, "clip factor made": work.factors, **unit.gradients.before_read()},
            work=Work(work.staged(reads, states, weights, scratch)),
        )
        if not grads.nbytes:
            unit.gradients.read_by(updated)
        if unit.spec.num_ranks > 1 and not unit.cut.is_one_copy:
            updated = self._gathered(unit, weights, updated, work)
        left = self._take_home(unit, states, weights, updated, work)
        free = self._port.freed(taken.slot, Lane.DEVICE_UPDATE, {"staged bytes home": left})
        taken.pool.give_back(taken.slot, [*left, free])

    def _bring(self, unit: Ledger[H], free_after: list[H], states: ByteSpan, grads: ByteSpan, weights: ByteSpan) -> H:
        """Copy to the device what the update reads: states, gradients in host memory, weights that it starts from."""
        wanted = [(unit.states, states), (unit.gradients, grads)] + [(unit.weights, weights)] * unit.starts_from_weights
        pairs = [(home, part) for home, part in wanted if part.nbytes]
        firsts = [unit.cut.updated[0] if home is unit.weights else 0 for home, _ in pairs]
        after = {"staging free": free_after}
        for home, _ in pairs:
            after |= home.before_read()  # type: ignore[arg-type]
        brought = self._port.submit(
            Lane.STATES_H2D,
            "stage",
            unit,
            reads=[home.span(at, at + part.nbytes) for at, (home, part) in zip(firsts, pairs, strict=True)],
            writes=[part for _, part in pairs],
            after=after,
        )
        for home, _ in pairs:
            home.read_by(brought)
        return brought

    def _take_home(
        self, unit: Ledger[H], states: ByteSpan, weights: ByteSpan, updated: H, work: UpdateWork[H]
    ) -> list[H]:
        """Copy new weights and states to their homes. Returns what must be over before the staging slot is free.

        Weights go first, since the next forward waits for them; only the next update waits for the states.
        """
        sent = self._port.submit(
            Lane.DEVICE_UPDATE if unit.weights.tier == "device" else Lane.STATES_D2H,
            "new weights of",
            unit,
            reads=[weights],
            writes=[unit.weights.span(*unit.cut.updated)],
            after={"updated on the device": updated, **self._unused(unit), **unit.weights.before_write()},
        )
        unit.weights.written_by(self._gathered(unit, weights, sent, work) if unit.cut.is_one_copy else sent)
        if unit.cut.is_resident:
            work.weights_sent()
        if not states.nbytes:
            return [sent]
        after = {"updated on the device": updated, **unit.states.before_write()}
        home = self._port.submit(
            Lane.STATES_D2H, "states of", unit, reads=[states], writes=[unit.states.span()], after=after
        )
        unit.states.written_by(home)
        return [sent, home]
