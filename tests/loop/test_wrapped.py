"""Frozen weights that wrap other tensors, as torchao's quantised ones do: the plain loop, bit for bit, on any tier."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from peft import PeftModel
from plans import forced
from plans import plan_for as made_plan
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, TorchAoConfig

import outcore
from outcore.checkpoint.export_checkpoint import export_checkpoint
from outcore.checkpoint.save_and_load import load_checkpoint, save_checkpoint
from outcore.core import extra
from outcore.engine.engine import engine_of
from outcore.model.partition import partition
from outcore.model.wrapped import tensors_in

from .qlora import (
    COMPILED,
    ELSEWHERE,
    LORA,
    PIECES,
    TRACED,
    WHERE,
    adapted,
    base_of,
    drive,
    goes_on,
    inside,
    is_the_plain_loop,
    same_in_pieces,
    saved,
    sizable,
    trained,
)
from .rig import DEVICE, IS_SIMULATED, assert_same, plan_for, prepared
from .test_transformers import ids

torchao = pytest.importorskip("torchao")
from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")  # peft and torchao warn

WAYS = {
    "int8": Int8WeightOnlyConfig(),
    "int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
    "float8": Float8WeightOnlyConfig(),
}
KINDS = (*WAYS, "nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("base"))


def base(folder, kind):
    config = TorchAoConfig(copy.deepcopy(WAYS[kind])) if kind in WAYS else None
    with torch.device("cpu"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
        for name, layer in model.named_modules() if kind == "nf4" else ():
            if isinstance(layer, nn.Linear) and name != "lm_head":
                layer.weight = nn.Parameter(to_nf4(layer.weight.detach(), 64, 16), requires_grad=False)
    return model


def loaded(folder, kind):
    return adapted(base(folder, kind))


def plain(folder, kind):
    model = loaded(folder, kind).to(DEVICE)
    torch.manual_seed(5)
    return drive(model, trained(model, fused=True)), inside(model)


ROUND = [(kind, where) for i, kind in enumerate(KINDS) for where in (WHERE * 2)[2 * i + 1 : 2 * i + 4]]


@pytest.mark.parametrize(("kind", "where"), ROUND)
def test_trained_as_in_the_plain_loop(kind, where, folder, tmp_path):
    want, state = plain(folder, kind)
    model = loaded(folder, kind)
    before = {name: type(p) for name, p in model.named_parameters()}
    with prepared(model, trained(model), where, tmp_path, depth=int("disk" in where or "keep" in where)) as (
        model,
        optimizer,
    ):
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, inside(model))
        assert_same(state, inside(dict(outcore.named_tensors(model))), "streamed")
        with outcore.gathered(model):
            assert_same(state, inside({n: p.detach() for n, p in model.state_dict().items()}), "gathered")
    assert before == {name: type(p) for name, p in model.named_parameters()}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert_same(state, inside(model), "closed")
    with prepared(model.requires_grad_(requires_grad=False), None, where, tmp_path) as (model, _):
        assert_same(state, inside(model), "prepared again")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize("how", PIECES)
def test_a_batch_in_pieces(how, kind, folder, tmp_path):
    same_in_pieces(loaded(folder, kind).to(DEVICE), loaded(folder, kind), tmp_path, **how)


@pytest.mark.parametrize("kind", ["int8", "nf4"])
@pytest.mark.parametrize(("where", "policy", "activations"), ELSEWHERE)
def test_activations_elsewhere(where, policy, activations, kind, folder, tmp_path):
    is_the_plain_loop(lambda: loaded(folder, kind), where, policy, activations, tmp_path)


@pytest.mark.skipif(IS_SIMULATED, reason="what dynamo asks a GPU is not simulated")
@pytest.mark.parametrize(("kind", "how"), [("int8", COMPILED[0]), ("nf4", COMPILED[1])])
def test_compiled(kind, how, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(LORA, "target_modules", {"v_proj", "down_proj"})  # fewer graphs to trace
    is_the_plain_loop(lambda: loaded(folder, kind), *how, tmp_path, TRACED)


def on_meta(folder, kind):
    """Args: kind: A key of ``WAYS``, or the configuration of a checkpoint."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    config = TorchAoConfig(copy.deepcopy(WAYS[kind])) if isinstance(kind, str) else kind
    return outcore.quantized(model, config)


