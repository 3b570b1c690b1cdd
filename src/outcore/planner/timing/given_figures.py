"""Figures that a user gives in place of those that are known of a part: ``memory=22GiB``, ``bf16=140TFLOPS``.

A figure has its name in a hardware file, or that name without its unit: ``memory`` for ``memory_bytes``, ``bf16`` for
``bf16_flops``, ``h2d`` for ``h2d_bytes_per_s``; ``bandwidth`` is ``bytes_per_s``. It is taken as it is: what the
machine reaches, not what its maker publishes. Other figures of the part stay as they are.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.spec.hardware import Hardware

_UNITS = ("_parameters_per_s", "_bytes_per_s", "_bytes", "_flops", "_s")
_TIMES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15, "": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6}
_NUMBER = r"(\d+(?:\.\d+)?(?:e-?\d+)?)\s*"


def with_given(machine: Hardware, given: Mapping[str, Sequence[str]]) -> Hardware:
    """Return a machine with figures of the user. Args: given: Kind of part -> figures such as ``memory=24gib``.

    Raises:
        ConfigError: There is no such figure, or no machine has it.
    """
    parts = {
        kind: _with_figures(getattr(machine, kind), texts, f"--hardware: {kind}")
        for kind, texts in given.items()
        if texts
    }
    found = dataclasses.replace(machine, **parts)
    return Hardware.from_json(found.to_json(), where="--hardware") if parts else found


def _with_figures(part: Any, texts: Sequence[str], where: str) -> Any:
    if part is None:
        raise ConfigError(f"{where}: expected a part that has figures, but got '{texts[0]}' without one; name a part")
    fields = {_short(field.name): field.name for field in dataclasses.fields(part) if "float" == field.type}
    changes: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition("=")
        field = fields.get(name.strip(), name.strip())
        if field not in fields.values() or field in changes:
            raise ConfigError(
                f"{where}: expected figures as name=value, each once, of {', '.join(fields)}, but got '{text}'"
            )
        changes[field] = _value(field, value.strip(), f"{where}: {name.strip()}")
    said = {field: "given by the user" for field in changes}
    ends = {
        end: {name: figure for name, figure in getattr(part, end).items() if name not in changes}
        for end in ("slow", "fast")
        if hasattr(part, end)
    }
    return dataclasses.replace(part, **changes, **ends, sources={**part.sources, **said})


def _short(field: str) -> str:
    if field == "bytes_per_s":
        return "bandwidth"
    return next((field.removesuffix(unit) for unit in _UNITS if field.endswith(unit)), field)


def _value(field: str, text: str, where: str) -> float:
    """Read a figure in the unit that its field has, or in one of its multiples."""
    if field.endswith("_bytes"):
        return float(parse_bytes(text, what=where))
    if field.endswith("bytes_per_s"):
        return _number(text, "([kmgt])b/s", f"{where}: expected bytes per second as in 20GB/s")
    if field.endswith("_flops"):
        return _number(text, r"([gtp])flops?(?:/s)?", f"{where}: expected FLOP/s as in 140TFLOPS")
    if field.endswith("_s") and not field.endswith("_per_s"):
        return _number(text, "(s|ms|us)", f"{where}: expected seconds as in 8us")
    return _number(text, "()", f"{where}: expected a number")


def _number(text: str, unit: str, expected: str) -> float:
    match = re.fullmatch(_NUMBER + unit, text)
    if match is None:
        raise ConfigError(f"{expected}, but got '{text}'")
    return float(match.group(1)) * _TIMES[match.group(2)]
