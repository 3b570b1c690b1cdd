"""Whole training steps: outcore on the device, on the host and on disk, over plain PyTorch with checkpointing.

Prints one JSON object. The model is a Llama of 217M parameters (12 layers, hidden 1024), bf16 weights with fp32
masters, clipping on, one micro-batch of 4 x 256 tokens. All contestants are in memory at once and take turns, since
machines are noisy; ratios are taken within a turn. A turn is a warm-up step and ``--steps`` timed ones. Its time is
from the moment when compute has finished one ``optimizer.step()`` to that of the last, so an update that runs beside
the next forward counts where it delays something. Then everything is drained. Exposed seconds are those that compute
waited for a lane. Seconds of processors, own and others', show what a busy machine hides. Let threads wait passively
(``OMP_WAIT_POLICY=passive``), or their waiting is counted, too. DeepSpeed ZeRO-3 with CPU offload joins if it can
be imported. With ``--compile`` blocks are compiled, also in the plain loop; code is generated in warm-up steps.

``to_host`` and ``to_disk`` are plans with everything on the device but activations, and ``--rivals`` are other ways to
save less: the plain loop itself with the model's own checkpointing, ``torch.autograd.graph.save_on_cpu``, or TRL's
offloading of activations.

    python benchmarks/step.py --turns 3 --steps 2 --disk .
    python benchmarks/step.py --keep --policy keep --seq-len 1024 --plans device to_host to_disk \
        --rivals checkpointing save_on_cpu trl_offloading --disk .
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from measuring import context, spread
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM

import outcore
from outcore.model.partition import partition
from outcore.planner.homes.pools import Comfort, pools_for
from outcore.spec.model import ModelSpec
from outcore.spec.plan import Plan, Policy, Tier, UnitPlan

COMFORT = Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3)
STATES = ("exp_avg", "exp_avg_sq")
AWAY = {"to_host": "host", "to_disk": "disk"}
HYPER = {"lr": 1e-4, "weight_decay": 0.01}


class Busy(NamedTuple):
    """Seconds of processors, and what else a process asks of the system."""

    own_s: float
    system_s: float
    """Those of ``own_s`` in the kernel, which finds and clears fresh memory."""
    others_s: float
    """Seconds of all other processes, and of other machines on the same processors."""
    faults: float
    """Page faults."""

    @classmethod
    def now(cls) -> Busy:
        """Totals since the machine, and the process, began."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        own_s = used.ru_utime + used.ru_stime
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        ticks = [int(n) for n in first[1:9]]  # user, nice, system, idle, iowait, irq, softirq, steal
        all_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        return cls(own_s, used.ru_stime, all_s - own_s, used.ru_minflt)

    def since(self, before: Busy, steps: int) -> Busy:
        """Difference to an earlier total, per step."""
        return Busy(*[(b - a) / steps for a, b in zip(before, self, strict=True)])


class Contestant:
    """A training loop that can be driven step by step."""

    def __init__(
        self,
        name: str,
        step: Callable[[], None],
        drain: Callable[[], None],
        exposed: Callable[[], dict[str, float]],
        traffic: Callable[[], dict[str, int]] = dict,
    ) -> None:
        """Store what the turns need."""
        self.name, self.step, self.drain, self.exposed, self.traffic = name, step, drain, exposed, traffic
        self.seconds: list[float] = []
        self.busy: list[Busy] = []
        self.exposed_s: dict[str, list[float]] = {}
        self.moved: dict[str, float] = {}
        """Bytes per step, by lane."""

    def turn(self, steps: int) -> float:
        """Run one turn. Returns seconds per step."""
        self.step()
        await_compute()
        before, moved, busy, start = self.exposed(), self.traffic(), Busy.now(), time.perf_counter()
        for _ in range(steps):
            self.step()
        await_compute()
        seconds = (time.perf_counter() - start) / steps
        self.busy.append(Busy.now().since(busy, steps))
        self.moved = {lane: (n - moved[lane]) / steps for lane, n in self.traffic().items() if n != moved[lane]}
        self.drain()  # waits of compute are known only when it is over
        for lane, after in self.exposed().items():
            self.exposed_s.setdefault(lane, []).append((after - before[lane]) / steps)
        self.seconds.append(seconds)
        return seconds


