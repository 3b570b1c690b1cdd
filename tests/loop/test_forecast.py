"""Plans in time: if the micro-batch and the machine are known, ``prepare`` takes the fastest plan. Results stay."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import plan_for, plan_in_time, without_launches

import outcore
from outcore.core.errors import ConfigError, DiskError
from outcore.device.cpu import CpuDevice
from outcore.device.faults import NO_FAULTS
from outcore.engine.activations import offloaded_call as away
from outcore.model.partition import partition
from outcore.planner.forward import watch
from outcore.planner.search.evaluations import Evaluations
from outcore.planner.search.plan_question import UNLIMITED
from outcore.preparation.plan_choice import choose_plan, limits_of, on_machine, question_of
from outcore.preparation.prepare_options import Options
from outcore.probe import measured_machines as kept
from outcore.spec.hardware import Hardware

from .rig import DEVICE, Tower, adamw, assert_same, batch, make, seen, train

MACHINE = without_launches("rtx-4090")
SAMPLE = {"ids": batch()}
TIGHT = {"device": 60_000, "host": 400_000}  # not everything fits on the device; nothing need go to disk


def slow_updates(hardware: Hardware = MACHINE) -> Hardware:
    """A machine on which the device should update, and inside backward."""
    host = dataclasses.replace(hardware.host, update_parameters_per_s=1e3)
    return dataclasses.replace(hardware, host=host)


def slow_device() -> Hardware:
    """A machine on which backward has time for the processor's updates."""
    device = dataclasses.replace(MACHINE.device, fp32_flops=1e6, update_parameters_per_s=1e2)
    return dataclasses.replace(
        MACHINE, device=device, host=dataclasses.replace(MACHINE.host, update_parameters_per_s=1e4)
    )


def slow_bus(hardware: Hardware) -> Hardware:
    """A machine on which nothing should leave the device that need not."""
    return dataclasses.replace(
        hardware, bus=dataclasses.replace(hardware.bus, d2h_bytes_per_s=1e4, h2d_bytes_per_s=1e9)
    )


def planned(num_blocks: int = 3, **options: Any) -> outcore.Plan:
    model = make(lambda: Tower(num_blocks=num_blocks))
    options = {"budget": outcore.Budget(**TIGHT), "device": DEVICE, "sample": SAMPLE, **options}
    return plan_for(model, adamw(model), **options)[1]


def in_another_order(plan: outcore.Plan) -> outcore.Plan:
    names = [unit.name for unit in plan.units]
    return dataclasses.replace(plan, updated_first=(names[-1], names[0], names[1]))


def homes(plan: outcore.Plan) -> list[tuple[str, ...]]:
    return [(u.weights, u.gradients, u.states, u.update) for u in plan.units]


SUITS_THE_CPU = pytest.mark.skipif(DEVICE != "cpu", reason="the budget is one that suits CPU lanes")


