"""Large models: a step over the bound of its plan, beside the same step without overlap, plain PyTorch and DeepSpeed.

Prints one JSON object at the end, or before it closes anything if it is stopped, and each case on standard error as
soon as it is measured. A case is a number of tokens per step under a limit on device memory, which the allocator
enforces. The model is a Llama built in code (bf16 weights with fp32 masters, clipped except with ``--early``). Its
first values are made unit by unit. For each case it is prepared with the plan that ``prepare`` finds, and the predicted
step is printed first. A failure ends only its own case.

The bound (docs/internals/overlap.md) comes from rates that were measured alone, before the run and without the engine:
benchmarks/rates.py. ``over_bound`` uses the rate of each direction of the bus alone; ``over_bound_together`` that of
both at once. Units whose policy is ``recompute`` count as recomputed, so a step can be below 1 only if it keeps some
activations while there is room. A step is from the end of one ``optimizer.step()`` on the device to
that of the next. Steps are measured without the recorder. Some more are then recorded: they show what compute waited
for, and are drawn with ``--svg``. ``serial`` is the same model and plan, with each operation waited for at once.

    python benchmarks/large.py --shape 3b --device-memory 24GiB 80GiB --tokens 8192 16384 32768 --svg pictures
    python benchmarks/large.py --shape tiny --device cpu --seq-len 32 --tokens 64 128 --device-memory 24MiB
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from contestants import Layout, Streamed, batch_of, cap_device, device_memory, run_rival, say
from llama import add_shape_arguments, config_of, on_meta, shape_name
from measuring import context, spread
from picture import last_step, svg
from rates import Machine, free_cached, measure_machine, time_passes
from step import HYPER, STATES

import outcore
from outcore.api import plan_in_time
from outcore.core.errors import OutcoreError, PlanInfeasibleError
from outcore.core.quantities import format_bytes, parse_bytes
from outcore.memory.machine import disk_free_bytes, host_free_bytes
from outcore.model.partition import partition
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import Simulation
from outcore.preparation.prepare_options import Options
from outcore.spec.budget import Limits
from outcore.spec.model import ModelSpec, UnitSpec
from outcore.spec.plan import Plan
from outcore.spec.plan_table import plan_table
from outcore.spec.schedule import usual_visits
from outcore.spec.timeline import COMPUTE, Timeline

sys.path.append(str(Path(__file__).resolve().parents[1] / "research"))
from planning.bound.bound import StepBound, bound_of

HOST_SHARE, DISK_SHARE = 0.94, 0.9
"""Shares of what is free; the rest is for the interpreter, the driver and first values in transit."""
DEVICE_SHARE = 0.9
"""Share of the cap, as by default for a GPU: the rest is memory the allocator cannot reuse, and kernels' workspace."""


