"""How close a step comes to the bound of its plan, with lanes slowed to given speeds.

Prints one JSON object. The model is a row of equal blocks whose forward and backward sleep: compute takes known time
and none of the machine's cores. Every lane is throttled to a known bandwidth, so the bound is known
(docs/internals/overlap.md), and each setting makes another resource bind. ``serial_s`` is the same step with overlap
off: every operation is waited for at once. A step is from the end of one ``optimizer.step()`` to that of the next, as
compute sees it.

On the CPU lanes are threads. With ``--device cuda`` copies and compute sleep on their streams: for exactly that time on
the simulated GPU (docs/internals/simulated-gpu.md), and by its clock on a real one.

    python benchmarks/overlap.py
    python benchmarks/overlap.py --settings h2d --windows forward --picture
    python tests/simulated_gpu/run.py benchmarks/overlap.py --device cuda
    torchrun --nproc-per-node 2 benchmarks/overlap.py

With several ranks, each is a process on this machine. Gradients and weights go between them over gloo, and lanes
between ranks are throttled like the others. Rank 0 reports how long its steps take.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from measuring import context, prepare_slowed, spread
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.device.cuda import sleep_on_stream
from outcore.device.faults import Faults
from outcore.engine.optimizer import StreamedOptimizer
from outcore.model import expensive_operations as dear
from outcore.model.partition import partition
from outcore.planner.homes.early_placement import with_early_updates
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.timing.rates import LINK_OF, Rates
from outcore.planner.timing.simulate import simulate
from outcore.spec.budget import Limits
from outcore.spec.layout import states_bytes, sums_on_device, update_cost_numel, weights_home
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Gather, Partition, Plan, Policy, Tier, UnitPlan
from outcore.spec.schedule import usual_visits
from outcore.spec.timeline import COMPUTE, Span, Timeline

sys.path.append(str(Path(__file__).resolve().parents[1] / "research"))
from planning.bound.bound import bound_of

RANK, NUM_RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
STATES = ("exp_avg", "exp_avg_sq")
FORWARD, BACKWARD = 1.0, 2.0
"""A block's forward, and its backward without recompute, in units of ``--milliseconds``."""


@dataclass(frozen=True)
class Setting:
    """How long each lane works for one block, in the same units, and where blocks keep their states."""

    h2d: float = 0.5
    d2h: float = 0.5
    update: float = 0.5
    disk: float = 0.0
    states: Tier = "host"
    saved: float = 0.0
    """Time of ``d2h`` for what a forward saves, and of the disk for the same, if it leaves the device."""
    activations: Tier = "device"
    policy: Policy = "recompute"
    """``select`` saves one product and computes the rest again."""
    reduce: float = 0.5
    """Time for gradients between ranks, if there are several; the next two are for weights."""
    gather: float = 0.5
    link: float = 0.5
    cut: tuple[Partition, Gather] = ("replicate", "link")


SETTINGS = {
    "compute": Setting(),
    "kept": Setting(saved=0.5, policy="keep"),
    "h2d": Setting(h2d=4.0),
    "d2h": Setting(d2h=4.0),
    "update": Setting(update=5.0),
    "disk": Setting(disk=5.0, states="disk"),
    "activations": Setting(saved=1.5, activations="host", policy="keep"),
    "activations_disk": Setting(saved=1.5, activations="disk", policy="keep"),
    "activations_hidden": Setting(saved=0.5, activations="host", policy="keep"),
    "selected": Setting(saved=0.5, activations="host", policy="select"),
    "selected_disk": Setting(saved=2.0, activations="disk", policy="select"),
}
BETWEEN_RANKS = {
    "compute": Setting(),
    "reduce": Setting(reduce=4.0),
    "gather": Setting(gather=4.0),
    "link": Setting(link=4.0, cut=("world", "link")),
    "link_reduce": Setting(link=2.0, reduce=2.0, cut=("world", "link")),
    "one_copy": Setting(reduce=2.0, gather=0.0, cut=("node", "host")),
}
"""Settings for several ranks. ``one_copy``: new weights only need a wait."""
WINDOWS = ("forward", "backward", "speculation")


