"""``--resume`` with other settings: each is used and reported, or refused by name with both values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest

from outcore.command.train.output.record import Content, RunRecord

from .conftest import CONFIG, Outcome, Run, read_jsonl, write_json, write_jsonl
from .test_train import options

SETTINGS = {"batch_size": 2, "seq_len": 48, "lr": 1e-2, "save_every": 2, "lr_scheduler_type": "cosine"}


@pytest.fixture
def resume(command: Run, config_json: Path, chats: Path, tmp_path: Path) -> Callable[..., Outcome]:
    """Train two of four steps, then go on with changed settings."""
    given = {"model": str(config_json), "data": str(chats), "out": str(tmp_path / "run"), "steps": 4, **SETTINGS}

    def run(**changes: Any) -> Outcome:
        values = {key: value for key, value in {**given, **changes}.items() if value is not None}
        return command("train", *options(values), "--resume")

    assert command("train", *options({**given, "steps": 4})).status == 0
    for left in ("model/model.safetensors", "checkpoint-4/manifest.json", "checkpoint-4/trainer_state.json"):
        (tmp_path / "run" / left).unlink()
    return run


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_what_makes_another_run_is_refused_with_both_values(resume, chats, tmp_path):
    """Nothing is touched, and the message names every changed setting."""
    other_rows = write_jsonl(tmp_path / "other.jsonl", read_jsonl(chats)[1:])
    other_model = write_json(tmp_path / "other.json", {**CONFIG, "attention_dropout": 0.1})
    cases: list[tuple[dict[str, Any], str]] = [
        ({"batch_size": 3}, "--batch-size is 3 instead of 2"),
        ({"grad_accum": 2, "seed": 7}, "--grad-accum is 2 instead of 1, --seed is 7 instead of 42"),
        ({"seq_len": 32}, "--seq-len is 32 instead of 48"),
        ({"packing": True}, "--packing is true instead of false"),
        ({"precision": "fp32"}, "--precision is 'fp32' instead of 'bf16'"),
        ({"lora": 2}, "but --lora is 2 instead of null;"),
        ({"optim": "sgd"}, "optim is 'sgd' instead of 'adamw_torch_fused'"),
        ({"adam_beta2": 0.9}, "adam_beta2 is 0.9 instead of 0.999"),
        ({"assistant_only_loss": True}, "assistant_only_loss is true instead of false"),
        (
            {"lr_scheduler_type": "greedy", "eval_data": str(chats), "metric_for_best_model": "loss"},
            "lr_scheduler_type is 'greedy' instead of 'cosine'",
        ),
        ({"model": str(other_model)}, f"--model '{other_model}' is another one (not '{tmp_path / 'config.json'}')"),
        ({"data": str(other_rows)}, f"but --data '{other_rows}' has others (10 rows, 438 tokens)"),
    ]
    before = snapshot(tmp_path)
    for changes, said in cases:
        done = resume(**changes)
        assert done.status == 2, changes
        assert said in done.err, changes
        assert f"'{tmp_path / 'run' / 'checkpoint-2'}'" in done.err
        assert snapshot(tmp_path) == before, changes


def test_another_learning_rate_and_length_are_used_and_said(resume, tmp_path):
    """The third step of six has twice the rate, as if the schedule had always been this one."""
    done = resume(lr=2e-2, steps=6, max_grad_norm=0.5)
    assert done.status == 0, done.err
    said = done.out[done.out.index("Resume") :].splitlines()
    assert said[1] == f"from {tmp_path / 'run' / 'checkpoint-2'}, at step 2 of 6"
    assert {" ".join(line.split()) for line in said[2:5]} == {
        "lr 0.02 instead of 0.01",
        "max_grad_norm 0.5 instead of 1.0",
        "steps 6 instead of 4; learning rates are those of a run of this length",
    }
    lrs = [line["lr"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl")]
    assert lrs[:2] == [1e-2, pytest.approx(0.5e-2 * (1 + 2**-0.5))]
    assert lrs[2:] == pytest.approx([2e-2 * share for share in (0.75, 0.5, 0.25, 0.0669873)])


def test_going_on_after_the_end_never_trains_with_rate_0(resume, tmp_path):
    assert resume().status == 0
    assert "nothing is left to do" in resume().out
    assert resume(steps=6).status == 0
    lines = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["lr"] > 0 for line in lines)


def test_what_a_run_costs_and_tells_may_change(resume, chats, tmp_path):
    """Checkpoints are saved as often as this run's settings say; the same rows may be in a file of another name."""
    moved = chats.rename(tmp_path / "moved.jsonl")
    more = {"device_memory": "1GiB", "save_every": 1, "keep": 9, "on_nonfinite": "skip", "eval_data": str(moved)}
    done = resume(**more, data=str(moved))
    assert done.status == 0, done.err
    assert "arguments do not match" not in done.err
    said = [" ".join(line.split()) for line in done.out[done.out.index("Resume") :].splitlines()]
    for line in (
        "device_memory 1073741824 instead of null",
        "keep 9 instead of null",
        "save_every 1 instead of 2",
        f"data '{moved}' instead of '{chats}', the same rows",
    ):
        assert line in said
    assert (tmp_path / "run" / "checkpoint-3").is_dir()


