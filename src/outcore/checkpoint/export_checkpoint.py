"""Export to other formats, for ``from_pretrained`` or ``torch.distributed.checkpoint``.

[Note: exporting] No engine is needed. A checkpoint is in the libraries' form already: its files are copied, without
those that only training needs. Other formats name tensors as the model does. The manifest says where each of them lies.
Those that the files hold in another form are read for a model on the meta device, built from the configuration there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outcore.checkpoint.export_merged import GO_ON, class_of, export_merged
from outcore.checkpoint.find_checkpoints import NOT_OF_A_MODEL, TRAINER_STATE, found, found_in
from outcore.checkpoint.library_files import REST
from outcore.checkpoint.training_state import OPTIMIZER_CLASS
from outcore.checkpoint.unit_files import UNIT, is_converted, read_saved
from outcore.checkpoint.weights.conversions import places
from outcore.checkpoint.weights.load_plan import LoadPlan, plan_loading
from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.memory.files.checkpoint_folder import mapped_tensors
from outcore.memory.files.staged_files import copy_files, is_any
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.spec.layout import CODES
from outcore.spec.manifest import MANIFEST_NAME, Manifest

Format = Literal["hf", "dcp"]
_MODEL, _CONFIG, _ADAPTER_CONFIG = "model", "config.json", "adapter_config.json"
_LIBRARY = "library"
"""A folder in checkpoints of earlier versions."""


def export_checkpoint(source: Path, directory: Path, form: Format, *, merge: bool = False) -> str:
    """Write a model that was trained in another format.

    Args:
        source: The folder of a run (its ``model``, or its newest whole checkpoint if that is newer), one checkpoint,
            a folder of checkpoints that ``save_checkpoint`` wrote, or a model or adapters as the libraries save them.
        directory: Created if missing.
        form: ``hf`` writes weights and configuration as ``from_pretrained`` reads them; for a model with adapters, it
            writes the adapters. ``dcp`` writes ``model`` and ``optimizer`` by name, as
            ``torch.distributed.checkpoint`` reads them; master weights, if there are any, are written as the weights.
        merge: For a model with adapters, write its base model with the adapters merged in.

    Returns:
        What was written, for people; empty if that is just what was asked for.

    Raises:
        ConfigError: There is nothing to export, it cannot be written in this format, or the directory is not empty.
        DiskError: The directory cannot be written.

    Memory: host, one tensor at a time; with ``dcp`` also weights that are saved in another form and have no masters,
    with ``merge`` also all adapters, and one layer.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"export: expected a folder that is empty or not there yet, but got '{directory}'")
    with _found(source) as (path, manifest):
        if manifest is not None and form == "dcp" and not merge:
            _write_dcp(path, manifest, directory)
            return ""
        return f"{path}, {_export_files(path, directory, form, merge=merge, manifest=manifest)}"


@contextmanager
def _found(source: Path) -> Iterator[tuple[Path, Manifest | None]]:
    """Give the folder to export. Its manifest is None if it holds a model as the libraries save it."""
    model = next((folder for folder in (source, source / _MODEL) if _has_model(folder)), None)
    states = [path / name for _, path in found_in(source)[:1] for name in (TRAINER_STATE, MANIFEST_NAME)]
    is_last = model is not None and _age(states) <= _age(model.glob("*.safetensors"))
    if model is not None and is_last and not (source / MANIFEST_NAME).is_file():
        yield model, None
        return
    with found(source) as (path, manifest):
        yield path, None if TRAINER_STATE in manifest.files else manifest


def _age(paths: Iterable[Path]) -> float:
    """When the last of some files was written; 0 if none is there."""
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def _has_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_CONFIG, _ADAPTER_CONFIG))


def _export_files(folder: Path, directory: Path, form: Format, *, merge: bool, manifest: Manifest | None) -> str:
    """Export a model or adapters that are there as the libraries save them."""
    is_adapter = (folder / _ADAPTER_CONFIG).is_file()
    if merge and form != "hf":
        raise ConfigError("--merge: expected the format hf; leave one of them out")
    if form != "hf":
        raise ConfigError(
            f"--format {form}: expected a checkpoint that outcore.save_checkpoint() wrote, but '{folder}' has a model "
            "as from_pretrained reads it, without optimizer states by name; leave --format out"
        )
    if merge and not is_adapter:
        raise ConfigError(
            f"--merge: expected adapters, but '{folder}' holds a whole model, with nothing to merge; leave it out"
        )
    if directory.resolve().is_relative_to(folder.resolve()):
        raise ConfigError(f"export: expected a folder outside of '{folder}', but got '{directory}'")
    if not WeightsDirectory.is_there(folder, "adapter_model" if is_adapter else "model"):
        what = "expected weights " + ("in safetensors files" if manifest is None else "as the libraries save them")
        repair = f" (of an earlier version, or of a model that its library does not save); {GO_ON}"
        raise ConfigError(f"export: {what} in '{folder}', but there are none{repair if manifest is not None else ''}")
    if manifest is not None:
        _refuse_left_out(folder, manifest)
    if merge:
        return export_merged(folder, directory, manifest=manifest)
    copy_files(folder, directory, lambda name: not is_any(name, NOT_OF_A_MODEL))
    if is_adapter:
        return "adapters as peft reads them (--merge merges them)"
    return "as from_pretrained reads it" if (folder / _CONFIG).is_file() else "as weights without a configuration"


