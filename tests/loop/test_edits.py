"""Edits between steps: a master follows its weight at the next step, save or read, wherever both live."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn

import outcore
from outcore.planner.homes.pools import Comfort

from .rig import DEVICE, Tower, assert_same, batch, make

NUM_STEPS = 4
PLANS: dict[str, dict[str, Any]] = {
    "device": {"homes": "device"},
    "states on the host": {"homes": lambda _: ("device", "host", "host")},
    "states on disk": {"homes": lambda _: ("device", "host", "disk")},
    "host": {"homes": "host"},
    "host keep": {
        "homes": "host",
        "policy": "keep",
        "comfort": Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=2),
    },
    "updated on the device": {"homes": "host", "share": 1.0},
    "early": {"homes": "host", "early": True, "steps": 1},
    "early on disk": {"homes": "disk", "early": True, "steps": 1},
    "weights on the host": {"homes": lambda _: ("host", "host", "disk")},
    "disk": {"homes": "disk"},
}
RECIPES = {
    "fp32": (torch.float32, {}),
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {}),
    "compact": (torch.bfloat16, {"master_format": "compact"}),
}


class Masters:
    """A plain loop with fp32 masters beside the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.pairs = model, []
        for param in (p for p in model.parameters() if p.requires_grad):
            param.grad_dtype = None  # gradients of micro-batches are summed in fp32
            self.pairs.append((param, nn.Parameter(param.detach().float().clone())))
        self.optimizer = adamw([master for _, master in self.pairs], fused=True)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients of one micro-batch to those of the masters."""
        for param, master in self.pairs:
            grad = param.grad.float()
            master.grad = grad if master.grad is None else master.grad.add_(grad)
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        for param, master in self.pairs:
            master.copy_(torch.where(param != master.to(param.dtype), param.float(), master))
        self.optimizer.step()
        for param, master in self.pairs:
            param.copy_(master)
        self.optimizer.zero_grad()

    def masters(self) -> list[torch.Tensor]:
        return [master.detach() for _, master in self.pairs]


def adamw(params: Any, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": params, **options}], lr=2e-6)  # far less than half a step of bf16


class Rehearsal:
    """What a drive calls, on either side."""

    def __init__(self, model: nn.Module, plain: Masters | None = None, streamed: Any = None) -> None:
        self.model, self._plain, self._streamed = model, plain, streamed

    def writing(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._plain else outcore.gathered(self.model, write=True)

    def backward(self, seed: int) -> None:
        self.model.loss(batch(seed)).backward()
        if self._plain:
            self._plain.collect()

    def step(self) -> None:
        if self._plain:
            self._plain.step()
        else:
            self._streamed.step()
            self._streamed.zero_grad()

    # Edits.

    def save(self) -> dict[str, torch.Tensor]:
        with self.writing():
            return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        with self.writing():
            for p in self.model.parameters():
                p.mul_(factor if p.requires_grad else 1)  # a checkpoint is refused beside other frozen weights

    @torch.no_grad()
    def restore(self, values: dict[str, torch.Tensor]) -> None:
        with self.writing():
            for n, p in self.model.named_parameters():
                p.copy_(values[n])


def perturbed_and_restored(side: Rehearsal, step: int) -> None:
    before = side.save()
    side.scale(1.05)
    side.restore(before)
    side.backward(step)
    side.step()


def gradients_at_perturbed_weights(side: Rehearsal, step: int) -> None:
    """Sharpness-aware training."""
    before = side.save()
    side.scale(1.05)
    side.backward(step)
    side.restore(before)
    side.step()


def averages_for_an_evaluation(side: Rehearsal, step: int) -> None:
    side.backward(step)
    side.step()
    before = {n: t.clone() for n, t in side.model.state_dict().items()}
    side.model.load_state_dict({n: (t.double() * 0.9).to(t.dtype) for n, t in before.items()})
    with torch.no_grad():
        side.model.loss(batch(step))
    side.model.load_state_dict(before)


@torch.no_grad()
def _edit_some(side: Rehearsal) -> None:
    with side.writing():
        block = side.model.blocks[1]
        block.up.weight[2:5] = 0.25
        block.up.weight[0, :2] = torch.tensor([-0.0, 0.0])
        block.down.bias.zero_()


def some_elements_stay_edited(side: Rehearsal, step: int) -> None:
    before = side.save()
    side.scale(3.0)
    side.restore(before)
    if step == 1:
        _edit_some(side)
    side.backward(step)
    if step == 2:  # after the update of this backward may have begun
        side.scale(0.5)
    side.step()


def several_times_while_gradients_accumulate(side: Rehearsal, step: int) -> None:
    before = side.save()
    for micro, factor in enumerate((1.05, 0.9, 1.01)):
        side.scale(factor)
        side.backward(3 * step + micro)
    side.restore(before)
    side.step()


DRIVES = [
    perturbed_and_restored,
    gradients_at_perturbed_weights,
    averages_for_an_evaluation,
    some_elements_stay_edited,
    several_times_while_gradients_accumulate,
]


@contextlib.contextmanager
def prepared(plan: str, recipe: str, folder: Path) -> Iterator[Any]:
    dtype, options = RECIPES[recipe]
    model = make(Tower, dtype)
    optimizer = adamw(model.parameters(), **options)
    chosen = {"comfort": Comfort(prefetch_depth=0, num_buckets=1, max_slots_host=1)} | PLANS[plan]
    made, steps = forced(model, optimizer, **chosen)[1], chosen.get("steps")
    more = {"accumulation_steps": steps, "clipping": steps is None, "device": DEVICE}
    with outcore.prepare(model, optimizer, plan=made, budget=outcore.Budget(disk=str(folder)), **more) as both:
        yield both


def compare_with_plain_loop(drive: Any, plan: str, recipe: str, folder: Path) -> None:
    model = make(Tower, RECIPES[recipe][0])
    plain = Masters(model)
    torch.manual_seed(5)
    for step in range(NUM_STEPS):
        drive(Rehearsal(model, plain), step)
    with prepared(plan, recipe, folder) as (twin, streamed):
        torch.manual_seed(5)
        for step in range(NUM_STEPS):
            drive(Rehearsal(twin, streamed=streamed), step)
        assert all(bool(value.isfinite().all()) for value in model.state_dict().values())
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
        if recipe != "fp32":
            states = [state for state in streamed.state_dict()["state"].values() if state["step"]]
            assert_same(plain.masters(), [state["master"] for state in states])


@pytest.mark.parametrize("recipe", ["bf16", "compact"])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("drive", DRIVES)
def test_masters_follow_what_has_changed_by_the_next_step(drive: Any, plan: str, recipe: str, tmp_path: Path) -> None:
    if "early" in plan and drive is several_times_while_gradients_accumulate:
        pytest.skip("early updates need the number of micro-batches")
    compare_with_plain_loop(drive, plan, recipe, tmp_path)


@pytest.mark.parametrize("recipe", ["fp32", "fp16"])
@pytest.mark.parametrize("plan", ["device", "states on the host", "host", "disk"])
def test_in_other_precisions(plan: str, recipe: str, tmp_path: Path) -> None:
    for drive in (gradients_at_perturbed_weights, some_elements_stay_edited):
        compare_with_plain_loop(drive, plan, recipe, tmp_path)


def edited_in_place(side: Rehearsal, step: int) -> None:
    """Weights that live on the device, without ``gathered`` but for reads in between."""
    before = {n: p.detach().clone() for n, p in side.model.named_parameters() if not n.startswith("blocks")}
    head = side.model.head
    with torch.no_grad():
        head.weight.mul_(1.05)
        head.bias.data = head.bias.data * 2
        side.save()
        head.weight.copy_(before["head.weight"])
        head.bias.copy_(before["head.bias"])
    side.backward(step)
    side.step()


@pytest.mark.parametrize("plan", ["device", "states on disk", "disk"])
def test_edits_in_place_may_cancel_too(plan: str, tmp_path: Path) -> None:
    compare_with_plain_loop(edited_in_place, plan, "bf16", tmp_path)


@pytest.mark.parametrize("recipe", ["bf16", "compact"])
@pytest.mark.parametrize("plan", ["device", "host", "disk"])
def test_a_master_follows_when_it_is_read_or_saved(plan: str, recipe: str, tmp_path: Path) -> None:
    with prepared(plan, recipe, tmp_path) as (model, optimizer):
        side = Rehearsal(model, streamed=optimizer)
        perturbed_and_restored(side, 0)
        weight = model.blocks[0].up.weight
        first = optimizer.state[weight]["master"].clone()
        before = side.save()
        rounded = before["blocks.0.up.weight"].cpu().float()
        assert not torch.equal(first.cpu(), rounded)
        side.scale(1.05)
        optimizer.state[weight]["exp_avg"].clone()
        side.restore(before)
        assert torch.equal(optimizer.state[weight]["master"].clone(), first)
        for read in (
            lambda: optimizer.state[weight]["master"].clone(),
            lambda: outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1).wait(),
        ):
            optimizer.state[weight]["master"].copy_(first)
            side.scale(1.05)
            read()
            side.restore(before)
            assert torch.equal(optimizer.state[weight]["master"].cpu(), rounded)


@pytest.mark.parametrize("recipe", ["bf16", "compact"])
@pytest.mark.parametrize("plan", ["device", "host", "disk"])
def test_what_is_loaded_is_later_than_an_edit(plan: str, recipe: str, tmp_path: Path) -> None:
    with prepared(plan, recipe, tmp_path) as (model, optimizer):
        side = Rehearsal(model, streamed=optimizer)
        perturbed_and_restored(side, 0)
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1).wait()
        values, states = dict(model.state_dict()), optimizer.state_dict()
        want = {"model": values, "states": states["state"]}

        def now() -> dict[str, Any]:
            return {"model": dict(model.state_dict()), "states": optimizer.state_dict()["state"]}

        some_elements_stay_edited(side, 2)
        side.scale(0.9)
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        assert_same(want, now())
        side.scale(0.9)
        model.load_state_dict(values)
        optimizer.load_state_dict(states)
        assert_same(want, now())
        weight = model.blocks[0].up.weight
        side.scale(0.9)
        written = torch.full(weight.shape, 0.123456, device=DEVICE)
        optimizer.state[weight]["master"] = written
        assert torch.equal(optimizer.state[weight]["master"].clone(), written)