def test_a_checkpoint_without_settings_is_said_and_a_damaged_one_refused(resume, tmp_path):
    file = tmp_path / "run" / "checkpoint-2" / "settings.json"
    file.with_name("manifest.json").unlink()  # as if written by another program or an older version
    known = json.loads(file.read_text())
    assert (known["steps"], known["data"]["rows"], known["settings"]["learning_rate"]) == (4, 11, 1e-2)
    file.write_text(json.dumps({**known, "owes_evaluation": False}))  # as version 0.1.0 wrote it
    assert RunRecord.load(file.parent).steps == 4
    file.write_text("{}")
    assert "settings.json', but it cannot be read" in resume().err
    file.unlink()
    assert "its settings are not known: there is no settings.json in it, and nothing was compared" in resume().out


def test_a_damaged_checkpoint_is_said_and_set_aside(resume, tmp_path):
    """The run goes on from the checkpoint before. If there is none, no new run begins over the damaged one."""
    out = tmp_path / "run"
    shutil.copytree(out / "checkpoint-2", out / "checkpoint-3")
    (out / ".checkpoint-9.0123abcd.partial").mkdir()  # of a run that was killed during a save
    states = out / "checkpoint-3" / "optimizer.safetensors"
    data = bytearray(states.read_bytes())
    data[-9] ^= 16
    states.write_bytes(data)
    done = resume()
    assert done.status == 0, done.err
    assert "Damaged" in done.out
    assert "of 'optimizer.safetensors'" in done.out
    assert f"from {out / 'checkpoint-2'}, at step 2 of 4" in done.out
    names = sorted(path.name for path in out.iterdir())
    assert names == ["checkpoint-2", "checkpoint-3.damaged", "checkpoint-4", "metrics.jsonl", "model", "plan.json"]
    for step in (2, 4):
        (out / f"checkpoint-{step}" / "settings.json").write_text("{}")
    done = resume()
    assert done.status == 2
    assert "none is as it was saved: " in done.err


def test_content_is_that_of_the_rows_not_of_their_storage():
    rows = [{"input_ids": [i, 2, 3][: i % 4], "mask": [i] * (i % 4)} for i in range(9)]
    one = datasets.Dataset.from_list(rows)
    parts = datasets.concatenate_datasets([one.select(range(4)), one.select(range(4, 9))])
    found = Content.of("x", one)
    assert (found.rows, found.tokens) == (9, sum(len(row["input_ids"]) for row in rows))
    assert Content.of("x", parts) == found
    for other in (rows[1:], rows[::-1], [*rows[:-1], {**rows[-1], "mask": [1] * 4}], [{**r, "mask": r["mask"][:-1]} for r in rows]):  # fmt: skip  # noqa: E501
        assert Content.of("x", datasets.Dataset.from_list(other)).digest != found.digest
