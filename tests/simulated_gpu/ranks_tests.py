"""Two ranks, each with its own device: the bits of the plain loop on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from ranks.cases import Case, plain
from ranks.conftest import launch
from ranks.trainers import LARGEST_SCALE, Job, run

pytestmark = pytest.mark.gpu
CASES = [
    Case("tied", "bfloat16", homes="mixed", clip=0.3, depth=1),
    Case("absent", homes="device", clip=0.3),
    Case("frozen", "bfloat16", share=1.0, clip=0.3, delays=7, partition="world"),
    Case("routes", "bfloat16", states="8bit", masters="compact", share=1.0, partition="node", gather="host"),
    Case("absent", homes="disk", optim="Muon", clip=0.3),
    Case("few", "bfloat16", homes="mixed", clip=0.3, partition="world"),
    Case("few", homes="device", share=1.0, partition="world"),
]


def test_ranks_on_devices_of_their_own_are_the_plain_loop(tmp_path: Path) -> None:
    said = launch("from ranks.cases import main; main(sys.argv[1:])", 2, [json.dumps(CASES), str(tmp_path)])
    found = [[json.loads(line) for line in of_rank.splitlines()] for of_rank in said]
    assert found[0] == found[1]
    assert [case["weights"] for case in found[0]] == [plain(case) for case in CASES]


def test_a_trainer_in_fp16_is_that_of_one_rank(tmp_path: Path) -> None:
    """The same steps overflow, with the same scale afterwards. A save has the scale of one rank."""
    jobs = [Job("two", is_scaled=True), Job("two resumed", resume="one/checkpoint-2", is_scaled=True)]
    one = run(Job("one", is_scaled=True), tmp_path)
    assert LARGEST_SCALE / 16 < one["scale"] < LARGEST_SCALE  # four steps, some of which are left out
    launch("from ranks.trainers import main; main()", 2, [str(tmp_path), *map(json.dumps, jobs)])
    for job in jobs:
        assert json.loads((tmp_path / f"{job.name}.0.json").read_text())["scale"] == one["scale"]
        found, wanted = torch.load(tmp_path / f"{job.name}.pt"), torch.load(tmp_path / "one.pt")
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
