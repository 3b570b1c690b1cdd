"""Quantised frozen bases of bitsandbytes under adapters: the plain QLoRA loop, bit for bit, wherever the bytes are."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from peft import PeftModel
from plans import plan_for
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import outcore
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from outcore.model import quantized as quantized_module
from outcore.model.partition import partition

from .qlora import (
    COMPILED,
    ELSEWHERE,
    LORA,
    PIECES,
    TRACED,
    WHERE,
    adapted,
    base_of,
    drive,
    goes_on,
    is_the_plain_loop,
    same_in_pieces,
    saved,
    sizable,
    trained,
)
from .rig import DEVICE, assert_same, prepared
from .test_transformers import ids

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # peft and bitsandbytes warn
    pytest.mark.skipif(DEVICE != "cpu", reason="the simulated GPU has no kernels of bitsandbytes"),
]

KINDS = {
    "nf4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.bfloat16),
    "nf4 nested": BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_quant_storage=torch.bfloat16,
    ),
    "fp4 nested": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True),
    "int8": BitsAndBytesConfig(load_in_8bit=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("base"))


def loaded(folder, kind, dtype=torch.bfloat16):
    return adapted(unadapted(folder, kind, dtype))


def plain(folder, kind, dtype=torch.bfloat16):
    model = loaded(folder, kind, dtype)
    torch.manual_seed(5)
    return drive(model, trained(model, fused=True)), dict(model.state_dict())


ROUND = [(kind, where) for i, kind in enumerate(KINDS) for where in (WHERE * 2)[i : i + 2]]


@pytest.mark.parametrize(("kind", "where"), ROUND)
def test_trained_as_in_the_plain_loop(kind, where, folder, tmp_path):
    want, state = plain(folder, kind)
    model = loaded(folder, kind)
    with prepared(model, trained(model), where, tmp_path, depth=int("disk" in where or "keep" in where)) as (
        model,
        optimizer,
    ):
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, dict(model.state_dict()))
    assert_same(state, dict(model.state_dict()), "closed")
    with prepared(model.requires_grad_(requires_grad=False), None, where, tmp_path) as (model, _):
        assert_same(state, dict(model.state_dict()), "prepared again")


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("kind", "where"), [("nf4 nested", "disk keep"), ("fp4", "host"), ("int8", "host keep")])
def test_computed_in_other_dtypes(kind, where, dtype, folder, tmp_path):
    want, state = plain(folder, kind, dtype)
    model = loaded(folder, kind, dtype)
    with prepared(model, trained(model), where, tmp_path) as (model, optimizer):
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
@pytest.mark.parametrize("how", PIECES)
def test_a_batch_in_pieces(how, kind, folder, tmp_path):
    same_in_pieces(loaded(folder, kind), loaded(folder, kind), tmp_path, **how)


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
@pytest.mark.parametrize(("where", "policy", "activations"), ELSEWHERE)
def test_activations_elsewhere(where, policy, activations, kind, folder, tmp_path):
    is_the_plain_loop(lambda: loaded(folder, kind), where, policy, activations, tmp_path)


@pytest.mark.parametrize(("kind", "how"), [("nf4 nested", COMPILED[0]), ("int8", COMPILED[1])])
def test_compiled(kind, how, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(LORA, "target_modules", {"v_proj", "down_proj"})  # fewer graphs to trace
    is_the_plain_loop(lambda: loaded(folder, kind), *how, tmp_path, TRACED)


@pytest.mark.parametrize("is_packed", [False, True])
@pytest.mark.parametrize(("kind", "where"), [("nf4 nested", "disk"), ("fp4", "host"), ("int8", "host")])
def test_quantised_as_it_is_read(kind, where, is_packed, folder, tmp_path, monkeypatch):
    """The model is on the meta device: its weights come piece by piece, and equal those of ``from_pretrained``.

    The checkpoint may have quantised weights already.
    """
    monkeypatch.setattr(quantized_module, "_PIECE", 4096)
    folder = packed(folder, kind, tmp_path) if is_packed else folder
    want, state = plain(folder, kind)
    model = adapted(on_meta(folder, kind))
    with prepared(model, trained(model), where, tmp_path, weights=folder) as (model, optimizer):
        before = loaded(folder, kind)
        assert_same({k: v for k, v in before.state_dict().items() if "lora_" not in k}, base_of(model))
        model.load_state_dict({k: v for k, v in before.state_dict().items() if "lora_" in k}, strict=False)
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, dict(model.state_dict()))


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_biases_of_layers_that_are_quantised_as_they_are_read(kind, tmp_path):
    """In its first forward bitsandbytes replaces a bias by one of the dtype that the layer computes in."""
    folder = saved(tmp_path / "biased", attention_bias=True)
    want, state = plain(folder, kind)
    model = adapted(on_meta(folder, kind))
    with prepared(model, trained(model), "host", tmp_path, weights=folder) as (model, optimizer):
        adapters = {k: v for k, v in loaded(folder, kind).state_dict().items() if "lora_" in k}
        model.load_state_dict(adapters, strict=False)
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, dict(model.state_dict()))
    if kind == "nf4":
        model = loaded(folder, kind)
        with pytest.raises(outcore.UnsupportedError, match="q_proj.*' it is torch.bfloat16 and .* by torch.float32"):
            outcore.prepare(model, trained(model))


def packed(folder, kind, tmp_path):
    """Save the same checkpoint, quantised."""
    unadapted(folder, kind).save_pretrained(tmp_path / "packed")
    return tmp_path / "packed"


def on_meta(folder, kind):
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return outcore.quantized(model, getattr(config, "quantization_config", copy.deepcopy(KINDS[kind])))


def test_a_checkpoint_that_is_quantised_otherwise(folder, tmp_path):
    """Its kind is not the model's; the refusal changes nothing."""
    checkpoint = packed(folder, "nf4 nested", tmp_path)
    said = r"_proj.weight' is {} in the model and quantized \(nf4 of .* scales in blocks of 256, stored as torch.bfl"
    for kind, found in (
        ("fp4", "fp4 of shape .* in blocks of 64, stored as torch.uint8"),
        ("int8", "8 bits by row of shape .*"),
    ):
        model = adapted(on_meta(folder, kind))
        with pytest.raises(outcore.ConfigError, match=said.format(found)):
            outcore.prepare(model, trained(model), weights=checkpoint)
    model = sizable().to(torch.bfloat16)
    with pytest.raises(outcore.ConfigError, match=said.format("torch.bfloat16") + ".* outcore.quantized"):
        outcore.prepare(model, trained(model), weights=checkpoint)
    tensors = load_file(checkpoint / "model.safetensors")
    [name, *_] = [name for name in tensors if "quant_state" in name]
    save_file({**tensors, name: tensors[name][:-3]}, checkpoint / "model.safetensors", metadata={"format": "pt"})
    model = adapted(on_meta(checkpoint, "nf4 nested"))
    with pytest.raises(outcore.ConfigError, match=f"expected in '{name}' what bitsandbytes writes"):
        outcore.prepare(model, trained(model), weights=checkpoint)
    weight = name.partition(".quant_state")[0]
    for damage, said in (
        ({f"{weight}.absmax": None}, "no absmax"),
        ({f"{weight}.nested_quant_map": None}, "no nested_quant_map"),
        ({f"{weight}.absmax": tensors[f"{weight}.absmax"][:-1].clone()}, "values in place of"),
        ({weight: tensors[weight][:-1].clone()}, "values in place of"),
    ):
        changed = {name: tensor for name, tensor in {**tensors, **damage}.items() if tensor is not None}
        save_file(changed, checkpoint / "model.safetensors", metadata={"format": "pt"})
        model = adapted(on_meta(checkpoint, "nf4 nested"))
        with pytest.raises(outcore.ConfigError, match=said):
            outcore.prepare(model, trained(model), weights=checkpoint)


