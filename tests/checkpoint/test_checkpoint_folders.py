"""Folders of checkpoints that many processes write and read at once, and filesystems that lack features."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

import outcore
from outcore.checkpoint import export_checkpoint as export_checkpoint_module
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.core.errors import ConfigError, DiskError
from outcore.memory.files import checkpoint_file, checkpoint_folder, locked_folder
from outcore.memory.files.checkpoint_file import BlockPool, CheckpointFile, PartOfCheckpoint
from outcore.memory.files.checkpoint_folder import read_manifest
from outcore.memory.files.locked_folder import held, taken_alone
from outcore.memory.piece_pool import ClosedError
from outcore.spec.manifest import Manifest

from . import small
from .test_training_state import state_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with small.prepared(small.build("plain", num_blocks=1), tmp_path) as pair:
        yield pair


def test_names_that_no_folder_can_have(run: Any, tmp_path: Path):
    """The system refuses to look at them."""
    path = tmp_path / ("x" * 300)
    with pytest.raises(DiskError, match="ENAMETOOLONG"):
        outcore.save_checkpoint(*run, path, step=1, wait=True)
    with pytest.raises(ConfigError, match="there is none"):
        outcore.load_checkpoint(*run, path)
    with pytest.raises(DiskError, match="ENAMETOOLONG"):
        outcore.save_pretrained(run[0], path)


def test_a_refused_load_holds_no_lock(run: Any, tmp_path: Path):
    """Also while the program keeps the error, as a notebook does."""
    path = outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True).wait()
    with small.prepared(small.build("plain", num_blocks=2), tmp_path) as pair:
        with pytest.raises(ConfigError, match="missing there") as kept:
            outcore.load_checkpoint(*pair, tmp_path / "c")
        with taken_alone(path, needs_lock=True):
            assert kept.value


@pytest.mark.parametrize("can_exchange", [True, False])
def test_many_replace_one_checkpoint_while_others_read_it(can_exchange: bool, tmp_path: Path, monkeypatch: Any):
    """All write the same step: a reader has the whole of one version until it is done."""
    if not can_exchange:  # then the name is missing at moments, and a reader finds nothing to hold
        monkeypatch.setattr(checkpoint_folder, "_exchange", lambda *_: False)
    target = tmp_path / "step-00000001"
    found: list[str] = []
    _replace(target, 9, 1)
    threads = [threading.Thread(target=_replace, args=(target, who, 5)) for who in range(3)]
    threads += [threading.Thread(target=lambda: found.extend(_read_once(target) for _ in range(40))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "one" in found
    assert not can_exchange or {*found} == {"one"}
    assert [path.name for path in tmp_path.iterdir()] == [target.name]
    assert _read_once(target) == "one"


@pytest.mark.parametrize("when", ["gone", "there again"])
def test_a_target_that_comes_and_goes(when: str, tmp_path: Path, monkeypatch: Any):
    """It changes between two calls of its replacement, where two folders cannot be exchanged in one call."""
    monkeypatch.setattr(checkpoint_folder, "_exchange", lambda *_: False)
    target, other, rename = tmp_path / "step-00000001", tmp_path / "other", Path.rename
    _replace(target, 9, 1)
    _replace(other, 8, 1)
    met: list[Path] = []

    def racing(path: Path, to: Path) -> Path:
        if when == "gone" and to == target and not met:
            with pytest.raises(OSError, match="not empty"):
                rename(path, to)
            met.append(rename(target, tmp_path / "away"))
            raise OSError(errno.ENOTEMPTY, "Directory not empty")
        if when == "there again" and path == target and not met:
            moved = rename(path, to)
            met.append(rename(other, target))
            return moved
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", racing)
    _replace(target, 7, 1)
    assert met
    assert (target / "a").read_text() == "7 0"
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({target.name, "other", "away"} if when == "gone" else {target.name})


def test_a_lock_is_of_the_folder_that_is_there(tmp_path: Path, monkeypatch: Any):
    """Another folder has taken its place between opening and locking."""
    path, open_file = tmp_path / "step-00000001", os.open
    path.mkdir()

    def replaced(*args: Any) -> int:
        fd = open_file(*args)
        path.rename(tmp_path / "old")
        path.mkdir()
        return fd

    monkeypatch.setattr(os, "open", replaced)
    with pytest.raises(BlockingIOError, match="another folder"), taken_alone(path, needs_lock=True):
        pytest.fail("the lock is of the old one")


def test_two_threads_remove_a_checkpoint(tmp_path: Path, monkeypatch: Any):
    """One is the lane on which a write failed; the other belongs to the caller of the save."""
    unfinished, remove, second = checkpoint_folder.UnfinishedCheckpoint(tmp_path / "step-1"), shutil.rmtree, []
    is_twice, wrong = threading.Event(), []

    def remove_it() -> None:
        try:
            unfinished.remove()
        except Exception as error:
            wrong.append(error)

    def removed(*args: Any, **options: Any) -> None:
        if not second:
            second.append(threading.Thread(target=remove_it))
            second[0].start()
            is_twice.wait(0.2)  # it may never be set
        else:
            is_twice.set()
        remove(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", removed)
    remove_it()
    second[0].join()
    assert (wrong, is_twice.is_set(), list(tmp_path.iterdir())) == ([], False, [])


def _replace(target: Path, who: int, num_saves: int) -> None:
    for i in range(num_saves):
        unfinished = checkpoint_folder.UnfinishedCheckpoint(target)
        for name in "ab":
            checkpoint_folder.write_new(unfinished.path / name, f"{who} {i}".encode())
        unfinished.commit(lambda files: Manifest(step=1, files=files))


def _read_once(target: Path) -> str:
    with held(target):
        try:
            manifest = read_manifest(target, check=True)
            texts = {(target / name).read_text() for name in "ab"}
            is_one = len(texts) == 1 and read_manifest(target, check=True) == manifest
        except (ConfigError, OSError) as error:
            return repr(error)
        return "one" if is_one else f"parts of {texts}"


def _cannot(*_: Any) -> None:
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def _synced(fd: int) -> None:
    if stat.S_ISDIR(os.fstat(fd).st_mode):
        raise OSError(errno.EINVAL, "Invalid argument")


@pytest.mark.parametrize("lacks", ["room ahead", "direct I/O", "locks", "exchanges", "syncs of folders"])
def test_filesystems_that_can_less(lacks: str, run: Any, tmp_path: Path, monkeypatch: Any):
    """Files grow, go through the page cache, or are not locked; the saved state is the same."""
    open_file = os.open

    def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT and "step-" in str(path):
            raise OSError(errno.EINVAL, "Invalid argument")
        return open_file(path, flags, *args, **options)

    if lacks == "room ahead":
        monkeypatch.setattr(checkpoint_file, "reserve", lambda *_: None)
    elif lacks == "direct I/O":
        monkeypatch.setattr(os, "open", opened)
    elif lacks == "syncs of folders":
        monkeypatch.setattr(os, "fsync", _synced)
    elif lacks == "locks":
        monkeypatch.setattr(locked_folder.fcntl, "flock", _cannot)
    else:
        monkeypatch.setattr(checkpoint_folder, "_exchange", lambda *_: False)
    model, optimizer = run
    for step in range(3):
        small.train(model, optimizer, range(step, step + 1))
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1 + step // 2, keep=1)
    want = state_of(model, optimizer)
    small.train(model, optimizer, range(3, 4))
    save.wait()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000002"]
    outcore.load_checkpoint(model, optimizer, tmp_path / "c")
    small.same(want, state_of(model, optimizer))


def test_the_working_directory_changes_meanwhile(run: Any, tmp_path: Path, monkeypatch: Any):
    """The save and the removal of older checkpoints happen where the save was begun."""
    model, optimizer = run
    (tmp_path / "elsewhere").mkdir()
    go_on, write = threading.Event(), checkpoint_file.CheckpointFile.write

    def held_back(*args: Any) -> None:
        threading.current_thread() is threading.main_thread() or go_on.wait(60)  # headers are written at once
        write(*args)

    monkeypatch.chdir(tmp_path)
    outcore.save_checkpoint(model, optimizer, "c", step=1, wait=True)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_file.CheckpointFile, "write", held_back)
        save = outcore.save_checkpoint(model, optimizer, "c", step=2, keep=1)
        patch.chdir(tmp_path / "elsewhere")
        go_on.set()
        assert save.wait() == tmp_path / "c" / "step-00000002"
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000002"]
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("of", ["elements", "dtype", "file"])
def test_tensors_that_the_manifest_describes_otherwise(of: str, run: Any, tmp_path: Path):
    """All checksums are right, since file and manifest were changed together. The model is left untouched."""
    model, optimizer = run
    path = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1).wait()
    file, name = path / "model.safetensors", "blocks.0.down.weight"
    tensors = load_file(file)
    if of == "elements":
        tensors[name] = tensors[name][:-1].contiguous()
    elif of == "dtype":
        tensors[name] = tensors[name].view(torch.int32)
    save_file(tensors, file)
    manifest = Manifest.from_json((path / "manifest.json").read_bytes())
    record = manifest.tensors[f"model.{name}"]
    if of == "file":
        record = dataclasses.replace(record, parts=(record.parts[0]._replace(file="optimizer.safetensors"),))
    files = {**manifest.files, file.name: tuple(checkpoint_folder._summed(file))}
    changed = dataclasses.replace(manifest, files=files, tensors={**manifest.tensors, f"model.{name}": record})
    (path / "manifest.json").write_bytes(changed.to_json())
    read_manifest(path, check=True)
    before = state_of(model, optimizer)
    for use in (
        lambda: outcore.load_checkpoint(model, optimizer, path),
        lambda: export_checkpoint(path, tmp_path / "out", "hf"),
    ):
        with pytest.raises(ConfigError, match=r"blocks\.0\.down\.weight"):
            use()
    small.same(before, state_of(model, optimizer))


def test_who_exports_keeps_what_is_read(tmp_path: Path, monkeypatch: Any):
    """A run that goes on would otherwise remove it."""
    with small.prepared(small.build("llama"), tmp_path) as run:
        outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True)
        write = export_checkpoint_module.copy_files

        def removed(*args: Any, **options: Any) -> Any:
            outcore.save_checkpoint(*run, tmp_path / "c", step=2, keep=1, wait=True)
            return write(*args, **options)

        monkeypatch.setattr(export_checkpoint_module, "copy_files", removed)
        export_checkpoint(tmp_path / "c", tmp_path / "out", "hf")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="no tmpfs here")
def test_on_tmpfs(run: Any):
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        want = state_of(*run)
        for step in (1, 1, 2):
            outcore.save_checkpoint(*run, folder, step=step, keep=1, wait=True)
        small.train(*run)
        assert outcore.load_checkpoint(*run, folder) == {"step": 2}
        small.same(want, state_of(*run))


def test_a_part_whose_folder_is_gone_says_who_may_have_removed_it(tmp_path: Path):
    """This happens to a rank that comes back after the others have waited for it in vain."""
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    part = PartOfCheckpoint(hidden, tmp_path / "step-1", is_direct=False)
    hidden.rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        part.create("unit.safetensors", 8).write(8, lambda start, stop, to: None)
    part.stop()
    assert "other ranks gave the checkpoint up" in str(part.error(caught.value))


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [(OSError(28, "full"), False), (ClosedError(), True), (TimeoutError(), True), (KeyboardInterrupt(), True)],
)
def test_a_descriptor_that_a_thread_may_still_use_stays_open(error: BaseException, is_kept: bool, tmp_path: Path):
    """The second Ctrl-C ends the wait for a thread; its write must not go to whatever file gets the number next."""
    used: list[int] = []

    class Pool:
        is_direct = False

        def run(self, write: Any, pieces: Any) -> None:
            used.append(write.args[0])
            raise error

    with pytest.raises(type(error)):
        CheckpointFile(tmp_path / "file", 10, cast(BlockPool, Pool())).write(10, lambda *_: None)
    (descriptor,) = used
    if is_kept:
        os.close(descriptor)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
