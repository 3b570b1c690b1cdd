"""The harness can fail: planted faults, such as engines had, are each named in the message."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from . import loops, zoo
from .loops import Record, Setting, assert_equal, plain_loop, streamed_loop


def _identity(model: nn.Module, optimizer: Any, **options: Any) -> tuple[nn.Module, Any]:
    """Stand in for prepare: everything stays as it is, but on the device."""
    model.to(zoo.DEVICE)
    for state in optimizer.state.values():  # Adagrad's constructor makes its states
        state.update({name: value.to(zoo.DEVICE) for name, value in state.items()})
    for group in optimizer.param_groups:
        group["fused"] = True
    return model, optimizer


def _run(name: str, setting: Setting, prepare: Any = _identity, **options: Any) -> Record:
    return streamed_loop(name, setting, prepare=prepare, read=loops.named_tensors, **options)


SETTINGS = (
    Setting(),
    Setting(precision="pure_bf16", micro_batches=3, clipping="always", groups="two", scheduler="lambda"),
    Setting(clipping="off", scheduler="cosine", optimizer="sgd"),
    Setting(micro_batches=3, optimizer="adagrad", groups="two"),
)


@pytest.mark.parametrize(
    ("name", "setting"), [(name, SETTINGS[i % len(SETTINGS)]) for i, name in enumerate([*zoo.MODELS, "t5"])], ids=str
)
def test_the_user_loop_without_streaming_is_the_plain_loop(name: str, setting: Setting) -> None:
    assert_equal(plain_loop(name, setting), _run(name, setting))


@pytest.mark.parametrize("name", ["gpt2", "patchwork"])
def test_bf16_is_repeatable_and_differs_from_pure_bf16(name: str) -> None:
    setting = Setting(precision="bf16", micro_batches=3)
    record = plain_loop(name, setting)
    assert_equal(record, plain_loop.__wrapped__(name, setting))
    other = plain_loop(name, dataclasses.replace(setting, precision="pure_bf16"))
    assert any(not torch.equal(record.tensors[n], t) for n, t in other.tensors.items())


@pytest.mark.skipif(zoo.DEVICE != "cpu", reason="the limits suit the CPU's random numbers")
@pytest.mark.parametrize("name", zoo.MODELS)
def test_clipping_settings_are_what_they_say(name: str) -> None:
    norms = torch.stack(plain_loop(name, Setting()).norms)
    assert 0 < int((norms > loops.max_norm(name, "on")).sum()) < len(norms)
    norms = torch.stack(plain_loop(name, Setting(clipping="always")).norms)
    assert bool((norms > loops.max_norm(name, "always")).all())


def test_the_patchwork_skips_and_reuses() -> None:
    steps = {n: int(s["step"]) for n, s in plain_loop("patchwork", Setting()).moments.items()}
    assert steps["pieces.0.up.weight"] == zoo.STEPS
    assert steps["pieces.3.up.weight"] == zoo.STEPS - 1
    assert "pieces.0.unused" not in steps
    assert int(plain_loop("patchwork", Setting()).state_dict["pieces.1.norm.num_batches_tracked"]) == 2 * zoo.STEPS


class _Spoiled:
    """A prepare that makes one mistake."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __call__(self, model: nn.Module, optimizer: Any, **options: Any) -> tuple[nn.Module, Any]:
        _identity(model, optimizer)
        getattr(self, self.fault)(model, optimizer)
        return model, optimizer

    def one_bit_of_one_weight(self, model: nn.Module, optimizer: Any) -> None:
        with torch.no_grad():
            bits = model.transformer.h[1].mlp.c_fc.weight.view(torch.int32)
            bits[2, 3] ^= 1

    def unclipped(self, model: nn.Module, optimizer: Any) -> None:
        grads: dict[Any, torch.Tensor] = {}
        optimizer.register_step_pre_hook(lambda *a: _restore(grads))
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: grads.__setitem__(p, p.grad.clone()))

    def stale_by_a_step(self, model: nn.Module, optimizer: Any) -> None:
        p = model.transformer.h[0].ln_1.bias
        held: list[torch.Tensor] = []

        def swap(*_: Any) -> None:
            held.append(p.grad.clone())
            p.grad = held[max(0, len(held) - 2)].clone()

        optimizer.register_step_pre_hook(swap)

    def last_micro_batch_lost(self, model: nn.Module, optimizer: Any) -> None:
        count = [0]

        def drop(grad: torch.Tensor) -> torch.Tensor:
            count[0] += 1
            return grad * 0 if count[0] % 3 == 0 else grad

        model.transformer.h[2].attn.c_proj.weight.register_hook(drop)

    def zeros_for_none(self, model: nn.Module, optimizer: Any) -> None:
        def fill(*_: Any) -> None:
            for p in model.parameters():
                p.grad = torch.zeros_like(p) if p.grad is None and p.requires_grad else p.grad

        optimizer.register_step_pre_hook(fill)

    def one_random_number_too_many(self, model: nn.Module, optimizer: Any) -> None:
        optimizer.register_step_post_hook(lambda *_: torch.rand(1, device=zoo.DEVICE))


def _restore(grads: dict[Any, torch.Tensor]) -> None:
    for p, grad in grads.items():
        p.grad = grad
    grads.clear()


FAULTS = [
    ("gpt2", "one_bit_of_one_weight", 1, "loss of micro-batch|norm of step|tensor"),
    ("gpt2", "unclipped", 1, "loss of micro-batch 1|tensor|norm of step 1"),
    ("gpt2", "stale_by_a_step", 1, "loss of micro-batch 2"),
    ("gpt2", "last_micro_batch_lost", 3, "norm of step 0"),
    ("patchwork", "zeros_for_none", 1, "step of pieces.3"),
    ("gpt2", "one_random_number_too_many", 1, "loss of micro-batch 1"),
]


@pytest.mark.parametrize(("name", "fault", "micro_batches", "message"), FAULTS, ids=[f[1] for f in FAULTS])
def test_planted_faults_are_found(name: str, fault: str, micro_batches: int, message: str) -> None:
    setting = Setting(clipping="always" if fault == "unclipped" else "on", micro_batches=micro_batches)
    if fault == "zeros_for_none":
        setting = dataclasses.replace(setting, clipping="off")
    with pytest.raises(AssertionError, match=message):
        assert_equal(plain_loop(name, setting), _run(name, setting, _Spoiled(fault)))


def test_a_moment_a_step_and_a_missing_entry_are_named() -> None:
    plain = plain_loop("gpt2", Setting())
    name = "transformer.h.0.ln_2.weight"
    changed = copy.deepcopy(plain)
    changed.moments[name]["exp_avg_sq"][7] *= 1.0000002
    with pytest.raises(AssertionError, match=f"{name}, exp_avg_sq: 1 of 44 elements differ, by up to"):
        assert_equal(plain, changed)
    changed = copy.deepcopy(plain)
    changed.moments[name]["step"] += 1
    with pytest.raises(AssertionError, match=rf"step of {name}: 1 of 1 elements differ, by up to 1 \(3.0 != 4.0\)"):
        assert_equal(plain, changed)
    changed = copy.deepcopy(plain)
    del changed.moments[name]["exp_avg"]
    with pytest.raises(AssertionError, match=rf"{name},: missing \['exp_avg'\]"):
        assert_equal(plain, changed)
