"""A prepared model's weights on their way out: streamed by name, or saved as a Hugging Face directory.

[Note: what is saved] Keys, shapes and dtypes are those that ``model.save_pretrained`` writes for the plain model. Names
are settled on meta tensors; the weights are then read from their homes as they are written. The small files
(configuration, model card, adapters) are written by the library itself, into a folder of their own first.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.weights.conversions import (
    Group,
    StatePlace,
    is_adapter_model,
    is_pretrained_model,
    places,
    saving_groups,
    tied_targets,
)
from outcore.checkpoint.weights.small_files import Writers, rehearse_small_files, write_small_files
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.engine import Engine
from outcore.engine.unit.unit import Beneath
from outcore.engine.values.parameter_values import take_edits
from outcore.memory.files.weights_file import write_safetensors
from outcore.model.wrapped import Wrapping, is_wrapped, tensors_in
from outcore.ranks.agreement import agreed, read_by_all

ADAPTER_FILE, GENERATION = "adapter_model.safetensors", "generation_config.json"
_NO_OTHERS: Writers = {}
_NO_VALUES: Mapping[str, torch.Tensor] = {}


def read_tensor(engine: Engine, tensor: torch.Tensor) -> torch.Tensor:
    """The current value of a parameter or buffer as a fresh tensor in host memory; waits for its update."""
    if is_wrapped(tensor):
        made: torch.Tensor = Wrapping(tensor).around([read_tensor(engine, inner) for inner in tensors_in(tensor)])
        return made
    found = engine.places.get(id(tensor))
    if found is not None:
        take_edits(found[0], engine.access)
    if found is None or found[0].presence.now is Beneath.GATHERED:
        return tensor.detach().to("cpu", copy=True)
    return engine.access.current_weight(*found)


def stream_tensors(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """All parameters, then all persistent buffers, each once under its first name, one at a time."""
    engine.refuse_if_closed()
    everything = [p for p in places(engine.model) if p.is_persistent]
    seen: set[int] = set()
    for place in sorted(everything, key=lambda p: p.is_buffer):  # sorting is stable
        if id(place.tensor) not in seen:
            seen.add(id(place.tensor))
            yield place.name, read_tensor(engine, place.tensor)


def save_model(engine: Engine, directory: str | Path, others: Writers = _NO_OTHERS) -> None:
    """Save weights and configuration; for a model with adapters, the adapters only. With several ranks, rank 0 writes.

    Weights come first. They stay if small files cannot be written.

    Args:
        engine: The engine of the model.
        directory: Created if missing; files of an older save are replaced.
        others: What writes other small files, such as a tokenizer's.

    Raises:
        ConfigError: The directory is a file.
        UnsupportedError: A module has its own way of saving, or a weight has a format that files cannot hold.
        DiskError: The directory cannot be written.
        SmallFilesError: The weights are there, but not all of the small files beside them.

    Memory: host, one tensor at a time, or the group of tensors that become one in the checkpoint. All adapters, if peft
    converts some.
    """
    engine.refuse_if_closed()
    world = engine.access.world
    is_first = world is None or world.rank == 0
    if is_first or engine.has_cut_weights:
        with agreed(world if engine.has_cut_weights else None, "save_pretrained"):
            if os.path.isfile(directory):
                raise ConfigError(f"save_pretrained: expected a directory, but '{directory}' is a file")
            _save(engine, Path(directory), others, writes=is_first)


def _save(engine: Engine, directory: Path, others: Writers, *, writes: bool) -> None:
    """Save the model. Args: writes: False: this rank only contributes its part of the weights."""
    model = engine.model
    adapters = adapter_tensors(model)
    if not saves_adapters(model):
        state = saved_state(model)
        groups = saving_groups(model, state)
        specs = []
        for group in groups:
            made = group.convert(lambda name: without_bytes(state[name]))
            specs += [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in made.items()]
        tensors = _converted(engine, groups, state)
        with read_by_all(tensors if engine.has_cut_weights else ()):
            if writes:
                write_safetensors(directory, specs, tensors)
    for inside, found in (adapters or {}).items():
        specs = [(name, place.tensor.dtype, tuple(place.tensor.shape)) for name, place in found.items()]
        tensors = ((name, read_tensor(engine, place.tensor)) for name, place in found.items())
        with read_by_all(tensors if engine.has_cut_weights else ()):
            if writes:  # peft reads one file
                stem = Path(ADAPTER_FILE).stem
                write_safetensors(directory / inside, specs, tensors, stem=stem, max_shard_bytes=2**62)
    values = adapter_values(engine) if adapters is None else {}
    if writes:
        library = _library_writers(model, partial(save_beside_weights, model, adapters=adapters, values=values))
        edited = ["README.md"] if saves_adapters(model) else []  # the model card
        write_small_files(directory, {**library, **others}, edited=edited)


def rehearse_save(model: nn.Module, others: Writers = _NO_OTHERS) -> None:
    """Do before training all of ``save_model`` that needs no weights, in a scratch folder. Nothing of it stays.

    Args:
        model: Prepared or not.
        others: As for ``save_model``.

    Raises:
        ConfigError: A small file can be read and not be written, or tied weights are none that the library knows.
        UnsupportedError: As for ``save_model``.
    """
    adapters = adapter_tensors(model)
    if not saves_adapters(model):
        saving_groups(model, saved_state(model))
        write = partial(save_beside_weights, model)
    elif adapters is not None:
        write = partial(save_beside_weights, model, adapters=adapters)
    else:  # peft would need the values
        write = partial(_save_configurations, model)
    base = model.get_base_model() if is_adapter_model(model) else model  # type: ignore[operator]
    rehearse_small_files({**_library_writers(model, write), **others}, str(getattr(base, "name_or_path", "")))


def saves_adapters(model: nn.Module) -> bool:
    """Whether only the adapters of a model are saved."""
    return is_adapter_model(model) or bool(getattr(model, "_hf_peft_config_loaded", False))


def save_beside_weights(
    model: nn.Module,
    folder: Path,
    adapters: Mapping[Path, Mapping[str, StatePlace]] | None = None,
    values: Mapping[str, torch.Tensor] = _NO_VALUES,
) -> None:
    """Write what the library saves beside the weights, or all of the adapters, into a new folder. Nothing is synced.

    Args:
        model: The model.
        folder: A new folder.
        adapters: What ``adapter_tensors`` returned. If given, adapters are left out, and the caller saves them.
        values: Values of all adapters by name, if these are what is saved and the library is to save them.
    """
    if adapters is not None:
        names = {place.name for tensors in adapters.values() for place in tensors.values()}
        try:
            _library_save(model, folder, dict.fromkeys(names, torch.empty(0)))
        finally:  # else what stands in for weights would take the place of those that are there
            for inside in adapters:
                (folder / inside / ADAPTER_FILE).unlink(missing_ok=True)
    elif saves_adapters(model):
        _library_save(model, folder, values)
    elif is_pretrained_model(model):
        try:
            _library_save(model, folder, {})
        finally:
            for path in folder.glob("model*.safetensors*"):
                path.unlink()


def _library_writers(model: nn.Module, write: Callable[[Path], None]) -> Writers:
    """Name the files that the library writes. Args: write: Has the library write them."""
    is_adapter = saves_adapters(model)
    files = ("README.md", "adapter_config.json") if is_adapter else ("config.json", GENERATION)
    return {files: write}


def _save_configurations(model: nn.Module, folder: Path) -> None:
    for config in _configs(model).values():
        config.save_pretrained(folder)


def adapter_values(engine: Engine) -> dict[str, torch.Tensor]:
    """Values of a model's adapters by name, if only the adapters are saved; empty otherwise."""
    model = engine.model
    names = adapter_names(model) if saves_adapters(model) else set()
    return {p.name: read_tensor(engine, p.tensor) for p in places(model) if p.name in names}


