"""``outcore train --lora RANK --load-in-4bit``: a base that is quantised as it is read; refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoConfig, AutoModelForCausalLM, BitsAndBytesConfig, TorchAoConfig

from outcore.command.plan.answer import answer
from outcore.core import extra

from .conftest import CONFIG, Run, read_jsonl, replaced
from .test_plan import asked

pytest.importorskip("bitsandbytes")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated GPU has no kernels of bitsandbytes"),
]

SHORT = ("--steps", 3, "--batch-size", 2, "--seq-len", 32, "--lr", 1e-2, "--save-every", 2)
NESTED = ("--load-in-4bit", "--set", "bnb_4bit_use_double_quant=true")


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**CONFIG, "initializer_range": 0.1, "hidden_size": 64, "intermediate_size": 128})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


def seen(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_jsonl(folder / "metrics.jsonl")]


def test_over_tiers_and_resumed(command: Run, weights: Path, text: Path, tmp_path: Path):
    shared = ("train", "--model", weights, "--data", text, "--lora", 2, *SHORT, *NESTED)
    tight = ("--device-memory", "180KiB", "--host-memory", "150KiB", "--disk", tmp_path)
    assert command(*shared, "--out", tmp_path / "one").status == 0
    done = command(*shared, "--out", tmp_path / "tight", *tight)
    assert done.status == 0, done.err
    assert "frozen          144,320" in done.out, "parameters are counted in full precision"
    units = json.loads((tmp_path / "tight" / "plan.json").read_text())["units"]
    assert {unit["weights"] for unit in units} == {"device", "host", "disk"}
    assert seen(tmp_path / "one") == seen(tmp_path / "tight")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True)
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, quantization_config=config)
    trained = PeftModel.from_pretrained(base, tmp_path / "tight" / "model").state_dict()
    assert any(tensor.any() for name, tensor in trained.items() if "lora_B" in name)
    last = seen(tmp_path / "tight")[2:]
    (tmp_path / "tight" / "checkpoint-3").rename(tmp_path / "aside")
    done = command(*shared, "--out", tmp_path / "tight", "--resume")
    assert done.status == 0, done.err
    assert seen(tmp_path / "tight")[2:] == last


def test_in_8_bits(command: Run, weights: Path, text: Path, tmp_path: Path):
    more = ("--load-in-8bit", "--device-memory", "180KiB", "--host-memory", "150KiB", "--disk", tmp_path)
    done = command("train", "--model", weights, "--data", text, "--out", tmp_path / "run", "--lora", 2, *SHORT, *more)
    assert done.status == 0, done.err
    assert "quantised to 8 bits" in done.out


def test_a_base_that_is_quantised_already(command: Run, weights: Path, text: Path, tmp_path: Path):
    """The base equals the one that ``--load-in-4bit`` makes of the same weights."""
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, quantization_config=config)
    base.save_pretrained(tmp_path / "packed")
    shared = ("train", "--data", text, *SHORT)
    assert command(*shared, "--model", weights, "--out", tmp_path / "one", "--lora", 2, *NESTED).status == 0
    packed = (*shared, "--model", tmp_path / "packed", "--out", tmp_path / "two")
    done = command(*packed, "--lora", 2, "--device-memory", "180KiB", "--host-memory", "150KiB", "--disk", tmp_path)
    assert done.status == 0, done.err
    assert seen(tmp_path / "one") == seen(tmp_path / "two")
    refusals = {
        (): "expected --lora RANK beside it, since its weights are quantised to 4 bits, nf4, its statistics too",
        ("--lora", 2, "--load-in-8bit"): "they are quantised already, to 4 bits",
    }
    for more, message in refusals.items():
        refused = command(*packed[:-1], tmp_path / "three", *more)
        assert (refused.status, message in refused.err) == (2, True), refused.err
    planned = command("plan", "--model", tmp_path / "packed", "--hardware", "rtx-4090", "--lora", 2, "--json")
    assert planned.status == 0, planned.err


@pytest.mark.filterwarnings("ignore")  # torchao's own
def test_a_base_of_torchao(command: Run, weights: Path, text: Path, tmp_path: Path):
    way = pytest.importorskip("torchao.quantization").Int8WeightOnlyConfig
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16, quantization_config=TorchAoConfig(way()))
    base.save_pretrained(tmp_path / "packed")
    shared = ("train", "--data", text, *SHORT, "--model", tmp_path / "packed")
    tight = ("--device-memory", "180KiB", "--host-memory", "150KiB", "--disk", tmp_path)
    for name, more in {"one": (), "tight": tight}.items():
        done = command(*shared, "--out", tmp_path / name, "--lora", 2, *more)
        assert done.status == 0, done.err
    assert seen(tmp_path / "one") == seen(tmp_path / "tight")
    refusals = {
        (): "since its weights are quantised to torchao's Int8WeightOnlyConfig and stay as they are",
        ("--lora", 2, "--load-in-8bit"): "quantised already, to torchao's Int8WeightOnlyConfig; leave --load-in-4bit",
    }
    for more, message in refusals.items():
        refused = command(*shared, "--out", tmp_path / "three", *more)
        assert (refused.status, message in refused.err) == (2, True), refused.err
    planned = command("plan", "--model", tmp_path / "packed", "--hardware", "rtx-4090", "--lora", 2, "--json")
    assert planned.status == 0, planned.err


REFUSED = {
    "no adapters": (("--load-in-4bit",), "--load-in-4bit: expected --lora RANK beside it, .* but got none; add it"),
    "both": (("--lora", 2, "--load-in-4bit", "--load-in-8bit"), "--load-in-4bit: expected it without --load-in-8bit"),
    "type": (("--lora", 2, "--load-in-4bit", "--set", "bnb_4bit_quant_type=int3"), "expected 'nf4' or 'fp4', but got"),
    "unused": (("--lora", 2, "--set", "bnb_4bit_quant_type=fp4"), "bnb_4bit_quant_type: expected --load-in-4bit besi"),
    "no weights": (("--lora", 2, "--load-in-8bit", "--model", "{config}"), "expected a model with weights to quantise"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_one_message(command: Run, weights: Path, text: Path, tmp_path: Path, case: str):
    options, message = REFUSED[case]
    given = [weights / "config.json" if option == "{config}" else option for option in options]
    done = command(*replaced("train", "--model", weights, "--data", text, "--out", tmp_path / "run", *given))
    assert done.status == 2
    [line] = [line for line in done.err.splitlines() if not line.startswith("note:")]
    assert line.startswith("outcore: ")
    assert re.search(message, line), line
    assert not (tmp_path / "run").exists()


def test_a_missing_library_is_one_sentence(command: Run, weights: Path, text: Path, tmp_path: Path, monkeypatch):
    found = extra.find_spec
    monkeypatch.setattr(extra, "find_spec", lambda name: None if name == "bitsandbytes" else found(name))
    run = ("--out", tmp_path / "run", "--lora", 2, "--load-in-4bit")
    done = command("train", "--model", weights, "--data", text, *run)
    assert done.status == 2
    assert (
        "--load-in-4bit: expected the package bitsandbytes, but it is not installed; pip install 'outcore[quantized"
        in (done.err)
    )


def test_time_to_unpack_matrices_is_planned(weights: Path):
    """Half a byte is read for each weight, and two are written, in forward and in backward."""
    usual = asked(weights, Path("rtx-4090"), lora=2, load_in_4bit=True, device_memory="1GiB", host_memory="1GiB")
    found = answer(usual)
    packed = sum(p.numel for p in found.spec.units[1].params if p.name.endswith("base_layer.weight"))
    assert packed > 0
    assert found.setting.profile_of(usual.batch_size).work[found.spec.units[1].name].unpacked_bytes == 5 * packed


def test_planned(command: Run, weights: Path):
    """A plan of a quantised base has a predicted step time and reserves little memory."""
    done = command("plan", "--model", weights, "--hardware", "rtx-4090", "--lora", 2, "--load-in-4bit", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["predicted_step_s"] > 0
    assert found["not_followed"] is None
    assert found["reserved_bytes"]["device"] - found["workspace_bytes"] < 2**20
    refused = command("plan", "--model", weights, "--hardware", "rtx-4090", "--load-in-4bit")
    assert (refused.status, "expected --lora RANK" in refused.err) == (2, True)
