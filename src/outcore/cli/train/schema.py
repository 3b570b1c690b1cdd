"""Every setting there is: TRL's, PEFT's ``LoraConfig`` and outcore's own, with types, limits and names.

The three classes are the list; here stands only what their annotations do not say.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

from outcore.cli.train.fields import Mismatch, coerce, in_words, narrowed, shown
from outcore.cli.train.given import Given
from outcore.cli.train.methods import Method
from outcore.core.errors import ConfigError
from outcore.spec.model import Precision

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
    # names that transformers is about to drop
    "gradient_checkpointing": "activation_checkpointing",
    "gradient_checkpointing_kwargs": "activation_checkpointing_kwargs",
}

DEFAULTS: Mapping[str, Any] = {
    "activation_checkpointing": False,  # the engine recomputes by itself
    "bf16": False,  # precision says it
    "disable_tqdm": True,  # outcore has a progress bar of its own
    "logging_nan_inf_filter": False,  # it shows other numbers in place of nan, and waits for the device to do so
    "logging_steps": 1,
    "report_to": "none",
    "save_strategy": "no",  # model/ is written at the end in any case
}
"""Where the commands differ from TRL's class."""

_HUB = "upload the finished OUT/model with 'hf upload'"
_ALWAYS_TRAINS = "this command always trains, and evaluates with --eval-data"
INSTEAD: Mapping[str, str] = {
    "do_train": _ALWAYS_TRAINS,
    "do_eval": _ALWAYS_TRAINS,
    "do_predict": _ALWAYS_TRAINS,
    "fp16": "--precision says what weights and arithmetic are in: bf16, pure_bf16 or fp32",
    "disable_tqdm": "outcore shows a progress bar of its own",
    "model_init_kwargs": "the model is built from its config.json: change a copy of that file",
    "trust_remote_code": "only models that transformers itself knows can be trained",
    "logging_nan_inf_filter": "--on-nonfinite says what becomes of numbers that are not finite; they are shown as such",
    "resume_from_checkpoint": "--resume continues from the newest checkpoint in --out",
    "save_only_model": "without states no checkpoint can be resumed from, and the final model is in model/ anyway",
    "precompute_ref_log_probs": "the frozen reference is kept out of core beside the model, and --lora needs none",
    "ignore_data_skip": "a resumed run goes on with the data that comes next",
    "push_to_hub": _HUB,
    "hub_always_push": _HUB,
    "hub_model_id": _HUB,
    "hub_private_repo": _HUB,
    "hub_revision": _HUB,
    "hub_strategy": _HUB,
    "hub_token": _HUB,
}
"""Settings that have no effect here, or a wrong one -> what to do instead. Their defaults are accepted."""


OnNonfinite = Literal["stop", "skip", "go"]
Resume = bool | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class Own:
    """outcore's own settings: at the top level or under ``outcore:``."""

    model: str
    data: str
    out: str
    eval_data: str | None = None
    precision: Precision = "bf16"
    device_memory: Any = None
    host_memory: Any = None
    disk: str | list[str] | None = None
    plan: str | None = None
    device: str | None = None
    resume: Resume = False
    on_nonfinite: OnNonfinite = "stop"
    trace: str | None = None
    dry_run: bool = False
    # SFTConfig has these two, too; DPOConfig has not.
    eos_token: str | None = None
    chat_template_path: str | None = None


class Limit(NamedTuple):
    """What a value must keep to beyond its type."""

    words: str
    holds: Callable[[Any], bool]


_POSITIVE = Limit("above 0", lambda v: v > 0)
_NOT_NEGATIVE = Limit("of 0 or more", lambda v: v >= 0)
_ONE_OR_MORE = Limit("of 1 or more", lambda v: v >= 1)
_BELOW_ONE = Limit("from 0 to below 1", lambda v: 0 <= v < 1)
_UP_TO_ONE = Limit("from 0 to 1", lambda v: 0 <= v <= 1)
_SEED = Limit("from 0 to 4294967295", lambda v: 0 <= v < 2**32)  # NumPy's seeds are 32 bits
_NAME = Limit("that is a name or a path", lambda v: v is None or (v.strip() and "\0" not in v))