class TestTheFastest:
    @SUITS_THE_CPU
    def test_the_device_updates_where_the_processor_is_slow(self):
        usual, found = planned(hardware="none"), planned(hardware=slow_updates())
        assert all(unit.update == "host" for unit in usual.units)
        assert any(unit.update == "device" for unit in found.units)

    @SUITS_THE_CPU
    def test_updates_run_inside_backward_where_that_is_allowed(self, monkeypatch):
        """The usual plan gets them, too: other plans of this machine do without."""
        monkeypatch.setattr("outcore.planner.search.search.WORTH", 1.0)
        slow = slow_device()
        promised = planned(hardware=slow, accumulation_steps=1, clipping=False)
        assert any(unit.early for unit in promised.units)
        assert promised.accumulation_steps == 1
        assert not any(unit.early for unit in planned(hardware=slow).units)

    def test_the_same_inputs_give_the_same_plan(self):
        assert planned(hardware=slow_updates()) == planned(hardware=slow_updates())

    def test_what_is_hardly_faster_is_not_worth_it(self, monkeypatch):
        monkeypatch.setattr("outcore.planner.search.search.WORTH", 1.0)
        assert planned(hardware=slow_updates()) == planned(hardware="none")

    def test_what_is_no_faster_and_writes_less_is_worth_it(self, monkeypatch, tmp_path):
        """The rule fills tier by tier, and the drive is slow."""
        monkeypatch.setattr("outcore.planner.search.search.WORTH", 1.0)
        budget = outcore.Budget(device=60_000, host=60_000, disk=tmp_path)
        slow = dataclasses.replace(MACHINE, disk=dataclasses.replace(MACHINE.disk, write_bytes_per_s=1e5))
        usual, found = (planned(hardware=hardware, budget=budget) for hardware in ("none", slow))
        assert found.tier_bytes["disk"] < usual.tier_bytes["disk"]
        monkeypatch.setattr("outcore.planner.search.search.takes_more", lambda *_: False)
        assert planned(hardware=slow, budget=budget) == usual

    def test_a_plan_takes_as_long_for_a_run_as_for_the_search(self, tmp_path):
        model, disk = make(), tmp_path
        budget = outcore.Budget(device=60_000, host=40_000, disk=disk)
        cut = partition(model, state_names=("exp_avg", "exp_avg_sq"))
        device = CpuDevice(NO_FAULTS, None)
        slow = dataclasses.replace(MACHINE, disk=dataclasses.replace(MACHINE.disk, write_bytes_per_s=1e5))
        options = Options(sample=SAMPLE, budget=budget, hardware=slow)
        asked = question_of(cut, options, device, limits_of(budget, device))
        _, plan, _, question = choose_plan(asked, cut, options, device)
        device.close()
        assert any(unit.states == "disk" for unit in plan.units)
        assert question.predict(plan).step_s == Evaluations(question).simulation(plan, None).step_s

    @SUITS_THE_CPU
    def test_what_autocast_never_keeps_is_not_counted_on(self):
        """Calls are recomputed under autocast's cache of casts, however much room there is."""
        plan = dataclasses.replace(planned(hardware="none"), kept_bytes=2**30)
        assert not plan.plain
        assert any(unit.policy == "recompute" for unit in plan.units)

        def step_s(*, has_cache: bool) -> float:
            with torch.autocast(DEVICE, torch.bfloat16, cache_enabled=has_cache):
                cut = partition(make(), state_names=("exp_avg", "exp_avg_sq"))
                device = CpuDevice(NO_FAULTS, None)
                options = Options(sample=SAMPLE, hardware=MACHINE)
                question = on_machine(question_of(cut, options, device, UNLIMITED), cut, options, device)
                simulation = question.predict(plan)
                device.close()
            return simulation.step_s

        assert step_s(has_cache=True) > step_s(has_cache=False)

    def test_a_plan_that_is_given_wins(self):
        plan = planned(hardware="none")
        assert planned(hardware=slow_updates(), plan=plan) == plan

    @pytest.mark.parametrize(
        ("hardware", "how"),
        [
            (slow_updates(), {}),
            (slow_device(), {"accumulation_steps": 1, "clipping": False}),
            ("none", {"plan": in_another_order(planned(hardware="none"))}),
        ],
        ids=["share", "early", "order"],
    )
    def test_results_are_those_of_the_plain_loop(self, hardware, how):
        model = make()
        plain = adamw(model)
        for group in plain.param_groups:
            group["fused"] = True
        want = seen((torch.manual_seed(5), train(model, plain))[1], model, plain)
        twin = make()
        options = {"budget": outcore.Budget(**TIGHT), "sample": SAMPLE, "hardware": hardware, "device": DEVICE}
        with outcore.prepare(twin, adamw(twin), **options, **how) as (twin, streamed):
            got = seen((torch.manual_seed(5), train(twin, streamed))[1], twin, streamed)
        assert_same(want, got)