def test_a_damaged_checkpoint_in_8_bits(folder, tmp_path):
    checkpoint = packed(folder, "int8", tmp_path)
    tensors = load_file(checkpoint / "model.safetensors")
    [scales, *_] = [name for name in tensors if name.endswith("q_proj.SCB")]
    weight = scales.removesuffix("SCB") + "weight"
    for damage in ({scales: tensors[scales][:-1].clone()}, {weight: tensors[weight].to(torch.int16)}):
        save_file({**tensors, **damage}, checkpoint / "model.safetensors", metadata={"format": "pt"})
        model = adapted(on_meta(checkpoint, "int8"))
        with pytest.raises(outcore.ConfigError, match=f"expected '{weight}' in int8, with a scale for each of its 64"):
            outcore.prepare(model, trained(model), weights=checkpoint)


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_saved_and_resumed(kind, folder, tmp_path):
    goes_on(lambda: loaded(folder, kind), lambda: unadapted(folder, kind), tmp_path)


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_exported_with_the_base_in_full_precision(kind, folder, tmp_path):
    model = loaded(folder, kind)
    with prepared(model, trained(model), "host", tmp_path) as (model, optimizer):
        save_checkpoint(model, optimizer, tmp_path / "saved", step=2, wait=True)
        outcore.save_pretrained(model, tmp_path / "adapters")
    with pytest.warns(UserWarning, match="were quantised before outcore had them"):
        export_checkpoint(tmp_path / "saved", tmp_path / "merged", "hf", merge=True)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    want = PeftModel.from_pretrained(base, tmp_path / "adapters").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert_same(dict(want.state_dict()), dict(merged.state_dict()))


