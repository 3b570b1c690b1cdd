"""Cut weights as two ranks read and write them. Run as a program on both, with a folder."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plans import forced
from safetensors.torch import load_file
from torch import distributed, nn

import outcore
from outcore.planner.homes.pools import LEAST

RANK = int(os.environ["RANK"])
WAYS = [
    ("host", "world", "link", "compact"),
    ("device", "world", "link", "fp32"),
    ("disk", "world", "link", "fp32"),
    ("host", "node", "host", "compact"),
]


def build() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(40, 40), nn.ReLU()) for _ in range(3)])
    model[1][0].weight.requires_grad_(False)
    return model.to(torch.bfloat16)


def prepared(folder: Path, homes: str, partition: str, gather: str, masters: str) -> Any:
    model = build()
    group = {"params": [p for p in model.parameters() if p.requires_grad], "master_format": masters}
    optimizer = torch.optim.AdamW([group], lr=0.1, fused=True)
    options: Any = {"units": [nn.Sequential], "num_ranks": 2, "comfort": LEAST}
    _, plan = forced(model, optimizer, homes, **options, partition=partition, gather=gather)
    budget = outcore.Budget(disk=str(folder))
    return outcore.prepare(model, optimizer, plan=plan, units=[nn.Sequential], device="cpu", budget=budget)


def results(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(x)


def see(folder: Path, homes: str, partition: str, gather: str, masters: str) -> None:
    x, plain, trained = torch.randn(4, 40).bfloat16(), build(), folder / f"{homes} {gather}"
    with prepared(folder, homes, partition, gather, masters) as (model, optimizer):
        _homes_half(optimizer)
        assert torch.equal(results(model, x), results(plain, x))
        model(x + RANK).float().square().sum().backward()
        optimizer.step()
        state = model.state_dict()
        plain.load_state_dict(state)
        assert torch.equal(results(model, x), results(plain, x))
        assert all(torch.equal(value, state[name]) for name, value in outcore.named_tensors(model))
        outcore.save_pretrained(model, trained)
        distributed.barrier()
        saved = load_file(trained / "model.safetensors")
        assert all(torch.equal(value, state[name]) for name, value in saved.items())
        master = optimizer.state[model[0][0].weight]["master"].clone()
        with outcore.gathered(model, write=True):
            assert torch.equal(model[1][0].weight, state["1.0.weight"])
            with torch.no_grad():
                model[1][0].weight.mul_(2.0)
                model[0][0].weight.mul_(2.0)
        plain[1][0].weight.data.mul_(2.0)
        plain[0][0].weight.data.mul_(2.0)
        assert torch.equal(results(model, x), results(plain, x))
        model.load_state_dict(state)
        plain.load_state_dict(state)
        assert torch.equal(results(model, x), results(plain, x))
        assert not torch.equal(master, state["0.0.weight"].float())
        assert torch.equal(optimizer.state[model[0][0].weight]["master"].clone(), master)  # the edit is undone
        states, written = optimizer.state[model[0][0].weight], state["0.0.weight"].float() + 2.0**-9
        assert torch.equal(states["master"].bfloat16(), state["0.0.weight"])
        states["master"] = written
        assert torch.equal(states["master"].clone(), written)
        if masters == "compact":  # a compact master and its weight are one value
            plain[0][0].weight.data.copy_(written)
        assert torch.equal(results(model, x), results(plain, x))
        with pytest.raises(outcore.OutcoreError, match="between calls of its unit"):
            model[1][0].weight.sum()
    assert torch.equal(results(model, x), results(plain, x))  # an ordinary model again
    if homes == gather:
        del optimizer
        gc.collect()
        assert "memfd:outcore" not in Path("/proc/self/maps").read_text()


def _homes_half(optimizer: Any) -> None:
    """Check that of every unit but the root each rank holds half."""
    engine = optimizer.engine
    for unit in engine.units[1:]:
        cut, whole = unit.ledger.cut, unit.spec.weight_bytes
        assert 2 * cut.taken_bytes == whole
        assert unit.ledger.weights.nbytes == (whole if cut.is_one_copy else whole // 2)


def main() -> None:
    torch.set_num_threads(1)
    for way in WAYS:
        see(Path(sys.argv[1]), *way)
        print(way, flush=True)
    distributed.destroy_process_group()
