"""Optimizers by the names that Transformers uses."""

from __future__ import annotations

import pytest
import torch
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from outcore.core.errors import UnsupportedError
from outcore.integrations.optimizers import OPTIMIZERS, AdafactorOfTransformers, optimizer_for
from outcore.optim import Lion, check

from .test_refusals import Streamed, llama


def arguments(folder, name, **more):
    return TrainingArguments(output_dir=str(folder), use_cpu=True, report_to="none", optim=name, **more)


@pytest.mark.parametrize("name", ["adamw_torch", "adamw_torch_fused", "sgd", "adagrad", "rmsprop"])
def test_what_the_trainer_takes_is_taken(name, tmp_path):
    args = arguments(tmp_path, name, learning_rate=0.3, adam_beta2=0.7, adam_epsilon=1e-3)
    assert optimizer_for(args) == Trainer.get_optimizer_cls_and_kwargs(args)


@pytest.mark.parametrize(
    ("name", "given"), [("sgd", "momentum=0.9,nesterov=true"), ("adagrad", "lr_decay=0.1"), ("rmsprop", "alpha=0.5")]
)
def test_further_arguments(name, given, tmp_path):
    args = arguments(tmp_path, name, optim_args=given)
    assert optimizer_for(args) == Trainer.get_optimizer_cls_and_kwargs(args)
    assert len(optimizer_for(args)[1]) > len(optimizer_for(arguments(tmp_path, name))[1])


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"sgd", "adagrad", "rmsprop"}))
def test_further_arguments_that_nobody_reads(name, tmp_path):
    with pytest.raises(UnsupportedError, match=f"expected no optim_args with optim '{name}'.*, but got 'beta=1'"):
        Streamed(llama(), arguments(tmp_path, name, optim_args="beta=1"))


def test_names_of_bitsandbytes_are_its_storage(tmp_path):
    """Of embeddings 32 bits, as the Trainer tells bitsandbytes."""
    model = llama()
    optimizer = Streamed(model, arguments(tmp_path, "adamw_bnb_8bit", weight_decay=0.1)).create_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    stored = {id(p): group["state_format"] for group in optimizer.param_groups for p in group["params"]}
    assert {n for n, p in model.named_parameters() if stored[id(p)] == "fp32"} == {"model.embed_tokens.weight"}
    assert {(g["weight_decay"], g["state_format"]) for g in optimizer.param_groups} == {
        *((0.1, "8bit"), (0.1, "fp32"), (0.0, "8bit"))
    }
    kind, options = optimizer_for(arguments(tmp_path, "paged_lion_32bit", adam_beta2=0.99))
    assert (kind, options["betas"]) == (Lion, (0.9, 0.99))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(33, 7), (3, 5, 7), (65,)])
def test_adafactor_is_that_of_transformers(shape, dtype):
    params = [
        torch.nn.Parameter(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)) for _ in "ab"
    ]
    mine = AdafactorOfTransformers(params[:1], lr=0.1, weight_decay=0.1)
    theirs = Adafactor(params[1:], lr=0.1, weight_decay=0.1, scale_parameter=False, relative_step=False)
    for step in range(4):
        for param in params:
            param.grad = torch.randn(shape, generator=torch.Generator().manual_seed(step)).to(dtype)
        mine.step()
        theirs.step()
        assert torch.equal(*params)
    check(AdafactorOfTransformers, shapes=[shape], dtypes=[dtype])
