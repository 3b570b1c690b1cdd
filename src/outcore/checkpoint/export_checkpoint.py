"""Export to other formats, for ``from_pretrained`` or ``torch.distributed.checkpoint``.

[Note: exporting] No engine is needed. What ``save_checkpoint`` wrote has a folder ``library``, with what a library must
know to build the model. It is built from that on the meta device, which gives the names under which its tensors are
saved. What a Trainer or ``outcore train`` wrote is in the libraries' form already: its files are copied, without those
that only training needs. Adapters are merged from such a folder; those of ``save_checkpoint`` are written to one first.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outcore.checkpoint.export_merged import GO_ON, class_of, export_merged
from outcore.checkpoint.find_checkpoints import NOT_OF_A_MODEL, TRAINER_STATE, found, found_in
from outcore.checkpoint.save_and_load import LIBRARY
from outcore.checkpoint.training_state import OPTIMIZER_CLASS
from outcore.checkpoint.weights.conversions import Group, saving_groups
from outcore.checkpoint.weights.export import ADAPTER_FILE, adapter_names, saved_state
from outcore.checkpoint.weights.state_names import places
from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.engine.unit.views import torch_dtype
from outcore.memory.files.checkpoint_folder import mapped_tensors
from outcore.memory.files.staged_files import copy_files, is_any
from outcore.memory.files.weights_file import WeightsDirectory, write_safetensors
from outcore.optim.compact import masters_of
from outcore.spec.layout import CODES
from outcore.spec.manifest import MANIFEST_NAME, Manifest

Format = Literal["hf", "dcp"]
_MODEL, _CONFIG, _ADAPTER_CONFIG = "model", "config.json", "adapter_config.json"


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

    Memory: host, one tensor at a time, or the group of tensors that become one; with ``merge`` also all adapters, and
    one layer.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"export: expected a folder that is empty or not there yet, but got '{directory}'")
    with _found(source) as (path, manifest):
        if manifest is not None:
            said = _export(_CheckpointTensors(path, manifest), directory, form, merge=merge)
        else:
            said = _export_files(path, directory, form, merge=merge)
        return f"{path}, {said}" if said else ""


@contextmanager
def _found(source: Path) -> Iterator[tuple[Path, Manifest | None]]:
    """Give the folder to export. Its manifest is None if it holds a model as the libraries save it."""
    model = next((folder for folder in (source, source / _MODEL) if _has_model(folder)), None)
    states = [path / name for _, path in found_in(source)[:1] for name in (TRAINER_STATE, MANIFEST_NAME)]
    is_last = model is not None and _age(states) <= _age(model.glob("*.safetensors"))
    if model is not None and is_last and not (source / MANIFEST_NAME).is_file():
        yield model, None
        return
    with found(source, of_trainers=True) as (path, manifest):
        yield path, None if TRAINER_STATE in manifest.files else manifest


def _age(paths: Iterable[Path]) -> float:
    """When the last of some files was written; 0 if none is there."""
    return max((path.stat().st_mtime for path in paths if path.is_file()), default=0.0)


def _has_model(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (_CONFIG, _ADAPTER_CONFIG))


def _export(saved: _CheckpointTensors, directory: Path, form: Format, *, merge: bool) -> str:
    is_adapter = (saved.library / _ADAPTER_CONFIG).is_file()
    if merge and (form != "hf" or not is_adapter):
        raise ConfigError("--merge: expected a model with adapters, and the format hf; leave it out")
    if saved.manifest.frozen and not is_adapter:
        raise _frozen(min(saved.manifest.frozen))
    if form == "dcp":
        _write_dcp(saved, directory)
    elif not (saved.library / _CONFIG).is_file():
        _write_groups(saved, directory, [Group(name, [("", name)]) for name in saved.weights], {})
    elif merge:
        with tempfile.TemporaryDirectory() as folder:
            _write_adapters(saved, Path(folder))
            return export_merged(Path(folder), directory, library=saved.library, manifest=saved.manifest)
    elif is_adapter:
        _write_adapters(saved, directory)
    else:
        model = _built(saved.library)
        _write_groups(saved, directory, saving_groups(model, saved_state(model)), _names_of(model, saved))
    return ""


def _export_files(folder: Path, directory: Path, form: Format, *, merge: bool) -> str:
    """Export a model or adapters that are there as the libraries save them."""
    is_adapter = (folder / _ADAPTER_CONFIG).is_file()
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
        raise ConfigError(f"export: expected weights in safetensors files in '{folder}', but there are none")
    if merge:
        return export_merged(folder, directory)
    copy_files(folder, directory, lambda name: not is_any(name, NOT_OF_A_MODEL))
    return "adapters as peft reads them (--merge merges them)" if is_adapter else "as from_pretrained reads it"


class _CheckpointTensors:
    """Tensors of a checkpoint, read from mapped files."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.manifest, self.library = manifest, path / LIBRARY
        files = {part.file for record in manifest.tensors.values() for part in record.parts}
        self._tensors = {file: mapped_tensors(path / file) for file in files}
        self.weights = [name.removeprefix("model.") for name in manifest.tensors if name.startswith("model.")]

    def read(self, name: str) -> torch.Tensor:
        """A tensor; a view of the mapped file where possible."""
        return self._shaped(name, self._flat(name))

    def _flat(self, name: str) -> torch.Tensor:
        """A tensor as it lay in memory (1D)."""
        record = self.manifest.tensors[name]
        flats = [self._tensors[part.file](name).reshape(-1) for part in record.parts]
        if not flats:  # several ranks saved it, and none has an element of it
            return torch.empty(0, dtype=torch_dtype(record.dtype), device="cpu")
        return flats[0] if len(flats) == 1 else torch.cat(flats)

    def _shaped(self, name: str, flat: torch.Tensor) -> torch.Tensor:
        record = self.manifest.tensors[name]
        order = record.order or tuple(range(len(record.shape)))
        return flat.view([record.shape[i] for i in order]).permute([order.index(i) for i in range(len(order))])

    def weight(self, name: str) -> torch.Tensor:
        """A parameter or buffer, in the dtype that the model computes with."""
        if f"model.{name}" not in self.manifest.tensors:
            raise _frozen(name)
        return self.read(f"model.{name}")

    def states(self, name: str) -> dict[str, torch.Tensor]:
        """Optimizer states of a parameter, its master weights included."""
        prefix = f"optimizer.{name}."
        found = [key for key in self.manifest.tensors if key.startswith(prefix) and "." not in key[len(prefix) :]]
        states = {key.removeprefix(prefix): self.read(key) for key in found}
        if states.pop(CODES, None) is not None:
            stored = (self._flat(key) for key in (f"model.{name}", f"{prefix}master", prefix + CODES))
            states["master"] = self._shaped(f"{prefix}master", masters_of(*stored))
        return states


