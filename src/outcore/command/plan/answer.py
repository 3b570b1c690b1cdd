"""``outcore plan``: whether a model fits a machine, how fast it trains there, and what limits it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast, get_args

from outcore.command.plan.known_models import known_named
from outcore.command.plan.plan_request import MicroBatch, PlannedDevice, PlanRequest, sharings_of
from outcore.command.plan.question import Question
from outcore.command.train.model.adapters import with_adapters
from outcore.core.errors import ConfigError
from outcore.core.quantities import parse_bytes
from outcore.device.opening import usual_device
from outcore.integrations.optimizers import optimizer_named
from outcore.model.partition import partition
from outcore.optim.joined import members
from outcore.optim.rules import rule_for
from outcore.planner.forward.footprint import as_run
from outcore.planner.homes.activation_policies import ActivationPolicy, ways_to
from outcore.planner.homes.occupancy import TierLoad, occupancy, peak_of
from outcore.planner.homes.placement import Least, least
from outcore.planner.homes.pools import LEAST, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import Found, explain
from outcore.planner.timing.simulate import steps_until_settled
from outcore.preparation.forecast import Loop, hardware_for
from outcore.preparation.prepare_options import Options
from outcore.preparation.with_ranks import among
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.lane_names import RANK_LANES
from outcore.spec.model import ModelSpec, Precision
from outcore.spec.plan import TIERS, AwayTier, Plan, Tier
from outcore.spec.schedule import usual_visits
from outcore.spec.timeline import WRITES_TO_DISK

if TYPE_CHECKING:
    from outcore.command.train.model.source import ModelSource

_DEVICE_SHARE, _HOST_SHARE, _DISK_SHARE = 0.9, 0.8, 0.9
"""Default budgets as shares of a machine's memory: the rest is for the driver and for other programs."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plan, and what it was made for."""

    question: Question
    source: ModelSource | None
    """Where the model's configuration comes from; None: a model was given from Python."""
    setting: PlanQuestion
    """What was asked of the planner."""
    found: Found
    """What the search found. Its plan is the one that a run with the same budgets would follow."""
    guess: str = ""
    """Why the model could not be followed on shapes; empty if it could."""
    notes: Sequence[str] = ()
    """What of a run differs from what is predicted."""

    @classmethod
    def of(cls, question: Question, source: ModelSource | None, request: PlanRequest, notes: Iterable[str]) -> Answer:
        """Return the answer to a request. Args: notes: Those on the model."""
        plan, bare, candidate, setting = request.planned()
        found = dataclasses.replace(explain(setting, bare, candidate), plan=plan)
        notes = (*notes, *request.notes)
        return cls(question=question, source=source, setting=setting, found=found, guess=request.guess, notes=notes)

    @property
    def hardware(self) -> Hardware:
        """The machine."""
        return cast("Hardware", self.setting.machine)

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
        """Predicted tokens per second of all ranks together; samples where there are no tokens."""
        step_s = self.found.simulation.step_s
        return self.setting.tokens / step_s if step_s else 0.0

    @property
    def busiest_lane(self) -> tuple[str, float]:
        """The lane that works longest in a step, and its seconds."""
        return max(self.busy_s().items(), key=lambda item: item[1], default=("compute", 0.0))

    @cached_property
    def loads(self) -> tuple[TierLoad, ...]:
        """What is predicted to be in use on each tier over time."""
        job, visits, plan = self.setting, usual_visits(self.spec, self.setting.micro_batches), self.run
        footprint, circumstances = job.footprint, Circumstances(clips=job.clipping)
        steps = [] if footprint is None else footprint.alive(plan.units)
        alive = {(step.unit, step.is_backward): nbytes for step, nbytes in steps if step.unit}
        warm_up = steps_until_settled(plan)
        return occupancy(self.spec, plan, job.rates, visits, circumstances, alive=alive, warm_up=warm_up)

    @cached_property
    def run(self) -> Plan:
        """The plan as it runs: with the activations that there is room to keep."""
        plan, footprint = self.found.plan, self.setting.footprint
        if plan.plain:  # nothing would use its slots
            plan = dataclasses.replace(plan, pools=pools_for(self.spec, plan.units, LEAST))
        keeps = plan.plain or self.setting.keeps_what_fits
        return plan if footprint is None else as_run(plan, footprint.saved if keeps else {}, plan.kept_bytes)

    @cached_property
    def least(self) -> Least:
        """The least budgets that would suffice, with whatever way to share weights and to treat activations."""
        job, ranks = self.setting, self.setting.ranks
        sharings = [self.spec.sharing] if ranks.size == 1 else sharings_of(ranks)
        models = [dataclasses.replace(self.spec, sharing=sharing) for sharing in sharings]
        away: list[ActivationPolicy] = []
        if job.footprint is not None and job.activation_share:  # the device has memory of its own
            away = [way for tier in get_args(AwayTier) for way in ways_to(tier, job.footprint)]
        ways = [job.activations(way) for way in dict.fromkeys([*job.ways, *away])]
        return Least.of_any([least(model, job.limits, ways) for model in models])

    @property
    def activation_bytes(self) -> int | None:
        """The most that activations and workspace take on the device; None: not known."""
        footprint = self.setting.footprint
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
    from outcore.command.train.model.source import find_shapes

    known = known_named(model)
    return find_shapes(model) if known is None else known.source


