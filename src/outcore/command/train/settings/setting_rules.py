"""Checks for settings that are right one by one and wrong together: outcore's own, then those of the libraries."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from outcore.command.train.data.sources import sources_of
from outcore.command.train.method import Method
from outcore.command.train.settings.given_settings import GivenSetting, shown
from outcore.core.errors import ConfigError, UnsupportedError

LENGTHS = ("max_steps", "num_train_epochs")

_LONGEST = 400  # characters of a library's message
_FEW = 3  # the most settings that are named together if a library does not say which one it means
_OF_OPTIMIZERS = ("learning_rate", "adam_beta1", "adam_beta2", "adam_epsilon", "optim", "optim_args")
_EVALUATION = ("per_device_eval_batch_size", "load_best_model_at_end", "metric_for_best_model", "greater_is_better")
# What constructors of settings raise: they look for packages and files, too.
_REFUSALS = (ValueError, TypeError, LookupError, AttributeError, NotImplementedError, ImportError, OSError)


def refuse_contradictions(settings: Mapping[str, GivenSetting]) -> None:
    """Refuse settings that would silently have no effect beside others.

    Raises:
        ConfigError: The first pair that is found.
    """
    _refuse_two_lengths(settings)
    _refuse_two_precisions(settings)
    _refuse_unused_intervals(settings)
    _refuse_keeping_what_is_not_saved(settings)
    _refuse_evaluation_without_data(settings)
    _refuse_output_among_data(settings)


def check_lora(lora: Mapping[str, Any], settings: Mapping[str, GivenSetting]) -> None:
    """Have PEFT check its settings together.

    Raises:
        ConfigError: PEFT refuses them, or adapters would begin with something made from the weights.
    """
    from peft import LoraConfig

    first = settings.get("lora.init_lora_weights")
    if first is not None and isinstance(first.value, str) and first.value != "gaussian":
        raise ConfigError(
            f"{first.where}: expected true, false or gaussian, since adapters are made before the weights are read, "
            f"but got {shown(first.value)}; choose one of these, or train with OutcoreMixin"
        )
    with _quiet(), _refused_by("PEFT", {k: s for k, s in settings.items() if k.startswith("lora.")}):
        LoraConfig(**lora)


def check_training(training: Mapping[str, Any], out: str, settings: Mapping[str, GivenSetting], method: Method) -> None:
    """Have TRL, transformers and torch check their settings together. Nothing is written or printed.

    Raises:
        ConfigError: A library refuses them, or would once the run has begun.
    """
    from outcore.integrations.refusals import refuse_arguments

    given = {key: setting for key, setting in settings.items() if "." not in key}
    with _quiet(), _refused_by("TRL", given):
        # Also checked before the arguments are made, since making some of them looks for packages.
        refuse_arguments(SimpleNamespace(n_gpu=1, **training))
        args = method.arguments(out, training)
        refuse_arguments(args)
    with _quiet(), _refused_by("torch", {key: setting for key, setting in given.items() if key in _OF_OPTIMIZERS}):
        optimizer = _optimizer(args)
    with _quiet(), _refused_by("transformers", {k: s for k, s in given.items() if k.startswith("lr_scheduler_")}):
        _try_schedule(args, optimizer)
    if "report_to" in given and args.report_to:
        _refuse_absent_trackers(args.report_to, given["report_to"].where)


def _refuse_two_lengths(settings: Mapping[str, GivenSetting]) -> None:
    steps, epochs = (settings.get(key) for key in LENGTHS)
    if steps is not None and epochs is not None:
        raise ConfigError(
            f"{steps.where}: expected steps or epochs, but got {shown(steps.value)} steps beside "
            f"{shown(epochs.value)} epochs ({epochs.where}); remove one of them"
        )


def _refuse_two_precisions(settings: Mapping[str, GivenSetting]) -> None:
    """Refuse TRL's ``bf16`` with any precision but fp32, since it is autocast over fp32 weights."""
    precision = settings.get("outcore.precision")
    asked = settings.get("bf16")
    if asked is not None and asked.value and (precision is None or precision.value != "fp32"):
        got = "bf16, the default" if precision is None else f"{precision.value} ({precision.where})"
        raise ConfigError(
            f"{asked.where}: expected precision fp32 beside bf16, which is autocast over fp32 weights, but got {got}; "
            "set precision to fp32, or leave bf16 out"
        )


def _refuse_unused_intervals(settings: Mapping[str, GivenSetting]) -> None:
    for name in ("save", "eval", "logging"):
        steps, strategy = settings.get(f"{name}_steps"), settings.get(f"{name}_strategy")
        if steps is not None and strategy is not None and strategy.value != "steps":
            raise ConfigError(
                f"{steps.where}: expected {name}_strategy steps beside a number of steps, but got "
                f"{shown(strategy.value)} ({strategy.where}); remove one of them"
            )
    strategy = settings.get("eval_strategy")
    if strategy is not None and strategy.value == "steps" and not {"eval_steps", "save_steps"} & settings.keys():
        raise ConfigError(
            f"{strategy.where}: expected eval_steps beside eval_strategy steps, but got none; set the number of steps "
            "between evaluations"
        )


