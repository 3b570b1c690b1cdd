"""What cannot work on streamed weights is refused by name before anything else happens."""

from __future__ import annotations

import functools
import re
import warnings
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from transformers import Trainer, TrainingArguments
from transformers.utils.quantization_config import QuantizationMethod
from trl import DPOConfig, SFTConfig, SFTTrainer

import outcore
from outcore.core.quantities import format_bytes
from outcore.integrations.optimizers import OPTIMIZERS
from outcore.integrations.refusals import refuse_accelerator, refuse_unranked
from outcore.integrations.transformers import OutcoreMixin
from outcore.optim.joined import members
from outcore.optim.rules import rule_for

from .rig import EVAL_TEXTS, WARNINGS, language, llama, saved_model, streamed, token_dataset

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

ARGUMENTS = {
    "deepspeed": {"zero_optimization": {"stage": 3}},
    "fsdp": True,
    "parallelism_config": object(),
    "auto_find_batch_size": True,
    "fp16_full_eval": True,
    "bf16_full_eval": True,
    "torch_compile": True,
    "activation_offloading": True,
    "sync_ref_model": True,
}


class Streamed(OutcoreMixin, Trainer):
    pass


@pytest.mark.parametrize("name", ARGUMENTS)
def test_training_arguments(name, tmp_path):
    args = DPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    setattr(args, name, ARGUMENTS[name])  # the constructor may need packages that are missing here
    with pytest.raises(outcore.UnsupportedError, match=f"expected {name} to be off, but got .*; .+"):
        Streamed(llama(), args)


def test_arguments_are_refused_before_a_model_is_read(tmp_path):
    class StreamedSft(OutcoreMixin, SFTTrainer):
        pass

    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, auto_find_batch_size=True)
    with pytest.raises(outcore.UnsupportedError, match="auto_find_batch_size"):
        StreamedSft(model=str(tmp_path / "nowhere"), args=args)


def test_several_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(
        outcore.UnsupportedError, match="expected one GPU, but this process sees 2.*CUDA_VISIBLE_DEVICES"
    ):
        Streamed(llama())


def built(tmp_path, **options):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    return Streamed(args=args, **options)


