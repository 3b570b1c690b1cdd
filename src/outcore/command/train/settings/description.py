"""What a run will do, under the names that a user gives its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outcore.command.train.method import Method
from outcore.command.train.settings.given_settings import shown
from outcore.command.train.settings.outcore_settings import RunOptions
from outcore.command.train.settings.run_settings import RunSettings
from outcore.command.train.settings.schema import DEFAULTS, SHORT_NAMES

_ALWAYS = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "max_length", "beta", "loss_type"),
    *("learning_rate", "lr_scheduler_type", "warmup_steps", "max_grad_norm", "save_strategy", "seed"),
)
"""Fields of TRL's classes that are said whether they were set or not."""
_SHORT = {full: short for short, full in SHORT_NAMES.items() if short != "output_dir"}


def describe(settings: RunSettings) -> dict[str, str]:
    """Say what a run will do: all that was set, and the defaults that matter. Name -> text, in reading order."""
    values = dict(defaults(settings.method)) | dict(settings.training)
    length = "max_steps" if values["max_steps"] > 0 else "num_train_epochs"
    fields = [field.name for field in dataclasses.fields(RunOptions) if field.name != "dry_run"]
    own = {name: getattr(settings, name) for name in fields}
    is_set = {name: value for name, value in own.items() if value != getattr(RunOptions, name, None)}
    said = {name: own[name] for name in ("model", "data", "out", "precision")} | is_set
    said |= {name: values[name] for name in (length, *_ALWAYS) if name in values}
    said |= {k: v for k, v in settings.training.items() if k != "use_cpu" and DEFAULTS.get(k, _UNSET) != v}
    said["lora"] = "off, all weights are trained" if settings.lora is None else _list(settings.lora)
    if settings.quantization is not None:
        said["base"] = f"quantised to {settings.quantization}"
    return {_SHORT.get(name, name): _text(value) for name, value in said.items()}


_UNSET = object()


def defaults(method: Method) -> Iterator[tuple[str, Any]]:
    """Yield the fields of TRL's class with their defaults."""
    for field in dataclasses.fields(method.config_class()):
        make = field.default_factory
        yield field.name, field.default if make is dataclasses.MISSING else make()


def _text(value: Any) -> str:
    value = getattr(value, "value", value)
    if isinstance(value, list | tuple):
        return ", ".join(map(_text, value))
    return str(value) if isinstance(value, str | Path) else shown(value).strip("'")


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_text(value)}" for name, value in values.items())