def answer_for(question: Question, source: ModelSource, hardware: Hardware) -> Answer:
    """Answer for a model and a machine that were found already. Raises: As ``answer``."""
    question, request, notes = _asking(question, source, hardware)
    return Answer.of(question, source, request, notes)


def usual_plan(question: Question, source: ModelSource, hardware: Hardware) -> tuple[Plan, PlanQuestion]:
    """Return the plan of the rule, and the setting in which to search for a faster one. Raises: As ``answer``."""
    _, request, _ = _asking(question, source, hardware)
    chosen = request.planned(searches=False)
    return chosen.plan, chosen.question


def _asking(question: Question, source: ModelSource, hardware: Hardware) -> tuple[Question, PlanRequest, list[str]]:
    """Return the question with what its inputs say, the request to plan, and notes on the model."""
    # Here, since outcore.plan needs no Transformers.
    from outcore.command.plan.any_model import build_any, inputs_for, is_causal, notes_on

    precision = cast("Precision", question.precision)
    limits = limits_for(question, hardware)
    source = source.quantised(question.quantization, has_adapters=question.lora is not None)
    notes = list(notes_on(source))  # building switches off what they tell of
    model = build_any(source, precision)
    trains_text = is_causal(model)
    question, inputs, optional = inputs_for(model, question)
    adapted = model
    if question.lora is not None:
        task = {"task_type": "CAUSAL_LM"} if trains_text else {}
        try:
            adapted = with_adapters(model, {"r": question.lora, "target_modules": "all-linear", **task})
        except ConfigError:
            raise
        except (ValueError, TypeError, RuntimeError) as error:  # such as for Mamba
            raise ConfigError(f"--lora: expected a model that PEFT adapts, but it refuses this one: {error}") from error
    optimizer = optimizer_named(question.optim, adapted, question.master_format)
    keeps = rule_for(*members(optimizer)).kept(optimizer.param_groups)
    # As in a run of outcore train: TRL, if it is installed, computes losses in tiles.
    makes_logits = not trains_text or find_spec("trl") is None
    loop = Loop(question.grad_accum, clips=question.clipping, is_promised=True, makes_logits=makes_logits)
    request = PlanRequest(
        cut=among(partition(adapted, keeps=keeps, precision=precision), question.ranks, 0),
        options=Options(sample=inputs, precision=precision, loop=loop),
        batch=MicroBatch(question.batch_size, question.seq_len, optional),
        where=f"--model '{question.model}'",
        hardware=hardware,
        device=PlannedDevice.of(hardware),
        limits=limits,
        ranks=question.ranks,
    )
    return question, request, notes


def machine_for(question: Question) -> Hardware:
    """Return the machine that was named, or this one with the drives measured last. Raises: ConfigError: No machine."""
    here = PlannedDevice(usual_device(), has_host_memory=False, activation_share=0.0)
    found = hardware_for(question.hardware, here, None, may_measure=True)
    if found is None:
        raise ConfigError(
            "--hardware: expected a machine to plan for, but none is named, and this one is not measured; name a "
            "file or parts, or run outcore probe"
        )
    return found


def limits_for(question: Question, hardware: Hardware) -> Limits:
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