def lay_out(args: argparse.Namespace, limits: Limits, tokens: int) -> tuple[Layout, Plan, Simulation | None]:
    """Choose micro-batches as large as memory allows, and the plan of ``prepare`` for them, with its simulation.

    Raises:
        PlanInfeasibleError, torch.OutOfMemoryError: Not even one sequence at a time fits.
    """
    sequences = tokens // args.seq_len
    while True:
        try:
            _, plan, predicted = plan_in_time(
                model := on_meta(config_of(args)),
                torch.optim.AdamW(model.parameters(), **HYPER),
                Options(
                    sample=batch_of(args, sequences),
                    budget=budget_of(args, limits),
                    accumulation_steps=tokens // args.seq_len // sequences,
                    clipping=not args.early,
                    device=args.device,
                ),
            )
            passes = time_passes(functools.partial(config_of, args), batch_of(args, sequences), args.device)
            return Layout(tokens, sequences, tokens // args.seq_len // sequences, passes), plan, predicted
        except (torch.OutOfMemoryError, PlanInfeasibleError):
            if sequences == 1:
                raise
            sequences = next(n for n in range(sequences - 1, 0, -1) if tokens // args.seq_len % n == 0)
            free_cached(args.device)


def budget_of(args: argparse.Namespace, limits: Limits) -> outcore.Budget:
    """The budget of a plan."""
    return outcore.Budget(
        device=limits.device_bytes, host=limits.host_bytes, disk=args.disk, disk_bytes=limits.disk_bytes
    )


def rates_of(spec: ModelSpec, layout: Layout, machine: Machine, which: str) -> Rates:
    """Rates from which the bound is computed. Embeddings, head and loss count as the root's."""
    forward_s, backward_s = {"": layout.passes.rest_forward_s}, {"": layout.passes.rest_backward_s}
    for unit in blocks(spec):
        forward_s[unit.name], backward_s[unit.name] = layout.passes.block_forward_s, layout.passes.block_backward_s
    updates = machine.parameters_per_s
    return Rates(
        forward_s=forward_s,
        backward_s=backward_s,
        bytes_per_s={**machine.links[which], **machine.disk},
        parameters_per_s={
            "update": updates["update"],
            "device_update": updates["device"],
            "compute": updates["device"],
        },
    )


def blocks(spec: ModelSpec) -> list[UnitSpec]:
    """The repeated units, without a large embedding."""
    return [unit for unit in spec.units if ".layers." in unit.name]


def describe(
    args: argparse.Namespace, layout: Layout, streamed: Streamed, machine: Machine
) -> tuple[dict[str, Any], Timeline]:
    """Measure one case."""
    spec, plan = streamed.optimizer.model_spec, streamed.optimizer.plan
    visits = usual_visits(spec, layout.micro_batches)
    bounds = {
        which: bound_of(spec, plan, rates_of(spec, layout, machine, which), visits) for which in ("alone", "together")
    }
    seconds, timeline = streamed.measure(layout)
    memory = device_memory(args.device)
    serial_s = streamed.measure_serial(layout) if args.serial_steps else None
    step_s, bound_s = spread(seconds), bounds["alone"].seconds
    median_s = step_s["median"]
    recorded = args.recorded_steps
    busy_s, exposed_s, moved = timeline.busy_s(), timeline.exposed_s(), timeline.moved_bytes()
    found = {
        "tokens": layout.tokens,
        "micro_batches": layout.micro_batches,
        "sequences": layout.sequences,
        "step_s": step_s,
        "tokens_per_s": layout.tokens / median_s,
        "bound_s": bound_s,
        "binding": bounds["alone"].binding,
        "over_bound": round(median_s / bound_s, 3),
        "over_bound_together": round(median_s / bounds["together"].seconds, 3),
        "bound_parts_s": parts_of(bounds["alone"]),
        "serial_s": None if serial_s is None else spread(serial_s),
        "serial_over_step": None if serial_s is None else round(spread(serial_s)["median"] / median_s, 3),
        "exposed_s_per_step": {lane: round(s / recorded, 4) for lane, s in exposed_s.items() if s},
        "busy_s_per_step": {lane: round(s / recorded, 4) for lane, s in busy_s.items() if s},
        "gb_per_s_when_busy": {
            lane: round(moved[lane] / busy_s[lane] / 1e9, 3) for lane in moved if moved[lane] and busy_s[lane]
        },
        "recorded_over_step": round(timeline.wall_s / recorded / median_s, 3),
        "explained": round((busy_s[COMPUTE] + sum(exposed_s.values())) / timeline.wall_s, 4),
        "device_memory": memory,
        "host_is_pinned": streamed.host_is_pinned,
        "passes": dataclasses.asdict(layout.passes),
    }
    return found, timeline


def rates_line(machine: Machine) -> str:
    """Format all rates for people."""
    rates = {f"{link} {which}": rate for which, links in machine.links.items() for link, rate in links.items()}
    found = [f"{name} {rate / 1e9:.3g} GB" for name, rate in (rates | dict(machine.disk)).items()]
    return ", ".join([*found, *(f"{name} {rate / 1e9:.3g}e9" for name, rate in machine.parameters_per_s.items())])


def parts_of(bound: StepBound) -> dict[str, dict[str, float]]:
    """Seconds that the bound consists of, and seconds of every resource in a step."""
    parts = {"bound": bound.parts, "total": bound.total_s}
    return {name: {r: float(f"{s:.4g}") for r, s in seconds.items() if s} for name, seconds in parts.items()}


def limits_of(args: argparse.Namespace, cap_bytes: int) -> Limits:
    """What is free, with the cap on device memory."""
    host_bytes = int(HOST_SHARE * host_free_bytes()) if args.host_memory is None else args.host_memory
    disk_bytes = int(DISK_SHARE * disk_free_bytes(args.disk)) if args.disk_memory is None else args.disk_memory
    device_bytes = cap_bytes if args.device == "cpu" else int(args.device_share * cap_bytes)
    return Limits(device_bytes=device_bytes, host_bytes=host_bytes, disk_bytes=disk_bytes)


def run_case(args: argparse.Namespace, spec: ModelSpec, cap_bytes: int, tokens: int, found: dict[str, Any]) -> None:
    """Measure steps with a number of tokens under a cap, as far as possible.

    Args:
        args: The command line.
        spec: The model.
        cap_bytes: Limit on device memory.
        tokens: Tokens of a step.
        found: Receives results as soon as they are known.
    """
    found |= {"cap_bytes": cap_bytes, "tokens": tokens}
    try:
        cap_device(args.device, cap_bytes)
        _measure_case(args, spec, cap_bytes, tokens, found)
    except (torch.OutOfMemoryError, OutcoreError) as error:
        found["stopped"] = f"{type(error).__name__}: {error}".splitlines()[0]
        say(f"{format_bytes(cap_bytes)}, {tokens} tokens: stopped\n{error}")
    finally:
        free_cached(args.device)


def _measure_case(
    args: argparse.Namespace, spec: ModelSpec, cap_bytes: int, tokens: int, found: dict[str, Any]
) -> None:
    limits = limits_of(args, cap_bytes)
    found["limits"] = dataclasses.asdict(limits)
    try:
        started_s = time.perf_counter()
        layout, plan, predicted = lay_out(args, limits, tokens)
        found["plan_s"] = round(time.perf_counter() - started_s, 2)
    except PlanInfeasibleError as error:
        say(f"{format_bytes(cap_bytes)}, {tokens} tokens: refused\n{error}")
        found["refused"] = str(error)
        return
    say(plan_table(spec, plan, limits))
    machine = measure_machine(args.device, blocks(spec)[0], args.disk if plan.tier_bytes.get("disk") else None)
    say(f"rates per second: {rates_line(machine)}")
    found["predicted_s"] = None if predicted is None else predicted.step_s
    say(f"{tokens} tokens: predicted {'nothing' if predicted is None else f'{predicted.step_s:.3f} s'}")
    streamed = Streamed(args, plan, budget_of(args, limits))
    found |= {
        "plan": summary(plan),
        "prepare_s": round(streamed.prepare_s, 2),
        "host_is_pinned": streamed.host_is_pinned,
        "rates": dataclasses.asdict(machine),
    }
    pinned = {True: "pinned", False: "not pinned", None: "not used"}[streamed.host_is_pinned]
    say(f"prepared in {streamed.prepare_s:.1f} s; host memory is {pinned}")
    try:
        case, timeline = describe(args, layout, streamed, machine)
        found |= case
        say(line_of(case))
        if args.svg is not None:
            draw(args, cap_bytes, case, last_step(timeline))
    finally:
        streamed.close()


def summary(plan: Plan) -> dict[str, Any]:
    """Where data is kept, in numbers."""
    kinds = ("weights", "gradients", "states", "update", "policy", "activations")
    homes = {kind: dict(Counter(getattr(unit, kind) for unit in plan.units)) for kind in kinds}
    slots = {f"{pool.tier} {pool.kind}": pool.num_slots for pool in plan.pools}
    early = sum(unit.early for unit in plan.units)
    return {"tier_bytes": dict(plan.tier_bytes), "units": homes, "slots": slots, "early_units": early}


def draw(args: argparse.Namespace, cap_bytes: int, case: Mapping[str, Any], timeline: Timeline) -> None:
    """Save a picture of a step."""
    cap = format_bytes(cap_bytes)
    shape = shape_name(args)
    about = f"Llama {shape}, {case['tokens']} tokens, device memory capped at {cap}"
    about += f": {case['over_bound']:.2f} of the bound ({case['binding']} binds)"
    args.svg.mkdir(parents=True, exist_ok=True)
    about += ", updates inside backward" if args.early else ""
    name = f"step_{shape}_{cap.replace('.00 ', '').replace(' ', '')}_{case['tokens']}{'_early' * args.early}.svg"
    (args.svg / name).write_text(svg(timeline, about))


def line_of(case: Mapping[str, Any]) -> str:
    """Format the most important results of a case."""
    waits = ", ".join(f"{lane} {s:.3f}" for lane, s in case["exposed_s_per_step"].items()) or "nothing"
    line = f"{case['tokens']:>7} tokens in {case['micro_batches']}: {case['step_s']['median']:.3f} s"
    line += f", bound {case['bound_s']:.3f} s ({case['binding']}): {case['over_bound']:.3f}"
    line += f" (links together: {case['over_bound_together']:.3f}); waits for {waits}"
    line += f"; serial {case['serial_over_step']} times as long" if case["serial_s"] else ""
    line += "; host memory is not pinned" if case["host_is_pinned"] is False else ""
    memory = case["device_memory"]
    return line + (f"; {format_bytes(memory['peak_reserved_bytes'])} of device memory" if memory else "")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_shape_arguments(parser)
    size = functools.partial(parse_bytes, what="a size")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384, 32768], help="per step")
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--device-memory", type=size, nargs="+", default=[24 * 2**30], help="caps, one after the other")
    parser.add_argument("--device-share", type=float, default=DEVICE_SHARE, help="of a cap, that a plan may take")
    parser.add_argument("--host-memory", type=size, help=f"default: {HOST_SHARE:.0%} of what is free")
    parser.add_argument("--disk", type=Path, default=Path(), help="folder of the disk tier, for what host cannot hold")
    parser.add_argument("--disk-memory", type=size, help=f"default: {DISK_SHARE:.0%} of what is free")
    parser.add_argument("--steps", type=int, default=4, help="measured steps, after two for warming up")
    parser.add_argument("--recorded-steps", type=int, default=2)
    parser.add_argument("--serial-steps", type=int, default=1, help="with overlap off, after one; 0: none")
    parser.add_argument("--max-norm", type=float, default=1.0, help="of gradients, clipped to")
    parser.add_argument("--early", action="store_true", help="clip nothing, and promise it: updates inside backward")
    parser.add_argument("--against", nargs="*", default=[], choices=["plain", "deepspeed"])
    parser.add_argument("--only-against", action="store_true", help="measure the others alone, under the largest cap")
    parser.add_argument("--svg", type=Path, help="folder for a picture of one step per case")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if any(tokens % args.seq_len for tokens in args.tokens):
        parser.error(f"--tokens: expected multiples of --seq-len ({args.seq_len}), but got {args.tokens}")
    return args


