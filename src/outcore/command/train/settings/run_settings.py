"""What a training run is to do: a YAML file, flags and ``--set`` become one checked value, before anything is touched.

Flags and ``--set`` override the file. The file's top level takes the options of the command (``batch_size``) and every
field of TRL's ``SFTConfig``, or ``DPOConfig``; ``lora:`` takes those of PEFT's ``LoraConfig``, and ``outcore:``
outcore's own. ``--set`` takes the same names, with a dot after a section: ``--set lora.r=8``. Paths are relative to the
current directory, also those in the file; ``~`` is the home directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from outcore.command.train.method import Method
from outcore.command.train.model.quantization import Quantization, quantization_of
from outcore.command.train.settings.at_once import refuse_incomplete
from outcore.command.train.settings.given_settings import Given, GivenSetting, shown
from outcore.command.train.settings.outcore_settings import RunOptions
from outcore.command.train.settings.schema import Schema
from outcore.command.train.settings.setting_rules import LENGTHS, check_lora, check_training, refuse_contradictions
from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.quantities import parse_bytes
from outcore.spec.budget import Budget

Settled = Mapping[str, GivenSetting]


@dataclass(frozen=True, kw_only=True)
class RunSettings(RunOptions):
    """One training run."""

    method: Method
    training: Mapping[str, Any]
    """Fields of TRL's class without ``output_dir``. ``packing`` is among them only if the user decided it."""
    lora: Mapping[str, Any] | None
    """Fields of ``LoraConfig``; None: all weights are trained."""
    quantization: Quantization | None
    """How the base under adapters is quantised; None: it is not."""
    budget: Budget

    @property
    def data_name(self) -> str:
        """What the run trains on, in one text."""
        return ", ".join(self.data)


def resolve(given: Given, method: Method) -> RunSettings:
    """Put a run's settings together. Nothing is read or written.

    Raises:
        ConfigError: A name that does not exist, a value that is not allowed, or settings that exclude one another.
    """
    schema = Schema(method)
    settled = _merged(schema.check(given.in_file), schema.check(given.on_command_line))
    refuse_incomplete([key.removeprefix("outcore.") for key in settled])
    refuse_contradictions(settled)
    lora = _lora(settled)
    if lora is not None:
        check_lora(lora, settled)
    own = {field.name: _own(settled, field.name) for field in fields(RunOptions)}
    quantization = _quantization(settled, own, has_adapters=lora is not None)
    own["device"] = _device(settled)
    training = {**schema.defaults, **_training(settled, own)}
    check_training(training, str(own["out"]), settled, method)
    if template := training.get("chat_template_path"):
        own["chat_template_path"] = Path(os.path.expanduser(template))
    own["eos_token"] = training.get("eos_token", own["eos_token"])
    return RunSettings(
        **own, method=method, training=training, lora=lora, quantization=quantization, budget=_budget(settled)
    )


def _merged(in_file: Settled, on_command_line: Settled) -> dict[str, GivenSetting]:
    """Let the command line override the file. Steps and epochs, which both say how long a run is, count as one here."""
    is_length_given = not on_command_line.keys().isdisjoint(LENGTHS)
    kept = {key: setting for key, setting in in_file.items() if not (is_length_given and key in LENGTHS)}
    return kept | dict(on_command_line)


def _own(settled: Settled, name: str) -> Any:
    setting = settled.get(f"outcore.{name}")
    return getattr(RunOptions, name, None) if setting is None else setting.value


def _lora(settled: Settled) -> dict[str, Any] | None:
    given = {key.removeprefix("lora."): s.value for key, s in settled.items() if key.startswith("lora.")}
    if not given:
        return None
    rank = given.get("r", 8)
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"} | given | {"task_type": "CAUSAL_LM"}


