"""Compiled blocks equal a plain loop with compiled blocks, and one code serves all of them."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from torch import nn
from torch._dynamo.utils import counters
from torch.nn import functional

import outcore
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.planner.homes.pools import Comfort

from .rig import DEVICE, IS_SIMULATED, Block, Tower, adamw, assert_same, batch, make, prepared, seen, train

# Torch's own warnings, from code that it compiles.
pytestmark = [
    pytest.mark.skipif(IS_SIMULATED, reason="what dynamo asks a GPU is not simulated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning"),
]
PLANS: dict[str, dict[str, Any]] = {
    "device": {"homes": "device"},
    "host": {"homes": "host"},
    "host keep": {"homes": "host", "policy": "keep"},
    "disk, activations on host": {"homes": "disk", "policy": "keep", "activations": "host"},
    "host, arguments on host": {"homes": "host", "policy": "recompute", "activations": "host"},
    "device, activations on disk": {"homes": "device", "policy": "keep", "activations": "disk"},
    "disk, arguments on disk": {"homes": "disk", "policy": "recompute", "activations": "disk"},
    "mixed": {
        "homes": lambda i: (("host", "disk", "device")[i % 3],) * 3,
        "policy": lambda i: "keep" if i % 2 else "recompute",
        "activations": lambda i: "disk" if i == 3 else "device",
    },
}
COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
TRACED = {"backend": "aot_eager"}
"""Everything of torch.compile except the compiler."""


@pytest.fixture(autouse=True)
def _nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def five() -> nn.Module:
    return Tower(num_blocks=5)


def num_codes() -> int:
    return int(counters["stats"]["unique_graphs"])


Drive = Callable[[nn.Module, Any], Any]


@contextmanager
def compiled(model: nn.Module, folder: Path, options: Any, **plan: Any) -> Iterator[Any]:
    optimizer = adamw(model)
    _, made = forced(model, optimizer, comfort=COMFORT, **plan)
    more = {"budget": outcore.Budget(disk=folder), "device": DEVICE, "micro_batches_in_unit": plan.get("pieces")}
    with outcore.prepare(model, optimizer, plan=made, compile=options, **more) as result:
        yield result


def plain_with_compiled_blocks(drive: Drive, build: Callable[[], nn.Module], options: Any) -> tuple[Any, int]:
    """Return the results, and the number of compiled codes."""
    model = make(build)
    for block in model.blocks:
        block.compile(**({} if options is True else options))
    optimizer = adamw(model, fused=True)
    torch.manual_seed(5)
    result = seen(drive(model, optimizer), model, optimizer)
    return result, num_codes()


_PLAIN: dict[tuple[Drive, str], tuple[Any, int]] = {}
"""Results of the plain loop, which do not depend on the plan."""


def same(
    drive: Drive, folder: Path, *, build: Callable[[], nn.Module] = five, options: Any = TRACED, **plan: Any
) -> tuple[int, int]:
    """Drive a plain model with compiled blocks and a prepared one; return how many codes each needed."""
    key = drive, repr(options)
    if key not in _PLAIN or build is not five:
        _PLAIN[key] = plain_with_compiled_blocks(drive, build, options)
        torch._dynamo.reset()
        counters.clear()
    want, of_plain = _PLAIN[key] if build is five else _PLAIN.pop(key)
    with compiled(make(build), folder, options, **plan) as (model, optimizer):
        before = num_codes()  # codes of the trial whether this machine compiles
        torch.manual_seed(5)
        assert_same(want, seen(drive(model, optimizer), model, optimizer))
        return of_plain, num_codes() - before


def micro_batches(model: nn.Module, optimizer: Any) -> Any:
    out = []
    for step in range(3):
        for i in range(2):
            model.loss(batch(2 * step + i)).backward()
        out.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5) + 0)
        model.loss(batch(step))  # no backward follows
        optimizer.step()
        optimizer.zero_grad()
    return out


class Undropped(Block):
    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.0


def test_batches_in_pieces(tmp_path: Path) -> None:
    """Equal accumulation over the pieces, one of them smaller, in a plain loop with compiled blocks."""
    build, pieces, rows = functools.partial(Tower, Undropped), 3, 5

    def drive(model: nn.Module, optimizer: Any, count: int) -> Any:
        for step in range(2):
            ids = batch(step, rows)
            for piece in ids.chunk(count):
                logits = model(piece).flatten(0, 1)
                (functional.cross_entropy(logits, piece.flatten(), reduction="sum") / ids.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()

    in_turn = functools.partial(drive, count=pieces)
    want, _ = plain_with_compiled_blocks(in_turn, build, TRACED)
    torch._dynamo.reset()
    with compiled(make(build), tmp_path, TRACED, pieces=pieces, **PLANS["mixed"]) as (model, optimizer):
        assert_same(want, seen(drive(model, optimizer, 1), model, optimizer))


@pytest.mark.parametrize("plan", PLANS)
def test_like_a_plain_loop_with_compiled_blocks(plan: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every possible policy, on every tier."""
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    left, leave = [], OffloadedCall.leave
    monkeypatch.setattr(OffloadedCall, "leave", lambda mine, target: left.append(mine) or leave(mine, target))
    of_plain, ours = same(micro_batches, tmp_path, **PLANS[plan])
    assert len(left) >= (6 if plan == "mixed" else 6 * 4 if "activations" in PLANS[plan] else 0)
    assert of_plain == 1  # for five blocks, however often they run
    assert ours == (2 if plan == "mixed" else 1)  # parameters that stay on the device are of another class


