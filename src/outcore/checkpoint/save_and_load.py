"""Checkpoints: the whole state of a run at one step, committed as one folder and written while training goes on.

[Note: checkpoints] ``DIR/step-00001200/`` has the files of a Trainer's checkpoint: weights and configuration as
``save_pretrained`` writes them, and ``optimizer.safetensors``. What of the trained weights and buffers the library's
files do not hold is in ``rest.safetensors``, small state in ``state.json``. ``manifest.json`` ties all files together,
and says where each tensor lies. A checkpoint does not depend on the plan. Frozen parameters are never read from it,
because the model is built with them; a sample of each is in the manifest, and compared on loading.
Earlier versions wrote a file for each unit, with weights and states as they lie in their homes. The manifest says where
these tensors lie, too, so both forms are read in one way.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from outcore.checkpoint.begin_checkpoint import begun
from outcore.checkpoint.find_checkpoints import RANDOM_STATE, TRAINER_STATE, found, found_in, prune
from outcore.checkpoint.library_files import LibraryFiles, SavedNames
from outcore.checkpoint.run_manifest import frozen_samples, group_names, manifest_maker, wrappings
from outcore.checkpoint.shared_checkpoint import (
    all_random_states,
    buffers_of,
    odd_buffers,
    restore_buffer,
    restore_odd_buffers,
    restore_random_states_of,
)
from outcore.checkpoint.small_state import encode, random_states, read_small, write_small
from outcore.checkpoint.training_state import params_by_name, refuse_other_classes, saved_settings, take_settings
from outcore.checkpoint.unit_files import (
    OpenFile,
    as_shown,
    differences,
    files_in,
    in_memory,
    is_converted,
    load_param,
    read_saved,
    records,
)
from outcore.checkpoint.weights.load_plan import LoadPlan, plan_loading
from outcore.core.errors import ConfigError, OutcoreError, UnsupportedError
from outcore.engine.checkpoint_saves import Save
from outcore.engine.engine import Engine, engine_of
from outcore.engine.optimizer import StreamedOptimizer
from outcore.engine.unit.unit import Beneath
from outcore.engine.values.parameter_values import let_masters_follow, take_edits
from outcore.ranks.agreement import agree, agreed
from outcore.spec.manifest import MANIFEST_NAME, Manifest

_STATE = "state"


def save_checkpoint(
    model: nn.Module,
    optimizer: StreamedOptimizer,
    directory: str | Path,
    *,
    step: int,
    extra: Mapping[str, Any] | None = None,
    keep: int | None = None,
    wait: bool = False,
) -> Save:
    """Save the whole state of a run as ``directory/step-<step>`` while training goes on.

    Saved are weights, optimizer states, master weights, buffers, settings of param groups and states of random
    generators, tied together by checksums. The checkpoint appears as a whole or not at all, however the process ends.
    Gradients are not saved: call this between ``optimizer.step()`` and the next backward. ``from_pretrained`` reads the
    folder as it is. Of a model with adapters, it has the adapters, and of each base weight a sample.

    With several ranks this is a collective: each rank writes its part into one folder that all ranks see. Weights that
    are cut over ranks are written before the call returns.

    Args:
        model: The prepared model.
        optimizer: The optimizer that was prepared with it.
        directory: Folder for the checkpoints of this run; created if missing.
        step: Step of the run. A checkpoint of the same step is replaced.
        extra: Other state that a resumed run needs, such as state dicts of schedulers, scalers and loaders: numbers,
            strings, tensors and arrays, in dicts, lists and tuples.
        keep: Number of checkpoints to keep. Older ones are removed as soon as this one is durable.
        wait: Return only when the checkpoint is durable.

    Returns:
        A handle. Its ``wait()`` blocks until the checkpoint is durable and raises what went wrong; ``done`` says
        whether it is over. The next ``save_checkpoint`` and the end of the run wait for it, too.

    Raises:
        ConfigError: An argument cannot be used.
        DiskError: There is no room, or nothing can be written; older checkpoints are untouched. Or the previous
            checkpoint could not be written, which no call has reported yet; the new one is still being saved then.

    Memory: host, 16 MiB while the checkpoint is written, plus each tensor whose saved form differs, and ``extra`` until
    the call returns.

    Order: each unit is copied after its update, and its next update waits for that copy only. Code other than calls of
    the unit waits for the copy before it sees weights that live on the device.
    """
    folder = Path(directory).absolute()  # a later change of the working directory must not move it
    save = _begin_save(engine_of(model, "save_checkpoint"), optimizer, folder, step, extra or {}, keep)
    if wait:
        save.wait()
    return save


def _begin_save(
    engine: Engine, optimizer: StreamedOptimizer, directory: Path, step: int, extra: Mapping[str, Any], keep: int | None
) -> Save:
    engine.refuse_if_closed()
    world = engine.access.world
    with agreed(world, "save_checkpoint"):  # nothing is written yet
        _refuse_other_optimizer(engine, optimizer, "save_checkpoint")
        _refuse_unfit(engine, step, extra, keep)
        small: dict[str, Any] = {"extra": dict(extra), "random": random_states(engine.device)}
        encode(small["extra"], {})
        saved_settings(optimizer)  # raises what JSON cannot hold
        for unit in engine.units:
            let_masters_follow(unit, engine.access)
        names = _names(engine.model)
        target = directory / f"step-{step:08d}"
        _refuse_to_replace(target)
        later = [path.name for number, path in found_in(directory) if number > step]
        if later:
            warnings.warn(
                f"save_checkpoint: '{directory}' has checkpoints of later steps than {step}, up to {later[0]}, and the "
                "highest step is what load_checkpoint takes; remove them if this run takes their place",
                stacklevel=3,
            )
    if world is not None:
        said = {"step": step, "directory": str(directory), "keep": keep}
        agree(world, {f"{name}={value!r}": "" for name, value in said.items()}, call="save_checkpoint")
        small["ranks"] = all_random_states(engine)
        small["buffers"] = odd_buffers(engine)

    def tidy_up() -> None:
        if keep is not None:
            prune(directory, keep, newest=step)

    describe = manifest_maker(optimizer, step, names.held() if names else {})
    with begun(engine, target, lambda files: describe(unfinished.path, files), tidy_up) as (unfinished, save):
        library = LibraryFiles(engine, unfinished, save, names or SavedNames(), is_strict=False)
        is_first = world is None or world.rank == 0
        if names is not None and (is_first or engine.has_cut_weights):
            library.weights(unfinished.path)
        if is_first:
            write_small(unfinished.path, _STATE, small)
        library.states(optimizer, step=step)
        library.submit()
    return save


def _names(model: nn.Module) -> SavedNames | None:
    """Names of the library's files. None: the library does not save this model, so all that is trained is rest."""
    try:
        return SavedNames.of(model)
    except (ConfigError, UnsupportedError):
        return None


