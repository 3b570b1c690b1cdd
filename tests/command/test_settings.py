"""Settings of a training run: what a user may set, how it is resolved, and the message for each mistake."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outcore import Budget
from outcore.command.train.methods import FINE_TUNING
from outcore.command.train.settings.description import describe
from outcore.command.train.settings.given_settings import Given
from outcore.command.train.settings.run_settings import RunSettings, resolve
from outcore.core.errors import ConfigError
from outcore.integrations.versions import other_names

from .conftest import CHECKPOINTING

# The trainers' packages are first imported here; their own warnings are not this test's concern.
pytestmark = [pytest.mark.filterwarnings("ignore::DeprecationWarning"), pytest.mark.usefixtures("_in_an_empty_folder")]

JOB = {"model": "org/model", "data": "train.jsonl", "out": "run"}
CONFIG = "job.yaml"


@pytest.fixture
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)


def settle(yaml: str | bytes | None = None, *assignments: str, **flags: object) -> RunSettings:
    """Resolve settings, with flags that give a whole job; a flag that is None is left out."""
    if yaml is not None:
        Path(CONFIG).write_bytes(yaml if isinstance(yaml, bytes) else yaml.encode())
    given = {name: value for name, value in (JOB | flags).items() if value is not None}
    return resolve(Given.read(None if yaml is None else Path(CONFIG), given, assignments), FINE_TUNING)


def refusal(*args: object, **flags: object) -> str:
    """Return the message of a refusal. It is one line, and nothing was written or printed."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.raises(ConfigError) as refused:
        settle(*args, **flags)
    assert sorted(os.listdir()) == ([CONFIG] if args and args[0] is not None else [])
    assert out.getvalue() + err.getvalue() == ""
    message = str(refused.value)
    assert "\n" not in message
    assert len(message) < 600
    return message


