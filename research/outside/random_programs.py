"""Train random programs plain and prepared, and count how they agree. Writes a JSON report.

python research/outside/random_programs.py --count 200 --seed 0 --json report.json
python research/outside/random_programs.py --count 200 --simulated    # on the simulated GPU, with streams that are late
python research/outside/random_programs.py --count 100 --edits        # weights are edited between steps, beside masters
python research/outside/random_programs.py --only 17            # one program, with everything that is known of it
python research/outside/random_programs.py --shrink 17          # the smallest program found with the same verdict
"""

from __future__ import annotations

import argparse
import collections
import copy
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2] / "tests"
sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(TESTS)]

LATE_S = 0.0005
"""Longest delay before each operation of a stream of the simulated GPU."""
GOOD = ("equal", "rounding", "refused", "plain raises")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the others follow")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="the longest that one program may take")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no further program after so long")
    parser.add_argument("--simulated", action="store_true", help="on the simulated GPU; alone: run this file by run.py")
    parser.add_argument("--edits", action="store_true", help="edit weights between steps")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", type=int)
    parser.add_argument("--shrink", type=int)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return work(edits=args.edits)
    if args.only is not None or args.shrink is not None:
        from outside.program import make_program

        program = make_program(args.shrink if args.only is None else args.only, edits=args.edits)
        return show(program, is_shrunk=args.shrink is not None)
    start_s = time.monotonic()
    pool = Pool(args.jobs, args.seconds, args.minutes * 60, is_simulated=args.simulated, edits=args.edits)
    results = pool.run(range(args.seed, args.seed + args.count))
    report = summary(results, time.monotonic() - start_s)
    if args.json:
        args.json.write_text(json.dumps({**report, "results": results}, indent=1) + "\n")
    print(json.dumps(report, indent=2))
    return 0 if all(r["verdict"] in GOOD for r in results) else 1


