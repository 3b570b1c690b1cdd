"""A random program: a model, a recipe, a loop and a plan, as plain data that can be printed, repeated and shrunk."""

from __future__ import annotations

import random
from typing import Any

from .blocks import CALLS, KINDS, LENGTHS, STYLES

Program = dict[str, Any]

OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("AdamW", {"lr": 1e-2, "weight_decay": 0.1, "betas": (0.9, 0.95)}),
    ("AdamW", {"lr": 3e-3, "amsgrad": True}),
    ("Adam", {"lr": 3e-3, "weight_decay": 0.01}),
    ("Adam", {"lr": 3e-3, "maximize": True, "eps": 1e-6}),
    ("SGD", {"lr": 5e-2, "momentum": 0.9, "weight_decay": 0.01}),
    ("SGD", {"lr": 5e-2, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 5e-2, "momentum": 0.5, "dampening": 0.1}),
    ("SGD", {"lr": 5e-2}),
    ("Adagrad", {"lr": 1e-2, "lr_decay": 0.01}),
    ("Adagrad", {"lr": 1e-2, "initial_accumulator_value": 0.1}),
)
SCHEDULES = ("none", "none", "lambda", "cosine", "onecycle", "step", "plateau", "chained")
HOOKS = (
    "forward",
    "forward_pre",
    "backward",
    "tensor",
    "parameter",
    "parameter_look",
    "optimizer_pre",
    "optimizer_post",
)
LOOKS = ("eval", "no_grad", "norms", "total_norm", "state_dict", "states", "parameters", "collect", "train_twice")
ERRORS = ("ValueError", "RuntimeError", "MemoryError", "KeyboardInterrupt")
NOT_CUT = ("multihead", "experts")
"""Kinds of blocks that return a number for the whole batch; batches in pieces refuse it."""
LEGAL = tuple(
    (w, g, s)
    for w in ("device", "host", "disk")
    for g in ("device", "host", "disk")
    for s in ("device", "host", "disk")
    if s != "device" or w == g == "device"
)
"""Homes of weights, gradients and states."""


EDITS = ("cancel", "cancel", "perturb", "perturb", "restore", "restore", "some", "swap")
"""Edits of weights: made and undone, made, undone, made to some elements, loaded and loaded back."""


def make_program(seed: int, *, edits: bool = False) -> Program:
    """Return the program of a seed, always the same one. With ``edits`` weights are changed between steps."""
    rng = random.Random(seed)
    program: Program = {"seed": seed}
    program["rounds"] = rng.random() < 0.12  # only these may leave the order open in which gradients are summed
    program["precision"] = rng.choice(("fp32", "fp32", "bf16", "pure_bf16"))
    program["autocast"] = program["precision"] == "fp32" and rng.random() < 0.3
    program["model"] = _model(rng, rounds=program["rounds"])
    # Adam and Adagrad divide by the gradient's size: rounding of a nearly zero gradient becomes a whole step.
    name, options = rng.choice([o for o in OPTIMIZERS if o[0] == "SGD"] if program["rounds"] else OPTIMIZERS)
    program["optimizer"] = {"name": name, "options": dict(options), "groups": rng.choice((1, 1, 2, 3))}
    program["schedule"] = {"kind": rng.choice(SCHEDULES), "before": rng.random() < 0.5}
    program["scaler"] = rng.choice((None, None, None, "off", "on")) if program["precision"] == "fp32" else None
    if program["rounds"]:
        program["scaler"] = None
    program["plan"] = _plan(rng, len(program["model"]["blocks"]))
    program["loop"] = _loop(rng, program)
    program["hooks"] = [
        {
            "kind": rng.choice(HOOKS),
            "block": rng.randrange(len(program["model"]["blocks"])),
            "early": rng.random() < 0.5,
        }
        for _ in range(rng.choice((0, 0, 0, 1, 2)))
    ]
    # From a separate generator, so that programs are the same as before batches ran in pieces.
    program["pieces"] = random.Random(f"pieces {seed}").choice((1, 1, 1, 2, 3))
    # The same, for the time before results of blocks were lent.
    program["model"]["ends"] = random.Random(f"ends {seed}").random() < 0.25
    for block in program["model"]["blocks"] if program["pieces"] > 1 else ():
        block["kind"] = "attention" if block["kind"] in NOT_CUT else block["kind"]
    program["compact"] = False
    for step in program["loop"]["steps"]:
        step["edits"] = {}
    if edits:
        _add_edits(random.Random(f"edits {seed}"), program)
    return program


def _add_edits(rng: random.Random, program: Program) -> None:
    precision = program["precision"] = rng.choice(("bf16",) * 6 + ("fp32", "pure_bf16"))
    program["compact"] = precision == "bf16" and rng.random() < 0.5
    if precision != "fp32":
        program["autocast"], program["scaler"] = False, None
    for step in program["loop"]["steps"]:
        places = ("before", *range(len(step["micros"])), "after")
        step["edits"] = {str(p): rng.choices(EDITS, k=rng.randint(1, 2)) for p in places if rng.random() < 0.4}