def main() -> None:
    """Run the benchmark."""
    args = arguments()
    if args.device == "cpu":
        torch.set_num_threads(1)  # for a trial run: with such small shapes a second thread would only wait
    model = on_meta(config_of(args))
    spec = partition(model, state_names=STATES, precision="bf16").spec
    shape = {
        "shape": shape_name(args),
        "parameters": sum(p.numel() for p in model.parameters()),
        "seq_len": args.seq_len,
    }
    del model
    found: dict[str, Any] = {"benchmark": "large", **shape, "cases": [], "rivals": {}}

    stdout = sys.stdout  # rivals run with another one

    @functools.cache  # only once
    def report() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(json.dumps(found | context("transformers")), file=stdout, flush=True)

    def stop(*_: object) -> None:
        report()  # before closing, which may take minutes
        sys.exit(143)

    signal.signal(signal.SIGTERM, stop)  # ``timeout`` sends SIGTERM
    try:
        for cap_bytes, tokens in itertools.product(() if args.only_against else args.device_memory, args.tokens):
            found["cases"].append({})
            run_case(args, spec, cap_bytes, tokens, found["cases"][-1])
        for name in args.against:
            found["rivals"][name] = {}
            run_rival(args, name, found["rivals"][name])
    finally:
        report()


if __name__ == "__main__":
    main()
