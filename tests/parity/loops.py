"""The plain loop, the streamed loop, and the comparison of their records: bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from one_arithmetic import trains_fused
from torch import nn

from outcore.optim import Lion
from outcore.optim.formats import Codes, decode, encode
from outcore.optim.joined import Joined

from . import zoo

_SOMETIMES = {"qwen3": 2.4, "mixtral": 2.0, "lora": 0.38}
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    "adam": (torch.optim.Adam, {"lr": 3e-3, "weight_decay": 0.01}),
    "sgd": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 5e-2, "momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.01}),
    "adamw foreach": (torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1, "foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.9, "centered": True}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2, "weight_decay": 0.1}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2, "betas": (0.9, 0.6), "weight_decay": 0.1}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2, "weight_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "lion": (Lion, {"lr": 1e-3, "weight_decay": 0.1}),
    "dyadic": (torch.optim.SGD, {"lr": 2.0**-4}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2, "eps": (1e-9, 1e-3), "weight_decay": 0.1}),
}
BY_RULE = ("adamw foreach", "rmsprop", "nadam", "radam", "adamax", "adadelta", "lion", "adafactor", "muon")
"""Optimizers without a fused kernel; ``muon`` has AdamW beside it for parameters that are no matrices."""

Moments = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True)
class Setting:
    """How a loop trains; the same for the plain and the streamed one."""

    precision: str = "fp32"
    micro_batches: int = 1
    clipping: str = "on"  # "off", "on", "always"
    groups: str = "one"  # "one"; "two": biases and norms without decay and at another rate
    scheduler: str = "none"  # "none"; "lambda": built after prepare; "cosine": built before
    optimizer: str = "adamw"
    steps: int = zoo.STEPS
    seed: int = 5

    def __str__(self) -> str:
        default = Setting()
        parts = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(default, k) or k == "precision"]
        return ",".join(parts)


def max_norm(name: str, clipping: str) -> float:
    """Return the limit: ``"on"`` clips some steps of the model, ``"always"`` all of them."""
    return _SOMETIMES.get(name, 1.3) if clipping == "on" else 0.05


@dataclass
class Record:
    """Everything that two runs must agree on."""

    losses: list[torch.Tensor] = field(default_factory=list)
    norms: list[torch.Tensor] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)  # parameters and persistent buffers
    state_dict: dict[str, torch.Tensor] = field(default_factory=dict)
    moments: Moments = field(default_factory=dict)
    labels: frozenset[str] = frozenset()  # dependency labels that the lanes saw; streamed runs only

    def history(self) -> dict[str, torch.Tensor]:
        """Losses and norms in the order in which they were computed."""
        found: dict[str, torch.Tensor] = {}
        per_step = len(self.losses) // len(self.rates)
        for step in range(len(self.rates)):
            for i in range(step * per_step, (step + 1) * per_step):
                found[f"loss of micro-batch {i}"] = self.losses[i]
            if self.norms:
                found[f"norm of step {step}"] = self.norms[step]
        return found


# -- the two loops ----------------------------------------------------------------------------------------------------


Backward = Callable[[nn.Module, zoo.Batch, int], torch.Tensor]
"""Model, batch, micro-batches per step -> the loss that is recorded for the micro-batch."""


def plain_backward(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Run the usual forward and backward of one micro-batch."""
    loss = zoo.loss(model, batch) / micro_batches
    loss.backward()
    return loss


@functools.lru_cache(maxsize=512)
def plain_loop(
    name: str,
    setting: Setting,
    *,
    backward: Backward = plain_backward,
    edit: Callable[[nn.Module], None] | None = None,
) -> Record:
    """Train in memory, as usual. bf16 keeps fp32 accumulators and masters beside a bf16 model.

    Args:
        name: Model of the zoo.
        setting: How to train.
        backward: Replaces the ordinary forward and backward of a micro-batch.
        edit: Changes the model before the optimizer is built.
    """
    model = zoo.make(name, setting.precision)
    if edit is not None:
        edit(model)
    model.to(zoo.DEVICE)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    has_masters = setting.precision == "bf16"
    updated = {n: nn.Parameter(p.detach().float().clone()) for n, p in trained.items()} if has_masters else trained
    optimizer = build_optimizer(setting, updated, is_fused=True)
    scheduler = build_scheduler(setting, optimizer)
    record = Record()
    batches = zoo.batches(name, steps=setting.steps, micro_batches=setting.micro_batches)
    torch.manual_seed(setting.seed)
    for step in range(setting.steps):
        for batch in batches[step * setting.micro_batches :][: setting.micro_batches]:
            loss = backward(model, batch, setting.micro_batches)
            record.losses.append(loss.detach().clone())
            accumulate(trained, updated)
        if setting.clipping != "off":
            record.norms.append(nn.utils.clip_grad_norm_(updated.values(), max_norm(name, setting.clipping)).clone())
        record.rates.append(sorted({float(g["lr"]) for g in optimizer.param_groups}))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        write_back(trained, updated)
    record.tensors = {n: t.detach().clone() for n, t in named_tensors(model)}
    finish(record, model, optimizer, {id(p): n for n, p in updated.items()})
    for n, state in record.moments.items():
        if trained[n].dtype != updated[n].dtype:  # else the weight is its own master
            state["master"] = updated[n].detach().clone()
    return record