def _quantization(settled: Settled, own: Mapping[str, Any], *, has_adapters: bool) -> Quantization | None:
    for name in ("bnb_4bit_quant_type", "bnb_4bit_use_double_quant"):
        if own[name] != getattr(RunOptions, name) and not own["load_in_4bit"]:
            where = settled[f"outcore.{name}"].where
            raise ConfigError(f"{where}: expected --load-in-4bit beside it, but got none; add it, or leave this out")
    return quantization_of(
        in_4bit=own["load_in_4bit"],
        in_8bit=own["load_in_8bit"],
        has_adapters=has_adapters,
        kind=own["bnb_4bit_quant_type"],
        nested=own["bnb_4bit_use_double_quant"],
    )


def _device(settled: Settled) -> str | None:
    """Return the device, which must be the first accelerator or the CPU: the Trainer drives no other."""
    import torch

    asked, use_cpu = settled.get("outcore.device"), settled.get("use_cpu")
    is_cpu = use_cpu is not None and use_cpu.value
    if asked is None or asked.value is None:
        return "cpu" if is_cpu else None
    if use_cpu is not None and use_cpu.value != (asked.value == "cpu"):
        raise ConfigError(
            f"{asked.where}: expected a device that goes with use_cpu, but got {shown(asked.value)} beside "
            f"{shown(use_cpu.value)} ({use_cpu.where}); remove one of them"
        )
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["cpu"] if there is None else ["cpu", there.type, f"{there.type}:0"]
    if there is None and asked.value != "cpu":
        _refuse_absent(asked)
    if asked.value not in kinds:
        raise ConfigError(
            f"{asked.where}: expected one of {', '.join(kinds)}, but got {shown(asked.value)}; to use another "
            "accelerator, let the environment show only that one (CUDA_VISIBLE_DEVICES)"
        )
    return str(asked.value)


def _refuse_absent(asked: GivenSetting) -> None:
    """Raise with outcore's reason why it sees no accelerator."""
    from outcore.device.opening import open_device

    try:
        open_device(asked.value).close()
    except OutcoreError as error:
        raise ConfigError(f"{asked.where}: {str(error).removeprefix('device: ')}") from error


def _training(settled: Settled, own: Mapping[str, Any]) -> dict[str, Any]:
    import torch

    given = {key: setting.value for key, setting in settled.items() if "." not in key}
    follows: dict[str, Any] = {"use_cpu": own["device"] == "cpu" or not torch.accelerator.is_available()}
    if "per_device_train_batch_size" in given:
        follows["per_device_eval_batch_size"] = given["per_device_train_batch_size"]
    if "save_steps" in given:
        follows["save_strategy"] = "steps"
    if own["eval_data"] is not None:
        every = given.get("eval_steps", given.get("save_steps"))
        follows["eval_strategy"] = "epoch" if every is None else "steps"
        if given.get("eval_strategy", follows["eval_strategy"]) == "steps":
            follows["eval_steps"] = every
    if own["precision"] == "fp16":
        if follows["use_cpu"]:
            where = settled["outcore.precision"].where
            raise ConfigError(
                f"{where}: expected an accelerator for fp16, whose gradients need a scaler, but the run is on the CPU; "
                "take bf16"
            )
        follows["fp16"] = True
    return {**follows, **given, "use_cpu": follows["use_cpu"]}


def _budget(settled: Settled) -> Budget:
    folders = _own(settled, "disk")
    if folders is not None:
        folders = [os.path.expanduser(folder) for folder in ([folders] if isinstance(folders, str) else folders)]
    device, host = _bytes(settled, "device_memory"), _bytes(settled, "host_memory")
    try:
        return Budget(device=device, host=host, disk=folders)
    except ConfigError as error:
        raise ConfigError(f"{settled['outcore.disk'].where}: {str(error).removeprefix('Budget(disk=): ')}") from error


def _bytes(settled: Settled, name: str) -> int | None:
    size = settled.get(f"outcore.{name}")
    return None if size is None or size.value is None else parse_bytes(size.value, what=size.where)
