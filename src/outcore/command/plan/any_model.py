"""A model of any kind that Transformers knows, built for planning from its configuration alone."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, cast

import transformers
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from outcore.command.plan.model_inputs import given_inputs, model_inputs
from outcore.command.plan.question import Question
from outcore.command.train.model.source import ModelSource, build_model, refuse_long
from outcore.core.errors import ConfigError
from outcore.spec.model import Precision

_ENCODER_DECODERS = ("AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")
_KINDS = (
    *("AutoModelForMaskedLM", "AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForCTC"),
    *("AutoModelForImageClassification", "AutoModelForVideoClassification", "AutoModelForAudioClassification"),
    *("AutoModelForSemanticSegmentation", "AutoModelForObjectDetection", "AutoModel"),
)
"""Kinds of models, in the order in which they are tried for a configuration that names no class."""
_SKIPS = ("layerdrop", "encoder_layerdrop", "decoder_layerdrop")  # chances that a step leaves out a layer


def build_any(source: ModelSource, precision: Precision) -> PreTrainedModel:
    """Build a model on the meta device, of the class that its configuration names, else of a kind that fits.

    Args:
        source: From ``find_shapes``.
        precision: See ``build_model``.

    Raises:
        ConfigError: No model can be built from its configuration.
    """
    return build_model(source, precision, _maker(source.name, source.config))


def is_causal(model: PreTrainedModel) -> bool:
    """Whether ``outcore train`` would train it."""
    return not model.config.is_encoder_decoder and type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def inputs_for(model: PreTrainedModel, question: Question) -> tuple[Question, dict[str, Any], list[str]]:
    """Return a micro-batch for a model.

    Args:
        model: Without adapters.
        question: Says its size, and may give inputs.

    Returns:
        The question with the size that given inputs have, keyword arguments of forward, and the names of those inputs
        that a text may come without.

    Raises:
        ConfigError: See ``model_inputs``; or the inputs do not go together, or are longer than a table of positions.
    """
    given = given_inputs(question.inputs or ())
    tokens, counted = given.get("input_ids"), given.get(model.main_input_name)
    rows = question.batch_size if counted is None or not counted.dim() else len(counted)
    if rows != question.batch_size > 1:
        raise ConfigError(
            f"--input {model.main_input_name}: expected {question.batch_size} samples, as --batch-size says, but got "
            f"{rows}; set --batch-size {rows}"
        )
    length = question.seq_len if tokens is None or tokens.dim() != 2 else tokens.shape[1]
    inputs = model_inputs(model, rows, length or 1, given)
    has_tokens = "input_ids" in inputs
    refuse_long(model, length if has_tokens else None)
    images = [name for name in ("pixel_values",) if has_tokens and name in inputs and name not in given]
    return dataclasses.replace(question, batch_size=rows, seq_len=length if has_tokens else None), inputs, images


def notes_on(source: ModelSource) -> Iterator[str]:
    """Say what of a run differs from what is planned."""
    if source.stored_in:
        yield (
            f"weights are stored in {source.stored_in}, which cannot be trained: planned for full precision, so load "
            "them with dequantize=True in their quantization_config"
        )
    if any(getattr(source.config, name, 0) for name in _SKIPS):
        yield "every layer runs in each step: layerdrop counts as 0"


def _maker(name: str, config: PretrainedConfig) -> Callable[..., PreTrainedModel]:
    for skip in _SKIPS:
        if hasattr(config, skip):
            setattr(config, skip, 0.0)
    for architecture in config.architectures or ():
        kind = getattr(transformers, architecture, None)
        if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
            return cast("type[PreTrainedModel]", kind)._from_config  # noqa: SLF001 (as the Auto classes do)
    for auto in (*(_ENCODER_DECODERS if config.is_encoder_decoder else ()), *_KINDS):
        kind = getattr(transformers, auto)
        if type(config) in kind._model_mapping:  # noqa: SLF001
            return functools.partial(kind.from_config, trust_remote_code=False)
    raise ConfigError(
        f"--model '{name}': expected a configuration of a model, but Transformers has none for {config.model_type} "
        "alone; name the class under architectures in config.json"
    )
