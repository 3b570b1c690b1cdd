"""A Trainer on two ranks is the Trainer on one with twice the accumulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import outcore
from outcore.memory.files.checkpoint_folder import read_manifest

from .cases import DEVICE
from .conftest import launch

pytestmark = [
    pytest.mark.skipif(DEVICE != "cpu", reason="over gloo, between processes on the CPU"),
    pytest.mark.xdist_group("ranks"),
]
RUN = "from ranks.trainers import main; main()"
ON_TWO = [
    ["two"],
    ["two clipped", "language", True, 0.1],
    ["two from one", "language", True, 1e9, 0.0, "one/checkpoint-3"],
    ["two lora", "lora", True, 0.1, 0.1],
    ["two lora resumed", "lora", True, 0.1, 0.1, "two lora/checkpoint-3"],
    ["ddp", "language", False],
    ["two cut", "language", True, 0.1, 0.0, None, "world"],
    ["two full", "full", True, 0.1, 0.0, None, "world"],
    ["two cut resumed", "language", True, 0.1, 0.0, "two cut/checkpoint-3", "world"],
    ["two buffers", "buffers"],
    ["two buffers resumed", "buffers", True, 1e9, 0.0, "two buffers/checkpoint-3"],
    ["two compact", "language", True, 1e9, 0.0, None, "replicate", "compact"],
    ["two own", "own"],
]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The output folder, and what each rank reports of each job."""
    from .trainers import Job, run

    folder = tmp_path_factory.mktemp("trainers")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    said = {"one": [run(Job("one"), folder)], "plain": [run(Job("plain", is_streamed=False), folder)]}
    said["plain clipped"] = [run(Job("plain clipped", is_streamed=False, clip=0.1), folder)]
    launch(RUN, 2, [str(folder), *map(json.dumps, ON_TWO)])
    for name, *_ in ON_TWO:
        said[name] = [json.loads((folder / f"{name}.{rank}.json").read_text()) for rank in range(2)]
    with pytest.warns(UserWarning, match="resume_from_checkpoint: 2 ranks saved .* and 1 go on: generators stay"):
        said["one from two"] = [run(Job("one from two", resume="two/checkpoint-3"), folder)]
    said["one compact"] = [run(Job("one compact", masters="compact"), folder)]
    with pytest.warns(UserWarning, match="generators stay"):  # resumed with another master format
        run(Job("one from two compact", resume="two compact/checkpoint-3", masters="fp32"), folder)
    torch.set_num_threads(threads)
    return folder, said


def weights(folder: Path, name: str) -> dict[str, torch.Tensor]:
    return torch.load(folder / f"{name}.pt")


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("one", "plain"),
        ("two", "plain"),
        ("two clipped", "plain clipped"),
        ("two from one", "plain"),
        ("one from two", "plain"),
        ("two lora resumed", "two lora"),
        ("two cut", "plain clipped"),
        ("two cut resumed", "plain clipped"),
        ("two full", "plain clipped"),
        ("two compact", "one compact"),
        ("one from two compact", "one compact"),
    ],
)
def test_weights_are_bitwise_those_of(name, wanted, found):
    folder, _ = found
    torch.testing.assert_close(weights(folder, name), weights(folder, wanted), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["two clipped", "two cut"])
def test_load_checkpoint_takes_what_several_ranks_saved(name, found, tmp_path):
    from .trainers import Job, Streamed, language, llama, token_dataset

    folder, _ = found
    side = Streamed(tmp_path, Job("loads"))
    trainer = language(side, tmp_path / "run", model=llama(seed=9), parts={"train_dataset": token_dataset(["a b"])})
    trainer.evaluate()  # prepares
    last = max(folder.glob(f"{name}/checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    with pytest.warns(UserWarning, match="generators stay"):
        assert outcore.load_checkpoint(trainer.model, trainer.optimizer, last) == {"step": int(last.name[11:])}
    torch.testing.assert_close(dict(outcore.named_tensors(trainer.model)), weights(folder, name), rtol=0, atol=0)
    outcore.close(trainer.model)


def test_rank_0_may_write_weights_of_its_own(found):
    folder, _ = found
    checkpoint = max((folder / "two own").glob("checkpoint-*"), key=lambda path: int(path.name[11:]))
    assert read_manifest(checkpoint, check=True).step == int(checkpoint.name[11:])
    assert (checkpoint / "own").exists()


def test_weights_are_nearly_those_of_ddp(found):
    folder, _ = found
    torch.testing.assert_close(weights(folder, "two"), weights(folder, "ddp"), rtol=0, atol=1e-6)


def test_logs_are_those_of_one_rank(found):
    _, said = found
    known = {"loss", "grad_norm", "learning_rate", "epoch", "step"}
    for name, wanted, names in (
        ("two", "plain", known),
        ("two clipped", "plain clipped", known),
        ("two", "ddp", {*known, "eval_loss"}),  # the plain Trainer's own loss differs with the number of ranks
    ):
        for of_rank in said[name]:
            for line, other in zip(of_rank["logs"], said[wanted][0]["logs"], strict=True):
                for what in other.keys() & names:
                    assert line[what] == pytest.approx(other[what], rel=1e-5), (name, what)
        assert said[name][0]["best"] == said[name][1]["best"]


def test_buffers_are_each_ranks_own(found):
    _, said = found
    own = [[of_rank["own"] for of_rank in said[name]] for name in ("two buffers", "two buffers resumed")]
    assert own[0] == own[1]
    assert own[0][1] == 2 * own[0][0] > 0


def test_checkpoints_are_rotated_and_whole(found):
    folder, said = found
    there = {path.name for path in (folder / "two").iterdir()}
    assert there == {f"checkpoint-{step}" for step in (2, 3, 4)}
    files = {path.name for path in (folder / "two" / "checkpoint-3").iterdir()}
    assert {"model.safetensors", "trainer_state.json", "rng_state.json", "manifest.json"} <= files
    assert {"unit-00001-000.safetensors", "unit-00001-001.safetensors"} <= files
    assert "optimizer.safetensors" not in files
    assert said["two"][0]["best"] == str(folder / "two" / "checkpoint-4")
