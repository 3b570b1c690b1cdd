"""Where everything fits the loop runs plain; activations are kept as far as there is room. The bits never change."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from one_arithmetic import trains_fused
from plans import plan_for as made_plan
from torch import nn

import outcore
from outcore.core.errors import ConfigError, OutcoreError

from .rig import ADAMW, DEVICE, RESIDENT, Block, Tower, adamw, assert_same, batch, make, plan_for, seen, train

ROOMS = {"none": 0, "some": 15_000, "all": 2**30}  # a block of three rows keeps 8 KiB
ROOM = pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
PLANS = [*(("plain", name) for name in ROOMS), ("device", "some"), ("host", "some"), ("host", "all")]
PLAIN = pytest.mark.parametrize(("kind", "room"), [pytest.param(k, ROOMS[n], id=f"{k}-{n}") for k, n in PLANS])


def prepared(model: nn.Module, optimizer: Any, kind: str, room: int, folder: Path, **options: Any) -> Any:
    plan = plan_for(model, optimizer, kind, depth=1, precision=options.get("precision"))
    plan = dataclasses.replace(plan, kept_bytes=room)
    assert plan.plain == (kind == "plain")
    return outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=str(folder)), **options)


def same(
    drive: Callable[..., Any],
    kind: str,
    room: int,
    folder: Path,
    build: Callable[[], nn.Module] = Tower,
    optimizer: Callable[[nn.Module], Any] = adamw,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Drive a plain model and a prepared one."""
    model = make(build, dtype)
    plain = optimizer(model)
    for group in plain.param_groups:
        group["fused"] = trains_fused(type(plain), dtype, DEVICE)
    torch.manual_seed(5)
    want = seen(drive(model, plain), model, plain)
    twin = make(build, dtype)
    with prepared(
        twin, optimizer(twin), kind, room, folder, precision="pure_bf16" * (dtype != torch.float32) or None
    ) as (
        twin,
        streamed,
    ):
        torch.manual_seed(5)
        got = seen(drive(twin, streamed), twin, streamed)
        assert streamed.engine.calls.room.taken_bytes == 0
    assert_same(want, got)


def shapes_that_change(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for step in range(6):
        for micro in range(2):
            loss = model.loss(batch(step + 10 * micro, rows=1 + (3 * step + micro) % 5))
            loss.backward()
            losses.append(loss.detach())
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@PLAIN
def test_shapes_may_change_at_every_step(kind: str, room: int, tmp_path: Path):
    same(shapes_that_change, kind, room, tmp_path)


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, 0.05, momentum=0.9),
    "sgd without momentum": lambda params: torch.optim.SGD(params, 0.05),
    "adam": lambda params: torch.optim.Adam(params, 1e-2, amsgrad=True, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, 1e-2, initial_accumulator_value=0.1),
}


def groups(make_optimizer: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    def build(model: nn.Module) -> Any:
        params = list(model.parameters())
        return make_optimizer([{"params": params[::2]}, {"params": params[1::2], "lr": 0.03, "weight_decay": 0.2}])

    return build


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "pure_bf16"])
def test_every_optimizer(optimizer: Callable[[Any], Any], dtype: torch.dtype, tmp_path: Path):
    same(shapes_that_change, "plain", ROOMS["some"], tmp_path, optimizer=groups(optimizer), dtype=dtype)


def liberties(model: nn.Module, optimizer: Any) -> Any:
    """Do what a loop may do between forward, backward and step."""
    seen = []
    for step in range(7):
        loss = model.loss(batch(step))
        if step == 1:
            model.eval()
            with torch.no_grad():
                seen.append(model.loss(batch(9)))
            model.train()
        if step == 2:
            loss.backward(retain_graph=True)
        if step == 3:
            model.loss(batch(8))  # no backward follows
        if step == 4:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                model.loss(batch(7)).backward()
        loss.backward()
        seen += [p.grad.abs().mean() for p in model.parameters() if p.grad is not None]
        if step == 5:
            model.blocks[0].down.weight.grad = None
            model.blocks[1].down.weight.grad.zero_()
            model.head.weight.grad.add_(0.25)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        with torch.no_grad():
            if step == 3:
                model.blocks[2].up.weight.mul_(0.5)
                model.head.weight.data = model.head.weight.data * 2
        seen.append(loss.detach())
    return seen


