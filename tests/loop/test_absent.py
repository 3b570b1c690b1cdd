"""Parameters between calls: what they answer, what they refuse, and edits of those that are on the device."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import outcore

from .rig import (
    BLOCKS,
    DEVICE,
    KINDS,
    RESIDENT,
    Block,
    Tower,
    adamw,
    agrees,
    batch,
    make,
    prepared,
    same,
    tower_on,
    train,
)

KIND = pytest.mark.parametrize("kind", KINDS)
ENDS = pytest.mark.parametrize("kind", ["device", "host"])
AWAY = pytest.mark.parametrize("kind", ["host", "disk"])
NAME = "blocks.1.up.weight"

READS = {
    "sum": lambda p: p.sum(),
    "add": lambda p: torch.add(input=torch.ones(()), other=p),
    "stack": lambda p: torch.stack([torch.zeros(p.shape), p]),
    "data": lambda p: p.data,
    "detach": lambda p: p.detach(),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.numpy(),
    "cpu": lambda p: p.cpu(),
    "item": lambda p: p[0, 0].item(),
    "tolist": lambda p: p.tolist(),
    "bool": lambda p: bool((p == 0).all()),
    "to dtype": lambda p: p.to(torch.float64),
    "type": lambda p: p.type(torch.float64),
    "linear": lambda p: functional.linear(torch.ones(2, p.shape[1]), p),
    "in place": lambda p: p.mul_(2),
    "copy_": lambda p: torch.zeros(p.shape).copy_(p),
    "set data": lambda p: setattr(p, "data", torch.zeros(p.shape)),
    "init": lambda p: nn.init.normal_(p),
    "data_ptr": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": pickle.dumps,
    "norm": lambda p: torch.nn.utils.parameters_to_vector([p]),
}


@AWAY
def test_every_read_is_refused_by_name(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        param = model.get_parameter(NAME)
        place = "host memory" if kind == "host" else "the disk tier"
        for what, read in READS.items():
            with pytest.raises(outcore.AbsentParameterError, match=f"'{NAME}' is in {place}") as refused:
                read(param)
            assert "outcore.gathered" in str(refused.value), what
        train(model, optimizer, 1)


@KIND
def test_questions_are_answered(kind, tmp_path):
    plain, model = make(), make()
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        train(model, optimizer, 1)
        for (name, a), (twin, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
            assert name == twin
            for question in (
                "shape",
                "dtype",
                "device",
                "ndim",
                "requires_grad",
                "is_leaf",
                "layout",
                "itemsize",
                "nbytes",
                "grad_fn",
                "is_cuda",
            ):
                assert getattr(a, question) == getattr(b, question), question
            assert (a.size(), a.size(0), a.numel(), a.dim(), a.element_size(), len(a)) == (
                b.size(),
                b.size(0),
                b.numel(),
                b.dim(),
                b.element_size(),
                len(b),
            )
            assert (a.type(), a.is_floating_point(), torch.is_complex(a)) == (
                b.type(),
                b.is_floating_point(),
                torch.is_complex(b),
            )
            assert isinstance(b, nn.Parameter)
            assert isinstance(b, torch.Tensor)
            assert b in {b}
            assert {b: 1}[b] == 1
            assert b.grad is None
            assert str(tuple(b.shape)) in repr(b) or kind in RESIDENT or not name.startswith("blocks")
            assert b.requires_grad_(b.requires_grad) is b
        count = sum(p.numel() for p in model.parameters())
        assert count == sum(p.numel() for p in plain.parameters())
        assert str(model) == str(plain)
        assert model.get_parameter(NAME) is dict(model.named_parameters())[NAME]
        model.requires_grad_(True) if all(p.requires_grad for p in model.parameters()) else None
        if kind not in RESIDENT:
            assert NAME in repr(model.get_parameter(NAME))


@ENDS
def test_unfreezing_is_refused(kind, tmp_path):
    name = "blocks.1.shift"
    for way in ("method", "attribute"):
        with tower_on(kind, tmp_path) as (model, optimizer):
            param = model.get_parameter(name)

            def change():
                if way == "method":
                    param.requires_grad_(True)
                else:
                    param.requires_grad = True
                model.loss(batch()).backward()
                optimizer.step()

            with pytest.raises(outcore.UnsupportedError, match=f"'{name}' to stay frozen.*before prepare"):
                change()


@agrees(*BLOCKS)
def test_frozen_while_nobody_trains(model, optimizer):
    """Adapters are switched off in this way for a reference model's forward, between a forward and its backward."""
    losses = []
    for step in range(2):
        loss = model.loss(batch(step))
        model.blocks.requires_grad_(False)
        with torch.no_grad():
            losses.append(model.loss(batch(9)))
        for name, param in model.blocks.named_parameters():
            param.requires_grad_("shift" not in name)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@ENDS
def test_unfrozen_below_all_that_is_trained(kind, tmp_path):
    """Nothing before the block needs a gradient, so its unit would only run plain."""
    model = make()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        model.get_parameter(NAME).requires_grad_(True)
        with pytest.raises(outcore.UnsupportedError, match=f"'{NAME}' to stay frozen"):
            model.loss(batch()).backward()


