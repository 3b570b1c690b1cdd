"""The race checker is not blind: if any one of the engine's waits is left out, it finds the race.

A wait that can be dropped unnoticed is either not needed or guards bytes that no operation declares; both are bugs.
Each wait is also needed: without it, and with a late lane, results are wrong.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import one_arithmetic
import pytest
import torch
from plans import prepare_for_test
from torch import nn

from outcore.core.errors import DiskError, OutcoreError, RaceError, UnsupportedError
from outcore.device.faults import Faults
from outcore.device.race import RaceChecker

from . import zoo
from .cases import Case, run, run_checked, spoil_gradients
from .loops import Backward, Record, Setting, assert_equal, moments, plain_backward, plain_loop

STEPS = 3
SCENARIOS = [
    # These three come first, since only they show that some waits are missing.
    Case("llama", "mixed", Setting(steps=STEPS), offset=2),
    Case("llama", "mixed", Setting(steps=STEPS), share=1.0, offset=7),
    Case("patchwork", "resident", Setting(clipping="off", steps=STEPS), policy="keep"),
    Case("patchwork", "mixed", Setting(micro_batches=3, steps=STEPS), policy="mixed", depth=2),
    Case("patchwork", "disk", Setting(micro_batches=3, steps=STEPS), depth=1),
    Case("patchwork", "host", Setting(precision="bf16", steps=STEPS), depth=2),
    Case("patchwork", "device", Setting(precision="bf16", micro_batches=3, steps=STEPS), depth=0),
    Case("patchwork", "mixed", Setting(precision="bf16", micro_batches=3, steps=STEPS), offset=7, depth=1),
    Case("llama", "disk", Setting(precision="bf16", micro_batches=3, steps=STEPS), depth=2),
    Case("patchwork", "mixed", Setting(clipping="off", steps=STEPS), promised=True, early=True, depth=1),
    Case("llama", "host", Setting(clipping="on", steps=STEPS), promised=True, early=True, depth=1),
    Case("patchwork", "host", Setting(precision="bf16", steps=STEPS), share=1.0, depth=1),
    Case("patchwork", "resident", Setting(steps=STEPS), share=0.5, depth=1),
    Case("llama", "host", Setting(clipping="off", steps=STEPS), share=1.0, depth=1, is_minimal=True),
    Case("patchwork", "mixed", Setting(clipping="off", steps=STEPS), offset=4),
    Case("llama", "device", Setting(micro_batches=2, steps=STEPS), policy="keep", activations="host", is_minimal=True),
    Case("llama", "device", Setting(micro_batches=2, steps=STEPS), policy="keep", activations="disk"),
    # With a clip factor, an accelerator's updates come after it, and so after all gradients.
    *([Case("llama", "disk", Setting(clipping="off", steps=STEPS))] * (zoo.DEVICE != "cpu")),
]
LEAST_LABELS = 10


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Case]]:
    """Return the scenarios that use each label."""
    found: dict[str, list[Case]] = {}
    for case in SCENARIOS:
        for label in run_checked(case, tmp_path_factory.mktemp("labels"), is_nosy=True).labels:
            found.setdefault(label, []).append(case)
    return found


def test_there_are_enough_waits_to_drop(users: dict[str, list[Case]]) -> None:
    assert len(users) >= LEAST_LABELS, sorted(users)


IMPLIED = {"states read", "activations written", "next states read", "next weights read"}
"""Activations come back from host memory after the host waited for the copy that took them there. Activations that are
read from disk have lost their slot to a later call, whose own write follows theirs on one lane.

