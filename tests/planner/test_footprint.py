"""What is alive in a step, from shapes alone, for any policies. Runs of a simulated GPU are compared with it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

from outcore.model import expensive_operations as dear
from outcore.model.partition import Partition, partition
from outcore.planner.forward.footprint import Footprint, SavedBytes, Step, as_run
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.spec.plan import POLICIES, TIERS, Plan, UnitPlan

SAVED = SavedBytes(keep=100, select=40, recompute=10, kept=100, cast=0)
NAMES = ("a", "b", "c", "d")


def step(unit: str, begin: int, recompute: int, select: int, keep: int, *, is_backward: bool = False) -> Step:
    """A step. Args: recompute, select, keep: Bytes beyond what is alive before."""
    return Step(
        unit=unit,
        is_backward=is_backward,
        begin_bytes=begin,
        peak_bytes=begin + recompute,
        select_bytes=begin + select,
        keep_bytes=begin + keep,
        made_bytes=20 * is_backward,
    )


FOOTPRINT = Footprint(
    saved=dict.fromkeys(NAMES, SAVED),
    steps=[
        step("", 0, 5, 5, 5),
        *(step(n, 10 * i, 30, 50, 110) for i, n in enumerate(NAMES)),
        *(step(n, 10 * i, 150, 160, 0, is_backward=True) for i, n in reversed(list(enumerate(NAMES)))),
    ],
)


def units(policy: str, tier: str) -> list[UnitPlan]:
    homes: Any = {"weights": "device", "gradients": "device", "states": "device"}
    saved_bytes = 4096 if tier != "device" else 0
    return [UnitPlan(name=n, policy=policy, activations=tier, saved_bytes=saved_bytes, **homes) for n in NAMES]


@pytest.mark.parametrize(
    ("policy", "tier", "most"),
    [
        ("recompute", "device", 180),
        ("select", "device", 180 + 3 * 30),
        ("keep", "device", 180 + 3 * 90),
        ("recompute", "host", 180 - 2 * 10),  # the last two arguments are still there
        ("select", "host", 180 + 10 - 2 * 10 + 30),
        ("keep", "host", 30 + 110 - 10 + 90),  # the first arguments stay until forward is over
        ("keep", "disk", 30 + 110 - 10 + 90),
    ],
)
def test_peak_of_policies(policy: str, tier: str, most: int) -> None:
    assert FOOTPRINT.peak_bytes(units(policy, tier)) == most


def test_casts_and_small_storages_take_room_of_what_is_kept() -> None:
    """A call of a run takes as much for them (``engine.activations.policies.SavedBytesCounter``)."""
    saved = dict.fromkeys(NAMES, dataclasses.replace(SAVED, kept=120, small=7))
    plan = Plan(precision="bf16", units=tuple(units("recompute", "device")), pools=(), prefetch_depth=0)
    kept = [unit.policy for unit in as_run(plan, saved, 2 * 127).units]
    assert kept == ["keep", "keep", "recompute", "recompute"]
    assert [unit.policy for unit in as_run(plan, saved, 2 * 127 - 1).units].count("keep") == 1
    assert dataclasses.replace(FOOTPRINT, saved=saved).keep_bytes == 4 * 127


class Rows(nn.Module):
    """Layers over the output of an embedding, with a loss that takes more than they do."""

    def __init__(self, *, holds: bool) -> None:
        super().__init__()
        self.embed, self.head, self.holds = nn.Embedding(8, 1024), nn.Linear(1024, 8192), holds
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024)) for _ in range(4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        self.first = x if self.holds else None
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x).log_softmax(-1).mean()
        return loss


def test_what_the_first_unit_got_is_there_while_the_model_has_it() -> None:
    """If the model drops it and it has left the device, it is no longer counted."""
    alive = {}
    for holds in (True, False):
        cut = partition(Rows(holds=holds), state_names=(), precision=None)
        found = footprint_of(cut, {"ids": torch.zeros(64, dtype=torch.long)}, CPU)
        homes: Any = {"weights": "device", "gradients": "device", "states": "device"}
        away: Any = {"policy": "keep", "activations": "host", "saved_bytes": 4096}
        plans = [UnitPlan(name=u.name, **homes, **(away if u.name else {})) for u in cut.spec.units]
        alive[holds] = max(nbytes for step, nbytes in found.alive(plans) if not step.is_backward)
    assert alive[True] == alive[False] + 64 * 1024 * 4


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_what_is_too_small_to_leave_is_counted(tier: str) -> None:
    """It is counted for all calls but the running one, which already includes it."""
    small = dataclasses.replace(FOOTPRINT, saved=dict.fromkeys(NAMES, dataclasses.replace(SAVED, small=7)))
    for policy, more in (("keep", 3 * 7), ("select", 0), ("recompute", 0)):
        found, before = (of.peak_bytes(units(policy, tier)) for of in (small, FOOTPRINT))
        assert found == before + more


def llama(layers: int = 3, device: str = "cpu") -> Partition:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=4, vocab_size=300
    )
    with torch.device(device):
        model = LlamaForCausalLM(config)
    return partition(model, state_names=(), precision=None)


def peak(found: Footprint) -> int:
    """Peak bytes of a step that recomputes everything."""
    homes: Any = {"weights": "device", "gradients": "device", "states": "device"}
    return found.peak_bytes(UnitPlan(name=name, **homes) for name in found.saved)


def sample(rows: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, 64, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


CPU = torch.device("cpu")


def test_saves_more_with_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", 1)
    for saved in footprint_of(llama(), sample(), CPU).saved.values():
        assert 0 < saved.recompute < saved.select < saved.keep
        assert saved.recompute == 2 * 64 * 64 * 4


def test_equal_layers_are_followed_once_and_count_all() -> None:
    """The result is that of following each layer."""
    few, many = (footprint_of(llama(n, "meta"), sample(), CPU) for n in (2, 12))
    backward = [step for step in many.steps if step.is_backward]
    assert len(backward) == 12
    assert {step.made_bytes for step in backward[1:]} == {few.steps[-1].made_bytes}
    arguments = 2 * 64 * 64 * 4
    assert peak(many) == peak(few) + 10 * arguments + many.loose_bytes - few.loose_bytes


def test_what_several_units_get_is_counted_once() -> None:
    """Examples are the encoder's output, and the positions that the first block of each half passes to the others."""
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "vocab_size": 300}
    cut = partition(T5ForConditionalGeneration(T5Config(decoder_start_token_id=0, **sizes)), state_names=())
    found = footprint_of(cut, sample(), CPU)
    row, positions = 2 * 64 * 64 * 4, 4 * 64 * 64 * 4
    arguments = {name: saved.recompute for name, saved in found.saved.items()}
    assert [arguments[f"encoder.block.{i}"] for i in range(3)] == [row, row + positions, row]
    assert [arguments[f"decoder.block.{i}"] for i in range(3)] == [2 * row, row + positions, row]
    assert found.shared_bytes == row + 2 * positions