def _refuse_to_replace(target: Path) -> None:
    if os.path.lexists(target) and not (target / MANIFEST_NAME).is_file():
        raise ConfigError(
            f"save_checkpoint: expected a checkpoint at '{target}', or nothing, but something else is there; move it "
            "away, or name another folder"
        )


def load_checkpoint(
    model: nn.Module,
    optimizer: StreamedOptimizer,
    directory: str | Path,
    *,
    step: int | None = None,
    verify: bool = True,
) -> dict[str, Any]:
    """Restore what ``save_checkpoint`` saved, under any plan: weights, states, settings, random generators.

    A ``checkpoint-N`` of a Trainer with ``OutcoreMixin``, or of ``outcore train``, is taken, too. Its schedule and its
    place in the data are for a Trainer.

    With several ranks this is a collective. Their number may differ from that of the run that saved.

    Args:
        model: The prepared model, built as in the run that saved.
        optimizer: The optimizer that was prepared with it, over the same param groups.
        directory: One checkpoint, or a folder of them.
        step: Step to load. None: the newest checkpoint that is as it was saved; a warning names damaged ones.
        verify: Read everything first, and compare it with the checksums. False: compare sizes only.

    Returns:
        ``extra`` as it was saved, with ``step`` added. A Trainer's has none.

    Raises:
        ConfigError: No whole checkpoint is there, or it is of another model, optimizer or precision. Nothing was
            changed.
        DiskError: The checkpoint can no longer be read. The model cannot be used until a checkpoint is loaded.

    Memory: host, 16 MiB while it is verified; then 4 MiB, and each tensor that is saved in another form or memory
    order than it has here.
    """
    engine = engine_of(model, "load_checkpoint")
    if not isinstance(engine.run.refusal, _HalfLoadedError):
        engine.refuse_if_closed()
    failed = engine.opened.saves.make_room()
    if failed is not None:
        warnings.warn(f"load_checkpoint: the last save failed: {failed.error}", stacklevel=2)
    with agreed(engine.access.world, "load_checkpoint"):
        engine.device.check()
        _refuse_other_optimizer(engine, optimizer, "load_checkpoint")
        resumed = Resumed(directory, step=step, verify=verify)
    return resumed.take_over(optimizer)


