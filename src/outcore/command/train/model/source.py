"""The model to train: a local directory, one on the hub, or a bare ``config.json``; built without its weights."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outcore.checkpoint.weights.quantize import quantized
from outcore.command.train.model.attention import with_attention
from outcore.command.train.model.byte_tokenizer import byte_tokenizer
from outcore.command.train.model.place import CONFIG, Place, find_place, one_line, unreadable
from outcore.command.train.model.quantization import Quantization
from outcore.core.errors import ConfigError
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.model.partition import kept_in_fp32
from outcore.spec.model import Precision

_GENERATION_CONFIG = "generation_config.json"
_LAYERS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_COUNTS = re.compile("(^n_layer|layers|blocks|experts)$")  # vision_feature_layer is an index
_MOST = 10_000  # modules of a kind: more would take minutes and gigabytes to build, before anything is planned
_UNUSED_POSITIONS = 2  # a table of OPT has two rows that no position uses
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.json",
    "vocab.txt",
)
_FETCHED = (
    *("*.json", "*.txt", "*.jinja", "*.model", "additional_chat_templates/*"),
    *(_WEIGHTS, "model-*-of-*.safetensors"),
)
_QUANTISED_BASES = ("bitsandbytes", "torchao")
_DEQUANTISED = {"fp8": "FineGrainedFP8Config", "mxfp4": "Mxfp4Config"}
"""Formats whose weights Transformers can load in full precision, and the settings for it."""
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "consolidated*.safetensors")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from, and what it is."""

    name: str
    """As the user gave it."""
    config: PretrainedConfig
    weights: Path | None
    """Directory to stream the weights from. None: random initialisation."""
    folder: Path
    """Where its other files are, a tokenizer's for instance."""
    attention: str | None = None
    """Transformers' name of an implementation; None: what Transformers takes by itself."""
    quantization: Quantization | None = None
    """Quantisation of linear layers; None: weights stay in full precision."""
    stored_in: str = ""
    """The format of weights that Transformers can load in bf16 instead, which is planned for; empty: there is none."""

    def quantised(self, asked: Quantization | None, *, has_adapters: bool) -> ModelSource:
        """Return the same model with its linear layers quantised, if they are not already.

        Args:
            asked: How to quantise them; None: they stay as they are.
            has_adapters: Whether adapters are trained on the model.

        Raises:
            ConfigError: It is quantised already and asked to be again, or it is quantised and has nothing to train.
        """
        if self.quantization is None:
            return self if asked is None else dataclasses.replace(self, quantization=asked)
        where = f"--model '{self.name}'"
        if asked is not None:
            raise ConfigError(
                f"{where}: expected weights in full precision to quantise to {asked}, but they are quantised already, "
                f"to {self.quantization}; leave --load-in-4bit and --load-in-8bit out"
            )
        if not has_adapters:
            raise ConfigError(
                f"{where}: expected --lora RANK beside it, since its weights are quantised to {self.quantization} and "
                "stay as they are, but got none; add it, or name the model that it was made from"
            )
        return self


def find_model(name: str, *, attention: str | None = None) -> ModelSource:
    """Find a model and check what can be checked without building it.

    Args:
        name: A directory with ``config.json`` and weights, the ID of such a model on the hub, or a ``config.json``
            alone, for random initialisation.
        attention: See ``ModelSource``.

    Raises:
        ConfigError: There is no such model, or not one that can be trained.

    Memory: host, headers. From the hub, the model's files come into the hub's cache on disk.
    """
    return _found(name, _FETCHED, attention)


def find_shapes(name: str) -> ModelSource:
    """Find a model of any kind without its weights, for planning. From the hub, only the configuration is fetched."""
    return _found(name, (CONFIG,), None)


def _found(name: str, fetched: Sequence[str], attention: str | None) -> ModelSource:
    place = find_place(name, fetched)
    folder, is_to_train = place.config.parent, fetched is _FETCHED
    try:
        loaded = _load_config(name, place)
        if is_to_train:
            _check_causal(f"--model '{name}'", loaded)
        weights = None if place.is_bare or not is_to_train else _find_weights(name, folder)
    except OSError as error:
        raise unreadable(name, error, place.config) from error
    said = getattr(loaded, "quantization_config", None)
    method = str(said and said.get("quant_method"))
    if said is None or method in _QUANTISED_BASES:
        return ModelSource(name, loaded, weights, folder, attention, said and Quantization.stored_as(said))
    if is_to_train or method not in _DEQUANTISED:
        raise _stored_otherwise(name, method)
    del loaded.quantization_config
    return ModelSource(name, loaded, weights, folder, attention, stored_in=method)


