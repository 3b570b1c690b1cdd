"""Every setting there is: TRL's, PEFT's ``LoraConfig`` and outcore's own.

The three classes are the list. This module adds what their annotations do not say and their constructors do not check.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING
from typing import Any, get_type_hints

from pydantic import Field

from outcore.command.train.method import Method
from outcore.command.train.settings.fields import CheckedSetting, SettingKind, admitted
from outcore.command.train.settings.given_settings import GivenSetting, shown
from outcore.command.train.settings.outcore_settings import OutcoreSettings
from outcore.core.errors import ConfigError
from outcore.integrations.versions import other_names

SECTIONS = ("outcore", "lora")

SHORT_NAMES: Mapping[str, str] = {
    "steps": "max_steps",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "grad_accum": "gradient_accumulation_steps",
    "seq_len": "max_length",
    "lr": "learning_rate",
    "save_every": "save_steps",
    "keep": "save_total_limit",
    "lora": "lora.r",
    "output_dir": "out",
}

DEFAULTS: Mapping[str, Any] = {
    # the engine recomputes by itself
    "activation_checkpointing": False,
    "gradient_checkpointing": False,
    "bf16": False,  # --precision decides
    "disable_tqdm": True,  # outcore has a progress bar of its own
    "logging_nan_inf_filter": False,  # it shows other numbers in place of nan, and waits for the device to do so
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",  # model/ is written at the end in any case
}
"""Defaults of the commands that differ from TRL's class. Names that the class does not have are ignored."""

_LIMITS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            *("max_steps", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
            *("save_total_limit", "eval_accumulation_steps", "dataloader_prefetch_factor", "dataset_num_proc"),
            *("pad_to_multiple_of", "lora.r", "lora.lora_alpha"),
        ),
        Field(ge=1),
    ),
    **dict.fromkeys(("num_train_epochs", "learning_rate", "save_steps", "eval_steps", "logging_steps"), Field(gt=0)),
    "neftune_noise_alpha": Field(gt=0),
    **dict.fromkeys(("beta", "weight_decay"), Field(ge=0)),
    **dict.fromkeys(("max_grad_norm", "router_aux_loss_coef", "eval_delay", "dataloader_num_workers"), Field(ge=0)),
    **dict.fromkeys(("label_smoothing_factor", "label_smoothing", "ld_alpha"), Field(ge=0, le=1)),
    **dict.fromkeys(("seed", "data_seed"), Field(ge=0, lt=2**32)),  # NumPy's seeds are 32 bits
    "max_length": Field(ge=2),  # a token and the one to predict
    "lora.lora_dropout": Field(ge=0, lt=1),
}
"""Limits of numbers that no library checks before the run has begun."""

INSTEAD: Mapping[str, str] = {
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict"), "this command always trains, and evaluates with --eval-data"
    ),
    "fp16": "--precision says what weights and arithmetic are in: bf16, pure_bf16, fp16 or fp32",
    "disable_tqdm": "outcore shows a progress bar of its own",
    "model_init_kwargs": "the model is built from its config.json: change a copy of that file",
    "trust_remote_code": "only models that transformers itself knows can be trained",
    "logging_nan_inf_filter": "--on-nonfinite says what becomes of numbers that are not finite; they are shown as such",
    "resume_from_checkpoint": "--resume continues from the newest checkpoint in --out",
    "enable_jit_checkpoint": "a run that is told to stop saves a checkpoint by itself, within --grace",
    "lora.inference_mode": "this command trains",
    "lora.use_dora": "its magnitudes begin as norms of weights, which are not read yet where this command makes "
    "adapters; train them with OutcoreMixin",
    "save_only_model": "without states no checkpoint can be resumed from, and the final model is in model/ anyway",
    "precompute_ref_log_probs": "the frozen reference is kept out of core beside the model, and --lora needs none",
    "ignore_data_skip": "a resumed run goes on with the data that comes next",
    **dict.fromkeys(
        (
            *("push_to_hub", "hub_always_push", "hub_model_id", "hub_private_repo", "hub_revision", "hub_strategy"),
            "hub_token",
        ),
        "upload the finished OUT/model with 'hf upload'",
    ),
}
"""Settings that have no effect here, or a wrong one -> what to do instead. Their defaults are accepted."""

_WITHOUT_DEFAULT = {"max_steps", "save_steps", "lora.r"}
"""Settings that mean another way of training if they are left out, not the number that the class has for them."""


def _words(method: Method) -> dict[str, Sequence[str]]:
    """Return the words that a setting takes, for settings that their class annotates as mere text."""
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    from outcore.integrations.optimizers import OPTIMIZERS

    return {
        "include_num_input_tokens_seen": ("all", "non_padding", "no"),
        "pad_to_multiple_of": ("auto",),
        "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
        "metric_for_best_model": [*(name.removeprefix("eval_") for name in method.metrics), *method.metrics],
        "optim": OPTIMIZERS,
        "report_to": (*sorted(INTEGRATION_TO_CALLBACK), "all", "none"),
        "lora.task_type": ("CAUSAL_LM",),
        "lora.peft_type": ("LORA",),
    }


