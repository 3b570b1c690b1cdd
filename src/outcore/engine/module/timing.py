"""Times of a whole model's forward and backward, of which units are only a part."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial

from torch import nn

from outcore.core.errors import UnsupportedError
from outcore.device.recorder import DeviceMoment, Recorder
from outcore.engine.recompute.structure import take_apart
from outcore.torch_private import at_end_of_task, current_task


@contextmanager
def recording(model: nn.Module, recorder: Recorder, *, num_steps: int) -> Iterator[Recorder]:
    """Record while the block runs: what the device does for ``model``, and the model's own forward and backward.

    Args:
        model: The prepared model.
        recorder: The recorder of its device.
        num_steps: See ``Recorder.begin``.
    """
    recorder.begin(num_steps=num_steps)
    try:
        with timing(model, recorder):
            yield recorder
    finally:
        recorder.end()


@contextmanager
def timing(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """Tell the recorder of every forward and backward of ``model`` while the block runs."""
    began: list[float | DeviceMoment] = []
    timer = _BackwardTimer(recorder)

    def enter(*_: object) -> None:
        began.append(recorder.now())

    def leave(_: nn.Module, __: object, result: object) -> None:
        if began:  # else it began before the block
            recorder.add_phase("forward", began.pop(), recorder.now())
        with suppress(UnsupportedError):  # if raised, backward is timed by units alone
            for tensor in take_apart(result, "the model")[0]:
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(timer.begin)

    with ExitStack() as undo:
        undo.callback(timer.stop)
        undo.callback(model.register_forward_pre_hook(enter).remove)
        undo.callback(model.register_forward_hook(leave).remove)
        yield


class _BackwardTimer:
    """Times a backward from the moment it reaches the first of the model's results to its end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._task = -1
        self._is_on = True

    def stop(self) -> None:
        """Stop timing, also the backwards of forwards that ran before."""
        self._is_on = False

    def begin(self, *_: object) -> None:
        """Start timing: autograd has reached a result of the model."""
        task = current_task()
        if self._is_on and task != self._task:
            self._task = task
            end = partial(self._end, self._recorder.now())
            at_end_of_task(end)

    def _end(self, start: float | DeviceMoment) -> None:
        self._recorder.add_phase("backward", start, self._recorder.now())
