"""Measuring this machine: the arithmetic, the results, what is kept and when it is stale, and bad disks."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import threading
import time
from collections import Counter
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import outcore
from outcore.command.probe import probe
from outcore.core.errors import ConfigError, DiskError, OutcoreError
from outcore.core.quantities import PAGE_BYTES
from outcore.device.opening import open_device
from outcore.memory import disk_file
from outcore.memory.disk import DiskStore, Extent
from outcore.memory.machine import Others, host_bytes
from outcore.model.partition import partition
from outcore.planner.timing.counted import counted_work
from outcore.planner.timing.known_hardware import known_hardware
from outcore.preparation.forecast import hardware_for
from outcore.probe import compute_rates as work
from outcore.probe import links
from outcore.probe import measure as measuring
from outcore.probe import measured_machines as kept
from outcore.probe.loads import ProbeLoad, SampledRate, rate_of, speeds
from outcore.probe.measure import MIB, Effort, measure
from outcore.probe.measured_machines import Machine
from outcore.probe.samples import line, parts
from outcore.probe.small_block import SmallBlock
from outcore.spec.hardware import Hardware
from outcore.spec.lane_names import Lane

DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")
LEAST = Effort(
    window_s=0.004, buffer_bytes=2 * MIB, sizes=(MIB // 16, MIB), disk_bytes=4 * MIB, longest_transfer=2 * MIB, steps=2
)
OPENED = partial(open_device, DEVICE)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("outcore.probe.measure.EFFORTS", {"whole": LEAST, "quick": LEAST})
    monkeypatch.setattr("outcore.command.probe._LOOK_S", 0.0)


class TestArithmetic:
    def test_a_line_has_a_rate_and_what_comes_besides(self):
        assert line({1000: 3e-3, 10_000: 12e-3, 5000: 0.5}) == pytest.approx((1e6, 2e-3))

    @pytest.mark.parametrize("points", [{1: 2.0, 1000: 1.0}, {1: 1e-9, 1000: 1.0}])
    def test_noise_gives_no_negative_time(self, points):
        assert line(points) == pytest.approx((1000.0, 0.0))

    def test_parts_explain_the_speeds_that_they_made(self):
        """Parts are recovered from the speeds that a fair machine would leave."""
        true = {"compute": 1.0, "update": 0.9, "h2d": 0.6, "disk_read": 0.3}

        def left(one: str, other: str) -> tuple[float, float]:
            fair = min(true[one], true[other], 0.5)
            own = min(true[one], max(1 - min(true[other], 0.5), fair))
            return own / true[one], min(true[other], 1 - own) / true[other]

        names = list(true)
        speeds_of = {(a, b): left(a, b) for i, a in enumerate(names) for b in names[i + 1 :]}
        assert parts(speeds_of) == pytest.approx(true, abs=0.05)

    def test_those_that_do_not_slow_each_other_down_share_nothing_to_speak_of(self):
        found = parts({("h2d", "update"): (1.0, 0.99), ("d2h", "update"): (1.0, 1.0), ("d2h", "h2d"): (1.0, 1.0)})
        assert set(found.values()) == {0.0}, "three at once would slow each other down"


class TestLoads:
    def test_the_median_of_the_turns_counts_and_their_quartiles_are_said(self, monkeypatch):
        took_s = [9.0, *(each for each in (1.0, 1.25, 2.0, 4.0, 50.0))]  # the first one is not counted
        left, now_s = list(took_s), [0.0]
        monkeypatch.setattr("outcore.probe.loads.time.perf_counter", lambda: now_s[0])
        load = ProbeLoad("h2d", 10.0, lambda: now_s.append(now_s.pop() + left.pop(0)))
        assert rate_of(load, 58.0) == (5.0, 2.5, 8.0)
        assert not left

    def test_beside_each_other_they_are_as_fast_as_they_were_meanwhile(self):
        lock = threading.Lock()  # the resource that both share

        def turn() -> None:
            with lock:
                time.sleep(0.01)  # longer than a busy machine needs to wake a thread

        loads = [ProbeLoad("update", 2.0, turn), ProbeLoad("compute", 1.0, turn, is_compute=True)]
        sums = []
        for _ in range(5):  # other programs may slow either down for a while
            alone, together = speeds(loads[:1], 0.2)["update"], speeds(loads, 0.4)
            assert alone < 200
            sums.append(together["update"] / alone + 2 * together["compute"] / alone)
        assert sorted(sums)[1] < 1.5, sums

    def test_a_thread_that_cannot_start_ends_all_of_them(self, monkeypatch):
        start, started = threading.Thread.start, []

        def only_one(thread: threading.Thread) -> None:
            if started:
                raise RuntimeError("can't start new thread")
            started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", only_one)
        with pytest.raises(RuntimeError, match="can't start"):
            speeds([ProbeLoad("h2d", 1.0, lambda: time.sleep(0.001)), ProbeLoad("d2h", 1.0, lambda: None)], 0.01)
        assert not started[0].is_alive()

    def test_an_error_ends_all_of_them(self):
        def fail() -> None:
            raise DiskError("it broke")

        with pytest.raises(DiskError, match="it broke"):
            speeds([ProbeLoad("disk_read", 1.0, fail), ProbeLoad("compute", 1.0, lambda: None, is_compute=True)], 5.0)


def test_kernels_of_the_small_block_are_those_that_a_model_is_counted_by():
    device = torch.device("cpu")
    block = SmallBlock(device)
    cut = partition(nn.Sequential(block), units=[SmallBlock], state_names=("exp_avg", "exp_avg_sq"))
    found = counted_work(cut, {"input": block.example()}, device)
    assert found["0"].kernels == SmallBlock.kernels


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Hardware, set[int], set[int]]:
    """The measured hardware, the disk pages that were written, and those that were read without having been written."""
    written, unwritten = set[int](), set[int]()
    read, write = DiskStore.read, DiskStore.write

    def pages(extent: Extent) -> set[int]:
        return set(range(extent.offset // PAGE_BYTES, (extent.offset + extent.nbytes) // PAGE_BYTES))

    def noted_write(store: DiskStore, extent: Extent, memory: torch.Tensor) -> None:
        write(store, extent, memory)
        written.update(pages(extent))

    def noted_read(store: DiskStore, extent: Extent, memory: torch.Tensor) -> None:
        unwritten.update(pages(extent) - written)
        read(store, extent, memory)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DiskStore, "write", noted_write)
        patch.setattr(DiskStore, "read", noted_read)
        moves = {"disk_read": (Lane.STATES_READ, noted_read), "disk_write": (Lane.DISK_WRITE, noted_write)}
        patch.setattr(work, "_TRANSFERS", moves)
        hardware = measure(OPENED, [tmp_path_factory.mktemp("disk")], LEAST)
    assert torch.equal(before, torch.get_rng_state()), "a run draws the numbers that it would have drawn"
    return hardware, written, unwritten


class Called(TorchDispatchMode):
    """Collects the names of the optimizer kernels that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: set[str] = set()

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.updates |= {name} if "adam" in name or name.startswith("addcdiv") else set()
        return func(*args, **(kwargs or {}))


