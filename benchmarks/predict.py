"""Predicted steps compared with real ones. Every prediction is recorded before the first step of its case.

Prints one JSON object, also if it is stopped, and on standard error a line per prediction and per measurement, as they
come.

``throttled``: rows of blocks that sleep, as in ``overlap.py``, with lanes of random speed. The machine is measured by
the probe, which does not know these speeds; it is told how long blocks sleep. ``models``: small
Llamas without throttles, with everything on the device, in host memory or on disk. Their work is counted from shapes
alone. The machine is measured first. ``limit``: equal matrix products for ``--seconds``. Medians over some seconds tell
how often the best prediction would be how close.

    python benchmarks/predict.py
    python benchmarks/predict.py --what models limit --layers 4 --hidden 256
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contestants import timed, warm_up
from measuring import context, prepare_slowed
from overlap import BACKWARD, FORWARD, STATES, Block, Row, Setting, paces, plan_for
from torch import nn
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.device.faults import Faults
from outcore.device.opening import open_device
from outcore.model.partition import partition
from outcore.planner.homes.check import with_room
from outcore.planner.homes.pools import UnitHomes
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.plan_space import ALL_DEVICE, ALL_DISK, ALL_HOST, ROOMY, PlanSpace
from outcore.planner.timing.profile import rates_for
from outcore.planner.timing.simulate import simulate
from outcore.preparation.plan_choice import on_machine, question_of
from outcore.preparation.prepare_options import Options
from outcore.probe.compute_rates import products
from outcore.probe.measure import WHOLE, Effort, measure
from outcore.spec.budget import Limits
from outcore.spec.hardware import Hardware
from outcore.spec.plan import Plan
from outcore.spec.schedule import usual_visits

HOMES: Mapping[str, UnitHomes] = {"device": ALL_DEVICE, "host": ALL_HOST, "disk": ALL_DISK}
PLENTY = Limits(device_bytes=2**40, host_bytes=2**40, disk_bytes=2**40)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
WARM_UP = 2
PRODUCTS, WINDOWS_S = 8, (1.0, 5.0, 10.0, 20.0)
"""Products that are timed together, for some tenths of a second; windows as long as some steps of a model."""


def steps_s(
    model: nn.Module, plan: Plan, steps: int, loss_of: Callable[[], torch.Tensor], folder: str, **options: Any
) -> list[float]:
    """Seconds of real steps, from the end of one ``step()`` to that of the next."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with prepare_slowed(model, optimizer, plan=plan, budget=outcore.Budget(disk=folder), **options) as prepared:
        model, optimizer = prepared

        def step() -> None:
            loss_of().backward()
            clip_grad_norm_(model.parameters(), 1e9)
            optimizer.step()
            optimizer.zero_grad()

        if options["device"] != "cpu":  # its own clock: the host runs ahead of it
            warm_up(step, options["device"])
            return timed(step, steps, options["device"])
        ends = list[float]()
        for _ in range(WARM_UP + steps + 1):
            step()
            ends.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(ends)][WARM_UP:]


def compared(name: str, predicted_s: float, run: Callable[[], list[float]]) -> dict[str, Any]:
    """Print the prediction, run the case, and print the result."""
    print(f"{time.strftime('%H:%M:%S')} {name}: predicted {predicted_s:.4f} s", file=sys.stderr)
    seconds = run()
    ratio = predicted_s / statistics.median(seconds)
    print(f"{time.strftime('%H:%M:%S')} {name}: took {statistics.median(seconds):.4f} s, {ratio:.3f}", file=sys.stderr)
    return {
        "case": name,
        "predicted_s": round(predicted_s, 5),
        "measured_s": [round(s, 5) for s in seconds],
        "predicted_over_measured": round(ratio, 4),
    }


