"""``outcore plan``: whether a model fits a machine, how fast it trains there, what binds, and why other plans lost."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Any, NamedTuple, Self, cast, get_args

import torch

from outcore.command.plan.failing import refuse_failing, why_not_followed
from outcore.command.plan.known_models import known_named
from outcore.command.plan.question import Question
from outcore.command.train.model.adapters import with_adapters
from outcore.command.train.model.source import ModelSource, build_model, find_shapes, refuse_long
from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.device.device_memory import ACCELERATOR_SHARE
from outcore.device.opening import open_device, usual_device
from outcore.integrations.optimizers import optimizer_named
from outcore.model.fused_dropout import fused_dropout
from outcore.model.partition import Partition, partition
from outcore.optim.joined import members
from outcore.optim.rules import rule_for
from outcore.planner.forward.footprint import as_run
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.planner.homes.activation_policies import ActivationPolicy, ways_to
from outcore.planner.homes.occupancy import TierLoad, occupancy, peak_of
from outcore.planner.homes.placement import Least, least
from outcore.planner.homes.pools import LEAST, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.changes import SettingChange, best_changes
from outcore.planner.search.search import Found, explain
from outcore.planner.search.setting import Setting
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import NO_TIMES
from outcore.planner.timing.profile import Profile, UnitTimes, unit_work
from outcore.planner.timing.rank_layout import Ranks
from outcore.planner.timing.simulate import steps_until_settled
from outcore.preparation.forecast import Loop, hardware_for, token_batch
from outcore.preparation.plan_choice import PlacedPlan, Planner, Timed
from outcore.preparation.prepare_options import Options
from outcore.preparation.with_ranks import among, fastest, of_a_node, sharings_over_links
from outcore.probe.kept_blocks import runs_here, with_times
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.lane_names import RANK_LANES
from outcore.spec.model import ModelSpec, Precision, Sharing
from outcore.spec.plan import TIERS, AwayTier, Plan, Tier
from outcore.spec.schedule import usual_visits
from outcore.spec.timeline import WRITES_TO_DISK

_DEVICE_SHARE, _HOST_SHARE, _DISK_SHARE = 0.9, 0.8, 0.9
"""Default budgets as shares of a machine's memory: the rest is for the driver and for other programs."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan, and what it was made for."""

    question: Question
    setting: Setting
    found: Found
    """What the search found. Its plan is the one that a run with the same budgets would follow."""
    guess: str = ""
    """Why the model could not be followed on shapes; empty if it could."""

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return self.setting.hardware

    @property
    def limits(self) -> Limits:
        """The budgets of one rank."""
        return self.setting.limits

    @property
    def spec(self) -> ModelSpec:
        """The model's units."""
        return self.setting.model

    @property
    def tokens_per_s(self) -> float:
        """Predicted tokens per second of all ranks together."""
        step_s = self.found.simulation.step_s
        return self.setting.tokens / step_s if step_s else 0.0

    @cached_property
    def changes(self) -> tuple[SettingChange, ...]:
        """The changes that would help most; none if the model could not be followed on shapes."""
        return () if self.guess else best_changes(self.setting, self.found)

    @property
    def busiest_lane(self) -> tuple[str, float]:
        """The lane that works longest in a step, and its seconds."""
        return max(self.busy_s().items(), key=lambda item: item[1], default=("compute", 0.0))

    @cached_property
    def loads(self) -> tuple[TierLoad, ...]:
        """What is predicted to be in use on each tier over time."""
        job, visits, plan = self.setting.job(), usual_visits(self.spec, self.setting.micro_batches), self.run
        footprint, circumstances = self.setting.profile.footprint, Circumstances(clips=job.clipping)
        steps = [] if footprint is None else footprint.alive(plan.units)
        alive = {(step.unit, step.is_backward): nbytes for step, nbytes in steps if step.unit}
        warm_up = steps_until_settled(plan)
        return occupancy(self.spec, plan, job.rates, visits, circumstances, alive=alive, warm_up=warm_up)

    @cached_property
    def run(self) -> Plan:
        """The plan as it runs: with the activations that there is room to keep."""
        plan, footprint = self.found.plan, self.setting.profile.footprint
        if plan.plain:  # nothing would use its slots
            plan = dataclasses.replace(plan, pools=pools_for(self.spec, plan.units, LEAST))
        keeps = plan.plain or self.setting.keeps_what_fits
        return plan if footprint is None else as_run(plan, footprint.saved if keeps else {}, plan.kept_bytes)

    @cached_property
    def least(self) -> Least:
        """The least budgets that would suffice, with whatever way to share weights and to treat activations."""
        job, ranks = self.setting.job(), self.setting.ranks
        sharings = [self.spec.sharing] if ranks.size == 1 else _sharings(ranks)
        models = [dataclasses.replace(self.spec, sharing=sharing) for sharing in sharings]
        away: list[ActivationPolicy] = []
        if job.footprint is not None and job.activation_share:  # the device has memory of its own
            away = [way for tier in get_args(AwayTier) for way in ways_to(tier, job.footprint)]
        ways = [job.activations(way) for way in dict.fromkeys([*job.ways, *away])]
        return Least.of_any([least(model, job.limits, ways) for model in models])

    @property
    def activation_bytes(self) -> int | None:
        """The most that activations and workspace take on the device; None: not known."""
        footprint = self.setting.profile.footprint
        if footprint is None or not footprint.steps:
            return None
        return max(load.peak_bytes for load in self.loads if load.label == "activations")

    @property
    def policies(self) -> Counter[tuple[str, str]]:
        """(Policy, tier where activations rest) -> number of units."""
        return Counter((unit.policy, unit.activations) for unit in self.run.units[1:])

    def ways(self) -> list[dict[str, str | int]]:
        """Return ``policies`` as data."""
        return [{"policy": policy, "rest_on": tier, "units": count} for (policy, tier), count in self.policies.items()]

    def peak_bytes(self) -> dict[Tier, int]:
        """Return, by tier, the most bytes that one rank has in use at once."""
        return {tier: peak_of([load for load in self.loads if load.tier == tier]) for tier in TIERS}

    def of_node(self, nbytes: Mapping[Tier, int], *, all_tiers: bool = False) -> dict[Tier, int]:
        """Return what ranks of a node take together. Args: nbytes: Of one rank. all_tiers: Sum up devices, too."""
        count = self.setting.ranks.per_node
        return {tier: (count if all_tiers or tier != "device" else 1) * n for tier, n in nbytes.items()}

    @property
    def written_bytes(self) -> float:
        """Bytes written to the disk of a node per step."""
        moved = self.moved_bytes()
        return self.setting.ranks.per_node * sum(moved[lane] for lane in WRITES_TO_DISK)

    def received_bytes(self) -> dict[str, float]:
        """Return, by lane between ranks, the bytes that one rank receives from others per step."""
        moved = self.moved_bytes()
        return {lane.value: moved[lane.value] for lane in RANK_LANES}

    def moved_bytes(self) -> dict[str, float]:
        """Return, by lane, the bytes that one rank moves per step."""
        return self._per_step(self.found.simulation.timeline.moved_bytes())

    def busy_s(self) -> dict[str, float]:
        """Return, by lane, the busy seconds per step, without lanes that are never busy."""
        return {lane: s for lane, s in self._per_step(self.found.simulation.timeline.busy_s()).items() if s}

    def exposed_s(self) -> dict[str, float]:
        """Return, by lane, the seconds per step that compute waits, without lanes that it never waits for."""
        return {lane: s for lane, s in self._per_step(self.found.simulation.timeline.exposed_s()).items() if s}

    def _per_step(self, sums: Mapping[str, float]) -> dict[str, float]:
        return {lane: value / self.found.simulation.num_steps for lane, value in sums.items()}


