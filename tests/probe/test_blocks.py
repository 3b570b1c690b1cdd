"""Timing real blocks: which are run, that the model and its random numbers do not change, and what is kept."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.zoo import batches, make
from torch import nn

from outcore.device.device import Device
from outcore.device.opening import device_name, open_device
from outcore.memory.topology import Others
from outcore.model.partition import Partition, partition
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import UnitTimes, UnitWork, rates_for
from outcore.planner.timing.rank_layout import Ranks
from outcore.preparation.plan_choice import Options, Timed
from outcore.probe import block_times as blocks
from outcore.probe import kept_blocks
from outcore.probe.block_times import Speed
from outcore.probe.kept_blocks import KeptBlocks, with_times
from outcore.probe.loads import ProbeLoad
from outcore.probe.measured_machines import Machine, Measured, versions
from outcore.probe.small_block import SmallBlock
from outcore.spec.hardware import Hardware

DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
_KNOWN = known_hardware("rtx-4090")
MACHINE = dataclasses.replace(_KNOWN, device=dataclasses.replace(_KNOWN.device, blocks_per_s=50.0))
STATES = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "_LEAST_S", 0.0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def sample_of(name: str) -> dict[str, Any]:
    batch = batches(name, steps=1)[0]
    batch.pop("targets", None)
    return batch if name == "patchwork" else {**batch, "use_cache": False}


def timed(
    model: nn.Module, sample: dict[str, Any], *, hardware: Hardware = MACHINE, **options: Any
) -> dict[str, UnitWork]:
    cut = partition(model, state_names=STATES, **options)
    with open_device(DEVICE) as device:
        return with_times(counted_work(cut, sample, device.torch_device), cut, sample, device, hardware)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "t5", "lora", "patchwork"])
def test_every_unit_has_times_and_nothing_else_happens(name):
    """The model has buffers that forward changes, dropout, blocks that are called twice, and gradients."""
    model, sample = make(name), sample_of(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    attributes = [dict(module.__dict__) for module in model.modules()]
    torch.manual_seed(3)
    random.seed(3)
    drawn = torch.rand(3).tolist(), random.random()
    torch.manual_seed(3)
    random.seed(3)
    work = timed(model, sample)
    assert (torch.rand(3).tolist(), random.random()) == drawn
    assert all(each.measured is not None for each in work.values())
    assert all(seconds > 0 for each in work.values() for seconds in each.measured if each.product_flops)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [dict(module.__dict__) for module in model.modules()] == attributes


def test_no_weights_are_needed():
    sample = sample_of("llama")
    with torch.device("meta"):
        model = make("llama")
    assert all(each.measured is not None for each in timed(model, sample).values())


def test_blocks_that_do_the_same_are_run_once_and_kept(monkeypatch):
    runs: list[int] = []
    measure = kept_blocks.measure_blocks

    def counting(cut: Any, calls: Any, *rest: Any) -> Any:
        runs.append(len(calls.kinds))
        return measure(cut, calls, *rest)

    monkeypatch.setattr(kept_blocks, "measure_blocks", counting)
    first = timed(make("llama"), sample_of("llama"))
    names = [name for name in first if name.startswith("model.layers.")]
    assert len(names) > 1
    assert len({first[name].measured for name in names}) == 1
    assert timed(make("llama"), sample_of("llama")) == first
    assert runs == [1 + (len(first) > len(names) + 1)], "a kind of block, and the input embeddings if they are a unit"
    other = make("llama")
    other.config._attn_implementation = "eager"
    timed(other, sample_of("llama"))
    assert len(runs) == 2, "other kernels"


def test_parameters_are_lent_once_for_all_turns(monkeypatch):
    """Lending them takes longer than launching the kernels of a small block."""
    lent, turns = [], []
    lend, turn = blocks._lend, blocks._Measurement._turn
    monkeypatch.setattr(blocks, "_lend", lambda module, own, then: lend(module, lent.append(module) or own, then))
    monkeypatch.setattr(blocks._Measurement, "_turn", lambda self, number: turn(self, turns.append(number) or number))
    timed(make("llama"), sample_of("llama"))
    assert len(turns) >= 3 * len(lent) > 0


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's clock is not compared")
def test_the_speed_is_that_of_loads_without_autocast(monkeypatch):
    """Whatever the user's settings are. None of the user's random numbers is drawn for it."""
    dtypes = []
    monkeypatch.setattr(blocks, "usual_speed", lambda load, seconds: dtypes.append(load.turn()) or 1.0)
    monkeypatch.setattr(blocks, "blocks", lambda device: ProbeLoad("compute", 1.0, partial(dtype_of_forward, device)))
    monkeypatch.setattr(blocks, "products", lambda *given: ProbeLoad("compute", 1.0, dtype_of_product))

    def dtype_of_product() -> torch.dtype:
        one = torch.ones(2, 2, dtype=torch.float32)
        return (one @ one).dtype

    def dtype_of_forward(device: Device) -> torch.dtype:
        block = SmallBlock(device.torch_device)
        return block(block.example()).dtype

    before = torch.get_rng_state()
    with open_device(DEVICE) as device, torch.autocast("cpu", torch.bfloat16), default_dtype(torch.bfloat16):
        assert dtype_of_product() is torch.bfloat16
        Speed(device, MACHINE).now()
    assert dtypes == [torch.float32] * 2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's clock is not compared")
def test_where_no_block_was_timed_products_alone_tell_the_speed(monkeypatch):
    """A file that an earlier version wrote has no such figure."""
    text = json.loads(MACHINE.to_json())
    del text["device"]["blocks_per_s"]
    monkeypatch.setattr(blocks, "usual_speed", lambda load, seconds: 0.5 * MACHINE.device.fp32_flops)
    with open_device(DEVICE) as device:
        assert math.isclose(Speed(device, Hardware.from_json(json.dumps(text))).now(), 0.5)


def test_slow_moments_count_at_the_speed_of_the_probe(monkeypatch):
    """Products run at a 25th, and small blocks at a quarter, of the speeds that they had in the probe."""
    turns: list[float] = []
    turn = blocks._Measurement._turn

    def watched(self: Any, number: int) -> UnitTimes:
        found = turn(self, number)
        turns.append(found.backward_s)
        return found

    monkeypatch.setattr(blocks._Measurement, "_turn", watched)
    of_blocks, of_products = 0.25 * MACHINE.device.blocks_per_s, 0.04 * MACHINE.device.fp32_flops
    monkeypatch.setattr(blocks, "usual_speed", lambda load, seconds: of_blocks if load.amount == 1 else of_products)
    work = timed(make("llama"), sample_of("llama"))
    measured = {each.measured.backward_s for each in work.values() if each.measured.backward_s}
    factor = 0.1 if DEVICE == "cpu" else 1.0
    assert measured
    assert all(any(math.isclose(seconds, factor * found) for found in turns) for seconds in measured)


@pytest.mark.skipif(DEVICE != "cpu", reason="an accelerator does not share its memory with other programs")
@pytest.mark.parametrize(
    ("slow", "measured"),
    [([1.9], 1), ([2.2, 0.9], 2), ([2.3, 2.2, 2.1, 0.9], 3), ([2.2, None, 0.9], 3), ([None], 1)],
    ids=["as counted", "once slow", "slow for long", "not again", "never"],
)
def test_a_part_far_slower_than_counted_is_measured_again(slow, measured, monkeypatch):
    """The least counts. Parts of less than 20 ms are not measured again: much of them is never counted."""
    for unit_s in (1.0, 1e-3):
        left, pauses = [None if times is None else times * unit_s for times in slow], list[float]()
        monkeypatch.setattr(blocks.time, "sleep", pauses.append)

        def measure(left: list[float | None] = left) -> UnitTimes | None:
            seconds = left.pop(0)
            return None if seconds is None else UnitTimes(seconds / 3, 2 * seconds / 3, 0.0)

        with open_device(DEVICE) as device:
            found = blocks._least(measure, unit_s, device)
        number = measured if unit_s == 1.0 else 1
        known = [seconds * unit_s for seconds in slow[:number] if seconds is not None]
        assert (None if found is None else found.seconds) == (pytest.approx(min(known)) if known else None)
        assert pauses == [blocks._PAUSE_S] * (number - 1)


@pytest.mark.parametrize("text", ["{", '{"versions": {}, "blocks": {}}', '{"versions": {"torch": "0"}, "blocks": 3}'])
def test_what_cannot_be_read_is_measured_again(text):
    path = Machine(DEVICE).blocks_path(MACHINE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert all(each.measured is not None for each in timed(make("llama"), sample_of("llama")).values())
    assert KeptBlocks.load(path).blocks
    edited = path.read_text().replace("[", "[-", 1)
    path.write_text(edited)
    timed(make("llama"), sample_of("llama"))
    assert path.read_text() != edited


def test_each_measurement_of_the_machine_has_its_own_times(monkeypatch):
    """So a file of another speed, or a run that measures again, gets times of its own, and leaves the others alone."""
    fast = dataclasses.replace(MACHINE, device=dataclasses.replace(MACHINE.device, fp32_flops=1e15))
    first, other = (timed(make("llama"), sample_of("llama"), hardware=each) for each in (MACHINE, fast))
    assert other != first, "it was measured by itself"
    assert Machine(DEVICE).blocks_path(fast).is_file()
    monkeypatch.setattr("outcore.probe.kept_blocks.measure_blocks", None)  # kept ones are not measured again
    assert timed(make("llama"), sample_of("llama")) == first
    Machine(DEVICE)._keep(Measured(hardware=MACHINE, effort="quick", at="now", versions=versions()))
    assert not any(Machine(DEVICE).blocks_path(hardware).exists() for hardware in (MACHINE, fast))


def test_times_on_a_busy_machine_are_not_kept(monkeypatch):
    monkeypatch.setattr(Others, "busy", lambda _: "others kept 1.6 of 2 cores busy")
    with pytest.warns(UserWarning, match="others kept 1.6 of 2 cores busy while blocks of the model were timed"):
        found = timed(make("llama"), sample_of("llama"))
    assert all(each.measured is not None for each in found.values()), "this run uses them"
    assert not Machine(DEVICE).blocks_path(MACHINE).exists()


class Strange(nn.Module):
    """A block with memory that shares a parameter and a module with others, and has the module under two names."""

    def __init__(self, shared: nn.Parameter, linear: nn.Linear) -> None:
        super().__init__()
        self.shared, self.linear, self.again, self.calls = shared, linear, linear, 0
        self.seen: list[torch.Tensor] = []
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(x)
        self.last = x
        return self.norm(self.again(self.linear(x)) * self.shared)


class Strangers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shared, self.linear = nn.Parameter(torch.ones(8)), nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Strange(self.shared, self.linear) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_blocks_share_and_remember_stays_as_it_is():
    """Gradients that a parameter got under another name would be taken for the loop's own."""
    model, sample = Strangers(), {"x": torch.ones(4, 8)}
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    work = timed(model, sample, units=[Strange])
    assert work["blocks.1"].measured is not None
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [(block.calls, block.seen, hasattr(block, "last")) for block in model.blocks] == [(0, [], False)] * 3


