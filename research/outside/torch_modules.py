"""torch's own databases: every module as a block, trained plain and prepared, and every configuration of an optimizer.

    OUTSIDE_SECONDS=330 OUTSIDE_INPUTS=2 python research/outside/torch_modules.py modules
    python research/outside/torch_modules.py optimizers

Runs if torch has its test databases (torch.testing._internal), which need `expecttest` or `hypothesis` in some
versions. Prints counts, and the names of cases that differ.
"""

from __future__ import annotations

import collections
import os
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import outcore
from outcore.core.errors import OutcoreError

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2] / "tests")]
from plans import forced  # noqa: E402

STEPS = 3
CASE_S = 10
LONGEST_S = float(os.environ.get("OUTSIDE_SECONDS", "inf"))
INPUTS = int(os.environ.get("OUTSIDE_INPUTS", "2"))
"""Number of inputs tried for each module; one module has over 500."""
HOMES = ("device", "host", "disk")


class Wrapped(nn.Module):
    """A module of the database as two blocks, over inputs that are scaled by a trained parameter."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Unit(build()), Unit(build())])
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, args: Any, kwargs: Any) -> Any:
        scaled = pytree.tree_map(lambda t: t * self.scale if _is_float(t) else t, (args, kwargs))
        return [block(*scaled[0], **scaled[1]) for block in self.blocks]


class Unit(nn.Module):
    """One block: the module and a parameter, so that modules without any are units, too."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Linear(1, 1)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.inner(*args, **kwargs)
        return pytree.tree_map(lambda t: t * self.gain.weight.reshape(()) if _is_float(t) else t, result)


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.float32


def train(model: nn.Module, optimizer: torch.optim.Optimizer, call: Callable[[], Any]) -> list[torch.Tensor]:
    """Train some steps. Returns everything that can be compared."""
    seen = []
    for step in range(STEPS):
        torch.manual_seed(step)
        tensors = [t for t in pytree.tree_leaves(call()) if _is_float(t) and t.requires_grad]
        loss = sum((t.nan_to_num() * (i + 1)).square().mean() for i, t in enumerate(tensors) if t.numel())
        seen += [t.detach().clone() for t in tensors]
        if isinstance(loss, torch.Tensor):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(t.detach().clone() for t in model.state_dict().values() if isinstance(t, torch.Tensor))]


def compare(*args: Any, **kwargs: Any) -> str:
    """Return the verdict of plain against prepared on each tier, or that it took too long."""
    signal.signal(signal.SIGALRM, _stop)
    signal.alarm(CASE_S)
    try:
        return _compare(*args, **kwargs)
    except TooLongError as error:
        return f"too long: {error}"
    finally:
        signal.alarm(0)


def _compare(  # noqa: PLR0911
    build: Callable[[], nn.Module],
    call: Callable[[nn.Module], Any],
    make: Callable[[nn.Module], Any],
    units: Callable[[nn.Module], list[str]] | None = None,
) -> str:
    try:
        torch.manual_seed(0)
        plain = build()
        want = train(plain, make(plain), lambda: call(plain))
    except TooLongError:
        raise
    except Exception as error:
        return f"plain raises {type(error).__name__}"
    for home in HOMES:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = build()
            try:
                optimizer = make(model)
                for group in optimizer.param_groups:
                    group["fused"] = None
                named = None if units is None else units(model)
                _, plan = forced(model, optimizer, home, units=named, may_be_one=True)
                budget = outcore.Budget(disk=folder)
                with outcore.prepare(model, optimizer, plan=plan, budget=budget, units=named) as (model, prepared):
                    got = train(model, prepared, lambda: call(model))
            except TooLongError:
                raise
            except OutcoreError as error:
                return f"refused: {type(error).__name__}: {error}"
            except Exception as error:
                return f"RAW {home}: {type(error).__name__}: {error}"
            if list(Path(folder).iterdir()):
                return f"FILES LEFT {home}"
        same = len(want) == len(got) and all(_equal(a, b) for a, b in zip(want, got, strict=True))
        if not same:
            gaps = [
                float((a - b).abs().nan_to_num().max())
                for a, b in zip(want, got, strict=False)
                if _is_float(a) and a.shape == b.shape and a.numel()
            ]
            return f"DIFFERS {home}: by up to {max(gaps, default=0.0):.3g}"
    return "equal"


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))


# -- modules ----------------------------------------------------------------------------------------------------------


