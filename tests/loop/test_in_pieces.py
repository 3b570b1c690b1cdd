"""Batches that units run in pieces: the result is that of accumulation with these pieces as micro-batches."""

from __future__ import annotations

import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced, prepare_for_test
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import outcore
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.engine.module.call import UnitCall
from outcore.engine.values.access import ValueAccess
from outcore.model import expensive_operations as dear
from outcore.planner.homes.pools import Comfort
from outcore.spec.plan import POLICIES, TIERS

from . import rig
from .rig import DEVICE, LENGTH, VOCAB, WIDTH, Tower, assert_same, batch, make

PIECES, ROWS, STEPS = 3, 8, 3  # 3 + 3 + 2 rows
COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Block(rig.Block):
    """Has no random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout.p = 0.0


class Normed(Block):
    """Its running statistics show the order of pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)


def tower(block: Callable[[], nn.Module] = Block) -> Callable[[], nn.Module]:
    return lambda: Tower(block)


class Llama(LlamaForCausalLM):
    def __init__(self, **changes: Any) -> None:
        super().__init__(LlamaConfig(**SHAPE, **changes))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


BUILDS: dict[str, Callable[[], nn.Module]] = {"tower": tower(), "normed": tower(Normed), "llama": Llama}


def loss_of(model: nn.Module, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Return the sum over tokens, divided by the number of tokens of the whole batch, as Transformers accumulates."""
    logits = model(ids)
    return functional.cross_entropy(logits.flatten(0, 1).float(), ids.roll(1, 1).flatten(), reduction="sum") / count


def optimizer_of(params: Any) -> torch.optim.Optimizer:
    """Make two groups of the trained parameters."""
    trained = [p for p in params if p.requires_grad]
    groups = [{"params": trained[::2]}, {"params": trained[1::2], "lr": 2e-2, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1, fused=True)


def accumulated(model: nn.Module, batches: list[list[torch.Tensor]], pieces: int = PIECES) -> list[torch.Tensor]:
    """Run the plain loop with masters and sums in fp32. A step has one or several batches, each of them in pieces."""
    params = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float().clone()) for p in params]
    optimizer, norms = optimizer_of(masters), []
    for step in batches:
        for ids in step:
            sums: list[torch.Tensor] = []
            for piece in ids.chunk(pieces):
                loss_of(model, piece, ids.numel() * len(step)).backward()
                grads = [p.grad.float() for p in params]
                sums = [a + b for a, b in zip(sums, grads, strict=True)] if sums else grads
                model.zero_grad()
            for master, grad in zip(masters, sums, strict=True):
                master.grad = grad if master.grad is None else master.grad + grad
        norms.append(nn.utils.clip_grad_norm_(masters, 0.5))
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)
    return norms


def in_pieces(model: nn.Module, optimizer: Any, batches: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    norms = []
    for step in batches:
        for ids in step:
            loss_of(model, ids, ids.numel() * len(step)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return norms


@contextmanager
def prepared(
    model: nn.Module, folder: Path, homes: Any = "host", pieces: int = PIECES, faults: Any = None, **how: Any
) -> Iterator[Any]:
    """Prepare with the race checker, which raises at two unordered accesses. Args: faults: Fields of ``Faults``."""
    optimizer = optimizer_of(model.parameters())
    _, plan = forced(model, optimizer, homes, comfort=COMFORT, pieces=pieces, **how)
    budget = outcore.Budget(disk=folder)
    options = {"plan": plan, "budget": budget, "device": DEVICE, "micro_batches_in_unit": pieces}
    options |= {"accumulation_steps": how.get("steps"), "race_checker": RaceChecker()}
    with prepare_for_test(model, optimizer, faults=Faults(**(faults or {})), **options) as result:
        yield result


def batches_of(micro_batches: int = 1, rows: int = ROWS) -> list[list[torch.Tensor]]:
    return [[batch(10 * i + j, rows) for j in range(micro_batches)] for i in range(STEPS)]


def same(
    folder: Path,
    build: Callable[[], nn.Module] = BUILDS["tower"],
    dtype: torch.dtype = torch.float32,
    micro_batches: int = 1,
    rows: int = ROWS,
    pieces: int = PIECES,
    **how: Any,
) -> None:
    model, twin, batches = make(build, dtype), make(build, dtype), batches_of(micro_batches, rows)
    want = accumulated(model, batches, pieces)
    with prepared(twin, folder, pieces=pieces, **how) as (twin, optimizer):
        got = in_pieces(twin, optimizer, batches)
        assert_same(want, got)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
MIXED = (("host", "disk", "host"), ("device", "host", "disk"), ("disk", "device", "host"))
PLANS: dict[str, dict[str, Any]] = {
    "device": {"homes": "device"},
    "host": {"homes": "host"},
    "host, kept": {"homes": "host", "policy": "keep"},
    "disk": {"homes": "disk"},
    "early": {"homes": "host", "steps": 1, "early": True},
    "share": {"homes": "host", "share": 0.6},
    "mixed": {"homes": lambda i: MIXED[i % 3]},
}


@both_dtypes
@pytest.mark.parametrize("plan", PLANS)
def test_is_accumulation(plan: str, dtype: torch.dtype, tmp_path: Path) -> None:
    same(tmp_path, dtype=dtype, **PLANS[plan])


@both_dtypes
@pytest.mark.parametrize("name", ["normed", "llama"])
def test_of_other_models(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    same(tmp_path, BUILDS[name], dtype)


@pytest.mark.parametrize("homes", ["device", "host"])
def test_autocast_and_a_scaler(homes: str, tmp_path: Path) -> None:
    model, twin, batches = make(BUILDS["llama"]), make(BUILDS["llama"]), batches_of()

    def train(model: nn.Module, optimizer: Any, pieces: int) -> None:
        scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0)
        for (ids,) in batches:
            for piece in ids.chunk(pieces):
                with torch.autocast(DEVICE, torch.bfloat16):
                    loss = loss_of(model, piece, ids.numel())
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

    train(model, optimizer_of(model.parameters()), PIECES)
    with prepared(twin, tmp_path, homes) as (twin, optimizer):
        train(twin, optimizer, 1)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))


@both_dtypes
def test_several_batches_make_a_step(dtype: torch.dtype, tmp_path: Path) -> None:
    same(tmp_path, dtype=dtype, micro_batches=2)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
@pytest.mark.parametrize("policy", ["keep", "select", "recompute"])
def test_every_policy_on_every_tier(policy: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)
    left, leave = [], OffloadedCall.leave
    monkeypatch.setattr(OffloadedCall, "leave", lambda mine, target: left.append(mine) or leave(mine, target))
    same(tmp_path, BUILDS["llama"], policy=policy, activations=tier)
    assert tier == "device" or len(left) >= STEPS * (3 * PIECES - 2)  # one for each unit and piece; the last ones stay


@pytest.mark.parametrize("homes", ["device", "host"])
def test_results_of_pieces_are_not_held(homes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were copied into the batch's result."""
    made, call = list[Any](), UnitCall.__call__

    def spy(mine: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(mine, *args, **kwargs)
        if torch.is_grad_enabled():
            made.append(weakref.ref(result.untyped_storage()))
        return result

    monkeypatch.setattr(UnitCall, "__call__", spy)
    with prepared(make(BUILDS["llama"]), tmp_path, homes, policy="keep") as (model, _):
        loss = loss_of(model, batch(0, ROWS), 1)
        assert len(made) == 3 * PIECES
        assert not any(storage() for storage in made)
        loss.backward()


def random_plan(seed: int) -> tuple[int, int, dict[str, Any]]:
    """Return the number of rows, the number of pieces, and a plan."""
    draw = random.Random(seed)
    kind = draw.choice(["mixed", "device", "host", "disk"])
    homes = [draw.choice(MIXED) if kind == "mixed" else (kind,) * 3 for _ in range(5)]
    policies = [draw.choice(POLICIES) for _ in range(5)]
    tiers = [draw.choice(TIERS) for _ in range(5)]
    early = draw.random() < 0.3
    plan: dict[str, Any] = {
        "homes": lambda i: homes[i],
        "policy": lambda i: policies[i],
        "activations": lambda i: tiers[i],
        "share": draw.choice([0.0, 0.5, 1.0]) if not early else 0.0,
        "micro_batches": draw.choice([1, 1, 2]),
        "dtype": draw.choice([torch.float32, torch.bfloat16]),
    }
    plan |= {"steps": plan["micro_batches"], "early": True} if early else {}
    if draw.random() < 0.5:
        plan["faults"] = {"delays": {"d2h": 1e-3, "h2d": 5e-4, "disk_write": 1e-3}, "poison": True}
    return draw.randint(1, 9), draw.randint(2, 5), plan


NUM_PLANS = int(os.environ.get("OUTCORE_TEST_PLANS", "6"))


@pytest.mark.parametrize("seed", range(NUM_PLANS))
def test_random_plans(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)
    rows, pieces, plan = random_plan(seed)
    model = BUILDS["normed" if seed % 3 == 0 else "llama"]
    same(tmp_path, model, rows=rows, pieces=pieces, **plan)


FAULTS: dict[str, dict[str, Any]] = {
    "late": {"delays": {"d2h": 2e-3, "h2d": 1e-3, "update": 1e-3, "disk_write": 1e-3}, "poison": True},
    "permuted": {"permute": 3, "poison": True},
}


@pytest.mark.parametrize("faults", [name for name in FAULTS if name == "late" or DEVICE == "cpu"])
@pytest.mark.parametrize(("homes", "more"), [("disk", {"early": True, "steps": 1}), ("host", {"activations": "host"})])
def test_late_and_permuted_lanes(homes: str, more: Any, faults: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(away, "SMALL_BYTES", 64)
    same(tmp_path, dtype=torch.bfloat16, homes=homes, faults=FAULTS[faults], **more)


def test_weights_come_once_however_many_pieces(tmp_path: Path) -> None:
    moved = []
    for pieces in (1, 2, 8):
        with prepared(make(BUILDS["tower"]), tmp_path, pieces=pieces) as (model, optimizer):
            in_pieces(model, optimizer, batches_of())
            moved.append(optimizer.engine.opened.traffic.totals())
    assert moved[0] == moved[1] == moved[2]


def test_tied_parameters_are_equal_up_to_rounding(tmp_path: Path) -> None:
    build = lambda: Llama(tie_word_embeddings=True)  # noqa: E731
    model, twin, batches = make(build), make(build), batches_of()[:1]
    accumulated(model, batches)
    with prepared(twin, tmp_path) as (twin, optimizer):
        in_pieces(twin, optimizer, batches)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()), rounding=1e-5)


def test_hooks_and_chosen_gradients(tmp_path: Path) -> None:
    """Parameters outside of units have hooks and can be asked for, too."""
    model, twin, ids = make(BUILDS["tower"]), make(BUILDS["tower"]), batch(0, ROWS)
    seen: list[list[torch.Tensor]] = [[], []]
    whole = sum(loss_of(model, piece, ids.numel()) for piece in ids.chunk(PIECES))
    (want,) = torch.autograd.grad(whole, [model.head.weight])
    model.embed.weight.register_hook(seen[0].append)
    for piece in ids.chunk(PIECES):
        loss_of(model, piece, ids.numel()).backward()
    with prepared(twin, tmp_path) as (twin, _):
        (got,) = torch.autograd.grad(loss_of(twin, ids, ids.numel()), [twin.head.weight])
        torch.testing.assert_close(got, want)
        twin.embed.weight.register_hook(seen[1].append)
        loss_of(twin, ids, ids.numel()).backward()
        torch.testing.assert_close(sum(seen[1]), sum(seen[0]))
        torch.testing.assert_close(twin.embed.weight.grad + 0, model.embed.weight.grad)
        assert torch.equal(twin.blocks[1].up.weight.grad + 0, model.blocks[1].up.weight.grad)


def test_small_and_other_batches(tmp_path: Path) -> None:
    """A short last batch, another length, one row; evaluation takes a batch whole."""
    batches = [[batch(0, 2)], [batch(1, ROWS)[:, :4]], [batch(2, 1)], [batch(3, ROWS)]]
    model, twin = make(BUILDS["tower"]), make(BUILDS["tower"])
    want = accumulated(model, batches)
    with prepared(twin, tmp_path) as (twin, optimizer):
        calls = []
        twin.blocks[0].up.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
        assert_same(want, in_pieces(twin, optimizer, batches))
        calls.clear()
        with torch.no_grad():
            assert torch.equal(model(batch(4, ROWS)), twin(batch(4, ROWS)))
        assert calls == [ROWS]


def test_an_empty_batch(tmp_path: Path) -> None:
    with prepared(make(BUILDS["tower"]), tmp_path) as (model, _):
        assert model(batch(0, ROWS)[:0]).shape == (0, LENGTH, VOCAB)


def test_an_exception_in_a_piece(tmp_path: Path) -> None:
    model, twin, batches = make(BUILDS["tower"]), make(BUILDS["tower"]), batches_of()
    want = accumulated(model, batches)
    with prepared(twin, tmp_path) as (twin, optimizer):
        in_pieces(twin, optimizer, batches[:1])
        calls: list[int] = []

        def fail(*_: Any) -> None:
            calls.append(1)
            if len(calls) == 2:
                raise KeyError("second piece")

        hook = twin.blocks[1].up.register_forward_hook(fail)
        with pytest.raises(KeyError, match="second piece"):
            loss_of(twin, batches[1][0], 1)
        hook.remove()
        in_pieces(twin, optimizer, batches[1:])
        assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert want


def test_router_logits_are_those_of_the_batch(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return MixtralForCausalLM(MixtralConfig(**SHAPE, num_local_experts=2, output_router_logits=True))

    model, twin, ids = make(build), make(build), batch(0, ROWS)
    want = model(input_ids=ids, labels=ids)
    with prepared(twin, tmp_path) as (twin, _):
        got = twin(input_ids=ids, labels=ids)
        assert [t.shape for t in got.router_logits] == [t.shape for t in want.router_logits]
        torch.testing.assert_close(got.aux_loss, want.aux_loss)
        got.loss.backward()


class InPlace(Tower):
    """Changes the results of units in place."""

    def __init__(self) -> None:
        super().__init__(Block)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x).mul_(1.5)
        return self.head(x)


def test_results_may_be_changed_in_place(tmp_path: Path) -> None:
    same(tmp_path, InPlace)


def test_the_weights_outside_of_units_changed_before_backward(tmp_path: Path) -> None:
    with prepared(make(BUILDS["tower"]), tmp_path) as (model, _):
        loss = loss_of(model, batch(0, ROWS), 1)
        with torch.no_grad():
            model.head.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_frozen_between_forward_and_backward(tmp_path: Path) -> None:
    with prepared(make(BUILDS["tower"]), tmp_path) as (model, _):
        loss = loss_of(model, batch(0, ROWS), 1)
        model.head.weight.requires_grad_(requires_grad=False)
        loss.backward()
        assert model.head.weight.grad is None
        assert model.head.bias.grad is not None


def test_weights_outside_of_units_are_not_taken_for_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with prepared(make(BUILDS["tower"], torch.bfloat16), tmp_path) as (model, optimizer):
        monkeypatch.setattr(ValueAccess, "read_state", lambda *_: pytest.fail("a master was read"))
        in_pieces(model, optimizer, [[batch(0, ROWS)], [batch(1, ROWS)]])


def test_no_gradients_of_gradients(tmp_path: Path) -> None:
    with prepared(make(BUILDS["tower"]), tmp_path) as (model, _):
        x = torch.randn(ROWS, LENGTH, WIDTH, device=DEVICE, requires_grad=True)
        (grad,) = torch.autograd.grad(model.head(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


class Beside(Tower):
    """A module outside of units changes its argument, or a list that it gets."""

    def __init__(self, pre: nn.Module) -> None:
        super().__init__(Block)
        self.pre = pre

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, losses = self.embed(ids), list[Any]()
        for block in self.blocks:
            x = block(x)
        return self.head(self.pre(x, losses) + x)


class Rectified(nn.Linear):
    def forward(self, x: torch.Tensor, _: Any) -> torch.Tensor:
        return super().forward(x.relu_())


class Penalised(nn.Linear):
    def forward(self, x: torch.Tensor, losses: list[Any]) -> torch.Tensor:
        losses.append(x.mean())
        return super().forward(x)


@pytest.mark.parametrize("kind", [Rectified, Penalised])
def test_arguments_that_are_changed_outside_of_units(kind: Any, tmp_path: Path) -> None:
    with prepared(make(lambda: Beside(kind(WIDTH, WIDTH))), tmp_path) as (model, _):
        with pytest.raises(UnsupportedError, match="changed one of its arguments"):
            model(batch(0, ROWS))


class Shared(Tower):
    """The blocks' norm is used outside of them, too."""

    def __init__(self) -> None:
        super().__init__(Block)
        self.norm = self.blocks[0].norm
        for block in self.blocks:
            block.norm = self.norm

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def test_a_module_inside_and_outside_of_units(tmp_path: Path) -> None:
    model, twin, batches = make(Shared), make(Shared), batches_of()[:1]
    accumulated(model, batches)
    with prepared(twin, tmp_path) as (twin, optimizer):
        in_pieces(twin, optimizer, batches)
        assert_same(dict(model.state_dict()), dict(twin.state_dict()), rounding=1e-5)


class Mixing(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(0))


class Infinite(Mixing):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.nan_to_num(0.0, 0.0, 0.0)).index_fill(-1, torch.tensor(0, device=x.device), torch.inf)


class NotFinite(Block):
    """Returns NaN and infinity beside rows that are apart."""

    def forward(self, x: Any) -> Any:
        result = super().forward(x[0] if isinstance(x, tuple) else x)
        return result, torch.full_like(result, torch.nan), torch.full_like(result, -torch.inf)


class SequenceFirst(nn.Module):
    """Has its batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 2, 24, dropout=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(functional.pad(x, (0, 12 - WIDTH)))[..., :1] + x


class Scalar(Block):
    """Returns a scalar beside its rows."""

    def forward(self, x: Any) -> Any:
        x, penalty = x if isinstance(x, tuple) else (x, 0.0)
        result = super().forward(x)
        return result, penalty + result.square().mean()


class Scored(Tower):
    def __init__(self) -> None:
        super().__init__(Scalar)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: Any = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x[0])


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (tower(Mixing), "the result of one of them depends on another"),
        (tower(Infinite), "the result of one of them depends on another"),
        (tower(SequenceFirst), "the result of one of them depends on another"),
        (Scored, "a result of two rows has shape"),
    ],
)
def test_what_cannot_be_cut_is_refused(build: Callable[[], nn.Module], said: str, tmp_path: Path) -> None:
    with prepared(make(build), tmp_path) as (model, _):
        for ids in (torch.zeros_like(batch(0, ROWS)), batch(0, ROWS)):  # equal rows are refused, too
            with pytest.raises(UnsupportedError, match=said):
                model(ids)


def test_results_that_are_not_finite(tmp_path: Path) -> None:
    class Net(Scored):
        def __init__(self) -> None:
            Tower.__init__(self, NotFinite)

    same(tmp_path, Net)


def test_options_that_cannot_be(tmp_path: Path) -> None:
    model = make(BUILDS["tower"])
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ConfigError, match="micro_batches_in_unit to be a positive integer or None"):
            outcore.prepare(model, optimizer_of(model.parameters()), micro_batches_in_unit=wrong)  # type: ignore[arg-type]
