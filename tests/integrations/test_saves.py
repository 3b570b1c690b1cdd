"""A Trainer goes on while its checkpoint is written; a reader of the checkpoint waits for it, or gets its error."""

from __future__ import annotations

import errno
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

import outcore
from outcore.checkpoint.weights.small_files import SmallFilesError
from outcore.engine.checkpoint_saves import EditedError, Save
from outcore.integrations.trainer_saves import EndedAtOnceError
from outcore.integrations.transformers import OutcoreMixin
from outcore.memory.files.checkpoint_file import CheckpointFile
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint, read_manifest

from .rig import WARNINGS, Plain, exactly, language, llama, sft, streamed
from .test_checkpoints import sft_lora

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


class Heard(TrainerCallback):
    """Records which checkpoints callbacks are told of, and when; each must be whole by then."""

    def __init__(self) -> None:
        self.step, self.saved = 0, []

    def on_step_begin(self, args, state, control, **kwargs):
        self.step = state.global_step

    def on_save(self, args, state, control, **kwargs):
        read_manifest(Path(args.output_dir, f"checkpoint-{state.global_step}"), check=True)
        self.saved.append((state.global_step, self.step))


def files_of(folder: Path) -> dict[str, bytes]:
    names = ("*.safetensors", "scheduler.json", "rng_state*")
    return {path.name: path.read_bytes() for name in names for path in sorted(folder.glob(name))}


