"""Steps of small known models where little memory must do, on a consumer's GPU.

    python -m planning.tight_budgets          (in the folder research)

Prints a row per budget: the predicted step, how far it is above its bound, and what the search takes. Run it at two
commits to compare their searches.
"""

from __future__ import annotations

import statistics
import time

from outcore.command.plan.answer import answer_for, machine_for
from outcore.command.plan.known_models import known_models
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.search import Found, search
from outcore.spec.schedule import usual_visits

from .bound.bound import bound_of
from .fixed_policies import Asked

MACHINE, GIB = "rtx-4090", 2**30
BUDGETS = {  # sequences of a batch, and GiB of device and host memory; the roomiest comes last
    "meta-llama/Llama-3.2-1B": (4, [(6, 12), (7, 12), (8, 12), (9, 12), (10, 12)]),
    "Qwen/Qwen3-1.7B": (1, [(6, 20), (7, 20), (8, 20), (9, 20), (10, 20), (12, 20)]),
    "meta-llama/Llama-3.2-3B": (2, [(10, 32), (12, 32), (16, 32)]),
    "Qwen/Qwen3-4B": (1, [(8, 32), (10, 32), (14, 32)]),
}


def bound_of_found(found: Found) -> float:
    """Return the bound of a step of a plan that was found."""
    job = found.looks.job
    run, visits = job.as_run(found.bare, found.candidate.saves), usual_visits(job.model, job.micro_batches)
    return bound_of(job.model, run, job.rates, visits, Circumstances(clips=job.clipping)).seconds


def main() -> None:
    known = {each.name: each for each in known_models()}
    above, took = list[float](), list[float]()
    print("| model | device, host | clips | step | over its bound | simulated | seconds of the search |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for model, (batch_size, budgets) in BUDGETS.items():
        for clipping in (True, False):
            most = (f"{gib}GiB" for gib in budgets[-1])
            question = Asked(model, MACHINE, *most, batch_size, clipping=clipping).question()
            setting = answer_for(question, known[model].source, machine_for(question)).setting
            for device, host in budgets:
                job = setting.with_limits(device_bytes=device * GIB, host_bytes=host * GIB)
                start_s = time.process_time()
                found = search(job)
                took.append(time.process_time() - start_s)
                step_s = found.simulation.step_s
                above.append(step_s / bound_of_found(found))
                print(
                    f"| {model.split('/')[1]} | {device}, {host} GiB | {'yes' if clipping else 'no'} | {step_s:.4g} s "
                    f"| {above[-1]:.3f} | {found.num_simulated} | {took[-1]:.1f} |",
                    flush=True,
                )
    print(
        f"\n{len(above)} plans, {min(above):.3f} to {max(above):.3f} times their bounds, "
        f"median {statistics.median(above):.3f}; {sum(took):.0f} s of processor time"
    )


if __name__ == "__main__":
    main()
