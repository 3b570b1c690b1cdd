"""Export of a checkpoint to other formats, for ``from_pretrained`` or ``torch.distributed.checkpoint``.

[Note: exporting] No engine is needed. The checkpoint's folder ``library`` has what a library must know to build the
model. It is built from that on the meta device, which gives the names under which its tensors are saved.
"""

from __future__ import annotations

import tempfile
import warnings
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from outcore.core.errors import ConfigError
from outcore.core.extra import refuse_missing
from outcore.memory.files.checkpoint_folder import mapped_tensors
from outcore.memory.files.staged_files import copy_files
from outcore.memory.files.weights_file import write_safetensors
from outcore.optim.compact import masters_of
from outcore.planning.units.quantized import full_checksum
from outcore.runtime.unit.views import torch_dtype
from outcore.runtime.values.access import sample_of
from outcore.saving.checkpoint import LIBRARY
from outcore.saving.found import found
from outcore.saving.training_state import OPTIMIZER_CLASS
from outcore.saving.weights.conversions import Group, saving_groups
from outcore.saving.weights.export import adapter_names, saved_state
from outcore.saving.weights.state_names import places
from outcore.spec.checkpoint import Manifest
from outcore.spec.layout import CODES

Format = Literal["hf", "dcp"]


def export_checkpoint(source: Path, directory: Path, form: Format, *, merge: bool = False) -> None:
    """Write a checkpoint in another format.

    Args:
        source: A checkpoint that ``save_checkpoint`` wrote, or a folder of them, of which the newest whole one is
            taken.
        directory: Created if missing.
        form: ``hf`` writes weights and configuration as ``from_pretrained`` reads them; for a model with adapters, it
            writes the adapters. ``dcp`` writes ``model`` and ``optimizer`` by name, as
            ``torch.distributed.checkpoint`` reads them; master weights, if there are any, are written as the weights.
        merge: For a model with adapters, write its base model with the adapters merged in.

    Raises:
        ConfigError: There is no checkpoint, it cannot be written in this format, or the directory is not empty.
        DiskError: The directory cannot be written.

    Memory: host, one tensor at a time, or the group of tensors that become one; with ``merge`` the whole model.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"export: expected a folder that is empty or not there yet, but got '{directory}'")
    with found(source) as (path, manifest):
        _export(_Saved(path, manifest), directory, form, merge=merge)


def _export(saved: _Saved, directory: Path, form: Format, *, merge: bool) -> None:
    is_adapter = (saved.library / "adapter_config.json").is_file()
    if merge and (form != "hf" or not is_adapter):
        raise ConfigError("--merge: expected a model with adapters, and the format hf; leave it out")
    if saved.manifest.frozen and not is_adapter:
        raise _frozen(min(saved.manifest.frozen))
    if form == "dcp":
        _write_dcp(saved, directory)
    elif not (saved.library / "config.json").is_file():
        _write_groups(saved, directory, [Group(name, [("", name)]) for name in saved.weights], {})
    elif is_adapter:
        _write_adapters(saved, directory, merge=merge)
    else:
        model = _built(saved.library)
        _write_groups(saved, directory, saving_groups(model, saved_state(model)), _names_of(model, saved))


class _Saved:
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


_GO_ON = "go on from the checkpoint (prepare(checkpoint=...)), and call outcore.save_pretrained(model, DIR) there"


def _frozen(name: str) -> ConfigError:
    return ConfigError(f"export: expected '{name}' in the checkpoint, but frozen parameters are not saved; {_GO_ON}")


def _class_of(config: Any) -> Any:
    import transformers

    name = config.architectures[0]
    if not hasattr(transformers, name):
        raise ConfigError(f"export: expected a class of transformers, but the model is a '{name}'; {_GO_ON}")
    return getattr(transformers, name)


def _built(library: Path) -> nn.Module:
    """The model, built on the meta device."""
    refuse_missing("transformers")
    import transformers

    config = transformers.AutoConfig.from_pretrained(library)
    kind = _class_of(config)
    if not (library / "adapter_config.json").is_file():
        with torch.device("meta"):
            return kind(config)
    refuse_missing("peft")
    from peft import PeftConfig, get_peft_model

    adapter = PeftConfig.from_pretrained(str(library))
    config.name_or_path = adapter.base_model_name_or_path
    with torch.device("meta"):
        return get_peft_model(kind(config), adapter)


def _names_of(model: nn.Module, saved: _Saved) -> dict[str, str]:
    """Map every name of a tensor to the one under which it was saved. Tied tensors have several names."""
    known = set(saved.weights)
    by_tensor = {id(p.tensor): p.name for p in places(model) if p.name in known}
    return {p.name: by_tensor.get(id(p.tensor), p.name) for p in places(model)}


def _write_groups(saved: _Saved, directory: Path, groups: list[Group], names: dict[str, str]) -> None:
    def read(name: str) -> torch.Tensor:
        return saved.weight(names.get(name, name))

    def shape(name: str) -> torch.Tensor:
        tensor = read(name)
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    specs = [(n, t.dtype, tuple(t.shape)) for group in groups for n, t in group.convert(shape).items()]
    write_safetensors(directory, specs, (pair for group in groups for pair in group.convert(read).items()))
    _copy_library(saved, directory)


def _copy_library(saved: _Saved, directory: Path) -> None:
    if saved.library.is_dir():
        copy_files(saved.library, directory)


def _write_adapters(saved: _Saved, directory: Path, *, merge: bool) -> None:
    from peft import get_peft_model_state_dict

    model: Any = _built(saved.library)
    values = {name: saved.weight(name).contiguous() for name in sorted(adapter_names(model))}
    adapters = get_peft_model_state_dict(model, state_dict=values)
    specs = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in adapters.items()]
    with tempfile.TemporaryDirectory() if merge else nullcontext(directory) as folder:
        write_safetensors(folder, specs, adapters.items(), stem="adapter_model")
        _copy_library(saved, Path(folder))
        Path(folder, "config.json").unlink()  # the base model's
        if merge:
            _merged(saved, model, Path(folder)).save_pretrained(directory)


def _merged(saved: _Saved, model: Any, adapters: Path) -> Any:
    from peft import PeftModel

    base = model.peft_config["default"].base_model_name_or_path
    if not base:
        raise ConfigError(
            "--merge: expected a base model that has a name or a folder, but adapter_config.json has none"
        )
    import transformers

    config = transformers.AutoConfig.from_pretrained(saved.library)
    plain = _class_of(config).from_pretrained(base, dtype=config.dtype)
    whole: Any = PeftModel.from_pretrained(plain, str(adapters))
    frozen, full, unknown = saved.manifest.frozen, saved.manifest.full, list[str]()
    with_parts = {name.rpartition(".")[0] for name in frozen}
    for name, param in whole.named_parameters():
        is_quantized = name in with_parts
        want = (full if is_quantized else frozen).get(name)
        if want is None:
            unknown += [name] * is_quantized
        elif want != (full_checksum(param) if is_quantized else zlib.crc32(sample_of(param))):
            raise ConfigError(
                f"--merge: expected the base model that the adapters were trained on, but of '{base}' the weight "
                f"'{name}' has other values; put back the files of the base model that the run had"
            )
    if unknown:
        warnings.warn(
            f"--merge: {len(unknown)} weights such as '{unknown[0]}' were quantised before outcore had them, so "
            f"nothing says whether those of '{base}' are the ones that the adapters were trained on",
            stacklevel=2,
        )
    return whole.merge_and_unload()


def _write_dcp(saved: _Saved, directory: Path) -> None:
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