def _refuse_left_out(folder: Path, manifest: Manifest) -> None:
    """Raise if a weight was trained that the library's files do not hold, such as a norm beside adapters."""
    for name in manifest.steps:
        file = next((part.file for part in manifest.tensors[f"model.{name}"].parts), "")
        is_in_unit = file.startswith(UNIT) and f"optimizer.{name}.{CODES}" not in manifest.tensors  # else a second time
        if file == f"{REST}.safetensors" or is_in_unit:
            raise ConfigError(
                f"export: expected all trained weights among those that the library saves, but '{name}' in '{folder}' "
                "is not; let peft save it (modules_to_save), or go on from the checkpoint "
                "(prepare(checkpoint=...)) and save it there (outcore.named_tensors)"
            )


class _CheckpointTensors:
    """Tensors of a checkpoint by their names in the model, read from mapped files."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest, self._path = manifest, path
        files = {part.file for record in manifest.tensors.values() for part in record.parts}
        self._files = {file: mapped_tensors(path / file) for file in files}
        self.weights = [name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")]

    def _read(self, name: str) -> torch.Tensor:
        """A tensor; a view of the mapped file where possible."""
        return read_saved(lambda file, inside: self._files[file](inside), self.manifest, name)

    def weight(self, name: str) -> torch.Tensor:
        """A parameter or buffer, in the dtype that the model computes with."""
        if not is_converted(self.manifest.tensors[f"model.{name}"]):
            return self._read(f"model.{name}")
        made, tensors = self._converted
        return made.read(tensors[name])

    @cached_property
    def _converted(self) -> tuple[LoadPlan, dict[str, torch.Tensor]]:
        model = _built(self._path)
        return plan_loading(model, self._path, is_exact=False), {place.name: place.tensor for place in places(model)}

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Optimizer states of a parameter, its master weights included."""
        prefix = f"optimizer.{name}."
        found = [key for key in self.manifest.tensors if key.startswith(prefix) and "." not in key[len(prefix) :]]
        return {key.removeprefix(prefix): self._read(key) for key in found if key != prefix + CODES}


def _built(folder: Path) -> nn.Module:
    """The model of a configuration, on the meta device."""
    refuse_missing("transformers")
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder)
    except Exception as error:  # the library may raise anything
        raise ConfigError(f"export: expected a configuration in '{folder}', but {error}; {GO_ON}") from error
    with torch.device("meta"):
        return class_of(config)(config)


def _write_dcp(path: Path, manifest: Manifest, directory: Path) -> None:
    """Write one file per tensor: otherwise torch's writer keeps all of them in memory."""
    is_adapter = any((folder / _ADAPTER_CONFIG).is_file() for folder in (path, path / _LIBRARY))
    if manifest.frozen and not is_adapter:
        raise ConfigError(
            f"--format dcp: expected a model whose parameters are all trained, but '{min(manifest.frozen)}' is frozen; "
            "leave --format out"
        )
    saved = _CheckpointTensors(path, manifest)
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    model, states = dict[str, torch.Tensor](), dict[str, dict[str, torch.Tensor]]()
    for name in saved.weights:
        own = saved.states(name)
        model[name] = own.pop("master") if "master" in own else saved.weight(name)
        if saved.manifest.steps.get(name):
            states[name] = {**own, "step": torch.tensor(float(saved.manifest.steps[name]), device="cpu")}
    everything = {
        "model": model,
        "optimizer": {"state": states, "param_groups": list(map(_as_trained, saved.manifest.groups))},
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # no_dist asks for just that
        save(everything, storage_writer=FileSystemWriter(directory, single_file_per_rank=False), no_dist=True)


def _as_trained(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group with the kernel that was used: the fused one if none was chosen. Other kernels give other bits."""
    is_open = group.get("fused", False) is None and not group.get("foreach") and "lr_decay" not in group
    settings = {name: value for name, value in group.items() if name != OPTIMIZER_CLASS}
    return {**settings, "fused": True} if is_open else settings
