"""What can go wrong around a checkpoint: drives that fail, power losses, bytes that change, processes that die."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import nursery
import pytest
import torch
from outside import power_loss
from outside.calls import Call, watched
from outside.flipped_bytes import flip_disk, flipped

import outcore
from outcore.checkpoint.find_checkpoints import found, found_in, prune
from outcore.core.errors import ConfigError, DiskError, OutcoreError
from outcore.memory.files import checkpoint_folder
from outcore.memory.files.checkpoint_folder import find_damage, read_manifest
from outcore.spec.manifest import Manifest

from . import small
from .test_library_files import saved_beside
from .test_training_state import state_of


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with small.prepared(small.build("plain", num_blocks=1), tmp_path) as pair:
        yield pair


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Two checkpoints that no test may change, and the folder they are in."""
    folder = tmp_path_factory.mktemp("saved")
    with small.prepared(small.build("plain", num_blocks=1), folder) as (model, optimizer):
        for step in (1, 2):
            small.train(model, optimizer, range(step, step + 1))
            extra = {"tensor": torch.arange(3)}
            outcore.save_checkpoint(model, optimizer, folder / "c", step=step, extra=extra, wait=True)
    return folder / "c", folder


class Fault:
    """Makes the call with a given number fail, with an error or by writing only half of its data."""

    def __init__(self, number: int, *, is_short: bool) -> None:
        self._left, self._code = number, 0 if is_short else (errno.ENOSPC, errno.EIO)[number % 2]
        self.hit = ""

    def __call__(self, call: Call, do: Any) -> Any:
        if not self._code and call.name not in ("write", "pwrite"):
            return do()
        self._left -= 1
        if self._left != -1:
            return do()
        self.hit = call.name
        if self._code:
            raise OSError(self._code, os.strerror(self._code), call.path)
        return do(memoryview(call.data)[: len(call.data) // 2])


@contextmanager
def _job(of: str, folder: Path) -> Iterator[tuple[Any, Any, Callable[[int], object]]]:
    """A model, its optimizer, and a function that saves a step and keeps only that one."""
    model = small.with_adapters(small.build("llama")) if of == "adapters" else small.build("plain", num_blocks=1)
    checkpoints = folder / "c"
    with small.prepared(model, folder, "device" if of == "device" else "host") as (model, optimizer):

        def of_a_loop(step: int) -> None:
            outcore.save_checkpoint(model, optimizer, checkpoints, step=step, keep=1, wait=True)

        def of_a_trainer(step: int) -> None:
            def tidy_up() -> None:
                prune(checkpoints, 1, of_trainers=True)

            saved_beside(model, optimizer, checkpoints, f"checkpoint-{step}", tidy_up=tidy_up).wait()

        yield model, optimizer, of_a_loop if of in ("host", "device") else of_a_trainer


@pytest.mark.parametrize("is_short", [False, True])
@pytest.mark.parametrize("of", ["host", "device", "trainer", "adapters"])
def test_every_call_of_a_save_fails_once(of: str, is_short: bool, tmp_path: Path):
    """The error is typed, the older checkpoint is whole, nothing is left behind, and training goes on bit for bit."""
    folder, hit, failed, fault = tmp_path / "c", Counter[str](), 0, None
    with _job(of, tmp_path) as (model, optimizer, save):
        for number in range(1000):
            if number % 8 == 0:
                small.train(model, optimizer, range(number // 8, number // 8 + 1))
            before, fault = found_in(folder), Fault(number, is_short=is_short)
            with warnings.catch_warnings(), watched(tmp_path, fault):
                warnings.simplefilter("ignore")  # an older checkpoint that cannot be removed
                try:
                    save(number + 1)
                except DiskError:
                    failed += 1
            hit[fault.hit] += 1
            if not fault.hit:
                break
            assert found_in(folder) or not before
            for _, path in found_in(folder):
                read_manifest(path, check=number % 8 == 0)
        assert [step for step, _ in found_in(folder)] == [number + 1]
        assert len(list(folder.iterdir())) == 1
        state = state_of(model, optimizer)
        if of in ("host", "device"):
            small.train(model, optimizer, range(50, 51))
            outcore.load_checkpoint(model, optimizer, folder)
            small.same(state, state_of(model, optimizer))
    kinds = {"write", "pwrite"} if is_short else {"write", "pwrite", "create", "mkdir", "fsync", "rename"}
    assert kinds < hit.keys()
    assert is_short or failed > 20
    with _job(of, tmp_path) as (model, optimizer, _):
        small.train(model, optimizer, range(number // 8 + 1))
        small.same(state_of(model, optimizer), state)


def test_flipped_bytes(saved: Any):
    """All bytes of the manifest and many of the other files are changed. No change is accepted."""
    rng, path = random.Random(0), saved[0] / "step-00000002"
    text = (path / "manifest.json").read_bytes()
    flipped = (text[:i] + bytes([text[i] ^ 1 << rng.randrange(8)]) + text[i + 1 :] for i in range(len(text)))
    assert not [changed for changed in flipped if _is_read(changed)]
    manifest = Manifest.from_json(text)
    places = [(path / name, rng.randrange(sum(b.nbytes for b in manifest.files[name]))) for name in manifest.files]
    places += rng.choices(places, k=100)
    assert not [place for place in places if find_damage_at(*place, 1 << rng.randrange(8), path, manifest) is None]


def _is_read(text: bytes) -> bool:
    try:
        Manifest.from_json(text)
    except ValueError:
        return False
    return True


def find_damage_at(file: Path, place: int, bit: int, path: Path, manifest: Manifest) -> str | None:
    with flipped(file, place, bit):
        return find_damage(path, manifest)


def test_the_one_before_is_taken(saved: Any):
    source, _ = saved
    file = source / "step-00000002" / "state.safetensors"
    text = file.read_bytes()
    file.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.warns(UserWarning, match="step-00000002.*not those that were saved.*The one before it is taken"):
        assert small.find(source)[1].step == 1
    with pytest.raises(ConfigError, match="not those that were saved"):
        small.find(source, step=2)
    file.write_bytes(text)
    assert small.find(source)[1].step == 2


@pytest.mark.parametrize("of", ["loop", "train"])
def test_power_loss(of: str, tmp_path: Path):
    lost = power_loss.cut(tmp_path, 60, seed=0, num_steps=2, of=of)
    assert not lost["wrong"]
    assert lost["newest is durable"] > 5
    assert lost["newest is later"] + lost["none yet"] > 0


def _said_by(folder: Path, *command: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    options: dict[str, Any] = {"cwd": Path(power_loss.__file__).parents[1], "env": environment, "text": True}
    done = nursery.run([sys.executable, *command], check=False, capture_output=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


FORKS = pytest.mark.skipif(small.DEVICE != "cpu", reason="lives are forked, and no accelerator outlives a fork")


@FORKS
@pytest.mark.parametrize("options", ["--kills 4 --seed 5", "--of train --kills 1 --seed 2"])
def test_killed_while_saving(options: str, tmp_path: Path):
    """A loop with LoRA on disk, and ``outcore train`` with all weights on disk, run until they are done."""
    said = _said_by(tmp_path, "outside/checkpoint_kills.py", *options.split())
    assert "| most lives in a row" in said


LOUD = """
from pathlib import Path
from outside import checkpoint_kills as kills
def fail(*_):
    raise ValueError(9000 * "\u00e9" + "\\ud800 in the end")
kills._loop = fail
life = kills.lived(Path("{folder}"), ("loop", "full", "host"), None)
print(life.status, len(life.text), life.text[-13:])
"""


def test_a_life_with_much_to_say_ends(tmp_path: Path):
    """The end of a long error text is kept: 4,081 two-byte letters and a half."""
    said = _said_by(tmp_path, "-c", LOUD.format(folder=tmp_path / "life"))
    assert said.strip() == "1 4095 ? in the end"


@FORKS
def test_bytes_are_flipped_by_the_program(tmp_path: Path):
    """The program covers checkpoints of loops and of ``outcore train``."""
    said = _said_by(tmp_path, "outside/flipped_bytes.py", "--flips", "20", "--every", "200")
    assert "| loaded | 0 | 0 | 0 |" in said


def test_bits_of_the_disk_tier_are_named(tmp_path: Path):
    found = flip_disk(tmp_path, 9, seed=0)
    assert (found["named"], found["not named"], found["not noticed"]) == (9, 0, 0)


def test_memory_is_measured(tmp_path: Path):
    tiny = ("--state-gib", "0.1", "--child", str(tmp_path), "save, load")
    found = json.loads(_said_by(tmp_path, "outside/checkpoint_memory.py", *tiny))
    assert found["largest resident size meanwhile, MiB"] > 100
    assert found["added, MiB"] < 1000


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("model.safetensors", "../x.safetensors"),
        lambda text: text.replace("model.safetensors", "/tmp/x.safetensors"),
        lambda text: text.replace('"step":2', '"step":-2'),
        lambda text: text.replace('"step":2', '"step":2.0'),
        lambda text: text.replace('"step":2', '"step":true'),
        lambda text: text.replace('"groups":[{', '"groups":[3,{'),
        lambda text: text.replace('"shape":[131,19]', '"shape":[131,20]'),
        lambda text: text.replace('"shape":[131,19]', '"shape":[-131,-19]'),
        lambda text: text.replace('"frozen":{', '"frozen":{"x":"y",'),
        lambda text: text.replace(",0,2489]", ",5,2489]"),
    ],
)
def test_manifests_that_nobody_writes(change: Any, saved: Any):
    """They are refused although their checksum is right."""
    from outcore.spec.manifest import _signed

    text = (saved[0] / "step-00000002" / "manifest.json").read_text()
    fields = json.loads(text)
    del fields["crc32"]
    assert _signed(fields) == text.encode()
    changed = change(text)
    assert changed != text
    fields = json.loads(changed)
    del fields["crc32"]
    with pytest.raises(ValueError, match=r"in it|an entry|cannot be a file|file that|parts of|tensor|no checkpoint"):
        Manifest.from_json(_signed(fields))


def test_what_is_no_checkpoint_is_not_replaced(run: Any, tmp_path: Path):
    for target in ("step-00000001", "step-00000002"):
        (tmp_path / "c" / target).parent.mkdir(exist_ok=True)
    (tmp_path / "c" / "step-00000001").write_text("mine")
    (tmp_path / "c" / "step-00000002").mkdir()
    for step in (1, 2):
        with pytest.raises(ConfigError, match="expected a checkpoint at .* or nothing"):
            outcore.save_checkpoint(*run, tmp_path / "c", step=step)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001", "step-00000002"]


def test_links_are_removed_and_not_what_they_lead_to(run: Any, tmp_path: Path):
    first = outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True).path
    elsewhere = first.rename(tmp_path / "elsewhere")
    first.symlink_to(elsewhere)
    assert small.find(tmp_path / "c")[1].step == 1
    outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True)  # the link is replaced
    assert not first.is_symlink()
    (tmp_path / "c" / "step-00000000").symlink_to(elsewhere)
    outcore.save_checkpoint(*run, tmp_path / "c", step=2, keep=1, wait=True)
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000002"]
    read_manifest(elsewhere, check=True)


def test_damaged_ones_do_not_count_among_those_that_are_kept(run: Any, tmp_path: Path):
    for step in (1, 2, 3):
        outcore.save_checkpoint(*run, tmp_path / "c", step=step, wait=True)
    (tmp_path / "c" / "step-00000003" / "state.json").unlink()
    outcore.save_checkpoint(*run, tmp_path / "c", step=4, keep=2, wait=True)
    assert [step for step, _ in found_in(tmp_path / "c")] == [4, 3, 2]
    assert prune(tmp_path / "c", 1) == [tmp_path / "c" / f"step-0000000{step}" for step in (3, 2)]


def test_who_reads_a_checkpoint_keeps_it(run: Any, tmp_path: Path):

    outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True)
    with found(tmp_path / "c") as (path, _):
        outcore.save_checkpoint(*run, tmp_path / "c", step=2, keep=1, wait=True)
        read_manifest(path, check=True)
    outcore.save_checkpoint(*run, tmp_path / "c", step=3, keep=1, wait=True)
    assert [step for step, _ in found_in(tmp_path / "c")] == [3]


def test_who_reads_a_checkpoint_before_its_writer_is_done_keeps_it(run: Any, tmp_path: Path, monkeypatch: Any):
    """The checkpoint has its name already, but its parent folder is still to be synced."""
    sync, reading = checkpoint_folder.sync, ExitStack()

    def read_first(path: Path) -> None:
        if path == tmp_path / "c" and found_in(path):
            reading.enter_context(found(path))
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "sync", read_first)
        outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True)
    outcore.save_checkpoint(*run, tmp_path / "c", step=2, keep=1, wait=True)
    assert [step for step, _ in found_in(tmp_path / "c")] == [2, 1]
    reading.close()
    outcore.save_checkpoint(*run, tmp_path / "c", step=3, keep=1, wait=True)
    assert [step for step, _ in found_in(tmp_path / "c")] == [3]


@pytest.mark.parametrize("is_there", [False, True])
def test_a_new_name_that_is_not_durable(is_there: bool, run: Any, tmp_path: Path, monkeypatch: Any):
    """The folder above cannot be synced after the rename: the checkpoint is whole, and none was removed yet."""
    model, optimizer = run
    folder, sync = tmp_path / "c", checkpoint_folder.sync
    old = outcore.save_checkpoint(model, optimizer, folder, step=2 if is_there else 1, wait=True).path
    small.train(model, optimizer)
    before = read_manifest(old, check=True)

    def fail_behind_rename(path: Path) -> None:
        if path == folder and found_in(path)[0][0] == 2 and read_manifest(found_in(path)[0][1], check=False) != before:
            raise OSError(errno.EIO, "broken")
        sync(path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_folder, "sync", fail_behind_rename)
        save = outcore.save_checkpoint(model, optimizer, folder, step=2, keep=1)
        said = "2': expected that it survives a power loss, but got EIO: broken; .* it is whole and in place"
        with pytest.raises(DiskError, match=said):
            save.wait()
    assert [read_manifest(path, check=True) == before for path in folder.iterdir()].count(True) == 1
    assert small.find(folder)[1] != before
    state = state_of(model, optimizer)
    small.train(model, optimizer)
    outcore.load_checkpoint(model, optimizer, folder)
    small.same(state, state_of(model, optimizer))
    outcore.save_checkpoint(model, optimizer, folder, step=3, keep=1, wait=True)
    assert [path.name for path in folder.iterdir()] == ["step-00000003"]


def test_who_reads_a_checkpoint_has_it_until_the_end(run: Any, tmp_path: Path, monkeypatch: Any):
    """Another save of the same step waits for the reader before it replaces the checkpoint, and finally gives up."""
    model, optimizer = run
    small.train(model, optimizer)
    outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
    with found(tmp_path / "c") as (path, manifest):
        small.train(model, optimizer)
        save = outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1)
        time.sleep(0.3)
        assert not save.done
        assert read_manifest(path, check=True) == manifest
    assert read_manifest(save.wait(), check=True) != manifest
    monkeypatch.setattr("outcore.memory.files.checkpoint_folder.STALL_TIMEOUT_S", 0.1)
    with found(tmp_path / "c") as (path, manifest):
        with pytest.raises(DiskError, match="EBUSY: a reader has held it for more than 0.1 s"):
            outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        assert read_manifest(path, check=True) == manifest
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-00000001"]