def keep_busy(x: torch.Tensor, seconds: float) -> None:
    """Let the work on a tensor take time."""
    if x.is_cuda:
        sleep_on_stream(seconds)
    else:
        time.sleep(seconds)


class Sleep(torch.autograd.Function):
    """Sleeps in forward and backward, and gives a weight a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, forward_s: float, backward_s: float, saved: int
    ) -> torch.Tensor:
        keep_busy(x, forward_s)
        ctx.shape, ctx.backward_s = weight.shape, backward_s
        if saved:
            ctx.save_for_backward(x.new_empty(saved))
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        keep_busy(grad, ctx.backward_s)
        return grad, grad.new_full(ctx.shape, 1e-6), None, None, None


class Block(nn.Module):
    """A block with one parameter, and a forward and backward of known length."""

    def __init__(self, numel: int, unit_s: float, saved: int = 0, selected: int = 0) -> None:
        """Args: unit_s: Seconds of forward. saved: Values that forward saves. selected: Those that a product saves."""
        super().__init__()
        self.weight, self.saved, self.selected = nn.Parameter(torch.zeros(numel)), saved, selected
        self.forward_s, self.backward_s = FORWARD * unit_s, BACKWARD * unit_s

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.selected:
            one = x.detach()[:1]
            x = x + 0 * (one.expand(self.selected, 1) @ one.view(1, 1))[0]
        return Sleep.apply(x, self.weight, self.forward_s, self.backward_s, self.saved)


class Row(nn.Module):
    """A sequence of blocks."""

    def __init__(self, num_blocks: int, numel: int, unit_s: float, saved: int = 0, selected: int = 0) -> None:
        """Args: See ``Block``."""
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.blocks = nn.ModuleList(Block(numel, unit_s, saved, selected) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return x.mean()


class Case:
    """One setting in one window: its plan, throttle and bound."""

    def __init__(self, setting: Setting, window: str, args: argparse.Namespace) -> None:
        """Args: args: The command line."""
        self._args, self._clips = args, window != "backward"
        # What is saved goes through the gradients' lane, which takes ``setting.d2h`` for ``numel`` values.
        saved = round(args.numel * setting.saved / setting.d2h)
        self._saved, self._selected = (0, saved) if setting.policy == "select" else (saved, 0)
        unit_s = args.milliseconds / 1e3
        spec = partition(self._model(), units=[Block], state_names=STATES).spec.among(NUM_RANKS, RANK)
        leaves = setting.activations != "device"
        self.plan = plan_for(spec, setting, args, saved_bytes=4 * saved * leaves, is_early=window != "forward")
        self.throttle, rates = paces(spec, self.plan, setting, unit_s, device=args.device)
        self.thread_s: list[float] = []
        """Processor seconds per step of the thread that drives, which a busy machine does not change."""
        step = (spec, self.plan, rates, usual_visits(spec), Circumstances(clips=self._clips))
        self.bound = bound_of(*step)
        self.simulated_s = simulate(*step).step_s

    def run(self, steps: int, *, serial: bool) -> tuple[list[float], Timeline]:
        """Return the seconds of each step, and their timeline."""
        with self._prepared(serial=serial) as (model, optimizer):
            if not serial:
                self._step(model, optimizer)
            with optimizer.recording(num_steps=steps + 1) as recorder:
                for _ in range(steps + 1):
                    began_s = time.thread_time()
                    self._step(model, optimizer)
                    self.thread_s.append(time.thread_time() - began_s)
            optimizer.engine.device.synchronize()
            timeline = recorder.timeline()
        ends = [span.end_s for span in timeline.spans if (span.lane, span.name) == (COMPUTE, "step")]
        timeline = timeline.between(ends[0], ends[-1])
        return [end - start for start, end in itertools.pairwise(ends)], timeline

    def _model(self) -> Row:
        unit_s = self._args.milliseconds / 1e3
        return Row(self._args.blocks, self._args.numel, unit_s, self._saved, self._selected)

    @contextlib.contextmanager
    def _prepared(self, *, serial: bool) -> Iterator[tuple[nn.Module, StreamedOptimizer]]:
        model = self._model()
        with (
            mock.patch.object(dear, "DEAR_FLOP_PER_BYTE", 0),  # so that a tiny product is selected
            tempfile.TemporaryDirectory(dir=self._args.disk) as folder,
            prepare_slowed(
                model,
                torch.optim.AdamW(model.parameters(), lr=1e-3),
                faults=Faults(throttle=self.throttle, serial=serial),
                plan=self.plan,
                budget=outcore.Budget(disk=folder),
                units=[Block],
                clipping=self._clips,
                device=self._args.device,
            ) as prepared,
        ):
            yield prepared

    def _step(self, model: nn.Module, optimizer: StreamedOptimizer) -> None:
        model(torch.ones(4, device=self._args.device)).backward()
        if self._clips:
            clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()


def plan_for(
    model: ModelSpec, setting: Setting, args: argparse.Namespace, *, saved_bytes: int = 0, is_early: bool
) -> Plan:
    """A plan with weights and gradients of all blocks on the host, and the root on the device."""
    units = [UnitPlan(name="", weights="device", gradients="device", states="device", policy="keep")]
    homes: dict[str, Any] = {"weights": "host", "gradients": "host", "states": setting.states}
    homes |= {"policy": setting.policy, "activations": setting.activations, "saved_bytes": saved_bytes}
    homes |= dict(zip(("partition", "gather"), setting.cut, strict=True))
    units += [UnitPlan(name=unit.name, **homes) for unit in model.units[1:]]
    comfort = Comfort(prefetch_depth=args.depth, num_buckets=args.buckets, max_slots_host=3)
    plan = Plan(
        precision=model.precision,
        units=tuple(units),
        pools=pools_for(model, units, comfort),
        prefetch_depth=args.depth,
        accumulation_steps=1,
    )
    ample = Limits(device_bytes=2**40, host_bytes=2**40, disk_bytes=2**40)
    return with_early_updates(model, plan, ample) if is_early else plan


def paces(
    model: ModelSpec, plan: Plan, setting: Setting, unit_s: float, *, device: str
) -> tuple[dict[str, float], Rates]:
    """Return the throttle that gives each lane the setting's speed, in bytes per second, and the same as rates."""
    spec, unit = model.units[-1], plan.units[-1]
    states, weights = states_bytes(spec, unit, model), weights_home(spec, unit)
    written = {
        "h2d": (weights.nbytes, setting.h2d),
        "d2h": (spec.update_bytes if sums_on_device(spec, unit) else spec.bucket_bytes, setting.d2h),
        "update": (weights.updated_bytes + states, setting.update),
        "reduce": (spec.bucket_bytes, setting.reduce),
        "gather": (weights.updated_bytes, setting.gather),
        "link": (spec.weight_bytes, setting.link),
        "states_read": (states, setting.disk),
        **dict.fromkeys(("disk_write", "states_write"), (states, setting.disk)),
    }
    if unit.activations == "disk":
        written |= dict.fromkeys(("disk_write", "weights_read"), (unit.saved_bytes, setting.saved))
    throttle = {lane: nbytes / (units * unit_s) for lane, (nbytes, units) in written.items() if units}
    links: dict[str, float] = {LINK_OF[lane]: rate for lane, rate in throttle.items()}
    # Between ranks a lane also writes what belongs to the rank itself. A sum reads the parts of all ranks.
    others = {"reduce": spec.others_bytes, "gather": (weights.num_copies - 1) * spec.run_bytes}
    others |= {"link": spec.weight_bytes - weights.nbytes}
    links |= {lane: others[lane] / (written[lane][1] * unit_s) for lane in others if others[lane] and written[lane][1]}
    links |= {"host gather": links["gather"]} if "gather" in links else {}
    links |= {"update": spec.num_ranks * throttle["update"]}
    names = [u.name for u in model.units[1:]]
    rates = Rates(
        forward_s=dict.fromkeys(names, FORWARD * unit_s),
        backward_s=dict.fromkeys(names, BACKWARD * unit_s),
        selected_forward_s=dict.fromkeys(names, FORWARD * unit_s),
        bytes_per_s=links,
        parameters_per_s={"update": update_cost_numel(spec, unit) / (setting.update * unit_s)},
        host_runs_ahead=device != "cpu",
    )
    return throttle, rates


