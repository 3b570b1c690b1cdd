"""Saving and resuming: what is written and read, and that a resumed run equals the uninterrupted run."""

from __future__ import annotations

import errno
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback

import outcore
from outcore.engine.optimizer import StreamedOptimizer
from outcore.integrations.transformers import OutcoreMixin
from outcore.memory.files.checkpoint_folder import read_manifest

from .rig import (
    ALL_TIERS,
    TEXTS,
    WARNINGS,
    Plain,
    dpo,
    exactly,
    language,
    llama,
    logs,
    lora,
    saved_model,
    sft,
    streamed,
    tiers,
    token_dataset,
    weights,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]

SAVES = {"save_strategy": "steps", "save_steps": 3}  # of four steps; step 3 is in the middle of the second epoch
CHECKPOINT = "checkpoint-3"


def sft_lora(side, folder, *, parts=None, **changes):
    return sft(side, folder, parts={"peft_config": lora(), **(parts or {})}, **changes)


def history(trainer):
    """Logs without values that count from the beginning of a call of ``train``."""
    return [{k: v for k, v in entry.items() if not k.endswith("num_tokens")} for entry in logs(trainer)[:-1]]


@pytest.mark.parametrize("job", [language, sft_lora, dpo])
def test_resumed_run_is_the_uninterrupted_run(job, tmp_path):
    def build(side, folder, **changes):
        reference = {"parts": {"ref_model": llama(seed=4)}} if job is dpo else {}
        return job(side, tmp_path / folder, **reference, **SAVES, **changes)

    plain = build(Plain(), "plain")
    plain.train()
    with streamed(tmp_path) as side:
        whole = build(side, "outcore")
        whole.train()
        exactly(logs(whole), logs(plain))
    for origin in ("plain", "outcore"):
        other = {} if job is sft_lora else {"model": llama(seed=8)}  # all values come from the checkpoint
        with streamed(tmp_path) as side:
            resumed = build(side, f"from {origin}", **other)
            if origin == "plain":
                resumed.evaluate()  # so it prepares before it knows the checkpoint
            resumed.train(resume_from_checkpoint=str(tmp_path / origin / CHECKPOINT))
            assert tiers(resumed.model) == ALL_TIERS
            exactly(history(resumed), history(plain))
            exactly(weights(resumed.model), weights(plain.model))


@pytest.mark.parametrize("job", [language, sft_lora])
def test_load_checkpoint_takes_what_a_trainer_saved(job, tmp_path):
    with streamed(tmp_path) as side:
        whole = job(side, tmp_path / "whole", save_strategy="steps", save_steps=4)
        whole.train()
        other = job(side, tmp_path / "other", **({} if job is sft_lora else {"model": llama(seed=8)}))
        other.evaluate()  # prepares
        checkpoint = tmp_path / "whole" / "checkpoint-4"
        assert outcore.load_checkpoint(other.model, other.optimizer, checkpoint) == {"step": 4}
        exactly(weights(other.model), weights(whole.model))
        there, here = (trainer.optimizer.state_dict() for trainer in (whole, other))
        exactly(here["state"], there["state"])
        assert here["param_groups"] == there["param_groups"]


@pytest.mark.parametrize(
    "changes",
    [{"train_sampling_strategy": "group_by_length"}, {"accelerator_config": {"use_seedable_sampler": False}}],
    ids=["lengths", "seed"],
)
def test_rows_keep_the_order_that_was_drawn(changes, tmp_path):
    """Such a sampler draws from torch's own generator, of which the plain Trainer restores no earlier state."""
    with streamed(tmp_path) as side:
        whole = language(side, tmp_path / "whole", **SAVES, **changes)
        whole.train()
        resumed = language(side, tmp_path / "resumed", model=llama(seed=8), **SAVES, **changes)
        torch.manual_seed(9)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / CHECKPOINT))
        exactly(history(resumed), history(whole))
        exactly(weights(resumed.model), weights(whole.model))


class Passes(torch.utils.data.IterableDataset):
    """Data whose length nobody knows, in another order in each pass."""

    passes = 0

    def set_epoch(self, epoch):
        self.passes = epoch

    def __iter__(self):
        yield from [*token_dataset(TEXTS[self.passes :])][:5]


