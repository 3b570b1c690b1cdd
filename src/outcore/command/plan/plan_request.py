"""A request to plan for one model, micro-batch and machine, answered as a run there would choose."""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from torch import nn

from outcore.command.plan.failing import refuse_failing, why_not_followed
from outcore.command.plan.model_inputs import said_inputs, with_rows
from outcore.core.errors import ConfigError
from outcore.device.device_memory import ACCELERATOR_SHARE
from outcore.device.opening import open_device, usual_device
from outcore.model.fused_dropout import fused_dropout
from outcore.model.partition import Partition
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import NO_TIMES
from outcore.planner.timing.profile import Profile, UnitTimes, unit_work
from outcore.planner.timing.rank_layout import ALONE, Ranks
from outcore.preparation.forecast import DeviceFacts
from outcore.preparation.plan_choice import ChosenPlan, planned, question_of
from outcore.preparation.prepare_options import Options
from outcore.preparation.with_ranks import fastest, of_a_node, sharings_over_links
from outcore.probe.kept_blocks import runs_here, with_times
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.model import Sharing

_KERNELS = {"use_kernel_func_from_hub_with_fallback", "is_fast_path_available", "load_wkv_cuda_kernel"}
"""Names in files of Transformers whose layers have fused kernels beside code for reference."""