class TestFile:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("learning_rate: [1", ["job.yaml, line 1, column 18", "expected YAML", "correct the file"]),
            ("a: b: c\n", ["job.yaml, line 1, column 5: expected YAML, but this is not YAML: mapping values"]),
            ("lr: 1e-4\n\tsteps: 3\n", ["expected YAML", "line 2"]),
            (b"# caf\xe9\nlr: 1\n", ["line 1", "expected text in UTF-8", "0xe9", "save the file"]),
            (b"lr: 1\n\nsteps: 2 # \xff\n", ["line 3", "UTF-8", "0xff"]),
            (b"PK\x03\x04\x00\x00", ["expected YAML"]),
            ("- lr\n- steps\n", ["expected settings such as", "['lr', 'steps']", "write a mapping"]),
            ("just words\n", ["expected settings such as", "'just words'"]),
            ("42\n", ["expected settings such as", "42"]),
            ("lr: 1e-4\nsteps: 3\nlr: 2e-4\n", ["job.yaml, line 3", "found 'lr' again", "stands on line 1"]),
            ("{lr: 1e-4, lr: 1e-4}\n", ["line 1", "found 'lr' again"]),
            ("lora:\n  r: 8\n  r: 16\n", ["line 3", "found 'r' again, which stands on line 2"]),
            ("lr_scheduler_kwargs:\n  a: 1\n  a: 1\n", ["line 3", "found 'a' again, which stands on line 2"]),
            ("1: 2\n", ["job.yaml, line 1: expected the name of a setting, but got 1; put it in quotes"]),
            ("no: 2\n", ["line 1", "expected the name of a setting", "got false"]),
            ("lora: {1: 2}\n", ["line 1", "expected the name of a setting"]),
            ("? [a]\n: 1\n", ["line 1", "name of a setting", "['a']"]),
            ("lr_scheduler_kwargs: {? [a] : 1}\n", ["expected YAML", "unhashable"]),
            ("run_name: !!python/object:os.system x\n", ["expected YAML", "line 1", "python/object"]),
            ("run_name: !!python/object/apply:os.mkdir [made]\n", ["expected YAML", "line 1"]),
            ("run_name: !!int x\n", ["job.yaml, line 1: run_name: expected a value", "read 'x'", "put it in quotes"]),
            ("run_name: !!bool x\n", ["line 1: run_name: expected a value, but YAML cannot read 'x'"]),
            ("run_name: !!timestamp x\n", ["YAML cannot read 'x'"]),
            ("lora: {r: [!!int x]}\n", ["line 1: lora.r", "YAML cannot read a part of it"]),
            ("steps: " + "9" * 5000, ["line 1: steps", "YAML cannot read '999"]),
            ("steps: 0x" + "f" * 5000, ["a number less than", "a number of 20000 bits"]),
            ("run_name: *name\n", ["expected YAML", "undefined alias"]),
            ("a: 1\n---\nb: 2\n", ["expected YAML", "line 2", "document"]),
            ("run_name: &a [*a]\n", ["expected YAML", "recursive"]),
            ("[" * 1000, ["expected YAML", "nested too deeply"]),
            ("# " + "x" * (1 << 20), ["more than 1 MiB", "check the path"]),
        ],
        ids=lambda value: None if isinstance(value, list) else repr(value)[:40],
    )
    def test_broken(self, text: str | bytes, words: list[str]):
        message = refusal(text)
        assert [word for word in words if word not in message] == [], message

    def test_missing(self):
        with pytest.raises(ConfigError, match=r"'no\.yaml': expected a YAML file .* No such file .* check the path"):
            resolve(Given.read(Path("no.yaml"), JOB, []), FINE_TUNING)

    def test_a_folder(self):
        with pytest.raises(ConfigError, match=r"'\.': expected a YAML file .* Is a directory"):
            resolve(Given.read(Path(), JOB, []), FINE_TUNING)

    def test_unreadable(self, monkeypatch):
        def refuse(*_: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        with pytest.raises(ConfigError, match=r"'locked\.yaml': .* Permission denied"):
            resolve(Given.read(Path("locked.yaml"), JOB, []), FINE_TUNING)

    def test_a_name_that_is_none(self):
        with pytest.raises(ConfigError, match="null"):
            resolve(Given.read(Path("a\0b"), JOB, []), FINE_TUNING)

    def test_an_endless_file_is_not_read_to_its_end(self):
        with pytest.raises(ConfigError, match="more than 1 MiB"):
            resolve(Given.read(Path("/dev/zero"), JOB, []), FINE_TUNING)

    def test_is_found_wrong_before_the_trainers_are_imported(self):
        """A typing mistake is reported at once: importing trl takes seconds."""
        code = (
            "import sys\nfrom pathlib import Path\nfrom outcore.command.train.settings.run_settings import Given\n"
            "try: Given.read(Path('no.yaml'), {}, [])\n"
            "except Exception as error: print(type(error).__name__)\n"
            "print('torch' in sys.modules)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["ConfigError", "False"]

    @pytest.mark.parametrize("text", ["", "\n", "# nothing\n", "---\n", "null\n", "~\n"])
    def test_empty(self, text):
        assert settle(text) == settle()

    def test_a_byte_order_mark(self):
        assert settle(b"\xef\xbb\xbfseed: 3\n").training["seed"] == 3

    def test_anchors(self):
        given = (
            "lora: &a {r: 4, bias: all}\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: &b {min_lr: 0}\n"
        )
        settings = settle(given)
        assert settings.lora["bias"] == "all"
        assert settings.training["lr_scheduler_kwargs"] == {"min_lr": 0}

    def test_a_merged_anchor_gives_way(self):
        text = "outcore: &a {precision: fp32, device_memory: 1GiB}\n"
        text += "lora:\n  <<: {r: 4, lora_alpha: 4}\n  r: 8\n"
        settings = settle(text)
        assert (settings.lora["r"], settings.lora["lora_alpha"]) == (8, 4)

    def test_paths_are_relative_to_the_current_directory(self, tmp_path):
        folder = tmp_path / "configs"
        folder.mkdir()
        (folder / CONFIG).write_text("out: run\ndata: ~/train.txt\noutcore: {disk: ~/swap}\n")
        settings = resolve(Given.read(folder / CONFIG, {"model": "m"}, []), FINE_TUNING)
        assert settings.out == Path("run")
        assert settings.data == (os.path.expanduser("~/train.txt"),)
        assert settings.budget.disk == (os.path.expanduser("~/swap"),)


class TestNames:
    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                "learning_rte: 1\n",
                ["job.yaml, line 1: learning_rte", "unknown setting 'learning_rte'", "'learning_rate'"],
            ),
            ("lr: 1\n\nbatchsize: 4\n", ["line 3", "'batch_size'"]),
            ("batch-size: 4\n", ["'batch_size'"]),
            ("LR: 4\n", ["'lr'"]),
            ("warmup_ratio: 0.1\n", ["unknown setting 'warmup_ratio'", "'warmup_steps'"]),
            ("evaluation_strategy: epoch\n", ["'eval_strategy'"]),
            ("max_seq_length: 10\n", ["'max_length'"]),
            ("target_modules: [q]\n", ["'lora.target_modules'"]),
            ("r: 8\n", ["'lora.r'"]),
            ("lora: {learning_rate: 1}\n", ["line 1: lora.learning_rate", "'learning_rate'"]),
            ("lora:\n  r: 8\n  alpha: 4\n", ["line 3: lora.alpha", "'lora.lora_alpha'"]),
            ("outcore:\n  memory: 4\n", ["line 2", "unknown setting 'outcore.memory'", "memory'?"]),
            (
                "state_format: 8bit\n",
                ["unknown setting 'state_format'", "optim says how states are stored", "adamw_8bit"],
            ),
            (
                "xyzzy_q: 4\n",
                ["unknown setting 'xyzzy_q'; use an option", "--help", "a field of trl.SFTConfig", "lora: or outcore:"],
            ),
            ("training: {lr: 1}\n", ["unknown setting 'training'", "trl.SFTConfig"]),
            ("lr_scheduler_kwargs.num_cycles: 3\n", ["give lr_scheduler_kwargs as a whole", "{num_cycles: VALUE}"]),
            ("outcore: 5\n", ["line 1: outcore", "expected a section", "got 5", "indent"]),
            ("outcore:\nlr: 1\n", ["line 1: outcore", "expected a section", "null"]),
            ("lora:\n- r\n", ["line 1: lora", "a section of settings or a rank", "['r']"]),
            ("lora: {}\n", ["a section of settings or a rank", "{}"]),
            ("lora: eight\n", ["line 1: lora", "a valid integer", "'eight'"]),
        ],
    )
    def test_unknown_in_a_file(self, text: str, words: list[str]):
        message = refusal(text)
        assert [word for word in words if word not in message] == [], message

    @pytest.mark.parametrize(
        ("assignment", "words"),
        [
            ("learning_rate", ["--set", "expected KEY=VALUE", "'learning_rate'", "--set learning_rate=1e-4"]),
            ("=3", ["expected KEY=VALUE", "'=3'"]),
            (" = 3", ["expected KEY=VALUE"]),
            ("", ["expected KEY=VALUE", "''"]),
            ("lrate=3", ["--set lrate", "unknown setting 'lrate'"]),
            ("lora.rank=3", ["--set lora.rank", "unknown setting 'lora.rank'"]),
            ("lora={1: 2}", ["--set lora, 1", "unknown setting 'lora.1'"]),
            ("outcore.disk.path=3", ["--set outcore.disk.path", "outcore.disk"]),
            ("outcore=3", ["--set outcore", "expected a section"]),
        ],
    )
    def test_unknown_in_an_assignment(self, assignment: str, words: list[str]):
        message = refusal(None, assignment)
        assert [word for word in words if word not in message] == [], message

    @pytest.mark.parametrize(
        ("flags", "named"),
        [
            ({"model": None}, "no --model;"),
            ({"data": None, "out": None}, "no --data, no --out;"),
            ({"model": None, "data": None, "out": None}, "no --model, no --data, no --out;"),
        ],
    )
    def test_missing(self, flags: dict[str, None], named: str):
        assert named in refusal(**flags)

    @pytest.mark.parametrize(
        ("yaml", "assignments", "flags", "words"),
        [
            ("lr: 1e-4\nlearning_rate: 2e-4\n", [], {}, ["line 2: learning_rate", "0.0002", "0.0001", "line 1: lr"]),
            (None, ["learning_rate=1"], {"lr": 2.0}, ["--set learning_rate", "(--lr)", "remove one"]),
            (None, ["seed=1", "seed=1"], {}, ["--set", "seed once", "seed=1 and seed=1"]),
            ("lora: {r: 8}\nlora.r: 4\n", [], {}, ["lora.r", "8", "4"]),
            ("precision: fp32\noutcore: {precision: bf16}\n", [], {}, ["'fp32'", "'bf16'"]),
            ("out: a\noutput_dir: b\n", [], {"out": None}, ["line 2: output_dir", "'a'", "'b'"]),
            (None, ["lora={r: 4}"], {"lora": 8}, ["--set lora, r", "(--lora)"]),
        ],
    )
    def test_twice(self, yaml, assignments, flags, words):
        message = refusal(yaml, *assignments, **flags)
        assert [word for word in words if word not in message] == [], message

    def test_twice_the_same_is_no_contradiction(self):
        assert settle(None, "learning_rate=0.0001", lr=1e-4).training["learning_rate"] == 1e-4

    def test_the_command_line_goes_over_the_file(self):
        text = "lr: 1e-4\nsteps: 7\nlora: {r: 4, bias: all}\nmodel: other\noutcore: {disk: /a, host_memory: 1GiB}\n"
        settings = settle(text, "outcore.disk=/b", "lora.r=16", lr=2e-4)
        assert settings.training["learning_rate"] == 2e-4
        assert settings.training["max_steps"] == 7
        assert (settings.lora["r"], settings.lora["bias"]) == (16, "all")
        assert settings.model == "org/model"
        assert settings.budget == Budget(host="1GiB", disk="/b")

    def test_data_may_be_a_list(self):
        assert settle("data: [a, b]\n", data=None).data == ("a", "b")
        assert settle("data: [a, b]\n", data=["c"]).data == ("c",)

    def test_a_length_on_the_command_line_replaces_the_other_kind(self):
        settings = settle("steps: 100\n", epochs=2)
        assert "max_steps" not in settings.training
        assert settings.training["num_train_epochs"] == 2


