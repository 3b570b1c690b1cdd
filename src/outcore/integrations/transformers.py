"""``OutcoreMixin``: runs any Trainer of Transformers or TRL out of core.

[Note: what is overridden] Only what a Trainer's own loop needs to run on a prepared model. The model is not moved to
the device, and is prepared where the Trainer would wrap it. Checkpoints would hold all weights or states in host memory
at once, so they are streamed instead. Everything else is the Trainer's own code, and its model and optimizer behave as
usual. ``tests/integrations/test_contract.py`` lists the library's names on which this relies.
"""

# ruff: noqa: E402

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outcore.core.extra import TRAINER, refuse_missing

refuse_missing(*TRAINER)  # before Python's ImportError, which does not name the extra

from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import has_length

from outcore.api import close, prepare_in_loop
from outcore.checkpoint.training_state import load_weights
from outcore.checkpoint.weights.conversions import is_adapter_model
from outcore.core.errors import ConfigError, OutcoreError
from outcore.engine.engine import attachment_of
from outcore.engine.optimizer import StreamedOptimizer
from outcore.integrations.optimizers import optimizer_or_other
from outcore.integrations.refusals import (
    refuse_accelerator,
    refuse_arguments,
    refuse_class,
    refuse_model,
    refuse_optimizer,
    refuse_pieces,
    refuse_unranked,
    refuse_unscaled,
    warn_of_logits,
    warn_of_no_masters,
)
from outcore.integrations.scaling import share_scale, step_with
from outcore.integrations.streamed_checkpoints import StreamedCheckpoints
from outcore.integrations.trainer_saves import TrainerSaves
from outcore.integrations.versions import scores_in_tiles
from outcore.preparation.forecast import Loop, NamedHardware, token_batch
from outcore.preparation.prepare_options import Options
from outcore.spec.budget import Budget
from outcore.spec.model import MasterFormat, Precision
from outcore.spec.plan import AwayTier, Plan