class PlannedDevice(NamedTuple):
    """What a plan depends on besides rates, of a device that this machine need not have."""

    torch_device: torch.device
    has_host_memory: bool
    activation_share: float

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Return the facts of a machine. Shapes are followed with the kernels of a device of this machine."""
        is_accelerator = bool(hardware.device.runs_ahead)
        here = usual_device() if is_accelerator else torch.device("cpu")
        return cls(here, not is_accelerator, ACCELERATOR_SHARE if is_accelerator else 0.0)


class MicroBatch(NamedTuple):
    """The size of a micro-batch."""

    rows: int
    """Samples."""
    length: int | None
    """Tokens of each; None: its inputs have no tokens."""
    optional: Sequence[str] = ()
    """Inputs to leave out if the model cannot be followed with them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """One request. What the model computes and saves is worked out once."""

    cut: Partition
    options: Options
    """The arguments of ``prepare``, with a sample and without a plan."""
    batch: MicroBatch
    where: str
    """What the user named the model with, for errors."""
    hardware: Hardware
    device: DeviceFacts
    limits: Limits
    """The budgets of one rank."""
    ranks: Ranks = ALONE

    def planned(self, *, searches: bool = True) -> ChosenPlan:
        """Choose as a run would. Args: searches: Whether to search for a faster plan than the rule's.

        Raises:
            ConfigError: The model fails with this micro-batch, or nothing tells what it computes.
            PlanInfeasibleError: The model does not fit.
        """
        device, ranks = self.device, self.ranks
        with of_a_node(ranks.per_node), self._as_in_a_run():
            options = dataclasses.replace(self.options, sample=self._followed.sample, hardware=NO_TIMES)
            question = dataclasses.replace(
                question_of(self.cut, options, device, self.limits, ranks=ranks),
                machine=None if self.guess else self.hardware,  # without times a run follows the rule
                profile_of=self._profile_of,
                batch_size=self.batch.rows,
                seq_len=self.batch.length,
            )
            make = functools.partial(planned, cut=self.cut, options=options, device=device, searches=searches)
            if ranks.size == 1:
                chosen = make(question)
            else:
                chosen = fastest(sharings_of(ranks), question, make, in_order=not searches)
        ways = [chosen.question.ways[0], *([] if chosen.candidate is None else [chosen.candidate.saves])]
        if question.footprint is not None and device.activation_share:
            # Where less memory is left, or more is saved, arguments may have to leave.
            ways += [None, ActivationPolicy("host", "recompute")]
        asked = dataclasses.replace(chosen.question, machine=self.hardware, ways=tuple(dict.fromkeys([*ways, None])))
        return chosen._replace(question=asked)

    @property
    def guess(self) -> str:
        """Why the model could not be followed on shapes; empty if it could."""
        return self._followed.guess

    @property
    def notes(self) -> Sequence[str]:
        """What else a user should know."""
        return (*reference_notes(self.cut.modules[0]), *self._followed.notes)

    @contextmanager
    def _as_in_a_run(self) -> Iterator[None]:
        """Autocast as our own loops have it (else the caller's), and attention as the device computes it."""
        where, is_fp16 = self.device.torch_device.type, self.cut.spec.precision == "fp16"
        with ExitStack() as following:
            if self.options.loop is not None:
                following.enter_context(torch.autocast(where, torch.float16, enabled=is_fp16))
            if not self.device.has_host_memory and where == "cpu":
                following.enter_context(fused_dropout())
            yield

    @cached_property
    def _profile_of(self) -> Callable[[int], Profile]:
        return functools.cache(self._profile)

    @cached_property
    def _followed(self) -> _Followed:
        """What is known of the micro-batch, with the optional inputs if the model can be followed with them."""
        sample, left = dict(self.options.sample or {}), self._without_optional
        try:
            return _Followed(sample, self._profile_with(sample, 1.0))
        except ConfigError as error:
            guess = why_not_followed(error)
            if len(left) < len(sample):
                with suppress(ConfigError):
                    note = f"{', '.join(sorted(sample.keys() - left.keys()))} is not followed, nor timed: {guess}"
                    return _Followed(left, self._profile_with(left, 1.0), notes=(note,))
            refuse_failing(self.where, self.cut, sample, self.device.torch_device)
            if self.batch.length is None:
                raise ConfigError(
                    f"{self.where}: expected inputs with which the model can be followed, since without tokens nothing "
                    f"else tells what it computes, but got {said_inputs(sample)}: {guess}; give others with --input, "
                    "or with sample= from Python"
                ) from error
            return _Followed(sample, self._estimated(self.batch.rows), guess)

    @property
    def _without_optional(self) -> dict[str, Any]:
        return {name: each for name, each in (self.options.sample or {}).items() if name not in self.batch.optional}

    def _profile(self, rows: int) -> Profile:
        """Return what a micro-batch of another number of samples computes and saves."""
        followed, own_rows = self._followed, self.batch.rows
        if rows == own_rows:
            return followed.profile
        if followed.guess:
            return self._estimated(rows)
        with self._as_in_a_run():
            return self._profile_with(with_rows(followed.sample, own_rows, rows), rows / own_rows)

    def _profile_with(self, sample: Mapping[str, Any], more: float) -> Profile:
        """Follow the model on shapes. Args: more: Size of the micro-batch over that of the one that was asked for."""
        device, loop = self.device.torch_device, self.options.loop
        work = counted_work(self.cut, sample, device)
        for name, each in self._times.items():
            if more == 1 or not (self.hardware.device.runs_ahead and each.is_launching):
                work[name] = dataclasses.replace(work[name], measured=each.times(more))
        return Profile(work, footprint_of(self.cut, sample, device, makes_logits=loop is None or loop.makes_logits))

    def _estimated(self, rows: int) -> Profile:
        """Estimate the work from the parameters alone."""
        model, length = self.cut.modules[0], self.batch.length or 1
        return Profile(unit_work(model, self.cut.spec, batch_size=rows, seq_len=length), None)

    @cached_property
    def _times(self) -> dict[str, UnitTimes]:
        """Measured times of units over the batch that was asked for; empty if this machine cannot measure them."""
        cut, where, sample = self.cut, self.device.torch_device, self.options.sample or {}
        if self.options.compile is not False or not runs_here(cut, self.hardware, where):
            return {}
        try:
            work = counted_work(cut, sample, where)
        except ConfigError:  # so the optional inputs are left out
            sample = self._without_optional
            work = counted_work(cut, sample, where)
        with open_device(where) as device:
            work = with_times(work, cut, sample, device, self.hardware)
        return {name: each.measured for name, each in work.items() if each.measured is not None}


class _Followed(NamedTuple):
    """What one micro-batch computes and saves."""

    sample: Mapping[str, Any]
    profile: Profile
    guess: str = ""
    notes: Sequence[str] = ()


def reference_notes(model: nn.Module) -> Iterator[str]:
    """Say of which layers the code for reference is timed, and not their fused kernels."""
    modules = {type(each).__module__ for each in model.modules()}
    found = sorted(name for name in modules if _KERNELS & vars(sys.modules.get(name, object)).keys())
    if found:
        yield (
            f"state-space, linear-attention and short-convolution layers of {', '.join(found)} are timed as their "
            "reference code computes, which takes longer than fused kernels (mamba-ssm, fla, causal-conv1d)"
        )


def sharings_of(ranks: Ranks) -> list[Sharing]:
    """Return the ways in which several ranks may share weights."""
    return ["copy", *sharings_over_links(ranks)]