LIMITS: Mapping[str, Limit] = {
    "max_steps": _ONE_OR_MORE,
    "num_train_epochs": _POSITIVE,
    "per_device_train_batch_size": _ONE_OR_MORE,
    "per_device_eval_batch_size": _ONE_OR_MORE,
    "gradient_accumulation_steps": _ONE_OR_MORE,
    "max_length": Limit("of 2 or more", lambda v: v >= 2),  # a token and the one to predict
    "learning_rate": _POSITIVE,
    "weight_decay": _NOT_NEGATIVE,
    "adam_beta1": _BELOW_ONE,
    "adam_beta2": _BELOW_ONE,
    "adam_epsilon": _NOT_NEGATIVE,
    "max_grad_norm": _NOT_NEGATIVE,
    "label_smoothing_factor": _UP_TO_ONE,
    "warmup_steps": _NOT_NEGATIVE,
    "neftune_noise_alpha": _POSITIVE,
    "router_aux_loss_coef": _NOT_NEGATIVE,
    "save_steps": _POSITIVE,
    "save_total_limit": _ONE_OR_MORE,
    "eval_steps": _POSITIVE,
    "eval_delay": _NOT_NEGATIVE,
    "eval_accumulation_steps": _ONE_OR_MORE,
    "logging_steps": _POSITIVE,
    "seed": _SEED,
    "data_seed": _SEED,
    "dataloader_num_workers": _NOT_NEGATIVE,
    "dataloader_prefetch_factor": _ONE_OR_MORE,
    "dataset_num_proc": _ONE_OR_MORE,
    "pad_to_multiple_of": _ONE_OR_MORE,
    "outcore.model": _NAME,
    "outcore.data": _NAME,
    "outcore.out": _NAME,
    "outcore.eval_data": _NAME,
    "outcore.plan": _NAME,
    "outcore.trace": _NAME,
    "beta": _NOT_NEGATIVE,
    "ld_alpha": _UP_TO_ONE,
    "label_smoothing": _UP_TO_ONE,
    "lora.r": _ONE_OR_MORE,
    "lora.lora_alpha": _ONE_OR_MORE,
    "lora.lora_dropout": _BELOW_ONE,
}


CHOICES: Mapping[str, tuple[str, ...]] = {
    "include_num_input_tokens_seen": ("all", "non_padding", "no"),
    "pad_to_multiple_of": ("auto",),
    "f_divergence_type": ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"),
}
"""Words where the class says text only."""

_WITHOUT_DEFAULT = {"steps", "max_steps", "save_every", "save_steps", "lora"}
"""Left out they mean another way, not the number that the class has for them."""


class Field(NamedTuple):
    """One setting."""

    hint: Any
    default: Any
    """``dataclasses.MISSING`` where there is none, or none that is worth saying."""
    limit: Limit | None

    def expected(self, value: object) -> str:
        """Say in words what this setting takes."""
        words = in_words(self.hint, value)
        if self.limit is None:
            return words
        first, null, _ = words.partition(" or null")
        return f"{first} {self.limit.words}{null}"


class Setting(NamedTuple):
    """A setting whose name and value are right by themselves."""

    value: Any
    where: str


