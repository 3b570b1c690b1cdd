"""Refuses settings of a Trainer that cannot work with streamed weights, by name, before anything is moved.

Settings that work, but may not be meant, are warned of.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence, Sized
from typing import TYPE_CHECKING

import torch
from torch import distributed, nn

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.core.ranks import launched
from outcore.integrations.optimizers import OPTIMIZERS, optimizer_for
from outcore.model.unit_modules import output_embeddings
from outcore.spec.budget import Budget

if TYPE_CHECKING:
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments

_ARGUMENTS = {
    "deepspeed": "drop the DeepSpeed config; budget= says what may be taken on device, host and disk",
    "fsdp": "drop it; under torchrun, outcore shares the work among the ranks itself",
    "parallelism_config": "drop it; under torchrun, outcore shares the work among the ranks itself",
    "auto_find_batch_size": "choose per_device_train_batch_size yourself; a plan is made once, for one batch size",
    "fp16_full_eval": "drop it; evaluation runs in the precision of training",
    "bf16_full_eval": "drop it; evaluation runs in the precision of training",
    "torch_compile": "drop it; compile=True beside budget=, in the command --compile, compiles the blocks",
    "activation_offloading": "drop it; outcore recomputes activations itself",
    "sync_ref_model": "drop it; it reads and writes weights behind outcore's back",
}


_REPLACED = ("_save", "_save_optimizer_and_scheduler", "_load_from_checkpoint", "_load_best_model")
"""Methods of a Trainer in whose place the mixin saves and loads."""


def refuse_class(behind: Sequence[type]) -> None:
    """Refuse a Trainer with a way of its own to save or load, which would silently never be called.

    Args:
        behind: The classes that come after the mixin.

    Raises:
        UnsupportedError: One of them is a user's, and has such a method.
    """
    for kind in behind:
        name = next((name for name in _REPLACED if name in vars(kind)), None)
        if name is not None and kind.__module__.partition(".")[0] not in ("transformers", "trl", "outcore"):
            raise UnsupportedError(
                f"expected a Trainer that saves and loads as Transformers does, but {kind.__name__} has a {name} of "
                "its own, which would never be called, since the mixin does that tensor by tensor; override "
                "save_model or train instead, or put the method into the class that names OutcoreMixin first"
            )


def refuse_arguments(args: TrainingArguments) -> None:
    """Refuse training arguments.

    Raises:
        UnsupportedError: An argument is set that should not be. The error names the first one.
    """
    for name, remedy in _ARGUMENTS.items():
        value = getattr(args, name, None)
        if value:
            raise UnsupportedError(f"training arguments: expected {name} to be off, but got {value!r}; {remedy}")
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"expected one GPU, but this process sees {args.n_gpu} and the Trainer would copy the model to each "
            "(DataParallel); set CUDA_VISIBLE_DEVICES to one of them"
        )


def refuse_unranked(args: TrainingArguments) -> None:
    """Refuse arguments that do not work with several ranks.

    Raises:
        UnsupportedError: There is such an argument. The error names it.
    """
    if args.world_size == 1:
        return
    refused = {
        "save_on_each_node": (args.save_on_each_node, "drop it; all ranks write one folder, which all must see"),
        "accelerator_config.split_batches": (
            args.accelerator_config.split_batches,
            "drop it, and set per_device_train_batch_size to the rows that a rank computes at once",
        ),
        "enable_jit_checkpoint": (
            getattr(args, "enable_jit_checkpoint", False),
            "drop it, since ranks would stop at different steps; outcore train saves on SIGTERM",
        ),
    }
    for name, (value, remedy) in refused.items():
        if value:
            raise UnsupportedError(f"training arguments: expected {name} to be off with several ranks; {remedy}")


def refuse_optimizer(args: TrainingArguments) -> None:
    """Refuse an optimizer's name or arguments, before anything looks for its package, which would not help.

    Raises:
        UnsupportedError: There is no streamed update for it, or its arguments would be ignored.
    """
    chosen = getattr(args, "optim", OPTIMIZERS[0])
    name = getattr(chosen, "value", chosen)
    if name not in OPTIMIZERS:
        raise UnsupportedError(
            f"training arguments: expected optim to be one of {', '.join(OPTIMIZERS)}, but got {name!r}; choose one of "
            "these, or give the Trainer an optimizer of your own (docs/explanation/updates.md)"
        )
    optimizer_for(args)


def refuse_unscaled(precision: str | None, args: TrainingArguments | None) -> None:
    """Refuse fp16 weights without a scaler for their gradients.

    Raises:
        UnsupportedError: The weights are fp16, and the training arguments lack ``fp16=True``.
    """
    if precision == "fp16" and not getattr(args, "fp16", False):
        raise UnsupportedError(
            "expected fp16=True in the training arguments beside precision 'fp16', since gradients in fp16 need its "
            "scaler; set it, or take precision 'bf16'"
        )


def refuse_pieces(args: TrainingArguments, count: int | None) -> None:
    """Refuse batches that cannot be cut into pieces by rows. Args: count: Pieces in which units run a batch.

    Raises:
        ConfigError: There are fewer rows than pieces.
        UnsupportedError: TRL joins rows end to end, without padding.
    """
    if count is None or count == 1:
        return
    is_packed = getattr(args, "packing", False) and getattr(args, "packing_strategy", "") in ("bfd", "bfd_split")
    if is_packed or getattr(args, "padding_free", False):
        raise UnsupportedError(
            "micro_batches_in_unit (--unit-micro-batches): expected batches of padded rows, but the training arguments "
            "pack them without padding, so that all are one row; set padding_free=False, and packing=False or "
            "packing_strategy='wrapped'"
        )
    if isinstance(count, int) and args.per_device_train_batch_size < count:
        raise ConfigError(
            f"micro_batches_in_unit (--unit-micro-batches): expected at least {count} rows in a micro-batch, one for "
            f"each piece, but per_device_train_batch_size (--batch-size) is {args.per_device_train_batch_size}; raise "
            "it, or ask for fewer pieces"
        )


def refuse_accelerator(accelerator: Accelerator) -> None:
    """Refuse settings that Accelerate gets from a launcher or the environment instead of the training arguments.

    Raises:
        UnsupportedError: A plugin, ranks that Accelerate does not see, compilation, or a mixed precision other than
            bf16 (or fp16 with a gradient scaler).
    """
    kind = accelerator.distributed_type
    if kind not in ("NO", "MULTI_CPU", "MULTI_GPU"):
        raise UnsupportedError(
            f"accelerate: expected ranks without DeepSpeed, FSDP or the like, but got {kind.value}; start with python "
            "or torchrun, without ACCELERATE_* variables"
        )
    found = launched()
    count = 1 if found is None else found.size
    if distributed.is_available() and distributed.is_initialized():
        count = distributed.get_world_size()
    if count != accelerator.num_processes:
        raise UnsupportedError(
            f"accelerate: expected it to see the {count} ranks that train together, but it sees "
            f"{accelerator.num_processes}; start with torchrun, which sets LOCAL_RANK beside RANK and WORLD_SIZE"
        )
    known = ("no", "bf16", *(("fp16",) if accelerator.scaler is not None else ()))
    if accelerator.mixed_precision not in known:
        raise UnsupportedError(
            f"accelerate: expected mixed precision {' or '.join(map(repr, known))} on {accelerator.device.type}, but "
            f"got '{accelerator.mixed_precision}'; pass bf16=True (fp16=True needs an accelerator), and unset "
            "ACCELERATE_MIXED_PRECISION"
        )
    backend = accelerator.state.dynamo_plugin.backend
    if backend != "NO":
        raise UnsupportedError(
            f"accelerate: expected no compilation, but got the backend {backend.value}; unset "
            "ACCELERATE_DYNAMO_BACKEND; compile=True beside budget= compiles the blocks"
        )


def refuse_model(model: nn.Module, *, has_scaler: bool) -> None:
    """Refuse a model with weights that cannot be streamed.

    Raises:
        UnsupportedError: The model is quantized by a library other than bitsandbytes and torchao, has fp16 weights to
            train without a scaler, or is spread over devices by a device map.
    """
    what = type(model).__name__
    method = getattr(model, "quantization_method", None)
    name = getattr(method, "value", method)
    if name not in (None, "bitsandbytes", "torchao"):
        raise UnsupportedError(
            f"expected weights in fp32, bf16, or quantised by bitsandbytes or torchao, but this {what} is quantized "
            f"({name}); load it without quantization_config, or with BitsAndBytesConfig and train adapters"
        )
    half = next((n for n, p in model.named_parameters() if p.requires_grad and p.dtype == torch.float16), None)
    if half is not None and not has_scaler:
        raise UnsupportedError(
            f"expected weights to train in fp32 or bf16, but '{half}' is in fp16, which needs a scaler for gradients; "
            "pass fp16=True, or load the model with dtype=torch.bfloat16 or torch.float32"
        )
    places = {str(place) for place in (getattr(model, "hf_device_map", None) or {}).values()}
    if len(places) > 1 or places & {"disk", "meta"}:
        raise UnsupportedError(
            f"expected a model in one place, but this {what} was spread over {', '.join(sorted(places))}; load it "
            "without device_map, or with model_init_kwargs={'device_map': None}: outcore places it within budget="
        )


def warn_of_no_masters(precision: str | None, asked: str | None) -> None:
    """Say once that a bf16 model has no fp32 masters, unless the user asked for that. Args: asked: The user's own."""
    if precision == "pure_bf16" and asked is None:
        warnings.warn(
            "the model is in bf16 and is updated in bf16, as by the plain Trainer: there are no fp32 masters, so "
            "small updates are lost; precision='bf16' adds them, and precision='pure_bf16' says that none are meant",
            stacklevel=2,
        )