def _converted(
    engine: Engine, groups: list[Group], state: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    for group in groups:
        yield from group.convert(lambda name: read_tensor(engine, state[name])).items()


def saved_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers to save, by name. Tied ones appear once, as the library's loader expects them."""
    everything = [p for p in places(model) if p.is_persistent]
    for place in everything:
        _refuse_own_format(place)
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ()) if is_pretrained_model(model) else set()
    targets = tied_targets(model)
    kept: dict[int, str] = {}
    for place in sorted(everything, key=lambda p: p.name in targets):
        first = kept.setdefault(id(place.tensor), place.name)
        if is_pretrained_model(model) and first != place.name and place.name not in targets:
            raise ConfigError(
                f"save_pretrained: expected tied weights as {type(model).__name__} declares them, but '{first}' and "
                f"'{place.name}' are one parameter and a reloaded model would not know; save model.state_dict() instead"
            )
    return {p.name: p.tensor for p in everything if kept[id(p.tensor)] == p.name and p.name not in ignored}


def _refuse_own_format(place: StatePlace) -> None:
    if is_wrapped(place.tensor):
        raise UnsupportedError(
            f"save_pretrained: expected weights that a file can hold, or adapters beside them, but '{place.name}' is a "
            f"{type(place.tensor).__qualname__}; save model.state_dict() with torch.save instead"
        )
    kind = type(place.module)
    plain = nn.Module
    own = [
        name
        for name in ("_save_to_state_dict", "get_extra_state", "state_dict")
        if getattr(kind, name) is not getattr(plain, name)
    ]
    if own:
        raise UnsupportedError(
            f"save_pretrained: expected modules that save their tensors as torch does, but {kind.__name__} of "
            f"'{place.name}' has a {own[0]} of its own; save model.state_dict() with torch.save instead"
        )