def _frozen(name: str) -> ConfigError:
    return ConfigError(f"export: expected '{name}' in the checkpoint, but frozen parameters are not saved; {GO_ON}")


def _built(library: Path) -> nn.Module:
    """The model, built on the meta device."""
    refuse_missing("transformers")
    import transformers

    config = transformers.AutoConfig.from_pretrained(library)
    kind = class_of(config)
    if not (library / "adapter_config.json").is_file():
        with torch.device("meta"):
            return kind(config)
    refuse_missing("peft")
    from peft import PeftConfig, get_peft_model

    adapter = PeftConfig.from_pretrained(str(library))
    config.name_or_path = adapter.base_model_name_or_path
    with torch.device("meta"):
        return get_peft_model(kind(config), adapter)


def _names_of(model: nn.Module, saved: _CheckpointTensors) -> dict[str, str]:
    """Map every name of a tensor to the one under which it was saved. Tied tensors have several names."""
    known = set(saved.weights)
    by_tensor = {id(p.tensor): p.name for p in places(model) if p.name in known}
    return {p.name: by_tensor.get(id(p.tensor), p.name) for p in places(model)}


def _write_groups(saved: _CheckpointTensors, directory: Path, groups: list[Group], names: dict[str, str]) -> None:
    def read(name: str) -> torch.Tensor:
        return saved.weight(names.get(name, name))

    def shape(name: str) -> torch.Tensor:
        tensor = read(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    specs = [(n, t.dtype, tuple(t.shape)) for group in groups for n, t in group.convert(shape).items()]
    write_safetensors(directory, specs, (pair for group in groups for pair in group.convert(read).items()))
    _copy_library(saved, directory)


def _copy_library(saved: _CheckpointTensors, directory: Path) -> None:
    if saved.library.is_dir():
        copy_files(saved.library, directory)


def _write_adapters(saved: _CheckpointTensors, directory: Path) -> None:
    from peft import get_peft_model_state_dict

    model: Any = _built(saved.library)
    names = _names_of(model, saved)
    values = {name: saved.weight(names.get(name, name)).contiguous() for name in sorted(adapter_names(model))}
    adapters = get_peft_model_state_dict(model, state_dict=values)
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters.items()]
    write_safetensors(directory, specs, adapters.items(), stem=Path(ADAPTER_FILE).stem)
    _copy_library(saved, directory)
    Path(directory, _CONFIG).unlink()  # the base model's


def _write_dcp(saved: _CheckpointTensors, directory: Path) -> None:
    """Write one file per tensor: otherwise torch's writer keeps all of them in memory."""
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
