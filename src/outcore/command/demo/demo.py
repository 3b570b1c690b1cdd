"""``outcore demo``: train over all three tiers, then check whether that changed the result."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from statistics import median
from typing import cast

import torch
from rich.console import Console
from rich.markup import escape
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaForCausalLM

import outcore
from outcore.command.demo import plain_loop
from outcore.command.demo.size import (
    DEVICE_FRACTION,
    HOST_FRACTION,
    MOST_S,
    PRECISION,
    STATE_BYTES,
    budget_of,
    largest,
    sample,
)
from outcore.command.files import usual_folders
from outcore.command.progress import StepReport, progress
from outcore.command.terminal import Terminal
from outcore.core.errors import ConfigError, DiskError, UnsupportedError
from outcore.core.quantities import format_bytes
from outcore.core.ranks import launched
from outcore.engine.optimizer import StreamedOptimizer
from outcore.memory.disk import DiskStore
from outcore.memory.machine import Others

HELD_OUT_TOKENS = 2**16
COMPARED_STEPS, COMPARED_MICRO_BATCHES = 6, 2
PROMPT, SAMPLE_TOKENS, FIT_SAMPLE_TOKENS = b"def ", 240, 60


def run_demo(*, steps: int, device: str | None, folder: Path | None, fit: bool = False) -> bool:
    """Train, report, compare.

    Args:
        steps: Optimizer steps of the training run.
        device: Torch device, or None for outcore's choice.
        folder: Folder of the disk tier, or None for one that can serve.
        fit: Train the largest model whose demo is predicted to take three minutes.

    Returns:
        Whether the short run equals the plain loop bit for bit.

    Raises:
        ConfigError: The folder or the device cannot be used, or this is one of several ranks.
    """
    _refuse_ranks()
    # Kernels this small gain little from a second thread, and lose much when an update or another program has its core.
    torch.set_num_threads(1)
    console = Terminal(highlight=False)
    folder = _disk_folder(folder)
    text = plain_loop.corpus()
    console.print(
        f"Corpus: {len(text):,} bytes of Python's standard library. Disk tier: {escape(str(folder))}", soft_wrap=True
    )
    size = _largest(console, steps, device, folder) if fit else {}
    start_s = time.perf_counter()
    _train(console, text, size, steps=steps, device=device, folder=folder)
    others = Others()
    is_equal, comparison, speeds = _compare(text, folder, size)
    if fit:
        console.print(f"\nAll of it took {time.perf_counter() - start_s:.0f} s.")
    console.print(f"\n[bold]Does it equal the plain loop?[/bold] {comparison}", soft_wrap=True)
    console.print(speeds, soft_wrap=True)
    _say_busy(console, others)
    return is_equal


def _largest(console: Console, steps: int, device: str | None, folder: Path) -> Mapping[str, int]:
    found = largest(steps, device, folder)
    is_long = found.run_s(steps) > MOST_S
    which = "The smallest, which takes longer than that" if is_long else "The largest that fits memory and that time"
    console.print(
        f"At most {MOST_S:.0f} s, as predicted. {which}: {found.sizes['num_hidden_layers']} layers of "
        f"{found.sizes['hidden_size']} channels, {found.step_s:.3g} s per step, {found.run_s(steps):.0f} s in all",
        soft_wrap=True,
    )
    return found.sizes


def _train(
    console: Console, text: torch.Tensor, size: Mapping[str, int], *, steps: int, device: str | None, folder: Path
) -> None:
    training, held_out = text[:-HELD_OUT_TOKENS], text[-HELD_OUT_TOKENS:]
    unseen = list(islice(plain_loop.batches(held_out, seed=1), 4))
    with _prepared(device, folder, size) as (model, optimizer):
        place = next(model.parameters()).device
        console.print(_sizes(model), soft_wrap=True)
        console.print("\n[bold]Plan[/bold]")
        console.print(str(optimizer.plan), markup=False, soft_wrap=True)
        before = _mean_loss(model, unseen, place)
        reports, others = _reports(model, optimizer, plain_loop.batches(training, seed=0), steps), Others()
        with progress(console, steps) as shown:
            for report in reports:
                shown.report(report)
        _say_busy(console, others)
        after = _mean_loss(model, unseen, place)
        console.print(f"\n[bold]Loss on unseen text[/bold]  before {before:.3f}  after {after:.3f}")
        console.print("\n[bold]Sample[/bold]")
        tokens = FIT_SAMPLE_TOKENS if size else SAMPLE_TOKENS
        console.print(_sample(model, place, tokens), markup=False)
        moved = (f"{lane} {format_bytes(nbytes)}" for lane, nbytes in optimizer.traffic().items() if nbytes)
        console.print(f"Moved per lane: {', '.join(moved)}", soft_wrap=True)
        peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        console.print(
            f"Peak memory of the process, Python and torch included: {format_bytes(peak_bytes)}", soft_wrap=True
        )


def _say_busy(console: Console, others: Others) -> None:
    busy = others.busy()
    if busy:
        console.print(f"This machine is busy: {busy}, so these steps took longer than on an idle one.", soft_wrap=True)


def _sizes(model: LlamaForCausalLM) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    state_bytes = STATE_BYTES * parameters
    device, host = (format_bytes(int(part * state_bytes)) for part in (DEVICE_FRACTION, HOST_FRACTION))
    return (
        f"Model: {parameters:,} parameters in {PRECISION}, {format_bytes(state_bytes)} of training state. "
        f"Budgets: device {device}, host {host}, the rest on disk."
    )


Pair = tuple[LlamaForCausalLM, StreamedOptimizer]


def _prepared(device: str | None, folder: Path, size: Mapping[str, int]) -> AbstractContextManager[Pair]:
    """Prepare the demo's model under budgets that use every tier. Args: size: Sizes chosen by ``--fit``, else empty."""
    model = plain_loop.build(seed=0, **size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plain_loop.LR)
    budget = budget_of(sum(p.numel() for p in model.parameters()), folder)
    batch = sample() if size else None
    try:
        pair = outcore.prepare(model, optimizer, sample=batch, budget=budget, precision=PRECISION, device=device)
    except (DiskError, UnsupportedError) as error:  # nothing has run yet: folder or device were a wrong choice
        raise ConfigError(str(error)) from error
    return cast("AbstractContextManager[Pair]", pair)  # the optimizer is None only where none was given