@pytest.fixture
def found(measured: tuple[Hardware, set[int], set[int]]) -> Hardware:
    return measured[0]


@pytest.mark.parametrize("changed", ["", "a slow drive", "little host memory"])
def test_transfers_are_long_where_the_drive_is_fast(changed, tmp_path, monkeypatch):
    """On a slow drive not even one such transfer is measured, in either direction."""
    sizes: Counter[int] = Counter()

    def noted(store: DiskStore, extent: Extent, memory: torch.Tensor) -> None:
        sizes[memory.numel()] += 1
        time.sleep(0.01)

    moves = {"disk_read": (Lane.STATES_READ, DiskStore.read), "disk_write": (Lane.DISK_WRITE, noted)}
    monkeypatch.setattr(work, "_TRANSFERS", moves)
    monkeypatch.setattr(measuring, "_LONGEST_S", 0.01 if changed == "a slow drive" else 60.0)
    if changed == "little host memory":
        monkeypatch.setattr(measuring, "host_free_bytes", lambda: 32 * MIB)
    measure(OPENED, [tmp_path], LEAST)
    assert sizes[MIB] > 0
    assert (sizes[LEAST.longest_transfer] > 0) == (not changed)


class TestMeasuring:
    def test_it_is_a_machine_that_plans_can_be_made_for(self, found):
        assert Hardware.from_json(found.to_json()) == found
        assert found.device.runs_ahead == (DEVICE != "cpu")
        assert found.host.visit_s > 1e-6  # what is not seen is 1e-9
        assert found.host.resting_visit_s > 1e-6
        assert found.device.plain_update_parameters_per_s > 0

    def test_a_plain_plan_is_measured_by_the_kernels_that_it_runs(self):
        model = nn.Linear(8, 8, device=DEVICE)
        with outcore.prepare(model, torch.optim.AdamW(model.parameters()), device=DEVICE) as (model, optimizer):
            assert optimizer.plan.plain
            model(torch.ones(1, 8, device=DEVICE)).sum().backward()
            optimizer.step()  # which also checks the kernels
            with Called() as run:
                optimizer.step()
        with closing(OPENED()) as device:
            load = work.plain_updates(device, MIB)
            with Called() as measured:
                load.turn()
        assert run.updates == measured.updates == {"_fused_adamw_"}

    def test_memory_is_what_there_is_not_what_is_free(self, found):
        with closing(open_device(DEVICE)) as device:
            shared = 2 if device.has_host_memory else 1  # both tiers share it
            assert found.host.memory_bytes == host_bytes() / shared
            assert found.device.memory_bytes == device.total_bytes() / shared

    def test_every_figure_says_where_it_is_from(self, found):
        for part in (found.device, found.bus, found.host, found.disk):
            names = {field.name for field in dataclasses.fields(part)} - {"sources", "slow", "fast"}
            names -= {"runs_ahead", "endurance_bytes"}
            assert part.sources.keys() == names

    def test_the_spread_of_turns_is_the_range_of_a_figure(self, found):
        for part in (found.device, found.host):
            assert part.slow.keys() == part.fast.keys() >= {"update_parameters_per_s"}
            for name, slow in part.slow.items():
                ends = sorted((slow, getattr(part, name), part.fast[name]), reverse=name == "kernel_s")
                assert ends == [slow, getattr(part, name), part.fast[name]]

    def test_the_cores_are_shared_where_they_compute(self, found):
        links = {"h2d", "d2h", "update", "disk_read", "disk_write"}
        assert found.host.parts.keys() == links
        assert found.host.compute_left.keys() == found.host.left_beside_compute.keys()
        assert found.host.compute_left.keys() == (links if DEVICE == "cpu" else set())

    def test_only_what_was_written_is_read(self, measured):
        """A filesystem answers reads of other pages without its drive, many times as fast."""
        hardware, written, unwritten = measured
        assert hardware.disk is not None
        assert len(written) == LEAST.disk_bytes // PAGE_BYTES
        assert not unwritten

    def test_without_folders_there_is_no_disk(self):
        assert measure(OPENED, [], LEAST).disk is None

    def test_a_folder_that_cannot_serve_leaves_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setattr(disk_file.OsDiskIO, "free_bytes", lambda *_: 4096)
        with pytest.raises(DiskError, match="ENOSPC"):
            Machine(DEVICE, (tmp_path,)).measure("whole")
        assert list(tmp_path.iterdir()) == []