Each operation that writes states at home follows their readers in any case: it is on the reader's lane (an update on
the host after an early one), or it writes results of what was read (states that pass through the device, or a slot).
Only a user who writes states has to wait; see the last test. Only a save reads second homes; see
``tests/checkpoint/test_checkpoint_parity.py``."""

UNDECLARED = {"clip factor copied", "clip factor made"}
"""Waits for memory unknown to the race checker. Accelerators have them; results on the simulated GPU show why."""


def test_no_wait_can_be_dropped_unnoticed(users: dict[str, list[Case]], tmp_path: Path) -> None:
    labels = sorted(users.keys() - IMPLIED - UNDECLARED)
    unnoticed = {label: verdicts for label in labels if (verdicts := _verdicts(label, users[label], tmp_path))}
    assert not unnoticed, "\n".join(f"'{label}': {verdicts}" for label, verdicts in unnoticed.items())


def _verdicts(label: str, cases: list[Case], folder: Path) -> dict[str, str]:
    """Return the outcome of each scenario if none of them met the race; else nothing."""
    verdicts = {}
    for case, is_nosy in itertools.product(cases, (True, False)):  # looking at states waits for their writers
        try:
            run_checked(case, folder, is_nosy=is_nosy, skip=frozenset({label}))
        except RaceError:
            return {}
        except OutcoreError as error:
            verdicts[str(case)] = f"{type(error).__name__}: {error}"
        else:
            verdicts[str(case)] = "no race found"
    return verdicts


@dataclass(frozen=True)
class Shown:
    """How results show that a wait is missing."""

    case: Case
    lane: str
    """The lane that is late."""
    looks: str = ""
    """What else the loop does: evaluate after backward, read states after a step, or spoil its gradients there."""
    poison: bool = False
    on_streams: bool = False
    """Whether it shows only where compute is as late as lanes are."""


def _setting(**more: Any) -> Setting:
    return Setting(steps=2, **more)


RESIDENT = Case("patchwork", "resident", _setting(clipping="off"), policy="keep")
SHARE = Case("patchwork", "resident", _setting(), share=0.5)
HOST = Case("llama", "host", _setting(clipping="off"))
PATCHES = Case("patchwork", "host", _setting(precision="bf16"), depth=2)
DISK = Case("llama", "disk", _setting(clipping="off"))
SUMS = Case("llama", "disk", _setting(micro_batches=2))
MIXED_SHARE = Case("llama", "mixed", _setting(), share=1.0, offset=7)
AWAY = Case("llama", "device", _setting(micro_batches=2), policy="keep", activations="host", is_minimal=True)
ONE_SLOT = Case("llama", "device", _setting(micro_batches=2), policy="keep", activations="disk", is_minimal=True)
SHOWN = {
    "activation slot free": Shown(ONE_SLOT, "disk_write", poison=True),
    "activations at hand": Shown(ONE_SLOT, "weights_read"),
    "activations came": Shown(AWAY, "h2d"),
    "activations left": Shown(AWAY, "d2h", on_streams=True),
    "activations made": Shown(AWAY, "compute", "evaluates", on_streams=True),
    "bucket free": Shown(RESIDENT, "d2h"),
    "clip factor copied": Shown(Case("llama", "host", _setting()), "d2h", on_streams=True),
    "clip factor made": Shown(SHARE, "compute", "evaluates", poison=True, on_streams=True),
    "gradient slot free": Shown(DISK, "update"),
    "gradients at hand": Shown(DISK, "d2h"),
    "gradients fetched": Shown(MIXED_SHARE, "d2h"),
    "gradients kept": Shown(DISK, "d2h", poison=True),
    "gradients landed": Shown(SUMS, "d2h"),
    "gradients made": Shown(RESIDENT, "compute", on_streams=True),
    "gradients read": Shown(RESIDENT, "update", "spoils"),
    "gradients written": Shown(RESIDENT, "d2h"),
    "landing free": Shown(DISK, "update", poison=True),
    "new weights slot free": Shown(RESIDENT, "write_back"),
    "slot free": Shown(PATCHES, "compute", "evaluates", on_streams=True),
    "slot of activations free": Shown(AWAY, "compute", on_streams=True),
    "staged": Shown(SHARE, "states_h2d"),
    "staging free": Shown(SHARE, "device_update"),
    "state slot free": Shown(DISK, "states_write"),
    "states fetched": Shown(MIXED_SHARE, "states_read"),
    "states updated": Shown(MIXED_SHARE, "update"),
    "states written": Shown(HOST, "update", "reads states"),
    "updated on the device": Shown(SHARE, "device_update"),
    "weights fetched": Shown(PATCHES, "h2d", poison=True),
    "weights read": Shown(HOST, "h2d", "evaluates", poison=True, on_streams=True),
    "weights staged": Shown(MIXED_SHARE, "weights_read"),
    "weights updated on the host": Shown(RESIDENT, "update"),
    "weights used": Shown(RESIDENT, "compute", "evaluates", on_streams=True),
    "weights written": Shown(RESIDENT, "write_back"),
}
UNSEEN = {
    # The next call gets the home only if no backward can come to the previous one: nothing needs what is still read.
    "activations read": Shown(AWAY, "h2d"),
    # An update in a slot that is still being written to disk is written there once more, on the same lane.
    "kept states written": Shown(SUMS, "states_write"),
}
"""Waits whose absence no result shows, and why. The same holds for ``IMPLIED``; see the last test."""
HIDDEN = {"clip factor made", "gradients made"}
"""Waits whose absence is hidden if norms wait for the device."""
LATE_S = (0.004, 0.02, 0.08)


def test_each_wait_is_shown_to_be_needed(users: dict[str, list[Case]]) -> None:
    assert users.keys() <= SHOWN.keys() | UNSEEN.keys() | IMPLIED


@pytest.mark.parametrize("label", [name for name, how in SHOWN.items() if how.on_streams == (zoo.DEVICE != "cpu")])
def test_wrong_by_results_without(label: str, tmp_path: Path) -> None:
    """The later the lane, the surer the error."""
    if one_arithmetic.is_installed() and label in HIDDEN:
        pytest.skip("norms and updates wait for the device here, and all behind them with it")
    how = SHOWN[label]
    for late_s in LATE_S:
        try:
            _train(how, tmp_path, skip=frozenset({label}), delays={how.lane: late_s}, poison=how.poison)
        except (AssertionError, UnsupportedError, DiskError) as error:
            seen = "recompute gave another result", "are not what was written there"  # the disk tier's sums tell, too
            assert isinstance(error, AssertionError) or any(said in str(error) for said in seen)
            return
    pytest.fail("all results are those of the plain loop")


@pytest.mark.parametrize("label", UNSEEN)
def test_no_result_tells(label: str, tmp_path: Path) -> None:
    how = UNSEEN[label]
    _train(how, tmp_path, skip=frozenset({label}), delays={how.lane: LATE_S[0]})


def _train(how: Shown, folder: Path, **faults: Any) -> None:
    """Train and compare with the plain loop."""
    read: dict[str, dict[str, torch.Tensor]] = {}

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, faults=Faults(**faults), **options)
        if how.looks == "spoils":
            prepared[1].register_step_post_hook(spoil_gradients)
        return prepared

    def read_states(model: nn.Module, optimizer: Any, _: int) -> None:
        read.update(moments(optimizer, {id(p): n for n, p in model.named_parameters()}))

    backward: Backward = _and_evaluate if how.looks == "evaluates" else plain_backward
    more = {"after_step": read_states} if how.looks == "reads states" else {}
    got = run(how.case, folder, prepare=prepare, backward=backward, **more)
    got.moments = read or got.moments
    assert_equal(plain_loop(how.case.name, how.case.setting, backward=backward), got)


def _and_evaluate(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    loss = plain_backward(model, batch, micro_batches)
    model.eval()
    with torch.no_grad():
        again = zoo.loss(model, batch)
    model.train()
    return torch.stack([loss.detach(), again])


def test_who_writes_states_waits_for_an_early_update_that_reads_them(tmp_path: Path) -> None:
    case = Case("llama", "host", Setting(clipping="off", steps=STEPS), promised=True, early=True)
    dropped = {"skip": frozenset({"states read"}), "delays": {"update": 0.01}}
    with pytest.raises(RaceError, match="update early"):
        _with_states_written(case, tmp_path, RaceChecker(), **dropped)
    # No result can show it: a state that is written meanwhile invalidates the early update.
    assert_equal(plain_loop(case.name, case.setting), _with_states_written(case, tmp_path, None, **dropped))


def _with_states_written(case: Case, folder: Path, checker: RaceChecker | None, **faults: Any) -> Record:
    """Write all states, unchanged, between backward and step."""
    optimizers: list[Any] = []

    def prepare(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
        prepared = prepare_for_test(model, optimizer, faults=Faults(**faults), race_checker=checker, **options)
        optimizers.append(prepared[1])
        return prepared

    def backward(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
        loss = plain_backward(model, batch, micro_batches)
        for state in optimizers[0].state.values():
            if "exp_avg" in state:
                state["exp_avg"].mul_(1.0)
        return loss

    return run(case, folder, prepare=prepare, backward=backward)
