"""Tests marked ``gpu`` on a CUDA device made of threads: in their own processes, since it must load before torch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import nursery
import pytest
import torch

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER))
import simulator  # noqa: E402

TESTS = FOLDER.parent
GPU = TESTS / "gpu"
LOOP = [
    TESTS / "loop" / f"test_{name}.py"
    for name in (
        *("presence", "recompute", "gradients", "select", "activations", "in_pieces", "lent", "wrapped", "edits"),
        "nothing_stays",
    )
]
BLOCKS = TESTS / "probe" / "test_blocks.py"
SIDE_BY_SIDE = 2
# One or two of the cases that differ in what does not concern a device (host lanes, micro-batches, dtypes). The
# rehearsal of ``benchmarks/gpu.sh`` runs the others.
ENGINE = (
    "test_delays_on_each_lane and early and (None or H2D or D2H or WRITE_BACK) or test_updates_inside and -1- or "
    "test_first_loss and host or test_states_on and not dtype0 and not dtype2 or test_states_that and dtype1 or "
    "test_overlap_off or test_three_steps or test_a_recompute or test_device_memory or test_where_everything or "
    "test_factors_are"
)
PARITY = (
    "test_all_lanes_late and not patchwork-disk and not llama-device and not gpt2-resident or "
    "test_skipped_frozen_and_shared_parts and patchwork or by_results_without or test_the_ties_that_have_a_code"
)
# A new run, one that stops and resumes, adapters, an evaluation, a scaler: each through the user's calls. And saves of
# weights on the device.
PROGRAMS = (
    "test_trainer or test_sft_lora or test_conversations_with_evaluation or TestResume and test_adapters or "
    "test_a_run_goes_on_under_another_plan and bf16 and not pure or test_goes_on_from_a_plain_run or "
    "test_saving_at_every_step and not llama-host and not mixed or test_fp16 and dpo or "
    "test_compact_masters and sft or test_an_edit_that_came_before or test_who_has_kept_the_data or "
    "test_a_unit_that_edits_itself"
)
# Parameters whose values are elsewhere for a moment, tensors that blocks make, and tensors that meet gradients; saved
# tensors of every policy, on every tier, with graphs that wait for one another, autocast and exceptions.
CALLS = (
    "test_a_state_dict_between or test_the_default_device or test_scaled_by_hand or test_any_block and Dropping or "
    "test_whatever_a_loop_does and two_forwards or test_an_argument_that_is_cast_twice or "
    "test_an_exception_in_the_middle and backward or test_an_interrupt_when or test_nothing_is_left or "
    "test_is_accumulation and mixed or test_late_and_permuted_lanes or test_every_unit_has_times and t5 or "
    "test_what_blocks_share or test_the_lender_may_be_walked_first or "
    "test_masters_follow_what and gradients_at_perturbed and states or test_nothing_stays_alive and plain or "
    "test_a_wrapper_for_a_call and host or test_trained_as_in_the_plain_loop and nf4"
)
# Each is a process of its own, and those with the longest waits come first; files that take seconds share one.
RUNS = {
    "faults": [
        *("-m", "gpu", FOLDER / "fault_tests.py", FOLDER / "stall_tests.py"),
        *(GPU / "test_streams_cuda.py", GPU / "test_interrupts_cuda.py"),
    ],
    "programs": ["-k", PROGRAMS, TESTS / "command" / "test_train.py", TESTS / "integrations", TESTS / "checkpoint"],
    "parity": ["-k", PARITY, TESTS / "parity"],  # as on the CPU's lanes, but a device computes and streams wait
    "engine": ["-m", "gpu", GPU / "test_engine_cuda.py", "-k", ENGINE],
    "loop": ["-k", CALLS, *LOOP, BLOCKS],
    "memory": ["-m", "gpu", FOLDER / "memory_tests.py", FOLDER / "footprint_tests.py"],
    "ranks": ["-m", "gpu", FOLDER / "ranks_tests.py"],
    "machine": [
        *("-m", "gpu", FOLDER / "devices_tests.py", FOLDER / "machine_tests.py"),
        *(GPU / "test_device_cuda.py", GPU / "test_recorder_cuda.py", GPU / "test_update_memory.py"),
    ],
}

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real GPU"),
    pytest.mark.timeout(1500),
]


def test_every_file_is_run():
    run = {part for parts in RUNS.values() for part in parts if isinstance(part, Path)}
    assert run >= {*GPU.glob("test_*.py"), *FOLDER.glob("*_tests.py")}


@pytest.fixture(scope="session")
def done(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[CompletedProcess[str]]]]:
    """Start all runs; return their results. They mostly wait for copies and sleeps, so some run side by side."""
    missing = simulator.why_not()
    if missing is not None and "CI" not in os.environ:
        pytest.skip(missing)
    assert missing is None, missing
    simulator.build()
    wanted = {item.name for item in request.session.items}
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {
            name: pool.submit(_suite_of, RUNS[name]) for name in RUNS if f"test_on_the_simulated_gpu[{name}]" in wanted
        }


def _suite_of(run: list[Any]) -> CompletedProcess[str]:
    options = ["-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-n0"]
    command = [sys.executable, str(FOLDER / "run.py"), "-m", "pytest", *options, *map(str, run)]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return nursery.run(
        command,
        kind=nursery.Worker,  # ranks are forked from a process that has imported all
        cwd=FOLDER.parent.parent,
        env=env | {"OMP_NUM_THREADS": "1", "OUTCORE_TEST_DEVICE": "cuda"},
        capture_output=True,
        text=True,
        check=False,
        timeout=1490,
    )


@pytest.mark.parametrize("run", RUNS)
def test_on_the_simulated_gpu(run: str, done: dict[str, Future[CompletedProcess[str]]]):
    ended = done[run].result()
    assert ended.returncode == 0, ended.stdout[-20000:] + ended.stderr[-5000:]
    assert " passed" in ended.stdout
    assert "skipped" not in ended.stdout.splitlines()[-1]