@pytest.mark.parametrize("kind", RESIDENT)  # the drive edits in place
@ROOM
def test_liberties_between_forward_backward_and_step(kind: str, room: int, tmp_path: Path):
    same(liberties, kind, room, tmp_path)


class Twice(Tower):
    """Has tied weights, and a block that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embed.weight
        self.blocks.append(Block())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in (self.blocks[0], self.blocks[1], self.blocks[2]):
            x = block(x)
        return self.head(x)


@PLAIN
def test_tied_and_unused_weights(kind: str, room: int, tmp_path: Path):
    same(shapes_that_change, kind, room, tmp_path, build=Twice)


class Failing(Block):
    """Fails when told to, in forward or in backward."""

    fail = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if Failing.fail == "forward":
            raise ValueError("forward")
        if Failing.fail == "backward" and y.requires_grad:
            y.register_hook(lambda _: (_ for _ in ()).throw(ValueError("backward")))
        return y


@pytest.mark.parametrize("where", ["forward", "backward"])
@ROOM
def test_an_exception_leaves_nothing_taken(where: str, room: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = train(model, optimizer)
        Failing.fail = where
        with pytest.raises((ValueError, OutcoreError)):
            model.loss(batch(3)).backward()
        Failing.fail = ""
        optimizer.zero_grad()
        return losses + train(model, optimizer)

    monkeypatch.setattr(Failing, "fail", "")
    same(drive, "plain", room, tmp_path, build=lambda: Tower(Failing))


class Rolls(Block):
    """Draws from Python's generator, which a second forward would draw from again."""

    num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Rolls.num_calls += 1
        return super().forward(x) * (1 + random.random())


def test_prepare_keeps_what_plainly_fits(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Rolls, "num_calls", 0)

    def drive(model: nn.Module, optimizer: Any) -> Any:
        random.seed(3)
        return train(model, optimizer, 3)

    model = make(lambda: Tower(Rolls))
    plain = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    torch.manual_seed(5)
    want = seen(drive(model, plain), model, plain)
    num_calls, Rolls.num_calls = Rolls.num_calls, 0
    twin = make(lambda: Tower(Rolls))
    with outcore.prepare(twin, adamw(twin)) as (twin, streamed):
        assert streamed.plan.plain
        assert 2**20 < streamed.plan.kept_bytes
        torch.manual_seed(5)
        assert_same(want, seen(drive(twin, streamed), twin, streamed))
        assert type(next(twin.parameters())) is nn.Parameter
    assert Rolls.num_calls == num_calls + 3 * (DEVICE != "cpu"), "an accelerator's first step is measured"


