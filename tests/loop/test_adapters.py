"""Adapters of peft: trained bit for bit as in the plain loop, saved and resumed, or refused by name before prepare."""

from __future__ import annotations

import copy
import functools
from pathlib import Path

import pytest
import torch
from checkpoint import small
from peft import (
    AdaLoraConfig,
    AdaptionPromptConfig,
    IA3Config,
    LoHaConfig,
    LoraConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptTuningConfig,
    VeraConfig,
    get_peft_model,
)
from torch import nn

import outcore
from outcore.checkpoint.training_state import load_states, load_weights

from .rig import DEVICE, VOCAB, agrees, assert_same, batch, make, prepared, same
from .test_transformers import llama, mixtral, step

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns about targets and generation

LM = {"task_type": "CAUSAL_LM"}
SOME = ["q_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROMPT = {**LM, "num_virtual_tokens": 4}
ADALORA = {"init_r": 6, "target_r": 3, "total_step": 6, "tinit": 1, "tfinal": 2, "deltaT": 1}
KINDS = {
    "dora": (llama, LoraConfig(**LM, r=4, use_dora=True, lora_dropout=0.1, target_modules="all-linear")),
    "mixtral": (mixtral, LoraConfig(**LM, r=4, target_modules="all-linear")),
    "experts": (mixtral, LoraConfig(**LM, r=4, target_modules=["q_proj"], target_parameters=EXPERTS)),
    "embeddings": (llama, LoraConfig(**LM, r=4, target_modules=SOME, modules_to_save=["lm_head", "embed_tokens"])),
    "ia3": (llama, IA3Config(**LM)),
    "vera": (llama, VeraConfig(**LM, r=4, target_modules=["q_proj"])),
    "loha": (llama, LoHaConfig(**LM, r=4, target_modules=SOME)),
    "adalora": (llama, AdaLoraConfig(**LM, **ADALORA, target_modules=SOME)),
    "prompt": (llama, PromptTuningConfig(**PROMPT)),
    "prompt encoder": (llama, PromptEncoderConfig(**PROMPT, encoder_hidden_size=12)),
    "adaption prompt": (llama, AdaptionPromptConfig(**LM, adapter_len=4, adapter_layers=2)),
}


def adapted(kind, name="default"):
    build, config = KINDS[kind]
    model = build()
    torch.manual_seed(12)
    with torch.device("cpu" if kind == "vera" else DEVICE):  # vera draws from a CPU generator of its own
        return get_peft_model(model, copy.deepcopy(config), adapter_name=name).to(DEVICE)


def trained_alone(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def drive(model, optimizer):
    seen = []
    for i in range(2):
        seen.append(step(model, optimizer, i))
    return seen


EACH_ON_TWO = [(kind, where) for i, kind in enumerate(KINDS) for where in ("host", ("device", "disk")[i % 2])]


@pytest.mark.parametrize(("kind", "where"), EACH_ON_TWO)
def test_trained_as_in_the_plain_loop(kind, where, tmp_path):
    policy = "keep" if where == "host" else "recompute"
    build = functools.partial(adapted, kind)
    same(drive, where, tmp_path, build=build, optimizer=trained_alone, policy=policy)


@agrees("host", build=functools.partial(adapted, "adalora"), optimizer=trained_alone)
def test_ranks_of_adalora_are_allocated(model, optimizer):
    """AdaLoRA reads weights and gradients between step() and zero_grad()."""
    losses = []
    for i in range(4):
        loss = model(input_ids=batch(i), labels=batch(i)).loss
        loss.backward()
        optimizer.step()
        model.base_model.update_and_allocate(i + 1)
        optimizer.zero_grad()
        losses.append(loss)
    return losses


@pytest.mark.parametrize(("kind", "name"), [("dora", "foo"), ("experts", "foo"), ("adalora", "default")])
def test_saved_and_resumed(kind, name, tmp_path):
    def build():
        return adapted(kind, name)

    model = make(build)
    with prepared(model, trained_alone(model), "host", tmp_path) as (model, optimizer):
        drive(model, optimizer)
        outcore.save_pretrained(model, tmp_path / "saved")
        small.save_states(optimizer, tmp_path / "saved")
        torch.manual_seed(5)
        want = drive(model, optimizer)
    model = make(build)
    with prepared(model, trained_alone(model), "disk", tmp_path) as (model, optimizer):
        load_weights(model, tmp_path / "saved")
        load_states(optimizer, tmp_path / "saved")
        saved = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(5)
        torch.testing.assert_close(drive(model, optimizer), want, rtol=0, atol=0)
    folder = tmp_path / "saved" / ("" if name == "default" else name)
    loaded = PeftModel.from_pretrained(make(KINDS[kind][0]), folder, adapter_name=name).state_dict()
    trained = [key for key in saved if "lora_" in key]
    assert trained
    assert_same({k: saved[k] for k in trained}, {k: loaded[k] for k in trained})


@pytest.mark.parametrize("kind", ["dora", "experts"])
def test_merged(kind, tmp_path):
    model, plain = (make(functools.partial(adapted, kind)) for _ in range(2))
    with prepared(model, trained_alone(model), "host", tmp_path) as (model, optimizer):
        drive(model, optimizer)
        plain.load_state_dict(model.state_dict())
        with outcore.gathered(model, write=True):
            model.merge_adapter()
        plain.merge_adapter()
        assert_same(dict(plain.state_dict()), dict(model.state_dict()))


def test_named_adapter_that_is_not_there(tmp_path):
    model = make(functools.partial(adapted, "dora", "foo"))
    with prepared(model, trained_alone(model), "host", tmp_path) as (model, _):
        with pytest.raises(outcore.ConfigError, match="in '.*nowhere/foo', but there is none for adapter 'foo'"):
            load_weights(model, tmp_path / "nowhere")


def test_prompts_whose_encoder_is_not_saved(tmp_path):
    model = make(functools.partial(adapted, "prompt encoder"))
    with prepared(model, trained_alone(model), "host", tmp_path) as (model, _):
        outcore.save_pretrained(model, tmp_path / "saved")
        with pytest.raises(outcore.UnsupportedError, match="of adapter 'default' .P_TUNING. it saves the prompts and"):
            load_weights(model, tmp_path / "saved")


def test_ranks_of_adalora_that_are_settled(tmp_path):
    """Once ranks are settled, peft saves tensors of other shapes than the model had at prepare."""
    model = make(functools.partial(adapted, "adalora"))
    with prepared(model, trained_alone(model), "host", tmp_path) as (model, _):
        model.peft_config["default"].rank_pattern = {}
        outcore.save_pretrained(model, tmp_path / "saved")
        config = tmp_path / "saved" / "adapter_config.json"
        config.write_text(config.read_text().replace('"rank_pattern": {}', '"rank_pattern": {"q_proj": [true]}'))
        with pytest.raises(outcore.UnsupportedError, match="of adapter 'default' .ADALORA. the ranks are settled"):
            load_weights(model, tmp_path / "saved")


def test_prefixes_are_refused():
    model = get_peft_model(make(llama), PrefixTuningConfig(**PROMPT))
    with pytest.raises(outcore.UnsupportedError, match="adapter 'default' is PREFIX_TUNING.*use LoraConfig"):
        outcore.prepare(model, trained_alone(model))
    step(model, trained_alone(model))  # as if no attempt had been made


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)

    def forward(self, x):
        return x + self.attention(x, x, x)[0]


def test_attention_that_is_merged_in_forward_is_refused():
    model = nn.Sequential(nn.Embedding(VOCAB, 8), Attention(), Attention())
    model = get_peft_model(model, LoraConfig(target_modules=["attention"]))
    with pytest.raises(
        outcore.UnsupportedError, match=r"but '.*attention.base_layer.in_proj_weight' is made anew.*lea"
    ):
        outcore.prepare(model, trained_alone(model))
    model(batch()).sum().backward()


def test_frozen_first_blocks_and_the_default_cache(tmp_path):
    """The model makes a cache by itself; an entry of a frozen block would reach the next one."""

    def build():
        model = llama(use_cache=True)
        for block in model.model.layers[:2]:
            block.requires_grad_(requires_grad=False)
        model.model.embed_tokens.requires_grad_(requires_grad=False)
        return model

    for where in ("device", "host"):
        same(drive, where, tmp_path, build=build, optimizer=trained_alone)


def test_frozen_models_keep_their_caches(tmp_path):
    """Without an optimizer nothing is recomputed: decoding works with gradients on, too."""
    plain, model = make(llama).eval().requires_grad_(requires_grad=False), make(llama).eval()
    ids = batch()[:, :5]

    def decode(model):
        cache = model(ids, use_cache=True).past_key_values
        return model(ids[:, :1], past_key_values=cache).logits

    with prepared(model, None, "host", Path(tmp_path)) as (model, _):
        assert torch.equal(decode(model), decode(plain))
