"""Uses of a Trainer other than a single call of ``train``."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
import torch
from transformers import Trainer, TrainerCallback, get_cosine_schedule_with_warmup

import outcore
from outcore.core.errors import ConfigError
from outcore.engine.engine import attachment_of
from outcore.engine.optimizer import StreamedOptimizer
from outcore.preparation.prepare_options import Options

from .rig import (
    ALL_TIERS,
    CHECKPOINTING,
    EVAL_TEXTS,
    TEXTS,
    WARNINGS,
    Plain,
    dpo,
    exactly,
    language,
    llama,
    logs,
    lora,
    same,
    seen,
    sft,
    streamed,
    tiers,
    token_dataset,
    train,
    weights,
)

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


def test_evaluating_before_training(tmp_path):
    def drive(trainer):
        before = trainer.evaluate()["eval_loss"]
        trainer.train()
        return before, trainer.evaluate()["eval_loss"]

    same(language, tmp_path, drive=drive)


def test_arguments_that_change_between_an_evaluation_and_training(tmp_path):
    def drive(trainer):
        trainer.evaluate()
        trainer.args.learning_rate, trainer.args.weight_decay = 2e-2, 0.3
        trainer.train()

    same(language, tmp_path, drive=drive)


def test_what_is_changed_by_hand_between_an_evaluation_and_training_stays(tmp_path):
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "outcore")
        trainer.evaluate()
        trainer.optimizer.param_groups[0]["eps"] = 1e-3
        trainer.args.weight_decay = 0.3
        trainer.train()
        group = trainer.optimizer.param_groups[0]
        assert (group["eps"], group["weight_decay"]) == (1e-3, 0.3)


def test_another_optimizer_after_an_evaluation_is_refused(tmp_path):
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "outcore")
        trainer.evaluate()
        trainer.args.optim = "sgd"
        with pytest.raises(ConfigError, match=r"expected the AdamW .* ask for another optimizer now \(SGD\)"):
            trainer.train()


def test_predicting_without_training(tmp_path):
    dataset = token_dataset(EVAL_TEXTS)
    parts = {"train_dataset": None}
    want = language(Plain(), tmp_path / "plain", parts=parts).predict(dataset)
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "outcore", parts=parts)
        got = trainer.predict(dataset)
        assert tiers(trainer.model) == ALL_TIERS
        assert trainer.optimizer is None
    exactly(got.predictions, want.predictions)
    assert got.metrics["test_loss"] == want.metrics["test_loss"]


def test_training_twice(tmp_path):
    def drive(trainer):
        trainer.train()
        first = logs(trainer)
        trainer.train()
        return first

    same(language, tmp_path, drive=drive)


def test_model_init(tmp_path):
    seen = []

    def drive(trainer):
        trainer.train()
        first = trainer.model
        values = weights(first)
        trainer.train()
        assert trainer.model is not first
        if isinstance(trainer.optimizer, StreamedOptimizer):
            seen.append(attachment_of(first))
        return values

    def job(side, folder):
        return language(side, folder, parts={"model_init": lambda: llama()})

    same(job, tmp_path, drive=drive)
    assert seen == [None], "the first model was not closed"


def test_given_optimizer_and_scheduler(tmp_path):
    def job(side, folder):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
        scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)
        return language(side, folder, model=model, parts={"optimizers": (optimizer, scheduler)})

    same(job, tmp_path)


def test_optimizer_that_is_prepared_already(tmp_path):
    def job(side, folder):
        model = llama()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if type(side) is not Plain:
            model, optimizer = side.prepare(model, optimizer, Options())
        return language(side, folder, model=model, parts={"optimizers": (optimizer, None)})

    same(job, tmp_path)


def test_create_optimizer_of_a_subclass(tmp_path):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, fused=True)
            return self.optimizer

    same(functools.partial(language, kind=Own), tmp_path)


def test_choice_of_optimizer_of_a_subclass(tmp_path):
    class Own(Trainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args, model=None):
            assert args.optim == "ademamix"  # a name of which outcore knows nothing
            return torch.optim.SGD, {"lr": 0.1, "fused": True}

    same(functools.partial(language, kind=Own), tmp_path, optim="ademamix")


def test_optimizer_that_outcore_does_not_know(tmp_path):
    class Own(Trainer):
        def create_optimizer(self, model=None):
            self.optimizer = torch.optim.ASGD(self.model.parameters())
            return self.optimizer

    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "outcore", kind=Own)
        with pytest.raises(outcore.ConfigError, match="ASGD"):
            trainer.train()


def test_a_second_trainer_takes_the_model_over(tmp_path):
    """For example in a second stage of training, or when a notebook's cell is run again."""

    def job(side, folder):
        model = llama()
        language(side, folder / "first", model=model).train()
        return language(side, folder / "second", model=model)

    same(job, tmp_path)


