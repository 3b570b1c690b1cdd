"""States in other forms than AdamW's are saved, loaded and continued with, under any plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import outcore
from outcore.checkpoint import training_state
from outcore.checkpoint.training_state import load_states
from outcore.core.errors import ConfigError, UnsupportedError
from outcore.optim import Rule, State
from outcore.optim.joined import Joined

from . import small
from .test_training_state import state_of


def trained(model: Any) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def muon(model: Any) -> list[torch.optim.Optimizer]:
    params = trained(model)
    adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-2)
    return [torch.optim.Muon([p for p in params if p.ndim == 2], lr=1e-2), adamw]


def stored_in(chosen: str) -> Any:
    return lambda model: torch.optim.AdamW([{"params": trained(model), "state_format": chosen}], lr=1e-2)


def compact(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": trained(model), "master_format": "compact"}], lr=1e-2)


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([{"params": trained(model), "state_format": "bf16"}], lr=1e-2, momentum=0.9)


OPTIMIZERS = {
    "nadam": lambda model: torch.optim.NAdam(trained(model), lr=1e-2),  # a number that every step multiplies
    "adafactor": lambda model: torch.optim.Adafactor(trained(model), lr=1e-2),  # states of other shapes
    "bf16": stored_in("bf16"),  # noise that continues
    "8bit": stored_in("8bit"),  # codes and scales
    "compact": compact,  # weights that are a part of their masters
    "muon": muon,  # two optimizers, whose parameters have different states
}


MORE = {"fp32": stored_in("fp32"), "sgd": sgd}


def prepared(name: str, folder: Path, tier: str, seed: int = 0, **options: Any) -> Any:
    model = small.build("llama", dtype=torch.bfloat16, seed=seed)
    optimizer = (OPTIMIZERS | MORE)[name](model)
    joined = Joined(optimizer) if isinstance(optimizer, list) else optimizer
    return small.prepared(model, folder, tier, optimizer=joined, **options)


@pytest.mark.parametrize(("there", "here"), [("host", "disk"), ("disk", "device")])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_checkpoint_goes_on_under_another_plan(name: str, there: str, here: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    with prepared(name, tmp_path, there) as (model, optimizer):
        small.train(model, optimizer, range(3))
        outcore.save_checkpoint(model, optimizer, folder, step=3, wait=True)
        want = small.train(model, optimizer, range(3, 5)), state_of(model, optimizer)
    with prepared(name, tmp_path, here, 1) as (model, optimizer):
        small.train(model, optimizer, range(2))
        outcore.load_checkpoint(model, optimizer, folder)
        got = small.train(model, optimizer, range(3, 5)), state_of(model, optimizer)
    assert want[0] == got[0]
    small.same(want[1], got[1])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_state_and_a_state_dict_go_on(name: str, tmp_path: Path) -> None:
    with prepared(name, tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer, range(2))
        small.save_states(optimizer, tmp_path / "states")
        state_dict, weights = optimizer.state_dict(), dict(outcore.named_tensors(model))
        want = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
    for load in (lambda o: load_states(o, tmp_path / "states"), lambda o: o.load_state_dict(state_dict)):
        with prepared(name, tmp_path, "disk", 1) as (model, optimizer):
            with outcore.gathered(model, write=True), torch.no_grad():
                for param_name, param in model.named_parameters():
                    param.copy_(weights[param_name])
            restore_buffers(model, weights)
            load(optimizer)
            got = small.train(model, optimizer, range(2, 4)), state_of(model, optimizer)
        assert want[0] == got[0]
        small.same(want[1], got[1])


def restore_buffers(model: Any, values: dict[str, torch.Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def test_states_are_torchs_by_name_and_shape(tmp_path: Path) -> None:
    with prepared("nadam", tmp_path, "disk") as (model, optimizer):
        small.train(model, optimizer, range(2))
        plain = torch.optim.NAdam(
            [torch.nn.Parameter(torch.zeros(p.shape)) for p in optimizer.param_groups[0]["params"]]
        )
        for param in plain.param_groups[0]["params"]:
            param.grad = torch.ones_like(param)
        plain.step()
        theirs = {name: value.shape for name, value in plain.state[plain.param_groups[0]["params"][0]].items()}
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        mine = {name: value.shape for name, value in state.items() if name != "master"}
        assert mine == theirs
        assert 0 < float(state["mu_product"]) < 1
        before = float(state["mu_product"])
        state["mu_product"] = torch.tensor(before / 2)  # the next step continues from it
        small.train(model, optimizer, range(2, 3))
        assert float(state["mu_product"]) < before / 2


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    model = small.build("llama")
    params = trained(model)
    twice = [torch.optim.Adamax(params), torch.optim.AdamW(params[:1])]
    with pytest.raises(ConfigError, match="expected optimizers that share no parameter"):
        outcore.prepare(model, twice)
    named = [torch.optim.Adamax(list(model.named_parameters())[:1]), torch.optim.AdamW(params[1:])]
    with pytest.raises(ConfigError, match=r"expected optimizers that all have names of their parameters, or none"):
        outcore.prepare(model, named)
    with pytest.raises(ConfigError, match=r"expected torch\.optim\.Optimizers in the list .* but got none"):
        outcore.prepare(model, [])
    with pytest.raises(ConfigError, match="but got a str"):
        outcore.prepare(model, [torch.optim.Adamax(params), "adamw"])
    with prepared("muon", tmp_path, "host") as (model, optimizer):
        with pytest.raises(UnsupportedError, match="expected the optimizer that outcore.prepare"):
            optimizer._originals[1].step()
        small.train(model, optimizer)
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
    with (
        prepared("adafactor", tmp_path, "host") as (model, optimizer),
        pytest.raises(ConfigError, match="expected one of this model, optimizer and precision"),
    ):
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")


def test_a_group_that_needs_more_states_later_is_refused(tmp_path: Path) -> None:
    model = small.build("llama")
    optimizer = torch.optim.RMSprop(trained(model), momentum=0.0)
    with small.prepared(model, tmp_path, "host", optimizer=optimizer) as (model, optimizer):
        small.train(model, optimizer)
        optimizer.param_groups[0]["momentum"] = 0.9
        model(**small.batch()).loss.backward()
        with pytest.raises(UnsupportedError, match="needs momentum_buffer now, for which no memory was taken"):
            optimizer.step()


class Summing(Rule):
    """Needs the sum over a whole gradient, whose bits depend on the number of threads."""

    is_whole = True

    def states(self, shape: tuple[int, ...], settings: Mapping[str, Any]) -> Mapping[str, State]:
        return {}

    def update(self, weight: Any, grad: Any, states: Any, step: int, settings: Any) -> None:
        weight.sub_(grad.sum())


@pytest.mark.skipif(small.DEVICE != "cpu", reason="an accelerator's sums are not cut among threads")
def test_whole_parameters_are_summed_by_as_many_threads_as_in_a_loop(tmp_path: Path) -> None:
    """Parameters are so large that torch splits their sums among threads."""
    count = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        results = []
        for tier in ("device", "host"):
            torch.manual_seed(0)
            layers = [torch.nn.Linear(1000, 1000, bias=False) for _ in range(3)]
            model = torch.nn.Sequential(layers[0], *[torch.nn.Sequential(layer) for layer in layers[1:]])
            summing = Summing(model.parameters(), {})
            with small.prepared(model, tmp_path, tier, optimizer=summing) as (model, streamed):
                model(torch.randn(8, 1000)).square().sum().backward()
                streamed.step()
                results.append(dict(outcore.named_tensors(model)))
        small.same(*results)
    finally:
        torch.set_num_threads(count)


def test_another_format_is_refused(tmp_path: Path) -> None:
    with prepared("8bit", tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        state_dict, group = optimizer.state_dict(), optimizer.param_groups[0]
        group["state_format"] = "bf16"
        model(**small.batch()).loss.backward()
        with pytest.raises(UnsupportedError, match="state_format that the param group of .* is 'bf16' now"):
            optimizer.step()
        group["state_format"] = "8bit"
        optimizer.step()
        param = group["params"][0]
        with pytest.raises(
            ConfigError, match=r"in torch.uint8, as this run stores it \(state_format '8bit'\), but got torch.float32"
        ):
            optimizer.state[param] = {**optimizer.state[param], "exp_avg": torch.zeros(param.shape)}
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
    with prepared("bf16", tmp_path, "host") as (model, optimizer):
        with pytest.raises(ConfigError, match="expected one of this model, optimizer and precision"):
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        assert state_dict["param_groups"][0]["state_format"] == "8bit"
        small.train(model, optimizer)
        others = [state_dict, optimizer.state_dict()]
    with prepared("fp32", tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        others.append(optimizer.state_dict())
        before = state_of(model, optimizer)
        param = optimizer.param_groups[0]["params"][0]
        for other in others[:2]:
            with pytest.raises(ConfigError, match="expected groups of state_format"):
                optimizer.load_state_dict(other)
        plain = {"state": state_dict["state"], "param_groups": others[2]["param_groups"]}
        with pytest.raises(ConfigError, match="in torch.float32, as this run stores it .* but got torch.uint8"):
            optimizer.load_state_dict(plain)
        with pytest.raises(ConfigError, match="in torch.float32, as this run stores it .* but got torch.uint8"):
            optimizer.state[param] = state_dict["state"][0]
        small.same(before, state_of(model, optimizer))
    with prepared("bf16", tmp_path, "host") as (model, optimizer):
        with pytest.raises(ConfigError, match=r"expected groups of state_format \['bf16'\], but got \['fp32'\]"):
            optimizer.load_state_dict(others[2])
        plain = {"state": others[2]["state"], "param_groups": others[1]["param_groups"]}
        with pytest.raises(ConfigError, match="in torch.bfloat16, as this run stores it .* but got torch.float32"):
            optimizer.load_state_dict(plain)
        assert optimizer.param_groups[0]["state_format"] == "bf16"


def test_codes_are_not_edited_alone(tmp_path: Path) -> None:
    with prepared("8bit", tmp_path, "host") as (model, optimizer):
        small.train(model, optimizer)
        param = optimizer.param_groups[0]["params"][0]
        state = optimizer.state[param]
        saved = {name: value.fetch() for name, value in state.items()}
        for edit in (
            lambda: state["exp_avg"].zero_(),
            lambda: state.update(exp_avg=torch.zeros_like(saved["exp_avg"])),
        ):
            with pytest.raises(UnsupportedError, match="expected codes of 8 bits to be left alone"):
                edit()
        state["exp_avg_absmax"].zero_()  # a scale of 0 makes the moments 0
        assert not state["exp_avg_absmax"].any()
        with pytest.raises(ConfigError, match="expected exp_avg_absmax beside exp_avg of"):
            optimizer.state[param] = {name: saved[name] for name in ("step", "exp_avg")}
        optimizer.state[param] = saved
        small.same(saved, {name: value.fetch() for name, value in state.items()})


def decaying(name: str, folder: Path) -> Any:
    model = small.build("llama")
    optimizer = getattr(torch.optim, name)(trained(model), lr=1e-2, weight_decay=0.1)
    return small.prepared(model, folder, optimizer=optimizer)


@pytest.mark.parametrize("how", ["state dict", "states", "checkpoint"])
def test_an_adamw_that_gets_states_of_an_adam_stays_one(how: str, tmp_path: Path, monkeypatch: Any) -> None:
    """As in torch. Files of earlier versions do not name the optimizer that saved them."""
    with decaying("Adam", tmp_path) as (model, optimizer), monkeypatch.context() as patch:
        patch.setattr(training_state, "class_names", lambda _: [None])
        small.train(model, optimizer)
        state_dict = optimizer.state_dict()
        small.save_states(optimizer, tmp_path / "states")
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
    with decaying("AdamW", tmp_path) as (model, optimizer):
        load = {
            "state dict": lambda: optimizer.load_state_dict(state_dict),
            "states": lambda: load_states(optimizer, tmp_path / "states"),
            "checkpoint": lambda: outcore.load_checkpoint(model, optimizer, tmp_path / "c"),
        }
        load[how]()
        plain = torch.optim.AdamW([torch.zeros(p.shape) for p in optimizer.param_groups[0]["params"]])
        plain.load_state_dict(state_dict)
        assert optimizer.param_groups[0].keys() == plain.param_groups[0].keys()
        for name, value in plain.param_groups[0].items():
            assert name == "params" or optimizer.param_groups[0][name] == value, name


def test_states_of_another_optimizer_are_refused(tmp_path: Path) -> None:
    with decaying("Adam", tmp_path) as (model, optimizer):
        small.train(model, optimizer)
        small.save_states(optimizer, tmp_path / "states")
        outcore.save_checkpoint(model, optimizer, tmp_path / "c", step=1, wait=True)
        outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        load_states(optimizer, tmp_path / "states")
        assert "optimizer_class" not in {*optimizer.param_groups[0], *optimizer.state_dict()["param_groups"][0]}
    with decaying("AdamW", tmp_path) as (model, optimizer):
        want = state_of(model, optimizer)
        with pytest.raises(ConfigError, match="expected states of AdamW in param group 0, but Adam saved them"):
            outcore.load_checkpoint(model, optimizer, tmp_path / "c")
        with pytest.raises(ConfigError, match="expected states of AdamW in param group 0, but Adam saved them"):
            load_states(optimizer, tmp_path / "states")
        small.same(want, state_of(model, optimizer))


def test_noise_of_an_optimizer_without_steps_goes_on(tmp_path: Path) -> None:
    test_a_training_state_and_a_state_dict_go_on("sgd", tmp_path)
