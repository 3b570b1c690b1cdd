"""The demo tells the truth: its comparison can fail, its loop is the example, and it leaves nothing behind."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import nursery
import pytest
import torch
from rich.console import Console

import outcore
from outcore.command.demo import demo, plain_loop
from outcore.command.demo import size as demo_size
from outcore.core.errors import ConfigError
from outcore.memory.machine import Others

from .conftest import Run, replaced

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "plain_loop.py"
COMMAND = [sys.executable, "-c", "from outcore.command.main import main; main()", "demo"]
# The same shape with smaller sizes: otherwise writing the sample alone takes seconds. Six layers also fit a device
# budget of a tenth in fp32, which the demo takes on CPUs without AVX-512.
SIZES = "import outcore.command.demo.plain_loop as p; p.HIDDEN, p.LAYERS, p.BATCH_SIZE, p.SEQUENCE = 64, 6, 2, 33; "
SIZES += "import outcore.command.demo.demo as d; d.SAMPLE_TOKENS = 9; "
SMALL = [*COMMAND[:2], SIZES + COMMAND[2], COMMAND[3]]


@pytest.fixture
def small(monkeypatch) -> None:
    for name, value in {"HIDDEN": 64, "LAYERS": 2, "BATCH_SIZE": 2, "SEQUENCE": 33}.items():
        monkeypatch.setattr(plain_loop, name, value)


@pytest.fixture
def plain_engine(small, monkeypatch) -> None:
    """The plain loop in place of outcore."""
    monkeypatch.setattr(demo, "_prepared", lambda device, folder, size: nullcontext((plain_loop.build(seed=0), None)))
    monkeypatch.setattr(demo, "_streamed", lambda model, optimizer, *rest: plain_loop.train(model, *rest))
    monkeypatch.setattr(outcore, "named_tensors", lambda model: model.named_parameters(), raising=False)


def text() -> torch.Tensor:
    return torch.randint(256, (5003,), generator=torch.Generator().manual_seed(3))


def test_the_example_is_the_demos_loop():
    assert EXAMPLE.read_text() == Path(plain_loop.__file__).read_text()


def test_the_plain_loop_repeats_itself(small):
    runs = [
        list(plain_loop.train(plain_loop.build(seed=1), plain_loop.batches(text(), seed=1), 3, 2)) for _ in range(2)
    ]
    assert runs[0] == runs[1]


def test_the_plain_loop_learns(small):
    data = text() % 3
    losses = [loss for loss, _ in plain_loop.train(plain_loop.build(seed=1), plain_loop.batches(data, seed=1), 30)]
    assert losses[-1] < losses[0] / 2


def test_equal_runs_are_equal(plain_engine, tmp_path):
    is_equal, said, _ = demo._compare(text(), tmp_path, {})
    assert is_equal
    assert said.startswith("Yes, bit for bit.")


def test_one_wrong_bit_in_a_weight_is_seen(plain_engine, monkeypatch, tmp_path):
    def named_tensors(model) -> Iterator[tuple[str, torch.Tensor]]:
        for i, (name, tensor) in enumerate(model.named_parameters()):
            changed = tensor.detach().clone()
            if i == 7:
                changed.view(-1).view(torch.int16)[5] ^= 1
            yield name, changed

    monkeypatch.setattr(outcore, "named_tensors", named_tensors, raising=False)
    is_equal, said, _ = demo._compare(text(), tmp_path, {})
    tensors = len(list(plain_loop.build(seed=0).parameters()))
    assert not is_equal
    assert said.startswith("NO.")
    assert said.endswith(f"{tensors - 1} of {tensors} parameters.")


def test_a_missing_tensor_is_seen(plain_engine, monkeypatch, tmp_path):
    monkeypatch.setattr(outcore, "named_tensors", lambda model: list(model.named_parameters())[1:], raising=False)
    assert not demo._compare(text(), tmp_path, {})[0]


@pytest.mark.parametrize("column", [0, 1])
def test_another_loss_or_norm_is_seen(plain_engine, monkeypatch, tmp_path, column):
    def streamed(model, optimizer, *rest) -> Iterator[tuple[float, float]]:
        for step, values in enumerate(plain_loop.train(model, *rest)):
            yield tuple(v * (1 + 1e-15) if (step, i) == (2, column) else v for i, v in enumerate(values))

    monkeypatch.setattr(demo, "_streamed", streamed)
    assert not demo._compare(text(), tmp_path, {})[0]


def test_demo_uses_all_tiers_and_leaves_nothing(tmp_path):
    done = nursery.run([*SMALL, "--steps", "3", "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for part in ("step 3/3", "before", "after", "device", "host", "disk", "Yes, bit for bit.", "6 of 6 losses"):
        assert part in done.stdout
    before, _, _ = done.stdout.partition("step 1/3")
    for part in ("parameters", "of training state", "Budgets: device", "Plan"):
        assert part in before, "what will run is said before it runs"
    assert re.search(r"^Peak memory of the process, .* included: [\d.]+ [MG]iB$", done.stdout, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("step_s", "number"), [(0.0001, 17), (0.1, 4), (100.0, 0)])
def test_the_largest_that_fits_into_three_minutes(monkeypatch, tmp_path, step_s, number):
    """Each size takes half as long again as the size before it."""
    seconds = {shape: step_s * 1.5**i for i, shape in enumerate(demo_size._SHAPES)}
    predicted = lambda shape, device, folder: demo_size.FittingModel(demo_size._sizes(shape), seconds[shape])  # noqa: E731
    monkeypatch.setattr(demo_size, "_predicted", predicted)
    monkeypatch.setattr(demo_size, "host_free_bytes", lambda: 2**50)
    found = demo_size.largest(250, None, tmp_path)
    assert found.sizes == demo_size._sizes(demo_size._SHAPES[number])
    assert number in (0, 17) or found.run_s(250) <= demo_size.MOST_S < 1.5 * found.run_s(250)


def test_a_size_has_a_time(monkeypatch, tmp_path):
    found = demo_size._predicted((192, 6), "cpu", tmp_path, hardware="rtx-4090")
    assert found.sizes["hidden_size"] == 192
    assert 0 < found.step_s < found.run_s(10)
    with pytest.raises(ConfigError, match="expected a machine whose speed is known"):
        demo_size._predicted((192, 6), "cpu", tmp_path)


def test_speeds_are_the_medians_of_both_loops_and_their_ratio():
    def steps() -> Iterator[tuple[float, float]]:
        for seconds in (0.3, 0.01, 0.01):
            time.sleep(seconds)
            yield seconds, 1.0

    got, median_s = demo._timed(steps())
    assert [loss for loss, _ in got] == [0.3, 0.01, 0.01]
    assert 0.01 <= median_s < 0.3
    assert demo._speeds(0.5, 0.75) == (
        "Median of these steps: plain loop 0.500 s (2,048 tokens/s), streamed 0.750 s (1,365 tokens/s), "
        "1.50 times as long."
    )


def test_a_busy_machine_is_said(capsys, monkeypatch):
    demo._say_busy(Console(), Others())
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(Others, "busy", lambda _: "others kept 1.6 of 2 cores busy")
    demo._say_busy(Console(), Others())
    assert "This machine is busy: others kept 1.6 of 2 cores busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value"),
    [("--folder", "a_file"), ("--folder", "/proc"), ("--device", "cuda:77"), ("--device", "toaster")],
)
def test_a_wrong_choice_is_one_message_and_2(command: Run, tmp_path, monkeypatch, option, value):
    (tmp_path / "a_file").write_text("x")
    monkeypatch.chdir(tmp_path)
    done = command(*replaced("demo", "--folder", tmp_path, "--steps", 1, option, value))
    assert done.status == 2, done.err
    assert done.err.startswith("outcore: ")
    assert value in done.err
    assert "Traceback" not in done.err
    assert [p.name for p in tmp_path.iterdir()] == ["a_file"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_demo_leaves_nothing(tmp_path, number):
    command = [*COMMAND, "--steps", "100000", "--folder", str(tmp_path)]
    process = nursery.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=1)
    try:
        for line in process.stdout:
            if line.startswith("step 1/"):
                break
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 128 + number
    assert "Traceback" not in errors
    assert list(tmp_path.iterdir()) == []