class TestValues:
    @pytest.mark.parametrize(
        ("flags", "words"),
        [
            ({"steps": 0}, ["--steps: expected a number of at least 1, but got 0"]),
            ({"steps": -1}, ["--steps", "got -1"]),
            ({"steps": 2.5}, ["--steps", "a valid integer", "got 2.5"]),
            ({"steps": True}, ["--steps", "a valid integer", "got true"]),
            ({"steps": 10**40}, ["--steps", "a number less than", "bits"]),
            ({"grace": "2:00"}, ["--grace", "a valid number", "got '2:00'"]),
            ({"epochs": 0.0}, ["--epochs: expected a number above 0, but got 0.0"]),
            ({"epochs": float("nan")}, ["--epochs: expected a finite number, but got nan"]),
            ({"epochs": float("inf")}, ["--epochs: expected a finite number, but got inf"]),
            ({"batch_size": 0}, ["--batch-size", "at least 1", "leave it out for 8"]),
            ({"grad_accum": 0}, ["--grad-accum", "at least 1"]),
            ({"seq_len": 1}, ["--seq-len", "at least 2", "leave it out for 1024"]),
            ({"lr": 0.0}, ["--lr: expected a number above 0, but got 0.0", "leave it out for 2e-05"]),
            ({"lr": -1e-4}, ["--lr", "-0.0001"]),
            ({"lr": float("nan")}, ["--lr", "nan"]),
            ({"lr": "fast"}, ["--lr", "'fast'"]),
            ({"max_grad_norm": -0.1}, ["--max-grad-norm", "at least 0"]),
            ({"max_grad_norm": float("inf")}, ["--max-grad-norm", "inf"]),
            ({"precision": "fp1"}, ["--precision", "'fp32', 'bf16', 'pure_bf16' or 'fp16'", "'fp1'"]),
            ({"precision": "fp16", "device": "cpu"}, ["--precision", "an accelerator for fp16", "take bf16"]),
            ({"save_every": 0}, ["--save-every", "above 0"]),
            ({"keep": 0, "save_every": 2}, ["--keep", "at least 1"]),
            ({"seed": -1}, ["--seed", "at least 0"]),
            ({"seed": 2**32}, ["--seed", "at most 4294967295"]),
            ({"lora": 0}, ["--lora: expected a number of at least 1, but got 0"]),
            ({"lora": -8}, ["--lora", "-8"]),
            ({"model": ""}, ["--model", "a name or a path", "''"]),
            ({"data": " "}, ["--data", "a name or a path"]),
            ({"data": []}, ["--data", "a name or a path, or a list of these"]),
            ({"data": ["a", "b:2"]}, ["--data 'a'", "expected a weight, as 'b' has one", "give all of them a weight"]),
            ({"data": ["a:0"]}, ["--data 'a:0'", "a weight above 0 after the colon, but got '0'"]),
            ({"data": ["a:nan"]}, ["a weight above 0 after the colon, but got 'nan'"]),
            ({"out": "a\0b"}, ["--out", "a name or a path"]),
            ({"report_to": "wandbb"}, ["--report-to", "'wandbb'", "installed"]),
            ({"report_to": "clearml"}, ["--report-to", "installed", "'clearml'"]),
            ({"device_memory": "20 bananas"}, ["--device-memory: expected bytes", "'20 bananas'", "GiB"]),
            ({"device_memory": -1}, ["--device-memory", "-1"]),
            ({"host_memory": "nan"}, ["--host-memory", "'nan'"]),
            ({"host_memory": 1.5}, ["--host-memory: expected bytes", "1.5"]),
            ({"disk": ""}, ["--disk: expected a folder", "''"]),
            ({"disk": []}, ["--disk: ", "empty list"]),
            ({"disk": ["/a", "/a/"]}, ["--disk: ", "named twice"]),
            ({"disk": [3]}, ["--disk", "a valid string", "[3]"]),
            ({"plan": ""}, ["--plan"]),
        ],
        ids=str,
    )
    def test_wrong_flag(self, flags: dict[str, object], words: list[str]):
        message = refusal(**flags)
        assert [word for word in words if word not in message] == [], message

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            (
                "lr: fast\n",
                ["job.yaml, line 1: lr: expected a valid number, but got 'fast'", "leave it out for 2e-05"],
            ),
            ("\nlr:\n", ["line 2: lr", "got null"]),
            ("lr: [1]\n", ["a valid number", "[1]"]),
            ("lr: .nan\n", ["number, but got nan"]),
            ("lr: 1e999\n", ["a finite number, but got inf"]),
            ("lr: true\n", ["a valid number", "got true"]),
            ("steps: 1.5\n", ["a valid integer", "1.5"]),
            ("steps: '12x'\n", ["a valid integer", "'12x'"]),
            ("steps: 2024-01-01\n", ["a valid integer", "got '2024-01-01'"]),
            ("lr: 1:30\n", ["a valid number", "got '1:30'"]),  # YAML 1.1: sexagesimal, 90
            ("lr: 1:30.5\n", ["a valid number", "got '1:30.5'"]),
            ("packing: maybe\n", ["a valid boolean", "'maybe'"]),
            ("packing_strategy: bfdd\n", ["one of bfd, bfd_split, wrapped", "'bfdd'", "did you mean 'bfd'?"]),
            ("optim: adamw\n", ["line 1: optim", "did you mean 'adamw_"]),
            ("lr_scheduler_type: cosin\n", ["cosine", "cosin is not a valid"]),
            ("logging_strategy: sometimes\n", ["TRL", "'no', 'steps', 'epoch'"]),
            ("loss_type: mse\n", ["one of nll, dft, chunked_nll"]),
            ("neftune_noise_alpha: -1\n", ["above 0"]),
            ("label_smoothing_factor: 2\n", ["at most 1"]),
            ("dataloader_num_workers: -1\n", ["at least 0"]),
            ("logging_steps: -1\n", ["above 0"]),
            ("lora: {r: 2, lora_alpha: -1}\n", ["line 1: lora.lora_alpha", "at least 1"]),
            ("lora: {r: 2, lora_dropout: 2}\n", ["line 1: lora.lora_dropout", "at most 1"]),
            ("log_level: loud\n", ["debug, ", "leave it out for 'passive'"]),
            ("pad_to_multiple_of: 0\n", ["at least 1"]),
            ("run_name: [7]\n", ["line 1: run_name", "a valid string", "got [7]"]),
            ("model: null\n", ["line 1: model", "a valid string", "got null"]),
            ("model: ''\n", ["line 1: model", "a name or a path", "got ''"]),
            ("lr_scheduler_kwargs: [1]\n", ["a valid dictionary", "[1]"]),
            ("lr_scheduler_kwargs: {1: 2}\n", ["line 1: lr_scheduler_kwargs", "transformers"]),
            ("label_names: a\n", ["a valid list", "'a'"]),
            ("label_names: [a, 1]\n", ["a valid string", "['a', 1]"]),
            ("adam_beta2: 1\n", ["line 1: adam_beta2", "torch", "beta parameter at index 1"]),
            ("weight_decay: -1\n", ["at least 0"]),
            ("warmup_steps: -1\n", ["line 1: warmup_steps", "TRL", "warmup_steps"]),
            ("save_steps: 0\n", ["above 0"]),
            ("lora: {r: 0}\n", ["line 1: lora.r", "at least 1"]),
            ("lora: {bias: some}\n", ["'none', 'all' or 'lora_only'", "'some'"]),
            ("lora: {init_lora_weights: pissa_niter_x}\n", ["a valid boolean", "pissa"]),
            ("lora: {layer_replication: [[1]]}\n", ["Field required", "[[1]]"]),
            ("lora: {eva_config: {rhoo: 2}}\n", ["Unexpected keyword argument 'rhoo'"]),
            ("outcore: {resume: maybe}\n", ["outcore.resume", "a valid boolean or 'auto'"]),
            ("outcore: {precision: fp64}\n", ["'fp32', 'bf16', 'pure_bf16' or 'fp16'"]),
            ("outcore: {device_memory: 1.5}\n", ["line 1: outcore.device_memory: expected bytes", "1.5"]),
            ("outcore: {device_memory: 5 PiB}\n", ["'5 PiB'", "TiB"]),
            ("outcore: {device: tpu}\n", ["outcore.device", "cpu", "'tpu'"]),
            ("outcore: {device: ''}\n", ["outcore.device", "''"]),
            ("outcore: {disk: {a: 1}}\n", ["outcore.disk", "a valid list"]),
        ],
        ids=repr,
    )
    def test_wrong_in_a_file(self, text: str, words: list[str]):
        message = refusal(text)
        assert [word for word in words if word not in message] == [], message

    @pytest.mark.parametrize(
        ("assignment", "words"),
        [
            ("lr=", ["--set lr: expected a valid number, but got null"]),
            ("lr=fast", ["--set lr", "'fast'"]),
            ("packing=2", ["--set packing", "a valid boolean"]),
            ("lora.r=x", ["--set lora.r", "'x'"]),
            ("lora=null", ["--set lora", "a section of settings or a rank"]),
            ("lora={r: x}", ["--set lora, r", "'x'"]),
            ("outcore.device_memory=lots", ["--set outcore.device_memory: expected bytes"]),
            ("label_names=[a", ["--set label_names", "'[a'"]),
            ("lr=!!bool x", ["--set lr", "'!!bool x'"]),
            ("model=", ["--set model", "got null"]),
        ],
    )
    def test_wrong_assignment(self, assignment: str, words: list[str]):
        message = refusal(None, assignment, **({"model": None} if assignment == "model=" else {}))
        assert [word for word in words if word not in message] == [], message

    @pytest.mark.parametrize(
        ("text", "name", "value"),
        [
            ("learning_rate: 1e-5\n", "learning_rate", 1e-5),
            ("learning_rate: .5\n", "learning_rate", 0.5),
            ("seed: 0x10\n", "seed", 16),
            ("seed: 1_000\n", "seed", 1000),
            ("lr: '0.5'\n", "learning_rate", 0.5),
            ("steps: 3.0\n", "max_steps", 3),
            ("steps: 010\n", "max_steps", 10),  # YAML 1.1: octal, 8
            ("steps: '30'\n", "max_steps", 30),
            ("epochs: 2\n", "num_train_epochs", 2),
            ("seq_len: null\n", "max_length", None),
            ("seq_len: none\n", "max_length", None),
            ("packing: no\n", "packing", False),
            ("packing: 'True'\n", "packing", True),
            ("logging_strategy: no\n", "logging_strategy", "no"),
            ("logging_strategy: 'no'\n", "logging_strategy", "no"),
            ("include_num_input_tokens_seen: true\n", "include_num_input_tokens_seen", True),
            ("pad_to_multiple_of: 8\n", "pad_to_multiple_of", 8),
            ("pad_to_multiple_of: auto\n", "pad_to_multiple_of", "auto"),
            ("report_to: [none]\n", "report_to", ["none"]),
            ("gradient_checkpointing: true\n", CHECKPOINTING, True),
            ("lr_scheduler_kwargs: '{\"num_cycles\": 2}'\n", "lr_scheduler_kwargs", '{"num_cycles": 2}'),
            ("liger_kernel_config: {rope: yes}\n", "liger_kernel_config", {"rope": True}),
            ("hub_strategy: every_save\n", "hub_strategy", "every_save"),
            ("do_train: false\n", "do_train", False),
            ("eval_strategy: no\n", "eval_strategy", "no"),
            ("load_best_model_at_end: false\n", "load_best_model_at_end", False),
            ("steps: 1e3\n", "max_steps", 1000),
            ("run_name: 7\n", "run_name", "7"),
            ("run_name: no\n", "run_name", "no"),
            ("run_name: 2024-01-01\n", "run_name", "2024-01-01"),
            ("run_name: 2024-13-45\n", "run_name", "2024-13-45"),
            ("lr_scheduler_kwargs: {num_cycles: 1e0}\n", "lr_scheduler_kwargs", {"num_cycles": 1.0}),
        ],
        ids=repr,
    )
    def test_right(self, text: str, name: str, value: object):
        if name == "lr_scheduler_kwargs":
            text += "lr_scheduler_type: cosine_with_restarts\n"
        got = settle(text).training[name]
        assert got == value
        assert type(got) is type(value)

    @pytest.mark.parametrize(
        ("assignment", "name", "value"),
        [
            ("run_name=7", "run_name", "7"),
            ("run_name=no", "run_name", "no"),
            ("run_name='a b'", "run_name", "a b"),
            ("run_name=a=b", "run_name", "a=b"),
            ("run_name=[a", "run_name", "[a"),
            ("run_name=a: b", "run_name", "a: b"),
            ("run_name=2024-01-01", "run_name", "2024-01-01"),
            ("run_name=null", "run_name", None),
            ("logging_strategy=no", "logging_strategy", "no"),
            ("label_names=[a, b]", "label_names", ["a", "b"]),
            ("lr=1e-3", "learning_rate", 1e-3),
            ("packing=false", "packing", False),
        ],
    )
    def test_right_assignment(self, assignment: str, name: str, value: object):
        assert settle(None, assignment).training[name] == value