@pytest.mark.parametrize(("kind", "where"), [("int8", "disk"), ("int4", "host keep"), ("float8", "host")])
def test_quantised_as_it_is_read(kind, where, folder, tmp_path):
    want, state = plain(folder, kind)
    model = adapted(on_meta(folder, kind))
    with prepared(model, trained(model), where, tmp_path, weights=folder) as (model, optimizer):
        before = loaded(folder, kind)
        assert_same(inside(base_of(before)), inside(base_of(model)))
        model.load_state_dict({k: v for k, v in before.state_dict().items() if "lora_" in k}, strict=False)
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, inside(model))
        save_checkpoint(model, optimizer, tmp_path / "saved", step=2, wait=True)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        export_checkpoint(tmp_path / "saved", tmp_path / "merged", "hf", merge=True)
    assert not [each for each in said if "were quantised before" in str(each.message)]


@pytest.mark.parametrize(("kind", "where"), [("int8", "host keep"), ("int4", "disk"), ("float8", "host")])
def test_a_checkpoint_that_is_quantised_already(kind, where, folder, tmp_path):
    want, state = plain(folder, kind)
    base(folder, kind).save_pretrained(tmp_path / "packed", max_shard_size="100KB")
    said = AutoConfig.from_pretrained(tmp_path / "packed").quantization_config
    model = adapted(on_meta(folder, said))
    with prepared(model, trained(model), where, tmp_path, weights=tmp_path / "packed") as (model, optimizer):
        before = loaded(folder, kind)
        assert_same(inside(base_of(before)), inside(base_of(model)))
        model.load_state_dict({k: v for k, v in before.state_dict().items() if "lora_" in k}, strict=False)
        torch.manual_seed(5)
        assert_same(want, drive(model, optimizer))
        assert_same(state, inside(model))


def test_a_checkpoint_that_is_quantised_otherwise(folder, tmp_path, monkeypatch):
    base(folder, "int8").save_pretrained(tmp_path / "packed")

    def refuses(model, error, said):
        model = adapted(model)
        with pytest.raises(error, match=said):
            outcore.prepare(model, trained(model), weights=tmp_path / "packed")

    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    advice = "pass the model through outcore.quantized"
    refuses(full, outcore.ConfigError, f"is torch.bfloat16 in the model and quantized .torchao.*Int8Tensor .*{advice}")
    refuses(on_meta(folder, "float8"), outcore.ConfigError, r"is torchao.*Float8Tensor .* and quantized .torchao.*Int8")
    monkeypatch.setattr(extra, "find_spec", lambda _: None)
    refuses(full, outcore.ConfigError, "expected the package torchao, but it is not installed; pip install torchao")


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_saved_and_resumed(kind, folder, tmp_path):
    goes_on(lambda: loaded(folder, kind), lambda: base(folder, kind), tmp_path)
    with pytest.warns(UserWarning, match="were quantised before outcore had them"):
        export_checkpoint(tmp_path / "saved", tmp_path / "merged", "hf", merge=True)
    full = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    full = PeftModel.from_pretrained(full, tmp_path / "adapters").merge_and_unload()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    assert_same(dict(full.state_dict()), dict(merged.state_dict()))
    other = loaded(folder, "float8")
    with prepared(other, trained(other), "host", tmp_path) as (other, optimizer):
        with pytest.raises(outcore.ConfigError, match="expected the same parameters to be frozen, but"):
            load_checkpoint(other, optimizer, tmp_path / "saved")