class TestKept:
    @pytest.fixture(autouse=True)
    def _known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kept, "measure", lambda *_, **__: known_hardware("rtx-4090"))

    def test_once(self, tmp_path):
        machine = Machine(DEVICE)
        assert machine.kept() is None
        with pytest.warns(UserWarning, match=f"to predict times of plans.*'{tmp_path}/cache/outcore/hardware-"):
            first = machine.at_hand()
        assert Machine(DEVICE).at_hand() == first
        assert Machine(DEVICE, (tmp_path,)).kept() is None, "a disk is another machine"

    def test_of_whichever_drives_were_measured_last(self, tmp_path, monkeypatch):
        machine, here = Machine(DEVICE), SimpleNamespace(torch_device=torch.device(DEVICE))
        monkeypatch.delenv("OUTCORE_HARDWARE")
        with pytest.warns(UserWarning, match="to predict times of plans"):
            assert hardware_for(None, here, None, may_measure=True) == machine.at_hand()
        assert machine.kept_with_a_disk() is None
        monkeypatch.setattr(kept, "measure", lambda *_: known_hardware("h100"))
        found = Machine(DEVICE, (tmp_path,)).measure("whole")
        assert machine.kept_with_a_disk() == found
        monkeypatch.setattr(kept, "measure", None)
        assert hardware_for(None, here, None, may_measure=True) == found.hardware

    def test_what_is_measured_beside_a_run_is_not_kept(self):
        machine = Machine(DEVICE)
        machine.measure("quick", is_kept=False)
        assert machine.kept() is None

    def test_one_device_is_one_machine(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
        assert Machine("cuda").path == Machine("cuda:0").path != Machine("cuda:1").path

    def test_stale_is_said(self, monkeypatch):
        machine = Machine(DEVICE)
        first = machine.measure("whole")
        monkeypatch.setattr(torch, "__version__", "9.9")
        with pytest.warns(UserWarning, match=re.escape(f"is stale: torch was {first.versions['torch']}")):
            assert machine.kept() is None

    def test_what_an_earlier_version_kept_is_measured_again(self):
        """Its file has a figure that nothing uses any more."""
        machine = Machine(DEVICE)
        text = json.loads(machine.measure("whole").to_json())
        text["versions"]["probe"], text["hardware"]["device"]["blocks_per_s"] = "12", 50.0
        machine.path.write_text(json.dumps(text))
        with pytest.warns(UserWarning, match="is stale: probe was 12; it is measured again"):
            assert machine.kept() is None
        assert Hardware.from_json(json.dumps(text["hardware"])) == known_hardware("rtx-4090")

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"hardware": 1}', "null"])
    def test_damaged_is_said(self, text):
        machine = Machine(DEVICE)
        machine.path.parent.mkdir(parents=True)
        machine.path.write_text(text)
        with pytest.warns(UserWarning, match="cannot be used: .*hardware-"):
            assert machine.kept() is None

    def test_a_home_that_cannot_be_written_to(self, tmp_path):
        (tmp_path / "cache").write_text("a file")
        assert Machine(DEVICE).measure("whole").hardware.device.fp32_flops > 0


