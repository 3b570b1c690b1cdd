"""Results that leave a block beside its return value: what transformers records with hooks inside blocks.

Router logits, for one, go from inside a block into a list that only the model's own forward knows, and from there
into the loss. While a unit runs, the list is replaced by a copy. What the unit adds to the copy becomes a result of
the unit. It goes to the real list afterwards, as a tensor of the outer graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

Recorded = dict[str, list[Any]]
"""What was added to each recording, by its name."""


def active_recording() -> Mapping[str, Any] | None:
    """Return what is being recorded now, or None."""
    variable = _variable()
    return None if variable is None else variable.get()


def recording_apart(template: Mapping[str, Any] | None) -> AbstractContextManager[Recorded]:
    """Record into copies of the lists while the block runs. At its end the yielded dict has what was added to them.

    Args:
        template: What was being recorded in the unit's forward; None: nothing.
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
    """Add what a unit recorded to the real lists."""
    recording = active_recording() or {}
    for name, values in added.items():
        recording[name].extend(values)


def emptied(template: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return a template for the recompute. It holds no tensors; its lists keep their lengths."""
    return None if template is None else {k: [None] * len(v) if isinstance(v, list) else v for k, v in template.items()}


def _variable() -> Any:
    module = sys.modules.get("transformers.utils.output_capturing")
    return getattr(module, "_active_collector", None)
