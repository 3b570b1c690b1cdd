"""A model on the meta device without ``weights=`` initialises itself unit by unit."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore
from outcore.checkpoint.weights import initialise
from outcore.engine import opened

from . import small

WIDE = {
    "gpt2": {"n_embd": 96},
    "t5": {"d_model": 96, "d_ff": 131},
}


def initialised(
    name: str, tmp_path: Path, *, tier: str = "host", seed: int = 0, **more: Any
) -> dict[str, torch.Tensor]:
    model = small.build(name, meta=True, **more)
    optimizer = small.adamw(model)
    torch.manual_seed(seed)
    with small.prepared(model, tmp_path, tier, optimizer=optimizer):
        return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", [*small.NAMES, "plain"])
def test_distribution_is_that_of_a_built_model(name: str, tmp_path: Path):
    more = WIDE.get(name, {"width": 96} if name == "plain" else {"hidden_size": 96, "intermediate_size": 131})
    want = small.build(name, seed=4, **more).cpu().state_dict()
    got = initialised(name, tmp_path, **more)
    assert list(want) == list(got)
    for key, value in want.items():
        assert got[key].dtype == value.dtype
        if value.float().std(correction=0) == 0:  # norms, biases, counters
            assert torch.equal(got[key], value), key
            continue
        error = 6 / value.numel() ** 0.5
        assert abs(got[key].std() / value.std() - 1) < error, key
        assert abs(got[key].mean() - value.mean()) < error * value.std(), key
        assert got[key].abs().max() < 2 * value.abs().max(), key


def test_parameters_of_one_shape_differ(tmp_path: Path):
    got = initialised("llama", tmp_path)
    values = [v.flatten()[:40] for v in got.values() if v.std() > 0]
    assert len({tuple(v.tolist()) for v in values}) == len(values)


@pytest.mark.parametrize("name", ["llama", "gpt2", "plain"])
def test_follows_the_seed_and_not_the_plan(name: str, tmp_path: Path):
    first = initialised(name, tmp_path, tier="device", seed=7)
    small.same(first, initialised(name, tmp_path, tier="disk", seed=7))
    other = initialised(name, tmp_path, tier="disk", seed=8)
    assert not torch.equal(next(iter(first.values())), next(iter(other.values())))


@pytest.mark.parametrize("name", [*small.NAMES, "plain"])
def test_buffers_are_those_of_a_built_model(name: str, tmp_path: Path):
    want = small.build(name)
    model = small.build(name, meta=True)
    with small.prepared(model, tmp_path):
        for (key, a), (_, b) in zip(want.named_buffers(), model.named_buffers(), strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b), key


@pytest.mark.parametrize("tier", small.TIERS)
@pytest.mark.parametrize("name", ["llama", "tied", "plain"])
def test_trains(name: str, tier: str, tmp_path: Path):
    model = small.build(name, meta=True)
    parameters = list(model.parameters())
    with small.prepared(model, tmp_path, tier) as (model, optimizer):
        assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        assert {p.device for p in parameters} == {torch.empty(0, device=small.DEVICE).device}
        losses = []
        for _ in range(12):
            losses += small.train(model, optimizer)
        assert losses[-1] < 0.8 * losses[0]


def test_padding_row_of_a_tied_embedding_stays_zero(tmp_path: Path):
    """The source of a tie is initialised, and not its target, which has no padding index."""
    got = initialised("tied", tmp_path, pad_token_id=2)
    assert got["model.embed_tokens.weight"][2].count_nonzero() == 0
    assert got["model.embed_tokens.weight"][3].count_nonzero() > 0


def test_what_has_values_keeps_them(tmp_path: Path):
    model = small.build("llama")
    want = {k: v.clone() for k, v in model.state_dict().items()}
    model.model.layers[1].mlp.to("meta")
    with small.prepared(model, tmp_path) as (model, _):
        got = model.state_dict()
    changed = {k for k, v in want.items() if not torch.equal(v.cpu(), got[k].cpu())}
    assert changed == {f"model.layers.1.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
    assert all(0.01 < got[k].std() < 0.03 for k in changed)


@pytest.mark.parametrize("is_neutral", [True, False])
def test_lora_on_meta(is_neutral: bool, tmp_path: Path):
    model = small.with_adapters(small.build("llama", meta=True), init_lora_weights=is_neutral)
    with small.prepared(model, tmp_path) as (model, optimizer):
        got = dict(outcore.named_tensors(model))
        small.train(model, optimizer)
    a = [v for k, v in got.items() if "lora_A" in k]
    b = [v for k, v in got.items() if "lora_B" in k]
    assert len(a) == len(b) == 6
    assert all(v.count_nonzero() == 0 if is_neutral else v.std() > 0.05 for v in b)
    assert all(v.std() > 0.05 for v in a)  # and not the base model's 0.02


def test_modules_that_the_model_leaves_alone_initialise_themselves(tmp_path: Path):
    """Transformers does not initialise bilinear layers: they keep the values that their constructor gives them."""
    model = small.build("llama", meta=True)
    for layer in model.model.layers:
        layer.mlp.extra = nn.Bilinear(31, 3, 37, device="meta")
    torch.manual_seed(0)
    want = nn.Bilinear(31, 3, 37).weight
    with small.prepared(model, tmp_path) as (model, _):
        got = model.state_dict()
    for i in range(3):
        assert abs(got[f"model.layers.{i}.mlp.extra.weight"].std() / want.std() - 1) < 0.1
        assert got[f"model.layers.{i}.mlp.up_proj.weight"].std() < 0.03


class Scaled(nn.Module):
    """A block whose parameter is initialised in its own way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(5, 5)
        self.gain = nn.Parameter(torch.full((5,), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.gain

    def reset_parameters(self) -> None:
        if self.how == "in place":
            nn.init.constant_(self.gain, 3.0)
        elif self.how == "through data":
            self.gain.data.fill_(3.0)
        elif self.how == "new data":
            self.gain.data = torch.full((5,), 3.0, device=self.gain.device)
        elif self.how == "replaced":
            self.gain = nn.Parameter(torch.full((5,), 3.0))
        elif self.how == "from above":
            nn.init.constant_(self.linear.weight, 3.0)


def stack(how: str) -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(*(Scaled(how) for _ in range(3)))


@pytest.mark.parametrize("how", ["in place", "through data", "new data", "replaced"])
def test_ways_to_initialise(how: str, tmp_path: Path):
    with small.prepared(stack(how), tmp_path) as (model, _):
        got = model.state_dict()
        assert all(torch.equal(got[f"{i}.gain"], torch.full((5,), 3.0)) for i in range(3))


class TestRefusals:
    @pytest.fixture(autouse=True)
    def _takes_no_memory(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(*_: object) -> None:
            raise AssertionError("memory was taken")

        monkeypatch.setattr(opened, "Tiers", refuse)

    def refused(self, model: nn.Module, match: str) -> None:
        seeded = torch.random.get_rng_state()
        with pytest.raises(outcore.ConfigError, match=match):
            outcore.prepare(model, small.adamw(model))
        assert torch.equal(seeded, torch.random.get_rng_state())
        assert all(p.is_meta for p in model.parameters())

    @pytest.mark.parametrize("how", ["not at all", "from above"])
    def test_a_parameter_that_nobody_initialises(self, how: str):
        self.refused(stack(how), r"parameter '0.gain' of Scaled is not \(3 in all\)")

    def test_a_buffer_that_nobody_initialises(self):
        model = stack("in place")
        model[1].register_buffer("table", torch.ones(3, device="meta"))
        self.refused(model, "buffer '1.table' of Scaled is not .1 in all.")

    def test_an_initialiser_that_needs_values(self):
        model = stack("in place")
        model[2].reset_parameters = lambda: model[2].gain.fill_(model[2].linear.weight.sum().item())
        self.refused(model, "expected Scaled to initialise itself")

    @pytest.mark.filterwarnings("ignore::FutureWarning")
    def test_adapters_that_are_not_lora(self):
        from peft import IA3Config, get_peft_model

        config = IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"])
        model = get_peft_model(small.build("llama", meta=True), config)
        self.refused(model, "adapters on the meta device to be LoRA")


def test_from_above_initialises_below(tmp_path: Path):
    """A module may initialise its children over what they did themselves."""
    model = stack("from above")
    for scaled in model:
        scaled.gain = nn.Parameter(torch.ones(5))
    with small.prepared(model, tmp_path) as (model, _):
        got = model.state_dict()
        assert all(torch.equal(got[f"{i}.linear.weight"], torch.full((5, 5), 3.0)) for i in range(3))
        assert all(got[f"{i}.linear.bias"].std() > 0 for i in range(3))


def test_holds_one_unit_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    like = initialise._like
    alive, most, total = [0], [0], [0]

    def forget(nbytes: int) -> None:
        alive[0] -= nbytes

    def counted(tensor: torch.Tensor, device: str) -> torch.Tensor:
        made = like(tensor, device)
        if device == "cpu":
            alive[0] += made.nbytes
            total[0] += made.nbytes
            most[0] = max(most[0], alive[0])
            weakref.finalize(made.untyped_storage(), forget, made.nbytes)
        return made

    monkeypatch.setattr(initialise, "_like", counted)
    model = small.build("llama", meta=True, num_hidden_layers=8)
    nbytes = sum(p.nbytes for p in model.parameters())
    unit = sum(p.nbytes for p in model.model.layers[0].parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    with small.prepared(model, tmp_path, "disk"):
        pass
    assert total[0] == nbytes + buffers
    root = nbytes - 8 * unit
    assert most[0] <= max(root, unit) + buffers < nbytes / 2