def test_a_second_trainer_with_positional_arguments(tmp_path):
    with streamed(tmp_path) as side:
        first = language(side, tmp_path / "first")
        first.train()
        kind = type(first)
        second = kind(first.model, first.args, first.data_collator, first.train_dataset, first.eval_dataset)
        side.models.append(lambda: second.model)
        second.train()


def test_a_trainer_whose_model_was_closed(tmp_path):
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "trainer")
        trainer.train()
        outcore.close(trainer.model)
        with pytest.raises(outcore.ConfigError, match=r"outcore.close\(\) ended its run, .* or build a new Trainer"):
            trainer.train()


def test_no_take_over_that_would_lose_weights(tmp_path, monkeypatch):
    with streamed(tmp_path) as side:
        first = language(side, tmp_path / "first")
        first.train()
        want = weights(first.model)
        with monkeypatch.context() as patched:
            patched.setattr("outcore.checkpoint.weights.model_values.host_free_bytes", lambda: 1000)
            with pytest.raises(outcore.ConfigError, match=r"its weights would be lost: they take .* of host memory"):
                language(side, tmp_path / "second", model=first.model)
        exactly(weights(first.model), want)
        assert not first.optimizer.engine.is_closed


class Stops(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_a_second_trainer_after_an_interrupt(tmp_path):
    def job(side, folder):
        model = llama()
        with pytest.raises(KeyboardInterrupt):
            language(side, folder / "first", model=model, parts={"callbacks": [Stops()]}).train()
        return language(side, folder / "second", model=model)

    same(job, tmp_path)


class Samples(TrainerCallback):
    """Generates text at the end of every epoch."""

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def on_epoch_end(self, args, state, control, model, **_):
        model.eval()
        ids = torch.tensor([[1, 40, 41]])
        made = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=True)
        self.texts.append(made.tolist())


def test_a_callback_that_generates(tmp_path):
    samples = [Samples(), Samples()]
    callbacks = iter(samples)
    same(lambda *where: language(*where, parts={"callbacks": [next(callbacks)]}), tmp_path)
    assert samples[0].texts == samples[1].texts
    assert len(samples[0].texts) == 2


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]).mean())}


@pytest.mark.parametrize(
    "changes",
    [
        {
            "neftune_noise_alpha": 5.0,
            "label_smoothing_factor": 0.1,
            "max_grad_norm": 0.0,
            CHECKPOINTING: True,
        },
        {"parts": {"compute_metrics": accuracy}, "eval_on_start": True, "dataloader_num_workers": 1},
    ],
    ids=["training", "evaluation"],
)
def test_settings(changes, tmp_path):
    same(language, tmp_path, **changes)


def test_reference_log_probabilities_before_training(tmp_path):
    def job(side, folder):
        trainer = dpo(side, folder, precompute_ref_log_probs=True)
        assert (attachment_of(trainer.model) is None) == (type(side) is Plain)
        return trainer

    same(job, tmp_path)


def test_nothing_is_prepared_when_a_trainer_is_built(tmp_path):
    with streamed(tmp_path) as side:
        trainer = language(side, tmp_path / "outcore")
        assert attachment_of(trainer.model) is None
        assert trainer.optimizer is None


def test_bf16_masters_are_asked_for(tmp_path):
    with streamed(tmp_path, precision="bf16") as side:
        trainer = language(side, tmp_path / "outcore", model=llama(torch.bfloat16))
        trainer.train()
        assert trainer.optimizer.model_spec.precision == "bf16"
        assert all("master" in state for state in trainer.optimizer.state_dict()["state"].values())


