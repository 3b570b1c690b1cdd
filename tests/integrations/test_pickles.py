"""No checkpoint of outcore is read with pickle, and those of others are read as plain data."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import nursery
from outside import pickles


def test_no_pickle_is_read(tmp_path: Path):
    """An audit hook counts pickles, in a separate process since it cannot be removed."""
    command = [sys.executable, pickles.__file__, str(tmp_path)]
    done = nursery.run(command, check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("unpickling") == ["class builtins.len"]
    assert len(found) > 10
    summed = {"file training_args.bin"}  # only its bytes are read, for the manifest: loading would look up classes
    plain = {"file optimizer.pt", "file scheduler.pt", "file rng_state.pth"}
    for part, heard in found.items():
        expected = plain if part.startswith("resume plain") else set()
        assert {*heard} - summed == expected, part