@pytest.mark.parametrize(("accumulation", "step"), [(1, 5), (1, 7), (2, 3)], ids=["end of a pass", "within", "uneven"])
def test_data_that_is_shorter_than_the_run(accumulation, step, tmp_path):
    """The plain Trainer takes all steps for one pass, and would go on with the first rows."""
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": accumulation, "max_steps": 9}
    changes |= {"save_strategy": "steps", "save_steps": step, "eval_strategy": "no"}

    def build(side, folder, **more):
        return language(side, tmp_path / folder, parts={"train_dataset": Passes()}, **changes, **more)

    plain = build(Plain(), "plain")
    plain.train()
    for origin in ("plain", "outcore"):
        with streamed(tmp_path) as side:
            build(side, "outcore").train()
            resumed = build(side, f"from {origin}", model=llama(seed=8))
            resumed.train(resume_from_checkpoint=str(tmp_path / origin / f"checkpoint-{step}"))
            exactly(history(resumed), history(plain))
            exactly(weights(resumed.model), weights(plain.model))


def test_a_save_at_the_end_of_a_pass_over_such_data(tmp_path):
    """It is not evaluated again, which would draw random numbers."""
    changes = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 1, "max_steps": 9}
    changes |= {"save_strategy": "epoch", "eval_strategy": "epoch", "parts": {"train_dataset": Passes()}}
    with streamed(tmp_path) as side:
        whole = language(side, tmp_path / "whole", **changes)
        whole.train()
        resumed = language(side, tmp_path / "resumed", model=llama(seed=8), **changes)
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
        exactly(history(resumed), history(whole))
        exactly(weights(resumed.model), weights(whole.model))


@pytest.mark.parametrize("origin", ["plain", "outcore"])
def test_what_a_trainer_saves_besides(origin, tmp_path):
    """As TRL's GRPOTrainer does, which saves and loads a coefficient with the optimizer."""

    class Own(Trainer):
        told = 0

        def _save_checkpoint(self, model, trial):
            super()._save_checkpoint(model, trial)
            Path(self._get_output_dir(trial), f"checkpoint-{self.state.global_step}", "own").write_text("7")

        def _load_optimizer_and_scheduler(self, checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            if checkpoint is not None:
                self.told = int(Path(checkpoint, "own").read_text())

    plain = language(Plain(), tmp_path / "plain", kind=Own, **SAVES)
    plain.train()
    with streamed(tmp_path) as side:
        language(side, tmp_path / "outcore", kind=Own, **SAVES).train()
        resumed = language(side, tmp_path / "resumed", kind=Own, model=llama(seed=8), **SAVES)
        resumed.train(resume_from_checkpoint=str(tmp_path / origin / CHECKPOINT))
        assert resumed.told == 7
        exactly(weights(resumed.model), weights(plain.model))


def test_resuming_bf16_with_masters(tmp_path):
    def build(side, folder):
        return language(side, tmp_path / folder, model=llama(torch.bfloat16), **SAVES)

    with streamed(tmp_path, precision="bf16") as side:
        whole = build(side, "whole")
        whole.train()
        assert "master" in whole.optimizer.state_dict()["state"][0]
        want = weights(whole.model)
    with streamed(tmp_path, precision="bf16") as side:
        resumed = build(side, "rest")
        resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / CHECKPOINT))
        exactly(weights(resumed.model), want)


def test_resuming_bf16_without_masters_beside_8_bits(tmp_path):
    """States are those of bitsandbytes: embeddings and small parameters keep fp32."""

    def model():
        torch.manual_seed(3)
        config = LlamaConfig(vocab_size=259, hidden_size=64, intermediate_size=80, num_hidden_layers=2, pad_token_id=0)
        return LlamaForCausalLM(config).bfloat16()

    def run(folder, *, resume=None, **options):
        with streamed(tmp_path, precision="pure_bf16", **options) as side:
            trainer = language(side, tmp_path / folder, model=model(), optim="adamw_bnb_8bit", **SAVES)
            trainer.train(resume_from_checkpoint=resume)
            states = trainer.optimizer.state_dict()["state"].values()
            assert {s["exp_avg"].dtype for s in states} == {torch.float32, torch.uint8}
            return weights(trainer.model)

    want = run("whole")
    exactly(run("rest", resume=str(tmp_path / "whole" / CHECKPOINT)), want)
    exactly(run("one", budget=outcore.Budget()), want)


@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_model_on_the_meta_device(adapters, tmp_path):
    saved = saved_model(tmp_path / "model")
    job = sft_lora if adapters else sft
    plain = job(Plain(), tmp_path / "plain", model=saved, **SAVES)
    plain.train()

    def on_meta(side, folder):
        with torch.device("meta"):
            model = llama(seed=8)
        return job(side, tmp_path / folder, model=model, **SAVES)

    if not adapters:  # the first values of adapters would be other random numbers
        with streamed(tmp_path, weights=saved) as side:
            whole = on_meta(side, "whole")
            whole.train()
            exactly(weights(whole.model), weights(plain.model))
    with streamed(tmp_path, weights=saved) as side:
        resumed = on_meta(side, "resumed")
        resumed.train(resume_from_checkpoint=str(tmp_path / "plain" / CHECKPOINT))
        exactly(weights(resumed.model), weights(plain.model))


