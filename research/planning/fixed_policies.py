"""Plans that a search finds beside fixed ones, by the simulator: 24 settings of models, machines, budgets and batches.

    python -m planning.fixed_policies          (in the folder research)

The fixed plans are: filling tier by tier as the rule does, everything in host memory, everything on disk, all
activations kept, all recomputed, and what two systems always do. ZeRO-Infinity has weights, gradients and states on
disk, arguments of blocks in host memory, and updates after backward. SSDTrain sends all activations to disk. Homes in
these two follow the rule if the system has none of its own. Each plan has as much room as the plan that is found.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from outcore.command.plan.answer import Answer, answer_for, machine_for
from outcore.command.plan.known_models import known_models
from outcore.command.plan.question import Question
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.homes.activation_policies import ActivationPolicy
from outcore.planner.homes.placement import place
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.plan_space import ALL_DISK, ALL_HOST, ROOMY, TIGHT, PlanSpace
from outcore.spec.budget import tier_bytes
from outcore.spec.plan import Plan

SMALL, MIDDLE, LARGE, EXPERTS, HUGE = (
    *("meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-32B"),
    *("Qwen/Qwen3-30B-A3B", "meta-llama/Llama-3.1-70B"),
)
SERVER = "+pcie4+server-ddr4+server-nvme"


@dataclass(frozen=True)
class Asked:
    """A setting in a few words."""

    model: str
    hardware: str
    device_memory: str
    host_memory: str
    batch_size: int = 2
    micro_batches: int = 1
    clipping: bool = True

    def question(self) -> Question:
        """The question as the command would ask it."""
        return Question(
            model=self.model,
            hardware=self.hardware,
            batch_size=self.batch_size,
            seq_len=2048,
            grad_accum=self.micro_batches,
            precision="bf16",
            clipping=self.clipping,
            device_memory=self.device_memory,
            host_memory=self.host_memory,
            disk_size="10TB",
        )


def settings() -> Iterator[Asked]:
    """Yield twenty-four settings."""
    for clipping in (True, False):
        yield Asked(SMALL, "rtx-4090" + SERVER, "8GiB", "16GiB", 1, clipping=clipping)
        yield Asked(SMALL, "rtx-4090" + SERVER, "14GiB", "60GiB", 4, clipping=clipping)
        yield Asked(MIDDLE, "rtx-4090" + SERVER, "21GiB", "60GiB", 1, clipping=clipping)
        yield Asked(MIDDLE, "rtx-4090" + SERVER, "21GiB", "120GiB", 2, 4, clipping=clipping)
        yield Asked(MIDDLE, "rtx-4090+pcie3+desktop-ddr5", "21GiB", "200GiB", 4, clipping=clipping)
        yield Asked(MIDDLE, "h100+pcie5+server-ddr5+server-nvme", "72GiB", "100GiB", 1, clipping=clipping)
        yield Asked(MIDDLE, "a100-80gb" + SERVER, "43GiB", "400GiB", 8, clipping=clipping)
        yield Asked(LARGE, "a100-80gb" + SERVER, "43GiB", "400GiB", 2, 2, clipping=clipping)
        yield Asked(LARGE, "h100+pcie5+server-ddr5+server-nvme", "72GiB", "800GiB", 4, clipping=clipping)
        yield Asked(EXPERTS, "rtx-4090" + SERVER, "21GiB", "300GiB", 2, clipping=clipping)
        yield Asked(EXPERTS, "h100+pcie5+server-ddr5+server-nvme", "72GiB", "800GiB", 4, clipping=clipping)
        yield Asked(HUGE, "a100-80gb" + SERVER, "72GiB", "400GiB", 2, clipping=clipping)


def _filled(job: PlanQuestion) -> Plan:
    """A plan by the rule."""
    steps = job.promised_steps
    return place(job.model, job.limits, accumulation_steps=steps, activations=job.activations(job.ways[0]))


def _all(kind: UnitHomes) -> Callable[[PlanQuestion], Plan]:
    def plan(job: PlanQuestion) -> Plan:
        choice = PlanSpace(job.model, accumulation_steps=None, may_be_early=False)
        for comfort in (ROOMY, TIGHT):
            found = choice.plan(choice.uniform(kind, comfort))
            taken, room = tier_bytes(job.model, found), job.room(job.ways[0])
            if all(taken[tier] <= room[tier] for tier in room):
                return found
        raise PlanInfeasibleError("it does not fit", {}, {})

    return plan


@dataclass(frozen=True)
class Fixed:
    """A fixed policy."""

    name: str
    plan: Callable[[PlanQuestion], Plan]
    away: ActivationPolicy | None = None
    keeps: bool = True
    """Whether activations are kept where there is room, although the policy would recompute them."""


FIXED = (
    Fixed("filled tier by tier", _filled),
    Fixed("all in host memory", _all(ALL_HOST)),
    Fixed("all on disk", _all(ALL_DISK)),
    Fixed("keep", _filled, ActivationPolicy("device", "keep")),
    Fixed("recompute", _filled, keeps=False),
    Fixed("ZeRO-Infinity", _all(ALL_DISK), ActivationPolicy("host", "recompute"), keeps=False),
    Fixed("SSDTrain", _filled, ActivationPolicy("disk", "keep"), keeps=False),
)


def step_s(answer: Answer, fixed: Fixed) -> float | None:
    """Seconds of a step; None if it does not fit."""
    job = replace(answer.setting, ways=(fixed.away,))
    try:
        plan = fixed.plan(job)
    except PlanInfeasibleError:
        return None
    return Evaluations(job if fixed.keeps else replace(job, keeps_what_fits=False)).simulation(plan, job.ways[0]).step_s


def main() -> None:
    known = {each.name: each for each in known_models()}
    print("| model | machine | device, host | batch | step | found in |", " | ".join(f.name for f in FIXED), "|")
    print("|---|---|---|---|---|---|", "---|" * len(FIXED), sep="")
    least = math.inf
    for asked in settings():
        question = asked.question()
        start_s = time.process_time()
        answer = answer_for(question, known[asked.model].source, machine_for(question))
        took_s, found_s = time.process_time() - start_s, answer.found.simulation.step_s
        ratios = [None if s is None else s / found_s for s in (step_s(answer, fixed) for fixed in FIXED)]
        least = min([least, *(ratio for ratio in ratios if ratio is not None)])
        batch = f"{asked.micro_batches} x {asked.batch_size}{'' if asked.clipping else ', no clipping'}"
        cells = [asked.model.partition("/")[2], asked.hardware, f"{asked.device_memory}, {asked.host_memory}", batch]
        cells += [f"{found_s:.3g} s", f"{took_s:.1f} s", *("-" if r is None else f"{r:.3f}" for r in ratios)]
        print(f"| {' | '.join(cells)} |", flush=True)
    print(f"\nleast: {least:.4f} of what was found")


if __name__ == "__main__":
    main()
