"""What forwards save is known to the byte before the run, and plans have room for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from loop.rig import DEVICE, Tower, adamw, assert_same, batch, make, seen
from plans import plan_for
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import outcore
from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.engine.activations.offloaded_call import OffloadedCall
from outcore.planner.homes.check import check_plan

IDS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
WIDTH = {"hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, **IDS}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**WIDTH)),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(n_embd=48, n_layer=3, n_head=4, n_positions=64, **IDS)),
    "t5": lambda: T5ForConditionalGeneration(
        T5Config(d_model=48, d_kv=12, d_ff=80, num_layers=3, num_heads=4, vocab_size=96, decoder_start_token_id=0)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_key_value_heads=4, **WIDTH)),
}


def sample_of(rows: int = 2, length: int = 32) -> dict[str, torch.Tensor]:
    ids = torch.randint(96, (rows, length), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return {"input_ids": ids, "labels": ids}


def train(model: nn.Module, optimizer: Any, steps: int = 2) -> list[torch.Tensor]:
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        loss = model(**sample_of()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of what calls have saved."""
    found: list[int] = []
    end = OffloadedCall.end_forward

    def noting(mine: OffloadedCall, owner: object) -> Any:
        call = end(mine, owner)
        found.append(mine.nbytes)
        return call

    monkeypatch.setattr(OffloadedCall, "end_forward", noting)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_call_saves_what_was_planned(
    name: str, dtype: torch.dtype, tier: str, tmp_path: Path, sizes: list[int]
) -> None:
    model = make(MODELS[name], dtype)
    options = {"sample": sample_of(), "activations": tier, "device": DEVICE, "budget": outcore.Budget(disk=tmp_path)}
    with outcore.prepare(model, adamw(model), precision="pure_bf16" if dtype != torch.float32 else None, **options) as (
        model,
        optimizer,
    ):
        planned = [unit.saved_bytes for unit in optimizer.plan.units[1:]]
        train(model, optimizer)
    assert sizes == planned * 2
    assert min(planned) > 0


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_trained_as_in_the_plain_loop(name: str, tier: str, tmp_path: Path) -> None:
    model = make(MODELS[name])
    plain = adamw(model, fused=True)
    want = seen(train(model, plain), model, plain)
    model = make(MODELS[name])
    budget = outcore.Budget(disk=tmp_path)
    options = {"sample": sample_of(), "activations": tier, "device": DEVICE, "budget": budget}
    with outcore.prepare(model, adamw(model), **options) as (model, optimizer):
        assert_same(want, seen(train(model, optimizer), model, optimizer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.filterwarnings("error:.*saves more than the plan has room for")
def test_experts_that_tokens_choose_are_no_shapes(dtype: torch.dtype, sizes: list[int]) -> None:
    model = MixtralForCausalLM(MixtralConfig(num_local_experts=4, num_key_value_heads=4, **WIDTH)).to(dtype)
    spec, plan = plan_for(model, adamw(model), sample=sample_of(), activations="host", device=DEVICE)
    assert all(unit.saved_bytes for unit in plan.units[1:])
    check_plan(spec, plan)
    with outcore.prepare(model, adamw(model), plan=plan, device=DEVICE) as (model, _):
        model(**sample_of()).loss.backward()
    assert sizes


def test_a_smaller_batch_fits_and_a_larger_one_is_recomputed(sizes: list[int]) -> None:
    model = make(MODELS["llama"])
    with outcore.prepare(model, adamw(model), sample=sample_of(), activations="host", device=DEVICE) as (model, _):
        model(**sample_of(1, 16)).loss.backward()
        assert len(sizes) == 3
        with pytest.warns(UserWarning, match="saves more than the plan has room for"):
            model(**sample_of(4, 32)).loss.backward()
        assert len(sizes) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"activations": "moon", "sample": sample_of()},
            "activations: expected 'host' or 'disk', or None .* but got 'moon'",
        ),
        ({"activations": "disk", "sample": sample_of()}, "activations: expected a folder for the disk tier"),
        ({"activations": "host"}, "activations: expected sample= beside it"),
        ({"activations": "host", "sample": {"x": torch.ones(2)}}, "sample: expected keyword arguments with which"),
    ],
)
def test_is_refused_before_anything_moves(options: dict[str, Any], message: str) -> None:
    model = make(MODELS["llama"])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConfigError, match=message):
        outcore.prepare(model, adamw(model), device=DEVICE, **options)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_what_an_error_names_is_enough(tmp_path: Path) -> None:
    model = make(MODELS["llama"])
    options = {"sample": sample_of(), "activations": "disk", "device": DEVICE}
    budget = outcore.Budget(device=2**16, host=2**16, disk=tmp_path, disk_bytes=2**20)
    with pytest.raises(PlanInfeasibleError, match="slots for activations(.|\n)*activations of the units") as caught:
        outcore.prepare(model, adamw(model), budget=budget, **options)
    need = caught.value.required_bytes
    enough = outcore.Budget(device=need["device"], host=need["host"], disk=tmp_path, disk_bytes=need["disk"])
    with outcore.prepare(model, adamw(model), budget=enough, **options) as (model, optimizer):
        train(model, optimizer, 1)


def test_a_disk_that_is_too_small_for_them_is_refused(tmp_path: Path) -> None:
    model = make(MODELS["llama"])
    budget = outcore.Budget(device=2**30, host=2**30, disk=tmp_path, disk_bytes=2**14)
    with pytest.raises(PlanInfeasibleError, match="activations of the units"):
        outcore.prepare(model, adamw(model), sample=sample_of(), activations="disk", device=DEVICE, budget=budget)


@pytest.mark.parametrize(("disk_bytes", "policy"), [(2**20, "keep"), (2**16, "recompute")])
def test_as_much_is_saved_as_there_is_room_for(disk_bytes: int, policy: str, tmp_path: Path) -> None:
    model = make(MODELS["llama"])
    budget = outcore.Budget(device=2**30, host=2**30, disk=tmp_path, disk_bytes=disk_bytes)
    options = {"sample": sample_of(), "activations": "disk", "device": DEVICE, "budget": budget}
    with outcore.prepare(model, adamw(model), **options) as (model, optimizer):
        assert {unit.policy for unit in optimizer.plan.units[1:]} == {policy}
        train(model, optimizer, 1)


def test_a_plan_goes_through_json(tmp_path: Path) -> None:
    model = make(MODELS["llama"])
    budget = outcore.Budget(disk=tmp_path)
    spec, plan = plan_for(model, adamw(model), sample=sample_of(), activations="disk", device=DEVICE, budget=budget)
    again = outcore.Plan.from_json(plan.to_json())
    assert again == plan
    check_plan(spec, again)


def test_a_plan_says_where_activations_rest() -> None:
    model = make(MODELS["llama"])
    options = {"sample": sample_of(), "activations": "host", "device": DEVICE}
    _, plan = plan_for(model, adamw(model), **options)
    with pytest.raises(ConfigError, match="activations: expected it without plan="):
        outcore.prepare(model, adamw(model), plan=plan, **options)


def test_a_tower_with_positional_arguments_has_no_sample() -> None:
    model = make(Tower)
    with pytest.raises(ConfigError, match="expected sample to be keyword arguments of Tower.forward"):
        outcore.prepare(model, adamw(model), sample={"tokens": batch()}, activations="host", device=DEVICE)
