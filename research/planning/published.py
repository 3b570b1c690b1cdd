"""Steps that others measured and published, predicted by the simulator.

    python -m planning.published          (in the folder research)

Some inputs are not stated by the authors (rates of their kernels, drives and processors). They are fixed on some rows,
which are marked. All other rows are predicted. Each system is represented by a plan: where it keeps what, and when it
updates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from outcore.planner.homes.pools import UnitHomes
from outcore.planner.paper.paper_schedule import Circumstances
from outcore.planner.search.plan_space import ALL_HOST, Candidate, Comfort, PlanSpace
from outcore.planner.timing.rates import Rates
from outcore.planner.timing.simulate import simulate
from outcore.spec.model import ModelSpec, ParamSpec, UnitSpec
from outcore.spec.schedule import usual_visits

GB, GIGA, TERA = 1e9, 1e9, 1e12
ROOMY = Comfort(prefetch_depth=2, num_buckets=2, max_slots_host=3)
STATES_ON_DISK = UnitHomes("host", "host", "disk")


@dataclass(frozen=True)
class Row:
    """A published figure and ours."""

    source: str
    what: str
    published: float
    predicted: float
    unit: str
    is_fixed: bool = False
    """Whether an input was fixed on this row."""

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def model_of(params: float, layers: int) -> ModelSpec:
    """A model of equal layers, in bf16 with fp32 masters."""
    shape = (int(params / layers),)
    units = [UnitSpec(name="", params=())]
    for i in range(layers):
        param = ParamSpec(
            name=f"layers.{i}.weight", shape=shape, dtype="bfloat16", update_dtype="float32", requires_grad=True
        )
        units.append(UnitSpec(name=f"layers.{i}", params=(param,)))
    return ModelSpec(units=tuple(units), state_names=("exp_avg", "exp_avg_sq"), precision="bf16")


def step_s(model: ModelSpec, rates: Rates, kind: UnitHomes, *, share: float = 0.0, early: float = 0.0) -> float:
    """Seconds of a step of a plan with equal homes for all units."""
    choice = PlanSpace(model, policy="keep", accumulation_steps=1 if early else None, may_be_early=early > 0)
    plan = choice.plan(Candidate((kind,) * len(model.units), ROOMY, share, early))
    circumstances = Circumstances(clips=not early, overtaken=frozenset())  # these systems make all early updates
    return simulate(model, plan, rates, usual_visits(model), circumstances, warm_up=4).step_s


def rates_of(model: ModelSpec, compute_s: float, speeds: dict[str, float], update: float) -> Rates:
    """Args: compute_s: Seconds of forward and backward; a third is forward."""
    layers = len(model.units) - 1
    names = [unit.name for unit in model.units[1:]]
    return Rates(
        forward_s=dict.fromkeys(names, compute_s / 3 / layers),
        backward_s=dict.fromkeys(names, 2 * compute_s / 3 / layers),
        bytes_per_s=speeds,
        parameters_per_s={"update": update, "device_update": 50 * GIGA, "compute": 50 * GIGA},
    )


def fixed(seconds: Callable[[float], float], target_s: float, low: float, high: float) -> float:
    """Return the rate with which a step takes ``target_s``; a higher rate makes it faster."""
    for _ in range(12):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if seconds(middle) > target_s else (low, middle)
    return math.sqrt(low * high)


def lohan() -> Iterator[Row]:
    """13B on an RTX 4090: states on drives, updates inside backward. TFLOPS count 6 per parameter and token."""
    source, params, seq_len = "LoHan, evaluation_data.md", 12.85 * GIGA, 1024
    model = model_of(params, 40)
    flops = {batch: 6 * params * batch * seq_len for batch in (8, 16, 32, 64, 128)}
    by_batch = dict(zip(flops, (42.8, 84.3, 143.1, 155.8, 153.8), strict=True))
    by_drives = {1: 37.5, 2: 64.3, 3: 81.1, 6: 121.7, 12: 142.0}

    def seconds(batch: int, drives: int, drive: float, update: float) -> float:
        # The ratio of reading to writing is from the data sheet: 6.5 and 3.4 GB/s.
        speeds = {"h2d": 25 * GB, "d2h": 25 * GB, "disk_read": drives * drive, "disk_write": drives * drive * 3.4 / 6.5}
        compute_s = flops[batch] / (by_batch[64] * TERA)
        return step_s(model, rates_of(model, compute_s, speeds, update), STATES_ON_DISK, early=1.0)

    drive = fixed(lambda d: seconds(32, 1, d, 10 * GIGA), flops[32] / by_drives[1] / TERA, 0.1 * GB, 50 * GB)
    update = fixed(lambda u: seconds(8, 12, drive, u), flops[8] / by_batch[8] / TERA, 0.1 * GIGA, 20 * GIGA)
    for batch, published in by_batch.items():
        found = flops[batch] / seconds(batch, 12, drive, update) / TERA
        yield Row(source, f"batch {batch}, 12 drives", published, found, "TFLOPS", is_fixed=batch in (8, 64))
    for drives, published in by_drives.items():
        found = flops[32] / seconds(32, drives, drive, update) / TERA
        yield Row(source, f"batch 32, {drives} drives", published, found, "TFLOPS", is_fixed=drives == 1)


def deep_optimizer_states() -> Iterator[Row]:
    """Four ranks, each with a quarter of the states in host memory; one rank is simulated."""
    yield from _on_h100()
    yield from _on_a100()


def _rank(params: float, compute_s: float, speeds: dict[str, float], update: float, share: float) -> float:
    model = model_of(params / 4, 40)
    return step_s(model, rates_of(model, compute_s, speeds, update), UnitHomes("device", "host", "host"), share=share)


def _on_h100() -> Iterator[Row]:
    source = "Deep Optimizer States, authors' logs and plots, 4 x H100"
    names = ("7B", "8.3B", "10B", "13B", "20B")
    sizes = dict(zip(names, (5.95, 9.14, 9.92, 11.3, 15.33), strict=True))
    offload = dict(zip(names, (3.1, 4.7, 4.5, 5.7, 7.3), strict=True))
    interleaved = dict(zip(names, (1.6, 2.4, 2.2, 2.3, 2.9), strict=True))
    fast = {"h2d": 55.2 * GB, "d2h": 55.2 * GB}
    per_billion_s = (0.211 + 0.971) / 15.33  # forward and backward of 20B while gradients are flushed

    def seconds(name: str, speeds: dict[str, float], update: float, share: float = 0.0) -> float:
        return _rank(sizes[name] * GIGA, sizes[name] * per_billion_s, speeds, update, share)

    update = fixed(lambda u: seconds("20B", fast, u), 3.802, 0.1 * GIGA, 50 * GIGA)
    yield Row(source, "20B, flush beside backward", 3.802, seconds("20B", fast, update), "s", is_fixed=True)

    def slow(rate: float) -> dict[str, float]:
        return {**fast, "d2h": rate}

    flush = fixed(lambda d: seconds("20B", slow(d), update), offload["20B"], 0.1 * GB, 50 * GB)
    for name in names:
        found = seconds(name, slow(flush), update)
        yield Row(source, f"{name}, ZeRO-3 offload", offload[name], found, "s", is_fixed=name == "20B")
    for name in names:
        found = seconds(name, fast, update, 0.5)
        yield Row(source, f"{name}, every second update on the device", interleaved[name], found, "s")


def _on_a100() -> Iterator[Row]:
    source = "Deep Optimizer States, authors' logs, 4 x A100-40GB"
    fast, compute_s = {"h2d": 25 * GB, "d2h": 25 * GB}, 0.380 + 1.428

    def seconds(speeds: dict[str, float], update: float, share: float = 0.0) -> float:
        return _rank(11.3 * GIGA, compute_s, speeds, update, share)

    update = fixed(lambda u: seconds(fast, u), 6.095, 0.1 * GIGA, 50 * GIGA)
    yield Row(source, "13B, flush beside backward", 6.095, seconds(fast, update), "s", is_fixed=True)
    yield Row(source, "13B, every second update on the device", 4.758, seconds(fast, update, 0.5), "s")


def lazy_train() -> Iterator[Row]:
    """One H800 with 12 GB/s in each direction; all states in host memory. TFLOPS count 6 per parameter and token."""
    sizes = {"3B": 3.1, "7B": 7.6, "14B": 14.8, "27B": 27.0}
    batches = {"MegaTrain": (192, 144, 96, 72), "LazyTrain": (192, 144, 96, 72), "ZeRO-3 offload": (32, 16, 8, 2)}
    tflops = {
        "MegaTrain": (142.8, 161.35, 171.92, 176.9),
        "LazyTrain": (176.42, 199.84, 212.34, 219.95),
        "ZeRO-3 offload": (68.65, 79.88, 93.43, 86.55),
    }
    for system, published in tflops.items():
        rows = dict(zip(sizes, zip(published, batches[system], strict=True), strict=True))

        def reached(name: str, rate: float, rows: dict[str, tuple[float, int]] = rows) -> float:
            params = sizes[name] * GIGA
            flops = 6 * params * 1024 * rows[name][1]
            model = model_of(params, 36)
            speeds = {"h2d": 12 * GB, "d2h": 12 * GB}
            return flops / step_s(model, rates_of(model, flops / rate, speeds, 2.3 * GIGA), ALL_HOST) / TERA

        rate = fixed(lambda r: 1 / reached("7B", r), 1 / rows["7B"][0], 10 * TERA, 2000 * TERA)
        for name, (measured, _) in rows.items():
            found = reached(name, rate)
            yield Row(f"LazyTrain, table of {system}", name, measured, found, "TFLOPS", is_fixed=name == "7B")


def main() -> None:
    rows = [*lohan(), *deep_optimizer_states(), *lazy_train()]
    print("| source | row | published | predicted | ratio | |\n|---|---|---|---|---|---|")
    for row in rows:
        said = "fixed on it" if row.is_fixed else "" if abs(row.ratio - 1) <= 0.2 else "missed"
        published, predicted = f"{row.published:.4g} {row.unit}", f"{row.predicted:.4g} {row.unit}"
        print(f"| {row.source} | {row.what} | {published} | {predicted} | {row.ratio:.2f} | {said} |")
    free = [row for row in rows if not row.is_fixed]
    print(f"\n{sum(abs(row.ratio - 1) <= 0.2 for row in free)} of {len(free)} predicted rows are within 20%.")


if __name__ == "__main__":
    main()
