"""``outcore plan`` for any kind of model, from a configuration alone; ``outcore.plan`` for a model in a program."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from plans import plan_for
from torch import nn

import outcore
from outcore.command.plan.answer import answer
from outcore.command.plan.question import Question
from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.planner.timing.known_hardware import known_hardware

from .conftest import CONFIG, Run, write_json

TEXT = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
VISION |= {"image_size": 32, "patch_size": 8}
SPEECH = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "vocab_size": 99}
SPEECH |= {"decoder_attention_heads": 4, "max_source_positions": 50, "max_target_positions": 20, "num_mel_bins": 8}
SPEECH |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
LLAVA = {"text_config": {**TEXT, "model_type": "llama"}, "vision_config": {**VISION, "model_type": "clip_vision_model"}}
RESNET = {"embedding_size": 16, "layer_type": "basic"}  # blocks of equal weights with other strides, and in place
CONFIGS: dict[str, dict[str, Any]] = {
    "BertForMaskedLM": {"model_type": "bert", **TEXT},
    "T5ForConditionalGeneration": {"model_type": "t5", "vocab_size": 99, "d_model": 32, "num_layers": 2, "d_ff": 48},
    "ViTForImageClassification": {"model_type": "vit", **VISION},
    "ResNetForImageClassification": {"model_type": "resnet", "hidden_sizes": [64, 64], "depths": [2, 2], **RESNET},
    "WhisperForConditionalGeneration": {"model_type": "whisper", **SPEECH},
    "LlavaForConditionalGeneration": {"model_type": "llava", "image_token_index": 98, **LLAVA},
}
PARTS = "rtx-4090+pcie4+desktop-ddr5"


def config_of(name: str, folder: Path, **more: Any) -> Path:
    return write_json(folder / f"{name}.json", {**CONFIGS[name], "architectures": [name], **more})


@pytest.mark.usefixtures("gains")
@pytest.mark.parametrize(
    ("name", "counted", "inputs"),
    [
        ("BertForMaskedLM", "tokens", "2 x 16 tokens"),
        ("T5ForConditionalGeneration", "tokens", "2 x 16 tokens"),
        ("ViTForImageClassification", "samples", "2 samples"),
        ("ResNetForImageClassification", "samples", "2 samples"),
        ("WhisperForConditionalGeneration", "samples", "2 samples"),
        ("LlavaForConditionalGeneration", "tokens", "2 x 16 tokens"),
    ],
)
def test_any_architecture_is_planned_from_its_configuration(
    command: Run, tmp_path: Path, name: str, counted: str, inputs: str
):
    asked = ("--model", config_of(name, tmp_path), "--hardware", PARTS, "--batch-size", 2, "--seq-len", 16)
    done = command("plan", *asked, "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["not_followed"] is None
    assert found[f"predicted_{counted}_per_s"] > 0
    assert found["batch_size"] == 2
    assert found["seq_len"] == (16 if counted == "tokens" else None)


@pytest.mark.usefixtures("gains")
def test_what_would_help_may_cut_a_model_into_other_units(command: Run, tmp_path: Path):
    """Adapters make units of two linear layers that are none by themselves."""
    asked = ("--model", config_of("LlavaForConditionalGeneration", tmp_path), "--hardware", PARTS, "--seq-len", 16)
    done = command("plan", *asked, "--batch-size", 2, "--device-memory", "300KiB", "--host-memory", "8MiB")
    assert done.status == 0, done.err
    assert done.out.startswith("Fits.")


def test_a_configuration_that_names_no_class_gets_one_of_its_kind(command: Run, tmp_path: Path):
    path = write_json(tmp_path / "config.json", CONFIGS["ViTForImageClassification"])
    done = command("plan", "--model", path, "--hardware", PARTS)
    assert done.status == 0, done.err
    assert "per second (predicted" in next(line for line in done.out.splitlines() if line.startswith("samples "))


@pytest.mark.parametrize("name", ["ViTForImageClassification", "T5ForConditionalGeneration"])
def test_prepare_takes_the_bytes_of_the_plan(tmp_path: Path, name: str):
    path = config_of(name, tmp_path)
    question = Question(
        model=str(path),
        hardware=PARTS + "+no-disk",
        device_memory="1400KiB",
        host_memory="8MiB",
        disk_size=None,
        batch_size=2,
        seq_len=16,
        grad_accum=1,
        precision="bf16",
        clipping=True,
    )
    plan = answer(question).found.plan
    model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(path)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    budget = outcore.Budget(device="1400KiB", host="8MiB")
    with outcore.prepare(model, optimizer, precision="bf16", plan=plan, budget=budget, device="cpu") as (_, streamed):
        assert streamed.plan.tier_bytes == plan.tier_bytes
        assert streamed.plan.units == plan.units


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--input", "pixel_values=2x3x32x32"), "--input: expected NAME=SHAPE:DTYPE, such as pixel_values=2x3x224x224"),
        (("--input", "pixel_values=99999999999999999999:float32"), "--input: expected NAME=SHAPE:DTYPE"),
        (("--input", "pixel_values=1099511627776x1099511627776:float32"), "--input: expected NAME=SHAPE:DTYPE"),
        (("--input", "pixels=2x3:float32"), "expected an argument of ViTForImageClassification.forward, but got 'pix"),
        (("--input", "labels=2:int64", "--input", "labels=2:int64"), "--input: expected 'labels' once, but got it"),
        (("--batch-size", "3", "--input", "pixel_values=2x3x32x32:float32"), "expected 3 samples, as --batch-size"),
        (("--input", "pixel_values=2x5x32x32:bfloat16"), "expected inputs with which the model can be followed"),
    ],
)
def test_wrong_inputs_are_one_message(command: Run, tmp_path: Path, options: tuple[str, ...], message: str):
    path = config_of("ViTForImageClassification", tmp_path)
    done = command("plan", "--model", path, "--hardware", PARTS, *options)
    assert done.status == 2
    assert message in done.err


def test_inputs_that_cannot_be_made_are_asked_for(command: Run, tmp_path: Path):
    config = {"model_type": "patchtst", "architectures": ["PatchTSTForPrediction"], "context_length": 32}
    path = write_json(tmp_path / "config.json", config)
    done = command("plan", "--model", path, "--hardware", PARTS)
    assert done.status == 2
    assert "give --input past_values=SHAPE:DTYPE" in done.err


def test_a_given_input_says_the_number_of_samples(command: Run, tmp_path: Path):
    path = config_of("ViTForImageClassification", tmp_path)
    done = command("plan", "--model", path, "--hardware", PARTS, "--input", "pixel_values=4x3x32x32:bfloat16", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["batch_size"] == 4


def test_weights_in_fp8_are_planned_in_full_precision(command: Run, tmp_path: Path):
    sizes = ("--hardware", PARTS, "--seq-len", 16, "--json")
    plain = command("plan", "--model", write_json(tmp_path / "plain.json", CONFIG), *sizes)
    stored = {**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    done = command("plan", "--model", write_json(tmp_path / "fp8.json", stored), *sizes)
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["plan"] == json.loads(plain.out)["plan"]
    assert "load them with dequantize=True" in found["notes"][0]


def test_weights_that_cannot_be_loaded_in_full_precision_are_refused(command: Run, tmp_path: Path):
    stored = {**CONFIG, "quantization_config": {"quant_method": "gptq", "bits": 4}}
    done = command("plan", "--model", write_json(tmp_path / "config.json", stored), "--hardware", PARTS)
    assert done.status == 2
    assert "but they are quantised by 'gptq'" in done.err
    assert "name the model that it was made from" in done.err


def test_state_space_layers_say_that_reference_code_is_timed(command: Run, tmp_path: Path):
    config = {"model_type": "mamba", "vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    path = write_json(tmp_path / "config.json", {**config, "architectures": ["MambaForCausalLM"]})
    done = command("plan", "--model", path, "--hardware", PARTS, "--seq-len", 8)
    assert done.status == 0, done.err
    assert "are timed as their reference code computes" in done.out


class Layers(nn.Module):
    """A model that no library knows."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SAMPLE = {"x": torch.zeros(8, 64)}