def measure(case: Case, args: argparse.Namespace) -> tuple[dict[str, object], Timeline]:
    """Return one line of the result."""
    seconds, timeline = case.run(args.steps, serial=False)
    thread_s = spread(case.thread_s)
    serial_s, _ = case.run(args.serial_steps, serial=True)
    bound_s, measured = case.bound.seconds, spread(seconds)
    busy_s, exposed_s = timeline.busy_s(), timeline.exposed_s()
    found = {
        "binding": case.bound.binding,
        "bound_s": round(bound_s, 4),
        "simulated_s": round(case.simulated_s, 4),
        "measured_s": measured,
        "thread_s": thread_s,
        "over_bound": round(measured["median"] / bound_s, 3),
        "over_simulated": round(measured["median"] / case.simulated_s, 3),
        "serial_s": spread(serial_s),
        "serial_over_bound": round(spread(serial_s)["median"] / bound_s, 3),
        "exposed_s_per_step": {lane: round(s / args.steps, 4) for lane, s in exposed_s.items() if s},
        "busy_s_per_step": {lane: round(s / args.steps, 4) for lane, s in busy_s.items() if s},
        "explained": round((busy_s[COMPUTE] + sum(exposed_s.values())) / sum(seconds), 4),
    }
    return found, timeline


def picture(timeline: Timeline, seconds: float, width: int = 160) -> str:
    """Draw the first ``seconds`` as text, one row per lane; a block's operations appear under its number."""
    start_s = timeline.start_s
    cut = timeline.between(start_s, start_s + seconds)
    spans = [s for s in cut.spans if s.name not in ("forward", "backward", "step")]
    rows = {COMPUTE: [s for s in spans if s.lane == COMPUTE], "waits": list(cut.waits)}
    rows |= {lane: [s for s in spans if s.lane == lane] for lane in cut.lanes()[1:]}
    return "\n".join(f"{n:>12} {_row(row, start_s, width / seconds, width)}" for n, row in rows.items() if row)


