"""Mistakes for which a run is refused at once, before torch and the trainers are imported, which takes seconds.

``resolve``, and what comes after it, refuses all of these again, and everything else.
"""

from __future__ import annotations

from collections.abc import Collection

from outcore.command.train.data.sources import refuse_absent
from outcore.command.train.model.place import find_place
from outcore.command.train.settings.given_settings import Given, GivenSetting
from outcore.command.train.settings.schema import SHORT_NAMES
from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.planner.timing.known_hardware import NO_TIMES, named_hardware


def refuse_at_once(given: Given) -> None:
    """Refuse what is wrong without looking at the libraries.

    Raises:
        ConfigError: A path, a size, or the name of a model or machine cannot be used.
    """
    # The last one counts.
    found = {
        SHORT_NAMES.get(item.key, item.key).removeprefix("outcore."): item
        for item in (*given.in_file, *given.on_command_line)
    }
    if "outcore" not in found:
        refuse_incomplete(found)
    for name in ("device_memory", "host_memory"):
        if name in found and isinstance(size := found[name].value, int | str):
            parse_bytes(size, what=found[name].where)
    for name in ("data", "eval_data"):
        refuse_absent(_texts(found.get(name)), flag=f"--{name.replace('_', '-')}")
    for text in _texts(found.get("model")):
        find_place(text)
    for text in _texts(found.get("hardware")):
        if text != NO_TIMES:
            named_hardware(text)


def refuse_incomplete(names: Collection[str]) -> None:
    """Raise if one of the settings without which there is no run is not among those given."""
    missing = [f"--{name}" for name in ("model", "data", "out") if name not in names]
    if missing:
        raise ConfigError(
            f"expected --model, --data and --out, but got no {', no '.join(missing)}; give them as flags or in the "
            "YAML file"
        )


def _texts(given: GivenSetting | None) -> list[str]:
    """Return what was typed where that is text, or a list of texts; anything else is refused by its type, later."""
    value = None if given is None else given.value
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and text.strip() and "\0" not in text]
