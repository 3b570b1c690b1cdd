"""One error, or a Ctrl-C, at any stage of a step is reported and never trained past, or costs only gradients."""

from __future__ import annotations

import functools
from contextlib import contextmanager

import pytest
import torch
from plans import forced, prepare_for_test

import outcore
from outcore.device.race import RaceChecker
from outcore.engine.activations import offloaded_call as away
from outcore.engine.values.parameter_values import let_masters_follow
from outcore.memory.disk_file import OsDiskIO
from outcore.order.attempts import Attempts
from outcore.planner.homes.pools import Comfort

from .rig import adamw, assert_same, batch, make, prepared, train

pytestmark = pytest.mark.filterwarnings("ignore:the weights of this:UserWarning")

STEPS = 2  # micro-batches of a step
COMFORT = Comfort(prefetch_depth=1, num_buckets=2, max_slots_host=2)
SETTINGS = {
    "host": {},
    "disk": {},
    "host early": {"early": True},
    "disk early": {"early": True},
    "host staged": {"share": 1.0},
    "host in pieces": {"pieces": 2, "policy": "select", "activations": "disk"},
}
STAGES = [
    *(("host", name) for name in ("gradients of", "accumulate", "update", "fetch")),
    *(("disk", name) for name in ("write gradients of", "read gradients of", "read states of", "write states of")),
    *(("disk", name) for name in ("accumulate", "update", "write weights of", "read weights of", "fetch")),
    *(("host early", name) for name in ("update early", "accumulate")),
    *(("disk early", name) for name in ("update early", "read states of", "write states of", "write weights of")),
    *(("host in pieces", name) for name in ("activations of", "write activations of", "bring activations of")),
    *(("host staged", name) for name in ("stage", "update", "states of", "new weights of")),
]


@pytest.fixture(autouse=True)
def _everything_leaves(monkeypatch):
    monkeypatch.setattr(away, "SMALL_BYTES", 64)


@contextmanager
def special(setting, folder, prepare=outcore.prepare):
    """Yield a model whose steps have two micro-batches, after one good step."""
    model = make().requires_grad_()  # frozen weights have no second home
    optimizer, more = adamw(model), SETTINGS[setting]
    early = more.get("early", False)
    _, plan = forced(model, optimizer, setting.split()[0], comfort=COMFORT, steps=STEPS, **more)
    options = {"plan": plan, "accumulation_steps": STEPS, "clipping": not early}
    options |= {"micro_batches_in_unit": more.get("pieces")}
    with prepare(model, optimizer, budget=outcore.Budget(disk=str(folder)), **options) as (model, optimizer):
        step(model, optimizer, 0)
        optimizer.engine.device.synchronize()
        yield model, optimizer


def step(model, optimizer, seed):
    torch.manual_seed(seed)
    for i in range(STEPS):
        model.loss(batch(seed + i)).backward()
    optimizer.step()
    optimizer.zero_grad()


def fail_once(monkeypatch, optimizer, name, error):
    """Let the first operation of that name raise, like a drive that recovers; return the list of operations hit."""
    submit, hit = optimizer.engine.device.submit, []

    def submit_and_count(lane, what, given, **options):
        def work():
            if not hit and what == name:
                hit.append(what)
                raise error
            return given()

        return submit(lane, what, work, **options)

    monkeypatch.setattr(optimizer.engine.device, "submit", submit_and_count)
    return hit


@pytest.mark.parametrize(("setting", "name"), STAGES)
def test_one_error_at_any_stage_is_said_and_training_never_goes_on(setting, name, tmp_path, monkeypatch):
    name = f"{name} blocks.1"
    with special(setting, tmp_path) as (model, optimizer):
        if setting.endswith("early"):  # make every attempt, whatever the rates
            monkeypatch.setattr("outcore.order.attempts.Attempts.wants_next", lambda _: True)
            monkeypatch.setattr("outcore.engine.updates.streamed._EarlyAttempt.is_due", lambda _: True)
            monkeypatch.setattr("outcore.engine.updates.streamed._EarlyAttempt.settle", lambda _: True)
        hit = fail_once(monkeypatch, optimizer, name, ZeroDivisionError("injected"))

        def go_on():
            for seed in range(1, 5):
                step(model, optimizer, seed)
                optimizer.engine.device.synchronize()

        with pytest.raises(outcore.OutcoreError, match=rf"'{name}' on lane \w+ \(.+\) .* ZeroDivisionError: injected"):
            go_on()
        assert hit
        for _ in range(2):
            optimizer.zero_grad()
            with pytest.raises(outcore.OutcoreError):
                go_on()


READS = {
    "evaluation": lambda model, _: model.eval().loss(batch()),
    "gathered": lambda model, _: outcore.gathered(model).__enter__(),
    "state_dict": lambda model, _: model.state_dict(),
    "optimizer.state_dict": lambda _, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), MemoryError("injected")])