class TestActivations:
    """On a device with memory of its own."""

    @pytest.fixture(autouse=True)
    def _an_accelerator(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(CpuDevice, "activation_share", 0.3)
        monkeypatch.setattr(CpuDevice, "has_host_memory", False)
        monkeypatch.setattr(watch, "SMALL_BYTES", 64)
        monkeypatch.setattr(away, "SMALL_BYTES", 64)

    @staticmethod
    def resting(plan: outcore.Plan) -> set[tuple[str, str]]:
        return {(unit.policy, unit.activations) for unit in plan.units[1:]}

    def test_leave_where_that_is_faster_than_to_compute_again(self):
        budget = outcore.Budget(device=90_000, host=2**22)
        assert self.resting(planned(budget=budget, hardware=slow_device())) == {("keep", "host")}
        assert self.resting(planned(budget=budget, hardware="none")) == {("recompute", "device")}

    def test_stay_where_the_bus_is_slow(self):
        budget = outcore.Budget(device=120_000, host=2**22)
        assert self.resting(planned(budget=budget, hardware=slow_bus(MACHINE))) == {("recompute", "device")}

    def test_stay_where_everything_fits(self):
        plan = planned(budget=outcore.Budget(device="1GiB", host="1GiB"), hardware=slow_device())
        assert plan.plain

    def test_leave_where_there_is_no_other_way(self):
        options: dict[str, Any] = {"num_blocks": 20, "sample": {"ids": batch(rows=40)}, "hardware": "none"}
        with pytest.raises(outcore.PlanInfeasibleError) as caught:
            planned(budget=outcore.Budget(device=1000, host=2**24), **options)
        least = caught.value.required_bytes["device"]
        plan = planned(budget=outcore.Budget(device=least, host=2**24), **options)
        assert self.resting(plan) == {("recompute", "host")}

    def test_results_are_those_of_the_plain_loop(self):
        model = make()
        plain = adamw(model)
        for group in plain.param_groups:
            group["fused"] = True
        want = seen((torch.manual_seed(5), train(model, plain))[1], model, plain)
        twin = make()
        budget = outcore.Budget(device=90_000, host=2**22)
        options = {"budget": budget, "sample": SAMPLE, "hardware": slow_device(), "device": DEVICE}
        with outcore.prepare(twin, adamw(twin), **options) as (twin, streamed):
            assert self.resting(streamed.plan) == {("keep", "host")}
            got = seen((torch.manual_seed(5), train(twin, streamed))[1], twin, streamed)
        assert_same(want, got)


class TestWhereItIsNotAsked:
    @pytest.fixture(autouse=True)
    def _nothing_is_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("OUTCORE_HARDWARE")
        monkeypatch.setattr(kept, "measure", None)

    def test_everything_fits(self):
        """The plan made without times is taken at once: no other is faster."""
        plan = planned(budget=outcore.Budget(device="1GiB", host="1GiB"))
        assert plan.plain
        assert plan == planned(budget=outcore.Budget(device="1GiB", host="1GiB"), hardware="none")

    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    def test_where_everything_fits_a_step_is_computing(self, precision):
        model, budget = make(), outcore.Budget(device="1GiB", host="1GiB")
        options = {"sample": SAMPLE, "device": DEVICE, "precision": precision, "hardware": MACHINE, "budget": budget}
        _, plan, found = plan_in_time(model, adamw(model), **options)
        assert plan.plain == (precision == "fp32")
        assert found is not None
        assert found.step_s > 0
        assert found.binding.keys() == {"compute"}

    @SUITS_THE_CPU
    def test_no_sample(self):
        assert planned(sample=None) == planned(hardware="none")


class TestTheMachine:
    @pytest.fixture(autouse=True)
    def _this_one(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("OUTCORE_HARDWARE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(kept, "measure", lambda *_: slow_updates())

    def test_is_measured_once_and_that_is_said(self):
        with pytest.warns(UserWarning, match="this machine was measured once"):
            found = planned()
        assert found == planned() == planned(hardware=slow_updates())

    def test_may_be_named_in_the_environment(self, monkeypatch, tmp_path):
        slow_updates().save(tmp_path / "hardware.json")
        monkeypatch.setenv("OUTCORE_HARDWARE", str(tmp_path / "hardware.json"))
        assert planned() == planned(hardware=slow_updates())
        monkeypatch.setenv("OUTCORE_HARDWARE", "none")
        assert planned() == planned(hardware="none")

    def test_that_cannot_be_measured_gives_the_usual_plan_and_says_why(self, monkeypatch):
        def fail(*_: Any) -> Hardware:
            raise DiskError("the drive is gone")

        monkeypatch.setattr(kept, "measure", fail)
        with pytest.warns(UserWarning, match="without predicted times, .* cannot be measured: the drive is gone"):
            assert planned() == planned(hardware="none")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"hardware": "rtx-9999"}, "--hardware: expected a JSON file, or names of parts"),
            ({"hardware": "none.json"}, "expected a readable JSON file at 'none.json'"),
        ],
    )
    def test_no_machine(self, options, message):
        with pytest.raises(ConfigError, match=message):
            planned(**options)

    def test_without_a_disk(self, tmp_path):
        with pytest.raises(ConfigError, match="expected a machine with a disk, since there is a disk tier"):
            planned(hardware="rtx-4090+no-disk", budget=outcore.Budget(**TIGHT, disk=tmp_path))

    @SUITS_THE_CPU
    def test_a_model_that_cannot_be_followed_has_the_usual_plan(self):
        with pytest.warns(UserWarning, match="without predicted times: sample: expected keyword arguments"):
            found = planned(sample={"ids": torch.zeros(3, dtype=torch.float32, device=DEVICE)}, hardware=MACHINE)
        assert found == planned(hardware="none")