def accumulate(trained: Mapping[str, nn.Parameter], updated: Mapping[str, nn.Parameter]) -> None:
    """Add a micro-batch's gradients to the masters' fp32 accumulators, then drop them; no gradient, no accumulator."""
    for n, p in trained.items():
        if p is updated[n] or p.grad is None:
            continue
        grad = p.grad.float()
        updated[n].grad = grad.clone() if updated[n].grad is None else updated[n].grad.add_(grad)
        p.grad = None


@torch.no_grad()
def write_back(trained: Mapping[str, nn.Parameter], updated: Mapping[str, nn.Parameter]) -> None:
    """Round masters to weights."""
    for n, p in trained.items():
        if p is not updated[n]:
            p.copy_(updated[n])


def streamed_loop(
    name: str,
    setting: Setting,
    *,
    backward: Backward = plain_backward,
    edit: Callable[[nn.Module], None] | None = None,
    make_plan: Callable[[nn.Module, torch.optim.Optimizer], Any] | None = None,
    prepare: Callable[..., Any] | None = None,
    read: Callable[[nn.Module], Iterable[tuple[str, torch.Tensor]]] | None = None,
    after_step: Callable[[nn.Module, torch.optim.Optimizer, int], None] | None = None,
    **options: Any,
) -> Record:
    """The user's loop on ``outcore.prepare``.

    Args:
        name: Model of the zoo.
        setting: As for the plain loop.
        backward: As for the plain loop.
        edit: As for the plain loop.
        make_plan: Builds the plan from the model and the optimizer, just before ``prepare``.
        prepare: Replaces ``outcore.prepare``.
        read: Replaces ``outcore.named_tensors``.
        after_step: Called after each step with the model, the optimizer and the step's number.
        options: Further arguments of ``prepare``.
    """
    model = zoo.make(name, setting.precision)
    if edit is not None:
        edit(model)
    named = dict(model.named_parameters())
    trained = {n: p for n, p in named.items() if p.requires_grad}
    names = {id(p): n for n, p in named.items()}
    optimizer = build_optimizer(setting, named if setting.groups == "one" else trained)
    scheduler = build_scheduler(setting, optimizer) if setting.scheduler == "cosine" else None
    if make_plan is not None:
        options["plan"] = make_plan(model, optimizer)
    options |= {"precision": setting.precision, "device": zoo.DEVICE}
    model, optimizer = (prepare or _outcore().prepare)(model, optimizer, **options)
    with closing(optimizer):
        if setting.scheduler == "lambda":
            scheduler = build_scheduler(setting, optimizer)
        record = Record()
        batches = iter(zoo.batches(name, steps=setting.steps, micro_batches=setting.micro_batches))
        torch.manual_seed(setting.seed)
        for step in range(setting.steps):
            for _ in range(setting.micro_batches):
                loss = backward(model, next(batches), setting.micro_batches)
                record.losses.append(loss.detach().clone())
            if setting.clipping != "off":
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm(name, setting.clipping))
                record.norms.append(norm.detach().clone())
            record.rates.append(sorted({float(g["lr"]) for g in optimizer.param_groups}))
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
            optimizer.zero_grad()
            if after_step is not None:
                after_step(model, optimizer, step)
        record.tensors = {n: t.detach().clone() for n, t in (read or _outcore().named_tensors)(model)}
        finish(record, model, optimizer, names)
    return record