@pytest.mark.parametrize("kind", ["plain", "host"])
def test_no_more_is_kept_than_there_is_room_for(kind: str, tmp_path: Path):
    room = 20_000
    model = make()
    with prepared(model, adamw(model), kind, room, tmp_path) as (model, optimizer):
        for rows in (3, 3, 1, 20, 3):
            loss = model.loss(batch(rows=rows))
            assert 0 <= optimizer.engine.calls.room.taken_bytes <= room
            loss.backward()
            assert optimizer.engine.calls.room.taken_bytes == 0, "the loss is still alive"
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.skipif(DEVICE != "cpu", reason="an accelerator keeps nothing until it has measured what else is alive")
@pytest.mark.parametrize("kind", ["plain", "host"])
def test_what_there_is_room_for_is_kept_from_the_first_step(kind: str, tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), kind, 20_000, tmp_path) as (model, optimizer):
        for rows in (3, 3, 1, 20, 3):
            loss = model.loss(batch(rows=rows))
            taken = optimizer.engine.calls.room.taken_bytes
            assert (taken > 0) == (rows < 20), "two blocks of three rows, all of one row, none of twenty"
            loss.backward()


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU measures nothing")
def test_an_accelerator_keeps_nothing_until_a_step_was_measured(tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "host", 2**30, tmp_path) as (model, optimizer):
        for step in range(2):
            loss = model.loss(batch())
            assert (optimizer.engine.calls.room.taken_bytes > 0) == (step > 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_the_room_is_what_the_budget_leaves(tmp_path: Path):
    model = make()
    spec, plan = made_plan(model, adamw(model), budget=outcore.Budget(device="1MiB", host="1MiB"))
    assert plan.plain
    assert plan.kept_bytes == 2**20 - plan.tier_bytes["device"]
    given = dataclasses.replace(plan, kept_bytes=2**40)
    with outcore.prepare(model, adamw(model), plan=given, budget=outcore.Budget(device="1MiB", host="1MiB")) as (_, o):
        assert o.plan == plan


@pytest.mark.parametrize(
    ("options", "expected"),
    [({"accumulation_steps": 2}, False), ({"clipping": False}, False), ({"precision": "bf16"}, False), ({}, True)],
    ids=str,
)
def test_what_is_promised_or_accumulated_apart_is_not_plain(options: dict[str, Any], expected: bool):
    model = make()
    _, plan = made_plan(model, adamw(model), **options)
    assert plan.plain is expected
    assert plan.kept_bytes


def test_a_plan_that_cannot_be_plain_is_refused(tmp_path: Path):
    model = make()
    _, plan = made_plan(model, adamw(model))
    with pytest.raises(ConfigError, match="expected clipping=True with a plan that leaves gradients to autograd"):
        outcore.prepare(model, adamw(model), plan=plan, clipping=False)
    wrong = dataclasses.replace(plan_for(model, adamw(model), "host"), plain=True)
    with pytest.raises(ConfigError, match="plain: expected all homes of all units on the device"):
        outcore.prepare(model, adamw(model), plan=wrong)


@ROOM
def test_a_graph_of_other_weights_is_not_walked(room: int, tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "plain", room, tmp_path) as (model, optimizer):
        train(model, optimizer)
        for change in (
            lambda: optimizer.step(),
            lambda: model.load_state_dict({k: v * 2 for k, v in model.state_dict().items()}),
        ):
            model.loss(batch(1)).backward()
            loss = model.loss(batch(2))
            change()
            with pytest.raises(
                (RuntimeError, OutcoreError), match="modified by an inplace operation|have changed since"
            ):
                loss.backward()
            optimizer.zero_grad()
        train(model, optimizer)
        loss = model.loss(batch(2))
        model.state_dict()
        loss.backward()


def test_states_go_from_plan_to_plan(tmp_path: Path):
    model = make()
    reference = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)
    for i in range(3):
        torch.manual_seed(i)
        train(model, reference, 2, seed=2 * i)
    saved: Any = None
    weights = make().state_dict()
    for i, kind in enumerate(("plain", "host", "plain")):
        part = make()
        part.load_state_dict(weights)
        with prepared(part, adamw(part), kind, ROOMS["some"], tmp_path) as (part, optimizer):
            if saved is not None:
                optimizer.load_state_dict(saved)
            torch.manual_seed(i)
            train(part, optimizer, 2, seed=2 * i)
            weights, saved = part.state_dict(), optimizer.state_dict()
    assert_same(dict(model.state_dict()), dict(weights))
    assert_same(reference.state_dict()["state"], saved["state"])


def test_what_is_unfrozen_has_no_states(tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "plain", ROOMS["all"], tmp_path) as (model, optimizer):
        train(model, optimizer)
        model.blocks[0].shift.requires_grad_()
        with pytest.raises(OutcoreError, match="blocks.0.shift"):
            train(model, optimizer)


def test_evaluation_alone(tmp_path: Path):
    model, twin = make().eval(), make().eval()
    with torch.no_grad():
        want = model(batch())
    with outcore.prepare(twin, None) as (twin, _):
        assert torch.equal(twin(batch()), want)
        with torch.no_grad():
            assert torch.equal(twin(batch()), want)


