"""Export of adapters merged into their base model, as ``from_pretrained`` reads it. See [Note: merging]."""

from __future__ import annotations

import copy
import json
import re
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from outcore.checkpoint.find_checkpoints import NOT_OF_A_MODEL, RECORD, found_in
from outcore.checkpoint.weights.conversions import places, saving_groups
from outcore.checkpoint.weights.export import ADAPTER_FILE, GENERATION, adapter_tensors, saved_state, without_bytes
from outcore.checkpoint.weights.merge import BaseWeights, Merged
from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.engine.values.access import sample_of
from outcore.memory.files.checkpoint_folder import small_file
from outcore.memory.files.staged_files import copy_files, is_any
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors
from outcore.model.quantized import full_checksum
from outcore.spec.manifest import Manifest

_TOKENIZER = "tokenizer_config.json"
_OF_ADAPTERS = ("adapter_*", "README.md", "config.json")
_OF_TOKENIZERS = ("tokenizer*", "*_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.jinja", "*.model")
_SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FETCHED = ("*.json", "*.txt", "*.jinja", "*.model", "*.safetensors")


GO_ON = "go on from the checkpoint (prepare(checkpoint=...)), and call outcore.save_pretrained(model, DIR) there"
"""What to do about a model that cannot be built from its configuration, or that its library does not save whole."""


def export_merged(adapters: Path, directory: Path, *, manifest: Manifest | None = None) -> str:
    """Write the base model of some adapters with the adapters merged in.

    Args:
        adapters: Folder of the adapters as peft writes them. What else it holds, such as a tokenizer, is copied.
        directory: Folder to write to.
        manifest: Of the checkpoint, if it says what the adapters were trained on. Base weights are compared with it.

    Returns:
        What was written, for people.

    Raises:
        ConfigError: The base model is not there, or is not the one of the adapters; or peft cannot merge them.
        DiskError: The directory cannot be written.

    Memory: host, all adapters, and a layer of the model, or the layers whose tensors are saved together.
    """
    refuse_missing("transformers", "peft")
    import transformers
    from peft import PeftConfig, get_peft_model

    adapter: Any = PeftConfig.from_pretrained(str(adapters))
    folder = _base_folder(adapter.base_model_name_or_path, adapters)
    config: Any = transformers.AutoConfig.from_pretrained(folder)
    config.name_or_path = adapter.base_model_name_or_path  # peft compares
    plain = _plain(config)
    try:
        with torch.device("meta"):
            model = get_peft_model(copy.deepcopy(plain), adapter)
    except (ValueError, RuntimeError, NotImplementedError) as error:
        raise ConfigError(
            f"--merge: expected adapters of a {type(plain).__name__} in '{adapters}', but peft says: {error}; name the "
            "folder of the run that trained them"
        ) from error
    quantization = getattr(config, "quantization_config", None)
    base, compared = BaseWeights(plain, folder, quantization), _Compared(folder, manifest)
    merged = Merged(model, base, _reader(model, adapters), compared.check)
    if merged.unties(plain):
        warnings.warn("--merge: the adapters differ between tied weights, which are saved untied", stacklevel=5)
        config.tie_word_embeddings = False
        plain = _plain(config)
    state = saved_state(plain)
    groups = saving_groups(plain, state)
    made = [pair for group in groups for pair in group.convert(lambda name: without_bytes(state[name])).items()]
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made]
    write_safetensors(directory, specs, (pair for group in groups for pair in group.convert(merged.read).items()))
    compared.warn()
    plain.config.save_pretrained(directory)
    copy_files(adapters, directory, lambda name: not is_any(name, (*NOT_OF_A_MODEL, *_OF_ADAPTERS)))
    missing = [] if (directory / _TOKENIZER).is_file() else [*_OF_TOKENIZERS]
    missing += [] if (directory / GENERATION).is_file() else [GENERATION]
    copy_files(folder, directory, lambda name: is_any(name, missing))
    was = _trained_on(adapters) if quantization is None else ", whose quantised weights were dequantised"
    return f"merged into '{folder}' in {_SHORT.get(plain.dtype, plain.dtype)}{was}"


