"""Steps of several micro-batches: plans are compared by a few of them. How near that is, and which plans it finds.

    python -m planning.long_steps near          (in the folder tests)
    python -m planning.long_steps found

``near`` draws plans of three models and prints seconds of a step that was extended over those of one that was played
in full. ``found`` prints the plans that a search finds for 4, 8 and 16 micro-batches; run it at two commits.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from outcore.cli.plan.answer import answer_for, machine_for
from outcore.cli.plan.known import known_models
from outcore.planning.search.candidates import Candidate
from outcore.planning.search.fillings import Fillings
from outcore.planning.search.looks import Looks
from outcore.planning.search.search import search
from outcore.planning.search.setting import Setting

from .fixed_policies import EXPERTS, HUGE, LARGE, MIDDLE, SERVER, SMALL, Asked

SETTINGS = {
    "8B": (MIDDLE, "rtx-4090", "21GiB", "120GiB", 2),
    "1B": (SMALL, "rtx-4090", "8GiB", "16GiB", 1),
    "experts": (EXPERTS, "rtx-4090", "21GiB", "300GiB", 2),
    "32B": (LARGE, "a100-80gb", "43GiB", "400GiB", 2),
    "70B": (HUGE, "a100-80gb", "72GiB", "400GiB", 2),
}
DRAWN = ("8B", "1B", "experts")


def setting(name: str, *, clipping: bool) -> Setting:
    """A setting with one micro-batch."""
    model, machine, device, host, rows = SETTINGS[name]
    question = Asked(model, machine + SERVER, device, host, rows, clipping=clipping).question()
    source = next(each.source for each in known_models() if each.name == model)
    return answer_for(question, source, machine_for(question)).setting


def candidates(looks: Looks, fillings: Fillings, ways: tuple) -> Iterator[Candidate]:
    """Some fillings, and random candidates."""
    filled = [each for way in ways[:6] for each in list(fillings.of(way))[:40:6]]
    yield from filter(looks.fits, filled[:6])
    for seed, drawn in enumerate(fillings.drawn(filled[0], 16)):
        candidate = replace(drawn, saves=random.Random(seed).choice(ways))
        if looks.fits(candidate):
            yield candidate


def near() -> None:
    """Print how near extended steps are to those that are played in full."""
    print("| model | clips | micro-batches | plans | least | most | within 0.1% |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in DRAWN:
        for clipping in (True, False):
            one = setting(name, clipping=clipping)
            for micro_batches in (6, 9):
                job = replace(one, micro_batches=micro_batches).job()
                looks = Looks(job)
                found = list(candidates(looks, Fillings(job, looks), job.ways))
                ratios = [looks.seconds(c) / looks.cost_s(looks.plan(c), c.saves) for c in found]
                exact = sum(abs(ratio - 1) <= 1e-3 for ratio in ratios)
                cells = [name, "yes" if clipping else "no", micro_batches, len(ratios)]
                cells += [f"{min(ratios):.4f}", f"{max(ratios):.4f}", exact]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


def found() -> None:
    """Print what a search finds."""
    print("| model | clips | micro-batches | step | simulated | seconds of the search |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in SETTINGS:
        for clipping in (True, False):
            one = setting(name, clipping=clipping)
            for micro_batches in (4, 8, 16):
                start_s = time.process_time()
                plan = search(replace(one, micro_batches=micro_batches).job())
                cells = [name, "yes" if clipping else "no", micro_batches, f"{plan.simulation.step_s:.4g} s"]
                cells += [plan.num_simulated, f"{time.process_time() - start_s:.1f}"]
                print(f"| {' | '.join(map(str, cells))} |", flush=True)


if __name__ == "__main__":
    {"near": near, "found": found}[sys.argv[1]]()
