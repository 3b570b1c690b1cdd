"""What a run will do, in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from outcore.command.train.method import Method
from outcore.command.train.settings.outcore_settings import RunOptions
from outcore.command.train.settings.run_settings import RunSettings
from outcore.command.train.settings.schema import DEFAULTS


def describe(settings: RunSettings) -> dict[str, str]:
    """Say what a run will do: all that was set, and the defaults that matter. Name -> text, in reading order."""
    values = dict(defaults(settings.method)) | dict(settings.training)
    said = {"model": settings.model, "data": settings.data_name, "out": str(settings.out)}
    said |= _said_of_training(settings, values)
    said |= {
        "LoRA": "off, all weights are trained" if settings.lora is None else _list(settings.lora),
        **({} if settings.quantization is None else {"base": f"quantised to {settings.quantization}"}),
        "plan": "made for this run" if settings.plan is None else str(settings.plan),
    }
    rest = {
        name: _MEANT.get(f"{name} {value}", str(value))
        for name, value in settings.training.items()
        if name not in _SAID and DEFAULTS.get(name, dataclasses.MISSING) != value
    }
    if settings.attention is not None:
        rest["attention"] = settings.attention
    if settings.compile:
        rest["compile"] = "blocks"
    if settings.unit_micro_batches is not None:
        rest["pieces in a unit"] = str(settings.unit_micro_batches)
    if settings.activations is not None:
        rest["activations"] = f"on {settings.activations} between forward and backward"
    if settings.hardware is not None:
        rest["hardware"] = settings.hardware
    if settings.on_nonfinite != RunOptions.on_nonfinite:
        rest["on nonfinite"] = settings.on_nonfinite
    if settings.grace != RunOptions.grace:
        rest["grace"] = f"{settings.grace:g} s"
    if settings.trace is not None:
        rest["trace"] = str(settings.trace)
    return said | rest


_MEANT = {"optim muon": "Muon for matrices of blocks, AdamW for the rest (muon)"}
_SAID = {
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "use_cpu"),
    *("gradient_accumulation_steps", "max_length", "packing", "packing_strategy", "learning_rate", "warmup_steps"),
    *("lr_scheduler_type", "max_grad_norm", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
    *("save_total_limit", "seed", "bf16", "fp16", "beta", "loss_type"),
}
"""Fields of TRL's classes that ``describe`` puts into words."""


def defaults(method: Method) -> Iterator[tuple[str, Any]]:
    """Yield the fields of TRL's class with their defaults."""
    for field in dataclasses.fields(method.config_class()):
        make = field.default_factory
        yield field.name, field.default if make is dataclasses.MISSING else make()


def _said_of_training(settings: RunSettings, values: Mapping[str, Any]) -> dict[str, str]:
    steps, warmup = values["max_steps"], values["warmup_steps"]
    batch, accumulated = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    longest = "of any length" if values["max_length"] is None else f"of at most {values['max_length']} tokens"
    evaluation = "off"
    if settings.eval_data is not None:
        every = _interval(values["eval_strategy"], values["eval_steps"])
        evaluation = f"{', '.join(settings.eval_data)}, {every}, batches of {values['per_device_eval_batch_size']}"
    checkpoints = _interval(values["save_strategy"], values["save_steps"])
    if settings.save_every_minutes is not None:
        often = f"every {settings.save_every_minutes:g} minutes"
        checkpoints = often if values["save_strategy"] == "no" else f"{checkpoints}, {often}"
    if values["save_total_limit"] is not None:
        checkpoints += f", the last {values['save_total_limit']} kept"
    masters = ", compact masters" if settings.master_format == "compact" else ""
    return {
        "precision": f"{settings.precision}{', bf16 autocast' if values['bf16'] else ''}{masters}",
        "length": f"{steps} steps" if steps > 0 else f"{values['num_train_epochs']:g} epochs",
        "batch": f"{batch} sequences" + (f", {accumulated} times accumulated" if accumulated > 1 else ""),
        "sequences": ", ".join([longest, *_said_of_rows(settings, values)]),
        "learning rate": f"{values['learning_rate']:g}, {values['lr_scheduler_type']}, "
        + (f"warmup over {warmup:g} {'steps' if warmup >= 1 else 'of the run'}" if warmup else "no warmup"),
        "clipping": f"gradient norm {values['max_grad_norm']:g}" if values["max_grad_norm"] else "off",
        "evaluation": evaluation,
        "checkpoints": checkpoints,
        "seed": str(values["seed"]),
    }


def _said_of_rows(settings: RunSettings, values: Mapping[str, Any]) -> Iterator[str]:
    if "beta" in values:
        yield f"in pairs; beta {values['beta']:g}, loss {', '.join(values['loss_type'])}"
    elif "packing" in settings.training:  # else it follows from the data
        yield f"packed ({values['packing_strategy']})" if values["packing"] else "not packed"


def _interval(strategy: str, steps: float | None) -> str:
    if strategy == "steps" and steps is not None:
        return f"every {steps:g} steps" if steps >= 1 else f"every {steps:g} of the run"
    return {"no": "none before the end", "epoch": "every epoch", "best": "whenever evaluation is best"}.get(
        strategy, strategy
    )


def _list(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
