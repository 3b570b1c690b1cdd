"""Training loops that move to another stream, and blocks that have a stream of their own.

Autograd leaves hooks of parameters on the stream of the first step. The race checker is told the loop's
own order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from loop.rig import VOCAB, WIDTH, Block, Tower, agrees
from plans import prepare_for_test
from torch.nn.utils import clip_grad_norm_

import outcore
from outcore.device.race import RaceChecker
from outcore.engine.gradients.passes import BackwardGradients

from .test_engine_cuda import build, plan_for

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node.s stream"),  # the plain loop has it, too
]

STEPS = 3
Streams = Sequence[torch.cuda.Stream]
Order = Callable[[torch.cuda.Stream, torch.cuda.Stream], object]


def put_behind(later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
    later.wait_stream(earlier)


def batch(step: int) -> dict[str, torch.Tensor]:
    tokens = torch.randint(259, (3, 31), generator=torch.Generator().manual_seed(step)).cuda()
    return {"input_ids": tokens, "labels": tokens}


def drive(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, streams: Streams, order: Order = put_behind
) -> list[torch.Tensor]:
    """Step on one stream, keep its loss and graph alive, then step on another one; join each stream after its step."""
    seen, kept = [], []
    torch.manual_seed(7)
    for step in range(STEPS):
        stream, outer = streams[min(step, 1)], torch.cuda.current_stream()
        order(stream, outer)
        with torch.cuda.stream(stream):
            loss = model(**batch(step)).loss
            loss.backward()
            seen.append(loss.detach())
            seen += [p.grad.clone() for p in model.parameters()]
            seen.append(clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
            kept.append(loss)
        order(outer, stream)
    return [t.cpu() for t in seen]


def drive_prepared(kind: str, folder: Path, streams: Streams, patch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    model, checker = build("llama", torch.float32).train(), RaceChecker()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"plan": plan_for(model, kind), "budget": outcore.Budget(disk=folder), "device": "cuda"}
    with prepare_for_test(model, optimizer, race_checker=checker, **options) as (model, optimizer):

        def name(stream: torch.cuda.Stream) -> str:
            with torch.cuda.stream(stream):
                return optimizer.engine.device.stream_name()

        def order(later: torch.cuda.Stream, earlier: torch.cuda.Stream) -> None:
            put_behind(later, earlier)
            checker.order(name(later), name(earlier))

        def end(*args: Any) -> None:
            checker.order(name(torch.cuda.current_stream()), name(streams[0]))  # autograd has joined them by now
            end_task(*args)

        end_task = BackwardGradients._end_task
        patch.setattr(BackwardGradients, "_end_task", end)
        seen = drive(model, optimizer, streams, order)
        return seen + [t.cpu() for _, t in outcore.named_tensors(model)][: len(list(model.parameters()))]


def drive_plain(streams: Streams) -> list[torch.Tensor]:
    model = build("llama", torch.float32).train().cuda()
    seen = drive(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), streams)
    return seen + [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("kind", ["device", "host", "mixed"])
def test_steps_on_another_stream_than_the_first_give_the_same_bits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The bits are the plain loop's if the device updates, else those of a run on one stream."""
    two, one = [torch.cuda.Stream(), torch.cuda.Stream()], [torch.cuda.current_stream()] * 2
    with monkeypatch.context() as patch:
        want = drive_plain(two) if kind == "device" else drive_prepared(kind, tmp_path, one, patch)
    with monkeypatch.context() as patch:
        got = drive_prepared(kind, tmp_path, two, patch)
    for a, b in zip(want, got, strict=True):
        assert torch.equal(a, b)


class Aside(Block):
    """Does half of its work on a stream of its own, which is late."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, aside = torch.cuda.current_stream(), _aside()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            torch.cuda._sleep(2_000_000)
            y = torch.tanh(self.up(x))
        half = self.norm(x) + self.shift
        here.wait_stream(aside)
        for tensor, stream in ((x, aside), (y, here)):
            tensor.record_stream(stream)
        return x + self.dropout(self.down(y)) * half.view(*x.shape[:-1], WIDTH)


_asides: list[torch.cuda.Stream] = []


def _aside() -> torch.cuda.Stream:
    if not _asides:
        _asides.append(torch.cuda.Stream())
    return _asides[0]


@agrees("device", "device keep", build=lambda: Tower(Aside, num_blocks=4))
def test_blocks_that_work_on_a_stream_of_their_own(model: torch.nn.Module, optimizer: torch.optim.Optimizer):
    losses = []
    for step in range(4):
        losses.append(model.loss(batch(step)["input_ids"] % VOCAB))
        losses[-1].backward()
        optimizer.step()
        _aside().wait_stream(torch.cuda.current_stream())  # the plain loop's gradients lie in memory of that stream
        optimizer.zero_grad()
    return losses
