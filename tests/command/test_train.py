"""``outcore train`` end to end: it trains what TRL's trainer trains, over all tiers, and it can be resumed."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

from outcore.command.train import run as train_run
from outcore.command.train.loop import trainer as train_trainer
from outcore.command.train.model.byte_tokenizer import byte_tokenizer
from outcore.core.errors import DiskError

from .conftest import CHECKPOINTING, CONFIG, TIERS, Run, read_jsonl, replaced

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GIB = 2**30
SHORT = ("--steps", 6, "--batch-size", 2, "--seq-len", 48, "--lr", 1e-2)
# Windows of three batches, of which the last in an epoch is short; a clipped norm; a schedule with a warmup.
LOOP = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 3,
    "max_steps": 6,
    "learning_rate": 1e-2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 2,
    "max_length": 48,
    "logging_nan_inf_filter": False,
}


MODEL_FILES = [
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A saved model with random weights; dropout makes the order of random numbers matter."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**CONFIG, "attention_dropout": 0.1, "initializer_range": 0.1})
    folder = tmp_path / "weights"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def plain(
    weights: Path, folder: Path, rows: list[dict[str, Any]], evaluation: Any = None, **changes: Any
) -> SFTTrainer:
    """The same job, trained by TRL's trainer with everything in memory."""
    args = SFTConfig(
        output_dir=str(folder),
        per_device_eval_batch_size=1,
        save_strategy="no",
        logging_steps=1,
        report_to="none",
        disable_tqdm=True,
        use_cpu=DEVICE == "cpu",
        bf16=False,
        **{CHECKPOINTING: False},
        **{**LOOP, **changes},
    )
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32),
        args=args,
        train_dataset=Dataset.from_list(rows),
        eval_dataset=None if evaluation is None else Dataset.from_list(evaluation),
        processing_class=byte_tokenizer(),
    )
    trainer.train()
    return trainer


def options(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--set", f"{name}={json.dumps(value)}")]


def losses(folder: Path, key: str = "loss") -> list[float]:
    return [line[key] for line in read_jsonl(folder / "metrics.jsonl") if key in line]


def tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in model.state_dict().items()}