class TestContradictions:
    @pytest.mark.parametrize(
        ("yaml", "flags", "words"),
        [
            (None, {"steps": 3, "epochs": 1.0}, ["--steps", "steps or epochs", "(--epochs)", "remove one"]),
            ("max_steps: 3\nnum_train_epochs: 3\n", {}, ["line 1: max_steps", "line 2: num_train_epochs"]),
            (None, {"keep": 2}, ["--keep", "--save-every"]),
            ("save_strategy: no\nkeep: 2\n", {}, ["line 2: keep", "--save-every"]),
            ("save_strategy: epoch\n", {"save_every": 3}, ["--save-every", "save_strategy steps", "'epoch'"]),
            ("logging_strategy: epoch\nlogging_steps: 3\n", {}, ["logging_strategy steps"]),
            ("eval_steps: 5\n", {}, ["line 1: eval_steps", "--eval-data"]),
            ("eval_strategy: epoch\n", {}, ["line 1: eval_strategy", "--eval-data"]),
            ("eval_on_start: true\n", {}, ["--eval-data"]),
            ("load_best_model_at_end: true\n", {}, ["line 1: load_best_model_at_end", "--eval-data"]),
            ("eval_strategy: no\n", {"eval_data": "e"}, ["--eval-data", "eval_strategy no", "line 1"]),
            ("eval_strategy: steps\n", {"eval_data": "e"}, ["line 1: eval_strategy", "eval_steps", "got none"]),
            (
                "eval_strategy: epoch\neval_steps: 3\n",
                {"eval_data": "e"},
                ["line 2: eval_steps", "eval_strategy steps"],
            ),
            ("load_best_model_at_end: true\n", {"eval_data": "e"}, ["line 1: load_best_model_at_end", "match"]),
            (
                "metric_for_best_model: eval_mean_token_acuracy\n",
                {"eval_data": "e"},
                ["line 1: metric_for_best_model", "one of loss, entropy", "did you mean 'eval_mean_token_accuracy'?"],
            ),
            (
                "metric_for_best_model: eval_eval_loss\n",
                {"eval_data": "e"},
                ["one of loss, entropy", "4 others, but got 'eval_eval_loss'"],
            ),
            (
                "metric_for_best_model: epoch\n",
                {"eval_data": "e"},
                ["one of loss, entropy", "4 others, but got 'epoch'"],
            ),
            (
                "load_best_model_at_end: true\nsave_every: 3\neval_steps: 2\n",
                {"eval_data": "e"},
                ["line 1", "round multiple"],
            ),
            ("lr_scheduler_type: reduce_lr_on_plateau\n", {}, ["TRL", "eval strategy"]),
            ("lr_scheduler_type: cosine_with_min_lr\n", {}, ["line 1: lr_scheduler_type", "transformers", "min_lr"]),
            ("lr_scheduler_kwargs: {speed: 3}\n", {}, ["line 1: lr_scheduler_kwargs", "speed", "change or leave out"]),
            ("lr_scheduler_kwargs: '{x'\n", {}, ["line 1: lr_scheduler_kwargs", "TRL accepts"]),
            ("dataloader_prefetch_factor: 2\n", {}, ["line 1: dataloader_prefetch_factor", "dataloader_num_workers"]),
            ("accelerator_config: {splits: 3}\n", {}, ["line 1: accelerator_config", "splits"]),
            (
                "seed: 1\nproject: a\nlr: 1\naccelerator_config: {splits: 3}\n",
                {},
                ["line 4: accelerator_config: expected"],
            ),
            ("accelerator_config: missing.json\n", {}, ["line 1: accelerator_config", "missing.json"]),
            ("logging_steps: 1.5\n", {}, ["line 1: logging_steps", "integer"]),
            ("debug: everything\n", {}, ["line 1: debug", "everything"]),
            ("bf16: true\n", {}, ["line 1: bf16", "precision fp32", "bf16, the default", "leave bf16 out"]),
            ("bf16: true\n", {"precision": "pure_bf16"}, ["pure_bf16 (--precision)"]),
            ("fp16: true\n", {"precision": "fp32"}, ["line 1: fp16", "--precision"]),
            ("bf16_full_eval: true\n", {"eval_data": "e"}, ["line 1: bf16_full_eval", "to be off"]),
            ("deepspeed: ds.json\n", {}, ["line 1: deepspeed", "expected deepspeed to be off", "DeepSpeed config"]),
            ("deepspeed: {stage: 3}\n", {}, ["line 1: deepspeed", "to be off"]),
            ("fsdp: full_shard\n", {}, ["line 1: fsdp", "to be off"]),
            ("auto_find_batch_size: true\n", {}, ["line 1: auto_find_batch_size", "to be off"]),
            ("torch_compile: true\n", {}, ["line 1: torch_compile", "to be off"]),
            ("torch_compile_backend: inductor\n", {}, ["torch_compile"]),
            ("activation_offloading: true\n", {}, ["line 1: activation_offloading", "to be off"]),
            ("use_cpu: false\noutcore: {device: cpu}\n", {}, ["outcore.device", "use_cpu", "remove one"]),
            ("lora: {r: 8, task_type: SEQ_CLS}\n", {}, ["lora.task_type", "CAUSAL_LM"]),
            ("lora: {r: 8, inference_mode: true}\n", {}, ["lora.inference_mode", "this command trains"]),
            ("lora: {r: 8, use_dora: true}\n", {}, ["lora.use_dora", "which are not read yet", "OutcoreMixin"]),
            ("lora: {r: 8, init_lora_weights: pissa}\n", {}, ["lora.init_lora_weights", "true, false or gaussian"]),
            ("lora: {r: 8, layers_pattern: h}\n", {}, ["line 1: lora.layers_pattern", "PEFT"]),
            ("lora: {layers_to_transform: 1}\n", {}, ["lora.layers_to_transform", "target_modules"]),
            ("resume_from_checkpoint: here\n", {}, ["line 1: resume_from_checkpoint", "--resume"]),
            ("save_only_model: true\n", {}, ["line 1: save_only_model", "resumed from"]),
            ("ignore_data_skip: true\n", {}, ["line 1: ignore_data_skip", "goes on with the data"]),
            ("hub_token: hf_secret\n", {}, ["line 1: hub_token", "but got a value"]),
            ("do_eval: true\n", {}, ["line 1: do_eval", "--eval-data"]),
            ("push_to_hub: true\n", {}, ["line 1: push_to_hub", "hf upload"]),
            ("hub_model_id: me/mine\n", {}, ["line 1: hub_model_id", "hf upload"]),
            ("model_init_kwargs: {a: 1}\n", {}, ["line 1: model_init_kwargs", "config.json"]),
            ("trust_remote_code: true\n", {}, ["line 1: trust_remote_code"]),
            ("disable_tqdm: false\n", {}, ["line 1: disable_tqdm", "progress bar"]),
        ],
        ids=str,
    )
    def test_refused(self, yaml: str | None, flags: dict[str, object], words: list[str]):
        message = refusal(yaml, **flags)
        assert [word for word in words if word not in message] == [], message

    def test_a_second_gpu(self, monkeypatch):
        """Two GPUs would make transformers use DataParallel: this is refused before the model is looked for."""
        from transformers import TrainingArguments

        monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda _: 2))
        assert "CUDA_VISIBLE_DEVICES" in refusal()

    def test_an_accelerator_that_is_not_the_first(self, monkeypatch):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: SimpleNamespace(type="cuda"))
        message = refusal("outcore: {device: 'cuda:1'}\n")
        assert "line 1: outcore.device: expected one of cpu, cuda, cuda:0, but got 'cuda:1'" in message
        assert settle("outcore: {device: 'cuda:0'}\n").device == "cuda:0"

    def test_a_hidden_folder_among_the_data_is_not_read(self, tmp_path):
        (tmp_path / "data").mkdir()
        assert settle(data="data", out="data/.runs/1").out == Path("data/.runs/1")
        assert settle(data="data", out="data-run").out == Path("data-run")


