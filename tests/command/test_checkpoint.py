"""``outcore checkpoint`` lists, verifies and prunes; damage is reported, with status 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from checkpoint import small
from safetensors.torch import load_file

import outcore
from outcore.checkpoint.find_checkpoints import prune
from outcore.command import checkpoint
from outcore.command import main as cli
from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint, remove, write_new
from outcore.spec.manifest import Manifest

from .conftest import Run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints")
    with small.prepared(small.build("plain", num_blocks=1), folder) as (model, optimizer):
        for step in range(3):
            outcore.save_checkpoint(model, optimizer, folder, step=step)
    return folder


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> tuple[object, str, str]:
    monkeypatch.setattr("sys.argv", ["outcore", "checkpoint", *args])
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr()
    return stop.value.code or 0, said.out, said.err


def test_commands(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, out, _ = run(monkeypatch, capsys, "ls", str(folder))
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [[f"step-{n:08d}", str(n)] for n in (2, 1, 0)]
    status, out, _ = run(monkeypatch, capsys, "verify", str(folder / "step-00000001"))
    assert status == 0
    assert [line.split()[:2] for line in out.splitlines()[1:]] == [["step-00000001", "1"]]
    states = folder / "step-00000002" / "optimizer.safetensors"
    data = bytearray(states.read_bytes())
    data[-5000] ^= 4
    states.write_bytes(data)
    assert run(monkeypatch, capsys, "ls", str(folder))[0] == 0  # it looks at sizes alone
    status, out, _ = run(monkeypatch, capsys, "verify", str(folder))
    assert status == 1
    assert "damaged" in out.splitlines()[1]
    assert "of 'optimizer.safetensors'" in out.splitlines()[1]
    assert [line.split()[-1] for line in out.splitlines()[2:]] == ["saved", "saved"]
    states.unlink()
    status, _, err = run(monkeypatch, capsys, "prune", str(folder / "step-00000001"), "--keep", "1")
    assert status == 2
    assert "expected a folder of checkpoints, but" in err
    status, out, _ = run(monkeypatch, capsys, "prune", str(folder), "--keep", "1")
    assert (status, out.splitlines()) == (0, [f"removed {folder / 'step-00000000'}"])
    with pytest.warns(UserWarning, match="The one before it is taken"):
        found, _ = small.find(folder)
    assert found.name == "step-00000001"


def test_of_a_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Pruning keeps the best checkpoint, as ``outcore train --keep`` does."""
    for step in (2, 4, 6, 8):
        unfinished = UnfinishedCheckpoint(tmp_path / f"checkpoint-{step}")
        best = {"best_model_checkpoint": str(tmp_path / "checkpoint-4")}
        write_new(unfinished.path / "trainer_state.json", json.dumps(best).encode())
        unfinished.commit(lambda files, step=step: Manifest(step=step, files=files))
    status, out, _ = run(monkeypatch, capsys, "prune", str(tmp_path), "--keep", "1")
    assert (status, out.splitlines()) == (0, [f"removed {tmp_path / f'checkpoint-{step}'}" for step in (6, 2)])
    assert [line.split()[0] for line in run(monkeypatch, capsys, "ls", str(tmp_path))[1].splitlines()[1:]] == [
        "checkpoint-8",
        "checkpoint-4",
    ]


def test_verify_beside_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """A checkpoint that is being read stays, and one that the run has removed does not count as damage."""
    look, seen = checkpoint.read_manifest, []

    def meanwhile(path: Path, *, check: bool) -> Manifest:
        seen.append(path.name)
        if len(seen) == 1:
            prune(tmp_path, 1, newest=1)
            remove(tmp_path / "step-00000002")
        return look(path, check=check)

    for step in range(3):
        unfinished = UnfinishedCheckpoint(tmp_path / f"step-{step:08d}")
        unfinished.commit(lambda files, step=step: Manifest(step=step, files=files))
    monkeypatch.setattr(checkpoint, "read_manifest", meanwhile)
    status, out, _ = run(monkeypatch, capsys, "verify", str(tmp_path))
    assert seen == ["step-00000002", "step-00000001", "step-00000000"]
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["step-00000002", "step-00000001"]
    assert status == 0


def test_nothing_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    status, out, said = run(monkeypatch, capsys, "verify", str(tmp_path))
    assert (status, out) == (2, "")
    assert "expected checkpoints in" in said


def test_export(tmp_path: Path, command: Run):
    model = small.build("plain", num_blocks=1).requires_grad_(True)  # --format dcp takes no frozen parameters
    with small.prepared(model, tmp_path) as (model, optimizer):
        outcore.save_checkpoint(model, optimizer, tmp_path, step=3, wait=True)
        want = {name: value.clone() for name, value in outcore.named_tensors(model)}
    ended = command("export", tmp_path, tmp_path / "hf")
    assert (ended.status, ended.out) == (
        0,
        f"wrote {tmp_path / 'hf'}: {tmp_path / 'step-00000003'}, as weights without a configuration\n",
    )
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in want.items())
    assert command("export", tmp_path, tmp_path / "dcp", "--format", "dcp").status == 0
    assert (tmp_path / "dcp" / ".metadata").is_file()
    ended = command("export", tmp_path, tmp_path / "other", "--format", "gguf")
    assert ended.status == 2
    assert "--format: expected hf or dcp, but got 'gguf'" in ended.err
    assert not (tmp_path / "other").exists()
