"""What ``outcore plan`` estimates for changed settings, beside what a search finds for them.

    python -m planning.estimates          (in the folder research)

Prints for six models and budgets the gains of the changes that help most, and the step times of the curves, each over
what a search finds. Other ways to treat activations may be tried when a user asks for a point itself.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from outcore.command.plan import recipes
from outcore.command.plan.answer import Answer, answer_for, machine_for
from outcore.command.plan.known_models import known_models
from outcore.core.errors import PlanInfeasibleError
from outcore.planner.search import curves
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import search

from .fixed_policies import Asked

ASKED = (
    Asked("meta-llama/Llama-3.2-1B", "rtx-4090", "8GiB", "12GiB", 4),
    Asked("Qwen/Qwen3-1.7B", "rtx-4090", "9GiB", "20GiB", 1),
    Asked("meta-llama/Llama-3.2-3B", "rtx-4090", "12GiB", "32GiB", 2),
    Asked("meta-llama/Llama-3.1-8B", "rtx-4090", "21GiB", "120GiB", 1),
    Asked("meta-llama/Llama-3.1-8B", "h100", "72GiB", "100GiB", 1, clipping=False),
    Asked("Qwen/Qwen3-32B", "a100-80gb", "72GiB", "400GiB", 1),
)


def answer_of(asked: Asked) -> Answer:
    """Return the answer with its plan."""
    source = next(each.source for each in known_models() if each.name == asked.model)
    question = asked.question()
    found = answer_for(question, source, machine_for(question))
    _ = found.found
    return found


def gains(answer: Answer) -> Iterator[tuple[str, float, float]]:
    """Yield of the changes that help most the name, the estimated gain, and that of a search."""
    setting, step_s = answer.setting, answer.found.simulation.step_s
    for recipe, _, factor in recipes.gains(answer):
        other = recipes._setting_with(recipe, answer)
        if other is not None:
            searched_s = search(other).simulation.step_s
            yield recipe.options, factor, step_s * other.tokens / setting.tokens / searched_s


def over_search(answer: Answer) -> Iterator[tuple[str, list[float]]]:
    """Yield of each curve the name, and its step times over those of a search where both fit, but for today's point."""
    setting = answer.setting
    settings: dict[str, Callable[[int], PlanQuestion]] = {
        "device_memory": lambda value: setting.with_limits(device_bytes=value),
        "host_memory": lambda value: setting.with_limits(host_bytes=value),
        "batch": lambda value: replace(setting, batch_size=value),
    }
    for name, points in curves.curves(setting, answer.found)._asdict().items():
        found = list[float]()
        for point in points:
            if point.step_s is None or point.is_today:
                continue
            try:
                found.append(point.step_s / search(settings[name](point.value)).simulation.step_s)
            except PlanInfeasibleError:  # it fits with another way to treat activations alone
                continue
        yield name, found


def main() -> None:
    low, long = list[float](), list[float]()
    for asked in ASKED:
        answer = answer_of(asked)
        start_s = time.process_time()
        _ = recipes.gains(answer)
        helps_s, start_s = time.process_time() - start_s, time.process_time()
        _ = curves.curves(answer.setting, answer.found)
        curves_s = time.process_time() - start_s
        print(f"{asked.model}, {asked.hardware}, {asked.device_memory} and {asked.host_memory}:", end=" ")
        print(f"{helps_s:.1f} s for the gains, {curves_s:.1f} s for the curves", flush=True)
        for name, estimated, searched in gains(answer):
            low.append(estimated / searched)
            print(f"    {name}: {estimated:.3f} times, by a search {searched:.3f}", flush=True)
        for name, ratios in over_search(answer):
            long += ratios
            print(f"    {name}:", *(f"{ratio:.3f}" for ratio in ratios), flush=True)
    print(f"gains over those of a search: {min(low):.3f} at worst, {statistics.mean(low):.3f} in the mean")
    print(f"steps over those of a search: {max(long):.3f} at worst, {statistics.mean(long):.3f} in the mean")


if __name__ == "__main__":
    main()
