"""Every setting there is: fields of TRL's class, of PEFT's ``LoraConfig`` and outcore's own, by their annotations.

The libraries check what an annotation does not say when their classes are made (``setting_rules``). This file has only
what they would check in the middle of a run or never, and what this command decides in their place.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass
from types import GenericAlias
from typing import Any, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from outcore.command.train.method import Method
from outcore.command.train.settings.given_settings import SECTIONS, GivenSetting, shown
from outcore.command.train.settings.outcore_settings import OutcoreSettings
from outcore.core.errors import ConfigError
from outcore.integrations.versions import other_names

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

_LEAST: Mapping[str, int] = {
    **dict.fromkeys(("max_steps", "per_device_train_batch_size", "per_device_eval_batch_size"), 1),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit", "pad_to_multiple_of"), 1),
    **dict.fromkeys(("eval_accumulation_steps", "dataloader_prefetch_factor", "dataset_num_proc"), 1),
    **dict.fromkeys(("lora.r", "lora.lora_alpha"), 1),
    **dict.fromkeys(("max_grad_norm", "weight_decay", "beta", "seed", "data_seed", "router_aux_loss_coef"), 0),
    **dict.fromkeys(("eval_delay", "dataloader_num_workers", "lora.lora_dropout"), 0),
    **dict.fromkeys(("label_smoothing_factor", "label_smoothing", "ld_alpha"), 0),
    "max_length": 2,  # a token and the one to predict
}
_ABOVE_0 = ("num_train_epochs", "learning_rate", "save_steps", "eval_steps", "logging_steps", "neftune_noise_alpha")
_MOST: Mapping[str, int] = {
    **dict.fromkeys(("label_smoothing_factor", "label_smoothing", "ld_alpha", "lora.lora_dropout"), 1),
    **dict.fromkeys(("seed", "data_seed"), 2**32 - 1),  # NumPy's seeds are 32 bits
}
"""Limits of numbers that no library checks before the run has begun."""
_WORDS: Mapping[str, Sequence[str]] = {
    "lora.task_type": ("CAUSAL_LM",),
    "lora.peft_type": ("LORA",),
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
}
"""Words that the libraries check in the first step, or never."""
_MANY = 12
"""The most words that a message lists."""
_TOO_LARGE = 2**63
"""torch and NumPy take only smaller numbers."""

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

_CHECKED = ConfigDict(extra="forbid", allow_inf_nan=False)


@dataclass(frozen=True)
class SettingKind:
    """The values that one setting takes."""

    hint: Any
    default: Any
    """``dataclasses.MISSING`` where there is none, or none that is worth saying."""
    words: Sequence[str] = ()
    """What its text may be; empty: any."""

    def read(self, given: GivenSetting) -> Any:
        """Return the setting's value from what was given: as it is, then as pydantic converts it or what was typed.

        Raises:
            ConfigError: The setting does not take it. No setting takes numbers that are not finite.
        """
        hint: Any = GenericAlias(list, self.hint)  # pydantic takes no configuration for a lone dataclass
        adapter, typed = TypeAdapter(hint, config=_CHECKED), given.value if given.text is None else given.text
        readings = [(given.value, True)]
        readings += [(reading, False) for reading in (given.value, typed) if not isinstance(reading, bool)]
        readings += [(None, True)] if str(typed).lower() in ("none", "null") else []
        expected: dict[str, None] = {}
        for reading, is_strict in readings:
            try:
                value = adapter.validate_python([reading], strict=is_strict)[0]
            except ValidationError as error:
                if not expected or not is_strict:
                    expected = dict.fromkeys(map(_expected, error.errors()))
            else:
                wrong = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, str)]
                if not self.words or all(word in self.words for word in wrong):
                    return reading if isinstance(value, float) and value == reading else value  # 3 stays 3, not 3.0
                some = (
                    self.words
                    if len(self.words) <= _MANY
                    else [*self.words[:_MANY], f"{len(self.words) - _MANY} others"]
                )
                expected = {f"one of {', '.join(some)}": None}
                break
        said = " or ".join(expected) or "a value of another type"
        usual = "" if self.default in (MISSING, None) else f", or leave it out for {shown(self.default)}"
        repair = suggestion(shown(given.value).strip("'"), self.words) or f"correct it{usual}"
        raise ConfigError(f"{given.where}: expected {said}, but got {shown(given.value)}; {repair}")


def suggestion(wrong: str, known: Iterable[str]) -> str:
    """Ask whether a word was meant that is like the wrong one; empty if none is."""
    near = [word for word in difflib.get_close_matches(wrong.lower(), list(known), n=1) if word != wrong]
    return f"did you mean '{near[0]}'?" if near else ""


def _expected(error: Mapping[str, Any]) -> str:
    """Put pydantic's words into a sentence."""
    _, is_usual, said = error["msg"].rpartition("Input should be ")
    key = f" '{error['loc'][-1]}'" if error["type"] in ("missing", "unexpected_keyword_argument") else ""
    if not is_usual:
        return f"a value that fits ({said.removeprefix('Value error, ')}{key})"
    return f"{'a number ' if said.startswith(('greater', 'less')) else ''}{said.partition(', unable to ')[0]}"


