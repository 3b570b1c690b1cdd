"""The training state of a prepared model, to and from a directory: optimizer states by name, and weights alone.

[Note: training state] ``optimizer.safetensors`` (or its shards) holds every state of every trained parameter as
``<parameter>.<state>``. Master weights are among them where weights have another dtype. The metadata in its header
(``training_state``) has the steps of each parameter and the settings of each param group. The file does not depend on
the plan: states that were saved from disk load onto the device. Weights lie beside it, as ``save_pretrained`` writes
them. Several ranks write files of units and a manifest instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.find_checkpoints import refuse_other_tensors
from outcore.checkpoint.shared_checkpoint import restore_buffer
from outcore.checkpoint.unit_files import as_shown, is_state, load_states_of
from outcore.checkpoint.weights.conversions import is_adapter_model
from outcore.checkpoint.weights.load_plan import plan_loading
from outcore.checkpoint.weights.state_names import places
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.engine import Engine, engine_of
from outcore.engine.optimizer import StreamedOptimizer, class_names
from outcore.engine.unit.unit import Unit
from outcore.engine.unit.views import torch_dtype
from outcore.engine.values.access import shown_states
from outcore.engine.values.edits import let_masters_follow, take_edits
from outcore.memory.files.checkpoint_folder import read_manifest
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors
from outcore.memory.files.weights_layout import TensorSpec
from outcore.ranks.agreement import read_by_all
from outcore.spec.manifest import MANIFEST_NAME, Manifest

STATES = "optimizer"
"""Stem of the names of the files."""
OPTIMIZER_CLASS = "optimizer_class"
"""Key in a saved param group for the class name of its optimizer."""
_KEY = "training_state"


def has_states(directory: str | Path) -> bool:
    """Whether a directory has states, of ``save_states`` or of several ranks."""
    return WeightsDirectory.is_there(directory, STATES) or _manifest(directory) is not None


def _manifest(directory: str | Path) -> Manifest | None:
    """The manifest of a Trainer's checkpoint whose states are in files of units; None for any other directory."""
    if not Path(directory, MANIFEST_NAME).is_file():
        return None
    manifest = read_manifest(Path(directory), check=False)
    return manifest if manifest.steps else None


def save_states(optimizer: StreamedOptimizer, directory: str | Path) -> None:
    """Write optimizer states, steps and settings of param groups. Waits for updates that are under way.

    With several ranks this is a collective; rank 0 writes.

    Args:
        optimizer: The prepared optimizer.
        directory: Created if missing; an older save there is replaced when the new one is complete.

    Raises:
        UnsupportedError: JSON cannot hold a setting of a param group.
        DiskError: The directory cannot be written.

    Memory: host, one tensor at a time.
    """
    engine = optimizer.engine
    engine.refuse_if_closed()
    trained = dict(trained_params(optimizer))
    specs = [spec for name, (unit, i) in trained.items() for spec in _specs(name, unit, i)]
    metadata, values = described_states(optimizer), _values(engine, trained)
    world = engine.access.world
    with read_by_all(values if world is not None else ()):
        if world is None or world.rank == 0:
            write_safetensors(directory, specs, values, stem=STATES, metadata=metadata)


def described_states(optimizer: StreamedOptimizer, *, step: int | None = None) -> dict[str, str]:
    """Metadata of the files. Args: step: Step of the whole run, for ``step_of_states``. Raises: As ``save_states``."""
    described = plain_settings(optimizer)
    return {_KEY: json.dumps(described if step is None else {**described, "step": step})}


def plain_settings(optimizer: StreamedOptimizer) -> dict[str, Any]:
    """Steps and settings of param groups. Raises: UnsupportedError: JSON cannot hold a setting of a param group."""
    return {
        "steps": {name: unit.steps[i] for name, (unit, i) in trained_params(optimizer)},
        "groups": saved_settings(optimizer),
    }


def saved_settings(optimizer: StreamedOptimizer) -> list[dict[str, Any]]:
    """Settings of each param group, and the class of its optimizer. Raises: As ``plain_settings``."""
    return [
        {**{k: _plain(k, v) for k, v in group.items() if k != "params"}, OPTIMIZER_CLASS: name}
        for group, name in zip(optimizer.param_groups, class_names(optimizer), strict=True)
    ]