def _model(rng: random.Random, *, rounds: bool) -> dict[str, Any]:
    count = rng.randint(2, 6)
    favourite = rng.choice(tuple(KINDS))  # so that some models have equal blocks
    blocks = [
        {
            "kind": favourite if rng.random() < 0.4 else rng.choice(tuple(KINDS)),
            "style": rng.choice(tuple(STYLES)),
            "call": rng.choice(CALLS),
            "frozen": rng.choice(("no", "no", "no", "no", "all", "some")),
        }
        for _ in range(count)
    ]

    def pair() -> list[int]:
        return [rng.randrange(count), rng.randrange(count)]

    return {
        "width": rng.choice((8, 12, 20)),
        "blocks": blocks,
        "tied": rng.random() < 0.3,
        "frozen_embedding": rng.random() < 0.15,
        "same": pair() if rounds and rng.random() < 0.3 else None,  # one module in two places
        "shared": pair() if rounds and rng.random() < 0.3 else None,  # one weight in two blocks
        "trips": rng.random() < 0.3,
    }


def _plan(rng: random.Random, count: int) -> dict[str, Any]:
    late = {lane: rng.choice((0.0005, 0.002)) for lane in _LANES if rng.random() < 0.3}
    faults = {
        "delays": late if rng.random() < 0.4 else {},
        "permute": rng.randrange(1000) if rng.random() < 0.25 else None,
        "poison": rng.random() < 0.5,
        "seed": rng.randrange(1000),
    }
    kind = rng.choice(("device", "host", "disk", "mixed", "mixed", "mixed"))
    return {
        "how": rng.choice(("given",) * 8 + ("budget", "default")),
        "fraction": rng.choice((0.0, 0.0, 0.3, 0.7)),  # of the way from the least budget to everything on the device
        "homes": [_homes(rng, kind, i == 0) for i in range(count + 2)],
        "policies": [rng.choice(("keep", "select", "recompute")) for _ in range(count + 2)],
        "activations": [rng.choice(("device", "device", "host", "disk")) for _ in range(count + 2)],
        "units": rng.choice((None, None, "blocks", "some", "with embedding")),
        "slots": rng.choice((1, 1, 2, 3, 4)),
        "depth": rng.choice((0, 1, 2, 3)),
        "promised": rng.random() < 0.35,
        "early": rng.random() < 0.6,
        "share": rng.choice((0.0, 0.0, 0.5, 1.0)),
        "faults": faults,
    }


def _homes(rng: random.Random, kind: str, is_root: bool) -> tuple[str, str, str]:
    homes = rng.choice(LEGAL) if kind == "mixed" else (kind, kind, kind)
    if is_root and homes[0] != "device":
        homes = ("device", homes[1], "host" if homes[2] == "device" else homes[2])
    return homes


_LANES = ("compute", "h2d", "d2h", "weights_read", "states_read", "disk_write", "states_write", "update")


def _loop(rng: random.Random, program: Program) -> dict[str, Any]:
    promised = program["plan"]["promised"]
    micros = rng.choice((1, 1, 2, 3))
    clip = rng.choice(("none", "none", "some", "always", "look"))
    steps = [
        {
            "micros": [_micro(rng, program, promised) for _ in range(micros if promised or rng.random() < 0.8 else 2)],
            "clip": clip if rng.random() < 0.8 or clip == "none" else "look",
            "set_to_none": rng.random() < 0.7,
            "by": rng.choice(("optimizer", "model")),
            "zeroes": rng.random() < 0.9,
            "steps": rng.random() < 0.95,
            "before": _looks(rng, 0.15),
            "between": _looks(rng, 0.15),
            "after": _looks(rng, 0.25),
            "saves": rng.random() < 0.1,
            "loads": rng.random() < 0.1,
            "scales": rng.choice((None,) * 8 + (0.5, 3.0)),
            "drops": rng.random() < 0.05,
            "rate": rng.choice((None,) * 9 + (0.3,)),
        }
        for _ in range(rng.randint(3, 6))
    ]
    if promised:
        for step in steps:  # a promise of micro-batches per step
            step["zeroes"] = step["steps"] = True
    return {"steps": steps, "micros": micros if promised else None, "seed": rng.randrange(1000)}


def _looks(rng: random.Random, chance: float) -> list[str]:
    return [rng.choice(LOOKS)] if rng.random() < chance else []


def _micro(rng: random.Random, program: Program, promised: bool) -> dict[str, Any]:
    count = len(program["model"]["blocks"])
    order = list(range(count))
    if rng.random() < 0.15:
        order.pop(rng.randrange(count))
    if rng.random() < 0.1:
        rng.shuffle(order)
    if program["rounds"] and rng.random() < 0.15:
        order.insert(rng.randrange(len(order) + 1), rng.randrange(count))
    fault = None
    if rng.random() < 0.08:
        where = rng.choice(("forward", "backward", "again", "interrupt", "interrupt"))
        fault = {"where": where, "block": rng.randrange(count), "error": rng.choice(ERRORS), "part": rng.random()}
        if where == "backward" and not program["model"]["trips"]:
            fault = None
    ways = (
        ("one",) * 12
        + (("sum",) if program["rounds"] else ())
        + (() if promised else ("retain", "two", "apart", "parts") * 2)
    )
    return {
        "rows": rng.choice((2, 2, 3)),
        "length": rng.choice((LENGTHS[1], LENGTHS[1], *LENGTHS)),
        "seed": rng.randrange(1000),
        "order": order,
        "way": rng.choice(ways),
        "between": _looks(rng, 0.08),
        "fault": fault,
    }
