"""What a training run is to do: a YAML file, flags and ``--set`` become one checked value, before anything is touched.

Flags and ``--set`` go over the file. At the top level of the file stand the options of the command (``batch_size``) and
every field of TRL's ``SFTConfig``, or ``DPOConfig``; under ``lora:`` those of PEFT's ``LoraConfig``, under ``outcore:``
outcore's own. ``--set`` takes the same names, with a dot after a section: ``--set lora.r=8``. Paths are relative to the
current directory, also those in the file; ``~`` is the home directory.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outcore.cli.launcher import refuse_launchers
from outcore.cli.train.fields import shown
from outcore.cli.train.given import from_assignments, from_flags
from outcore.cli.train.methods import FINE_TUNING, Method
from outcore.cli.train.rules import LENGTHS, check_lora, check_training, refuse_contradictions
from outcore.cli.train.schema import DEFAULTS, SECTIONS, OnNonfinite, Own, Resume, Schema, Setting
from outcore.cli.train.yaml_file import read_yaml
from outcore.core.errors import ConfigError, OutcoreError
from outcore.core.quantities import parse_bytes
from outcore.spec.budget import Budget
from outcore.spec.model import Precision

Settled = Mapping[str, Setting]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One training run."""

    method: Method
    model: str
    data: str
    out: Path
    eval_data: str | None
    precision: Precision
    training: Mapping[str, Any]
    """Fields of TRL's class without ``output_dir``. ``packing`` is among them only if the user decided it."""
    lora: Mapping[str, Any] | None
    """Fields of ``LoraConfig``; None: all weights are trained."""
    eos_token: str | None
    """Ends a document or turn, instead of the tokenizer's own."""
    chat_template: Path | None
    """Instead of the tokenizer's own."""
    budget: Budget
    plan: Path | None
    device: str | None
    """``cpu`` or an accelerator; None: the accelerator if there is one."""
    resume: Resume
    """``auto``: where nothing was saved, begin anew."""
    on_nonfinite: OnNonfinite
    """What becomes of a step whose loss or gradient norm is not a finite number."""
    trace: Path | None
    """File for a timeline of a few steps."""
    dry_run: bool


def resolve(
    config: Path | None, flags: Mapping[str, Any], assignments: Sequence[str], method: Method = FINE_TUNING
) -> Settings:
    """Put a run's settings together. Only ``config`` is read, and nothing is written.

    Args:
        config: A YAML file, or None.
        flags: Option -> value, only those that were given.
        assignments: ``KEY=VALUE`` texts.
        method: What the run trains for.

    Raises:
        ConfigError: A file that cannot be read, a name that does not exist, a value that cannot be, settings that
            exclude one another, or one of several ranks.
    """
    refuse_launchers()  # the libraries below would start to talk to the other ranks
    in_file = [] if config is None else read_yaml(config, SECTIONS)
    on_command_line = [*from_flags(flags), *from_assignments(assignments)]
    schema = Schema(method)
    settled = _merged(schema.check(in_file), schema.check(on_command_line))
    _refuse_missing(settled)
    refuse_contradictions(settled, method)
    lora = _lora(settled)
    if lora is not None:
        check_lora(lora, settled)
    device = _device(settled)
    training = _training(settled, device)
    out = _path(_own(settled, "out"))
    check_training(training, out, settled, method)
    plan, eval_data, trace = (_own(settled, name) for name in ("plan", "eval_data", "trace"))
    template = training.get("chat_template_path", _own(settled, "chat_template_path"))
    return Settings(
        method=method,
        model=_path(_own(settled, "model")),
        data=_path(_own(settled, "data")),
        out=Path(out),
        eval_data=None if eval_data is None else _path(eval_data),
        precision=_own(settled, "precision"),
        training=training,
        lora=lora,
        eos_token=training.get("eos_token", _own(settled, "eos_token")),
        chat_template=None if template is None else Path(_path(template)),
        budget=_budget(settled),
        plan=None if plan is None else Path(_path(plan)),
        device=device,
        resume=_own(settled, "resume"),
        on_nonfinite=_own(settled, "on_nonfinite"),
        trace=None if trace is None else Path(_path(trace)),
        dry_run=_own(settled, "dry_run"),
    )


def _merged(in_file: Settled, on_command_line: Settled) -> dict[str, Setting]:
    """The command line over the file. The two ways to say how long a run is are one setting here."""
    is_length_given = not on_command_line.keys().isdisjoint(LENGTHS)
    kept = {key: setting for key, setting in in_file.items() if not (is_length_given and key in LENGTHS)}
    return kept | dict(on_command_line)


def _refuse_missing(settled: Settled) -> None:
    missing = [f"--{name}" for name in ("model", "data", "out") if f"outcore.{name}" not in settled]
    if missing:
        raise ConfigError(
            f"expected --model, --data and --out, but got no {', no '.join(missing)}; give them as flags or in the "
            "YAML file"
        )


def _own(settled: Settled, name: str) -> Any:
    setting = settled.get(f"outcore.{name}")
    return getattr(Own, name) if setting is None else setting.value


def _path(name: str) -> str:
    return os.path.expanduser(name)