@pytest.mark.parametrize("kind", ["nf4", "nf4 nested", "int8"])
def test_exported_with_a_base_that_is_quantised_in_its_files(kind, folder, tmp_path):
    """Each weight is dequantised as it is merged: the result is peft's over the dequantised base."""
    base = packed(folder, kind, tmp_path)
    adapted(AutoModelForCausalLM.from_pretrained(base)).save_pretrained(tmp_path / "adapters")
    said = export_checkpoint(tmp_path / "adapters", tmp_path / "merged", "hf", merge=True)
    assert said.endswith("in bf16, whose quantised weights were dequantised")
    full = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).dequantize()
    want = PeftModel.from_pretrained(full, tmp_path / "adapters").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    assert getattr(merged.config, "quantization_config", None) is None
    assert_same(dict(want.state_dict()), dict(merged.state_dict()))


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_another_base_is_not_merged_into(kind, folder, tmp_path):
    """One layer of the base was changed since."""
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    model = on_meta(folder, kind)
    model.config.name_or_path = model.name_or_path = str(tmp_path / "base")
    model = adapted(model)
    with prepared(model, trained(model), "host", tmp_path, weights=tmp_path / "base") as (model, optimizer):
        save_checkpoint(model, optimizer, tmp_path / "saved", step=2, wait=True)
    export_checkpoint(tmp_path / "saved", tmp_path / "merged", "hf", merge=True)
    with torch.no_grad():
        base.model.layers[1].mlp.up_proj.weight.neg_()
    base.save_pretrained(tmp_path / "base")
    with pytest.raises(outcore.ConfigError, match="layers.1.mlp.up_proj.base_layer.weight' has other values"):
        export_checkpoint(tmp_path / "saved", tmp_path / "other", "hf", merge=True)


def unadapted(folder, kind, dtype=torch.bfloat16):
    config = copy.deepcopy(KINDS[kind])
    if config.load_in_4bit and dtype is not torch.bfloat16:
        config.bnb_4bit_compute_dtype = dtype
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=config)


def test_another_base_is_not_resumed_on(folder, tmp_path):
    for kind, place in (("nf4", "host"), ("fp4", "host")):
        model = loaded(folder, kind)
        with prepared(model, trained(model), place, tmp_path) as (model, optimizer):
            if kind == "nf4":
                save_checkpoint(model, optimizer, tmp_path / "saved", step=2, wait=True)
                continue
            with pytest.raises(outcore.ConfigError, match="expected the frozen parameters that it was trained with"):
                load_checkpoint(model, optimizer, tmp_path / "saved")


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_merged_when_the_run_is_over(kind, folder, tmp_path):
    merged = []
    for is_plain in (True, False):
        model = loaded(folder, kind)
        with nullcontext((model, None)) if is_plain else prepared(model, trained(model), "host", tmp_path):
            pass
        merged.append(dict(model.merge_and_unload().state_dict()))
    assert_same(*merged)