# Accelerate neither moves nor wraps an object with this attribute.
_ACCELERATE_PREPARED = "_is_accelerate_prepared"
_PREPARED: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Models that a Trainer prepared. A later Trainer may take them over."""


class OutcoreMixin(StreamedCheckpoints):
    """Trains with any Trainer within a memory budget: ``class MyTrainer(OutcoreMixin, SFTTrainer)``.

    Logs, weights and checkpoints equal those of the plain Trainer on one device (with the optimizer's fused
    implementation, Transformers' default). Under ``torchrun``, ranks train together without DDP. The weights equal
    those of one rank whose accumulation is multiplied by the number of ranks (``docs/explanation/ranks.md``).
    ``trainer.optimizer`` is the prepared optimizer, and ``outcore.close(trainer.model)`` ends the run.

    A reference model (DPO and others) may be prepared with ``outcore.prepare(ref_model, None, budget=...)`` before it
    is passed in.
    """

    def __init__(  # noqa: D417, PLR0913 (as prepare)
        self,
        *args: Any,
        budget: Budget | None = None,
        plan: Plan | None = None,
        precision: Precision | None = None,
        weights: str | Path | None = None,
        units: Sequence[str | type] | None = None,
        hardware: NamedHardware | None = None,
        compile: bool | Mapping[str, Any] = False,
        sample: Mapping[str, torch.Tensor] | None = None,
        activations: AwayTier | None = None,
        micro_batches_in_unit: int | None = None,
        master_format: MasterFormat = "fp32",
        **kwargs: Any,
    ) -> None:
        """Build the underlying Trainer. The model is prepared at its first use.

        Arguments that are not described here are those of ``outcore.prepare``.

        Args:
            *args: The Trainer's own arguments.
            budget: The most to take on each tier, as for ``outcore.prepare``.
            precision: None: that of the plain Trainer, so a bf16 model is updated in bf16. ``"bf16"`` adds fp32 master
                weights; ``"fp16"`` means fp16 weights with fp32 masters. ``bf16=True`` and ``fp16=True`` in the
                training arguments still mean autocast, the latter with Accelerate's gradient scaler.
            weights: A Hugging Face checkpoint directory to stream in; the model may then be on the meta device.
            hardware: As for ``outcore.prepare``. If the training arguments have a ``max_length``, the size of batches
                follows from it and the batch size. Then the plan is the one that is predicted to be fastest.
            sample: The largest micro-batch to expect, as for ``outcore.prepare``. None: token IDs, if the training
                arguments have a ``max_length``.
            master_format: For param groups without one. ``"compact"`` stores fp32 masters in half the bytes.
            **kwargs: The Trainer's own arguments.

        Raises:
            UnsupportedError: A setting cannot work with streamed weights.
        """
        mro = type(self).__mro__
        refuse_class(mro[mro.index(StreamedCheckpoints) + 1 :])
        self._outcore_options = Options(
            budget=Budget() if budget is None else budget,
            plan=plan,
            weights=weights,
            units=units,
            hardware=hardware,
            compile=compile,
            activations=activations,
            micro_batches_in_unit=micro_batches_in_unit,
        )
        self._outcore_sample = sample
        self._outcore_precision, self._outcore_master_format = precision, master_format
        self._outcore_checkpoint, self._outcore_reading = None, ExitStack()
        self._outcore_saves = TrainerSaves(self, self._outcore_saved)
        self._outcore_logged = (0, 0.0)
        self._outcore_early: tuple[type, list[dict[str, Any]]] | None = None
        """Class and param groups of the optimizer as an evaluation made it, before any training."""
        training = next((a for a in (*args, *kwargs.values()) if isinstance(a, TrainingArguments)), None)
        refuse_unscaled(precision, training)
        if training is not None:
            refuse_arguments(training)
            refuse_pieces(training, micro_batches_in_unit)
            if not _brings_optimizer(type(self), args, kwargs):
                refuse_optimizer(training)
            is_name = isinstance(kwargs.get("model", args[0] if args else None), str)
            if is_name and hasattr(training, "model_init_kwargs"):
                # TRL's default would load the whole model onto the accelerator.
                training.model_init_kwargs = {"device_map": None, **(training.model_init_kwargs or {})}
        _take_over(super().__init__, args, kwargs)
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse settings by which the plain Trainer would distribute, compile or convert."""
        refuse_arguments(self.args)
        super().create_accelerator_and_postprocess()
        refuse_accelerator(self.accelerator)
        refuse_unranked(self.args)
        if self.accelerator.scaler is not None:
            share_scale(self.accelerator.scaler, self.args.world_size)
        if self.model is not None:
            refuse_model(self.model, has_scaler=self.accelerator.scaler is not None)

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """Close the prepared model that the new one replaces."""
        if self.model is not None and attachment_of(self.model) is not None:
            close(self.model, keep_weights=False)
        return super().call_model_init(trial)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave the model where it is until it is prepared."""

    # Preparing.

    @classmethod
    def get_optimizer_cls_and_kwargs(cls, args: TrainingArguments, model: nn.Module | None = None) -> tuple[Any, Any]:
        """Return the named optimizer, with updates that can be streamed, unless a class behind this one has its own."""
        theirs = super().get_optimizer_cls_and_kwargs
        named = optimizer_or_other if theirs is Trainer.get_optimizer_cls_and_kwargs else theirs
        return named(args, model)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:  # noqa: FBT001, FBT002
        """Prepare the model. The Trainer calls this before its first step and its first evaluation."""
        if training:
            self._outcore_rehearse()
        self._outcore_prepare_once(training=training)
        if self.accelerator.distributed_type != "NO":  # all that Accelerate does, except DDP around the model
            self.accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)
            setattr(self.model, _ACCELERATE_PREPARED, True)
        return super()._wrap_model(model, training, dataloader)

    def compute_ref_log_probs(self, model: nn.Module, inputs: Any) -> Any:
        """Prepare the model. TRL may call this while it builds its Trainer."""
        self._outcore_prepare_once()
        return super().compute_ref_log_probs(model, inputs)

    def _outcore_prepare_once(self, *, training: bool = False) -> None:
        known = attachment_of(self.model)
        is_over = isinstance(self.optimizer, StreamedOptimizer) and self.optimizer.engine.is_closed
        if is_over and (training or known is None):
            raise ConfigError(
                f"{type(self).__name__}: expected a model that this Trainer prepared and that is still open, but "
                "outcore.close() ended its run, or another Trainer took the model over; train with that one, or build "
                "a new Trainer over the model, which goes on from its weights"
            )
        _switch_off_checkpointing(self.model)
        if attachment_of(self.model) is None or not isinstance(self.optimizer, StreamedOptimizer | None):
            self._outcore_early = None
            if self.train_dataset is not None:
                is_early = self.optimizer is None and not training
                made = self.create_optimizer()
                self._outcore_early = (type(made), [dict(group) for group in made.param_groups]) if is_early else None
            self._outcore_prepare()
        elif training and self._outcore_early is not None:
            self._outcore_renew(*self._outcore_early)
            self._outcore_early = None
        if self.optimizer is not None:
            setattr(self.optimizer, _ACCELERATE_PREPARED, True)

    def _outcore_prepare(self) -> None:
        scaler = self.accelerator.scaler
        refuse_model(self.model, has_scaler=scaler is not None)
        options = self._outcore_options
        checkpoint, self._outcore_checkpoint = self._outcore_checkpoint, None
        adapters = is_adapter_model(self.model)
        has_promise = isinstance(options.plan, Plan) and options.plan.accumulation_steps is not None
        precision = self._outcore_precision or _plain_precision(self.model)
        if self.optimizer is not None:
            warn_of_no_masters(precision, self._outcore_precision)
        warn_of_logits(self, options.budget)
        loop = Loop(
            self.args.gradient_accumulation_steps,
            clips=self.args.max_grad_norm > 0,
            is_promised=_has_a_known_loop(self),
            makes_logits=self._outcore_sample is not None or not scores_in_tiles(),
        )
        options = dataclasses.replace(
            options,
            weights=options.weights if checkpoint is None or adapters else checkpoint,
            accumulation_steps=self.args.gradient_accumulation_steps if has_promise else None,  # arguments must keep it
            precision=precision,
            device=self.args.device,
            sample=self._outcore_largest_batch(),
            loop=loop,
        )
        for group in [] if self.optimizer is None else self.optimizer.param_groups:
            group.setdefault("master_format", self._outcore_master_format)
        with self.accelerator.autocast():  # activations are measured under autocast
            prepared = prepare_in_loop(self.model, self.optimizer, options)
        self.optimizer = prepared.optimizer
        if scaler is not None and self.optimizer is not None:
            step_with(scaler, self.optimizer)
        _PREPARED.add(self.model)
        self._outcore_logged = (0, 0.0)
        if checkpoint is not None and adapters:
            load_weights(self.model, checkpoint)

    def _outcore_renew(self, kind: type[Any], before: Sequence[Mapping[str, Any]]) -> None:
        """Adopt what changed in the training arguments since an evaluation made the optimizer.

        Args:
            kind: Its class.
            before: Its param groups as they were made.

        Raises:
            ConfigError: The arguments ask for another optimizer.
        """
        prepared, self.optimizer = self.optimizer, None
        try:
            now = self.create_optimizer()
        finally:
            self.optimizer = prepared
        if type(now) is not kind or len(now.param_groups) != len(before):
            raise ConfigError(
                f"{type(self).__name__}: expected the {kind.__name__} that the evaluation before has prepared, but the "
                f"training arguments ask for another optimizer now ({type(now).__name__}); build a new Trainer"
            )
        for group, old, new in zip(prepared.param_groups, before, now.param_groups, strict=True):
            group |= {name: new[name] for name in old if name != "params" and old[name] != new[name]}

    def _outcore_largest_batch(self) -> Mapping[str, torch.Tensor] | None:
        """Return the largest micro-batch that the arguments allow. A preference pair has a row for each answer."""
        length = getattr(self.args, "max_length", None)
        if self._outcore_sample is not None or length is None:
            return self._outcore_sample
        pairs = any(kind.__name__ == "DPOConfig" for kind in type(self.args).__mro__)
        return token_batch(self.args.per_device_train_batch_size * (1 + pairs), length)

    # Logs.

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add to the logs the bytes moved since the last log, and the seconds that compute waited for lanes."""
        if "loss" in logs and isinstance(self.optimizer, StreamedOptimizer):
            before_bytes, before_s = self._outcore_logged
            moved_bytes = sum(self.optimizer.traffic().values())
            exposed_s = sum(self.optimizer.exposed_s().values())
            logs |= {"moved_bytes": moved_bytes - before_bytes, "exposed_s": exposed_s - before_s}
            self._outcore_logged = (moved_bytes, exposed_s)
        super().log(logs, start_time)


def _brings_optimizer(trainer: type[Trainer], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the optimizer comes from elsewhere than the training arguments."""
    given = (*args, *kwargs.values())
    return (
        trainer.create_optimizer is not Trainer.create_optimizer
        or any("get_optimizer_cls_and_kwargs" in vars(kind) for kind in {*trainer.__mro__} - {OutcoreMixin, Trainer})
        or kwargs.get("optimizer_cls_and_kwargs") is not None
        or any(isinstance(value, tuple) and any(part is not None for part in value) for value in given)
    )


def _has_a_known_loop(trainer: Trainer) -> bool:
    """Whether a step has as many backward passes as the arguments say.

    Not if a user's class overrides the loop. Nor if an epoch may end between two micro-batches of a step, as the next
    epoch then adds to their gradients: the Trainer does not know where data without a length ends, and a user's
    callback may stop an epoch there.
    """
    names = ("training_step", "_inner_training_loop", "_run_epoch", "get_batch_samples", "get_train_dataloader")
    if not _is_theirs(type(trainer), names) or not has_length(trainer.train_dataset):
        return False
    return trainer.args.gradient_accumulation_steps == 1 or all(
        _is_theirs(type(callback), ("on_step_begin", "on_substep_end"))
        for callback in trainer.callback_handler.callbacks
    )


def _is_theirs(kind: type, names: Sequence[str]) -> bool:
    """Whether no user's class has one of these methods."""
    makers = (each.__module__ for each in kind.__mro__ if any(name in vars(each) for name in names))
    return all(maker.partition(".")[0] in ("transformers", "trl", "outcore") for maker in makers)


def _take_over(build: Callable[..., None], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Close a model that an earlier Trainer prepared, so that a new one trains it on from the same weights."""
    try:
        given = inspect.signature(build).bind_partial(*args, **kwargs).arguments
    except TypeError:  # the Trainer raises a better error
        return
    options = {**given, **given.get("kwargs", {})}
    model = options.get("model")
    if not isinstance(model, nn.Module) or model not in _PREPARED or options.get("train_dataset") is None:
        return
    if attachment_of(model) is None:
        return
    try:
        close(model)
    except OutcoreError as error:
        raise ConfigError(
            f"expected to take over the {type(model).__name__} that an earlier Trainer prepared, but its weights "
            f"would be lost: {error.__cause__}. Save it with outcore.save_pretrained (or go on from its last "
            "checkpoint), end its run with outcore.close(model, keep_weights=False), and give this Trainer what "
            "from_pretrained loads"
        ) from error


def _plain_precision(model: nn.Module) -> Precision | None:
    """Return the precision that updates every parameter in its own dtype, as a plain loop does."""
    return "pure_bf16" if any(p.requires_grad and p.dtype == torch.bfloat16 for p in model.parameters()) else None


def _switch_off_checkpointing(model: nn.Module) -> None:
    """Switch off activation checkpointing, as units are recomputed anyway. No warning: TRL turns it on by itself."""
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False) is True:
            module.gradient_checkpointing = False  # type: ignore[assignment]
