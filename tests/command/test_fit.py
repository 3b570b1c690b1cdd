"""``outcore plan --fit``: the largest known models that fit, each with its plan; impossible questions are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from outcore.command.plan import fit, known_models
from outcore.command.plan.answer import Answer, answer, answer_for
from outcore.command.plan.question import Question
from outcore.command.train.model.source import ModelSource, build_model
from outcore.core.errors import ConfigError, PlanInfeasibleError
from outcore.planner.timing import known_hardware as parts
from outcore.planner.timing.known_hardware import known_hardware
from outcore.spec.hardware import Hardware

from .conftest import CONFIG, Run

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

TOO_LARGE, LARGE, MIDDLE, SMALL = 20, 3, 2, 1
SMALL_BUDGETS = ("--device-memory", "800KiB", "--host-memory", "1MiB", "--disk-size", "1MiB", "--seq-len", 64)


def known_of(layers: int) -> known_models.KnownModel:
    return known_models.KnownModel(
        name=f"tiny-{layers}", parameters=layers, config={**CONFIG, "num_hidden_layers": layers}
    )


@pytest.fixture(scope="module")
def answered() -> dict[str, Answer | PlanInfeasibleError]:
    return {}


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, answered: dict[str, Answer | PlanInfeasibleError]) -> None:
    """Tiny models in place of those with billions of parameters. Each question about them is answered once."""
    known = [known_of(layers) for layers in (TOO_LARGE, LARGE, MIDDLE, SMALL)]
    monkeypatch.setattr(known_models, "known_models", lambda: known)

    def answer_once(question: Question, source: ModelSource, machine: Hardware) -> Answer:
        if (key := repr((question, machine))) not in answered:
            try:
                answered[key] = answer_for(question, source, machine)
            except PlanInfeasibleError as error:
                answered[key] = error
        if isinstance(found := answered[key], PlanInfeasibleError):
            raise found
        return found

    monkeypatch.setattr(fit, "answer_for", answer_once)


@pytest.mark.usefixtures("tiny")
def test_the_largest_that_fit_each_with_its_plan(command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch):
    asked_for: list[str] = []

    def known(name: str) -> Hardware:
        asked_for.append(name)
        return known_hardware(name)

    monkeypatch.setattr(parts, "known_hardware", known)
    done = command("plan", "--fit", "--hardware", "rtx-4090", *SMALL_BUDGETS, "--json")
    assert done.status == 0, done.err
    assert asked_for == ["rtx-4090", "rtx-4090"], "before torch is imported, and once for all models"
    found = json.loads(done.out)
    assert [row["model"] for row in found["models"]] == ["tiny-3", "tiny-2", "tiny-1"]
    assert found["too_large"] == ["tiny-20"]
    asked = Question(
        model=str(config_json),
        hardware="rtx-4090",
        batch_size=1,
        seq_len=64,
        grad_accum=1,
        precision="bf16",
        clipping=True,
        device_memory="800KiB",
        host_memory="1MiB",
        disk_size="1MiB",
    )
    config_json.write_text(json.dumps({**CONFIG, "num_hidden_layers": MIDDLE}))
    for way, changes in (("full", {}), ("8-bit states", {"optim": "adamw_8bit"}), ("LoRA", {"lora": 16})):
        alone = answer(dataclasses.replace(asked, **changes)).found.simulation.step_s
        assert found["models"][1]["ways"][way]["predicted_step_s"] == alone
    for row in found["models"]:
        assert [*row["ways"]] == ["full", "8-bit states", "LoRA", "QLoRA"]
        for way in row["ways"].values():
            assert way["predicted_tokens_per_s"] == pytest.approx(64 / way["predicted_step_s"])
            assert way["reserved_bytes"]["device"] <= 800 * 2**10
            assert way["activations"]


@pytest.mark.usefixtures("tiny")
def test_as_a_table_for_a_machine_of_a_file(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    known_hardware("a100-40gb").save(tmp_path / "hardware.json")
    monkeypatch.setattr(fit, "MOST", 1)
    done = command("plan", "--fit", "--hardware", tmp_path / "hardware.json", *SMALL_BUDGETS)
    assert done.status == 0, done.err
    first, _, heads, *rows = done.out.splitlines()
    assert "predicted for 1 x 64 tokens in bf16" in first
    assert heads.split() == ["model", "parameters", "full", "8-bit", "states", "LoRA", "QLoRA"]
    assert rows[0].startswith("tiny-3")
    assert "too large: tiny-20" in done.out
    assert "tiny-3" in done.err, "what takes seconds is named before"


@pytest.mark.usefixtures("tiny")
def test_only_models_that_are_fast_enough(command: Run):
    asked = ("plan", "--fit", "--hardware", "rtx-4090", *SMALL_BUDGETS, "--json")
    rates = {
        row["model"]: max(way["predicted_tokens_per_s"] for way in row["ways"].values())
        for row in json.loads(command(*asked).out)["models"]
    }
    enough = (rates["tiny-2"] + rates["tiny-1"]) / 2
    found = json.loads(command(*asked, "--at-least", enough).out)
    assert [row["model"] for row in found["models"]] == ["tiny-1"]
    assert [row["model"] for row in found["too_slow"]] == ["tiny-3", "tiny-2"]


def test_a_cell_says_why_there_is_no_plan():
    needs = PlanInfeasibleError("too small", {"device": 3 * 2**30}, {"device": 2**31})
    assert fit.cell_text(needs) == "needs device 2.00 GiB"
    assert fit.cell_text(ConfigError("experts are no linear layers")) == "not possible"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "expected either --model or --fit, but got neither"),
        (("--fit", "--model", "config.json"), "expected either --model or --fit, but got both"),
        (("--fit", "--html", "plan.html"), "--fit: expected it without --out and --html"),
        (("--fit", "--out", "plan.json"), "--fit: expected it without --out and --html"),
        (("--model", "config.json", "--at-least", "5"), "--at-least: expected it with --fit"),
        (("--fit", "--device-memory", "0"), "--device-memory: expected more than 0 bytes"),
        (("--fit", "--device-memory", "1KiB"), "expected a machine that trains one of 4 known models, but even tiny-1"),
        (("--fit", "--precision", "fp8"), "--precision: expected one of fp32, bf16, pure_bf16"),
    ],
)
@pytest.mark.usefixtures("tiny")
def test_bad_input_is_one_message(command: Run, options: tuple[str, ...], message: str):
    done = command("plan", "--hardware", "h100", *options)
    assert (done.status, done.out) == (2, "")
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.mark.usefixtures("tiny")
def test_without_a_machine_there_is_nothing_to_plan_for(command: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OUTCORE_HARDWARE", "none")
    done = command("plan", "--fit")
    assert (done.status, done.out) == (2, "")
    assert "--hardware: expected a machine to plan for, but none is named" in done.err


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-8B", "mistralai/Mixtral-8x7B-v0.1", "openai/gpt-oss-20b"],
)
def test_shapes_have_the_parameters_that_are_written_down(name: str):
    known = {each.name: each for each in known_models.known_models()}
    model = build_model(known[name].source, "bf16")
    assert sum(p.numel() for p in model.parameters()) == known[name].parameters


def test_the_largest_come_first():
    counts = [known.parameters for known in known_models.known_models()]
    assert counts == sorted(counts, reverse=True)
    assert len({known.name for known in known_models.known_models()}) == len(counts)