def _refuse_keeping_what_is_not_saved(settings: Mapping[str, GivenSetting]) -> None:
    strategy, keep = settings.get("save_strategy"), settings.get("save_total_limit")
    minutes = settings.get("outcore.save_every_minutes")
    is_saving = "save_steps" in settings or any(
        setting is not None and setting.value not in (None, "no") for setting in (strategy, minutes)
    )
    if keep is not None and keep.value is not None and not is_saving:
        raise ConfigError(
            f"{keep.where}: expected checkpoints to be saved, but got a number to keep and no --save-every; add it"
        )


def _refuse_evaluation_without_data(settings: Mapping[str, GivenSetting]) -> None:
    data = settings.get("outcore.eval_data")
    if data is not None and data.value is not None:
        strategy = settings.get("eval_strategy")
        if strategy is not None and strategy.value == "no":
            raise ConfigError(
                f"{data.where}: expected an evaluation of this data, but got eval_strategy no ({strategy.where}); "
                "remove one of them"
            )
        return
    for key, setting in settings.items():
        is_on = setting.value not in (None, False, 0, "no")
        if is_on and (key.startswith("eval_") or key in _EVALUATION):
            raise ConfigError(
                f"{setting.where}: expected --eval-data beside a setting of evaluation, but got none; name the data, "
                "or leave this out"
            )


def _refuse_output_among_data(settings: Mapping[str, GivenSetting]) -> None:
    """Refuse a folder to write to below one of data: a run that resumes would read its own output as data."""
    out = settings["outcore.out"]
    path = os.path.realpath(out.value)
    for flag in ("data", "eval_data"):
        data = settings.get(f"outcore.{flag}")
        for name in () if data is None or data.value is None else _names_of(data):
            below = os.path.relpath(path, os.path.realpath(name)).split(os.sep)
            # The folder itself is "." and one outside begins with ".."; a hidden folder is not read.
            if os.path.isdir(name) and (below == ["."] or not any(part.startswith(".") for part in below)):
                raise ConfigError(
                    f"{out.where}: expected a folder outside of --{flag.replace('_', '-')} '{name}', all files "
                    f"in which are read as data, but got '{out.value}'; name another"
                )


def _names_of(data: GivenSetting) -> list[str]:
    """Return what data is read from. Raises: ConfigError: Its weights cannot be used."""
    try:
        return [source.name for source in sources_of(data.value)]
    except ConfigError as error:
        raise ConfigError(f"{data.where} {error}") from error


def _optimizer(args: Any) -> Any:
    import torch

    from outcore.integrations.optimizers import optimizer_for

    kind, options = optimizer_for(args)
    return kind([torch.zeros(1, device="cpu"), torch.zeros(1, 1, device="cpu")], **options)


def _try_schedule(args: Any, optimizer: Any) -> None:
    """Make the schedule, since it checks its arguments only then; a run makes it after the model."""
    from transformers.optimization import get_scheduler

    extra = args.lr_scheduler_kwargs
    get_scheduler(args.lr_scheduler_type, optimizer, 0, num_training_steps=1, scheduler_specific_kwargs=extra)


def _refuse_absent_trackers(trackers: Iterable[str], where: str) -> None:
    from transformers.integrations import get_available_reporting_integrations

    installed = get_available_reporting_integrations()
    absent = next((tracker for tracker in trackers if tracker not in installed), None)
    if absent is not None:
        raise ConfigError(
            f"{where}: expected a tracker that is installed ({', '.join(installed) or 'there is none'}), "
            f"but got {shown(absent)}; install its package, or leave this out"
        )


@contextmanager
def _refused_by(who: str, settings: Mapping[str, GivenSetting]) -> Iterator[None]:
    try:
        yield
    except (UnsupportedError, *_REFUSALS) as error:
        said = " ".join(str(error).split()) or type(error).__name__
        where = ", ".join(_guilty(settings, said)) or "settings"
        if isinstance(error, UnsupportedError):
            raise ConfigError(f"{where}: {said.removeprefix('training arguments: ')}") from error
        said = said.rstrip(".") if len(said) <= _LONGEST else f"{said[:_LONGEST]}..."
        raise ConfigError(
            f"{where}: expected what {who} accepts, but it says: {said}; change or leave out what it names"
        ) from error


def _guilty(settings: Mapping[str, GivenSetting], said: str) -> list[str]:
    """Return where the settings were given that a library's message is about, as far as it tells."""
    by_name = [s.where for key, s in settings.items() if re.search(rf"\b{key.rpartition('.')[2]}\b", said)]
    by_value = [s.where for s in settings.values() if any(word in said for word in _long_words(s.value))]
    return by_name or by_value or [s.where for s in settings.values() if len(settings) <= _FEW]


def _long_words(value: object) -> list[str]:
    values = value if isinstance(value, Mapping) else [repr(value) if isinstance(value, float) else value]
    return [word for word in values if isinstance(word, str) and len(word) > 2]  # "no" stands in many sentences


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the libraries: what is only tried out here is reported when the run makes it for good."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