def warn_of_logits(trainer: Trainer, budget: Budget | None) -> None:
    """Say what an evaluation keeps for ``compute_metrics`` beside the budget, if it is more than that.

    Args:
        trainer: Its model and its data for evaluation are known.
        budget: The user's.
    """
    keeps = trainer.compute_metrics is not None and not trainer.args.prediction_loss_only
    given = [] if budget is None else [n for n in (budget.device, budget.host) if n is not None]
    head = next(output_embeddings(trainer.model), None)
    if not keeps or trainer.preprocess_logits_for_metrics is not None or not given or head is None:
        return
    data = trainer.eval_dataset
    data = max((d for d in data.values() if isinstance(d, Sized)), key=len) if isinstance(data, Mapping) else data
    first = data[0] if isinstance(data, Sized) and len(data) else None  # type: ignore[index]
    ids = first.get("input_ids") if isinstance(first, Mapping) else None
    if ids is None or data is None:
        return
    rows, numel = len(data), len(head.weight)  # type: ignore[arg-type]
    nbytes = rows * len(ids) * numel * 4
    if nbytes > min(given):
        warnings.warn(
            f"each evaluation keeps all logits for compute_metrics, in addition to the budget: {rows:,} rows of about "
            f"{len(ids):,} tokens, {numel:,} numbers each, are {format_bytes(nbytes)}; pass "
            "preprocess_logits_for_metrics=, such as lambda logits, labels: logits.argmax(-1)",
            stacklevel=2,
        )
