"""A model that was trained is saved, tried, exported and merged; one that cannot be saved is not trained."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from .conftest import CONFIG, Run

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
SHORT = ("--steps", 2, "--batch-size", 2, "--seq-len", 32, "--lr", 1e-2)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(3)
    config = AutoConfig.for_model(**{**CONFIG, "initializer_range": 0.1, "hidden_size": 64, "intermediate_size": 128})
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "weights")
    return tmp_path / "weights"


@pytest.fixture
def train(command: Run, weights: Path, text: Path, tmp_path: Path) -> Run:
    return lambda *more: command("train", "--model", weights, "--data", text, "--out", tmp_path / "run", *SHORT, *more)


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["run", "dry run"])
def test_what_cannot_be_saved_is_refused_before_the_first_step(
    more: Any, train: Run, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    settings = weights / "generation_config.json"
    settings.write_text(json.dumps({"do_sample": False, "temperature": 0.9}))
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    refused = train(*more)
    assert refused.status == 2
    *_, said = refused.err.splitlines()
    assert said.startswith("outcore: generation_config.json: expected what can be saved beside the trained weights")
    assert "`temperature`" in said
    assert said.endswith(f"; correct or remove it in '{weights}'")
    assert "step 1/2" not in refused.out
    assert not (tmp_path / "run").exists()
    assert not list((tmp_path / "scratch").glob("outcore-*"))


@pytest.mark.parametrize(
    ("kind", "more", "files"),
    [
        (GenerationConfig, (), {"model.safetensors", "config.json", "tokenizer.json"}),
        (LoraConfig, ("--lora", 2), {"adapter_model.safetensors", "README.md", "tokenizer.json"}),
    ],
    ids=["whole", "adapters"],
)
def test_weights_are_written_whatever_happens_to_small_files(
    kind: Any, more: Any, files: set[str], train: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The small file can be written before training, and cannot be written at its end."""
    save, times = kind.save_pretrained, []

    def refuses(*args: Any, **kwargs: Any) -> None:
        times.append(1)
        if len(times) > 1:
            raise ValueError("not any more")
        save(*args, **kwargs)

    monkeypatch.setattr(kind, "save_pretrained", refuses)
    ended = train(*more)
    assert ended.status == 1
    *_, said = ended.err.splitlines()
    name = "adapter_config.json" if more else "generation_config.json"
    where = tmp_path / "run" / "model"
    assert said.startswith(f"outcore: '{where}': the weights are there and whole, but expected small files")
    assert f"{name}: not any more; correct what is named" in said
    assert files <= {path.name for path in where.iterdir()}
    assert name not in {path.name for path in where.iterdir()}
    assert load_file(where / min(f for f in files if f.endswith("safetensors")))


@pytest.mark.parametrize("kind", ["lora", "4 bits"])
def test_the_lines_at_the_end_work(kind: str, train: Run, command: Run, weights: Path, tmp_path: Path):
    if kind == "4 bits":
        pytest.importorskip("bitsandbytes")
    done = train("--lora", 2, "--save-every", 2, *["--load-in-4bit"] * (kind == "4 bits"))
    assert done.status == 0, done.err
    lines = done.out.splitlines()
    tried, merge = (lines[lines.index(title) + 1] for title in ("Try it", "Merge"))
    assert merge == f"outcore export {tmp_path / 'run'} {tmp_path / 'run-merged'} --merge"
    base = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.bfloat16)
    want = PeftModel.from_pretrained(base, tmp_path / "run" / "model").merge_and_unload().state_dict()
    for source, out in (("run", "run-merged"), ("run/model", "2"), ("run/checkpoint-2", "3")):
        made = command("export", tmp_path / source, tmp_path / out, "--merge")
        assert made.status == 0, made.err
        assert f"merged into '{weights}' in bf16" in made.out
        assert ("they were trained on it in 4 bits, nf4" in made.out) == (kind == "4 bits")
        got = AutoModelForCausalLM.from_pretrained(tmp_path / out)
        assert (tmp_path / out / "tokenizer.json").is_file()
        for name, value in got.state_dict().items():
            assert torch.equal(value, want[name]), name
    if kind == "lora":
        plain = {**os.environ, "HF_HUB_OFFLINE": "1"}
        said = subprocess.run(shlex.split(tried), env=plain, capture_output=True, text=True, check=False)
        assert said.returncode == 0, said.stderr
        assert said.stdout.startswith("Hello")


def test_what_a_run_wrote_is_exported(train: Run, command: Run, tmp_path: Path):
    """The model at its end; the newest checkpoint, if it is newer; and each by its name."""

    def exported(source: Path, name: str) -> dict[str, torch.Tensor]:
        made = command("export", source, tmp_path / name)
        assert made.status == 0, made.err
        kept = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
        assert {path.name for path in (tmp_path / name).iterdir()} == kept | {"chat_template.jinja"}
        return load_file(tmp_path / name / "model.safetensors")

    def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    run = tmp_path / "run"
    assert train("--save-every", 1).status == 0
    last, first = (load_file(run / f"checkpoint-{n}" / "model.safetensors") for n in (2, 1))
    assert not same(first, last)
    assert same(exported(run, "of the run"), last)
    assert same(exported(run / "model", "of the model"), last)
    assert same(exported(run / "checkpoint-1", "of step 1"), first)
    before = (run / "checkpoint-2" / "trainer_state.json").stat().st_mtime - 100
    (run / "model" / "model.safetensors").write_bytes(b"old")
    os.utime(run / "model" / "model.safetensors", (before, before))  # as if the run had gone on since
    assert same(exported(run, "of the newest"), last)
    nothing = command("export", run / "model", tmp_path / "none", "--merge")
    assert (nothing.status, (tmp_path / "none").exists()) == (2, False)
