"""The Trainers behind the commands: TRL's, training out of core, which also say what truncation costs."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import pyarrow
import pyarrow.compute
from transformers.trainer import align_special_tokens
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from outcore.api import close
from outcore.command.train.loop.nonfinite import FiniteSteps
from outcore.command.train.loop.preemption import PreemptibleRuns
from outcore.core.errors import ConfigError
from outcore.engine.module_guard import is_guarded
from outcore.engine.optimizer import StreamedOptimizer

_FLAGS = {"train": "--data", "eval": "--eval-data"}
_BATCH_ROWS = 1000


class _QuietMixin(PreemptibleRuns, FiniteSteps):
    """A mixin for a Trainer that writes nothing but checkpoints."""

    _outcore_is_saved = True

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: it would say the same of every model."""

    def rehearse(self) -> None:
        """Find out whether what would be trained could be saved. Raises: as ``train``."""
        align_special_tokens(self.model, self.processing_class)  # as training begins: it changes what is saved
        self._outcore_rehearse_alone()

    def end(self) -> None:
        """Give memory, files and threads back."""
        if isinstance(self.optimizer, StreamedOptimizer):
            self.optimizer.close()


class SftTrainer(_QuietMixin, SFTTrainer):  # type: ignore[misc]  # the library has no types here
    """Refuses data of which nothing is left to learn from."""

    def _prepare_dataset(
        self,
        dataset: datasets.Dataset,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,  # noqa: FBT001 (the library's)
        formatting_func: Any,
        dataset_name: str,
    ) -> datasets.Dataset:
        """Tokenize and cut in two passes, which TRL allows, to see in between how long rows are."""
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        whole = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)  # noqa: FBT003
        ready = super()._prepare_dataset(whole, processing_class, args, packing, formatting_func, dataset_name)
        _refuse_nothing(ready, whole, args.max_length, dataset_name)
        if args.max_length is not None and not (packing and args.packing_strategy != "bfd"):
            left_out = 0 if packing else len(whole) - len(ready)
            longer = _longer(whole, args.max_length, lambda rows: _lengths(rows, "input_ids"))
            _warn_of_cuts(longer, left_out, whole, args, dataset_name)
        return ready


class DpoTrainer(_QuietMixin, DPOTrainer):  # type: ignore[misc]  # the library has no types here
    """Refuses data of which nothing is left to learn from; owns its reference model."""

    def end(self) -> None:
        """Give memory, files and threads back, those of the reference model too."""
        super().end()
        if self.ref_model is not None and is_guarded(self.ref_model):  # in a dry run it is not prepared
            close(self.ref_model, keep_weights=False)

    def _prepare_dataset(
        self, dataset: datasets.Dataset, processing_class: Any, args: DPOConfig, dataset_name: str
    ) -> datasets.Dataset:
        """Tokenize; rows are cut when they are put into batches."""
        ready = super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        _refuse_nothing(ready, dataset, args.max_length, dataset_name)
        if args.max_length is not None:
            left_out = len(dataset) - len(ready)
            longer = left_out + _longer(ready, args.max_length, _pair_lengths)
            _warn_of_cuts(longer, left_out, dataset, args, dataset_name)
        return ready


def _refuse_nothing(ready: datasets.Dataset, whole: datasets.Dataset, tokens: int | None, name: str) -> None:
    if not len(ready):
        raise ConfigError(
            f"{_FLAGS[name]}: expected rows with something to learn, but nothing is left of all {len(whole):,} "
            f"after cutting them to {tokens} tokens; raise --seq-len"
        )


def _warn_of_cuts(longer: int, left_out: int, whole: datasets.Dataset, args: Any, name: str) -> None:
    if longer:
        nothing_left = f", {left_out:,} of them left out with nothing to learn" if left_out else ""
        warnings.warn(
            f"{_FLAGS[name]}: {longer:,} of {len(whole):,} rows have more than {args.max_length} tokens and are cut"
            f"{nothing_left}; raise --seq-len to keep them whole",
            stacklevel=1,
        )


def _longer(rows: datasets.Dataset, tokens: int, lengths: Callable[[pyarrow.Table], Any]) -> int:
    batches = rows.with_format("arrow").iter(_BATCH_ROWS)
    found = (pyarrow.compute.sum(pyarrow.compute.greater(lengths(batch), tokens)).as_py() for batch in batches)
    return sum(count or 0 for count in found)


def _lengths(rows: pyarrow.Table, column: str) -> Any:
    return pyarrow.compute.list_value_length(rows.column(column))


def _pair_lengths(rows: pyarrow.Table) -> Any:
    answers = pyarrow.compute.max_element_wise(_lengths(rows, "chosen_ids"), _lengths(rows, "rejected_ids"))
    return pyarrow.compute.add(_lengths(rows, "prompt_ids"), answers)
