"""Results that leave a block beside its return value: what transformers records with hooks inside blocks.

Router logits, for one, go from inside a block into a list that only the model's own forward knows, and from there
into the loss. While a unit runs, the list is replaced by a copy; what was added to it becomes a result of the unit,
and goes to the real list afterwards, as a tensor of the outer graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Recorded = dict[str, list[Any]]
"""Name of the recording -> what was added to it."""


def active_recording() -> Mapping[str, Any] | None:
    """What is being recorded now, or None."""
    variable = _variable()
    return None if variable is None else variable.get()


def recording_apart(template: Mapping[str, Any] | None) -> AbstractContextManager[Recorded]:
    """Record into lists of our own, which the yielded dict has at the end without what ``template`` had at the start.

    Args:
        template: What was being recorded when the unit was called first; None: nothing.
    """
    variable = _variable()
    return nullcontext({}) if template is None or variable is None else _recording_apart(variable, template)


@contextmanager
def _recording_apart(variable: Any, template: Mapping[str, Any]) -> Iterator[Recorded]:
    added: Recorded = {}
    apart = {name: list(value) if isinstance(value, list) else value for name, value in template.items()}
    lengths = {name: len(value) for name, value in apart.items() if isinstance(value, list)}
    token = variable.set(apart)
    try:
        yield added
    finally:
        variable.reset(token)
    added.update({name: apart[name][start:] for name, start in lengths.items() if len(apart[name]) > start})


def hand_over(added: Recorded) -> None:
    """Add results of a unit to the real lists."""
    recording = active_recording() or {}
    for name, values in added.items():
        recording[name].extend(values)


def emptied(template: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """A template for later, which holds no tensors: lists keep their lengths."""
    return None if template is None else {k: [None] * len(v) if isinstance(v, list) else v for k, v in template.items()}


def _variable() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)
