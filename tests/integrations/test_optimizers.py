"""Optimizers by the names that Transformers uses."""

from __future__ import annotations

import re

import pytest
import torch
from parity.loops import Both
from transformers import Trainer, TrainingArguments
from transformers.optimization import Adafactor

from outcore.core.errors import ConfigError, UnsupportedError
from outcore.integrations.optimizers import OPTIMIZERS, AdafactorOfTransformers, optimizer_for
from outcore.optim import Lion, check

from .rig import WARNINGS, dpo, language, lora, same, sft
from .rig import Streamed as StreamedSide
from .test_refusals import Streamed, llama

pytestmark = [pytest.mark.filterwarnings(line) for line in WARNINGS]


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


@pytest.mark.parametrize("name", sorted({*OPTIMIZERS} - {"sgd", "adagrad", "rmsprop", "muon"}))
def test_further_arguments_that_nobody_reads(name, tmp_path):
    with pytest.raises(UnsupportedError, match=f"expected no optim_args with optim '{name}'.*, but got 'beta=1'"):
        Streamed(llama(), arguments(tmp_path, name, optim_args="beta=1"))


def test_names_of_bitsandbytes_are_its_storage(tmp_path):
    """The names set the state format; embeddings keep 32 bits, as the Trainer tells bitsandbytes."""
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


MUON = {"momentum": 0.9, "ns_steps": 4, "adjust_lr_fn": "original", "lr": 0.02, "ns_coefficients": (3.0, -4.0, 2.0)}


class Beside(Both):
    def load_state_dict(self, state_dict):
        """Do nothing: Accelerate reloads states to move them, and members would keep settings that nothing changes."""


def with_muon(side, trainer, **given):
    """A Trainer with Muon: built by hand with the Trainer's groups on the plain side, chosen by name on the other."""
    if isinstance(side, StreamedSide):
        trainer.args.optim = "muon"
        said = {name: ":".join(map(str, v)) if isinstance(v, tuple) else v for name, v in given.items()}
        trainer.args.optim_args = ",".join(f"{name}={value}" for name, value in said.items())
        return trainer
    decays, args = {*trainer.get_decay_parameter_names(trainer.model)}, trainer.args
    named = [(n, p) for n, p in trainer.model.named_parameters() if p.requires_grad]
    mine = [p for n, p in named if ".layers." in n and p.ndim == 2]
    members = [torch.optim.Muon(mine, **{"lr": args.learning_rate, "weight_decay": args.weight_decay, **given})]
    rest = {n: p for n, p in named if not any(p is other for other in mine)}
    if rest:
        groups = [
            {"params": [p for n, p in rest.items() if n in decays], "weight_decay": args.weight_decay},
            {"params": [p for n, p in rest.items() if n not in decays], "weight_decay": 0.0},
        ]
        members.append(torch.optim.AdamW(groups, lr=args.learning_rate, betas=(0.8, 0.9), eps=1e-7, fused=True))
    trainer.optimizer = Beside(members)
    return trainer


@pytest.mark.parametrize(
    ("job", "given"),
    [(language, {"adjust_lr_fn": "match_rms_adamw"}), (sft, {**MUON, "weight_decay": 0.3}), (dpo, MUON), ("lora", {})],
)
def test_muon_by_name_is_torchs_beside_adamw(job, given, tmp_path):
    """Muon's own settings are used where given; otherwise AdamW's matched rate and the Trainer's weight decay."""

    def trainer(side, folder):
        parts = {"ref_model": llama()} if job is dpo else {"peft_config": lora()} if job == "lora" else {}
        more = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}
        made = (sft if job == "lora" else job)(side, folder, parts=parts, **more)
        is_by_name = isinstance(side, StreamedSide)
        return with_muon(side, made, **(given or {} if is_by_name else {"adjust_lr_fn": "match_rms_adamw", **given}))

    same(trainer, tmp_path)


def test_what_muon_takes(tmp_path):
    """Muon takes the matrices of blocks; AdamW takes the embedding, the head and all that is no matrix."""
    model = llama()
    args = arguments(tmp_path, "adamw_torch", optim_args=None)
    args.optim = "muon"
    optimizer = Streamed(model, args).create_optimizer()
    muon, adamw = optimizer.members
    assert (type(muon), type(adamw)) == (torch.optim.Muon, torch.optim.AdamW)
    names = {id(p): n for n, p in model.named_parameters()}
    taken = {names[id(p)] for group in muon.param_groups for p in group["params"]}
    assert taken == {n for n in names.values() if re.search(r"layers.*(proj)\.weight", n)}
    assert {g["adjust_lr_fn"] for g in muon.param_groups} == {"match_rms_adamw"}
    for given in ("beta=1", "momentum", "ns_steps=1.5", "nesterov=maybe", "ns_coefficients=1:x"):
        args.optim_args = f"momentum=0.9, {given}"
        with pytest.raises(UnsupportedError, match=rf"settings of torch.optim.Muon, .* but got '{given}'"):
            Streamed(model, args)
    args.optim_args = None
    none = Streamed(llama().requires_grad_(requires_grad=False), args)
    none.model.lm_head.requires_grad_()
    with pytest.raises(ConfigError, match="optim 'muon': expected matrices to train in blocks of the model, but this"):
        none.create_optimizer()


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
