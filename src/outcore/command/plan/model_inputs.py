"""A micro-batch for any model of Transformers: made from the arguments of its forward and from its configuration.

Values are zeros and ones, since only shapes and dtypes count.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from outcore.core.errors import ConfigError

GivenInputs = Mapping[str, torch.Tensor | None]
"""Name of an argument of forward -> what to pass. None: leave the argument out."""

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.long, torch.int32, torch.bool)} | {
    str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)
}
_FORM = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?:(?P<shape>\d+(?:x\d+)*):(?P<dtype>\w+)|none)")
_MOST_NUMBERS = 2**31
_IMAGE, _CHANNELS = 224, 3  # what most models of images take
_SOUND, _FRAMES = 160_000, 1_000  # ten seconds of sound at 16 kHz, and of spectra every 10 ms
_TEXT_LABELS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "ForTokenClassification")
_CLASS_LABELS = (
    *("ForSequenceClassification", "ForImageClassification", "ForVideoClassification"),
    "ForAudioClassification",
)
"""Ends of the names of models whose labels are tokens, or one class for a sample."""


def given_inputs(texts: Sequence[str]) -> dict[str, torch.Tensor | None]:
    """Return what the option ``--input`` gives. Args: texts: Such as ``pixel_values=2x3x224x224:float32``.

    Raises:
        ConfigError: A text has another form, or names an argument twice.
    """
    found: dict[str, torch.Tensor | None] = {}
    for text in texts:
        parts = _FORM.fullmatch(text)
        sizes = [int(size) for size in (parts["shape"] or "1").split("x")] if parts else []
        dtype = parts and (_DTYPES.get(parts["dtype"]) if parts["dtype"] else torch.bool)
        if parts is None or dtype is None or not 0 < math.prod(sizes) < _MOST_NUMBERS:
            raise ConfigError(
                "--input: expected NAME=SHAPE:DTYPE, such as pixel_values=2x3x224x224:float32, with a dtype of "
                f"{', '.join(_DTYPES)}, or NAME=none to leave an input out, but got '{text}'"
            )
        if parts["name"] in found:
            raise ConfigError(f"--input: expected '{parts['name']}' once, but got it again in '{text}'; leave one out")
        found[parts["name"]] = torch.ones((), dtype=dtype, device="cpu").expand(sizes) if parts["shape"] else None
    return found


def model_inputs(model: nn.Module, rows: int, length: int, given: GivenInputs) -> dict[str, Any]:
    """Return keyword arguments for the forward of a model of Transformers, with labels where these give a loss.

    Args:
        model: The model; it may be on the meta device.
        rows: Samples of the micro-batch.
        length: Tokens of each, where it takes tokens.
        given: Inputs that replace those that would be made, or come on top of them.

    Raises:
        ConfigError: No inputs can be made, or the model takes no input of a given name. The error says which to give.
    """
    takes = inspect.signature(model.forward).parameters
    unknown = next((name for name in given if name not in takes), None)
    if unknown is not None:
        raise ConfigError(
            f"--input: expected an argument of {type(model).__name__}.forward, but got '{unknown}'; it takes "
            f"{', '.join(_named(takes))}"
        )
    made = {name: value for name, value in _made(model, rows, length) if name in takes and name not in given}
    found = {**made, **{name: value for name, value in given.items() if value is not None}}
    required = [name for name in _named(takes) if takes[name].default is inspect.Parameter.empty]
    main = str(getattr(model, "main_input_name", ""))
    missing = next((name for name in (*required, main) if name in takes and name not in {**found, **given}), None)
    if missing is not None:
        raise ConfigError(
            f"--model: expected inputs that can be made from a configuration, but {type(model).__name__} takes "
            f"'{missing}', whose shape that does not say; give --input {missing}=SHAPE:DTYPE, such as "
            f"{missing}={rows}x64x7:float32"
        )
    return found


def rows_of(sample: Mapping[str, Any], main: str) -> int:
    """Return the number of samples in a micro-batch: rows of tokens, or of the input that counts, else of the first.

    Args:
        sample: Keyword arguments of a forward.
        main: Name of the input that counts.
    """
    tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor) and value.dim()}
    first = next(iter(tensors.values()), torch.ones(1, device="cpu"))
    return len(tensors.get("input_ids", tensors.get(main, first)))


def with_rows(sample: Mapping[str, Any], rows: int, wanted: int) -> dict[str, Any]:
    """Return a micro-batch with another number of samples. Args: rows: What it has. wanted: What it gets."""
    if rows == wanted:
        return dict(sample)

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim() or len(value) % rows:
            return value
        return value[torch.arange(len(value) // rows * wanted, device=value.device) % len(value)]

    return {name: cut(value) for name, value in sample.items()}


def said_inputs(sample: Mapping[str, Any]) -> str:
    """Name the inputs, as ``--input`` takes them."""
    tensors = {name: value for name, value in sample.items() if isinstance(value, torch.Tensor)}
    return ", ".join(
        f"{name}={'x'.join(map(str, tensor.shape))}:{str(tensor.dtype).removeprefix('torch.')}"
        for name, tensor in tensors.items()
    )


def _named(takes: Mapping[str, inspect.Parameter]) -> list[str]:
    return [name for name, each in takes.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)]


def _made(model: Any, rows: int, length: int) -> Iterator[tuple[str, Any]]:
    """Yield every input that can be made, with its name. It is for the caller to take those that a forward has."""
    config, takes = model.config, inspect.signature(model.forward).parameters
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    ids, image = (
        torch.zeros(rows, length, dtype=torch.long, device="cpu"),
        _image(config, rows, has_several="pixel_attention_mask" in takes),
    )
    yield "input_ids", ids
    if "input_ids" in takes:
        yield "attention_mask", torch.ones_like(ids)
    if config.model_type.startswith("gemma3"):  # which it needs to train: where the tokens of images are
        yield "token_type_ids", ids
    yield "pixel_values", torch.zeros(image, dtype=dtype, device="cpu")
    yield from ((name, torch.zeros(rows, *sizes, dtype=dtype, device="cpu")) for name, sizes in _sounds(config))
    if isinstance(patch := getattr(config, "patch_size", None), int):
        yield (
            "bool_masked_pos",
            torch.zeros(rows, math.prod(size // patch for size in image[-2:]), dtype=torch.bool, device="cpu"),
        )
    yield from {"return_loss": True, "use_cache": False}.items()
    targets = ids[:, : getattr(config, "max_target_positions", None)] if config.is_encoder_decoder else ids
    if config.is_encoder_decoder:
        yield "decoder_input_ids", targets
    labels = {
        **dict.fromkeys(_TEXT_LABELS, targets),
        **dict.fromkeys(_CLASS_LABELS, ids[:, 0]),
        "ForSemanticSegmentation": torch.zeros(rows, *image[-2:], dtype=torch.long, device="cpu"),
    }
    yield from (("labels", tensor) for kind, tensor in labels.items() if type(model).__name__.endswith(kind))


def _image(config: Any, rows: int, *, has_several: bool) -> tuple[int, ...]:
    """Return the shape of images, one for each sample, or of videos. Args: has_several: A sample has a list of them."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None) or _IMAGE
    height, width = size if isinstance(size, list | tuple) else (size, size)
    frames = getattr(vision, "num_frames", None)
    channels = getattr(vision, "num_channels", None) or _CHANNELS
    return (rows, *([frames or 1] if frames or has_several else []), channels, height, width)


def _sounds(config: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names of inputs of sound, with the shape for one sample: a spectrogram, or the sound itself."""
    audio = getattr(config, "audio_config", None) or config
    bands, positions = getattr(audio, "num_mel_bins", None), getattr(audio, "max_source_positions", None)
    if bands and positions:
        yield "input_features", (bands, 2 * positions)  # as Whisper has them, whose second layer takes every other one
    elif getattr(config, "input_feat_per_channel", None):
        yield "input_features", (_FRAMES, config.input_feat_per_channel * config.input_channels)
    if bands and getattr(audio, "max_length", None):
        yield "input_values", (audio.max_length, bands)
    else:
        yield "input_values", (_SOUND,)
