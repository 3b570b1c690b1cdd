"""Every example runs, and what the pages about moving and training say agrees with the code."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import nursery
import pytest
import torch
import typer
from accelerate.state import AcceleratorState, GradientState
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, SFTConfig

import outcore
from outcore.command.main import app, main
from outcore.command.train.data.load import load_data
from outcore.command.train.methods import FINE_TUNING
from outcore.command.train.settings.given_settings import Given
from outcore.command.train.settings.run_settings import resolve
from outcore.command.train.settings.schema import SHORT_NAMES
from outcore.integrations.refusals import _ARGUMENTS as REFUSED
from outcore.integrations.transformers import OutcoreMixin

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples"
HOW_TO = ROOT / "docs" / "how-to"
MOVING, TRAIN, AVERAGING = (HOW_TO / name for name in ("moving.md", "train.md", "averaging.md"))
RUNS = ROOT / "docs" / "reference" / "runs.md"
SCRIPTS = sorted(p.name for p in FOLDER.glob("*.py") if "__main__" in p.read_text() and p.name != "plain_loop.py")
SETTINGS = sorted(p.name for p in FOLDER.rglob("*.yaml"))
FROM_NOTHING = [name for name in SETTINGS if "\nmodel:" in (FOLDER / name).read_text()]
CONFIG = FOLDER / "data" / "config.json"
OUTCORE = [sys.executable, "-c", "from outcore.command.main import main; main()"]
TRAINED: dict[str, Path] = {}
COMMAND = typer.main.get_command(app).commands["train"]
OPTIONS = {name for option in COMMAND.params for name in option.opts if name.startswith("--")}


def run(*command: str) -> str:
    """Run from the repository's root, offline, with one thread: other work on the machine must not slow it down."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    done = nursery.run(list(command), cwd=ROOT, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def files() -> list[Path]:
    return sorted(path for path in FOLDER.rglob("*") if "__pycache__" not in path.parts)


def test_there_are_examples_of_each_kind_and_the_list_names_all():
    assert len(SCRIPTS) >= 2
    assert len(FROM_NOTHING) >= 2
    linked = re.findall(r"\]\(([^)]+)\)", (FOLDER / "README.md").read_text())
    assert {*SCRIPTS, *SETTINGS, "plain_loop.py", "notebook.ipynb"} <= set(linked)


@pytest.mark.parametrize("name", SCRIPTS)
def test_script(name: str, tmp_path: Path):
    before = files()
    printed = run(sys.executable, str(FOLDER / name), str(tmp_path))
    first, last = map(float, re.search(r"^loss ([\d.]+) -> ([\d.]+)$", printed, re.MULTILINE).groups())
    assert last < 0.9 * first
    assert re.search(r"^the (model|adapter) loads: ", printed, re.MULTILINE)
    assert any(tmp_path.glob("*/*.safetensors"))
    assert files() == before