def assert_equal(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


def tiers_used(folder: Path) -> set[str]:
    units = json.loads((folder / "plan.json").read_text())["units"]
    return {unit[what] for unit in units for what in ("weights", "gradients", "states")}


def test_a_new_model_learns_over_all_tiers_and_loads(command: Run, config_json: Path, text: Path, tmp_path: Path):
    out = tmp_path / "deep" / "run"
    more = ("--steps", 12, *TIERS, "--disk", tmp_path)
    done = command(*replaced("train", "--model", config_json, "--data", text, "--out", out, *SHORT, *more))
    assert done.status == 0, done.err
    assert tiers_used(out) == {"device", "host", "disk"}
    assert sorted(p.name for p in out.iterdir()) == ["metrics.jsonl", "model", "plan.json"]
    assert len(losses(out)) == 12
    assert losses(out)[-1] < losses(out)[0] - 0.5, "it learns"
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    assert model.dtype == torch.bfloat16
    batch = tokenizer("7 bottles", return_tensors="pt", return_token_type_ids=False)
    assert model(**batch).logits.isfinite().all()
    assert tokenizer.decode(batch["input_ids"][0]) == "7 bottles"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert not (out / "model" / "training_args.bin").exists()


class TestEqualsThePlainTrainer:
    """Bit for bit: losses, gradient norms, evaluations and final weights."""

    def run(
        self, command: Run, weights: Path, out: Path, data: Path, settings: dict[str, Any], *more: Any,
        tiers: tuple[str, ...] = TIERS,
    ) -> None:  # fmt: skip
        done = command(
            "train", "--model", weights, "--data", data, "--out", out, "--precision", "fp32", *tiers,
            "--disk", out.parent, "--device", DEVICE, *options({**LOOP, **settings}), *more,
        )  # fmt: skip
        assert done.status == 0, done.err
        assert tiers_used(out) == {"device", "host", "disk"}

    def compare(self, trainer: SFTTrainer, out: Path) -> None:
        history = trainer.state.log_history
        for key in ("loss", "grad_norm", "eval_loss"):
            assert losses(out, key) == [line[key] for line in history if key in line], key
        assert losses(out, "lr") == [line["learning_rate"] for line in history if "loss" in line]

    def test_text_is_packed(self, command, weights, text, tmp_path):
        out = tmp_path / "run"
        self.run(command, weights, out, text, {})
        rows = [{"text": text.read_text()}]
        trainer = plain(weights, tmp_path / "plain", rows, packing=True, packing_strategy="wrapped")
        self.compare(trainer, out)
        trained = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        assert_equal(tensors(trained), tensors(trainer.model))

    def test_conversations_with_evaluation(self, command, weights, chats, tmp_path):
        out, settings = tmp_path / "run", {"assistant_only_loss": True, "eval_steps": 2}
        self.run(command, weights, out, chats, settings, "--eval-data", chats)
        rows = read_jsonl(chats)
        trainer = plain(weights, tmp_path / "plain", rows, rows, eval_strategy="steps", **settings)
        assert len(losses(out, "eval_loss")) == 3
        self.compare(trainer, out)
        trained = AutoModelForCausalLM.from_pretrained(out / "model", dtype=torch.float32)
        assert_equal(tensors(trained), tensors(trainer.model))


def test_adapters_are_the_same_over_all_tiers_and_load(command: Run, weights: Path, chats: Path, tmp_path: Path):
    shared = ("train", "--model", weights, "--data", chats, "--lora", 2, "--precision", "fp32", *SHORT)
    shared += ("--set", "lora.lora_dropout=0.1")
    tiers = ("--device-memory", "200KiB", "--host-memory", "130KiB", "--disk", tmp_path)
    assert command(*shared, "--out", tmp_path / "one").status == 0
    assert command(*shared, "--out", tmp_path / "three", *tiers).status == 0
    assert tiers_used(tmp_path / "one") == {"device"}
    assert tiers_used(tmp_path / "three") == {"device", "host", "disk"}
    assert losses(tmp_path / "one") == losses(tmp_path / "three")
    models = [
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / name / "model", dtype=torch.float32)
        for name in ("one", "three")
    ]
    assert_equal(tensors(models[0]), tensors(models[1]))
    assert any("lora_B" in name and tensor.any() for name, tensor in tensors(models[0]).items()), "they were trained"
    assert not (tmp_path / "three" / "model" / "model.safetensors").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "three" / "model").chat_template


def test_the_same_command_trains_the_same_model(command: Run, config_json: Path, text: Path, tmp_path: Path):
    shared = ("train", "--model", config_json, "--data", text, *SHORT)
    disk = ("--disk", tmp_path)
    runs = {"a": (), "b": (*disk, *TIERS), "c": ("--seed", 43), "d": (*disk, "--activations", "disk")}
    runs["e"] = (*disk, *TIERS, "--set", "master_format=compact")
    for name, more in runs.items():
        assert command(*shared, "--out", tmp_path / name, *more).status == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b") == losses(tmp_path / "d") == losses(tmp_path / "e")
    units = json.loads((tmp_path / "d" / "plan.json").read_text())["units"]
    assert [unit["activations"] for unit in units] == ["device"] + ["disk"] * (len(units) - 1)
    assert losses(tmp_path / "a") != losses(tmp_path / "c")