class Schema:
    """The settings by their full names: ``learning_rate``, ``outcore.disk``, ``lora.r``."""

    def __init__(self, method: Method) -> None:
        """List them.

        Args:
            method: Whose class of TRL's counts.
        """
        # Imported here: the two take seconds, and a broken YAML file is found before.
        config = method.config_class()
        try:
            from peft import LoraConfig
        except ImportError:
            LoraConfig = None  # noqa: N806 (a class, if it is there)
        self._has_lora = LoraConfig is not None
        self._config_name = config.__name__
        self.fields = dict(_fields(config))
        own = dict(_fields(Own, "outcore."))
        self.fields |= {key: field for key, field in own.items() if key.removeprefix("outcore.") not in self.fields}
        if LoraConfig is not None:
            self.fields |= _fields(LoraConfig, "lora.")

    def check(self, given: Iterable[Given]) -> dict[str, Setting]:
        """Check names and values of settings that were given side by side.

        Raises:
            ConfigError: An unknown name, a value that its setting does not take, or the same setting twice.
        """
        checked: dict[str, Setting] = {}
        for item in _apart(given):
            key = self._key(item)
            setting = Setting(self._value(key, item), item.where)
            other = checked.setdefault(key, setting)
            if other.value != setting.value:
                raise ConfigError(
                    f"{setting.where}: expected {key} to be given once, but got {shown(setting.value)} beside "
                    f"{shown(other.value)} ({other.where}); remove one of them"
                )
        return checked

    def _key(self, given: Given) -> str:
        name = SHORT_NAMES.get(given.key, given.key)
        key = next((key for key in (name, f"outcore.{name}") if key in self.fields), None)
        if key is not None:
            return key
        if name.startswith("lora.") and not self._has_lora:
            raise ConfigError(
                f"{given.where}: expected the package peft for LoRA, but it is not installed; "
                "pip install 'outcore[peft]'"
            )
        raise ConfigError(f"{given.where}: expected the name of a setting, but got {self._instead_of(given.key)}")

    def _instead_of(self, key: str) -> str:
        got = f"the unknown {shown(key)}"
        head, dot, tail = key.partition(".")
        if dot and head in self.fields:
            return f"{got}; give {head} as a whole: {head}={{{tail}: VALUE}}"
        # A name that is right but stands in another section comes first.
        known = [name for name in (*SHORT_NAMES, *self.fields) if name not in INSTEAD]
        leaf = key.rpartition(".")[2].lower()
        moved = [name for name in known if name.rpartition(".")[2] == leaf]
        leaves = {name.removeprefix("outcore."): None for name in known}
        near = moved or difflib.get_close_matches(key.lower(), leaves, n=1)
        if near:
            return f"{got}; did you mean '{near[0]}'?"
        return (
            f"{got}; there are those of trl.{self._config_name}, the options of this command, and the sections outcore "
            "and lora"
        )

    def _value(self, key: str, given: Given) -> Any:
        field = self.fields[key]
        value = _read(given, field)
        is_number = isinstance(value, int | float)  # the limits of words, such as null or auto, are their choices
        if field.limit is not None and (is_number or field.limit is _NAME) and not field.limit.holds(value):
            raise _wrong(given, field)
        if key in INSTEAD and value != field.default:
            got = "a value" if key.endswith("_token") else shown(value)  # a secret must not end in a log
            raise ConfigError(f"{given.where}: expected this to be left out, but got {got}; {INSTEAD[key]}")
        return value


def _fields(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field]]:
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        key = prefix + field.name
        if field.init and key not in SHORT_NAMES:
            hint = narrowed(hints[field.name], CHOICES.get(key, field.metadata.get("choices")))
            yield key, Field(hint, DEFAULTS.get(key, field.default), LIMITS.get(key))


def _apart(given: Iterable[Given]) -> Iterator[Given]:
    """Take sections apart that were given as a whole; a lone number for LoRA is its rank."""
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


def _read(given: Given, field: Field) -> Any:
    # A word such as no means something to YAML; where its setting wants text, it is that text.
    for value in [given.value] if given.text is None else [given.value, given.text]:
        try:
            return coerce(value, field.hint)
        except Mismatch:
            continue
    raise _wrong(given, field)


def _wrong(given: Given, field: Field) -> ConfigError:
    takes_text = str in (field.hint, *get_args(field.hint))
    if takes_text and not isinstance(given.value, str | list | Mapping | None):
        repair = "put it in quotes if it is text"
    elif field.default in (MISSING, None) or given.key in _WITHOUT_DEFAULT:
        repair = "correct it"
    else:
        repair = f"correct it, or leave it out for {shown(field.default)}"
    return ConfigError(f"{given.where}: expected {field.expected(given.value)}, but got {shown(given.value)}; {repair}")