def modules() -> Iterator[tuple[str, str]]:
    """Each module of the database with each of its inputs: as two blocks, and as the whole model."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        if (
            info.is_lazy
            or torch.float32 not in info.dtypes
            or "quantiz" in info.module_cls.__module__
            or ".qat." in info.module_cls.__module__
        ):
            yield info.name, "left out: lazy, quantized or not for float32"
            continue
        try:
            inputs = info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True)
        except Exception as error:
            yield info.name, f"left out: its inputs raise {type(error).__name__}"
            continue
        for number, given in enumerate(inputs):
            if given.forward_input is None or number >= INPUTS:
                continue
            name = f"{info.name}[{number}] {given.desc}".strip()
            args, kwargs = given.forward_input.args, given.forward_input.kwargs
            fresh = [
                t.detach().clone() if isinstance(t, torch.Tensor) else t for t in pytree.tree_leaves((args, kwargs))
            ]
            spec = pytree.tree_structure((args, kwargs))

            def inputs_of(fresh: Any = fresh, spec: Any = spec) -> Any:
                return pytree.tree_unflatten([t.clone() if isinstance(t, torch.Tensor) else t for t in fresh], spec)

            def build(info: Any = info, given: Any = given) -> nn.Module:
                return info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)

            def adamw(model: nn.Module) -> torch.optim.Optimizer:
                return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

            def as_blocks(model: nn.Module, inputs_of: Any = inputs_of) -> Any:
                return model(*inputs_of())

            yield f"{name} as blocks", compare(lambda build=build: Wrapped(build), as_blocks, adamw)
            yield f"{name} as model", compare(lambda build=build: Whole(build()), as_blocks, adamw)


class Whole(nn.Module):
    """A model with the module and one parameter."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.5))

    def forward(self, args: Any, kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map(lambda t: t * self.scale if _is_float(t) else t, (args, kwargs))
        return self.inner(*args, **kwargs)


# -- optimizers -------------------------------------------------------------------------------------------------------

SUPPORTED = ("AdamW", "Adam", "SGD", "Adagrad")


def optimizers() -> Iterator[tuple[str, str]]:
    """Each configuration of each optimizer; unsupported ones must be refused by name."""
    from torch.testing._internal.common_optimizers import optim_db

    for info in optim_db:
        for given in info.optim_inputs_func("cpu"):
            kwargs = {k: v for k, v in given.kwargs.items() if k not in ("foreach", "fused")}
            name = f"{info.optim_cls.__name__} {given.desc}"

            def make(model: nn.Module, info: Any = info, kwargs: Any = kwargs) -> torch.optim.Optimizer:
                fused = (
                    {"fused": True}
                    if info.optim_cls.__name__ in SUPPORTED
                    and not kwargs.get("differentiable")
                    and not kwargs.get("capturable")
                    else {}
                )
                # A group for each: fused SGD raises where a group's parameters get first gradients in different steps.
                return info.optim_cls(model.parameters(), **{**kwargs, **fused})

            def call(model: nn.Module) -> Any:
                generator = torch.Generator().manual_seed(1)
                return model(torch.randn(5, 7, generator=generator))

            yield name, compare(_tower, call, make)


def _tower() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(7, 7), nn.Tanh()) for _ in range(3)])


class TooLongError(Exception):
    """One case took longer than it may."""


def _stop(*_: Any) -> None:
    raise TooLongError(f"no result after {CASE_S} s")


def timed(found: Iterator[tuple[str, str]], all_s: float) -> Iterator[tuple[str, str]]:
    """Begin no case after ``all_s``, and report progress on stderr."""
    start_s = time.monotonic()
    for number, (name, verdict) in enumerate(found, start=1):
        print(f"{number} {time.monotonic() - start_s:.0f} s {name}: {verdict[:150]}", file=sys.stderr, flush=True)
        yield name, verdict
        if time.monotonic() - start_s > all_s:
            print(f"stopped after {number} cases: the time is over", flush=True)
            return


def show(what: str, found: Iterator[tuple[str, str]]) -> bool:
    """Print counts, refusals by message, and what differs."""
    results = list(timed(found, LONGEST_S))
    kinds = collections.Counter(
        v.split(":")[0].split(" ")[0] + (" out" if v.startswith("left") else "") for _, v in results
    )
    print(f"## {what}: {len(results)}\n\n{dict(kinds)}\n")
    sentences: dict[str, list[str]] = {}
    for name, verdict in results:
        if verdict != "equal":
            sentences.setdefault(verdict[:400], []).append(name)
    for verdict, names in sorted(sentences.items()):
        print(f"- {verdict} ({len(names)}): {', '.join(names[:6])}{' ...' if len(names) > 6 else ''}")
    print(flush=True)
    return not any(v.startswith(("RAW", "DIFFERS", "FILES")) for _, v in results)


def main() -> int:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    wanted = sys.argv[1:] or ["modules", "optimizers"]
    suites = {"modules": modules, "optimizers": optimizers}
    return 0 if all([show(name, suites[name]()) for name in wanted]) else 1


if __name__ == "__main__":
    raise SystemExit(main())