def test_cells_of_the_notebook_run_in_order(capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    for cell in json.loads((FOLDER / "notebook.ipynb").read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["losses"][-1] < 0.5 * names["losses"][0]
    assert names["moved"]["h2d"] > 0
    assert "3, 4, 5, 6, 7, 8, 9, 3, 4, 5, 6" in capsys.readouterr().out


@pytest.fixture(scope="module", params=FROM_NOTHING)
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the command's output folder. Tests come in any order, and each file is trained once."""
    if request.param not in TRAINED:
        before = files()
        folder = tmp_path_factory.mktemp("trained") / "out"
        run(*OUTCORE, "train", f"examples/{request.param}", "--out", str(folder))
        assert files() == before
        TRAINED[request.param] = folder
    return TRAINED[request.param]


def test_settings(trained: Path):
    lines = metrics(trained)
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    numbers = set(first_column(RUNS, "in a line of `metrics.jsonl`"))
    sometimes = {"skipped", "predicted_compute_s", "predicted_exposed_s"}
    assert numbers == set(lines[0]) | sometimes, "the page lists every number"
    assert outcore.Plan.load(trained / "plan.json")
    tokenizer = AutoTokenizer.from_pretrained(trained / "model")
    assert tokenizer.chat_template
    model = AutoModelForCausalLM.from_pretrained(trained / "model")
    with torch.no_grad():
        assert model(**tokenizer("A unit is", return_tensors="pt")).logits.isfinite().all()


@pytest.mark.parametrize("trained", ["pretrain_text.yaml"], indirect=True)
def test_pre_training_goes_on_from_a_model(trained: Path, tmp_path: Path):
    run_on("pretrain_text.yaml", trained, tmp_path / "out", "--steps", "2")
    first, last = (metrics(trained)[n]["loss"] for n in (0, -1))
    assert metrics(tmp_path / "out")[0]["loss"] < 1.1 * last < 0.8 * first


@pytest.mark.parametrize("trained", ["sft_messages.yaml"], indirect=True)
def test_preferences_go_on_from_a_model(trained: Path, tmp_path: Path):
    before = files()
    run_on("dpo_preferences.yaml", trained, tmp_path / "out")
    assert files() == before
    lines = metrics(tmp_path / "out")
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    assert lines[-1]["rewards/margins"] > lines[0]["rewards/margins"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def run_on(name: str, trained: Path, out: Path, *more: str) -> None:
    """Run the command that the file's comment gives for an existing model."""
    (command,) = re.findall(r"^# +outcore (.*--model.*)$", (FOLDER / name).read_text(), re.MULTILINE)
    places = {"DIR/model": str(trained / "model"), "DIR2": str(out)}
    before = signal.getsignal(signal.SIGTERM)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.chdir(ROOT)
        patch.setattr(sys, "argv", ["outcore", *(places.get(word, word) for word in shlex.split(command)), *more])
        main()  # in this process, which has already imported all libraries
    signal.signal(signal.SIGTERM, before)
    assert not stop.value.code


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# The pages.


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def rows(page: Path, head: str) -> list[list[str]]:
    """Return the cells of the table that has this text in its head."""
    lines = page.read_text().splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {head}"))
    table: Iterator[str] = iter(lines[start + 2 :])
    found = []
    while (line := next(table, "")).startswith("|"):
        found.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def quoted(cell: str) -> list[str]:
    """Return the names in backquotes, without values assigned to them."""
    return [text.partition("=")[0] for text in re.findall(r"`([^`]+)`", cell)]


def first_column(page: Path, head: str) -> list[str]:
    return [name for cells in rows(page, head) for name in quoted(cells[0])]


def snippets(language: str) -> list[Any]:
    return [
        pytest.param(code, id=f"{page.stem}-{n}")
        for page in sorted(HOW_TO.glob("*.md"))
        for n, code in enumerate(blocks(page, language))
    ]


@pytest.mark.parametrize("code", snippets("python"))
def test_python_compiles(code: str):
    compile(code, "page", "exec")


@pytest.mark.parametrize("text", snippets("yaml"))
def test_settings_resolve(text: str, tmp_path: Path):
    file = tmp_path / "run.yaml"
    file.write_text(text)
    needed = {name: name for name in ("model", "data", "out") if f"{name}:" not in text}
    settings = resolve(Given.read(file, needed, []), FINE_TUNING)
    assert settings.budget.disk


@pytest.mark.parametrize("text", snippets("bash"))
def test_commands_parse(text: str):
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:2] == ["outcore", "train"]:
            context = COMMAND.make_context("train", words[2:])
            assignments = context.params["assignments"] or []
            resolve(Given.read(None, {"model": "m", "data": "d", "out": "o"}, assignments), FINE_TUNING)


@pytest.mark.parametrize("kind", ["text", "prompt_completion", "messages"])
def test_data_is_read(kind: str, tmp_path: Path):
    text, prompt_completion, messages, *_ = blocks(TRAIN, "json")
    texts = {"text": text, "prompt_completion": prompt_completion, "messages": messages}
    (tmp_path / "rows.jsonl").write_text(texts[kind])
    data = load_data([str(tmp_path / "rows.jsonl")], flag="--data", cache=tmp_path / "cache", method=FINE_TUNING)
    assert (data.kind, len(data.rows), data.notices) == (kind, 2, ())


def test_fields_of_trainers_are_spelled_right_and_refused_as_the_page_says():
    known = {field.name for config in (SFTConfig, DPOConfig) for field in fields(config)}
    of_models = {"quantization_config", "load_in_4bit", "load_in_8bit"}
    table = rows(MOVING, "field of `TrainingArguments`")
    names = [name for cells in table for name in quoted(cells[0])]
    assert len(names) == len(set(names))
    assert set(names) - known == of_models
    refused = {name for cells in table for name in quoted(cells[0]) if cells[1].startswith("refused")}
    assert refused - of_models == set(REFUSED)


def test_flags_and_what_they_set():
    for flags, field, _ in rows(TRAIN, "flag, and name in YAML"):
        for option, name in zip(quoted(flags), quoted(field), strict=False):
            flag = option.split()[0]
            short = flag.removeprefix("--").replace("-", "_")
            assert flag in OPTIONS
            if short not in ("eval_data", "lora"):
                assert SHORT_NAMES.get(short, short) == name
    assert OPTIONS <= set(re.findall(r"--[a-z0-9-]+", TRAIN.read_text() + RUNS.read_text()))


def test_arguments_of_the_mixin():
    parameters = inspect.signature(OutcoreMixin.__init__).parameters.values()
    assert first_column(TRAIN, "argument") == [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]


@pytest.mark.parametrize("code", blocks(AVERAGING, "python"), ids=["gathered", "streamed"])
def test_averages_are_those_of_a_loop_without_outcore(code: str):
    without = re.sub(r"model, optimizer = outcore.*", "", code).replace("outcore.gathered(model)", "nullcontext()")
    plain = averaged(without.replace("outcore.named_tensors(model)", "model.state_dict().items()"))
    streamed = averaged(code)
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)


def averaged(code: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    budget = outcore.Budget(device="512KiB", host="4MiB")
    loader = [{"input_ids": row, "labels": row} for row in torch.randint(259, (6, 2, 16))]
    names = {**locals(), "outcore": outcore, "nullcontext": contextlib.nullcontext}
    exec(code, names)
    if "outcore.prepare" in code:
        assert not names["optimizer"].plan.rests_on_device
        outcore.close(model)
    average = names["average"]
    return average if isinstance(average, dict) else average.module.state_dict()


@pytest.fixture
def _accelerate_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Reset accelerate's global states, so that no test sees those of another."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    forget_accelerate()
    yield
    forget_accelerate()


def forget_accelerate() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_accelerate_on_the_cpu")
def test_the_accelerate_loop_ends_with_the_same_weights_without_its_outcore_line(tmp_path: Path):
    (code,) = (code for code in blocks(MOVING, "python") if "Accelerator(" in code)
    (line,) = (line for line in code.splitlines() if "outcore.prepare" in line)
    streamed_line = line.replace('outcore.Budget(disk="/mnt/nvme")', 'budget, device="cpu"')
    assert streamed_line != line
    budget = outcore.Budget(device="512KiB", host="2MiB", disk=tmp_path)
    streamed = accelerated(code.replace(line, streamed_line), budget)
    plain = accelerated(code.replace(line, ""), budget)
    assert all(torch.equal(streamed[name], plain[name]) for name in plain)


def accelerated(code: str, budget: outcore.Budget) -> dict[str, torch.Tensor]:
    """Return the weights after a loop over 10 micro-batches: three windows of three, and a short one."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    loader = DataLoader([{"input_ids": row, "labels": row} for row in torch.randint(259, (20, 16))], batch_size=2)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    exec(code, {k: v for k, v in locals().items() if k not in ("code", "before")})
    after = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not any(torch.equal(after[name], before[name]) for name in before)
    if "outcore.prepare" in code:
        outcore.close(model)
    return after
