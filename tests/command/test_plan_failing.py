"""``outcore plan`` for models that cannot be followed on shapes: those that fail are refused, others are planned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaForCausalLM

from outcore.command.plan.failing import refuse_failing
from outcore.core.errors import ConfigError
from outcore.model.partition import Partition, partition
from outcore.planner.forward.shapes import on_shapes

from .conftest import CONFIG, Run, write_json

CPU = torch.device("cpu")
SAMPLE = {"input_ids": torch.zeros(2, 4, dtype=torch.long)}
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 4}


@pytest.mark.parametrize(
    ("config", "fails_in"),
    [
        ({**CONFIG, "num_key_value_heads": 3}, "scaled_dot_product_attention: RuntimeError: The size of tensor a (4)"),
        ({**MIXTRAL, "architectures": ["MixtralForCausalLM"]}, "topk: RuntimeError: k not in range for dimension"),
        ({**CONFIG, "vocab_size": 0}, "view: RuntimeError: cannot reshape tensor of 0 elements"),
    ],
)
def test_a_model_whose_forward_fails_is_refused(
    command: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture, config: dict[str, Any], fails_in: str
):
    path = write_json(tmp_path / "config.json", config)
    done = command("plan", "--model", path, "--hardware", "rtx-4090", "--batch-size", 2, "--seq-len", 64)
    assert done.status == 2
    assert done.out == ""
    assert f"--model '{path}': expected a model whose forward runs, but with input_ids=2x64:int64, " in done.err
    assert fails_in in done.err
    assert "; correct config.json, or change the inputs (--batch-size, --seq-len, --input)" in done.err
    assert not caplog.records  # torch logs what fails on fake tensors, with a traceback


def test_a_model_that_asks_for_values_is_planned(
    command: Run, config_json: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    forward = LlamaForCausalLM.forward

    def choose(self: nn.Module, input_ids: torch.Tensor, **others: Any) -> Any:
        return forward(self, input_ids if bool(input_ids.any()) else input_ids + 1, **others)

    monkeypatch.setattr(LlamaForCausalLM, "forward", choose)
    options = ("--model", config_json, "--hardware", "rtx-4090", "--seq-len", 64, "--html", tmp_path / "plan.html")
    done, data = command("plan", *options), command("plan", *options[:-2], "--json")
    assert done.status == data.status == 0, done.err
    why = "its forward cannot be followed on shapes alone (DataDependentOutputException: aten._local_scalar_dense."
    assert f"of unknown size, so they get a share of the device, and homes follow the rule: {why}" in done.out
    assert "a few steps on the machine show what they take" in done.out
    assert "prepare" not in done.out
    assert "in use at once, and an unknown size of activations and workspace" in done.out
    assert json.loads(data.out)["activation_bytes"] is None
    assert "of unknown size" in (tmp_path / "plan.html").read_text()


class Blocks(nn.Module):
    """A model that ends with any function."""

    def __init__(self, end: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.table, self.end = nn.Embedding(4, 8), end
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, input_ids: torch.Tensor) -> object:
        rows = self.table(input_ids)
        for block in self.blocks:
            rows = block(rows)
        return self.end(rows)


def unfollowed(end: Callable[[torch.Tensor], object]) -> Partition:
    cut = partition(Blocks(end), state_names=("exp_avg", "exp_avg_sq"))
    with pytest.raises(ConfigError, match="runs on shapes alone"), on_shapes(cut, SAMPLE, CPU) as shapes:
        shapes.forward(lambda _: None)
    return cut


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device="cpu")


@pytest.mark.parametrize(
    "end",
    [
        lambda rows: rows @ ones(7, 7),
        lambda rows: rows.view(-1, 7),
        lambda rows: rows.sum(9),
        lambda rows: torch.cat([rows, rows[..., :3]]),
        lambda rows: torch.einsum("bsh,kh->bsk", rows, ones(3, 5)),
        lambda rows: functional.cross_entropy(rows.flatten(0, 1), ones(5).long()),
    ],
    ids=("matmul", "view", "sum", "cat", "einsum", "cross_entropy"),
)
def test_shapes_that_do_not_fit_are_a_failure(end: Callable[[torch.Tensor], object]):
    cut = unfollowed(end)
    with pytest.raises(ConfigError, match="with input_ids=2x4:int64.* it fails in "):
        refuse_failing("any", cut, SAMPLE, CPU)


def needs_a_gpu(rows: torch.Tensor) -> object:
    raise ValueError(f"expected an accelerator, but got {rows.device}")


@torch.library.custom_op("outcore_tests::accelerated", mutates_args=())
def accelerated(rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("rows.is_cuda() expected")


@accelerated.register_fake
def _(rows: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("rows.is_cuda() expected")


@pytest.mark.parametrize(
    "end",
    [
        lambda rows: rows.sum().item(),
        lambda rows: rows[rows > 0],
        lambda rows: rows.detach().numpy(),
        needs_a_gpu,
        accelerated,
        # Torch's rule for shapes takes bf16 alone, its kernel on the CPU all.
        lambda rows: torch._grouped_mm(rows[0], ones(2, 8, 8), offs=ones(2).int()),
        # Too large to try.
        lambda rows: rows.new_empty(2**27) @ rows,
    ],
    ids=("item", "mask", "numpy", "needs_a_gpu", "custom", "grouped", "large"),
)
def test_what_only_cannot_be_followed_is_no_failure(end: Callable[[torch.Tensor], object]):
    refuse_failing("any", unfollowed(end), SAMPLE, CPU)
