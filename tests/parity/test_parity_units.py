"""Parity where units, plans, graphs or gradients are unusual."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import outcore

from . import zoo
from .cases import Case, run
from .loops import Setting, assert_equal, named_tensors, plain_loop, streamed_loop

KINDS = pytest.mark.parametrize("kind", ["device", "disk", "mixed"])
PLANS = pytest.mark.parametrize(("kind", "policy"), [("device", "recompute"), ("disk", "recompute"), ("mixed", "keep")])


def check(case: Case, folder: Path, **more: Any) -> None:
    """Compare with the plain loop; ``backward`` and ``edit`` go to both."""
    both = {k: more[k] for k in ("backward", "edit") if k in more}
    assert_equal(plain_loop(case.name, case.setting, **both), run(case, folder, **more))


# -- optimizers


@KINDS
def test_adagrad_begins_with_a_sum_that_bf16_cannot_hold(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from . import loops

    options = {"lr": 1e-2, "initial_accumulator_value": 0.1}
    monkeypatch.setitem(loops.OPTIMIZERS, "adagrad_from", (torch.optim.Adagrad, options))
    check(Case("patchwork", kind, Setting(precision="bf16", optimizer="adagrad_from", steps=2)), tmp_path)


def use_norms_of_torch(model: nn.Module) -> None:
    for module in list(model.modules()):
        for name, norm in module.named_children():
            if type(norm).__name__ == "LlamaRMSNorm":
                own = nn.RMSNorm(norm.weight.shape, dtype=norm.weight.dtype)
                setattr(module, name, own)


@KINDS
def test_gradients_that_an_operation_gives_in_fp32_are_rounded_to_bf16_under_every_plan(
    kind: str, tmp_path: Path
) -> None:
    check(Case("llama", kind, Setting(precision="bf16", steps=3)), tmp_path, edit=use_norms_of_torch)


# -- units and plans


def test_units_by_class_may_be_smaller_than_blocks(tmp_path: Path) -> None:
    from transformers.models.llama.modeling_llama import LlamaAttention, LlamaMLP

    check(Case("llama", "mixed", policy="mixed", units=(LlamaAttention, LlamaMLP)), tmp_path)


def test_units_by_name_leave_the_rest_resident(tmp_path: Path) -> None:
    check(Case("llama", "disk", units=("model.layers.0", "model.layers.3")), tmp_path)


def test_units_of_unequal_size(tmp_path: Path) -> None:
    check(Case("patchwork", "disk", units=("embed", "pieces.1", "pieces.2.up", "head"), depth=2), tmp_path)


@pytest.mark.parametrize(("name", "depth"), [("llama", 0), ("patchwork", 1), ("llama", 2)])
def test_one_slot_of_each_kind(name: str, depth: int, tmp_path: Path) -> None:
    # Only the slots that a run cannot do without: the next unit's slot is always the one that was used last.
    case = Case(name, "disk", Setting(precision="bf16", micro_batches=3), depth=depth, is_minimal=True)
    check(case, tmp_path)


def test_a_plan_survives_json(tmp_path: Path) -> None:
    case = Case("gpt2", "mixed", Setting(precision="bf16"), policy="mixed", offset=3)

    def through_a_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        plan = case.plan(model, optimizer)
        plan.save(tmp_path / "plan.json")
        loaded = outcore.Plan.load(tmp_path / "plan.json")
        assert loaded == plan
        return loaded

    record = streamed_loop(case.name, case.setting, make_plan=through_a_file, **case.options(tmp_path))
    assert_equal(plain_loop(case.name, case.setting), record)


@pytest.mark.parametrize("name", zoo.MODELS)
def test_the_least_budget_that_an_error_names_is_enough(name: str, tmp_path: Path) -> None:
    setting = Setting(precision="bf16")
    with pytest.raises(outcore.PlanInfeasibleError) as refused:
        streamed_loop(name, setting, budget=outcore.Budget(device=1, host=1, disk=str(tmp_path)))
    least = refused.value.required_bytes
    budget = outcore.Budget(device=least["device"], host=least["host"], disk=str(tmp_path))
    assert_equal(plain_loop(name, setting), streamed_loop(name, setting, budget=budget))


@pytest.mark.parametrize("name", ["gpt2", "patchwork"])
def test_the_default_budget(name: str) -> None:
    assert_equal(plain_loop(name, Setting()), streamed_loop(name, Setting()))


def test_two_threads_of_the_caller(tmp_path: Path) -> None:
    # The caller's number of threads changes the bits of sums, so units must run on as many as the plain loop has.
    case = Case("llama", "mixed", Setting(seed=6), policy="mixed", offset=5)
    torch.set_num_threads(2)
    try:
        plain = plain_loop(case.name, case.setting)
        assert_equal(plain, run(case, tmp_path))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


# -- encoder-decoder


@pytest.mark.parametrize(
    ("kind", "policy", "activations", "precision"),
    [
        ("disk", "recompute", "host", "fp32"),
        ("mixed", "keep", "disk", "fp32"),
        ("device", "keep", "device", "bf16"),
        ("host", "select", "host", "fp32"),
        ("mixed", "recompute", "device", "bf16"),
    ],
)
def test_t5(kind: str, policy: str, activations: str, precision: str, tmp_path: Path) -> None:
    # Gradients of the encoder's output come from all decoder layers, two from each.
    setting = Setting(precision=precision, optimizer="nesterov", micro_batches=2)
    case = Case("t5", kind, setting, policy=policy, activations=activations)
    assert_equal(plain_loop("t5", setting), run(case, tmp_path))


# -- graphs


def twice(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Run two backward passes through one graph."""
    loss = zoo.loss(model, batch)
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def two_losses(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Build two graphs in one step, each with its own backward."""
    first, second = zoo.loss(model, batch), zoo.loss(model, batch)
    second.backward()
    first.backward()
    return first + second


def shared_graph(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Compute two losses from one forward."""
    out = model(batch["inputs"], order=batch["order"])
    first = nn.functional.cross_entropy(out["logits"].float(), batch["targets"])
    second = out["gate"].float().square().mean()
    first.backward(retain_graph=True)
    second.backward()
    return first + second


def abandoned(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Before the forward that counts, run one whose graph is dropped, and one whose graph is kept until later."""
    zoo.loss(model, batch)
    kept = zoo.loss(model, batch)
    loss = zoo.loss(model, batch)
    loss.backward()
    return loss + kept.detach()


def interleaved(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Call a block again after another one."""
    loss = zoo.loss(model, {**batch, "order": (0, 1, 2, 1, 3, 0, 4)})
    loss.backward()
    return loss


def unused_outputs(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Call blocks outside of the model's forward, and do not use what the last two return."""
    hidden = model.embed(batch["inputs"]["tokens"])
    state = {"hidden": hidden, "gate": torch.zeros_like(hidden), "positions": torch.arange(zoo.LENGTH), "calls": 0}
    states = [state := piece(state, weight=0.5) for piece in model.pieces]
    loss = states[2]["hidden"].float().square().mean() + states[1]["gate"].float().mean()
    loss.backward()
    return loss


def input_gradient(model: nn.Module, batch: zoo.Batch, micro_batches: int) -> torch.Tensor:
    """Compute a gradient of an input alone, which leaves no trace on parameters."""
    embeds = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    probe = model(inputs_embeds=embeds, labels=batch["labels"]).loss
    before = [p.grad is None for p in model.parameters()]
    (grad,) = torch.autograd.grad(probe, embeds)
    assert [p.grad is None for p in model.parameters()] == before
    loss = zoo.loss(model, batch)
    loss.backward()
    return torch.stack([loss, grad.double().norm(), grad.double().sum()])


GRAPHS: list[tuple[str, Callable[..., torch.Tensor]]] = [
    ("gpt2", twice),
    ("gpt2", two_losses),
    ("patchwork", shared_graph),
    ("patchwork", abandoned),
    ("patchwork", interleaved),
    ("patchwork", unused_outputs),
    ("llama", input_gradient),
]


@PLANS
@pytest.mark.parametrize(("name", "backward"), GRAPHS, ids=[f"{n}-{b.__name__}" for n, b in GRAPHS])
def test_graphs(name: str, backward: Any, kind: str, policy: str, tmp_path: Path) -> None:
    check(Case(name, kind, Setting(steps=3), policy=policy), tmp_path, backward=backward)


@pytest.mark.parametrize(
    ("name", "backward"),
    [("patchwork", twice), ("lora", two_losses), ("lora", input_gradient)],
    ids=["twice", "two losses", "input"],
)
def test_graphs_of_other_models(name: str, backward: Any, tmp_path: Path) -> None:
    check(Case(name, "mixed", Setting(steps=3), policy="keep"), tmp_path, backward=backward)


# -- frozen parts


def freeze_start(model: nn.Module) -> None:
    """Freeze units whose inputs need no gradient, so that they bypass autograd."""
    model.get_input_embeddings().requires_grad_(False)
    for layer in model.model.layers[:2]:
        layer.requires_grad_(False)


def freeze_middle(model: nn.Module) -> None:
    """Freeze a unit that gradients must cross."""
    model.model.layers[2].requires_grad_(False)


def freeze_blocks(model: nn.Module) -> None:
    """Train only the root."""
    model.model.layers.requires_grad_(False)


def freeze_biases(model: nn.Module) -> None:
    """Have frozen and trained parameters in every block."""
    for p in model.parameters():
        p.requires_grad_(p.ndim >= 2)


@PLANS
@pytest.mark.parametrize("edit", [freeze_start, freeze_middle, freeze_blocks, freeze_biases], ids=lambda f: f.__name__)
def test_frozen(edit: Any, kind: str, policy: str, tmp_path: Path) -> None:
    precision = "fp32" if policy == "keep" else "bf16"
    check(Case("llama", kind, Setting(precision=precision, steps=3), policy=policy), tmp_path, edit=edit)


@pytest.mark.parametrize(
    ("name", "kind"), [*((name, "disk") for name in zoo.MODELS), ("gpt2", "device"), ("patchwork", "mixed")]
)
def test_a_frozen_model_without_optimizer_evaluates(name: str, kind: str, tmp_path: Path) -> None:
    batch = zoo.batches(name)[0]
    plain = zoo.make(name).requires_grad_(False).eval().to(zoo.DEVICE)
    model = zoo.make(name).requires_grad_(False).eval()
    case = Case(name, kind)
    model, optimizer = outcore.prepare(model, None, plan=case.plan(model, None), **case.options(tmp_path))
    assert optimizer is None
    try:
        for _ in range(2):
            assert torch.equal(zoo.loss(plain, batch), zoo.loss(model, batch))
            with torch.no_grad():
                assert torch.equal(zoo.loss(plain, batch), zoo.loss(model, batch))
        got = {n: t.clone() for n, t in outcore.named_tensors(model)}
        want = dict(named_tensors(plain))
        assert got.keys() == want.keys()
        assert all(torch.equal(t.cpu(), got[n].cpu()) for n, t in want.items())
    finally:
        outcore.close(model)


# -- between steps


@pytest.mark.parametrize(("name", "kind"), [("llama", "disk"), ("llama", "device"), ("patchwork", "mixed")])
def test_evaluation_between_steps(name: str, kind: str, tmp_path: Path) -> None:
    case = Case(name, kind, Setting(precision="bf16", micro_batches=3), depth=2)
    batch = zoo.batches(name)[0]

    def evaluate(model: nn.Module, out: list[torch.Tensor]) -> None:
        model.eval()
        with torch.no_grad():
            out.append(zoo.loss(model, batch))
        model.train()

    got: list[torch.Tensor] = []
    record = run(case, tmp_path, after_step=lambda model, *_: evaluate(model, got))
    assert_equal(plain_loop(name, case.setting), record)
    want: list[torch.Tensor] = []
    for steps in range(1, zoo.STEPS + 1):
        model = zoo.make(name, "bf16").to(zoo.DEVICE)
        model.load_state_dict(plain_loop(name, dataclasses.replace(case.setting, steps=steps)).state_dict)
        evaluate(model, want)
    assert [t.item() for t in got] == [t.item() for t in want]