def on_meta() -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.device("meta"):
        model = Layers()
    return model, torch.optim.AdamW(model.parameters())


class TestFromPython:
    def test_a_model_without_values_is_planned_for_another_machine(self):
        budget = outcore.Budget(device="120KiB", host="1MiB")
        found = outcore.plan(*on_meta(), sample=SAMPLE, budget=budget, hardware=PARTS)
        assert found.tokens_per_s is None
        assert found.samples_per_s == pytest.approx(8 / found.step_s)
        assert 0 < found.peak_bytes["device"] <= 120 * 2**10
        assert sum(found.limited_by.values()) == pytest.approx(1)
        assert "budget 120.00 KiB" in str(found)
        assert json.loads(found.to_json())["model"] == "Layers"
        assert "<title>outcore plan: Layers on rtx-4090" in found.to_html()
        with pytest.raises(dataclasses.FrozenInstanceError):
            found.step_s = 1.0

    def test_prepare_follows_the_plan_and_would_have_made_it(self):
        budget, model, machine = outcore.Budget(device="120KiB", host="1MiB"), Layers(), known_hardware("rtx-4090")
        machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, runs_ahead=0), disk=None)
        asked: dict[str, Any] = {"sample": SAMPLE, "budget": budget, "clipping": False, "hardware": machine}
        found = outcore.plan(model, torch.optim.AdamW(model.parameters()), accumulation_steps=2, **asked)
        _, plan = plan_for(model, torch.optim.AdamW(model.parameters()), accumulation_steps=2, **asked)
        assert found.plan == plan
        optimizer = torch.optim.AdamW(model.parameters())
        with outcore.prepare(model, optimizer, plan=found.plan, budget=budget, device="cpu", clipping=False) as (
            _,
            own,
        ):
            assert own.plan.tier_bytes == found.plan.tier_bytes

    def test_nothing_is_changed(self):
        model, _ = on_meta()
        found = outcore.plan(model, None, sample=SAMPLE, hardware=PARTS)
        assert all(param.requires_grad and param.is_meta for param in model.parameters())
        assert "bytes of states" not in str(found)  # nothing is trained

    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            ({"sample": None}, ConfigError, "outcore.plan: expected sample="),
            ({"sample": {"y": torch.zeros(1)}}, ConfigError, "keyword arguments of Layers.forward"),
            ({"hardware": "rtx-9"}, ConfigError, "rtx-9"),
            ({"hardware": "none"}, ConfigError, "expected a machine to predict times for"),
            ({"accumulation_steps": 0}, ConfigError, "positive integer"),
            ({"budget": outcore.Budget(device="1KiB")}, PlanInfeasibleError, "device"),
            ({"budget": outcore.Budget(disk="there")}, ConfigError, "expected a machine with a disk"),
            ({"sample": {"x": torch.zeros(8, 63)}}, ConfigError, r"outcore.plan\(sample=\): expected .* it fails in"),
        ],
    )
    def test_wrong_arguments_are_refused_as_by_prepare(self, options: dict[str, Any], kind: type, message: str):
        with pytest.raises(kind, match=message):
            outcore.plan(*on_meta(), **{"sample": SAMPLE, "hardware": PARTS + "+no-disk", **options})