class Plain:
    """The loop that outcore is compared with."""

    def __init__(self, model: LlamaForCausalLM, batch: dict[str, torch.Tensor], *, compiles: bool = False) -> None:
        """Create a model's masters and states."""
        if compiles:
            for layer in model.model.layers:
                layer.compile()
        self._model, self._batch = model, batch
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self._recomputed = [m for m in model.modules() if hasattr(m, "gradient_checkpointing")]
        self._weights = list(model.parameters())
        self._masters = [torch.nn.Parameter(w.detach().float()) for w in self._weights]
        self._sums = [torch.zeros_like(m) for m in self._masters]
        self._optimizer = torch.optim.AdamW(self._masters, fused=True, **HYPER)

    def contestant(self, name: str, how: str) -> Contestant:
        """One way to save what backward needs; all ways share model and states. Args: how: See ``RIVALS``, or keep."""
        around = RIVALS.get(how, _as_it_is)(self._model)

        def step() -> None:
            for module in self._recomputed:
                module.gradient_checkpointing = how == "checkpointing"
            self._step(around)

        return Contestant(name, step, synchronize, dict)

    def _step(self, around: Callable[[], AbstractContextManager[object]]) -> None:
        with around():
            loss = self._model(**self._batch).loss
        loss.backward()
        for weight, total, master in zip(self._weights, self._sums, self._masters, strict=True):
            master.grad = total.zero_().add_(weight.grad)
            weight.grad = None
        clip_grad_norm_(self._masters, 1.0)
        self._optimizer.step()
        with torch.no_grad():
            for weight, master in zip(self._weights, self._masters, strict=True):
                weight.copy_(master)


def _as_it_is(_: LlamaForCausalLM) -> Callable[[], AbstractContextManager[object]]:
    return nullcontext


def _save_on_cpu(_: LlamaForCausalLM) -> Callable[[], AbstractContextManager[object]]:
    return lambda: torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def _trl_offloading(model: LlamaForCausalLM) -> Callable[[], AbstractContextManager[object]]:
    from trl.models.activation_offloading import get_act_offloading_ctx_manager

    manager = get_act_offloading_ctx_manager(model)
    return lambda: manager


RIVALS = {"checkpointing": _as_it_is, "save_on_cpu": _save_on_cpu, "trl_offloading": _trl_offloading}


def streamed(
    name: str,
    model: LlamaForCausalLM,
    batch: dict[str, torch.Tensor],
    disk: Path,
    device: str,
    *,
    policy: str = "recompute",
    compiles: bool = False,
) -> Contestant:
    """outcore with everything except the root's weights on one tier; in the disk plan gradients pass through the host.

    ``fits`` is the plan that ``prepare`` makes by itself: all activations are kept if there is room. ``to_host`` and
    ``to_disk`` are its plans if activations are to leave.
    """
    optimizer = torch.optim.AdamW(model.parameters(), **HYPER)
    budget = outcore.Budget(disk=disk)
    options: dict[str, Any] = {"budget": budget, "device": device, "compile": compiles}
    if name in AWAY:
        options |= {"sample": batch, "activations": AWAY[name], "hardware": "none"}
    elif name != "fits":
        plan = plan_for(partition(model, state_names=STATES).spec, cast("Tier", name), policy)
        options |= {"plan": plan, "accumulation_steps": 1}
    model, optimizer = outcore.prepare(model, optimizer, **options)

    def step() -> None:
        model(**batch).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    engine_device = optimizer.engine.device
    return Contestant(name, step, engine_device.synchronize, optimizer.exposed_s, optimizer.traffic)


def plan_for(model: ModelSpec, tier: Tier, policy: str = "recompute") -> Plan:
    """A plan with all units on one tier."""
    gradients: Tier = "host" if tier == "disk" else tier
    units = tuple(
        UnitPlan(
            name=u.name,
            weights=tier if u.name else "device",
            gradients=gradients,
            states=tier,
            policy=cast("Policy", policy),
        )
        for u in model.units
    )
    pools = pools_for(model, units, COMFORT)
    return Plan(
        precision=model.precision, units=units, pools=pools, prefetch_depth=COMFORT.prefetch_depth, accumulation_steps=1
    )


def deepspeed(model: LlamaForCausalLM, batch: dict[str, torch.Tensor]) -> Contestant | str:
    """ZeRO-3 with parameters and optimizer on the CPU, or the reason why it cannot run."""
    try:
        import deepspeed as engine_of
    except Exception as error:
        return f"not run: {type(error).__name__}: {error}"
    offload = {"device": "cpu", "pin_memory": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": batch["input_ids"].shape[0],
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "offload_param": offload, "offload_optimizer": offload},
        "optimizer": {"type": "AdamW", "params": HYPER},
    }
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531"}
    os.environ.update({name: os.environ.get(name, value) for name, value in alone.items()})  # otherwise it asks MPI
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    engine, *_ = engine_of.initialize(model=model, model_parameters=model.parameters(), config=config)

    def step() -> None:
        engine.backward(engine(**batch).loss)
        engine.step()

    return Contestant("deepspeed_zero3_offload", step, synchronize, dict)