@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_what_a_step_takes_is_planned(kind, folder, tmp_path):
    """The plan comes from shapes, through the library's own operations, and leaves the model as it was."""
    model = loaded(folder, kind)
    want = dict(model.state_dict())
    budget = outcore.Budget(device="1MiB", host="64MiB")
    options = {"budget": budget, "sample": {"input_ids": ids(), "labels": ids()}, "hardware": "rtx-4090+pcie4"}
    _, plan = plan_for(model, trained(model), **options)
    assert plan.tier_bytes["device"] <= budget.device
    assert_same(want, dict(model.state_dict()))
    model.eval()
    with outcore.prepare(model, trained(model), **options) as (model, optimizer):
        with torch.no_grad():
            model(input_ids=ids())
        model.train()
        drive(model, optimizer)
        assert_same(base_of(model), {k: v for k, v in want.items() if "lora_" not in k})


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("nf4", 0.5 + 4 / 64), ("nf4 nested", 0.5 + 1 / 64 + 4 / 64 / 256), ("int8", 1.0)]
)
def test_bytes_per_parameter(kind, nbytes):
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2048, num_hidden_layers=1))
    model = outcore.quantized(model, copy.deepcopy(KINDS[kind])).requires_grad_(requires_grad=False)
    cut = partition(model, units=["model.layers.0"])
    params = [param for param in cut.spec.units[1].params if "proj" in param.name]
    assert sum(param.weight_bytes for param in params) / sum(p.parameters for p in params) == pytest.approx(
        nbytes, 0.01
    )
    assert cut.spec.units[1].weight_bytes == pytest.approx(nbytes * sum(p.parameters for p in params), 0.01)


def test_a_library_that_keeps_weights_elsewhere(folder, monkeypatch):
    monkeypatch.setattr(quantized_module, "present_class", type)
    quantized_module._refuse_other_backward.cache_clear()
    model = loaded(folder, "nf4")
    with pytest.raises(outcore.UnsupportedError, match="expected a bitsandbytes whose backward reads weights where"):
        outcore.prepare(model, trained(model), budget=outcore.Budget(device="8MiB", host="8MiB"))


def test_experts_that_stay_as_they_are_are_named():
    """Transformers stacks their matrices, and bitsandbytes quantises linear layers alone."""
    sizes = {"vocab_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = AutoConfig.for_model("mixtral", hidden_size=32, intermediate_size=64, num_local_experts=4, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"48.00 KiB of others stay in bfloat16, such as '.*experts.gate_up_proj'"):
        outcore.quantized(model, KINDS["nf4"])


def test_refused(folder, tmp_path):
    with torch.device("meta"):
        model = LlamaForCausalLM(sizable().config)
    with pytest.raises(outcore.ConfigError, match="expected a BitsAndBytesConfig with load_in_4bit or load_in_8bit"):
        outcore.quantized(model, BitsAndBytesConfig())
    with pytest.raises(outcore.ConfigError, match="expected a model of Transformers on the meta device, but"):
        outcore.quantized(sizable(), KINDS["nf4"])
    model = adapted(outcore.quantized(model, KINDS["nf4"]))
    with pytest.raises(outcore.ConfigError, match="expected weights= with a quantised model on the meta .*q_proj"):
        outcore.prepare(model, trained(model))
    blocks = [bitsandbytes.nn.Linear4bit(64, 64), bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False)]
    for block in blocks:
        with pytest.raises(outcore.UnsupportedError, match="expected quantised weights, but '0.weight' is not"):
            outcore.prepare(torch.nn.Sequential(block), None)
    with pytest.raises(outcore.UnsupportedError, match="'0.weight' has has_fp16_weights=True"):
        outcore.prepare(torch.nn.Sequential(bitsandbytes.nn.Linear8bitLt(64, 64)), None)
    model = loaded(folder, "nf4").eval()
    if model.base_model.model.model.layers[0].mlp.up_proj.base_layer.support_avx512bf16_for_cpu:
        with torch.no_grad():
            model(input_ids=ids())
        with pytest.raises(outcore.UnsupportedError, match="q_proj.*was repacked by an evaluation on the CPU"):
            outcore.prepare(model, trained(model))