def test_plan_and_units_are_passed_on(tmp_path):
    units = ["model.embed_tokens", "model.layers.1", "model.layers.2"]
    with streamed(tmp_path, units=units) as side:
        trainer = language(side, tmp_path / "outcore")
        trainer.train()
        plan, want = trainer.optimizer.plan, weights(trainer.model)
        assert [unit.name for unit in plan.units] == ["", *units]
    with streamed(tmp_path, units=units, plan=plan, budget=outcore.Budget(disk=tmp_path)) as side:
        trainer = language(side, tmp_path / "again")
        trainer.train()
        assert trainer.optimizer.plan == plan
        exactly(weights(trainer.model), want)
    promising = dataclasses.replace(plan, accumulation_steps=7)
    with streamed(tmp_path, units=units, plan=promising, budget=outcore.Budget(disk=tmp_path)) as side:
        with pytest.raises(ConfigError, match=r"expected the accumulation_steps that the plan was made for \(7\)"):
            language(side, tmp_path / "promised").train()


class OwnLoop(Trainer):
    def training_step(self, *args, **kwargs):
        return super().training_step(*args, **kwargs)


@pytest.mark.parametrize(
    ("kind", "norm", "is_early"), [(Trainer, 0.0, True), (Trainer, 0.1, False), (OwnLoop, 0.0, False)]
)
def test_updates_run_inside_backward_where_nothing_clips(kind, norm, is_early, tmp_path):
    want = seen(language(Plain(), tmp_path / "plain", kind=kind, max_grad_norm=norm), train)
    with streamed(tmp_path, budget=outcore.Budget(device="300KiB", host="1GiB", disk=tmp_path)) as side:
        trainer = language(side, tmp_path / "outcore", kind=kind, max_grad_norm=norm)
        exactly(seen(trainer, train), want)
        assert any(unit.early for unit in trainer.optimizer.plan.units) == is_early


class Endless(torch.utils.data.IterableDataset):
    """Data whose length nobody knows: an epoch ends after one micro-batch of the second step."""

    def __iter__(self):
        yield from token_dataset(TEXTS[:5])


class EndsAnEpoch(TrainerCallback):
    has_ended = False

    def on_substep_end(self, args, state, control, **kwargs):
        if state.global_step == 1 and not self.has_ended:
            self.has_ended = control.should_epoch_stop = True


@pytest.mark.parametrize("ends", ["data", "callback"])
def test_epochs_that_end_within_a_step(ends, tmp_path):
    """The next epoch adds to the gradients, so the number of backward passes is not promised."""

    def job(side, folder):
        parts = {"train_dataset": Endless()} if ends == "data" else {"callbacks": [EndsAnEpoch()]}
        size, steps = (1, 4) if ends == "data" else (2, 2)
        changes = {"per_device_train_batch_size": size, "gradient_accumulation_steps": steps, "max_steps": 3}
        return language(side, folder, parts=parts, max_grad_norm=0.0, eval_strategy="no", **changes)

    want = seen(job(Plain(), tmp_path / "plain"), train)
    with streamed(tmp_path, budget=outcore.Budget(device="300KiB", host="1GiB", disk=tmp_path)) as side:
        exactly(seen(job(side, tmp_path / "outcore"), train), want)


def test_logs_tell_what_was_moved(tmp_path):
    with streamed(tmp_path) as side:
        trainer = sft(side, tmp_path / "outcore")
        trainer.train()
        steps = [entry for entry in trainer.state.log_history if "loss" in entry]
        others = [entry for entry in trainer.state.log_history if "loss" not in entry]
        assert sum(entry["moved_bytes"] for entry in steps) <= sum(trainer.optimizer.traffic().values())
        assert all(entry["moved_bytes"] > 10**5 for entry in steps)
        assert all(entry["exposed_s"] >= 0 and math.isfinite(entry["exposed_s"]) for entry in steps)
        assert not any("moved_bytes" in entry for entry in others)


def test_no_second_recomputation(tmp_path):
    """TRL turns activation checkpointing on; inside units it would run every block a third time."""
    with streamed(tmp_path) as side:
        trainer = sft(side, tmp_path / "outcore", max_steps=1, parts={"peft_config": lora()})
        assert getattr(trainer.args, CHECKPOINTING)
        trainer.train()
        assert not getattr(trainer.model, f"is_{CHECKPOINTING}")
