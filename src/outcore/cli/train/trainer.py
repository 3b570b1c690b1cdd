"""The Trainer behind ``outcore train``: TRL's SFTTrainer out of core, which also says what truncation costs."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import datasets
import pyarrow.compute
from trl import SFTConfig, SFTTrainer

from outcore.cli.train.nonfinite import FiniteSteps
from outcore.core.errors import ConfigError


class SftTrainer(FiniteSteps, SFTTrainer):  # type: ignore[misc]  # the library has no types here
    """Writes nothing but checkpoints, and refuses data of which nothing is left to learn from."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write none: it would say of every model the same."""

    def _prepare_dataset(
        self,
        dataset: datasets.Dataset,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,  # noqa: FBT001 (the library's)
        formatting_func: Any,
        dataset_name: str,
    ) -> datasets.Dataset:
        """Tokenize and cut in two goes, which TRL allows for, to see in between how long rows are."""
        uncut = copy.copy(args)
        uncut.max_length, uncut.shuffle_dataset = None, False
        whole = super()._prepare_dataset(dataset, processing_class, uncut, False, formatting_func, dataset_name)  # noqa: FBT003
        ready = super()._prepare_dataset(whole, processing_class, args, packing, formatting_func, dataset_name)
        flag = {"train": "--data", "eval": "--eval-data"}[dataset_name]
        if not len(ready):
            raise ConfigError(
                f"{flag}: expected rows with something to learn, but of all {len(whole):,} nothing is left after "
                f"cutting them to {args.max_length} tokens; raise --seq-len"
            )
        is_cut = args.max_length is not None and not (packing and args.packing_strategy != "bfd")
        if is_cut and (longer := _longer(whole, args.max_length)):
            left_out = 0 if packing else len(whole) - len(ready)
            nothing_left = f", {left_out:,} of them left out with nothing to learn" if left_out else ""
            warnings.warn(
                f"{flag}: {longer:,} of {len(whole):,} rows have more than {args.max_length} tokens and are cut"
                f"{nothing_left}; raise --seq-len to have them whole",
                stacklevel=1,
            )
        return ready


def _longer(rows: datasets.Dataset, tokens: int) -> int:
    lengths = pyarrow.compute.list_value_length(rows.data.column("input_ids"))
    return int(pyarrow.compute.sum(pyarrow.compute.greater(lengths, tokens)).as_py() or 0)
