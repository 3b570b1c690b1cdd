"""Updates inside backward: the bits of the plain loop, if an attempt is kept, dropped, or overtaken by the user."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import prepare_for_test
from torch import nn

from outcore.device.faults import Faults
from outcore.engine.unit.unit import Unit
from outcore.engine.updates.streamed import EarlyUpdates, _EarlyAttempt

from . import zoo
from .cases import Case, run, run_checked
from .loops import Record, Setting, assert_equal, plain_loop, streamed_loop

STEPS = 4


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch, patient_attempts: None) -> Counter[str]:
    """Count attempts, and attempts that were kept."""
    counts: Counter[str] = Counter()
    work, keep = _EarlyAttempt.out_of_place, EarlyUpdates.keep

    def start(self: _EarlyAttempt, *args: Any) -> Any:
        counts["started"] += 1
        return work(self, *args)

    def kept(self: EarlyUpdates, *args: Any) -> bool:
        is_kept = keep(self, *args)
        counts["kept"] += is_kept
        return is_kept

    monkeypatch.setattr(_EarlyAttempt, "out_of_place", start)
    monkeypatch.setattr(EarlyUpdates, "keep", kept)
    return counts


def case(name: str, kind: str, *, offset: int = 0, **setting: Any) -> Case:
    return Case(name, kind, Setting(steps=STEPS, **setting), promised=True, early=True, offset=offset, depth=2)


KINDS = ["host", "disk", "resident", "mixed"]
each_kind = pytest.mark.parametrize("kind", KINDS)


class TestWindow:
    """Without clipping every attempt is kept."""

    @pytest.mark.parametrize(
        ("kind", "precision", "micro_batches"),
        [
            *(("host", "fp32", 3), ("disk", "fp32", 1), ("resident", "pure_bf16", 3), ("mixed", "pure_bf16", 1)),
            *(("host", "bf16", 1), ("disk", "bf16", 3), ("resident", "bf16", 1), ("mixed", "bf16", 3)),
        ],
    )
    def test_equals_the_plain_loop(
        self, kind: str, precision: str, micro_batches: int, outcomes: Counter[str], tmp_path: Path
    ) -> None:
        c = case("gpt2", kind, precision=precision, micro_batches=micro_batches, clipping="off", scheduler="cosine")
        assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
        assert outcomes["kept"] == outcomes["started"] > STEPS

    @pytest.mark.parametrize(
        ("name", "optimizer"), [("patchwork", "adamw"), ("lora", "sgd"), ("mixtral", "adagrad"), ("qwen3", "adamw")]
    )
    def test_skipped_frozen_and_shared_parts(
        self, name: str, optimizer: str, outcomes: Counter[str], tmp_path: Path
    ) -> None:
        c = case(name, "mixed", precision="bf16", clipping="off", optimizer=optimizer, groups="two", offset=3)
        assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
        assert outcomes["kept"] == outcomes["started"] > 0

    def test_plain_sgd_has_nothing_but_weights(
        self, outcomes: Counter[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from . import loops

        monkeypatch.setitem(loops.OPTIMIZERS, "plain_sgd", (torch.optim.SGD, {"lr": 1e-2}))
        c = case("patchwork", "host", clipping="off", optimizer="plain_sgd")
        assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
        assert outcomes["kept"] == outcomes["started"] > 0


class TestSpeculation:
    """With clipping, attempts are kept in steps that do not clip."""

    @pytest.mark.parametrize(
        ("kind", "precision", "clipping"),
        [
            *(("host", "fp32", "on"), ("disk", "fp32", "always"), ("resident", "fp32", "never")),
            *(("disk", "bf16", "on"), ("mixed", "bf16", "always"), ("host", "bf16", "never"), ("mixed", "bf16", "on")),
            *(("resident", "pure_bf16", "on"), ("host", "pure_bf16", "always"), ("disk", "pure_bf16", "never")),
        ],
    )
    def test_equals_the_plain_loop(
        self, kind: str, precision: str, clipping: str, outcomes: Counter[str], tmp_path: Path, monkeypatch: Any
    ) -> None:
        from . import loops

        limit = loops.max_norm
        monkeypatch.setattr(loops, "max_norm", lambda name, how: 1e9 if how == "never" else limit(name, how))
        c = case("gpt2", kind, precision=precision, clipping=clipping, micro_batches=2)
        assert_equal(plain_loop.__wrapped__(c.name, c.setting), run_checked(c, tmp_path, poison=True))
        kept, started = outcomes["kept"], outcomes["started"]
        assert started > STEPS
        assert {"never": kept == started, "on": 0 < kept < started, "always": kept == 0}[clipping]

    def test_one_spike(self, outcomes: Counter[str], tmp_path: Path) -> None:
        """The gradients of one step are a hundred thousand times larger than the limit."""
        c = case("llama", "mixed", precision="bf16", clipping="always")

        def spiking() -> Callable[[nn.Module, zoo.Batch, int], torch.Tensor]:
            scales = iter([1e-4, 1e-4, 1e5, 1e-4, 1e-4])

            def spike(model: nn.Module, batch: zoo.Batch, _: int) -> torch.Tensor:
                loss = zoo.loss(model, batch) * next(scales)
                loss.backward()
                return loss

            return spike

        plain = plain_loop.__wrapped__(c.name, c.setting, backward=spiking())
        assert_equal(plain, run(c, tmp_path, backward=spiking()))
        assert 0 < outcomes["kept"] < outcomes["started"]


def train(
    model: nn.Module, optimizer: Any, name: str, before_step: Callable[[int], bool], scale: Callable[[int], float]
) -> list[torch.Tensor]:
    """Take some steps; ``before_step`` may change anything and says whether to step."""
    losses = []
    torch.manual_seed(3)
    for step, batch in enumerate(zoo.batches(name, steps=6, micro_batches=1)):
        loss = zoo.loss(model, batch) * scale(step)
        loss.backward()
        if before_step(step):
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses


class TestUserCameBetween:
    """Whatever a user does between backward and step counts, as it does in the plain loop."""

    def compare(
        self,
        tmp_path: Path,
        change: Callable[[nn.Module, Any, int], bool],
        scale: Callable[[int], float] = lambda _: 1.0,
    ) -> None:
        import outcore

        c = Case("llama", "mixed", Setting(), promised=True, early=True)
        plain = zoo.make(c.name, "fp32").to(zoo.DEVICE)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
        want = train(plain, optimizer, c.name, lambda step: change(plain, optimizer, step), scale)
        model = zoo.make(c.name, "fp32")
        mine = torch.optim.AdamW(model.parameters(), lr=1e-2)
        budget = outcore.Budget(disk=str(tmp_path))
        plan = c.plan(model, mine)
        with outcore.prepare(model, mine, plan=plan, budget=budget) as (model, streamed):
            got = train(model, streamed, c.name, lambda step: change(model, streamed, step), scale)
            assert torch.equal(torch.stack(want).nan_to_num(), torch.stack(got).nan_to_num())
            for (name, a), b in zip(outcore.named_tensors(model), plain.parameters(), strict=True):
                assert torch.equal(a.cpu(), b.cpu()), name
            states = streamed.state_dict()["state"]
            for i, state in optimizer.state_dict()["state"].items():
                assert torch.equal(state["exp_avg_sq"].cpu(), states[i]["exp_avg_sq"].cpu()), i

    def test_nothing(self, outcomes: Counter[str], tmp_path: Path) -> None:
        self.compare(tmp_path, lambda *_: True)
        assert outcomes["kept"] == outcomes["started"] > 0

    def test_a_rate_set_just_before_the_step(self, outcomes: Counter[str], tmp_path: Path) -> None:
        def change(_: nn.Module, optimizer: Any, step: int) -> bool:
            optimizer.param_groups[0]["lr"] = 1e-2 / (step + 2)
            return True

        self.compare(tmp_path, change)
        assert outcomes["kept"] == 0 < outcomes["started"]

    def test_a_skipped_step(self, outcomes: Counter[str], tmp_path: Path) -> None:
        self.compare(tmp_path, lambda _, __, step: step % 2 == 0)
        assert 0 < outcomes["kept"] < outcomes["started"]

    def test_a_step_skipped_since_gradients_are_not_finite(self, outcomes: Counter[str], tmp_path: Path) -> None:
        def change(model: nn.Module, _: Any, step: int) -> bool:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
            assert bool(norm.isfinite()) == (step % 3 != 1)
            return bool(norm.isfinite())

        self.compare(tmp_path, change, lambda step: float("inf") if step % 3 == 1 else 1.0)
        assert 0 < outcomes["kept"] < outcomes["started"]

    def test_gradients_scaled(self, tmp_path: Path) -> None:
        def change(model: nn.Module, _: Any, step: int) -> bool:
            for p in model.parameters():
                if step == 2 and p.grad is not None:
                    p.grad.mul_(0.5)
                if step == 3 and p.grad is not None:
                    p.grad.div_(3.0 if zoo.DEVICE == "cpu" else 2.0)  # division by 3 needs the bytes
                if step == 4 and p.grad is not None:
                    p.grad.clamp_(-1e-3, 1e-3)
            return True

        self.compare(tmp_path, change)

    def test_some_gradients_dropped(self, tmp_path: Path) -> None:
        def change(model: nn.Module, _: Any, step: int) -> bool:
            for i, p in enumerate(model.parameters()):
                if step == 2 and i % 3 == 0:
                    p.grad = None
                if step == 3 and i % 3 == 1 and p.grad is not None:
                    p.grad.zero_()
            return True

        self.compare(tmp_path, change)

    def test_states_loaded(self, tmp_path: Path) -> None:
        kept: dict[int, Any] = {}

        def change(_: nn.Module, optimizer: Any, step: int) -> bool:
            if step == 1:
                kept[id(optimizer)] = optimizer.state_dict()
                kept[id(optimizer)] = {
                    "state": {k: {n: v.clone() for n, v in s.items()} for k, s in kept[id(optimizer)]["state"].items()},
                    "param_groups": kept[id(optimizer)]["param_groups"],
                }
            if step == 4:
                optimizer.load_state_dict(kept[id(optimizer)])
            return True

        self.compare(tmp_path, change)

    def test_weights_loaded(self, tmp_path: Path) -> None:
        kept: dict[int, Any] = {}

        def change(model: nn.Module, _: Any, step: int) -> bool:
            if step == 1:
                kept[id(model)] = {n: t.clone() for n, t in model.state_dict().items()}
            if step == 4:
                model.load_state_dict(kept[id(model)])
            return True

        self.compare(tmp_path, change)

    def test_states_read(self, outcomes: Counter[str], tmp_path: Path) -> None:
        def change(model: nn.Module, optimizer: Any, _: int) -> bool:
            optimizer.state_dict()
            model.state_dict()
            return True

        self.compare(tmp_path, change)
        assert outcomes["kept"] == outcomes["started"] > 0


def run_freely(c: Case, folder: Path, **faults: Any) -> Record:
    """Run without the race checker, which makes every attempt."""

    def prepare(model: nn.Module, optimizer: Any, **options: Any) -> Any:
        return prepare_for_test(model, optimizer, faults=Faults(**faults), **options)

    return run(c, folder, prepare=prepare)


class TestTooFewToMakeAll:
    """Timing decides which attempts are made, but not the result."""

    @pytest.mark.parametrize(
        ("kind", "seed"),
        [*zip(KINDS, range(4), strict=True), ("host", 1), ("disk", 4), *(("mixed", i) for i in range(4, 7))],
    )
    def test_any_of_them(self, kind: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        chance, made = random.Random(seed), Counter[bool]()

        def is_due(attempt: _EarlyAttempt) -> bool:
            with attempt._deciding:
                if attempt._is_made is None:
                    attempt._is_made = chance.random() < 0.5
                    made[attempt._is_made] += 1
                return attempt._is_made

        monkeypatch.setattr(_EarlyAttempt, "is_due", is_due)
        c = case("gpt2", kind, offset=7 * seed, precision="bf16", clipping="off", micro_batches=1 + seed % 2)
        assert_equal(plain_loop(c.name, c.setting), run_checked(c, tmp_path, poison=True))
        assert made[True] + made[False] > STEPS

    @each_kind
    def test_updates_that_are_slower_than_backward(self, kind: str, tmp_path: Path) -> None:
        c = case("llama", kind, precision="bf16", clipping="off")
        delays = {"update": 0.02, "states_read": 0.01}
        assert_equal(plain_loop(c.name, c.setting), run_freely(c, tmp_path, poison=True, delays=delays))

    @pytest.mark.parametrize("offset", [2, 6, 11])
    def test_gradients_on_every_tier_share_slots(self, offset: int, tmp_path: Path) -> None:
        """A copy out of the device runs even if its update is not made."""
        c = case("gpt2", "mixed", offset=offset, clipping="off", optimizer="nesterov")
        delays = {"update": 0.004, "d2h": 0.004}
        assert_equal(plain_loop(c.name, c.setting), run_freely(c, tmp_path, delays=delays))

    def test_the_overtaken_are_updated_by_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """If updates are slower than backward, some attempts are made, and some units are left to ``step()``."""
        kept = Counter[bool]()
        keep = EarlyUpdates.keep

        def counted(self: EarlyUpdates, unit: Unit, *args: Any) -> bool:
            has_attempt = unit.name in self._attempts
            is_kept = keep(self, unit, *args)
            kept[is_kept] += has_attempt
            return is_kept

        monkeypatch.setattr(EarlyUpdates, "keep", counted)
        run_freely(case("gpt2", "host", clipping="off"), tmp_path, delays={"update": 0.05, "compute": 0.005})
        assert kept[True] > 0
        assert kept[False] > 0


def test_fewer_micro_batches_than_promised(tmp_path: Path) -> None:
    """``step()`` flushes the rest."""
    c = Case("llama", "host", Setting(micro_batches=1, steps=3, clipping="off"))
    promised = Case("llama", "host", Setting(micro_batches=2, steps=3, clipping="off"), promised=True, early=True)
    options = promised.options(tmp_path)
    got = streamed_loop(c.name, c.setting, make_plan=promised.plan, **options)
    assert_equal(plain_loop(c.name, c.setting), got)
