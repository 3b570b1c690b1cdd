"""The blocked CPU update, compared with the memory's own speed, unblocked torch, and DeepSpeed's CPU Adam.

Prints one JSON object. The recipe is bf16 training: a bf16 gradient in, fp32 master weights and two moments updated,
bf16 weights out. The rule is AdamW; beside it runs every other rule and format of states, with its time over AdamW's
(``times_adamw``; the planner and the probe use it for a rule that was not measured).

How bytes are counted, per parameter: 14 are read (master, exp_avg, exp_avg_sq: 4 each; gradient: 2) and 14 written (the
three, and the weights: 2), together 28. The weights are written without being read, so the cache fetches their lines
first (write-allocate): 2 more, 30 in all. The *stream* moves those 30 bytes through the same tensors and does nothing
else: ``master.mul_(1)``, ``exp_avg.mul_(1)``, ``exp_avg_sq.mul_(1)`` (4 read and 4 written each) and
``weights.add_(grad)`` (4 read, 2 written), with all threads. The contestants take turns in every repetition, since
machines are noisy, and ratios are taken within a repetition. There is a pause between them: OpenMP's threads spin for
some milliseconds after their last loop, and would take the cores from the next contestant.

    python benchmarks/cpu_update.py --repeats 15
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import math
import time
from collections.abc import Callable

import torch
from measuring import context, spread

from outcore.engine.updates.workers import TRIALS, UpdateWorkers
from outcore.optim import Lion
from outcore.optim.compact import close_masters
from outcore.optim.formats import Codes, codes_of
from outcore.optim.piece import Piece
from outcore.optim.rules import AdamHyper, rule_for
from outcore.spec.layout import CODES, ROW_NUMEL

COUNTED_BYTES, ALLOCATED_BYTES = 28, 30
PAUSE_S = 0.03
HYPER = AdamHyper(
    lr=1e-4, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, amsgrad=False, maximize=False, decoupled=True
)
STEP = 10
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": torch.optim.RMSprop,
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "lion": Lion,
    "adafactor": torch.optim.Adafactor,
    "muon": torch.optim.Muon,
}
WHOLE, COLUMNS = ("adafactor", "muon"), 1024
RULES = (*[name for name in OPTIMIZERS if name != "adamw"], "adamw:bf16", "adamw:8bit", "adamw:compact", "lion:8bit")


class Buffers:
    """The training state of one flat parameter."""

    def __init__(self, numel: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.master = torch.randn(numel, generator=generator)
        self.exp_avg, self.exp_avg_sq = torch.zeros(numel), torch.full((numel,), 1e-4)
        self.grad = torch.randn(numel, generator=generator).bfloat16()
        self.weights = self.master.bfloat16()


def blocked(b: Buffers, workers: UpdateWorkers, factors: tuple[torch.Tensor, ...] = ()) -> Callable[[], None]:
    states = {"exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}
    piece = Piece(
        target=b.master, grad=b.grad, states=states, weights=b.weights, step=STEP, hyper=HYPER, factors=factors
    )
    return lambda: workers.run([piece])


def stream(b: Buffers) -> Callable[[], None]:
    def run() -> None:
        for tensor in (b.master, b.exp_avg, b.exp_avg_sq):
            tensor.mul_(1.0)
        b.weights.add_(b.grad)

    return run


def with_casts(b: Buffers, param: torch.nn.Parameter, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """A step over a whole buffer, with the casts that a training loop needs around it."""
    param.grad = torch.empty_like(param)

    def run() -> None:
        param.grad.copy_(b.grad)
        optimizer.step()
        b.weights.copy_(param.detach())

    return run


def unblocked(b: Buffers) -> Callable[[], None]:
    """torch's fused AdamW on whole buffers, with the casts around it."""
    param = torch.nn.Parameter(b.master)
    optimizer = torch.optim.AdamW([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True)
    optimizer.state[param] = {"step": torch.tensor(float(STEP)), "exp_avg": b.exp_avg, "exp_avg_sq": b.exp_avg_sq}
    return with_casts(b, param, optimizer)


def deepspeed(b: Buffers) -> Callable[[], None]:
    """DeepSpeedCPUAdam with the casts that its training loop needs."""
    adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
    param = torch.nn.Parameter(b.master.clone())
    optimizer = adam([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay, adamw_mode=True)
    return with_casts(b, param, optimizer)


def bitsandbytes(b: Buffers, bits: int) -> Callable[[], None]:
    """bitsandbytes' AdamW with moments of ``bits`` bits, with the casts that a training loop needs."""
    adamw = getattr(importlib.import_module("bitsandbytes").optim, f"AdamW{bits}bit")
    param = torch.nn.Parameter(b.master.clone())
    optimizer = adamw([param], lr=HYPER.lr, weight_decay=HYPER.weight_decay)
    return with_casts(b, param, optimizer)


OTHERS: dict[str, Callable[[Buffers], Callable[[], None]]] = {
    "deepspeed": deepspeed,
    "bitsandbytes_32bit": functools.partial(bitsandbytes, bits=32),
    "bitsandbytes_8bit": functools.partial(bitsandbytes, bits=8),
}


def by_name(b: Buffers, workers: UpdateWorkers, name: str) -> Callable[[], None]:
    """An optimizer and the format of its moments or its master, by name: ``rmsprop``, ``adamw:8bit``."""
    kind, _, chosen = name.partition(":")
    is_compact = chosen == "compact"
    param = torch.nn.Parameter(b.master)
    shape = (len(b.master) // COLUMNS, COLUMNS) if kind in WHOLE else b.master.shape
    if kind in WHOLE:  # a matrix as in a large model
        param = torch.nn.Parameter(b.master.view(shape))
    optimizer = OPTIMIZERS[kind]([param])
    optimizer.param_groups[0]["master_format" if is_compact else "state_format"] = chosen or "fp32"
    rule, groups = rule_for(optimizer), optimizer.param_groups
    kept = rule.kept(groups)(param, "float32")
    forms = [(form, shape if form.shape is None else form.shape) for form in kept.states]
    states = {
        form.name: torch.full((math.prod(own),), form.initial, dtype=getattr(torch, form.dtype)) for form, own in forms
    }
    likes = {form.name: torch.empty(own, device="meta") for form, own in forms if form.shape is not None}
    codes = codes_of(kept.states, "w")
    if is_compact:
        lower, rows = torch.empty(len(b.master), dtype=torch.int16), -(-len(b.master) // ROW_NUMEL)
        states |= {"master": lower, CODES: torch.empty(rows, dtype=torch.uint8)}
        weights = b.weights.clone()
        close_masters(b.master, weights, lower, states[CODES])
        codes = Codes({"master": "compact"}, 0)
    piece = Piece(
        target=weights if is_compact else b.master,
        grad=b.grad,
        states=states,
        weights=None if is_compact else b.weights,
        step=STEP,
        hyper=rule.hyper(groups[0]),
        numbers={form.name: 0.5 for form, own in forms if own == () and not kept.is_whole},
        likes={"": torch.empty(shape, device="meta"), **likes},
        codes=codes,
    )
    return lambda: workers.run([piece])


def measure(
    contestants: dict[str, Callable[[], None]], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Seconds per run, in turns; untimed runs come first, until the block sizes are settled."""
    for name, run in contestants.items():
        is_settled = name in (*WHOLE, "stream", "unblocked", *OTHERS)
        for _ in range(1 if is_settled else (5 * TRIALS)):
            run()
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, run in contestants.items():
            time.sleep(PAUSE_S)
            start = clock()
            run()
            seconds[name].append(clock() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--numel", type=int, default=64 * 2**20, help="parameters, in whole rows of 1,024 (default: 64 Mi)"
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--workers", type=int, help="threads (default: one per core)")
    parser.add_argument(
        "--processor-time", action="store_true", help="instead of time that passes: for a machine that others use too"
    )
    parser.add_argument("--rules", nargs="*", default=RULES, choices=RULES, help="beside AdamW (default: all)")
    args = parser.parse_args()
    args.numel -= args.numel % COLUMNS
    buffers, skipped = Buffers(args.numel), {}
    in_teams = torch.cuda.is_available()  # as in a run beside it
    with UpdateWorkers(args.workers, has_whole=True, in_teams=in_teams) as workers:
        contestants = {
            "blocked": blocked(buffers, workers),
            "stream": stream(buffers),
            "blocked_clipped": blocked(buffers, workers, (torch.tensor(0.5),)),
            "unblocked": unblocked(buffers),
            **{name: by_name(buffers, workers, name) for name in args.rules},
        }
        for name, build in OTHERS.items():
            try:
                contestants[name] = build(buffers)
            except Exception as error:  # it is imported and built here, and any error in it is not ours
                skipped[name] = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = measure(contestants, args.repeats, time.process_time if args.processor_time else time.perf_counter)
    n = args.numel
    report = {
        "benchmark": "cpu_update",
        **context("deepspeed", "bitsandbytes"),
        "numel": n,
        "repeats": args.repeats,
        "num_workers": workers.num_workers,
        "in_teams": in_teams,
        "is_processor_time": args.processor_time,
        "aten_threads_of_others": torch.get_num_threads(),
        "scratch_bytes_per_worker": {str(kind): workers.sizes.take(kind) for kind in workers.sizes.kinds},
        "seconds": {name: spread(s) for name, s in seconds.items()},
        "gparam_per_s": {name: spread([n / t / 1e9 for t in s]) for name, s in seconds.items() if name != "stream"},
        "gb_per_s_at_28_bytes": {
            name: spread([COUNTED_BYTES * n / t / 1e9 for t in s]) for name, s in seconds.items() if name != "stream"
        },
        "stream_gb_per_s_at_30_bytes": spread([ALLOCATED_BYTES * n / t / 1e9 for t in seconds["stream"]]),
        "blocked_over": {  # ratio of speeds in the same repetition; 30 bytes against 30 for the stream
            name: spread([other / own for other, own in zip(s, seconds["blocked"], strict=True)])
            for name, s in seconds.items()
            if name != "blocked"
        },
        "times_adamw": {
            name: spread([s / own for s, own in zip(seconds[name], seconds["blocked"], strict=True)])
            for name in args.rules
        },
        "skipped": skipped,
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
