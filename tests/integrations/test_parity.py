"""A Trainer with the mixin logs and trains exactly what the plain one does."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

import outcore
from outcore.engine.engine import attachment_of
from outcore.spec.layout import CODES

from .rig import (
    ON_CPU,
    WARNINGS,
    Plain,
    dpo,
    exactly,
    language,
    llama,
    lora,
    same,
    saved_model,
    seen,
    sft,
    streamed,
    tiers,
    train,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


def test_trainer(tmp_path):
    same(language, tmp_path)


def test_everything_on_the_device(tmp_path):
    plain = seen(language(Plain(), tmp_path / "plain"), train)
    with streamed(tmp_path, budget=outcore.Budget()) as side:
        trainer = language(side, tmp_path / "streamed")
        exactly(seen(trainer, train), plain)
        assert tiers(trainer.model) == {"device"}


@pytest.mark.parametrize(
    "changes", [{}, {"packing": True, "max_length": 48}, {"bf16": True}], ids=["full", "packing", "autocast"]
)
def test_sft(changes, tmp_path):
    same(sft, tmp_path, **changes)


@pytest.mark.skipif(ON_CPU, reason="Accelerate has a gradient scaler on accelerators alone")
@pytest.mark.parametrize("job", [language, sft, dpo])
@pytest.mark.parametrize("max_grad_norm", [0.1, 0.0])
def test_fp16(job, max_grad_norm, tmp_path):
    """Accelerate's scale starts so high that the first steps overflow, except in DPO."""

    def with_reference(side, folder, **more):  # each side has its own: a Trainer changes its forward
        return job(side, folder, parts={"ref_model": llama(seed=4)} if job is dpo else {}, **more)

    drive = train if job is dpo else train_and_say_the_scale
    same(with_reference, tmp_path, drive=drive, fp16=True, max_grad_norm=max_grad_norm)


def train_and_say_the_scale(trainer):
    trainer.train()
    scale = trainer.accelerator.scaler.get_scale()
    assert scale < 2.0**16
    return scale


@pytest.mark.skipif(ON_CPU, reason="Accelerate has a gradient scaler on accelerators alone")
def test_fp16_weights_with_masters_are_the_same_wherever_they_live(tmp_path):
    found = []
    for name, options in {"one": {"budget": outcore.Budget()}, "all": {}}.items():
        with streamed(tmp_path, precision="fp16", **options) as side:
            trainer = language(side, tmp_path / name, fp16=True)
            found.append(seen(trainer, train_and_say_the_scale))
            assert {p.dtype for p in trainer.model.parameters()} == {torch.float16}
    exactly(*found)


@pytest.mark.parametrize("job", [language, sft])
def test_compact_masters(job, tmp_path):
    """Compact masters give the result of fp32 masters, and take less memory."""
    found, tight = [], []
    for chosen in ("fp32", "compact"):
        with streamed(tmp_path, precision="bf16", master_format=chosen) as side:
            trainer = job(side, tmp_path / chosen)
            found.append(seen(trainer, train))
            codes = [CODES in u.ledger.state_specs for u in attachment_of(trainer.model).engine.units]
            assert any(codes) == (chosen == "compact")
            tight.append(side.budget.host)
    exactly(*found)
    assert tight[0] > tight[1]


def test_activations_leave_under_autocast(tmp_path):
    """Room for activations is measured under autocast, so none is recomputed; a recompute would be reported."""
    plain = seen(sft(Plain(), tmp_path / "plain", bf16=True), train)
    with streamed(tmp_path, activations="disk", budget=outcore.Budget(disk=tmp_path)) as side:
        trainer = sft(side, tmp_path / "streamed", bf16=True)
        exactly(seen(trainer, train), plain)
        assert {u.policy for u in attachment_of(trainer.model).engine.opened.plan.units} == {"keep"}


@pytest.mark.parametrize("job", [sft, dpo])
def test_batches_in_pieces(job, tmp_path):
    """Pieces give the same bits under any plan. Losses equal those of whole batches up to rounding."""

    def run(side, name):
        parts = {"ref_model": llama(seed=4)} if job is dpo else {}
        return seen(job(side, tmp_path / name, model=llama(attention_dropout=0.0), parts=parts), train)

    whole, found = run(Plain(), "plain"), []
    for name, options in {"one": {"budget": outcore.Budget()}, "all": {}}.items():
        with streamed(tmp_path, micro_batches_in_unit=2, **options) as side:
            found.append(run(side, name))
    exactly(*found)
    assert found[0]["logs"][-1]["train_loss"] == pytest.approx(whole["logs"][-1]["train_loss"], rel=1e-4)


def test_sft_lora(tmp_path):
    same(sft, tmp_path, parts={"peft_config": lora()})


@pytest.mark.parametrize("kind", [{"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, {"load_in_8bit": True}])
def test_quantized_base(kind, tmp_path):
    pytest.importorskip("bitsandbytes")
    if not ON_CPU:
        pytest.skip("the simulated GPU has no kernels of bitsandbytes")
    name = saved_model(tmp_path / "model")

    def job(side, folder):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=BitsAndBytesConfig(**kind))
        more = {"peft_config": lora(), "eval_dataset": None}  # evaluation would repack the plain side's weights
        return sft(side, folder, model=model, parts=more, eval_strategy="no")

    same(job, tmp_path)


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_base_of_torchao(tmp_path):
    way = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
    name = saved_model(tmp_path / "model")

    def job(side, folder):
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_pretrained(name, quantization_config=TorchAoConfig(way()))
        return sft(side, folder, model=model, parts={"peft_config": lora()})

    same(job, tmp_path)


def test_sft_model_given_as_a_path(tmp_path):
    same(sft, tmp_path, model=saved_model(tmp_path / "model"))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_compiled_blocks_with_adapters(tmp_path):
    def adapted():
        config = lora()
        config.target_modules = {"q_proj"}
        return get_peft_model(llama(), config)

    model = adapted()
    for layer in model.base_model.model.model.layers:
        layer.compile(backend="eager")
    job = {"max_steps": 2, "eval_strategy": "no"}
    plain = seen(language(Plain(), tmp_path / "plain", model=model, **job), train)
    with streamed(tmp_path, compile={"backend": "eager"}) as side:
        exactly(seen(language(side, tmp_path / "streamed", model=adapted(), **job), train), plain)


def test_bf16_model(tmp_path):
    same(lambda *where: language(*where, model=llama(torch.bfloat16)), tmp_path)


@pytest.mark.parametrize(
    ("prepared", "changes"),
    [(False, {}), (True, {}), (True, {"bf16": True})],
    ids=["plain reference", "streamed reference", "autocast"],
)
def test_dpo_with_a_reference(prepared, changes, tmp_path):
    def job(side, folder, **more):
        reference = llama(seed=4)
        return dpo(side, folder, parts={"ref_model": side.reference(reference) if prepared else reference}, **more)

    same(job, tmp_path, **changes)


@pytest.mark.parametrize("given", ["settings", "model"])
def test_dpo_lora(given, tmp_path):
    """The reference is the model without its adapter, or with a copy of the adapter that it came with."""

    def job(side, folder):
        if given == "settings":
            return dpo(side, folder, parts={"peft_config": lora()})
        return dpo(side, folder, model=get_peft_model(llama(), lora(init_lora_weights=False)))

    same(job, tmp_path)