class Resumed:
    """A checkpoint that was found and checked, to resume from. It is locked against removal until it is taken over."""

    def __init__(self, directory: str | Path, *, step: int | None = None, verify: bool = True) -> None:
        """Find it; arguments as for ``load_checkpoint``. Raises: ConfigError."""
        holding = ExitStack()
        self._let_go = weakref.finalize(self, holding.close)
        self._path, self._manifest = holding.enter_context(found(Path(directory), step=step, check=verify))
        if not self.names:
            raise ConfigError(
                f"checkpoint '{self._path}': expected the whole state of a run, but this Trainer's has no states "
                "(save_only_model), or is of an earlier version; give it to resume_from_checkpoint, or begin anew from "
                "its weights: from_pretrained reads them as they are"
            )

    @property
    def names(self) -> set[str]:
        """Names of its parameters and buffers."""
        return {name.removeprefix("model.") for name in self._manifest.tensors if name.startswith("model.")}

    def take_over(self, optimizer: StreamedOptimizer) -> dict[str, Any]:
        """Write everything home. Returns what ``load_checkpoint`` returns.

        Raises:
            ConfigError: It is of another model, optimizer or precision. Nothing was changed.
        """
        try:
            return self._taken_over(optimizer)
        finally:  # at once: an error that is kept would keep this object
            self._let_go()

    def _taken_over(self, optimizer: StreamedOptimizer) -> dict[str, Any]:
        engine, path, manifest, call = optimizer.engine, self._path, self._manifest, "load_checkpoint"
        if engine.access.world is not None:
            agree(engine.access.world, {f"step of the checkpoint in '{path.parent}'": str(manifest.step)}, call=call)
        frozen = frozen_samples(engine)
        with agreed(engine.access.world, call):
            _refuse_others(optimizer, path, manifest, frozen)
            small = _read_state(path)
            converted, opened = _converted(engine, path, manifest), files_in(path)
        with _whole_or_refused(engine, path):
            for unit in engine.units:
                take_edits(unit, engine.access)
                for i, spec in enumerate(unit.spec.params[: unit.num_trainable]):
                    load_param(engine.access, unit, i, opened, manifest, converted)
                    unit.steps[i] = manifest.steps[spec.name]
            _load_buffers(engine, opened, manifest, converted)
            restore_odd_buffers(small["buffers"], engine)
            take_settings(optimizer, manifest.groups)
            restore_random_states_of(small["ranks"], engine, call)
        return {**small["extra"], "step": manifest.step}


def _read_state(path: Path) -> dict[str, Any]:
    try:
        if (path / TRAINER_STATE).is_file():
            small = read_small(path, RANDOM_STATE)
            small |= {"extra": {}, "random": small}
        else:
            small = read_small(path, _STATE)
        ranks = small.get("ranks", [small["random"]])
        return {"extra": dict(small["extra"]), "ranks": ranks, "buffers": small.get("buffers", [{}] * len(ranks))}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            f"checkpoint '{path}': expected its small state as it was saved, but got {error!r}"
        ) from error


class _HalfLoadedError(OutcoreError):
    """Part of the model comes from a checkpoint, and part does not."""


@contextmanager
def _whole_or_refused(engine: Engine, path: Path) -> Iterator[None]:
    """Refuse the model if a load is cut short: it is a mixture then, which must not be trained."""
    try:
        yield
    except BaseException as error:
        engine.run.refusal = _HalfLoadedError(
            f"expected a whole checkpoint, but loading '{path}' was cut short by {type(error).__name__}: {error}; "
            "load it again, or another one"
        )
        raise
    engine.run.refusal = None


def _refuse_other_optimizer(engine: Engine, optimizer: object, what: str) -> None:
    if not isinstance(optimizer, StreamedOptimizer) or optimizer.engine is not engine:
        raise ConfigError(
            f"{what}: expected the optimizer that outcore.prepare() returned with this model, but got "
            f"{'that of another model' if isinstance(optimizer, StreamedOptimizer) else type(optimizer).__name__}"
        )


