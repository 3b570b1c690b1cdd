"""Models of transformers and peft in the user's loop."""

from __future__ import annotations

import functools

import pytest
import torch
from transformers import (
    DynamicCache,
    Ernie4_5_MoeConfig,
    Ernie4_5_MoeForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import outcore

from .rig import DEVICE, IS_SIMULATED, KINDS, adamw, agrees, assert_same, make, plan_for, prepared, same, seen

KIND = pytest.mark.parametrize("kind", KINDS)
ENDS = pytest.mark.parametrize("kind", ["device", "disk"])
POLICY = pytest.mark.parametrize("policy", ["keep", "recompute"])
SIZES = {"vocab_size": 61, "bos_token_id": 1, "eos_token_id": 2}


def llama(**options):
    more = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0, "attention_dropout": 0.1, **options}
    return LlamaForCausalLM(LlamaConfig(hidden_size=20, intermediate_size=36, num_hidden_layers=3, **SIZES, **more))


def gpt2():
    """Return a GPT-2 with its default cache: attention's arguments lie otherwise in memory, and round otherwise."""
    return GPT2LMHeadModel(GPT2Config(n_positions=40, n_embd=20, n_layer=3, n_head=2, pad_token_id=0, **SIZES))


def mixtral():
    more = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_local_experts": 3,
        "output_router_logits": True,
        "pad_token_id": 0,
    }
    return MixtralForCausalLM(MixtralConfig(hidden_size=20, intermediate_size=24, num_hidden_layers=3, **SIZES, **more))