@pytest.mark.parametrize("job", [language, sft, sft_lora])
def test_training_goes_on_meanwhile(job, tmp_path, monkeypatch):
    """Nothing of step 2 is written before a batch of step 3 has gone forward, and yet it holds the state of step 2."""
    settings = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 1}
    with streamed(tmp_path) as side:  # here training waits for each save
        save = OutcoreMixin._save_checkpoint
        with monkeypatch.context() as patch:
            patch.setattr(
                OutcoreMixin, "_save_checkpoint", lambda self, *args: (save(self, *args), self._outcore_saves.settle())
            )
            job(side, tmp_path / "waits", **settings).train()
    goes_on, is_held, write = threading.Event(), [], CheckpointFile.write

    def held(self: Any, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and "checkpoint-2" in str(self.path):
            is_held.append(goes_on.wait(60))
        write(self, *args)

    monkeypatch.setattr(CheckpointFile, "write", held)
    heard = Heard()
    with streamed(tmp_path) as side:
        trainer = job(side, tmp_path / "goes on", parts={"callbacks": [heard]}, **settings)
        loss = trainer.compute_loss

        def compute_loss(*args: Any, **kwargs: Any) -> Any:
            found = loss(*args, **kwargs)
            if trainer.state.global_step == 2:
                goes_on.set()
            return found

        trainer.compute_loss = compute_loss
        trainer.train()
    assert is_held
    assert all(is_held)
    names = [f"checkpoint-{step}" for step in range(2, trainer.state.max_steps + 1, 2)]
    for name in names:
        assert files_of(tmp_path / "goes on" / name) == files_of(tmp_path / "waits" / name)
    assert [step for step, _ in heard.saved] == [int(name[11:]) for name in names]
    assert heard.saved[0][1] >= 2, "with a later step"


def fails_at(step: int, monkeypatch: Any) -> None:
    commit = UnfinishedCheckpoint.commit

    def full(self: Any, describe: Any) -> None:
        if self.target.name == f"checkpoint-{step}":
            raise OSError(errno.ENOSPC, "No space left on device")
        commit(self, describe)

    monkeypatch.setattr(UnfinishedCheckpoint, "commit", full)


@pytest.mark.parametrize(("step", "most"), [(2, 4), (4, 4)])
def test_a_save_that_fails_ends_the_run(step, most, tmp_path, monkeypatch):
    """The run ends with the first step that finds the error, or after the last step; earlier checkpoints are whole."""
    fails_at(step, monkeypatch)
    heard = Heard()
    settings = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    with streamed(tmp_path) as side:
        trainer = sft(side, tmp_path / "run", parts={"callbacks": [heard]}, load_best_model_at_end=True, **settings)
        with pytest.raises(outcore.OutcoreError, match=f"checkpoint-{step}.*ENOSPC"):
            trainer.train()
        assert step <= trainer.state.global_step <= most
        assert f"checkpoint-{step}" not in str(trainer.state.best_model_checkpoint)
    assert [step for step, _ in heard.saved] == list(range(1, step))
    there = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*"))
    assert there == [f"checkpoint-{number}" for number in range(1, step)]


@pytest.mark.parametrize(("step", "is_last"), [(2, False), (4, True)])
def test_a_save_whose_weights_were_edited_is_left_out_unless_it_is_the_last(step, is_last, tmp_path, monkeypatch):
    """The next save waits for such units, so one such failure does not end the run."""
    commit = UnfinishedCheckpoint.commit

    def edited(self: UnfinishedCheckpoint, *args: Any) -> None:
        if self.target.name == f"checkpoint-{step}":
            raise EditedError("edited")
        commit(self, *args)

    monkeypatch.setattr(UnfinishedCheckpoint, "commit", edited)
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", save_strategy="steps", save_steps=2)
        with pytest.raises(EditedError) if is_last else pytest.warns(UserWarning, match="checkpoint-2' was not made"):
            trainer.train()
    there = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*"))
    assert there == ["checkpoint-2" if is_last else "checkpoint-4"]


def test_what_else_ends_a_run_says_that_a_save_failed(tmp_path, monkeypatch):
    fails_at(2, monkeypatch)

    class Breaks(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                raise RuntimeError("broken")

    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path, save_strategy="steps", save_steps=2, parts={"callbacks": [Breaks()]})
        with pytest.raises(RuntimeError, match="broken") as caught:
            trainer.train()
    assert "the last save failed: checkpoint" in caught.value.__notes__[0]


def test_uploads_come_behind_it(tmp_path, monkeypatch):
    """Each upload is made with the state of the checkpoint's step."""
    pushed = []

    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", save_strategy="steps", save_steps=2)

        def push(folder: str) -> None:
            read_manifest(Path(folder), check=True)
            pushed.append((Path(folder).name, trainer.state.global_step))

        monkeypatch.setattr(Trainer, "_push_from_checkpoint", lambda self, folder: push(folder))
        trainer.args.push_to_hub = True
        monkeypatch.setattr(trainer, "_finish_current_push", lambda: None)
        trainer.train()
    assert pushed == [("checkpoint-2", 2), ("checkpoint-4", 4)]


def test_callbacks_may_stop_training(tmp_path):
    class Stops(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            control.should_training_stop = True
            return control

    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", save_strategy="steps", save_steps=1, parts={"callbacks": [Stops()]})
        trainer.train()
        assert trainer.state.global_step <= 3, "with the step that finds it durable"


class AlsoLatest(Trainer):
    """Saves the model a second time with each checkpoint."""

    def _save_checkpoint(self, model, trial):
        super()._save_checkpoint(model, trial)
        self.save_model(str(Path(self.args.output_dir, "latest")))


def test_a_second_save_of_a_trainer_goes_where_it_says(tmp_path):
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", kind=AlsoLatest, save_strategy="steps", save_steps=4)
        trainer.train()
    saved, latest = (load_file(tmp_path / "run" / name / "model.safetensors") for name in ("checkpoint-4", "latest"))
    exactly(latest, saved)


def test_the_best_checkpoint_stays(tmp_path):
    """It is found to be the best only after its save, and others follow."""
    best = {"metric_for_best_model": "eval_loss", "greater_is_better": True, "eval_strategy": "epoch"}

    def kept(side, name):
        saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
        trainer = language(side, tmp_path / name, **saves, **best)
        trainer.train()
        written = json.loads((tmp_path / name / "checkpoint-4" / "trainer_state.json").read_text())
        named = {written["best_model_checkpoint"], trainer.state.best_model_checkpoint}
        return {path.name for path in (tmp_path / name).glob("checkpoint-*")}, {Path(path).name for path in named}

    want = kept(Plain(), "plain")
    assert want == ({"checkpoint-2", "checkpoint-4"}, {"checkpoint-2"})
    with streamed(tmp_path) as side:
        assert kept(side, "streamed") == want


def test_callbacks_hear_of_the_state_of_the_step(tmp_path):
    """Logs made since that step are left out."""
    seen = []

    class Logs(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            seen.append((state.global_step, max(line["step"] for line in state.log_history)))

    settings = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "no"}
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", parts={"callbacks": [Logs()]}, **settings)
        look = trainer._outcore_saves.look
        trainer._outcore_saves.look = lambda: None if trainer.state.global_step == 3 else look()  # as if not done yet
        trainer.train()
    assert seen == [(2, 2), (4, 4)]


@pytest.mark.parametrize("end", [KeyboardInterrupt, EndedAtOnceError, SystemExit])
def test_who_ends_a_run_at_once_waits_for_no_save(end, tmp_path, monkeypatch):
    """No callback is told of it. An orderly exit waits."""
    goes_on, write, end_at_once = threading.Event(), CheckpointFile.write, Save.end_at_once

    def held(self: Any, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread() and "checkpoint-2" in str(self.path):
            goes_on.wait(5)
        write(self, *args)

    monkeypatch.setattr(CheckpointFile, "write", held)
    monkeypatch.setattr(Save, "end_at_once", lambda self: (end_at_once(self), goes_on.set()))

    class Ends(Heard):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 2:
                if end is SystemExit:
                    goes_on.set()
                raise end

    heard, is_given_up = Ends(), end is not SystemExit
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", save_strategy="steps", save_steps=1, parts={"callbacks": [heard]})
        with pytest.raises(end):
            trainer.train()
    assert [step for step, _ in heard.saved] == ([1] if is_given_up else [1, 2])
    left = sorted(path.name for path in (tmp_path / "run").glob("*checkpoint*"))
    assert left == [f"checkpoint-{step}" for step in ([1] if is_given_up else [1, 2])]


def test_a_trainer_may_write_weights_of_its_own(tmp_path, monkeypatch):
    """As a class does that overrides ``_save`` in front of the mixin."""

    def saves(self: Any, output_dir: str | None = None, state_dict: Any = None) -> None:
        Path(output_dir).mkdir()
        save_file({name: tensor.clone() for name, tensor in outcore.named_tensors(self.model)}, f"{output_dir}/own")

    monkeypatch.setattr(OutcoreMixin, "_save", saves)
    with streamed(tmp_path) as side:
        language(side, tmp_path / "run", save_strategy="steps", save_steps=2).train()
    checkpoint = tmp_path / "run" / "checkpoint-2"
    assert read_manifest(checkpoint, check=True).step == 2
    assert load_file(checkpoint / "own")


def unsavable() -> Any:
    """A model whose generation settings can be read and not be saved."""
    model = llama()
    model.generation_config.update(do_sample=False, temperature=0.9)
    return model


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid")
@pytest.mark.parametrize("job", [sft, language])
def test_a_model_that_cannot_be_saved_is_not_trained(job, tmp_path):
    with streamed(tmp_path) as side:
        trainer = job(side, tmp_path / "run", model=unsavable(), save_strategy="steps", save_steps=2)
        with pytest.raises(outcore.ConfigError, match="generation_config.json: .* correct it in the model before"):
            trainer.train()
        assert trainer.state.global_step == 0
        trainer.model.generation_config.update(do_sample=True)
        trainer.train()
        assert (tmp_path / "run" / "checkpoint-4" / "generation_config.json").is_file()


@pytest.mark.filterwarnings("ignore:.*generation flags are not valid")
def test_weights_come_first_where_small_files_cannot_be_saved(tmp_path):
    """Nothing is to be saved, so it is trained with a warning; a save that the user asks for writes what it can."""
    with streamed(tmp_path) as side:
        trainer = sft(side, tmp_path / "run", model=unsavable())
        with pytest.warns(UserWarning, match="cannot be saved as a whole: generation_config.json"):
            trainer.train()
        with pytest.raises(SmallFilesError, match="the weights are there and whole, .*: generation_config.json: "):
            trainer.save_model(str(tmp_path / "saved"))
        saved = load_file(tmp_path / "saved" / "model.safetensors")
        exactly(saved, {name: dict(outcore.named_tensors(trainer.model))[name] for name in saved})
    assert {"config.json", "tokenizer.json", "training_args.bin"} <= {p.name for p in (tmp_path / "saved").iterdir()}
