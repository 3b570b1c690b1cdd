"""One training loop over models, precisions and plans, for a plain optimizer and for any number of ranks.

Micro-batch j of rank r is number j R + r of a step. Gradients are divided by the number of micro-batches after the last
backward, so that a mean over three ranks rounds as one over three more micro-batches does.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from plans import forced, prepare_for_test
from torch import nn
from torch.nn import functional

import outcore
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker
from outcore.model.wrapped import tensors_in
from outcore.optim.joined import as_one
from outcore.optim.norms import block_sums, node_sums, norm_of, num_blocks, whole_nodes
from outcore.planner.homes.pools import Comfort

VOCAB = 29
TOTAL, STEPS = map(int, os.environ.get("OUTCORE_TEST_LOOP", "6 3").split())
"""Micro-batches of all ranks in a step, and number of steps."""
DEVICE = os.environ.get("OUTCORE_TEST_DEVICE", "cpu")


ADAPTED = ("lora", "torchao", "bitsandbytes")
"""Kinds that train one layer of a block, in fp32; the other layers are quantised, except for ``lora``."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 3 * width + 5), nn.Linear(3 * width + 5, width)
        self.spare = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, spare: bool) -> torch.Tensor:
        x = x + self.down(torch.relu(self.up(self.norm(x))))
        return x + self.spare(x) if spare else x


class Net(nn.Module):
    """A small language model. Args: kind: What is special about it."""

    def __init__(self, kind: str, width: int = 21, num_blocks: int = 3) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(VOCAB, width), nn.Linear(width, VOCAB)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        if kind == "tied":
            self.head.weight = self.embed.weight
        if kind == "frozen":
            self.embed.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.blocks[2].up.requires_grad_(False)
        if kind == "few":
            for name, param in self.blocks.named_parameters():
                param.requires_grad_("norm" in name or "bias" in name)

    def forward(self, ids: torch.Tensor, number: int) -> torch.Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if self.kind == "routes" and (i == number % 3 or i == 1):  # the block in the middle is never visited
                continue
            x = block(x, self.kind in ADAPTED or (self.kind == "absent" and number % 3 == 1))
        if self.kind == "backwards":
            for block in self.blocks:  # a second time, in the same order
                x = block(x, False)
        return self.head(x)


def build(kind: str, dtype: str, width: int = 21) -> nn.Module:
    torch.manual_seed(3)
    width = 160 if kind == "few" else width  # so that the trained weights are small beside a rank's part of the rest
    model = Net(kind, width).to(DEVICE, getattr(torch, dtype)).train()
    if kind in ADAPTED:
        model.requires_grad_(False)
        for block in model.blocks:
            quantise(block, kind)
            block.spare.float().requires_grad_(True)
            block.spare.register_forward_pre_hook(lambda _, args: (args[0].float(),))
            block.spare.register_forward_hook(lambda _, __, out: out.to(getattr(torch, dtype)))
    return model


def quantise(block: Block, kind: str) -> None:
    """Quantise a block's weights, with the library's own layers or wrappers."""
    if kind == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(block, Int8WeightOnlyConfig(), lambda _, name: name in ("up", "down"))
    for name in ("up", "down") if kind == "bitsandbytes" else ():
        from bitsandbytes import nn as quantised

        layer = getattr(block, name)
        made = quantised.Linear4bit(layer.in_features, layer.out_features, compute_dtype=layer.weight.dtype)
        made.load_state_dict(layer.state_dict())
        setattr(block, name, made.to(layer.weight.dtype).requires_grad_(False).to(DEVICE))


class Case(NamedTuple):
    kind: str = "plain"
    dtype: str = "float32"
    homes: str = "host"
    clip: float = 0.0
    """Largest norm; 0: no clipping."""
    share: float = 0.0
    depth: int = 0
    delays: int = 0
    """Seed of random delays; 0: none."""
    keep: bool = False
    """Whether ``zero_grad`` zeroes gradients in place."""
    permute: int = 0
    """Seed of an arbitrary legal order of the lanes; 0: the usual order."""
    states: str = "fp32"
    """The optimizer's ``state_format``."""
    partition: str = "replicate"
    gather: str = "link"
    masters: str = "fp32"
    """The optimizer's ``master_format``."""
    optim: str = "AdamW"
    """The optimizer's class. Muon has AdamW beside it for all but the matrices of blocks."""

    @property
    def is_torchs(self) -> bool:
        """Whether the plain loop supports the optimizer. Other optimizers are compared with one rank."""
        return (self.states, self.masters, self.optim) == ("fp32", "fp32", "AdamW")

    @property
    def name(self) -> str:
        return " ".join(f"{k}={v}" for k, v in self._asdict().items() if v != Case._field_defaults[k]) or "plain"


