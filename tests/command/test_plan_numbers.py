"""``outcore plan``: budgets that it names suffice, and times are those that a run predicts."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from outcore.command.plan.answer import answer
from outcore.command.plan.text import range_of, to_json
from outcore.planner.forward import watch
from outcore.planner.homes.placement import place
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import explain
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import Profile
from outcore.spec.budget import tier_bytes

from .conftest import CONFIG, Run
from .test_plan import asked


def test_the_least_budgets_suffice_as_they_are_written(command: Run, tmp_path: Path):
    """In GiB two digits are coarser than pages."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 50_001, "num_hidden_layers": 1}))
    asked = ("plan", "--model", tmp_path / "config.json", "--hardware", "rtx-4090+no-disk", "--seq-len", 8)
    done = command(*asked, "--device-memory", "60MiB", "--host-memory", "1GiB")
    assert done.status == 0, done.err
    said = next(line.split(": ")[1] for line in done.out.splitlines() if "all at once, the least device first" in line)
    flags = {"device": "--device-memory", "host": "--host-memory"}
    least = [word for size in said.split(", ") for word in (flags[size.split()[0]], size.split(maxsplit=1)[1])]
    done = command(*asked, *least)
    assert done.status == 0, done.err


def test_a_plain_plan_that_recomputes_some_units_is_predicted_as_a_run_predicts_it(config_json: Path, tmp_path: Path):
    """Its loop runs as it is, so the engine takes no time for visits, and slots leave more room to activations."""
    machine = known_hardware("rtx-4090+no-disk")
    dataclasses.replace(machine, host=dataclasses.replace(machine.host, visit_s=1e-3)).save(tmp_path / "hardware.json")
    options: dict[str, Any] = {"precision": "fp32", "host_memory": "1GiB"}
    whole = answer(asked(config_json, tmp_path / "hardware.json", device_memory="1GiB", **options))
    footprint = whole.setting.footprint
    assert footprint is not None
    most = tier_bytes(whole.spec, whole.found.plan)["device"] + footprint.keep_bytes // 2
    found = answer(asked(config_json, tmp_path / "hardware.json", device_memory=f"{most}B", **options))
    assert found.found.plan.plain
    assert found.policies.keys() == {("keep", "device"), ("recompute", "device")}
    job = found.setting
    run = PlanQuestion(
        model=found.spec, machine=job.rates, profile_of=lambda _: Profile({}, footprint), activation_share=0.3
    )
    assert found.found.simulation.step_s == run.predict(found.found.plan).step_s
    assert found.found.simulation.step_s == pytest.approx(found.busiest_lane[1])


def test_the_least_is_that_of_the_way_with_activations_that_needs_least(
    config_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The plan sends all that units save to host memory, since the device is slow. Less would do."""
    monkeypatch.setattr(watch, "SMALL_BYTES", 64)
    machine = known_hardware("rtx-4090+no-disk")
    device = dataclasses.replace(machine.device, bf16_flops=1e9)
    dataclasses.replace(machine, device=device).save(tmp_path / "hardware.json")
    options: dict[str, Any] = {"device_memory": "1700KiB", "seq_len": 128, "grad_accum": 2}
    found = answer(asked(config_json, tmp_path / "hardware.json", **options))
    assert found.found.candidate.saves is not None
    assert found.found.plan.tier_bytes == tier_bytes(found.spec, found.found.plan), "with what activations take"
    assert found.least.with_others["host"] == 0
    less = answer(asked(config_json, tmp_path / "hardware.json", **options, host_memory="1B"))
    assert less.found.plan.tier_bytes["host"] == 0


def test_the_rules_plan_is_compared_with_its_own_activations(
    config_json: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """There they stay. Beside activations that leave, the rule may find no plan."""
    monkeypatch.setattr(watch, "SMALL_BYTES", 64)
    slow = dataclasses.replace(known_hardware("rtx-4090+no-disk").device, bf16_flops=1e9)
    dataclasses.replace(known_hardware("rtx-4090+no-disk"), device=slow).save(tmp_path / "hardware.json")
    found = answer(asked(config_json, tmp_path / "hardware.json", device_memory="1700KiB", seq_len=128))
    job = found.setting
    assert found.found.candidate.saves is not None
    rule = place(found.spec, job.limits, activations=job.activations(None))
    step_s = found.found.looks.simulation(rule, None).step_s
    assert [other.step_s for other in found.found.runners_up if other.name == "filled tier by tier"] == [step_s]


def test_in_fp16_nothing_is_kept_that_a_run_under_autocast_recomputes(config_json: Path):
    found = answer(asked(config_json, Path("rtx-4090"), precision="fp16", device_memory="2500KiB"))
    kept = answer(asked(config_json, Path("rtx-4090"), precision="bf16", device_memory="2500KiB"))
    assert not found.found.plan.plain
    assert found.found.plan.kept_bytes > 0
    assert {unit.policy for unit in found.found.plan.units[1:]} == {policy for policy, _ in found.policies}
    assert ("keep", "device") in kept.policies


@pytest.mark.parametrize("is_accelerator", [True, False], ids=["accelerator", "cpu"])
def test_an_accelerators_attention_drops_out_as_it_computes(config_json: Path, tmp_path: Path, is_accelerator: bool):
    """A CPU has no such kernel: with dropout it makes matrices of queries x keys."""
    machine, block = known_hardware("rtx-4090"), "transformer.h.0"
    device = dataclasses.replace(machine.device, runs_ahead=float(is_accelerator))
    dataclasses.replace(machine, device=device).save(tmp_path / "hardware.json")
    works, saved, budget = [], [], {"device_memory": "1GiB", "host_memory": "1GiB"}
    for rate in (0.0, 0.5):
        shape = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
        config_json.write_text(json.dumps({"model_type": "gpt2", **shape, "attn_pdrop": rate}))
        profile = answer(asked(config_json, tmp_path / "hardware.json", seq_len=512, **budget)).setting.profile_of(2)
        assert profile.footprint is not None
        works.append(profile.work[block])
        saved.append(profile.footprint.saved[block])
    if is_accelerator:
        assert works[1] == works[0]
        assert saved[1].select < saved[0].select  # what draws random numbers is computed again
        assert saved[1].keep == saved[0].keep
    else:
        assert works[1].moved_bytes > works[0].moved_bytes


def test_figures_that_are_known_as_ranges_make_answers_that_are_ranges(config_json: Path):
    """The plan is made for the middle, and its step is simulated at both ends."""
    found = answer(asked(config_json, "rtx-4090+no-disk", device_memory="2MiB", host_memory="4MiB"))
    ends, said = range_of(found), json.loads(to_json(found))
    assert ends is not None
    fast_s, slow_s = ends.step_s
    assert fast_s < found.found.simulation.step_s < slow_s
    assert said["predicted_step_s_range"] == [fast_s, slow_s]
    assert said["predicted_tokens_per_s_range"] == [found.setting.tokens / slow_s, found.setting.tokens / fast_s]
    at_ends = (dataclasses.replace(found.setting, machine=found.hardware.at(end)) for end in ("fast", "slow"))
    assert [explain(each, found.found.bare, found.found.candidate).simulation.step_s for each in at_ends] == [
        fast_s,
        slow_s,
    ]