class TestBusy:
    @pytest.fixture(autouse=True)
    def _busy(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(kept, "measure", lambda *_, **__: known_hardware("rtx-4090"))
        monkeypatch.setattr(Others, "busy", lambda _: "others kept 1.6 of 2 cores busy")

    def test_the_run_uses_what_was_measured_but_it_is_not_kept(self):
        with pytest.warns(UserWarning, match="is busy: others kept 1.6 of 2 cores busy; so the result is not kept"):
            assert Machine(DEVICE).at_hand() == known_hardware("rtx-4090")
        assert Machine(DEVICE).kept() is None

    @pytest.mark.parametrize("number", [1, 2])
    def test_the_command_refuses_and_writes_nothing(self, number, tmp_path, monkeypatch):
        """It looks before it measures, and again afterwards."""
        said = ["others kept 1.6 of 2 cores busy", ""][:: number * 2 - 3]
        monkeypatch.setattr(Others, "busy", lambda _: said.pop())
        with pytest.raises(OutcoreError, match="busy: others kept 1.6 of 2 cores busy while it was measured, so its"):
            probe(disks=[], device=DEVICE, out=tmp_path / "hardware.json")
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("least_s", "is_repeated"), [(1e-9, False), (0.05, True)])
def test_what_takes_no_time_is_done_some_times_over(least_s, is_repeated, monkeypatch):
    monkeypatch.setattr(work, "_LEAST_TURN_S", least_s)
    done = []
    with open_device("cpu") as device:
        load = work._sized(device, lambda size: (float(size), lambda: done.append(size)), 1, 4)
        done.clear()
        load.turn()
    assert load.amount == sum(done)
    assert (len(done) > 1) is is_repeated
    assert set(done) == ({4} if is_repeated else {1})