RULES = "SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam Lion Adafactor Muon".split()
CASES = [
    Case(),
    Case(dtype="bfloat16"),
    Case("tied", homes="disk", clip=0.3),
    Case("frozen", clip=0.3, depth=1),
    Case("absent", homes="device", clip=0.3),
    Case("routes", "bfloat16", clip=1e9),
    Case("lora", "bfloat16", clip=0.3),
    Case("tied", clip=0.3, share=1.0),
    Case("backwards", clip=0.3),
    Case("absent", "float16", clip=0.3),
    Case("absent", "bfloat16", delays=7, keep=True, clip=0.3, homes="mixed"),
    Case("routes", permute=3, clip=0.3, homes="mixed", depth=1),
    Case("tied", "float64", clip=0.3),
    Case("absent", "bfloat16", clip=0.3, states="bf16"),
    Case("absent", states="8bit", clip=0.3, delays=3, share=1.0),
    Case("tied", "bfloat16", homes="mixed", states="8bit", masters="compact", clip=0.3, keep=True),
    Case("routes", "bfloat16", masters="compact", share=1.0, clip=0.3),
    Case("absent", "bfloat16", homes="mixed", optim="Muon", clip=0.3, delays=5, depth=1),
    Case("tied", share=1.0, optim="Adafactor", clip=0.3),
    Case("frozen", "bfloat16", optim="NAdam", masters="compact", homes="mixed"),
    Case("torchao", "bfloat16", clip=0.3, delays=3, depth=1),
    Case("bitsandbytes", homes="disk", clip=0.3),
]
CUT = [
    Case("absent", clip=0.3, depth=1, partition="world"),
    Case("tied", "bfloat16", homes="disk", clip=0.3, partition="world"),
    Case("frozen", homes="device", clip=0.3, depth=1, partition="world"),
    Case("frozen", "bfloat16", share=1.0, clip=0.3, partition="world"),
    Case("lora", "bfloat16", homes="mixed", clip=0.3, delays=7, depth=2, partition="world"),
    Case("backwards", homes="mixed", keep=True, delays=5, partition="node"),
    Case("routes", "bfloat16", clip=1e9, depth=1, delays=3, partition="node", gather="host"),
    Case("frozen", share=1.0, clip=0.3, delays=9, partition="node", gather="host"),
    Case("tied", "bfloat16", homes="mixed", clip=0.3, partition="node", gather="host"),
    Case("tied", "bfloat16", states="8bit", masters="compact", clip=0.3, partition="world", homes="mixed"),
    Case("routes", "bfloat16", masters="compact", clip=0.3, partition="node", gather="host", delays=3),
    Case("absent", homes="disk", optim="Muon", partition="world"),
    Case("few", "bfloat16", homes="mixed", clip=0.3, delays=3, partition="world"),
    Case("few", homes="device", share=1.0, clip=0.3, depth=1, partition="world"),
    Case("torchao", homes="mixed", clip=0.3, delays=7, partition="world"),
    Case("bitsandbytes", "bfloat16", clip=0.3, partition="node", gather="host"),
]
"""Cases whose weights are cut over ranks."""
MACHINES = [
    Case("tied", homes="disk", partition="node"),
    Case("frozen", "bfloat16", homes="device", depth=1, partition="node"),
    Case("absent", share=1.0, delays=7, partition="node"),
    Case("few", "bfloat16", homes="mixed", partition="node"),
    Case("routes", "bfloat16", clip=1e9, delays=3, partition="node", gather="host"),
    Case("frozen", share=1.0, partition="node", gather="host"),
    Case("plain", "bfloat16", depth=1, partition="world"),
]
"""Cases for ranks on two machines."""


def micro_batches(step: int) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(100 + step)
    return [torch.randint(0, VOCAB, (2, 5), generator=numbers, device="cpu").to(DEVICE) for _ in range(TOTAL)]