def ernie():
    """Return a mixture of experts whose routers Transformers keeps in fp32."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "pad_token_id": 0}
    experts = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16, "moe_layer_start_index": 1}
    sizes = {"hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 3, "moe_layer_end_index": 2}
    return Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**heads, **experts, **sizes, **SIZES))


def ids(seed=0):
    return torch.randint(3, 61, (2, 9), generator=torch.Generator(DEVICE).manual_seed(seed))


def step(model, optimizer, seed=0, **options):
    loss = model(input_ids=ids(seed), labels=ids(seed), **options).loss
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach(), norm


@KIND
@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_generate_between_steps(kind, build, tmp_path):
    ways = [{}, {"do_sample": True, "top_k": 20}, {"num_beams": 3}, {"use_cache": False}]

    def drive(model, optimizer):
        seen = []
        for i, way in enumerate(ways):
            seen.append(step(model, optimizer, i))
            model.eval()
            seen.append(
                model.generate(
                    ids(i),
                    attention_mask=torch.ones_like(ids(i)),
                    max_new_tokens=5,
                    use_cache=way.pop("use_cache", True),
                    **way,
                )
            )
            ways[i] = {**way, "use_cache": False} if i == 3 else way
            model.train()
        return seen

    same(drive, kind, tmp_path, build=build)


@pytest.mark.skipif(IS_SIMULATED, reason="what dynamo asks a GPU is not simulated")
@ENDS
def test_generate_with_compiled_blocks(kind, tmp_path):
    """Training keeps caches from compiled blocks; generation does not."""
    options = {"attention_mask": torch.ones_like(ids()), "max_new_tokens": 5, "do_sample": False}
    want = make(llama).eval().generate(ids(), **options)
    model = make(llama)
    with prepared(model, adamw(model), kind, tmp_path, compile={"backend": "aot_eager"}) as (model, _):
        assert torch.equal(model.eval().generate(ids(), **options), want)


@ENDS
@POLICY
@pytest.mark.parametrize("build", [llama, gpt2], ids=["llama", "gpt2"])
def test_caches_in_training(build, kind, policy, tmp_path):
    def drive(model, optimizer):
        model.config.use_cache = True  # the model makes a cache by itself
        seen = [step(model, optimizer), step(model, optimizer, use_cache=True)]
        if hasattr(optimizer, "engine"):
            with torch.no_grad():
                cache = model(ids(), use_cache=True, past_key_values=DynamicCache(config=model.config)).past_key_values
            with pytest.raises(outcore.UnsupportedError, match="expected no key-value cache in training"):
                model(input_ids=ids(1), past_key_values=cache, labels=ids(1))
        return seen

    same(drive, kind, tmp_path, build=build, policy=policy)


@pytest.mark.pairs
@ENDS
@POLICY
@pytest.mark.parametrize("asked", ["output_router_logits", "output_hidden_states", "output_attentions"])
def test_what_is_recorded_inside_blocks(kind, policy, asked, tmp_path):
    def drive(model, optimizer):
        seen = []
        for i in range(2):
            out = model(input_ids=ids(i), labels=ids(i), **{asked: True})
            loss = out.loss
            if asked == "output_hidden_states":
                loss = loss + sum(h.square().mean() for h in out.hidden_states)
            if asked == "output_attentions":
                loss = loss + 0.1 * sum(a.square().mean() for a in out.attentions)
                seen.append(list(out.attentions))
            loss.backward()
            seen.append(list(out.router_logits))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss)
        return [*seen, step(model, optimizer)]

    def build():
        model = mixtral()
        model.set_attn_implementation("eager")
        return model

    same(
        drive,
        kind,
        tmp_path,
        build=build,
        policy=policy,
        rounding=1e-6 if asked == "output_hidden_states" else 0.0,  # their gradients are added in another order
        optimizer=adamw if asked == "output_router_logits" else lambda m: torch.optim.SGD(m.parameters(), 0.05),
    )


@KIND
def test_what_libraries_ask(kind, tmp_path):
    plain, model = make(llama), make(llama)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        step(model, optimizer)
        assert model.num_parameters() == plain.num_parameters()
        assert model.num_parameters(only_trainable=True) == plain.num_parameters()
        assert model.get_memory_footprint() == plain.get_memory_footprint()
        assert (model.device, model.dtype) == (plain.device, plain.dtype)
        assert model.get_output_embeddings().weight.shape == (61, 20)


@KIND
def test_resized_embeddings_are_refused(kind, tmp_path):
    model = make(llama)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        before = model.get_input_embeddings()
        for wanted in ((70,), (None, 8)):
            with pytest.raises(outcore.UnsupportedError, match=r"expected the 61 rows .*, but (70|64) .* before"):
                model.resize_token_embeddings(*wanted)
        assert model.resize_token_embeddings(61) is model.resize_token_embeddings() is before
        step(model, optimizer)
    assert model.resize_token_embeddings(70).weight.shape == (70, 20)  # closed


@pytest.mark.filterwarnings("ignore")
@KIND
def test_adapters_added_later_are_refused(kind, tmp_path):
    from peft import LoraConfig, get_peft_model

    model = make(llama)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError, match=r"adapters"):
            adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
            adapted(input_ids=ids(), labels=ids()).loss.backward()
            optimizer.step()


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable. is deprecated")
@agrees(*KINDS, build=functools.partial(llama, use_cache=False))
def test_gradient_checkpointing_enabled_later(model, optimizer):
    model.gradient_checkpointing_enable()
    return [step(model, optimizer), step(model, optimizer)]


@KIND
def test_routers_stay_in_fp32_as_if_the_model_were_loaded_in_bf16(kind, tmp_path):
    """An fp32 model, prepared in ``pure_bf16``, trains as what ``from_pretrained`` loads in bf16."""
    make(ernie).cpu().save_pretrained(tmp_path / "saved")
    plain = Ernie4_5_MoeForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.bfloat16).to(DEVICE).train()
    assert {p.dtype for p in plain.parameters()} == {torch.bfloat16, torch.float32}
    optimizer = adamw(plain, fused=True)
    want = seen([step(plain, optimizer, i) for i in range(2)], plain, optimizer)
    model = make(ernie)
    optimizer, options = adamw(model), {"precision": "pure_bf16"}
    options |= {"plan": plan_for(model, optimizer, kind, **options), "budget": outcore.Budget(disk=tmp_path)}
    with outcore.prepare(model, optimizer, device=DEVICE, **options) as (model, optimizer):
        assert_same(want, seen([step(model, optimizer, i) for i in range(2)], model, optimizer))