class TestRun:
    def test_libraries_say_nothing_yet(self, capfd):
        """The run itself passes the libraries' warnings on, once; here warnings are errors."""
        assert settle("pad_token: x\ntruncation_mode: keep_end\n").training["pad_token"] == "x"
        assert capfd.readouterr() == ("", "")

    def test_the_least(self):
        settings = settle()
        assert (settings.model, settings.data, settings.out) == ("org/model", ("train.jsonl",), Path("run"))
        assert (settings.eval_data, settings.lora, settings.plan, settings.device) == (None, None, None, None)
        assert (settings.precision, settings.budget) == ("bf16", Budget())
        assert (settings.resume, settings.dry_run, settings.trace) == (False, False, None)
        assert "packing" not in settings.training
        assert {"max_steps", "num_train_epochs", "output_dir"}.isdisjoint(settings.training)
        assert settings.training["save_strategy"] == "no"
        assert (settings.training["report_to"], settings.training["logging_steps"]) == ("none", 1)
        assert settings.training["bf16"] is False

    def test_all_flags(self):
        settings = settle(
            steps=3, batch_size=2, grad_accum=4, seq_len=64, lr=1e-3, max_grad_norm=0.5, precision="fp32",
            packing=True, lora=4, eval_data="e.jsonl", save_every=2, keep=1, seed=7, report_to="none",
            device_memory="1GiB", host_memory=2**31, disk=["/a", "/b"], plan=Path("plan.json"), resume=True,
            dry_run=True, out=Path("run"),
        )  # fmt: skip
        expected = {
            "max_steps": 3, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
            "gradient_accumulation_steps": 4, "max_length": 64, "learning_rate": 1e-3, "max_grad_norm": 0.5,
            "packing": True, "eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2,
            "save_total_limit": 1, "seed": 7, "report_to": "none",
        }  # fmt: skip
        assert expected.items() <= settings.training.items()
        assert (settings.precision, settings.eval_data, settings.plan) == ("fp32", ("e.jsonl",), Path("plan.json"))
        assert settings.budget == Budget(device="1GiB", host="2GiB", disk=["/a", "/b"])
        assert settings.resume
        assert settings.dry_run

    @pytest.mark.parametrize(
        ("text", "assignments", "flags"),
        [
            (None, (), {"trace": Path("t.json")}),
            ("trace: t.json\n", (), {}),
            ("outcore: {trace: t.json}\n", (), {}),
            ("outcore: {trace: other.json}\n", ("outcore.trace=t.json",), {}),
            (None, ("trace=t.json",), {}),
        ],
    )
    def test_trace(self, text: str | None, assignments: tuple[str, ...], flags: dict[str, object]):
        settings = settle(text, *assignments, **flags)
        assert settings.trace == Path("t.json")
        assert describe(settings)["trace"] == "t.json"

    @pytest.mark.parametrize("metric", ["loss", "eval_loss", "mean_token_accuracy", "eval_entropy", "null"])
    def test_metrics_that_are_measured(self, metric: str):
        training = settle(f"metric_for_best_model: {metric}\n", eval_data="e").training
        assert training["metric_for_best_model"] == (None if metric == "null" else metric)

    def test_lora_defaults(self):
        assert settle(lora=4).lora == {
            "r": 4, "lora_alpha": 8, "target_modules": "all-linear", "task_type": "CAUSAL_LM",
        }  # fmt: skip

    def test_lora_section(self):
        text = "lora: {lora_alpha: 3, target_modules: [q_proj], eva_config: {rho: 1.5}}\n"
        lora = settle(text + "lora.layer_replication: [[0, 2]]\n").lora
        assert (lora["r"], lora["lora_alpha"], lora["target_modules"]) == (8, 3, ["q_proj"])
        assert lora["eva_config"].rho == 1.5
        assert lora["layer_replication"] == [(0, 2)]
        assert settle(None, "lora.init_lora_weights=gaussian").lora["init_lora_weights"] == "gaussian"

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("", {"eval_strategy": "epoch"}),
            ("save_every: 5\n", {"eval_strategy": "steps", "eval_steps": 5}),
            ("eval_steps: 3\n", {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no"}),
            ("eval_steps: 3\nsave_every: 6\n", {"eval_strategy": "steps", "eval_steps": 3, "save_steps": 6}),
            ("eval_strategy: epoch\nsave_every: 6\n", {"eval_strategy": "epoch", "save_steps": 6}),
            ("batch_size: 2\nper_device_eval_batch_size: 1\n", {"per_device_eval_batch_size": 1}),
        ],
    )
    def test_evaluation(self, text: str, expected: dict[str, object]):
        training = settle(text, eval_data="e").training
        assert expected.items() <= training.items()
        if expected.get("eval_strategy") == "epoch":
            assert "eval_steps" not in training

    @pytest.mark.parametrize("text", ["use_cpu: true\n", "outcore: {device: cpu}\n", "device: cpu\nuse_cpu: true\n"])
    def test_the_cpu(self, text: str):
        settings = settle(text)
        assert settings.device == "cpu"
        assert settings.training["use_cpu"] is True

    def test_autocast_over_fp32_weights(self):
        assert settle(None, "bf16=true", precision="fp32", device="cpu").training["bf16"] is True

    def test_trackers(self, monkeypatch):
        monkeypatch.setattr("transformers.integrations.get_available_reporting_integrations", lambda: ["wandb"])
        assert settle(report_to="wandb").training["report_to"] == "wandb"
        assert settle(None, "report_to=[wandb]").training["report_to"] == ["wandb"]
        assert "(wandb)" in refusal(report_to="mlflow")

    def test_what_comes_out_is_what_trl_takes(self):
        from trl import SFTConfig

        settings = settle("eval_steps: 3\nlr_scheduler_type: cosine\n", eval_data="e", save_every=6, keep=2, steps=9)
        args = SFTConfig(output_dir=str(settings.out), **settings.training)
        assert (args.eval_steps, args.save_steps, args.max_steps, args.disable_tqdm) == (3, 6, 9, True)
        assert os.listdir() == [CONFIG]

    def test_every_field_can_be_set_to_its_default(self):
        """The contract: every SFTConfig field can be set. Fields that the command decides accept only their default."""

        import yaml
        from trl import SFTConfig

        skipped = {"max_steps", "output_dir", "include_for_metrics", "eval_strategy", "bf16"}
        skipped |= other_names([field.name for field in dataclasses.fields(SFTConfig)]).keys()
        defaults = {f.name: f.default for f in dataclasses.fields(SFTConfig) if f.init and f.name not in skipped}
        defaults |= {"disable_tqdm": True, CHECKPOINTING: False, "save_strategy": "steps"}
        defaults["logging_nan_inf_filter"] = False
        defaults["eval_do_concat_batches"] = None
        settle(yaml.safe_dump({name: value for name, value in defaults.items() if value is not None}), eval_data="e")


