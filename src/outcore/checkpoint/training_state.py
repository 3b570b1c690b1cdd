"""The training state of a prepared model, to and from a directory: optimizer states by name, and weights alone.

[Note: training state] ``optimizer.safetensors`` (or its shards) holds every state of every trained parameter as
``<parameter>.<state>``. Master weights are among them where weights have another dtype. The metadata in its header
(``training_state``) has the steps of each parameter and the settings of each param group. The file does not depend on
the plan: states that were saved from disk load onto the device. Weights lie beside it, as ``save_pretrained`` writes
them. Several ranks write files of units and a manifest instead.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.checkpoint.find_checkpoints import refuse_other_tensors
from outcore.checkpoint.shared_checkpoint import restore_buffer
from outcore.checkpoint.unit_files import as_shown, differences, files_in, is_state, load_states_of
from outcore.checkpoint.weights.conversions import is_adapter_model, places
from outcore.checkpoint.weights.load_plan import plan_loading
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.engine import Engine, engine_of
from outcore.engine.optimizer import StreamedOptimizer, class_names
from outcore.engine.unit.unit import Unit
from outcore.engine.values.access import shown_states
from outcore.engine.values.parameter_values import let_masters_follow, take_edits
from outcore.memory.files.checkpoint_folder import read_manifest
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.spec.manifest import MANIFEST_NAME, Manifest, PartRecord, TensorRecord

STATES = "optimizer"
"""Stem of the names of the files."""
OPTIMIZER_CLASS = "optimizer_class"
"""Key in a saved param group for the class name of its optimizer."""
_KEY = "training_state"


def has_states(directory: str | Path) -> bool:
    """Whether a directory has states, in files of their own or of several ranks."""
    path = Path(directory)
    is_there = WeightsDirectory.is_there(path, STATES)
    return is_there or ((path / MANIFEST_NAME).is_file() and bool(read_manifest(path, check=False).steps))


def _saved_states(directory: str | Path) -> Manifest:
    """What a directory says of the states in it: their places, steps, and settings of param groups.

    Raises:
        ConfigError: There are none, or outcore did not write them.
    """
    path = Path(directory)
    if has_states(path) and not WeightsDirectory.is_there(path, STATES):
        manifest = read_manifest(path, check=False)
        refuse_other_tensors(path, manifest)
        return manifest
    saved = WeightsDirectory.open(path, STATES)
    tensors = {}
    for name in saved.names():
        dtype, shape = str(saved.dtype(name)).removeprefix("torch."), saved.shape(name)
        tensors[f"optimizer.{name}"] = TensorRecord(
            dtype, shape, (PartRecord(saved.file(name), 0, math.prod(shape)),), name=name
        )
    try:
        described = json.loads(saved.metadata[_KEY])
        steps, groups = {n: int(m) for n, m in described["steps"].items()}, tuple(map(dict, described["groups"]))
        return Manifest(step=described.get("step", -1), files={}, tensors=tensors, steps=steps, groups=groups)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"optimizer states '{saved.path}': expected steps and groups under '{_KEY}' in the file's metadata, but "
            f"they cannot be read: {error!r}; the file was not written by outcore, or is damaged"
        ) from error


def described_states(optimizer: StreamedOptimizer, *, step: int | None = None) -> dict[str, str]:
    """Metadata of the files. Args: step: Step of the whole run. Raises: As ``saved_settings``."""
    steps = {name: unit.steps[i] for name, (unit, i) in trained_params(optimizer)}
    described = {"steps": steps, "groups": saved_settings(optimizer)}
    return {_KEY: json.dumps(described if step is None else {**described, "step": step})}


def saved_settings(optimizer: StreamedOptimizer) -> list[dict[str, Any]]:
    """Settings of each param group, and the class of its optimizer.

    Raises:
        UnsupportedError: JSON cannot hold a setting of a param group.
    """
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
    step = _saved_states(directory).step
    return None if step < 0 else step


def load_states(optimizer: StreamedOptimizer, directory: str | Path) -> None:
    """Load the states of a checkpoint, under any plan, and take over the settings of param groups.

    Raises:
        ConfigError: There are no states, or those of another model, optimizer or precision. Nothing has been changed.
        DiskError: The files cannot be read.

    Memory: host, 4 MiB, or a tensor whose form or memory order differs.
    """
    engine = optimizer.engine
    engine.refuse_if_closed()
    manifest, path = _saved_states(directory), Path(directory)
    trained = dict(trained_params(optimizer))
    _refuse_others(path, manifest, trained)
    if len(manifest.groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"optimizer states '{path}': expected {len(optimizer.param_groups)} param groups as the optimizer "
            f"has, but {len(manifest.groups)} were saved; build it as in the run that saved them"
        )
    refuse_other_classes(f"optimizer states '{path}'", optimizer, manifest.groups)
    take_settings(optimizer, manifest.groups)
    opened = files_in(path)
    for name, (unit, i) in trained.items():
        load_states_of(engine.access, unit, i, opened, manifest)
        unit.steps[i] = manifest.steps[name]


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
    loading.close()


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


def params_by_name(engine: Engine) -> dict[str, tuple[Unit, int]]:
    """Unit and index of each trained parameter, by name."""
    return {unit.spec.params[i].name: (unit, i) for unit in engine.units for i in range(unit.num_trainable)}


def _refuse_others(path: Path, manifest: Manifest, trained: Mapping[str, tuple[Unit, int]]) -> None:
    here = {
        f"{name}.{state.name}": (dtype, state.described(unit.spec.params[i], i).shape)
        for name, (unit, i) in trained.items()
        for state, dtype in shown_states(unit, i)
    }
    saved = as_shown(manifest.tensors.items())
    differing = differences(here, {name.partition(".")[2]: seen for name, seen in saved if is_state(name)})
    differing += [(name, "") for name in sorted(trained.keys() ^ manifest.steps.keys())]
    if differing:
        raise ConfigError(
            f"optimizer states '{path}': expected those of this model, optimizer and precision, but "
            f"{len(differing)} differ: '{differing[0][0]}' {differing[0][1] or 'has steps on one side only'}; resume "
            "with the settings of the run that saved it"
        )


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