def test_two_runs_save_into_one_folder(run: Any, tmp_path: Path):
    """Neither run removes what the other is writing."""
    with small.prepared(small.build("plain", num_blocks=1, seed=1), tmp_path) as other:
        saves = [outcore.save_checkpoint(*pair, tmp_path / "c", step=i) for pair in (run, other) for i in (1, 2)]
        for save in saves:
            save.wait()
    for _, path in found_in(tmp_path / "c"):
        read_manifest(path, check=True)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["step-00000001", "step-00000002"]


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError(errno.EIO, "broken")])
def test_a_load_that_is_cut_short(error: Any, run: Any, tmp_path: Path, monkeypatch: Any):
    """A partly loaded state cannot be trained; another load repairs it."""
    model, optimizer = run
    small.train(model, optimizer)
    outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
    want = state_of(model, optimizer)
    small.train(model, optimizer, range(1, 2))

    def interrupt(*_: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("outcore.checkpoint.save_and_load._load_buffers", interrupt)
        with pytest.raises((KeyboardInterrupt, OSError)):
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
    for use in (lambda: small.train(model, optimizer), optimizer.step):
        with pytest.raises(OutcoreError, match="expected a whole checkpoint, but loading .* was cut short"):
            use()
    outcore.load_checkpoint(model, optimizer, tmp_path / "c")
    small.same(want, state_of(model, optimizer))
    small.train(model, optimizer, range(1, 2))


def test_ctrl_c_while_small_files_are_written(run: Any, tmp_path: Path, monkeypatch: Any):
    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("outcore.checkpoint.save_and_load.LibraryFiles.states", interrupt)
        with pytest.raises(KeyboardInterrupt):
            outcore.save_checkpoint(*run, tmp_path / "c", step=1)
    assert not list((tmp_path / "c").iterdir())
    outcore.save_checkpoint(*run, tmp_path / "c", step=1, wait=True)


def test_a_forked_child_leaves_the_save_alone(run: Any, tmp_path: Path, monkeypatch: Any):
    """The child may even close the model that it inherited."""
    go_on, model = threading.Event(), run[0]
    from outcore.memory.files.checkpoint_folder import UnfinishedCheckpoint

    commit = UnfinishedCheckpoint.commit
    monkeypatch.setattr(UnfinishedCheckpoint, "commit", lambda self, what: (go_on.wait(20), commit(self, what))[1])
    save = outcore.save_checkpoint(*run, tmp_path / "c", step=1)
    pid = os.fork()
    if pid == 0:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                outcore.close(model, keep_weights=False)
            except BaseException:
                os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    go_on.set()
    read_manifest(save.wait(), check=True)
    assert status == 0