def _plain(config: Any) -> Any:
    """Build the base model on the meta device, in the dtypes of ``from_pretrained``, with nothing quantised."""
    kind = class_of(config)
    config = copy.deepcopy(config)
    config.dtype = config.dtype if isinstance(config.dtype, torch.dtype) else torch.bfloat16
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        model = kind(config).to(config.dtype)
    model.config.architectures = [kind.__name__]
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    for place in places(model):
        if any(re.search(pattern.replace("*", ".*"), place.name) for pattern in patterns):
            place.tensor.data = place.tensor.data.float()
    return model


def class_of(config: Any) -> Any:
    """Return the model's class. Raises: ConfigError: It is not of Transformers."""
    import transformers

    name = config.architectures[0]
    if not hasattr(transformers, name):
        raise ConfigError(f"export: expected a class of transformers, but the model is a '{name}'; {GO_ON}")
    return getattr(transformers, name)


def _base_folder(name: str | None, adapters: Path) -> Path:
    """Find the files of the base model. Those of a model on the hub come into its cache."""
    where = f"--merge: expected the base model of '{adapters}'"
    if not name:
        raise ConfigError(f"{where}, but its adapter_config.json names none; write base_model_name_or_path into it")
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_FETCHED)))
    except Exception as error:  # names, networks and caches fail in many ways
        raise ConfigError(
            f"{where}, which is '{name}', but it is neither a folder here nor on the hub or in its cache; put it back, "
            "or correct base_model_name_or_path in adapter_config.json"
        ) from error


def _reader(model: nn.Module, adapters: Path) -> Callable[[str], torch.Tensor | None]:
    """Return a function that reads a tensor of the adapters by its name in peft's model; None: there is none."""
    found = adapter_tensors(model)
    if found is None:
        raise ConfigError(
            f"--merge: expected adapters whose tensors peft saves as they are, but those in '{adapters}' are made anew "
            "when they are saved; load base and adapters with peft, and call merge_and_unload there"
        )
    stored = WeightsDirectory.open(adapters, Path(ADAPTER_FILE).stem)
    names = {id(place.tensor): name for name, place in found[Path()].items() if name in stored.names()}
    files = {place.name: names[id(place.tensor)] for place in places(model) if id(place.tensor) in names}
    return lambda name: stored.read(files[name]) if name in files else None


@final
class _Compared:
    """Compares the base model with the one that adapters were trained on, as far as a checkpoint knows it."""

    def __init__(self, folder: Path, manifest: Manifest | None) -> None:
        self._folder = folder
        self._frozen = {} if manifest is None else manifest.frozen
        self._full = {} if manifest is None else manifest.full
        self._with_parts = {name.rpartition(".")[0] for name in self._frozen}
        self._unknown = list[str]()

    def check(self, name: str, value: torch.Tensor) -> None:
        is_quantized = name in self._with_parts
        want = (self._full if is_quantized else self._frozen).get(name)
        if want is None:
            self._unknown += [name] * is_quantized
        elif want != (full_checksum(value) if is_quantized else zlib.crc32(sample_of(value))):
            raise ConfigError(
                f"--merge: expected the base model that the adapters were trained on, but of '{self._folder}' the "
                f"weight '{name}' has other values; put back the files of the base model that the run had"
            )

    def warn(self) -> None:
        if self._unknown:
            warnings.warn(
                f"--merge: {len(self._unknown)} weights such as '{self._unknown[0]}' were quantised before outcore had "
                f"them, so nothing says whether those of '{self._folder}' are the ones that the adapters were trained "
                "on",
                stacklevel=5,
            )


def _trained_on(adapters: Path) -> str:
    """What a run's record says of its base model, if it was quantised while it was read."""
    records = [path / RECORD for path in (adapters, *(path for _, path in found_in(adapters.parent)))]
    record = next((path for path in records if path.is_file()), None)
    base = None if record is None else json.loads(small_file(record)).get("settings", {}).get("base")
    return "" if base is None else f", its weights in full precision; they were trained on it in {base}"