@pytest.mark.skipif(DEVICE == "cpu", reason="Accelerate has a gradient scaler on accelerators alone")
def test_fp16_overflows_and_goes_on(
    command: Run, config_json: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The first steps overflow, which is no error; a resumed run has the scale of the run before it."""
    high = partial(torch.amp.GradScaler, DEVICE, init_scale=2.0**21)
    monkeypatch.setattr("accelerate.accelerator.get_grad_scaler", lambda *_, **__: high())
    shared = ("train", "--model", config_json, "--data", text, *SHORT, "--steps", 6, "--precision", "fp16")
    shared += ("--save-every", 3)
    assert command(*shared, "--out", tmp_path / "a").status == 0
    assert command(*shared, "--out", tmp_path / "b", "--disk", tmp_path, *TIERS).status == 0
    assert None in losses(tmp_path / "a", "grad_norm")
    for key in ("loss", "grad_norm"):
        assert losses(tmp_path / "a", key) == losses(tmp_path / "b", key)
    want = losses(tmp_path / "b"), load_file(tmp_path / "b" / "model" / "model.safetensors")
    assert {tensor.dtype for tensor in want[1].values()} == {torch.float16}
    shutil.rmtree(tmp_path / "b" / "checkpoint-6")
    assert command(*shared, "--out", tmp_path / "b", "--disk", tmp_path, *TIERS, "--resume").status == 0
    assert losses(tmp_path / "b") == want[0]
    assert_equal(load_file(tmp_path / "b" / "model" / "model.safetensors"), want[1])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
def test_blocks_are_compiled_with_the_attention_that_was_named(
    command: Run, config_json: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    compiled: list[str] = []

    def compiler(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        names = " ".join(str(node.target) for node in graph.graph.nodes)
        compiled.append("sdpa" if "scaled_dot" in names else "another")
        return graph

    monkeypatch.setattr("torch._dynamo.backends.registry.get_default_backend", lambda: compiler)
    shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS)
    done = command(*shared, "--out", tmp_path / "a", "--compile", "--attention", "eager", "--save-every", 3)
    assert done.status == 0
    assert "sdpa" not in compiled
    assert len(compiled) < 4, "three blocks share a code"
    assert "attention" in done.out
    assert command(*shared, "--out", tmp_path / "b", "--attention", "eager").status == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    other = command(*replaced(*shared, "--out", tmp_path / "a", "--resume", "--steps", 7))
    assert other.status == 2
    assert "--attention is null instead of 'eager', --compile is null instead of true" in " ".join(other.err.split())


def test_blocks_run_a_batch_in_pieces(command: Run, config_json: Path, text: Path, tmp_path: Path):
    shared = ("train", "--model", config_json, "--data", text, *SHORT, "--precision", "fp32")
    shared += ("--disk", tmp_path, *TIERS)
    pieces = ("--batch-size", 4, "--unit-micro-batches", 2, "--save-every", 3)
    done = command(*replaced(*shared, "--out", tmp_path / "a", *pieces))
    assert done.status == 0
    assert "unit_micro_batches" in done.out
    assert command(*shared, "--out", tmp_path / "b", "--grad-accum", 2).status == 0
    pairs = zip(losses(tmp_path / "a"), losses(tmp_path / "b"), strict=True)  # TRL's loss sees the whole batch
    assert all(a == pytest.approx(b, rel=1e-5) for a, b in pairs)
    other = command(*replaced(*shared, "--out", tmp_path / "a", "--batch-size", 4, "--resume", "--steps", 7))
    assert other.status == 2
    assert "--unit-micro-batches is null instead of 2" in " ".join(other.err.split())


@pytest.mark.parametrize(
    ("device", "free_bytes", "is_scarce"),
    [("cpu", 6 * GIB, False), ("cpu", 6 * GIB - 1, True), ("meta", 3 * GIB, False), ("meta", 2 * GIB, True)],
)
def test_freed_memory_is_given_back_at_once_only_where_memory_is_scarce(
    device: str, free_bytes: int, is_scarce: bool, monkeypatch: pytest.MonkeyPatch
):
    """Blocks that are mapped anew each time add half to a step on the CPU."""
    called = []
    libc = SimpleNamespace(mallopt=lambda *given: called.append(given), malloc_trim=called.append)
    monkeypatch.setattr(train_run, "ctypes", SimpleNamespace(CDLL=lambda _: libc))
    monkeypatch.setattr(train_run, "host_free_bytes", lambda: free_bytes)
    plan = SimpleNamespace(kept_bytes=GIB)
    job = SimpleNamespace(
        taken={"device": 2 * GIB, "host": 2 * GIB, "disk": 1},
        model=SimpleNamespace(plan=plan),
        args=SimpleNamespace(device=torch.device(device)),
    )
    with pytest.warns(UserWarning, match="half as long again") if is_scarce else nullcontext():
        train_run._give_freed_memory_back(job)
    assert bool(called) is is_scarce


def test_a_plan_can_be_given(command: Run, config_json: Path, text: Path, tmp_path: Path):
    shared = ("train", "--model", config_json, "--data", text, *SHORT)
    assert command(*shared, "--out", tmp_path / "a", "--disk", tmp_path, *TIERS).status == 0
    plan = tmp_path / "a" / "plan.json"
    edited = plan.read_text().replace('"recompute"', '"keep"')
    plan.write_text(edited)
    assert command(*shared, "--out", tmp_path / "b", "--disk", tmp_path, "--plan", plan).status == 0
    assert (tmp_path / "b" / "plan.json").read_text() == edited
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    little = command(*shared, "--out", tmp_path / "c", "--plan", plan, "--device-memory", "1KiB")
    named, free = little.err.rpartition("as options: ")[2].split(";")
    assert named.endswith(" --disk DIR")
    assert free.rstrip().endswith("must be free in DIR")
    enough = named.replace("DIR", str(tmp_path)).split()
    assert command(*shared, "--out", tmp_path / "c", "--plan", plan, *enough).status == 0


class TestResume:
    """A run that is stopped and resumed leaves what the uninterrupted run leaves, bit for bit."""

    @pytest.fixture
    def shared(self, config_json: Path, chats: Path, tmp_path: Path) -> tuple[Any, ...]:
        config = json.loads(config_json.read_text())
        config_json.write_text(json.dumps({**config, "attention_dropout": 0.1}))
        settings = options({"lr_scheduler_type": "cosine", "eval_steps": 3, "gradient_accumulation_steps": 2})
        more = ("--save-every", 2, "--eval-data", chats, *TIERS, "--disk", tmp_path)
        return ("train", "--model", config_json, "--data", chats, *SHORT, *settings, *more)

    def stop_at(self, monkeypatch: pytest.MonkeyPatch, step: int, stop: Callable[[], None]) -> None:
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == step:
                stop()

        monkeypatch.setattr(train_run.RunReport, "on_step_end", on_step_end)

    def assert_same(self, resumed: Path, whole: Path) -> None:
        wanted = ("step", "epoch", "loss", "lr", "grad_norm", "eval_loss")
        mine, theirs = (
            [{k: line.get(k) for k in wanted} for line in read_jsonl(out / "metrics.jsonl")] for out in (resumed, whole)
        )
        assert mine == theirs
        assert_equal(*(load_file(out / "model" / "model.safetensors") for out in (resumed, whole)))
        names = [sorted(p.relative_to(out) for p in out.rglob("*")) for out in (resumed, whole)]
        assert names[0] == names[1]

    def test_after_ctrl_c(self, command, shared, tmp_path, monkeypatch):
        whole, out = tmp_path / "whole", tmp_path / "run"
        assert command(*shared, "--out", whole).status == 0

        def stop(saved: str) -> None:
            deadline_s = time.monotonic() + 60
            while saved and not (out / saved).exists() and time.monotonic() < deadline_s:
                time.sleep(0.01)  # it is written while training goes on; Ctrl-C gives up an unfinished save
            signal.raise_signal(signal.SIGINT)

        begun_anew = f"no checkpoint was saved in {out}: --resume auto begins anew"
        for step, saved, left in ((1, "", begun_anew), (5, "checkpoint-4", "")):
            with monkeypatch.context() as patch:
                self.stop_at(patch, step, stop=partial(stop, saved))
                stopped = command(*shared, "--out", out, "--resume", "auto")
            assert stopped.status == 130
            assert f"nothing was saved in {out}: the run begins at step 0" in stopped.out
            assert left in stopped.err
        assert stopped.err.splitlines()[-2:] == [
            "outcore: stopped",
            f"{out / 'checkpoint-4'} holds everything up to step 4; the same command with --resume goes on there",
        ]
        assert sorted(p.name for p in out.iterdir()) == ["checkpoint-2", "checkpoint-4", "metrics.jsonl", "plan.json"]
        assert len(losses(out)) == 4
        # As if the run had been killed while it wrote the newest checkpoint.
        (out / "checkpoint-4" / "manifest.json").unlink()  # as older versions wrote it
        (out / "checkpoint-4" / "trainer_state.json").write_text("{")
        resumed = command(*shared, "--out", out, "--resume", "auto")
        assert resumed.status == 0, resumed.err
        assert f"from {out / 'checkpoint-2'}, at step 2 of 6" in resumed.out
        self.assert_same(out, whole)

    def test_adapters(self, command, weights, chats, tmp_path, monkeypatch):
        shared = ("train", "--model", weights, "--data", chats, "--lora", 2, *SHORT, "--save-every", 2)
        whole, out = tmp_path / "whole", tmp_path / "run"
        assert command(*shared, "--out", whole).status == 0
        with monkeypatch.context() as patch:
            self.stop_at(patch, 4, stop=partial(signal.raise_signal, signal.SIGTERM))
            stopped = command(*shared, "--out", out)
        assert stopped.status == 143
        assert "checkpoint-4" in stopped.err
        assert command(*shared, "--out", out, "--resume").status == 0
        assert losses(out) == losses(whole)
        assert_equal(*(load_file(folder / "model" / "adapter_model.safetensors") for folder in (out, whole)))

    def test_what_is_finished_can_only_go_further(self, command, config_json, text, tmp_path):
        out = tmp_path / "run"
        shared = ("train", "--model", config_json, "--data", text, "--out", out, *SHORT, "--save-every", 3, "--keep", 1)
        assert command(*shared).status == 0
        assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-6"]
        before = load_file(out / "model" / "model.safetensors")
        shutil.rmtree(out / "model")
        again = command(*shared, "--resume")
        assert again.status == 0
        assert "nothing is left to do" in again.out
        assert_equal(load_file(out / "model" / "model.safetensors"), before)
        assert sorted(p.name for p in (out / "model").iterdir()) == MODEL_FILES
        assert command(*replaced(*shared, "--resume", "--steps", 8)).status == 0
        assert [line["step"] for line in read_jsonl(out / "metrics.jsonl")] == list(range(1, 9))
        assert sorted(p.name for p in out.glob("checkpoint-*")) == ["checkpoint-8"]
        with pytest.raises(AssertionError):
            assert_equal(load_file(out / "model" / "model.safetensors"), before)

    def test_stopped_before_the_first_step_leaves_nothing(self, command, shared, tmp_path, monkeypatch):
        def stop(**_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(train_trainer, "SftTrainer", stop)
        out = tmp_path / "deep" / "run"
        stopped = command(*shared, "--out", out)
        assert stopped.status == 130
        assert stopped.err == "outcore: stopped\n"
        assert not out.parent.exists()


class TestDryRun:
    def test_it_says_settings_and_plan_and_writes_nothing(self, command, config_json, text, tmp_path):
        before = sorted(tmp_path.rglob("*"))
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--disk", tmp_path, *TIERS)
        done = command(*shared, "--out", tmp_path / "run", "--dry-run")
        assert done.status == 0, done.err
        assert ["lr", "0.01"] in [line.split() for line in done.out.splitlines()]
        assert "states     model.layers.0-2 (3 units)" in done.out
        assert sorted(tmp_path.rglob("*")) == before

    def test_the_plan_is_that_of_the_run(self, command, weights, chats, tmp_path):
        budgets = ("--device-memory", "64MiB", "--host-memory", "64MiB")  # free memory changes by the second
        shared = (
            "train",
            "--model",
            weights,
            "--data",
            chats,
            "--lora",
            2,
            *SHORT,
            *budgets,
            "--out",
            tmp_path / "run",
        )
        dry, real = command(*shared, "--dry-run"), command(*shared)
        assert dry.out in real.out

    def test_a_budget_of_more_than_there_is_is_said(self, command, config_json, text, tmp_path):
        shared = ("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run", "--dry-run")
        done = command(*shared, "--device-memory", "5TiB", "--host-memory", "1GiB")
        assert done.status == 0
        assert "note: the device budget of 5.00 TiB is more than this machine has" in done.err
        assert "host budget" not in done.err

    def test_it_reads_the_data(self, command, config_json, tmp_path):
        done = command(
            "train", "--model", config_json, "--data", tmp_path / "none.txt", "--out", tmp_path / "run", "--dry-run"
        )
        assert done.status == 2
        assert "--data" in done.err


def test_an_error_of_the_run_itself_says_how_to_go_on(command, config_json, text, tmp_path, monkeypatch):
    """Errors of outcore exit with status 1 and bugs keep their traceback; both carry the note."""

    def fail(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise DiskError("short read")

    monkeypatch.setattr(train_run.RunReport, "on_step_end", fail)
    out = tmp_path / "run"
    failed = command("train", "--model", config_json, "--data", text, "--out", out, *SHORT, "--save-every", 2)
    assert failed.status == 1
    assert failed.err.splitlines()[-2:] == [
        "outcore: short read",
        f"{out / 'checkpoint-2'} holds everything up to step 2; the same command with --resume goes on there",
    ]