class Schema:
    """The settings by their full names: ``learning_rate``, ``outcore.disk``, ``lora.r``."""

    def __init__(self, method: Method) -> None:
        """List the settings.

        Args:
            method: Decides which class of TRL's counts.
        """
        # Imported here: PEFT and TRL take seconds, and a broken YAML file is found before.
        from peft import LoraConfig

        config, words = method.config_class(), _words(method)
        self._config_name = config.__name__
        self._names = {**SHORT_NAMES, **other_names([field.name for field in dataclasses.fields(config)])}
        self.kinds = {key: kind for key, kind in _kinds(config, words) if key not in self._names}
        own = dict(_kinds(OutcoreSettings, words, "outcore."))
        self.kinds |= {key: kind for key, kind in own.items() if key.removeprefix("outcore.") not in self.kinds}
        self.kinds |= _kinds(LoraConfig, words, "lora.")
        self.defaults = {key: value for key, value in DEFAULTS.items() if key in self.kinds}

    def check(self, given: Iterable[GivenSetting]) -> dict[str, CheckedSetting]:
        """Check names and values of settings that were given side by side.

        Raises:
            ConfigError: An unknown name, a value that its setting does not take, or the same setting twice.
        """
        checked: dict[str, CheckedSetting] = {}
        for item in _apart(given):
            key = self._key(item)
            setting = CheckedSetting(self._value(key, item), item.where)
            other = checked.setdefault(key, setting)
            if other.value != setting.value:
                raise ConfigError(
                    f"{setting.where}: expected {key} to be given once, but got {shown(setting.value)} beside "
                    f"{shown(other.value)} ({other.where}); remove one of them"
                )
        return checked

    def _key(self, given: GivenSetting) -> str:
        name = self._names.get(given.key, given.key)
        key = next((key for key in (name, f"outcore.{name}") if key in self.kinds), None)
        if key is not None:
            return key
        raise ConfigError(f"{given.where}: expected the name of a setting, but got {self._instead_of(given.key)}")

    def _instead_of(self, key: str) -> str:
        got = f"the unknown {shown(key)}"
        head, dot, tail = key.partition(".")
        if dot and head in self.kinds:
            return f"{got}; give {head} as a whole: {head}={{{tail}: VALUE}}"
        if key.rpartition(".")[2] == "state_format":
            return f"{got}; optim says how states are stored: names with 8bit, such as adamw_8bit, store 8 bits"
        # A right name that belongs to another section is suggested first.
        known = [name for name in (*self._names, *self.kinds) if name not in INSTEAD]
        leaf = key.rpartition(".")[2].lower()
        moved = [name for name in known if name.rpartition(".")[2] == leaf]
        leaves = {name.removeprefix("outcore."): None for name in known}
        near = moved or difflib.get_close_matches(key.lower(), leaves, n=1)
        if near:
            return f"{got}; did you mean '{near[0]}'?"
        return (
            f"{got}, and no name is like it; the options of this command are settings (--help lists them), and so are "
            f"the fields of trl.{self._config_name} and those of the sections outcore and lora"
        )

    def _value(self, key: str, given: GivenSetting) -> Any:
        value = self.kinds[key].read(given)
        if key in INSTEAD and value != self.kinds[key].default:
            got = "a value" if key.endswith("_token") else shown(value)  # a secret must not get into a log
            raise ConfigError(f"{given.where}: expected this to be left out, but got {got}; {INSTEAD[key]}")
        return value


def _kinds(config: Any, words: Mapping[str, Sequence[str]], prefix: str = "") -> Iterator[tuple[str, SettingKind]]:
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        key = prefix + field.name
        if not field.init:
            continue
        choices = words.get(key) or field.metadata.get("choices") or ()
        if key == "loss_type" and not choices:  # TRL lists them in its help text alone
            choices = tuple(dict.fromkeys(re.findall(r"`'(\w+)'`", field.metadata.get("help", ""))))
        default = MISSING if key in _WITHOUT_DEFAULT else DEFAULTS.get(key, field.default)
        yield (
            key,
            SettingKind(admitted(hints[field.name], choices, _LIMITS.get(key)), getattr(default, "value", default)),
        )


def _apart(given: Iterable[GivenSetting]) -> Iterator[GivenSetting]:
    """Take apart sections that were given as a whole; a lone number for LoRA is its rank."""
    for item in given:
        if item.key in SECTIONS and isinstance(item.value, Mapping) and item.value:
            yield from item.section(item.value)
        elif item.key == "outcore" or (item.key == "lora" and not isinstance(item.value, int | str)):
            raise ConfigError(
                f"{item.where}: expected a section of settings{' or a rank' if item.key == 'lora' else ''}, but got "
                f"{shown(item.value)}; indent its settings below it, or remove it"
            )
        else:
            yield item
