"""What stands around everything that runs on the weights of a unit."""

from __future__ import annotations

import inspect

from outcore.device.lanes import Handle
from outcore.device.recorder import Recorder
from outcore.order.activations import ActivationOrder
from outcore.runtime.unit.unit import Unit
from outcore.runtime.weights.weights import Weights
from outcore.spec.schedule import Phase
from outcore.spec.timeline import COMPUTE


def make_way(activations: ActivationOrder[Handle], unit: Unit, weights: Weights) -> None:
    """What earlier calls saved leaves, since a call begins. Cut short, this is noticed as a call is."""
    depth = weights.begin_call(unit)
    try:
        activations.begin_forward()
    except BaseException:
        weights.unwind(depth)
        raise


class Bound:
    """Makes a unit's parameters present, and absent again.

    A class, so that no frame of ``contextlib`` stands between: an interrupt there would leave the call unended and
    unseen. See [Note: cut short].
    """

    def __init__(self, unit: Unit, index: int, phase: Phase, weights: Weights, recorder: Recorder) -> None:
        """Args: index: Of the unit. recorder: Keeps how long it took, if it is on."""
        self._unit, self._index, self._phase, self._weights, self._recorder = unit, index, phase, weights, recorder

    def __enter__(self) -> None:
        self._depth = self._weights.begin_call(self._unit)
        try:
            # Not in a variable, which would be in the frame that it holds.
            self._weights.bind(self._index, self._phase, inspect.currentframe().f_back)  # type: ignore[union-attr]
            self._start = self._recorder.now() if self._recorder.is_on else None
        except BaseException:
            self._weights.unwind(self._depth)
            raise

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if self._start is not None and self._recorder.is_on:
                name = f"{self._phase.value} {self._unit.label}"
                self._recorder.add(COMPUTE, name, self._start, self._recorder.now())
            if kind is None:
                self._weights.unbind(self._index)
            else:
                self._weights.unwind(self._depth)
        except BaseException:
            self._weights.unwind(self._depth)
            raise