def _refuse_unfit(engine: Engine, step: int, extra: Mapping[str, Any], keep: int | None) -> None:
    engine.device.check()
    for name, value in (("step", step), ("keep", 1 if keep is None else keep)):
        least = 1 if name == "keep" else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"save_checkpoint: expected {name} to be an integer from {least} on, but got {value!r}")
    if not isinstance(extra, Mapping) or "step" in extra:
        raise ConfigError(
            "save_checkpoint: expected extra to be a dict without 'step', which is an argument of its own, but got "
            f"{type(extra).__name__ if not isinstance(extra, Mapping) else 'one with it'}; leave it out"
        )
    gathered = next((u for u in engine.units if u.presence.now is Beneath.GATHERED), None)
    if gathered is not None:
        raise UnsupportedError(
            f"save_checkpoint: expected weights at rest, but unit '{gathered.label}' is inside outcore.gathered(); "
            "leave the block first"
        )


# Reading.


def _refuse_others(optimizer: StreamedOptimizer, path: Path, manifest: Manifest, frozen: Mapping[str, int]) -> None:
    """Raise if the checkpoint does not fit this run. Nothing was changed yet."""
    engine = optimizer.engine
    saved = (pair for unit in engine.units for pair in records(unit))
    wanted = dict(as_shown(saved))
    buffers = buffers_of(engine)
    wanted |= {f"model.{n}": (str(b.dtype).removeprefix("torch."), tuple(b.shape)) for n, b in buffers.items()}
    differing = differences(wanted, dict(as_shown(manifest.tensors.items())))
    if differing:
        raise ConfigError(
            f"checkpoint '{path}': expected one of this model, optimizer and precision, but {len(differing)} tensors "
            f"differ: '{differing[0][0]}' {differing[0][1]}; resume with the settings of the run that saved it"
        )
    trained = {s.name for u in engine.units for s in u.spec.params[: u.num_trainable]}
    if trained != manifest.steps.keys():
        raise ConfigError(f"checkpoint '{path}': expected step counts of all trained parameters, but some are missing")
    if [group.get("params") for group in manifest.groups] != group_names(optimizer):
        raise ConfigError(
            f"checkpoint '{path}': expected the same parameters in the same param groups, but {len(manifest.groups)} "
            f"groups were saved, and the optimizer has {len(optimizer.param_groups)} or others in them; build it as in "
            "the run that saved them"
        )
    refuse_other_classes(f"checkpoint '{path}'", optimizer, manifest.groups)
    if frozen.keys() != manifest.frozen.keys():
        name = min(frozen.keys() ^ manifest.frozen.keys())
        raise ConfigError(
            f"checkpoint '{path}': expected the same parameters to be frozen, but '{name}' is frozen only "
            f"{'here' if name in frozen else 'there'}; build the model as in the run that saved it"
        )
    for name, checksum in frozen.items():
        if checksum != manifest.frozen[name]:
            raise ConfigError(
                f"checkpoint '{path}': expected the frozen parameters that it was trained with, but '{name}' has other "
                "values; build the model from the weights with which the saved run began"
            )
    for name, said in wrappings(engine.model).items():
        if manifest.wrapped.get(name, said) != said:
            raise ConfigError(
                f"checkpoint '{path}': expected the frozen parameters that it was trained with, but '{name}' is {said} "
                f"here, and {manifest.wrapped[name]} there; quantise the model as in the run that saved it"
            )


def _converted(engine: Engine, path: Path, manifest: Manifest) -> LoadPlan | None:
    """What makes those tensors that the weights files hold in another form; None if there are none.

    Raises:
        ConfigError: The files do not hold them.
    """
    names = [name for name, record in manifest.tensors.items() if is_converted(record)]
    if not names:
        return None
    made = plan_loading(engine.model, path, is_exact=False)
    tensors = {name: unit.params[i] for name, (unit, i) in params_by_name(engine).items()} | buffers_of(engine)
    here = {f"model.{name}" for name, tensor in tensors.items() if made.holds(tensor)}
    for name in names:
        if name not in here:
            raise ConfigError(
                f"checkpoint '{path}': expected what becomes '{name}' in its weights files, but it is not there; take "
                "another one (outcore checkpoint ls)"
            )
    return made


def _load_buffers(engine: Engine, opened: OpenFile, manifest: Manifest, converted: LoadPlan | None) -> None:
    for name, buffer in buffers_of(engine).items():
        if converted is not None and is_converted(manifest.tensors[f"model.{name}"]):
            restore_buffer(buffer, converted.read(buffer))
        else:
            restore_buffer(buffer, read_saved(in_memory(opened), manifest, f"model.{name}"))
