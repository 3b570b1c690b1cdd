"""Run a program twice, plain and prepared, and report how well the two agree."""

from __future__ import annotations

import contextlib
import dis
import functools
import gc
import random
import re
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from plans import forced
from torch import nn
from torch.nn import functional

import outcore
from outcore.core.errors import LaneError, OutcoreError, PlanInfeasibleError, RaceError
from outcore.engine.activations import offloaded_call as away
from outcore.model import expensive_operations as dear

from .blocks import DEVICE, KINDS, VOCAB, Block
from .program import Program

SOURCE = str(Path(outcore.__file__).parent)
INJECTS = "device/faults.py"
"""A file that exists only for tests, and is never interrupted."""


class Net(nn.Module):
    """Embedding, blocks and head."""

    def __init__(self, spec: dict[str, Any], seed: int) -> None:
        super().__init__()
        rng, width = random.Random(seed), spec["width"]
        self.embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            Block(
                KINDS[b["kind"]](width, rng), style=b["style"], call=b["call"], trips=spec["trips"], ends=spec["ends"]
            )
            for b in spec["blocks"]
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCAB, bias=not spec["tied"])
        for block, described in zip(self.blocks, spec["blocks"], strict=True):
            params = list(block.parameters())
            for p in params if described["frozen"] == "all" else params[:2] if described["frozen"] == "some" else ():
                p.requires_grad_(False)
        self.embed.weight.requires_grad_(not spec["frozen_embedding"])
        if spec["tied"]:
            self.head.weight = self.embed.weight
        if spec["shared"]:
            _share(*(self.blocks[i] for i in spec["shared"]))
        if spec["same"]:
            i, j = spec["same"]
            self.blocks[j] = self.blocks[i]
        self.tensor_hook: tuple[int, Callable[[torch.Tensor], torch.Tensor]] | None = None

    def forward(self, ids: torch.Tensor, order: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.embed(ids)
        aux = torch.zeros(())
        for i in order:
            x, more = self.blocks[i].run(x)
            if self.tensor_hook is not None and self.tensor_hook[0] == i and x.requires_grad:
                x.register_hook(self.tensor_hook[1])
            if more is not None:
                aux = aux + 0.1 * more.float()
        return self.head(self.norm(x)), aux


def _share(one: nn.Module, other: nn.Module) -> None:
    """Let two blocks share one weight, if both have one of the same shape."""
    places = [(m, n, p) for m in other.modules() for n, p in m.named_parameters(recurse=False)]
    for p in one.parameters():
        for module, name, old in places:
            if old.shape == p.shape and p.ndim == 2 and type(module).__name__ != "ParametrizationList":
                setattr(module, name, p)
                return


# -- the plain side and the prepared one ------------------------------------------------------------------------------


class Side:
    """A model with its optimizer; the loop below drives either side."""

    def __init__(self, program: Program) -> None:
        self.program, self.precision = program, program["precision"]
        torch.manual_seed(program["seed"])
        self.model = Net(program["model"], program["seed"])
        if self.precision != "fp32":
            self.model.to(torch.bfloat16)
        self.model.train()
        self.calls: list[str] = []

    def build_optimizer(self, named: dict[str, nn.Parameter], **more: Any) -> torch.optim.Optimizer:
        spec = self.program["optimizer"]
        cls, options, count = getattr(torch.optim, spec["name"]), dict(spec["options"]), spec["groups"]
        groups: list[dict[str, Any]] = [{"params": []} for _ in range(count)]
        for i, p in enumerate(named.values()):
            groups[(0 if count == 1 else p.ndim < 2 if count == 2 else i % count)]["params"].append(p)
        for i, group in enumerate(groups[1:], start=1):
            group.update({"lr": options["lr"] * (1 + i), "weight_decay": 0.0})
        return cls([part for g in groups if g["params"] for part in self.finish_group(g)], **options)

    def finish_group(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        return [group]

    def build_schedule(self, optimizer: torch.optim.Optimizer) -> Any:  # noqa: PLR0911
        s, kind = torch.optim.lr_scheduler, self.program["schedule"]["kind"]
        if kind == "lambda":
            return s.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
        if kind == "cosine":
            return s.CosineAnnealingLR(optimizer, T_max=4)
        if kind == "onecycle":
            cycles = "betas" in optimizer.defaults or bool(optimizer.defaults.get("momentum"))
            return s.OneCycleLR(optimizer, max_lr=0.02, total_steps=40, cycle_momentum=cycles)
        if kind == "step":
            return s.StepLR(optimizer, 2, 0.5)
        if kind == "plateau":
            return s.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        if kind == "chained":
            return s.SequentialLR(
                optimizer, [s.LinearLR(optimizer, 0.1, total_iters=2), s.ExponentialLR(optimizer, 0.9)], [2]
            )
        return None

    def add_hooks(self, when_early: bool) -> None:
        """Add hooks. Args: when_early: Those that are added before ``prepare``, or those after it."""
        for hook in self.program["hooks"]:
            block = self.model.blocks[hook["block"]]
            optimizer = hook["kind"].startswith("optimizer")
            if hook["early"] is not when_early:
                continue
            if hook["kind"] == "forward":
                block.inner.register_forward_hook(lambda m, a, r: (r[0] * 1.25, r[1]))
            elif hook["kind"] == "forward_pre":
                block.inner.register_forward_pre_hook(lambda m, a: (a[0] * 0.75,))
            elif hook["kind"] == "backward":
                block.register_full_backward_hook(lambda m, i, o: self.calls.append("backward"))
            elif hook["kind"] == "tensor":
                # None as for any custom function that no gradient reaches; the plain loop does not call the hook then.
                self.model.tensor_hook = (hook["block"], lambda g: None if g is None else g * 0.5)
            elif hook["kind"] in ("parameter", "parameter_look"):
                for p in [p for p in block.parameters() if p.requires_grad][:2]:
                    p.register_hook(_doubled if hook["kind"] == "parameter" else self._note_gradient)
            elif optimizer:
                name = "register_step_pre_hook" if hook["kind"] == "optimizer_pre" else "register_step_post_hook"
                getattr(self.optimizer, name)(lambda o, a, k: self.calls.append("step"))

    def _note_gradient(self, gradient: torch.Tensor | None) -> None:
        if gradient is not None:  # a plain loop calls hooks also where no gradient arrives
            self.calls.append(f"{gradient.sum():.3e}")

    def tensors(self) -> dict[str, torch.Tensor]:
        return {n: t.detach().clone() for n, t in self.model.state_dict().items()}

    # What differs between the sides.

    optimizer: torch.optim.Optimizer
    schedule: Any = None
    is_prepared = False

    def clipped(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def after_backward(self) -> None: ...

    def before_step(self) -> None: ...

    def after_step(self) -> None: ...

    def editing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def _doubled(gradient: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None else gradient * 2


class Plain(Side):
    """The loop as a user would write it; bf16 keeps fp32 accumulators and masters beside the model."""

    def __init__(self, program: Program) -> None:
        super().__init__(program)
        self.trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        masters = self.precision == "bf16"
        self.updated = {
            n: nn.Parameter(p.detach().float().clone()) if masters and p.dtype != torch.float32 else p
            for n, p in self.trained.items()
        }
        self.optimizer = self.build_optimizer(self.updated)
        self.add_hooks(True)
        self.schedule = self.build_schedule(self.optimizer)
        self.add_hooks(False)

    def finish_group(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        if self.program["optimizer"]["name"] != "SGD":
            return [{**group, "fused": True}]
        # On the CPU, SGD with fused=True skips most of a bf16 parameter (torch 2.11 to 2.13). It raises if parameters
        # of a group get their first gradients in different steps: so each parameter has a group of its own.
        return [{**group, "params": [p], "fused": p.dtype == torch.float32} for p in group["params"]]

    def clipped(self) -> list[torch.Tensor]:
        return list(self.updated.values())

    def gradient_of(self, name: str) -> Any:
        return self.updated[name]

    def after_backward(self) -> None:
        for n, p in self.trained.items():
            if p is self.updated[n] or p.grad is None:
                continue
            grad = p.grad.float()
            self.updated[n].grad = grad.clone() if self.updated[n].grad is None else self.updated[n].grad.add_(grad)
            p.grad = None

    @torch.no_grad()
    def before_step(self) -> None:
        for n, p in self.trained.items():
            master = self.updated[n]
            if p is not master:
                master.copy_(torch.where(p != master.to(p.dtype), p.float(), master))

    @torch.no_grad()
    def after_step(self) -> None:
        for n, p in self.trained.items():
            if p is not self.updated[n]:
                p.copy_(self.updated[n])

    def zero(self, by: str, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for p in self.model.parameters():
            if all(p is not u for u in self.updated.values()):
                p.grad = None

    def save(self) -> Any:
        self.before_step()
        copies = {n: p.detach().clone() for n, p in self.updated.items()}
        return self.tensors(), copies, _copied(self.optimizer.state_dict())

    @torch.no_grad()
    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        for n, p in self.updated.items():
            p.copy_(saved[1][n])
        self.optimizer.load_state_dict(_copied(saved[2]))  # torch keeps some of these tensors without a copy

    def states(self) -> dict[str, Any]:
        self.before_step()
        names = {id(p): n for n, p in self.updated.items()}
        found = _states(self.optimizer, names)
        for n, state in found.items():
            if self.trained[n] is not self.updated[n]:
                state["master"] = self.updated[n].detach().clone()
        return _with_moments(found)

    def read(self) -> dict[str, torch.Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        yield


class Prepared(Side):
    """The same model and optimizer after ``prepare``."""

    is_prepared = True

    def __init__(self, program: Program, folder: Path) -> None:
        super().__init__(program)
        named = dict(self.model.named_parameters())
        self.trained = {n: p for n, p in named.items() if p.requires_grad}
        self.names = {id(p): n for n, p in named.items()}
        self.optimizer = self.build_optimizer(self.trained)
        self.add_hooks(True)
        if program["schedule"]["before"]:
            self.schedule = self.build_schedule(self.optimizer)
        self.checker = None
        self.model, self.optimizer = self._prepare(folder)
        if not program["schedule"]["before"]:
            self.schedule = self.build_schedule(self.optimizer)
        self.add_hooks(False)

    def _prepare(self, folder: Path) -> Any:
        from plans import prepare_for_test

        from outcore.device.faults import Faults
        from outcore.device.race import RaceChecker

        spec = self.program["plan"]
        options: dict[str, Any] = {"precision": self.precision, "units": self._units()}
        if spec["promised"]:
            options["accumulation_steps"] = self.program["loop"]["micros"]
            options["clipping"] = _asks_norms(self.program)
        options["budget"] = outcore.Budget(disk=str(folder))
        if self.program["pieces"] > 1:
            options["micro_batches_in_unit"] = self.program["pieces"]
        if spec["how"] == "given":
            options["plan"] = self._plan(options)
        elif spec["how"] == "budget":
            options["budget"] = self._budget(options, folder)
        self.checker = RaceChecker()
        return prepare_for_test(
            self.model,
            self.optimizer,
            faults=Faults(**spec["faults"]),
            race_checker=self.checker,
            device=DEVICE,
            **options,
        )

    def _units(self) -> list[str] | None:
        wanted = self.program["plan"]["units"]
        if wanted == "some":
            return ["blocks.0"]
        return None if wanted is None else ["blocks.*"] if wanted == "blocks" else ["blocks.*", "embed"]

    def _budget(self, options: dict[str, Any], folder: Path) -> Any:
        from plans import plan_for

        generous = {**options, "budget": outcore.Budget(device="1GiB", host="1GiB", disk=str(folder))}
        _, plan = plan_for(self.model, self.optimizer, **generous)
        try:
            plan_for(
                self.model, self.optimizer, **{**options, "budget": outcore.Budget(device=1, host=1, disk=str(folder))}
            )
        except PlanInfeasibleError as error:
            least = error.required_bytes
        else:
            raise AssertionError("a budget of one byte was accepted")
        sizes = {
            tier: int(least[tier] + self.program["plan"]["fraction"] * max(0, plan.tier_bytes[tier] - least[tier]))
            for tier in ("device", "host")
        }
        return outcore.Budget(**sizes, disk=str(folder))

    def _plan(self, options: dict[str, Any]) -> Any:
        from outcore.planner.homes.pools import Comfort

        spec, steps = self.program["plan"], options.get("accumulation_steps")
        slots = spec["slots"]
        return forced(
            self.model,
            self.optimizer,
            lambda i: spec["homes"][i % len(spec["homes"])],
            policy=lambda i: spec["policies"][i % len(spec["policies"])],
            activations=lambda i: spec["activations"][i % len(spec["activations"])],
            units=options["units"],
            precision=self.precision,
            comfort=Comfort(prefetch_depth=slots - 1, num_buckets=min(slots, 2), max_slots_host=slots),
            depth=spec["depth"],
            steps=steps,
            early=spec["early"] and steps is not None,
            share=spec["share"],
            pieces=self.program["pieces"],
        )[1]

    def finish_group(self, group: dict[str, Any]) -> list[dict[str, Any]]:
        return [{**group, "master_format": "compact"} if self.program["compact"] else group]

    def editing(self) -> contextlib.AbstractContextManager[None]:
        return outcore.gathered(self.model, write=True)

    def gradient_of(self, name: str) -> Any:
        return self.trained[name]

    def zero(self, by: str, set_to_none: bool) -> None:
        (self.optimizer if by == "optimizer" else self.model).zero_grad(set_to_none=set_to_none)

    def save(self) -> Any:
        return self.tensors(), None, _copied(self.optimizer.state_dict())

    def load(self, saved: Any) -> None:
        self.model.load_state_dict(saved[0])
        self.optimizer.load_state_dict(_copied(saved[2]))  # torch keeps some of these tensors without a copy

    def states(self) -> dict[str, Any]:
        return _with_moments({n: s for n, s in _states(self.optimizer, self.names).items() if n in self.trained})

    def read(self) -> dict[str, torch.Tensor]:
        params = dict(self.model.named_parameters())
        return {n: t.detach().clone() for n, t in outcore.named_tensors(self.model) if n in params}

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            outcore.close(self.model, keep_weights=False)


def _copied(nest: Any) -> Any:
    if isinstance(nest, torch.Tensor):
        return nest.detach().clone()
    if isinstance(nest, dict):
        return {k: _copied(v) for k, v in nest.items()}
    return [_copied(v) for v in nest] if isinstance(nest, list) else nest


def _states(optimizer: torch.optim.Optimizer, names: dict[int, str]) -> dict[str, Any]:
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    return {
        order[i]: {k: torch.as_tensor(v).detach().clone() for k, v in values.items() if v is not None}
        for i, values in optimizer.state_dict()["state"].items()
    }


def _with_moments(states: dict[str, Any]) -> dict[str, Any]:
    """Leave out states that are only a master: plain SGD has none, and the weights are compared anyway.

    States of a parameter without a step go, too: if it has a master, its initial states are saved with the master.
    """
    return {n: s for n, s in states.items() if set(s) - {"master"} and s.get("step") != 0}


def _asks_norms(program: Program) -> bool:
    steps = program["loop"]["steps"]
    looks = [look for s in steps for look in (*s["before"], *s["between"], *s["after"])]
    looks += [look for s in steps for m in s["micros"] for look in m["between"]]
    return (
        any(s["clip"] != "none" for s in steps)
        or bool({"norms", "total_norm"} & set(looks))
        or program["scaler"] == "on"
    )


# -- the loop ---------------------------------------------------------------------------------------------------------


class Loop:
    """Drives one side through the program; ``seen`` is what both sides must agree on, in order of time."""

    def __init__(self, side: Side) -> None:
        self.side, self.program = side, side.program
        self.seen: list[tuple[str, Any]] = []
        self.saved: Any = None
        self.values: dict[str, torch.Tensor] = {}
        scaler = self.program["scaler"]
        self.scaler = (
            None
            if scaler is None
            else torch.amp.GradScaler(DEVICE, init_scale=2.0**8, growth_interval=2, enabled=scaler == "on")
        )
        self.where = "start"

    def note(self, what: str, value: Any) -> None:
        value = _copied(value)
        self.seen.append((f"{self.where}: {what}", value))

    def run(self) -> None:
        loop, side = self.program["loop"], self.side
        torch.manual_seed(loop["seed"])
        for number, step in enumerate(loop["steps"]):
            self.where = f"step {number}"
            self.look(step["before"])
            self.edit(step["edits"].get("before", ()))
            for i, micro in enumerate(step["micros"]):
                self.where = f"step {number}, micro-batch {i}"
                self.micro(micro)
                self.edit(step["edits"].get(str(i), ()))
            self.where = f"step {number}"
            self.look(step["between"])
            self.end_step(step)
            self.edit(step["edits"].get("after", ()))
            self.look(step["after"])
            if step["saves"]:
                self.saved = side.save()
            if step["loads"] and self.saved is not None:
                side.load(self.saved)
        self.where = "end"
        self.note("calls", sorted(side.calls))  # hooks of parameters may be called in another order
        self.note("tensors", side.tensors())
        self.note("parameters", side.read())
        self.note("states", side.states())

    def end_step(self, step: dict[str, Any]) -> None:  # noqa: C901, PLR0912
        side, scaler = self.side, self.scaler
        if step["scales"] is not None:
            for p in side.clipped():
                if p.grad is not None:
                    p.grad.mul_(step["scales"])
        if step["drops"]:
            name = list(side.trained)[-1]
            side.gradient_of(name).grad = None
        if step["rate"] is not None:
            for group in side.optimizer.param_groups:
                group["lr"] = group["lr"] * step["rate"]
        has_gradients = any(p.grad is not None for p in side.clipped())
        if scaler is not None and has_gradients and step["clip"] != "none":
            scaler.unscale_(side.optimizer)
        if step["clip"] in ("some", "always"):
            limit = 0.05 if step["clip"] == "always" else 1.0
            self.note("norm", torch.nn.utils.clip_grad_norm_(side.clipped(), limit))
        elif step["clip"] == "look":
            self.look(["total_norm"])
        if not step["steps"]:
            if step["zeroes"] and not (scaler is not None and has_gradients and step["clip"] != "none"):
                side.zero(step["by"], step["set_to_none"])
            elif scaler is not None and has_gradients and step["clip"] != "none":
                scaler.update()
                side.zero(step["by"], step["set_to_none"])
            return
        side.before_step()
        if scaler is not None and has_gradients:
            scaler.step(side.optimizer)
            scaler.update()
        else:
            side.optimizer.step()
        side.after_step()
        if side.schedule is not None:
            if self.program["schedule"]["kind"] == "plateau":
                side.schedule.step(3.0)
            else:
                side.schedule.step()
        self.note("rates", sorted({float(g["lr"]) for g in side.optimizer.param_groups}))
        if step["zeroes"] or scaler is not None:
            side.zero(step["by"], step["set_to_none"])

    # Edits of weights.

    def edit(self, edits: Sequence[str]) -> None:
        for what in edits:
            getattr(self, f"edit_{what}")()

    @torch.no_grad()
    def edit_perturb(self) -> None:
        with self.side.editing():
            self.values = {n: p.detach().clone() for n, p in self.side.model.named_parameters()}
            for p in self.side.model.parameters():
                p.mul_(1.05)

    @torch.no_grad()
    def edit_restore(self) -> None:
        with self.side.editing():
            for n, p in self.side.model.named_parameters() if self.values else ():
                p.copy_(self.values[n])

    def edit_cancel(self) -> None:
        self.edit_perturb()
        self.edit_restore()

    @torch.no_grad()
    def edit_some(self) -> None:
        with self.side.editing():
            for p in list(self.side.model.parameters())[::2]:
                p.view(-1)[: p.numel() // 3] = 0.125

    def edit_swap(self) -> None:
        before = self.side.tensors()
        self.side.model.load_state_dict({n: t.neg() if t.is_floating_point() else t for n, t in before.items()})
        self.side.model.load_state_dict(before)

    # A micro-batch.

    def loss(self, micro: dict[str, Any], more: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (micro["rows"], micro["length"])
        numbers = torch.Generator().manual_seed(micro["seed"] + more)
        ids = torch.randint(0, VOCAB, shape, generator=numbers, device="cpu").to(DEVICE)
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=self.program["autocast"]):
            logits, aux = self.side.model(ids, micro["order"])
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten())
        return loss, aux

    def backward(self, loss: torch.Tensor, **more: Any) -> None:
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**more)
        self.side.after_backward()

    def micro(self, micro: dict[str, Any]) -> None:
        fault = micro["fault"]
        if fault is None:
            self.work(micro)
        elif fault["where"] == "interrupt":
            self.interrupted(micro, fault)
        else:
            self.failing(micro, fault)

    def work(self, micro: dict[str, Any]) -> None:
        way = micro["way"]
        loss, aux = self.loss(micro)
        self.note("loss", loss)
        self.note("aux", aux)
        self.look(micro["between"])
        if way == "one":
            self.backward(loss + aux)
        elif way == "sum":
            other, more = self.loss(micro, 1)
            self.backward(loss + 0.5 * other + more)
        elif way == "retain":
            self.backward(loss, retain_graph=True)
            self.backward(0.5 * loss + aux)
        elif way == "two":
            if aux.requires_grad:
                self.backward(aux, retain_graph=True)
            self.backward(loss)
        elif way == "apart":
            other, _ = self.loss(micro, 2)
            self.note("other", other)
            self.backward(other)
            self.backward(loss)
        elif way == "parts":
            self.backward(0.3 * loss, retain_graph=True)
            self.backward(0.3 * loss, retain_graph=True)
            self.backward(0.4 * loss)

    def failing(self, micro: dict[str, Any], fault: dict[str, Any]) -> None:
        """Raise an error inside a block; the loop catches it and zeroes gradients."""
        error = {"ValueError": ValueError, "RuntimeError": RuntimeError, "MemoryError": MemoryError}.get(
            fault["error"], KeyboardInterrupt
        )("planted")
        trip, where = self.side.model.blocks[fault["block"]].trip, fault["where"]
        state = self.snapshot()
        try:
            if where == "forward":
                trip.arm("forward", error)
                loss, aux = self.loss(micro)
            else:
                loss, aux = self.loss(micro)
                trip.arm(where, error)
            self.backward(loss + aux)
        except (ValueError, RuntimeError, MemoryError, KeyboardInterrupt) as raised:
            if raised is not error and raised.__cause__ is not error:
                raise
        trip.where = None
        self.restore(state)
        self.side.zero("model", True)

    def interrupted(self, micro: dict[str, Any], fault: dict[str, Any]) -> None:
        """Press Ctrl-C somewhere inside outcore, then run again from where the interrupted part began."""
        if self.side.is_prepared:
            state = self.snapshot()
            length = len(self.seen)
            counter = LineCounter(None)
            with counter:
                self.work({**micro, "between": []})
            self.restore(state)
            self.side.zero("model", True)
            with contextlib.suppress(KeyboardInterrupt), LineCounter(1 + int(fault["part"] * counter.count)):
                self.work({**micro, "between": []})
            self.restore(state)
            del self.seen[length:]
        self.side.zero("model", True)
        self.work(micro)

    def snapshot(self) -> Any:
        named = [b for b in self.side.model.modules()]
        buffers = [(m, n, b, b.detach().clone()) for m in named for n, b in m._buffers.items() if b is not None]
        states = torch.get_rng_state(), None if DEVICE == "cpu" else torch.cuda.get_rng_state()
        return states, buffers, list(self.side.calls)

    def restore(self, state: Any) -> None:
        torch.set_rng_state(state[0][0])
        if state[0][1] is not None:
            torch.cuda.set_rng_state(state[0][1])
        with torch.no_grad():
            for module, name, buffer, value in state[1]:
                module._buffers[name] = buffer
                buffer.copy_(value)
        self.side.calls[:] = state[2]

    # Looks at the state that change nothing.

    def look(self, looks: list[str]) -> None:
        for what in looks:
            getattr(self, f"look_{what}")()

    def look_eval(self) -> None:
        self.side.model.eval()
        with torch.no_grad():
            self.note("evaluation", self.loss(_LOOK)[0])
        self.side.model.train()

    def look_no_grad(self) -> None:
        with torch.no_grad():
            self.note("forward without gradients", self.loss(_LOOK)[0])

    def look_train_twice(self) -> None:
        self.note("forward without backward", self.loss(_LOOK)[0])

    def look_norms(self) -> None:
        for n in self.side.trained:
            grad = self.side.gradient_of(n).grad
            self.note(f"norm of {n}", None if grad is None else torch.linalg.vector_norm(grad))

    def look_total_norm(self) -> None:
        grads = [p.grad for p in self.side.clipped() if p.grad is not None]
        self.note("total norm", torch.nn.utils.get_total_norm(grads) if grads else None)

    def look_state_dict(self) -> None:
        self.note("state_dict", self.side.tensors())

    def look_states(self) -> None:
        self.note("states", self.side.states())

    def look_parameters(self) -> None:
        self.note("parameters", self.side.read())

    def look_collect(self) -> None:
        gc.collect()


_LOOK = {"rows": 2, "length": 7, "seed": 77, "order": [0, 1]}


class LineCounter:
    """Counts the lines of outcore that run in this thread, and raises KeyboardInterrupt at one of them."""

    def __init__(self, stop: int | None) -> None:
        self.count, self.stop, self.place = 0, stop, ""
        self._before = sys.gettrace()  # for example that of a coverage tool

    def __enter__(self) -> LineCounter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)

    def _call(self, frame: Any, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        return self._line if file.startswith(SOURCE) and not file.endswith(INJECTS) else None

    def _line(self, frame: Any, event: str, _: Any) -> Any:
        if event == "line" and frame.f_lasti not in _ends_of_with(frame.f_code):
            self.count += 1
            if self.count == self.stop:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                PLACES.append(self.place)
                sys.settrace(self._before)
                raise KeyboardInterrupt(self.place)
        return self._line


@functools.cache
def _ends_of_with(code: types.CodeType) -> frozenset[int]:
    """Lines that leave a ``with``: no real Ctrl-C comes there, and a planted one would skip the exit."""
    steps = list(dis.get_instructions(code))
    found = set()
    for i, step in enumerate(steps):
        following = steps[i + step.opname.startswith("SWAP") :][:4]
        names = [f.opname for f in following]
        is_left = names[:3] == ["LOAD_CONST"] * 3 and {f.argval for f in following[:3]} == {None}
        if (is_left and names[3:] in (["PRECALL"], ["CALL"])) or names[:2] == ["PUSH_EXC_INFO", "WITH_EXCEPT_START"]:
            found.add(step.offset)
    return frozenset(found)


PLACES: list[str] = []
"""Places of the KeyboardInterrupts in the last program."""


# -- verdicts ---------------------------------------------------------------------------------------------------------


def has_documented_rounding(program: Program) -> bool:
    """Whether the model leaves the order open in which gradients are summed."""
    model = program["model"]
    micros = [m for s in program["loop"]["steps"] for m in s["micros"]]
    # One backward pass through two forwards calls every block twice.
    return bool(model["same"] or model["shared"]) or any(
        len(set(m["order"])) < len(m["order"]) or m["way"] == "sum" for m in micros
    )


@mock.patch.object(away, "SMALL_BYTES", 64)  # models are tiny
@mock.patch.object(dear, "DEAR_FLOP_PER_BYTE", 1)
def run_program(program: Program) -> dict[str, Any]:
    """Run a program on both sides. Returns its verdict, and details of what is not equal.

    Some steps may amplify bf16's rounding. If they do, the same program must agree closely in fp32.
    """
    with contextlib.nullcontext() if DEVICE == "cpu" else torch.device(DEVICE):  # for tensors that blocks create
        return _judged(program)


def _judged(program: Program) -> dict[str, Any]:
    result = _run_once(program)
    is_low = program["autocast"] or program["precision"] != "fp32"
    if result["verdict"] == "wrong" and is_low and has_documented_rounding(program):
        result["fp32"] = _run_once({**program, "autocast": False, "precision": "fp32"})
        if result["fp32"]["verdict"] in ("equal", "rounding"):
            result["verdict"] = "rounding"
    return result


def _run_once(program: Program) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    PLACES.clear()
    before = set(threading.enumerate())
    with tempfile.TemporaryDirectory(prefix="random-programs-") as name:
        folder = Path(name)
        try:
            # Results of batches in pieces are compared with accumulation elsewhere (tests/loop/test_in_pieces.py).
            plain = Plain(program) if program["pieces"] == 1 else Prepared(at_home(program), folder)
            reference = Loop(plain)
            with plain.closing():
                reference.run()
        except Exception as error:
            return {
                "verdict": "plain raises",
                "message": f"{type(error).__name__}: {error}",
                "trace": traceback.format_exc(),
            }
        PLACES.clear()
        result = _run_prepared(program, folder, reference)
        left = _left(folder, before)
    if left and result["verdict"] in ("equal", "rounding", "refused"):
        result = {"verdict": "left behind", "message": left, "first": result}
    return result


def at_home(program: Program) -> Program:
    """The same program with everything on the device, where nothing moves and nothing is late."""
    count = len(program["plan"]["homes"])
    plain = {"homes": [("device",) * 3] * count, "policies": ["keep"] * count, "activations": ["device"] * count}
    calm = {"delays": {}, "permute": None, "poison": False, "seed": 0}
    return {
        **program,
        "plan": {**program["plan"], **plain, "how": "given", "early": False, "share": 0.0, "faults": calm},
    }


def _run_prepared(program: Program, folder: Path, reference: Loop) -> dict[str, Any]:
    loop = None
    try:
        side = Prepared(program, folder)
        loop = Loop(side)
        with side.closing():
            loop.run()
    except (RaceError, LaneError) as error:
        return _verdict("race" if isinstance(error, RaceError) else "lane error", error, loop)
    except OutcoreError as error:
        return _verdict("refused", error, loop)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not PLACES and str(error) != "planted":
            raise
        return _verdict("raw error", error, loop)
    return _compare(program, reference.seen, loop.seen)


def _verdict(verdict: str, error: BaseException, loop: Loop | None) -> dict[str, Any]:
    trace = "".join(traceback.format_exception(error))
    where = "prepare" if loop is None else loop.where
    return {
        "verdict": verdict,
        "kind": type(error).__name__,
        "message": str(error),
        "sentence": re.sub(r"'[^']*'|\([\d, ]*\)|\b\d[\d.e+-]*", "…", str(error)),
        "where": where,
        "places": list(PLACES),
        "trace": trace,
    }


def _left(folder: Path, before: set[threading.Thread]) -> str:
    files = sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))
    deadline_s = time.monotonic() + 5
    while time.monotonic() < deadline_s:
        threads = [t.name for t in threading.enumerate() if t not in before and t.name.startswith("outcore")]
        if not threads:
            break
        gc.collect()
        time.sleep(0.01)
    return ", ".join([*(f"file {f}" for f in files), *(f"thread {t}" for t in threads)])


def _compare(program: Program, want: list[tuple[str, Any]], got: list[tuple[str, Any]]) -> dict[str, Any]:
    worst, first, may_round = 0.0, "", has_documented_rounding(program)
    limit = 1e-4 if program["precision"] == "fp32" and not program["autocast"] else 3e-2
    for (name, a), (other, b) in zip(want, got, strict=False):
        if name != other:
            return {"verdict": "wrong", "message": f"'{name}' in the plain loop, '{other}' in the prepared one"}
        if name.endswith(": calls") and may_round:
            continue  # hooks saw values with rounding
        for path, gap in _gaps(a, b, name):
            if gap and not first:
                first = f"{path}: differs by {gap:.3g} of its largest element"
            worst = max(worst, gap)
    if len(want) != len(got):
        return {
            "verdict": "wrong",
            "message": f"{len(want)} things seen in the plain loop, {len(got)} in the prepared one",
        }
    if not worst:
        return {"verdict": "equal"}
    if may_round and worst < limit:
        return {"verdict": "rounding", "message": first, "worst": worst}
    return {"verdict": "wrong", "message": first, "worst": worst, "places": list(PLACES)}


def _gaps(a: Any, b: Any, path: str) -> Iterator[tuple[str, float]]:  # noqa: C901
    if isinstance(a, dict) and isinstance(b, dict):
        if set(a) != set(b):
            yield f"{path}: only in one: {sorted(set(a) ^ set(b))}", float("inf")
        for k in a:
            if k in b:
                yield from _gaps(a[k], b[k], f"{path}/{k}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _gaps(x, y, f"{path}/{i}")
    elif isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        a, b = a.cpu(), b.cpu()
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{path}: {a.dtype} {tuple(a.shape)} != {b.dtype} {tuple(b.shape)}", float("inf")
        elif not torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5)):
            gap = float((a.double() - b.double()).abs().nan_to_num(float("inf")).max())
            # Relative to the largest element; a tensor that is nearly zero everywhere consists of rounding.
            yield path, gap / max(float(a.double().abs().nan_to_num().max()), 1e-2) or float("inf")
    elif a != b:
        yield f"{path}: {a!r} != {b!r}"[:300], float("inf")
