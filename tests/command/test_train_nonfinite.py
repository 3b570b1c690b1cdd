"""``--on-nonfinite``: a loss or gradient that is not finite ends the run, or the step is skipped without a trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file
from trl import SFTTrainer

from outcore.command.train.loop.nonfinite import FiniteSteps, finite

from .conftest import TIERS, Run, replaced
from .test_train import LOOP, assert_equal, losses, options, plain, tensors, weights

__all__ = ["weights"]  # the fixture

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")


def strict_jsonl(path: Path) -> list[dict[str, Any]]:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """Step, counted from 1 -> factor on the loss of its last batch."""
    factors: dict[int, float] = {}
    compute = SFTTrainer.compute_loss

    def compute_loss(self, model, inputs, **kwargs):
        loss = compute(self, model, inputs, **kwargs)
        factor = factors.get(self.state.global_step + 1) if self.model.training else None
        return loss if factor is None or not self.accelerator.sync_gradients else loss * factor

    monkeypatch.setattr(SFTTrainer, "compute_loss", compute_loss)
    return factors


@pytest.fixture
def shared(weights: Path, text: Path, tmp_path: Path) -> tuple[Any, ...]:
    tiers = (*TIERS, "--disk", tmp_path)
    return ("train", "--model", weights, "--data", text, "--precision", "fp32", *tiers, *options(LOOP))


class TestStop:
    def test_the_run_ends_before_the_update_and_names_the_last_checkpoint(self, command: Run, shared, tmp_path, poison):
        poison.update({5: math.nan})
        out = tmp_path / "run"
        failed = command(*shared, "--out", out, "--save-every", 2)
        assert failed.status == 1
        *_, said, left = failed.err.splitlines()
        assert said.startswith("outcore: step 5: expected a finite loss and gradient norm, but the loss is nan and")
        assert "--on-nonfinite skip" in said
        assert left.startswith(f"{out / 'checkpoint-4'} holds everything up to step 4")
        assert "Done" not in failed.out
        assert sorted(p.name for p in out.iterdir()) == ["checkpoint-2", "checkpoint-4", "metrics.jsonl", "plan.json"]
        assert len(strict_jsonl(out / "metrics.jsonl")) == 4
        poison.clear()
        assert command(*shared, "--out", out, "--save-every", 2, "--resume").status == 0
        assert len(losses(out)) == 6

    def test_a_gradient_alone_is_enough(self, command, shared, tmp_path, monkeypatch):
        norm = FiniteSteps.__base__._get_grad_norm
        monkeypatch.setattr(
            FiniteSteps.__base__, "_get_grad_norm", lambda *a, **k: norm(*a, **k) * math.inf, raising=False
        )
        failed = command(*shared, "--out", tmp_path / "run")
        assert failed.status == 1
        assert "step 1: expected a finite loss" in failed.err
        assert "the gradient norm inf" in failed.err
        assert "no checkpoint was saved" in failed.err


class TestSkip:
    @pytest.mark.parametrize("early", [False, True])
    def test_a_skipped_step_is_as_if_it_had_not_been(
        self, command, shared, weights, text, tmp_path, poison, monkeypatch, early
    ):
        """Weights, moments, their step count and the learning rate stay, also if updates began inside backward."""
        poison.update({1: math.inf, 4: math.nan})
        out = tmp_path / "run"
        if early:
            assert command(*shared, "--out", tmp_path / "planned", "--on-nonfinite", "skip").status == 0
            plan = json.loads((tmp_path / "planned" / "plan.json").read_text())
            plan["accumulation_steps"] = 3
            for unit in plan["units"]:
                unit["early"] = unit["states"] != "device"
            (tmp_path / "plan.json").write_text(json.dumps(plan))
            big = ("--plan", tmp_path / "plan.json", "--device-memory", "8MiB", "--host-memory", "8MiB")
            shared = replaced(*shared, *big)
        done = command(*shared, "--out", out, "--on-nonfinite", "skip")
        assert done.status == 0, done.err
        assert ("units updated inside backward" in done.out) == early
        assert "note: step 1: the loss is inf and the gradient norm nan; no update (1 so far)" in done.err
        lines = strict_jsonl(out / "metrics.jsonl")
        assert [line["skipped"] for line in lines] == [1, 0, 0, 1, 0, 0]
        assert [line["step"] for line in lines if line["loss"] is None] == [1, 4]

        monkeypatch.setattr(AcceleratedOptimizer, "step", leaving_out(AcceleratedOptimizer.step))
        rows = [{"text": text.read_text()}]
        trainer = plain(weights, tmp_path / "plain", rows, packing=True, packing_strategy="wrapped")
        theirs = [line for line in trainer.state.log_history if "loss" in line]
        assert [line["lr"] for line in lines] == [line["learning_rate"] for line in theirs]
        finite_ones = [i for i, line in enumerate(lines) if line["loss"] is not None]
        assert [lines[i]["grad_norm"] for i in finite_ones] == [theirs[i]["grad_norm"] for i in finite_ones]
        mine = load_file(out / "model" / "model.safetensors")
        assert_equal(mine, {name: t for name, t in tensors(trainer.model).items() if name in mine})

    def test_several_steps_in_a_line(self, command, shared, tmp_path, poison):
        """The mean of a line is over the steps that were made."""
        poison.update({2: math.nan, 5: math.nan, 6: math.nan})
        for every in (1, 2):
            more = ("--on-nonfinite", "skip", "--out", tmp_path / str(every), "--set", f"logging_steps={every}")
            assert command(*shared, *more).status == 0
        one, two = (losses(tmp_path / name) for name in ("1", "2"))
        assert two == [one[0], pytest.approx((one[2] + one[3]) / 2), None]


def leaving_out(step: Callable[..., None]) -> Callable[..., None]:
    """Skip the update, and the scheduler's step with it, if a gradient is not finite: what a plain loop would do."""

    def skipping(self: AcceleratedOptimizer, closure: None = None) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self._is_overflow = not all(bool(grad.isfinite().all()) for grad in grads)
        if not self._is_overflow:
            step(self, closure)

    return skipping


def test_go_is_the_plain_trainer_with_honest_numbers(command, shared, tmp_path, poison):
    poison.update({3: math.nan})
    out = tmp_path / "run"
    done = command(*shared, "--out", out, "--on-nonfinite", "go", "--save-every", 6)
    assert done.status == 0, done.err
    assert [line for line in done.err.splitlines() if "nan" in line] == [
        "note: step 3: the loss is nan and the gradient norm nan; the run goes on, as --on-nonfinite go says"
    ]
    assert [loss is None for loss in losses(out)] == [False, False, True, True, True, True]
    strict_jsonl(out / "metrics.jsonl")
    (state,) = out.glob("checkpoint-*/trainer_state.json")
    assert "NaN" not in state.read_text()


def test_finite():
    inf = math.inf
    assert finite({"a": [1.0, inf, (math.nan, "nan")], "b": -inf, "c": 3}) == {"a": [1.0, None, [None, "nan"]], "b": None, "c": 3}  # fmt: skip  # noqa: E501