def test_the_command_says_and_writes(tmp_path):
    said = probe(disks=[tmp_path], device=DEVICE, out=tmp_path / "hardware.json")
    names = [line.split()[0] for line in said.splitlines()]
    assert names == ["machine", "device", "memory", "bus", "host", "disk", "spread", "shared", "kept"]
    written = Hardware.load(tmp_path / "hardware.json")
    assert json.loads(Machine(DEVICE, (tmp_path,)).path.read_text())["hardware"] == json.loads(written.to_json())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"disks": [Path("/nowhere")]}, "--disk-dir: expected a folder that is there, but got '/nowhere'"),
        ({"disks": [Path("/dev/shm")]}, "--disk-dir: disk path '/dev/shm': expected a drive"),
        ({"out": Path("/nowhere/hardware.json")}, "--out: expected a file in a folder that is there"),
        ({"out": Path("/tmp")}, "--out: expected a file in a folder that is there"),
        ({"device": "tpu"}, "device: expected 'cpu' or 'cuda'"),
        ({"device": "meta"}, "device: expected 'cpu' or 'cuda'"),
    ],
)
def test_bad_input_is_refused_before_anything_is_measured(options, message):
    with pytest.raises(ConfigError, match=message):
        probe(**({"disks": [], "device": DEVICE, "out": None} | options))


class Node:
    """Ranks that each get a fixed number of bytes per second from others of the node, in simulated time."""

    def __init__(self, size: int, local_size: int) -> None:
        self.rank, self.size, self.local_size, self.now_s = 0, size, local_size, 0.0
        self.join_lanes = self.open_groups = self.all_of = lambda _: None

    def all_gather(
        self, _facts: str, _unit: str, pieces: list[tuple[torch.Tensor, torch.Tensor]], sharers: int
    ) -> None:
        ((whole, mine),) = pieces
        assert (sharers, whole.numel()) == (self.local_size, self.local_size * mine.numel())
        self.now_s += 1e-3 + (whole.numel() - mine.numel()) / 1e8

    def exchange(self, _bits: bytes, bucket: torch.Tensor, received: torch.Tensor, _unit: str) -> None:
        run = bucket.numel() // self.size
        assert received.numel() == bucket.numel() == self.size * run
        self.now_s += 2e-3 + self.local_size * (self.size - self.local_size) * run / 1e9

    def from_first(self, value: tuple[float, float]) -> tuple[float, float]:
        return value


@pytest.mark.parametrize(("size", "per_node"), [(4, 4), (8, 4), (3, 1)])
def test_what_is_between_ranks(size, per_node, monkeypatch):
    node = Node(size, per_node)
    monkeypatch.setattr(links.time, "perf_counter", lambda: node.now_s)
    monkeypatch.setattr(links, "rate_of", lambda *_: SampledRate(1e9, 1e9, 1e9))  # of copies to GPUs
    with closing(OPENED()) as device:
        found = links.measure_links(node, device, (MIB // 4, MIB))
    assert (found.links is None, found.network is None) == (per_node == 1, size == per_node)
    if found.links is not None:
        assert (found.links.bytes_per_s, found.links.host_bytes_per_s) == pytest.approx((1e8, 1e8))
        assert found.links.latency_s == pytest.approx(1e-3)
        assert (found.links.on_bus, found.links.through_host, found.links.devices_per_port) == (1, 1, 1)
    if found.network is not None:
        assert found.network.bytes_per_s == pytest.approx(1e9)
        assert found.network.latency_s == pytest.approx(2e-3)
