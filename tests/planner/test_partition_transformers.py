"""Partition of the architectures that Transformers has, tiny and on the meta device."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from outcore.model.partition import partition
from outcore.model.unit_modules import LARGE_EMBEDDING_NUMEL

WIDTH = 32
VOCAB = LARGE_EMBEDDING_NUMEL // WIDTH  # just large enough for a unit of its own
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
}


def build(name: str, **options) -> torch.nn.Module:
    with torch.device("meta"):
        if name == "gpt2":
            return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_layer=3, n_head=4))
        if name == "t5":
            sizes = {"d_model": WIDTH, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4}
            return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=VOCAB, **sizes))
        if name == "bert":
            return hf.BertForMaskedLM(hf.BertConfig(**{**SIZES, "pad_token_id": 0}))
        if name == "mixtral":
            return hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=3, **SIZES))
        config = {"llama": hf.LlamaConfig, "qwen3": hf.Qwen3Config}[name](**SIZES, **options)
        return hf.AutoModelForCausalLM.from_config(config)


def layers(prefix: str, count: int = 3) -> list[str]:
    return [f"{prefix}.{i}" for i in range(count)]


@pytest.mark.parametrize(
    ("name", "options", "units", "root"),
    [
        (
            "gpt2",
            {},
            layers("transformer.h"),
            ["transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight", "transformer.ln_f.bias"],
        ),
        ("llama", {}, ["model.embed_tokens", *layers("model.layers")], ["model.norm.weight", "lm_head.weight"]),
        (
            "llama",
            {"tie_word_embeddings": True},
            layers("model.layers"),
            ["model.embed_tokens.weight", "model.norm.weight"],
        ),
        (
            "qwen3",
            {"tie_word_embeddings": True},
            layers("model.layers"),
            ["model.embed_tokens.weight", "model.norm.weight"],
        ),
        ("mixtral", {}, ["model.embed_tokens", *layers("model.layers")], ["model.norm.weight", "lm_head.weight"]),
        (
            "t5",
            {},
            [*layers("encoder.block", 2), *layers("decoder.block", 3)],
            ["shared.weight", "encoder.final_layer_norm.weight", "decoder.final_layer_norm.weight"],
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_units_and_root(name, options, units, root):
    model = build(name, **options)
    found = partition(model).spec
    assert [u.name for u in found.units] == ["", *units]
    assert [p.name for p in found.units[0].params] == root
    assert sum(len(u.params) for u in found.units) == len(list(model.parameters()))


def test_bert_keeps_its_tied_decoder_in_the_root():
    found = partition(build("bert")).spec
    assert [u.name for u in found.units] == ["", *layers("bert.encoder.layer")]
    root = {p.name for p in found.units[0].params}
    assert {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"} <= root


def test_a_frozen_tower_beside_a_language_model():
    model = torch.nn.Module()
    model.vision, model.language = build("bert"), build("llama")
    found = partition(model).spec
    assert [u.name for u in found.units] == [
        "",
        *layers("vision.bert.encoder.layer"),
        "language.model.embed_tokens",
        *layers("language.model.layers"),
    ]


@pytest.mark.parametrize(
    ("precision", "dtype", "kept"),
    [("fp16", "float16", ("wo.weight",)), ("bf16", "bfloat16", ()), ("fp32", "float32", ())],
)
def test_what_transformers_keeps_in_fp32_in_this_dtype_stays_so(precision, dtype, kept):
    model = torch.nn.ModuleDict({"inner": build("t5")})  # inside a module that no library knows
    found = {p.name: p.dtype for unit in partition(model, precision=precision).spec.units for p in unit.params}
    assert found == {name: "float32" if name.endswith(kept or "none") else dtype for name in found}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses the old name
def test_what_adapters_wrap_stays_in_fp32_too():
    peft = pytest.importorskip("peft")
    model = build("llama")
    model._keep_in_fp32_modules_strict = {"q_proj.weight", "up_*.weight"}
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    found = {p.name: p.dtype for unit in partition(adapted, precision="bf16").spec.units for p in unit.params}
    kept = [name for name, dtype in found.items() if dtype == "float32"]
    assert {name.split(".layers.")[1].split(".", 2)[2] for name in kept} == {
        "q_proj.base_layer.weight",
        "up_proj.weight",
    }
    assert len(kept) == 6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft uses the old name
class TestLora:
    @staticmethod
    def wrapped(**options):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=3, target_modules=["q_proj", "down_proj"], **options)
        return peft.get_peft_model(build("llama"), config)

    def test_units_are_found_through_the_wrapper(self):
        found = partition(self.wrapped(), state_names=("exp_avg", "exp_avg_sq")).spec
        prefix = "base_model.model"
        expected = ["", f"{prefix}.model.embed_tokens", *layers(f"{prefix}.model.layers")]
        assert [u.name for u in found.units] == expected
        layer = found.units[2]
        assert [p.name.split(".")[-3] for p in layer.trainable] == ["lora_A", "lora_B", "lora_A", "lora_B"]
        assert [p.name for p in found.units[0].params] == [f"{prefix}.model.norm.weight", f"{prefix}.lm_head.weight"]

    def test_frozen_parameters_own_no_update_bytes(self):
        found = partition(self.wrapped()).spec
        layer = found.units[2]
        trained = sum(p.numel for p in layer.trainable)
        assert trained == 3 * (WIDTH + WIDTH) + 3 * (64 + WIDTH)
        assert layer.update_bytes == 4096  # 4 parameters of at most 768 bytes
        assert [u.update_bytes for u in (found.units[0], found.units[1])] == [0, 0]

    def test_an_adapted_output_embedding_stays_in_the_root(self):
        found = partition(self.wrapped(modules_to_save=["lm_head"])).spec
        root = [p.name for p in found.units[0].params]
        assert root == [
            "base_model.model.lm_head.modules_to_save.default.weight",
            "base_model.model.model.norm.weight",
            "base_model.model.lm_head.original_module.weight",
        ]
