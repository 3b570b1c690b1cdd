"""A training run that can be done: its model is there, its plan is within the budget, its data is of one kind."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from transformers import PreTrainedTokenizerBase, Trainer, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import SFTConfig

from outcore.api import plan_for
from outcore.cli.train.data import Data, load_data
from outcore.cli.train.model import ModelSource, build_model, find_model, load_tokenizer
from outcore.cli.train.settings import Settings
from outcore.cli.train.trainer import SftTrainer
from outcore.core.errors import ConfigError, DiskError
from outcore.memory.disk import DiskStore
from outcore.planning.reservations import tier_bytes
from outcore.spec.budget import Budget
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan


@dataclass(frozen=True, kw_only=True)
class RunData:
    """What a run trains and evaluates on."""

    training: Data
    evaluation: Data | None

    @classmethod
    def load(cls, settings: Settings, cache: Path) -> Self:
        """Load and check it, and say what was left out.

        Raises:
            ConfigError: It cannot be used, or the two are of different kinds.
        """
        training, evaluation = load_data(settings.data, flag="--data", cache=cache), None
        if settings.eval_data is not None:
            evaluation = load_data(settings.eval_data, flag="--eval-data", cache=cache)
            if evaluation.kind != training.kind:
                raise ConfigError(
                    f"--eval-data '{settings.eval_data}': expected rows of {training.kind}, as in --data, but got "
                    f"{evaluation.kind}; name data of that kind"
                )
        for notice in (*training.notices, *(() if evaluation is None else evaluation.notices)):
            warnings.warn(notice, stacklevel=1)
        return cls(training=training, evaluation=evaluation)


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """Model, tokenizer and plan of a run. Holds no weights."""

    settings: Settings
    source: ModelSource
    tokenizer: PreTrainedTokenizerBase
    spec: ModelSpec
    plan: Plan

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """Find the model and plan for it.

        Raises:
            ConfigError: The model, a disk or a setting cannot be used.
            PlanInfeasibleError: The budget does not suffice.
        """
        _refuse_unusable(settings.budget.paths)
        _refuse_new_tokens(settings.training.get("chat_template_path"))
        source = find_model(settings.model)
        tokenizer = load_tokenizer(source, eos_token=settings.training.get("eos_token"))
        model = build_model(source, settings.precision)
        if settings.lora is not None:
            from peft import get_peft_model

            model = get_peft_model(model, _lora(settings.lora))
        args = SFTConfig(output_dir=str(settings.out), **settings.training)
        kind, options = Trainer.get_optimizer_cls_and_kwargs(args, model)
        optimizer = kind([p for p in model.parameters() if p.requires_grad], **options)
        given = None if settings.plan is None else Plan.load(settings.plan)
        promises = given is not None and given.accumulation_steps is not None
        spec, plan = plan_for(
            model,
            optimizer,
            budget=settings.budget,
            precision=settings.precision,
            plan=given,
            accumulation_steps=args.gradient_accumulation_steps if promises else None,
            device=args.device,
        )
        return cls(settings=settings, source=source, tokenizer=tokenizer, spec=spec, plan=plan)

    def trainer(self, data: RunData, follower: TrainerCallback) -> SftTrainer:
        """Tokenize the data and put everything together. Weights are read when training begins."""
        settings = self.settings
        training: dict[str, Any] = {**settings.training, "output_dir": str(settings.out)}
        if data.training.kind == "text" and training.get("packing", True):  # text has no turns that a cut could spoil
            training |= {"packing": True, "packing_strategy": training.get("packing_strategy", "wrapped")}
        trainer = SftTrainer(
            model=build_model(self.source, settings.precision),
            args=SFTConfig(**training),
            train_dataset=data.training.rows,
            eval_dataset=None if data.evaluation is None else data.evaluation.rows,
            processing_class=self.tokenizer,
            peft_config=None if settings.lora is None else _lora(settings.lora),
            callbacks=[follower],
            plan=self.plan,
            budget=self._planned_budget(),
            precision=settings.precision,
            weights=self.source.weights,
            on_nonfinite=settings.on_nonfinite,
        )
        trainer.remove_callback(PrinterCallback)
        return trainer

    def written_bytes(self) -> int:
        """The least that the run writes: the model or its adapters, and of a checkpoint their states too."""
        all_params = [p for unit in self.spec.units for p in unit.params]
        trained = [p for p in all_params if p.requires_grad]
        weights = sum(p.weight_bytes for p in (all_params if self.settings.lora is None else trained))
        if self.settings.training["save_strategy"] == "no":
            return weights
        states = (1 + len(self.spec.state_names)) * sum(p.update_bytes for p in trained)
        return 2 * weights + states

    def _planned_budget(self) -> Budget:
        """What the plan takes: what was free when it was made may be less by now."""
        taken, disks = tier_bytes(self.spec, self.plan), self.settings.budget.disk
        if disks is None:
            return Budget(device=taken["device"], host=taken["host"])
        return Budget(device=taken["device"], host=taken["host"], disk=disks, disk_bytes=taken["disk"])


def _lora(fields: Mapping[str, Any]) -> Any:
    from peft import LoraConfig  # an extra; that it is there was checked with the settings

    return LoraConfig(**fields)


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


def _refuse_new_tokens(template: str | None) -> None:
    """Raise if a chat template would bring tokens of its own: the model's embeddings have no room for them."""
    if template is not None and not (Path(template).is_file() and template.endswith((".jinja", ".j2"))):
        raise ConfigError(
            f"chat_template_path: expected a file that ends in .jinja or .j2, but got '{template}'; save the template "
            "as one"
        )
