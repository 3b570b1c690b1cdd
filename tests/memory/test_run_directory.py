"""Two runs never meet, no way to end leaves data behind, and only folders of dead runs are removed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap

import nursery
import pytest

from outcore.memory.disk import DiskStore
from outcore.memory.run_directory import OWNER_NAME, RunDirectory, reclaim_dead

RUN = """
    import signal, sys, time
    from pathlib import Path
    from outcore.memory.disk import DiskStore
    store = DiskStore.open([Path(sys.argv[1])], 8 * 2**20)
    print("ready", flush=True)
    if sys.argv[2] == "raise":
        raise ValueError("wrong")
    time.sleep(60)
"""


def start_run(folder, how="sleep"):
    process = nursery.Whole(
        [sys.executable, "-c", textwrap.dedent(RUN), str(folder), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "ready\n", process.stderr.read()
    return process


def end(process, number):
    process.send_signal(number)
    process.communicate(timeout=60)


def files_and_bytes(folder):
    files = [path for path in folder.rglob("*") if path.is_file()]
    return [path.name for path in files], sum(path.stat().st_size for path in files)


def test_a_run_that_fails_without_closing_leaves_nothing(tmp_path):
    process = start_run(tmp_path, "raise")
    process.communicate(timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_leaves_nothing(tmp_path):
    end(start_run(tmp_path), signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_an_abrupt_end_leaves_no_data_and_the_next_run_removes_the_rest(tmp_path, number):
    end(start_run(tmp_path), number)
    names, nbytes = files_and_bytes(tmp_path)
    assert names == [OWNER_NAME]
    assert nbytes < 4096
    DiskStore.open([tmp_path], 4096).close()
    assert list(tmp_path.iterdir()) == []


def test_two_runs_in_one_folder_and_a_dead_third(tmp_path):
    dead, alive = start_run(tmp_path), start_run(tmp_path)
    end(dead, signal.SIGKILL)
    try:
        (dead_path,) = tmp_path.glob(f"outcore-{dead.pid}-*")
        (alive_path,) = tmp_path.glob(f"outcore-{alive.pid}-*")
        with RunDirectory.create(tmp_path) as mine:
            assert reclaim_dead(tmp_path) == [dead_path]
            assert alive_path.is_dir()
            assert mine.path.is_dir()
    finally:
        end(alive, signal.SIGINT)
    assert list(tmp_path.iterdir()) == []


def test_the_owner_file_tells_a_person_who_holds_how_much(tmp_path):
    with RunDirectory.create(tmp_path, reserved_bytes=12345) as directory:
        owner = json.loads((directory.path / OWNER_NAME).read_text())
        assert owner["pid"] == os.getpid()
        assert owner["reserved_bytes"] == 12345
        assert directory.path.name.startswith(f"outcore-{os.getpid()}-")


def dead_owner(tmp_path):
    """Return the owner file of a run that has ended."""
    with RunDirectory.create(tmp_path) as directory:
        owner = json.loads((directory.path / OWNER_NAME).read_text())
    return owner | {"start_time_ticks": 1}


def test_a_dead_folder_is_reclaimed_but_not_a_persons_file_in_it(tmp_path):
    # The counterpart of the test below: here everything is in order, and the same folder is removed.
    owner = dead_owner(tmp_path)
    for name in ("outcore-1-00000000", "outcore-2-00000000"):
        (tmp_path / name).mkdir()
        (tmp_path / name / OWNER_NAME).write_text(json.dumps(owner))
        (tmp_path / name / "data").write_text("left over")
    (tmp_path / "outcore-2-00000000" / "thesis.txt").write_text("precious")
    assert reclaim_dead(tmp_path) == [tmp_path / "outcore-1-00000000"]
    assert [path.name for path in (tmp_path / "outcore-2-00000000").iterdir()] == ["thesis.txt"]
    (tmp_path / "outcore-2-00000000" / "thesis.txt").unlink()
    (tmp_path / "outcore-2-00000000").rmdir()


@pytest.mark.parametrize(
    ("name", "owner_text"),
    [
        ("outcore-1-0000000", "valid"),
        ("outcore-1-00000000x", "valid"),
        ("outcore-results", "valid"),
        ("my-outcore-1-00000000", "valid"),
        ("outcore-1-00000000", None),
        ("outcore-1-00000000", ""),
        ("outcore-1-00000000", "{}"),
        ("outcore-1-00000000", "[1]"),
        ("outcore-1-00000000", "[" * 60000),
        ("outcore-1-00000000", '{"format": "outcore run direc'),
        ("outcore-1-00000000", '{"format": "something else"}'),
    ],
)
def test_a_foreign_folder_is_never_touched(tmp_path, name, owner_text):
    owner = json.dumps(dead_owner(tmp_path)) if owner_text == "valid" else owner_text
    folder = tmp_path / name
    folder.mkdir()
    (folder / "data").write_text("precious")
    if owner is not None:
        (folder / OWNER_NAME).write_text(owner)
    assert reclaim_dead(tmp_path) == []
    assert (folder / "data").read_text() == "precious"
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


def test_a_link_to_a_folder_is_never_followed(tmp_path):
    target = tmp_path / "target"
    target.mkdir()
    (target / OWNER_NAME).write_text(json.dumps(dead_owner(tmp_path)))
    (target / "data").write_text("precious")
    link = tmp_path / "outcore-1-00000000"
    link.symlink_to(target)
    assert reclaim_dead(tmp_path) == []
    assert (target / "data").exists()
    link.unlink()


def test_a_living_process_is_believed_even_where_locks_are_not(tmp_path, monkeypatch):
    from outcore.memory import run_directory

    monkeypatch.setattr(run_directory.fcntl, "flock", lambda fd, how: None)  # a mount that grants every lock
    with RunDirectory.create(tmp_path) as directory:
        assert reclaim_dead(tmp_path) == []
        assert directory.path.is_dir()


def test_a_held_lock_is_believed_even_where_the_process_is_unknown(tmp_path):
    # A run in another container: its process id means nothing here.
    owner = dead_owner(tmp_path)
    with RunDirectory.create(tmp_path) as directory:
        (directory.path / OWNER_NAME).write_text(json.dumps(owner))
        assert reclaim_dead(tmp_path) == []
        assert directory.path.is_dir()


def test_a_forked_child_that_ends_takes_nothing_away(tmp_path):
    script = """
        import os, sys
        from pathlib import Path
        from outcore.memory.run_directory import RunDirectory, reclaim_dead
        directory = RunDirectory.create(Path(sys.argv[1]))
        pid = os.fork()
        if pid == 0:
            directory.close()
            sys.exit(0)  # runs what is registered for the exit
        os.waitpid(pid, 0)
        assert directory.path.is_dir()
        assert reclaim_dead(Path(sys.argv[1])) == []  # the lock still holds
    """
    nursery.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_a_dropped_directory_goes_with_its_last_reference(tmp_path):
    directory = RunDirectory.create(tmp_path)
    del directory
    assert list(tmp_path.iterdir()) == []