def report(contestant: Contestant, baselines: Sequence[Contestant]) -> dict[str, Any]:
    """A contestant's results, and its ratios within a turn: of time, and of processor seconds."""
    found: dict[str, Any] = {
        "seconds_per_step": spread(contestant.seconds),
        "processor_s_per_step": {name: spread(values) for name, values in _columns(contestant.busy).items()},
        "exposed_s_per_step": {lane: spread(values)["median"] for lane, values in contestant.exposed_s.items()},
        "moved_bytes_per_step": contestant.moved,
    }
    for base in baselines:
        found[f"over_{base.name}"] = spread([s / b for s, b in zip(contestant.seconds, base.seconds, strict=True)])
        pairs = zip(contestant.busy, base.busy, strict=True)
        found[f"processor_s_over_{base.name}"] = spread([mine.own_s / other.own_s for mine, other in pairs])
    return found


def _columns(rows: Sequence[Busy]) -> dict[str, list[float]]:
    return {name: [getattr(row, name) for row in rows] for name in Busy._fields}


def copy_rate() -> float:
    """Return GiB per second that one thread copies on the host, as a copy lane does."""
    origin, target = (torch.ones(2**28, dtype=torch.uint8) for _ in range(2))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        seconds = []
        for _ in range(9):
            start = time.thread_time()
            target.copy_(origin)
            seconds.append(time.thread_time() - start)
    finally:
        torch.set_num_threads(threads)
    return 0.25 / spread(seconds)["median"]


def await_compute() -> None:
    """Wait for the work that compute was given; copies and updates after it go on."""
    if torch.cuda.is_available():
        torch.cuda.current_stream().synchronize()


def synchronize() -> None:
    """Drain the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(args: argparse.Namespace) -> LlamaForCausalLM:
    """Make the model, the same for every contestant."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.hidden,
        intermediate_size=43 * args.hidden // 16,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 64,
        num_key_value_heads=args.hidden // 64,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2, help="timed steps per turn")
    parser.add_argument("--plans", nargs="*", default=["device", "host", "disk"])
    parser.add_argument("--keep", action="store_true", help="the plain loop keeps its activations")
    parser.add_argument("--rivals", nargs="*", default=[], choices=RIVALS, help="what else the plain loop may do")
    parser.add_argument("--policy", default="recompute", help="of units in plans for one tier")
    parser.add_argument("--compile", action="store_true", help="all compile their blocks")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--disk", type=Path, default=Path(), help="folder of the disk tier")
    args = parser.parse_args()
    model = build(args)
    tokens = torch.randint(
        args.vocabulary, (args.batch_size, args.seq_len), generator=torch.Generator().manual_seed(0)
    ).to(args.device)
    batch = {"input_ids": tokens, "labels": tokens}
    loop = Plain(copy.deepcopy(model).to(args.device), batch, compiles=args.compile)
    contestants = [loop.contestant("plain", "keep" if args.keep else "checkpointing")]
    skipped = {}
    for name in args.rivals:
        try:
            contestants.append(loop.contestant(name, name))
        except Exception as error:
            skipped[name] = f"not run: {type(error).__name__}: {error}"
    how = {"policy": args.policy, "compiles": args.compile}
    contestants += [streamed(n, copy.deepcopy(model), batch, args.disk, args.device, **how) for n in args.plans]
    rival = deepspeed(copy.deepcopy(model), batch)
    if isinstance(rival, Contestant):
        contestants.append(rival)
    else:
        skipped["deepspeed_zero3_offload"] = rival
    for _ in range(args.turns):
        for contestant in contestants:
            said = f"{contestant.name}: {contestant.turn(args.steps):.2f} s per step, {contestant.busy[-1]}"
            print(said, file=sys.stderr, flush=True)
    results = {c.name: report(c, [b for b in contestants if b.name in ("plain", "checkpointing")]) for c in contestants}
    shape = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens_per_step": args.batch_size * args.seq_len,
    }
    more = {"copy_gib_per_s": copy_rate(), "skipped": skipped, **context("transformers")}
    print(json.dumps({"benchmark": "step", **shape, "results": results, **more}))


if __name__ == "__main__":
    main()
