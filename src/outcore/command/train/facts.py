"""What a run is, in numbers, shown before it begins."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from outcore.command.train.output.record import Content
from outcore.command.train.planned_run import PlannedRun
from outcore.core.quantities import format_bytes
from outcore.device.opening import device_name
from outcore.spec.budget import reservations
from outcore.spec.model import ParamSpec

_STATE = ("weights", "gradients", "states", "buffers")


def steps_of(trainer: Any) -> tuple[int, int]:
    """Ask a Trainer for the steps of an epoch, and of the whole run.

    Its data loader draws a random number when it is made, which is undone for the training.
    """
    with torch.random.fork_rng(devices=[]):
        found = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    _, steps_per_epoch, *_, steps = found
    return int(steps_per_epoch), int(steps)


def facts_of_model(job: PlannedRun) -> dict[str, str]:
    """Return device, parameters, bytes and budgets: name -> text."""
    settings, planned = job.settings, job.model
    on_cpu = settings.training["use_cpu"]
    device = device_name("cpu" if on_cpu else None)
    if on_cpu and settings.device is None:
        device += f": torch {torch.__version__} sees no accelerator"
    params = [p for unit in planned.spec.units for p in unit.params]
    all_of_them, trained = _count(params), _count(p for p in params if p.requires_grad)
    state = sum(r.nbytes for r in reservations(planned.spec, planned.plan) if r.kind in _STATE)
    said = {
        "device": device,
        "parameters": f"{all_of_them:,}",
        "trained": _share(trained, all_of_them),
        "frozen": _share(all_of_them - trained, all_of_them),
        "training state": f"{_bytes(state)}: weights, gradients, optimizer states",
    }
    if job.reference is not None:
        said["reference"] = f"a frozen copy, {_bytes(sum(p.weight_bytes for p in params))}"
    if planned.num_ranks > 1:
        said["ranks"] = f"{planned.num_ranks}; host and disk budgets are for all on a node"
    budget = settings.budget
    said |= {"device budget": _bytes(budget.device or 0), "host budget": _bytes(budget.host or 0)}
    disk = f"{_bytes(budget.disk_bytes or 0)} in {', '.join(budget.paths)}" if budget.paths else "not used"
    return said | {"disk budget": disk}


def facts_of_data(content: Content, steps: tuple[int, int], trainer: Any, sources: Sequence[str]) -> dict[str, str]:
    """Return rows, tokens and steps: name -> text.

    Args:
        content: Of the data.
        steps: As ``steps_of`` returns them.
        trainer: The run's Trainer.
        sources: What each of several sources gives.
    """
    per_epoch, in_all = steps
    packed = ", packed" if getattr(trainer.args, "packing", False) else ""
    said = {
        **({"from": "; ".join(sources)} if sources else {}),
        "rows": f"{content.rows:,}{packed}, {content.tokens:,} tokens",
        "an epoch": f"{per_epoch:,} steps",
        "a step": f"{content.tokens / per_epoch:,.0f} tokens on average",
        "the run": f"{in_all:,} steps, {in_all / per_epoch:.2f} epochs",
    }
    return said if trainer.eval_dataset is None else said | {"evaluation": f"{len(trainer.eval_dataset):,} rows"}


def _count(params: Iterable[ParamSpec]) -> int:
    return sum(p.parameters for p in params)


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({part / whole:.2%})"


def _bytes(nbytes: int) -> str:
    return f"{format_bytes(nbytes)} ({nbytes:,} bytes)"