@KIND
def test_head_and_embedding_read_outside_of_their_calls(kind, tmp_path):
    def tied():
        tower = Tower()
        tower.head.weight = tower.embed.weight
        return tower

    def drive(model, optimizer):
        losses = []
        for step in range(3):
            x = model.embed(batch(step))
            for block in model.blocks:
                x = block(x)
            # Fused losses use the head's weight without the head, in pieces; a penalty uses another weight once more.
            logits = torch.cat([part @ model.head.weight.T for part in x.flatten(0, 1).split(5)])
            loss = functional.cross_entropy(logits, batch(step).flatten()) + 1e-3 * model.embed.weight.square().sum()
            loss.backward()
            losses.append((loss.detach(), model.head.weight.detach().norm(), model.embed.weight[3].sum().item()))
            optimizer.step()
            optimizer.zero_grad()
        return losses

    same(drive, kind, tmp_path)
    same(drive, kind, tmp_path, build=tied)


@ENDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_edits_of_weights_on_the_device_count(kind, dtype, tmp_path):
    def edits(model, step):
        with torch.no_grad():
            if step == 0:
                model.head.weight.clamp_(-0.1, 0.1)
            elif step == 1:
                model.embed.weight.data[2:5] = 0.25
            elif step == 2:
                model.head.bias.data = torch.full((31,), 0.5, dtype=dtype)
            elif step == 3:
                nn.init.ones_(model.head.bias)
                model.state_dict()  # reads every parameter in between
            elif step == 4 and kind == "device":
                model.blocks[1].up.weight.mul_(0.5)
                model.blocks[1].shift.data.zero_()

    def drive(model, optimizer):
        losses = []
        for step in range(6):
            edits(model, step)
            losses += train(model, optimizer, 1, step)
        return losses

    if dtype == torch.float32:
        same(drive, kind, tmp_path)
        return
    model = make(dtype=dtype)
    with prepared(model, adamw(model, lr=0.0), kind, tmp_path) as (model, optimizer):
        before = dict(outcore.named_tensors(model))
        with torch.no_grad():
            model.head.weight[2] = 3.0
        model.loss(batch()).backward()
        optimizer.step()
        after = dict(outcore.named_tensors(model))
        masters = optimizer.state_dict()["state"]
        place = [n for n, _ in model.named_parameters()].index("head.weight")
        assert torch.equal(after["head.weight"][2], torch.full((13,), 3.0, dtype=dtype, device="cpu"))
        assert torch.equal(after["head.weight"][3], before["head.weight"][3])
        assert (masters[place]["master"][2] - 3.0).abs().max() < 1e-5


@ENDS
def test_an_edit_between_forward_and_backward_is_refused(kind, tmp_path):
    model = make()
    name = "blocks.1.up.weight" if kind == "device" else "head.weight"
    with prepared(model, adamw(model), kind, tmp_path) as (model, _):
        loss = model.loss(batch())
        with torch.no_grad():
            model.get_parameter(name).mul_(2)
        with pytest.raises(
            (outcore.UnsupportedError, RuntimeError), match=r"have changed since|modified by an inplace operation"
        ):
            loss.backward()


@ENDS
def test_replaced_data_of_another_shape_is_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        model.head.bias.data = torch.zeros(7)
        with pytest.raises(outcore.UnsupportedError, match=r"'head.bias' to keep shape \(31,\).*replaced by \(7,\)"):
            optimizer.step()


@ENDS
def test_replaced_parameters_are_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        model.head.weight = nn.Parameter(torch.zeros(31, 13))
        with pytest.raises(outcore.UnsupportedError, match=r"'head.weight' was replaced"):
            optimizer.step()
        assert not dict(outcore.named_tensors(model))["head.weight"].any()  # reading still works


