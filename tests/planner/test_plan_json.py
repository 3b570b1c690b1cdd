from __future__ import annotations

import json

import pytest

from outcore.core.errors import ConfigError
from outcore.spec.plan import Plan, Pool, UnitPlan

PLAN = Plan(
    precision="bf16",
    units=(
        UnitPlan(name="", weights="device", gradients="host", states="host", policy="keep"),
        UnitPlan(name="layers.0", weights="host", gradients="disk", states="disk"),
    ),
    pools=(Pool(tier="device", kind="weights", slot_bytes=8192, num_slots=3),),
    prefetch_depth=2,
    updated_first=("layers.0",),
    kept_updated_first=False,
    accumulation_steps=4,
    tier_bytes={"device": 28672, "host": 0, "disk": 0},
)


def changed(path: str, value: object) -> str:
    """Return the plan's JSON with the value at 'a/0/b' replaced."""
    data = json.loads(PLAN.to_json())
    *way, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    target = data
    for part in way:
        target = target[part]
    target[last] = value
    return json.dumps(data)


def test_round_trip(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    assert Plan.load(path) == PLAN
    assert Plan.load(path).to_json() == path.read_text()
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_saving_again_replaces(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("something long that was here before" * 99)
    PLAN.save(str(path))
    assert Plan.load(path) == PLAN


def test_is_readable():
    text = PLAN.to_json()
    assert '"name": "layers.0",\n      "weights": "host",' in text
    assert text.endswith("}\n")


def test_what_has_a_default_may_be_left_out():
    data = json.loads(PLAN.to_json())
    for key in (
        "accumulation_steps",
        "kept_updated_first",
        "updated_first",
        "micro_batches_in_unit",
        "tier_bytes",
        "version",
    ):
        del data[key]
    for key in ("policy", "partition", "gather"):
        del data["units"][1][key]
    plan = Plan.from_json(json.dumps(data))
    assert (plan.accumulation_steps, plan.micro_batches_in_unit, plan.units[1].policy) == (None, 1, "recompute")
    assert plan.kept_updated_first
    assert plan.updated_first == ()


@pytest.mark.parametrize("key", ["precision", "units", "pools", "prefetch_depth"])
def test_missing_keys(key):
    data = json.loads(PLAN.to_json())
    del data[key]
    with pytest.raises(ConfigError, match=f"plan: key '{key}' is missing"):
        Plan.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("surprise", 1, "unknown key 'surprise'; known keys are precision"),
        ("units/0/home", "host", "plan: units: unknown key 'home'"),
        ("pools/0/slots", 1, "plan: pools: unknown key 'slots'"),
        ("version", 2, "expected version 1, but got 2"),
        ("precision", "fp8", "precision: expected one of fp32, bf16, pure_bf16, fp16, fp64, but got 'fp8'"),
        ("precision", ["bf16"], "precision: expected one of"),
        ("units", {}, "expected a list under 'units', but got dict"),
        ("units", None, "expected a list under 'units', but got NoneType"),
        ("units/0", 3, "expected a JSON object, but got int"),
        ("units/0/name", None, "expected a unit's name as a string, but got None"),
        ("units/0/name", ["a"], "expected a unit's name as a string"),
        ("units/1/name", "", "root unit's weights are always resident|is named twice"),
        ("units/0/name", "layers.0", "expected every unit once, but 'layers.0' is named twice"),
        ("units/0/weights", "host", "root unit's weights are always resident, expected 'device', but got 'host'"),
        ("units/1/weights", "nvme", "unit 'layers.0': weights: expected one of device, host, disk, but got 'nvme'"),
        ("units/1/weights", {}, "weights: expected one of"),
        ("units/1/policy", "offload", "policy: expected one of keep, select, recompute, but got 'offload'"),
        ("units/1/states", "device", "states on the device need weights and gradients on the device too"),
        ("units/1/partition", "all", "partition: expected one of replicate, node, world, but got 'all'"),
        ("units/0/partition", "world", "root unit's weights are always whole on each rank"),
        ("units/1/gather", "nccl", "gather: expected one of link, host, but got 'nccl'"),
        ("units/1/gather", "host", "with partition 'node', of which .* weights=host, partition=replicate; set gather"),
        ("pools", "none", "expected a list under 'pools'"),
        ("pools/0/tier", "disk", "tier: expected one of device, host, but got 'disk'"),
        (
            "pools/0/kind",
            "states",
            "device: kind: expected one of weights, bucket, received, sums, scratch, staging, activations, temporary, "
            "but got 'states'",
        ),
        ("pools/0/slot_bytes", 100, "pool 'weights' on device: expected slot_bytes in multiples of 4096, but got 100"),
        ("pools/0/slot_bytes", -4096, "slot_bytes: expected a whole number >= 1, but got -4096"),
        ("pools/0/slot_bytes", "8 KiB", "slot_bytes: expected a whole number >= 1, but got '8 KiB'"),
        ("pools/0/slot_bytes", 8192.0, "slot_bytes: expected a whole number"),
        ("pools/0/num_slots", 0, "num_slots: expected a whole number >= 1, but got 0"),
        ("pools/0/num_slots", True, "num_slots: expected a whole number >= 1, but got True"),
        ("pools/0/num_slots", 10**30, "expected num_slots <= 1024"),
        ("prefetch_depth", -1, "prefetch_depth: expected a whole number >= 0, but got -1"),
        ("prefetch_depth", None, "prefetch_depth: expected a whole number >= 0, but got None"),
        ("kept_updated_first", 1, "plan: kept_updated_first: expected true or false, but got 1"),
        ("updated_first", "layers.0", "expected a list under 'updated_first', but got str"),
        ("updated_first", ["", "layers.1"], "names of units of the plan, each once, but got 'layers.1' at place 1"),
        ("updated_first", ["", ""], "updated_first: expected names of .*, each once, but got '' at place 1"),
        ("updated_first", [3], "but got 3 at place 0"),
        ("plain", "no", "plan: plain: expected true or false, but got 'no'"),
        ("accumulation_steps", 0, "accumulation_steps .*: expected a whole number >= 1, but got 0"),
        ("micro_batches_in_unit", 0, "micro_batches_in_unit: expected a whole number >= 1, but got 0"),
        ("accumulation_steps", "2", "accumulation_steps .*: expected a whole number >= 1, but got '2'"),
        ("tier_bytes", [1], "expected tier_bytes as an object, but got \\[1\\]"),
    ],
)
def test_wrong_values(path, value, message):
    with pytest.raises(ConfigError, match=message):
        Plan.from_json(changed(path, value))


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"plan"', "NaN", "[" * 100_000, "\x00"])
def test_no_plan_at_all(text, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"plan '.*plan\.json': expected a "):
        Plan.load(path)


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x80")
    for path in (tmp_path, tmp_path / "absent", tmp_path / "binary"):
        with pytest.raises(ConfigError, match="expected a readable JSON file"):
            Plan.load(path)


def test_a_place_that_cannot_be_written(tmp_path):
    with pytest.raises(ConfigError, match="expected a path to write to"):
        PLAN.save(tmp_path / "absent" / "plan.json")
    with pytest.raises(ConfigError, match="expected a path to write to"):
        PLAN.save(tmp_path)
    assert not tmp_path.with_name(f"{tmp_path.name}.partial").exists()
