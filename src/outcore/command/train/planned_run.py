"""A run that is ready to begin: its model is found, its plan fits the budget, and its data is of one kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final

import torch
from peft import LoraConfig
from torch import nn
from transformers import PreTrainedTokenizerBase, TrainerCallback
from transformers.trainer_callback import PrinterCallback

from outcore.api import close, plan_for, plan_in_time, prepare
from outcore.command.train.data.load import Data, load_data
from outcore.command.train.loop import trainer as trainers
from outcore.command.train.model.adapters import with_adapters
from outcore.command.train.model.reference import PlacedModel, plan_both
from outcore.command.train.model.source import ModelSource, build_model, find_model, load_tokenizer, refuse_long
from outcore.command.train.output.prediction import PredictedStep, PredictionComparison
from outcore.command.train.settings.outcore_settings import MOST_TOKENS
from outcore.command.train.settings.run_settings import RunSettings
from outcore.core.errors import ConfigError, DiskError
from outcore.engine.module_guard import is_guarded
from outcore.integrations.optimizers import optimizer_for
from outcore.integrations.refusals import refuse_pieces
from outcore.integrations.versions import scores_in_tiles
from outcore.memory.disk import DiskStore
from outcore.preparation.forecast import Loop, token_batch
from outcore.preparation.prepare_options import Options
from outcore.preparation.with_ranks import free_budget
from outcore.spec.budget import Budget
from outcore.spec.layout import CODES, lay_out_states
from outcore.spec.plan import TIERS, Plan, Tier
from outcore.spec.plan_table import plan_table


@dataclass(frozen=True, kw_only=True)
class RunData:
    """The data that a run trains and evaluates on."""

    training: Data
    evaluation: Data | None


@final
@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """Model, tokenizer and plan of a run. Holds no weights."""

    settings: RunSettings
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    model: PlacedModel
    reference: PlacedModel | None
    """A frozen copy of the model, if the method wants one."""
    args: Any
    """The Trainer's arguments. No others may be made during a run: making them resets what Accelerate shares."""

    @classmethod
    def of(cls, settings: RunSettings) -> Self:
        """Find the model and plan for it.

        Raises:
            ConfigError: The model, a disk or a setting cannot be used.
            PlanInfeasibleError: The budget does not suffice.
        """
        _refuse_unusable(settings.budget.paths)
        source, tokenizer = _found(settings)
        args = settings.method.arguments(str(settings.out), settings.training)
        if not (settings.method.has_reference and settings.lora is None):
            model, reference = _plan_model(settings, args, source, settings.budget), None
        else:
            _refuse_random_reference(source)
            model, reference = plan_both(
                free_budget(settings.budget, device=args.device),
                lambda budget: _plan_model(settings, args, source, budget),
                lambda budget: _plan_reference(settings, args, source, budget),
            )
        return cls(settings=settings, source=source, tokenizer=tokenizer, model=model, reference=reference, args=args)

    @property
    def plans(self) -> tuple[PlacedModel, PlacedModel | None]:
        """The plans of the model and its reference, for the other ranks. They need no steps in time."""
        return self.model._replace(predicted=None), self.reference and self.reference._replace(predicted=None)

    @classmethod
    def told(cls, settings: RunSettings, plans: tuple[PlacedModel, PlacedModel | None]) -> Self:
        """Make another rank's job. Args: plans: Of rank 0. Raises: ConfigError: The model cannot be found here."""
        (source, tokenizer), (model, reference) = _found(settings), plans
        args = settings.method.arguments(str(settings.out), settings.training)
        return cls(settings=settings, source=source, tokenizer=tokenizer, model=model, reference=reference, args=args)

    def load_data(self, cache: Path) -> RunData:
        """Load and check what the run trains on, and warn of what is left out.

        Raises:
            ConfigError: The data cannot be used, or not with this tokenizer; or training and evaluation data are of
                different kinds.
        """
        settings, seed = self.settings, self.args.seed if self.args.data_seed is None else self.args.data_seed
        load = partial(load_data, cache=cache, method=settings.method, seed=seed)
        training, evaluation = load(settings.data, flag="--data"), None
        if settings.eval_data is not None:
            evaluation = load(settings.eval_data, flag="--eval-data")
            if evaluation.kind != training.kind:
                raise ConfigError(
                    f"--eval-data '{', '.join(settings.eval_data)}': expected rows of {training.kind}, as in --data, "
                    f"but got {evaluation.kind}; name data of that kind"
                )
        for notice in (*training.notices, *(() if evaluation is None else evaluation.notices)):
            warnings.warn(notice, stacklevel=1)
        if training.is_conversational and self.tokenizer.chat_template is None:
            raise ConfigError(
                f"--data '{settings.data_name}': expected a tokenizer with a chat template, since its rows are "
                f"messages, but that of '{settings.model}' has none; give one with --set "
                "chat_template_path=FILE.jinja, for instance that of a chat version of this model, or train on text"
            )
        if settings.training.get("completion_only_loss") and training.kind != "prompt_completion":
            raise ConfigError(
                f"completion_only_loss: expected rows of prompt and completion, but those of --data "
                f"'{settings.data_name}' are {training.kind}; leave it out"
            )
        return RunData(training=training, evaluation=evaluation)

    @property
    def taken(self) -> Mapping[Tier, int]:
        """Bytes on each tier, with those of the reference; on host and disk, those of all ranks on this node."""
        planned = [self.model, *([] if self.reference is None else [self.reference])]
        return {tier: sum(p.taken[tier] for p in planned) for tier in TIERS}

    def comparison(self) -> PredictionComparison:
        """Return what compares steps with the times that are predicted for them."""
        steps = self.model.predicted
        return PredictionComparison(None if steps is None else PredictedStep.of(steps))

    def plan_table(self) -> str:
        """Return a table of the bytes that each owner has on each tier."""
        table, ranks = plan_table(self.model.spec, self.model.plan), self.model.num_ranks
        if ranks > 1:
            table = f"of each of {ranks} ranks:\n{table}"
        if self.reference is None:
            return table
        return f"{table}\n\nits frozen reference:\n{plan_table(self.reference.spec, self.reference.plan)}"

    def trainer(self, data: RunData, followers: Sequence[TrainerCallback]) -> Any:
        """Tokenize the data and put everything together. The model's weights are read when training begins.

        Args:
            data: The data to train and evaluate on.
            followers: Callbacks of the Trainer, called in this order.

        Raises:
            ConfigError: The data cannot be used with these settings.

        Memory: what the reference takes, until the trainer ends.
        """
        settings = self.settings
        training = settings.method.fitted(settings.training, data.training.kind)
        reference = {} if self.reference is None else {"ref_model": self._reference_model(self.reference)}
        try:
            trainer = getattr(trainers, settings.method.trainer)(
                model=build_model(self.source, settings.precision),
                args=settings.method.arguments(str(settings.out), training),
                train_dataset=data.training.rows,
                eval_dataset=None if data.evaluation is None else data.evaluation.rows,
                processing_class=self.tokenizer,
                peft_config=None if settings.lora is None else LoraConfig(**settings.lora),
                callbacks=[*followers],
                plan=self.model.plan,
                budget=self._planned_budget(self.model, self.model.plan.kept_bytes),
                precision=settings.precision,
                master_format=settings.master_format,
                weights=self.source.weights,
                compile=settings.compile,
                micro_batches_in_unit=settings.unit_micro_batches,
                on_nonfinite=settings.on_nonfinite,
                **reference,
            )
        except BaseException:
            for model in reference.values():
                if is_guarded(model):
                    close(model, keep_weights=False)
            raise
        trainer.remove_callback(PrinterCallback)
        return trainer

    def _reference_model(self, planned: PlacedModel) -> nn.Module:
        # As from_pretrained leaves a model, and as TRL's own reference is: without dropout.
        model = build_model(self.source, self.settings.precision).eval()
        if self.settings.dry_run:
            model.to = lambda *_, **__: model  # it stays on the meta device, unread
            return model
        return prepare(
            model,
            None,
            plan=planned.plan,
            budget=self._planned_budget(planned),
            precision=self.settings.precision,
            weights=self.source.weights,
            device=self.args.device,
            compile=self.settings.compile,
        ).model

    def written_bytes(self) -> int:
        """Return the least that the run writes: the model or its adapters, and a checkpoint if it saves any."""
        settings, nbytes = self.settings, self._model_bytes()
        if settings.training["save_strategy"] == "no" and settings.save_every_minutes is None:
            return nbytes
        names, units = ("master", CODES, *self.model.spec.state_names), self.model.spec.units
        states = [state for unit in units for state in lay_out_states(unit, names, is_compact=True).values()]
        of_rank = sum(part.nbytes for state in states for part in state.parts)
        return 2 * nbytes + self.model.num_ranks * of_rank

    def _model_bytes(self) -> int:
        all_params = [p for unit in self.model.spec.units for p in unit.params]
        trained = [p for p in all_params if p.requires_grad]
        return sum(p.weight_bytes for p in (all_params if self.settings.lora is None else trained))

    def _planned_budget(self, planned: PlacedModel, kept_bytes: int = 0) -> Budget:
        """Return what the plan takes; less may be free now than when it was made. Args: kept_bytes: Of activations."""
        taken, disks = planned.taken, self.settings.budget.disk
        device = taken["device"] + kept_bytes
        if disks is None:
            return Budget(device=device, host=taken["host"])
        return Budget(device=device, host=taken["host"], disk=disks, disk_bytes=taken["disk"])


