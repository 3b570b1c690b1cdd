"""What the manifest of a run's checkpoint says: where each tensor lies, and by what the run is known again."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from outcore.checkpoint.library_files import REST, Held
from outcore.checkpoint.shared_checkpoint import buffers_of
from outcore.checkpoint.training_state import STATES, params_by_name, saved_settings, trained_params
from outcore.checkpoint.unit_files import as_shown, records
from outcore.engine.engine import Engine
from outcore.engine.optimizer import StreamedOptimizer
from outcore.engine.values.access import shown_states
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.model.quantized import FULL_CHECKSUM
from outcore.model.wrapped import Wrapping, is_wrapped
from outcore.spec.layout import CODES
from outcore.spec.manifest import Manifest, PartRecord, TensorRecord


def manifest_maker(
    optimizer: StreamedOptimizer, step: int, held: Held
) -> Callable[[Path, Mapping[str, Any]], Manifest]:
    """Return a function that makes the manifest, for the state that training has now. A collective.

    Args: held: What ``SavedNames.held`` returned.
    """
    engine = optimizer.engine
    described = zip(group_names(optimizer), saved_settings(optimizer), strict=True)
    groups = tuple({"params": names, **settings} for names, settings in described)
    tensors = {name: record for unit in engine.units for name, record in records(unit)}
    for name, buffer in buffers_of(engine).items():
        tensors[f"model.{name}"] = TensorRecord(str(buffer.dtype).removeprefix("torch."), tuple(buffer.shape), ())
    shown, at = dict(as_shown(tensors.items())), _places(optimizer, held)
    in_units = {name: record for name, record in tensors.items() if name not in at and engine.access.world is not None}
    frozen = frozen_samples(engine)
    everything = engine.model.named_parameters()
    full = {name: getattr(param, FULL_CHECKSUM) for name, param in everything if hasattr(param, FULL_CHECKSUM)}
    wrapped = wrappings(engine.model)
    steps = {u.spec.params[i].name: u.steps[i] for u in engine.units for i in range(u.num_trainable)}

    def describe(path: Path, files: Mapping[str, Any]) -> Manifest:
        opened = {stem: WeightsDirectory.open(path, stem) for stem in {place[0] for place in at.values() if place}}
        placed = {}
        for name, place in at.items():
            dtype, shape = shown[name]
            parts = (PartRecord(opened[place[0]].file(place[1]), 0, math.prod(shape)),) if place else ()
            placed[name] = TensorRecord(dtype, shape, parts, name=place[1] if place else None)
        known = {"frozen": frozen, "full": full, "wrapped": wrapped, "steps": steps}
        return Manifest(step=step, files=files, tensors={**in_units, **placed}, groups=groups, **known)

    return describe


def _places(optimizer: StreamedOptimizer, held: Held) -> dict[str, tuple[str, str] | None]:
    """Stem of the files and name in them of each tensor of the manifest, but for those in files of units.

    None: it is converted. Args: held: What ``SavedNames.held`` returned.
    """
    at: dict[str, tuple[str, str] | None] = {}
    engine, updated = optimizer.engine, dict(trained_params(optimizer))
    many = engine.access.world is not None
    for name, (unit, i) in params_by_name(engine).items():
        if id(unit.params[i]) in held and not (many and CODES in unit.ledger.state_specs):
            at[f"model.{name}"] = held[id(unit.params[i])]
        elif not many:
            at[f"model.{name}"] = REST, name
        states = [] if many else [f"{name}.{state.name}" for state, _ in shown_states(unit, i)]
        at.update({f"optimizer.{state}": (STATES if name in updated else REST, state) for state in states})
    at.update({f"model.{name}": held.get(id(buffer), (REST, name)) for name, buffer in buffers_of(engine).items()})
    return at


def wrappings(model: nn.Module) -> dict[str, str]:
    """What decides how the bytes inside wrapped parameters are read, by name."""
    return {name: str(Wrapping(param)) for name, param in model.named_parameters() if is_wrapped(param)}


def frozen_samples(engine: Engine) -> dict[str, int]:
    """Checksums of some bytes of each frozen parameter, by name. A collective if they are cut over ranks."""
    everything = ((unit, i, spec) for unit in engine.units for i, spec in enumerate(unit.spec.params))
    frozen = ((unit, i, spec.name) for unit, i, spec in everything if i >= unit.num_trainable)
    return {name: zlib.crc32(engine.access.sample(unit, i)) for unit, i, name in frozen}


def group_names(optimizer: StreamedOptimizer) -> list[list[str]]:
    """Names of the parameters in each param group."""
    found = [[optimizer.engine.places[id(p)] for p in group["params"]] for group in optimizer.param_groups]
    return [[unit.spec.params[i].name for unit, i in group] for group in found]
