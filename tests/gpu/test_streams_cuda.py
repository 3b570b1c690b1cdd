"""A training loop that moves to another stream: autograd leaves hooks of parameters on the stream of the first step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch.nn.utils import clip_grad_norm_

import outcore

from .test_engine_cuda import build, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream"),  # of the plain loop too
]

STEPS = 3


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(259, (3, 31), generator=torch.Generator().manual_seed(step)).cuda()
    return {"input_ids": tokens, "labels": tokens}


def drive(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, streams: Sequence[torch.cuda.Stream]
) -> list[torch.Tensor]:
    """Step on one stream, whose loss and so whose graph stay alive, and on another one that is joined after each."""
    seen, kept = [], []
    torch.manual_seed(7)
    for step in range(STEPS):
        stream = streams[min(step, 1)]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            loss = model(**batch(step)).loss
            loss.backward()
            seen.append(loss.detach())
            seen += [p.grad.clone() for p in model.parameters()]
            seen.append(clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss)
        torch.cuda.current_stream().wait_stream(stream)
    return [t.cpu() for t in seen]


def drive_prepared(kind: str, folder: Path, streams: Sequence[torch.cuda.Stream]) -> list[torch.Tensor]:
    model = build("llama", torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"plan": plan_for(model, kind), "budget": outcore.Budget(disk=folder), "device": "cuda"}
    with outcore.prepare(model, optimizer, **options) as (model, optimizer):
        seen = drive(model, optimizer, streams)
        return seen + [t.cpu() for _, t in outcore.named_tensors(model)][: len(list(model.parameters()))]


def drive_plain(streams: Sequence[torch.cuda.Stream]) -> list[torch.Tensor]:
    model = build("llama", torch.float32).train().cuda()
    seen = drive(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), streams)
    return seen + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["device", "host", "mixed"])
def test_steps_on_another_stream_than_the_first_give_the_same_bits(kind: str, tmp_path: Path):
    """Those of the plain loop where the device updates, else those of one stream."""
    two, one = [torch.cuda.Stream(), torch.cuda.Stream()], [torch.cuda.current_stream()] * 2
    want = drive_plain(two) if kind == "device" else drive_prepared(kind, tmp_path, one)
    for a, b in zip(want, drive_prepared(kind, tmp_path, two), strict=True):
        assert torch.equal(a, b)