def answer(question: Question) -> Answer:
    """Plan for a model on a machine. No weights are needed, and neither is the machine.

    Args:
        question: What is asked.

    Raises:
        ConfigError: An option that cannot be used.
        PlanInfeasibleError: The model does not fit; the error says what would do.
    """
    return answer_for(question, source_of(question.model), machine_for(question))


def source_of(model: str) -> ModelSource:
    """Return the model of that name, without its weights. Raises: ConfigError: There is none."""
    known = known_named(model)
    return find_shapes(model) if known is None else known.source


def answer_for(question: Question, source: ModelSource, hardware: Hardware) -> Answer:
    """Answer for a model and a machine that were found already. Raises: As ``answer``."""
    return _asking(question, source, hardware).answer()


def usual_plan(question: Question, source: ModelSource, hardware: Hardware) -> Plan:
    """Return the plan of the rule, without a search for a faster one. Raises: As ``answer``."""
    return _asking(question, source, hardware).usual()


def _asking(question: Question, source: ModelSource, hardware: Hardware) -> _PlanRequest:
    precision = cast("Precision", question.precision)
    limits = _limits(question, hardware)
    source = source.quantised(question.quantization, has_adapters=question.lora is not None)
    model = build_model(source, precision)
    refuse_long(model, question.seq_len)
    if question.lora is not None:
        model = with_adapters(model, {"r": question.lora, "target_modules": "all-linear", "task_type": "CAUSAL_LM"})
    optimizer = optimizer_named(question.optim, model, question.master_format)
    keeps = rule_for(*members(optimizer)).kept(optimizer.param_groups)
    cut = partition(model, keeps=keeps, precision=precision)
    return _PlanRequest(question, among(cut, question.ranks, 0), hardware, limits)