def _row(spans: list[Span], start_s: float, scale: float, width: int) -> str:
    row = [" "] * width
    for span in spans:
        first, end = (int((moment - start_s) * scale) for moment in (span.start_s, span.end_s))
        label = span.name.rsplit(".", 1)[-1] if "blocks." in span.name else span.name
        text = f"|{label.split()[0]}".ljust(max(end - first, 1), "-")[: max(end - first, 1)]
        row[first : first + len(text)] = text
    return "".join(row)[:width]


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    settings = SETTINGS if NUM_RANKS == 1 else BETWEEN_RANKS
    windows = ["forward", "backward"] if NUM_RANKS == 1 else ["forward"]  # ranks update after backward
    parser.add_argument("--settings", nargs="*", default=list(settings), choices=settings)
    parser.add_argument("--windows", nargs="*", default=windows, choices=WINDOWS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, default=20)
    parser.add_argument("--numel", type=int, default=2**16, help="parameters of a block")
    parser.add_argument("--milliseconds", type=float, default=14.0, help="forward of a block")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--serial-steps", type=int, default=1)
    parser.add_argument("--depth", type=int, default=2, help="units to fetch ahead")
    parser.add_argument("--buckets", type=int, default=2, help="units whose gradients may be on their way")
    parser.add_argument("--disk", type=Path, default=Path(), help="folder of the disk tier")
    parser.add_argument("--picture", action="store_true", help="draw one step of each on standard error")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = arguments()
    torch.set_num_threads(1)  # the blocks sleep; a second thread would only wait for a core
    results: dict[str, Mapping[str, object]] = {}
    for window in args.windows:
        results[window] = found = {}
        for name in args.settings:
            case = Case((SETTINGS if NUM_RANKS == 1 else BETWEEN_RANKS)[name], window, args)
            found[name], timeline = measure(case, args)
            if args.picture and RANK == 0:
                print(window, name, json.dumps(found[name]), file=sys.stderr)
                print(picture(timeline, 1.1 * found[name]["measured_s"]["median"]), file=sys.stderr)
    shape = {"ranks": NUM_RANKS, "blocks": args.blocks, "forward_s": args.milliseconds / 1e3, "slots": args.depth + 1}
    if RANK == 0:
        print(json.dumps({"benchmark": "overlap", **shape, "results": results, **context()}))
    if NUM_RANKS > 1:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
