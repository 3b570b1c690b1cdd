"""Checkpoints that earlier versions wrote are read: units in files of their own, from one rank or two."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.core.errors import ConfigError

from . import small
from .test_compact import optimizer_for
from .test_training_state import state_of

OLD = Path(__file__).with_name("old.zip")
"""Checkpoints of step 2, of a bf16 model with masters, of a Llama with compact masters, and of two ranks with cut
weights and compact masters."""
DIGESTS = {
    "plain": "17bd516d94829f0a",
    "compact": "ddf40d81e53e1334",
    "ranks": "a05e6d5d21a79315",
}
"""Of weights, states, buffers and settings, as the version that saved them loaded them."""


def begun(name: str, folder: Path, tier: str, **options: Any) -> Any:
    """The model and optimizer that were saved, prepared on one rank."""
    if name == "compact":
        sizes = {"hidden_size": 4, "intermediate_size": 9, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = small.build("llama", dtype=torch.bfloat16, num_key_value_heads=1, **sizes)
    else:
        model = small.build("plain", dtype=torch.bfloat16, width=16 if name == "ranks" else 4, num_blocks=1)
    trained = torch.nn.ParameterList(p for p in model.parameters() if p.requires_grad)
    optimizer = small.adamw(model) if name == "plain" else optimizer_for(trained, "compact")
    return small.prepared(model, folder, tier, optimizer=optimizer, precision="bf16", **options)


def digest(model: Any, optimizer: Any) -> str:
    found, state = hashlib.sha256(), state_of(model, optimizer)
    for name, value in sorted(state.items()):
        data = torch.as_tensor(value).detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        found.update(name.encode() + data.numpy().tobytes())
    for group in optimizer.param_groups:
        found.update(repr(sorted((k, v) for k, v in group.items() if k != "params")).encode())
    return found.hexdigest()[:16]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_they_are_exported_by_name_alone(old: Path, tmp_path: Path):
    """Compact masters are opened. What the libraries read is saved by a run that goes on."""
    import torch.distributed.checkpoint as dcp

    with pytest.raises(ConfigError, match="but there are none .of an earlier version, or .*; go on from"):
        export_checkpoint(old / "compact", tmp_path / "hf", "hf")
    export_checkpoint(old / "compact", tmp_path / "out", "dcp")
    with begun("compact", tmp_path, "host", checkpoint=old / "compact") as (model, optimizer):
        states = optimizer.state_dict()["state"].values()
        want = {n: s["master"].cpu() for (n, _), s in zip(model.named_parameters(), states, strict=True)}
    loaded = {"model": {name: torch.zeros(value.shape) for name, value in want.items()}}
    dcp.load(loaded, checkpoint_id=tmp_path / "out", no_dist=True)
    small.same(want, loaded["model"])


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with zipfile.ZipFile(OLD) as archive:
        archive.extractall(tmp_path / "old")
    return tmp_path / "old"


@pytest.mark.filterwarnings("ignore:load_checkpoint. 2 ranks saved")
@pytest.mark.parametrize("tier", small.TIERS)
@pytest.mark.parametrize("name", DIGESTS)
def test_a_run_goes_on(name: str, tier: str, old: Path, tmp_path: Path):
    """What is loaded has the bits of the version that saved it; saved anew and loaded again, it goes on equally."""
    with begun(name, tmp_path, tier) as (model, optimizer):
        assert outcore.load_checkpoint(model, optimizer, old / name) == {"step": 2, "said": (1, 2.5)}
        assert digest(model, optimizer) == DIGESTS[name]
        outcore.save_checkpoint(model, optimizer, tmp_path / "new", step=2, wait=True)
        want = small.train(model, optimizer, range(2, 4)), digest(model, optimizer)
    with begun(name, tmp_path, "host", checkpoint=tmp_path / "new") as (model, optimizer):
        assert (small.train(model, optimizer, range(2, 4)), digest(model, optimizer)) == want
