"""State dicts of model and optimizer are given and taken as in plain PyTorch."""

from __future__ import annotations

import copy
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.engine.live_states import LiveStates

from . import small


def to_file(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def from_file(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


@pytest.mark.parametrize("is_model_first", [True, False])
@pytest.mark.parametrize("tier", small.TIERS)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_masters_of_the_beginning_come_back(kind: str, tier: str, is_model_first: bool, tmp_path: Path):
    """They are saved before the first step and loaded after some: weights alone do not have the masters' precision."""
    model = small.build("llama")
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5) if kind == "sgd" else None
    with small.prepared(model, tmp_path, tier, precision="bf16", optimizer=sgd) as (model, optimizer):
        saved = model.state_dict(), copy.deepcopy(optimizer.state_dict())
        want = small.train(model, optimizer, range(3))
        loads = [(model, saved[0]), (optimizer, saved[1])]
        for owner, values in loads if is_model_first else reversed(loads):
            owner.load_state_dict(values)
        assert not optimizer.state
        assert small.train(model, optimizer, range(3)) == want


def test_states_of_the_beginning_suit_a_plain_optimizer(tmp_path: Path):
    with small.prepared(small.build("llama"), tmp_path, precision="bf16") as (_, optimizer):
        saved = optimizer.state_dict()
    models = [small.build("llama") for _ in range(2)]
    loaded, fresh = (small.adamw(model) for model in models)
    loaded.load_state_dict(saved)
    assert small.train(models[0], loaded, range(2)) == small.train(models[1], fresh, range(2))


def test_masters_that_are_saved_follow_edits(tmp_path: Path):
    model = small.build("llama")
    with small.prepared(model, tmp_path, "device", precision="bf16") as (model, optimizer):
        small.train(model, optimizer)
        weight = optimizer.param_groups[0]["params"][-1]
        weight.data.fill_(3.0)
        assert (optimizer.state_dict()["state"][len(optimizer.state) - 1]["master"] == 3).all()


class TestModel:
    @pytest.mark.parametrize("tier", small.TIERS)
    @pytest.mark.parametrize("name", ["gpt2", "tied", "mixtral", "plain"])
    def test_equals_the_plain_one(self, name: str, tier: str, tmp_path: Path):
        want = small.build(name).state_dict()
        with small.prepared(small.build(name), tmp_path, tier) as (model, _):
            got = model.state_dict()
        small.same(want, got)
        assert got._metadata == want._metadata

    @pytest.mark.parametrize("tier", small.TIERS)
    def test_file_has_the_size_of_the_plain_one(self, tier: str, tmp_path: Path):
        plain = small.build("llama")
        with small.prepared(small.build("llama"), tmp_path, tier) as (model, _):
            data = to_file(model.state_dict())
        assert abs(len(data) - len(to_file(plain.state_dict()))) < 4096
        small.same(plain.state_dict(), from_file(data))

    @pytest.mark.parametrize("tier", small.TIERS)
    def test_is_a_copy(self, tier: str, tmp_path: Path):
        with small.prepared(small.build("llama"), tmp_path, tier) as (model, optimizer):
            first = model.state_dict()
            kept = copy.deepcopy(first)
            small.train(model, optimizer)
            changed = model.state_dict()
        small.same(kept, first)
        assert all(not torch.equal(first[n], changed[n]) for n in first)

    @pytest.mark.parametrize("precision", ["fp32", "bf16", "pure_bf16"])
    @pytest.mark.parametrize("tier", small.TIERS)
    def test_the_next_step_starts_from_what_was_loaded(self, tier: str, precision: str, tmp_path: Path):
        """Fresh optimizer states and loaded weights make a fresh run: masters must not remember older values."""
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16
        loaded = small.build("llama", dtype=dtype, seed=5).state_dict()
        with small.prepared(small.build("llama", dtype=dtype, seed=5), tmp_path, tier, precision=precision) as run:
            want = small.train(*run, range(3))
        model = small.build("llama", dtype=dtype)
        with small.prepared(model, tmp_path, tier, precision=precision) as (model, optimizer):
            result = model.load_state_dict(loaded)
            assert not result.missing_keys + result.unexpected_keys
            small.same(loaded, model.state_dict())
            assert not optimizer.state
            assert small.train(model, optimizer, range(3)) == want

    def test_loads_over_a_running_update(self, tmp_path: Path):
        loaded = small.build("llama", seed=5).state_dict()
        with small.prepared(small.build("llama"), tmp_path, "disk") as (model, optimizer):
            small.train(model, optimizer)
            model.load_state_dict(loaded)
            small.same(loaded, model.state_dict())

    def test_strict(self, tmp_path: Path):
        with small.prepared(small.build("llama"), tmp_path) as (model, _):
            before = model.state_dict()
            state = dict(before)
            del state["model.layers.1.mlp.up_proj.weight"]
            state["odd"] = torch.ones(3)
            with pytest.raises(RuntimeError, match=r"Missing key.*up_proj.*\n.*Unexpected key.*odd"):
                model.load_state_dict(state)
            state["lm_head.weight"] = torch.ones(3, 3)
            with pytest.raises(RuntimeError, match=r"size mismatch for lm_head.weight"):
                model.load_state_dict(state, strict=False)
            small.same(before, model.state_dict())

    def test_not_strict(self, tmp_path: Path):
        with small.prepared(small.build("llama"), tmp_path) as (model, _):
            before = model.state_dict()
            result = model.load_state_dict({"lm_head.weight": torch.ones(131, 40)}, strict=False)
            assert len(result.missing_keys) == len(before) - 1
            small.same(before | {"lm_head.weight": torch.ones(131, 40)}, model.state_dict())

    def test_buffers_are_loaded(self, tmp_path: Path):
        with small.prepared(small.build("plain"), tmp_path, "disk") as (model, optimizer):
            small.train(model, optimizer, range(2))
            state = model.state_dict()
        with small.prepared(small.build("plain", seed=3), tmp_path, "disk") as (model, _):
            model.load_state_dict(state)
            small.same(state, model.state_dict())
            assert model.blocks[2].norm.num_batches_tracked == 2


class TestOptimizer:
    @pytest.mark.parametrize(
        ("tier", "precision"), [*((tier, "bf16") for tier in small.TIERS), ("host", "fp32"), ("disk", "pure_bf16")]
    )
    def test_an_interrupted_run_goes_on(self, tier: str, precision: str, tmp_path: Path):
        dtype = torch.float32 if precision == "fp32" else torch.bfloat16

        def make(seed: int = 0) -> Any:
            return small.prepared(small.build("tied", dtype=dtype, seed=seed), tmp_path, tier, precision=precision)

        with make() as (model, optimizer):
            want = small.train(model, optimizer, range(5))
            final = model.state_dict(), to_file(optimizer.state_dict())
        with make() as (model, optimizer):
            small.train(model, optimizer, range(2))
            data = to_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        with make(seed=6) as (model, optimizer):
            state = from_file(data)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            assert small.train(model, optimizer, range(2, 5)) == want[2:]
            small.same(final[0], model.state_dict())
            assert_same_states(from_file(final[1]), optimizer.state_dict())

    @pytest.mark.parametrize("tier", small.TIERS)
    def test_goes_on_from_a_plain_run(self, tier: str, tmp_path: Path):
        model = small.build("llama")
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
        small.train(model, plain, range(2))
        states = copy.deepcopy((model.state_dict(), plain.state_dict()))
        want = small.train(model, plain, range(2, 5))
        with small.prepared(small.build("llama", seed=4), tmp_path, tier) as (streamed, optimizer):
            streamed.load_state_dict(states[0])
            optimizer.load_state_dict(states[1])
            assert small.train(streamed, optimizer, range(2, 5)) == want
            small.same(model.state_dict(), streamed.state_dict())
            assert_same_states(plain.state_dict(), optimizer.state_dict())

    @pytest.mark.parametrize("tier", small.TIERS)
    def test_takes_over_states_at_prepare(self, tier: str, tmp_path: Path):
        want_model, model = small.build("llama"), small.build("llama")
        want_plain, plain = (
            torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1, fused=True) for m in (want_model, model)
        )
        small.train(model, plain, range(2))
        small.train(want_model, want_plain, range(2))
        want = small.train(want_model, want_plain, range(2, 5))
        held = [weakref.ref(t) for state in plain.state.values() for n, t in state.items() if n != "step"]
        with small.prepared(model, tmp_path, tier, optimizer=plain) as (model, optimizer):
            assert held
            assert not any(ref() is not None for ref in held), "they stand at home alone"
            assert small.train(model, optimizer, range(2, 5)) == want
            small.same(want_model.state_dict(), model.state_dict())
            assert_same_states(want_plain.state_dict(), optimizer.state_dict())
        assert isinstance(plain.state, LiveStates), "it holds none of its own any more"

    def test_goes_back_to_a_plain_run(self, tmp_path: Path):
        with small.prepared(small.build("llama"), tmp_path, "disk") as (model, optimizer):
            small.train(model, optimizer, range(2))
            states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            want = small.train(model, optimizer, range(2, 5))
            final = model.state_dict()
        plain_model = small.build("llama", seed=4)
        plain = small.adamw(plain_model)
        plain_model.load_state_dict(states[0])
        states[1]["param_groups"][0]["fused"] = True  # before loading: a fused optimizer keeps its steps on the device
        plain.load_state_dict(states[1])
        assert small.train(plain_model, plain, range(2, 5)) == want
        small.same(final, plain_model.state_dict())

    def test_settings_of_groups_are_loaded(self, tmp_path: Path):
        with small.prepared(small.build("plain"), tmp_path) as (_, optimizer):
            state = optimizer.state_dict()
            state["param_groups"][0]["lr"] = 0.125
            before = optimizer.param_groups[0]
            optimizer.load_state_dict(state)
            assert optimizer.param_groups[0]["lr"] == 0.125
            assert before["lr"] != 0.125, "groups are other dicts, as in torch"

    def test_other_groups(self, tmp_path: Path):
        with small.prepared(small.build("plain"), tmp_path) as (_, optimizer):
            state = optimizer.state_dict()
            state["param_groups"][0]["params"].pop()
            with pytest.raises(outcore.ConfigError, match="expected groups of"):
                optimizer.load_state_dict(state)

    def test_another_shape(self, tmp_path: Path):
        with small.prepared(small.build("plain"), tmp_path) as (model, optimizer):
            small.train(model, optimizer)
            state = optimizer.state_dict()
            state["state"][1]["exp_avg"] = torch.zeros(3)
            with pytest.raises(outcore.ConfigError, match=r"expected exp_avg of '.*' with shape"):
                optimizer.load_state_dict(state)

    def test_file_has_the_size_of_the_plain_one(self, tmp_path: Path):
        plain_model = small.build("llama")
        plain = small.adamw(plain_model)
        small.train(plain_model, plain)
        with small.prepared(small.build("llama"), tmp_path, "device") as (model, optimizer):
            small.train(model, optimizer)
            data = to_file(optimizer.state_dict())
        assert abs(len(data) - len(to_file(plain.state_dict()))) < 4096


def assert_same_states(want: dict[str, Any], got: dict[str, Any]) -> None:
    assert want["state"].keys() == got["state"].keys()
    for key, values in want["state"].items():
        assert values.keys() == got["state"][key].keys()
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(value).cpu(), torch.as_tensor(got["state"][key][name]).cpu()), (
                key,
                name,
            )
