"""A checkpoint's record of the run that wrote it, so that a resumed run uses and reports, or refuses, each difference.

[Note: what may change] What a run costs, where it runs and what it reports may change freely (``_FREE``). So may its
length and its learning rates (``_FROM_HERE``): the schedule is then that of the new settings, at the step that the run
has reached. Any other change would make it another run and is refused, also that of a setting that is not named here.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Self, final

import datasets
import numpy as np
import pyarrow
import pyarrow.compute

from outcore.checkpoint.find_checkpoints import RECORD
from outcore.command.train.model.source import ModelSource
from outcore.command.train.settings.description import defaults
from outcore.command.train.settings.given_settings import shown
from outcore.command.train.settings.outcore_settings import OutcoreSettings
from outcore.command.train.settings.run_settings import RunSettings
from outcore.command.train.settings.schema import SHORT_NAMES
from outcore.core.errors import ConfigError
from outcore.memory.files.weights_file import WeightsDirectory
from outcore.ranks.world import num_ranks

_FREE = {
    *("device_memory", "host_memory", "disk", "plan", "activations", "hardware", "device", "use_cpu"),
    *("trace", "on_nonfinite", "eval_data", "master_format"),
    *("save_steps", "save_strategy", "save_total_limit", "save_on_each_node", "report_to", "run_name", "project"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better", "per_device_eval_batch_size"),
    *("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataset_num_proc"),
    *("dataloader_prefetch_factor", "disable_tqdm", "skip_memory_metrics", "torch_empty_cache_steps"),
    *("prediction_loss_only", "batch_eval_metrics", "activation_checkpointing", "activation_checkpointing_kwargs"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs"),
    "chat_template_path",  # rows are compared as tokens
}
_FREE_BEGINNINGS = ("eval_", "logging_", "log_", "trackio_", "include_")
_SCHEDULE = {"learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "warmup_ratio"}
_FROM_HERE = {*_SCHEDULE, "max_grad_norm"}
_BY_MEASURES = ("reduce_lr_on_plateau", "greedy")  # schedules that no formula brings to the run's place
_LENGTHS = ("max_steps", "num_train_epochs")  # the steps that they come to are compared
_PACKING = ("packing", "packing_strategy")  # follow from the data where they are not given
_OF_TRL = ("max_grad_norm", "optim", "packing", "seed", "report_to")
_WITH_FLAGS = (*_OF_TRL, *(field.name for field in dataclasses.fields(OutcoreSettings)))
_FLAGS = {name: name for name in _WITH_FLAGS} | {full: short for short, full in reversed(list(SHORT_NAMES.items()))}
_FLAGS["base"] = "load_in_4bit/--load-in-8bit"
_NOT_OF_A_MODEL = ("_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype")
_BATCH_ROWS = 1000


@dataclass(frozen=True, kw_only=True)
class Content:
    """What is recorded of the rows that a Trainer gets."""

    name: str
    rows: int
    tokens: int
    digest: str

    @classmethod
    def of(cls, name: str, rows: datasets.Dataset) -> Self:
        """Read every token. Columns beside the tokens that are computed from them do not count.

        Memory: host, a thousand rows.
        """
        hashes = {column: hashlib.blake2b(digest_size=16) for column in sorted(_token_columns(rows))}
        tokens = 0
        for batch in rows.with_format("arrow").iter(_BATCH_ROWS):
            for column, found in hashes.items():
                for part in _parts(batch.column(column)):
                    found.update(part)
                if column.endswith("_ids"):
                    tokens += len(batch.column(column).combine_chunks().flatten())
        whole = hashlib.blake2b("".join(f"{c} {h.hexdigest()} " for c, h in hashes.items()).encode(), digest_size=16)
        return cls(name=name, rows=len(rows), tokens=tokens, digest=whole.hexdigest())


def _token_columns(rows: datasets.Dataset) -> list[str]:
    types = rows.features.arrow_schema
    lists = [c for c in rows.column_names if isinstance(types.field(c).type, pyarrow.ListType | pyarrow.LargeListType)]
    return lists or list(rows.column_names)


def _parts(column: pyarrow.ChunkedArray) -> Iterator[bytes]:
    values = column.combine_chunks()
    if pyarrow.types.is_list(values.type) or pyarrow.types.is_large_list(values.type):
        yield np.ascontiguousarray(pyarrow.compute.list_value_length(values), dtype=np.int64).tobytes()
        values = values.flatten()
    if pyarrow.types.is_integer(values.type) and not values.null_count:
        yield np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype=np.int64).tobytes()
    else:
        yield repr(values.to_pylist()).encode()


@final
@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run must know of another one to go on with it."""

    settings: Mapping[str, Any]
    """Settings as JSON holds them; ``packing`` and what belongs to it only if the data is known."""
    model: str
    """Digest of the model's configuration and weights."""
    data: Content | None = None
    steps: int | None = None

    @classmethod
    def of(cls, settings: RunSettings, source: ModelSource) -> Self:
        """Record what is known before the data is read."""
        values = dict(defaults(settings.method))
        values |= settings.training
        values["gradient_accumulation_steps"] *= num_ranks()  # fewer ranks may accumulate more
        for name in ("output_dir", *_LENGTHS, *_PACKING, *(n for n in values if n in SHORT_NAMES)):
            values.pop(name, None)
        names = (
            "model",
            "trace",
            "eval_data",
            "precision",
            "master_format",
            "plan",
            "hardware",
            "device",
            "on_nonfinite",
        )
        own = {name: getattr(settings, name) for name in (*names, "attention", "eos_token", "chat_template_path")}
        budget = settings.budget
        values |= own | {"device_memory": budget.device, "host_memory": budget.host, "disk": list(budget.paths)}
        values |= {"command": settings.method.command, "compile": settings.compile or None}
        values |= {"unit_micro_batches": settings.unit_micro_batches if settings.unit_micro_batches != 1 else None}
        values |= {"base": None if settings.quantization is None else str(settings.quantization)}
        values |= {f"lora.{name}": value for name, value in (settings.lora or {"r": None}).items()}
        return cls(settings=_as_json(values), model=_digest(source))

    def with_data(self, name: str, rows: datasets.Dataset, args: Any, steps: int) -> Self:
        """Return the whole record.

        Args:
            name: Name of the data, as it was given.
            rows: Rows as the Trainer has them.
            args: The Trainer's arguments.
            steps: Steps of the whole run.
        """
        packing = {key: getattr(args, key) for key in _PACKING if hasattr(args, key)}
        return dataclasses.replace(
            self, settings={**self.settings, **_as_json(packing)}, data=Content.of(name, rows), steps=steps
        )

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        (folder / RECORD).write_text(json.dumps(dataclasses.asdict(self), indent=1, allow_nan=False))

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read what ``save`` wrote; None: another program wrote the checkpoint.

        Raises:
            ConfigError: The record is damaged.
        """
        path = folder / RECORD
        try:
            found = json.loads(path.read_text())
            found.pop("owes_evaluation", None)  # earlier versions wrote it
            return cls(**{**found, "data": Content(**found["data"])})
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ConfigError(
                f"--resume: expected the settings of a run in '{path}', but it cannot be read: {error}; remove it to "
                "go on without comparing"
            ) from error

    def changes_since(self, before: RunRecord, where: Path) -> dict[str, str]:
        """Say what differs and is used: name -> text. What is not known yet is not compared.

        Args:
            before: The checkpoint's record.
            where: The checkpoint.

        Raises:
            ConfigError: A difference would make it another run: another model, settings (all are named) or data.
        """
        self._refuse_another_model(before, where)
        found = self._differing(before)
        schedules = {record.settings.get("lr_scheduler_type") for record in (self, before)}
        may = _FROM_HERE - (_SCHEDULE if schedules.intersection(_BY_MEASURES) else set())
        refused = {key: values for key, values in found.items() if not (key in may or _is_free(key))}
        if "lora.r" in refused:  # the rest follows from it
            refused = {key: values for key, values in refused.items() if key == "lora.r" or not key.startswith("lora.")}
        if refused:
            named = [f"{_flag(key)} is {shown(new)} instead of {shown(old)}" for key, (old, new) in refused.items()]
            raise ConfigError(
                f"--resume: expected the settings of '{where}', but {', '.join(named)}; give what the run had, "
                "or begin another one with another --out"
            )
        said = {_FLAGS.get(k, k): f"{shown(new)} instead of {shown(old)}" for k, (old, new) in found.items()}
        return said | self._changes_of_data(before, where)

    def _differing(self, before: RunRecord) -> dict[str, tuple[Any, Any]]:
        """Return, by setting, what it was and what it is."""
        keys = (self.settings.keys() | before.settings.keys()) - {"model", *(() if self.data else _PACKING)}
        values = {key: (before.settings.get(key), self.settings.get(key)) for key in sorted(keys)}
        return {key: (old, new) for key, (old, new) in values.items() if old != new}

    def _refuse_another_model(self, before: RunRecord, where: Path) -> None:
        if self.model != before.model:
            old, new = (f"'{record.settings.get('model')}'" for record in (before, self))  # in full: a path is copied
            other = "another configuration or other weights" if old == new else f"not {old}"
            raise ConfigError(
                f"--resume: expected the model of '{where}', but --model {new} is another one ({other}); name the one "
                "that the run began with, or begin another run with another --out"
            )

    def _changes_of_data(self, before: RunRecord, where: Path) -> dict[str, str]:
        if self.data is None or before.data is None:
            return {}
        old, new = before.data, self.data
        if new.digest != old.digest:
            raise ConfigError(
                f"--resume: expected the data of '{where}' ('{old.name}', {old.rows:,} rows, {old.tokens:,} tokens), "
                f"but --data '{new.name}' has others ({new.rows:,} rows, {new.tokens:,} tokens); give the data and "
                "tokenizer that the run had, or begin another one with another --out"
            )
        said = {} if new.name == old.name else {"data": f"'{new.name}' instead of '{old.name}', the same rows"}
        if self.steps != before.steps:
            said["steps"] = (
                f"{self.steps:,} instead of {before.steps:,}; learning rates are those of a run of this length"
            )
        return said


def _is_free(key: str) -> bool:
    return key in _FREE or key.startswith(_FREE_BEGINNINGS)


def _flag(key: str) -> str:
    return f"--{_FLAGS[key].replace('_', '-')}" if key in _FLAGS else key


def _as_json(values: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    return value.value if isinstance(value, Enum) else str(value)


def _digest(source: ModelSource) -> str:
    config = {k: v for k, v in source.config.to_diff_dict().items() if k not in _NOT_OF_A_MODEL}
    weights = "random" if source.weights is None else WeightsDirectory.open(source.weights).digest()
    said = json.dumps([config, weights], sort_keys=True, default=str)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()