@ENDS
@pytest.mark.parametrize(
    "way",
    [
        copy.deepcopy,
        AveragedModel,
        pickle.dumps,
        lambda m: copy.deepcopy(m.blocks[1]),
        lambda m: pickle.dumps(m.blocks[1]),
        lambda m: copy.deepcopy(m.head),
        lambda m: torch.save(m, "/dev/null"),
    ],
)
def test_copies_of_modules_are_refused(kind, way, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        with pytest.raises(outcore.UnsupportedError):
            way(model)
        train(model, optimizer, 1)


@ENDS
@pytest.mark.parametrize("way", [copy.deepcopy, pickle.dumps])
def test_copies_of_the_optimizer_are_refused(kind, way, tmp_path):
    model = make()
    with (
        prepared(model, adamw(model), kind, tmp_path) as (model, optimizer),
        pytest.raises(outcore.UnsupportedError, match=r"state_dict"),
    ):
        way(optimizer)


@ENDS
def test_moves_that_change_nothing_pass_and_others_are_refused(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        for part in (model, model.blocks[1], model.head):
            assert part.to(DEVICE) is part
            assert part.to(torch.float32) is part
            assert part.float() is part
            assert (part.cpu() if DEVICE == "cpu" else part.cuda()) is part
            assert part.to(torch.device(DEVICE), torch.float32, non_blocking=True) is part
            for move in (
                lambda m: m.half(),
                lambda m: m.bfloat16(),
                lambda m: m.double(),
                lambda m: m.to("meta"),
                lambda m: m.to(torch.float16),
                lambda m: m.to_empty(device="cpu"),
                lambda m: m.type(torch.float64),
                *([lambda m: m.share_memory()] if DEVICE == "cpu" else []),  # elsewhere it does nothing
            ):
                with pytest.raises(outcore.UnsupportedError, match=r"to stay"):
                    move(part)
        train(model, optimizer, 1)


@KIND
def test_hand_written_average(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, optimizer):
        average = {n: t.clone() for n, t in outcore.named_tensors(model)}
        train(model, optimizer, 1)
        if kind not in RESIDENT:
            with pytest.raises(outcore.AbsentParameterError):
                [average[n].lerp_(p.cpu(), 0.1) for n, p in model.named_parameters()]
        before = {n: t.clone() for n, t in average.items()}
        for name, tensor in outcore.named_tensors(model):
            average[name].lerp_(tensor, 0.5)
        now = model.state_dict()
        assert {n: torch.equal(t, before[n].lerp(now[n], 0.5)) for n, t in average.items()} == dict.fromkeys(now, True)


class OwnAndChildren(Block):
    """Has parameters of its own and in children, all of one unit."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(13))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        return super().forward(x) * self.scale


@KIND
def test_state_dict_to_a_file_and_back(kind, tmp_path):

    def build():
        return Tower(OwnAndChildren)

    plain = make(build)
    reference = adamw(plain, fused=True)
    torch.manual_seed(3)
    train(plain, reference, 2)
    model = make(build)
    with prepared(model, adamw(model), kind, tmp_path) as (model, optimizer):
        torch.manual_seed(3)
        train(model, optimizer, 2)
        torch.save(model.state_dict(), tmp_path / "model.pt")
        state = torch.load(tmp_path / "model.pt")
        assert list(state) == list(plain.state_dict())
        assert all(torch.equal(v.cpu(), state[k].cpu()) for k, v in plain.state_dict().items())
        assert list(model.blocks[1].state_dict()) == list(plain.blocks[1].state_dict())
        kept = {k: v.clone() for k, v in state.items()}
        live = model.state_dict()
        train(model, optimizer, 1)
        assert all(
            torch.equal(live[k].cpu(), kept[k].cpu()) for k in kept if not k.startswith("blocks") or kind != "device"
        )
        changed = {k: v + 1 for k, v in state.items()}
        assert str(model.load_state_dict(changed)) == "<All keys matched successfully>"
        assert all(torch.equal(v.cpu(), changed[k].cpu()) for k, v in model.state_dict().items())
        part = {
            "blocks.1.scale": torch.full((13,), 9.0),
            "blocks.1.shift": torch.full((13,), 8.0),
            "blocks.1.up.bias": torch.full((29,), 7.0),
        }
        with pytest.raises(RuntimeError, match="Missing key"):
            model.load_state_dict(part)
        assert sorted(model.load_state_dict(part, strict=False).missing_keys) == sorted(set(changed) - set(part))
        with pytest.raises(RuntimeError, match="size mismatch"):
            model.load_state_dict({"head.bias": torch.zeros(2)}, strict=False)
        with pytest.raises(outcore.UnsupportedError, match="assign=False"):
            model.load_state_dict(changed, assign=True)
        with pytest.raises(outcore.UnsupportedError, match="keep_vars=False"):
            model.state_dict(keep_vars=True)
        now = model.state_dict()
        assert all(torch.equal(now[k].cpu(), {**changed, **part}[k].cpu()) for k in now)
        plain.load_state_dict(now)
        train(
            plain, reference, 1
        )  # both go on from the third step's moments, which differ: only check that training runs
        train(model, optimizer, 1)


@KIND
def test_training_goes_on_from_loaded_weights(kind, tmp_path):
    other = make(lambda: Tower(OwnAndChildren)).state_dict()

    def drive(model, optimizer):
        train(model, optimizer, 2)
        model.load_state_dict({k: v * 0.5 for k, v in other.items()})
        return train(model, optimizer, 2)

    same(drive, kind, tmp_path, build=lambda: Tower(OwnAndChildren))


@AWAY
def test_what_is_asked_often_is_answered_as_by_a_present_parameter(kind, tmp_path):
    with tower_on(kind, tmp_path) as (model, _):
        param = model.get_parameter(NAME)
        with outcore.gathered(model):
            want = param.shape, param.dtype, param.device, param.requires_grad, param.grad
        assert (param.shape, param.dtype, param.device, param.requires_grad, param.grad) == want
        model.loss(batch()).backward()
        assert param.grad is not None
        del param.grad
        assert param.grad is None
        param.requires_grad = False
        assert not param.requires_grad
        param.requires_grad = True
        with pytest.raises((AttributeError, outcore.AbsentParameterError)):
            param.dtype = torch.float64
        with pytest.raises(outcore.AbsentParameterError):
            param._post_accumulate_grad_hooks = None
