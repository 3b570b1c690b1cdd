"""Device memory of whole steps, by the device's own counter: never more than the plan, and little less.

Several models, bf16 and autocast, all policies, tiers and homes, whole batches and pieces. ``footprint_of_plans.py``
tries more of them, and prints the results.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from memory_tests import LOOSE_BYTES, allocated, with_room_for
from plans import forced
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import outcore
from outcore.core.quantities import PAGE_BYTES
from outcore.model import expensive_operations as dear
from outcore.model.partition import partition
from outcore.planner.forward.saved_bytes import footprint_of
from outcore.planner.homes.activation_policies import WORKSPACE_SHARE
from outcore.spec.budget import tier_bytes
from outcore.spec.plan import POLICIES, TIERS

pytestmark = pytest.mark.gpu
LAYERS, ROWS, LENGTH, WORDS = 6, 4, 64, 600
SHAPE = {"hidden_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4, "vocab_size": WORDS}
GATED = {**SHAPE, "intermediate_size": 344, "num_key_value_heads": 2}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "Llama": lambda: LlamaForCausalLM(LlamaConfig(**GATED)),
    "Qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**GATED, head_dim=32)),
    "GPT-2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=128, n_layer=LAYERS, n_head=4, vocab_size=WORDS, n_positions=LENGTH)
    ),
    "T5": lambda: T5ForConditionalGeneration(
        T5Config(
            d_model=128,
            d_kv=32,
            d_ff=344,
            num_layers=3,
            num_decoder_layers=3,
            num_heads=4,
            vocab_size=WORDS,
            decoder_start_token_id=0,
        )
    ),
}
RANDOM = ("Llama", "Qwen3", "GPT-2")
HOMES = ("device", "host", "disk")
NUMBERS = ("fp32", "bf16", "autocast")
DEAR = 30  # FLOP per byte: the models are small


@dataclass(frozen=True)
class Case:
    """A model and a plan."""

    model: str
    numbers: str
    policies: tuple[str, ...]
    tiers: tuple[str, ...]
    homes: str
    pieces: int

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if self.numbers == "autocast" else nullcontext()


@dataclass(frozen=True)
class Bytes:
    """Bytes of two steps on the device. The second step also has remains of the first, such as norms."""

    planned: int
    """Bytes beside those between steps, from shapes."""
    seen: int
    plan: int
    """All bytes of the plan."""
    peak: int
    """All bytes that were taken."""


def random_case(seed: int) -> Case:
    draw = random.Random(seed)
    kind = draw.choice(["mixed", *POLICIES])
    policies = tuple(draw.choice(POLICIES) if kind == "mixed" else kind for _ in range(LAYERS))
    tiers = tuple(draw.choice(TIERS) for _ in range(LAYERS))
    return Case(
        draw.choice(RANDOM),
        draw.choice(NUMBERS),
        policies,
        tiers if draw.random() < 0.5 else tiers[:1] * LAYERS,
        draw.choice(HOMES),
        draw.choice([1, 1, 1, 2, 4]),
    )


def bytes_of(case: Case, folder: Path) -> Bytes:
    """Plan a step, and run two."""
    torch.manual_seed(0)
    model = MODELS[case.model]().to(torch.bfloat16 if case.numbers == "bf16" else torch.float32)
    ids = torch.randint(WORDS, (ROWS, LENGTH)).cuda()
    sample = {"input_ids": ids, "labels": ids}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cut = partition(model, state_names=(), precision=None, micro_batches_in_unit=case.pieces)
    with case.autocast():
        found = footprint_of(cut, sample, torch.device("cuda"))
    saving = {"policy": lambda i: case.policies[i - 1], "activations": lambda i: case.tiers[i - 1]}
    spec, plan = forced(model, optimizer, case.homes, pieces=case.pieces, **saving)
    plan = with_room_for(found, plan)
    planned = found.peak_bytes(plan.units)
    room = int(WORKSPACE_SHARE * planned)
    before = allocated()
    options = {"plan": dataclasses.replace(plan, workspace_bytes=room), "budget": outcore.Budget(disk=folder)}
    options |= {"device": "cuda", "micro_batches_in_unit": case.pieces}
    with outcore.prepare(model, optimizer, **options) as (model, optimizer):
        prepared = allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            with case.autocast():
                loss = model(**sample).loss
            loss.backward()
            del loss
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
    return Bytes(planned, peak - prepared, tier_bytes(spec, options["plan"])["device"], peak - before)


# Caches of keys in pieces; select; kept beside what leaves, under autocast; pieces under autocast; pieces.
@pytest.mark.parametrize("seed", [6, 5, 18, 27, 43])
def test_a_step_takes_what_was_planned(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", DEAR)
    found = bytes_of(random_case(seed), tmp_path)
    check(found)
    assert found.seen <= found.planned + PAGE_BYTES, found


@pytest.mark.parametrize(("policy", "tier"), [("select", "device"), ("recompute", "host"), ("keep", "disk")])
def test_a_step_of_an_encoder_decoder(policy: str, tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks share tensors. Selected tensors are not those that autograd saves."""
    monkeypatch.setattr(dear, "DEAR_FLOP_PER_BYTE", DEAR)
    check(bytes_of(Case("T5", "fp32", (policy,) * LAYERS, (tier,) * LAYERS, "host", 1), tmp_path))


def check(found: Bytes) -> None:
    assert 0.97 * found.plan - LOOSE_BYTES <= found.peak <= found.plan, found