def test_loaded_and_merged_when_the_run_is_over(folder, tmp_path):
    """A run on the disk loads another base."""
    other = base(folder, "int8")
    for layer in other.model.layers:
        for tensor in tensors_in(layer.mlp.up_proj.weight):
            tensor.mul_(-1)
    model = base(folder, "int8").requires_grad_(requires_grad=False)
    with prepared(model, None, "disk", tmp_path) as (model, _):
        model.load_state_dict(other.state_dict())
        assert_same(inside(other), inside(model))
        with pytest.raises(outcore.UnsupportedError, match=r"save_pretrained: .* 'model.layers.0.*' is a Int8Tensor"):
            outcore.save_pretrained(model, tmp_path / "saved")
    merged = []
    for is_plain in (True, False):
        model = loaded(folder, "int8")
        if not is_plain:
            with prepared(model, trained(model), "host", tmp_path):
                pass
        merged.append(inside(model.merge_and_unload()))
    assert_same(*merged)


def test_what_a_step_takes_is_planned(folder, tmp_path):
    """The plan comes from shapes, through the library's own operations, and leaves the model as it was."""
    model = loaded(folder, "int4")
    want = inside(model)
    budget = outcore.Budget(device="1MiB", host="64MiB")
    options = {"budget": budget, "sample": {"input_ids": ids(), "labels": ids()}, "hardware": "rtx-4090+pcie4"}
    _, plan = made_plan(model, trained(model), **options)
    assert plan.tier_bytes["device"] <= budget.device
    assert_same(want, inside(model))
    with outcore.prepare(model, trained(model), device=DEVICE, **options) as (model, optimizer):
        drive(model, optimizer)
        assert_same(inside(base_of(model)), {k: v for k, v in want.items() if "lora_" not in k})


@pytest.mark.parametrize(
    ("kind", "nbytes"), [("int8", 1 + 5 / 1024), ("int4", 1 + 3 / 32), ("float8", 1 + 4 / 1024), ("nf4", 0.516)]
)
def test_bytes_per_parameter(kind, nbytes):
    layer = nn.Sequential(nn.Linear(1024, 1024, bias=False, dtype=torch.bfloat16)).requires_grad_(requires_grad=False)
    if kind == "nf4":
        layer[0].weight = nn.Parameter(to_nf4(layer[0].weight.detach()), requires_grad=False)
    else:
        quantize_(layer, WAYS[kind])
    spec = partition(layer, units=["0"]).spec.units[1]
    assert sum(param.weight_bytes for param in spec.params) == pytest.approx(nbytes * 2**20, rel=0.001)
    assert sum(param.parameters for param in spec.params) == 2**20
    assert spec.weight_bytes == pytest.approx(nbytes * 2**20, rel=0.01)