def of_many_kinds(model: nn.Module, optimizer: Any) -> Any:
    """Change shapes, evaluate in between, and make two forwards before a backward."""
    out = []
    for step, rows in enumerate((3, 5, 2, 3)):
        losses = [model.loss(batch(2 * step, rows=rows)), model.loss(batch(2 * step + 1, rows=rows + step))]
        sum(losses).backward()
        model.eval()
        with torch.no_grad():
            out += [*losses, model.loss(batch(step + 50))]
        model.train()
        optimizer.step()
        optimizer.zero_grad()
    return out


def test_shapes_and_modes_that_change(tmp_path: Path):
    of_plain, ours = same(of_many_kinds, tmp_path, homes="host", options={"backend": "eager"})
    assert of_plain == ours


def test_where_everything_fits(tmp_path: Path):
    model = make(five)
    for block in model.blocks:
        block.compile(**TRACED)
    want = train(model, adamw(model, fused=True))
    twin = make(five)
    with outcore.prepare(twin, adamw(twin), device=DEVICE, compile=TRACED) as (twin, optimizer):
        assert optimizer.plan.plain
        assert_same(want, train(twin, optimizer))


def under_autocast(model: nn.Module, optimizer: Any) -> Any:
    losses = []
    for step in range(2):
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            loss = model.loss(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_autocast(policy: str, tmp_path: Path):
    of_plain, ours = same(under_autocast, tmp_path, homes="host", policy=policy)
    assert of_plain == ours


class Broken(nn.Module):
    """Has a line that torch cannot follow; torch compiles the code before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(13, 13), nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = functional.gelu(self.one(x))
        torch._dynamo.graph_break()
        return x + functional.dropout(self.two(h), 0.1, training=self.training)


def test_code_in_parts(tmp_path: Path):
    of_plain, ours = same(train, tmp_path, build=lambda: Tower(Broken, 4), homes="host")
    assert of_plain == ours == 2


def test_frozen_reference(tmp_path: Path):
    model = make(five)
    for block in model.blocks:
        block.compile(**TRACED)
    with torch.no_grad():
        want = model.eval()(batch())
    twin = make(five)
    with prepared(twin, None, "host", tmp_path, compile=TRACED) as (twin, _), torch.no_grad():
        assert_same(want, twin.eval()(batch()))


def test_is_over_with_the_run(tmp_path: Path):
    model = make(five)
    with compiled(model, tmp_path, TRACED, homes="host") as (_, optimizer):
        train(model, optimizer)
    assert all("forward" not in vars(block) for block in model.blocks)


class OneLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(13, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.dropout(torch.tanh(self.up(x)), 0.1, training=self.training)


@pytest.mark.skipif(DEVICE != "cpu" or not shutil.which("g++"), reason="needs a compiler for the device")
def test_compiler(tmp_path: Path):
    of_plain, ours = same(train, tmp_path, build=lambda: Tower(OneLayer, 3), options=True, homes="host")
    assert of_plain == ours == 1


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ("inductor", ConfigError, "expected a bool or a dict of torch.compile's options, but got 'inductor'"),
        ({"speed": 11}, ConfigError, "but got speed; leave out what it does not have"),
        ({"backend": "abacus"}, ConfigError, "expected a torch that can compile for .*abacus"),
        ({"mode": "reduce-overhead"}, UnsupportedError, "mode 'reduce-overhead' replays CUDA graphs"),
        ({"mode": "max-autotune"}, UnsupportedError, "take mode 'max-autotune-no-cudagraphs'"),
        ({"options": {"triton.cudagraphs": True}}, UnsupportedError, "triton.cudagraphs replays CUDA graphs"),
    ],
)
def test_refused_options(options: Any, kind: type[Exception], says: str):
    model = make(five)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(kind, match=says):
        outcore.prepare(model, adamw(model), device=DEVICE, compile=options)
    assert_same(before, dict(model.state_dict()))


@pytest.mark.parametrize(("how", "options"), [("in place", False), ("in place", TRACED), ("wrapped", TRACED)])
def test_blocks_that_are_compiled_already(how: str, options: Any):
    model = make(five)
    for i, block in enumerate(model.blocks):
        if how == "in place":
            block.compile(**TRACED)
        else:
            model.blocks[i] = torch.compile(block, **TRACED)
    with pytest.raises(UnsupportedError, match="blocks are not compiled, but 'blocks.0' is.*compile=True"):
        outcore.prepare(model, adamw(model), device=DEVICE, compile=options)