def named_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Return what ``outcore.named_tensors`` would give, for a plain model."""
    yield from model.named_parameters()
    saved = model.state_dict()
    yield from ((n, b) for n, b in model.named_buffers() if n in saved)


def finish(record: Record, model: nn.Module, optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Record what training left besides tensors, and the dependency labels that the run used."""
    record.state_dict = {n: t.detach().clone() for n, t in model.state_dict().items()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}  # Adagrad keeps states of frozen ones, too
    record.moments = {n: s for n, s in moments(optimizer, names).items() if n in trained}
    engine = getattr(optimizer, "engine", None)
    if engine is not None:
        record.labels = frozenset(engine.device.labels_seen)


def moments(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> Moments:
    """Return states by parameter name, read from ``state_dict`` in torch's format.

    Parameters without a step are left out: where there are masters, their states are saved from the start.
    """
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    state = optimizer.state_dict()["state"]
    return {
        order[i]: {k: torch.as_tensor(v).detach().clone() for k, v in values.items() if v is not None}
        for i, values in state.items()
        if values.get("step") != 0 and values.keys() != {"master"}
    }


def build_optimizer(
    setting: Setting, named: Mapping[str, nn.Parameter], *, is_fused: bool = False
) -> torch.optim.Optimizer:
    """Build an optimizer with one group, or with two like the Hugging Face trainer."""
    if setting.optimizer == "muon":
        matrices = {n: p for n, p in named.items() if p.ndim == 2}
        rest = {n: p for n, p in named.items() if p.ndim != 2}
        adamw = build_optimizer(dataclasses.replace(setting, optimizer="adamw"), rest, is_fused=is_fused)
        return Both([torch.optim.Muon(list(matrices.values()), lr=1e-2), adamw])
    if ":" in setting.optimizer:  # such as "adamw:8bit"
        name, chosen = setting.optimizer.rsplit(":", 1)
        optimizer = build_optimizer(dataclasses.replace(setting, optimizer=name), named, is_fused=is_fused)
        if is_fused and chosen != "compact":
            return Stored(optimizer.param_groups, chosen, {id(p): n for n, p in named.items()})
        for group in optimizer.param_groups:
            group["master_format" if chosen == "compact" else "state_format"] = chosen
        return optimizer
    cls, options = OPTIMIZERS[setting.optimizer]
    groups: list[dict[str, Any]] = [{"params": list(named.values())}]
    if setting.groups == "two":
        decayed = [p for p in named.values() if p.ndim >= 2]
        plain = [p for p in named.values() if p.ndim < 2]
        groups = [{"params": decayed}, {"params": plain, "weight_decay": 0.0, "lr": options["lr"] * 2}]
    if is_fused and setting.optimizer not in BY_RULE:
        groups = [part for group in groups for part in _fused_where_it_trains(cls, group)]
    return cls([g for g in groups if g["params"]], **options)


class Both(Joined):
    """Two optimizers that a plain loop steps as one."""

    def __init__(self, members: list[torch.optim.Optimizer]) -> None:
        super().__init__(members)
        for member in members:
            member.state = self.state  # type: ignore[assignment]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for member in self.members:
            member.step(closure)


class Stored(torch.optim.AdamW):
    """AdamW in a plain loop over stored states: a whole parameter and its states are decoded into fp32, updated by
    torch's kernel, and rounded."""

    def __init__(self, groups: Iterable[dict[str, Any]], chosen: str, names: Mapping[int, str]) -> None:
        super().__init__(groups)
        self.chosen, self.names = chosen, names

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                self._step(p, group)

    def _step(self, p: nn.Parameter, group: Mapping[str, Any]) -> None:
        is_wide = self.chosen == "fp32" or (self.chosen == "8bit" and p.numel() < 4096)
        numel, states = p.numel(), self.state[p]
        dtype = {"8bit": torch.uint8, "bf16": torch.bfloat16}.get(self.chosen, torch.float32)
        shape = {"dtype": torch.float32 if is_wide else dtype, "memory_format": torch.preserve_format}
        if not states:
            states["step"] = torch.tensor(0.0)
            for name in ("exp_avg", "exp_avg_sq"):
                states[name] = torch.zeros_like(p, **shape)
                if not is_wide and self.chosen == "8bit":
                    states[name + "_absmax"] = torch.zeros(-(-numel // 256))
        master, rooms = nn.Parameter(p.detach().float().clone()), {}
        master.grad = p.grad.float()
        flat = {name: tensor.view(-1) for name, tensor in states.items()}
        codes = Codes({"exp_avg": self.chosen, "exp_avg_sq": self.chosen}, zlib.crc32(self.names[id(p)].encode()))
        codes = codes._replace(unsigned=frozenset({"exp_avg_sq"}))
        for name in ("exp_avg", "exp_avg_sq"):
            rooms[name] = flat[name] if is_wide else torch.empty(-(-numel // 256) * 256)
            if not is_wide:
                decode(name, flat, codes, rooms[name])
        options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
        inner = torch.optim.AdamW([master], fused=True, **options)
        inner.state[master] = {"step": states["step"]}
        inner.state[master] |= {name: room[:numel].view(p.shape) for name, room in rooms.items()}
        inner.step()
        p.copy_(master)
        for name, room in rooms.items():
            if not is_wide:
                encode(name, flat, codes, room, 0, int(states["step"]))


def _fused_where_it_trains(cls: type, group: dict[str, Any]) -> list[dict[str, Any]]:
    """Split a group: parameters for which ``fused=True`` skips elements step without it."""
    parts: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in group["params"]:
        parts[trains_fused(cls, p.dtype, p.device.type)].append(p)
    return [{**group, "params": params, "fused": fused} for fused, params in parts.items()]


def build_scheduler(setting: Setting, optimizer: torch.optim.Optimizer) -> Any:
    """Build a schedule that gives every step another rate."""
    if setting.scheduler == "lambda":
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4 if step < 3 else 1 / step)
    if setting.scheduler == "cosine":
        return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=setting.steps, eta_min=1e-4)
    return None


@contextlib.contextmanager
def closing(optimizer: Any) -> Iterator[None]:
    """Close a prepared optimizer whatever happens; a plain one has nothing to close."""
    try:
        yield
    finally:
        close = getattr(optimizer, "close", None)
        if close is not None:
            close()


def _outcore() -> Any:
    import outcore  # imported here, so that the plain loops do not need it

    return outcore


# -- comparison -------------------------------------------------------------------------------------------------------


def assert_equal(plain: Record, streamed: Record) -> None:
    """Assert that losses, norms, rates, parameters, buffers, moments and steps agree bit for bit.

    Raises:
        AssertionError: Names the first tensor that differs: step counts first, which explain the rest, then in the
            order of time.
    """
    for n, state in plain.moments.items():
        if "step" in state and "step" in streamed.moments.get(n, {}):
            _same(f"step of {n}", state["step"], streamed.moments[n]["step"])
    assert plain.rates == streamed.rates, f"learning rates: {plain.rates} != {streamed.rates}"
    _same_tree("", plain.history(), streamed.history())
    _same_tree("tensor", plain.tensors, streamed.tensors)
    _same_tree("state_dict entry", plain.state_dict, streamed.state_dict)
    more = {n: s for n, s in streamed.moments.items() if n in plain.moments or not _is_in_its_beginning(s)}
    _same_keys("moments", plain.moments, more)
    for n, state in plain.moments.items():
        _same_tree(f"{n},", state, streamed.moments[n])


def _is_in_its_beginning(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether no step changed the state: beside a master, states exist before the first step."""
    return "master" in state and not any(bool(t.any()) for name, t in state.items() if name != "master")


def _same_keys(what: str, want: Mapping[str, object], got: Mapping[str, object]) -> None:
    missing, extra = sorted(set(want) - set(got)), sorted(set(got) - set(want))
    assert not missing + extra, f"{what}: missing {missing}, not expected {extra}"


def _same_tree(what: str, want: Mapping[str, torch.Tensor], got: Mapping[str, torch.Tensor]) -> None:
    _same_keys(what, want, got)
    for n, a in want.items():
        _same(f"{what} {n}".strip(), a, got[n])


def _same(what: str, want: torch.Tensor, got: torch.Tensor) -> None:
    want, got = want.cpu(), got.cpu()
    assert want.shape == got.shape, f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}"
    assert want.dtype == got.dtype, f"{what}: expected {want.dtype}, got {got.dtype}"
    if torch.equal(want, got):
        return
    differ = (want != got) | want.isnan() | got.isnan()
    gap = (want.double() - got.double()).abs().max().item()
    shown = "" if want.numel() > 1 else f" ({want.item()!r} != {got.item()!r})"
    raise AssertionError(f"{what}: {int(differ.sum())} of {want.numel()} elements differ, by up to {gap:.3g}{shown}")
