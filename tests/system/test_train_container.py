"""``outcore train`` in a container whose memory is a quarter of the training state, as a user would run it."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .test_container import memory_group

# Python, torch, TRL and what that imports (about 400 MiB with torchao), activations, a unit's fresh gradients.
LIBRARIES_BYTES = 500 * 2**20
HIDDEN, INTERMEDIATE, LAYERS, VOCABULARY = 448, 1232, 8, 260
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INTERMEDIATE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "tie_word_embeddings": False,
}
NUMEL = LAYERS * (4 * HIDDEN**2 + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN


@pytest.mark.timeout(300)
def test_a_quarter_of_the_state_is_enough(tmp_path: Path) -> None:
    quarter = 18 * NUMEL // 4
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "text.txt").write_text("as a user would type it " * 100)
    command = [sys.executable, "-c", "from outcore.command.main import main; main()", "train"]
    command += ["--model", "config.json", "--data", "text.txt", "--out", "run"]
    command += ["--steps", "2", "--batch-size", "1", "--seq-len", "32", "--save-every", "1", "--keep", "1"]
    command += ["--device-memory", f"{quarter // 3}", "--host-memory", f"{2 * quarter // 3}", "--disk", "."]
    # Settings of a test environment are removed: the command must work without them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_"))}
    with memory_group(quarter + LIBRARIES_BYTES) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text(str(os.getpid()))

        done = subprocess.run(
            command, cwd=tmp_path, preexec_fn=join, capture_output=True, text=True, check=False, env=environment
        )
    assert done.returncode == 0, done.stderr[-2000:]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["tier_bytes"]["disk"] > 2 * quarter, "most of the state was on disk"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]
    assert all(math.isfinite(line["loss"]) for line in lines)
    saved = (tmp_path / "run" / "model" / "model.safetensors").stat().st_size
    assert 2 * NUMEL < saved < 2.01 * NUMEL
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["config.json", "run", "text.txt"]
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [
        "checkpoint-2",
        "metrics.jsonl",
        "model",
        "plan.json",
    ]