@pytest.mark.parametrize("job", [language, sft_lora])
def test_best_model_is_loaded_at_the_end(job, tmp_path):
    best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
    changes = {"save_strategy": "steps", "save_steps": 2, **best}

    def run(side, folder):
        trainer = job(side, tmp_path / folder, **changes)
        trainer.train()
        best = Path(trainer.state.best_model_checkpoint).name
        return best, weights(trainer.model), trainer.evaluate()["eval_loss"]

    want = run(Plain(), "plain")
    assert want[0] != "checkpoint-4", "the last one is the best one anyway"
    with streamed(tmp_path) as side:
        got = run(side, "outcore")
    assert got[0] == want[0]
    exactly(got[1:], want[1:])


def test_files_of_a_checkpoint(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("all states, or all weights, in host memory at once")

    sft(Plain(), tmp_path / "plain", **SAVES).train()
    with streamed(tmp_path) as side:
        trainer = sft(side, tmp_path / "outcore", **SAVES)
        monkeypatch.setattr(StreamedOptimizer, "state_dict", refuse)
        monkeypatch.setattr(LlamaForCausalLM, "state_dict", refuse)
        trainer.train()
        monkeypatch.undo()
        folder = tmp_path / "outcore" / "checkpoint-4"
        names = {path.name for path in folder.iterdir()}
        expected = {path.name for path in (tmp_path / "plain" / "checkpoint-4").iterdir()}
        assert names == expected - {"optimizer.pt", "scheduler.pt", "rng_state.pth"} | {
            *("optimizer.safetensors", "scheduler.json", "rng_state.json", "rng_state.safetensors", "manifest.json")
        }
        exactly(weights(LlamaForCausalLM.from_pretrained(folder)), weights(trainer.model))
        assert (
            trainer.processing_class.get_vocab() == type(trainer.processing_class).from_pretrained(folder).get_vocab()
        )


def test_adapters_are_saved_alone(tmp_path):
    with streamed(tmp_path) as side:
        trainer = sft_lora(side, tmp_path / "outcore")
        trainer.train()
        trainer.save_model(str(tmp_path / "adapters"))
        trained = weights(trainer.model)
    names = {path.name for path in (tmp_path / "adapters").iterdir()}
    assert "adapter_model.safetensors" in names
    assert "model.safetensors" not in names
    exactly(weights(PeftModel.from_pretrained(llama(), tmp_path / "adapters")), trained)
    assert trained.keys() == weights(get_peft_model(llama(), lora())).keys()


def test_saving_before_anything_was_prepared(tmp_path):
    with streamed(tmp_path) as side:
        language(side, tmp_path / "outcore").save_model(str(tmp_path / "first"))
    exactly(weights(LlamaForCausalLM.from_pretrained(tmp_path / "first")), weights(llama()))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with streamed(folder) as side:
        language(side, folder, save_strategy="steps", save_steps=2).train()
    return folder


def resume(folder, tmp_path):
    with streamed(tmp_path) as side:
        language(side, tmp_path / "again").train(resume_from_checkpoint=str(folder))


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (["optimizer.safetensors"], "optimizer.safetensors is not there"),
        (["scheduler.json"], "scheduler.pt is not there"),
        (["trainer_state.json"], "trainer_state.json is not there"),
        (["optimizer.safetensors", "scheduler.json"], "optimizer.safetensors and scheduler.pt are not there"),
    ],
    ids=" ".join,
)
def test_incomplete_checkpoints(lost, said, checkpoints, tmp_path):
    """If one of the files is missing, the plain Trainer silently starts states and schedule anew."""
    rest = tmp_path / "rest"
    shutil.copytree(checkpoints / "checkpoint-2", rest)
    for name in ("manifest.json", *lost):
        (rest / name).unlink()
    with pytest.raises(outcore.ConfigError, match=f"expected a whole checkpoint in '.*', but {said}, .*begin anew"):
        resume(rest, tmp_path)