def summary(results: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    refusals = collections.Counter(f"{r['kind']}: {r['sentence']}" for r in results if r["verdict"] == "refused")
    bad = [r for r in results if r["verdict"] not in GOOD]
    return {
        "programs": len(results),
        "seconds": round(seconds, 1),
        "verdicts": dict(collections.Counter(r["verdict"] for r in results).most_common()),
        "refusals": dict(refusals.most_common()),
        "failures": [
            {k: str(r.get(k, ""))[:300] for k in ("seed", "verdict", "kind", "message", "where")} for r in bad
        ],
    }


# -- processes --------------------------------------------------------------------------------------------------------


class Pool:
    """Workers that each run one program after another; one that takes too long, or dies, is replaced."""

    def __init__(self, jobs: int, longest_s: float, all_s: float, *, is_simulated: bool, edits: bool) -> None:
        self._is_simulated, self._edits = is_simulated, edits
        self._jobs, self._longest_s, self._end_s = jobs, longest_s, time.monotonic() + all_s

    def run(self, seeds: Any) -> list[dict[str, Any]]:
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for seed in seeds:
            waiting.put(seed)
        results: list[dict[str, Any]] = []
        threads = [threading.Thread(target=self._serve, args=(waiting, results)) for _ in range(self._jobs)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(results, key=lambda r: r["seed"])

    def _serve(self, waiting: Any, results: list[dict[str, Any]]) -> None:
        worker = None
        while time.monotonic() < self._end_s:
            try:
                seed = waiting.get_nowait()
            except queue.Empty:
                break
            worker = worker or Worker(is_simulated=self._is_simulated, edits=self._edits)
            result = worker.ask(seed, self._longest_s)
            if result["verdict"] in ("hang", "crash"):
                worker = None
            results.append(result)
            if result["verdict"] not in GOOD:
                print(
                    seed,
                    result["verdict"],
                    result.get("kind", ""),
                    result.get("message", "")[:200],
                    file=sys.stderr,
                    flush=True,
                )
        if worker is not None:
            worker.end()


class Worker:
    """One process that runs programs."""

    def __init__(self, *, is_simulated: bool, edits: bool) -> None:
        command = [sys.executable, __file__, "--worker", *(["--edits"] if edits else [])]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if is_simulated:
            command.insert(1, str(TESTS / "simulated_gpu" / "run.py"))
            environment["OUTCORE_TEST_DEVICE"] = "cuda"
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put("")

    def ask(self, seed: int, longest_s: float) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seed}\n")
        self._process.stdin.flush()
        try:
            line = self._answers.get(timeout=longest_s)
        except queue.Empty:
            self._process.kill()
            return {"seed": seed, "verdict": "hang", "message": f"no answer after {longest_s} s"}
        if not line:
            return {
                "seed": seed,
                "verdict": "crash",
                "message": f"the process ended with status {self._process.wait()}",
            }
        return json.loads(line)

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def work(*, edits: bool) -> int:
    """Answer seeds from standard input with verdicts."""
    from outside.driver import run_program
    from outside.program import make_program

    simulator = sys.modules.get("simulator")
    if simulator is not None:
        simulator.set_knobs(delay_s=LATE_S)
    for line in sys.stdin:
        seed = int(line)
        start_s = time.monotonic()
        try:
            result = run_program(make_program(seed, edits=edits))
        except BaseException as error:
            import traceback

            result = {"verdict": "harness", "message": repr(error), "trace": traceback.format_exc()}
        print(json.dumps({"seed": seed, **result, "seconds": round(time.monotonic() - start_s, 3)}), flush=True)
    return 0


# -- one program ------------------------------------------------------------------------------------------------------


def show(program: dict[str, Any], *, is_shrunk: bool) -> int:
    from outside.driver import run_program

    result = run_program(program)
    if is_shrunk:
        program, result = shrunk(program, result)
    print(json.dumps(program, indent=1))
    print(result.pop("trace", ""))
    print(json.dumps(result, indent=1))
    return 0


def shrunk(program: dict[str, Any], result: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Repeatedly remove what is not needed for the same verdict."""
    from outside.driver import run_program

    def key(r: dict[str, Any]) -> tuple[Any, ...]:
        return r["verdict"], r.get("kind"), r.get("message", "").split(": ")[1:2]

    changed, tried = True, {json.dumps(program)}
    while changed:
        changed = False
        for smaller in simpler(program):
            if (text := json.dumps(smaller)) in tried:
                continue
            tried.add(text)
            try:
                outcome = run_program(smaller)
            except Exception:  # the smaller program makes no sense
                continue
            if key(outcome) == key(result):
                program, result, changed = smaller, outcome, True
                print(f"smaller: {len(json.dumps(program))} characters", file=sys.stderr, flush=True)
                break
    return program, result


SIMPLE: tuple[tuple[tuple[str, ...], Any], ...] = (
    (("hooks",), []), (("scaler",), None), (("autocast",), False), (("precision",), "fp32"),
    (("schedule", "kind"), "none"), (("optimizer", "groups"), 1), (("optimizer", "name"), "SGD"),
    (("pieces",), 1), (("model", "tied"), False), (("model", "frozen_embedding"), False), (("model", "same"), None),
    (("model", "shared"), None), (("model", "trips"), False), (("model", "ends"), False), (("plan", "how"), "given"),
    (("plan", "promised"), False), (("compact",), False),
    (("plan", "early"), False), (("plan", "share"), 0.0), (("plan", "slots"), 1), (("plan", "depth"), 0),
    (("plan", "units"), None), (("plan", "units"), "blocks"), (("plan", "faults", "delays"), {}),
    (("plan", "faults", "permute"), None), (("plan", "faults", "poison"), False),
)  # fmt: skip
PLAIN_STEP = {
    "clip": "none", "set_to_none": True, "by": "optimizer", "zeroes": True, "steps": True, "before": [], "between": [],
    "after": [], "saves": False, "loads": False, "scales": None, "drops": False, "rate": None, "edits": {},
}  # fmt: skip
PLAIN_MICRO = {"rows": 2, "length": 7, "seed": 1, "way": "one", "between": [], "fault": None}
PLAIN_BLOCK = {"style": "tensor", "call": "position", "frozen": "no", "kind": "mlp"}


def simpler(program: dict[str, Any]) -> Any:  # noqa: C901, PLR0912
    """Programs that lack one more thing."""
    steps = program["loop"]["steps"]
    for i in range(len(steps)):
        if len(steps) > 1:
            new = copy.deepcopy(program)
            del new["loop"]["steps"][i]
            yield new
    for i, step in enumerate(steps):
        for j in range(len(step["micros"]) if program["loop"]["micros"] is None else 0):
            new = copy.deepcopy(program)
            del new["loop"]["steps"][i]["micros"][j]
            yield new
    for b in range(len(program["model"]["blocks"])):
        new = without_block(program, b)
        if new is not None:
            yield new
    for path, value in SIMPLE:
        new = copy.deepcopy(program)
        if set_at(new, path, value):
            if path == ("optimizer", "name"):
                new["optimizer"]["options"] = {"lr": 0.05}
            if path == ("plan", "promised"):
                new["loop"]["micros"] = None
            yield new
    for i, step in enumerate(steps):
        for name, value in PLAIN_STEP.items():
            new = copy.deepcopy(program)
            if set_at(new["loop"]["steps"][i], (name,), value):
                yield new
        for j in range(len(step["micros"])):
            plain_order = list(range(len(program["model"]["blocks"])))
            for name, value in {**PLAIN_MICRO, "order": plain_order}.items():
                new = copy.deepcopy(program)
                if set_at(new["loop"]["steps"][i]["micros"][j], (name,), value):
                    yield new
    for b in range(len(program["model"]["blocks"])):
        for name, value in PLAIN_BLOCK.items():
            new = copy.deepcopy(program)
            if set_at(new["model"]["blocks"][b], (name,), value):
                yield new
    for i in range(len(program["plan"]["homes"])):
        for homes in (["device", "device", "device"], ["host", "host", "host"]):
            new = copy.deepcopy(program)
            if (i or homes[0] == "device") and set_at(new["plan"], ("homes", i), homes):
                yield new
        for policy in ("keep", "select", "recompute"):
            new = copy.deepcopy(program)
            if policy == "recompute" and set_at(new["plan"], ("policies", i), policy):
                yield new
        new = copy.deepcopy(program)
        if set_at(new["plan"], ("activations", i), "device"):
            yield new


def without_block(program: dict[str, Any], b: int) -> dict[str, Any] | None:  # noqa: C901
    if len(program["model"]["blocks"]) <= 2:
        return None
    new = copy.deepcopy(program)
    del new["model"]["blocks"][b]
    for name in ("homes", "policies", "activations"):
        del new["plan"][name][b + 1]
    for name in ("same", "shared"):
        if new["model"][name]:
            if b in new["model"][name]:
                return None
            new["model"][name] = [i - (i > b) for i in new["model"][name]]
    for step in new["loop"]["steps"]:
        for micro in step["micros"]:
            micro["order"] = [i - (i > b) for i in micro["order"] if i != b]
            if micro["fault"]:
                if micro["fault"]["block"] == b:
                    return None
                micro["fault"]["block"] -= micro["fault"]["block"] > b
    for hook in new["hooks"]:
        if hook["block"] == b:
            return None
        hook["block"] -= hook["block"] > b
    return new


def set_at(nest: Any, path: tuple[Any, ...], value: Any) -> bool:
    """Set a value. Returns False if it is set already."""
    for key in path[:-1]:
        nest = nest[key]
    before = nest[path[-1]]
    if before == value or (isinstance(before, tuple) and list(before) == value):
        return False
    nest[path[-1]] = value
    return True


if __name__ == "__main__":
    raise SystemExit(main())
