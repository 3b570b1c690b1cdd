"""The runs: a model, a plan, a setting. Plans put units on tiers by force, without the planner."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from plans import forced
from torch import nn

import outcore
from outcore.engine.activations import offloaded_call as away
from outcore.model import expensive_operations as dear
from outcore.planner.homes.check import can_be_plain
from outcore.planner.homes.pools import LEAST, Comfort
from outcore.spec.plan import TIERS

from . import zoo
from .loops import Record, Setting, plain_backward, streamed_loop

KINDS = ("device", "fits", "host", "disk", "mixed")
"""``fits`` is ``device``, but plain if possible."""
ROOMS = (0, 2**15, 2**30)  # bytes for activations: none, for some calls, for all
PRECISIONS = ("fp32", "bf16", "pure_bf16")
POLICIES = ("recompute", "keep", "select", "mixed")
MIXED = (
    ("device", "host", "disk"),
    ("disk", "host", "host"),
    ("device", "device", "host"),
    ("host", "disk", "disk"),
    ("device", "device", "device"),
    ("disk", "device", "disk"),
    ("host", "device", "host"),
    ("device", "disk", "host"),
    ("host", "host", "disk"),
    ("disk", "disk", "host"),
    ("device", "device", "disk"),
    ("host", "host", "host"),
    ("disk", "host", "disk"),
    ("device", "host", "host"),
    ("host", "disk", "host"),
    ("disk", "device", "host"),
    ("device", "disk", "disk"),
    ("host", "device", "disk"),
    ("disk", "disk", "disk"),
)
"""Home tiers (weights, gradients, states): all 19 legal combinations; neighbours differ in nearly everything."""


PLAIN = Setting()


@dataclass(frozen=True)
class Case:
    """One comparison."""

    name: str
    kind: str
    setting: Setting = PLAIN
    policy: str = "recompute"  # or "keep", "select"; "mixed" alternates
    activations: str = "device"  # where saved activations rest; "mixed" alternates
    promised: bool = False  # prepare gets accumulation_steps and, without clipping, clipping=False
    share: float = 0.0  # share of the units that are updated on the device through staging slots
    early: bool = False  # with promised: every unit that can be is updated inside backward
    order: str = "usual"  # of updates; "in turn": units whose states are still in slots are not first; or "shuffled"
    depth: int = 1
    offset: int = 0  # where a mixed plan begins in MIXED
    units: tuple[Any, ...] | None = None  # classes or names, instead of the units that are found
    is_minimal: bool = False  # one slot of each kind
    room: int = 0  # bytes for activations of units that the policy would recompute
    pieces: int = 1  # pieces in which units run a batch

    def __str__(self) -> str:
        parts = [
            self.name,
            self.kind,
            f"{self.policy} on {self.activations}",
            f"depth={self.depth}",
            f"offset={self.offset}",
            str(self.setting),
        ]
        return "-".join(
            parts
            + ["promised"] * self.promised
            + ["early"] * self.early
            + [f"share={self.share:.2g}"] * bool(self.share)
            + [f"{self.order} order"] * (self.order != "usual")
            + ["minimal"] * self.is_minimal
            + [f"room={self.room}"] * bool(self.room)
            + [f"pieces={self.pieces}"] * (self.pieces > 1)
        )

    def options(self, folder: Path) -> dict[str, Any]:
        """Arguments of ``prepare`` other than the plan."""
        options: dict[str, Any] = {"budget": outcore.Budget(disk=str(folder))}
        if self.units is not None:
            options["units"] = list(self.units)
        if self.pieces > 1:
            options["micro_batches_in_unit"] = self.pieces
        if self.promised:
            options["accumulation_steps"] = self.setting.micro_batches
            options["clipping"] = self.setting.clipping != "off"
        return options

    def plan(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Any:
        """Return the plan for a model, with the tiers of this case."""
        comfort = Comfort(prefetch_depth=self.depth, num_buckets=2, max_slots_host=3)
        spec, plan = forced(
            model,
            optimizer,
            lambda i: tiers(self.kind, i, self.offset),
            policy=lambda i: unit_policy(self.policy, i),
            activations=lambda i: TIERS[(i + i // 3) % 3] if self.activations == "mixed" else self.activations,
            units=self.units,
            precision=self.setting.precision,
            comfort=LEAST if self.is_minimal else comfort,
            depth=self.depth,
            steps=self.setting.micro_batches if self.promised else None,
            early=self.early and self.promised,
            share=self.share,
            pieces=self.pieces,
        )
        first = [unit.name for unit in plan.units] if self.order == "shuffled" else []
        random.Random(str(self)).shuffle(first)
        plan = dataclasses.replace(
            plan, kept_bytes=self.room, kept_updated_first=self.order != "in turn", updated_first=tuple(first)
        )
        is_plain = self.kind == "fits" and not self.promised and can_be_plain(spec, plan)
        return dataclasses.replace(plan, plain=True, pools=()) if is_plain else plan


def run(case: Case, folder: Path, *, prepare: Callable[..., Any] | None = None, **more: Any) -> Record:
    """Train a case with the streamed loop."""
    options = {**case.options(folder), **more}
    with mock.patch.object(away, "SMALL_BYTES", 64), mock.patch.object(dear, "DEAR_FLOP_PER_BYTE", 1):  # tiny models
        return streamed_loop(case.name, case.setting, make_plan=case.plan, prepare=prepare, **options)


def run_checked(case: Case, folder: Path, *, is_nosy: bool = False, **faults: Any) -> Record:
    """Train with faults under the race checker, which raises if two accesses are not ordered.

    Args:
        case: What to train.
        folder: Of the disk tier.
        is_nosy: Whether to look at weights, gradients and states whenever a loop may, which changes no result.
        faults: Fields of ``Faults``.
    """
    from plans import prepare_for_test

    from outcore.device.faults import Faults
    from outcore.device.race import RaceChecker

    checker = RaceChecker()

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, faults=Faults(**faults), race_checker=checker, **options)
        if is_nosy:
            prepared[1].register_step_post_hook(spoil_gradients)
        return prepared

    look = _backward_and_look if case.activations == "device" else _backward_and_leave_off
    looks = {"backward": look, "after_step": _read_states} if is_nosy else {}
    record = run(case, folder, prepare=prepare, **looks)
    assert checker.num_accesses > 0
    return record


def _backward_and_look(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Use weights once more after the unit's gradients have left."""
    loss = plain_backward(model, batch, micro_batches)
    model.eval()
    with torch.no_grad():
        zoo.loss(model, batch)
    model.train()
    return loss


