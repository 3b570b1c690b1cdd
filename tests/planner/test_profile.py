"""The work of a model from shapes, as torch counts it in a real forward; and seconds from a machine's rates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from outcore.model.partition import partition
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import UnitWork, rates_for, unit_work
from outcore.spec.model import ModelSpec

from .models import Stack

SIZES = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300}
SIZES |= {"hidden_size": 64, "intermediate_size": 96, "bos_token_id": 0, "eos_token_id": 1}
BATCH, LENGTH = 2, 32
DENSE = {
    "llama": transformers.LlamaConfig(**SIZES),
    "tied": transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen3": transformers.Qwen3Config(**SIZES, head_dim=32),
}


def profiled(model: torch.nn.Module) -> dict[str, UnitWork]:
    spec = partition(model, state_names=("exp_avg", "exp_avg_sq"), precision="fp32").spec
    return unit_work(model, spec, batch_size=BATCH, seq_len=LENGTH)


@pytest.mark.parametrize("name", DENSE)
def test_products_are_those_that_torch_counts(name: str):
    model = transformers.AutoModelForCausalLM.from_config(DENSE[name])
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(BATCH, LENGTH, dtype=torch.long))
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for op, flops in counted.items() if "attention" not in str(op))
    found = profiled(model)
    assert sum(work.product_flops for work in found.values()) == products
    layer = found["model.layers.0"]
    heads = 4 * getattr(DENSE[name], "head_dim", 16)
    assert layer.attention_flops == 4 * heads * BATCH * LENGTH * LENGTH / 2
    assert found[""].attention_flops == 0


def test_of_experts_those_count_that_a_token_is_sent_to():
    config = transformers.MixtralConfig(**SIZES, num_local_experts=8, num_experts_per_tok=2)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    spec = partition(model, state_names=("exp_avg", "exp_avg_sq"), precision="fp32").spec
    layer = unit_work(model, spec, batch_size=BATCH, seq_len=LENGTH)["model.layers.0"]
    attention, router, experts = 64 * 64 * 2 + 64 * 32 * 2, 64 * 8, 2 * 3 * 64 * 96
    assert layer.product_flops == 2 * BATCH * LENGTH * (attention + router + experts)


def test_a_plain_module_has_products_alone():
    found = profiled(Stack(3))
    assert {w.attention_flops for w in found.values()} == {0.0}
    assert found["blocks.0"].product_flops == 2 * BATCH * LENGTH * (5 * 10 * 2)


def test_seconds_of_a_machine():
    model = Stack(2)
    spec = partition(model, state_names=("exp_avg", "exp_avg_sq"), precision="bf16").spec
    machine = known_hardware("rtx-4090")
    work = {unit.name: UnitWork(product_flops=1e12, attention_flops=1e11) for unit in spec.units}
    rates = rates_for(machine, spec, work)
    expected = 1e12 / machine.device.bf16_flops + 1e11 / machine.device.attention_flops
    assert rates.forward_s["blocks.0"] == pytest.approx(expected)
    assert rates.backward_s["blocks.0"] > 2 * expected
    assert rates.bytes_per_s["h2d"] == machine.bus.h2d_bytes_per_s
    memory = next(shared for shared in rates.shared if shared.name == "host memory")
    assert memory.parts["update"] == pytest.approx(0.52, rel=0.01)
    assert all(0 < part <= 1 for shared in rates.shared for part in shared.parts.values())
    assert "disk_read" not in rates_for(known_hardware("rtx-4090+no-disk"), spec, work).bytes_per_s


def test_measured_parts_count_before_bytes():
    hardware = known_hardware("rtx-4090")
    spec = ModelSpec(units=(), state_names=(), precision="bf16")
    parts, beside = (
        {"update": 0.8, "h2d": 0.3},
        {"compute_left": {"update": 0.25}, "left_beside_compute": {"update": 0.5}},
    )
    measured = dataclasses.replace(hardware, host=dataclasses.replace(hardware.host, parts=parts, **beside))
    assert rates_for(measured, spec, {}).shared[0].parts == parts
    assert rates_for(measured, spec, {}).beside_compute == {"update": (0.25, 0.5)}
    assert not rates_for(hardware, spec, {}).beside_compute
