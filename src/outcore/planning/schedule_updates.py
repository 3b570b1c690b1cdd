"""Updates of a schedule: behind the next forward, inside backward, or on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outcore.planning.operations import Home, Index, Kept, Operations, ScheduledUnit, Taken
from outcore.planning.schedule_gradients import Gradients
from outcore.spec.layout import staging
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan
from outcore.spec.timeline import COMPUTE


class Updates:
    """Lays out what the runtime submits to update units: every early update is made in time, and kept."""

    def __init__(self, operations: Operations, model: ModelSpec, plan: Plan) -> None:
        self._operations, self._model = operations, model
        self.gradients = Gradients(operations, plan, self._attempt)

    def kept_first(self, indices: Iterable[int]) -> list[int]:
        """Units whose states are in slots still are updated first, so that they are not read again."""
        kept = {of for pool in self._operations.pools("states") for of in pool.spared()}
        return sorted(indices, key=lambda i: self._operations.units[i].kept_states() not in kept)

    def update(self, unit: ScheduledUnit, backward_over: Index) -> None:
        """What ``step()`` does for a unit.

        Args:
            unit: With gradients.
            backward_over: What has the clip factor ready.
        """
        unit.has_gradients, unit.num_passes = False, 0
        if unit.plan.states == "device":
            after = [unit.gradients.ready, unit.states.ready, unit.weights.ready]
            nbytes = unit.spec.trainable_bytes + unit.states_bytes
            unit.states.ready = unit.weights.ready = self._operations.add(COMPUTE, "update", unit, nbytes, after)
        elif unit.attempt is not None:
            self._keep(unit, *unit.attempt)
        elif unit.plan.update == "device":
            self._on_device(unit, backward_over)
        else:
            self._on_host(unit, backward_over)

    # On the host.

    def _on_host(self, unit: ScheduledUnit, backward_over: Index) -> None:
        """Bring what is missing, update, write back."""
        grads, grads_ready = self.gradients.bring(unit, is_early=False)
        states, states_ready = self._states(unit)
        after = [backward_over, grads_ready, *states_ready]
        target: Taken | None = None
        if unit.plan.weights == "host":
            after += [unit.weights.ready, *unit.weights.readers]
        else:
            pool = self._operations.pool("host", "new_weights", unit.spec.trainable_bytes)
            target = pool, pool.take()
            after += target[1].free_after
        nbytes = unit.spec.trainable_bytes + unit.states_bytes
        done = self._operations.add("update", "update", unit, nbytes, after)
        self.gradients.give_back(unit, grads, done)
        unit.states = Home(done)
        if states is not None:
            unit.states = Home(self._write_states(unit, states, unit.kept_states(), done))
        if target is None:
            unit.weights = Home(done)
        else:
            target[0].give(target[1], [self._write_weights(unit, done)])

    def _states(self, unit: ScheduledUnit) -> tuple[Taken | None, list[Index]]:
        """States in host memory: in which slot, if in one, and what must be over before they are updated."""
        if unit.plan.states == "host" or not unit.states_bytes:
            return None, [unit.states.ready, *unit.states.readers]
        kept = self._operations.take_kept("states", unit.kept_states())
        if kept is not None:
            return kept, [*kept[1].free_after]
        pool = self._operations.pool("host", "states", unit.states_bytes)
        slot = pool.take()
        after = [*slot.free_after, unit.states.ready]
        return (pool, slot), [self._operations.add("states_read", "read states of", unit, unit.states_bytes, after)]

    def _write_states(self, unit: ScheduledUnit, states: Taken, to: Kept, done: int) -> int:
        written = self._operations.add("disk_write", "write states of", unit, unit.states_bytes, [done])
        self._operations.give_kept(*states, to, done, written)
        return written

    def _write_weights(self, unit: ScheduledUnit, done: int) -> int:
        """Send new weights from host memory home."""
        lane, users = self._users(unit, "write_back", "disk_write")
        after = [done, *users, unit.weights.ready]
        written = self._operations.add(lane, "write weights of", unit, unit.spec.trainable_bytes, after)
        unit.weights = Home(written)
        return written

    def _users(self, unit: ScheduledUnit, to_device: str, elsewhere: str) -> tuple[str, Sequence[Index]]:
        """The lane on which weights go home, and who must have read the old ones."""
        if unit.plan.weights == "device":
            return to_device, [self._operations.computed]
        return elsewhere, unit.weights.readers

    # Inside backward.

    def _attempt(self, unit: ScheduledUnit) -> None:
        """Update out of place, into the second homes."""
        if unit.attempt is not None:  # gradients came once more
            self._operations.forget(unit.kept_states(is_next=True))
        grads, grads_ready = self.gradients.bring(unit, is_early=True)
        states, states_ready = self._states(unit)
        after = [grads_ready, *states_ready, *([] if unit.has_master else [unit.weights.ready])]
        nbytes = unit.spec.trainable_bytes + unit.states_bytes
        done = self._operations.add("update", "update early", unit, nbytes, after)
        self.gradients.give_back(unit, grads, done)
        unit.states.readers = [done]
        if not unit.has_master:
            unit.weights.readers.append(done)
        ready = done
        if states is not None:
            ready = self._write_states(unit, states, unit.kept_states(is_next=True), done)
        unit.attempt = done, ready

    def _keep(self, unit: ScheduledUnit, done: int, states_ready: int) -> None:
        """The homes change places; weights that live elsewhere are sent there."""
        unit.attempt, unit.states_home, unit.states = None, unit.states_home ^ 1, Home(states_ready)
        if unit.plan.weights == "host":
            unit.weights = Home(done)
        else:
            self._write_weights(unit, done)

    # On the device, of states in host memory.

    def _on_device(self, unit: ScheduledUnit, backward_over: Index) -> None:
        """Bring states and gradients to a staging slot, update, take states and weights home."""
        layout = staging(unit.spec, unit.plan, self._model)
        states_bytes, grads_bytes, weights_bytes, scratch_bytes = (stop - start for start, stop in layout)
        pool = self._operations.pool("device", "staging", layout.scratch[1])
        slot = pool.take()
        homes = [unit.states] if states_bytes else []
        homes += [unit.gradients] if grads_bytes else []
        homes += [] if unit.has_master else [unit.weights]
        nbytes = states_bytes + grads_bytes + (0 if unit.has_master else weights_bytes)
        after = [*slot.free_after, *(home.ready for home in homes)]
        brought = self._operations.add("states_h2d", "stage", unit, nbytes, after)
        for home in homes:
            home.readers.append(brought)
        nbytes = states_bytes + weights_bytes + scratch_bytes
        after = [brought, unit.gradients.ready, backward_over]
        done = self._operations.add("device_update", "update", unit, nbytes, after)
        if not grads_bytes:
            unit.gradients.readers.append(done)
        left = []
        if states_bytes:
            after = [done, *unit.states.readers]
            left.append(self._operations.add("states_d2h", "states of", unit, states_bytes, after))
            unit.states = Home(left[0])
        lane, users = self._users(unit, "device_update", "states_d2h")
        after = [done, *users, unit.weights.ready]
        left.append(self._operations.add(lane, "new weights of", unit, weights_bytes, after))
        unit.weights = Home(left[-1])
        pool.give(slot, left)