def machine_for(question: Question) -> Hardware:
    """Return the machine that was named, or this one with the drives measured last. Raises: ConfigError: No machine."""
    here = _PlannedDevice(usual_device(), has_host_memory=False, activation_share=0.0)
    found = hardware_for(question.hardware, here, None, may_measure=True)
    if found is None:
        raise ConfigError(
            "--hardware: expected a machine to plan for, but none is named, and this one is not measured; name a "
            "file or parts, or run outcore probe"
        )
    return found


class _PlannedDevice(NamedTuple):
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


class _PlanRequest:
    """One question, with its model and machine."""

    def __init__(self, question: Question, cut: Partition, hardware: Hardware, limits: Limits) -> None:
        self._question, self._cut, self._hardware, self._limits = question, cut, hardware, limits
        self._machine, self._guess = _PlannedDevice.of(hardware), ""
        # As in a run of outcore train: TRL, if it is installed, computes losses in tiles.
        makes_logits = find_spec("trl") is None
        self._loop = Loop(question.grad_accum, clips=question.clipping, is_promised=True, makes_logits=makes_logits)
        self._profile_of = functools.cache(self._profile)

    def answer(self) -> Answer:
        """Choose as a run would."""
        with of_a_node(self._question.ranks.per_node), self._as_in_a_run():
            return self._chosen()

    def usual(self) -> Plan:
        """Follow the rule."""
        with of_a_node(self._question.ranks.per_node), self._as_in_a_run():
            options = self._options()  # what it computes is of no interest, but what it saves
            return self._placed(options, Timed(self._cut, options, self._machine), searches=False).plan

    def _options(self) -> Options:
        return Options(
            sample=self._sample(self._question.batch_size),
            precision=self._cut.spec.precision,
            hardware=NO_TIMES if self._guess else self._hardware,  # without times a run follows the rule
            loop=self._loop,
        )

    def _chosen(self) -> Answer:
        asked, profile = self._question, self._profile_of(self._question.batch_size)
        options = self._options()
        timed = Timed(self._cut, options, self._machine, profile=profile, ranks=asked.ranks)
        placed = self._placed(options, timed)
        ways = [placed.rule, placed.way]
        if profile.footprint is not None and self._machine.activation_share:
            # Where less memory is left, or more is saved, arguments may have to leave.
            ways += [None, ActivationPolicy("host", "recompute")]
        setting = Setting(
            model=self._cut.spec,
            hardware=self._hardware,
            limits=self._limits,
            profile_of=self._profile_of,
            batch_size=asked.batch_size,
            seq_len=asked.seq_len,
            activation_share=self._machine.activation_share,
            micro_batches=asked.grad_accum,
            clipping=asked.clipping,
            keeps_what_fits=timed.keeps_what_fits,
            ways=tuple(dict.fromkeys([*ways, None])),
            ranks=asked.ranks,
        )
        found = dataclasses.replace(explain(setting.job(), placed.bare, placed.candidate), plan=placed.plan)
        return Answer(question=asked, setting=setting, found=found, guess=self._guess)

    def _placed(self, options: Options, timed: Timed, *, searches: bool = True) -> PlacedPlan:
        """Return the plan of a run; for several ranks, also choose how they share weights."""

        def make(cut: Partition, own: Timed) -> tuple[Plan, PlacedPlan]:
            planner = Planner(cut, options, self._machine, self._limits, own)
            placed = planner.placed() if searches else planner.usual()
            return placed.plan, placed

        ranks = self._question.ranks
        if ranks.size == 1:
            return make(self._cut, timed)[1]
        self._cut, (_, placed) = fastest(_sharings(ranks), self._cut, timed, make, in_order=not searches)
        return placed

    @contextmanager
    def _as_in_a_run(self) -> Iterator[None]:
        """Autocast as a run has it, and attention as its device computes it."""
        machine, is_fp16 = self._machine, self._cut.spec.precision == "fp16"
        with torch.autocast(machine.torch_device.type, torch.float16, enabled=is_fp16), ExitStack() as following:
            if not machine.has_host_memory and machine.torch_device.type == "cpu":
                following.enter_context(fused_dropout())
            yield

    @cached_property
    def _times(self) -> dict[str, UnitTimes]:
        """Measured times of units over the batch that was asked for; empty if this machine cannot measure them."""
        cut, where, sample = self._cut, self._machine.torch_device, self._sample(self._question.batch_size)
        if not runs_here(cut, self._hardware, where):
            return {}
        with open_device(where) as device:
            work = with_times(counted_work(cut, sample, where), cut, sample, device, self._hardware)
        return {name: each.measured for name, each in work.items() if each.measured is not None}

    def _sample(self, batch_size: int) -> dict[str, Any]:
        return {**token_batch(batch_size, self._question.seq_len), "use_cache": False}

    def _profile(self, batch_size: int) -> Profile:
        """Follow the model on shapes; if that is impossible, estimate its work from its parameters alone."""
        cut, sample, device = self._cut, self._sample(batch_size), self._machine.torch_device
        try:
            with self._as_in_a_run():
                more, times = batch_size / self._question.batch_size, self._times
                work = counted_work(cut, sample, device)
                for name, each in times.items():
                    if more == 1 or not (self._hardware.device.runs_ahead and each.is_launching):
                        work[name] = dataclasses.replace(work[name], measured=each.times(more))
                return Profile(work, footprint_of(cut, sample, device, makes_logits=self._loop.makes_logits))
        except ConfigError as error:
            with self._as_in_a_run():
                refuse_failing(self._question.model, cut, sample, device)
            self._guess = why_not_followed(error)
        model, seq_len = cut.modules[0], self._question.seq_len
        return Profile(unit_work(model, cut.spec, batch_size=batch_size, seq_len=seq_len), None)


