"""A plan made ahead is the plan that prepare follows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from plans import plan_for
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.core.errors import ConfigError
from outcore.device.cpu import CpuDevice

CONFIG = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)


def build(device: str) -> tuple[LlamaForCausalLM, torch.optim.AdamW]:
    with torch.device(device):
        model = LlamaForCausalLM(CONFIG)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


@pytest.mark.parametrize("place", ["cpu", "meta"])
@pytest.mark.parametrize("precision", ["fp32", "pure_bf16", None])
def test_is_the_plan_that_prepare_follows(place: str, precision: str | None, tmp_path: Path):
    budget = outcore.Budget(device="200KiB", host="700KiB", disk=tmp_path)
    model, optimizer = build(place)
    before = {name: (id(p), p.device, p.requires_grad) for name, p in model.named_parameters()}
    spec, plan = plan_for(model, optimizer, budget=budget, precision=precision)
    assert {name: (id(p), p.device, p.requires_grad) for name, p in model.named_parameters()} == before
    assert list(tmp_path.iterdir()) == []
    with outcore.prepare(*build("cpu"), budget=budget, precision=precision) as (_, streamed):
        assert (streamed.model_spec, streamed.plan) == (spec, plan)


def test_without_an_optimizer_nothing_stays_frozen(tmp_path: Path):
    model, _ = build("meta")
    spec, _ = plan_for(model, None, budget=outcore.Budget(disk=tmp_path))
    assert not any(unit.trainable for unit in spec.units)
    assert all(p.requires_grad for p in model.parameters())


def test_refuses_what_prepare_refuses(tmp_path: Path):
    model, optimizer = build("meta")
    with pytest.raises(outcore.PlanInfeasibleError) as caught:
        plan_for(model, optimizer, budget=outcore.Budget(device=1000, host=1000))
    assert caught.value.required_bytes
    with pytest.raises(ConfigError, match="positive integer"):
        plan_for(model, optimizer, accumulation_steps=0)


def test_what_an_error_names_is_enough_on_an_accelerator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CpuDevice, "activation_share", 0.3)  # an accelerator's value
    with pytest.raises(outcore.PlanInfeasibleError) as caught:
        plan_for(*build("meta"), budget=outcore.Budget(device=1000, host=1000, disk=tmp_path))
    need = caught.value.required_bytes
    budget = outcore.Budget(device=need["device"], host=need["host"], disk=tmp_path, disk_bytes=need["disk"])
    with outcore.prepare(*build("cpu"), budget=budget) as (model, streamed):
        assert streamed.plan.tier_bytes["device"] <= need["device"] - int(0.3 * need["device"])
        model(input_ids=torch.zeros(1, 3, dtype=torch.int64)).logits.sum().backward()
        streamed.step()


def test_what_an_error_names_is_the_least_of_all_ways_to_treat_activations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(CpuDevice, "activation_share", 0.3)  # an accelerator's values
    monkeypatch.setattr(CpuDevice, "has_host_memory", False)
    ids = torch.zeros(4, 256, dtype=torch.int64)
    sample = {"input_ids": ids, "labels": ids}

    def refused(**budget: int) -> outcore.PlanInfeasibleError:
        with pytest.raises(outcore.PlanInfeasibleError) as caught:
            plan_for(*build("meta"), sample=sample, budget=outcore.Budget(disk=tmp_path, **budget))
        return caught.value

    error = refused(device=1000, host=1000)
    need = error.required_bytes
    assert "activations of the units" in str(error)  # they leave the device
    assert refused(device=need["device"], host=1000).raise_one_to["host"] == need["host"]
    refused(device=need["device"] - 1, host=2**30)
    budget = outcore.Budget(device=need["device"], host=need["host"], disk=tmp_path, disk_bytes=need["disk"])
    with outcore.prepare(*build("cpu"), sample=sample, budget=budget) as (model, streamed):
        assert {unit.activations for unit in streamed.plan.units[1:]} == {"disk"}
        model(**sample).loss.backward()
        streamed.step()