def take_settings(optimizer: StreamedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Replace settings by what ``saved_settings`` returned, in the types that the groups use."""
    pairs = zip(optimizer.param_groups, saved, strict=True)
    settings = [{k: _like(mine.get(k), v) for k, v in group.items() if k != OPTIMIZER_CLASS} for mine, group in pairs]
    optimizer.replace_settings(settings)


def refuse_other_classes(what: str, optimizer: StreamedOptimizer, saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse states of another kind of optimizer. Files of earlier versions do not name it, and are taken.

    Args:
        what: What is loaded, for the error.
        optimizer: The prepared optimizer.
        saved: What ``saved_settings`` returned.

    Raises:
        ConfigError: A class differs.
    """
    for number, (here, group) in enumerate(zip(class_names(optimizer), saved, strict=True)):
        there = group.get(OPTIMIZER_CLASS)
        if there not in (None, here):
            raise ConfigError(
                f"{what}: expected states of {here} in param group {number}, but {there} saved them; resume with the "
                "optimizer of the run that saved them"
            )


def step_of_states(directory: str | Path) -> int | None:
    """Step of the whole run, as the files give it; None if they do not."""
    manifest = _manifest(directory)
    if manifest is not None:
        return manifest.step
    step: int | None = json.loads(WeightsDirectory.open(directory, STATES).metadata.get(_KEY, "{}")).get("step")
    return step


def load_states(optimizer: StreamedOptimizer, directory: str | Path) -> None:
    """Load what ``save_states`` wrote, under any plan, and take over the settings of param groups.

    Raises:
        ConfigError: There are no states, or those of another model, optimizer or precision. Nothing has been changed.
        DiskError: The files cannot be read.

    Memory: host, one tensor at a time.
    """
    engine = optimizer.engine
    engine.refuse_if_closed()
    manifest, path = _manifest(directory), Path(directory)
    trained = dict(trained_params(optimizer))
    if manifest is None:
        saved = WeightsDirectory.open(directory, STATES)
        path, steps, groups = saved.path, *_described(saved)
        there = {name: (saved.dtype(name), saved.shape(name)) for name in saved.names()}
    else:
        refuse_other_tensors(path, manifest)
        steps, groups = manifest.steps, manifest.groups
        states = ((name, seen) for name, seen in as_shown(manifest.tensors.items()) if is_state(name))
        there = {name.partition(".")[2]: (torch_dtype(dtype), shape) for name, (dtype, shape) in states}
    _refuse_others(path, there, trained, steps)
    if len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"optimizer states '{path}': expected {len(optimizer.param_groups)} param groups as the optimizer "
            f"has, but {len(groups)} were saved; build it as in the run that saved them"
        )
    refuse_other_classes(f"optimizer states '{path}'", optimizer, groups)
    take_settings(optimizer, groups)
    for name, (unit, i) in trained.items():
        if manifest is None:
            for state, _, _ in _specs(name, unit, i):
                engine.access.write_state(unit, state.removeprefix(f"{name}."), i, saved.read(state))
        else:
            load_states_of(engine.access, unit, i, path, manifest)
        unit.steps[i] = steps[name]


@torch.no_grad()
def load_weights(model: nn.Module, directory: str | Path) -> None:
    """Replace the weights of a prepared model by a checkpoint's. In a model with adapters, replace the adapters only.

    Master weights follow the weights; other optimizer states stay as they are.

    Args:
        model: The prepared model.
        directory: A checkpoint as ``save_pretrained`` writes it.

    Raises:
        ConfigError: The model is not prepared, or the checkpoint is of another one. Nothing has been changed.

    Memory: host, one tensor at a time; all adapters.
    """
    engine = engine_of(model, "load_weights")
    engine.refuse_if_closed()
    if is_adapter_model(model):
        _load_adapters(model, directory)
        return
    loading = plan_loading(model, directory)
    for tensor in {id(p.tensor): p.tensor for p in places(model) if loading.holds(p.tensor)}.values():
        found = engine.places.get(id(tensor))
        if found is None:
            restore_buffer(tensor, loading.read(tensor))
            continue
        take_edits(found[0], engine.access)
        engine.access.write_weight(*found, loading.read(tensor))
        let_masters_follow(found[0], engine.access)  # at once: what compact masters keep until then would add up
    loading.forget()


def _load_adapters(model: nn.Module, directory: str | Path) -> None:
    from peft import load_peft_weights, set_peft_model_state_dict

    check_adapters(model, directory)
    for name in _adapters(model):
        values = load_peft_weights(str(_adapter_folder(directory, name)), device="cpu")
        set_peft_model_state_dict(model, values, adapter_name=name)