def _sharings(ranks: Ranks) -> list[Sharing]:
    """Return the ways in which several ranks may share weights."""
    return ["copy", *sharings_over_links(ranks)]


def _limits(question: Question, hardware: Hardware) -> Limits:
    """Return the budgets of one rank: as given, else shares of the machine, divided among the ranks of a node."""
    count = question.gpus_per_node

    def given(text: str | None, flag: str, default: float, shares: int = 1) -> int:
        nbytes = (int(default) if text is None else parse_bytes(text, what=flag)) // shares
        if not nbytes:
            of_machine = f"{default:g} from '{hardware.name}'; correct its file, or set the option"
            got = of_machine if text is None else f"'{text}'"
            each = f" for each of {shares} ranks" if shares > 1 else ""
            raise ConfigError(f"{flag}: expected more than 0 bytes{each}, but got {got}")
        return nbytes

    disk = hardware.disk
    if disk is None and question.disk_size is not None:
        raise ConfigError(
            f"--disk-size: expected a machine with a disk, but '{hardware.name}' has none; leave the option out, or "
            "name a machine with one, or measure this one with outcore probe --disk-dir"
        )
    device = hardware.device.memory_bytes / (1 if hardware.device.runs_ahead else count)
    disk_bytes = 0 if disk is None else given(question.disk_size, "--disk-size", _DISK_SHARE * disk.size_bytes, count)
    return Limits(
        device_bytes=given(question.device_memory, "--device-memory", _DEVICE_SHARE * device),
        host_bytes=given(question.host_memory, "--host-memory", _HOST_SHARE * hardware.host.memory_bytes, count),
        disk_bytes=None if disk is None else disk_bytes,
    )