def _plan_model(settings: RunSettings, args: Any, source: ModelSource, budget: Budget) -> PlacedModel:
    """Plan what is trained."""
    model = build_model(source, settings.precision)
    refuse_long(model, args.max_length)
    if settings.lora is not None:
        model = with_adapters(model, settings.lora)
    kind, settings_of_kind = optimizer_for(args, model)
    optimizer = kind([p for p in model.parameters() if p.requires_grad], **settings_of_kind)
    for group in optimizer.param_groups:
        group["master_format"] = settings.master_format
    given = None if settings.plan is None else Plan.load(settings.plan)
    promises = given is not None and given.accumulation_steps is not None
    micro_batches = args.gradient_accumulation_steps
    _refuse_activations(settings, args)
    refuse_pieces(args, settings.unit_micro_batches)
    autocast = torch.float16 if args.fp16 else torch.bfloat16
    with torch.autocast(args.device.type, autocast, enabled=args.bf16 or args.fp16):  # as the Trainer's own forward
        options = Options(
            budget=budget,
            precision=settings.precision,
            plan=given,
            accumulation_steps=micro_batches if promises else None,
            device=args.device,
            activations=settings.activations,
            hardware=settings.hardware,
            sample=None if args.max_length is None else _largest_batch(settings, args),
            # The Trainer always asks for a norm, but only a norm that clips rules out updates inside backward.
            loop=Loop(
                micro_batches, clips=args.max_grad_norm > 0, is_promised=True, makes_logits=not scores_in_tiles()
            ),
            compile=settings.compile,
            micro_batches_in_unit=settings.unit_micro_batches,
        )
        found = plan_in_time(model, optimizer, options)
    return PlacedModel(*found)