def check_adapters(model: nn.Module, directory: str | Path) -> None:
    """Refuse a folder from which the adapters of a model cannot be loaded whole. Reads their configuration.

    Raises:
        ConfigError: An adapter is missing.
        UnsupportedError: peft does not save this kind of adapter whole.
    """
    from peft import PeftConfig

    for name, config in _adapters(model).items():
        folder = _adapter_folder(directory, name)
        if not _has_adapter(folder):
            raise ConfigError(
                f"weights '{directory}': expected adapter_model.safetensors in '{folder}', but there is none for "
                f"adapter '{name}'; name a folder that a run of this model saved"
            )
        kind = getattr(config.peft_type, "value", config.peft_type)
        if kind == "ADALORA" and PeftConfig.from_pretrained(str(folder)).rank_pattern:
            raise UnsupportedError(
                f"weights '{directory}': expected adapters of the shapes that they have here, but of adapter '{name}' "
                "(ADALORA) the ranks are settled and the tensors have shrunk; train it in one run"
            )
        if kind == "P_TUNING":
            raise UnsupportedError(
                f"weights '{directory}': expected adapters that peft saves whole, but of adapter '{name}' (P_TUNING) "
                "it saves the prompts and not the encoder that makes them; train it in one run"
            )


def _adapters(model: nn.Module) -> Mapping[str, Any]:
    return model.peft_config  # type: ignore[return-value]


def _adapter_folder(directory: str | Path, name: str) -> Path:
    """Folder where peft saves an adapter: one with another name than ``default`` has a folder of its own."""
    return Path(directory) / ("" if name == "default" else name)


def _has_adapter(folder: Path) -> bool:
    return any((folder / name).is_file() for name in ("adapter_model.safetensors", "adapter_model.bin"))


def trained_params(optimizer: StreamedOptimizer) -> Iterator[tuple[str, tuple[Unit, int]]]:
    """Yield name, unit and index of every trained parameter, in the order of the param groups."""
    for param in (p for group in optimizer.param_groups for p in group["params"]):
        unit, i = optimizer.engine.places[id(param)]
        if i < unit.num_trainable:
            yield unit.spec.params[i].name, (unit, i)


def _specs(name: str, unit: Unit, index: int) -> list[TensorSpec]:
    spec = unit.spec.params[index]
    states = shown_states(unit, index)
    return [(f"{name}.{s.name}", torch_dtype(dtype), s.described(spec, index).shape) for s, dtype in states]


def _values(engine: Engine, trained: Mapping[str, tuple[Unit, int]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, (unit, i) in trained.items():
        let_masters_follow(unit, engine.access)
        for state, _, _ in _specs(name, unit, i):
            yield state, engine.access.read_state(unit, state.removeprefix(f"{name}."), i)


def _described(saved: WeightsDirectory) -> tuple[Mapping[str, int], Sequence[Mapping[str, Any]]]:
    try:
        described = json.loads(saved.metadata[_KEY])
        return {name: int(n) for name, n in described["steps"].items()}, [dict(g) for g in described["groups"]]
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"optimizer states '{saved.path}': expected steps and groups under '{_KEY}' in the file's metadata, but "
            f"they cannot be read: {error!r}; the file was not written by outcore, or is damaged"
        ) from error


def _refuse_others(
    path: Path,
    there: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    trained: Mapping[str, tuple[Unit, int]],
    steps: Mapping[str, int],
) -> None:
    wanted = {spec[0]: spec[1:] for name, (unit, i) in trained.items() for spec in _specs(name, unit, i)}
    differing = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
    differing += sorted(trained.keys() ^ steps.keys())
    if differing:
        name = differing[0]
        raise ConfigError(
            f"optimizer states '{path}': expected those of this model, optimizer and precision, but "
            f"{len(differing)} differ: '{name}' is {_shown(wanted.get(name))} here and {_shown(there.get(name))} in "
            "the file; resume with the settings of the run that saved it"
        )


def _shown(spec: tuple[torch.dtype, tuple[int, ...]] | None) -> str:
    return "missing" if spec is None else f"{spec[0]} {spec[1]}"


def _plain(name: str, value: Any) -> Any:
    """A setting in a form that JSON holds exactly: Python writes floats with as many digits as they need."""
    value = value.tolist() if isinstance(value, torch.Tensor) else value
    value = [_plain(name, v) for v in value] if isinstance(value, list | tuple) else value
    if not isinstance(value, str | int | float | bool | list | None):
        raise UnsupportedError(
            f"optimizer states: expected numbers, strings and lists in param groups, but '{name}' is a "
            f"{type(value).__name__}; remove it before saving"
        )
    return value


def _like(mine: Any, saved: Any) -> Any:
    """A saved setting in the type that the group uses: JSON has no tuples and no tensors."""
    if isinstance(mine, torch.Tensor):
        return torch.as_tensor(saved, dtype=mine.dtype, device=mine.device)
    return tuple(saved) if isinstance(saved, list) and not isinstance(mine, list) else saved
