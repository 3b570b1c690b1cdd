"""Timing real blocks: which are run, that the model and its random numbers do not change, and what is kept."""

from __future__ import annotations

import dataclasses
import os
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.zoo import batches, make
from torch import nn

from outcore.device.opening import device_name, open_device
from outcore.memory.machine import Others
from outcore.model.partition import Partition, partition
from outcore.planner.search.plan_question import UNLIMITED
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import known_hardware
from outcore.planner.timing.profile import UnitTimes, UnitWork, rates_for
from outcore.planner.timing.rank_layout import Ranks
from outcore.preparation.plan_choice import on_machine, question_of
from outcore.preparation.prepare_options import Options
from outcore.probe import block_times as blocks
from outcore.probe import kept_blocks
from outcore.probe.kept_blocks import KeptBlocks, with_times
from outcore.probe.measured_machines import Machine, Measured, versions
from outcore.spec.hardware import Hardware

DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
MACHINE = known_hardware("rtx-4090")
STATES = ("exp_avg", "exp_avg_sq")


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(blocks, "_LEAST_S", 0.0)


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


def all_measured(work: dict[str, UnitWork]) -> bool:
    """Whether every block has times. What is in none is counted."""
    return [name for name, each in work.items() if each.measured is None] == [""]


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
    assert all_measured(work)
    assert all(seconds > 0 for each in work.values() if each.measured for seconds in each.measured)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert [dict(module.__dict__) for module in model.modules()] == attributes


def test_no_weights_are_needed():
    sample = sample_of("llama")
    with torch.device("meta"):
        model = make("llama")
    assert all_measured(timed(model, sample))


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


def test_parameters_are_swapped_once_for_all_turns(monkeypatch):
    """Swapping them takes longer than launching the kernels of a small block."""
    swaps, turns = [], []
    swap, turn = blocks._ParameterSwap, blocks._BlockTurns._turn
    monkeypatch.setattr(blocks, "_ParameterSwap", lambda module, then: swap(module, swaps.append(module) or then))
    monkeypatch.setattr(blocks._BlockTurns, "_turn", lambda self, number: turn(self, turns.append(number) or number))
    timed(make("llama"), sample_of("llama"))
    assert len(turns) >= 3 * len(swaps) > 0


@pytest.mark.parametrize("text", ["{", '{"versions": {}, "blocks": {}}', '{"versions": {"torch": "0"}, "blocks": 3}'])
def test_what_cannot_be_read_is_measured_again(text):
    path = Machine(DEVICE).blocks_path(MACHINE)
    path.parent.mkdir(parents=True)
    path.write_text(text)
    assert all_measured(timed(make("llama"), sample_of("llama")))
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
    assert all_measured(found), "this run uses them"
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
    assert [name for name, each in work.items() if each.measured is None] == ["", "1", "2"]
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
    assert all_measured(timed(model, {"input": torch.ones(2, 8)}, units=[Remembering]))
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
            assert on_machine(question_of(cut, options, device, UNLIMITED), cut, options, device) is not None
    assert len(found) == (not compiles)