class TestDescription:
    def test_defaults(self):
        said = describe(settle())
        assert list(said)[:4] == ["model", "data", "out", "precision"]
        expected = {
            "epochs": "3.0", "batch_size": "8", "grad_accum": "1", "seq_len": "1024", "lr": "2e-05",
            "lr_scheduler_type": "linear", "warmup_steps": "0", "max_grad_norm": "1.0", "save_strategy": "no",
            "seed": "42", "lora": "off, all weights are trained",
        }  # fmt: skip
        assert expected.items() <= said.items()
        assert {"use_cpu", "disable_tqdm", "steps", "beta", "grace"}.isdisjoint(said)

    def test_all_that_was_set(self):
        text = "lr_scheduler_type: cosine\nwarmup_steps: 0.1\nneftune_noise_alpha: 5\nplan: p.json\nmax_length: null\n"
        flags = {"lora": 4, "data": ["a", "b"], "eval_data": "e", "save_every": 2, "keep": 3, "steps": 9, "grace": 60}
        said = describe(settle(text, packing=False, **flags))
        expected = {
            "data": "a, b", "eval_data": "e", "steps": "9", "lr_scheduler_type": "cosine", "warmup_steps": "0.1",
            "seq_len": "null", "packing": "false", "save_every": "2", "keep": "3", "eval_steps": "2", "grace": "60",
            "neftune_noise_alpha": "5", "plan": "p.json",
        }  # fmt: skip
        assert expected.items() <= said.items()
        assert said["lora"].startswith("r 4, lora_alpha 8, target_modules all-linear")
        assert "epochs" not in said
