"""A user's mistake: status 2, one message of what was expected, what was found and where, and nothing left behind.

Every case goes through the real command line. Each ``{...}`` in its arguments is a file that ``world`` makes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from outcore.command.train.model.byte_tokenizer import byte_tokenizer
from outcore.command.train.output import folder as output

from .conftest import CONFIG, Run, replaced, write_json, write_jsonl

BASE = {"--model": "{config}", "--data": "{text}", "--out": "{new}", "--steps": "2", "--seq-len": "32"}

Case = tuple[str, dict[str, str | None], str]  # arguments added to BASE (None: removed), and the message


def option(name: str, value: str, says: str) -> Case:
    return f"{name} {value}", {f"--{name}": value}, says


OPTIONS: list[Case] = [
    ("no model", {"--model": None}, "expected --model, --data and --out, but got no --model"),
    ("no data", {"--data": None}, "got no --data"),
    ("no out", {"--out": None}, "got no --out"),
    option("steps", "0", "--steps: expected a number of at least 1, but got .?0"),
    option("steps", "1.5", "--steps: expected a valid integer, but got"),
    option("lr", "1e-5e", "--lr: expected a valid number, but got '1e-5e'"),
    option("epochs", "1", "--epochs|--steps: expected steps or epochs"),
    option("seq-len", "1", "--seq-len: expected a number of at least 2, but got .?1"),
    option("lr", "nan", "--lr: expected a finite number, but got .?nan"),
    option("lr", "inf", "--lr: expected .* but got .?inf"),
    option("max-grad-norm", "-1", "--max-grad-norm: expected .* but got .?-1"),
    option("precision", "fp8", "--precision: expected 'fp32', 'bf16', 'pure_bf16' or 'fp16', but got 'fp8'"),
    option("save-every", "0", "--save-every: expected a number above 0"),
    option("keep", "2", "--keep: expected checkpoints to be saved"),
    option("device", "tpu", "--device: expected 'cpu' or 'cuda' .* but got 'tpu'"),
    option("device-memory", "20 giraffes", "--device-memory: expected bytes .* but got '20 giraffes'"),
    option("host-memory", "-1", "--host-memory: expected bytes"),
    option(
        "device-memory",
        "1KiB",
        "device +budget 1.00 KiB: too little(.|\n)*as options: --device-memory [0-9.]+KiB --host",
    ),
    option("disk", "{missing}", "--disk: expected a folder that is there, but '.*missing' is not"),
    option("disk", "{text}", "--disk: expected a folder that is there, but '.*text.txt' is a file"),
    option("disk", "/dev/shm", "--disk: .*expected a (drive|folder)"),  # memory rather than a drive, where it exists
    option("set", "optim=ademamix", "--set optim: expected one of .* others, but got 'ademamix'"),
    option("report-to", "tensorbored", "--report-to: expected a tracker that is installed"),
    option("set", "learning_rate", "--set: expected KEY=VALUE, but got 'learning_rate'"),
    option("set", "learning_rat=1", "--set learning_rat: unknown setting .* did you mean 'learning_rate'"),
    option("set", "lora.rr=1", "--set lora.rr: unknown setting 'lora.rr'"),
    option("set", "warmup_steps=many", "--set warmup_steps: expected a valid number, but got 'many'"),
    option("set", "bf16=true", "--set bf16: expected precision fp32"),
    option("set", "deepspeed=ds.json", "deepspeed"),
    option("set", "max_steps=3", "--steps|--set max_steps: expected max_steps to be given once"),
    option("set", "lora.target_modules=[nonsense]", "peft says: .*nonsense"),
    option("set", "eos_token=<nonsense>", "<nonsense>"),
    option("set", "chat_template_path={missing}.jinja", "chat_template_path: expected a file that ends in .jinja"),
    option("set", "chat_template_path={config}", "chat_template_path: expected a file that ends in .jinja"),
    option("set", "assistant_only_loss=true", "assistant_only_loss"),
    (
        "metric that is not measured",
        {"--eval-data": "{text}", "--set": "metric_for_best_model=eval_los"},
        "--set metric_for_best_model: expected one of loss, .* 4 others, but got 'eval_los'; did you mean 'eval_loss'",
    ),
]
YAML: list[Case] = [
    ("missing", {"{missing}.yaml": ""}, "missing.yaml"),
    ("a folder", {"{folder}": ""}, "folder"),
    ("not YAML", {"{yaml:a: [}": ""}, r"line [12]"),
    ("no mapping", {"{yaml:- a}": ""}, "expected .* mapping|settings"),
    ("unknown key", {"{yaml:leaning_rate: 1}": ""}, "did you mean 'learning_rate'"),
    ("a key twice", {"{yaml:lr: 1e-4\nlr: 1e-5}": ""}, "line 2.*found 'lr' again, which stands on line 1"),
    ("wrong type", {"{yaml:packing: 7}": ""}, "packing.*expected a valid boolean, but got 7"),
    ("contradiction", {"{yaml:lr: 1e-4\nlearning_rate: 1e-5}": ""}, "learning_rate to be given once"),
    ("wrong section", {"{yaml:outcore: 7}": ""}, "outcore.*expected a section"),
    ("wrong encoding", {"{latin:latin.yaml}": ""}, "latin.yaml"),
]
PLANS: list[Case] = [
    option("plan", "{missing}", "plan: expected a readable JSON file at '.*missing'"),
    option("plan", "{text}", "plan '.*text.txt': expected a plan as JSON"),
    option("plan", "{other_plan}", "plan: expected the 4 units of this model"),
    option("unit-micro-batches", "0", "--unit-micro-batches: expected a number greater than 0, but got 0"),
    option("unit-micro-batches", "64", "expected at least 64 rows in a micro-batch, .*but per_device_train_batch_size"),
    (
        "pieces of rows without padding",
        {"--unit-micro-batches": "2", "--batch-size": "2", "--packing": "", "--set": "packing_strategy=bfd"},
        "expected batches of padded rows, .*set padding_free=False",
    ),
    option("seq-len", "1000000000000", "--batch-size, --seq-len: expected at most 67,108,864 tokens in a micro-batch"),
    option("batch-size", "4611686018427387904", "but got 147,573,952,589,676,412,928"),
    option("lora", "999999999", "--lora: expected a rank of at most 260, .* but got 999,999,999"),
    option("activations", "moon", "--activations: expected 'host' or 'disk', but got 'moon'"),
    option("activations", "disk", "expected a folder for the disk tier"),
    option("attention", "flash", "--attention 'flash': .*says: .*only possible arguments are .*sdpa"),
    option("attention", "kernels-community/flash-attn", "kernels from the hub are not run"),
    option("attention", "flash_attention_2", "--attention 'flash_attention_2': .*says: .*doesn't seem to be installed"),
    option("attention", "flex_attention", "--attention 'flex_attention': .* has no backward there"),
]
MODELS: list[Case] = [
    option("model", "{missing}", "--model '.*missing': expected a directory, a config.json, or"),
    option("model", "someone/unknown-model", "--model 'someone/unknown-model': expected"),
    option("model", "~nobody-here/model", "--model '~nobody-here/model': expected"),
    option("model", "{text}", "--model '.*': expected JSON in text.txt"),
    option("model", "{empty}", "--model '.*': expected JSON"),
    option("model", "{folder}", "--model '.*folder': expected config.json in it, but there is none"),
    option(
        "model",
        '{config:model_type="lama"}',
        "to describe a lama model, but got: .*does not recognize this architecture",
    ),
    option("model", '{config:model_type="t5"}', "expected a causal language model"),
    option("model", "{config:vocab_size=100}", "expected a vocab_size of at least 259"),
    option("model", "{config:num_attention_heads=5}", "expected .* llama model, but got.*number of attention heads"),
    option("model", "{config:hidden_size=null}", "--model '.*'"),
    option("model", "{weights:gone}", "expected weights .* but there are none in"),
    option("model", "{weights:cut}", "--model .*model.safetensors"),
    option("model", "{weights:nan}", "lm_head.weight': expected finite values, but 8,320 of 8,320 are nan or infinite"),
    option("model", "{weights:int8}", "of the model, but 'lm_head.weight' is .* quantized .torch.int8.*; name the"),
    option("model", "{weights:complex}", "lm_head.weight': expected a dtype .*'C64'; complex weights"),
    option("model", "{config:num_hidden_layers=1000000000}", "of 1 to 10,000 layers"),
    option("model", "{config:num_hidden_layers=0}", "of 1 to 10,000 layers.* has num_hidden_layers 0; correct it"),
    option("model", "{config:num_hidden_layers=-3}", "of 1 to 10,000 layers.* has num_hidden_layers -3; correct it"),
    ("no chat template", {"--model": "{untemplated}", "--data": "{chat}"}, "--set chat_template_path=FILE.jinja"),
    option("set", "optim=adamw_torch_4bit", "--set optim: expected one of .*did you mean 'adamw_torch_8bit'"),
    option("device", "cuda", "--device: expected a GPU for 'cuda', but .*this torch .[0-9.]+"),
    option("model", "{weights:other}", "expected .*lm_head.weight.* shape"),
]
DATA: list[Case] = [
    option("data", "{missing}", "--data '.*missing': expected a file or a directory"),
    option("data", "someone/unknown-data", "--data 'someone/unknown-data': expected"),
    option("data", "~nobody-here/a.txt", "--data '~nobody-here/a.txt': expected a file or a directory"),
    option("data", "{empty}", "--data '.*empty.jsonl': expected at least one row"),
    option("data", "{folder}", "--data '.*folder': expected"),
    option("data", "{config}", "--data '.*config.json': expected"),
    option("data", '{rows:{"text": "a"}|{"text": }}', "rows.jsonl', line 2: expected"),
    option("data", '{rows:{"text": "a"}|{"txt": "b"}}', "rows.jsonl', line 2: expected"),
    option("data", '{rows:{"sentence": "a"}}', "line 1: expected .*text"),
    option("data", '{rows:{"text": 3}}', "line 1: expected 'text' to be a string, but got a number"),
    option("data", '{rows:["a"]}', "line 1: expected"),
    option("data", '{rows:{"messages": [{"content": "a"}]}}', "line 1.*role"),
    option("data", '{rows:{"prompt": "a"}}', "line 1.*completion"),
    option("data", "{latin:latin.jsonl}", "latin.jsonl.*UTF-8"),
    option("eval-data", "{missing}", "--eval-data '.*missing': expected"),
    option("set", "completion_only_loss=true", "completion_only_loss: expected rows of prompt and completion, .* text"),
    (
        "rows longer than the table of positions",
        {"--model": "{short}"},
        "--seq-len: expected at most 16, since 'gpt2' has a table of 16 positions, but got 32; set --seq-len 16",
    ),
    ("nothing left to learn", {"--data": "{long_prompts}"}, "--data: expected rows with something to learn.*--seq-len"),
    (
        "other kind to evaluate on",
        {"--eval-data": '{rows:{"prompt": "a", "completion": "b"}}'},
        "--eval-data '.*rows.jsonl': expected rows of text, as in --data, but got prompt_completion",
    ),
]
OUTPUTS: list[Case] = [
    option("out", "{folder:precious}", "--out: expected an empty or a new folder, but '.*' holds 'precious'"),
    option("out", "{text}", "--out: expected a folder .*, but '.*text.txt' is a file"),
    option("out", "{text}/below", "--out: expected a folder .*, but '.*text.txt' is a file"),
    (
        "out, a name too long",
        {"--out": "{new}" + 300 * "x"},
        "--out: expected a folder to write to, but '.*x' cannot be written to: File name too long",
    ),
    (
        "out, a name too long in a folder that is there",
        {"--out": "{folder}/" + 300 * "x"},
        "--out: expected a folder to write to, but '.*x' cannot be written to: File name too long",
    ),
    (
        "out in the folder of the data",
        {"--data": "{folder:a.txt}", "--out": "folder/deep/run"},
        "--out: expected a folder outside of --data '.*folder', .* but got 'folder/deep/run'",
    ),
    (
        "out in the folder of the evaluation data, to resume",
        {"--eval-data": "{folder:a.txt}", "--out": "folder", "--resume": ""},
        "--out: expected a folder outside of --eval-data '.*folder', .* but got 'folder'",
    ),
    option("out", "/proc/outcore/run", "--out: expected"),
    option("out", "{dangling}", "--out: expected a folder to write to, but '.*dangling'"),
    ("resume from nothing", {"--resume": ""}, "--resume: expected a complete checkpoint in '.*new', but there is none"),
    (
        "resume from an incomplete one",
        {"--resume": "", "--out": "{folder:checkpoint-3/config.json}"},
        "only checkpoint-3, which is incomplete",
    ),
]
TRACES: list[Case] = [
    option("trace", "{missing}/trace.json", "--trace: expected a folder that is there, but '.*missing' is not"),
    option("trace", "{text}/trace.json", "--trace: expected a folder that is there, but '.*text.txt' is a file"),
    option("trace", "{folder}", "--trace: expected a file that exists or can be made, but '.*folder' is a folder"),
    option("trace", "/", "^outcore: --trace: expected a file that exists .*, but '/' is a folder; name another$"),
    option("trace", "/dev/null", "--trace: expected a file that exists or can be made, but '/dev/null' is not a file"),
    option("trace", "{text}", "--trace: expected a new file or an older trace .*, but '.*text.txt' holds something"),
    option("trace", "{new}/plan.json", "--trace: expected a file of its own, but the run itself writes '.*plan.json'"),
    option("trace", "{missing}" + 300 * "x", "--trace: expected a file to write to, but .* File name too long"),
    option("trace", "/proc/trace.json", "--trace: expected a file to write to, but '/proc/trace.json' cannot be"),
]
USAGE: list[tuple[str, list[str], str]] = [
    ("unknown option", ["--step", "3"], "--steps"),
    ("no value", ["--out"], "--out"),
]


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights") / "model"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG)).save_pretrained(folder)
    return folder


class World:
    """Makes the files that the arguments name: ``{name}`` or ``{name:how}``."""

    def __init__(self, folder: Path, weights: Path) -> None:
        self._folder, self._weights = folder, weights

    def __call__(self, argument: str) -> str:
        match = re.search(r"\{(\w+)(?::(.*))?\}", argument, flags=re.DOTALL)
        if match is None:
            return argument
        made = getattr(self, match[1])(*(() if match[2] is None else (match[2],)))
        return argument[: match.start()] + str(made) + argument[match.end() :]

    def new(self) -> Path:
        return self._folder / "deep" / "new"

    def missing(self) -> Path:
        return self._folder / "missing"

    def text(self) -> Path:
        return self._folder / "text.txt"

    def config(self, change: str = "vocab_size=260") -> Path:
        key, value = change.split("=")
        return write_json(self._folder / "config.json", {**CONFIG, key: json.loads(value)})

    def short(self) -> Path:
        config = {"model_type": "gpt2", "n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2}
        return write_json(self._folder / "short.json", config)

    def empty(self) -> Path:
        return self._file("empty.jsonl", "")

    def rows(self, lines: str) -> Path:
        return self._file("rows.jsonl", lines.replace("|", "\n"))

    def long_prompts(self) -> Path:
        return write_jsonl(self._folder / "long.jsonl", [{"prompt": "a" * 100, "completion": "b"}])

    def yaml(self, lines: str) -> Path:
        return self._file("run.yaml", lines)

    def latin(self, name: str) -> Path:
        path = self._folder / name
        path.write_bytes('{"text": "é"}'.encode("latin-1"))
        return path

    def other_plan(self) -> Path:
        units = [{"name": "", "weights": "device", "gradients": "device", "states": "device"}]
        plan = {"precision": "bf16", "units": units, "pools": [], "prefetch_depth": 1}
        return write_json(self._folder / "other.json", plan)

    def folder(self, inside: str | None = None) -> Path:
        made = self._folder / "folder"
        made.mkdir()
        if inside is not None:
            (made / inside).parent.mkdir(exist_ok=True)
            (made / inside).write_text("{}")
        return made

    def dangling(self) -> Path:
        link = self._folder / "dangling"
        link.symlink_to(self._folder / "nowhere" / "deep")
        return link

    def weights(self, change: str) -> Path:
        copy = shutil.copytree(self._weights, self._folder / "model")
        path = copy / "model.safetensors"
        if change == "gone":
            path.unlink()
        elif change == "cut":
            path.write_bytes(path.read_bytes()[:-100])
        else:
            values = {
                "nan": torch.full((260, 32), torch.nan),
                "int8": torch.zeros(260, 32, dtype=torch.int8),
                "complex": torch.zeros(260, 32, dtype=torch.complex64),
                "other": torch.zeros(7, 32),
            }
            save_file({**load_file(path), "lm_head.weight": values[change]}, path, {"format": "pt"})
        return copy

    def untemplated(self) -> Path:
        """A model whose tokenizer has no chat template."""
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = None
        tokenizer.save_pretrained(self._folder)
        return self._folder / "config.json"

    def chat(self) -> Path:
        return self.rows('{"messages": [{"role": "user", "content": "a"}]}')

    def _file(self, name: str, content: str) -> Path:
        (self._folder / name).write_text(content)
        return self._folder / name


@pytest.fixture
def world(tmp_path: Path, config_json: Path, text: Path, weights: Path) -> World:
    return World(tmp_path, weights)


def arguments(changes: dict[str, str | None], fill: Callable[[str], str]) -> list[str]:
    given = {name: value for name, value in {**BASE, **changes}.items() if value is not None}
    return [fill(part) for name, value in given.items() for part in (name, value) if part]


def snapshot(folder: Path) -> dict[Path, Any]:
    return {
        path: path.read_bytes() if path.is_file() and not path.is_symlink() else os.lstat(path).st_mode
        for path in sorted(folder.rglob("*"))
    }


def assert_one_message(outcome: Any, says: str) -> None:
    assert outcome.status == 2, outcome.err
    message = "\n".join(line for line in outcome.err.splitlines() if not line.startswith("note: "))
    assert message.startswith("outcore: "), message
    assert message.count("\noutcore: ") == 0
    assert "Traceback" not in outcome.out + outcome.err
    assert "expected" in message or "unknown setting" in message
    assert re.search(says, message), message
    assert len(message) < 2000


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        pytest.param(changes, says, id=f"{kind}: {name}")
        for kind, cases in {
            "option": OPTIONS, "yaml": YAML, "plan": PLANS, "model": MODELS, "data": DATA, "out": OUTPUTS,
            "trace": TRACES,
        }.items()
        for name, changes, says in cases
    ],
)  # fmt: skip
def test_is_refused(
    command: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: Any, says: str
):
    typed = ["train", *arguments(changes, world)]
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    assert_one_message(command(*typed), says)
    assert snapshot(tmp_path) == before


def test_a_dry_run_finds_what_a_run_would(command: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    before = snapshot(tmp_path)
    typed = arguments({"--trace": "{missing}/trace.json", "--dry-run": ""}, world)
    assert_one_message(command("train", *typed), "--trace: expected a folder that is there")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(("typed", "says"), [pytest.param(a, s, id=name) for name, a, s in USAGE])
def test_wrong_usage(command: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: list[str], says: str):
    monkeypatch.chdir(tmp_path)
    outcome = command("train", *typed)
    assert outcome.status == 2
    assert says in outcome.err
    assert outcome.err.count("Error") == 1
    assert "Traceback" not in outcome.err
    assert not list(tmp_path.iterdir())


def test_a_full_drive(command: Run, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(2**20, 2**20, 2**10))
    before = snapshot(tmp_path)
    typed = arguments({}, world)
    assert_one_message(command("train", *typed), r"--out: expected room for .* but 1\.00 KiB are free")
    assert snapshot(tmp_path) == before


@pytest.fixture
def tiny_drive(tmp_path: Path) -> Iterator[Path]:
    """A file system with room for a few pages only."""
    folder = tmp_path / "drive"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_drive_that_fills_up(command: Run, world: World, tiny_drive: Path):
    """The model fits, but not the data beside it."""
    long = tiny_drive.parent / "long.txt"
    long.write_text("many words " * 50_000)
    typed = arguments({"--out": str(tiny_drive / "run"), "--data": str(long)}, world)
    assert_one_message(command("train", *typed), "No space left on device")
    assert not list(tiny_drive.iterdir())


def test_a_read_only_drive(command: Run, world: World, tiny_drive: Path):
    subprocess.run(["mount", "-o", "remount,ro", str(tiny_drive)], check=True)
    typed = arguments({"--out": str(tiny_drive / "run")}, world)
    assert_one_message(command("train", *typed), "--out: expected a folder to write to, but '.*drive' is not writable")


def test_resuming_with_another_model(command: Run, world: World, tmp_path: Path):
    typed = arguments({"--save-every": "1"}, world)
    assert command("train", *typed).status == 0
    write_json(tmp_path / "config.json", {**CONFIG, "intermediate_size": 64})
    before = snapshot(tmp_path)
    assert_one_message(command(*replaced("train", *typed, "--resume", "--steps", "4")), "checkpoint-2")
    assert snapshot(tmp_path) == before


def test_there_are_enough_cases():
    assert sum(map(len, (OPTIONS, YAML, PLANS, MODELS, DATA, OUTPUTS, USAGE))) >= 80
