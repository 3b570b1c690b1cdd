"""Runs the command line in this process, with the smallest model and data that it can train."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch

from outcore.command import main as cli
from outcore.planner.search.plan_question import PlanQuestion
from outcore.planner.search.search import Found, search

# Transformers imports torchao at some point, and torchao then warns about what it cannot load.
with warnings.catch_warnings(action="ignore"), suppress(ImportError):
    import torchao  # noqa: F401

_RENAMED_IN = (5, 23)
_VERSION = tuple(int(part) for part in version("transformers").split(".")[:2])
CHECKPOINTING = "activation_checkpointing" if _VERSION >= _RENAMED_IN else "gradient_checkpointing"

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
# Room for a slot or two on device and host: the three blocks are spread over host and disk.
DEVICE_MEMORY = "460KiB" if torch.cuda.is_available() else "260KiB"  # an accelerator's also has room for activations
TIERS = ("--device-memory", DEVICE_MEMORY, "--host-memory", "520KiB")


LISTS = ("--set", "--disk")
"""Options that tests repeat."""


@dataclass(frozen=True)
class Outcome:
    """What a command left behind."""

    status: int
    out: str
    err: str


Run = Callable[..., Outcome]
_searched: list[tuple[PlanQuestion, Found]] = []


@pytest.fixture(autouse=True)
def _same_jobs_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Search once for each job: commands ask for few plans, and a search is deterministic (tests/planner)."""

    def find(job: PlanQuestion, *shared: Any, **other: Any) -> Found:
        if other:  # a short search, for what would help
            return search(job, *shared, **other)
        known = next(
            (
                found
                for same, found in _searched
                if (same, same.rates, same.footprint) == (job, job.rates, job.footprint)
            ),
            None,
        )
        if known is None:
            known = search(job, *shared)
            _searched.append((job, known))
        return known

    monkeypatch.setattr("outcore.planner.search.search.search", find)


@pytest.fixture
def gains() -> None:
    """Asked for by tests whose claim is what would help: all others pass over these searches, which take long."""


@pytest.fixture(autouse=True)
def _gains_are_searched_where_they_are_the_claim(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "gains" not in request.fixturenames:
        monkeypatch.setattr("outcore.command.plan.recipes.gains", lambda _: ())


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run ``outcore`` with these arguments, as from a shell."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["outcore", *map(str, arguments)])
        before = signal.getsignal(signal.SIGTERM)
        capsys.readouterr()
        try:
            with pytest.raises(SystemExit) as stop:
                cli.main()
        finally:
            signal.signal(signal.SIGTERM, before)
        captured = capsys.readouterr()
        return Outcome(int(stop.value.code or 0), captured.out, captured.err)

    return run


def replaced(*words: object) -> list[object]:
    """Return a command in which an option that comes again replaces the earlier one."""
    options: list[list[object]] = [[]]
    for word in words:
        if isinstance(word, str) and word.startswith("--"):
            options.append([])
        options[-1].append(word)
    found = {i if not option or option[0] in LISTS else option[0]: option for i, option in enumerate(options)}
    return [word for option in found.values() for word in option]


@pytest.fixture
def config_json(tmp_path: Path) -> Path:
    """A Llama of 50 thousand parameters, to be initialised at random."""
    return write_json(tmp_path / "config.json", CONFIG)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """Enough text for a dozen steps."""
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"{n} bottles of beer on the wall," for n in range(150)))
    return path


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Eleven conversations: with two rows per step, the last step of an epoch is short."""
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"What is {n} and {n}?"},
                {"role": "assistant", "content": f"It is {2 * n}."},
            ]
        }
        for n in range(11)
    ]
    return write_jsonl(tmp_path / "chats.jsonl", rows)


def write_json(path: Path, value: Mapping[str, Any]) -> Path:
    path.write_text(json.dumps(value))
    return path


def write_jsonl(path: Path, rows: list[Mapping[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
