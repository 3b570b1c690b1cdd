"""Machines as data: known ones are complete and name their figures' sources; damaged and absurd ones are refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from outcore.core.errors import ConfigError
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.known_parts import known_parts
from outcore.planner.timing.profile import UnitWork, rates_for
from outcore.spec.hardware import DevicePart, Hardware, HostPart

from .models import layered

KNOWN = known_parts()

FIELDS = ["device.bf16_flops", "bus.h2d_bytes_per_s", "host.bytes_per_s", "disk.both"]
FIELDS += ["links.bytes_per_s", "network.bytes_per_s"]
NUMBERS = [0, -1, 1e-300, 1e30, 10**400, float("inf"), float("nan"), "fast", None, True, [1], {}]


@pytest.mark.parametrize("name", KNOWN.devices)
def test_known_machines_are_whole_and_come_back_from_json(name: str, tmp_path: Path):
    machine = known_hardware(name)
    assert machine.disk is not None
    machine.save(tmp_path / "hardware.json")
    assert Hardware.load(tmp_path / "hardware.json") == machine


def test_every_figure_has_a_source():
    for part in itertools.chain.from_iterable(parts.values() for parts in KNOWN.by_kind.values()):
        if part is None:  # no disk
            continue
        fields = {f.name: f.default for f in dataclasses.fields(part) if "Mapping" not in str(f.type)}
        said = {name for name, default in fields.items() if getattr(part, name) != default}
        assert said <= set(part.sources), part
        assert all(len(source) > 10 for source in part.sources.values())


@pytest.mark.parametrize("part", [*KNOWN.devices.values(), *KNOWN.hosts.values()])
def test_figures_lie_within_their_ranges(part: DevicePart | HostPart):
    assert part.slow
    assert part.slow.keys() == part.fast.keys()
    for name, slow in part.slow.items():
        ordered = sorted([slow, getattr(part, name), part.fast[name]], reverse=name.endswith("_s") and slow < 1)
        assert ordered == [slow, getattr(part, name), part.fast[name]], name


def test_layers_on_an_h200_take_as_long_as_was_measured():
    """A block of 3072 channels over 32768 tokens: benchmarks/reports/gpu_h200_2026-11-26.md."""
    spec = layered(1, root=0, layer=100_000_000)
    counted = UnitWork(product_flops=6.597e12, attention_flops=0.8246e12, moved_bytes=13.83e9, kernels=38)
    rates = rates_for(known_hardware("h200"), spec, {"model.layers.0": counted})
    assert rates.forward_s["model.layers.0"] == pytest.approx(15.7e-3, rel=0.03)
    assert rates.backward_s["model.layers.0"] == pytest.approx(31.8e-3, rel=0.03)


def test_rates_that_were_measured_lie_within_the_ranges():
    host = known_hardware("h100").host
    assert (host.slow["update_parameters_per_s"], host.fast["update_parameters_per_s"]) == pytest.approx(
        (1.2e9, 2.5e9), rel=0.01
    )
    card = known_hardware("rtx-4090").device
    assert card.bf16_flops == pytest.approx(156e12)  # LoHan's plateau
    assert card.slow["bf16_flops"] == pytest.approx(115e12)  # ZeRO-3 with its update exposed
    for device in KNOWN.devices.values():
        assert device.kernel_s > 0


def test_a_machine_at_one_end_of_what_is_known_has_no_range():
    machine = known_hardware("rtx-4090")
    slow, fast = machine.at("slow"), machine.at("fast")
    assert machine.has_range
    assert not slow.has_range
    assert slow.device.bf16_flops < machine.device.bf16_flops < fast.device.bf16_flops
    assert slow.host.visit_s > machine.host.visit_s > fast.host.visit_s
    assert slow.bus == machine.bus


def test_parts_are_composed():
    machine = known_hardware("RTX-4090+pcie3+desktop-ddr4+laptop-nvme")
    assert (machine.bus, machine.host, machine.disk) == (
        KNOWN.buses["pcie3"],
        KNOWN.hosts["desktop-ddr4"],
        KNOWN.disks["laptop-nvme"],
    )
    assert known_hardware("h100").bus == KNOWN.buses["pcie5"]
    assert (known_hardware("h100").links, known_hardware("h100+200g").network) == (
        KNOWN.links["nvlink4"],
        KNOWN.networks["200g"],
    )
    assert known_hardware("gh200").links is None
    assert known_hardware("h100+no-disk").disk is None


def test_figures_of_the_user_replace_those_of_a_part():
    machine, known = known_hardware("rtx-4090,memory=22GiB,bf16=140TFLOPS,kernel=8us+pcie4,h2d=20GB/s+64GiB"), KNOWN
    card, usual = machine.device, known.devices["rtx-4090"]
    assert (card.memory_bytes, card.bf16_flops, card.kernel_s) == (22 * 2**30, 140e12, pytest.approx(8e-6))
    assert (card.fp32_flops, card.attention_flops) == (usual.fp32_flops, usual.attention_flops)
    assert (machine.bus.h2d_bytes_per_s, machine.bus.d2h_bytes_per_s) == (20e9, known.buses["pcie4"].d2h_bytes_per_s)
    assert machine.host == dataclasses.replace(
        known.hosts["desktop-ddr5"],
        memory_bytes=64 * 2**30,
        sources={**known.hosts["desktop-ddr5"].sources, "memory_bytes": "given by the user"},
    )
    assert card.sources["bf16_flops"] == "given by the user"
    assert "bf16_flops" not in {*card.slow, *card.fast}, "a figure of the user has no range"


def test_cards_without_bf16_say_so_and_are_not_planned_in_it():
    card = known_hardware("t4").device
    assert not card.computes_bf16
    assert card.sources["bf16_flops"].startswith("65 TFLOP/s in fp16, no bf16")
    model = layered(1, root=0, layer=100_000_000)
    work = {"model.layers.0": UnitWork(product_flops=1e12, attention_flops=0)}
    with pytest.raises(ConfigError, match="expected fp16 or fp32, since this device does not compute in bf16"):
        rates_for(known_hardware("t4"), dataclasses.replace(model, precision="bf16"), work)
    assert rates_for(known_hardware("t4"), dataclasses.replace(model, precision="fp16"), work).forward_s


def test_whatever_is_usual_beside_a_card_is_known():
    assert len(KNOWN.devices) >= 40
    assert KNOWN.families.keys() == KNOWN.usual.keys() == KNOWN.devices.keys()
    assert not {*KNOWN.refused} & {name for parts in KNOWN.by_kind.values() for name in parts}
    names = [name for parts in KNOWN.by_kind.values() for name in parts]
    assert len(names) == len(set(names)), "a name is that of one part"


@pytest.mark.parametrize(
    ("name", "bf16_flops", "bytes_per_s"),
    [
        ("rtx-4090", 156e12, 1008e9),
        ("a100-40gb", 224.64e12, 1555e9),
        ("a100-80gb", 224.64e12, 2039e9),
        ("h100", 633.216e12, 2747e9),
        ("h200", 633.216e12, 3936e9),
        ("gh200", 633.216e12, 3280e9),
        ("mi300x", 758.292e12, 5300e9),
    ],
)
def test_figures_are_those_with_which_reports_were_made(name: str, bf16_flops: float, bytes_per_s: float):
    card = KNOWN.devices[name]
    assert (card.bf16_flops, card.bytes_per_s) == pytest.approx((bf16_flops, bytes_per_s))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rtx4090", "the nearest is 'rtx-4090'"),
        ("pcie4", "expected a device among the parts"),
        ("h100+h200", "expected one device, but got 'h100' and 'h200'"),
        ("", "expected a JSON file, or names of parts"),
        ("gb10", "expected a machine whose GPU has memory of its own, but got 'gb10': a DGX Spark has one memory"),
        ("rtx-4090,vram=3", "device: expected figures as name=value, each once, of memory, bf16, fp32"),
        ("rtx-4090,memory=1GiB,memory_bytes=2GiB", "each once"),
        ("rtx-4090,memory=fast", "device: memory: expected bytes"),
        ("rtx-4090,memory=0", "device: memory_bytes: expected a number from 1"),
        ("rtx-4090,bf16=140", "expected FLOP/s as in 140TFLOPS, but got '140'"),
        ("rtx-4090,kernel=8h", "expected seconds as in 8us, but got '8h'"),
        ("rtx-4090+pcie4,both=9", "bus: both: expected a number from 0.5 to 2"),
        ("rtx-4090+no-disk,size=1TB", "disk: expected a part that has figures"),
    ],
)
def test_unknown_parts(name: str, message: str):
    with pytest.raises(ConfigError, match=message):
        known_hardware(name)


@pytest.mark.parametrize("value", NUMBERS, ids=repr)
@pytest.mark.parametrize(
    "field",
    [
        "device.bf16_flops",
        "bus.h2d_bytes_per_s",
        "host.bytes_per_s",
        "disk.both",
        "links.bytes_per_s",
        "network.bytes_per_s",
    ],
)
def test_absurd_numbers_are_refused(field: str, value: Any):
    data = json.loads(known_hardware("h100").to_json())
    part, name = field.split(".")
    data[part][name] = value
    with pytest.raises(ConfigError, match=f"hardware: {part}: {name}: expected a number"):
        Hardware.from_json(json.dumps(data))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("bus"), "key 'bus' is missing"),
        (lambda data: data.update(gpu={}), "unknown key 'gpu'"),
        (lambda data: data["host"].pop("memory_bytes"), "host: key 'memory_bytes' is missing"),
        (lambda data: data["host"].update(memory=1), "host: unknown key 'memory'"),
        (lambda data: data.update(disk=[]), "disk: expected a JSON object, but got list"),
        (lambda data: data.update(name=3), "name: expected a string"),
        (lambda data: data["host"].update(parts={"h2d": 1.5}), "host: parts: expected numbers from 0 to 1"),
        (lambda data: data["host"].update(parts={"gpu": 0.5}), "host: parts: expected numbers from 0 to 1"),
        (
            lambda data: data["host"].update(compute_left={"compute": 0.5}),
            "host: compute_left: expected numbers from 0",
        ),
        (lambda data: data["links"].update(devices_per_port=0.5), "devices_per_port: expected a number from 1 to 64"),
        (lambda data: data["device"].update(slow={"speed": 1}), "device: slow: expected figures under names of fields"),
        (lambda data: data["host"].update(fast=[]), "host: fast: expected figures under names of fields"),
        (lambda data: data["host"].update(fast={"visit_s": -1}), "host: fast: visit_s: expected a number from 0 to 10"),
        (lambda data: data["links"].update(on_bus=2), "on_bus: expected a number from 0 to 1"),
        (lambda data: data.update(version=9), "expected version 2, but got 9"),
        (lambda data: data["device"].update(sources={"bytes_per_s": 3}), "sources: expected names of fields"),
    ],
)
def test_damaged_descriptions_are_refused(change: Any, message: str):
    data = json.loads(known_hardware("h100").to_json())
    change(data)
    with pytest.raises(ConfigError, match=message):
        Hardware.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", "[" * 10**5, "3", "null", '"x"'])
def test_no_json(text: str):
    with pytest.raises(ConfigError, match="hardware: expected a"):
        Hardware.from_json(text)


def test_files_that_cannot_be_read_or_written(tmp_path: Path):
    with pytest.raises(ConfigError, match="expected a readable JSON file"):
        Hardware.load(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="expected a readable JSON file"):
        Hardware.load(tmp_path / "bytes.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        known_hardware("h100").save(tmp_path / "none" / "hardware.json")


def test_links_may_be_missing():
    data = json.loads(known_hardware("h100").to_json())
    del data["links"], data["network"]
    found = Hardware.from_json(json.dumps(data))
    assert (found.links, found.network) == (None, None)