class ChangedOutside(Tower):
    """Adds to results of blocks in place, which no block saves."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
            x += 0.5
        return self.head(x)


class Skipped(Block):
    """Returns what it gets, and a result less, in every other call."""

    skips = False

    def forward(self, x: torch.Tensor, passed: torch.Tensor) -> Any:
        if self.skips:
            return x, passed, x.mean().exp()
        y = super().forward(x)
        return y, passed, (0.1 * y).mean().exp(), (0.2 * y).mean().exp()


class Skipping(Tower):
    def __init__(self) -> None:
        super().__init__(Skipped)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, beside = self.embed(ids), torch.zeros((), device=DEVICE)
        for block in self.blocks:
            x, _, *rest = block(x, x)
            beside = beside + sum(rest)
        return self.head(x) + beside


@PLAIN
def test_calls_with_fewer_results(kind: str, room: int, tmp_path: Path):
    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = []
        for step in range(4):
            for i, block in enumerate(model.blocks):
                block.skips = (step + i) % 2 == 1
            losses += train(model, optimizer, 1, seed=step)
        return losses

    same(drive, kind, room, tmp_path, Skipping)


def test_an_argument_that_a_kept_unit_returns_is_not_its_result(tmp_path: Path):
    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = []
        for step in range(2):
            x = model.embed(batch(step))
            passed = given = model.head.weight.square().sum()
            for block in model.blocks:
                x, passed, *_ = block(x, passed)
            (grad,) = torch.autograd.grad(passed, model.head.weight, create_graph=True)
            assert passed is given
            losses.append(x.square().mean() + grad.square().mean())
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        return losses

    same(drive, "plain", 2**30, tmp_path, Skipping)


class Checkpointed(Tower):
    """Calls blocks inside of the user's own checkpoints."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        return self.head(x)


@pytest.mark.parametrize("build", [ChangedOutside, Checkpointed])
@PLAIN
def test_results_changed_in_place_and_own_checkpoints(build: type[Tower], kind: str, room: int, tmp_path: Path):
    same(shapes_that_change, kind, room, tmp_path, build=build)


def under_autocast(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(batch(step))
        if hasattr(optimizer, "engine"):
            losses.append(optimizer.engine.calls.room.taken_bytes > 0)
        else:
            losses.append(step > 0)
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_under_autocast_a_recompute_tells_what_the_next_calls_keep(tmp_path: Path):
    same(under_autocast, "plain", ROOMS["all"], tmp_path)


def test_what_did_not_fit_is_counted_by_its_recompute(tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "plain", ROOMS["some"], tmp_path) as (model, optimizer):
        model.loss(batch(rows=20)).backward()
        optimizer.zero_grad()
        known = [u.module.__dict__["forward"]._policy._known for u in optimizer.engine.units[1:]]
        assert all(len(kinds) == 1 for kinds in known), "those that found no room too"
        assert len({nbytes for kinds in known for nbytes, _ in kinds.values()}) == 1


@pytest.mark.parametrize("policy", ["keep", "recompute"])
@ROOM
def test_double_backward_in_the_first_call_and_in_later_ones(policy: str, room: int, tmp_path: Path):
    def penalty(model: nn.Module, optimizer: Any) -> Any:
        norms = []
        for step in range(3):
            torch.manual_seed(step)
            x = torch.full((2, 7, 13), 0.1 * (step + 1), requires_grad=True)
            (grad,) = torch.autograd.grad(model.blocks[1](model.blocks[0](x)).sum(), x, create_graph=True)
            grad.square().sum().backward()
            norms.append(grad.detach())
            optimizer.step()
            optimizer.zero_grad()
        return norms

    if policy == "keep":  # nothing is recomputed, so it is the plain loop
        model, twin = make(), make()
        want = penalty(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))
        plan = plan_for(twin, adamw(twin), "plain", "keep")
        with outcore.prepare(twin, adamw(twin), plan=plan) as (twin, streamed):
            assert_same(want, penalty(twin, streamed))
        return
    model = make()
    with prepared(model, adamw(model), "plain", room, tmp_path) as (model, optimizer):
        for _ in range(3):
            with pytest.raises(outcore.UnsupportedError, match="create_graph=True.* give the units the policy keep"):
                penalty(model, optimizer)
            optimizer.zero_grad()
        train(model, optimizer)
    assert optimizer.engine.calls.room.taken_bytes == 0