def test_a_drive_that_fails_while_somebody_looks(name, error, tmp_path, monkeypatch):
    def fail(*_):
        raise error

    model = make()
    with prepared(model, adamw(model), "disk", tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        optimizer.engine.device.synchronize()  # else the error hits an update that is under way
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(OsDiskIO, "pread", fail)
            match = r"(blocks\.\d|root) (weights|states|gradients)|injected"  # the last update may still read
            with pytest.raises((outcore.OutcoreError, MemoryError), match=match):
                READS[name](model, optimizer)
    assert list(tmp_path.iterdir()) == []


# Ctrl-C in the calling thread.


def looks(model, optimizer):
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()["state"]


@pytest.mark.parametrize("setting", SETTINGS)
def test_an_interrupt_anywhere_in_forward_and_backward_costs_only_the_gradients(setting, tmp_path, monkeypatch):
    with special(setting, tmp_path) as (model, optimizer):
        for seed in (1, 2):
            step(model, optimizer, seed)
        want = looks(model, optimizer)
    points = ("submit", "compute", "mark")
    number = 0
    while number >= 0:
        with special(setting, tmp_path) as (model, optimizer):
            with monkeypatch.context() as patch:
                calls = interrupt(patch, optimizer.engine.device, points, number)
                try:
                    for i in range(STEPS):
                        model.loss(batch(7 + i)).backward()
                except KeyboardInterrupt:
                    number += 31 if "pieces" in setting else 11  # odd: alternates before and after a call
                else:
                    assert len(calls) <= number
                    number = -1
            optimizer.zero_grad()
            for seed in (1, 2):
                step(model, optimizer, seed)
            assert_same(want, looks(model, optimizer))


def interrupt(patch, owner, names, number):
    """Raise at the n-th call of any of these methods: before it if ``number`` is odd, else after it."""
    calls = []

    def wrapped(real):
        def call(*args, **options):
            calls.append(args)
            if len(calls) == number + 1 and number % 2:
                raise KeyboardInterrupt
            result = real(*args, **options)
            if len(calls) == number + 1:
                raise KeyboardInterrupt
            return result

        return call

    for name in names:
        patch.setattr(owner, name, wrapped(getattr(owner, name)))
    return calls


@pytest.mark.parametrize("setting", ["host early", "disk early"])
def test_after_an_interrupt_of_an_early_update_states_can_be_loaded(setting, tmp_path, monkeypatch):
    """Operations of the update are still under way, and nothing has their handles."""
    prepare = functools.partial(prepare_for_test, race_checker=RaceChecker())
    with special(setting, tmp_path, prepare) as (model, optimizer):
        saved = {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()

        def begin_again():
            optimizer.zero_grad()
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            for unit in optimizer.engine.units:  # else masters follow in step(), and this step has no early update
                let_masters_follow(unit, optimizer.engine.access)

        for seed in (1, 2):
            step(model, optimizer, seed)
        want = looks(model, optimizer)
        submit = optimizer.engine.device.submit

        def interrupted(lane, what, *args, **options):
            handle = submit(lane, what, *args, **options)
            if what == stage:
                raise KeyboardInterrupt
            return handle

        # The unit is tried however long earlier steps took.
        monkeypatch.setattr(Attempts, "wants_next", lambda _: True)
        for stage in ("read states of blocks.1", "update early blocks.1", "write states of blocks.1"):
            begin_again()
            with monkeypatch.context() as patch:
                patch.setattr(optimizer.engine.device, "submit", interrupted)
                if stage.split()[0] == "update" or setting == "disk early":
                    with pytest.raises(KeyboardInterrupt):
                        step(model, optimizer, 1)
            begin_again()
            for seed in (1, 2):
                step(model, optimizer, seed)
            assert_same(want, looks(model, optimizer))


@pytest.mark.parametrize("setting", SETTINGS)
def test_after_an_interrupt_in_step_only_closing_is_left(setting, tmp_path, monkeypatch):
    with special(setting, tmp_path) as (model, optimizer):
        with monkeypatch.context() as patch:
            for i in range(STEPS):
                model.loss(batch(i)).backward()
            calls = interrupt(patch, optimizer.engine.device, ("submit", "mark"), 2)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
            assert calls
        for call in (
            lambda: model.loss(batch()),
            lambda: model.eval().loss(batch()),
            optimizer.step,
            model.state_dict,
            optimizer.state_dict,
            lambda: outcore.save_pretrained(model, tmp_path / "saved"),
            lambda: outcore.gathered(model).__enter__(),
        ):
            with pytest.raises(outcore.OutcoreError, match=r"the last one was cut short.* by KeyboardInterrupt"):
                call()


@pytest.mark.parametrize("number", [0, 1, 4, 9])
def test_after_an_interrupt_in_a_state_dict_everything_goes_on(number, tmp_path, monkeypatch):
    with special("disk", tmp_path) as (model, optimizer):
        step(model, optimizer, 1)
        want = looks(model, optimizer)
    with special("disk", tmp_path) as (model, optimizer):
        with monkeypatch.context() as patch:
            interrupt(patch, optimizer.engine.access, ("read_weight",), number)
            with pytest.raises(KeyboardInterrupt):
                model.state_dict()
        step(model, optimizer, 1)
        assert_same(want, looks(model, optimizer))