@pytest.fixture
def fresh_accelerate():
    """Accelerate reads the environment only once, so its state is reset."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.usefixtures("fresh_accelerate")
@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "ACCELERATE_DYNAMO_BACKEND",
            "inductor",
            "expected no compilation, but got the backend INDUCTOR; unset .*BACKEND",
        ),
        (
            "ACCELERATE_MIXED_PRECISION",
            "fp16",
            "expected mixed precision 'no' or 'bf16' on cpu, but got 'fp16'; pass bf16=True .* unset .*PRECISION",
        ),
    ],
)
def test_what_the_environment_asks_for(variable, value, message, tmp_path, monkeypatch):
    monkeypatch.setenv(variable, value)
    with pytest.raises(outcore.UnsupportedError, match=message):
        built(tmp_path, model=llama())


def test_plugins():
    accelerator = SimpleNamespace(distributed_type=DistributedType.FSDP)
    with pytest.raises(outcore.UnsupportedError, match="expected ranks without .*, but got FSDP; start with python"):
        refuse_accelerator(accelerator)


def test_ranks_that_accelerate_does_not_see(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    accelerator = SimpleNamespace(distributed_type=DistributedType.NO, num_processes=1)
    with pytest.raises(outcore.UnsupportedError, match="to see the 2 ranks .*, but it sees 1; start with torchrun"):
        refuse_accelerator(accelerator)


@pytest.mark.parametrize("name", ["save_on_each_node", "split_batches", "enable_jit_checkpoint"])
def test_what_several_ranks_refuse(name):
    given = {"save_on_each_node": False, "enable_jit_checkpoint": False, name: True}
    batches = SimpleNamespace(split_batches=name == "split_batches")
    args = SimpleNamespace(world_size=2, accelerator_config=batches, **given)
    with pytest.raises(outcore.UnsupportedError, match=f"expected .*{name} to be off with several ranks; drop it"):
        refuse_unranked(args)
    args.world_size = 1
    refuse_unranked(args)


def test_what_accelerate_prepared_first():
    model = llama()
    _, optimizer = Accelerator(cpu=True).prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(outcore.ConfigError, match="its AcceleratedOptimizer; call outcore.prepare first"):
        outcore.prepare(model, optimizer, device="cpu")


def said_in(job, folder, **options):
    """Evaluate; return the warnings of the mixin."""
    with streamed(folder, **options) as side, warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        job(side, folder / "streamed").evaluate()
    return [text for w in found if "masters" in (text := str(w.message)) or "logits" in text]


def test_bf16_without_masters_is_said_unless_it_was_asked_for(tmp_path):
    def job(side, folder):
        return language(side, folder, model=llama(torch.bfloat16))

    [said] = said_in(job, tmp_path)
    assert re.search("there are no fp32 masters, .* precision='bf16' adds them", said)
    for precision in ("bf16", "pure_bf16"):
        assert said_in(job, tmp_path, precision=precision) == []
    assert said_in(language, tmp_path) == []


def test_logits_that_are_kept_for_metrics_are_said(tmp_path):
    def job(side, folder, **more):
        return language(side, folder, parts={"compute_metrics": lambda _: {}, "eval_dataset": rows, **more})

    rows, budget = token_dataset(EVAL_TEXTS * 16), outcore.Budget(device="300KiB", host="1GiB")
    [said] = said_in(job, tmp_path, budget=budget)
    size = format_bytes(len(rows) * len(rows[0]["input_ids"]) * 259 * 4)
    assert re.search(f"{len(rows)} rows .* 259 numbers each, are {size}; pass preprocess_logits_for_metrics", said)
    small = functools.partial(job, preprocess_logits_for_metrics=lambda logits, _: logits.argmax(-1))
    assert said_in(small, tmp_path, budget=budget) == []
    assert said_in(job, tmp_path, budget=outcore.Budget(host="1GiB")) == []


@pytest.mark.parametrize("name", ["_save", "_load_best_model"])
def test_a_way_to_save_or_load_of_ones_own(name):
    own = type("Own", (Trainer,), {name: lambda self, *args, **kwargs: None})
    with pytest.raises(outcore.UnsupportedError, match=f"but Own has a {name} of its own, which would never be called"):
        type("Both", (OutcoreMixin, own), {})(llama())


@pytest.mark.parametrize("name", ["adamw_torch_4bit", "ademamix", "galore_adamw"])
def test_names_of_other_optimizers(name, tmp_path):
    """The refusal names the optimizer, and does not ask for a missing package that would not help."""
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", optim=name)
    with pytest.raises(
        outcore.UnsupportedError, match=f"expected optim to be one of {', '.join(OPTIMIZERS)}, but got '{name}'"
    ):
        Streamed(llama(), args)
    Streamed(args=args, model=llama(), optimizers=(torch.optim.SGD([torch.zeros(1)]), None))  # the name is not used


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_names_of_optimizers_that_work(name, tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
    args.optim = name
    rule_for(*members(Streamed(llama(), args).create_optimizer()))


@pytest.mark.usefixtures("fresh_accelerate")
def test_autocast_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert built(tmp_path, model=llama()).accelerator.mixed_precision == "bf16"


@pytest.mark.parametrize(
    ("places", "late"), [({"model": "cpu", "lm_head": 0}, False), ({"": "disk"}, False), ({"": "disk"}, True)]
)
def test_models_spread_over_devices(places, late, tmp_path):
    model = llama()
    model.hf_device_map = places
    parts = {"model_init": lambda: model} if late else {}
    with streamed(tmp_path, budget=outcore.Budget()) as side:
        with pytest.raises(outcore.UnsupportedError, match="in one place, but this LlamaForCausalLM was .*; load it"):
            language(side, tmp_path / "outcore", model=model, parts=parts).train()


def test_model_with_a_trivial_device_map(tmp_path):
    model = llama()
    model.hf_device_map = {"": "cpu"}
    built(tmp_path, model=model)


def test_quantized_models(tmp_path):
    model = llama()
    model.quantization_method = QuantizationMethod.GPTQ
    with pytest.raises(outcore.UnsupportedError, match="this LlamaForCausalLM is quantized \\(gptq\\)"):
        built(tmp_path, model=model)


def test_fp16_models(tmp_path):
    with pytest.raises(
        outcore.UnsupportedError, match="train in fp32 or bf16, but 'model.embed_tokens.weight' is in fp16"
    ):
        built(tmp_path, model=llama(torch.float16))
    with pytest.raises(outcore.UnsupportedError, match="expected fp16=True .* beside precision 'fp16', since"):
        built(tmp_path, model=llama(), precision="fp16")


@pytest.mark.usefixtures("fresh_accelerate")
def test_fp16_on_the_cpu(tmp_path):
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", fp16=True)
    with pytest.raises(
        outcore.UnsupportedError, match=r"'no' or 'bf16' on cpu, but got 'fp16'; .* \(fp16=True needs an"
    ):
        Streamed(llama(), args)


def test_budget_that_does_not_suffice(tmp_path):
    with streamed(tmp_path, budget=outcore.Budget(device="1KiB")) as side:
        trainer = language(side, tmp_path / "outcore")
        with pytest.raises(outcore.PlanInfeasibleError, match=r"device +budget 1.00 KiB: too little"):
            trainer.train()


def test_model_that_somebody_else_prepared(tmp_path):
    with streamed(tmp_path, budget=outcore.Budget()) as side:
        trainer = language(side, tmp_path / "outcore", model=side.reference(llama()))
        with pytest.raises(outcore.ConfigError, match="not prepared yet"):
            trainer.train()


@pytest.mark.parametrize("given", [None, {"dtype": "float32"}])
def test_path_is_not_loaded_onto_the_accelerator(given, tmp_path):
    class StreamedSft(OutcoreMixin, SFTTrainer):
        pass

    args = SFTConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False, model_init_kwargs=given)
    StreamedSft(saved_model(tmp_path / "model"), args, train_dataset=token_dataset(["text"]))
    assert args.model_init_kwargs == {"device_map": None, **(given or {})}