class Schema:
    """The settings by their full names: ``learning_rate``, ``outcore.disk``, ``lora.r``."""

    def __init__(self, method: Method) -> None:
        """List the settings.

        Args:
            method: Decides which class of TRL's counts.
        """
        # Imported here: PEFT and TRL take seconds, and a broken YAML file is found before.
        from peft import LoraConfig

        from outcore.integrations.optimizers import OPTIMIZERS

        config = method.config_class()
        self._config_name = config.__name__
        self._names = {**SHORT_NAMES, **other_names([field.name for field in dataclasses.fields(config)])}
        words = {
            **_WORDS,
            "optim": OPTIMIZERS,
            "metric_for_best_model": [*(name.removeprefix("eval_") for name in method.metrics), *method.metrics],
        }
        self.kinds = {key: kind for key, kind in _kinds(config, words) if key not in self._names}
        own = {key: kind for key, kind in _kinds(OutcoreSettings, words, "outcore.") if key[8:] not in self.kinds}
        self.kinds |= own | dict(_kinds(LoraConfig, words, "lora."))
        self.defaults = {key: value for key, value in DEFAULTS.items() if key in self.kinds}

    def check(self, given: Iterable[GivenSetting]) -> dict[str, GivenSetting]:
        """Check names and values of settings that were given side by side.

        Raises:
            ConfigError: An unknown name, a value that its setting does not take, or the same setting twice.
        """
        checked: dict[str, GivenSetting] = {}
        for item in _apart(given):
            key = self._key(item)
            setting = dataclasses.replace(item, key=key, value=self._value(key, item))
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
        raise ConfigError(f"{given.where}: unknown setting {shown(given.key)}; {self._instead_of(given.key)}")

    def _instead_of(self, key: str) -> str:
        head, dot, tail = key.partition(".")
        if dot and head in self.kinds:
            return f"give {head} as a whole: {head}={{{tail}: VALUE}}"
        if key.rpartition(".")[2] == "state_format":
            return "optim says how states are stored: names with 8bit, such as adamw_8bit, store 8 bits"
        # A right name that belongs to another section is suggested first.
        known = [name for name in (*self._names, *self.kinds) if name not in INSTEAD]
        moved = [name for name in known if name.rpartition(".")[2] == key.rpartition(".")[2].lower()]
        return (
            f"did you mean '{moved[0]}'?"
            if moved
            else suggestion(key, dict.fromkeys(name.removeprefix("outcore.") for name in known))
            or f"use an option of this command (--help lists them), a field of trl.{self._config_name}, or a key under "
            "lora: or outcore:"
        )

    def _value(self, key: str, given: GivenSetting) -> Any:
        value, default = self.kinds[key].read(given), self.kinds[key].default
        if key in INSTEAD and value != default:
            got = "a value" if key.endswith("_token") else shown(value)  # a secret must not get into a log
            raise ConfigError(f"{given.where}: expected this to be left out, but got {got}; {INSTEAD[key]}")
        if isinstance(value, int | float):
            _refuse_number(key, value, given, default)
        return value


def _refuse_number(key: str, value: float, given: GivenSetting, default: Any) -> None:
    least, most = _LEAST.get(key), _MOST.get(key)
    if not abs(value) < _TOO_LARGE:
        expected = f"a number less than {_TOO_LARGE}"
    elif most is not None and value > most:
        expected = f"a number of at most {most}"
    elif least is not None and value < least:
        expected = f"a number of at least {least}"
    elif key in _ABOVE_0 and value <= 0:
        expected = "a number above 0"
    else:
        return
    # Without these, a run is not what it is with the number that their class has for them.
    usual = "" if default in (MISSING, None) or key in ("max_steps", "save_steps", "lora.r") else shown(default)
    repair = "correct it" + (f", or leave it out for {usual}" if usual else "")
    raise ConfigError(f"{given.where}: expected {expected}, but got {shown(given.value)}; {repair}")


def _kinds(config: Any, words: Mapping[str, Sequence[str]], prefix: str = "") -> Iterator[tuple[str, SettingKind]]:
    hints = get_type_hints(config, include_extras=True)
    for field in dataclasses.fields(config):
        if not field.init:
            continue
        key, choices = prefix + field.name, tuple(field.metadata.get("choices", ()))
        if field.name == "loss_type":  # without choices, they are in its help text alone, and judged in the first step
            choices = choices or tuple(dict.fromkeys(re.findall(r"`'(\w+)'`", field.metadata.get("help", ""))))
        default = DEFAULTS.get(key, field.default)
        yield key, SettingKind(hints[field.name], getattr(default, "value", default), words.get(key, choices))


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
