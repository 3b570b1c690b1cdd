"""``outcore train --optim muon``: the same result over all tiers and when resumed; output, plans and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import without_launches

from .conftest import TIERS, Run, read_jsonl

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.* is deprecated:FutureWarning")
SHORT = ("--steps", 3, "--batch-size", 2, "--seq-len", 32, "--lr", 1e-2, "--save-every", 2, "--optim", "muon")
GIVEN = ("--set", "optim_args=momentum=0.9,ns_steps=4")


def seen(folder: Path) -> list[tuple[float, float]]:
    return [(line["loss"], line["grad_norm"]) for line in read_jsonl(folder / "metrics.jsonl")]


def test_over_tiers_and_resumed(command: Run, config_json: Path, text: Path, tmp_path: Path):
    shared = ("train", "--model", config_json, "--data", text, *SHORT, *GIVEN)
    done = command(*shared, "--out", tmp_path / "one")
    assert done.status == 0, done.err
    assert ["optim", "muon"] in [line.split() for line in done.out.splitlines()]
    tiers = (*shared, "--out", tmp_path / "tight", *TIERS, "--disk", tmp_path)
    done = command(*tiers)
    assert done.status == 0, done.err
    units = json.loads((tmp_path / "tight" / "plan.json").read_text())["units"]
    assert {unit["states"] for unit in units} == {"disk"}
    assert seen(tmp_path / "one") == seen(tmp_path / "tight")
    (tmp_path / "tight" / "checkpoint-3").rename(tmp_path / "aside")
    last = seen(tmp_path / "tight")
    done = command(*tiers, "--resume")
    assert done.status == 0, done.err
    assert seen(tmp_path / "tight") == last
    other = [part for part in tiers if part not in ("--optim", "muon", *GIVEN)]
    done = command(*other, "--resume")
    assert (done.status, "muon" in done.err) == (2, True), done.err


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("momentum=0.9,beta=1", "expected optim_args with optim 'muon' to be settings of torch.optim.Muon"),
        ("momentum=-1", "what torch accepts, but it says: momentum should be >= 0 but is: -1.0"),
        ("adjust_lr_fn=none", "what torch accepts, but it says: Adjust learning rate function none is not supported"),
    ],
)
def test_bad_settings_are_one_message(command: Run, config_json: Path, text: Path, tmp_path: Path, given, said):
    shared = ("train", "--model", config_json, "--data", text, *SHORT, "--out", tmp_path / "run")
    done = command(*shared, "--set", f"optim_args={given}")
    assert (done.status, said in done.err) == (2, True), done.err


def test_planned_by_the_work_of_matrices(command: Run, config_json: Path, tmp_path: Path):
    """Muon has one moment instead of two, and takes time for matrix products, also on the device."""
    machine = tmp_path / "hardware.json"
    without_launches("rtx-4090").save(machine)
    plan = ("plan", "--model", config_json, "--hardware", machine, "--json", "--batch-size", 1, "--seq-len", 16)
    steps = {}
    for name in ("adamw_torch", "muon"):
        done = command(*plan, "--optim", name)
        assert done.status == 0, done.err
        steps[name] = json.loads(done.out)["predicted_step_s"]
    assert steps["muon"] > steps["adamw_torch"]
    done = command(*plan[:5], "--optim", "muon")
    [said] = [line for line in done.out.splitlines() if line.startswith("optimizer")]
    assert 8.0 < float(said.split(":")[1].split()[0]) < 12.0, said