def _refuse_ranks() -> None:
    found = launched()
    if found is not None:
        raise ConfigError(
            f"outcore demo: expected one process on one device, but this is rank {found.rank} of {found.size} "
            f"(WORLD_SIZE={found.size} in the environment, as torchrun sets it); start one process, without a launcher"
        )


def _disk_folder(wanted: Path | None) -> Path:
    """Return the folder that was asked for, or the first of a few that can serve the disk tier."""
    reasons = []
    for folder in (wanted,) if wanted else usual_folders():
        try:
            DiskStore.open([folder], nbytes=1).close()
        except DiskError as error:
            reasons.append(str(error))
        else:
            return folder
    raise ConfigError("\n".join([*reasons, "name a folder on a drive with --folder"]))


def _streamed(
    model: LlamaForCausalLM,
    optimizer: StreamedOptimizer,
    data: Iterator[plain_loop.Batch],
    steps: int,
    micro_batches: int,
) -> Iterator[tuple[float, float]]:
    """Run the loop of ``plain_loop.train`` as a user of outcore writes it."""
    device = next(model.parameters()).device
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, plain_loop.warm_up_and_decay(steps))
    for _ in range(steps):
        total_loss = 0.0
        for _ in range(micro_batches):
            batch = {name: tensor.to(device) for name, tensor in next(data).items()}
            loss = model(**batch).loss / micro_batches
            loss.backward()
            total_loss += loss.item()
        norm = clip_grad_norm_(model.parameters(), plain_loop.MAX_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        yield total_loss, norm.item()


def _reports(
    model: LlamaForCausalLM, optimizer: StreamedOptimizer, data: Iterator[plain_loop.Batch], steps: int
) -> Iterator[StepReport]:
    tokens = plain_loop.BATCH_SIZE * plain_loop.SEQUENCE
    before_s, waited_s = time.perf_counter(), optimizer.exposed_s()
    for step, (loss, _) in enumerate(_streamed(model, optimizer, data, steps, micro_batches=1), start=1):
        now_s, exposed_s = time.perf_counter(), optimizer.exposed_s()
        yield StepReport(
            step=step,
            seconds=now_s - before_s,
            loss=loss,
            tokens=tokens,
            moved_bytes=sum(optimizer.traffic().values()),
            exposed_s={lane: seconds - waited_s.get(lane, 0.0) for lane, seconds in exposed_s.items()},
        )
        before_s, waited_s = now_s, exposed_s


@torch.no_grad()
def _mean_loss(model: LlamaForCausalLM, data: list[plain_loop.Batch], device: torch.device) -> float:
    model.eval()
    losses = [model(**{name: tensor.to(device) for name, tensor in batch.items()}).loss.item() for batch in data]
    model.train()
    return sum(losses) / len(losses)


def _sample(model: LlamaForCausalLM, device: torch.device, num_tokens: int) -> str:
    torch.manual_seed(0)
    model.eval()
    prompt = torch.tensor([list(PROMPT)], device=device)
    tokens = model.generate(
        prompt, max_new_tokens=num_tokens, do_sample=True, temperature=0.6, top_k=20, pad_token_id=0
    )
    model.train()
    return bytes(tokens[0].tolist()).decode(errors="replace")


def _speeds(plain_s: float, streamed_s: float) -> str:
    """Describe the speeds of both loops, of which these are the medians: a slow first step does not move them."""
    tokens = COMPARED_MICRO_BATCHES * plain_loop.BATCH_SIZE * plain_loop.SEQUENCE
    return (
        f"Median of these steps: plain loop {plain_s:.3f} s ({tokens / plain_s:,.0f} tokens/s), "
        f"streamed {streamed_s:.3f} s ({tokens / streamed_s:,.0f} tokens/s), "
        f"{streamed_s / plain_s:.2f} times as long."
    )


def _timed(steps: Iterator[tuple[float, float]]) -> tuple[list[tuple[float, float]], float]:
    """Return what every step yields, and the median of the steps' seconds."""
    got, seconds = [], []
    start = time.perf_counter()
    for values in steps:
        got.append(values)
        seconds.append(time.perf_counter() - start)
        start = time.perf_counter()
    return got, median(seconds)


def _compare(text: torch.Tensor, folder: Path, size: Mapping[str, int]) -> tuple[bool, str, str]:
    """Train the same model both ways, on the CPU, where every update runs one and the same kernel.

    Returns:
        Whether all is equal, bit for bit; what is equal, in words; how long each took.
    """
    plain = plain_loop.build(seed=0, **size)
    data = plain_loop.batches(text, seed=2)
    expected, plain_step_s = _timed(plain_loop.train(plain, data, COMPARED_STEPS, COMPARED_MICRO_BATCHES))
    reference = dict(plain.named_parameters())
    with _prepared("cpu", folder, size) as (model, optimizer):
        data = plain_loop.batches(text, seed=2)
        got, streamed_step_s = _timed(_streamed(model, optimizer, data, COMPARED_STEPS, COMPARED_MICRO_BATCHES))
        equal_tensors = sum(torch.equal(reference[name], tensor) for name, tensor in outcore.named_tensors(model))
    losses, norms = (sum(a[i] == b[i] for a, b in zip(expected, got, strict=True)) for i in range(2))
    is_equal = losses == norms == COMPARED_STEPS and equal_tensors == len(reference)
    said = (
        f"{'Yes, bit for bit.' if is_equal else 'NO.'} Equal after {COMPARED_STEPS} steps of {COMPARED_MICRO_BATCHES} "
        f"micro-batches on the CPU: {losses} of {COMPARED_STEPS} losses, {norms} of {COMPARED_STEPS} gradient norms, "
        f"{equal_tensors} of {len(reference)} parameters."
    )
    return is_equal, said, _speeds(plain_step_s, streamed_step_s)
