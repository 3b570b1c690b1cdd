"""``outcore.plan``: the answer of ``outcore plan``, for a model and a micro-batch that a program has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from outcore.command.plan.answer import Answer, limits_for
from outcore.command.plan.model_inputs import rows_of
from outcore.command.plan.page import facts_of, page
from outcore.command.plan.plan_request import MicroBatch, PlannedDevice, PlanRequest
from outcore.command.plan.question import Question
from outcore.command.plan.text import to_json, to_text
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.opening import open_device
from outcore.optim.joined import as_one
from outcore.preparation.forecast import DeviceFacts, NamedHardware, asked_hardware, hardware_for
from outcore.preparation.plan_choice import limits_of
from outcore.preparation.prepare_options import Options, cut_model, thaw, trained_in
from outcore.ranks.world import num_ranks
from outcore.spec.budget import Budget, Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import Precision
from outcore.spec.plan import AwayTier, Plan, Tier


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """How fast a model is predicted to train, in how much memory, and with which plan. ``print`` shows all of it."""

    step_s: float
    """Seconds of an optimizer step."""
    samples_per_s: float
    tokens_per_s: float | None
    """None: the sample has no ``input_ids``."""
    peak_bytes: Mapping[Tier, int]
    """Tier -> the most bytes in use at once."""
    limited_by: Mapping[str, float]
    """Lane, such as ``compute`` or ``h2d`` -> its part of the step's time, the largest first."""
    plan: Plan
    """The plan, for ``prepare(plan=...)``."""
    answer: Answer = field(repr=False)
    """All of the answer. Not part of the contract."""

    @classmethod
    def of(cls, answer: Answer) -> Prediction:
        """Return what a program asks first of an answer."""
        simulation, tokens = answer.found.simulation, answer.question.seq_len
        return cls(
            step_s=simulation.step_s,
            samples_per_s=answer.tokens_per_s / (tokens or 1),
            tokens_per_s=answer.tokens_per_s if tokens else None,
            peak_bytes=answer.peak_bytes(),
            limited_by=dict(sorted(simulation.binding.items(), key=lambda item: -item[1])),
            plan=answer.found.plan,
            answer=answer,
        )

    def __str__(self) -> str:
        return to_text(self.answer)

    def to_json(self) -> str:
        """Return what ``outcore plan --json`` prints."""
        return to_json(self.answer)

    def to_html(self) -> str:
        """Return the page that ``outcore plan --html`` writes, as text. It loads nothing."""
        return page(facts_of(self.answer))


def plan(  # noqa: PLR0913 (the arguments of ``prepare``)
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    *,
    sample: Mapping[str, torch.Tensor],
    budget: Budget | None = None,
    hardware: NamedHardware | None = None,
    precision: Precision | None = None,
    accumulation_steps: int | None = None,
    clipping: bool = True,
    units: Sequence[str | type] | None = None,
    device: torch.device | str | None = None,
    activations: AwayTier | None = None,
    compile: bool | Mapping[str, Any] = False,
    micro_batches_in_unit: int | None = None,
) -> Prediction:
    """Predict how ``prepare`` with the same arguments would train, here or on another machine. Nothing is changed.

    Args:
        model: Any module; any part of it may be on the meta device.
        optimizer: As for ``prepare``.
        sample: As for ``prepare``; only shapes and dtypes count.
        budget: The most to take on each tier. Default: 0.9 of the device's and 0.8 of the host's memory of the machine
            that ``hardware`` names, or what is free on this one; without disk.
        hardware: The machine: a file of ``outcore probe``, or names like ``"rtx-4090+pcie4+desktop-ddr5"``, which need
            no accelerator here. None: ``OUTCORE_HARDWARE``, else this machine, measured once in a few seconds.
        precision: As for ``prepare``.
        accumulation_steps: As for ``prepare``. None: a step has one micro-batch.
        clipping: As for ``prepare``.
        units: As for ``prepare``.
        device: As for ``prepare``, if the machine is this one.
        activations: As for ``prepare``.
        compile: As for ``prepare``. Times are those of code that is not compiled.
        micro_batches_in_unit: As for ``prepare``.

    Raises:
        ConfigError: An unusable argument, or no machine to predict times for.
        PlanInfeasibleError: The budget does not suffice; the error says what would.
        UnsupportedError: Several processes train together.
    """
    options = Options(
        sample=sample,
        budget=Budget() if budget is None else budget,
        precision=precision,
        accumulation_steps=accumulation_steps,
        clipping=clipping,
        units=units,
        device=device,
        activations=activations,
        hardware=hardware,
        compile=compile,
        micro_batches_in_unit=micro_batches_in_unit,
    )
    return _predicted(model, optimizer, options)


def _predicted(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None, options: Options
) -> Prediction:
    if num_ranks() > 1:
        raise UnsupportedError(
            f"outcore.plan: expected one process, but torchrun started {num_ranks()}; call it without torchrun, or ask "
            "for several GPUs with outcore plan --gpus-per-node"
        )
    trained = trained_in(model)
    try:
        joint = as_one(optimizer)
        _, cut = cut_model(model, joint, options)
        if options.sample is None:
            raise ConfigError(
                "outcore.plan: expected sample=, a micro-batch as keyword arguments of the model's forward, whose "
                "shapes tell how long a step takes, but got None; pass one"
            )
        asked = _question(model, joint, options, cut.spec.precision)
        with _machine(options, asked) as (machine, facts, limits):
            request = PlanRequest(
                cut=cut,
                options=options,
                batch=MicroBatch(asked.batch_size, asked.seq_len),
                where="outcore.plan(sample=)",
                hardware=machine,
                device=facts,
                limits=limits,
            )
            return Prediction.of(Answer.of(asked, None, request, ()))
    finally:
        thaw(trained)


def _question(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options, precision: Precision
) -> Question:
    """Return the question as the command line would put it."""
    sample, budget = options.sample or {}, options.budget
    ids = sample.get("input_ids")
    return Question(
        hardware=None if options.hardware is None else str(getattr(options.hardware, "name", options.hardware)),
        device_memory=None if budget.device is None else str(budget.device),
        host_memory=None if budget.host is None else str(budget.host),
        disk_size=None if budget.disk_bytes is None else str(budget.disk_bytes),
        model=type(model).__name__,
        batch_size=rows_of(sample, str(getattr(model, "main_input_name", ""))),
        seq_len=ids.shape[1] if isinstance(ids, torch.Tensor) and ids.dim() == 2 else None,
        grad_accum=options.accumulation_steps or 1,
        precision=precision,
        clipping=options.early_steps is None,
        optim="no optimizer" if optimizer is None else type(optimizer).__name__,
    )


@contextmanager
def _machine(options: Options, asked: Question) -> Iterator[tuple[Hardware, DeviceFacts, Limits]]:
    """Yield the machine, the facts of its device, and the budgets, which on this machine are those of ``prepare``."""
    budget, named = options.budget, asked_hardware(options.hardware)
    if isinstance(named, Hardware):
        facts = PlannedDevice.of(named)
        hardware_for(named, facts, budget.paths, may_measure=False)  # it refuses a disk tier without a disk
        machine = named if budget.paths else replace(named, disk=None)
        yield machine, facts, limits_for(asked, machine)
        return
    with open_device(options.device) as device:
        found = hardware_for(options.hardware, device, budget.paths, may_measure=True)
        if found is None:
            raise ConfigError(
                f"outcore.plan: expected a machine to predict times for, but got hardware={options.hardware!r}, and "
                "this one is not measured; name a file or parts, such as hardware='rtx-4090'"
            )
        yield found, device, limits_of(budget, device)
