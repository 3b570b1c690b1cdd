"""A process group after prepare, or a model that is replicated or sharded: refused. See also tests/ranks."""

from __future__ import annotations

import os
import sys

import nursery
import pytest
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import outcore

from .rig import Block, adamw, batch, make, tower_on, train

BARE = "prepare the bare model on every rank: outcore shares the work"
FIRST = "prepare after init_process_group, or under torchrun"


def refused(found, how=BARE):
    return pytest.raises(outcore.UnsupportedError, match=f"{found}; {how}")


@pytest.fixture
def world_of_one():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(("size", "rank"), [("2", "1"), ("8", None)])
def test_environment_of_a_launcher(size, rank, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", size)
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    model = make()
    with pytest.raises(outcore.ConfigError, match="prepare: expected MASTER_ADDR .* start with torchrun"):
        outcore.prepare(model, adamw(model))
    train(model, adamw(model))  # the refusal changed nothing


@pytest.mark.parametrize("kind", ["device", "host"])
def test_process_group_after_prepare(kind, tmp_path, monkeypatch):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer)
        model.loss(batch()).backward()
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_world_size", lambda: 4)
        with refused("optimizer.step: expected one process .* torch.distributed has 4 processes", FIRST):
            optimizer.step()
        with refused("forward: expected one process .* torch.distributed has 4 processes", FIRST):
            model(batch())


@pytest.mark.usefixtures("world_of_one")
def test_world_of_one(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with tower_on("host", tmp_path) as (model, optimizer):
        train(model, optimizer)


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize(
    ("wrap", "wrapper"),
    [
        (nn.DataParallel, "DataParallel"),
        (DistributedDataParallel, "DistributedDataParallel"),
        (fully_shard, "FSDPModule"),
    ],
)
def test_wrapped_before_prepare(wrap, wrapper):
    model = wrap(make())
    with refused(f"prepare: expected a model on one device, but the model is wrapped in {wrapper}"):
        outcore.prepare(model, adamw(model))


@pytest.mark.usefixtures("world_of_one")
def test_part_of_a_model_wrapped_before_prepare():
    model = make()
    model.blocks[1] = DistributedDataParallel(Block())
    with refused("but 'blocks.1' is wrapped in DistributedDataParallel"):
        outcore.prepare(model, adamw(model))


def test_fsdp_of_the_first_kind(monkeypatch):
    wrapper = type("FullyShardedDataParallel", (nn.Sequential,), {"__module__": "torch.distributed.fsdp"})
    model = wrapper(make())  # the real one needs an accelerator
    with refused("but the model is wrapped in FullyShardedDataParallel"):
        outcore.prepare(model, adamw(model))


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("kind", ["device", "host"])
def test_replicated_after_prepare(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        with refused("but the prepared model is wrapped in DistributedDataParallel"):
            DistributedDataParallel(model)
        with refused("but the prepared model is wrapped in DataParallel"):
            model._replicate_for_data_parallel()
        train(model, optimizer)


@pytest.mark.filterwarnings("ignore::UserWarning")  # fully_shard warns about forward hooks
@pytest.mark.usefixtures("world_of_one")
def test_sharded_after_prepare(tmp_path):
    with tower_on("device", tmp_path) as (model, optimizer):
        fully_shard(model)
        with refused("the model is wrapped in FSDPModule"):
            train(model, optimizer)


RANK = """
import sys
import pytest, torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import outcore

def refused(found):
    return pytest.raises(outcore.UnsupportedError, match=f"{found}.*(init_process_group|the bare model)")

def build():
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)])
    return model, torch.optim.AdamW(model.parameters())

model, optimizer = outcore.prepare(*build(), device="cpu")
model(torch.ones(2, 8)).sum().backward()
where, rank = sys.argv[1:]
distributed.init_process_group("gloo", init_method=f"file://{where}", rank=int(rank), world_size=2)
group = "torch.distributed has 2 processes"
with refused(f"forward: .*{group}"):
    model(torch.ones(2, 8))
with refused(f"optimizer.step: .*{group}"):
    optimizer.step()
with refused("DistributedDataParallel"):
    DistributedDataParallel(model)
fully_shard(model)
with refused(f"forward: .*{group}"):
    model(torch.ones(2, 8))
outcore.close(model)
distributed.destroy_process_group()
"""


def test_two_processes(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    ranks = [nursery.Whole([*command, str(rank)], env=environment) for rank in range(2)]
    assert [rank.wait(timeout=100) for rank in ranks] == [0, 0]