def _lora(settled: Settled) -> dict[str, Any] | None:
    given = {key.removeprefix("lora."): s.value for key, s in settled.items() if key.startswith("lora.")}
    if not given:
        return None
    rank = given.get("r", 8)
    return {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear"} | given | {"task_type": "CAUSAL_LM"}


def _device(settled: Settled) -> str | None:
    """The Trainer drives the first accelerator that it sees, or the CPU."""
    import torch

    asked, use_cpu = settled.get("outcore.device"), settled.get("use_cpu")
    is_cpu = use_cpu is not None and use_cpu.value
    if asked is None or asked.value is None:
        return "cpu" if is_cpu else None
    there = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["cpu"] if there is None else ["cpu", there.type, f"{there.type}:0"]
    if asked.value not in kinds:
        if there is None:
            _refuse_absent(asked)
        raise ConfigError(
            f"{asked.where}: expected one of {', '.join(kinds)}, but got {shown(asked.value)}; to use another "
            "accelerator, let the environment show only that one (CUDA_VISIBLE_DEVICES)"
        )
    if use_cpu is not None and use_cpu.value != (asked.value == "cpu"):
        raise ConfigError(
            f"{asked.where}: expected a device that goes with use_cpu, but got {shown(asked.value)} beside "
            f"{shown(use_cpu.value)} ({use_cpu.where}); remove one of them"
        )
    return str(asked.value)


def _refuse_absent(asked: Setting) -> None:
    """Let outcore say why it sees none."""
    from outcore.runtime.device_open import open_device

    try:
        open_device(asked.value).close()
    except OutcoreError as error:
        raise ConfigError(f"{asked.where}: {str(error).removeprefix('device: ')}") from error


def _training(settled: Settled, device: str | None) -> dict[str, Any]:
    import torch

    given = {key: setting.value for key, setting in settled.items() if "." not in key}
    follows: dict[str, Any] = {"use_cpu": device == "cpu" or not torch.accelerator.is_available()}
    if "per_device_train_batch_size" in given:
        follows["per_device_eval_batch_size"] = given["per_device_train_batch_size"]
    if "save_steps" in given:
        follows["save_strategy"] = "steps"
    if _own(settled, "eval_data") is not None:
        every = given.get("eval_steps", given.get("save_steps"))
        follows["eval_strategy"] = "epoch" if every is None else "steps"
        if given.get("eval_strategy", follows["eval_strategy"]) == "steps":
            follows["eval_steps"] = every
    return {**DEFAULTS, **follows, **given, "use_cpu": follows["use_cpu"]}


def _budget(settled: Settled) -> Budget:
    disk = settled.get("outcore.disk")
    folders = None if disk is None else disk.value
    if folders is not None:
        folders = [_path(folder) for folder in ([folders] if isinstance(folders, str) else folders)]
    device, host = _bytes(settled, "device_memory"), _bytes(settled, "host_memory")
    try:
        return Budget(device=device, host=host, disk=folders)
    except ConfigError as error:
        raise ConfigError(f"{settled['outcore.disk'].where}: {str(error).removeprefix('Budget(disk=): ')}") from error


def _bytes(settled: Settled, name: str) -> int | None:
    size = settled.get(f"outcore.{name}")
    return None if size is None or size.value is None else parse_bytes(size.value, what=size.where)


def describe(settings: Settings) -> dict[str, str]:
    """Say what a run will do: all that was set, and the defaults that matter. Name -> text, in order of reading."""
    values = dict(defaults(settings.method)) | dict(settings.training)
    said = {"model": settings.model, "data": settings.data, "out": str(settings.out)}
    said |= _said_of_training(settings, values)
    said |= {
        "LoRA": "off, all weights are trained" if settings.lora is None else _list(settings.lora),
        "plan": "made for this run" if settings.plan is None else str(settings.plan),
    }
    rest = {
        name: str(value)
        for name, value in settings.training.items()
        if name not in _SAID and DEFAULTS.get(name, dataclasses.MISSING) != value
    }
    if settings.on_nonfinite != Own.on_nonfinite:
        rest["on nonfinite"] = settings.on_nonfinite
    if settings.trace is not None:
        rest["trace"] = str(settings.trace)
    return said | rest


_SAID = {
    *("max_steps", "num_train_epochs", "per_device_train_batch_size", "per_device_eval_batch_size", "use_cpu"),
    *("gradient_accumulation_steps", "max_length", "packing", "packing_strategy", "learning_rate", "warmup_steps"),
    *("lr_scheduler_type", "max_grad_norm", "eval_strategy", "eval_steps", "save_strategy", "save_steps"),
    *("save_total_limit", "seed", "bf16", "beta", "loss_type"),
}
"""Fields of TRL's classes that ``describe`` puts into words."""


def defaults(method: Method) -> Iterator[tuple[str, Any]]:
    """Fields of TRL's class with their defaults."""
    for field in dataclasses.fields(method.config_class()):
        make = field.default_factory
        yield field.name, field.default if make is dataclasses.MISSING else make()


def _said_of_training(settings: Settings, values: Mapping[str, Any]) -> dict[str, str]:
    steps, warmup = values["max_steps"], values["warmup_steps"]
    batch, accumulated = values["per_device_train_batch_size"], values["gradient_accumulation_steps"]
    longest = "of any length" if values["max_length"] is None else f"of at most {values['max_length']} tokens"
    evaluation = "off"
    if settings.eval_data is not None:
        every = _interval(values["eval_strategy"], values["eval_steps"])
        evaluation = f"{settings.eval_data}, {every}, batches of {values['per_device_eval_batch_size']}"
    checkpoints = _interval(values["save_strategy"], values["save_steps"])
    if values["save_total_limit"] is not None:
        checkpoints += f", the last {values['save_total_limit']} kept"
    return {
        "precision": f"{settings.precision}{', bf16 autocast' if values['bf16'] else ''}",
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


def _said_of_rows(settings: Settings, values: Mapping[str, Any]) -> Iterator[str]:
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