def throttled(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of sleeping blocks over lanes of random speed."""
    unit_s, drawn = args.milliseconds / 1e3, random.Random(args.seed)
    window_s, steps = (0.01, 2) if args.quick else (0.1, 10)
    sizes = (2**13, 2**15)
    effort = Effort(window_s=window_s, buffer_bytes=2**20, sizes=sizes, disk_bytes=2**22, steps=steps)
    for number in range(args.cases):
        setting = Setting(
            h2d=drawn.uniform(0.3, 4.0),
            d2h=drawn.uniform(0.3, 4.0),
            update=drawn.uniform(0.3, 4.0),
            disk=(disk := drawn.choice([0.0, drawn.uniform(0.5, 3.0)])),
            states="disk" if disk else "host",
        )
        build = partial(Row, args.blocks, args.numel, unit_s)
        spec = partition(build(), units=[Block], state_names=STATES, precision="bf16").spec
        plan = plan_for(spec, setting, argparse.Namespace(depth=2, buckets=2), is_early=False)
        faults = Faults(throttle=paces(spec, plan, setting, unit_s, device="cpu")[0])
        with tempfile.TemporaryDirectory(dir=args.disk) as folder:
            hardware = measure(partial(open_device, "cpu", faults), [Path(folder)], effort)
            names = [unit.name for unit in spec.units[1:]]
            host = dataclasses.replace(hardware.host, compute_left={}, left_beside_compute={})  # blocks sleep
            measured = rates_for(dataclasses.replace(hardware, host=host), spec, {})
            rates = dataclasses.replace(
                measured,
                forward_s=dict.fromkeys(names, FORWARD * unit_s),
                backward_s=dict.fromkeys(names, BACKWARD * unit_s),
                bytes_per_s={**measured.bytes_per_s, "compute": hardware.device.bytes_per_s / 2},  # on no lane
            )
            step_s = simulate(spec, plan, rates, usual_visits(spec), Circumstances(clips=True)).step_s
            model = build()
            options = {"faults": faults, "units": [Block], "precision": "bf16", "device": "cpu"}
            loss = partial(lambda model: model(torch.ones(4)), model)
            run = partial(steps_s, model, plan, args.steps, loss, folder, **options)
            found = compared(f"throttled {number}", step_s, run)
        yield found | {"units_of_a_block": dataclasses.asdict(setting), "visit_s": hardware.host.visit_s}


def models(args: argparse.Namespace, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """Small Llamas, with their data in all places."""
    for hidden, length, policy, home in itertools.product(args.hidden, args.lengths, args.policies, args.homes):
        torch.manual_seed(0)
        model = LlamaForCausalLM(_config(hidden, args.layers)).to(DTYPES[args.precision])
        name = f"{sum(p.numel() for p in model.parameters()) / 1e6:.0f}M, {args.batch_size} x {length} tokens"
        line = one_model(args, hardware, f"{name}, {policy}, {home}", model, length, policy, home)
        yield line | {"machine": json.loads(hardware.to_json())}


def one_model(
    args: argparse.Namespace, hardware: Hardware, name: str, model: nn.Module, length: int, policy: Any, home: str
) -> dict[str, Any]:
    """Predict the steps of a model, and run it."""
    cut = partition(model, state_names=STATES, precision=args.precision)
    choice = PlanSpace(cut.spec, policy=policy, accumulation_steps=None, may_be_early=False)
    plan = choice.plan(choice.uniform(HOMES[home], ROOMY))
    plan = with_room(cut.spec, plan, PLENTY, clipping=True) if home == "device" else plan
    ids = torch.randint(0, 1000, (args.batch_size, length)).to(args.device)
    sample = {"input_ids": ids, "labels": ids, "use_cache": False}
    with open_device(args.device) as device:
        options = Options(sample=sample, hardware=hardware)
        question = on_machine(question_of(cut, options, device, PLENTY), cut, options, device)
        step_s = math.nan if question is None else question.predict(plan).step_s
    loss = partial(lambda model, sample: model(**sample).loss, model, sample)
    options = {"precision": args.precision, "device": args.device}
    with tempfile.TemporaryDirectory(dir=args.disk) as folder:
        run = partial(steps_s, model, plan, args.steps, loss, folder, **options)
        return compared(name, step_s, run)


def limit(args: argparse.Namespace) -> dict[str, Any]:
    """How close one prediction of equal work can be at best: to medians of its seconds over ``WINDOWS_S``."""
    turns, begin_s = list[tuple[float, float]](), time.perf_counter()
    with open_device(args.device) as device:
        load = products(device, torch.float32)
        while not turns or time.perf_counter() - begin_s < args.seconds:
            start_s = time.perf_counter()
            for _ in range(PRODUCTS):
                load.turn()
            turns.append((start_s - begin_s, time.perf_counter() - start_s))
    usual_s, found = statistics.median(took for _, took in turns), dict[str, Any]()
    for window_s in WINDOWS_S:
        groups = itertools.groupby(turns, key=lambda turn: turn[0] // window_s)
        medians = [statistics.median(took for _, took in group) for _, group in groups]
        counts = {f"within_{n}_percent": most_within(medians, n / 100) for n in (5, 10, 20, 50)}
        found[f"{window_s:g} s"] = {"windows": len(medians), **counts}
    spread = [round(each(took for _, took in turns) / usual_s, 3) for each in (min, max)]
    return {"usual_s": round(usual_s, 4), "least_and_most_over_usual": spread, "medians_over": found}


def most_within(seconds: list[float], off: float) -> int:
    """The most of several times that one prediction can be within. The longest of these is its upper end."""
    return max(sum(most_s * (1 - off) / (1 + off) <= s <= most_s for s in seconds) for most_s in seconds)


def measured_anew(args: argparse.Namespace, effort: Effort, caches: ExitStack) -> Hardware:
    """Measure the machine. Blocks are measured anew, too: they are kept in a folder of their own."""
    os.environ["XDG_CACHE_HOME"] = caches.enter_context(tempfile.TemporaryDirectory())
    return measure(partial(open_device, args.device), [args.disk], effort)


def _config(hidden: int, layers: int) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=11 * hidden // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        vocab_size=1000,
    )


def summary(found: list[Mapping[str, Any]]) -> dict[str, Any]:
    """How many predictions were how close."""
    off = [abs(1 / line["predicted_over_measured"] - 1) for line in found]
    counts = {f"within_{n}_percent": sum(o <= n / 100 for o in off) for n in (5, 10, 20, 50)}
    return {"cases": len(found), "predicted_over_measured": counts}


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", default=["throttled", "models"], choices=["throttled", "models", "limit"])
    parser.add_argument("--cases", type=int, default=10, help="draws of lanes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--numel", type=int, default=2**16, help="parameters of a block that sleeps")
    parser.add_argument("--milliseconds", type=float, default=50.0, help="forward of a block that sleeps")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=240.0, help="of equal products, to see how much they vary")
    parser.add_argument("--layers", type=int, default=4, help="of a model")
    parser.add_argument("--hidden", type=int, nargs="*", default=[256, 512])
    parser.add_argument("--lengths", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--policies", nargs="*", default=["recompute"], choices=["keep", "select", "recompute"])
    parser.add_argument("--homes", nargs="*", default=[*HOMES], choices=[*HOMES], help="of everything but activations")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--precision", choices=DTYPES, default="fp32", help="of models")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="that models run on")
    parser.add_argument("--quick", action="store_true", help="measure the machine in little time")
    parser.add_argument("--disk", type=Path, default=Path(), help="folder of the disk tier")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark."""
    args = arguments()
    results: dict[str, Any] = {}

    @functools.cache  # only once
    def report() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(json.dumps({"benchmark": "predict", "results": results, **context("transformers")}), flush=True)

    def stop(*_: object) -> None:
        report()  # before closing, which may take a while
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)  # ``timeout`` sends SIGTERM
    if "throttled" in args.what:
        collect(results, "throttled", throttled(args))
    if "models" in args.what:
        effort = Effort(window_s=0.01, buffer_bytes=2**21, sizes=(2**16, 2**20), disk_bytes=2**22, steps=4)
        with ExitStack() as caches:
            machine = measured_anew(args, effort if args.quick else WHOLE, caches)
            collect(results, "models", models(args, machine))
    if "limit" in args.what:
        results["limit"] = limit(args)
    report()


def collect(results: dict[str, Any], name: str, found: Iterator[dict[str, Any]]) -> None:
    """Keep what was found, as it comes."""
    lines: list[dict[str, Any]] = []
    for line in found:
        lines.append(line)
        results[name] = {**summary(lines), "lines": lines}


if __name__ == "__main__":
    main()