def test_parts_of_two_checkpoints(checkpoints, tmp_path):
    mixed = tmp_path / "mixed"
    shutil.copytree(checkpoints / "checkpoint-4", mixed)
    shutil.copy(checkpoints / "checkpoint-2" / "optimizer.safetensors", mixed)
    with pytest.raises(outcore.ConfigError, match="as it was saved, but .* of 'optimizer.safetensors' at byte 0"):
        resume(mixed, tmp_path)
    (mixed / "manifest.json").unlink()
    with pytest.raises(
        outcore.ConfigError, match="trainer_state.json is of step 4 and optimizer.safetensors of step 2"
    ):
        resume(mixed, tmp_path)


def test_checkpoint_without_random_state(checkpoints, tmp_path):
    rest = tmp_path / "rest"
    shutil.copytree(checkpoints / "checkpoint-2", rest)
    (rest / "manifest.json").unlink()
    (rest / "rng_state.json").unlink()
    with pytest.warns(UserWarning, match="has no rng_state.pth"):
        resume(rest, tmp_path)


@pytest.mark.parametrize("job", [language, sft_lora])
def test_no_checkpoint_there(job, tmp_path):
    with streamed(tmp_path) as side:
        with pytest.raises(outcore.ConfigError, match=r"in '.*nowhere', but "):
            job(side, tmp_path / "outcore").train(resume_from_checkpoint=str(tmp_path / "nowhere"))


def test_a_damaged_checkpoint_is_said_and_the_one_before_is_taken(checkpoints, tmp_path):
    """The leftovers of a killed run do not count as a checkpoint."""
    folder = tmp_path / "run"
    shutil.copytree(checkpoints, folder)
    (folder / ".checkpoint-6.0123abcd.partial").mkdir()
    states = folder / "checkpoint-4" / "optimizer.safetensors"
    data = bytearray(states.read_bytes())
    data[-100] ^= 4
    states.write_bytes(data)
    with streamed(tmp_path) as side:
        resumed = language(side, folder, save_strategy="steps", save_steps=3, save_total_limit=1)
        with pytest.warns(UserWarning, match="checkpoint-4.* of 'optimizer.safetensors' .* The one before it is taken"):
            resumed.train(resume_from_checkpoint=True)
        assert [line["step"] for line in resumed.state.log_history if "loss" in line] == [1, 2, 3, 4]
    assert sorted(path.name for path in folder.iterdir() if "checkpoint" in path.name) == ["checkpoint-4"]
    with streamed(tmp_path) as side:
        language(side, tmp_path / "again").train(resume_from_checkpoint=str(folder / "checkpoint-4"))


def test_nothing_is_there_until_all_of_it_is(tmp_path, monkeypatch):
    """During a save or after a failed one only earlier checkpoints are visible; callbacks find the new one whole."""
    seen = []

    class Looks(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            read_manifest(Path(args.output_dir, f"checkpoint-{state.global_step}"), check=True)
            seen.append(state.global_step)

    def full(self, output_dir):
        there = sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*"))
        assert there == [f"checkpoint-{step}" for step in seen]
        if self.state.global_step == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(self, output_dir)

    save = OutcoreMixin._save_rng_state
    monkeypatch.setattr(OutcoreMixin, "_save_rng_state", full)
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "run", save_strategy="steps", save_steps=1, parts={"callbacks": [Looks()]})
        with pytest.raises(outcore.OutcoreError, match="checkpoint-3.*No space left"):
            trainer.train()
    assert seen == [1, 2]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoint-1", "checkpoint-2"]


def test_a_signal_saves_as_in_the_plain_trainer(tmp_path, monkeypatch):
    """Transformers' own way may save in mid-step, with that moment's random numbers; the streamed Trainer does, too."""

    def stopped_and_resumed(side, folder):
        stopped = language(side, folder, enable_jit_checkpoint=True)
        manager = next(c.jit_manager for c in stopped.callback_handler.callbacks if hasattr(c, "jit_manager"))
        manager.kill_wait = 0
        step = stopped.training_step

        def training_step(*args):
            if stopped.state.global_step == 2 and not manager.is_checkpoint_requested:
                signal.raise_signal(signal.SIGTERM)
                while not manager.is_checkpoint_requested:
                    time.sleep(0.01)
            return step(*args)

        monkeypatch.setattr(stopped, "training_step", training_step)
        stopped.train()
        assert stopped.state.global_step == 3
        resumed = language(side, folder, model=llama(seed=8))
        resumed.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        return history(resumed), weights(resumed.model)

    before = signal.getsignal(signal.SIGTERM)
    try:
        want = stopped_and_resumed(Plain(), tmp_path / "plain")
        with streamed(tmp_path) as side:
            exactly(stopped_and_resumed(side, tmp_path / "streamed"), want)
    finally:
        signal.signal(signal.SIGTERM, before)
