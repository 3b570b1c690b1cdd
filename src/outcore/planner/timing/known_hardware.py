"""Machines by the names of their parts, to plan for a machine that is not at hand."""

from __future__ import annotations

import difflib
from contextlib import suppress
from pathlib import Path
from typing import Any

from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.planner.timing.given_figures import with_given
from outcore.planner.timing.known_parts import known_parts
from outcore.spec.hardware import Hardware

NO_TIMES = "none"
"""Given in place of a machine: plans are made without times, and nothing is measured."""


def known_hardware(name: str) -> Hardware:
    """Return a machine by the names of its parts: ``rtx-4090``, ``rtx-4090+pcie3+desktop-ddr4+laptop-nvme``.

    Figures may follow a part, as in ``rtx-4090,memory=22GiB,bf16=140TFLOPS+64GiB``: see ``given_figures``. A size in
    place of a part is that of host memory.

    Args:
        name: A device, and parts that are not usual beside it, joined by ``+``. ``no-disk`` leaves the disk out.

    Raises:
        ConfigError: A part or a figure is unknown, two parts are of one kind, or there is no device.
    """
    known, kinds = known_parts(), known_parts().by_kind
    found: dict[str, str] = {}
    given: dict[str, list[str]] = {}
    for text in name.lower().split("+"):
        part, *figures = text.split(",")
        if _is_size(part):
            given.setdefault("host", []).extend([f"memory={part}", *figures])
            continue
        kind = _kind_of(part)
        if kind in found:
            raise ConfigError(f"--hardware '{name}': expected one {kind}, but got '{found[kind]}' and '{part}'")
        found[kind] = part
        given.setdefault(kind, []).extend(figures)
    if "device" not in found:
        raise ConfigError(f"--hardware '{name}': expected a device among the parts, one of\n{known.listed('device')}")
    names: dict[str, Any] = {**known.usual[found["device"]], **found}
    parts: dict[str, Any] = {kind: known_of[names[kind]] if kind in names else None for kind, known_of in kinds.items()}
    return with_given(Hardware(name=name, **parts), given)


def _kind_of(part: str) -> str:
    """Return the kind of a part, as ``Hardware`` names it. Raises: ConfigError: It is unknown, or cannot be used."""
    known, kinds = known_parts(), known_parts().by_kind
    for kind, parts in kinds.items():
        if part in parts:
            return kind
    if part in known.refused:
        raise ConfigError(
            f"--hardware: expected a machine whose GPU has memory of its own, but got '{part}': {known.refused[part]}"
        )
    near = difflib.get_close_matches(part, [name for parts in kinds.values() for name in parts], n=1)
    hint = f"; the nearest is '{near[0]}'" if near else ""
    raise ConfigError(
        f"--hardware: expected a JSON file, or names of parts joined by '+', but got '{part}'{hint}. Known are\n"
        f"{known.listed()}"
    )


def _is_size(text: str) -> bool:
    with suppress(ConfigError):
        return not text.isdigit() and parse_bytes(text, what="") > 0
    return False


def named_hardware(named: str | Path) -> Hardware:
    """Return a machine by its file or by the names of its parts.

    Raises:
        ConfigError: There is no such machine.
    """
    is_file = isinstance(named, Path) or named.endswith(".json") or Path(named).is_file()
    try:
        return Hardware.load(named) if is_file else known_hardware(str(named))
    except ConfigError as error:
        if Path(named).is_dir():  # a folder may also have the name of a part
            raise ConfigError(
                f"hardware: expected a JSON file, or names of parts, but '{named}' is a folder; name its file"
            ) from error
        advice = "; correct the file, or measure the machine again with outcore probe" if is_file else ""
        raise ConfigError(f"{error}{advice}") from error