def adapter_names(model: nn.Module) -> set[str]:
    """Names of the tensors that peft needs for saving: those it picks from a state dict, and all trained ones."""
    names = {p.name for p in places(model) if p.tensor.requires_grad}
    for picked in _picked(model).values():
        names |= {place.name for place in picked.values() if place is not None}
    return names


def adapter_tensors(model: nn.Module) -> dict[Path, dict[str, StatePlace]] | None:
    """Tensors that peft saves unchanged: folder -> name in the file -> place in the model.

    Returns:
        The mapping. None if peft converts tensors of an adapter, or another library saves them.
    """
    if not is_adapter_model(model):
        return None
    picked = _picked(model)
    whole = {
        Path() if adapter == "default" else Path(adapter): {n: p for n, p in tensors.items() if p is not None}
        for adapter, tensors in picked.items()
    }
    is_whole = list(map(len, whole.values())) == list(map(len, picked.values()))
    return whole if is_whole and len(picked) == len(_configs(model)) else None


def _picked(model: nn.Module) -> dict[str, dict[str, StatePlace | None]]:
    """What peft picks from a state dict: adapter -> name -> place. None for a tensor that peft made itself."""
    from peft import get_peft_model_state_dict

    everything = [p for p in places(model) if p.is_persistent]
    state = {p.name: without_bytes(p.tensor) for p in everything}
    place_of = {id(state[p.name]): p for p in everything}
    found = {}
    for adapter, config in _configs(model).items():
        if getattr(config.peft_type, "value", config.peft_type) == "ADALORA":
            continue  # peft looks at values here; all that it saves is trained
        picked = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
        found[adapter] = {name: place_of.get(id(tensor)) for name, tensor in picked.items()}
    return found


def _configs(model: nn.Module) -> Mapping[str, Any]:
    return model.peft_config  # type: ignore[return-value]


def without_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A meta tensor of the same shape and dtype."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _library_save(model: nn.Module, directory: Path, state: Mapping[str, torch.Tensor]) -> None:
    from transformers.utils import logging

    shows_progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # it would count shards that are not written
    try:
        model.save_pretrained(directory, state_dict=dict(state))  # type: ignore[operator]  # both libraries have it
    finally:
        if shows_progress:
            logging.enable_progress_bar()