@pytest.mark.filterwarnings("ignore:the weights of this Tower are gone:UserWarning")
def test_after_a_step_that_was_cut_short_nothing_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    model = make()
    with prepared(model, adamw(model), "plain", ROOMS["all"], tmp_path) as (model, optimizer):
        train(model, optimizer)
        model.loss(batch()).backward()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr("outcore.engine.updates.plain.apply", interrupt)
            optimizer.step()
        for use in (lambda: model.loss(batch()), optimizer.step, model.state_dict):
            with pytest.raises(OutcoreError, match=r"the last one was cut short.* by KeyboardInterrupt"):
                use()


class SquashesLater(Block):
    """Only later calls with the same arguments save their result: tanh's backward needs it."""

    squashes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y.tanh() if self.squashes else y + 1


@PLAIN
def test_a_result_that_only_later_calls_save_is_not_changed_unseen(kind: str, room: int, tmp_path: Path):
    def changed(model: nn.Module) -> torch.Tensor:
        x = model.blocks[0](model.embed(batch()))
        x.mul_(1.5)
        return model.head(x).square().mean()

    def drive(model: nn.Module, optimizer: Any) -> Any:
        losses = [changed(model)]
        losses[0].backward()
        model.blocks[0].squashes = True
        loss = changed(model)
        keeps = room and DEVICE == "cpu"  # an accelerator keeps nothing until it has measured what else is alive
        if keeps or not hasattr(optimizer, "engine"):  # else recompute makes the result again
            with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
                loss.backward()
        model.zero_grad()
        model.blocks[0].squashes = False
        losses.append(changed(model))
        losses[1].backward()
        optimizer.step()
        return losses

    same(drive, kind, room, tmp_path, lambda: Tower(SquashesLater))


@pytest.mark.parametrize("kind", RESIDENT)
@ROOM
def test_a_graph_made_inside_gathered_is_not_walked_with_other_weights(kind: str, room: int, tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), kind, room, tmp_path) as (model, optimizer):
        train(model, optimizer)
        with outcore.gathered(model):
            with torch.no_grad():
                model.blocks[1].up.weight.mul_(2)  # without write=True it is lost
            loss = model.loss(batch())
        with pytest.raises((RuntimeError, OutcoreError), match=r"modified by an inplace operation|have changed since"):
            loss.backward()


def edits_by_data(model: nn.Module, optimizer: Any) -> Any:
    """Move bytes out of their home by ``.data``, in a unit and in the root, then do everything that reads the home."""
    seen = []
    for step in range(3):
        seen += train(model, optimizer, 1, seed=step)
        for param in (model.blocks[1].up.weight, model.head.weight):
            param.data = param.data * 0.5
        seen += train(model, optimizer, 1, seed=step + 5)
        named = dict(outcore.named_tensors(model) if hasattr(optimizer, "engine") else model.named_parameters())
        seen += [named["blocks.1.up.weight"].clone(), named["head.weight"].clone()]
        model.load_state_dict({key: value * 1.5 for key, value in model.state_dict().items()})
        optimizer.load_state_dict(optimizer.state_dict())
    return seen


@ROOM
def test_replaced_data_is_trained_saved_and_loaded(room: int, tmp_path: Path):
    same(edits_by_data, "plain", room, tmp_path)


@pytest.mark.parametrize("keep_weights", [True, False])
@ROOM
def test_a_graph_is_not_walked_once_closed(room: int, *, keep_weights: bool, tmp_path: Path):
    model = make()
    with prepared(model, adamw(model), "plain", room, tmp_path) as (model, optimizer):
        train(model, optimizer)
        loss, block = model.loss(batch()), model.blocks[0](torch.ones(1, 7, 13)).sum()
        outcore.close(model, keep_weights=keep_weights)
    with pytest.raises(OutcoreError, match="it was closed"):  # the root's bytes are gone, too
        loss.backward()
    with pytest.raises((RuntimeError, OutcoreError), match=r"it was closed|modified by an inplace operation"):
        block.backward()
