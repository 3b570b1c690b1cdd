"""The public API: ``prepare`` and the few functions around a prepared model."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from outcore.checkpoint.save_and_load import Resumed
from outcore.checkpoint.weights.export import save_model, stream_tensors
from outcore.checkpoint.weights.model_values import FirstValues, Origin, give_back, origins_of, take_weights
from outcore.core.errors import ConfigError, OutcoreError
from outcore.device.faults import NO_FAULTS, Faults
from outcore.device.opening import open_device
from outcore.device.race import RaceChecker
from outcore.device.threads import close_at_exit
from outcore.engine.checkpoint_saves import last_save
from outcore.engine.engine import Engine, Promises, attachment_of, engine_of
from outcore.engine.gather import gathered_units
from outcore.engine.module.compiling import Compiling
from outcore.engine.opened import switch_off_checkpointing
from outcore.engine.optimizer import StreamedOptimizer
from outcore.engine.unit.unit import Unit
from outcore.optim.joined import as_one
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.forecast import NamedHardware
from outcore.preparation.plan_choice import predicted
from outcore.preparation.prepare_options import Options, Reduction, cut_model, note_given, thaw, trained_in
from outcore.preparation.with_ranks import (
    chosen,
    chosen_alone,
    groups_said,
    joined,
    meet,
    of_first_rank,
    of_this_rank,
)
from outcore.ranks.world import World
from outcore.spec.budget import Budget
from outcore.spec.model import ModelSpec, Precision
from outcore.spec.plan import AwayTier, Plan

_Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None


class Prepared(NamedTuple):
    """A prepared model and its optimizer. Used as a context manager, it closes the model at the end of the block."""

    model: nn.Module
    optimizer: StreamedOptimizer | None

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # An interrupt should end the run soon: nothing is copied. An error leaves the weights of the last whole step.
        attachment = attachment_of(self.model)
        is_cut = attachment is not None and attachment.engine.has_cut_weights  # the other ranks may be elsewhere
        with last_save(attachment, error):
            try:
                close(self.model, keep_weights=kind is None or (issubclass(kind, Exception) and not is_cut))
            except OutcoreError as refusal:
                gone = f"the weights of this {type(self.model).__name__} are gone with the end of its block"
                lost = f"{gone}: {refusal.__cause__}. Save them inside the block, or go on from an earlier save"
                if error is not None:
                    error.add_note(lost)
                else:
                    warnings.warn(lost, stacklevel=2)
            finally:
                close(self.model, keep_weights=False)


def prepare(  # noqa: PLR0913 (one call is the whole configuration)
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    sample: Mapping[str, torch.Tensor] | None = None,
    budget: Budget | None = None,
    precision: Precision | None = None,
    accumulation_steps: int | None = None,
    clipping: bool = True,
    weights: str | Path | None = None,
    units: Sequence[str | type] | None = None,
    plan: Plan | None = None,
    device: torch.device | str | None = None,
    activations: AwayTier | None = None,
    hardware: NamedHardware | None = None,
    compile: bool | Mapping[str, Any] = False,
    micro_batches_in_unit: int | None = None,
    checkpoint: str | Path | None = None,
    reduction: Reduction = "exact",
) -> Prepared:
    """Make a model train within a memory budget. The training loop does not change.

    Args:
        model: Any module. It stays the same object; its parameters keep their identity.
        optimizer: One of ``torch.optim`` or an ``outcore.optim.Rule`` over the model's parameters, or a list of several
            over different ones. Param groups stay the same list. None freezes all, to evaluate, generate or compare.
        sample: The largest micro-batch to expect, as keyword arguments of the model's forward. Its shapes serve to plan
            activations and workspace, and to find the fastest plan.
        budget: The most to take on each tier. Default: what is free, without disk.
        precision: ``fp32``, ``fp64``, ``pure_bf16``; ``bf16`` and ``fp16`` have fp32 masters. None: the model's own.
        accumulation_steps: A number is a promise: more backward passes per step raise. None: any number.
        clipping: False is a promise to ask for no gradient norm.
        weights: A Hugging Face checkpoint directory. Its values replace those of the model, tensor by tensor.
        units: Classes or names of modules that move as a whole, instead of the repeated blocks that are found.
        plan: A plan to follow instead of searching for one.
        device: Default: the accelerator if there is one, else the CPU.
        activations: ``host`` or ``disk``: the tier where activations rest until backward. Those that do not fit there,
            for ``sample``, are recomputed. None: they stay, are recomputed or are offloaded, whichever is fastest.
        hardware: The machine to predict times for: a file of ``outcore probe``, or names like ``"rtx-4090+pcie3"``.
            None: ``OUTCORE_HARDWARE``, else this machine, measured once in a few seconds. ``"none"``: no times.
        compile: Compile blocks; results equal a plain loop with compiled blocks. A dict: options of ``torch.compile``.
        micro_batches_in_unit: Number of pieces in which each unit runs a batch, with one fetch of its weights. Equal to
            accumulation over the pieces, bit for bit if no random numbers are drawn.
        checkpoint: A checkpoint to resume from, as by ``load_checkpoint``; ``optimizer.resumed`` has its return value.
        reduction: For several ranks. ``exact``: exchange the gradients of each micro-batch. ``fast``: exchange their
            sums once per step, equal up to rounding; sums stay on the device, and ``accumulation_steps`` is needed.

    Returns: The model and a ``torch.optim.Optimizer`` (or None). The pair is also a context manager.

    Raises:
        ConfigError, PlanInfeasibleError: An unusable argument; a budget that is too small. Nothing has been changed.
        UnsupportedError: Something that cannot work with streamed weights.

    Memory: everything except activations is allocated here.
    """
    options = Options(
        sample=sample,
        budget=Budget() if budget is None else budget,
        precision=precision,
        accumulation_steps=accumulation_steps,
        clipping=clipping,
        weights=weights,
        units=units,
        plan=plan,
        device=device,
        activations=activations,
        hardware=hardware,
        compile=compile,
        micro_batches_in_unit=micro_batches_in_unit,
        checkpoint=checkpoint,
        reduction=reduction,
    )
    return prepare_in_loop(model, optimizer, options)


def prepare_in_loop(
    model: nn.Module,
    optimizer: _Optimizers,
    options: Options,
    faults: Faults | None = None,
    race_checker: RaceChecker | None = None,
) -> Prepared:
    """``prepare`` for one of our own loops, about which more is known. Not part of the contract.

    Args:
        model: As for ``prepare``.
        optimizer: As for ``prepare``.
        options: The other arguments of ``prepare``, and what is known of the loop.
        faults: Faults to inject, in tests.
        race_checker: Looks for races, in tests.
    """
    trained = trained_in(model)
    try:
        with joined(options) as (world, own):
            prepared = _prepare_rank(world, model, optimizer, own, faults or NO_FAULTS, race_checker)
    except BaseException:
        thaw(trained)
        raise
    switch_off_checkpointing(model)  # last: its warning may be an error, and then close(model) must work
    return prepared


def plan_for(model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options) -> tuple[ModelSpec, Plan]:
    """Return the plan that ``prepare`` would follow with the same arguments. Takes no memory and changes nothing.

    Args:
        model: The model; any part of it may be on the meta device.
        optimizer: An optimizer over its parameters; None: everything is frozen.
        options: The other arguments of ``prepare``.

    Returns:
        The model in units, and where each of them lives.

    Raises:
        ConfigError: An argument cannot be used.
        PlanInfeasibleError: The budget does not suffice.
    """
    return plan_in_time(model, optimizer, options, is_timed=False)[:2]


def plan_in_time(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options, *, is_timed: bool = True
) -> tuple[ModelSpec, Plan, Simulation | None]:
    """``plan_for``, together with predicted steps of the plan if sample and machine are known."""
    given = of_this_rank(options)
    compiling = Compiling(given.compile)
    trained = trained_in(model)
    try:
        _, cut = cut_model(model, as_one(optimizer), given)
        with open_device(given.device, Faults(), None) as device:
            compiling.check(cut, device.torch_device)
            made = chosen_alone(cut, given, device)
            return made.question.model, made.plan, predicted(made, cut, given, device) if is_timed else None
    finally:
        thaw(trained)


def close(model: nn.Module, *, keep_weights: bool = True) -> None:
    """End the run of a prepared model: let running work finish, then free memory, files and threads. Idempotent.

    Afterwards the model is an ordinary one, and can be prepared again with a new optimizer. Its weights are those that
    ``state_dict`` returns. Gradients, fp32 masters and optimizer states end with the run. The end of a ``with`` block
    always closes, with a warning if the weights cannot be kept. No weights are kept after a Ctrl-C in the block, or
    when the interpreter exits.

    Args:
        model: A prepared model.
        keep_weights: Put the weights back where they were before ``prepare``. False frees their memory too, which is
            right if they were saved, or do not fit in host memory.

    Raises:
        ConfigError: The model is not prepared.
        OutcoreError: The weights cannot be kept: they do not fit, or a step was cut short. The model stays prepared.
        DiskError: All is closed, but writing the last checkpoint failed, and no call has reported it yet.

    Memory: host, all weights in addition to what the run holds until it ends; none with ``keep_weights=False``.
    """
    attachment = attachment_of(model)
    if attachment is None:
        if model in _CLOSED:
            return
        raise ConfigError(
            f"close: expected a model that outcore.prepare() returned, but got a {type(model).__name__} that is not "
            "prepared"
        )
    engine = attachment.engine
    values = _weights_to_keep(engine) if keep_weights else {}
    _CLOSED.add(model)
    try:
        engine.close()
    finally:
        if keep_weights:
            _ENGINES.discard(engine)
            give_back(model, values, _ORIGINS[engine])


def _weights_to_keep(engine: Engine) -> dict[int, torch.Tensor]:
    try:
        return take_weights(engine)
    except OutcoreError as error:
        raise OutcoreError(
            f"close: expected weights that can go back into ordinary parameters, but {error}. The model is prepared "
            "still: save it if it is whole (outcore.save_pretrained, or named_tensors one by one), then end its run "
            "without them: outcore.close(model, keep_weights=False)"
        ) from error


def gathered(
    target: nn.Module | torch.nn.Parameter | Iterable[torch.nn.Parameter], *, write: bool = False
) -> AbstractContextManager[None]:
    """Gather whole parameters on the device for the length of a ``with`` block, to read or change them.

    Args:
        target: A prepared model, a module inside one, or parameters. The units they belong to are gathered whole.
        write: Write changes back home at the end; else changes are lost. Master weights follow before the next step,
            save or read of a master, where the weight then differs from its rounded master. So changes that cancel
            until then, as in sharpness-aware training, round no master.

    Raises:
        ConfigError: The target is not part of a prepared model.

    Memory: device, the gathered weights; host, of changed weights with compact masters, a copy; both beside the budget.
    """
    if isinstance(target, nn.Module):
        params = list(target.parameters())
    else:
        params = [target] if isinstance(target, torch.nn.Parameter) else list(target)
    wanted: dict[Engine, dict[str, Unit]] = {}
    for param in params:
        engine = next((e for e in _ENGINES if id(param) in e.places), None)
        if engine is None:
            raise ConfigError(
                "gathered: expected a model, module or parameters that outcore.prepare() knows, but one of shape "
                f"{tuple(param.shape)} belongs to no prepared model"
            )
        unit, _ = engine.places[id(param)]
        wanted.setdefault(engine, {})[unit.name] = unit
    return _all_gathered(wanted, write=write)


@contextmanager
def _all_gathered(wanted: Mapping[Engine, Mapping[str, Unit]], *, write: bool) -> Iterator[None]:
    with ExitStack() as stack:
        for engine, units in wanted.items():
            stack.enter_context(gathered_units(engine.access, engine.weights, list(units.values()), write=write))
        yield


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Stream all parameters and persistent buffers, by name, as full tensors in host memory.

    Tied parameters come once, under their first name. Memory: host, one tensor at a time.

    Raises:
        ConfigError: The model is not prepared.
    """
    return stream_tensors(engine_of(model, "named_tensors"))


