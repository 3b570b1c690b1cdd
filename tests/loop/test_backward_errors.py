"""A backward that ends in an exception: nothing trains on part of a gradient, and everything after it is as usual."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import outcore

from .rig import KINDS, Block, Tower, adamw, assert_same, batch, make, prepared, same, seen, tower_on, train

KIND = pytest.mark.parametrize("kind", KINDS)
SENTENCE = r"backward ended in an exception; call optimizer.zero_grad\(\) first"


class Bomb(torch.autograd.Function):
    """Raises in backward while it is armed."""

    is_armed = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Bomb.is_armed:
            raise ZeroDivisionError("injected")
        return grad


class Mined(Block):
    def forward(self, x):
        return super().forward(Bomb.apply(x))


class MinedTower(Tower):
    """Has the bomb between two blocks."""

    def forward(self, ids):
        x = self.blocks[0](self.embed(ids))
        for block in self.blocks[1:]:
            x = block(Bomb.apply(x))
        return self.head(x)


BUILDS = {"inside a block": lambda: Tower(Mined), "between blocks": MinedTower}


def explode(model, seed):
    Bomb.is_armed = True
    with pytest.raises(ZeroDivisionError):
        model.loss(batch(seed)).backward()
    Bomb.is_armed = False


@pytest.mark.pairs
@KIND
@pytest.mark.parametrize("where", BUILDS)
@pytest.mark.parametrize("before", [0, 1])
def test_zeroed_afterwards_all_goes_on(kind, where, before, tmp_path):
    def drive(model, optimizer):
        losses = train(model, optimizer, 1)
        for seed in range(3):
            for _ in range(before):
                model.loss(batch(7)).backward()
            explode(model, seed)
            optimizer.zero_grad()
            optimizer.step()  # there is nothing to do
            losses += train(model, optimizer, 1, seed=seed)
        return losses

    same(drive, kind, tmp_path, build=BUILDS[where])


def partly(before):
    def drive(model, optimizer):
        train(model, optimizer, 1)  # so that all calls keep what they save
        for seed in range(before):
            model.loss(batch(seed)).backward()
        explode(model, 1)
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        return grads, train(model, optimizer)

    return drive


@pytest.mark.pairs
@KIND
@pytest.mark.parametrize("where", BUILDS)
@pytest.mark.parametrize("before", [0, 1])
def test_not_zeroed_it_is_refused(kind, where, before, tmp_path):
    if kind == "plain":  # autograd's accumulated gradients stay, as in a plain loop
        same(partly(before), kind, tmp_path, build=BUILDS[where])
        return
    model = make(BUILDS[where])
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        for _ in range(before):
            model.loss(batch(7)).backward()
        explode(model, 1)
        weights = {n: t.clone() for n, t in model.state_dict().items()}
        for use in (
            optimizer.step,
            lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda: model.head.weight.grad.sum(),
            lambda: model.head.weight.grad.mul_(2),
            lambda: model.loss(batch(2)).backward(),
            optimizer.step,
        ):
            with pytest.raises(outcore.UnsupportedError, match=SENTENCE):
                use()
        assert_same(weights, dict(model.state_dict()))
        optimizer.zero_grad()
        train(model, optimizer, 1)


def test_an_exception_that_is_kept_does_not_keep_the_pass(tmp_path):
    """Notebooks keep exceptions, whose tracebacks keep everything alive."""
    kept = []

    def drive(model, optimizer):
        Bomb.is_armed = True
        try:
            model.loss(batch()).backward()
        except ZeroDivisionError as error:
            kept.append(error)
        Bomb.is_armed = False
        optimizer.zero_grad()
        return train(model, optimizer)

    same(drive, "host", tmp_path, build=MinedTower)


# Between any two statements of the runtime.

PACKAGE = Path(outcore.__file__).parent
FILES = {str(path) for room in ("engine", "device", "order") for path in (PACKAGE / room).rglob("*.py")}
SETTINGS = {"host": {}, "disk": {}, "device": {}, "promised": {"accumulation_steps": 2}, "keep": {"policy": "keep"}}
POINTS = 9


class Injection:
    """Raises before the n-th line that the calling thread, or autograd's in ``walk``, runs in the runtime."""

    def __init__(self, number=-1, error=None):
        self.number, self.error, self.count = number, error, 0
        self.reached = set()

    def __enter__(self):
        self.before = sys.gettrace()  # the tracer of a coverage tool, if one runs
        sys.settrace(self.call)
        self.is_on = True
        return self

    def __exit__(self, *_):
        self.is_on = False
        sys.settrace(self.before)

    def walk(self, loss):
        loss.register_hook(lambda _: sys.settrace(self.call))
        loss.backward()

    def call(self, frame, event, _):
        return self.line if self.is_on and frame.f_code.co_filename in FILES else None

    def line(self, frame, event, _):
        if event == "line":
            self.reached.add(Path(frame.f_code.co_filename).stem)
            self.count += 1
            if self.count == self.number + 1:
                raise self.error
        return self.line


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        *(("host", KeyboardInterrupt), ("disk", KeyboardInterrupt), ("promised", KeyboardInterrupt)),
        *(("disk", torch.OutOfMemoryError), ("device", torch.OutOfMemoryError), ("keep", torch.OutOfMemoryError)),
    ],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # from calls by Python itself
def test_an_error_at_any_statement_costs_only_the_gradients(setting, error, tmp_path):
    kind, options = setting if setting in KINDS else "disk", SETTINGS[setting]
    with tower_on(kind, tmp_path, **options) as (model, optimizer):
        train(model, optimizer, 1)
        first = {n: t.clone() for n, t in model.state_dict().items()}, optimizer.state_dict()

        def begin_again():
            model.load_state_dict(first[0])
            optimizer.load_state_dict(first[1])
            torch.manual_seed(3)

        def run(injection):
            for i in range(2):
                injection.walk(model.loss(batch(i)))

        begin_again()
        want = seen(train(model, optimizer, 2), model, optimizer)
        with Injection() as counting:
            run(counting)
        optimizer.zero_grad()
        reached = {"call", "device", "passes", "lanes", "structure", "views", "streamed_weights", "live_port"}
        assert counting.reached >= reached
        assert counting.count > 3000
        stride = counting.count // POINTS
        offset = 0 if error is KeyboardInterrupt else stride // 2
        hits = 0
        for number in range(offset, counting.count, stride):
            with suppress(error), Injection(number, error("injected")) as injection:
                run(injection)
                hits -= 1  # the error was raised in a function that Python calls by itself, and was lost
            hits += 1
            optimizer.zero_grad()
            begin_again()
            assert_same(want, seen(train(model, optimizer, 2), model, optimizer), f"line {number}")
        assert hits >= POINTS - 2