def _refuse_activations(settings: RunSettings, args: Any) -> None:
    if settings.activations is None:
        return
    if settings.plan is not None:
        raise ConfigError(
            "--activations: expected it without --plan, which says where activations rest, but got both; leave one out"
        )
    if args.max_length is None:
        raise ConfigError(
            "--activations: expected --seq-len N, which tells how much memory activations take, but rows may have any "
            "length; set it"
        )


def _largest_batch(settings: RunSettings, args: Any) -> Mapping[str, Any]:
    """Return the largest batch that may come. Raises: ConfigError: It is larger than any real one."""
    rows = args.per_device_train_batch_size * settings.method.rows_per_example
    if rows * args.max_length > MOST_TOKENS:
        raise ConfigError(
            f"--batch-size, --seq-len: expected at most {MOST_TOKENS:,} tokens in a micro-batch, but got "
            f"{rows * args.max_length:,}; lower one of them"
        )
    return {**token_batch(rows, args.max_length), "use_cache": False}


def _plan_reference(settings: RunSettings, args: Any, source: ModelSource, budget: Budget) -> PlacedModel:
    model = build_model(source, settings.precision)
    return PlacedModel(*plan_for(model, None, Options(budget=budget, precision=settings.precision, device=args.device)))


def _found(settings: RunSettings) -> tuple[ModelSource, PreTrainedTokenizerBase]:
    source = find_model(settings.model, attention=settings.attention)
    source = source.quantised(settings.quantization, has_adapters=settings.lora is not None)
    _refuse_random_base(source)
    tokenizer = load_tokenizer(source, eos_token=settings.eos_token, chat_template=settings.chat_template_path)
    return source, tokenizer


def _refuse_unusable(disks: Iterable[str]) -> None:
    """Raise if a folder cannot serve the disk tier, whether the plan needs it or not."""
    for disk in map(Path, disks):
        if not disk.is_dir():
            found = "is a file" if disk.exists() else "is not"
            raise ConfigError(
                f"--disk: expected a folder that is there, but '{disk}' {found}; make it, or name another"
            )
        try:
            DiskStore.open([disk], nbytes=1).close()
        except DiskError as error:
            raise ConfigError(f"--disk: {error}") from error


def _refuse_random_base(source: ModelSource) -> None:
    if source.quantization is not None and source.weights is None:
        raise ConfigError(
            f"--model '{source.name}': expected a model with weights to quantise, but it is a configuration alone; "
            "name a model's directory or ID, or leave --load-in-4bit and --load-in-8bit out"
        )


def _refuse_random_reference(source: ModelSource) -> None:
    if source.weights is None:
        raise ConfigError(
            f"--model '{source.name}': expected a model with weights, of which the reference is a copy, but it is a "
            "configuration alone; train it first with outcore train and name OUT/model, or train adapters (--lora RANK)"
        )