def train(
    model: nn.Module,
    optimizer: Any,
    case: Case,
    *,
    num_ranks: int,
    rank: int,
    own_norm: bool,
    steps: Sequence[int] = range(STEPS),
) -> list[float]:
    """Train some steps. Args: own_norm: Clip by the norm as several ranks compute it. Returns the norms."""
    norms = []
    for step in steps:
        batches = micro_batches(step)
        for number in range(rank, TOTAL, num_ranks):
            logits = model(batches[number], number).float().flatten(0, 1)
            functional.cross_entropy(logits, batches[number].flatten(), reduction="sum").backward()
            if isinstance(optimizer, Masters):
                optimizer.accumulate()
        held = optimizer.masters if isinstance(optimizer, Masters) else list(model.parameters())
        params = [p for p in held if p.grad is not None]
        for param in params:
            param.grad.mul_(num_ranks / TOTAL)
        if case.clip and own_norm:
            total = torch.linalg.vector_norm(torch.stack([blocked_norm(p.grad) for p in params]))
            nn.utils.clip_grads_with_norm_(params, case.clip, total)
            norms.append(float(total))
        elif case.clip:
            norms.append(float(nn.utils.clip_grad_norm_(held, case.clip)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=not case.keep)
    return norms


def blocked_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The norm of a whole gradient, as several ranks compute it."""
    flat = gradient.reshape(-1)
    count = num_blocks(flat.numel())
    sums = node_sums(block_sums(flat), 0, count, count)
    nodes = dict(zip(whole_nodes(0, count, count), sums.tolist(), strict=True))
    norm = torch.tensor(norm_of(nodes, count), dtype=torch.float64).to(gradient.device)
    return norm if gradient.dtype == torch.float64 else norm.float()


def made(case: Case) -> Any:
    """The model and its optimizer."""
    model = build(case.kind, case.dtype, width_of(case))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kinds = {"AdamW": {"weight_decay": 0.1, "fused": True}, "Muon": {"weight_decay": 0.1}}
    found = []
    of_muon = [name for name, p in trained.items() if case.optim == "Muon" and "blocks" in name and p.ndim == 2]
    for kind, names in ((case.optim, of_muon or list(trained)), ("AdamW", trained.keys() - of_muon if of_muon else [])):
        params = [p for name, p in trained.items() if name in names]
        group = {"params": params, "state_format": case.states, "master_format": case.masters}
        made_by = getattr(torch.optim, kind, None) or getattr(outcore.optim, kind)
        found += [made_by([group], lr=1e-2, **kinds.get(kind, {}))] if params else []
    return model, as_one(found)


def width_of(case: Case) -> int:
    """Width of the model. Small parameters have no 8-bit states; quantised layers are as wide as a block of them."""
    return 64 if case.kind in ADAPTED[1:] else 41 if case.states == "8bit" else 21


def plain(case: Case, num_steps: int = STEPS) -> str:
    """Run a case in a plain loop in one process. With bf16 it trains fp32 masters by hand."""
    if not case.is_torchs:
        with tempfile.TemporaryDirectory() as folder:
            return run(case, folder, 1, 0)["weights"]
    model = build(case.kind, case.dtype, width_of(case))
    masters = Masters(model)
    train(model, masters, case, num_ranks=1, rank=0, own_norm=True, steps=range(num_steps))
    return digest(model)


class Masters:
    """Sums gradients in float32, clips and applies them, then rounds to the weights' dtype."""

    def __init__(self, model: nn.Module) -> None:
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.masters = [nn.Parameter(_wide(p.detach())) for p in self.params]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2, weight_decay=0.1, fused=True)

    @torch.no_grad()
    def accumulate(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            if param.grad is None:
                continue
            if master.grad is None:
                master.grad = _wide(param.grad)
            else:
                master.grad.add_(_wide(param.grad))
            param.grad = None

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.copy_(master)

    def zero_grad(self, *, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def run(case: Case, folder: str, num_ranks: int, rank: int) -> dict[str, Any]:
    """Run one case with outcore. Returns digests of the weights and of the states, and the norms."""
    model, optimizer = made(case)
    if rank:  # all ranks start from rank 0's values
        for param in model.parameters():
            for tensor in tensors_in(param):
                tensor.data.fill_(rank)
    comfort = Comfort(prefetch_depth=case.depth, num_buckets=case.depth + 1, max_slots_host=case.depth + 1)
    homes: Any = (
        case.homes if case.homes != "mixed" else lambda i: (["host", "disk"][i % 2], "host", ["disk", "host"][i % 2])
    )
    options: dict[str, Any] = {"homes": homes, "units": [Block], "share": case.share, "comfort": comfort}
    options |= {"num_ranks": num_ranks, "per_node": int(os.environ.get("LOCAL_WORLD_SIZE", "1"))}
    _, plan = forced(model, optimizer, **options, partition=case.partition, gather=case.gather)
    model, optimizer = checked(model, optimizer, plan, folder, faults_of(case, rank))
    norms = train(model, optimizer, case, num_ranks=num_ranks, rank=rank, own_norm=num_ranks == 1)
    found = {"weights": digest(model), "states": states_digest(optimizer), "norms": norms}
    outcore.close(model)
    return found


def checked(model: nn.Module, optimizer: Any, plan: Any, folder: str, faults: Faults) -> Any:
    """Prepare under a race checker."""
    return prepare_for_test(
        model,
        optimizer,
        plan=plan,
        units=[Block],
        budget=outcore.Budget(disk=folder),
        device=DEVICE,
        faults=faults,
        race_checker=RaceChecker(),
    )


def faults_of(case: Case, rank: int) -> Faults:
    """Delays that differ from rank to rank, or a permuted order."""
    lanes = ("compute", "h2d", "d2h", "update", "reduce", "gather", "link", "device_update")
    if case.permute:
        return Faults(permute=case.permute + rank, poison=True)
    delays = dict.fromkeys(lanes, 2e-3) if case.delays else {}
    return Faults(delays=delays, seed=case.delays + rank, poison=bool(case.delays))


def digest(model: nn.Module) -> str:
    return _digest((f"{n} {i}", t) for n, p in model.state_dict().items() for i, t in enumerate(tensors_in(p)))


def states_digest(optimizer: torch.optim.Optimizer) -> str:
    states = optimizer.state_dict()["state"]
    return _digest((f"{i} {name}", value) for i, mine in states.items() for name, value in mine.items())


def _digest(tensors: Any) -> str:
    found = hashlib.sha256()
    for name, value in sorted(tensors, key=lambda pair: pair[0]):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def random_cases(seed: int, count: int, *, cut: bool = False) -> Iterator[Case]:
    """Args: cut: Cut weights over ranks. Through ``link`` all ranks visit the same units; ``host`` keeps one copy."""
    draw = random.Random(seed)
    for _ in range(count):
        ways = [("world", "link"), ("node", "link"), ("node", "host")]
        partition, gather = draw.choice(ways) if cut else ("replicate", "link")
        kinds = ["plain", "tied", "frozen", "absent", "backwards", "lora"]
        kind = draw.choice(kinds if cut and gather == "link" else [*kinds, "routes"])
        dtype = draw.choice(["float32", "bfloat16", *(["float64"] if kind != "lora" else [])])
        # One rank adds the gradients of a block that is called twice in another order (docs/reference/exceptions.md).
        has_reference = dtype != "float64" and kind != "backwards"
        states = draw.choice(["fp32", "fp32", *(["bf16", "8bit"] if has_reference else [])])
        has_rule = has_reference and states == "fp32" and draw.random() < 0.8
        may_be_compact = has_reference and dtype == "bfloat16" and kind != "lora"  # the adapters of lora are in fp32
        yield Case(
            kind=kind,
            dtype=dtype,
            homes=draw.choice(["host"] if cut and kind == "routes" else ["device", "host", "disk", "mixed"]),
            clip=draw.choice([0.0, 0.3, 1e9]),
            share=draw.choice([0.0, 0.5, 1.0]),
            depth=draw.randrange(3),
            delays=draw.choice([0, 0, draw.randrange(1, 1000)]),
            keep=draw.choice([False, True]),
            permute=draw.choice([0, 0, draw.randrange(1, 1000)]),
            states=states,
            partition=partition,
            gather=gather,
            masters=draw.choice(["fp32", "compact" if may_be_compact else "fp32"]),
            optim=draw.choice(RULES) if has_rule else "AdamW",
        )


def num_loops() -> int:
    """Number of gloo's threads, one for each group."""
    found = 0
    for path in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # the thread has ended in the meantime
            found += path.read_text() == "gloo_tcp_loop\n"
    return found


def begin() -> tuple[int, int]:
    """Return this rank and the number of ranks. On simulated GPUs each rank has its own."""
    torch.set_num_threads(1)
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if DEVICE == "cuda":
        import simulator

        simulator.set_knobs(num_devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    return rank, num_ranks


def main(arguments: Sequence[str]) -> None:
    """Run one rank. Args: arguments: Cases as JSON, and a folder for disk tiers."""
    rank, num_ranks = begin()
    for text in json.loads(arguments[0]):
        print(json.dumps(run(Case(*text), arguments[1], num_ranks, rank)), flush=True)
        deadline_s = time.monotonic() + 10.0
        while num_loops() > 1 and time.monotonic() < deadline_s:
            time.sleep(0.01)  # lets gloo's threads end
        assert num_loops() <= 1, "with the last engine its groups have ended, and the default one is left"
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