def test_rows_add_bytes() -> None:
    one, two = (peak(footprint_of(llama(), sample(rows), CPU)) for rows in (1, 2))
    assert 1.5 * one < two < 2.5 * one


def test_every_policy_on_every_tier_is_less_than_all_kept() -> None:
    cut = llama()
    found = footprint_of(cut, sample(), CPU)
    plans = [
        UnitPlan(name=u.name, weights="device", gradients="device", states="device", policy="keep")
        for u in cut.spec.units
    ]
    most = found.peak_bytes(plans)
    for policy in POLICIES:
        for tier in TIERS:
            more = {"activations": tier, "saved_bytes": 4096} if tier != "device" else {}
            chosen = [plans[0], *(dataclasses.replace(p, policy=policy, **more) for p in plans[1:])]
            assert found.peak_bytes(chosen) <= most


def test_a_loss_in_tiles_holds_gradients_in_fp32() -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, vocab_size=9000
    )
    cut = partition(LlamaForCausalLM(config), state_names=(), precision=None)
    whole, tiled = (footprint_of(cut, sample(), CPU, makes_logits=makes) for makes in (True, False))
    assert 4 * 9000 * 64 + 8 * 128 * 64 + 2 * 128 * 9000 < peak(tiled) < peak(whole)


class Choosy(nn.Module):
    """A model whose backward needs real values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        x.register_hook(lambda grad: grad * grad.max().item())
        return x


def test_a_backward_that_needs_values_is_not_known() -> None:
    cut = partition(Choosy(), state_names=(), precision=None)
    found = footprint_of(cut, {"x": torch.ones(2, 8)}, CPU)
    assert not found.steps
    assert peak(found) == 0