class Halves(torch.Tensor):
    """A weight in two parts, one of them in two parts again."""

    def __new__(cls, upper: torch.Tensor, lower: torch.Tensor) -> Any:
        rows = upper.shape[0] + lower.shape[0]
        return torch.Tensor._make_wrapper_subclass(cls, (rows, upper.shape[1]), dtype=upper.dtype, device=upper.device)

    def __init__(self, upper: torch.Tensor, lower: torch.Tensor) -> None:
        self.upper, self.lower = upper, lower

    def __tensor_flatten__(self):
        return ["upper", "lower"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Halves(inner["upper"], inner["lower"])

    def whole(self):
        return torch.cat([t.whole() if isinstance(t, Halves) else t for t in (self.upper, self.lower)])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return _Product.apply(*args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert func in (torch.ops.aten.detach.default, torch.ops.aten._to_copy.default), func
        return Halves(*(func(part, **(kwargs or {})) for part in (args[0].upper, args[0].lower)))


class _Product(torch.autograd.Function):
    """Saves the wrapper itself."""

    @staticmethod
    def forward(ctx, x, weight, bias=None):
        ctx.save_for_backward(weight)
        return x @ weight.whole().t()

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.saved_tensors[0].whole(), None, None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = torch.randn(3, 8), torch.randn(4, 8)
        self.fixed = nn.Linear(8, 8, bias=False)
        self.fixed.weight = nn.Parameter(Halves(Halves(*parts), torch.randn(1, 8)), requires_grad=False)
        self.free = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.free(self.fixed(x).relu())


class Passing(nn.Module):
    """Wraps its own weight for a call."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.free.weight.detach()
        return x + nn.functional.linear(self.free(x).relu(), Halves(weight[:3], weight[3:]))


def is_the_loop(block, where, folder, activations="device"):
    """Returns: Names of what the first block has."""

    def run(model, optimizer):
        losses = []
        for i in range(2):
            x = torch.randn(5, 8, generator=torch.Generator(DEVICE).manual_seed(i))
            loss = model(x).square().mean()
            with torch.no_grad():
                model(x + 1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses

    def built():
        torch.manual_seed(3)
        with torch.device("cpu"):
            return nn.Sequential(*(block() for _ in range(3)))

    plain, model = built(), built()
    want = run(plain.to(DEVICE), trained(plain, fused=True))
    optimizer = trained(model)
    plan = plan_for(model, optimizer, *where.split(), depth=1)
    if activations != "device":
        _, plan = forced(model, optimizer, where, policy="keep", activations=activations)
    budget = outcore.Budget(disk=str(folder))
    with outcore.prepare(model, optimizer, plan=plan, budget=budget, device=DEVICE) as (model, optimizer):
        assert_same(want, run(model, optimizer))
        assert_same(inside(plain), inside(model))
        assert {p.device.type for p in model.parameters()} == {DEVICE}
        return {spec.name for spec in engine_of(model, "test").units[1].spec.params}


@pytest.mark.parametrize("where", WHERE)
def test_a_wrapper_in_a_wrapper(where, tmp_path):
    parts = {f"0.fixed.weight.{part}" for part in ("upper_upper", "upper_lower", "lower")}
    assert parts < is_the_loop(Block, where, tmp_path)


@pytest.mark.parametrize(("where", "activations"), [*((where, "device") for where in WHERE), ("host", "disk")])
def test_a_wrapper_for_a_call(where, activations, tmp_path):
    """It wraps views of a weight that will be elsewhere in backward."""
    is_the_loop(Passing, where, tmp_path, activations)


def test_refused(folder, tmp_path):
    def refuses(weight, said):
        layer = nn.Linear(8, 8, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        with pytest.raises(outcore.UnsupportedError, match=said):
            outcore.prepare(nn.Sequential(layer, nn.Linear(8, 8)), None, units=["1"])

    part = torch.ones(4, 8, device="cpu")
    refuses(Halves(part, part.to(torch.complex64)), "'lower' of '0.weight' is torch.complex64")
    refuses(Halves(part, part[:1].expand(4, 8)), "or repeats itself")
    refuses(Halves(part, part.to_sparse()), "of layout torch.sparse_coo")
    model = nn.Sequential(Block(), Block())
    model[1].fixed.weight.requires_grad_()
    with pytest.raises(outcore.UnsupportedError, match=r"expected a frozen weight, .*Halves .* '1.fixed.weight' is to"):
        outcore.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    model = nn.Sequential(Block(), Block())
    free, held = model[0].free.weight, model[1].fixed.weight
    for other in (free, model[0].fixed.weight.upper.lower):  # a trained parameter, and a part of another wrapper
        held.lower = other.data[1:2]
        with pytest.raises(outcore.ConfigError, match=r"'0.f.*weight' and '1.fixed.weight' overlap; .* clone what is"):
            outcore.prepare(model, trained(model))

    model = loaded(folder, "int8")
    with pytest.raises(outcore.ConfigError, match="nothing says how it becomes a Int8Tensor"):
        outcore.prepare(model, trained(model), weights=folder)
    model = nn.Sequential(Block(), Block())
    with prepared(model, trained(model), "host", tmp_path) as (model, _):
        with pytest.raises(outcore.AbsentParameterError, match="'0.fixed.weight.upper_upper' is in host memory"):
            model[0].fixed(torch.ones(1, 8))
    config = TorchAoConfig(Int8WeightOnlyConfig(), include_input_output_embeddings=True)
    with torch.device("meta"):
        model = LlamaForCausalLM(sizable().config)
    with pytest.raises(outcore.UnsupportedError, match="expected a TorchAoConfig with one way for all"):
        outcore.quantized(model, config)


@pytest.mark.parametrize("where", WHERE)
def test_what_wrappers_share_is_one(where, tmp_path):
    """They share tensors, also with a frozen parameter: stored once, changed for all, still shared after the run."""

    def built():
        torch.manual_seed(3)
        with torch.device("cpu"):
            model = nn.Sequential(*(Block() for _ in range(3)))
        one, two, three = (block.fixed.weight for block in model)
        two.upper.lower = one.upper.lower.view(4, 8)
        two.lower = nn.Parameter(model[1].free.weight.detach()[2:3].clone(), requires_grad=False)
        model[2].register_parameter("own", two.lower)
        three.lower = two.lower.detach()
        return model

    def step(model, optimizer):
        x = torch.randn(5, 8, generator=torch.Generator(DEVICE).manual_seed(2))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    def edit(model):
        with torch.no_grad():
            model[0].fixed.weight.upper.lower.mul_(2)
            model[2].own.mul_(3)

    plain, model = built().to(DEVICE), built()
    first, others = plain[0].fixed.weight, (plain[1].fixed.weight, plain[2].fixed.weight)
    others[0].upper.lower, plain[2].own.data = first.upper.lower, plain[2].own.data
    others[0].lower, others[1].lower = plain[2].own, plain[2].own
    optimizer = trained(plain, fused=True)
    want = [step(plain, optimizer)]
    edit(plain)
    want.append(step(plain, optimizer))
    optimizer = trained(model)
    plan = plan_for(model, optimizer, *where.split(), depth=1)
    with outcore.prepare(model, optimizer, plan=plan, budget=outcore.Budget(disk=str(tmp_path)), device=DEVICE) as (
        model,
        optimizer,
    ):
        found = [step(model, optimizer)]
        with outcore.gathered(model, write=True):
            edit(model)
        found.append(step(model, optimizer))
        assert_same(want, found)
        assert_same(inside(plain), inside(model))
        names = [spec.name for spec in engine_of(model, "test").units[0].spec.params]
        assert sorted(names) == ["0.fixed.weight.upper_lower", "2.own"]
    edit(plain)
    edit(model)
    assert_same(inside(plain), inside(model))


def test_a_wrapper_stays_frozen(tmp_path):
    model = nn.Sequential(Block(), Block())
    with prepared(model, trained(model), "host", tmp_path) as (model, optimizer):
        model[1].fixed.weight.requires_grad_(True)
        with pytest.raises(outcore.UnsupportedError, match=r"expected '1.fixed.weight' to stay frozen, as it was at"):
            model(torch.ones(1, 8, device=DEVICE))
        with pytest.raises(outcore.UnsupportedError, match=r"expected '1.fixed.weight' to stay frozen, as it was at"):
            optimizer.step()
        model[1].fixed.weight.requires_grad_(False)
        model(torch.ones(1, 8, device=DEVICE)).sum().backward()
        optimizer.step()


def test_a_base_wrapped_in_another_way(folder, tmp_path):
    """Its bytes are the same, but are read otherwise."""
    model = loaded(folder, "int8")
    with prepared(model, trained(model), "host", tmp_path) as (model, optimizer):
        save_checkpoint(model, optimizer, tmp_path / "saved", step=1, wait=True)
        load_checkpoint(model, optimizer, tmp_path / "saved")
    other = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    quantize_(other.model, Int8DynamicActivationInt8WeightConfig())
    other = adapted(other)
    with prepared(other, trained(other), "host", tmp_path) as (other, optimizer):
        with pytest.raises(outcore.ConfigError, match=r"'.*_proj.*weight' is torchao.* here, and .* there"):
            load_checkpoint(other, optimizer, tmp_path / "saved")


def test_a_closed_model_is_saved_whole(folder, tmp_path):
    model = on_meta(folder, "int8")
    with prepared(model.requires_grad_(requires_grad=False), None, "host", tmp_path, weights=folder):
        pass
    torch.save(model, tmp_path / "model.pt")
    assert_same(inside(model), inside(torch.load(tmp_path / "model.pt", weights_only=False)))