def _stored_otherwise(name: str, method: str) -> ConfigError:
    advice = "name the model that it was made from"
    if method in _DEQUANTISED:
        way = f"quantization_config={_DEQUANTISED[method]}(dequantize=True)"
        advice += f", or load it with from_pretrained(..., {way}), save it with save_pretrained, and name that folder"
    return ConfigError(
        f"--model '{name}': expected weights in full precision, or quantised by {' or '.join(_QUANTISED_BASES)}, but "
        f"they are quantised by '{method}' (quantization_config in {CONFIG}); {advice}"
    )


def build_model(
    source: ModelSource, precision: Precision, make: Callable[..., PreTrainedModel] | None = None
) -> PreTrainedModel:
    """Build a model on the meta device, as ``from_pretrained`` would without its weights.

    Args:
        source: What ``find_model`` found.
        precision: ``fp32`` and ``fp16`` make parameters of that dtype, the others bf16 ones.
        make: Makes the model from its configuration; None: a causal language model.

    Raises:
        ConfigError: No model can be built from its configuration.

    Memory: none.
    """
    dtype = {"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)
    where = f"--model '{source.name}'"
    made = make or functools.partial(AutoModelForCausalLM.from_config, trust_remote_code=False)

    def build(attention: str | None = None) -> PreTrainedModel:
        config = copy.deepcopy(source.config)  # building changes it
        with torch.device("meta"):
            return made(config, dtype=dtype, attn_implementation=attention)

    try:
        model = build()
    except Exception as error:  # a constructor may raise anything for numbers that do not fit together
        raise ConfigError(
            f"{where}: expected a configuration that a {source.config.model_type} model can be built from, but "
            f"building it fails: {one_line(error)}; correct {CONFIG}"
        ) from error
    if source.attention is not None:
        model = with_attention(source.attention, build)
    for tensor in kept_in_fp32(model, str(dtype).removeprefix("torch.")):  # as ``from_pretrained`` does
        tensor.data = tensor.data.float()
    if source.quantization is not None:
        model = quantized(model, source.quantization.config(precision))
    if (source.folder / _GENERATION_CONFIG).exists():
        try:
            model.generation_config = GenerationConfig.from_pretrained(source.folder, local_files_only=True)
        except Exception as error:  # as above
            raise ConfigError(
                f"{where}: expected generation settings in {_GENERATION_CONFIG}, but got: {one_line(error)}; correct "
                "or remove it"
            ) from error
    return model


def refuse_long(model: PreTrainedModel, seq_len: int | None) -> None:
    """Raise if rows may be longer than the model's table of positions. Models with rotary positions have none.

    Args:
        model: Without adapters.
        seq_len: Tokens of the longest row; None: unknown.

    Raises:
        ConfigError: Rows may be longer.
    """
    config = model.config.get_text_config()
    most = getattr(config, "max_position_embeddings", None)
    if seq_len is None or not isinstance(most, int) or seq_len <= most:
        return
    vocabulary = getattr(config, "vocab_size", None)
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)]
    if any(most <= size <= most + _UNUSED_POSITIONS and size != vocabulary for size in tables):
        raise ConfigError(
            f"--seq-len: expected at most {most}, since '{config.model_type}' has a table of {most} positions, but got "
            f"{seq_len}; set --seq-len {most}"
        )