class Stubborn(nn.Module):
    """A block whose forward depends on the values it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor and x.abs().max() < 1:
            raise ValueError("too small")
        return self.linear(x)


def test_a_block_that_does_not_run_alone_is_counted():
    model = nn.Sequential(nn.Linear(8, 8), Stubborn(), Stubborn())
    sample = {"input": torch.ones(2, 8)}
    work = timed(model, sample, units=[Stubborn])
    assert [name for name, each in work.items() if each.measured is None] == ["1", "2"]
    assert all(module.forward.__func__ is Stubborn.forward for module in model[1:])


class Remembering(nn.Module):
    """A block whose forward uses the graph of the forward before, and that raises when it was called often."""

    def __init__(self, buffer: torch.Tensor) -> None:
        super().__init__()
        self.linear, self.before, self.calls = nn.Linear(8, 8), None, 0
        self.register_buffer("one", buffer)
        self.register_buffer("other", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 3:
            raise ValueError("called too often")
        x = self.linear(x) + self.one + self.other
        self.before = x if self.before is None else x + self.before
        return self.before


def test_turns_do_not_see_what_others_left_in_the_module():
    model = nn.Sequential(nn.Linear(8, 8), Remembering(torch.ones(8)))
    assert all(each.measured for each in timed(model, {"input": torch.ones(2, 8)}, units=[Remembering]).values())
    assert (model[1].calls, model[1].before) == (0, None)


def test_what_takes_too_much_memory_is_counted(monkeypatch):
    monkeypatch.setattr(blocks, "_OF_FREE", 2**60)
    assert all(each.measured is None for each in timed(make("llama"), sample_of("llama")).values())


def test_what_takes_long_is_counted():
    """A large block on a small machine would take minutes, so its time is computed from its operations."""
    slow = dataclasses.replace(MACHINE, device=dataclasses.replace(MACHINE.device, fp32_flops=1e3, attention_flops=1e3))
    assert all(each.measured is None for each in timed(make("llama"), sample_of("llama"), hardware=slow).values())


def test_seconds_that_were_measured_win():
    model, sample = make("llama"), sample_of("llama")
    cut = partition(model, state_names=STATES)
    work = counted_work(cut, sample, torch.device("cpu"))
    name = next(name for name in work if name.endswith("layers.0"))
    counted = rates_for(MACHINE, cut.spec, work)
    work[name] = dataclasses.replace(work[name], measured=UnitTimes(0.25, 0.5, 0.125))
    rates = rates_for(MACHINE, cut.spec, work)
    assert (rates.forward_s[name], rates.backward_s[name], rates.launch_s[name]) == (0.25, 0.5, 0.125)
    assert counted.selected_forward_s[name] < rates.selected_forward_s[name] < 0.25
    assert {n: s for n, s in rates.forward_s.items() if n != name} == {
        n: s for n, s in counted.forward_s.items() if n != name
    }


def test_ranks_share_the_cores_that_compute():
    cut = partition(make("llama"), state_names=STATES)
    machine = dataclasses.replace(MACHINE, device=dataclasses.replace(MACHINE.device, runs_ahead=0))
    work = counted_work(cut, sample_of("llama"), torch.device("cpu"))
    work = {name: dataclasses.replace(each, measured=UnitTimes(1.0, 2.0, 1.0)) for name, each in work.items()}
    rates = rates_for(machine, cut.spec, work, ranks=Ranks(1, 4))
    assert {*rates.forward_s.values(), *rates.backward_s.values()} == {4.0, 8.0}


def test_a_frozen_head_is_another_rest():
    timed(make("llama"), sample_of("llama"))
    path, model = Machine(DEVICE).blocks_path(MACHINE), make("llama")
    number = len(KeptBlocks.load(path).blocks)
    model.lm_head.requires_grad_(requires_grad=False)
    timed(model, sample_of("llama"))
    assert len(KeptBlocks.load(path).blocks) == number + 1


@pytest.mark.parametrize("compiles", [False, True])
def test_a_run_measures_blocks_on_its_own_machine_alone(compiles, monkeypatch):
    """A plan for another machine, or for code that is compiled later, counts operations."""
    found: list[Partition] = []

    def with_none(work: Any, cut: Partition, *_: Any) -> Any:
        found.append(cut)
        return work

    monkeypatch.setattr("outcore.preparation.plan_choice.with_times", with_none)
    cut = partition(make("llama"), state_names=STATES)
    with open_device(DEVICE) as device:
        for hardware in (MACHINE, dataclasses.replace(MACHINE, name=device_name(DEVICE))):
            options = Options(sample=sample_of("llama"), hardware=hardware, compile=compiles)
            assert Timed(cut, options, device).forecast() is not None
    assert len(found) == (not compiles)