def _backward_and_leave_off(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Begin another backward, which brings activations back that nothing uses."""
    loss = plain_backward(model, batch, micro_batches)
    model.eval()
    last = [p for p in model.parameters() if p.requires_grad][-4:]  # some parameters of the last unit
    torch.autograd.grad(zoo.loss(model, batch), last, allow_unused=True)
    model.train()
    return loss


def spoil_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Overwrite gradients, about to be dropped, while updates may still read them. Division by 3 needs the bytes."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.div_(3.0)


def _read_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Read states before anything else waits for the update."""
    optimizer.state_dict()


def tiers(kind: str, i: int, offset: int = 0) -> tuple[str, str, str]:
    """Return the home tiers of unit ``i``; unit 0 is the root, whose weights are always resident.

    Beside ``KINDS`` there is ``"resident"``: weights stay on the device, the rest on the host.
    """
    if kind == "resident":
        return ("device", "host", "host")
    if kind == "fits":
        return ("device", "device", "device")
    if kind != "mixed":
        return ("device" if i == 0 else kind, kind, kind)
    legal = [c for c in MIXED if i > 0 or c[0] == "device"]
    return legal[(i + offset) % len(legal)]


def unit_policy(policy: str, i: int) -> str:
    """Return the policy of unit ``i``."""
    return policy if policy != "mixed" else ("keep", "recompute", "select")[i % 3]


def pairwise() -> Iterator[Case]:
    """Yield every combination of plan kind, precision and policy, with all pairs of other choices somewhere among them.

    Greedy: Greedy: each case takes, of random choices, the one with the most new pairs for its time.
    """
    rng = random.Random(3)
    seen: set[tuple[object, ...]] = set()
    for kind, precision, policy in itertools.product(KINDS, PRECISIONS, POLICIES):
        fixed = {"kind": kind, "precision": precision, "policy": policy}
        tries = [fixed | {k: rng.choice(v) for k, v in CHOICES.items()} for _ in range(300)]
        best = max(tries, key=lambda chosen: (len(pairs(chosen) - seen) / (8 + _cost(chosen)), -_cost(chosen)))
        seen |= pairs(best)
        yield _case(best)


CHOICES: dict[str, Sequence[Any]] = {
    "name": zoo.MODELS,
    "micro_batches": (1, 3),
    "clipping": ("off", "on", "always"),
    "groups": ("one", "two"),
    "scheduler": ("none", "lambda", "cosine"),
    "optimizer": ("adamw", "adam", "sgd", "nesterov", "adagrad"),
    "promised": (False, True),
    "early": (False, True),
    "share": (0.0, 0.5),
    "order": ("usual", "in turn", "shuffled"),
    "depth": (0, 1, 2),
    "offset": tuple(range(len(MIXED))),
    "room": ROOMS,
    "activations": ("device", "host", "disk", "mixed"),
}


def pairs(chosen: dict[str, Any]) -> set[tuple[object, ...]]:
    """Return all pairs of choices that a case covers, without the offset."""
    names = sorted(set(chosen) - {"offset"})
    return {(a, chosen[a], b, chosen[b]) for a, b in itertools.combinations(names, 2)}


def _cost(chosen: dict[str, Any]) -> float:
    """Return about how long a case takes, in forward passes of a small model."""
    return (1 + chosen["micro_batches"]) * {"lora": 1.5, "llama": 1.2, "mixtral": 1.1}.get(chosen["name"], 0.9)


def _case(chosen: dict[str, Any]) -> Case:
    names = {f.name for f in dataclasses.fields(Setting)}
    setting = Setting(**{k: v for k, v in chosen.items() if k in names})
    return Case(setting=setting, **{k: v for k, v in chosen.items() if k not in names})