def load_tokenizer(
    source: ModelSource, *, eos_token: str | None = None, chat_template: Path | None = None
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer; without one, a token is a byte.

    Args:
        source: What ``find_model`` found.
        eos_token: Token that ends a document or turn, instead of the tokenizer's own.
        chat_template: File to take instead of the tokenizer's own template.

    Raises:
        ConfigError: It cannot be loaded, has no end-of-text token, or has more tokens than the model; the template
            cannot be read.
    """
    where = f"--model '{source.name}'"
    if any((source.folder / name).exists() for name in _TOKENIZER_FILES):
        try:
            tokenizer = AutoTokenizer.from_pretrained(source.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # parsers of many formats
            raise ConfigError(
                f"{where}: expected a tokenizer in '{source.folder}', but loading it fails: {one_line(error)}; fetch "
                "its files again, or remove them to train on bytes"
            ) from error
    else:
        tokenizer = byte_tokenizer()
        if source.weights is not None:
            warnings.warn(f"{where}: it has weights but no tokenizer, so every byte is a token to it", stacklevel=2)
    vocabulary = tokenizer.get_vocab()
    end = eos_token if eos_token is not None else tokenizer.eos_token
    if end is None or end not in vocabulary:
        found = "none" if end is None else f"'{end}', which is not in its vocabulary"
        raise ConfigError(
            f"{where}: expected a tokenizer with an end-of-text token, but found {found}; name one of its tokens with "
            "--set eos_token=TOKEN"
        )
    needed, given = max(vocabulary.values()) + 1, source.config.get_text_config().vocab_size
    if needed > given:
        raise ConfigError(
            f"{where}: expected a vocab_size of at least {needed}, which its tokenizer needs, but {CONFIG} has "
            f"{given}; {'raise it' if source.weights is None else 'use the tokenizer that the model was trained with'}"
        )
    tokenizer.eos_token = end
    if chat_template is not None:
        tokenizer.chat_template = _read_template(chat_template)
    return tokenizer


def _read_template(file: Path) -> str:
    """Read a file, nothing else: another model's template would bring tokens for which the embeddings have no room."""
    if not (file.is_file() and file.suffix in (".jinja", ".j2")):
        raise ConfigError(
            f"chat_template_path: expected a file that ends in .jinja or .j2, but got '{file}'; save the template as "
            "one"
        )
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template_path: expected text in '{file}', but got: {one_line(error)}") from error


def _load_config(name: str, place: Place) -> PretrainedConfig:
    where, file, raw = f"--model '{name}'", place.config, place.raw
    _check_config(where, raw)
    if "auto_map" in raw:
        warnings.warn(
            f"{where}: {CONFIG} names code of its own (auto_map), which is never run; the model is transformers' own "
            f"{raw['model_type']}",
            stacklevel=2,
        )
    try:
        config = AutoConfig.from_pretrained(file, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a configuration's class may raise anything for values that it does not expect
        raise ConfigError(
            f"{where}: expected {file.name} to describe a {raw['model_type']} model, but got: {one_line(error)}; "
            "correct it"
        ) from error
    config.name_or_path = place.source  # an adapter is saved with it, to know its base
    return config


def _check_config(where: str, raw: dict[str, Any]) -> None:
    kind = raw.get("model_type")
    if not isinstance(kind, str):
        found = "there is none" if "model_type" not in raw else f"got {kind!r}"
        raise ConfigError(f"{where}: expected a model_type in its configuration, such as llama, but {found}")
    if kind not in CONFIG_MAPPING and "auto_map" in raw:
        raise ConfigError(
            f"{where}: expected a model_type that transformers {transformers.__version__} knows, but got '{kind}', and "
            "its own code (auto_map) is not run; name another model"
        )
    for key, number in _counts(raw):
        if not int(key in _LAYERS) <= number <= _MOST:
            raise ConfigError(
                f"{where}: expected a model that can be built, of 1 to {_MOST:,} layers and at most as many experts, "
                f"but {CONFIG} has {key} {number:,}; correct it"
            )


def _counts(raw: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield how many modules of each kind a configuration asks for, with the configurations nested in it."""
    for key, value in raw.items():
        if isinstance(value, dict):
            yield from _counts(value)
        elif type(value) is int and _COUNTS.search(key):
            yield key, value


def _check_causal(where: str, config: PretrainedConfig) -> None:
    causal = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    saved_as = [name for name in config.architectures or [] if hasattr(transformers, name)]
    expected = f"{where}: expected a causal language model, but"
    if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(f"{expected} {config.model_type} is not one; name another model")
    if saved_as and not causal.intersection(saved_as):
        raise ConfigError(f"{expected} it is a {saved_as[0]} (architectures in {CONFIG}); name another model")


def _find_weights(name: str, folder: Path) -> Path:
    where = f"--model '{name}'"
    if not any((folder / file).exists() for file in (_WEIGHTS, _INDEX)):
        other = next((file.name for pattern in _OTHER_WEIGHTS for file in sorted(folder.glob(pattern))), None)
        if other is not None:
            raise ConfigError(
                f"{where}: expected weights as {_WEIGHTS} or its shards, but found '{other}'; convert them: load "
                "the model with from_pretrained and save it with save_pretrained"
            )
        raise ConfigError(
            f"{where}: expected weights ({_WEIGHTS}, or shards and {_INDEX}), but there are none in '{folder}'; "
            f"for random initialisation, name the {CONFIG} itself"
        )
    try:
        WeightsDirectory.open(folder)
    except ConfigError as error:
        raise ConfigError(f"--model {error}") from error
    return folder