def save_pretrained(model: nn.Module, directory: str | Path) -> None:
    """Save a prepared model so that ``from_pretrained`` loads it. Of a model with adapters, only these are saved.

    Any other module is saved as ``model.safetensors`` under the names of its ``state_dict``, tied parameters once. With
    several ranks, the first one writes; if weights are cut over ranks, all must call it.

    Args:
        model: A prepared model. Updates that are under way are waited for.
        directory: Folder to write, made if missing. An older save there is replaced file by file.

    Raises:
        ConfigError: The model is not prepared, or the directory is a file.
        UnsupportedError: A module has its own way of saving.
        DiskError: The directory cannot be written.
        OutcoreError: The weights are there, but not all of the small files beside them. The error names these.

    Memory: host, one tensor at a time.
    """
    save_model(engine_of(model, "save_pretrained"), directory)


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
_CLOSED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_ORIGINS: weakref.WeakKeyDictionary[Engine, dict[str, Origin]] = weakref.WeakKeyDictionary()


def _prepare_rank(
    world: World | None,
    model: nn.Module,
    optimizers: _Optimizers,
    options: Options,
    faults: Faults,
    race_checker: RaceChecker | None,
) -> Prepared:
    optimizer: torch.optim.Optimizer | None = as_one(optimizers)
    origins = origins_of(model, is_to_be_frozen=optimizer is None) if isinstance(model, nn.Module) else {}
    compiling = Compiling(options.compile)
    rule, cut = cut_model(model, optimizer, options)
    device = open_device(options.device, faults, race_checker)
    try:
        compiling.check(cut, device.torch_device)
        resumed = None if options.checkpoint is None else Resumed(options.checkpoint)
        names = () if resumed is None else resumed.names
        first_values = FirstValues(model, options.weights, later=names, quantized=cut.quantized)
        cut, plan = chosen(cut, options, device, world, groups_said(model, optimizer, rule))
    except BaseException:
        device.close()
        raise
    engine = Engine(
        cut,
        plan,
        device,
        [Path(p) for p in options.budget.paths],
        rule,
        Promises(accumulation_steps=plan.accumulation_steps, clipping=options.clipping),
        world,
    )
    try:
        for param, values in optimizer.state.items() if optimizer is not None else ():
            engine.values.check(param, values)
        first_values.take_over(engine.device.torch_device)
        for weight in cut.quantized:
            weight.take_over(engine.device.torch_device)
        engine.attach(of_first_rank(world, model, first_values.of), compiling)
        streamed = None if optimizer is None else StreamedOptimizer(engine, optimizer)
        if resumed is not None and streamed is not None:
            streamed.resumed = resumed.take_over(streamed)
        meet(world)
    except BaseException as error:
        error.add_note(f"outcore.prepare() did not finish; {engine.attached.what_is_left()}")
        engine.close()
        raise
    _ENGINES.add(engine)
    _ORIGINS[engine] = origins
    if optimizer is not None:
        note_given(optimizer)
    _CLOSED.discard(model)
    close_at_exit(engine)
    return Prepared(model, streamed)
